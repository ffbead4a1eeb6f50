"""Columns of tables: what becomes of each, and which look as if they should not be inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bpfed.data.mistaken import DATE, NEARLY, as_text, marks_split
from bpfed.data.preparation import Preparation
from bpfed.data.summary import SPLIT
from bpfed.data.table import UNKNOWN, Column, Table, Words
from bpfed.errors import quoted

#: Words of a column from which on they are very many.
MANY = 30
#: Number of values from which on a column may be an identity.
ENOUGH = 20
#: The same for words that others are about to be told.
TOLD = 5
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
            what = "marks the test rows"
        elif name in preparation.ignore:
            what = "ignored (--ignore)"
        elif name in preparation.left_out:
            what = "says what is held out (--holdout)"
        elif feature is None:
            empty = all(table.missing(name).all() for table in tables.values())
            what = "all missing, not used" if empty else "constant, not used"
        elif not feature.scale:
            what = "constant, some missing"
        else:
            what = f"{len(feature.levels)} categories" if feature.kind == "words" else "numbers"
            what += f", and {len(feature.levels)} categories" if feature.coded else ""
            what += ", some missing" if feature.indicator else ""
        rows.append(ColumnRow(name, what, len(feature.inputs) if feature else 0))
    return rows


def coded(preparation: Preparation) -> tuple[str, ...]:
    """Which columns are used both as numbers and as categories, in a sentence; none where none is."""
    names = [f.name for f in preparation.features if f.coded]
    if not names:
        return ()
    return (
        f"{quoted(names)} {'has' if len(names) == 1 else 'have'} few whole numbers, which may be codes, so the number and "
        "one input per value are used; --codes number uses the number alone.",
    )


def doubts(tables: Mapping[str, Table], preparation: Preparation) -> tuple[str, ...]:
    """Which inputs look like dates, identities, names of clients or text, in a sentence; none where none does."""
    if preparation.shape is not None:
        return ()
    dates, identities, owners, wordy = [], [], [], []
    for feature in (f for f in preparation.features if f.scale):
        held = [table.columns[feature.name] for table in tables.values() if feature.name in table.columns]
        if feature.kind == "words" and (as_text(feature.levels) or marks_split(feature.levels)):
            continue  # of which `mistaken` speaks
        named = _IDENTITY.fullmatch(feature.name) is not None
        dated, identity = _of_words(held) if feature.kind == "words" else _of_numbers(held, named)
        if dated:
            dates.append(feature.name)
        elif identity:
            identities.append(feature.name)
        elif _whose(held):
            owners.append(feature.name)
        elif len(feature.levels) > MANY:
            wordy.append(feature.name)
    found = [*dates, *identities, *owners, *wordy]
    if not found:
        return ()
    parts = (
        ("dates", dates),
        ("identifiers (nearly every value is different)", identities),
        ("client names (the same in all rows of a client, but not between clients)", owners),
        (f"more than {MANY} categories", wordy),
    )
    told = ", ".join(f"{what} in {quoted(names)}" for what, names in parts if names)
    left = ",".join((*preparation.ignore, *(name for name in found if "," not in name)))
    how = f"leave them out with --ignore '{left}'" if left else "remove them from the files"
    rename = " (rename any with a comma in its name first)" if left and any("," in n for n in found) else ""
    return (f"There seem to be {told}; if these should not be inputs, {how}{rename}.",)


def telling(table: Table) -> dict[str, list[str]]:
    """Columns of words that others should not be told: dates and identifiers, where there are some."""
    words = {name: column for name, column in table.columns.items() if isinstance(column, Words)}
    seen = {name: _of_words([column], TOLD) for name, column in words.items()}
    dates = [name for name, (dated, _) in seen.items() if dated]
    identities = [name for name, (dated, identity) in seen.items() if identity and not dated]
    numbers = [name for name in identities if as_text(words[name].levels)]
    parts = (
        ("dates", dates),
        ("identifiers", [name for name in identities if name not in numbers]),
        ("numbers written as text", numbers),
    )
    return {what: names for what, names in parts if names}


def _of_words(held: Sequence[Column], enough: int = ENOUGH) -> tuple[bool, bool]:
    """Whether all clients' words are dates, such as 2024-05-14 or 14.5.24 10:00, and whether they are identifiers."""
    columns = [column for column in held if isinstance(column, Words)]
    all_ = set().union(*(column.levels for column in columns))
    if not all_:
        return False, False  # of other clients alone
    dated = sum(bool(DATE.fullmatch(word)) for word in all_) >= NEARLY * len(all_)
    known = sum(int(np.count_nonzero(column.codes != UNKNOWN)) for column in columns)
    return dated, _different(known, len(all_), sum(len(column.levels) for column in columns), len(held), enough)


def _of_numbers(held: Sequence[Column], named: bool) -> tuple[bool, bool]:
    """Whether the numbers of all clients are dates, and whether they are identities; ``named``: they are called so.

    Tables may be long, so that what is different is only counted where nothing cheaper decides.
    """
    values = [column[~np.isnan(column)] for column in held if not isinstance(column, Words)]
    values = [part for part in values if len(part)]
    whole = all(map(_whole, values))
    if not values or not (whole or named):
        return False, False  # of other clients alone; or measured, as most columns are
    pooled = np.concatenate(values)
    if whole and _dates(pooled):
        return True, False
    if not (named or _counted(values, pooled)):
        return False, False
    return False, _different(len(pooled), _distinct(pooled), sum(map(_distinct, values)), len(held))


def _whose(held: Sequence[Column]) -> bool:
    """Whether words or whole numbers name the client: one for all rows of a client, different ones for others."""
    seen: set[str | float] = set()
    several = 0
    for column in held:
        if isinstance(column, Words):
            known = int(np.count_nonzero(column.codes != UNKNOWN))
            found: set[str | float] = set(column.levels)
        else:
            values = column[~np.isnan(column)]
            known, found = len(values), set(values[:1].tolist())
            if known and not (_whole(values[:1]) and (values == values[0]).all()):
                return False
        if len(found) > 1:
            return False
        seen |= found
        several += known > 1
    return several > 1 and len(seen) > 1


def _dates(values: np.ndarray) -> bool:
    """Whether these whole numbers are all dates such as 20240514."""
    if values.min() < 19000101 or values.max() > 21001231:
        return False
    month, day = values // 100 % 100, values % 100
    return bool(((month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)).all())


def _different(known: int, all_: int, own: int, clients: int, enough: int = ENOUGH) -> bool:
    """Whether nearly every value differs from all others, of all clients or, where they have enough, of its own.

    Args:
        known: Number of values.
        all_: How many of them are different.
        own: The same of each client's, summed.
        clients: Number of clients.
        enough: Values that one must have at least.
    """
    return (known >= enough and all_ >= NEARLY * known) or (known >= enough * clients and own >= NEARLY * known)


def _counted(values: Sequence[np.ndarray], pooled: np.ndarray) -> bool:
    """Whether these whole numbers run on from row to row, or leave hardly any out."""
    runs = all((np.diff(part) > 0).all() for part in values)
    return runs or _dense(pooled) or all(map(_dense, values))


def _dense(values: np.ndarray) -> bool:
    spread = np.ptp(values)
    return bool(spread <= 1.2 * len(values)) and bool(spread <= 1.2 * _distinct(values))


def _whole(values: np.ndarray) -> bool:
    """Whether all are whole numbers."""
    return bool((values == np.trunc(values)).all())


def _distinct(values: np.ndarray) -> int:
    """How many different ones there are."""
    if np.ptp(values) > 4 * len(values) or not _whole(values):
        return len(np.unique(values))
    return int(np.count_nonzero(np.bincount((values - values.min()).astype(np.int64))))
