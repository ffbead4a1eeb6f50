"""One client of a run: its own model, ready to predict."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bpfed.errors import UserError
from bpfed.methods.base import rows
from bpfed.noise import Purpose
from bpfed.predict import Classified, Regressed, classify, regress

if TYPE_CHECKING:
    from bpfed.run import Run


class Client:
    """One client of a run: its own model, ready to predict."""

    def __init__(self, run: Run, index: int) -> None:
        self.run, self.index = run, index

    @property
    def name(self) -> str:
        """The client's name."""
        return self.run.data.clients[self.index]

    def predict(self, x: Tensor, draws: int | None = None) -> Classified | Regressed:
        """Predict with this client's posterior.

        Args:
            x: Inputs, ``[B, ...]``, prepared as the training inputs were.
            draws: Weight draws to average; None: as many as in evaluation.

        Returns:
            Probabilities (or mean) with total, epistemic and aleatoric uncertainty, ``[B]`` each.
        """
        federation = self.run.federation
        if draws is not None and draws < 1:
            raise UserError(f"draws is {draws}, but must be at least 1.")
        x = torch.as_tensor(x, dtype=torch.float32)
        if tuple(x.shape[1:]) != federation.data.input_shape:
            raise UserError(
                f"Inputs have shape {list(x.shape[1:])} each, but '{federation.data.name}' was trained on "
                f"{list(federation.data.input_shape)}."
            )
        if not bool(torch.isfinite(x).all()):
            raise UserError("The inputs hold NaN or infinite values; clean or drop those rows.")
        who = torch.tensor([self.index])
        key = federation.keys(0, Purpose.EVALUATION, who)
        count = draws or federation.settings.eval_draws
        with torch.no_grad():
            predictive = federation.method.predictive(
                federation.model, rows(federation.shared, 1), federation.personal(who)
            )
            ask = classify if federation.data.task == "classification" else regress
            found = ask(federation.model, predictive, x[None].to(federation.device), key, count)
        return _first(found)


def _first(found: Classified | Regressed) -> Classified | Regressed:
    leaves = ((f.name, getattr(found, f.name)) for f in fields(found))
    first: dict[str, Any] = {name: None if leaf is None else leaf[0].cpu() for name, leaf in leaves}
    return type(found)(**first)
