"""The paper's experiments as data: cells, partitions, rounds, seeds, methods. Nothing here runs anything.

Two protocols, and a number is never given without its protocol:

- ``paper``: what the paper's text says, done honestly. Stratified splits, one network for all methods, hyper-parameters
  fixed once for all six cells, the *last* round, several seeds.
- ``published``: BPFed and pFedBayes as the public reference code runs them (`experiments.reference`), one run, the best
  of 800 test rounds, to show that the same engine lands on the printed numbers when it is told to do what was done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bpfed._util.errors import UserError, unknown
from bpfed.data.partition import CELLS

PROTOCOLS = ("paper", "published")
#: The paper's two label groups, and labels drawn at random for each client.
PARTITIONS = ("groups", "random")

#: Rounds of every method, by the size of the cell: all get the same.
ROUNDS = {"small": 300, "large": 100}
#: Evaluations in a run (the points of Figures 3 to 5), weight draws in each, and in the last one, which the tables are
#: made of.
EVALUATIONS = 20
DRAWS = 20
LAST_DRAWS = 100
#: Batch, local epochs and participants of section 5. The step size is a method's own: Adam's 1e-3, constant, for most.
RUN: dict[str, Any] = {"batch": 50, "epochs": 10, "participants": 10, "bins": 10}

#: Part of the training examples that is held out where settings are searched. With a fifth, as at first, what is left is
#: so much less that the model of all the examples comes out surer than the one that was chosen.
HELD = 0.1
#: Calibration pilots where a calibration temperature is learnt, by the size of the cell, and the part of the training examples that each of
#: them holds out. The smaller that part, the nearer is a calibration pilot's model to the run's.
PILOTS = {"small": 6, "large": 3}
PILOT_HOLDOUT = 0.05
#: MiB for what is trained side by side there.
MEMORY = 16384

#: The nine methods of Table 1, in its order.
TABLE = ("fedavg", "perfedavg", "pfedme", "pfedbayes", "fedper", "lg-fedavg", "fedrep", "fedsoul", "bpfed")
#: What we add to it: what BPFed became, what came later, and the cheap baselines that a Bayesian method must beat.
EXTRA = (
    "bpfed-recipe",
    "bpfed-recipe+calibrated",
    "bpfed-recipe+members+calibrated",
    "bpfed-population",
    "bpfed-population+calibrated",
    "bpfed-population+members+calibrated",
    "bpfed+ivon",
    "local",
    "fedavg-ft",
    "pfedvem",
    "ditto",
    "fedbabu",
    "fedper+temperature",
    "fedper+laplace",
)
#: Methods that are run with five seeds, the others with three.
MAIN = tuple(
    f"bpfed-{kind}{variant}"
    for kind in ("recipe", "population")
    for variant in ("", "+calibrated", "+members+calibrated")
)
SEEDS = {"main": 5, "other": 3}


def rounds(cell: str) -> int:
    """Rounds of a cell."""
    return ROUNDS[cell.rpartition("-")[2]]


def calibration_pilots(cell: str) -> int:
    """Calibration pilots of a cell, where a calibration temperature is learnt."""
    return PILOTS[cell.rpartition("-")[2]]


def seeds(method: str) -> int:
    """Seeds of a method."""
    return SEEDS["main" if method in MAIN else "other"]


def cells(names: str | Iterable[str] | None = None) -> tuple[str, ...]:
    """The cells of these names, all six if none is given; ``mnist`` is both of that dataset, ``small`` all small."""
    return _chosen("cell", names, tuple(CELLS), lambda cell, word: word in (cell, *cell.split("-")))


def methods(names: str | Iterable[str] | None = None) -> tuple[str, ...]:
    """The methods of these names, all if none is given; ``table`` is the paper's nine, and any variant may be named."""
    known: tuple[str, ...] = (*TABLE, *EXTRA)
    names = None if names is None else _words(names)
    for name in names or ():
        if "+" in name and name not in known:
            from bpfed.comparison.candidates import changes  # which needs torch

            changes(name)
            known += (name,)
    return _chosen("method", names, known, lambda name, word: word == name or (word == "table" and name in TABLE))


def partitions(names: str | Iterable[str] | None = None) -> tuple[str, ...]:
    """The partitions of these names, both if none is given."""
    return _chosen("partition", names, PARTITIONS, lambda name, word: word == name)


def _chosen(
    kind: str, names: str | Iterable[str] | None, known: Sequence[str], fits: Callable[[str, str], bool]
) -> tuple[str, ...]:
    """Those of the known names that some word fits, in their own order."""
    if names is None:
        return tuple(known)
    words = _words(names)
    if not words:
        raise UserError(f"No {kind} is named; leave the option out for all of them.")
    for word in words:
        if not any(fits(name, word) for name in known):
            raise unknown(kind, word, known)
    return tuple(name for name in known if any(fits(name, word) for word in words))


def _words(names: str | Iterable[str]) -> list[str]:
    return [w.strip() for w in (names.split(",") if isinstance(names, str) else names) if w.strip()]
