"""How long `bpfed --help` and `bpfed predict` take, as ratios to `python -c "import torch"`: medians of seven, in turn."""

from __future__ import annotations

import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPEATS = 7
ROWS = 60


def run(repeats: int = REPEATS) -> dict[str, Any]:
    """CPU seconds of each command and their ratios; CPU seconds depend less on what else a machine does."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        _trained(folder)
        python = [sys.executable]
        commands = {
            "import torch": [*python, "-c", "import torch"],
            "bpfed --help": [*python, "-m", "bpfed", "--help"],
            "bpfed predict": [*python, "-m", "bpfed", "predict", "run", "--client", "a", "--input", "sites/a.csv"],
        }
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(repeats):
            for name, command in commands.items():
                taken[name].append(_seconds(command, folder))
    seconds = {name: round(statistics.median(found), 3) for name, found in taken.items()}
    ratios = {name: round(value / seconds["import torch"], 2) for name, value in seconds.items()}
    return {"cpu_seconds": seconds, "ratio_to_torch": ratios, "repeats": repeats}


def _trained(folder: Path) -> None:
    """A small run on tables."""
    draw = random.Random(0)
    (folder / "sites").mkdir()
    for site in "ab":
        ages = [draw.gauss(50, 10) for _ in range(ROWS)]
        lines = [f"{age:.2f},{draw.choice('uvw')},{'yes' if age + draw.gauss(0, 5) > 50 else 'no'}" for age in ages]
        (folder / "sites" / f"{site}.csv").write_text("\n".join(["age,kind,ill", *lines]) + "\n")
    flags = "run --data folder:sites --target ill --rounds 2 --adapt off --baselines off --out run --quiet"
    _seconds([sys.executable, "-m", "bpfed", *flags.split()], folder)


def _seconds(command: list[str], folder: Path) -> float:
    """User and system time of a command, in seconds."""
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
