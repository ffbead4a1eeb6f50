"""Column types: numbers written as text, numbers that stand for a missing value, and a split under another name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bpfed._util.errors import quoted
from bpfed.data.tabular.recode import date_columns
from bpfed.data.tabular.table import SPLIT, UNKNOWN, Categorical, Column, Table

if TYPE_CHECKING:
    from bpfed.data.tabular.preprocessing import Preprocessor

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


def check_column_types(tables: Mapping[str, Table], preprocessor: Preprocessor) -> tuple[str, ...]:
    """What to say of columns that are probably used as what they are not; a sentence for each kind that there is."""
    features = [f for f in preprocessor.features if f.scale]
    texts = {f.name: such for f in features if f.kind == "words" and (such := as_text(f.categories))}
    if such := as_text(preprocessor.labels, plain=False):
        texts[preprocessor.target] = such
    gaps = {f.name: value for f in features if f.kind == "number" and (value := _gap(f.name, tables)) is not None}
    splits = [f.name for f in features if marks_split(f.categories)]
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
    values = [column for column in columns if not isinstance(column, Categorical)]
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


# --- Columns of tables ------------------------------------------------------------------------------------------------
#
# What becomes of each, and which look as if they should not be inputs.

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


def columns(tables: Mapping[str, Table], preprocessor: Preprocessor) -> list[ColumnRow]:
    """What becomes of each column of the clients' tables, in the tables' order; nothing for images."""
    if preprocessor.shape is not None:
        return []
    features = {f.name: f for f in preprocessor.features}
    rows = []
    for name in dict.fromkeys(name for table in tables.values() for name in table.columns):
        feature = features.get(name)
        if name == preprocessor.target:
            what = "target"
        elif name == SPLIT:
            what = "marks the test rows"
        elif name in preprocessor.ignore:
            what = "ignored (--ignore)"
        elif name in preprocessor.left_out:
            what = "says what is held out (--holdout)"
        elif feature is None:
            empty = all(table.missing(name).all() for table in tables.values())
            what = "all missing, not used" if empty else "constant, not used"
        elif not feature.scale:
            what = "constant, some missing"
        else:
            what = f"{len(feature.categories)} categories" if feature.kind == "words" else "numbers"
            what += f", and {len(feature.categories)} categories" if feature.coded else ""
            what += ", some missing" if feature.indicator else ""
        rows.append(ColumnRow(name, what, len(feature.inputs) if feature else 0))
    return rows


def coded(preprocessor: Preprocessor) -> tuple[str, ...]:
    """Which columns are used both as numbers and as categories, in a sentence; none where none is."""
    made = {column for name in preprocessor.recoding.dates for column in date_columns(name)}
    names = [f.name for f in preprocessor.features if f.coded and f.name not in made]
    if not names:
        return ()
    return (
        f"{quoted(names)} {'has' if len(names) == 1 else 'have'} few whole numbers, which may be codes, so the number and "
        "one input per value are used; --codes number uses the number alone.",
    )


def doubts(tables: Mapping[str, Table], preprocessor: Preprocessor) -> tuple[str, ...]:
    """Which inputs look like dates, identities, names of clients or text, in a sentence; none where none does."""
    if preprocessor.shape is not None:
        return ()
    dates, identities, owners, wordy = [], [], [], []
    for feature in (f for f in preprocessor.features if f.scale):
        held = [table.columns[feature.name] for table in tables.values() if feature.name in table.columns]
        if feature.kind == "words" and (as_text(feature.categories) or marks_split(feature.categories)):
            continue  # of which `check_column_types` speaks
        dated, identity = (
            _of_words(held) if feature.kind == "words" else _of_numbers(held, named_identity(feature.name))
        )
        if dated:
            dates.append(feature.name)
        elif identity:
            identities.append(feature.name)
        elif names_client(held):
            owners.append(feature.name)
        elif len(feature.categories) > MANY:
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
    left = ",".join((*preprocessor.ignore, *(name for name in found if "," not in name)))
    how = f"leave them out with --ignore '{left}'" if left else "remove them from the files"
    rename = " (rename any with a comma in its name first)" if left and any("," in n for n in found) else ""
    return (f"There seem to be {told}; if these should not be inputs, {how}{rename}.",)


def telling(table: Table) -> dict[str, list[str]]:
    """Columns of words that others should not be told: dates and identifiers, where there are some."""
    words = {name: column for name, column in table.columns.items() if isinstance(column, Categorical)}
    seen = {name: _of_words([column], TOLD) for name, column in words.items()}
    dates = [name for name, (dated, _) in seen.items() if dated]
    identities = [name for name, (dated, identity) in seen.items() if identity and not dated]
    numbers = [name for name in identities if as_text(words[name].categories)]
    parts = (
        ("dates", dates),
        ("identifiers", [name for name in identities if name not in numbers]),
        ("numbers written as text", numbers),
    )
    return {what: names for what, names in parts if names}


def _of_words(held: Sequence[Column], enough: int = ENOUGH) -> tuple[bool, bool]:
    """Whether all clients' words are dates, such as 2024-05-14 or 14.5.24 10:00, and whether they are identifiers."""
    columns = [column for column in held if isinstance(column, Categorical)]
    all_ = set().union(*(column.categories for column in columns))
    if not all_:
        return False, False  # of other clients alone
    dated = sum(bool(DATE.fullmatch(word)) for word in all_) >= NEARLY * len(all_)
    known = sum(int(np.count_nonzero(column.codes != UNKNOWN)) for column in columns)
    return dated, _different(known, len(all_), sum(len(column.categories) for column in columns), len(held), enough)


def _of_numbers(held: Sequence[Column], named: bool) -> tuple[bool, bool]:
    """Whether the numbers of all clients are dates, and whether they are identities; ``named``: they are called so.

    Tables may be long, so that what is different is only counted where nothing cheaper decides.
    """
    values = [column[~np.isnan(column)] for column in held if not isinstance(column, Categorical)]
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


def named_identity(name: str) -> bool:
    """Whether a column is called like an identifier."""
    return _IDENTITY.fullmatch(name) is not None


def is_identity(held: Sequence[Column], name: str) -> tuple[bool, bool]:
    """Whether the columns of all clients are dates, and whether they are identifiers."""
    words = any(isinstance(column, Categorical) and column.categories for column in held)
    return _of_words(held) if words else _of_numbers(held, named_identity(name))


def names_client(held: Sequence[Column]) -> bool:
    """Whether words or whole numbers name the client: one for all rows of a client, different ones for others."""
    seen: set[str | float] = set()
    several = 0
    for column in held:
        if isinstance(column, Categorical):
            known = int(np.count_nonzero(column.codes != UNKNOWN))
            found: set[str | float] = set(column.categories)
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
