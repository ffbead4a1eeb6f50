"""Several networks of one kind, trained side by side from different first weights, whose predictions are averaged.

With Gaussian weights this is a posterior that is a mixture of M Gaussians, each around a solution of its own, where a
single Gaussian covers one solution only (Wilson & Izmailov 2020); with point weights it is a deep ensemble
(Lakshminarayanan et al. 2017). Members do not see each other's predictions in training: the bound on the evidence of a
mixture whose components do not overlap is the mean of theirs plus log M. (What a method computes over all weights, such
as the size of the recipe's first heads or the norm that is clipped, is over all members.)

To a method it is a model with M times the weights, to the engine a member of a client is one more row of the stack.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from bpfed._util.errors import UserError
from bpfed.inference import rng
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.rng import Purpose
from bpfed.nn.model import Model


@dataclass(frozen=True)
class Ensemble(Model):
    """A model of M members; ``P`` counts the weights of all of them."""

    @cached_property
    def one(self) -> Model:
        first = self.layout.apart(self.initial)[0]
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return Model(**own | {"layout": self.layout.one, "initial": first})

    def outputs(self, weights: Tensor, x: Tensor, key: Tensor | None = None) -> Tensor:
        raise TypeError(
            "A mixture has no outputs of its own; call `one` with the weights that `ParameterLayout.apart` gives."
        )

    def gradient(self, weights: Tensor, x: Tensor, y: Tensor, mask: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The members' mean −log p, summed over the batch, ``[S]``; and each member's own gradient, ``[S, P]``."""
        value, gradient = self.one.gradient(self._rows(weights), *self._each(x, y, mask), self._keys(key))
        return self._mean(value), self._joined(gradient)

    def hessian_product(
        self, weights: Tensor, vector: Tensor, x: Tensor, y: Tensor, mask: Tensor, key: Tensor
    ) -> Tensor:
        """Each member's own, ``[S, P]``."""
        rows, along = self._rows(weights), self._rows(vector)
        return self._joined(self.one.hessian_product(rows, along, *self._each(x, y, mask), self._keys(key)))

    def local_gradient(
        self, q: Gaussian, x: Tensor, y: Tensor, mask: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `gradient`."""
        rows = Gaussian(*(self._rows(t) for t in q))
        value, mean, sigma = self.one.local_gradient(rows, *self._each(x, y, mask), self._keys(key))
        return self._mean(value), self._joined(mean), self._joined(sigma)

    def _rows(self, weights: Tensor) -> Tensor:
        """``[S, P]`` to a row for each member, ``[S M, P / M]``."""
        return self.layout.apart(weights).flatten(0, 1)

    def _joined(self, rows: Tensor) -> Tensor:
        return self.layout.together(rows.unflatten(0, (-1, self.members)))

    def _each(self, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The batch for every member, ``[S, ...]`` to ``[S M, ...]``."""
        each = self.members
        return x.repeat_interleave(each, 0), y.repeat_interleave(each, 0), mask.repeat_interleave(each, 0)

    def _keys(self, key: Tensor) -> Tensor:
        """A key of its own for each member, ``[S M, 2]``."""
        member = torch.arange(self.members, dtype=torch.int32, device=key.device)
        return rng.fold(key[:, None], member).flatten(0, 1)

    def _mean(self, values: Tensor) -> Tensor:
        return values.unflatten(0, (-1, self.members)).mean(1)


def make_ensemble(model: Model, members: int, seed: int) -> Model:
    """A model of that many networks like this one; all but the first start with newly drawn weights.

    Args:
        model: The first member.
        members: 1: the model itself.
        seed: Of the run.
    """
    if members == 1:
        return model
    like = model.layout.unflatten(model.initial)
    drawn = [like, *(like | _redrawn(model, seed, member) for member in range(1, members))]
    layout = replace(model.layout, shared=members * model.layout.shared, members=members)
    initial = layout.together(torch.stack([model.layout.flatten(weights) for weights in drawn]))
    own = {f.name: getattr(model, f.name) for f in fields(model)}
    return Ensemble(**own | {"layout": layout, "initial": initial})


def _redrawn(model: Model, seed: int, member: int) -> dict[str, Tensor]:
    """First weights as the module draws them, or where it does not say how, as its layers do, in order of use."""
    fresh = copy.deepcopy(model.module).cpu()
    place = {name: i for i, name in enumerate(model.order)}
    word = rng.words(seed, member, Purpose.INIT, np.zeros(1, dtype=np.uint64))[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(word >> np.uint64(1)))
        _redraw(fresh, "", place)
    return {n: p.detach().float() for n, p in fresh.named_parameters()}


def _redraw(module: nn.Module, name: str, place: dict[str, int]) -> None:
    where = f"Layer '{name}' of the module" if name else "The module"
    if callable(again := getattr(module, "reset_parameters", None)):
        try:
            again()
        except Exception as error:
            raise UserError(
                f"{where} cannot draw its parameters again, which members above 1 need: reset_parameters() says "
                f"'{error}'; fix it, or leave members at 1."
            ) from error
        return
    if any(True for _ in module.parameters(recurse=False)):
        raise UserError(
            f"{where} has parameters but no reset_parameters() to draw them again, which members above 1 need; "
            "give it one, or leave members at 1."
        )
    layers = [(f"{name}.{child}" if name else child, layer) for child, layer in module.named_children()]

    def first_use(called: tuple[str, nn.Module]) -> int:
        return min((place.get(f"{called[0]}.{n}", len(place)) for n, _ in called[1].named_parameters()), default=0)

    for called, layer in sorted(layers, key=first_use):
        _redraw(layer, called, place)
