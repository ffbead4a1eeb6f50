"""One cell of the tables: a method on a cell of the paper with all its seeds, and its record as JSON.

On a GPU the seeds are stacked along the client axis; on a CPU, where that saves nothing, they are run in turn. The
record is written after each of them, so what is broken off goes on where it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import bpfed
from bpfed._util.console import Say
from bpfed._util.errors import UserError
from bpfed._util.files import to_json, write_whole
from bpfed._util.text import duration
from bpfed.callbacks import Callback
from bpfed.comparison.candidates import Candidate, candidates
from bpfed.config.settings import Device, Settings
from bpfed.data import load
from bpfed.engine.evaluate import evaluate_clients
from bpfed.engine.federation import pick_device
from bpfed.runs.fit import RunRequest, train_runs
from bpfed.runs.run import Run
from experiments import protocol
from experiments.training import OtherResult, check_writable, device_name, differing, tests_on

if TYPE_CHECKING:
    from bpfed.callbacks.progress import CellProgress

#: The curves that are kept, over the evaluated rounds.
CURVES = ("accuracy", "nll", "ece")
#: The metrics that are kept of the last round.
METRICS = ("accuracy", "nll", "brier", "ece", "mce", "aurc")
#: The settings of how a calibration temperature is learnt. A record that has all its seeds stands if these have changed since.
LEARNING = ("pilots", "held")


@dataclass(frozen=True)
class Cell:
    """What is run: a method on a cell, dealt out by a partition, with so many rounds and seeds.

    Attributes:
        cell: One of the paper's six, e.g. ``"mnist-small"``.
        method: Name of a method or variant, e.g. ``"fedper+laplace"``.
        partition: ``"groups"`` or ``"random"``.
        rounds: None: the protocol's.
        seeds: Which; None: the protocol's.
        tag: Of a run beside the protocol's, e.g. ``"rounds-900"``; it is kept in a folder of that name.
    """

    cell: str
    method: str
    partition: str = "groups"
    rounds: int | None = None
    seeds: tuple[int, ...] | None = None
    tag: str = ""

    @property
    def name(self) -> str:
        """What it is called in progress and errors."""
        return f"{self.partition} {self.cell} {self.method}"

    @property
    def wanted(self) -> tuple[int, ...]:
        """The seeds."""
        return tuple(range(protocol.seeds(self.method))) if self.seeds is None else self.seeds

    def settings(self, device: Device = "auto") -> Settings:
        """How it is run; the seed is set later."""
        rounds = protocol.rounds(self.cell) if self.rounds is None else self.rounds
        return Settings(
            rounds=rounds,
            eval_every=max(1, rounds // protocol.EVALUATIONS),
            eval_draws=protocol.DRAWS,
            device=device,
            **protocol.RUN,
        )

    def candidate(self, device: Device = "auto") -> Candidate:
        """Who is run; where a calibration temperature is learnt, with as many calibration pilots as the protocol says."""
        (found,) = candidates([self.method], self.settings(device))
        if not found.settings.calibration_pilots:
            return found
        return replace(
            found, settings=replace(found.settings, calibrate=f"pilot:{protocol.calibration_pilots(self.cell)}")
        )

    def path(self, results: Path) -> Path:
        """Where its record is kept."""
        folder = results / "paper" / self.partition / self.cell
        return (folder / self.tag if self.tag else folder) / f"{self.method}.json"

    def record(self, results: Path) -> dict[str, Any] | None:
        """Its record, if there is one."""
        path = self.path(results)
        if not path.is_file():
            return None
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError):
            raise UserError(f"'{path}' is damaged; delete it to run the cell again.") from None

    def missing(self, results: Path) -> list[int]:
        """The seeds that its record does not hold.

        Raises:
            OtherResult: The record was made with other settings than it would be now.
        """
        record = self.record(results)
        if record is None:
            return list(self.wanted)
        done = {found["seed"] for found in record["runs"]}
        left = [seed for seed in self.wanted if seed not in done]
        was = record["settings"]
        if not left:  # then no seed is put beside others whose calibration temperature was learnt in another way
            was = was | {"run": {name: value for name, value in was["run"].items() if name not in LEARNING}}
        if differs := differing(was, _settings(self.candidate())):
            raise OtherResult(
                f"'{self.path(results)}' was made with other settings ({differs}) and is kept; delete it to run "
                "the cell again."
            )
        return left


def run(
    cell: Cell,
    results: Path,
    device: Device = "auto",
    say: Say = print,
    display: CellProgress | None = None,
) -> None:
    """Run the seeds of a cell that have no record yet."""
    missing = cell.missing(results)
    candidate = cell.candidate(device)
    stacked, path = pick_device(device).type == "cuda", cell.path(results)
    if missing:
        check_writable(path.parent)
    for seeds in [missing] if stacked and missing else [[seed] for seed in missing]:
        if display is not None:
            display.begin(cell.name, f"{candidate.title}, {cell.partition}", seeds)
        start = time.perf_counter()
        runs = train(candidate, cell, seeds, [display] if display is not None else [])
        record = _record(cell, candidate, runs, time.perf_counter() - start, cell.record(results))
        write_whole(path, to_json(record))
        if display is not None:
            display.finished()
        say(f"{cell.name}: {words(record)}")


def train(candidate: Candidate, cell: Cell, seeds: Sequence[int], callbacks: Sequence[Callback] = ()) -> list[Run]:
    """The runs of these seeds, trained side by side; the callbacks see the first one."""
    requests: list[RunRequest] = []
    for seed in seeds:
        settings = replace(candidate.settings, seed=seed)
        data = tests_on(load(cell.cell, partition=cell.partition, seed=seed), pick_device(settings.device))
        told = callbacks if not requests else ()
        requests.append(RunRequest(candidate.method, data, settings, callbacks=told, choose=False))
    runs = train_runs(requests, held=protocol.PILOT_HOLDOUT, eval_draws=protocol.LAST_DRAWS, memory=protocol.MEMORY)
    return [_last_test(run) for run in runs]


def _last_test(run: Run) -> Run:
    """Test the last round again with more weight draws."""
    run.federation.settings = replace(run.settings, eval_draws=protocol.LAST_DRAWS)
    run.evaluation = evaluate_clients(run.federation)
    run.history[-1] |= run.evaluation[0].record()
    return run


def _record(
    cell: Cell, candidate: Candidate, runs: list[Run], seconds: float, before: dict[str, Any] | None
) -> dict[str, Any]:
    """The record of a cell after these runs; earlier ones stay in it."""
    done = {} if before is None else {found["seed"]: found for found in before["runs"]}
    done |= {run.settings.seed: seed_record(run) for run in runs}
    return {
        "protocol": "paper",
        "partition": cell.partition,
        "cell": cell.cell,
        "method": cell.method,
        "title": candidate.title,
        "settings": _settings(candidate),
        "rounds": candidate.settings.rounds,
        "bins": candidate.settings.bins,
        "device": _all("device", device_name(candidate.settings.device), before),
        "seconds": round(seconds + (0.0 if before is None else before["seconds"]), 1),
        "bpfed": _all("bpfed", bpfed.__version__, before),
        "torch": _all("torch", torch.__version__, before),
        "runs": [done[seed] for seed in sorted(done)],
    }


def _all(what: str, now: str, before: dict[str, Any] | None) -> str:
    """All devices, or versions, that made the seeds of a record."""
    earlier = [] if before is None else before[what].split(", ")
    return ", ".join(dict.fromkeys([*earlier, now]))


def seed_record(run: Run) -> dict[str, Any]:
    """What is kept of one seed."""
    history, detail = run.history, run.detail()
    last = {name: history[-1][name]["pooled"] for name in METRICS}
    last |= {"ece_worst_client": history[-1]["ece"]["worst"], "ece_floor": detail["ece_floor"]}
    curve: dict[str, list[Any]] = {"round": [r["round"] for r in history]}
    curve |= {name: [_short(r[name]["pooled"]) for r in history] for name in CURVES}
    learnt = (
        {"calibration_temperature": run.federation.learnt_temperature}
        if run.federation.learnt_temperature is not None
        else {}
    )
    return {"seed": run.settings.seed, "last": last, **learnt, "curve": curve, "reliability": detail["reliability"]}


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def _settings(candidate: Candidate) -> dict[str, Any]:
    """What makes a record another one: settings of the method, and those of the run that are not its device."""
    assert candidate.method is not None, "a cell's method is named"
    kept = ("rounds", *protocol.RUN, "eval_draws", "scaling", "calibration")
    run = {name: getattr(candidate.settings, name) for name in kept} | {"last_draws": protocol.LAST_DRAWS}
    chosen = candidate.settings.schedule
    run |= {"schedule": candidate.method.schedule if chosen == "auto" else chosen}
    if candidate.settings.calibration_pilots:
        run |= {"pilots": candidate.settings.calibration_pilots, "held": protocol.PILOT_HOLDOUT}
    if candidate.settings.members > 1:
        run |= {"members": candidate.settings.members}
    return json.loads(to_json({"method": candidate.method.settings(), "run": run}))


def words(record: dict[str, Any]) -> str:
    """What a record says, in one line."""
    last = [found["last"] for found in record["runs"]]
    accuracy, nll, ece = (sum(found[m] for found in last) / len(last) for m in ("accuracy", "nll", "ece"))
    seeds = f"{len(last)} seed{'s' if len(last) > 1 else ''}"
    return (
        f"accuracy {100 * accuracy:.2f} %, NLL {nll:.3f}, ECE {100 * ece:.1f} %, {seeds}, {duration(record['seconds'])}"
    )
