"""Change what a plain module's calls do, without touching the module.

Torch-function modes see every ``linear``, ``conv2d`` and ``dropout`` that runs inside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bpfed import noise
from bpfed.errors import UserError

_DROPOUTS: dict[Callable[..., Any], int] = {F.dropout: 0, F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}
_UNKEYED = (F.alpha_dropout, F.feature_alpha_dropout)


class KeyedDropout(TorchFunctionMode):
    """Dropout whose mask is a function of a key, so that it is a client's own and repeats.

    Args:
        key: ``[2]`` int32; the n-th dropout of a forward pass uses the n-th fold of it.
    """

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key = noise.fold(key, 0x0D0)
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return self._dropout(_DROPOUTS[func], *args, **kwargs)
        if func in _UNKEYED and kwargs.get("training", False):
            raise UserError(f"The module uses {func.__name__}, whose masks cannot be keyed; use nn.Dropout.")
        return func(*args, **kwargs)

    def _dropout(
        self, channel_axes: int, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0.0:
            return input
        self.calls += 1
        # A channel dropout drops whole feature maps: its mask has one number for each [B, C].
        shape = input.shape if channel_axes == 0 else input.shape[: input.ndim - channel_axes]
        keep = noise.uniform(noise.fold(self.key, self.calls), math.prod(shape)).reshape(shape) >= p
        keep = keep.reshape(*shape, *(1,) * (input.ndim - len(shape)))
        return input * keep.to(input.dtype) * (1.0 / (1.0 - p))


class LocalNoise(TorchFunctionMode):
    """Move the noise of Gaussian weights from the weights to where it is cheaper and of lower variance.

    - ``linear``: the local reparameterisation trick. Outputs of a linear map of Gaussian weights are Gaussian, so draw
      those, independently for every example: mean x M^T + m, variance x² (S²)^T + s².
    - ``conv2d``: a weight draw for every example. Output positions share weights, so drawing outputs independently
      would be wrong; drawing the (few) weights once per example is exact.

    Args:
        sigma: Standard deviation of each parameter handled here, by ``id`` of the tensor that holds its mean.
        key: ``[2]`` int32.
    """

    def __init__(self, sigma: Mapping[int, Tensor], key: Tensor) -> None:
        super().__init__()
        self.sigma = sigma
        self.key = noise.fold(key, 0x10C)
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.linear, F.conv2d) and id(argument(args, kwargs, 1, "weight")) in self.sigma:
            self.calls += 1
            return (self._linear if func is F.linear else self._conv2d)(*args, **kwargs)
        return func(*args, **kwargs)

    def _normal(self, word: int, shape: torch.Size) -> Tensor:
        return noise.normal(noise.fold(self.key, 2 * self.calls + word), shape.numel()).reshape(shape)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        mean = F.linear(input, weight, bias)
        variance = F.linear(input.square(), self.sigma[id(weight)].square())
        if bias is not None:
            variance = variance + self.sigma[id(bias)].square()
        # The floor keeps the square root's slope finite where the variance is zero; 1e-16 is far below any weight noise.
        return mean + torch.sqrt(variance + 1e-16) * self._normal(0, mean.shape)

    def _conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        examples = input.shape[0]
        drawn = weight + self.sigma[id(weight)] * self._normal(0, torch.Size([examples, *weight.shape]))
        output = conv2d_as_matmul(input, drawn, stride, padding, dilation)
        if bias is not None:
            drawn_bias = bias + self.sigma[id(bias)] * self._normal(1, torch.Size([examples, *bias.shape]))
            output = output + drawn_bias[:, :, None, None]
        return output


def conv2d_as_matmul(input: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """``conv2d`` as patches times a matrix; ``weight`` is ``[O, C, kh, kw]``, or ``[B, O, C, kh, kw]`` with one per example."""
    kernel = weight.shape[-2:]
    stride, dilation = _pair(stride), _pair(dilation)
    padding = _same(kernel, dilation) if padding == "same" else (0, 0) if padding == "valid" else _pair(padding)
    patches = F.unfold(input, kernel, dilation=dilation, padding=padding, stride=stride)  # [B, C kh kw, L]
    output = weight.flatten(-3) @ patches  # [B, O, L]
    size = [
        (input.shape[2 + i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(2)
    ]
    return output.unflatten(-1, size)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))


def _same(kernel: Any, dilation: tuple[int, int]) -> tuple[int, int]:
    return (dilation[0] * (kernel[0] - 1) // 2, dilation[1] * (kernel[1] - 1) // 2)


def argument(args: Any, kwargs: Any, position: int, name: str) -> Any:
    """The argument of a call that may have been given by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name)


class LocalCalls(TorchFunctionMode):
    """Finds the parameters that `LocalNoise` can handle: used once, as weight or bias of a linear map or plain convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[int, int] = {}
        self.handled: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                self.uses[id(value)] = self.uses.get(id(value), 0) + 1
        plain_conv = func is F.conv2d and argument(args, kwargs, 6, "groups") in (None, 1)
        even_same = (
            argument(args, kwargs, 4, "padding") == "same"
            and any(k % 2 == 0 for k in argument(args, kwargs, 1, "weight").shape[-2:])
            if func is F.conv2d
            else False
        )
        if func is F.linear or (plain_conv and not even_same):
            self.handled |= {id(argument(args, kwargs, 1, "weight")), id(argument(args, kwargs, 2, "bias"))}
        return func(*args, **kwargs)
