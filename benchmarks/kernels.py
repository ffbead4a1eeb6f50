"""Microseconds of stacked convolutions and their gradients on a GPU: our kernels and PyTorch's, and which are taken."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bpfed.engine.federation import pick_device
from bpfed.nn.kernels import conv

#: Clients, images of each, channels in and out, side of the kernel, side of the images, stride, padding.
SHAPES = [
    (10, 50, 3, 6, 5, 32, 1, 0),
    (100, 50, 3, 6, 5, 32, 1, 0),
    (10, 50, 6, 16, 5, 14, 1, 0),
    (100, 50, 6, 16, 5, 14, 1, 0),
    (500, 1, 6, 16, 5, 14, 1, 0),
    (50, 10, 3, 32, 3, 32, 1, 0),
    (50, 10, 32, 64, 3, 30, 1, 0),
    (20, 10, 32, 64, 5, 14, 1, 0),
    (10, 32, 64, 64, 3, 32, 1, 1),
    (10, 32, 64, 128, 3, 32, 2, 1),
    (10, 32, 64, 128, 1, 32, 2, 0),
    (10, 32, 128, 128, 3, 16, 1, 1),
    (10, 32, 256, 256, 3, 8, 1, 1),
]


def run() -> dict[str, object] | str:
    """Forward, gradient in the images, gradient in the weights, each replayed from a CUDA graph."""
    if not torch.cuda.is_available():
        return "no CUDA device here; skipped"
    pick_device("cuda")
    from bpfed.nn.kernels import conv_triton

    found: dict[str, object] = {"device": torch.cuda.get_device_name()}
    before = os.environ.get("BPFED_KERNELS")
    for shape in SHAPES:
        ours = _timed(shape, conv_triton)
        os.environ["BPFED_KERNELS"] = "off"
        theirs = _timed(shape, conv)
        os.environ["BPFED_KERNELS"] = "on"
        taken = _timed(shape, conv)
        found[str(shape)] = {"ours": ours, "PyTorch": theirs, "taken": taken}
        print(f"  {shape}: {found[str(shape)]}", flush=True)
    if before is not None:
        os.environ["BPFED_KERNELS"] = before
    return found


def _timed(shape: tuple[int, ...], kernels: Any) -> list[float]:
    """Microseconds of the three operations."""
    s, b, c, o, k, side, stride, padding = shape
    torch.manual_seed(0)
    x = torch.randn(s, b, c, side, side, device="cuda")
    weight, bias = torch.randn(s, o, c, k, k, device="cuda"), torch.randn(s, o, device="cuda")
    form = ([stride] * 2, [padding] * 2, [1, 1])
    gradient = torch.randn_like(kernels.convolve(x, weight, bias, *form))
    calls = (
        lambda: kernels.convolve(x, weight, bias, *form),
        lambda: kernels.input_gradient(gradient, weight, [side] * 2, *form),
        lambda: kernels.weight_gradient(x, gradient, [k] * 2, *form),
    )
    return [_replayed(call) for call in calls]


def _replayed(call: Callable[[], Tensor], times: int = 5) -> float:
    """Microseconds of a call; the best of five."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    best = float("inf")
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, 1e3 * start.elapsed_time(end) / times)
    return round(best, 1)
