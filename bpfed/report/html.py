"""What all pages are made of: the document, and a figure with its words."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape

from bpfed.report.theme import SCRIPT, STYLE


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


def figure(title: str, drawing: str, read: str) -> str:
    """A drawing with its heading and how to read it."""
    return f"<figure><h3>{escape(title)}</h3>{drawing}<figcaption>{escape(read)}</figcaption></figure>"
