"""The notebook of the tour is the tour, and it runs."""

import json
import re
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from docs import notebook


def test_the_notebook_is_the_tour() -> None:
    stored = json.loads(notebook.NOTEBOOK.read_text(encoding="utf-8"))
    assert stored == notebook.tour(), "the notebook is old, run: python -m docs.notebook"


@pytest.mark.slow
def test_the_notebook_runs_and_ends_with_the_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # pictures are shown in the notebook
    cells: Any = nbformat.read(notebook.NOTEBOOK, as_version=4)
    assert cells.cells[0].source == notebook.INSTALL
    del cells.cells[0]
    for cell in cells.cells:  # a tenth of the steps; the site is built with all of them
        cell.source = re.sub(r"\b(20_480|10_240)\b", "2_048", cell.source)
    NotebookClient(cells, timeout=120).execute()
    (output,) = cells.cells[-1].outputs
    assert re.fullmatch(r"mean return \d+ \+/- \d+ after 4,096 steps\n", output.text)
    pictures = [out for cell in cells.cells for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]
    assert len(pictures) == 3
