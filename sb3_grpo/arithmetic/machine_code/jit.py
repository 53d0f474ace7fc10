"""
Functions that numba compiles, each for one signature, when a run needs it.

A function of machine code is either an *entry point*, which Python calls, or an *inner* function, which entry points call.
Compiling takes seconds, most of which LLVM spends on each function and once more on whatever calls it. So entry points call
inner functions and never each other, and Python code calls one entry point after the other: a call takes a microsecond or
two.

Entry points are kept in numba's cache on disk. The cache notices a change in the file of an entry point, and none in the files
of the functions that it calls, so the names under which it keeps them have a fingerprint of all these files.
"""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    import numba

    UNAVAILABLE = "NUMBA_DISABLE_JIT is set" if numba.config.DISABLE_JIT else ""
except ImportError:
    UNAVAILABLE = "numba is not installed"
except Exception as error:  # for example a numpy that is newer than numba knows
    UNAVAILABLE = f"numba cannot be imported ({error})"

#: Divisions by zero give infinity without a check, which would keep loops from being vectorised. There is no `fastmath`: it is
#: a fifth faster, but code that was just compiled and code from the cache then round differently, so that a seed does not
#: reproduce a run.
OPTIONS: dict[str, Any] = dict(error_model="numpy")


def _fingerprint() -> str:
    """:return: Eight characters that change with any file of machine code; none where they cannot be read"""
    try:
        files = sorted(Path(__file__).parent.glob("*.py"))
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]
    except OSError:
        return ""


FINGERPRINT = _fingerprint()


def inner(function: Function, **options: Any) -> Function:
    """:return: The compiled function, which only machine code can call. Without numba, the function itself"""
    if UNAVAILABLE:
        return function
    return numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **options, **OPTIONS)(function)


def inlined(function: Function) -> Function:
    """
    :param function: A function that is only a few calls of others
    :return: The function, which numba copies to where it is called, so that LLVM works on the others once less
    """
    return inner(function, inline="always")


class EntryPoint:
    """A function that Python calls. Its signature has the types of its result and its arguments, as numba writes them."""

    def __init__(self, function: Callable[..., Any], signature: str):
        self.function = function
        self.signature = signature
        #: The function in machine code, after :meth:`compile`
        self.run: Callable[..., Any] = self._not_compiled
        self._is_compiled = False
        function.__qualname__ += f"_{FINGERPRINT}"

    def _not_compiled(self, *_: Any) -> None:
        raise RuntimeError(f"{self.function.__name__} was not compiled: call compile_functions() first.")

    def compile(self) -> bool:
        """
        Compile the function, or load it from numba's cache. Later calls do nothing.

        :return: Whether it had to be compiled now
        :raises Exception: Whatever numba raises
        """
        if self._is_compiled:
            return False
        try:
            return self._compile(uses_cache=True)
        except Exception:  # the folders of the cache may be read-only, full or damaged
            return self._compile(uses_cache=False)

    def _compile(self, uses_cache: bool) -> bool:
        dispatcher = numba.njit(**OPTIONS)(self.function)
        if uses_cache:
            dispatcher.enable_caching()
        dispatcher.compile(self.signature)
        dispatcher.disable_compile()  # for other types than these, which would be a mistake
        self.run, self._is_compiled = dispatcher, True
        return not dispatcher.stats.cache_hits


def entry_point(signature: str) -> Callable[[Callable[..., Any]], EntryPoint]:
    """:return: A decorator that makes a function an :class:`EntryPoint` with this signature"""
    return lambda function: EntryPoint(function, signature)


def compile_functions(entry_points: Iterable[EntryPoint], announce: Callable[[], None] = lambda: None) -> str:
    """
    Compile functions, or load them from numba's cache.

    :param entry_points: The functions that are needed, small ones first
    :param announce: Called once, before the wait, if numba's cache does not have them
    :return: The reason why there are none, a clause; empty if they are ready
    """
    if UNAVAILABLE:
        return UNAVAILABLE
    is_announced = False
    for each in entry_points:
        try:
            is_new = each.compile()
        except Exception as error:
            return f"numba cannot compile it ({error})"
        if is_new and not is_announced:
            is_announced = True
            announce()
    return ""
