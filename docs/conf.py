"""Sphinx: the site in ``site/``, made of these pages, of docstrings, and of settings and commands (``make docs``)."""

from __future__ import annotations

import json
import re
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
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        *(
            f"sidebar/{part}.html"
            for part in ("brand", "versions", "search", "scroll-start", "navigation", "scroll-end")
        ),
    ]
}
html_static_path, html_css_files, html_js_files = ["_static"], ["site.css"], ["focus.js"]
html_title = "bpfed"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_permalinks_icon = "#"
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "monokai"

default_role = "py:obj"  # docstrings refer to names in single quotes of this kind


def skipped(app: object, what: str, name: str, value: object, skip: bool, options: object) -> bool | None:
    """Leave out what scikit-learn adds to every estimator."""
    return True if name.startswith("set_") and name.endswith("_request") else None


def rejoined(app: object, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Undo what napoleon does to a comment on an attribute: it takes what stands before the first colon for its type."""
    kinds = [at for at, line in enumerate(lines) if line.startswith(":type:")]
    if what in ("attribute", "property", "data") and kinds:
        before = lines.pop(kinds[0]).removeprefix(":type:").strip()
        lines[0] = f"{before}: {lines[0]}"


def versions(app: Sphinx) -> None:
    """Where the folder of the site is named as a version, list all versions beside it; each page links the others."""
    place = Path(app.outdir)
    app.config.html_context["versioned"] = bool(re.fullmatch(r"\d+(\.\d+)+", place.name))
    if app.config.html_context["versioned"]:
        there = {page.parent.name for page in place.parent.glob("[0-9]*/index.html")} | {place.name}
        found = sorted(there, key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)
        (place.parent / "versions.js").write_text(f"window.bpfedVersions = {json.dumps(found)};\n", encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Make the pages that follow from the code before any is read."""
    generate(HERE / "reference" / "generated")
    app.connect("builder-inited", versions)
    app.connect("autodoc-skip-member", skipped)
    app.connect("autodoc-process-docstring", rejoined, priority=600)
