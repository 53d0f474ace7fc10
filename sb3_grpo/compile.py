"""
Compile all machine code, so that no training has to wait for it: in a container image, or on a machine that runs tests.

    python -m sb3_grpo.compile
"""

import time

from sb3_grpo.arithmetic.machine_code import distributions, layers, optimizer, recurrent
from sb3_grpo.arithmetic.machine_code.jit import EntryPoint, compile_functions

ENTRY_POINTS = [
    each
    for module in (layers, recurrent, distributions, optimizer)
    for each in vars(module).values()
    if isinstance(each, EntryPoint)
]


def main() -> None:
    """Compile all functions into numba's cache."""
    began = time.perf_counter()
    reason = compile_functions(ENTRY_POINTS)
    print(
        f"Nothing was compiled, because {reason}" if reason else f"Machine code is ready: {time.perf_counter() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
