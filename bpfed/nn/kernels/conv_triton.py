"""The operations of `bpfed.nn.kernels.conv` as Triton kernels: implicit matrix products that never write patches.

A client's output positions (of all its images) are columns, its output channels rows, and kernel taps times input
channels what is summed over. Neighbouring threads read neighbouring positions, and what taps read again is in L1.
Every sum has a fixed order, so results repeat bit for bit.

``zero`` is an argument of the kernels that is always 0, and of which the compiler knows nothing. Where LLVM can tell
that positions are small, it adds the padding to a window's row and column in one instruction on two 16-bit parts
(``add.s16x2``); of a copy that ptxas 12.8 and 12.9 make of it for sm_90, one part lacks the padding. So the mask of a
load was true for windows above the image: it read before the allocation, and the gradient in the images of 32 to 64
channels, 3 x 3, was wrong by 15 %. With ``zero`` in them positions may be large, and all of it is 32-bit.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Config = dict[str, Any]

_PARTS = 32  # most parts that a client's sum over positions is cut into


@triton.jit
def _rounded(v, PRECISION: tl.constexpr):
    """Half a TF32 step more: the matrix units cut the low bits off, which would shrink every number a little."""
    if PRECISION == "tf32":
        power = (v.to(tl.int32, bitcast=True) & -8388608).to(tl.float32, bitcast=True)  # sign and exponent
        v += power * (1.0 / 2048.0)
    return v


@triton.jit
def _convolve(
    x, w, b, y, x_stride, w_stride, b_stride, positions, zero,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,  # noqa: E741
    KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    W_ROW: tl.constexpr, W_CHANNEL: tl.constexpr, FLIP: tl.constexpr, BIAS: tl.constexpr, EDGES: tl.constexpr,
    BY_TAP: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of ``y`` ``[S, B, O, OH, OW]``: BLOCK_O channels at BLOCK_M positions of one client.

    The weight of row o, channel c and tap t is ``w[o * W_ROW + c * W_CHANNEL + t]``, or with its taps reversed (FLIP).
    EDGES: windows may leave the image. BY_TAP: a step of the sum is one tap of BLOCK_K channels, else BLOCK_K of all
    (channel, tap) pairs; the former needs many channels, and then costs less per step.
    """
    T: tl.constexpr = KH * KW
    P: tl.constexpr = OH * OW
    tiles = tl.cdiv(positions, BLOCK_M)
    client = (tl.program_id(0) // tiles).to(tl.int64)
    x += client * x_stride
    w += client * w_stride
    y += client * positions * O
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    m = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.minimum(m, positions - 1)  # beyond the end: read the last, write none
    image = at // P
    p = at % P + zero
    top = (p // OW) * SH - PH
    left = (p % OW) * SW - PW
    base = (image * (C * H * W) + top * W + left)[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)
    if BIAS:
        total += tl.load(b + client * b_stride + o, mask=o < O, other=0.0)[None, :]
    CHUNKS: tl.constexpr = (C + BLOCK_K - 1) // BLOCK_K
    STEPS: tl.constexpr = T * CHUNKS if BY_TAP else (C * T + BLOCK_K - 1) // BLOCK_K
    for step in tl.range(STEPS, loop_unroll_factor=UNROLL):
        i = step + zero
        if BY_TAP:
            c = (i % CHUNKS) * BLOCK_K + tl.arange(0, BLOCK_K)
            t = i // CHUNKS
            row = (t // KW) * DH
            column = (t % KW) * DW
        else:
            k = i * BLOCK_K + tl.arange(0, BLOCK_K)
            c = k // T
            t = k % T + zero
            row = ((t // KW) * DH)[None, :]
            column = ((t % KW) * DW)[None, :]
        here = (c < C)[None, :]
        if EDGES:
            r = top[:, None] + row
            q = left[:, None] + column
            here = here & (r >= 0) & (r < H) & (q >= 0) & (q < W)
        patch = tl.load(x + base + (c[None, :] * (H * W) + (row * W + column)), mask=here, other=0.0)
        tap = T - 1 - t if FLIP else t
        weights = tl.load(
            w + o[None, :] * W_ROW + (c * W_CHANNEL + tap)[:, None],
            mask=(o < O)[None, :] & (c < C)[:, None], other=0.0,
        )  # fmt: skip
        total = tl.dot(_rounded(patch, PRECISION), _rounded(weights, PRECISION), total, input_precision=PRECISION)
    target = y + (image * (O * P) + p)[:, None] + o[None, :] * P
    tl.store(target, total, mask=(o < O)[None, :] & (m < positions)[:, None])


@triton.jit
def _weight_gradient(
    x, g, out, x_stride, g_stride, positions, per_part, zero,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,  # noqa: E741
    KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    EDGES: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the part of ``out`` ``[S, parts, O, C KH KW + 1]`` that ``per_part`` positions of one client add.

    A tile has CHANNELS input channels with their taps rounded up to TAPS. The first tap too many reads ones, and its
    gradient in channel 0 is that of the bias. Offsets of taps are known when compiling and cost nothing.
    """
    T: tl.constexpr = KH * KW
    P: tl.constexpr = OH * OW
    C_TILES: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    TILES: tl.constexpr = C_TILES * ((O + BLOCK_O - 1) // BLOCK_O)
    client = (tl.program_id(0) // TILES).to(tl.int64)
    tile = tl.program_id(0) % TILES
    part = tl.program_id(1)
    x += client * x_stride
    g += client * g_stride
    out += (client * tl.num_programs(1) + part) * (O * (C * T + 1))
    o = (tile // C_TILES) * BLOCK_O + tl.arange(0, BLOCK_O)
    channel = (tile % C_TILES) * CHANNELS
    x += channel * (H * W)
    k = tl.arange(0, CHANNELS * TAPS)
    t = k % TAPS
    c = k // TAPS
    row = ((t // KW) * DH)[None, :]
    column = ((t % KW) * DW)[None, :]
    offset = c[None, :] * (H * W) + row * W + column
    inside = t < T
    if C % CHANNELS != 0:
        inside = inside & (channel + c < C)
    ones = tl.where(t == T, 1.0, 0.0)[None, :]
    last = tl.minimum((part + 1) * per_part, positions)
    total = tl.zeros([CHANNELS * TAPS, BLOCK_O], tl.float32)
    for first in range(part * per_part, last, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        at = tl.minimum(m, positions - 1)
        image = at // P
        p = at % P + zero
        top = (p // OW) * SH - PH
        left = (p % OW) * SW - PW
        here = inside[None, :]
        if EDGES:
            r = top[:, None] + row
            q = left[:, None] + column
            here = here & (r >= 0) & (r < H) & (q >= 0) & (q < W)
        patch = tl.load(x + (image * (C * H * W) + top * W + left)[:, None] + offset, mask=here, other=0.0) + ones
        gradient = tl.load(
            g + (image * (O * P) + p)[:, None] + o[None, :] * P,
            mask=(o < O)[None, :] & (m < last)[:, None], other=0.0,
        )  # fmt: skip
        patch = _rounded(patch, PRECISION)
        gradient = _rounded(gradient, PRECISION)
        total = tl.dot(tl.trans(patch), gradient, total, input_precision=PRECISION)
    place = tl.where(t == T, C * T, (channel + c) * T + t)
    inside = inside | ((t == T) & (channel + c == 0))
    tl.store(out + (o[None, :] * (C * T + 1) + place[:, None]), total, mask=(o < O)[None, :] & inside[:, None])


@triton.jit
def _add_parts(parts, out, columns, PARTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """``[S, PARTS, columns]`` to ``[S, columns]``; the order of PyTorch's sum may depend on the number of clients."""
    client = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    part = tl.arange(0, PADDED)[:, None]
    values = tl.load(
        parts + client * PARTS * columns + part * columns + column,
        mask=(part < PARTS) & (column < columns), other=0.0,
    )  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + client * columns + column, tl.sum(values, 0), mask=column < columns)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    size: Sequence[int] | None = None,
    config: Config | None = None,
) -> Tensor:
    """As `bpfed.nn.kernels.conv.convolve`; without a bias, weights are read transposed and reversed (`input_gradient`)."""
    from bpfed.nn.kernels.conv import output_size

    flip = bias is None
    x, weight = _rows(x), _rows(weight)
    bias = weight if bias is None else _rows(bias)
    s, n, c, h, w = x.shape
    o, taps = weight.shape[2 if flip else 1], weight.shape[3] * weight.shape[4]
    size = size or output_size((h, w), weight.shape[3:], stride, padding, dilation)
    y = x.new_empty(s, n, o, *size)
    positions = n * size[0] * size[1]
    config = config or _convolve_config(c, o, positions)
    edges = any(_leaves(*a) for a in zip((h, w), size, weight.shape[3:], stride, padding, dilation, strict=True))
    # Clients are on the first axis of a grid, the only one that may be longer than 65 535.
    grid = (s * triton.cdiv(positions, config["BLOCK_M"]), triton.cdiv(o, config["BLOCK_O"]))
    _convolve[grid](
        x, weight, bias, y, x.stride(0), weight.stride(0), bias.stride(0), positions, 0,
        c, h, w, o, *size, *weight.shape[3:], *stride, *padding, *dilation,
        W_ROW=taps if flip else c * taps, W_CHANNEL=o * taps if flip else taps,
        FLIP=flip, BIAS=not flip, EDGES=edges, PRECISION=_precision(), **config,
    )  # fmt: skip
    return y


def input_gradient(
    gradient: Tensor,
    weight: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    config: Config | None = None,
) -> Tensor:
    """As `bpfed.nn.kernels.conv.input_gradient`: itself a convolution, of the gradient with reversed weights."""
    if max(stride) > 1:  # zeros where the stride stepped over
        wide = [(n - 1) * step + 1 for n, step in zip(gradient.shape[3:], stride, strict=True)]
        spread = gradient.new_zeros(*gradient.shape[:3], *wide)
        spread[..., :: stride[0], :: stride[1]] = gradient
        gradient = spread
    around = [d * (k - 1) - p for d, k, p in zip(dilation, weight.shape[3:], padding, strict=True)]
    return convolve(gradient, weight, None, (1, 1), around, dilation, size, config)


def weight_gradient(
    x: Tensor,
    gradient: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    config: Config | None = None,
) -> Tensor:
    """As `bpfed.nn.kernels.conv.weight_gradient`; parts of the sum over positions first, then their sum."""
    x, gradient = _rows(x), _rows(gradient)
    s, n, c, h, w = x.shape
    o, *size = gradient.shape[2:]
    taps = kernel[0] * kernel[1]
    positions = n * size[0] * size[1]
    config = config or _weight_config(taps, c, o)
    tiles = triton.cdiv(c, config["CHANNELS"]) * triton.cdiv(o, config["BLOCK_O"])
    # However many clients are stacked, a client's positions are parted the same way.
    per_part = max(triton.cdiv(triton.cdiv(positions, _PARTS), config["BLOCK_M"]), 4) * config["BLOCK_M"]
    parts = triton.cdiv(positions, per_part)
    out = x.new_empty(s, parts, o, c * taps + 1)
    edges = any(_leaves(*a) for a in zip((h, w), size, kernel, stride, padding, dilation, strict=True))
    _weight_gradient[(s * tiles, parts)](
        x, gradient, out, x.stride(0), gradient.stride(0), positions, per_part, 0,
        c, h, w, o, *size, *kernel, *stride, *padding, *dilation,
        EDGES=edges, PRECISION=_precision(), **config,
    )  # fmt: skip
    if parts == 1:
        return out[:, 0]
    total = x.new_empty(s, o, c * taps + 1)
    columns = total[0].numel()
    _add_parts[(s, triton.cdiv(columns, 64))](
        out, total, columns, PARTS=parts, PADDED=triton.next_power_of_2(parts), BLOCK=64
    )
    return total


def _rows(x: Tensor) -> Tensor:
    """Clients may lie apart (weights in a larger row) or share memory (the same images); each one's is contiguous."""
    return x if x[0].is_contiguous() else x.contiguous()


def _leaves(size: int, output: int, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    """Whether a window leaves the image on one axis."""
    return padding > 0 or (output - 1) * stride - padding + (kernel - 1) * dilation >= size


def _precision() -> str:
    """As PyTorch's own convolutions: TF32 unless it was turned off."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "tf32x3"


def _convolve_config(c: int, o: int, positions: int) -> Config:
    """Tiles that were fastest on an H200, of those tried."""
    config: Config = {"BLOCK_M": 64, "BLOCK_K": 32, "num_warps": 2, "num_stages": 1, "BY_TAP": False, "UNROLL": 1}
    config["BLOCK_O"] = min(max(triton.next_power_of_2(o), 8), 64)
    if triton.cdiv(c, 16) * 64 <= c * 5:  # 16 channels at a time waste at most a fifth
        config |= {"BY_TAP": True, "UNROLL": 5, "BLOCK_K": 16}
    if o <= 8 and positions >= 4096:
        config |= {"BLOCK_M": 256, "BLOCK_K": 16, "num_warps": 4}
    elif o > 16:
        config |= {"BLOCK_M": 128, "num_warps": 4}
    return config


def _weight_config(taps: int, c: int, o: int) -> Config:
    """As `_convolve_config`."""
    wide = triton.next_power_of_2(taps + 1)
    channels = math.gcd(c, max(1, 64 // wide))
    block = min(max(triton.next_power_of_2(o), 8), 64)
    return {
        "BLOCK_O": block, "BLOCK_M": 64, "CHANNELS": channels, "TAPS": wide, "num_warps": 2 if o <= 16 else 4,
        "num_stages": 1,
    }  # fmt: skip
