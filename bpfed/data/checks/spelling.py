"""Spelling: names, labels and words that look the same or nearly so, and are two where one may be meant."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from bpfed._util.errors import first_of, quoted
from bpfed.data.tabular.preprocessing import Preprocessor

DIFFER = (
    "differ only in case, spaces or the encoding of letters and are treated as different; if they are the same, spell "
    "them alike in all files."
)


def spelling(word: str) -> str:
    """A word without what similar spellings differ in."""
    return " ".join(unicodedata.normalize("NFC", word).split()).casefold()


def check_spelling(preparation: Preprocessor, clients: Iterable[str] = ()) -> tuple[str, ...]:
    """What to say of clients, columns, labels, and the words of columns: a sentence for each where there are some."""
    found = []
    if alike := _alike(clients):
        found.append(f"Clients {_listed(alike)} {DIFFER}")
    if alike := _alike((preparation.target, *(f.name for f in preparation.features))):
        found.append(f"Columns {_listed(alike)} {DIFFER}")
    if alike := _alike(preparation.labels):
        found.append(f"Labels {_listed(alike)} of '{preparation.target}' {DIFFER}")
    words = {f.name: alike for f in preparation.features if (alike := _alike(f.levels))}
    if words:
        first = next(iter(words.values()))[:1]
        found.append(f"Words of {quoted(list(words))}, such as {_listed(first)}, {DIFFER}")
    return tuple(found)


def _alike(words: Iterable[str]) -> list[list[str]]:
    """Those of one spelling, where they are several."""
    found: dict[str, list[str]] = {}
    for word in words:
        found.setdefault(spelling(word), []).append(word)
    return [same for same in found.values() if len(same) > 1]


def _listed(alike: list[list[str]]) -> str:
    return first_of([quoted(same, and_=" and ") for same in alike])
