"""Columns of tables: what becomes of each, and which look as if they should be no inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bpfed.data.preparation import Preparation
from bpfed.data.summary import SPLIT
from bpfed.data.table import UNKNOWN, Column, Table, Words
from bpfed.errors import quoted

#: Words of a column from which on they are very many.
MANY = 30
#: Share of values that differ, and number of values, from which on a column may be an identity.
DIFFERENT, ENOUGH = 0.9, 20
_DATE = re.compile(r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3(\d{4}|\d{2}))([T ].*)?")
_IDENTITY = re.compile(r"(.*[\W_])?(id|uuid|key|no|nr|code|zip|plz|index)", re.IGNORECASE)


class ColumnRow(NamedTuple):
    """A column: what it is in words, and how many inputs it gives."""

    name: str
    what: str
    inputs: int


def columns(tables: Mapping[str, Table], preparation: Preparation) -> list[ColumnRow]:
    """What becomes of each column of the clients' tables, in the tables' order; nothing for images."""
    if preparation.shape is not None:
        return []
    features = {f.name: f for f in preparation.features}
    rows = []
    for name in dict.fromkeys(name for table in tables.values() for name in table.columns):
        feature = features.get(name)
        if name == preparation.target:
            what = "target"
        elif name == SPLIT:
            what = "says which rows are for testing"
        elif name in preparation.ignore:
            what = "left out by --ignore"
        elif feature is None:
            empty = all(table.missing(name).all() for table in tables.values())
            what = "all missing, left out" if empty else "constant, left out"
        elif not feature.scale:
            what = "constant, but missing in places"
        else:
            what = f"{len(feature.levels)} words" if feature.kind == "words" else "numbers"
            what += ", some missing" if feature.indicator else ""
        rows.append(ColumnRow(name, what, len(feature.inputs) if feature else 0))
    return rows


def doubts(tables: Mapping[str, Table], preparation: Preparation) -> tuple[str, ...]:
    """Which inputs look like dates, identities or text, in a sentence; none where none does."""
    if preparation.shape is not None:
        return ()
    dates, identities, wordy = [], [], []
    for feature in (f for f in preparation.features if f.scale):
        held = [table.columns[feature.name] for table in tables.values() if feature.name in table.columns]
        values = [_known(column) for column in held]
        named = _IDENTITY.fullmatch(feature.name) is not None
        measured = feature.kind != "words" and not named and not all(map(_whole, values))
        if measured or not any(map(len, values)):
            continue  # neither dates nor counted, as most columns are; or of other clients alone
        if _dates(values):
            dates.append(feature.name)
        elif _different(values) and (feature.kind == "words" or named or _counted(values)):
            identities.append(feature.name)
        elif len(feature.levels) > MANY:
            wordy.append(feature.name)
    found = [*dates, *identities, *wordy]
    if not found:
        return ()
    parts = (
        ("dates", dates),
        ("identifiers (nearly every value is different)", identities),
        (f"more than {MANY} words", wordy),
    )
    told = ", ".join(f"{what} in {quoted(names)}" for what, names in parts if names)
    left = ",".join((*preparation.ignore, *found))
    return (f"There seem to be {told}; if these should be no inputs, --ignore '{left}' leaves them out.",)


def _known(column: Column) -> np.ndarray:
    """The values of a column that are not missing."""
    if isinstance(column, Words):
        return np.array(column.levels, dtype=object)[column.codes[column.codes != UNKNOWN]]
    return column[~np.isnan(column)]


def _dates(values: Sequence[np.ndarray]) -> bool:
    """Whether they are dates: words such as 2024-05-14 or 14.5.24 10:00, or numbers such as 20240514."""
    distinct = set().union(*map(_distinct, values))
    if any(isinstance(value, str) for value in distinct):
        return sum(bool(_DATE.fullmatch(str(value))) for value in distinct) >= DIFFERENT * len(distinct)
    return bool(distinct) and all(
        value == value // 1
        and 19000101 <= value <= 21001231
        and 1 <= value // 100 % 100 <= 12
        and 1 <= value % 100 <= 31
        for value in distinct
    )


def _different(values: Sequence[np.ndarray]) -> bool:
    """Whether nearly every value differs from all others, of all clients or, where they have enough, of its own."""
    known = sum(map(len, values))
    distinct = [_distinct(part) for part in values]
    own, all_ = sum(map(len, distinct)), len(set().union(*distinct))
    return (known >= ENOUGH and all_ >= DIFFERENT * known) or (
        known >= ENOUGH * len(values) and own >= DIFFERENT * known
    )


def _counted(values: Sequence[np.ndarray]) -> bool:
    """Whether they are whole numbers that run on from row to row, or leave hardly any out."""
    pooled = np.concatenate(values)
    if not _whole(pooled):
        return False
    runs = all((np.diff(part) > 0).all() for part in values)
    return runs or _dense(pooled) or all(_dense(part) for part in values if len(part))


def _dense(values: np.ndarray) -> bool:
    return bool(np.ptp(values) <= 1.2 * len(_distinct(values)))


def _whole(values: np.ndarray) -> bool:
    """Whether all are whole numbers; words are none."""
    return values.dtype != object and bool((values == np.trunc(values)).all())


def _distinct(values: np.ndarray) -> set[Any]:
    """Each value once."""
    return set(values.tolist()) if values.dtype == object else set(np.unique(values).tolist())
