"""Pages from the templates beside this file: one HTML file each that needs nothing else and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from bpfed import __version__
from bpfed._util.files import write_whole

TEMPLATES = Path(__file__).parent / "templates"
#: Nothing may be loaded, and no style or script counts but ours, whatever a client or a setting is called.
POLICY = "default-src 'none'; style-src '{style}'; script-src '{script}'; base-uri 'none'; form-action 'none'"


class Figure(NamedTuple):
    """A drawing with its words.

    Attributes:
        title: Its heading.
        drawing: The SVG.
        read: How to read it.
    """

    title: str
    drawing: str
    read: str


class Row(NamedTuple):
    """A row of a table.

    Attributes:
        name: Its heading.
        cells: The others, as text.
        style: Its class.
    """

    name: str
    cells: list[str]
    style: str = ""


class Table(NamedTuple):
    """A table of text: ``heads`` name the columns, the first of which holds the rows' names."""

    heads: list[str]
    rows: list[Row]
    label: str = ""


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    style, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    policy = POLICY.format(style=_digest(style), script=_digest(script))
    made.globals |= {"style": Markup(style), "script": Markup(script), "policy": Markup(policy), "version": __version__}
    return made


def _digest(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def page(template: str, **context: Any) -> str:
    """A whole page as text. The same context gives the same page, byte for byte; all of it is escaped but `Markup`."""
    return _environment().get_template(template).render(context)


def write_page(content: str, path: str | os.PathLike[str]) -> Path:
    """A page to a file, whole or not at all: an interrupted write leaves what was there before."""
    target = Path(path)
    # A name that was once a file's may hold what is no UTF-8.
    write_whole(target, content.encode("utf-8", "replace"))
    return target
