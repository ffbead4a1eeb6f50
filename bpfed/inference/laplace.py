"""A Gaussian posterior of the last layer, made after training: the Laplace approximation.

Daxberger et al.: Laplace Redux, 2021 (last layer, Kronecker factors). With the layers before it held, the outputs are
linear in the last layer's weights w, so the generalised Gauss-Newton matrix is the Hessian of −log p itself:
Σ_i Λ_i ⊗ h_i h_iᵀ for the layer's inputs h_i (with a 1 for the bias) and the Hessian Λ_i of −log p(y_i | outputs) in
the outputs. It is kept as two sums over a client's training data, A = Σ h_i h_iᵀ and G = Σ Λ_i, taken for G ⊗ A / n:
exact where all Λ_i are equal (so always in regression), an approximation otherwise. With the prior N(0, 1/δ) the
posterior's precision is G ⊗ A / n + δ.

δ can be chosen by the marginal likelihood (`best_precision`). That is sound at a mode. A network that fits few examples
perfectly is not at one (training has no prior) and has hardly any curvature left; the evidence then asks for so wide a
prior that predictions are worse than the point's. So a fixed δ is the default of the methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import hessian, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bpfed._util.errors import UserError
from bpfed.inference import rng
from bpfed.inference.estimators import Batch
from bpfed.nn.function_modes import argument
from bpfed.nn.kernels.conv import Convolutions

if TYPE_CHECKING:
    from bpfed.nn.model import Model

#: Phase in which no weight moves and the last layer's curvature is summed up.
CURVATURE = "curvature"
#: Prior precisions among which the marginal likelihood chooses.
GRID = tuple(10.0 ** (power / 8) for power in range(-32, 33))

_RESHAPES = {
    Tensor.squeeze,
    torch.squeeze,
    Tensor.flatten,
    torch.flatten,
    Tensor.reshape,
    torch.reshape,
    Tensor.view,
    Tensor.view_as,
}


class Head(NamedTuple):
    """The last layer, a linear map: names of its parameters, and where they are in the weight vector."""

    weight: str
    bias: str | None
    at: dict[str, slice]
    shape: tuple[int, int]

    @classmethod
    def of(cls, model: Model) -> Head:
        """The layer with the module's last parameters; a `UserError` if that is not a linear map."""
        if model.members > 1:
            raise UserError("laplace works with one network, but members is above 1; set it to 1, or laplace = false.")
        names = [n for n in model.layout.names if n in dict(model.module.named_parameters())]
        order = [n for n, _ in model.module.named_parameters() if n in names]
        last = [n for n in order if n.rpartition(".")[0] == order[-1].rpartition(".")[0]]
        shapes = dict(zip(model.layout.names, model.layout.shapes, strict=True))
        matrices = [n for n in last if len(shapes[n]) == 2]
        biases = [n for n in last if len(shapes[n]) == 1]
        # `Model.local` holds what was seen to be weight and bias of one linear map (or convolution) and nothing else.
        if len(matrices) != 1 or len(biases) > 1 or len(last) > 2 or not model.local.issuperset(last):
            raise UserError(
                f"laplace needs a network that ends in a linear layer, but its last parameters ({', '.join(last)}) are "
                "not one; end the network in nn.Linear, or set laplace = false."
            )
        ends = torch.tensor([0, *model.layout.sizes]).cumsum(0).tolist()
        places = {n: slice(a, b) for n, a, b in zip(model.layout.names, ends, ends[1:], strict=False)}
        outputs, inputs = shapes[matrices[0]]
        bias = biases[0] if biases else None
        return cls(matrices[0], bias, {n: places[n] for n in last}, (outputs, inputs + len(biases)))

    def get(self, weights: Tensor) -> Tensor:
        """The layer in weights ``[S, P]``: ``[S, K, I]``, the bias last."""
        matrix = weights[:, self.at[self.weight]].unflatten(1, (self.shape[0], -1))
        return matrix if self.bias is None else torch.cat([matrix, weights[:, self.at[self.bias], None]], -1)

    def put(self, weights: Tensor, layer: Tensor) -> Tensor:
        """Weights ``[S, P]`` with this layer ``[S, K, I]`` in place of theirs."""
        weights = weights.clone()
        inputs = self.shape[1] - (self.bias is not None)
        weights[:, self.at[self.weight]] = layer[..., :inputs].flatten(1)
        if self.bias is not None:
            weights[:, self.at[self.bias]] = layer[..., inputs]
        return weights


class LastLayer(TorchFunctionMode):
    """Sees inputs and outputs of the linear map with this weight, and which tensor is its outputs only reshaped."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.inputs = self.outputs = self.last = weight

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is F.linear and argument(args, kwargs, 1, "weight") is self.weight:
            self.inputs = argument(args, kwargs, 0, "input")
            self.outputs = self.last = result
        elif func in _RESHAPES and args and args[0] is self.last:
            self.last = result
        return result


class Curvature(NamedTuple):
    """The curvature of −log p in the last layer, summed over a client's training examples.

    Attributes:
        inputs: A = Σ h hᵀ of the layer's inputs, ``[S, I, I]``.
        outputs: G = Σ Λ, the Hessian of −log p in the outputs, ``[S, K, K]``.
        examples: Their number, ``[S, 1]``.
    """

    inputs: Tensor
    outputs: Tensor
    examples: Tensor

    @classmethod
    def zero(cls, model: Model) -> Curvature:
        """Of no example (no client axis)."""
        outputs, inputs = Head.of(model).shape
        new = model.initial.new_zeros
        return cls(new(inputs, inputs), new(outputs, outputs), new(1))

    def emptied(self) -> Curvature:
        """The same clients without an example."""
        return Curvature(*(torch.zeros_like(t) for t in self))

    def plus(self, model: Model, weights: Tensor, batch: Batch) -> tuple[Curvature, Tensor]:
        """With the examples of a batch added, at weights ``[S, P]``; and their mean −log p, ``[S]``."""
        layer = Head.of(model)
        inputs, outputs = vmap(lambda w, x: _ending(model, layer, w, x))(weights, batch.x)
        if layer.bias is not None:
            inputs = torch.cat([inputs, torch.ones_like(inputs[..., :1])], -1)
        own = set(model.likelihood.parameters())
        parameters = {n: p for n, p in vmap(model.layout.unflatten)(weights).items() if n in own}

        def nll(outputs: Tensor, y: Tensor, parameters: dict[str, Tensor]) -> Tensor:
            return model.likelihood.nll(outputs[None], y[None], parameters).sum()

        each = (0, 0, None)
        curved = vmap(vmap(hessian(nll), each))(outputs, batch.y, parameters) * batch.mask[..., None, None]
        loss = (vmap(vmap(nll, each))(outputs, batch.y, parameters) * batch.mask).sum(-1)
        count = batch.mask.sum(-1)
        new = Curvature(
            self.inputs + (inputs * batch.mask[..., None]).mT @ inputs,
            self.outputs + curved.sum(1),
            self.examples + count[:, None],
        )
        return new, loss / count.clamp(min=1.0)


class LaplacePredictive(NamedTuple):
    """A last layer with a Gaussian of Kronecker factors, on point weights.

    Attributes:
        weights: The point, ``[S, P]``.
        layer: Where the last layer is in it.
        inputs: Eigenvectors of A, ``[S, I, I]``.
        outputs: Eigenvectors of G, ``[S, K, K]``.
        sigma: Standard deviation along each pair of them, ``[S, K, I]``; 0 for a client without an example.
    """

    weights: Tensor
    layer: Head
    inputs: Tensor
    outputs: Tensor
    sigma: Tensor

    def draws(self, wanted: int) -> int:
        return wanted

    def draw(self, key: Tensor, index: int) -> Tensor:
        eps = rng.normal(rng.fold(key, index), self.sigma[0].numel()).view_as(self.sigma)
        # By the symmetric root of the covariance: eigenvectors have no sign, and where eigenvalues are equal no
        # direction, so that without the turn into their basis a draw would depend on the curvature's last bit.
        turned = self.sigma * (self.outputs.mT @ eps @ self.inputs)
        drawn = self.layer.get(self.weights) + self.outputs @ turned @ self.inputs.mT
        return self.layer.put(self.weights, drawn)


def laplace(model: Model, weights: Tensor, curvature: Curvature, precision: float = 0.0) -> LaplacePredictive:
    """The posterior of the last layer around weights ``[S, P]``.

    Args:
        model: The network.
        weights: The trained weights; a client whose curvature holds no example keeps them as they are.
        curvature: Of these clients.
        precision: δ of the prior; 0: chosen for each client by `best_precision`.
    """
    layer = Head.of(model)
    a, inputs = torch.linalg.eigh(curvature.inputs)
    g, outputs = torch.linalg.eigh(curvature.outputs)
    values = g.clamp(min=0.0)[:, :, None] * (a / curvature.examples.clamp(min=1.0)).clamp(min=0.0)[:, None, :]
    chosen = torch.full_like(curvature.examples[:, 0], precision)
    if precision == 0.0:
        chosen = best_precision(values.flatten(1), layer.get(weights).square().sum((1, 2)))
    seen = curvature.examples[..., None] > 0
    sigma = torch.where(seen, (values + chosen[:, None, None]).rsqrt(), 0.0)
    return LaplacePredictive(weights, layer, inputs, outputs, sigma)


def evidence(values: Tensor, square: Tensor, precision: float) -> Tensor:
    """log p(data | δ) − log p(data | w) by the Laplace approximation at w, ``[S]``.

    −½ δ ‖w‖² + ½ D log δ − ½ Σ_d log(λ_d + δ), from the curvature's eigenvalues λ ``[S, D]`` and ‖w‖² ``[S]``.
    """
    return -0.5 * (torch.log1p(values / precision).sum(-1) + precision * square)


def best_precision(values: Tensor, square: Tensor) -> Tensor:
    """The prior precision of `GRID` with the most evidence for each client, ``[S]``; arguments as `evidence`."""
    scores = torch.stack([evidence(values, square, precision) for precision in GRID])
    return torch.tensor(GRID, device=values.device)[scores.argmax(0)]


def _ending(model: Model, layer: Head, weights: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs ``[B, F]`` and outputs ``[B, K]`` of the last layer for one client."""
    parameters = model.layout.unflatten(weights)
    with Convolutions(), LastLayer(parameters[layer.weight]) as last_layer:
        outputs = model.call(parameters, x)
    if outputs is not last_layer.last:
        raise UserError(
            "laplace needs a network that ends in a linear layer, but something follows the layer of "
            f"'{layer.weight}'; leave it to the likelihood, or set laplace = false."
        )
    return last_layer.inputs, last_layer.outputs
