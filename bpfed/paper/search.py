"""The search for the recipe's settings, on validation data cut from the training data; no test example takes part.

Of each client's training examples a tenth, of each class alike, is what is scored; the cell's test examples are thrown
away before anything runs. All settings and all seeds are trained side by side, stacked along the client axis.

    bpfed paper search --cells small --method bpfed-recipe --rounds 300
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from bpfed.data import FederatedData, load
from bpfed.data.held import held_out
from bpfed.engine.federation import pick_device
from bpfed.engine.settings import Settings
from bpfed.errors import UserError
from bpfed.files import to_json, write_whole
from bpfed.methods import method
from bpfed.paper import protocol
from bpfed.paper.training import Say, device_name, tests_on, to_stderr
from bpfed.run import train_together
from bpfed.training import prepare

#: Part of the training examples that is scored, and the seeds, which no table uses. With a fifth held out, as at first,
#: what is left is so much less that the model of all the examples comes out surer than the one that was chosen.
HELD = 0.1
SEEDS = (11, 12, 13, 14)
#: MiB for what is trained side by side.
MEMORY = 16384
#: What is tried, by default around what was chosen; the rounds are tried twice, since calibration must not depend on
#: them.
GRID: tuple[dict[str, float], ...] = tuple(
    {"temperature": t, "anchor": c, "prior_sigma": s}
    for t, c in ((0.1, 5.0), (0.05, 10.0), (0.05, 20.0))
    for s in (2.8, 4.0)
)
ROUNDS = (100, 300)
#: The settings' short names in the tables.
WORDS = {
    "temperature": "T",
    "anchor": "c",
    "prior_sigma": "k",
    "fan_in_sigma": "k",
    "head_sigma": "s_h",
    "head_gain": "g",
    "bias_sigma": "σ_b",
    "discount": "a",
    "mean_sigma": "s_m",
}
#: In the first searches ``prior_sigma`` was s0 itself, one for all layers and at most 0.3; since then it is k, and s0
#: of a layer
#: is k over the root of its number of inputs.
LEAST_K = 1.0


def validation(cell: str, seed: int, partition: str = "groups") -> FederatedData:
    """The cell with a part of its training examples instead of its test examples."""
    return held_out(load(cell, partition=partition, seed=seed), HELD, seed)


def run(
    out: Path,
    cells: Sequence[str],
    name: str = "bpfed-recipe",
    grid: Sequence[Mapping[str, Any]] = GRID,
    rounds: int = ROUNDS[0],
    device: str = "auto",
    say: Say = to_stderr,
) -> None:
    """Search in each cell and write ``OUT/search/METHOD-CELL-ROUNDS.json``.

    Args:
        out: Folder of results.
        cells: Names of the paper's cells.
        name: Of the method.
        grid: Settings to try, of the method or of the run.
        rounds: Of every run.
        device: ``auto``, ``cpu`` or ``cuda``.
        say: Told what each setting gave.
    """
    for cell in cells:
        found = search(cell, name, grid, rounds, device=device)
        write_whole(out / "search" / f"{name}-{cell}-{rounds}.json", to_json(found))
        for row in found["tried"]:
            means = {m: sum(row[m]) / len(row[m]) for m in ("accuracy", "nll", "ece", "over_confidence")}
            say(f"{cell}, {_words(row['settings'])}: {', '.join(f'{m} {v:.4f}' for m, v in means.items())}")


def read_grid(text: str) -> list[dict[str, Any]]:
    """The settings to try, from JSON.

    Raises:
        UserError: It is not a JSON list of settings.
    """
    try:
        grid = json.loads(text)
    except ValueError as error:
        raise UserError(f"--grid is not JSON ({error}); give a list of settings.") from None
    if not isinstance(grid, list) or not grid or not all(isinstance(values, dict) for values in grid):
        raise UserError("--grid is not a list of settings; give one such as '[{\"temperature\": 0.1}]'.")
    return grid


def search(
    cell: str,
    name: str = "bpfed-recipe",
    grid: Sequence[Mapping[str, Any]] = GRID,
    rounds: int = ROUNDS[0],
    seeds: Sequence[int] = SEEDS,
    device: str = "auto",
    deal: Callable[[str, int], FederatedData] = validation,
) -> dict[str, Any]:
    """Train every setting with every seed; the metrics of the last round and the NLL after a third of the rounds."""
    kinds = {f.name for f in fields(Settings)}
    base = Settings(
        rounds=rounds,
        eval_every=max(1, rounds // 3),
        eval_draws=protocol.LAST_DRAWS,
        device=device,  # type: ignore[arg-type]
        memory=MEMORY,
        **protocol.RUN,
    )
    where, start = pick_device(device), time.perf_counter()
    runs = []
    dealt = {seed: tests_on(deal(cell, seed), where) for seed in seeds}
    for values in grid:
        made = method(name)(**{k: v for k, v in values.items() if k not in kinds})
        for seed in seeds:
            settings = replace(base, seed=seed, **{k: v for k, v in values.items() if k in kinds})
            runs.append(prepare(made, dealt[seed], settings))
    train_together(runs, [[] for _ in runs])
    tried = []
    for i, values in enumerate(grid):
        own = [run.history for run in runs[i * len(seeds) : (i + 1) * len(seeds)]]
        found = {m: [history[-1][m]["pooled"] for history in own] for m in ("accuracy", "nll", "brier", "ece")}
        gaps = [_over_confidence(run) for run in runs[i * len(seeds) : (i + 1) * len(seeds)]]
        curve = [[round(r["nll"]["pooled"], 4) for r in history] for history in own]
        tried.append({"settings": dict(values), **found, "over_confidence": gaps, "nll_curve": curve})
    return {
        "cell": cell,
        "method": name,
        "rounds": rounds,
        "seeds": list(seeds),
        "held": HELD,
        "device": device_name(device),
        "seconds": round(time.perf_counter() - start, 1),
        "tried": tried,
    }


def _over_confidence(run: Any) -> float:
    """Mean confidence less accuracy."""
    found = run.detail()["reliability"]
    total = sum(found["count"])
    parts = zip(found["count"], found["confidence"], found["accuracy"], strict=True)
    return sum(n * (c - a) for n, c, a in parts if n) / total if total else math.nan


def markdown(results: Path) -> str:
    """The tables of all searches: one for each series of files ``results/search/SERIES-CELL-ROUNDS.json``."""
    series: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for path in sorted((results / "search").glob("*.json")):
        found = json.loads(path.read_text())
        name = path.stem.removesuffix(f"-{found['cell']}-{found['rounds']}")
        series.setdefault((name, found["rounds"]), {})[found["cell"]] = found
    return "\n\n".join(_table(name, rounds, found) for (name, rounds), found in sorted(series.items()))


def _table(name: str, rounds: int, found: Mapping[str, Mapping[str, Any]]) -> str:
    cells = [cell for cell in protocol.cells() if cell in found]
    settings = [row["settings"] for row in found[cells[0]]["tried"]]
    rows = []
    for i, values in enumerate(settings):
        own = [found[cell]["tried"][i] for cell in cells]
        means = [{m: sum(row[m]) / len(row[m]) for m in ("accuracy", "nll", "over_confidence")} for row in own]
        figures = [f"{100 * m['accuracy']:.1f} / {m['nll']:.3f} / {100 * m['over_confidence']:+.1f}" for m in means]
        rows.append([_words(values), *figures, f"{sum(m['nll'] for m in means):.3f}"])
    best = min(range(len(rows)), key=lambda i: float(rows[i][-1]))
    rows[best][-1] = f"**{rows[best][-1]}**"
    head = [f"{name}, {rounds} rounds", *cells, "sum of NLLs"]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{_word(name, value)} = {value:g}" for name, value in settings.items())


def _word(name: str, value: float) -> str:
    """A setting's short name."""
    return "s0" if name == "prior_sigma" and value < LEAST_K else WORDS.get(name, name)
