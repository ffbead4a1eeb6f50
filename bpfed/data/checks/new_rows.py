"""New rows: what new rows have that training had not, in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bpfed._util.errors import first_of, quoted
from bpfed.data.checks.spelling import letters
from bpfed.data.tabular.statistics import UNITS_APART, of_channels
from bpfed.data.tabular.table import Categorical, Table

if TYPE_CHECKING:
    from bpfed.data.tabular.preprocessing import Feature, Preprocessor

#: Standard deviations from the mean of training beyond which a number is far.
FAR = 10.0


@dataclass(frozen=True)
class Unusual:
    """Where rows of a table are unlike those of training; only columns with such rows are in it.

    Attributes:
        rows: Number of rows n.
        words: Where a word is one that training never saw, ``[n]`` bool by column.
        numbers: Where a number is far off, likewise.
        own: Where a number is not, but is far off the client's own, likewise.
        missing: Where there is no value though training had one in every row, likewise.
        codes: Where a whole number that may be a code is one that training never saw, likewise.
    """

    rows: int
    words: dict[str, np.ndarray]
    numbers: dict[str, np.ndarray]
    missing: dict[str, np.ndarray] = field(default_factory=dict)
    codes: dict[str, np.ndarray] = field(default_factory=dict)
    own: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def far(self) -> np.ndarray:
        """Rows with some number that is far off, ``[n]`` bool."""
        return np.logical_or.reduce([np.zeros(self.rows, dtype=bool), *self.numbers.values(), *self.own.values()])

    def names(self) -> list[list[str]]:
        """The columns that are unusual in each row."""
        found: list[list[str]] = [[] for _ in range(self.rows)]
        for places in (self.numbers, self.own, self.words, self.codes, self.missing):
            for name, where in places.items():
                for row in np.flatnonzero(where).tolist():
                    found[row].append(name)
        return found


def unusual(preprocessor: Preprocessor, table: Table, client: str) -> Unusual:
    """Which rows have unseen words or codes, numbers far off, or no value where training had one; see `check_new_rows`."""
    words, numbers, missing, codes, far_off = {}, {}, {}, {}, {}
    mine = preprocessor.own.get(client, {})
    hashed = preprocessor.recoding.hashed
    for feature in (f for f in preprocessor.features if f.scale and f.name not in hashed):
        # Without an indicator a missing value is an average one, and nothing of the model can tell.
        if not feature.indicator and (gaps := table.missing(feature.name)).any():
            missing[feature.name] = gaps
        if feature.name not in table.columns:
            continue
        if feature.kind == "words":
            if (new := _new_words(feature, table)).any():
                words[feature.name] = new
        elif feature.kind == "number":
            own = preprocessor.local.get(client, {})
            far = far_numbers(table, feature.name, *own.get(feature.name, (feature.mean, feature.scale)))
            if far.any():
                numbers[feature.name] = far
            if feature.name in mine and (here := far_numbers(table, feature.name, *mine[feature.name]) & ~far).any():
                far_off[feature.name] = here
                far = far | here
            if feature.coded and (new := _new_words(feature, table) & ~far).any():
                codes[feature.name] = new
    return Unusual(table.rows, words, numbers, missing, codes, far_off)


def check_new_rows(preprocessor: Preprocessor, table: Table, client: str) -> list[str]:
    """A sentence each for misspelt columns, unseen words and codes, numbers far off, gaps, and pixels in another unit.

    Args:
        preprocessor: Of training.
        table: New rows.
        client: Whose rows; where each client is standardised by itself, its own mean is meant.
    """
    if preprocessor.shape is not None:
        return _unlike(preprocessor, table, client)
    found = []
    known = {letters(f.name): f.name for f in preprocessor.features if f.name not in table.columns}
    used = {preprocessor.target, *preprocessor.left_out, *(f.name for f in preprocessor.features)}
    other = {name: known[letters(name)] for name in table.columns if name not in used and letters(name) in known}
    if other:
        told = first_of([f"'{name}' (training had '{was}')" for name, was in other.items()])
        found.append(
            f"'{table.name}' has {told}, which is ignored; if that is the same column, spell it as in training."
        )
    strange = unusual(preprocessor, table, client)
    words = [_told(table, name, where, number=False) for name, where in strange.words.items()]
    numbers = [_told(table, name, where, number=True) for name, where in strange.numbers.items()]
    if words:
        found.append(
            f"'{table.name}' has words that were not seen in training in {first_of(words)}; the model treats them as "
            "if there were no word."
        )
    if numbers:
        found.append(
            f"'{table.name}' has numbers more than {FAR:g} standard deviations from the training mean in "
            f"{first_of(numbers)}; the predictions there may mean little."
        )
    own = [_told(table, name, where, number=True) for name, where in strange.own.items()]
    if own:
        found.append(
            f"'{table.name}' has numbers more than {FAR:g} standard deviations from the training mean of '{client}' itself in "
            f"{first_of(own)}; check their unit, the predictions there may mean little."
        )
    codes = [_told(table, name, where, number=True) for name, where in strange.codes.items()]
    if codes:
        found.append(
            f"'{table.name}' has numbers that were not seen in training in {first_of(codes)}; the model knows them "
            "by their size alone, which means little if they are codes."
        )
    gaps = [
        f"'{name}' ({np.count_nonzero(where)} of {table.rows} rows)"
        for name, where in strange.missing.items()
        if name in table.columns
    ]
    if gaps:
        found.append(
            f"'{table.name}' lacks values in {first_of(gaps)}, which no training row did; the model treats them as "
            "average, so the predictions there may mean little."
        )
    return found


def _unlike(preprocessor: Preprocessor, table: Table, client: str) -> list[str]:
    """A sentence if the pixels of images vary far more or far less than in training: then their unit is another one."""
    if table.images is None or preprocessor.standardise == "none":
        return []
    own, here = preprocessor.local.get(client, {}), of_channels(table.images)
    for feature in preprocessor.features:
        _, scale = own.get(feature.name, (feature.mean, feature.scale))
        spread = here[feature.name].scale
        if not scale / UNITS_APART <= spread <= scale * UNITS_APART:
            return [
                f"The pixels of '{table.name}' have a standard deviation of {spread:.3g} in {feature.name}, but "
                f"{scale:.3g} in training; save them in the same unit (bytes from 0 to 255, or fractions), or "
                "predictions mean nothing."
            ]
    return []


def _told(table: Table, name: str, where: np.ndarray, number: bool) -> str:
    """A column, in how many rows it is unusual, and its first such value."""
    first = table.take(np.flatnonzero(where)[:1]).words(name)[0]
    such = f"{float(first):g}" if number else quoted([first])
    return f"'{name}' ({np.count_nonzero(where)} of {table.rows} rows, such as {such})"


def _new_words(feature: Feature, table: Table) -> np.ndarray:
    """Which rows have a word, or a code, that training had not, ``[n]`` bool."""
    column = table.columns[feature.name]
    words = column if isinstance(column, Categorical) else Categorical.of(table.words(feature.name))
    known = set(feature.categories)
    return np.array([*(category not in known for category in words.categories), False])[words.codes]


def far_numbers(table: Table, name: str, mean: float, scale: float) -> np.ndarray:
    """Which rows have a number that is far off, ``[n]`` bool."""
    column = table.columns[name]
    if isinstance(column, Categorical):
        return np.zeros(table.rows, dtype=bool)
    return np.abs(np.nan_to_num(column - mean)) > FAR * scale
