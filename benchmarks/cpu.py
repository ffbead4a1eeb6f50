"""Client-steps per second on a CPU: MLP 784-100-10, batch 50, 10 clients, BPFed with its q and π steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch.utils.data import TensorDataset

from benchmarks.loops import bayesian, deterministic
from benchmarks.stacked import Stacked
from bpfed.methods import BPFed, FedAvg
from bpfed.nn.networks import mlp

REPEATS = 5


def run() -> dict[str, object]:
    """Time the loops and the engine in turns, and take medians, since machines are noisy."""
    torch.manual_seed(0)
    clients = [TensorDataset(torch.randn(250, 784), torch.randint(0, 10, (250,))) for _ in range(10)]
    compiled = Stacked(BPFed(draws=1), mlp(784, 10), (784,))
    plain = Stacked(BPFed(draws=1), mlp(784, 10), (784,), compiled=False)
    point = Stacked(FedAvg(), mlp(784, 10), (784,))
    jobs: dict[str, Callable[[], int]] = {
        "plain deterministic loop": lambda: deterministic(lambda: mlp(784, 10), clients, 50, 4),
        "plain Bayesian loop": lambda: bayesian(lambda: mlp(784, 10), clients, 50, 1),
        "bpfed, BPFed, compiled": compiled.round,
        "bpfed, BPFed, traced only": plain.round,
        "bpfed, FedAvg, compiled": point.round,
    }
    speeds: dict[str, list[float]] = {name: [] for name in jobs}
    for name, job in jobs.items():
        start = time.perf_counter()
        job()
        print(f"  {name}: ready after {time.perf_counter() - start:.1f} s", flush=True)
    for _ in range(REPEATS):
        for name, job in jobs.items():
            start = time.perf_counter()
            steps = job()
            speeds[name].append(steps / (time.perf_counter() - start))
    result = {name: round(median(values), 1) for name, values in speeds.items()}
    ours = result["bpfed, BPFed, compiled"]
    ratios = {f"BPFed compiled / {name}": round(ours / value, 2) for name, value in result.items()}
    return {"threads": torch.get_num_threads(), "client-steps per second": result, "ratios": ratios}
