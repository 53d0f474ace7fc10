"""Write the tour as a notebook that needs nothing but Python: `python -m docs.notebook`."""

import json
import pathlib
from typing import Any

from sphinx_gallery.gen_gallery import DEFAULT_GALLERY_CONF
from sphinx_gallery.notebook import jupyter_notebook
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

HERE = pathlib.Path(__file__).parent
NOTEBOOK = HERE / "tour.ipynb"
INSTALL = "# Once, where the packages are not installed yet\n%pip install -q 'sb3-grpo[extra]' pandas"


def tour() -> dict[str, Any]:
    """:return: The tour, with a cell that installs what it needs, as Jupyter stores a notebook"""
    _, blocks = split_code_and_text_blocks(str(HERE / "tour" / "plot_tour.py"))
    notebook = jupyter_notebook(blocks, {**DEFAULT_GALLERY_CONF, "first_notebook_cell": INSTALL}, str(HERE))
    del notebook["metadata"]["language_info"]  # the Python that writes it
    return notebook


if __name__ == "__main__":
    NOTEBOOK.write_text(json.dumps(tour(), indent=1) + "\n", encoding="utf-8")
