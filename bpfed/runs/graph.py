"""A client's model as one module from raw inputs to predictions, which `torch.export` can record.

The module computes what `Client.predict` does with the same code: preprocessing of the inputs, the task's own prediction,
temperatures and calibrated sets. Weights are fixed: draws are made once, with the keys that prediction uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from bpfed._util.errors import UserError
from bpfed.data.datasets import names, source_of
from bpfed.data.sources.pooled import Entry, entry
from bpfed.data.tabular.preprocessing import Feature, Preprocessor
from bpfed.data.tabular.recode import MissingValues
from bpfed.data.tabular.statistics import OTHER
from bpfed.data.tabular.table import MISSING, TRUTH
from bpfed.inference import inputs
from bpfed.inference.inputs import Inputs
from bpfed.inference.predictive import (
    FixedDraws,
    GaussianPredictive,
    How,
    Mixture,
    PointPredictive,
    Prediction,
    Predictive,
    drawn_weights,
    members,
)
from bpfed.inference.rng import Purpose
from bpfed.inference.tasks import TargetColumn
from bpfed.methods.base import rows
from bpfed.nn.model import Model
from bpfed.runs.client import joined

if TYPE_CHECKING:
    from bpfed.data.federated import FederatedData
    from bpfed.runs.client import Client

#: Codes of a word that is missing; a word that training did not see has the number of words.
MISSING_CODE = -1
#: Draws whose weights are made at a time.
STACK = 64


#: Steps of a conversion to another unit.
STEPS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "*": torch.mul,
    "/": torch.div,
    "+": torch.add,
    "-": torch.sub,
}
#: Those that undo them.
UNDONE = {"*": STEPS["/"], "/": STEPS["*"], "+": STEPS["-"], "-": STEPS["+"]}


class Column(NamedTuple):
    """A column of the tables that the model takes.

    Attributes:
        name: As the client's files call it.
        feature: What training knows of it.
        number: Whether it is numbers; else words.
        place: Among the columns of its kind.
        gone: Words that stand for no value in this run, in small letters, beside those that always do.
    """

    name: str
    feature: Feature
    number: bool
    place: int
    gone: frozenset[str] = frozenset()

    @property
    def codes(self) -> dict[str, int]:
        """The code of each word that has one of its own: those of training, and those that stand for no value."""
        missing = MISSING | self.gone
        gone = {spelt for word in missing for spelt in (word, word.upper(), word.capitalize(), word.title(), "NaN")}
        found = dict.fromkeys(sorted(gone), MISSING_CODE)
        for code, category in enumerate(self.feature.categories):
            found |= {category: code}
            found |= {category.upper(): code, category.capitalize(): code} if category in TRUTH else {}
        return found


# --- Raw inputs to those of the network -------------------------------------------------------------------------------


def check_recoding(made: Preprocessor) -> None:
    """Raise a `UserError` if the run recodes columns in a way that a graph has no operations for."""
    if said := [key for key in ("map", "dates", "text") if getattr(made.recoding, key)]:
        raise UserError(
            f"The run recodes columns by --{said[0]}, which works on text and has no counterpart in an exported graph; "
            "use 'bpfed serve', or train on tables that are recoded already."
        )


class TableInputs(nn.Module):
    """Columns of a table, prepared as `Preprocessor.inputs` does.

    Args:
        made: Of the run.
        client: Whose rows.

    Raises:
        UserError: The run recodes columns in a way that a graph has no operations for.
    """

    mean: Tensor
    scale: Tensor
    fill: Tensor
    coded_column: Tensor
    coded_value: Tensor
    word_column: Tensor
    word_code: Tensor
    categories: Tensor
    other: Tensor
    order: Tensor

    def __init__(self, made: Preprocessor, client: str) -> None:
        super().__init__()
        self.made = made
        recoding = made.recoding
        check_recoding(made)
        renames, _, conversions, _ = recoding._parsed
        called = {r.new: r.column for r in renames if r.client in (None, client)}
        used = [f for f in made.features if f.inputs]
        numbers, words = ([f for f in used if (f.kind == "words") is kind] for kind in (False, True))
        gone = MissingValues.of(made.missing)
        self.columns = [
            Column(called.get(f.name, f.name), f, number, place, gone.words(f.name))
            for number, some in ((True, numbers), (False, words))
            for place, f in enumerate(some)
        ]
        mine = [c for c in conversions if c.client in (None, client)]
        self.steps = {f.name: [c for c in mine if c.column == f.name] for f in numbers}
        self.gone = {f.name: _as_numbers(gone.words(f.name)) for f in numbers}
        scaling = made._local(client)
        pairs = [scaling[f.name] for f in numbers]
        fill = [f.mean if made.standardise == "none" else pair[0] for f, pair in zip(numbers, pairs, strict=True)]
        self._constant("mean", [mean for mean, _ in pairs])
        self._constant("scale", [scale if f.scale else 1.0 for f, (_, scale) in zip(numbers, pairs, strict=True)])
        self._constant("fill", fill)
        coded = [(k, float(category)) for k, f in enumerate(numbers) if f.scale for category in f.categories]
        self._constant("coded_column", [k for k, _ in coded], torch.int64)
        self._constant("coded_value", [value for _, value in coded])
        spelt = [(k, code) for k, f in enumerate(words) if f.scale for code in range(len(f.categories))]
        self._constant("word_column", [k for k, _ in spelt], torch.int64)
        self._constant("word_code", [code for _, code in spelt], torch.int64)
        self._constant("categories", [len(f.categories) for f in words], torch.int64)
        rest = [f.categories.index(OTHER) if OTHER in f.categories else MISSING_CODE - 1 for f in words]
        self._constant("other", rest, torch.int64)
        self._constant("order", self._order(numbers, words), torch.int64)

    def _constant(self, name: str, values: list[Any], kind: torch.dtype = torch.float64) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=kind), persistent=True)

    def _order(self, numbers: list[Feature], words: list[Feature]) -> list[int]:
        """The place of each input of the network among the blocks of `forward`."""
        blocks = [
            *((f.name, "value") for f in numbers),
            *((f.name, f"category {category}") for f in numbers if f.scale for category in f.categories),
            *((f.name, "missing") for f in numbers),
            *((f.name, f"category {category}") for f in words if f.scale for category in f.categories),
            *((f.name, "missing") for f in words),
        ]
        place = {block: k for k, block in enumerate(blocks)}
        found = []
        for f in self.made.features:
            value = ["value"] if f.kind != "words" else []
            parts = [*value, *(f"category {category}" for category in f.categories)] if f.scale else []
            found += [place[f.name, part] for part in (*parts, *(["missing"] if f.indicator else []))]
        return found

    @property
    def numbers(self) -> list[Column]:
        """The columns of numbers."""
        return [column for column in self.columns if column.number]

    @property
    def words(self) -> list[Column]:
        """The columns of words."""
        return [column for column in self.columns if not column.number]

    def forward(self, numbers: Tensor | None, codes: Tensor | None) -> Tensor:
        """Inputs ``[n, F]`` of numbers ``[n, A]`` float64, NaN where missing, and codes of words ``[n, W]`` int64."""
        found: list[Tensor] = []
        if numbers is not None:
            numbers = self._recoded(numbers)
            gaps = numbers.isnan()
            found.append((torch.where(gaps, self.fill, numbers) - self.mean) / self.scale)
            if len(self.coded_column):
                found.append((numbers[:, self.coded_column] == self.coded_value).double())
            found.append(gaps.double())
        if codes is not None:
            known = torch.where(codes == self.categories, self.other, codes)
            if len(self.word_column):
                found.append((known[:, self.word_column] == self.word_code).double())
            found.append((codes == MISSING_CODE).double())
        return torch.cat(found, 1)[:, self.order].float()

    def _recoded(self, numbers: Tensor) -> Tensor:
        """Values that stand for none taken out, and other units."""
        if not any(self.gone.values()) and not any(self.steps.values()):
            return numbers
        found = []
        for column in self.numbers:
            values = numbers[:, column.place]
            for number in self.gone[column.feature.name]:
                values = torch.where(values == number, torch.nan, values)
            for conversion in self.steps[column.feature.name]:
                for sign, number in conversion.steps:
                    values = STEPS[sign](values, number)
            found.append(values)
        return torch.stack(found, 1)


def _as_numbers(words: frozenset[str]) -> list[float]:
    found = []
    for word in sorted(words):
        try:
            found.append(float(word))
        except ValueError:
            continue
    return found


class ArrayInputs(nn.Module):
    """Arrays of one shape: (x − centre) / spread, as training scaled them.

    Args:
        centre: A number, or one for each channel ``[c, 1, 1]``.
        spread: Likewise.
    """

    centre: Tensor
    spread: Tensor

    def __init__(self, centre: Tensor | float = 0.0, spread: Tensor | float = 1.0) -> None:
        super().__init__()
        self.register_buffer("centre", torch.as_tensor(centre, dtype=torch.float32))
        self.register_buffer("spread", torch.as_tensor(spread, dtype=torch.float32))

    @property
    def scaled(self) -> bool:
        """Whether it changes anything."""
        return bool((self.centre != 0.0).any() or (self.spread != 1.0).any())

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.centre) / self.spread


class Untouched(nn.Module):
    """Arrays that are what training had; several of them as the dict or tuple that the network takes.

    Args:
        example: Inputs of the run.
    """

    def __init__(self, example: Inputs) -> None:
        super().__init__()
        self.example = inputs.take(example, slice(0))

    def forward(self, *parts: Tensor) -> Inputs:
        if isinstance(self.example, Tensor):
            return parts[0]
        if isinstance(self.example, dict):
            return dict(zip(self.example, parts, strict=True))
        return tuple(parts)


def preprocessor_of(data: FederatedData, client: str) -> nn.Module:
    """What a client's raw inputs go through before the network."""
    made = data.preprocessor
    if made is not None and made.shape is None:
        return TableInputs(made, client)
    if made is not None:
        scaling = np.array([made._local(client)[f.name] for f in made.features], dtype=np.float32)
        centre, spread = torch.from_numpy(scaling.T.reshape(2, -1, 1, 1).copy())
        return ArrayInputs(centre, spread)
    source = source_of(data.name) if data.name in names() else ""
    known = entry(source) if source else None
    if isinstance(known, Entry) and isinstance(data.train.x, Tensor):
        return ArrayInputs(known.half, known.half)
    return Untouched(data.train.x)


# --- The network with fixed weights -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FixedModel(Model):
    """One network, some of whose weights are constants; it has no client axis of its own.

    Attributes:
        constants: By name, those that are not in the vector of weights.
        random: Names of those that have a distribution, for a single pass.
    """

    constants: tuple[tuple[str, Tensor], ...] = ()
    random: tuple[str, ...] = ()

    def stacked_outputs(self, weights: Tensor, x: Inputs) -> Tensor:
        return self.call(self.layout.unflatten(weights[0]), inputs.take(x, 0))[None]

    def call(self, parameters: dict[str, Tensor], x: Inputs, training: bool = False) -> Tensor:
        return super().call({**dict(self.constants), **parameters}, x, training)

    def random_names(self, sigma: Tensor) -> list[str]:
        return list(self.random)


class Operations(TorchFunctionMode):
    """Replaces operations that ONNX lacks by others that compute the same."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.linalg.cholesky_ex:
            return cholesky(*args), None
        if func is torch.special.ndtr:
            return 0.5 * (1.0 + torch.erf(args[0] * 0.5**0.5))
        return func(*args, **(kwargs or {}))


def cholesky(matrix: Tensor) -> Tensor:
    """The lower factor of positive definite matrices ``[..., K, K]``, column by column."""
    size = matrix.shape[-1]
    factor = torch.zeros_like(matrix[..., :0])
    for k in range(size):
        column = matrix[..., k]
        if k:
            column = column - (factor @ factor[..., k, :, None])[..., 0]
        below = torch.arange(size, device=matrix.device) >= k
        column = torch.where(below, column / column[..., k, None].sqrt(), 0.0)
        factor = torch.cat([factor, column[..., None]], -1)
    return factor


class Scorer(nn.Module):
    """From raw inputs to what a client predicts, all weights inside.

    Args:
        client: Whose model.
        how: As `Client.predict`.
        draws: As `Client.predict`; None: as many as in evaluation.
        level: Of sets and intervals.

    Attributes:
        outputs: Names of what it gives, in order.
    """

    def __init__(self, client: Client, how: How, draws: int | None, level: float) -> None:
        super().__init__()
        run = client.run
        federation, who = run.federation, torch.tensor([client.index])
        self.how, self.level = how, level
        self.draws = draws or federation.settings.eval_draws
        self.prepare = preprocessor_of(run.data, client.name)
        self.task = run.data.task_type
        made = run.data.preprocessor
        self.target = TargetColumn(
            run.data.class_names, *((0.0, 1.0) if made is None else (made.target_mean, made.target_scale))
        )
        key = federation.keys(0, Purpose.EVALUATION, who)
        with torch.no_grad():
            found = federation.method.predictive(federation.model, rows(federation.shared, 1), federation.ready(who))
            self.predictive, self.model = _fixed(federation.model, found, key, self.draws, how)
        self.network = self.model.module  # so that what is frozen in it is recorded as a parameter
        self.common = federation.calibration_temperature
        self.temperature, scores = client.calibration_for(how, self.draws)
        self.scores = None if scores is None else scores.fixed(level)
        self.unscored = client.unscored
        self.outputs: tuple[str, ...] = ()

    def finished(self, found: Prediction, shift: float = 0.0) -> dict[str, Tensor]:
        """What is given of a prediction ``[B, ...]`` that has all but sets, whose bounds may be shifted."""
        scores = self.scores if self.scores is None or not shift else self.scores.shifted(shift)
        return self.task.tensors(found.with_scores(scores, self.unscored), self.target, self.level)

    def forward(self, *raw: Tensor) -> tuple[Tensor, ...]:
        given: tuple[Tensor | None, ...] = raw
        if isinstance(self.prepare, TableInputs):
            left = list(raw)
            given = tuple(left.pop(0) if some else None for some in (self.prepare.numbers, self.prepare.words))
        x = self.prepare(*given)
        key = torch.zeros(1, 2, dtype=torch.int32)
        found = joined(
            [self.task.predict(self.model, self.predictive, inputs.take(x, None), key, self.draws, self.how)]
        )
        found = found.with_temperature(self.common) if self.common != 1.0 else found
        found = found.with_scores(self.scores, self.unscored)
        found = found.with_client_temperature(self.temperature) if self.temperature != 1.0 else found
        made = self.finished(found)
        self.outputs = tuple(made)
        return tuple(made.values())


def _fixed(model: Model, found: Predictive, key: Tensor, draws: int, how: How) -> tuple[Predictive, FixedModel]:
    """The predictive and the model of one network, on the CPU, with all that prediction would draw."""
    one = model.one
    if how == "single-pass":
        parts = [_on_cpu(part) for part in members(model, found)]
        gaussian = [part for part in parts if isinstance(part, GaussianPredictive)]
        random = {name for part in gaussian for name in one.random_names(part.weights.sigma)}
        fixed = _model(one, {}, [n for n in one.layout.names if n in random])
        return Mixture(tuple(parts)), fixed
    weights = torch.cat([part.cpu() for part in drawn_weights(model, found, key, draws, STACK)])
    if isinstance(found, PointPredictive):
        return FixedDraws(weights), _model(one, {}, [])
    # Weights that are the same in all draws are constants: what they compute is computed once.
    split = one.layout.unflatten(torch.arange(one.layout.total))
    kept = set(one.likelihood.parameters())
    same = [n for n, at in split.items() if n not in kept and bool((weights[:1, :, at] == weights[:, :, at]).all())]
    same = same if len(same) < len(split) else []
    constants = {n: weights[0, 0, split[n].flatten()].view(split[n].shape) for n in same}
    fixed = _model(one, constants, [])
    return FixedDraws(torch.cat([weights[:, :, split[n].flatten()] for n in fixed.layout.names], -1)), fixed


def _model(one: Model, constants: dict[str, Tensor], random: list[str]) -> FixedModel:
    """A network with these constants; its module is a copy that keeps nothing of the trained parameters."""
    own = {f.name: getattr(one, f.name) for f in fields(Model)}
    made = FixedModel(**own | {"backbone": None}).to("cpu")
    assert isinstance(made, FixedModel)
    layout = one.layout
    for name, parameter in made.module.named_parameters():
        if name in layout.names:
            parameter.data = torch.zeros(())
        parameter.requires_grad_(False)
    if constants:
        kept = [n for n in layout.names if n not in constants]
        shared = sum(n not in layout.personal_names for n in kept)
        layout = layout.arranged(kept, shared)
    return replace(made, layout=layout, constants=tuple(constants.items()), random=tuple(random))


def _on_cpu(predictive: Predictive) -> Predictive:
    moved: Predictive = tree_map(lambda t: t.detach().cpu() if isinstance(t, Tensor) else t, predictive)
    return moved


@contextmanager
def recording() -> Iterator[None]:
    """Inside, a `Scorer` runs with operations that a graph may have."""
    with torch.no_grad(), Operations():
        yield
