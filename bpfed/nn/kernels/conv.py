"""Convolution of many clients at once, each with its own weights.

``vmap`` turns a convolution with weights per client into a grouped convolution, which cuDNN runs as one slow kernel per
client. On a GPU `Convolutions` sends ``conv2d`` here instead, to kernels made for it (`bpfed.nn.kernels.conv_triton`),
where these are the faster ones. With ``BPFED_KERNELS=off`` in the environment all convolutions are PyTorch's own.

Shapes: ``S`` clients, ``B`` images of each, ``C`` channels in and ``O`` out. A weight for every example is the case of
``S * B`` clients with one image each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight
from torch.overrides import TorchFunctionMode

from bpfed._util.errors import UserError

_TRITON = find_spec("triton") is not None

#: Channels in times channels out up to which the kernels are faster than PyTorch's grouped convolution on an H200 (see
#: docs/results/benchmarks.md): beyond, PyTorch's larger tiles pay.
MOST = 8192
#: The same for the gradient in the images, at stride 1; with fewer than the first a tile is mostly empty.
LEAST_INPUT, MOST_INPUT = 64, 2048
#: Beyond ``MOST``, a convolution is a product of matrices, one for each client, where the result of a client has at most
#: so many positions (images times height times width) for each channel out. Then most of the work is to read the
#: weights, and cuDNN's grouped convolution takes several times as long as that.
POSITIONS = 4


@torch.library.custom_op("bpfed::convolve", mutates_args=())
def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """``[S, B, C, H, W]``, ``[S, O, C, kh, kw]`` and ``[S, O]`` to ``[S, B, O, H', W']``."""
    if fast(x) and weight.shape[1] * weight.shape[2] <= MOST:
        from bpfed.nn.kernels import conv_triton

        return conv_triton.convolve(x, weight, bias, stride, padding, dilation)
    size = output_size(x.shape[3:], weight.shape[3:], stride, padding, dilation)
    if x.is_cuda and _mostly_weights(weight.shape[1], weight.shape[2], x.shape[1] * size[0] * size[1]):
        return by_matrices(x, weight, bias, stride, padding, dilation)
    y = F.conv2d(_groups(x), weight.flatten(0, 1), bias.flatten(), stride, padding, dilation, groups=len(x))
    return y.unflatten(1, (len(x), -1)).transpose(0, 1).contiguous()


@torch.library.custom_op("bpfed::convolve_input_gradient", mutates_args=())
def input_gradient(
    gradient: Tensor,
    weight: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Gradient in the images of `convolve`, ``[S, B, C, *size]``, from that in its result, ``[S, B, O, H', W']``."""
    if fast(gradient) and max(stride) == 1 and LEAST_INPUT <= weight.shape[1] * weight.shape[2] <= MOST_INPUT:
        from bpfed.nn.kernels import conv_triton

        return conv_triton.input_gradient(gradient, weight, size, stride, padding, dilation)
    if gradient.is_cuda and _mostly_weights(weight.shape[1], weight.shape[2], gradient[0, :, 0].numel()):
        return input_gradient_by_matrices(gradient, weight, size, stride, padding, dilation)
    s, b, c = len(gradient), gradient.shape[1], weight.shape[2]
    shape = (b, s * c, *size)
    x = conv2d_input(shape, weight.flatten(0, 1), _groups(gradient), stride, padding, dilation, s)
    return x.unflatten(1, (s, c)).transpose(0, 1).contiguous()


@torch.library.custom_op("bpfed::convolve_weight_gradient", mutates_args=())
def weight_gradient(
    x: Tensor,
    gradient: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Gradient in the weights of `convolve`, ``[S, O, C kh kw + 1]``; the last column is that in the bias."""
    if fast(x) and x.shape[2] * gradient.shape[2] <= MOST:
        from bpfed.nn.kernels import conv_triton

        return conv_triton.weight_gradient(x, gradient, kernel, stride, padding, dilation)
    if x.is_cuda and _mostly_weights(gradient.shape[2], x.shape[2], gradient[0, :, 0].numel()):
        return weight_gradient_by_matrices(x, gradient, kernel, stride, padding, dilation)
    s, o, c = len(x), gradient.shape[2], x.shape[2]
    shape = (s * o, c, *kernel)
    w = conv2d_weight(_groups(x), shape, _groups(gradient), stride, padding, dilation, s)
    return torch.cat([w.reshape(s, o, -1), gradient.sum((1, 3, 4))[..., None]], -1)


def _mostly_weights(outputs: int, inputs: int, positions: int) -> bool:
    """Whether a convolution with so many channels out and in is to be a product of matrices; see ``POSITIONS``."""
    return outputs * inputs > MOST and positions <= POSITIONS * outputs


def _patches(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """``[S, B, C, H, W]`` to what each position of the result sees, ``[S, B H' W', C kh kw]``."""
    size = output_size(x.shape[3:], kernel, stride, padding, dilation)
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0])).contiguous()
    s, b, c, h, w = x.stride()
    shape = (*x.shape[:2], *size, x.shape[2], *kernel)
    steps = (s, b, h * stride[0], w * stride[1], c, h * dilation[0], w * dilation[1])
    return x.as_strided(shape, steps).reshape(len(x), x.shape[1] * size[0] * size[1], -1)


def by_matrices(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """`convolve` as a product of two matrices for each client."""
    size = output_size(x.shape[3:], weight.shape[3:], stride, padding, dilation)
    patches = _patches(x, weight.shape[3:], stride, padding, dilation)
    y = torch.baddbmm(bias[:, None], patches, weight.flatten(2).mT)  # [S, B H' W', O]
    return y.unflatten(1, (x.shape[1], *size)).permute(0, 1, 4, 2, 3).contiguous()


def input_gradient_by_matrices(
    gradient: Tensor,
    weight: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """`input_gradient` as a product of two matrices for each client, and the sum of where patches overlap."""
    s, b = gradient.shape[:2]
    rows = gradient.permute(0, 1, 3, 4, 2).reshape(s, -1, gradient.shape[2])  # [S, B H' W', O]
    patches = (rows @ weight.flatten(2)).view(s * b, -1, weight[0, 0].numel())
    x = F.fold(patches.mT, tuple(size), weight.shape[3:], tuple(dilation), tuple(padding), tuple(stride))
    return x.unflatten(0, (s, b))


def weight_gradient_by_matrices(
    x: Tensor,
    gradient: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """`weight_gradient` as a product of two matrices for each client."""
    rows = gradient.transpose(1, 2).flatten(2)  # [S, O, B H' W']
    return torch.cat([rows @ _patches(x, kernel, stride, padding, dilation), rows.sum(-1, keepdim=True)], -1)


def fast(x: Tensor) -> bool:
    """Whether the GPU kernels can take this tensor; anything else goes through PyTorch."""
    return _TRITON and x.is_cuda and x.dtype == torch.float32 and kernels_wanted()


def kernels_wanted() -> bool:
    """Whether ``BPFED_KERNELS`` in the environment leaves the GPU kernels on, as they are without it."""
    wish = os.environ.get("BPFED_KERNELS", "on")
    if wish not in ("on", "off"):
        raise UserError(f"BPFED_KERNELS is '{wish}' in the environment, but must be 'on' or 'off'.")
    return wish == "on"


def _groups(x: Tensor) -> Tensor:
    """``[S, B, C, H, W]`` to ``[B, S C, H, W]``."""
    return x.transpose(0, 1).flatten(1, 2)


def output_size(size: Sequence[int], kernel: Sequence[int], stride: Any, padding: Any, dilation: Any) -> list[int]:
    """Height and width of a convolution's result."""
    return [(size[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(2)]


@convolve.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
    size = output_size(x.shape[3:], weight.shape[3:], stride, padding, dilation)
    return x.new_empty(*x.shape[:2], weight.shape[1], *size)


@input_gradient.register_fake
def _(gradient: Tensor, weight: Tensor, size: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    return gradient.new_empty(*gradient.shape[:2], weight.shape[2], *size)


@weight_gradient.register_fake
def _(x: Tensor, gradient: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    return x.new_empty(len(x), gradient.shape[2], x.shape[2] * kernel[0] * kernel[1] + 1)


def _stacking(op: Any, tensors: int) -> Any:
    """The ``vmap`` rule of an operation on stacked clients: the mapped axis becomes more clients."""

    def rule(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        more = [
            (t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)).flatten(0, 1)
            for t, d in zip(args[:tensors], in_dims, strict=False)
        ]
        return op(*more, *args[tensors:]).unflatten(0, (info.batch_size, -1)), 0

    return rule


convolve.register_vmap(_stacking(convolve, 3))
input_gradient.register_vmap(_stacking(input_gradient, 2))
weight_gradient.register_vmap(_stacking(weight_gradient, 2))


class _Function(torch.autograd.Function):
    """The operations as differentiable functions; each is linear in both arguments, so they are each other's gradients.

    They have no ``register_autograd``, because what that makes does not run under ``torch.func.grad``.
    """

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.form = inputs[3:]


class _Convolve(_Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, *form: Any) -> Tensor:
        return convolve(x, weight, bias, *form)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:  # not in a first layer
            dx = _InputGradient.apply(gradient, weight, x.shape[3:], *ctx.form)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            both = _WeightGradient.apply(x, gradient, weight.shape[3:], *ctx.form)
            dw, db = both[..., :-1].reshape(weight.shape), both[..., -1]
        return dx, dw, db, None, None, None


class _InputGradient(_Function):
    @staticmethod
    def forward(gradient: Tensor, weight: Tensor, size: Any, *form: Any) -> Tensor:
        return input_gradient(gradient, weight, size, *form)

    @staticmethod
    def backward(ctx: Any, second: Tensor) -> Any:
        gradient, weight = ctx.saved_tensors
        dg = _Convolve.apply(second, weight, weight.new_zeros(weight.shape[:2]), *ctx.form)
        dw = _WeightGradient.apply(second, gradient, weight.shape[3:], *ctx.form)[..., :-1].reshape(weight.shape)
        return dg, dw, None, None, None, None


class _WeightGradient(_Function):
    @staticmethod
    def forward(x: Tensor, gradient: Tensor, kernel: Any, *form: Any) -> Tensor:
        return weight_gradient(x, gradient, kernel, *form)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Function.setup_context(ctx, inputs, output)
        ctx.kernel = inputs[2]

    @staticmethod
    def backward(ctx: Any, second: Tensor) -> Any:
        x, gradient = ctx.saved_tensors
        weight = second[..., :-1].unflatten(-1, (x.shape[2], *ctx.kernel))
        dx = _InputGradient.apply(gradient, weight, x.shape[3:], *ctx.form)
        return dx, _Convolve.apply(x, weight, second[..., -1], *ctx.form), None, None, None, None


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
) -> Tensor:
    """Convolution of S clients' images with their own weights; differentiable, and ``vmap`` adds clients.

    Args:
        x: ``[S, B, C, H, W]``.
        weight: ``[S, O, C, kh, kw]``.
        bias: ``[S, O]``.

    Returns:
        ``[S, B, O, H', W']``.
    """
    if bias is None:
        bias = weight.new_zeros(weight.shape[:2])
    return _Convolve.apply(x, weight, bias, list(stride), list(padding), list(dilation))


class Convolutions(TorchFunctionMode):
    """Sends the ``conv2d`` of a module on a GPU to `conv2d` here; what it cannot do stays PyTorch's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.conv2d:
            output = self._conv2d(*args, **kwargs)
            if output is not None:
                return output
        return func(*args, **kwargs)

    def _conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        if groups != 1 or input.ndim != 4 or weight.ndim != 4 or weight.dtype != torch.float32 or not fast(input):
            return None
        form = in_pairs(weight.shape[2:], stride, padding, dilation)
        bias = None if bias is None else bias[None]
        return None if form is None else conv2d(input[None], weight[None], bias, *form).squeeze(0)


def in_pairs(kernel: Sequence[int], stride: Any, padding: Any, dilation: Any) -> list[list[int]] | None:
    """Stride, padding and dilation as pairs; None for a padding that differs from side to side."""
    strides, dilations = pair(stride), pair(dilation)
    if padding == "same":
        around = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        return None if any(a % 2 for a in around) else [strides, [a // 2 for a in around], dilations]
    return [strides, [0, 0] if padding == "valid" else pair(padding), dilations]


def pair(value: int | Sequence[int]) -> list[int]:
    """A number for height and width, given once or twice."""
    return [value, value] if isinstance(value, int) else list(value) * (2 // len(value))
