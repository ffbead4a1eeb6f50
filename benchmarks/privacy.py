"""Accuracy and calibration against ε (of clients, δ = 1e-5) and of compressed messages, with hundreds of clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import avg_pool2d

from bpfed.aggregation.privacy import noise_for
from bpfed.config.settings import Settings
from bpfed.data import FederatedData, load
from bpfed.data.arrays import from_arrays
from bpfed.data.partition import Partition
from bpfed.methods import Method, method
from bpfed.nn.networks import mlp
from bpfed.runs.fit import prepare
from bpfed.runs.run import train_together

ROUNDS, EPOCHS, BATCH, HIDDEN, DELTA = 20, 10, 100, 32, 1e-5
#: Number of clients; half of them take part in a round in the mean.
CLIENTS = {"digits": 200, "mnist": 500}
RATE, TEST = 0.5, 0.3
SEEDS = (0, 1, 2)
EPSILONS = (math.inf, 8.0, 2.0)
#: Clips among which one is chosen for each method, ε and seed, by the Brier score in a federation of the training examples.
CLIPS = (0.3, 1.0, 3.0)
#: On digits, BPFed also with nothing personal but the bias of the last layer: for six examples a whole layer is too much.
OWN_BIAS = "bpfed, own bias"
METHODS: dict[str, Method] = {
    "bpfed": method("bpfed")(lr=3e-3),
    OWN_BIAS: method("bpfed")(lr=3e-3, personal="3.bias"),
    "fedavg": method("fedavg")(lr=3e-3),
    "fedper": method("fedper")(lr=3e-3),
}


def run() -> dict[str, object]:
    """Choose clips, train with every seed, and give means over seeds."""
    return {"seeds": list(SEEDS), **{name: scene(name) for name in CLIENTS}}


def scene(name: str) -> list[dict[str, Any]]:
    """The rows of one dataset."""
    data = {seed: _loaded(name, seed) for seed in SEEDS}
    wanted = {who: chosen for who, chosen in METHODS.items() if who != OWN_BIAS or name == "digits"}
    rows = [row for who, chosen in wanted.items() for row in _rows(who, chosen, data)]
    alone = [_trained(method("local")(lr=3e-3), [data[s]], [_alone(s, len(data[s]))])[0] for s in SEEDS]
    rows.append(_said("local", "nothing is shared", alone))
    print(f"{name}\n{table(rows)}", flush=True)
    return rows


def _loaded(name: str, seed: int) -> FederatedData:
    """Images of 7 x 7 or 8 x 8."""
    data = load(name, clients=CLIENTS[name], test_fraction=TEST, seed=seed)
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
        clips = {seed: _chosen_clip(chosen, data[seed], seed, z) for seed in SEEDS}
        found = _trained(chosen, list(data.values()), [_settings(s, data[s], clip=clips[s], noise=z) for s in SEEDS])
        rows.append(_said(name, f"ε = {epsilon:g}", found) | {"noise": round(z, 3), "clip": list(clips.values())})
    return rows


def _chosen_clip(chosen: Method, data: FederatedData, seed: int, z: float) -> float:
    """The best of `CLIPS` in a smaller federation of the training examples, with the same noise on the mean of a round."""
    small = _dealt_again(data, seed)
    noise = z * len(small) / len(data)
    tried = _trained(chosen, [small] * len(CLIPS), [_settings(seed, small, clip=c, noise=noise) for c in CLIPS])
    print(f"    {[(c, round(t['brier'], 3), round(t['accuracy'], 3)) for c, t in zip(CLIPS, tried, strict=True)]}")
    return min(zip(CLIPS, tried, strict=True), key=lambda pair: pair[1]["brier"])[0]


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


def _dealt_again(data: FederatedData, seed: int) -> FederatedData:
    """All training examples dealt out anew, to clients with as many examples as those of ``data`` have with their tests.

    To hold out some of a client's six examples would leave it without any of their classes, which its tests do not.
    """
    pool, clients = data.train, round((1.0 - TEST) * len(data))
    owners = Partition("groups", 5).owners(pool.y.numpy(), clients, np.random.default_rng(seed))
    return from_arrays(pool.x, pool.y, owners, name=data.name, test_fraction=TEST, seed=seed)


def _trained(chosen: Method, data: Sequence[FederatedData], settings: Sequence[Settings]) -> list[dict[str, float]]:
    """The last round's pooled metrics of runs side by side."""
    runs = [prepare(chosen, d, s, _network(d.input_shape[0], s.seed)) for d, s in zip(data, settings, strict=True)]
    train_together(runs, [[] for _ in runs])
    last = [run.history[-1] for run in runs]
    return [
        {k: r[k]["pooled"] for k in ("accuracy", "nll", "brier", "ece")} | {"epsilon": r.get("epsilon", math.inf)}
        for r in last
    ]


def _network(inputs: int, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return mlp(inputs, 10, (HIDDEN,))


def _said(name: str, privacy: str, found: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"method": name, "privacy": privacy}
    for key in ("accuracy", "nll", "brier", "ece"):
        values = [f[key] for f in found]
        row[key] = round(mean(values), 4)
        row[f"{key} of seeds"] = [round(v, 4) for v in values]
    print(f"  {row}", flush=True)
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown."""
    lines = ["| method | privacy | accuracy | NLL | Brier | ECE | z | C |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        spread = 100 * (max(row["accuracy of seeds"]) - min(row["accuracy of seeds"])) / 2
        clips = ", ".join(f"{clip:g}" for clip in sorted(set(row.get("clip", ()))))
        lines.append(
            f"| {row['method']} | {row['privacy']} | {100 * row['accuracy']:.1f} ± {spread:.1f} % | {row['nll']:.2f} | "
            f"{row['brier']:.2f} | {100 * row['ece']:.1f} % | {row.get('noise', '')} | {clips} |"
        )
    return "\n".join(lines)
