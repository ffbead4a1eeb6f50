"""Change what a plain module's calls do, without touching the module.

Torch-function modes see every ``linear``, ``conv2d`` and ``dropout`` that runs inside them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bpfed._util.errors import UserError
from bpfed.inference import rng
from bpfed.nn.kernels.conv import conv2d, fast, in_pairs, output_size

#: Dropouts, and whether they drop whole channels.
_DROPOUTS: dict[Callable[..., Any], bool] = {F.dropout: False, F.dropout1d: True, F.dropout2d: True, F.dropout3d: True}
_UNKEYED = (F.alpha_dropout, F.feature_alpha_dropout)


def argument(args: Any, kwargs: Any, position: int, name: str) -> Any:
    """The argument of a call that may have been given by position or by name."""
    return args[position] if len(args) > position else kwargs.get(name)


def example_keys(key: rng.SplitKey, examples: int) -> rng.SplitKey:
    """A key for each example of a batch, ``[2]`` to ``[B, 2]``: its noise is its own, however the batch is padded."""
    return rng.fold(key, torch.arange(examples, dtype=torch.int32, device=key.first.device))


def _open(function: Any) -> FunctionType:
    """A composite function of PyTorch whose own calls modes can see: one that does not hand itself over as a whole."""
    names = function.__globals__ | {"has_torch_function": lambda tensors: False}
    opened = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


_attention_layer = _open(F.multi_head_attention_forward)


class KeyedDropout(TorchFunctionMode):
    """Dropout whose mask is a function of a key, so that it is a client's own and repeats; that of attention too.

    Args:
        key: ``[2]`` int32; the n-th dropout of a forward pass uses the n-th fold of it.
    """

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key = rng.fold(rng.SplitKey.of(key), 0x0D0)
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return self._dropout(_DROPOUTS[func], *args, **kwargs)
        if func is F.scaled_dot_product_attention and (argument(args, kwargs, 4, "dropout_p") or 0.0) > 0.0:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward and argument(args, kwargs, 10, "dropout_p") > 0.0:
            with self:  # it drops in calls of its own
                return _attention_layer(*args, **kwargs)
        if func in _UNKEYED and kwargs.get("training", False):
            raise UserError(f"The module uses {func.__name__}, whose masks cannot be keyed; use nn.Dropout.")
        return func(*args, **kwargs)

    def _dropout(
        self, channels: bool, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0.0:
            return input
        if p == 1.0:
            return torch.zeros_like(input)
        self.calls += 1
        shape = input.shape[:2] if channels else input.shape  # a whole feature map has one number, [B, C]
        keys = example_keys(rng.fold(self.key, self.calls), shape[0])
        keep = rng.uniform(keys, math.prod(shape[1:])).reshape(*shape, *(1,) * (input.ndim - len(shape))) >= p
        return input * keep.to(input.dtype) * (1.0 / (1.0 - p))

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """``scaled_dot_product_attention`` in single steps, with the weights dropped before they meet the values."""
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            scores = torch.where(attn_mask, scores, float("-inf")) if hidden else scores + attn_mask
        return self._dropout(False, torch.softmax(scores, -1), dropout_p) @ value


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
        self.key = rng.fold(rng.SplitKey.of(key), 0x10C)
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.linear, F.conv2d) and id(argument(args, kwargs, 1, "weight")) in self.sigma:
            self.calls += 1
            return (self._linear if func is F.linear else self._conv2d)(*args, **kwargs)
        return func(*args, **kwargs)

    def _normal(self, word: int, shape: torch.Size) -> Tensor:
        keys = example_keys(rng.fold(self.key, 2 * self.calls + word), shape[0])
        return rng.normal(keys, math.prod(shape[1:])).reshape(shape)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        mean = F.linear(input, weight, bias)
        variance = F.linear(input.square(), self.sigma[id(weight)].square())
        if bias is not None:
            variance = variance + self.sigma[id(bias)].square()
        # The floor keeps the square root's slope finite where the variance is zero; 1e-16 is far below any weight
        # noise.
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
        drawn_bias = drawn.new_zeros(examples, len(weight))
        if bias is not None:
            drawn_bias = bias + self.sigma[id(bias)] * self._normal(1, drawn_bias.shape)
        form = in_pairs(weight.shape[2:], stride, padding, dilation)
        assert form is not None  # `LocalCalls` leaves those to PyTorch
        if fast(input):
            return conv2d(input[:, None], drawn, drawn_bias, *form).squeeze(1)
        return conv2d_as_matmul(input, drawn, *form) + drawn_bias[:, :, None, None]


def conv2d_as_matmul(
    input: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """A convolution with a weight ``[B, O, C, kh, kw]`` for each example, as its patches times a matrix."""
    kernel = weight.shape[-2:]
    patches = F.unfold(input, kernel, tuple(dilation), tuple(padding), tuple(stride))  # [B, C kh kw, L]
    size = output_size(input.shape[2:], kernel, stride, padding, dilation)
    return (weight.flatten(-3) @ patches).unflatten(-1, size)


class LocalCalls(TorchFunctionMode):
    """Finds the parameters that `LocalNoise` can handle: those of a linear map or convolution, used nowhere else.

    Args:
        parameters: By name, as the module will use them.
        examples: Batch size of the pass. A layer that runs on several rows of an example (the words of a text) shares
            its weights between them, so noise drawn for each row would be wrong; it is known by another number of rows.
    """

    def __init__(self, parameters: Mapping[str, Tensor], examples: int) -> None:
        super().__init__()
        self.names = {id(p): n for n, p in parameters.items()}
        self.examples = examples
        self.uses = Counter[int]()
        self.calls: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.uses.update(id(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        if func in (F.linear, F.conv2d) and self._plain(func, args, kwargs):
            used = (argument(args, kwargs, 1, "weight"), argument(args, kwargs, 2, "bias"))
            self.calls.append(tuple(id(p) for p in used if p is not None))
        return func(*args, **kwargs)

    def _plain(self, func: Any, args: Any, kwargs: Any) -> bool:
        input, weight = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight")
        if input.shape[0] != self.examples or input.ndim != (2 if func is F.linear else 4):
            return False
        if func is F.linear:
            return True
        lopsided = argument(args, kwargs, 4, "padding") == "same" and any(k % 2 == 0 for k in weight.shape[-2:])
        return argument(args, kwargs, 6, "groups") in (None, 1) and not lopsided

    @property
    def local(self) -> frozenset[str]:
        """Names of the parameters found; a layer's weight and bias are found together or not at all."""
        found = [call for call in self.calls if all(i in self.names and self.uses[i] == 1 for i in call)]
        return frozenset(self.names[i] for call in found for i in call)
