"""A site's worker: what its app asks it for, through a socket that is its owner's alone."""

import contextlib
import os
import socket
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import Command
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from bpfed._util.errors import UserError
from bpfed.deploy import apps
from bpfed.deploy.protocol.messages import Reply, Request
from bpfed.deploy.site import worker
from bpfed.deploy.site.site import open_site


@pytest.fixture
def bpfed(capsys):
    return Command(capsys)


def test_records_pass_between_app_and_worker_unchanged(tmp_path):
    record = RecordDict(
        {
            "a": ConfigRecord({"x": 1, "y": "z", "flag": True}),
            "m": MetricRecord({"v": [1.5, 0.1], "n": 2}),
            "t": ArrayRecord(
                {"mean": Array("float32", (3,), "raw", b"\0\1\2" * 4), "none": Array("f", (0,), "raw", b"")}
            ),
        }
    )
    there = worker.from_bytes(worker.to_bytes(record))
    assert dict(there["a"]) == dict(record["a"])
    assert type(there["a"]["flag"]) is bool
    assert dict(there["m"]) == dict(record["m"])
    assert there["t"]["mean"].data == record["t"]["mean"].data
    assert there["t"]["none"].shape == (0,)


def test_an_app_asks_its_worker(bpfed, tmp_path):
    assert worker.ask(tmp_path, b"", 1.0) is None  # nobody is there
    fed = tmp_path / "fed"
    bpfed.ok("deploy", "init", fed, "--clients", "2")
    site = fed / "site-client-00"
    (site / "deploy.toml").write_text((site / "deploy.toml").read_text().replace('data = ""', 'data = "digits"'))
    said = []
    threading.Thread(target=worker.work, args=(site, said.append), daemon=True).start()
    while not worker.listens(site):
        pass
    own = open_site(site, print)
    ask = Request(own.fingerprint, "ab", 0).write()
    answer = Reply.read(worker.from_bytes(worker.ask(site, worker.to_bytes(ask), 30.0)), None, None)
    assert (answer.site, answer.refused) == ("client-00", "")
    assert '"classes": 10' in answer.statement


@pytest.fixture(params=[1, 180])
def working(bpfed, tmp_path, request, monkeypatch):
    """A site of which a worker is running, in a folder of a short or a long path; and what it says."""
    fed = tmp_path / ("f" * request.param)
    bpfed.ok("deploy", "init", fed, "--clients", "2")
    site, said = fed / "site-client-00", []
    (site / "deploy.toml").write_text((site / "deploy.toml").read_text().replace('data = ""', 'data = "digits"'))
    assert worker.ask(site, b"", 30.0) is None  # nobody is there, which is no reason to wait
    monkeypatch.setattr(worker, "PATIENCE", 0.5)
    umask = os.umask(0)
    threading.Thread(target=worker.work, args=(site, said.append), daemon=True).start()
    while not worker.listens(site):
        pass
    os.umask(umask)
    return site, said


def test_a_worker_outlives_whatever_its_socket_brings(working):
    site, said = working
    silent = socket.socket(socket.AF_UNIX)
    with worker.address(site) as place:
        silent.connect(place)  # and never says anything
    own = open_site(site, print)
    for spoilt in (
        b"x",
        b"\1" + b"\0" * 7 + b"3",
        (9).to_bytes(8, "little") + b'{"a": [1]}',
        b"\2" + b"\0" * 7 + b"{}",
    ):
        with contextlib.suppress(TimeoutError):
            worker.ask(site, spoilt, 30.0)
    answer = worker.ask(site, worker.to_bytes(Request(own.fingerprint, "ab", 0).write()), 30.0)
    assert Reply.read(worker.from_bytes(answer), None, None).site == "client-00"
    silent.close()
    assert any("could not be handed over (timed out)" in sentence for sentence in said)
    assert sum("A message could not be read" in sentence for sentence in said) == 3


def test_only_its_owner_can_ask_a_worker(working):
    site, _ = working
    assert stat.S_IMODE((site / worker.SOCKET).stat().st_mode) == 0o600
    assert stat.S_ISSOCK((site / worker.SOCKET).stat().st_mode)
    assert "@" not in "".join(line for line in Path("/proc/net/unix").read_text().splitlines() if "bpfed" in line)


def test_an_app_says_nothing_to_the_server_of_what_went_wrong(tmp_path, monkeypatch, capsys):
    now = time.time()
    message = SimpleNamespace(metadata=SimpleNamespace(created_at=now, ttl=60.0), content=RecordDict())
    context = SimpleNamespace(node_config={"folder": str(tmp_path / "secret")})
    monkeypatch.setattr(apps, "end_in_time", lambda left: None)
    for error in (PermissionError(13, "no", "secret"), UserError("secret"), KeyError("secret"), TimeoutError("secret")):

        def fails(*given, error=error):
            raise error

        monkeypatch.setattr(worker, "ask", fails)
        with pytest.raises((RuntimeError, TimeoutError)) as raised:
            apps._answered(message, context)
        assert "secret" not in str(raised.value)
        assert raised.value.__suppress_context__ or raised.value.__context__ is None
        assert "secret" in capsys.readouterr().err
