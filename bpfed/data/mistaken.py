"""Mistaken columns: numbers written as text, numbers that stand for a missing value, and a split under another name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from bpfed.data.preparation import Preparation
from bpfed.data.summary import SPLIT
from bpfed.data.table import Column, Table, Words
from bpfed.errors import quoted

#: Share of values that is nearly all of them.
NEARLY = 0.9
#: Words of a column from which on they may be numbers that are written as text.
SEVERAL = 10
#: Numbers that programs write for a missing value, and how often one must be there to be taken for it.
GAPS, OFTEN = (-99.0, -999.0, -9999.0, -99999.0, 999.0, 9999.0, 99999.0), 3
#: Words that mark rows for training (False) and for testing (True), whatever their case.
PARTS = {"train": False, "training": False, "test": True, "testing": True}
#: Dates, such as 2024-05-14 or 14.5.24 10:00.
DATE = re.compile(r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3(\d{4}|\d{2}))([T ].*)?")
#: Numbers with separators, a sign, a currency or a unit: 1,234 or 1 234.5 or −5 or $3.50 or 12 mg/l.
_NUMERIC = re.compile(r"[-+−'~$€£¥]*\s*\d[\d.,'’_\s]*([^\W\d]{1,5}(/[^\W\d]{1,5})?|[%‰°$€£¥]\w?)?")


def mistaken(tables: Mapping[str, Table], preparation: Preparation) -> tuple[str, ...]:
    """What to say of columns that are probably used as what they are not; a sentence for each kind that there is."""
    features = [f for f in preparation.features if f.scale]
    texts = {f.name: such for f in features if f.kind == "words" and (such := as_text(f.levels))}
    if such := as_text(preparation.labels, plain=False):
        texts[preparation.target] = such
    gaps = {f.name: value for f in features if f.kind == "number" and (value := _gap(f.name, tables)) is not None}
    splits = [f.name for f in features if marks_split(f.levels)]
    found = []
    if texts:
        found.append(
            f"Words of {quoted(list(texts))} look like numbers, such as '{next(iter(texts.values()))}', but each is a "
            "category of its own; if they are numbers, write them all as numbers without separators, units or words, "
            "such as 1234.5."
        )
    if gaps:
        found.append(
            f"Numbers such as {next(iter(gaps.values())):g} in {quoted(list(gaps))} are far from all others and may "
            "stand for missing values, but are used as numbers; if they are missing values, leave the cells blank or say "
            f"--missing '{next(iter(gaps))}={next(iter(gaps.values())):g}'."
        )
    if splits:
        found.append(
            f"{quoted(splits)} has the words of a split, but is used as an input; call it '{SPLIT}' if it marks the "
            "test rows, or leave it out with --ignore."
        )
    return tuple(found)


def as_text(words: Sequence[str], plain: bool = True) -> str | None:
    """One of the words, if they are several and nearly all look like numbers, but not like dates.

    Args:
        words: The words of a column, each once.
        plain: Also where all of them can be read as numbers.
    """
    if len(words) < SEVERAL or _share(DATE, words) >= NEARLY or _share(_NUMERIC, words) < NEARLY:
        return None
    such = [word for word in words if _NUMERIC.fullmatch(word)]
    return next((word for word in such if not _is_number(word)), such[0] if plain else None)


def marks_split(words: Iterable[str]) -> bool:
    """Whether these are the words that mark rows for training and for testing."""
    found = {word.casefold() for word in words}
    return bool(found) and found <= PARTS.keys()


def _gap(name: str, tables: Mapping[str, Table]) -> float | None:
    """The number that seems to stand for a missing value: it occurs often, and far from all others."""
    columns: list[Column] = [table.columns[name] for table in tables.values() if name in table.columns]
    values = [column for column in columns if not isinstance(column, Words)]
    for gap in GAPS:
        where = [column == gap for column in values]
        if sum(int(np.count_nonzero(at)) for at in where) < OFTEN:
            continue
        rest = np.concatenate([column[~(at | np.isnan(column))] for column, at in zip(values, where, strict=True)])
        if len(rest) and np.abs(rest - gap).min() > np.ptp(rest) > 0:
            return gap
    return None


def _share(pattern: re.Pattern[str], words: Sequence[str]) -> float:
    return sum(pattern.fullmatch(word) is not None for word in words) / len(words)


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False
