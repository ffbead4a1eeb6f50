"""Preprocessing: how the columns of tables become the inputs and targets of a network, learnt from federated sums.

    client_summary(table) at each client -> combine(summaries) at the server -> Preprocessor.inputs(table) at each client

It is plain data: a run keeps it and does the same to new rows. Sites of a deployment may also agree on one beforehand,
in a file (`read_preprocessor`), and then tell nothing of their columns.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from bpfed._util.errors import UserError, quoted, unknown
from bpfed._util.files import from_json, renamed, to_json, write_whole
from bpfed.data.holdout import Holdout
from bpfed.data.tabular.recode import NOTHING, Recoding
from bpfed.data.tabular.statistics import (
    CATEGORIES_KEY,
    MOST_CATEGORIES,
    MOST_CODES,
    OTHER,
    ColumnStatistics,
    ColumnSummary,
    of_channels,
    of_numbers,
)
from bpfed.data.tabular.table import (
    AS_THEY_ARE,
    LARGEST,
    ArrayOptions,
    Categorical,
    Column,
    Table,
    column_names,
    written,
)
from bpfed.inference.tasks import Task, get_task, is_task

Standardise = Literal["federated", "local", "none"]
Codes = Literal["both", "number"]
Kind = Literal["number", "words", "channel"]
VERSION = 1
#: Columns or labels that an error lists.
SHOWN = 8
#: Words of a column that is true or false, in small letters.
TRUTH_VALUES = {"true": 1.0, "yes": 1.0, "y": 1.0, "t": 1.0, "false": 0.0, "no": 0.0, "n": 0.0, "f": 0.0}
#: Values of a column that a client must have for new ones to be judged by.
ENOUGH_VALUES = 20


@dataclass(frozen=True)
class Feature:
    """A column of the tables that is an input.

    Attributes:
        name: The column's name.
        kind: ``"number"`` (one input, and one per category as for words), ``"words"`` (one input per category, 1 for the
            row's own; for a word that is no category, `bpfed.data.tabular.statistics.OTHER` if that is one, else all 0), or
            ``"channel"`` (of images).
        mean: Mean over all clients; missing numbers become it.
        scale: Standard deviation over all clients; 0: the value is always the same and no input.
        categories: The words; of numbers that may be codes, the whole numbers that occur, as words.
        indicator: Whether there is one more input that is 1 where the value is missing.
    """

    name: str
    kind: Kind
    mean: float = 0.0
    scale: float = 1.0
    categories: tuple[str, ...] = ()
    indicator: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """A name for each of its inputs."""
        values = (
            *(() if self.kind == "words" else (self.name,)),
            *(f"{self.name} = {category}" for category in self.categories),
        )
        return (*(values if self.scale else ()), *((f"{self.name} missing",) if self.indicator else ()))

    @property
    def coded(self) -> bool:
        """Whether it is numbers that may be codes, with an input for each value beside the number."""
        return self.kind == "number" and bool(self.categories)


def _feature(levels: Iterable[str], **given: Any) -> Feature:
    """The column of a record."""
    return Feature(**given, categories=tuple(levels))


@dataclass(frozen=True)
class Preprocessor:
    """How tables become inputs and targets; the same at every client, or with statistics of each client's own.

    Attributes:
        target: The column to predict.
        task: Name of the task, such as ``"classification"``.
        features: The columns that are inputs, by name in order.
        labels: The classes; empty for regression.
        target_mean: Mean of a regression's target; predictions are in units of ``target_scale`` from here.
        target_scale: Its standard deviation.
        standardise: By whose mean and standard deviation numbers are scaled: ``"federated"`` (all clients'),
            ``"local"`` (the client's own) or ``"none"`` (not at all).
        client_column: The column that identifies the client, where all rows are in one table.
        ignore: Columns that are not inputs.
        missing: Words that stand for no value, beside those that always do, ``WORD`` or ``COLUMN=WORD`` each.
        holdout: How rows are held out, ``time:COLUMN`` or ``group:COLUMN`` of a column that is no input, or ``last``; None:
            at random.
        codes: Whether columns of few whole numbers could become coded ones (``"both"``) or not (``"number"``).
        recoding: What is done to the columns of a table before anything else.
        shape: Shape of an image, ``(c, h, w)``, or of a sequence, ``(c, 1, t)``; None for tables.
        resized: Whether images of files are resized to that shape.
        local: Mean and scale of each number, by client and column; only with ``"local"``.
        own: Mean and standard deviation of each client's own numbers, by client and column, of those that it has enough
            of: by these, new rows are judged.
    """

    target: str
    task: str
    features: tuple[Feature, ...]
    labels: tuple[str, ...] = ()
    target_mean: float = 0.0
    target_scale: float = 1.0
    standardise: Standardise = "federated"
    client_column: str | None = None
    ignore: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    holdout: str | None = None
    codes: Codes = "both"
    recoding: Recoding = NOTHING
    shape: tuple[int, ...] | None = None
    resized: bool = False
    local: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    own: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)

    @property
    def task_type(self) -> Task:
        """The task itself: what its targets are and what follows from it."""
        return get_task(self.task)

    @property
    def input_names(self) -> tuple[str, ...]:
        """A name for each input, ``[F]``; for images, for each channel."""
        return tuple(name for feature in self.features for name in feature.inputs)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Columns of the tables that are no inputs: those to ignore, and the one by which rows are held out."""
        by = Holdout.of(self.holdout)
        return self.ignore if by is None else (*self.ignore, *by.columns)

    @property
    def array_kind(self) -> Literal["image", "sequence"] | None:
        """What the inputs are, where they are no columns."""
        return None if self.shape is None else "sequence" if self.shape[1] == 1 else "image"

    @property
    def arrays(self) -> ArrayOptions:
        """How new images or sequences are read."""
        if self.shape is None:
            return AS_THEY_ARE
        high, wide = self.shape[1:]
        return ArrayOptions(self.array_kind, (high, wide) if self.resized else None, self.shape[0])

    @property
    def words(self) -> tuple[str, ...]:
        """Columns that are words, to be read as such from new files (`bpfed.data.read_table`)."""
        return tuple(feature.name for feature in self.features if feature.kind == "words")

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
            raise UserError(f"'{table.name}' contains images, but training was on tables; give a table.")
        if not any(f.name in table.columns for f in self.features):
            raise UserError(
                f"'{table.name}' has none of the columns that training used "
                f"({quoted([f.name for f in self.features], SHOWN)}); give a table with these."
            )
        found = [block for f in self.features for block in self._blocks(f, table, local)]
        return torch.from_numpy(np.column_stack(found).astype(np.float32))

    def targets(self, table: Table, target: str | None = None) -> Tensor:
        """Targets of these rows: classes ``[n]`` int64, or standardised numbers ``[n]`` float32.

        ``target`` is the column that they are in, where it is called otherwise than in training.
        """
        target = target or self.target
        column = table.column(target)
        table.check_filled(target)
        if not self.task_type.has_classes:
            if isinstance(column, Categorical):
                raise words_for_numbers(target, table.name, column.categories[0])
            made = torch.from_numpy((column - self.target_mean) / self.target_scale).to(self.task_type.dtype)
            if len(made) and (fault := self.task_type.fault(made, 0, f"in its column '{target}'")):
                raise UserError(f"'{table.name}' has {fault}.")
            return made
        words = column if isinstance(column, Categorical) else _as_words(column)
        place = {label: i for i, label in enumerate(self.labels)}
        if words is not column:
            place |= {category: place[text] for category, text in meant(words.categories, self.labels).items()}
        strange = [category for category in words.categories if category not in place]
        if strange:
            raise UserError(
                f"'{table.name}' has the '{target}' '{strange[0]}', which no training row has"
                f"{'' if target == self.target else f' as {self.target!r}'}; it must be one of "
                f"{quoted(self.labels, SHOWN)}."
            )
        return torch.from_numpy(
            np.array([place[category] for category in words.categories], dtype=np.int64)[words.codes]
        )

    def in_units(self, values: Tensor) -> Tensor:
        """Standardised targets (or predicted means) in the target's own units, float64: they may be far from 0."""
        return values.double() * self.target_scale + self.target_mean

    def joined(self, client: str, table: Table) -> Preprocessor:
        """The preprocessing with one more client, whose statistics are those of this table; its target is ignored."""
        if self.standardise != "local":
            return self
        return self.with_clients([(client, {f.name: _summary_of(f, table) for f in self.features})])

    def with_clients(self, clients: Iterable[tuple[str, Mapping[str, ColumnSummary]]]) -> Preprocessor:
        """The preprocessing with statistics of these clients' own, where it is local."""
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

    def judged_by(self, summaries: Iterable[ColumnStatistics]) -> Preprocessor:
        """The preprocessing with what these clients' own numbers are like, to judge new rows of theirs by."""
        numbers = {f.name for f in self.features if f.kind == "number" and f.scale}
        own = {
            s.client: {
                name: (told.mean, told.scale)
                for name, told in s.columns.items()
                if name in numbers and told.count >= ENOUGH_VALUES and told.scale
            }
            for s in summaries
        }
        return replace(self, own={**self.own, **own})

    def alone(self, client: str) -> Preprocessor:
        """What one client needs: of the clients' own statistics only its own, or everybody's where it has none."""
        mine = replace(self, own={client: self.own[client]} if client in self.own else {})
        if self.standardise != "local":
            return mine
        known = mine if client in self.local else mine.with_clients([(client, {})])
        return replace(known, local={client: known.local[client]})

    def settings(self) -> dict[str, Any]:
        """What a configuration has to say so that the same files give the same data."""
        return {
            "target": self.target,
            "client_column": self.client_column,
            "task": self.task,
            "standardise": self.standardise,
            "codes": self.codes,
            "holdout": self.holdout,
            "ignore": ",".join(self.ignore) or None,
            "missing": ",".join(self.missing) or None,
            "input": self.array_kind,
            "image_size": "x".join(map(str, self.shape[1:])) if self.shape is not None and self.resized else None,
            **self.recoding.settings(),
        }

    def record(self) -> dict[str, Any]:
        """As plain data for JSON."""
        features = [renamed(asdict(feature), {"categories": CATEGORIES_KEY}) for feature in self.features]
        return {"version": VERSION, **asdict(self), "features": features}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Preprocessor:
        """The preprocessing that gave this record.

        Raises:
            UserError: It is damaged, or of another version.
        """
        try:
            made = cls._parsed(record)
            made._check_types()
            made._check_numbers()
            return made
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(f"The preprocessing's record is damaged ({error}); train again.") from error

    @classmethod
    def _parsed(cls, record: Mapping[str, Any]) -> Preprocessor:
        given = dict(record)
        version = given.pop("version", None)
        if version != VERSION:
            raise UserError(
                f"The preprocessing has version {version}, but this bpfed reads version {VERSION}; use the bpfed that "
                "wrote it."
            )
        for key in ("labels", "ignore"):
            given[key] = tuple(given[key])
        given["missing"] = tuple(given.get("missing", ()))  # since 0.7
        given.setdefault("codes", "number")  # since 0.9
        said = given.get("recoding", {})  # since 0.11
        given["recoding"] = Recoding(**{key: tuple(value) for key, value in said.items()})
        given["shape"] = None if given["shape"] is None else tuple(given["shape"])
        given["features"] = tuple(_feature(**f) for f in given["features"])
        for key in ("local", "own"):
            given[key] = {
                client: {name: (float(mean), float(scale)) for name, (mean, scale) in own.items()}
                for client, own in given.get(key, {}).items()
            }
        return cls(**given)

    def _check_types(self) -> None:
        """Raise a `ValueError` unless names and words are texts and choices are known ones; a `UserError` for a hold-out."""
        named = [self.client_column, self.holdout]
        words = [self.target, *self.labels, *self.ignore, *self.missing, *(name for name in named if name is not None)]
        words += [word for f in self.features for word in (f.name, *f.categories)]
        words += [word for listed in asdict(self.recoding).values() for word in listed]
        words += [word for own in (self.local, self.own) for who, columns in own.items() for word in (who, *columns)]
        if not all(isinstance(word, str) for word in words):
            raise ValueError("a name or a word in it is no text")
        if self.standardise not in get_args(Standardise) or self.codes not in get_args(Codes):
            raise ValueError("its standardise or codes is none that is known")
        for f in self.features:
            if f.kind not in get_args(Kind) or type(f.indicator) is not bool:
                raise ValueError(f"'{f.name}' is no number, word or channel, or its indicator is not true or false")
            if f.coded and not all(map(whole, f.categories)):
                raise ValueError(f"the codes of '{f.name}' are not whole numbers")
        if self.shape is not None and not (len(self.shape) == 3 and all(type(n) is int and n > 0 for n in self.shape)):
            raise ValueError("its shape is none")
        if type(self.resized) is not bool:
            raise ValueError("its resized is not true or false")
        Holdout.of(self.holdout)
        _ = self.recoding.columns

    def _check_numbers(self) -> None:
        """Raise a `ValueError` unless everything can be scaled with these numbers."""
        pairs = [(f"'{f.name}'", f.mean, f.scale) for f in self.features]
        known = [*self.local.items(), *self.own.items()]
        pairs += [(f"'{name}' of '{who}'", *pair) for who, own in known for name, pair in own.items()]
        for what, mean, scale in [*pairs, (f"'{self.target}'", self.target_mean, self.target_scale)]:
            if not (math.isfinite(mean) and math.isfinite(scale) and scale >= 0.0):
                raise ValueError(f"{what} has mean {mean} and standard deviation {scale}")
        if not self.target_scale > 0.0:
            raise ValueError(f"'{self.target}' has standard deviation {self.target_scale}")

    def fault(self) -> str:
        """What no preprocessing can have, in words that end a sentence; empty: there is nothing."""
        names = [f.name for f in self.features]
        if not is_task(self.task) or self.standardise not in get_args(Standardise):
            return f"its task is {self.task!r} and its standardise {self.standardise!r}, which must be known ones"
        if self.codes not in get_args(Codes):
            return f"its codes are {self.codes!r}, which must be one of {quoted(get_args(Codes))}"
        texts = [self.target, *names, *self.labels, *(category for f in self.features for category in f.categories)]
        if not all(isinstance(text, str) and text for text in texts):
            return "a name, word or class of it is not a text"
        if not names or len(set(names)) < len(names):
            return "it has no column, or one twice"
        if self.target in names:
            return f"the target '{self.target}' is among its columns"
        classes = len(self.labels)
        if classes > len(set(self.labels)) or (2 <= classes <= MOST_CATEGORIES) is not self.task_type.labelled:
            return f"its {classes} classes are not 2 to {MOST_CATEGORIES} different ones, or none where targets are no classes"
        if not (_finite(self.target_mean) and _finite(self.target_scale) and self.target_scale > 0.0):
            return "mean and scale of its target are not numbers, the scale above 0"
        for f in self.features:
            if f.kind not in ("number", "words", "channel") or (f.kind == "channel") is (self.shape is None):
                return f"the kind of '{f.name}' is {f.kind!r}, which must be number or words, or channel for images"
            if not (_finite(f.mean) and _finite(f.scale) and f.scale >= 0.0) or type(f.indicator) is not bool:
                return f"mean and scale of '{f.name}' are not numbers, the scale 0 or more, or its indicator is not true or false"
            if f.coded and (len(f.categories) > MOST_CODES or not all(map(whole, f.categories))):
                return f"the {CATEGORIES_KEY} of '{f.name}' are not up to {MOST_CODES} whole numbers, such as \"3\""
            if (
                len(set(f.categories)) < len(f.categories)
                or len(f.categories) > MOST_CATEGORIES
                or (f.kind == "channel" and f.categories)
            ):
                return f"the {CATEGORIES_KEY} of '{f.name}' are not up to {MOST_CATEGORIES} different words"
            if not f.inputs:
                return f"'{f.name}' gives no input; leave it out"
        if self.shape is not None and set(names) != {f"channel {k}" for k in range((*self.shape, 0)[0])}:
            return f"its columns are not the channels of images of {self.shape}"
        return ""

    def _local(self, client: str | None) -> dict[str, tuple[float, float]]:
        if self.standardise == "none":
            return {f.name: (0.0, 1.0) for f in self.features}
        if self.standardise == "federated":
            return {f.name: (f.mean, f.scale) for f in self.features}
        if client is None:
            raise UserError(
                "Each client is standardised by its own statistics; pass client= to name whose rows these are."
            )
        if client not in self.local:
            raise unknown("client", client, self.local)
        return self.local[client]

    def _blocks(self, feature: Feature, table: Table, local: Mapping[str, tuple[float, float]]) -> list[np.ndarray]:
        column, found = table.columns.get(feature.name), []
        missing = table.missing(feature.name)
        if feature.kind == "words":
            if column is None or (not isinstance(column, Categorical) and missing.all()):
                words = Categorical(np.full(table.rows, -1), ())
            else:
                words = column if isinstance(column, Categorical) else _as_words(column)
            if feature.scale:
                place = {category: i for i, category in enumerate(feature.categories)}
                rest = place.get(OTHER, -1)
                rows = np.array(
                    [*(place.get(category, rest) for category in words.categories), -1]
                )  # the last: missing
                found.append(np.vstack([np.eye(len(place)), np.zeros(len(place))])[rows[words.codes]])
        elif feature.scale:
            mean, scale = local[feature.name]
            # Missing numbers take the mean: the client's own where each is standardised by itself.
            fill = feature.mean if self.standardise == "none" else mean
            values = _numbers(column, table, feature.name)
            found.append((np.where(np.isnan(values), fill, values) - mean) / scale)
            if feature.categories:
                found.append((values[:, None] == np.array(feature.categories, dtype=np.float64)).astype(np.float64))
        if feature.indicator:
            found.append(missing.astype(np.float64))
        return found

    def _images(self, table: Table, local: Mapping[str, tuple[float, float]]) -> Tensor:
        assert self.shape is not None
        if table.images is None or tuple(table.images.shape[1:]) != self.shape:
            held = "a table" if table.images is None else array_words(table.images.shape[1:])
            raise UserError(
                f"'{table.name}' contains {held}, but training was on {array_words(self.shape)}; give such ones."
            )
        scaling = np.array([local[f.name] for f in self.features], dtype=np.float32)
        if self.standardise == "none" and table.images.dtype == np.uint8:
            scaling[:] = 127.5  # bytes to -1 .. 1
        centre, spread = scaling.T.reshape(2, -1, 1, 1)
        return torch.from_numpy((table.images.astype(np.float32) - centre) / spread)


def array_words(shape: Sequence[int]) -> str:
    """Images or sequences of this shape, in words."""
    channels, high, wide = shape
    return f"sequences of [{wide}, {channels}]" if high == 1 else f"images of {(channels, high, wide)}"


def write_preprocessor(path: Path, preprocessor: Preprocessor) -> str:
    """Write the preprocessing as a file that people can read and sites can agree on; gives back its `digest`.

    Nothing of single clients is in it: neither their own statistics nor the column that names them.
    """
    record = preprocessor.record()
    left_out = ("local", "client_column", "missing", "codes", "holdout", "recoding", "own", "resized")
    content = to_json({key: value for key, value in record.items() if key not in left_out})
    write_whole(path, content)
    return digest(content.encode())


def read_preprocessor(path: Path) -> tuple[Preprocessor, str]:
    """The preprocessing in a file that was written by `write_preprocessor` or by hand, and its `digest`.

    It must have ``target``, ``task``, ``features`` (each with ``name`` and ``kind``) and, for classes, ``labels``. What
    else is left out has the default of `Preprocessor` and `Feature`.

    Raises:
        UserError: It cannot be read, or is none.
    """
    try:
        content = path.read_bytes()
        found = from_json(content)
        defaults = {"version": VERSION, "labels": (), "ignore": (), "codes": "both", "shape": None}
        features = [{CATEGORIES_KEY: (), **feature} for feature in found["features"]]
        if any(key in found for key in ("local", "client_column", "missing", "holdout", "recoding", "own")):
            raise ValueError("local, client_column, missing, holdout, recoding and own are not for all sites")
        made = Preprocessor._parsed({**defaults, **found, "features": features, "local": {}})
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror}); give a preprocessing file.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, UserError) as error:
        raise UserError(
            f"'{path}' is not a preprocessing file ({error}); make one with 'bpfed data prepare'."
        ) from error
    if why := made.fault():
        raise UserError(
            f"'{path}' is not a preprocessing file: {why}; correct it, or make one with 'bpfed data prepare'."
        )
    return made, digest(content)


def digest(content: bytes) -> str:
    """SHA-256 of a file, by which sites know that they have agreed on the same."""
    return hashlib.sha256(content).hexdigest()


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST  # which no NaN is


def _summary_of(feature: Feature, table: Table) -> ColumnSummary:
    """A newcomer's summary of one feature."""
    if feature.kind == "channel":
        if table.images is None:
            raise UserError(f"'{table.name}' contains a table, but training was on images; give images.")
        return of_channels(table.images).get(feature.name, ColumnSummary(0, 0))
    if feature.kind == "words":
        return ColumnSummary(0, 0)
    values = _numbers(table.columns.get(feature.name), table, feature.name)
    return of_numbers(values[~np.isnan(values)], 0)


def _numbers(column: Column | None, table: Table, name: str) -> np.ndarray:
    if column is None or (isinstance(column, Categorical) and not column.categories):
        return np.full(table.rows, np.nan)
    if isinstance(column, Categorical):
        raise words_for_numbers(name, table.name, column.categories[0])
    return column


def _as_words(column: np.ndarray) -> Categorical:
    return Categorical.of([written(v) for v in column.tolist()])


def whole(word: str) -> bool:
    """Whether this is a whole number, as `written` writes it."""
    try:
        return float(word).is_integer() and written(float(word)) == word
    except (ValueError, OverflowError):
        return False


def meant(numbers: Iterable[str], words: Iterable[str]) -> dict[str, str]:
    """The one of these words that is each number written otherwise, as ``250.00`` is 250; none where several are.

    Whether a column is numbers is seen file by file: where one has ``250.00`` alone and another ``I10`` beside it, the
    same class is a number here and a word there.
    """
    spelt: dict[float, list[str]] = {}
    for word in words:
        with contextlib.suppress(ValueError):
            spelt.setdefault(float(word), []).append(word)
    found = {number: spelt.get(float(number), []) for number in numbers}
    return {number: same[0] for number, same in found.items() if len(same) == 1}


def words_for_numbers(name: str, where: str, word: str) -> UserError:
    """A `UserError` for a column with words where numbers must be."""
    return UserError(f"Column '{name}' of '{where}' must be numeric, but has '{word}'; correct it.")


# --- Targets in several columns ---------------------------------------------------------------------------------------


def gathered(table: Table, target: str | None, task: str | None) -> Table:
    """The table with one column, named ``target``, in place of the several that its name lists with commas between them.

    It is unchanged if it has a column of that name. What the numbers in the new column say is the task's matter
    (`bpfed.inference.tasks.Task.packed`); a row that lacks one of the columns lacks it.
    """
    kind = get_task(task) if task is not None else None
    names = tuple(column_names(target))
    if target is None or target in table.columns:
        if kind is not None and kind.packed_from != 1 and target is not None and "," not in target:
            raise UserError(f"--task {task} predicts from several columns; name them with {kind.packed_hint}.")
        return table
    if len(names) < 2:
        return table
    several = f"{quoted(names)} are {len(names)} columns"
    if kind is None or kind.packed_from == 1:
        raise UserError(f"{several}, but one is predicted; name one as --target, or use --task survival or multilabel.")
    if kind.packed_from not in (0, len(names)):
        raise UserError(f"{several}, but --task {task} needs {kind.packed_from}; use {kind.packed_hint}.")
    # All columns of a set of labels are truth values; of a time to event the second is.
    parts = np.column_stack(
        [_truth(table, name) if i or not kind.packed_from else _times(table, name) for i, name in enumerate(names)]
    )
    if fault := kind.packing_fault(names, parts):
        raise UserError(f"'{table.name}' has {fault}.")
    packed = np.where(np.isnan(parts).any(1), np.nan, kind.packed(parts))
    kept = {name: column for name, column in table.columns.items() if name not in names}
    return replace(table, columns={**kept, target: packed})


def _times(table: Table, name: str) -> np.ndarray:
    column = table.column(name)
    if isinstance(column, Categorical):
        raise words_for_numbers(name, table.name, column.categories[0] if column.categories else "")
    return column


def _truth(table: Table, name: str) -> np.ndarray:
    """A column of truth values as 1 and 0, NaN where it is missing."""
    column = table.column(name)
    if isinstance(column, Categorical):
        values = np.array([*(TRUTH_VALUES.get(category.casefold(), 2.0) for category in column.categories), np.nan])[
            column.codes
        ]
    else:
        values = column
    strange = np.flatnonzero(~np.isnan(values) & (values != 0.0) & (values != 1.0))
    if len(strange):
        raise UserError(
            f"Column '{name}' of '{table.name}' must be 0 or 1 (or no and yes), but has '{table.words(name)[strange[0]]}' "
            f"in row {strange[0] + 1}; correct it."
        )
    return values
