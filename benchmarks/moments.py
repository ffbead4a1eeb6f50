"""Prediction in a single pass against weight draws: the recipe and BPFed on mnist-small, MLP 784-100-10 and LeNet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from bpfed import fit
from bpfed._util.errors import UserError
from bpfed.data import Examples, FederatedData, load
from bpfed.inference.predictive import Classified, Predictive, classify
from bpfed.inference.rng import Purpose
from bpfed.methods import BPFed, Recipe
from bpfed.methods.base import rows
from bpfed.nn.model import Model
from bpfed.nn.networks import LeNet
from bpfed.runs.run import Run

#: Draws that the single pass is compared with in time, and in its probabilities.
DRAWS, MANY = 50, 400
REPEATS = 5


def run() -> dict[str, object] | str:
    """Train, then compare probabilities and time them in turns."""
    try:
        data = load("mnist-small", seed=0)
    except UserError as error:
        return f"left out: {error}"
    torch.set_num_threads(1)
    settings = {"seed": 0, "device": "cpu", "compile": "off", "progress": False}
    settings |= {"eval_every": 20, "eval_clients": 1, "eval_draws": 1}  # the run's own figures are not looked at
    found: dict[str, object] = {"threads": 1}
    for method in (Recipe(), BPFed()):
        start = time.perf_counter()
        mlp = fit(method, data, rounds=20, **settings)
        lenet = fit(method, _padded(data), model=LeNet(1, 10), rounds=5, epochs=5, **settings)
        print(f"  {method.title} trained in {time.perf_counter() - start:.0f} s", flush=True)
        found[method.name] = {
            "MLP, 10 clients": {"agreement": _agreement(mlp, 300), "time": _times(mlp, (1, 300, 1500))},
            "LeNet, 10 clients": {"agreement": _agreement(lenet, 60), "time": _times(lenet, (1, 60))},
        }
    return found


def _padded(data: FederatedData) -> FederatedData:
    """Images of 32 x 32, as LeNet needs them."""

    def part(examples: Examples) -> Examples:
        return replace(examples, x=F.pad(examples.x, (2, 2, 2, 2)))

    return replace(data, train=part(data.train), test=part(data.test))


def _asked(run: Run, examples: int) -> tuple[Model, Predictive, Tensor, Tensor]:
    """All clients with so many of their test examples each."""
    federation, who = run.federation, torch.arange(len(run.data))
    own = federation.method.predictive(federation.model, rows(federation.shared, len(who)), federation.ready(who))
    x = torch.stack(
        [run.data.test.client(i)[0][:: len(run.data.test.y) // len(who) // examples][:examples] for i in who]
    )
    return federation.model, own, x, federation.keys(0, Purpose.EVALUATION, who)


@torch.no_grad()
def _agreement(run: Run, examples: int) -> dict[str, float]:
    asked = _asked(run, examples)
    many, few = classify(*asked, MANY), classify(*asked[:3], asked[3].flip(0), DRAWS)
    single = classify(*asked, 1, "single-pass")

    def gap(a: Classified, b: Classified) -> Tensor:
        return (a.probs - b.probs).abs()

    return {
        "examples": examples * len(run.data),
        f"mean |p - p of {MANY} draws|": round(gap(single, many).mean().item(), 5),
        "the same for the point at the mean": round(_at_mean(asked, many), 5),
        f"the same for {DRAWS} other draws": round(gap(few, many).mean().item(), 5),
        "total variation": round(0.5 * gap(single, many).sum(-1).mean().item(), 5),
        "largest": round(gap(single, many).max().item(), 4),
        "same label": round((single.label == many.label).double().mean().item(), 4),
        "mean epistemic, single pass": round(single.epistemic.mean().item(), 4),
        f"mean epistemic, {MANY} draws": round(many.epistemic.mean().item(), 4),
    }


def _at_mean(asked: tuple[Model, Predictive, Tensor, Tensor], many: Classified) -> float:
    model, predictive, x, _ = asked
    return (model.stacked_outputs(predictive.weights.mean, x).softmax(-1) - many.probs).abs().mean().item()  # type: ignore[attr-defined]


def _times(run: Run, examples: tuple[int, ...]) -> dict[str, dict[str, float]]:
    return {str(n): _time(run, n) for n in examples}


@torch.no_grad()
def _time(run: Run, examples: int) -> dict[str, float]:
    asked = _asked(run, examples)
    jobs: dict[str, Callable[[], object]] = {
        "draws": lambda: classify(*asked, DRAWS),
        "single": lambda: classify(*asked, DRAWS, "single-pass"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(REPEATS + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if turn:  # the first is to warm up
                seconds[name].append(time.perf_counter() - start)
    draws, single = median(seconds["draws"]), median(seconds["single"])
    ratio = median(d / s for d, s in zip(seconds["draws"], seconds["single"], strict=True))
    return {f"{DRAWS} draws, s": round(draws, 4), "single pass, s": round(single, 5), "ratio": round(ratio, 1)}
