"""Sphinx configuration: `make docs` builds the site into docs/_build/html, warnings being errors."""

import html
import re
from pathlib import Path
from typing import Any

from docutils import nodes

ROOT = Path(__file__).resolve().parents[1]

project = "sb3-grpo"
author = "sb3-grpo contributors"
copyright = "the sb3-grpo contributors"
release = version = (ROOT / "sb3_grpo" / "version.txt").read_text(encoding="utf-8").strip()

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "sphinx.ext.viewcode",
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "tour"]
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
toc_object_entries_show_parents = "hide"

# The tour is executed whenever the site is built, and an error in it is one of the build
sphinx_gallery_conf = {
    "examples_dirs": "tour",
    "gallery_dirs": "auto_tour",
    "abort_on_example_error": True,
    "run_stale_examples": True,
    "download_all_examples": False,
    "show_memory": False,
    "write_computation_times": False,
}

html_theme = "furo"
html_title = "sb3-grpo"
html_static_path = ["_static"]
html_css_files = ["site.css"]

#: Parameters that users do not pass
INTERNAL = ("_init_setup_model", "unknown")


def hide_internal_parameters(lines: list[str]) -> None:
    """
    Remove the parameters in :data:`INTERNAL` from a docstring.

    :param lines: Docstring, changed in place
    """
    is_hidden, kept = False, []
    for line in lines:
        if line.startswith(":"):
            is_hidden = any(line.startswith(f":param {name}:") for name in INTERNAL)
        if not is_hidden:
            kept.append(line)
    lines[:] = kept


def without_internal_parameters(signature: str | None, returns: str | None) -> tuple[str, str | None] | None:
    """
    :param signature: Signature as text; ``None`` if there is none
    :param returns: Annotation of the result
    :return: The same without the parameters in :data:`INTERNAL`; ``None`` to leave it as it is
    """
    if signature is None:
        return None
    return signature.replace(", _init_setup_model=True", "").replace(", **unknown", ""), returns


#: What stays on one line in a table: an interval, a share, a pair, a shape
TOGETHER = re.compile(
    r"(?<![\w.-])-?[\d.,]+ to (?:-?[\d.,]+|never)|\d+ of \d+|worst -?[\d.,]+"
    r"|-?[\d.,]+; (?:-?[\d.,]+|never)$|\d+ x \d+(?:, \d+)*"
)
#: Cells with more characters have sentences, and names with more do not fit into a column or on a line of a telephone
SENTENCE, COLUMN, LINE = 40, 12, 24


def lay_out_tables(app: Any, doctree: nodes.document, docname: str) -> None:
    """
    Let tables break a line before an interval and nowhere in it, nor in the id of an environment or short code.

    :param app: Sphinx
    :param doctree: A page, changed in place
    :param docname: Its name
    """
    for cell in doctree.findall(nodes.entry):
        if len(cell.astext()) > SENTENCE:
            cell["classes"].append("prose")
        for code in cell.findall(nodes.literal):
            if len(code.astext()) <= COLUMN:
                code["classes"].append("whole")
        for text in list(cell.findall(nodes.Text)):
            if isinstance(text.parent, nodes.literal):
                continue
            kept: nodes.Node = nodes.Text(TOGETHER.sub(lambda found: found[0].replace(" ", "\u00a0"), text))
            if re.fullmatch(r"[\w/-]+-v?\d", text) and cell.parent.index(cell) == 0:
                kept = nodes.inline("", "", kept, classes=["whole"])
            text.parent.replace(text, kept)


def lay_out_code(app: Any, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """
    Let a long name break after its underscores, dots and the like, and no option within its hyphens.

    :param app: Sphinx
    :param page: Name of the page
    :param template: Name of its template
    :param context: What the template is filled with, changed in place
    :param doctree: The page, if it has one
    """

    def lay_out(found: re.Match[str]) -> str:
        word, length = found[1], len(html.unescape(found[1]))
        if "-" in word and length <= LINE:
            return f'<span class="pre whole">{word}</span>'
        if length > COLUMN:
            word = re.sub(r"(?<=\w)([_./=,(]+)(?=[^\W\d]|&)", r"\1<wbr>", word)
        return f'<span class="pre{" long" if length > LINE else ""}">{word}</span>'

    if "body" in context:
        context["body"] = re.sub(r'<span class="pre">([^<]*)</span>', lay_out, context["body"])


def setup(app: Any) -> None:
    """
    :param app: Sphinx
    """
    app.connect("autodoc-process-docstring", lambda *args: hide_internal_parameters(args[-1]))
    app.connect("doctree-resolved", lay_out_tables)
    app.connect("html-page-context", lay_out_code)
    app.connect("autodoc-process-signature", lambda *args: without_internal_parameters(*args[-2:]))
