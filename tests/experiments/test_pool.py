"""Cells in processes of their own: all are run, a failure is that cell's alone, and the command says what is asked."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from bpfed._util.errors import UserError
from bpfed.cli import app
from experiments import pool
from experiments.cell import Cell

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
    monkeypatch.setattr("experiments.cli._run_cells", lambda *arguments: asked.setdefault("run", arguments))
    monkeypatch.setattr("experiments.cli._show_table", lambda *arguments: None)
    argv = pool.command(CELLS[0], tmp_path, "cpu")
    assert argv[:3] == [sys.executable, "-m", "experiments"]
    app(["paper", *argv[3:]], standalone_mode=False)
    assert asked["run"] == ("mnist-small", "fedper", "groups", 2, 2, 1, "cpu", tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="Elsewhere a child outlives a parent that is killed.")
def test_children_end_with_their_parent(tmp_path):
    sleeper = f"import os, time; open(r'{tmp_path}/pid', 'w').write(str(os.getpid())); time.sleep(60)"
    code = f"import sys; from experiments import pool\npool._one([sys.executable, '-c', {sleeper!r}], set())"
    parent = subprocess.Popen([sys.executable, "-c", code])
    child = wait_for(lambda: int(text) if (text := read(tmp_path / "pid")) else None)
    parent.kill()
    parent.wait()
    assert wait_for(lambda: not alive(child))


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked for does not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(what, seconds=60.0):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found
