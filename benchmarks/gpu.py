"""Microseconds per local step of all stacked clients on a GPU, replayed as a CUDA graph, and where they go."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from benchmarks.stacked import Stacked
from bpfed.engine.compiled_step import Recorded
from bpfed.engine.federation import pick_device
from bpfed.methods import BPFed
from bpfed.nn.networks import LeNet, mlp


def run() -> dict[str, object] | str:
    """MLP and LeNet with 10 clients, and with 100 (ten runs of 10 clients stacked: what further seeds cost)."""
    if not torch.cuda.is_available():
        return "no CUDA device here; skipped"
    pick_device("cuda")
    cells = {}
    for clients in (10, 100):
        for name, network, shape in (
            ("MLP 784-100-10", mlp(784, 10), (784,)),
            ("LeNet, CIFAR-10", LeNet(), (3, 32, 32)),
        ):
            cells[f"{name}, {clients} clients"] = _measure(
                Stacked(BPFed(draws=1), network, shape, clients, device="cuda")
            )
            print(f"  {name}, {clients} clients: {cells[f'{name}, {clients} clients']['µs per step']} µs", flush=True)
    return {"device": torch.cuda.get_device_name(), **cells}


def _measure(stacked: Stacked) -> dict[str, Any]:
    stacked.round()
    loop = next(iter(next(iter(stacked.train.steppers.values())).loops.values()))
    assert isinstance(loop, Recorded)
    graph = loop.graphs[loop.TOGETHER]
    counter = loop.static.step
    replays = stacked.steps // loop.TOGETHER
    times = []
    for _ in range(20):
        counter.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (replays * loop.TOGETHER))
    counter.zero_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    kernels: dict[str, float] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name[:80]] = kernels.get(event.name[:80], 0.0) + event.device_time / loop.TOGETHER
    largest = dict(sorted(kernels.items(), key=lambda kv: -kv[1])[:8])
    # Twelve state vectors (two Gaussians of mean and ρ with two moments each), read once and written once.
    floor = 2 * 12 * 4 * stacked.model.layout.total * stacked.clients / _copy_bandwidth() * 1e6
    return {
        "µs per step": round(median(times), 1),
        "µs at copy bandwidth": round(floor, 1),
        "µs in kernels": {k: round(v, 2) for k, v in largest.items()},
    }


def _copy_bandwidth() -> float:
    """Bytes per second of a large copy on the device, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(5):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 5 * 2 * source.numel() / (start.elapsed_time(end) * 1e-3)
