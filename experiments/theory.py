"""The theorem measured: the mean Hellinger error of clients whose true functions are known, over n and over N.

Client i's function f_i is a teacher network (`experiments.teachers`). The students are wider than the teachers, so that
the theorem's approximation errors ξ_i are 0. What is measured is the theorem's left side: E_q[d²(P_i, P_w)] by draws of
w from what client i predicts with, d² on fresh inputs, the mean over clients. The number of local steps is the same for
every n, since the theorem is on the minimiser and not on the way there.

``results/theory.json``:

    {"setting": {...},                    what all points have in common, with every setting of the methods
     "points": [{"method", "n", "clients",
                 "hellinger": [one a seed],   mean over clients of E_q[d²]
                 "of_mean": [one a seed],     the same of the network at q's mean: what is left without q's spread
                 "seconds"}, ...],
     "by_n": {"clients": 10, "n": [...],
              "methods": {"bpfed": {"title", "hellinger": [[one a seed], one list for each n], "of_mean": likewise,
                                    "mean": [...], "slope", "slope_se"}, "bpfed-recipe": {...}},
              "bound": {"r_n": [...], "epsilon_n2": [...], "leading": "epsilon_n2", "slope", "slope_r_n"}},
     "by_clients": {"n": 100, "clients": [...], "methods": likewise,
                    "bound": {"r_n": [...], "epsilon_n2": [...], "slope", "slope_r_n"}}}

A slope is that of log error on log n (or log N) by least squares, mean over seeds; ``slope_se`` is its standard error
over seeds. The bound's slopes are fitted over the same range. ``leading`` is the term that falls
slowest: ε_n² has the highest power of the logarithm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bpfed._util.console import Say
from bpfed._util.errors import UserError
from bpfed._util.files import to_json, write_whole
from bpfed._util.scores import deviation, mean
from bpfed._util.text import duration
from bpfed.config.migrations import without_constants
from bpfed.config.settings import Device, Settings
from bpfed.engine.federation import Federation
from bpfed.inference.likelihoods import Normal
from bpfed.inference.predictive import GaussianPredictive
from bpfed.inference.rng import Purpose
from bpfed.methods import METHODS
from bpfed.methods.base import rows
from bpfed.nn.networks import mlp
from bpfed.runs.fit import prepare
from bpfed.runs.run import Run, train_together
from experiments.bounds import epsilon_n, r_n, squared_hellinger
from experiments.teachers import Setting, Task, task
from experiments.training import SaidProgress, check_same, check_writable, read

FILE = "theory.json"


def start(setting: Setting, method: str, n: int, clients: int, seed: int, device: Device) -> tuple[Run, Task]:
    """A run before its first round, and its data."""
    made = task(setting, n, clients, seed)
    batch = min(setting.batch, n)
    chosen = Settings(
        rounds=setting.rounds,
        participants=clients,
        epochs=max(1, round(setting.steps / math.ceil(n / batch))),
        batch=batch,
        seed=seed,
        schedule="cosine",
        eval_every=setting.rounds,
        eval_draws=1,
        compile="off",
        device=device,
    )
    student = _student(setting, seed)
    known = Normal(setting.noise, learnt=False)
    return prepare(setting.method(method), made.data, chosen, student, known), made


def measure(federation: Federation, made: Task, noise_scale: float, draws: int) -> tuple[float, float]:
    """Mean over clients of E_q[d²], by draws of the weights, and of d² at the mean weights."""
    who = torch.arange(len(federation))
    x, true = made.x.to(federation.device), made.true.to(federation.device)
    key = federation.keys(0, Purpose.EVALUATION, who)
    with torch.no_grad():
        predictive = federation.method.predictive(
            federation.model, rows(federation.shared, len(who)), federation.ready(who)
        )
        assert isinstance(predictive, GaussianPredictive)

        def error(weights: Tensor) -> float:
            found = federation.model.stacked_outputs(weights, x).squeeze(-1)
            return float(squared_hellinger(found, true, noise_scale).mean())

        drawn = [error(predictive.draw(key, m)) for m in range(draws)]
        return sum(drawn) / draws, error(predictive.weights.mean)


def point(
    setting: Setting, method: str, n: int, clients: int, seeds: Sequence[int], device: Device, say: Say, what: str
) -> dict[str, Any]:
    """One point of the curves, all seeds side by side; ``say`` is told how far it is, under the name ``what``."""
    began = time.perf_counter()
    pairs = [start(setting, method, n, clients, seed, device) for seed in seeds]
    shown = [[SaidProgress(say, what, setting.rounds)], *([] for _ in seeds[1:])]
    train_together([run for run, _ in pairs], shown)
    found = [measure(run.federation, made, setting.noise, setting.draws) for run, made in pairs]
    return {
        "method": method,
        "n": n,
        "clients": clients,
        "hellinger": [error for error, _ in found],
        "of_mean": [error for _, error in found],
        "seconds": round(time.perf_counter() - began, 1),
    }


def slope(sizes: Sequence[int], errors: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Slope of log error on log size, mean over seeds, and its standard error over them (NaN of one).

    All points of a seed share its functions, so the residuals around a line are not independent; seeds are.

    Args:
        sizes: ``[M]``.
        errors: ``[M][seeds]``.
    """
    x = torch.tensor(sizes, dtype=torch.float64).log()
    y = torch.tensor(errors, dtype=torch.float64).log()
    x = x - x.mean()
    slopes = ((x[:, None] * y).sum(0) / x.square().sum()).tolist()
    return mean(slopes), deviation(slopes) / math.sqrt(len(slopes))


def summary(setting: Setting, points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The file's content: the points, the two curves of those that are there, and the bound beside them."""
    shape = setting.shape
    found = {(p["method"], p["n"], p["clients"]): p for p in points}

    def curves(sizes: Sequence[int], at: Callable[[int], tuple[int, int]]) -> tuple[list[int], dict[str, Any]]:
        done = [s for s in sizes if all((m, *at(s)) in found for m in setting.methods)]
        methods = {}
        for method in setting.methods if done else ():
            mine = [found[method, *at(s)] for s in done]
            errors = [p["hellinger"] for p in mine]
            fitted = slope(done, errors) if len(done) > 1 else (math.nan, math.nan)
            methods[method] = {
                "title": METHODS[method].title,
                "hellinger": errors,
                "of_mean": [p["of_mean"] for p in mine],
                "mean": [sum(e) / len(e) for e in errors],
                "slope": fitted[0],
                "slope_se": fitted[1],
            }
        return done, methods

    def bound(sizes: Sequence[int], at: Callable[[int], tuple[int, int]]) -> dict[str, Any]:
        r = [r_n(shape, *at(s)) for s in sizes]
        epsilon = [epsilon_n(shape, at(s)[0]) ** 2 for s in sizes]
        slopes = [slope(sizes, [[v] for v in term])[0] if len(sizes) > 1 else math.nan for term in (epsilon, r)]
        return {"r_n": r, "epsilon_n2": epsilon, "leading": "epsilon_n2", "slope": slopes[0], "slope_r_n": slopes[1]}

    def over_n(n: int) -> tuple[int, int]:
        return n, setting.clients

    def over_clients(many: int) -> tuple[int, int]:
        return setting.fixed, many

    by_n, by_n_methods = curves(setting.examples, over_n)
    by_clients, by_clients_methods = curves(setting.many, over_clients)
    return {
        "setting": setting.record(),
        "points": list(points),
        "by_n": {"clients": setting.clients, "n": by_n, "methods": by_n_methods, "bound": bound(by_n, over_n)},
        "by_clients": {
            "n": setting.fixed,
            "clients": by_clients,
            "methods": by_clients_methods,
            "bound": bound(by_clients, over_clients),
        },
    }


def run(out: Path, seeds: int, device: Device, say: Say, setting: Setting | None = None) -> None:
    """Measure all points and write them to ``out``.

    Points that ``out`` holds already are kept, and where they have more seeds, so have the others; it is written after
    each point. Those of a method whose settings have changed since are measured again.

    Args:
        out: The JSON file.
        seeds: Each has teachers, data and first weights of its own.
        device: ``auto``, ``cpu`` or ``cuda``.
        say: Called with messages on how far it has come.

    Raises:
        OtherResult: The file is of another setting or of fewer seeds.
    """
    setting = setting or Setting()
    if seeds < 1:
        raise UserError(f"seeds is {seeds}, but must be at least 1.")
    grid, points = setting.grid(), _kept(out, setting, seeds)
    kept = {(p["method"], p["n"], p["clients"]) for p in points}
    seeds = max([seeds, *(len(p["hellinger"]) for p in points)])
    missing = [at for at in grid if at not in kept]
    if kept:
        say(f"theory: {len(kept)} of {len(grid)} points are in '{out}' already")
    if missing:
        check_writable(out.parent)
    began = time.perf_counter()
    for done, (method, n, clients) in enumerate(missing):
        title = f"theory: {METHODS[method].title}, n = {n}, {clients} clients (point {done + 1} of {len(missing)}"
        left = (time.perf_counter() - began) / done * (len(missing) - done) if done else None
        title += ")" if left is None else f", about {duration(left)} left)"
        say(title)
        found = point(setting, method, n, clients, range(seeds), device, say, title)
        points.append(found)
        points.sort(key=lambda p: grid.index((p["method"], p["n"], p["clients"])))
        write_whole(out, to_json(summary(setting, points)))
        mean = sum(found["hellinger"]) / seeds
        say(f"theory: {METHODS[method].title}, n = {n}, {clients} clients: {mean:.4f} ({duration(found['seconds'])})")
    for line in verdict(summary(setting, points)):
        say(line)


def verdict(content: dict[str, Any]) -> list[str]:
    """What the first sweep says, a line for each method."""
    by_n, lines = content["by_n"], []
    bound = by_n["bound"]
    for method in by_n["methods"].values():
        within = "no slower than" if method["slope"] <= bound["slope"] else "SLOWER than"
        lines.append(
            f"{method['title']}: error ~ n^({method['slope']:.2f} ± {method['slope_se']:.2f}), {within} the bound's "
            f"leading term n^({bound['slope']:.2f}); its r_n is n^({bound['slope_r_n']:.2f})."
        )
    return lines


def _kept(out: Path, setting: Setting, seeds: int) -> list[dict[str, Any]]:
    """The points of a file that need not be measured again."""
    if not out.exists():
        return []
    content, now = read(out), setting.record()
    try:
        was, points = content["setting"], content["points"]
        have = max([len(p["hellinger"]) for p in points], default=0)
        then = {name: without_constants(name, own) for name, own in was["settings"].items()}
        same = {name for name, own in now["settings"].items() if then.get(name) == own}
        kept = [p for p in points if p["method"] in same and len(p["hellinger"]) == have]
        asked = {name: value for name, value in now.items() if name != "settings"}
        check_same(was | {"seeds": range(have)}, asked | {"seeds": range(max(seeds, have))}, out, more=False)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"'{out}' is not a results file of this experiment; remove it or choose another.") from error
    return kept


def _student(setting: Setting, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return mlp(setting.inputs, 1, (setting.width,) * setting.hidden)
