"""The search for the recipe's settings, on validation data cut from the training data.

Of each client's training examples a tenth, of each class alike, is what is scored; the cell's test examples are thrown
away before anything runs, so no test example of a run's own split takes part. But a seed deals the same pool of images
anew: most validation examples of these seeds are test examples of the tables' seeds. All settings and all seeds are
trained side by side, stacked along the client axis.

A tenth of a small cell is 250 examples, on which settings that are nearly as good cannot be told apart. A *sharp* search
cuts a small cell out of the training examples of its dataset's large one, and scores all the others: 42 500.

    bpfed paper search --cells small --method bpfed-recipe --rounds 300

Some searches of `docs/lab/recipe-search.md` varied what are constants of the methods' classes since 0.10. To repeat one,
subclass the method and register the subclass (`docs/how-to/plug-ins.md`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from bpfed._util.console import Say, to_stderr
from bpfed._util.errors import UserError, unknown
from bpfed._util.files import to_json, write_whole
from bpfed._util.scores import deviation, mean
from bpfed.config.migrations import constant, recipe_with
from bpfed.config.schema import fields_of
from bpfed.config.settings import Device, Settings, words
from bpfed.data import FederatedData, load
from bpfed.data.federated import held_out
from bpfed.data.partition import CELLS
from bpfed.engine.federation import pick_device
from bpfed.methods import method
from bpfed.runs.fit import RunRequest, train_runs
from experiments import protocol, records
from experiments.records import numbers
from experiments.training import check_same, check_writable, device_name, read, record, tests_on
from experiments.typeset import NOTHING, signed

#: The seeds, which no table uses.
SEEDS = (11, 12, 13, 14)
#: What is tried, by default around what was chosen; the rounds are tried twice, since calibration must not depend on
#: them.
GRID: tuple[dict[str, float], ...] = tuple(
    {"temperature": t, "prior_sigma": s} for t in (0.025, 0.05, 0.1) for s in (2.8, 4.0)
)
ROUNDS = (100, 300)
#: Settings that a search has of its own, so none can be tried.
OWN = ("rounds", "seed", "device")
#: The settings' short names in the tables.
WORDS = {
    "temperature": "T",
    "mean_precision": "c",
    "prior_sigma": "k",
    "fan_in_sigma": "k",
    "head_sigma": "s_h",
    "head_gain": "g",
    "bias_sigma": "σ_b",
    "discount": "a",
    "mean_sigma": "s_m",
}
#: In the first searches ``prior_sigma`` was s0 itself, one for all layers and at most 0.3; since then it is k, and s0
#: of a layer is k over the root of its number of inputs.
LEAST_K = 1.0


class Cut(NamedTuple):
    """Where the training and validation examples of a search come from.

    Attributes:
        cell: Whose training examples they are.
        held: The part of them that is scored.
    """

    cell: str
    held: float

    @classmethod
    def of(cls, cell: str, sharp: bool = False) -> Cut:
        """A cell's own, or of a small cell as many as it trains on out of the large one's.

        Raises:
            UserError: A large cell cannot be cut out of another.
        """
        if not sharp:
            return cls(cell, protocol.HELD)
        large = f"{CELLS[cell].source}-large"
        if cell == large:
            raise UserError(f"'{cell}' cannot be cut out of a larger cell; search it without --sharp.")
        return cls(large, 1.0 - CELLS[cell].train / CELLS[large].train)

    def deal(self, seed: int, partition: str = "groups") -> FederatedData:
        """The cell with this part of its training examples instead of its test examples."""
        return held_out(load(self.cell, partition=partition, seed=seed), self.held, seed)


def run(
    out: Path,
    cells: Sequence[str],
    name: str = "bpfed-recipe",
    grid: Sequence[Mapping[str, Any]] = GRID,
    rounds: int = ROUNDS[0],
    device: Device = "auto",
    say: Say = to_stderr,
    sharp: bool = False,
) -> None:
    """Search in each cell and write ``OUT/search/METHOD-CELL-ROUNDS.json``; what is there already is left as it is.

    A sharp search is ``METHOD-sharp-CELL-ROUNDS.json``.

    Args:
        out: Folder of results.
        cells: Names of the paper's cells.
        name: Of the method.
        grid: Settings to try, of the method or of the run.
        rounds: Of every run.
        device: ``auto``, ``cpu`` or ``cuda``.
        say: Told what each setting gave.
        sharp: Whether small cells are cut out of large ones.

    Raises:
        OtherResult: There is a search of something else under that name.
    """
    check_grid(name, grid)
    paths = {cell: out / "search" / f"{name}{'-sharp' if sharp else ''}-{cell}-{rounds}.json" for cell in cells}
    done = {cell: _done(path, asked(cell, name, grid, rounds, sharp=sharp)) for cell, path in paths.items()}
    for cell, path in paths.items():
        if done[cell]:
            say(f"{name} on {cell}: done already")
            continue
        check_writable(path.parent)
        found = search(cell, name, grid, rounds, device=device, sharp=sharp)
        write_whole(path, to_json(found))
        for row in found["tried"]:
            means = {m: mean(row[m]) for m in ("accuracy", "nll", "ece", "over_confidence")}
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


def check_grid(name: str, grid: Sequence[Mapping[str, Any]]) -> None:
    """Check that these settings can be tried with a method.

    Raises:
        UserError: Neither the method nor its run has such a setting, or it is a number and text is given.
    """
    known = fields_of(method(name)) | fields_of(Settings)
    known = {key: field for key, field in known.items() if key not in OWN}
    for key, value in [pair for values in grid for pair in values.items()]:
        if why := constant(recipe_with(known), key, value) if key not in known or key == "sigma" else "":
            raise UserError(f"--grid: {why}")
        if key not in known:
            raise unknown("setting", key, known)
        if isinstance(value, str) and isinstance(known[key].default, int | float):
            raise UserError(f"--grid: {key} is {value!r}, but must be {words(known[key].annotation)}.")


def asked(
    cell: str,
    name: str,
    grid: Sequence[Mapping[str, Any]],
    rounds: int,
    seeds: Sequence[int] = SEEDS,
    sharp: bool = False,
) -> dict[str, Any]:
    """What a search is of; its file has all of it but the grid, which is the settings of what was tried."""
    cut = Cut.of(cell, sharp)
    return {
        "cell": cell,
        "method": name,
        "rounds": rounds,
        "seeds": list(seeds),
        "held": cut.held,
        **({"cut_from": cut.cell} if cut.cell != cell else {}),
        "settings": record(method(name)(), _settings(rounds)),
        "grid": [dict(values) for values in grid],
    }


def search(
    cell: str,
    name: str = "bpfed-recipe",
    grid: Sequence[Mapping[str, Any]] = GRID,
    rounds: int = ROUNDS[0],
    seeds: Sequence[int] = SEEDS,
    device: Device = "auto",
    sharp: bool = False,
) -> dict[str, Any]:
    """Train every setting with every seed; the metrics of the last round and the NLL after a third of the rounds."""
    cut = Cut.of(cell, sharp)
    kinds, base = {f.name for f in fields(Settings)}, _settings(rounds, device)
    where, start = pick_device(device), time.perf_counter()
    requests = []
    dealt = {seed: tests_on(cut.deal(seed), where) for seed in seeds}
    for values in grid:
        made = method(name)(**{k: v for k, v in values.items() if k not in kinds})
        for seed in seeds:
            settings = replace(base, seed=seed, **{k: v for k, v in values.items() if k in kinds})
            requests.append(RunRequest(made, dealt[seed], settings, choose=False))
    runs = train_runs(requests)
    tried = []
    for i, values in enumerate(grid):
        own = [run.history for run in runs[i * len(seeds) : (i + 1) * len(seeds)]]
        found = {m: [history[-1][m]["pooled"] for history in own] for m in ("accuracy", "nll", "brier", "ece")}
        gaps = [_over_confidence(run) for run in runs[i * len(seeds) : (i + 1) * len(seeds)]]
        curve = [[round(r["nll"]["pooled"], 4) for r in history] for history in own]
        tried.append({"settings": dict(values), **found, "over_confidence": gaps, "nll_curve": curve})
    of = asked(cell, name, grid, rounds, seeds, sharp)
    return {
        **{key: value for key, value in of.items() if key != "grid"},
        "device": device_name(device),
        "seconds": round(time.perf_counter() - start, 1),
        "tried": tried,
    }


def _settings(rounds: int, device: Device = "auto") -> Settings:
    """Of every run, but for what is tried and the seed."""
    return Settings(
        rounds=rounds,
        eval_every=max(1, rounds // 3),
        eval_draws=protocol.LAST_DRAWS,
        device=device,
        memory=protocol.MEMORY,
        **protocol.RUN,
    )


def _done(path: Path, asked: dict[str, Any]) -> bool:
    """Whether this very search is there."""
    found = read(path)
    if found:
        tried = [row["settings"] for row in found.get("tried", ())]
        check_same(found | {"grid": tried}, asked, path, more=False)
    return bool(found)


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
        found = records.read(path)
        try:
            cell, rounds = found["cell"], found["rounds"]
            tried = {_key(row["settings"]): _Tried.of(row) for row in found["tried"]}
        except (KeyError, TypeError):
            tried = {}
        if not tried or cell not in protocol.cells():
            raise UserError(f"'{path}' is not the result of a search; restore or delete it.")
        series.setdefault((path.stem.removesuffix(f"-{cell}-{rounds}"), rounds), {})[cell] = tried
    return "\n\n".join(_table(name, rounds, found) for (name, rounds), found in sorted(series.items()))


class _Tried(NamedTuple):
    """A setting, the means of its scores over seeds, and its NLL with each seed."""

    settings: Mapping[str, Any]
    accuracy: float
    nll: float
    over_confidence: float
    nlls: list[float]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> _Tried:
        accuracy, nlls, gaps = (numbers(row[m]).tolist() for m in ("accuracy", "nll", "over_confidence"))
        return cls(row["settings"], mean(accuracy), mean(nlls), mean(gaps), nlls)

    def __str__(self) -> str:
        return f"{100 * self.accuracy:.1f} / {self.nll:.3f} / {100 * self.over_confidence:+.1f}"


def _table(name: str, rounds: int, found: Mapping[str, Mapping[str, _Tried]]) -> str:
    """A series: a row for each setting that some cell was searched with; the sum where all of them were, and in
    brackets its paired difference from the first row's."""
    cells = [cell for cell in protocol.cells() if cell in found]
    rows, sums = [], []
    keys = list(dict.fromkeys(key for cell in cells for key in found[cell]))
    for key in keys:
        own = [found[cell].get(key) for cell in cells]
        there = [tried for tried in own if tried is not None]
        sums.append(math.fsum(tried.nll for tried in there) if len(there) == len(own) else math.nan)
        total = f"{sums[-1]:.3f}" if math.isfinite(sums[-1]) else NOTHING
        shown = [NOTHING if tried is None else str(tried) for tried in own]
        rows.append([_words(there[0].settings), *shown, total])
    if whole := [i for i, total in enumerate(sums) if math.isfinite(total)]:
        best = min(whole, key=lambda i: float(rows[i][-1]))
        rows[best][-1] = f"**{rows[best][-1]}**"
    for row, key in zip(rows[1:], keys[1:], strict=True):
        row[-1] += _paired([(found[cell].get(key), found[cell].get(keys[0])) for cell in cells])
    head = [f"{name}, {rounds} rounds", *cells, "sum of NLLs"]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def _paired(pairs: Sequence[tuple[_Tried | None, _Tried | None]]) -> str:
    """In brackets the sum over cells of a setting's NLL less the first one's, seed by seed, ± its standard error."""
    change = variance = 0.0
    for tried, first in pairs:
        if tried is None or first is None or len(tried.nlls) != len(first.nlls):
            return ""
        own = [a - b for a, b in zip(tried.nlls, first.nlls, strict=True)]
        change, variance = change + mean(own), variance + deviation(own) ** 2 / len(own)
    error = f" ± {math.sqrt(variance):.3f}" if math.isfinite(variance) else ""  # of one seed nothing is known
    return f" ({signed(change, 3)}{error})" if math.isfinite(change) else ""


def _key(settings: Mapping[str, Any]) -> str:
    """What is the same for the same settings; 10 and 10.0 are."""
    plain = {name: float(value) if type(value) is int else value for name, value in settings.items()}
    return json.dumps(plain, sort_keys=True)


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{_word(name, value)} = {_text(value)}" for name, value in settings.items())


def _text(value: Any) -> str:
    """A value as the tables have it; text and switches are as they are."""
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _word(name: str, value: Any) -> str:
    """A setting's short name."""
    return "s0" if name == "prior_sigma" and value < LEAST_K else WORDS.get(name, name)
