"""Sphinx: the site in ``site/``, made of these pages, of docstrings, and of settings and commands (``make docs``)."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from generate import generate  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402

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
napoleon_use_ivar = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
python_maximum_signature_line_length = 88

html_theme = "furo"
html_static_path, html_css_files = ["_static"], ["site.css"]
html_title = f"bpfed {version}"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_permalinks_icon = "#"
pygments_style, pygments_dark_style = "tango", "monokai"

default_role = "py:obj"  # docstrings refer to names in single quotes of this kind


def skipped(app: object, what: str, name: str, value: object, skip: bool, options: object) -> bool | None:
    """Leave out what scikit-learn adds to every estimator."""
    return True if name.startswith("set_") and name.endswith("_request") else None


def plain(app: object, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Keep napoleon from taking what stands before the first colon of an attribute's docstring for its type."""
    if what in ("attribute", "property", "data") and lines:
        lines.insert(0, "")


def setup(app: Sphinx) -> None:
    """Make the pages that follow from the code before any is read."""
    generate(HERE / "reference" / "generated")
    app.connect("autodoc-skip-member", skipped)
    app.connect("autodoc-process-docstring", plain, priority=400)
