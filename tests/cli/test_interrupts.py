"""Ctrl-C: nothing is lost but the round that it comes in, and the command says how to go on."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command import PLAIN, SMALL, Command, metrics

from bpfed.engine.simulator import Simulator


def test_ctrl_c_says_how_to_go_on_and_that_works(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command.ok(*PLAIN, "--rounds", "4", "--out", "whole")
    real, calls = Simulator.round, []

    def interrupted(self: Simulator) -> object:
        calls.append(self)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Simulator, "round", interrupted)
    outcome = command(*PLAIN, "--rounds", "4", "--out", "my run")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (130, "", 1)
    assert "at most the current round is lost" in outcome.err
    resume = shlex.split(outcome.err.partition("Resume with: ")[2])
    assert resume == ["bpfed", "run", "--out", "my run", "--resume"]
    assert "Resuming after round 2 of 4." in command.ok(*resume[1:]).err
    assert metrics(Path("my run")) == metrics(Path("whole"))


def test_ctrl_c_before_the_first_round_leaves_nothing(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bpfed.config.reader.Config.load_data", interrupted)
    outcome = command(*SMALL)
    assert (outcome.code, outcome.out) == (130, "")
    assert outcome.err == "bpfed: Stopped before the first round; nothing was written.\n"
    assert list(Path().iterdir()) == []


def test_ctrl_c_waits_until_torch_is_there(tmp_path: Path) -> None:
    """Else its libraries abort the process. Here is another torch, which presses Ctrl-C itself."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, sys\nos.kill(os.getpid(), signal.SIGINT)\nprint('whole', file=sys.stderr)\n"
    )
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.path.insert(0, sys.argv[1]); "
    code += "from bpfed.cli import main; main(sys.argv[2:])"
    for command in (("run", "--data", "digits", "--quiet"), ("predict", "runs/a", "--client", "a", "--input", "a.csv")):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), *command], cwd=tmp_path, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (130, "")
        lines = done.stderr.strip().splitlines()
        assert lines[0] == "whole"
        assert lines[1:] == (
            ["bpfed: Stopped before the first round; nothing was written."] if command[0] == "run" else []
        )
