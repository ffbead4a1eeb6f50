"""The report: one HTML page that needs nothing beside itself."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from bpfed.files import write_whole
from bpfed.report.record import RunRecord
from bpfed.report.sections import calibration, clients, headline, settings, training
from bpfed.report.theme import SCRIPT, STYLE


def render(run: RunRecord) -> str:
    """The whole page as text. The same record gives the same page, byte for byte."""
    parts = [headline(run), training(run), calibration(run), clients(run), settings(run)]
    parts.append("<footer>Made by bpfed from the run's own records.</footer>")
    return document(run.title, parts)


def document(title: str, parts: Sequence[str], style: str = "") -> str:
    """A page made of these parts; ``style`` is added to the style sheet."""
    # Nothing may be loaded, and no script may run but ours, whatever a client or a setting is called.
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = (
        '<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{style}</style>"
    )
    body = f"<main>\n{chr(10).join(filter(None, parts))}\n</main>\n<script>{SCRIPT}</script>"
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def write(run: RunRecord, path: str | os.PathLike[str]) -> Path:
    """Render to a file, whole or not at all: an interrupted write leaves what was there before."""
    target = Path(path)
    # A name that was once a file's may hold what is no UTF-8.
    write_whole(target, render(run).encode("utf-8", "replace"))
    return target
