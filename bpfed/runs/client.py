"""One client of a run: its own model, ready to predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from bpfed._util.errors import UserError, check_count
from bpfed.data.arrays import fitted
from bpfed.data.tabular.rows import Rows, read_rows
from bpfed.engine.evaluate import BLOCK, WIDE
from bpfed.inference import inputs
from bpfed.inference.calibration import Conformal
from bpfed.inference.inputs import Inputs
from bpfed.inference.predictive import How, Prediction, check_how, mean_weights
from bpfed.inference.rng import Purpose
from bpfed.inference.tasks import TargetColumn
from bpfed.methods.base import rows

if TYPE_CHECKING:
    from bpfed.data.checks.new_rows import Unusual
    from bpfed.data.federated import FederatedData
    from bpfed.inference.decisions import Rule
    from bpfed.runs.export import Format
    from bpfed.runs.run import Run


class Client:
    """One client of a run: its own model, ready to predict."""

    #: Why it can have no calibration examples, in words; None where a run may keep some.
    unscored: ClassVar[str | None] = None

    def __init__(self, run: Run, index: int) -> None:
        self.run, self.index = run, index

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
                dataset of Hugging Face, a mapping of columns by name, a `bpfed.data.Table`, or an array ``[n, C]`` with
                ``columns``. For a run on arrays the path of an NPZ file with ``x``.
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
    ) -> Prediction:
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
            ask = federation.data.task_type.predict
            x, device = federation.model.features(x), federation.device
            size = max(1, BLOCK // max(1, inputs.numbers(inputs.take(x, slice(1)))))
            size = min(size, WIDE[device.type]) if federation.model.wide else size
            parts = [
                ask(federation.model, predictive, inputs.move(inputs.take(block, None), device), key, count, how)
                for block in inputs.blocks(x, size)
            ]
        found = joined(parts)
        if federation.calibration_temperature != 1.0:
            found = found.with_temperature(federation.calibration_temperature)
        temperature, scores = self.calibration_for(how, count)
        found = found.with_scores(scores, self.unscored)
        found = found.with_client_temperature(temperature) if temperature != 1.0 else found
        _check_finite(found, self.name)
        return found

    def export_adapter(self, folder: str | Path) -> Path:
        """Write the adapter of this client's model to a new folder in the format of peft.

        It holds the means of the client's weights, personal and shared. ``peft.PeftModel.from_pretrained`` reads it,
        given the base model.
        """
        federation, who = self.run.federation, torch.tensor([self.index])
        with torch.no_grad():
            predictive = federation.method.predictive(
                federation.model, rows(federation.shared, 1), federation.ready(who)
            )
        weights = mean_weights(predictive)
        if weights is None:
            raise UserError(f"The weights of {federation.method.title} have no one mean that an adapter could hold.")
        federation.model.save_adapter(weights[0], Path(folder))
        return Path(folder)

    def export(
        self,
        format: Format,
        path: str | Path,
        *,
        how: How = "sample",
        draws: int | None = None,
        level: float = 0.9,
        overwrite: bool = False,
    ) -> Path:
        """Write this client's model to a file that can be used without bpfed.

        A graph takes raw inputs, with the preprocessing of tables and the scaling of images inside, and gives what
        `predict` does. It is compared with `predict` on a few rows first, and not written if it differs by more than
        1e-5.

        Args:
            format: ``onnx``, a graph for onnxruntime; ``torch``, a program of ``torch.export``; ``safetensors``, the
                distribution of the weights alone.
            path: The file to write.
            how: As `predict`; ``single-pass`` makes a smaller and faster graph.
            draws: As `predict`; the graph has the same draws inside.
            level: Of the prediction sets or intervals in the graph.
            overwrite: Whether a file that is there already may be replaced.

        Returns:
            The path.

        Raises:
            UserError: The model cannot be exported in this format.
        """
        from bpfed.runs.export import export

        return export(self, format, path, how=how, draws=draws, level=level, overwrite=overwrite)

    def _inputs(self, x: Any, columns: Sequence[str] | None, prepared: bool) -> Inputs:
        """Inputs for the network, ``[B, ...]``; arrays without names are not taken for prepared ones."""
        data = self.run.data
        if isinstance(x, Rows):
            x = x.x
        elif isinstance(x, str | Path) or columns is not None or (data.preprocessor is not None and not prepared):
            if prepared:
                raise UserError("Only arrays without column names can be prepared already; omit prepared.")
            x = self.read(x, columns).x
        if not isinstance(data.train.x, Tensor):
            return fitted(x, data.train.x, data.name)
        x = as_numbers(x, "inputs", torch.float32)
        check_shape(x, data)
        if not bool(torch.isfinite(x).all()):
            raise UserError("The inputs hold NaN or infinite values; clean or drop those rows.")
        return x

    def calibration_for(self, how: How, draws: int) -> tuple[float, Conformal | None]:
        """The temperature and the conformal scores for predictions made in this way; 1 and None where there are none."""
        federation, kept = self.run.federation, self.run.calibration
        if kept is not None and (kept.how, kept.draws) == (how, draws):
            return kept.client(self.index)
        if federation.data.calibration is None:
            return (1.0 if kept is None else kept.client(self.index)[0]), None
        return self.run.calibrated(how, draws).client(self.index)


def prediction_columns(
    data: FederatedData,
    found: Prediction,
    level: float,
    abstain: float | None,
    unusual: Unusual | None = None,
    times: tuple[float, ...] = (),
    rule: Rule | None = None,
) -> dict[str, list[str]]:
    """Predictions as columns of text, by name, in the units of the tables; the last says what is unlike training."""
    made = data.preprocessor
    mean, unit = (0.0, 1.0) if made is None else (made.target_mean, made.target_scale)
    columns = data.task_type.columns(found, TargetColumn(data.class_names, mean, unit, times), level, abstain)
    if rule is not None:
        columns |= rule.columns(found)
    if unusual is None:
        return columns
    if "abstain" in columns:
        far = unusual.far.tolist()
        columns["abstain"] = ["yes" if off else said for said, off in zip(columns["abstain"], far, strict=True)]
    return columns | {"unusual": [" | ".join(names) for names in unusual.names()]}


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


def _check_finite(found: Prediction, name: str) -> None:
    """Raise a `UserError` if anything that was predicted is not a number."""
    parts = found.numbers
    wrong = torch.stack([~part.isfinite() for part in parts]).any(0).nonzero().flatten().tolist()
    if wrong:
        raise UserError(
            f"The model of '{name}' predicts what is not a number in {len(wrong)} of {len(parts[0])} rows, first in row "
            f"{wrong[0] + 1}; correct extreme values there, or train again if all rows are such."
        )


def joined(parts: Sequence[Prediction]) -> Prediction:
    """The first client of each, end to end."""
    leaves = {f.name: [getattr(part, f.name) for part in parts] for f in fields(parts[0])}
    ends: dict[str, Any] = {
        name: None if leaf[0] is None else torch.cat([t[0] for t in leaf]).cpu() for name, leaf in leaves.items()
    }
    return type(parts[0])(**ends)
