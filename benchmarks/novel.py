"""A client that took no part in training: adapted to a run, or trained alone, on 1 to 50 examples per class (mnist-small)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bpfed
from bpfed.data import FederatedData, load
from bpfed.engine.federation import Federation
from bpfed.inference.likelihoods import Categorical
from bpfed.methods import BPFed, method
from bpfed.nn.model import Model
from bpfed.nn.networks import default
from bpfed.runs.adapt import adapt
from bpfed.runs.client import Client

ROUNDS, SEED = 40, 0
#: Clients held out of training, one of each of the two groups of labels.
HELD = (8, 9)
PER_CLASS = (1, 2, 5, 10, 50)
#: Steps that training alone may take: those are used that are best on the client's other training examples.
ALONE = (100, 300, 1000)
DRAWS = 50
PICTURE = Path(__file__).parent.parent / "docs" / "figures" / "novel-clients.png"


def run() -> dict[str, object]:
    """Train without the newcomers, let them join, and draw the curve."""
    data = load("mnist-small", seed=SEED)
    with tempfile.TemporaryDirectory() as folder:
        trained = bpfed.fit(BPFed(), without(data, HELD), out=Path(folder) / "run", rounds=ROUNDS, seed=SEED)
        return curve(trained, data, HELD, PICTURE)


def without(data: FederatedData, held: Sequence[int]) -> FederatedData:
    """The same data without these clients."""
    kept = torch.tensor([i for i in range(len(data)) if i not in held])
    names = tuple(data.clients[i] for i in kept.tolist())
    return replace(data, clients=names, train=data.train.select(kept), test=data.test.select(kept))


def curve(trained: bpfed.Run, data: FederatedData, held: Sequence[int], picture: Path) -> dict[str, object]:
    """Figures on the newcomers' test examples, as means over them."""
    start = Model.of(default(data.input_shape, data.classes, SEED), Categorical(data.classes), data.train.x[:2], "all")
    scratch = Federation.of(method("local")(), without(data, held), trained.settings, start)
    rows: dict[str, list[dict[str, Any]]] = {"adapted": [], "alone": []}
    steps = ALONE[-1]
    for k in PER_CLASS:
        parts = [few(*data.train.client(c), k) for c in held]
        tests = [data.test.client(c) for c in held]
        if all(len(p[3]) for p in parts):  # else as before
            others = [p[2:] for p in parts]
            scores = {s: _mean([adapt(scratch, *p[:2], steps=s) for p in parts], others)[0] for s in ALONE}
            steps = max(scores, key=scores.__getitem__)
        found = {
            "adapted": [trained.adapt(*p[:2], name=data.clients[c]) for c, p in zip(held, parts, strict=True)],
            "alone": [adapt(scratch, *p[:2], steps=steps) for p in parts],
        }
        for name, clients in found.items():
            accuracy, nll = _mean(clients, tests)
            row = {"per class": k, "accuracy": round(accuracy, 4), "nll": round(nll, 4)}
            rows[name].append(row | ({"steps": steps} if name == "alone" else {}))
            print(f"  {name}: {rows[name][-1]}", flush=True)
    unlabelled = [trained.adapt(name=data.clients[c]) for c in held]
    accuracy, nll = _mean(unlabelled, [data.test.client(c) for c in held])
    rows["adapted"].insert(0, {"per class": 0, "accuracy": round(accuracy, 4), "nll": round(nll, 4)})
    draw(rows, picture)
    return {"data": data.name, "rounds": ROUNDS, "seed": SEED, "newcomers": [data.clients[c] for c in held], **rows}


def few(x: Tensor, y: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first k examples of each class, and the others."""
    taken = torch.zeros(len(y), dtype=torch.bool)
    for c in y.unique():
        taken[(y == c).nonzero().flatten()[:k]] = True
    return x[taken], y[taken], x[~taken], y[~taken]


def _mean(clients: Sequence[Client], examples: Sequence[tuple[Tensor, ...]]) -> tuple[float, float]:
    """Accuracy and NLL, each as the mean over clients."""
    scores = []
    for client, (x, y) in zip(clients, examples, strict=True):
        probs = client.predict(x, draws=DRAWS).probs  # type: ignore[union-attr]
        nll = -probs[torch.arange(len(y)), y].clamp(min=1e-12).log().mean()
        scores.append((float((probs.argmax(-1) == y).float().mean()), float(nll)))
    accuracy, loss = zip(*scores, strict=True)
    return sum(accuracy) / len(scores), sum(loss) / len(scores)


def draw(rows: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Accuracy and NLL over the number of examples."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    names = {"adapted": "BPFed, adapted", "alone": "trained alone"}
    for axes, (metric, label, unit) in zip(
        figure.subplots(1, 2), (("accuracy", "Accuracy, %", 100.0), ("nll", "NLL, nats", 1.0)), strict=True
    ):
        for (name, title), style in zip(names.items(), ("o-", "s--"), strict=True):
            shown = [row for row in rows[name] if row["per class"]]
            axes.plot([r["per class"] for r in shown], [unit * r[metric] for r in shown], style, label=title)
        axes.set_xscale("log")
        axes.set_xticks(PER_CLASS, [str(k) for k in PER_CLASS])
        axes.minorticks_off()
        axes.set_xlabel("labelled examples per class")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)
