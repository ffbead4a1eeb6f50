"""A softness for each federation of a cell: rehearsals as in `bpfed.rehearsal`, those of all seeds side by side.

They hold out a tenth of each client's training examples, as the search for the settings does. No test example takes part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bpfed.comparison.entrants import Entrant
from bpfed.data import FederatedData
from bpfed.data.held import held_out
from bpfed.engine.federation import pick_device
from bpfed.paper import protocol
from bpfed.paper.search import HELD, MEMORY
from bpfed.paper.training import tests_on
from bpfed.rehearsal import as_rehearsal, common
from bpfed.run import train_together
from bpfed.training import prepare


def learnt(entrant: Entrant, deals: Mapping[int, FederatedData]) -> dict[int, float]:
    """The softness of each seed, given the seeds' data; 1 where none is to be learnt."""
    settings = replace(entrant.settings, eval_draws=protocol.LAST_DRAWS, memory=MEMORY)
    device = pick_device(settings.device)
    trials = [(seed, number) for seed in deals for number in range(1, settings.rehearsals + 1)]
    found: dict[int, list[float]] = {seed: [] for seed in deals}
    for together in [trials] if device.type == "cuda" and trials else [[trial] for trial in trials]:
        runs = []
        for seed, number in together:
            own = as_rehearsal(replace(settings, seed=seed), number)
            runs.append(prepare(entrant.method, tests_on(held_out(deals[seed], HELD, own.seed), device), own))
        for (seed, _), run in zip(together, train_together(runs, [[] for _ in runs]), strict=True):
            found[seed].append(run.detail()["softness"])
    return {seed: common(fitted) if fitted else 1.0 for seed, fitted in found.items()}
