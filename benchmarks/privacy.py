"""Accuracy and calibration against ε (of clients, δ = 1e-5) and of compressed messages, with hundreds of clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
from torch import nn
from torch.nn.functional import avg_pool2d

from bpfed.data import FederatedData, load
from bpfed.engine.settings import Settings
from bpfed.methods import Method, method
from bpfed.networks import mlp
from bpfed.privacy import noise_for
from bpfed.run import prepare, train_together

ROUNDS, EPOCHS, BATCH, HIDDEN, DELTA = 20, 10, 100, 32, 1e-5
#: Number of clients; half of them take part in a round in the mean.
CLIENTS = {"mnist": 500, "digits": 200}
RATE = 0.5
SEEDS = (0, 1, 2)
EPSILONS = (math.inf, 8.0, 2.0)
#: Clips among which one is chosen for each method and ε, by NLL on a third of the training examples of seed 0.
CLIPS = (0.1, 0.3, 1.0, 3.0)
HELD_OUT = 0.34
METHODS: dict[str, Method] = {name: method(name)(lr=3e-3) for name in ("bpfed", "fedavg", "fedper")}


def run() -> dict[str, object]:
    """Choose clips, train with every seed, and give means over seeds."""
    return {"seeds": list(SEEDS), **{name: scene(name) for name in CLIENTS}}


def scene(name: str) -> list[dict[str, Any]]:
    """The rows of one dataset."""
    data = {seed: _loaded(name, seed) for seed in SEEDS}
    rows = [row for who, chosen in METHODS.items() for row in _rows(who, chosen, data)]
    alone = [_trained(method("local")(lr=3e-3), [data[s]], [_alone(s, len(data[s]))])[0] for s in SEEDS]
    rows.append(_said("local", "nothing is shared", alone))
    print(f"{name}\n{table(rows)}", flush=True)
    return rows


def _loaded(name: str, seed: int) -> FederatedData:
    """Images of 7 x 7 or 8 x 8."""
    data = load(name, clients=CLIENTS[name], test_fraction=0.3, seed=seed)
    if name == "digits":
        return data
    train, test = (replace(e, x=avg_pool2d(e.x.view(-1, 1, 28, 28), 4).flatten(1)) for e in (data.train, data.test))
    return replace(data, train=train, test=test)


def _rows(name: str, chosen: Method, data: Mapping[int, FederatedData]) -> list[dict[str, Any]]:
    rows = [_said(name, "ε = ∞", _trained(chosen, list(data.values()), [_settings(s, data[s]) for s in SEEDS]))]
    half = [_settings(s, data[s], compression="half") for s in SEEDS]
    rows.append(_said(name, "ε = ∞, compressed", _trained(chosen, list(data.values()), half)))
    for epsilon in EPSILONS[1:]:
        z = noise_for(epsilon, DELTA, ROUNDS, RATE)
        parted = _held_out(data[SEEDS[0]])
        tried = _trained(chosen, [parted] * len(CLIPS), [_settings(0, parted, clip=c, noise=z) for c in CLIPS])
        clip = min(zip(CLIPS, tried, strict=True), key=lambda pair: pair[1]["nll"])[0]
        found = _trained(chosen, list(data.values()), [_settings(s, data[s], clip=clip, noise=z) for s in SEEDS])
        rows.append(_said(name, f"ε = {epsilon:g}", found) | {"noise": round(z, 3), "clip": clip})
    return rows


def _settings(seed: int, data: FederatedData, **changes: Any) -> Settings:
    return Settings(
        rounds=ROUNDS,
        participants=round(RATE * len(data)),
        epochs=EPOCHS,
        batch=BATCH,
        sampling="poisson",
        seed=seed,
        eval_every=ROUNDS,
        delta=DELTA,
        device="cpu",
        **changes,
    )


def _alone(seed: int, clients: int) -> Settings:
    """As many local steps as a client of the others takes in the mean, all in one round."""
    steps = round(EPOCHS * ROUNDS * RATE)
    return Settings(rounds=1, participants=clients, epochs=steps, batch=BATCH, seed=seed, device="cpu")


def _held_out(data: FederatedData) -> FederatedData:
    """Tested on training examples, which are then not trained on."""
    parted = data.hold_out(HELD_OUT, 0)
    assert parted.calibration is not None
    return replace(parted, test=parted.calibration, calibration=None)


def _trained(chosen: Method, data: Sequence[FederatedData], settings: Sequence[Settings]) -> list[dict[str, float]]:
    """The last round's pooled metrics of runs side by side."""
    runs = [prepare(chosen, d, s, _network(d.input_shape[0], s.seed)) for d, s in zip(data, settings, strict=True)]
    train_together(runs, [[] for _ in runs])
    last = [run.history[-1] for run in runs]
    return [
        {k: r[k]["pooled"] for k in ("accuracy", "nll", "ece")} | {"epsilon": r.get("epsilon", math.inf)} for r in last
    ]


def _network(inputs: int, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return mlp(inputs, 10, (HIDDEN,))


def _said(name: str, privacy: str, found: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"method": name, "privacy": privacy}
    for key in ("accuracy", "nll", "ece"):
        values = [f[key] for f in found]
        row[key] = round(mean(values), 4)
        row[f"{key} of seeds"] = [round(v, 4) for v in values]
    print(f"  {row}", flush=True)
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown."""
    lines = ["| method | privacy | accuracy | NLL | ECE | z | C |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        spread = 100 * (max(row["accuracy of seeds"]) - min(row["accuracy of seeds"])) / 2
        lines.append(
            f"| {row['method']} | {row['privacy']} | {100 * row['accuracy']:.1f} ± {spread:.1f} % | {row['nll']:.2f} | "
            f"{100 * row['ece']:.1f} % | {row.get('noise', '')} | {row.get('clip', '')} |"
        )
    return "\n".join(lines)
