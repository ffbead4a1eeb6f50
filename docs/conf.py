"""Sphinx: the site in ``site/``, made of these pages, of docstrings, and of settings and commands (``make docs``)."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import bpfed  # noqa: E402

project, author, version = "bpfed", "the bpfed authors", bpfed.__version__
release = version
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_*", "figures"]
suppress_warnings = ["myst.header"]
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"bpfed {version}"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_permalinks_icon = "#"
pygments_style, pygments_dark_style = "tango", "monokai"
