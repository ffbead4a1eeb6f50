"""The published protocol: BPFed and pFedBayes with the settings of the public reference code, the best of 800 rounds.

Only the reference picks its round on test data; that figure is given under this protocol's name and no other. The split
is that code's too (`experiments.slices`); its data are the same for all seeds. The test is in every tenth round, where
the code tests in every one.

    bpfed paper published --cells mnist-small --methods bpfed --seeds 1
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bpfed
from bpfed._util.console import Say, to_stderr
from bpfed._util.errors import UserError, unknown
from bpfed._util.files import to_json, write_whole
from bpfed._util.text import duration
from bpfed.config.settings import Device, Settings
from bpfed.data import load
from bpfed.data.partition import CELLS
from bpfed.engine.federation import pick_device
from bpfed.nn.networks import LeNet, default
from bpfed.runs.fit import RunRequest, train_runs
from bpfed.runs.run import Run
from experiments.cell import seed_record
from experiments.reference_methods import PUBLISHED, PublishedBPFed
from experiments.slices import load_slices
from experiments.training import SaidProgress, check_same, check_writable, device_name, read, record, tests_on

ROUNDS = 800
#: Rounds from one test to the next.
EVERY = 10
PARTITION = "groups"
BATCH = 100


class OnePool(LeNet):
    """The reference's Bayesian network for CIFAR-10: LeNet without the second pooling layer, so fc1 takes 1 600 inputs.

    It has 206 006 weights, where the networks of the paper's deterministic rows have 62 006.
    """

    def __init__(self, channels: int = 3, classes: int = 10) -> None:
        super().__init__(channels, classes)
        self.fc1 = nn.Linear(1600, 120)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.relu(self.conv2(x))
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))


def network(shape: tuple[int, ...], classes: int, seed: int, one_pool: bool = True) -> nn.Module:
    """The reference's network for inputs of this shape; ``one_pool=False``: the paper's own."""
    made = default(shape, classes, seed)
    if not one_pool or not isinstance(made, LeNet):
        return made
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return OnePool(shape[0], classes)


def settings(rounds: int = ROUNDS, device: Device = "auto") -> Settings:
    """How the reference runs: batches of 100, ten clients a round, one weight draw in a prediction."""
    # Above some forty rounds even a CPU repays a compiled step.
    return Settings(
        rounds=rounds,
        participants=10,
        batch=BATCH,
        eval_every=min(EVERY, rounds),
        eval_draws=1,
        schedule="constant",
        device=device,
        compile="on" if rounds >= 40 else "auto",
    )


def train(
    method: PublishedBPFed,
    cell: str,
    how: Settings,
    seeds: Sequence[int],
    say: Say,
    what: str,
    partition: str | None = None,
    one_pool: bool = True,
) -> list[Run]:
    """The runs of these seeds side by side, with networks of their own.

    ``partition`` is one of the protocol ``paper``, dealt out again for each seed; None: the reference's own split.
    """
    requests: list[RunRequest] = []
    for seed in seeds:
        data = load_slices(cell) if partition is None else load(cell, partition=partition, seed=seed)
        module = network(data.input_shape, data.classes, seed, one_pool)
        data = tests_on(data, pick_device(how.device))
        told = () if requests else (SaidProgress(say, what, how.rounds),)
        requests.append(RunRequest(method, data, replace(how, seed=seed), module, callbacks=told, choose=False))
    return train_runs(requests)


def run(
    out: Path,
    seeds: Sequence[int] = (0,),
    rounds: int = ROUNDS,
    device: Device = "auto",
    say: Say = to_stderr,
    cells: Iterable[str] | None = None,
    methods: Iterable[str] | None = None,
) -> None:
    """Fill ``out/published/groups/<cell>/<method>.json``; what is there already with these settings and seeds is kept.

    Args:
        out: Folder of results.
        seeds: Which.
        rounds: Of every run.
        device: ``auto``, ``cpu`` or ``cuda``.
        say: Told how far it is.
        cells: Names of cells; None: all six.
        methods: ``bpfed`` and ``pfedbayes``; None: both.
    """
    for cell in _known("cell", cells, CELLS):
        for name in _known("method", methods, PUBLISHED):
            _cell(out, cell, name, tuple(seeds), settings(rounds, device), say)


def best(one: dict[str, Any]) -> dict[str, float]:
    """The tested round with the highest accuracy of one seed's record: round, accuracy, NLL and ECE."""
    curve = one["curve"]
    at = max(range(len(curve["round"])), key=lambda i: curve["accuracy"][i])
    return {name: values[at] for name, values in curve.items()}


def _cell(out: Path, cell: str, name: str, seeds: tuple[int, ...], how: Settings, say: Say) -> None:
    path = out / "published" / PARTITION / cell / f"{name}.json"
    method = PUBLISHED[name]()
    asked = {"cell": cell, "method": name, "settings": record(method, how), "rounds": how.rounds}
    found = read(path)
    check_same(found, asked, path)
    kept = {one["seed"]: one for one in found.get("runs", [])}
    missing = [seed for seed in seeds if seed not in kept]
    title = {"bpfed": "BPFed", "pfedbayes": "pFedBayes"}[name]
    if not missing:
        say(f"{title} on {cell}: there already")
        return
    check_writable(path.parent)
    start = time.perf_counter()
    for one in train(method, cell, how, missing, say, f"{title} on {cell}"):
        kept[one.settings.seed] = seed_record(one)
    seconds = time.perf_counter() - start
    made = {
        "protocol": "published",
        "partition": PARTITION,
        **asked,
        "title": title,
        "bins": how.bins,
        "device": device_name(how.device),
        "seconds": round(seconds + found.get("seconds", 0.0), 1),
        "bpfed": bpfed.__version__,
        "torch": torch.__version__,
        "runs": [kept[seed] for seed in sorted(kept)],
    }
    write_whole(path, to_json(made))
    tops = [best(kept[seed]) for seed in missing]
    say(
        f"{title} on {cell}: best round's accuracy {100 * sum(t['accuracy'] for t in tops) / len(tops):.2f} %, "
        f"ECE {100 * sum(t['ece'] for t in tops) / len(tops):.1f} %, {duration(seconds)}"
    )


def _known(kind: str, names: Iterable[str] | None, known: Iterable[str]) -> list[str]:
    wanted = list(known if names is None else names)
    for name in wanted:
        if name not in known:
            raise unknown(kind, name, known)
    if not wanted:
        raise UserError(f"No {kind} is named; leave the option out for all of them.")
    return wanted
