import os
import random
from collections.abc import Iterator

# No window, no display: set before pygame or matplotlib are imported by anything.
os.environ["SDL_VIDEODRIVER"] = "dummy"
os.environ["MPLBACKEND"] = "Agg"
# Two threads of a BLAS that wait for each other on busy cores take many times as long as one. Read when numpy is imported.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch as th
from hypothesis import HealthCheck, settings

# Property tests try the same cases in every run and watch no clock, so that they cannot fail by chance or on a busy machine.
# The fixture below runs once for all cases of a test: they must not draw from the global generators that it seeds.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("repeatable")

# The nets are tiny, and pytest-xdist already fills the cores; several threads would also make sums depend on the machine.
th.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same global random state, whatever ran before it in the same process."""
    random.seed(0)
    np.random.seed(0)
    th.manual_seed(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests have recorded, whether they passed or not."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])]
    for name, value in (figure for report in reports for figure in report.user_properties):
        terminalreporter.write_line(f"{name}: {value}")


@pytest.fixture(scope="module")
def ray_ends_with_the_module() -> Iterator[None]:
    yield
    import ray

    ray.shutdown()
