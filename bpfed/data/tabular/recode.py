"""Recoding: what a user says of single columns before anything is learnt from them, and which words stand for no value.

Names, words and units that differ between clients are made the same, and dates and texts become columns of numbers. It
is done to each client's table by itself, after reading and before its statistics: a site of a deployment does it to its
own file and tells nobody. No file is changed.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from typing import NamedTuple

import numpy as np

from bpfed._util.errors import UserError, hint, quoted
from bpfed._util.text import spelling
from bpfed.data.tabular.table import UNKNOWN, Categorical, Column, Table, written

#: What separates several maps in one text; those of the other settings are separated by commas.
MAPS = ";"
#: Columns of numbers that a text becomes where nothing else is said, and at most.
BUCKETS, MOST_BUCKETS = 256, 4096
#: Digits of such a number that are read.
LONGEST_NUMBER = 9
#: The day from which days are counted.
DAY_ZERO = date(2000, 1, 1)
_STEP = re.compile(r"\s*([-+*/])\s*((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")
_TOKEN = re.compile(r"\w+")
_SLASHED = re.compile(r"(\d{1,2})([-/.])(\d{1,2})\2(\d{4}|\d{2})")
_MONTH = re.compile(r"\d{4}-\d{2}")


class Rename(NamedTuple):
    """``OLD[@CLIENT]=NEW``: another name of a column; of one client, or (None) of all."""

    column: str
    client: str | None
    new: str


class ValueMap(NamedTuple):
    """``COLUMN[@CLIENT]:WORD=WORD,...``: words (or numbers) of a column, by how they are written in the file."""

    column: str
    client: str | None
    words: Mapping[str, str]


class Conversion(NamedTuple):
    """``COLUMN[@CLIENT]:STEPS``, such as ``/88.4`` or ``-32/1.8``: steps are done from left to right."""

    column: str
    client: str | None
    steps: tuple[tuple[str, float], ...]

    def of(self, values: np.ndarray) -> np.ndarray:
        """The numbers ``[n]`` in the other unit."""
        for sign, number in self.steps:
            values = {"*": np.multiply, "/": np.divide, "+": np.add, "-": np.subtract}[sign](values, number)
        return values


@dataclass(frozen=True)
class Recoding:
    """What is said of columns, as it is written in a configuration.

    Attributes:
        rename: Other names of columns, ``OLD=NEW`` or ``OLD@CLIENT=NEW`` each.
        map: Other words, ``COLUMN:WORD=WORD,...`` or ``COLUMN@CLIENT:...`` each.
        convert: Other units, ``COLUMN:/88.4`` or ``COLUMN@CLIENT:-32/1.8`` each.
        dates: Columns whose dates become year, month, weekday and days since 2000.
        text: Columns whose words are counted in so many hashed columns, ``COLUMN`` or ``COLUMN:NUMBER`` each.
    """

    rename: tuple[str, ...] = ()
    map: tuple[str, ...] = ()
    convert: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()
    text: tuple[str, ...] = ()

    @classmethod
    def of(cls, **said: str | Iterable[str] | None) -> Recoding:
        """Of lists, or of texts with commas (maps: semicolons) between the entries.

        Raises:
            UserError: One of them says nothing that can be done.
        """
        made = cls(**{key: _entries(given, MAPS if key == "map" else ",") for key, given in said.items()})
        _ = made._parsed
        return made

    def settings(self) -> dict[str, str | None]:
        """What a configuration has to say so that the same is done."""
        return {
            key: (MAPS if key == "map" else ",").join(value) or None for key, value in vars(self).items() if key in KEYS
        }

    @property
    def columns(self) -> set[str]:
        """The columns that are named, as the files call them."""
        return {column for column, _ in self._named} | {*self.dates, *self._parsed[3]}

    @property
    def words(self) -> set[str]:
        """Columns that are read as words, though all their cells may be numbers: dates such as 20240514, and texts."""
        return {*self.dates, *self._parsed[3]}

    @cached_property
    def hashed(self) -> frozenset[str]:
        """The columns that texts become."""
        return frozenset(made for name, number in self._parsed[3].items() for made in text_columns(name, number))

    def check(self, tables: Mapping[str, Table]) -> None:
        """Raise a `UserError` if a client or a column is named that there is not."""
        known = {name for table in tables.values() for name in table.columns}
        known |= {each.new for each in self._parsed[0]}
        for name, client in [*self._named, *((name, None) for name in (*self.dates, *self._parsed[3]))]:
            if client is not None and client not in tables:
                raise UserError(f"There is no client '{client}' to recode a column of; {hint(client, tables)}")
            if name not in known:
                raise UserError(f"No client has the column '{name}' to recode; {hint(name, known)}")

    def apply(
        self, table: Table, client: str | None = None, missing: Iterable[str] = (), words: Collection[str] = ()
    ) -> Table:
        """A client's table with everything done to it that is said of its columns; those it lacks are no mistake.

        Args:
            table: As it was read.
            client: Whose it is; None: nobody's that is named.
            missing: Words that stand for no value, by the new names of columns.
            words: Columns that stay words though all of them are numbers.

        Raises:
            UserError: A column cannot be recoded like that.
        """
        if self == NOTHING:
            return table
        renames, maps, conversions, buckets = self._parsed
        columns = dict(table.columns)
        for name, new in ((r.column, r.new) for r in renames if r.client in (None, client) and r.column in columns):
            if new in columns:
                raise UserError(f"'{table.name}' has both '{name}' and '{new}'; rename one of them otherwise.")
            columns = {new if key == name else key: column for key, column in columns.items()}
        columns = MissingValues.of(missing).out_of(replace(table, columns=columns)).columns
        for mapped in (m for m in maps if m.client in (None, client) and m.column in columns):
            columns[mapped.column] = _mapped(columns[mapped.column], mapped.words, mapped.column in words)
        for conversion in (c for c in conversions if c.client in (None, client) and c.column in columns):
            columns[conversion.column] = _converted(columns[conversion.column], conversion, table.name)
        for name in self.dates:
            if name in columns:
                columns |= _date_columns(_words_of(columns.pop(name)), name, table.name)
        for name, number in buckets.items():
            if name in columns:
                columns |= _text_columns(_words_of(columns.pop(name)), name, number)
        return replace(table, columns=columns)

    @property
    def _named(self) -> list[tuple[str, str | None]]:
        """Columns with another name, other words or another unit, and whose."""
        renames, maps, conversions, _ = self._parsed
        return [
            *((r.column, r.client) for r in renames),
            *((m.column, m.client) for m in maps),
            *((c.column, c.client) for c in conversions),
        ]

    @cached_property
    def _parsed(self) -> tuple[list[Rename], list[ValueMap], list[Conversion], dict[str, int]]:
        return (
            [_rename(said) for said in self.rename],
            [_map(said) for said in self.map],
            [_conversion(said) for said in self.convert],
            dict(map(_buckets, self.text)),
        )


KEYS = ("rename", "map", "convert", "dates", "text")
NOTHING = Recoding()


def _entries(given: str | Iterable[str] | None, separator: str) -> tuple[str, ...]:
    listed = (given or "").split(separator) if given is None or isinstance(given, str) else list(given)
    return tuple(entry.strip() for entry in listed if entry.strip())


def _whose(said: str) -> tuple[str, str | None]:
    """The column and the client of ``COLUMN`` or ``COLUMN@CLIENT``."""
    column, at, client = said.rpartition("@")
    return (column.strip(), client.strip()) if at and column.strip() else (said.strip(), None)


def _rename(said: str) -> Rename:
    old, equals, new = said.partition("=")
    column, client = _whose(old)
    if not equals or not column or not new.strip():
        raise UserError(f"'{said}' renames no column; write OLD=NEW, or OLD@CLIENT=NEW for one client.")
    return Rename(column, client, new.strip())


def _map(said: str) -> ValueMap:
    whose, colon, pairs = said.partition(":")
    column, client = _whose(whose)
    split = [pair.partition("=") for pair in pairs.split(",") if pair.strip()]
    if not colon or not column or not split or not all(equals and old.strip() for old, equals, _ in split):
        raise UserError(f"'{said}' maps no words; write COLUMN:WORD=WORD,WORD=WORD, as in sex:F=female,M=male.")
    return ValueMap(column, client, {_spelt(old): new.strip() for old, _, new in split})


def _conversion(said: str) -> Conversion:
    whose, colon, steps = said.rpartition(":")
    column, client = _whose(whose)
    found = [(match[1], float(match[2])) for match in _STEP.finditer(steps)]
    if not colon or not column or not found or _STEP.sub("", steps) or ("/", 0.0) in found:
        raise UserError(f"'{said}' is no conversion; write COLUMN:/88.4 or COLUMN@CLIENT:-32/1.8 (from left to right).")
    return Conversion(column, client, tuple(found))


def _buckets(said: str) -> tuple[str, int]:
    column, colon, number = said.rpartition(":")
    if not colon or not number.strip().isdecimal():
        return said, BUCKETS
    if len(number) > LONGEST_NUMBER or not 1 <= int(number) <= MOST_BUCKETS:
        raise UserError(
            f"'{said[:60]}' asks for {number[:LONGEST_NUMBER]} columns of a text; choose 1 to {MOST_BUCKETS}."
        )
    return column.strip(), int(number)


# --- Words and numbers ------------------------------------------------------------------------------------------------


def _spelt(word: str) -> str:
    """A word without what similar spellings differ in; a number as `written` writes it."""
    text = spelling(word)
    try:
        return written(float(text)) or text
    except (ValueError, OverflowError):
        return text


def _words_of(column: Column) -> Categorical:
    return column if isinstance(column, Categorical) else Categorical.of([written(v) for v in column.tolist()])


def _mapped(column: Column, words: Mapping[str, str], keep: bool) -> Column:
    """A column with other words; numbers, if all are then and it is not to ``keep`` words."""
    if not isinstance(column, Categorical):
        values = {written(v) for v in np.unique(column[~np.isnan(column)]).tolist()} if len(column) else set()
        if not values & words.keys():
            return column
        column = _words_of(column)
    categories = [words.get(_spelt(category), category) for category in column.categories]
    new = Categorical.of([*categories, ""])
    made = Categorical(new.codes[column.codes], new.categories)  # the last one is that of missing values
    return made if keep else _as_numbers(made)


def _as_numbers(column: Categorical) -> Column:
    try:
        numbers = [float(category) for category in column.categories]
    except ValueError:
        return column
    return np.array([*numbers, np.nan])[column.codes]


def _converted(column: Column, conversion: Conversion, where: str) -> np.ndarray:
    if not isinstance(column, Categorical):
        return conversion.of(column)
    if column.categories:
        raise UserError(
            f"Column '{conversion.column}' of '{where}' is to be converted, but has '{column.categories[0][:40]}', which is no "
            "number; map it first, or name it as a missing value."
        )
    return np.full(len(column), np.nan)


# --- Dates ------------------------------------------------------------------------------------------------------------


def _date_columns(column: Categorical, name: str, where: str) -> dict[str, Column]:
    """Year, month (1 to 12), weekday (0 is Monday) and days since 2000 of dates, ``[n]`` each."""
    days = parse_dates(column.categories, name, where)
    parts: dict[str, Callable[[date], int]] = {
        "year": lambda day: day.year,
        "month": lambda day: day.month,
        "weekday": date.weekday,
        "days": lambda day: (day - DAY_ZERO).days,
    }
    return {
        made: np.array([*(float(parts[part](day)) for day in days), np.nan])[column.codes]
        for made, part in date_columns(name).items()
    }


def date_columns(name: str) -> dict[str, str]:
    """The columns that dates become, and what each has of them."""
    return {f"{name} {part}": part for part in ("year", "month", "weekday", "days")}


def parse_dates(words: Sequence[str], name: str, where: str) -> list[date]:
    """Dates as ISO 8601 writes them, also with a time of day, or as 14.5.2024, 14/5/2024 or 5/14/2024.

    Which of the two last ones it is must be clear from the column as a whole.

    Raises:
        UserError: A word is no such date, or nobody can tell the day from the month.
    """
    bare = [re.split(r"[T ]", word.strip(), maxsplit=1)[0] for word in words]
    slashed = [match for word in bare if (match := _SLASHED.fullmatch(word))]
    first, second = [max((int(m[k]) for m in slashed if m[2] != "."), default=0) for k in (1, 3)]
    unclear = bool(first) and (first > 12) is (second > 12)
    found = []
    for word, text in zip(words, bare, strict=True):
        try:
            if match := _SLASHED.fullmatch(text):
                if unclear and match[2] != ".":
                    raise UserError(
                        f"Column '{name}' of '{where}' has '{word[:40]}', of which nobody can tell the day from the month; "
                        "write dates as 2024-05-14."
                    )
                day, month = (match[1], match[3]) if match[2] == "." or first > 12 else (match[3], match[1])
                year = int(match[4]) + (0 if len(match[4]) == 4 else 1900 if int(match[4]) > 50 else 2000)
                found.append(date(year, int(month), int(day)))
            else:
                found.append(date.fromisoformat(f"{text}-01" if _MONTH.fullmatch(text) else text))
        except ValueError:
            raise UserError(
                f"Column '{name}' of '{where}' has '{word[:40]}', which is no date; correct it, or name it with --missing if "
                f"it stands for no value (dates are written as {quoted(['2024-05-14', '14.5.2024'])})."
            ) from None
    return found


# --- Texts ------------------------------------------------------------------------------------------------------------


def _text_columns(column: Categorical, name: str, buckets: int) -> dict[str, Column]:
    """How often words occur in each text, in so many columns ``[n]``; a row of them has length 1.

    A word's column and sign are a checksum of it in small letters, the same at every site, so nothing is exchanged. Where
    two words share a column, their signs let them cancel out on average.
    """
    made = np.zeros((len(column.categories) + 1, buckets))
    for row, text in enumerate(column.categories):
        for word, count in Counter(_TOKEN.findall(text.casefold())).items():
            code = zlib.crc32(word.encode())
            made[row, (code >> 1) % buckets] += count if code & 1 else -count
        made[row] /= np.linalg.norm(made[row]) or 1.0
    made[UNKNOWN] = np.nan
    return {new: made[column.codes, k] for k, new in enumerate(text_columns(name, buckets))}


def text_columns(name: str, buckets: int) -> list[str]:
    """The columns that a text becomes."""
    width = len(str(buckets - 1))
    return [f"{name} #{k:0{width}d}" for k in range(buckets)]


def recoded(tables: Mapping[str, Table], recoding: Recoding, missing: Sequence[str] = ()) -> dict[str, Table]:
    """The clients' tables with everything done that is said of their columns."""
    recoding.check(tables)
    found = {client: recoding.apply(table, client, missing) for client, table in tables.items()}
    every = [*tables.values(), *found.values()]
    MissingValues.of(missing).check(column for table in every for column in table.columns)
    return found


# --- Values that stand for none ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MissingValues:
    """What else is missing, beside `bpfed.data.tabular.table.MISSING`; whatever its case.

    Attributes:
        everywhere: Words that are in every column.
        columns: By column, those that are in it alone.
    """

    everywhere: frozenset[str] = frozenset()
    columns: dict[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, said: Iterable[str]) -> MissingValues:
        """Of ``WORD`` or ``COLUMN=WORD`` each."""
        everywhere: set[str] = set()
        columns: dict[str, frozenset[str]] = {}
        for text in said:
            column, equals, word = text.rpartition("=")
            word = word.strip().casefold()
            if not word or (equals and not column.strip()):
                raise UserError(f"'{text}' names no missing value; write WORD, or COLUMN=WORD for one column alone.")
            if equals:
                columns[column.strip()] = columns.get(column.strip(), frozenset()) | {word}
            else:
                everywhere.add(word)
        return cls(frozenset(everywhere), columns)

    def words(self, column: str) -> frozenset[str]:
        """Those of a column, in small letters."""
        return self.everywhere | self.columns.get(column, frozenset())

    def cells(self, column: str, cells: Sequence[str]) -> Sequence[str]:
        """Cells of a text file, empty where they stand for no value."""
        gone = self.words(column)
        return [("" if cell.strip().casefold() in gone else cell) for cell in cells] if gone else cells

    def out_of(self, table: Table) -> Table:
        """A table without the values that stand for none; a number is one of them however it is written."""
        if not self.everywhere and not self.columns:
            return table
        return replace(table, columns={name: self._out_of(name, column) for name, column in table.columns.items()})

    def _out_of(self, name: str, column: Column) -> Column:
        if isinstance(column, Categorical):
            return Categorical.of(self.cells(name, column.words()))
        numbers = [number for word in self.words(name) if (number := _number(word)) is not None]
        return np.where(np.isin(column, numbers), np.nan, column) if numbers else column

    def check(self, known: Iterable[str]) -> None:
        """Raise a `UserError` if a column is named that nobody has."""
        known = set(known)
        for name in self.columns:
            if name not in known:
                raise UserError(f"No client has the column '{name}' with missing values; {hint(name, known)}")


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
