"""Propagation: the mean and variance of every unit, carried through a plain module while it runs.

Each layer turns the mean and variance of its inputs into those of its outputs, with different units of a layer taken as
independent:

- ``linear`` and convolutions: exact for independent inputs;
- ReLU and leaky ReLU: the exact moments of a rectified Gaussian; other activations by Gauss-Hermite quadrature;
- maximum pooling: the moments of the larger of two Gaussians (Clark 1961), one after the other, with the covariance
  that outputs of a convolution have because they share its weights. Maximum and ReLU commute, so a pooling after a ReLU
  is done before it, on what is Gaussian;
- average pooling, sums and products: exact for independent inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from bpfed._util.errors import UserError
from bpfed.nn.kernels.conv import in_pairs, pair

# --- Moments of functions of Gaussians --------------------------------------------------------------------------------
#
# One rectified, the larger of two, smooth functions, a convolution's neighbours.

#: Nodes of the quadrature for smooth functions.
NODES = 12


def rectified(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of max(0, X) for Gaussian X.

    With a = μ/σ they are m = μ Φ(a) + σ φ(a) and σ² Φ(a) − m (m − μ), which loses no digits where X is far from 0.
    """
    sigma = variance.sqrt()
    a = mean / sigma.clamp(min=1e-18)
    below = torch.special.ndtr(a)
    first = mean * below + sigma * _density(a)
    return first, (variance * below - first * (first - mean)).clamp(min=0.0)


def larger(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], covariance: Tensor | float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of the larger of two Gaussians, each (mean, variance), and the chance that it is the first."""
    gap = a[0] - b[0]
    theta = (a[1] + b[1] - 2.0 * covariance).clamp(min=0.0).sqrt()
    ratio = (gap / theta.clamp(min=1e-18)).clamp(-1e4, 1e4)
    first, other = torch.special.ndtr(ratio), torch.special.ndtr(-ratio)
    peak = theta * _density(ratio)
    # Both moments about the mean of the first.
    mean = peak - gap * other
    square = a[1] * first + (b[1] + gap.square()) * other - gap * peak
    return a[0] + mean, (square - mean.square()).clamp(min=0.0), first


def averaged(function: Callable[[Tensor], Tensor], mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of a smooth function of a Gaussian, by Gauss-Hermite quadrature."""
    sigma = variance.sqrt()
    first, square = torch.zeros_like(mean), torch.zeros_like(mean)
    for at, weight in zip(*_nodes(), strict=True):
        value = function(mean + at * sigma)
        first, square = first + weight * value, square + weight * value.square()
    return first, (square - first.square()).clamp(min=0.0)


def neighbours(
    input: tuple[Tensor, Tensor | None],
    weight: tuple[Tensor, Tensor | None],
    shift: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    apart: tuple[int, int],
) -> Tensor:
    """Covariance of a convolution's outputs with those ``apart`` rows and columns further on, which share its weights.

    Σ S² m(p) m(p') + s² from the weights, and Σ W(k) W(k') v from the inputs that both see.

    Args:
        input: Mean and variance, ``[B, C, H, W]``.
        weight: Mean and variance, ``[O, C, kh, kw]``.
        shift: Variance of the bias, ``[O]``.
        stride: Of the convolution, as ``padding``.
        padding: With zeros.
        apart: Rows (0 or more) and columns (any).

    Returns:
        ``[B, O, h - rows, w - |columns|]`` for outputs of ``[B, O, h, w]``, from the first that has such a neighbour
        on.
    """
    rows, columns = apart[0] * stride[0], apart[1] * stride[1]
    edge = (padding[1], padding[1], padding[0], padding[0])
    mean = F.pad(input[0], edge)
    height, width = mean.shape[-2:]
    here = (slice(0, height - rows), slice(max(0, -columns), width - max(0, columns)))
    there = (slice(rows, height), slice(max(0, columns), width - max(0, -columns)))
    parts = []
    if weight[1] is not None:
        parts.append(F.conv2d(mean[(..., *here)] * mean[(..., *there)], weight[1], None, tuple(stride)))
    if input[1] is not None:
        kernel = weight[0]
        high, wide = kernel.shape[-2:]
        moved = F.pad(kernel, (columns, -columns, rows, -rows)) if rows < high and abs(columns) < wide else None
        if moved is not None:
            parts.append(F.conv2d(F.pad(input[1], edge)[(..., *here)], kernel * moved, None, tuple(stride)))
    if shift is not None:
        parts.append(shift[:, None, None].expand_as(parts[0]) if parts else shift[:, None, None])
    return total(*parts)


def total(*parts: Tensor | None) -> Tensor:
    """Of those that are there, of which there is one."""
    there = [part for part in parts if part is not None]
    return sum(there[1:], there[0])


def _density(a: Tensor) -> Tensor:
    return torch.exp(-0.5 * a.square()) * (1.0 / math.sqrt(2.0 * math.pi))


@cache
def _nodes() -> tuple[list[float], list[float]]:
    at, weight = np.polynomial.hermite_e.hermegauss(NODES)
    return at.tolist(), (weight / weight.sum()).tolist()


class Propagation(TorchFunctionMode):
    """Carries variances beside the tensors that a module computes, which are the means.

    Args:
        weights: Random parameters, as (mean, variance); all else is as it is.
    """

    def __init__(self, weights: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        # By id of the mean. That it is held here too keeps its id its own.
        self.random = {id(mean): (mean, variance) for mean, variance in weights}
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # what a ReLU was applied to
        self.last: dict[int, tuple[Tensor, Tensor]] = {}  # variances of a linear layer's inputs, and its weight
        self.convolved: dict[int, Callable[[tuple[int, int]], Tensor]] = {}  # `neighbours` of a convolution's outputs

    def variance(self, value: Any) -> Tensor | None:
        """Variance of a tensor that the module computed; None if it is not random."""
        found = self.random.get(id(value))
        return None if found is None else found[1]

    def covariance(self, outputs: Tensor) -> Tensor:
        """Of the outputs for each example, ``[B, K, K]``; diagonal unless they come from a linear layer."""
        variance = self.variance(outputs)
        flat = torch.zeros_like(outputs) if variance is None else variance
        flat = flat.reshape(outputs.shape[0], -1)
        if id(outputs) not in self.last:
            return torch.diag_embed(flat)
        inputs, weight = self.last[id(outputs)]
        outer = weight[:, None, :] * weight  # [K, K, H]
        shared = (inputs @ outer.flatten(0, 1).mT).unflatten(-1, outer.shape[:2])  # Σ_h W_kh v_h W_lh
        return shared + torch.diag_embed(flat - shared.diagonal(dim1=-2, dim2=-1))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(id(value) in self.random for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)):
            return func(*args, **kwargs)
        if func in _RULES:
            return _RULES[func](self, func, *args, **kwargs)
        result = func(*args, **kwargs)
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            return result  # a shape, a device
        raise _no_rule(func)

    def _random(self, mean: Tensor, variance: Tensor) -> Tensor:
        self.random[id(mean)] = (mean, variance)
        return mean

    def affine(
        self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **form: Any
    ) -> Any:
        """``linear`` and convolutions: Σ W² v + Σ S² (m² + v) + s²."""
        inputs, spread, bias_spread = (self.variance(t) for t in (input, weight, bias))
        mean = func(input, weight, bias, *rest, **form)
        shift = bias_spread
        if shift is not None:
            shift = (shift if func is F.linear else shift.reshape(-1, *(1,) * (weight.ndim - 2))).expand_as(mean)
        square = None if spread is None else func(input.square(), spread, None, *rest, **form)
        carried = None
        if inputs is not None:
            carried = func(inputs, weight.square() if spread is None else weight.square() + spread, None, *rest, **form)
        variance = total(square, carried, shift)
        if func is F.linear and inputs is not None and input.ndim == 2:
            self.last[id(mean)] = (inputs, weight)
        if func is F.conv2d and (strides := _form(weight, *rest, **form)) is not None:
            known = ((input, inputs), (weight, spread), bias_spread, *strides)
            self.convolved[id(mean)] = lambda apart: neighbours(*known, apart)
        return self._random(mean, variance)

    def relu(self, func: Any, input: Tensor, inplace: bool = False) -> Tensor:
        variance = self.random[id(input)][1]
        output = self._random(*rectified(input, variance))
        self.before[id(output)] = (input, variance)
        return output

    def leaky_relu(self, func: Any, input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
        # a X + (1 − a) max(0, X), and Cov(X, max(0, X)) = σ² Φ(μ/σ).
        variance = self.random[id(input)][1]
        mean, spread = rectified(input, variance)
        a, b = negative_slope, 1.0 - negative_slope
        both = variance * torch.special.ndtr(input / variance.sqrt().clamp(min=1e-18))
        return self._random(a * input + b * mean, a * a * variance + b * b * spread + 2.0 * a * b * both)

    def smooth(self, func: Any, input: Tensor, *rest: Any, **form: Any) -> Tensor:
        variance = self.random[id(input)][1]
        return self._random(*averaged(lambda value: func(value, *rest, **form), input, variance))

    def max_pool(
        self,
        func: Any,
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Tensor:
        if tree_leaves(padding).count(0) != len(tree_leaves(padding)) or ceil_mode or return_indices:
            raise _no_rule(func, " with padding, ceil_mode or indices")
        kernel, step, apart = pair(kernel_size), pair(stride or kernel_size), pair(dilation)
        mean, variance = self.before.get(id(input), self.random[id(input)])
        window = [(i * apart[0], j * apart[1]) for i in range(kernel[0]) for j in range(kernel[1])]
        size = [(n - a * (k - 1) - 1) // s + 1 for n, k, a, s in zip(mean.shape[-2:], kernel, apart, step, strict=True)]

        def at(values: Tensor, place: tuple[int, int]) -> Tensor:
            """The values at one place of every window."""
            ends = [p + s * (n - 1) + 1 for p, s, n in zip(place, step, size, strict=True)]
            return values[..., place[0] : ends[0] : step[0], place[1] : ends[1] : step[1]]

        def both(a: tuple[int, int], b: tuple[int, int]) -> Tensor | float:
            """Covariance of two places of every window."""
            if id(mean) not in self.convolved:
                return 0.0
            columns = b[1] - a[1]
            return at(self.convolved[id(mean)]((b[0] - a[0], columns)), (a[0], a[1] + min(0, columns)))

        # One place after the other, with the covariance of the largest so far and each that is still to come.
        pooled, spread = at(mean, window[0]), at(variance, window[0])
        shared = [both(window[0], place) for place in window[1:]]
        for n, place in enumerate(window[1:]):
            pooled, spread, first = larger((pooled, spread), (at(mean, place), at(variance, place)), shared[n])
            later = [both(place, other) for other in window[n + 2 :]]
            shared[n + 1 :] = [c * first + d * (1.0 - first) for c, d in zip(shared[n + 1 :], later, strict=True)]
        if id(input) not in self.before:
            return self._random(pooled, spread)
        output = self._random(*rectified(pooled, spread))
        self.before[id(output)] = (pooled, spread)
        return output

    def avg_pool(
        self,
        func: Any,
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        if ceil_mode or not count_include_pad or divisor_override is not None:
            raise _no_rule(func, " with ceil_mode, count_include_pad=False or a divisor")
        form = (kernel_size, stride, padding)
        return self._random(func(input, *form), func(self.random[id(input)][1], *form) / math.prod(pair(kernel_size)))

    def adaptive_avg_pool(self, func: Any, input: Tensor, output_size: Any) -> Tensor:
        size = [n if m is None else m for n, m in zip(input.shape[-2:], pair(output_size), strict=True)]
        if any(n % m for n, m in zip(input.shape[-2:], size, strict=True)):
            raise _no_rule(func, " with windows of different sizes")
        window = math.prod(n // m for n, m in zip(input.shape[-2:], size, strict=True))
        return self._random(func(input, output_size), func(self.random[id(input)][1], output_size) / window)

    def shape(self, func: Any, input: Tensor, *rest: Any, **form: Any) -> Any:
        """What moves numbers about and changes none."""
        output = func(input, *rest, **form)
        if output is input:
            return input
        return self._random(output, func(self.random[id(input)][1], *rest, **form))

    def dropout(self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training:
            raise _no_rule(func, " while training")
        return input

    def add(self, func: Any, input: Any, other: Any, **form: Any) -> Any:
        if form:
            raise _no_rule(func, f" with {', '.join(form)}")
        if input is other:
            raise _no_rule(func, " of a tensor and itself")
        output = func(input, other)
        spreads = [None if v is None else v.expand_as(output) for v in (self.variance(input), self.variance(other))]
        return self._random(output, total(*spreads))

    def multiply(self, func: Any, input: Any, other: Any, **form: Any) -> Any:
        if form:
            raise _no_rule(func, f" with {', '.join(form)}")
        if input is other:
            raise _no_rule(func, " of a tensor and itself")
        first, second = self.variance(input), self.variance(other)
        parts = (
            None if first is None else first * (other * other),
            None if second is None else second * (input * input),
            None if first is None or second is None else first * second,
        )
        return self._random(func(input, other), total(*parts))

    def divide(self, func: Any, input: Any, other: Any, **form: Any) -> Any:
        if form:
            raise _no_rule(func, f" with {', '.join(form)}")
        if self.variance(other) is not None:
            raise _no_rule(func, " by a random tensor")
        return self._random(func(input, other), self.random[id(input)][1] / (other * other))


def _form(
    weight: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> tuple[Sequence[int], Sequence[int]] | None:
    """Stride and padding of a convolution that `neighbours` can handle; None for another."""
    form = in_pairs(weight.shape[2:], stride, padding, dilation)
    return None if form is None or groups != 1 or tuple(form[2]) != (1, 1) else (form[0], form[1])


def _no_rule(func: Any, when: str = "") -> UserError:
    name = (resolve_name(func) or getattr(func, "__name__", str(func))).rpartition(".")[2]
    return UserError(
        f"The module uses '{name}'{when}, for which there is no rule in a single pass; predict with how='sample'."
    )


_T = torch.Tensor
_BY_RULE: dict[Callable[..., Any], tuple[Any, ...]] = {
    Propagation.affine: (F.linear, F.conv1d, F.conv2d, F.conv3d),
    Propagation.relu: (F.relu, torch.relu, _T.relu),
    Propagation.leaky_relu: (F.leaky_relu,),
    Propagation.smooth: (
        *(torch.tanh, _T.tanh, torch.sigmoid, _T.sigmoid, torch.exp, _T.exp, torch.sin, _T.sin, torch.cos, _T.cos),
        *(F.gelu, F.silu, F.elu, F.softplus, F.mish, F.selu, F.celu, F.logsigmoid),
    ),
    Propagation.max_pool: (F.max_pool2d, torch.max_pool2d),
    Propagation.avg_pool: (F.avg_pool2d,),
    Propagation.adaptive_avg_pool: (F.adaptive_avg_pool2d,),
    Propagation.dropout: (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    Propagation.shape: (
        *(torch.flatten, _T.flatten, torch.reshape, _T.reshape, _T.view, _T.unflatten, _T.contiguous, _T.clone),
        *(torch.squeeze, _T.squeeze, torch.unsqueeze, _T.unsqueeze, torch.permute, _T.permute, _T.expand),
        *(torch.transpose, _T.transpose, _T.t, _T.__getitem__, _T.float, _T.to, _T.detach),
    ),
    Propagation.add: (torch.add, _T.add, _T.__add__, _T.__radd__, torch.sub, _T.sub, _T.__sub__, _T.__rsub__),
    Propagation.multiply: (torch.mul, _T.mul, _T.__mul__, _T.__rmul__),
    Propagation.divide: (torch.div, _T.div, _T.__truediv__),
}
_RULES: dict[Any, Callable[..., Any]] = {func: rule for rule, funcs in _BY_RULE.items() for func in funcs}
