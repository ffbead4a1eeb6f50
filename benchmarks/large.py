"""A network of 11 million weights (ResNet-18 with group normalisation, images of 32 x 32): cost of a step of all clients.

python -m benchmarks.large [--device cpu] [--jobs FedPer,BPFed] [--variants all] [--profile] [--out FILE]

Each job is set beside plain loops in the same run. On a CPU a step is in CPU seconds (user and system) on one thread,
because machines are shared; on a GPU in seconds of the clock.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import bpfed
from benchmarks.loops import bayesian, deterministic
from benchmarks.stacked import Stacked
from bpfed.engine import compiled_step
from bpfed.engine.federation import pick_device
from bpfed.engine.local import threads
from bpfed.methods import BPFed, FedPer, Recipe
from bpfed.methods.base import Method
from bpfed.nn.kernels import conv

BATCH, CLASSES, SHAPE = 32, 10, (3, 32, 32)
GROUPS = 8


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*_convolved(inputs, outputs, 3, stride), nn.ReLU())
        self.second = nn.Sequential(*_convolved(outputs, outputs, 3, 1))
        same = stride == 1 and inputs == outputs
        self.around = nn.Identity() if same else nn.Sequential(*_convolved(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.around(x))


def _convolved(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [convolution, nn.GroupNorm(GROUPS, outputs)]


def resnet18() -> nn.Sequential:
    """ResNet-18 (He et al. 2016) with group instead of batch normalisation, for ten classes: 11 181 642 weights."""
    widths = (64, 64, 128, 256, 512)
    blocks: list[nn.Module] = []
    for before, width in pairwise(widths):
        blocks += [Block(before, width, 1 if width == widths[0] else 2), Block(width, width, 1)]
    stem = [*_convolved(3, widths[0], 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))


class OneDraw(Recipe):
    """The recipe with one draw of all weights for a batch."""

    estimator = "weights"


@dataclass(frozen=True)
class Setup:
    """What is measured, and where."""

    device: str
    clients: int
    steps: int
    compiled: bool
    memory: int
    rounds: int


LOOPS: dict[str, Callable[..., int]] = {
    "plain deterministic loop": deterministic,
    "plain Bayesian loop": lambda *a, **k: bayesian(*a, **k, prior_step=False),
    "plain Bayesian loop with Eq. 10": bayesian,
}
METHODS: dict[str, Method] = {
    "FedPer": FedPer(),
    "BPFed": BPFed(draws=1),
    "BPFed, two draws": BPFed(draws=2),
    "recipe, one draw": OneDraw(),
    "recipe": Recipe(),
}
#: Which plain loop a method is set beside.
BESIDE = {
    "FedPer": "plain deterministic loop",
    "BPFed": "plain Bayesian loop with Eq. 10",
    "recipe, one draw": "plain Bayesian loop",
    "recipe": "plain Bayesian loop",
}


@contextmanager
def no_kernels() -> Iterator[None]:
    """PyTorch's own convolutions."""
    os.environ["BPFED_KERNELS"] = "off"
    try:
        yield
    finally:
        del os.environ["BPFED_KERNELS"]


@contextmanager
def unrepeatable() -> Iterator[None]:
    """The fastest convolutions that cuDNN finds, repeatable or not."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = False, True
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before


@contextmanager
def grouped() -> Iterator[None]:
    """Wide convolutions as grouped ones of PyTorch, not as products of matrices."""
    before, conv.POSITIONS = conv.POSITIONS, 0
    try:
        yield
    finally:
        conv.POSITIONS = before


@contextmanager
def whole() -> Iterator[None]:
    """The whole step compiled, not only its element-wise operations on all weights."""
    before = compiled_step.compiled_regions
    compiled_step.compiled_regions = lambda *_: None  # type: ignore[assignment]
    try:
        yield
    finally:
        compiled_step.compiled_regions = before


#: Other ways to run the same, on a GPU.
VARIANTS: dict[str, Callable[[], Any]] = {
    "grouped": grouped,
    "whole": whole,
    "kernels off": no_kernels,
    "cudnn benchmark": unrepeatable,
}


def run() -> dict[str, object]:
    """As part of ``make bench``: on a GPU where there is one, else on one thread of the CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return measure(_setup(device), [name for name in (*LOOPS, *METHODS) if name != "BPFed, two draws"])


def _setup(device: str, clients: int = 0, steps: int = 0, compiled: bool | None = None, memory: int = 0) -> Setup:
    gpu = device == "cuda"
    compiled = gpu if compiled is None else compiled
    return Setup(device, clients or (10 if gpu else 4), steps or (30 if gpu else 4), compiled, memory or 32_768, 2)


def measure(
    setup: Setup, jobs: list[str], variants: tuple[str, ...] = (), profile: bool = False, seconds: float = 3600.0
) -> dict[str, object]:
    """Every job by name, its time beside that of its plain loop, and its peak memory; none begins after ``seconds``."""
    pick_device(setup.device)
    found: dict[str, dict[str, Any]] = {}
    start = time.perf_counter()
    with threads(1 if setup.device == "cpu" else torch.get_num_threads()):
        for variant in ("", *variants):
            for job in jobs:
                if time.perf_counter() - start > seconds or (variant and job in LOOPS):
                    continue
                name = f"{job}, {variant}" if variant else job
                if job in LOOPS:
                    found[name] = _loop(setup, LOOPS[job])
                else:
                    with VARIANTS[variant]() if variant else nullcontext():
                        found[name] = _ours(setup, METHODS[job], profile)
                if beside := found.get(BESIDE.get(job, "")):
                    found[name]["times the plain loop"] = round(found[name]["ms per step"] / beside["ms per step"], 2)
                print(f"  {name}: {json.dumps(found[name], ensure_ascii=False)}", flush=True)
    name = torch.cuda.get_device_name() if setup.device == "cuda" else "cpu, one thread"
    return {"device": name, "clients": setup.clients, "batch": BATCH, "compiled": setup.compiled, "steps": found}


def _loop(setup: Setup, loop: Callable[..., int]) -> dict[str, Any]:
    count = BATCH * setup.steps
    data = [
        TensorDataset(torch.randn(count, *SHAPE), torch.randint(0, CLASSES, (count,))) for _ in range(setup.clients)
    ]
    first = resnet18()

    def copied() -> nn.Module:  # drawing first weights is no part of a step
        return copy.deepcopy(first)

    loop(copied, data[:1], BATCH, 1, device=setup.device)
    return _timed(setup, lambda: loop(copied, data, BATCH, 1, device=setup.device))


def _ours(setup: Setup, method: Method, profile: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    start = time.perf_counter()
    stacked = Stacked(
        method,
        resnet18(),
        SHAPE,
        setup.clients,
        BATCH * setup.steps,
        BATCH,
        setup.device,
        setup.compiled,
        epochs=1,
        memory=setup.memory,
    )
    ready = time.perf_counter() - start
    stacked.round()
    _wait(setup)
    first = time.perf_counter() - start
    found = _timed(setup, stacked.round)
    found |= {
        "clients side by side": stacked.chunk,
        "s to be ready": round(ready, 1),
        "s to the first round": round(first, 1),
    }
    if profile:
        found["ms in kernels"] = _profiled(setup, stacked)
    return found


def _timed(setup: Setup, job: Callable[[], int]) -> dict[str, Any]:
    """The fastest of some rounds, and the peak of memory in them."""
    _forget(setup)
    times = []
    for _ in range(setup.rounds):
        start = _clock(setup)
        steps = job()
        times.append((_clock(setup) - start) / steps * setup.clients)
    return {"ms per step": round(1e3 * min(times), 2), "peak MiB": _peak(setup)}


def _clock(setup: Setup) -> float:
    if setup.device == "cuda":
        _wait(setup)
        return time.perf_counter()
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _wait(setup: Setup) -> None:
    if setup.device == "cuda":
        torch.cuda.synchronize()


def _forget(setup: Setup) -> None:
    """Start a new peak of memory."""
    gc.collect()
    if setup.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def _peak(setup: Setup) -> int:
    if setup.device == "cuda":
        return torch.cuda.max_memory_allocated() >> 20
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return int(lines["VmHWM"].split()[0]) >> 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def _profiled(setup: Setup, stacked: Stacked, most: int = 14) -> dict[str, float]:
    """Milliseconds of a step in its longest kernels, and in all."""
    gpu = setup.device == "cuda"
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if gpu else kinds.CPU]) as profile:
        stacked.round()
        _wait(setup)
    spent: dict[str, float] = {}
    calls = 0
    for event in profile.events():
        if (event.device_type == torch.autograd.DeviceType.CUDA) == gpu:
            spent[event.name[:70]] = spent.get(event.name[:70], 0.0) + (
                event.device_time if gpu else event.self_cpu_time_total
            )
            calls += 1
    steps = setup.steps * (1 if gpu else setup.clients)
    longest = sorted(spent.items(), key=lambda kv: -kv[1])[:most]
    per_step = {name: round(value / steps / 1e3, 3) for name, value in longest}
    return per_step | {"all": round(sum(spent.values()) / steps / 1e3, 2), "calls": round(calls / steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", default=";".join([*LOOPS, *METHODS]), help="names with semicolons between them")
    parser.add_argument("--variants", default="", help=f"all, or some of {', '.join(VARIANTS)}")
    parser.add_argument("--clients", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--memory", type=int, default=0, help="MiB for the state of clients in training")
    parser.add_argument("--compile", choices=["on", "off"], default=None)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no job after so many")
    parser.add_argument("--profile", action="store_true", help="list the longest kernels")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    compiled = None if args.compile is None else args.compile == "on"
    setup = _setup(args.device, args.clients, args.steps, compiled, args.memory)
    jobs = [job for job in (*LOOPS, *METHODS) if job in args.jobs.split(";")]
    variants = tuple(VARIANTS) if args.variants == "all" else tuple(v for v in args.variants.split(",") if v)
    result = {
        "bpfed": bpfed.__version__,
        "torch": torch.__version__,
        **measure(setup, jobs, variants, args.profile, args.seconds),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
