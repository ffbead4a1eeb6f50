"""The command as a user meets it: run in this process or in one that can be killed, and what is left in its folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import pytest

from bpfed.cli import main

#: A run that takes a second or less, as far as it can.
SMALL = ("run", "--clients", "3", "--epochs", "1", "--eval-draws", "2", "--adapt", "off", "--quiet")
#: The same with the method that is quickest to trace, where the method does not matter.
PLAIN = (*SMALL, "--method", "fedavg")


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """What a refused command says: one line on stderr, exit code 2, and nothing else at all."""
        assert self.code == 2, self
        assert self.out == ""
        assert self.err.startswith("bpfed: ")
        assert self.err.count("\n") == 1
        assert "Traceback" not in self.err
        return self.err.removeprefix("bpfed: ").rstrip("\n")


class Command:
    """Calls ``bpfed`` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: str | Path) -> Outcome:
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        out, err = self.capsys.readouterr()
        return Outcome(int(ended.value.code or 0), out, err)

    def ok(self, *arguments: str | Path) -> Outcome:
        outcome = self(*arguments)
        assert outcome.code == 0, outcome
        return outcome


def flip(path: Path) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


def as_before_manifests(folder: Path) -> Path:
    """Turn a run folder into what bpfed 0.7.0 wrote: no manifest, and checkpoints that say nothing of their run."""
    (folder / "manifest.json").unlink()
    for path in (folder / "checkpoint").glob("*.json"):
        record = json.loads(path.read_text())
        path.write_text(json.dumps({k: record[k] for k in record if k not in ("identity", "record", "metrics")}))
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """Everything in a folder, to see that it did not change."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def metrics(folder: Path) -> str:
    """``metrics.jsonl`` without its timings."""
    return re.sub(r', "seconds": [0-9.e+-]+', "", (folder / "metrics.jsonl").read_text())


_processes = multiprocessing.get_context("forkserver")
# What takes seconds to import is imported once, and every process begins as a copy.
_processes.set_forkserver_preload(["bpfed.config", "bpfed.runs.fit", "bpfed.cli", "sklearn.datasets", "torch._dynamo"])


def process(arguments: list[str], log: Path, dies_at: int = 0) -> BaseProcess:
    """``bpfed`` in a process of its own, to be started; it kills itself at its ``dies_at``-th operation on a file."""
    return _processes.Process(target=_live, args=(arguments, str(log), dies_at), daemon=True)


def _live(arguments: list[str], log: str, dies_at: int) -> None:
    import torch

    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(log, "a")  # noqa: SIM115 (open to the end, whatever that is)
    left = [dies_at]

    def now() -> bool:
        left[0] -= 1
        return left[0] == 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    real_fsync, real_replace, real_write = os.fsync, os.replace, os.write

    def fsync(handle: int) -> None:
        if now():
            die()
        real_fsync(handle)

    def replace(old: str, new: str) -> None:
        if now():
            die()
        real_replace(old, new)

    def write(handle: int, data: bytes) -> int:
        if now():
            real_write(handle, data[: len(data) // 2])
            die()
        return real_write(handle, data)

    os.fsync, os.replace, os.write = fsync, replace, write  # type: ignore[assignment]
    main(arguments)
