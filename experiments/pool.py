"""Several cells at once, each in a process of its own: one run of small networks leaves most of a GPU idle.

A process runs one cell by ``bpfed paper table1``, so what is finished is kept and what fails is that cell alone.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from bpfed._util.console import Say
from bpfed._util.errors import UserError
from bpfed._util.text import duration
from bpfed.config.settings import Device
from bpfed.deploy.ops.supervise import tied
from experiments.cell import Cell, words


def run(cells: Sequence[Cell], jobs: int, results: Path, device: Device, say: Say) -> None:
    """Run these cells, ``jobs`` at a time.

    Args:
        cells: With seeds to run; their order is the order they are begun in.
        jobs: Processes at a time.
        results: Folder of results.
        device: ``auto``, ``cpu`` or ``cuda``.
        say: Told of every cell that is finished, and of the time left.

    Raises:
        UserError: Cells failed; it is raised when all others are done.
    """
    began, failed = time.perf_counter(), []
    say(f"{len(cells)} cells, {jobs} at a time")
    running: set[subprocess.Popen[str]] = set()
    with ThreadPoolExecutor(jobs) as threads:
        futures = {threads.submit(_one, command(cell, results, device), running): cell for cell in cells}
        try:
            for done, future in enumerate(as_completed(futures), 1):
                cell, (code, said) = futures[future], future.result()
                if code:
                    failed.append(cell.name)
                    sentence = said.strip().splitlines()[-1] if said.strip() else f"ended with code {code}"
                else:
                    record = cell.record(results)
                    sentence = words(record) if record is not None else "has no record"
                left = (time.perf_counter() - began) / done * (len(cells) - done)
                after = f"; about {duration(left)} left" if done < len(cells) else ""
                say(f"{done}/{len(cells)} {cell.name}: {sentence}{after}")
        except BaseException:
            for future in futures:
                future.cancel()
            for process in list(running):
                process.terminate()
            raise
    if failed:
        raise UserError(
            f"{len(failed)} of {len(cells)} cells failed ({', '.join(failed)}); the same command runs them again."
        )


def command(cell: Cell, results: Path, device: Device) -> list[str]:
    """The command that runs one cell."""
    asked = {
        "cells": cell.cell,
        "methods": cell.method,
        "partitions": cell.partition,
        "seeds": len(cell.wanted),
        "device": device,
        "results": results,
    }
    if cell.rounds is not None:
        asked["rounds"] = cell.rounds
    options = [part for name, value in asked.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "experiments", "table1", *options]


def _one(argv: list[str], running: set[subprocess.Popen[str]]) -> tuple[int, str]:
    """Run a command to its end: its exit code and what it said on stderr."""
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=tied())
    running.add(process)
    try:
        said = process.communicate()[1]
        return process.returncode, said
    finally:
        running.discard(process)
