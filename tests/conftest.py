import os
import random

# No window, no display: set before pygame or matplotlib are imported by anything.
os.environ["SDL_VIDEODRIVER"] = "dummy"
os.environ["MPLBACKEND"] = "Agg"

import numpy as np
import pytest
import torch as th

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
