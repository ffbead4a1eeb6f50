"""Combine: the preprocessing of a federation, made from what its clients tell of their training rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import get_args

from bpfed._util.errors import OTHERS, UserError, first_of, unknown
from bpfed.data.tabular.preprocessing import Codes, Feature, Preprocessor, Standardise, array_words, meant
from bpfed.data.tabular.statistics import (
    FEWEST_CODES,
    MOST_CATEGORIES,
    MOST_CODES,
    MOST_WHOLE,
    UNITS_APART,
    ColumnStatistics,
    ColumnSummary,
    too_many,
    too_many_classes,
)
from bpfed.inference.tasks import get_task, inferred

#: Columns of codes that a table has at most; where more are whole numbers of few values, they are counts or pixels.
CODED = 30
#: Values of such a column for each different one, at least, on average; of fewer no effect can be learnt.
PER_CODE = 10


def combine(
    summaries: Sequence[ColumnStatistics],
    target: str,
    *,
    task: str | None = None,
    standardise: Standardise = "federated",
    client_column: str | None = None,
    ignore: Iterable[str] = (),
    missing: Iterable[str] = (),
    codes: Codes = "both",
    holdout: str | None = None,
) -> Preprocessor:
    """Make the preprocessing of a federation from what its clients tell; for the arguments see `bpfed.data.load`.

    Raises:
        UserError: The clients' columns cannot be brought together, or there is nothing to learn.
    """
    if standardise not in get_args(Standardise):
        raise unknown("way to standardise", str(standardise), get_args(Standardise))
    if codes not in get_args(Codes):
        raise unknown("way to use codes", str(codes), get_args(Codes))
    asked = get_task(task) if task is not None else None
    if asked is None or not asked.has_classes:  # as classes, numbers may pass for words
        _check_alike({target: [(s.client, s.target) for s in summaries]})
    aim = reduce(ColumnSummary.__add__, (s.target for s in summaries))
    decided = asked or inferred(aim.words or 0 < len(aim.categories or ()) <= MOST_WHOLE)
    labels: tuple[str, ...] = ()
    if decided.has_classes:
        labels = ordered(_classes(summaries, target))
        if why := decided.label_fault(labels):
            raise UserError(f"The target '{target}' {why}")
    elif aim.words:
        where = next(s for s in summaries if s.target.words and s.target.categories)
        raise UserError(
            f"The target '{target}' of '{where.client}' must be numeric for {decided.phrase}, but has "
            f"'{(where.target.categories or ('',))[0]}'; correct it, or use --task classification."
        )
    elif not aim.scale:
        raise UserError(
            f"The target '{target}' is the same in all rows, so there is nothing to learn; predict another column."
        )

    if decided.labelled and not decided.has_classes:
        labels = tuple(name.strip() for name in target.split(","))
    centre, unit = decided.scaling(aim.mean, aim.scale)
    shapes = {s.shape: s.client for s in summaries}
    if len(shapes) > 1:
        one, two = [
            f"'{who}' has {'a table' if shape is None else array_words(shape)}" for shape, who in shapes.items()
        ][:2]
        raise UserError(f"Clients have different kinds of inputs: {one}, {two}; give all of them the same kind.")
    (shape,) = shapes
    names = sorted({name for s in summaries for name in s.columns})
    # A client without the column has it all missing.
    told = {name: [(s.client, s.columns.get(name, ColumnSummary(0, s.rows))) for s in summaries] for name in names}
    _check_alike(told)
    if shape is not None and standardise == "federated":
        _check_units(told)
    features = [_feature(name, [column for _, column in told[name]], shape is not None) for name in names]
    if codes == "number" or sum(f.coded for f in features) > CODED:
        features = [replace(f, categories=()) if f.coded else f for f in features]
    crowded = {f.name: len(f.categories) for f in features if len(f.categories) > MOST_CATEGORIES}
    if crowded:
        raise too_many(crowded, "all clients together", ignore)
    made = Preprocessor(
        target=target,
        task=decided.name,
        features=tuple(f for f in features if f.inputs),
        labels=labels,
        target_mean=centre,
        target_scale=unit,
        standardise=standardise,
        client_column=client_column,
        ignore=tuple(ignore),
        missing=tuple(missing),
        codes=codes,
        holdout=holdout,
        shape=shape,
    )
    if not made.features:
        raise UserError(
            f"No column other than '{target}' has values that differ, so there is nothing to learn from; add inputs."
        )
    return made.with_clients((s.client, s.columns) for s in summaries)


def _check_units(told: Mapping[str, Sequence[tuple[str, ColumnSummary]]]) -> None:
    """Refuse images of which some have been saved as bytes and some as fractions: sums of both would suit neither."""
    for name, columns in told.items():
        spreads = sorted((column.scale, client) for client, column in columns if column.scale)
        if spreads and spreads[-1][0] > UNITS_APART * spreads[0][0]:
            (low, one), (high, other) = spreads[0], spreads[-1]
            raise UserError(
                f"The images' {name} has a standard deviation of {low:.3g} at '{one}' and of {high:.3g} at '{other}'; "
                "save all as bytes (0 to 255) or all as fractions (0 to 1), or use --standardise local."
            )


def _feature(name: str, told: Sequence[ColumnSummary], image: bool) -> Feature:
    total = reduce(ColumnSummary.__add__, told)
    if image:
        return Feature(name, "channel", total.mean, total.scale or 1.0)
    # Where nothing is known, or nothing is missing, an indicator would be the same everywhere.
    indicator = bool(total.missing and total.count)
    if total.words:
        categories = total.categories or ()
        return Feature(name, "words", 0.0, float(len(categories) > 1), categories, indicator)
    codes = ordered(total.categories or ())
    enough = FEWEST_CODES <= len(codes) <= MOST_CODES and total.count >= PER_CODE * len(codes)
    return Feature(name, "number", total.mean, total.scale, codes if enough else (), indicator)


def _check_alike(told: Mapping[str, Iterable[tuple[str, ColumnSummary]]]) -> None:
    """Refuse columns that are numbers at one client and text at another; all of them at once."""
    found = []
    for name, clients in told.items():
        numbers = words = None
        for client, column in clients:
            if column.count and column.words:
                words = words or (client, (column.categories or ("",))[0])
            elif column.count:
                numbers = numbers or client
        if numbers is not None and words is not None:
            found.append(f"'{name}' is numeric at '{numbers}' but text at '{words[0]}', such as '{words[1]}'")
    if found:
        raise UserError(f"Column {first_of(found, ', and ', OTHERS)}; write it the same way everywhere.")


def _classes(summaries: Sequence[ColumnStatistics], target: str) -> tuple[str, ...]:
    for s in summaries:
        if s.target.count and s.target.categories is None:
            raise UserError(
                f"The target '{target}' of '{s.client}' is neither text nor at most {MOST_CATEGORIES} whole numbers, so it "
                "cannot be classes; use --task regression."
            )
    words = {category for s in summaries if s.target.words for category in s.target.categories or ()}
    numbers = {category for s in summaries if not s.target.words for category in s.target.categories or ()} - words
    labels = tuple(sorted(words | (numbers - meant(numbers, words).keys())))
    if len(labels) < 2:
        held = f" '{labels[0]}'" if labels else ""
        raise UserError(
            f"The target '{target}' has only one class{held} in all training rows, so there is nothing to learn; "
            "predict another column."
        )
    if len(labels) > MOST_CATEGORIES:
        raise too_many_classes(target, "all clients together", labels)
    return labels


def ordered(labels: Iterable[str]) -> tuple[str, ...]:
    """Classes that are all numbers by size, others by letter."""
    found = sorted(labels)
    try:
        return tuple(sorted(found, key=float))
    except ValueError:
        return tuple(found)
