"""Preparation: how the columns of tables become the inputs and targets of a network, learnt from federated sums.

    client_summary(table) at each client  ->  combine(summaries) at the server  ->  Preparation.inputs(table) at each client

A summary holds counts, means, sums of squares and the words that occur in a client's training rows; never a row. Test rows
are in no summary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from bpfed.data.federated import Task
from bpfed.data.table import Column, Table, Words, written
from bpfed.errors import UserError, unknown

Standardise = Literal["federated", "local", "none"]
VERSION = 1
#: Whole numbers with more values than this are a regression, unless the task is given.
MOST_WHOLE = 20
#: A column (or target) with more words than this is text or an identity and no category.
MOST_LEVELS = 100
#: The column that says which rows are for training and which for testing.
SPLIT = "split"


@dataclass(frozen=True)
class ColumnSummary:
    """What a client tells of one column.

    Attributes:
        count: Number of values.
        missing: Number of rows without one.
        mean: Mean of the numbers.
        squares: Sum of their squared distances from the mean. (Count, mean and this are sums of values and squares in
            a form that rounding does not harm.)
        levels: The words that occur, or the distinct whole numbers of a target; None for other numbers.
        words: Whether it is a column of words.
    """

    count: int
    missing: int
    mean: float = 0.0
    squares: float = 0.0
    levels: tuple[str, ...] | None = None
    words: bool = False

    @property
    def scale(self) -> float:
        """Standard deviation, 0 where all values are the same (but for rounding)."""
        sd = math.sqrt(self.squares / self.count) if self.count else 0.0
        return sd if sd > 1e-9 * abs(self.mean) else 0.0

    def __add__(self, other: ColumnSummary) -> ColumnSummary:
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * other.count / count if count else 0.0
        squares = self.squares + other.squares + (apart**2 * self.count * other.count / count if count else 0.0)
        known = [s.levels for s in (self, other) if s.count]
        levels = None if None in known else tuple(sorted({w for k in known if k for w in k}))
        return ColumnSummary(count, self.missing + other.missing, mean, squares, levels, self.words or other.words)


@dataclass(frozen=True)
class Summary:
    """What a client tells the server before training, and all that it tells.

    Attributes:
        client: Its name.
        rows: Number of its training rows.
        columns: A summary of each column, by name; of images one of each channel.
        target: The target's.
        shape: Shape of an image, ``(c, h, w)``; None for tables.
    """

    client: str
    rows: int
    columns: dict[str, ColumnSummary]
    target: ColumnSummary
    shape: tuple[int, ...] | None = None

    def record(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Summary:
        """The summary that gave this record."""
        columns = {name: _column_summary(c) for name, c in record["columns"].items()}
        shape = tuple(record["shape"]) if record["shape"] else None
        return cls(record["client"], record["rows"], columns, _column_summary(record["target"]), shape)


def client_summary(
    table: Table, target: str, *, client: str | None = None, task: Task | None = None, ignore: Iterable[str] = ()
) -> Summary:
    """Summarise a client's training rows.

    Args:
        table: Its training rows, and no others.
        target: The column to predict.
        client: The client's name; left out, the table's.
        task: What the target is; left out, it shows.
        ignore: Columns that are no inputs.
    """
    aim = _summary(table.column(target), table, target)
    values = table.column(target)
    if not isinstance(values, Words) and task != "regression":
        distinct = np.unique(values[~np.isnan(values)])
        few = len(distinct) <= (MOST_WHOLE if task is None else MOST_LEVELS) and (distinct == np.trunc(distinct)).all()
        aim = replace(aim, levels=tuple(written(v) for v in distinct.tolist()) if few else None)
    shape = None
    if table.images is not None:
        shape, columns = tuple(table.images.shape[1:]), _channels(table.images)
    else:
        left = table.without([target, SPLIT, *ignore])
        columns = {name: _summary(column, table, name) for name, column in left.columns.items()}
    return Summary(client or table.name, table.rows, columns, aim, shape)


@dataclass(frozen=True)
class Feature:
    """A column of the tables that is an input.

    Attributes:
        name: The column's name.
        kind: ``"number"`` (one input), ``"words"`` (one input per level, 1 for the row's own; all 0 for a level that was
            not seen in training), or ``"channel"`` (of images).
        mean: Mean over all clients; missing numbers become it.
        scale: Standard deviation over all clients; 0: the value is always the same and no input.
        levels: The words.
        indicator: Whether there is one more input that is 1 where the value is missing.
    """

    name: str
    kind: Literal["number", "words", "channel"]
    mean: float = 0.0
    scale: float = 1.0
    levels: tuple[str, ...] = ()
    indicator: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """A name for each of its inputs."""
        values = tuple(f"{self.name} = {level}" for level in self.levels) if self.kind == "words" else (self.name,)
        return (*(values if self.scale else ()), *((f"{self.name} missing",) if self.indicator else ()))


@dataclass(frozen=True)
class Preparation:
    """How tables become inputs and targets; the same at every client, or with statistics of each client's own.

    Attributes:
        target: The column to predict.
        task: ``"classification"`` or ``"regression"``.
        features: The columns that are inputs, by name in order.
        labels: The classes; empty for regression.
        target_mean: Mean of a regression's target; predictions are in units of ``target_scale`` from here.
        target_scale: Its standard deviation.
        standardise: By whose mean and standard deviation numbers are scaled: ``"federated"`` (all clients'), ``"local"``
            (the client's own) or ``"none"`` (not at all).
        client_column: The column that says whose a row is, where one table has all.
        ignore: Columns that are no inputs.
        shape: Shape of an image, ``(c, h, w)``; None for tables.
        local: Mean and scale of each number, by client and column; only with ``"local"``.
    """

    target: str
    task: Task
    features: tuple[Feature, ...]
    labels: tuple[str, ...] = ()
    target_mean: float = 0.0
    target_scale: float = 1.0
    standardise: Standardise = "federated"
    client_column: str | None = None
    ignore: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    local: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)

    @property
    def input_names(self) -> tuple[str, ...]:
        """A name for each input, ``[F]``; for images, for each channel."""
        return tuple(name for feature in self.features for name in feature.inputs)

    def inputs(self, table: Table, client: str | None = None) -> Tensor:
        """Inputs of these rows, ``[n, F]`` float32 (``[n, c, h, w]`` for images).

        Args:
            table: Rows with the columns of training, in any order; others are ignored, one that lacks is all missing.
            client: Whose rows; needed where each client is standardised by itself.
        """
        local = self._local(client)
        if self.shape is not None:
            return self._images(table, local)
        if table.images is not None:
            raise UserError(f"'{table.name}' holds images, but training was on tables; give a table.")
        if not any(f.name in table.columns for f in self.features):
            raise UserError(
                f"'{table.name}' has none of the columns that training used ({_some(f.name for f in self.features)}); "
                "give a table with these."
            )
        found = [block for f in self.features for block in self._blocks(f, table, local)]
        return torch.from_numpy(np.column_stack(found).astype(np.float32))

    def targets(self, table: Table) -> Tensor:
        """Targets of these rows: classes ``[n]`` int64, or standardised numbers ``[n]`` float32."""
        column = table.column(self.target)
        if table.missing(self.target).any():
            rows = np.flatnonzero(table.missing(self.target))
            raise UserError(
                f"{len(rows)} of the {table.rows} rows of '{table.name}' have no '{self.target}', first row "
                f"{rows[0] + 1}; fill it in or remove them."
            )
        if self.task == "regression":
            if isinstance(column, Words):
                raise _words_for_numbers(self.target, table.name, column.levels[0])
            return torch.from_numpy(((column - self.target_mean) / self.target_scale).astype(np.float32))
        words = column if isinstance(column, Words) else _as_words(column)
        place = {label: i for i, label in enumerate(self.labels)}
        strange = [level for level in words.levels if level not in place]
        if strange:
            raise UserError(
                f"'{table.name}' has the '{self.target}' '{strange[0]}', which no training row has; it must be one of "
                f"{_some(self.labels)}."
            )
        return torch.from_numpy(np.array([place[level] for level in words.levels], dtype=np.int64)[words.codes])

    def in_units(self, values: Tensor) -> Tensor:
        """Standardised targets (or predicted means) in the target's own units."""
        return values * self.target_scale + self.target_mean

    def joined(self, client: str, table: Table) -> Preparation:
        """The preparation with one more client, whose statistics are those of this table; its target is not looked at."""
        if self.standardise != "local":
            return self
        return self.with_clients([(client, {f.name: _summary_of(f, table) for f in self.features})])

    def with_clients(self, clients: Iterable[tuple[str, Mapping[str, ColumnSummary]]]) -> Preparation:
        """The preparation with statistics of these clients' own, where it is local."""
        if self.standardise != "local":
            return self
        known = dict(self.local)
        for client, columns in clients:
            own = {}
            for feature in (f for f in self.features if f.kind != "words"):
                told = columns.get(feature.name, ColumnSummary(0, 0))
                # A client that has no value of a column, or one value only, cannot tell its spread.
                own[feature.name] = (told.mean if told.count else feature.mean, told.scale or feature.scale)
            known[client] = own
        return replace(self, local=known)

    def settings(self) -> dict[str, Any]:
        """What a configuration has to say so that the same files give the same data."""
        return {
            "target": self.target,
            "client_column": self.client_column,
            "task": self.task,
            "standardise": self.standardise,
            "ignore": ",".join(self.ignore) or None,
        }

    def record(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Preparation:
        """The preparation that gave this record.

        Raises:
            UserError: It is damaged, or of another version.
        """
        given = dict(record)
        version = given.pop("version", None)
        if version != VERSION:
            raise UserError(
                f"The preparation is of version {version} and this bpfed reads version {VERSION}; use the bpfed that wrote it."
            )
        try:
            for key in ("labels", "ignore"):
                given[key] = tuple(given[key])
            given["shape"] = None if given["shape"] is None else tuple(given["shape"])
            given["features"] = tuple(Feature(**{**f, "levels": tuple(f["levels"])}) for f in given["features"])
            given["local"] = {
                client: {name: (float(mean), float(scale)) for name, (mean, scale) in own.items()}
                for client, own in given["local"].items()
            }
            return cls(**given)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"The preparation's record is damaged ({error}); train again.") from error

    def _local(self, client: str | None) -> dict[str, tuple[float, float]]:
        if self.standardise == "none":
            return {f.name: (0.0, 1.0) for f in self.features}
        if self.standardise == "federated":
            return {f.name: (f.mean, f.scale) for f in self.features}
        if client is None:
            raise UserError("Each client is standardised by its own statistics; say whose rows these are.")
        if client not in self.local:
            raise unknown("client", client, self.local)
        return self.local[client]

    def _blocks(self, feature: Feature, table: Table, local: Mapping[str, tuple[float, float]]) -> list[np.ndarray]:
        column, found = table.columns.get(feature.name), []
        missing = table.missing(feature.name)
        if feature.kind == "words":
            if column is None or (not isinstance(column, Words) and missing.all()):
                words = Words(np.full(table.rows, -1), ())
            else:
                words = column if isinstance(column, Words) else _as_words(column)
            if feature.scale:
                place = {level: i for i, level in enumerate(feature.levels)}
                rows = np.array([*(place.get(level, -1) for level in words.levels), -1])  # the last: missing
                found.append(np.vstack([np.eye(len(place)), np.zeros(len(place))])[rows[words.codes]])
        elif feature.scale:
            mean, scale = local[feature.name]
            # Missing numbers take the mean: the client's own where each is standardised by itself.
            fill = feature.mean if self.standardise == "none" else mean
            values = _numbers(column, table, feature.name)
            found.append((np.where(np.isnan(values), fill, values) - mean) / scale)
        if feature.indicator:
            found.append(missing.astype(np.float64))
        return found

    def _images(self, table: Table, local: Mapping[str, tuple[float, float]]) -> Tensor:
        if table.images is None or tuple(table.images.shape[1:]) != self.shape:
            held = "a table" if table.images is None else f"images of {table.images.shape[1:]}"
            raise UserError(
                f"'{table.name}' holds {held}, but training was on images of {self.shape}; give such images."
            )
        scaling = np.array([local[f.name] for f in self.features], dtype=np.float32)
        if self.standardise == "none" and table.images.dtype == np.uint8:
            scaling[:] = 127.5  # bytes to -1 .. 1
        centre, spread = scaling.T.reshape(2, -1, 1, 1)
        return torch.from_numpy((table.images.astype(np.float32) - centre) / spread)


def combine(
    summaries: Sequence[Summary],
    target: str,
    *,
    task: Task | None = None,
    standardise: Standardise = "federated",
    client_column: str | None = None,
    ignore: Iterable[str] = (),
) -> Preparation:
    """Make the preparation of a federation from what its clients tell.

    Raises:
        UserError: The clients' columns cannot be brought together, or there is nothing to learn.
    """
    if standardise not in get_args(Standardise):
        raise unknown("way to standardise", str(standardise), get_args(Standardise))
    if task is not None and task not in get_args(Task):
        raise unknown("task", str(task), get_args(Task))
    _alike([(s.client, s.target) for s in summaries], target, classes=task == "classification")
    aim = reduce(ColumnSummary.__add__, (s.target for s in summaries))
    decided = task or ("classification" if aim.words or 0 < len(aim.levels or ()) <= MOST_WHOLE else "regression")
    labels: tuple[str, ...] = ()
    if decided == "classification":
        labels = _ordered(_classes(summaries, aim, target))
    elif aim.words:
        where = next(s for s in summaries if s.target.words and s.target.levels)
        raise _words_for_numbers(target, where.client, (where.target.levels or ("",))[0])
    elif not aim.scale:
        raise UserError(f"The target '{target}' is the same in all rows, so there is nothing to predict.")

    shapes = {s.shape: s.client for s in summaries}
    if len(shapes) > 1:
        one, two = [
            f"'{who}' has {'a table' if shape is None else f'images of {shape}'}" for shape, who in shapes.items()
        ][:2]
        raise UserError(f"Clients differ in what their inputs are: {one}, {two}; give all of them the same.")
    (shape,) = shapes
    names = sorted({name for s in summaries for name in s.columns})
    features = [_feature(name, summaries, shape is not None) for name in names]
    made = Preparation(
        target=target,
        task=decided,
        features=tuple(f for f in features if f.inputs),
        labels=labels,
        target_mean=aim.mean if decided == "regression" else 0.0,
        target_scale=aim.scale if decided == "regression" else 1.0,
        standardise=standardise,
        client_column=client_column,
        ignore=tuple(ignore),
        shape=shape,
    )
    if not made.features:
        raise UserError(f"There is no column beside '{target}' whose values differ, so there is nothing to learn from.")
    return made.with_clients((s.client, s.columns) for s in summaries)


def _feature(name: str, summaries: Sequence[Summary], image: bool) -> Feature:
    # A client without the column has it all missing.
    told = [(s.client, s.columns.get(name, ColumnSummary(0, s.rows))) for s in summaries]
    _alike(told, name)
    total = reduce(ColumnSummary.__add__, (column for _, column in told))
    if image:
        return Feature(name, "channel", total.mean, total.scale or 1.0)
    # Where nothing is known, or nothing is missing, an indicator would be the same everywhere.
    indicator = bool(total.missing and total.count)
    if total.words:
        levels = total.levels or ()
        if len(levels) > MOST_LEVELS:
            raise _too_many(name, "all clients together", len(levels))
        return Feature(name, "words", 0.0, float(len(levels) > 1), levels, indicator)
    return Feature(name, "number", total.mean, total.scale, (), indicator)


def _alike(told: Iterable[tuple[str, ColumnSummary]], name: str, classes: bool = False) -> None:
    """Numbers everywhere or words everywhere; as classes, numbers may pass for words."""
    numbers, words = None, None
    for client, column in told:
        if column.count and column.words:
            words = words or (client, (column.levels or ("",))[0])
        elif column.count:
            numbers = numbers or client
    if numbers is not None and words is not None and not classes:
        raise UserError(
            f"Column '{name}' is numbers at '{numbers}' but words at '{words[0]}', such as '{words[1]}'; write it the "
            "same way everywhere."
        )


def _classes(summaries: Sequence[Summary], aim: ColumnSummary, target: str) -> tuple[str, ...]:
    for s in summaries:
        if s.target.count and s.target.levels is None:
            raise UserError(
                f"The target '{target}' of '{s.client}' is not up to {MOST_LEVELS} whole numbers or words, so it is no "
                "class; say task 'regression'."
            )
    labels = aim.levels or ()
    if len(labels) < 2:
        held = f" '{labels[0]}'" if labels else ""
        raise UserError(
            f"The target '{target}' has only one class{held} in all training rows, so there is nothing to learn."
        )
    if len(labels) > MOST_LEVELS:
        raise _too_many(target, "all clients together", len(labels))
    return labels


def _summary(column: Column, table: Table, name: str) -> ColumnSummary:
    missing = int(np.count_nonzero(table.missing(name)))
    count = table.rows - missing
    if isinstance(column, Words):
        if len(column.levels) > MOST_LEVELS:
            raise _too_many(name, f"'{table.name}'", len(column.levels))
        return ColumnSummary(count, missing, levels=column.levels, words=bool(count))
    return _moments(column[~np.isnan(column)], missing)


def _moments(values: np.ndarray, missing: int) -> ColumnSummary:
    if not len(values):
        return ColumnSummary(0, missing)
    mean = float(values.mean(dtype=np.float64))
    return ColumnSummary(len(values), missing, mean, float(np.square(values - mean, dtype=np.float64).sum()))


def _channels(images: np.ndarray) -> dict[str, ColumnSummary]:
    return {f"channel {k}": _moments(images[:, k].reshape(-1).astype(np.float64), 0) for k in range(images.shape[1])}


def _summary_of(feature: Feature, table: Table) -> ColumnSummary:
    """A newcomer's summary of one feature."""
    if feature.kind == "channel":
        if table.images is None:
            raise UserError(f"'{table.name}' holds a table, but training was on images; give images.")
        return _channels(table.images).get(feature.name, ColumnSummary(0, 0))
    if feature.kind == "words":
        return ColumnSummary(0, 0)
    values = _numbers(table.columns.get(feature.name), table, feature.name)
    return _moments(values[~np.isnan(values)], 0)


def _numbers(column: Column | None, table: Table, name: str) -> np.ndarray:
    if column is None or (isinstance(column, Words) and not column.levels):
        return np.full(table.rows, np.nan)
    if isinstance(column, Words):
        raise _words_for_numbers(name, table.name, column.levels[0])
    return column


def _as_words(column: np.ndarray) -> Words:
    return Words.of([written(v) for v in column.tolist()])


def _ordered(labels: Iterable[str]) -> tuple[str, ...]:
    """Classes that are all numbers by size, others by letter."""
    found = sorted(labels)
    try:
        return tuple(sorted(found, key=float))
    except ValueError:
        return tuple(found)


def _some(words: Iterable[str], most: int = 8) -> str:
    found = [f"'{word}'" for word in words]
    return ", ".join(found[:most]) + (", ..." if len(found) > most else "")


def _column_summary(record: Mapping[str, Any]) -> ColumnSummary:
    return ColumnSummary(**{**record, "levels": None if record["levels"] is None else tuple(record["levels"])})


def _words_for_numbers(name: str, where: str, word: str) -> UserError:
    return UserError(f"Column '{name}' of '{where}' must be numbers, but has '{word}'; mend it.")


def _too_many(name: str, where: str, number: int) -> UserError:
    return UserError(
        f"Column '{name}' of {where} has {number} different words where {MOST_LEVELS} are the most; leave it out by "
        f"--ignore '{name}', or make it numbers."
    )
