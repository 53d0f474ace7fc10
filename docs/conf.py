"""Sphinx configuration: `make docs` builds the site into docs/_build/html, warnings being errors."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

project = "sb3-grpo"
author = "sb3-grpo contributors"
copyright = "the sb3-grpo contributors"
release = version = (ROOT / "sb3_grpo" / "version.txt").read_text(encoding="utf-8").strip()

extensions = ["sphinx.ext.autodoc", "sphinx.ext.viewcode", "myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_class_signature = "mixed"

html_theme = "furo"
html_title = "sb3-grpo"
