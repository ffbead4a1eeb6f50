"""Words that came from elsewhere, made fit to be shown."""

from __future__ import annotations


def plain(words: str, most: int | None = None) -> str:
    """Words on one line, without what a terminal would obey; of many letters, the first."""
    return "".join(letter if letter.isprintable() else "?" for letter in words[:most])
