"""Sphinx configuration: `make docs` builds the site into docs/_build/html, warnings being errors."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

project = "sb3-grpo"
author = "sb3-grpo contributors"
copyright = "the sb3-grpo contributors"
release = version = (ROOT / "sb3_grpo" / "version.txt").read_text(encoding="utf-8").strip()

extensions = ["sphinx.ext.autodoc", "sphinx.ext.viewcode", "myst_parser", "sphinx_gallery.gen_gallery"]
exclude_patterns = ["_build", "tour"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_class_signature = "mixed"

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
