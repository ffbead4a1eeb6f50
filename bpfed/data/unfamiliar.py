"""Unfamiliar rows: what new rows have that training had not, in words."""

from __future__ import annotations

import numpy as np

from bpfed.data.combine import UNITS_APART
from bpfed.data.lookalikes import spelling
from bpfed.data.preparation import Feature, Preparation
from bpfed.data.summary import of_channels
from bpfed.data.table import Table, Words
from bpfed.errors import first_of, quoted

#: Standard deviations from the mean of training beyond which a number is far.
FAR = 10.0


def unfamiliar(preparation: Preparation, table: Table, client: str) -> list[str]:
    """A sentence each for columns that lack but for their spelling, for words not seen, for numbers far off, and for pixels in another unit.

    Args:
        preparation: Of training.
        table: New rows.
        client: Whose rows; where each client is standardised by itself, its own mean is meant.
    """
    if preparation.shape is not None:
        return _unlike(preparation, table, client)
    found = []
    known = {spelling(f.name): f.name for f in preparation.features if f.name not in table.columns}
    used = {preparation.target, *preparation.ignore, *(f.name for f in preparation.features)}
    other = {name: known[spelling(name)] for name in table.columns if name not in used and spelling(name) in known}
    if other:
        told = first_of([f"'{name}' (training had '{was}')" for name, was in other.items()])
        found.append(f"'{table.name}' has {told}, which is ignored; spell it as in training if it is meant.")
    words, numbers = [], []
    for feature in (f for f in preparation.features if f.scale and f.name in table.columns):
        if feature.kind == "words":
            rows, such = _new_words(feature, table)
            words += [f"'{feature.name}' ({rows} of {table.rows} rows, such as {quoted([such])})"] if rows else []
        else:
            own = preparation.local.get(client, {})
            rows, such = _far(table, feature.name, *own.get(feature.name, (feature.mean, feature.scale)))
            numbers += [f"'{feature.name}' ({rows} of {table.rows} rows, such as {such})"] if rows else []
    if words:
        found.append(
            f"'{table.name}' has words that training never saw in {first_of(words)}; the model answers as if there were no word."
        )
    if numbers:
        found.append(
            f"'{table.name}' has numbers more than {FAR:g} standard deviations from the mean of training in "
            f"{first_of(numbers)}; the model's answers there may mean little."
        )
    return found


def _unlike(preparation: Preparation, table: Table, client: str) -> list[str]:
    """A sentence if the pixels of images vary far more or far less than in training: then their unit is another one."""
    if table.images is None or preparation.standardise == "none":
        return []
    own, here = preparation.local.get(client, {}), of_channels(table.images)
    for feature in preparation.features:
        _, scale = own.get(feature.name, (feature.mean, feature.scale))
        spread = here[feature.name].scale
        if not scale / UNITS_APART <= spread <= scale * UNITS_APART:
            return [
                f"The pixels of '{table.name}' have a standard deviation of {spread:.3g} in {feature.name}, those of training "
                f"{scale:.3g}; save them in the same unit (bytes from 0 to 255, or fractions), or the answers mean nothing."
            ]
    return []


def _new_words(feature: Feature, table: Table) -> tuple[int, str]:
    """How many rows have a word that training had not, and the first such word."""
    column = table.columns[feature.name]
    words = column if isinstance(column, Words) else Words.of(table.words(feature.name))
    known = set(feature.levels)
    new = np.array([*(level not in known for level in words.levels), False])[words.codes]
    return int(new.sum()), words.levels[words.codes[new.argmax()]] if new.any() else ""


def _far(table: Table, name: str, mean: float, scale: float) -> tuple[int, str]:
    """How many rows have a number that is far off, and the first such number."""
    column = table.columns[name]
    if isinstance(column, Words):
        return 0, ""
    far = np.abs(np.nan_to_num(column - mean)) > FAR * scale
    return int(far.sum()), f"{column[far.argmax()]:g}"
