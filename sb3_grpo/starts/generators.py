"""
The global random generators of Python, numpy and torch, which a reset with a seed must leave as they are.

Helpers such as ``seed_everything(seed)`` set them in ``reset``. The members of a group would then draw the same actions.
"""

from collections.abc import Callable
from typing import Any

from sb3_grpo.questions import ByValue


def _nested() -> tuple[Callable[..., None], Callable[..., Any]]:
    # Nested functions are pickled by value, so that the workers of a SubprocVecEnv need not import this package.
    def exchange(store: dict[str, Any], seed: int | None) -> None:
        """
        Before a reset with a seed, give the generators states that only such resets use; after it, with ``None``, their own. A
        process whose first resets leave the generators alone is left alone from then on, because the states take time.
        """
        n_left = store.setdefault("n_left", 8)
        if n_left == 0 or (seed is None and "own" not in store):
            return
        import random

        import numpy as np
        import torch as th

        def bits(state: Any) -> Any:
            is_of_numpy = isinstance(state, tuple) and isinstance(state[1], np.ndarray)
            if isinstance(state, th.Tensor):
                return state.numpy().tobytes()
            return repr(state[1].tolist() if is_of_numpy else state)

        of_torch = [th.default_generator, *(th.cuda.default_generators if th.cuda.is_initialized() else ())]
        present = [random.getstate(), np.random.get_state(), *(each.get_state() for each in of_torch)]
        if seed is None:
            is_same = all(bits(left) == bits(right) for left, right in zip(store["of_resets"], present, strict=False))
            store["n_left"], store["of_resets"] = n_left - 1 if is_same and n_left > 0 else -1, present
            states = store.pop("own")
        else:
            store.setdefault("own", present)
            if len(store.get("of_resets", ())) != len(present):
                seeded = [th.Generator(each.device).manual_seed(seed).get_state() for each in of_torch]
                store["of_resets"] = [random.Random(seed).getstate(), np.random.RandomState(seed).get_state(), *seeded]
            states = store["of_resets"]
        for give, state in zip((random.setstate, np.random.set_state, *(e.set_state for e in of_torch)), states, strict=False):
            give(state)

    def exchange_in_worker(seed: int | None, value: Any) -> Any:
        """The same in a worker, where a value arrives; returns the value."""
        import multiprocessing

        exchange(vars(multiprocessing.current_process()).setdefault("states_of_generators", {}), seed)
        return value

    return exchange, exchange_in_worker


exchange, _exchange_in_worker = _nested()


_IN_WORKER = ByValue(_exchange_in_worker)


class SeedForWorker(int):
    """The seed of a reset. A worker of a ``SubprocVecEnv`` exchanges the states of its generators when it arrives."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _IN_WORKER, (int(self), int(self))


class ActionForWorker:
    """The first action after such a reset, with which the generators of the worker get back their own states."""

    def __init__(self, action: Any):
        self._action = action

    def __reduce__(self) -> tuple[Any, ...]:
        return _IN_WORKER, (None, self._action)
