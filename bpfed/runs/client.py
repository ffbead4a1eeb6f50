"""One client of a run: its own model, ready to predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from bpfed._util.errors import UserError, check_count
from bpfed.data.tabular.rows import Rows, read_rows
from bpfed.engine.evaluate import BLOCK, calibrate
from bpfed.inference.predictive import Classified, How, Regressed, check_how, classify, regress
from bpfed.inference.rng import Purpose
from bpfed.methods.base import rows

if TYPE_CHECKING:
    from bpfed.data.federated import FederatedData
    from bpfed.runs.run import Run


class Client:
    """One client of a run: its own model, ready to predict."""

    #: Why it can have no calibration examples, in words; None where a run may keep some.
    unscored: ClassVar[str | None] = None

    def __init__(self, run: Run, index: int) -> None:
        self.run, self.index = run, index
        self._calibrated: dict[tuple[int, How, int], tuple[float, Tensor]] = {}

    def __repr__(self) -> str:
        data = self.run.data
        count = int(data.train.sizes[self.index])
        held = f": {count} training example{'' if count == 1 else 's'}" if count else ""  # a loaded run has no examples
        return f"<client '{self.name}' of '{data.name}'{held}>"

    @property
    def name(self) -> str:
        """The client's name."""
        return self.run.data.clients[self.index]

    def read(self, source: Any, columns: Sequence[str] | None = None) -> Rows:
        """Rows of a file or a data frame, prepared as this client's training data was.

        Unusual values go to the run's ``say``.

        Args:
            source: For a run on tables the path of a CSV, TSV, Parquet or NPZ file, a data frame of pandas or polars, a
                mapping of columns by name, a `bpfed.data.Table`, or an array ``[n, C]`` with ``columns``. For a run on
                arrays the path of an NPZ file with ``x``.
            columns: The names of an array's columns.

        Returns:
            Rows for `predict`: the inputs ``x``, ``[n, ...]``, and where they are unlike training (``unusual``).
        """
        return read_rows(self.run.data, source, self.name, self.run.say, columns=columns)

    def predict(
        self,
        x: Any,
        draws: int | None = None,
        how: How = "sample",
        *,
        columns: Sequence[str] | None = None,
        prepared: bool = False,
    ) -> Classified | Regressed:
        """Predict with this client's posterior.

        Args:
            x: For a run on tables what `read` takes or gives; an array needs ``columns``. For a run on arrays inputs
                ``[B, ...]``, scaled as those of training were, or the path of an NPZ file.
            draws: Weight draws to average; None: as many as in evaluation.
            how: ``sample`` averages over draws of all weights; ``single-pass`` draws none and is faster by far (see
                `bpfed.inference.predictive` for where it is exact).
            columns: For a run on tables, the names of an array's columns: they are scaled as in training.
            prepared: For a run on tables, whether ``x`` is prepared already, as ``run.data.test.x`` is.

        Returns:
            Probabilities (or mean) with total, epistemic and aleatoric uncertainty, ``[B]`` each, and prediction sets
            (or intervals) where the run kept calibration examples.
        """
        federation = self.run.federation
        if draws is not None:
            check_count("draws", draws)
        check_how(how)
        x = self._inputs(x, columns, prepared)
        who = torch.tensor([self.index])
        key = federation.keys(0, Purpose.EVALUATION, who)
        count = draws or federation.settings.eval_draws
        with torch.no_grad():
            predictive = federation.method.predictive(
                federation.model, rows(federation.shared, 1), federation.ready(who)
            )
            ask = classify if federation.data.task == "classification" else regress
            blocks = x.split(max(1, BLOCK // max(1, x[:1].numel())))
            parts = [
                ask(federation.model, predictive, block[None].to(federation.device), key, count, how=how)
                for block in blocks
            ]
        found = _joined(parts)
        if federation.calibration_temperature != 1.0:
            found = found.at(federation.calibration_temperature)
            found = replace(found, raw=None) if isinstance(found, Classified) else found
        temperature, scores = self._calibration(how, count)
        found = replace(found, scores=scores, unscored=self.unscored)
        found = found.at(temperature) if temperature != 1.0 and isinstance(found, Classified) else found
        _check_finite(found, self.name)
        return found

    def _inputs(self, x: Any, columns: Sequence[str] | None, prepared: bool) -> Tensor:
        """Inputs for the network, ``[B, ...]``; arrays without names are not taken for prepared ones."""
        data = self.run.data
        if isinstance(x, Rows):
            x = x.x
        elif isinstance(x, str | Path) or columns is not None or (data.preparation is not None and not prepared):
            if prepared:
                raise UserError("Only arrays without column names can be prepared already; omit prepared.")
            x = self.read(x, columns).x
        x = as_numbers(x, "inputs", torch.float32)
        check_shape(x, data)
        if not bool(torch.isfinite(x).all()):
            raise UserError("The inputs hold NaN or infinite values; clean or drop those rows.")
        return x

    def _calibration(self, how: How, draws: int) -> tuple[float, Tensor | None]:
        """Temperature and conformal scores for predictions made in this way; 1 and None where there are none."""
        federation, kept = self.run.federation, self.run.calibration
        if kept is not None and (kept.how, kept.draws) == (how, draws):
            return kept.client(self.index)
        if federation.data.calibration is None:
            return (1.0 if kept is None else kept.client(self.index)[0]), None
        at = (federation.round, how, draws)
        if at not in self._calibrated:
            self._calibrated[at] = calibrate(federation, torch.tensor([self.index]), how, draws).client(0)
        return self._calibrated[at]


def as_numbers(values: Any, what: str, kind: torch.dtype | None = None) -> Tensor:
    """An array or list as a tensor of this type (None: of its own), or a `UserError` that calls it ``what``."""
    try:
        return torch.as_tensor(values, dtype=kind)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"The {what} are not an array of numbers; give a tensor, an array or a list of them."
        ) from error


def check_shape(x: Tensor, data: FederatedData) -> None:
    """Raise a `UserError` unless inputs ``[B, ...]`` have the shape of those that a run on this data was trained on."""
    if not x.ndim:
        raise UserError("The inputs are a single number; give a batch, with a first axis for its examples.")
    if tuple(x.shape[1:]) != data.input_shape:
        raise UserError(
            f"Inputs have shape {list(x.shape[1:])} each, but those of '{data.name}' have {list(data.input_shape)}."
        )


def _check_finite(found: Classified | Regressed, name: str) -> None:
    """Raise a `UserError` if anything that was predicted is not a number."""
    parts = (
        (found.probs.sum(-1), found.entropy, found.aleatoric)
        if isinstance(found, Classified)
        else (found.mean, found.epistemic, found.aleatoric)
    )
    wrong = torch.stack([~part.isfinite() for part in parts]).any(0).nonzero().flatten().tolist()
    if wrong:
        raise UserError(
            f"The model of '{name}' predicts what is not a number in {len(wrong)} of {len(parts[0])} rows, first in row "
            f"{wrong[0] + 1}; correct extreme values there, or train again if all rows are such."
        )


def _joined(parts: Sequence[Classified | Regressed]) -> Classified | Regressed:
    """The first client of each, end to end."""
    leaves = {f.name: [getattr(part, f.name) for part in parts] for f in fields(parts[0])}
    joined: dict[str, Any] = {
        name: None if leaf[0] is None else torch.cat([t[0] for t in leaf]).cpu() for name, leaf in leaves.items()
    }
    return type(parts[0])(**joined)
