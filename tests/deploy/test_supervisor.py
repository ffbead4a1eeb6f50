"""Processes that are kept running, whatever becomes of logs and of the machine."""

import errno
import io
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from bpfed._util.errors import UserError
from bpfed.deploy.ops import supervise
from bpfed.deploy.ops.supervise import Echo, Supervised
from bpfed.deploy.site import worker


class Full(io.RawIOBase):
    """A log on a full disk."""

    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_process_does_not_wait_for_a_log_that_cannot_be_written(monkeypatch):
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(buffer=Full()))
    noisy = f"print('x' * 10**6); print({supervise.NOT_LET_IN.decode()!r})"
    process = supervise.start([sys.executable, "-c", noisy], {}, pipe=True)
    echo = Echo(process)
    try:
        assert process.wait(60.0) == 0
    finally:
        supervise.stop(process)
    assert echo.not_let_in()


def test_a_worker_that_cannot_be_started_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "BACK_OFF", (0.01, 0.01))
    said, tries, begin = [], [], supervise.start

    def start(command, env):
        tries.append(command)
        if len(tries) == 1:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return begin(command, env)

    monkeypatch.setattr(supervise, "start", start)
    kept = Supervised([sys.executable, "-c", "raise SystemExit(2)"], {}, said.append, tmp_path / worker.STUCK)
    kept.thread.join(60.0)
    assert kept.failed  # it has said why, in words
    assert not kept.first(tmp_path)
    assert said == ["The site's worker could not be started (Resource temporarily unavailable); trying again."]
    assert len(tries) == 2


def test_a_worker_that_is_not_installed_is_not_waited_for(tmp_path):
    said = []
    kept = Supervised([str(tmp_path / "nothing")], {}, said.append, tmp_path / worker.STUCK)
    until = time.monotonic() + 30.0
    while not kept.failed and time.monotonic() < until:
        time.sleep(0.01)
    assert not kept.first(tmp_path)
    assert "is not installed" in said[0]


def test_a_log_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        supervise.start([sys.executable, "-c", ""], {}, tmp_path / "nowhere" / "x.log")


def test_told_to_end_between_two_lives_it_ends_cleanly(monkeypatch):
    """The process has ended; what it has started still holds its output, which is waited for."""
    monkeypatch.setattr(Echo, "not_let_in", lambda self: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(5.0))
    said = []
    supervise.watch("It", lambda: [sys.executable, "-c", ""], dict(os.environ), said.append, lambda: None)
    assert said == []
