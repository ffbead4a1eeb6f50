"""Jobs of an experiment: each writes one record, several run at a time, and what is finished is never run again.

Experiments that are built on this need torch, numpy, scipy and scikit-learn, and no package for terminals or plots.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import bpfed
from bpfed._util.console import Say
from bpfed._util.errors import UserError
from bpfed._util.files import to_json, write_whole
from bpfed._util.scores import deviation, mean, student
from bpfed._util.text import duration
from bpfed.methods.base import Method
from bpfed.runs.run import Run
from experiments.training import check_writable, read

#: Metrics that a record keeps, where the task has them.
MEASURES = ("nll", "accuracy", "ece", "brier", "rmse", "mae", "crps")


@dataclass(frozen=True)
class Job:
    """One thing to run.

    Attributes:
        path: Of its record, relative to the folder of results.
        work: Makes the record; a function of a module, since it is called in another process.
        asked: Its arguments by name, ready for JSON; they are part of the record.
        cost: About how long it takes, in seconds on one core; the longest is begun first.
        where: The device, given to ``work`` too; a record of one device is not made again on another.
    """

    path: str
    work: Callable[..., dict[str, Any]]
    asked: dict[str, Any] = field(default_factory=dict)
    cost: float = 1.0
    where: str = "auto"


def run_jobs(jobs: Sequence[Job], results: Path, workers: int, budget: float, say: Say) -> int:
    """Run the jobs that have no record yet, and write each record when its job ends.

    Args:
        jobs: In any order.
        results: Folder of results.
        workers: Processes at a time, of one thread each; 1: here, in this process.
        budget: Seconds after which no further job is begun.
        say: Told of each job that ends.

    Returns:
        How many jobs have no record in the end.

    Raises:
        UserError: A job failed, or a record is for other arguments. Failures are raised when all others are done.
    """
    check_writable(results)
    waiting = sorted((job for job in jobs if not _finished(job, results)), key=lambda job: -job.cost)
    began, total = time.perf_counter(), len(waiting)
    say(f"{total} of {len(jobs)} jobs to run, {workers} at a time")
    done, failed = 0, list[str]()

    def ended(job: Job, outcome: Callable[[], str]) -> None:
        nonlocal done
        done += 1
        try:
            words = outcome()
        except Exception as error:  # whatever it is, the other jobs go on
            failed.append(job.path)
            words = f"failed, {type(error).__name__}: {error}"
        say(f"{done}/{total} {job.path}: {words} ({duration(time.perf_counter() - began)})")

    if workers == 1:
        while waiting and time.perf_counter() - began < budget:
            job = waiting.pop(0)
            ended(job, lambda job=job: _run(job, results))  # type: ignore[misc]
    else:
        os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started from here on
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _one_thread) as pool:
            running: dict[Future[str], Job] = {}
            while waiting or running:
                while waiting and len(running) < workers and time.perf_counter() - began < budget:
                    job = waiting.pop(0)
                    running[pool.submit(_run, job, results)] = job
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    ended(running.pop(future), future.result)
    if failed:
        raise UserError(f"{len(failed)} jobs failed ({', '.join(failed)}); the same command runs them again.")
    if waiting:
        say(f"{len(waiting)} jobs were not begun within {duration(budget)}; the same command goes on with them.")
    return len(waiting)


def _one_thread() -> None:
    torch.set_num_threads(1)


def _finished(job: Job, results: Path) -> bool:
    """Whether there is a record of this job.

    Raises:
        UserError: There is one with other arguments.
    """
    found = read(results / job.path)
    if found and found.get("asked") != json.loads(to_json(job.asked)):
        raise UserError(
            f"'{results / job.path}' is for {found.get('asked')}, not for {job.asked}; choose another folder of results."
        )
    return bool(found)


def _run(job: Job, results: Path) -> str:
    began, used = time.perf_counter(), time.process_time()
    made = job.work(**job.asked, device=job.where)
    took = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - used}
    versions = {"bpfed": bpfed.__version__, "torch": torch.__version__}
    write_whole(results / job.path, to_json({"asked": job.asked, **versions, **took, **made}))
    return str(made.get("words", "done"))


def run_record(run: Run, title: str | None = None, chosen: str = "") -> dict[str, Any]:
    """What is kept of a run: its settings and the metrics of its last round."""
    assert run.evaluation is not None
    evaluation = run.evaluation[0].record()
    scores = {name: evaluation[name] for name in MEASURES if name in evaluation}
    shown = ", ".join(f"{name} {value['pooled']:.4f}" for name, value in scores.items() if name in ("nll", "accuracy"))
    return {
        "title": title or run.federation.method.title,
        "config": _portable(run.config()),
        "chosen": chosen,
        "device": str(run.federation.model.initial.device),
        "scores": scores,
        "words": shown,
    }


def _portable(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration whose files are named as seen from the folder of data, which is elsewhere on each machine."""
    where = str(Path(os.environ.get("BPFED_DATA", "data")).resolve()) + os.sep
    data = {key: value.replace(where, "") if isinstance(value, str) else value for key, value in config["data"].items()}
    return {**config, "data": data}


def settings_chosen(method: Method, names: Sequence[str]) -> dict[str, Any]:
    """Some settings of a method, ready for JSON."""
    return {name: getattr(method, name) for name in names if hasattr(method, name)}


def records(results: Path, pattern: str) -> list[dict[str, Any]]:
    """All records below a folder whose path fits the pattern, in the order of their paths."""
    found = [read(path) for path in sorted(results.glob(pattern))]
    for one in found:
        if not {"asked", "bpfed", "torch"} <= one.keys():
            raise UserError(f"A record in '{results}' has no version or arguments; run the experiment again.")
    return found


def device_name(record: dict[str, Any]) -> str:
    """What a run was trained on: ``GPU`` or ``CPU``."""
    return "CPU" if record["device"] == "cpu" else "GPU"


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Mean difference, and half the width of its 95 % interval by Student's t; NaN of a single pair."""
    difference = [a - b for a, b in zip(ours, theirs, strict=True)]
    if len(difference) < 2:
        return mean(difference), math.nan
    return mean(difference), student(len(difference) - 1) * deviation(difference) / math.sqrt(len(difference))
