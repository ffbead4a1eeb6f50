"""How far many runs are, on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from command import Command
from rich.console import Console
from scenarios import classification

from bpfed.callbacks.progress import CellProgress
from bpfed.comparison.candidates import candidates
from bpfed.comparison.runner import run_cells
from bpfed.config.settings import Settings

pytestmark = pytest.mark.usefixtures("untraced")

PAIR = (
    "compare",
    "--clients",
    "3",
    "--epochs",
    "1",
    "--eval-draws",
    "2",
    "--rounds",
    "2",
    "--seeds",
    "2",
    "--methods",
    "fedavg,fedper",
)


def shown(display: CellProgress) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=True, width=display.console.width, color_system=None)
    console.print(display.render())
    written = console.file
    assert isinstance(written, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue()).rstrip("\n").split("\n")


def test_one_display_for_all_cells() -> None:
    display = CellProgress(Console(file=io.StringIO(), force_terminal=True, width=160, color_system=None))
    seen: list[list[str]] = []
    real = display.round

    def watched(*arguments: Any) -> None:
        real(*arguments)
        for width in (60, 90, 160):
            display.console.width = width
            lines = shown(display)
            assert len(lines) == 3
            assert all(len(line) <= width - 2 for line in lines)
        seen.append(lines)

    display.round = watched  # type: ignore[method-assign]
    who = candidates(["fedavg", "local"], Settings(rounds=3, epochs=1, batch=5, device="cpu"))
    run_cells(who, lambda seed: classification(seed=seed), 2, display=display)
    display.close()
    assert len(seen) == 12
    assert [re.findall(r"(\d)/4 cells", lines[1])[0] for lines in seen[::3]] == ["0", "1", "2", "3"]
    assert all("round 2/3" in lines[2] for lines in seen[1::3])
    assert "cell 3/4: FedAvg, seed 1, small, cpu" in seen[6][0]
    assert "left" not in seen[0][0]
    assert re.search(r"0:\d\d elapsed, about 0:\d\d left", seen[4][0])


def test_the_time_left_is_that_of_the_same_methods() -> None:
    display = CellProgress(Console(file=io.StringIO()))
    display.expect([("slow", 0), ("fast", 0), ("slow", 1), ("fast", 1), ("new", 1)])
    assert display.left is None
    display.found("slow", 0, 100.0)
    display.found("fast", 0, 10.0)
    assert display.left == pytest.approx(100.0 + 10.0 + 55.0)


def test_elsewhere_it_is_a_line_for_each_cell(command: Command) -> None:
    err = command.ok(*PAIR, "--device", "cpu", "--out", "a").err
    lines = [line for line in err.splitlines() if not re.match("cell ./4:", line)]  # said of a cell that takes long
    pattern = r"cell ./4  Fed(Avg|Per), seed .  accuracy \S+ %  NLL \S+  ECE \S+ %  0:\d\d(, about 0:\d\d left)?"
    assert len(lines) == 4
    assert all(re.fullmatch(pattern, line) for line in lines), err
