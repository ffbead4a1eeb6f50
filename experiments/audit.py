"""What the public code does otherwise than the paper says, switched one by one, and what each switch is worth.

From the published settings each difference is set as the paper has it, alone; and from the paper's settings each is set
as the public code has it, alone. The two need not agree: a difference may matter only beside another one.

    bpfed paper audit --seeds 3
    bpfed paper audit --cells cifar10-small --only published,published/network --device cuda
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import bpfed
from bpfed._util.console import Say, to_stderr
from bpfed._util.errors import unknown
from bpfed._util.files import to_json, write_whole
from bpfed._util.scores import deviation, mean
from bpfed._util.text import duration
from bpfed.config.settings import Device, Settings
from bpfed.data.partition import CELLS
from experiments import protocol
from experiments.cell import seed_record
from experiments.reference import BATCH, PARTITION, best, train
from experiments.reference_methods import PublishedBPFed
from experiments.training import check_same, check_writable, device_name, has_seeds, read
from experiments.training import record as recorded

FILE = "audit.json"
ROUNDS = 200
#: Tests in a run.
TESTS = 20
#: Weight draws in a test, where the noise is more than a trace.
DRAWS = 20


@dataclass(frozen=True)
class Difference:
    """Something the public code does otherwise than the paper says.

    Attributes:
        name: Its key in the results.
        code: What the code does, in words.
        paper: What the paper says, in words.
        published: Settings of the method as the code has them.
        printed: Settings of the method as the paper has them.
        images: Whether it exists in cells of colour images alone.
    """

    name: str
    code: str
    paper: str
    published: dict[str, Any] = field(default_factory=dict)
    printed: dict[str, Any] = field(default_factory=dict)
    images: bool = False


# fmt: off
DIFFERENCES = (
    Difference("noise", "noise ε ~ N(0, 0.001² I)", "noise ε ~ N(0, I)", {"noise_scale": 0.001}, {"noise_scale": 1.0}),
    Difference("direction", "KL(π ‖ q)", "KL(q ‖ π)",
               {"divergence": "prior-posterior"}, {"divergence": "posterior-prior"}),
    Difference("weight", "KL weight 5e-5 beside the mean −log p", "KL weight 1/n (data term scaled by n/b)",
               {"kl_weight": 5e-5}, {"kl_weight": None}),
    Difference("overwritten", "the server overwrites π's shared part, never q",
               "q = π = (η, ζ) at the start of a round",
               {"overwritten": "prior"}, {"overwritten": "both"}),
    Difference("averaged", "the server averages ρ", "the server averages σ",
               {"averaged": "rho"}, {"averaged": "sigma"}),
    Difference("work", "20 unshuffled batches of 100, 5 steps on q to one on π",
               "10 shuffled epochs of batches of 50, steps in turn",
               {"batches": 20, "inner": 5}, {"batches": 0, "inner": 1}),
    Difference("start", "start μ ~ N(0, 0.1²), ρ ~ N(−3, 0.1²)", "start not said (here the network's own μ, σ = 0.07)",
               {"start": "normal"}, {"start": "network"}),
    Difference("labels", "two label groups, 0-4 and 5-9", "five labels per client (here drawn at random)"),
    Difference("network", "CNN with one pooling layer, 206 006 weights", "CNN with two, 62 006 weights", images=True),
)
# fmt: on

#: What a chain of switches starts from: its name, and its words in the table.
BASES = {"published": "as published", "printed": "as the paper says"}


@dataclass(frozen=True)
class Variant:
    """A base with one difference switched, or none.

    Attributes:
        base: ``published`` or ``printed``.
        switched: Name of the difference that is as the other base has it; empty: none.
    """

    base: str
    switched: str = ""

    @property
    def name(self) -> str:
        """Its key in the results, such as ``published/noise``."""
        return f"{self.base}/{self.switched}" if self.switched else self.base

    def as_published(self, difference: str) -> bool:
        """Whether this difference is as the public code has it."""
        return (self.base == "published") != (difference == self.switched)

    @property
    def method(self) -> PublishedBPFed:
        """With the settings of all differences."""
        settings: dict[str, Any] = {}
        for one in DIFFERENCES:
            settings |= one.published if self.as_published(one.name) else one.printed
        return PublishedBPFed(**settings)

    @property
    def partition(self) -> str:
        """How labels are dealt out: in groups, from either base, unless that is what is switched."""
        return "random" if self.switched == "labels" else PARTITION

    @property
    def one_pool(self) -> bool:
        """Whether images meet the larger network."""
        return self.as_published("network")

    def settings(self, rounds: int, device: Device) -> Settings:
        """How it is run; the seed is set later."""
        ours = self.as_published("work")
        return Settings(
            rounds=rounds,
            participants=protocol.RUN["participants"],
            batch=BATCH if ours else protocol.RUN["batch"],
            epochs=protocol.RUN["epochs"],
            eval_every=max(1, rounds // TESTS),
            eval_draws=1 if self.as_published("noise") else DRAWS,
            schedule="constant",
            device=device,
        )


def variants(cell: str) -> Iterator[Variant]:
    """All that are measured in a cell."""
    colour = CELLS[cell].source.startswith("cifar")
    for base in BASES:
        yield Variant(base)
        for one in DIFFERENCES:
            if colour or not one.images:
                yield Variant(base, one.name)


def run(
    out: Path,
    seeds: Sequence[int] = (0, 1, 2),
    rounds: int = ROUNDS,
    device: Device = "auto",
    say: Say = to_stderr,
    cells: Iterable[str] = ("mnist-small",),
    only: Iterable[str] | None = None,
) -> None:
    """Measure every variant and keep the results in ``out/audit.json``, which is written after each one.

    Args:
        out: Folder of results.
        seeds: Which; all of a variant are stacked.
        rounds: Of every run.
        device: ``auto``, ``cpu`` or ``cuda``.
        say: Told how far it is.
        cells: Where to measure.
        only: Names of variants, such as ``published`` and ``printed/noise``; None: all.
    """
    path, only = out / FILE, None if only is None else list(only)
    for cell in cells:
        if cell not in CELLS:
            raise unknown("cell", cell, CELLS)
        wanted = {variant.name: variant for variant in variants(cell)}
        for name in only or ():
            if name not in wanted:
                raise unknown("variant", name, wanted)
        for name, variant in wanted.items():
            if only is None or name in only:
                _variant(path, cell, variant, tuple(seeds), rounds, device, say)


def _variant(
    path: Path, cell: str, variant: Variant, seeds: tuple[int, ...], rounds: int, device: Device, say: Say
) -> None:
    how, method, what = variant.settings(rounds, device), variant.method, f"{variant.name} on {cell}"
    asked: dict[str, Any] = {
        "partition": variant.partition,
        "one_pool": variant.one_pool,
        "settings": recorded(method, how),
        "seeds": list(seeds),
    }
    whole = read(path)
    found = whole.get("cells", {}).get(cell, {}).get(variant.name, {})
    check_same(found, asked, path)
    if has_seeds(found, asked):
        say(f"{what}: there already")
        return
    check_writable(path.parent)
    start = time.perf_counter()
    runs = train(method, cell, how, seeds, say, what, variant.partition, variant.one_pool)
    kept = [{k: v for k, v in seed_record(one).items() if k != "reliability"} for one in runs]
    made = {**asked, "rounds": rounds, "device": device_name(how.device)}
    made |= {"seconds": round(time.perf_counter() - start, 1), "runs": kept}
    cells = read(path).get("cells", {})  # others may have written meanwhile
    whole = {"bpfed": bpfed.__version__, "torch": torch.__version__, "cells": cells}
    whole["cells"].setdefault(cell, {})[variant.name] = made
    write_whole(path, to_json(whole))
    figures = measured(made)
    say(f"{what}: accuracy {figures['accuracy'][0]:.2f} %, ECE {figures['ece'][0]:.1f} %, {duration(made['seconds'])}")


def measured(variant: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation over seeds (NaN for one), in per cent but for NLL.

    ``accuracy``, ``ece`` and ``nll`` are the last round's, ``best`` is the accuracy and ``best_ece`` the ECE of the
    tested round with the highest accuracy.
    """
    return {name: (mean(of), deviation(of)) for name, of in _values(variant).items()}


def _values(variant: dict[str, Any]) -> dict[str, list[float]]:
    """What `measured` averages, a value for each seed."""
    runs = variant["runs"]
    tops = [best(one) for one in runs]
    return {
        "accuracy": [100 * one["last"]["accuracy"] for one in runs],
        "best": [100 * top["accuracy"] for top in tops],
        "ece": [100 * one["last"]["ece"] for one in runs],
        "best_ece": [100 * top["ece"] for top in tops],
        "nll": [one["last"]["nll"] for one in runs],
    }


def markdown(record: dict[str, Any]) -> str:
    """The tables of an ``audit.json``: for each cell, one from the published settings and one from the paper's."""
    parts = []
    for cell, found in record["cells"].items():
        for base, words in BASES.items():
            if base in found:
                parts.append(_table(cell, found, base, words))
    return "\n\n".join(parts) + "\n" if parts else "Nothing has been measured yet.\n"


def _table(cell: str, found: dict[str, Any], base: str, words: str) -> str:
    start = found[base]
    seeds = len(start["seeds"])
    head = (
        f"**{cell}, {words}, then one thing switched at a time.** {start['rounds']} rounds, "
        f"{seeds} seed{'s' if seeds > 1 else ''}, {start['device']}; ECE with 10 bins. "
        "In brackets the change from the first row, mean ± standard error of its seeds, which are the same."
    )
    lines = [
        head,
        "",
        "| switched | accuracy %, last round | accuracy %, best round | ECE %, last round | NLL, last round |",
        "|---|---|---|---|---|",
        _row(words, start, None),
    ]
    for one in DIFFERENCES:
        name = Variant(base, one.name).name
        if name in found:
            to = one.paper if base == "published" or one.name == "labels" else one.code
            lines.append(_row(to, found[name], start))
    return "\n".join(lines)


def _row(words: str, variant: dict[str, Any], base: dict[str, Any] | None) -> str:
    figures, own = measured(variant), _values(variant)
    from_ = _values(base) if base is not None else None
    cells = []
    for name, digits in (("accuracy", 2), ("best", 2), ("ece", 1), ("nll", 3)):
        value, spread = figures[name]
        text = f"{value:.{digits}f}"
        if spread == spread:  # one seed has none
            text += f" ± {spread:.{digits}f}"
        if from_ is not None:
            changes = [a - b for a, b in zip(own[name], from_[name], strict=True)]
            error = deviation(changes) / math.sqrt(len(changes))
            text += f" ({mean(changes):+.{digits}f}{f' ± {error:.{digits}f}' if error == error else ''})"
            text = text.replace("-", "−")
        cells.append(text)
    return f"| {words} | {' | '.join(cells)} |"
