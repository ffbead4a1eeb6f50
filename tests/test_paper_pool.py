"""Cells in processes of their own: all are run, a failure is that cell's alone, and the command says what is asked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bpfed.cli import app
from bpfed.errors import UserError
from bpfed.paper import pool
from bpfed.paper.cell import Cell

CELLS = [Cell("mnist-small", name, rounds=2, seeds=(0, 1), tag="rounds-2") for name in ("fedper", "fedavg", "local")]


def test_every_cell_is_run_and_one_that_fails_is_named(tmp_path, monkeypatch):
    def stand_in(cell: Cell, results: Path, device: str) -> list[str]:
        fails = cell.method == "fedavg"
        code = "import sys; sys.exit('It went wrong.')" if fails else f"open(r'{results}/{cell.method}', 'w').close()"
        return [sys.executable, "-c", code]

    monkeypatch.setattr(pool, "command", stand_in)
    said: list[str] = []
    with pytest.raises(UserError, match=r"1 of 3 cells failed \(groups mnist-small fedavg\)"):
        pool.run(CELLS, 2, tmp_path, "cpu", said.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fedper", "local"]
    assert any("fedavg: It went wrong." in line for line in said)
    assert len(said) == 4


def test_the_command_asks_for_that_cell_alone(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr("bpfed.cli.paper._run_cells", lambda *arguments: asked.setdefault("run", arguments))
    monkeypatch.setattr("bpfed.cli.paper._show_table", lambda *arguments: None)
    argv = pool.command(CELLS[0], tmp_path, "cpu")
    assert argv[:3] == [sys.executable, "-m", "bpfed"]
    app(argv[3:], standalone_mode=False)
    assert asked["run"] == ("mnist-small", "fedper", "groups", 2, 2, 1, "cpu", tmp_path)
