"""Spelling: names, labels and words that look the same or nearly so, and are two where one may be meant."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from bpfed._util.errors import first_of, quoted
from bpfed._util.text import spelling

if TYPE_CHECKING:
    from bpfed.data.tabular.preprocessing import Preprocessor

DIFFER = (
    "differ only in case, spaces or the encoding of letters and are treated as different; if they are the same, spell "
    "them alike in all files."
)


def letters(name: str) -> str:
    """A column's name without what is written differently most often: ``Heart Rate`` and ``heart_rate`` are one."""
    return re.sub(r"[\W_]+", "", name).casefold() or spelling(name)


def check_spelling(preprocessor: Preprocessor, clients: Iterable[str] = ()) -> tuple[str, ...]:
    """What to say of clients, columns, labels, and the words of columns: a sentence for each where there are some."""
    found = []
    if alike := alike_words(clients):
        found.append(f"Clients {_listed(alike)} {DIFFER}")
    if alike := alike_words((preprocessor.target, *(f.name for f in preprocessor.features))):
        found.append(f"Columns {_listed(alike)} {DIFFER}")
    if alike := alike_words(preprocessor.labels):
        found.append(f"Labels {_listed(alike)} of '{preprocessor.target}' {DIFFER}")
    words = {f.name: alike for f in preprocessor.features if (alike := alike_words(f.categories))}
    if words:
        first = next(iter(words.values()))[:1]
        found.append(f"Words of {quoted(list(words))}, such as {_listed(first)}, {DIFFER}")
    return tuple(found)


def alike_words(words: Iterable[str]) -> list[list[str]]:
    """Those of one spelling, where they are several."""
    found: dict[str, list[str]] = {}
    for word in words:
        found.setdefault(spelling(word), []).append(word)
    return [same for same in found.values() if len(same) > 1]


def _listed(alike: list[list[str]]) -> str:
    return first_of([quoted(same, and_=" and ") for same in alike])
