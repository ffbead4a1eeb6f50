"""Strangers before a real federation: a SuperLink on a second address and two sites, over TLS, attacked as anybody can.

Strangers use the commands of Flower as they are installed, and what is public: the address and `ca.crt`.
"""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.faults import below, children
from bpfed._util.files import RUN, SERVER
from bpfed.config.reader import Override, read
from bpfed.deploy.ops import admin, certificates, flower, gate, supervise
from bpfed.deploy.settings import Plan

pytestmark = pytest.mark.skipif(os.environ.get("BPFED_TEST_DEPLOY") != "1", reason="run by 'make test-deploy'")

WANTED = {"data.name": "digits", "data.clients": 2, "run.rounds": 1, "run.epochs": 1}
PROJECT = """
[project]
name = "stranger"
version = "1.0.0"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41.0"]
[tool.flwr.app]
publisher = "stranger"
fab-format-version = 1
flwr-version-target = "1.41.0"
[tool.flwr.app.components]
serverapp = "stranger.server_app:app"
clientapp = "stranger.client_app:app"
[tool.flwr.app.config]
"""
#: Each leaves a trace as soon as it is imported; the server's asks every site that it finds.
SERVER_APP = """
import time
from pathlib import Path
Path({trace!r}).write_text("the server's")
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    asked = RecordDict({{"ask": ConfigRecord({{"round": 0}})}})
    until = time.monotonic() + 90
    while len(list(grid.get_node_ids())) < 2 and time.monotonic() < until:
        time.sleep(0.5)
    nodes = list(grid.get_node_ids())
    replies = list(grid.send_and_receive([Message(asked, node, MessageType.QUERY) for node in nodes], timeout=90))
    Path({answers!r}).write_text("\\n".join(r.error.reason if r.has_error() else "answered" for r in replies))
"""
CLIENT_APP = """
import os
from pathlib import Path
Path({trace!r} + str(os.getpid())).write_text("a site's")
from flwr.app import Message
from flwr.clientapp import ClientApp
app = ClientApp()
@app.query()
def query(message, context):
    return Message(message.content, reply_to=message)
"""
#: How curl sends a message of nothing, as Flower's interfaces have it.
POST = ("-X", "POST", "-H", "Content-Type: application/protobuf", "--data-binary", "")


class Stranger:
    """Who has Flower, the server's address and its public certificate, and no key."""

    def __init__(self, folder, authority):
        self.folder, self.app = folder, folder / "stranger"
        (folder / "home").mkdir(parents=True)
        (folder / "traces").mkdir()
        (self.app / "stranger").mkdir(parents=True)
        (self.app / "pyproject.toml").write_text(PROJECT)
        (self.app / "LICENSE").write_text("none\n")
        (self.app / "stranger" / "__init__.py").write_text("")
        traces = {"trace": str(folder / "traces" / "x"), "answers": str(folder / "answers")}
        (self.app / "stranger" / "server_app.py").write_text(SERVER_APP.format(**traces))
        (self.app / "stranger" / "client_app.py").write_text(CLIENT_APP.format(**traces))
        (folder / certificates.AUTHORITY).write_bytes(authority)
        (folder / "own").mkdir()
        certificates.make_site(folder / "own", folder, "other")
        self.env = {**os.environ, "FLWR_HOME": str(folder / "home"), "FLWR_TELEMETRY_ENABLED": "0"}
        self.env |= {"FLWR_DISABLE_UPDATE_CHECK": "1"}
        self.env["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), self.env.get("PATH", "")))

    def flwr(self, address, *arguments):
        """What a command of Flower's says, and whether it ended well."""
        (self.folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "it"\n\n[superlink.it]\naddress = "{address}"\n'
            f'root-certificates = "{self.folder / certificates.AUTHORITY}"\n'
        )
        done = subprocess.run(["flwr", *arguments], env=self.env, capture_output=True, text=True, timeout=120)
        return done.returncode == 0, done.stdout + done.stderr

    def traces(self):
        """What of the stranger's code was executed somewhere."""
        return sorted(path.name for path in (self.folder / "traces").iterdir())


def curl(address, path, *how):
    """The status that anybody gets who asks (0: no answer), and what is said."""
    asked = ["curl", "-sk", "-m", "20", "-w", "\n%{http_code}", *how, f"https://{address}{path}"]
    said, _, status = subprocess.run(asked, capture_output=True, timeout=60).stdout.rpartition(b"\n")
    return int(status), said.decode(errors="replace")


def registered(server):
    """The keys that Flower lets in, and the numbers of their nodes."""
    with sqlite3.connect(f"file:{server / flower.DATABASE}?mode=ro", uri=True) as database:
        rows = database.execute("select public_key, node_id from node where status != 'unregistered'").fetchall()
    return {bytes(key): node % 2**64 for key, node in rows}


class Shown:
    """The commands of these processes and of all below them, as anybody on the machine is shown them."""

    def __init__(self, running):
        self.running, self.found, self.over = list(running), set(), threading.Event()
        self.thread = threading.Thread(target=self._look)
        self.thread.start()

    def _look(self):
        while not self.over.wait(0.2):
            for pid in [pid for process in self.running for pid in (process.pid, *children(process.pid))]:
                with contextlib.suppress(OSError):
                    self.found.add(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))

    def close(self):
        self.over.set()
        self.thread.join()
        return self.found


def until(holds, what, patience=240.0):
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < patience, what
        time.sleep(0.5)


def test_strangers_are_refused_and_a_site_executes_nobody_elses_app(tmp_path):
    config = read(None, [Override(key, str(value)) for key, value in WANTED.items()])
    address = f"127.0.0.2:{supervise.free_port()}"
    plan = Plan(config.load_data().clients, address, timeout=240.0, wait=300.0)
    folder = tmp_path / "fed"
    admin.make(folder, plan, config)
    server, sites = folder / SERVER, [admin.site_folder(folder, site) for site in plan.sites]
    stranger = Stranger(tmp_path / "stranger", (server / certificates.AUTHORITY).read_bytes())
    known = set(certificates.public_keys(server, plan.sites).values())
    said = []
    with admin.started(folder, plan, "digits", said.append) as running:
        local = gate.read_local(server)
        assert (server / gate.LOCAL).stat().st_mode & 0o777 == 0o600
        before = registered(server)
        assert before.keys() == known
        for place in (address, f"127.0.0.1:{local.port}"):  # from anywhere; on the server's machine
            for path in ("/v1/control/list-nodes", "/v1/control/list-runs", "/v1/runtime/acquire-task", "/docs"):
                status, answer = curl(place, path, *POST)
                assert (status, "Refused" in answer) == (403, True), (place, path, answer)
            for arguments in (
                ("supernode", "list", "it"),
                ("supernode", "register", str(stranger.folder / "own" / certificates.SITE_PUBLIC), "it"),
                ("supernode", "unregister", str(next(iter(before.values()))), "it"),
                ("run", str(stranger.app), "it"),
                ("log", "1", "it"),
            ):
                well, answer = stranger.flwr(place, *arguments)
                assert (well, "Refused" in answer) == (False, True), (place, arguments, answer)
        assert curl(f"127.0.0.1:{plan.port}", "/health")[0] == 0  # at no address but the given one
        assert registered(server) == before
        log = (server / "server.log").read_text()
        for path in ("list-nodes", "register-node", "unregister-node", "start-run", "stream-logs"):
            for why in ("it did not come by the operator's port on loopback", "it does not carry the secret"):
                assert any(f"'POST /v1/control/{path}' from 127.0.0.1:" in x and why in x for x in log.splitlines())

        # The operator is let in; and neither secret nor token is to be seen, by whom ever else is on that machine.
        shown = Shown(running.values())
        admin.run(server, plan, said.append, lambda found: None)
        assert (server / RUN / "report.html").is_file()
        commands = shown.close()
        assert {"flwr-serverapp", "flwr-clientapp"} <= {word for line in commands for word in line.split()}
        logs = [path.read_text() for path in (server / "server.log", *(own / "site.log" for own in sites))]
        secrets = [local.secret, *(gate.read_local(own).secret for own in sites), "--token"]
        assert [secret for secret in secrets for text in (*commands, *logs) if secret in text] == []
        assert stranger.traces() == []

        # Now somebody else has the server: its address, its certificate and its database, and a SuperLink of their own.
        supervise.stop(running[SERVER], 30.0)
        hostile = [*flower.command(server, plan, "127.0.0.2")]
        hostile = hostile[hostile.index("flower-superlink") :]
        running["hostile"] = supervise.start(hostile, stranger.env, tmp_path / "hostile.log")
        until(lambda: curl(address, "/health")[0] == 200, "the other SuperLink")
        well, answer = stranger.flwr(address, "run", str(stranger.app), "it")
        assert well, answer
        until((stranger.folder / "answers").exists, (tmp_path / "hostile.log").read_text())
        answers = (stranger.folder / "answers").read_text().splitlines()
        assert answers == ["The FAB could not be verified."] * 2
        assert stranger.traces() == ["x"]  # its own server's part
        for own in sites:
            log = (own / "site.log").read_text()
            assert "Refused the app 'stranger/stranger 1.0.0'" in log
            assert f"sent by the server at {address}" in log
            assert list(own.rglob("stranger*")) == []  # nor unpacked


def test_a_started_server_puts_right_what_was_done_to_its_database(tmp_path):
    config = read(None, [Override(key, str(value)) for key, value in WANTED.items()])
    plan = Plan(config.load_data().clients, f"127.0.0.2:{supervise.free_port()}")
    admin.make(tmp_path / "fed", plan, config)
    server, (first, second) = tmp_path / "fed" / SERVER, plan.sites
    own = certificates.public_keys(server, plan.sites)
    command = [sys.executable, "-m", "bpfed", "deploy", "server", str(server)]
    process = supervise.start(command, dict(os.environ), tmp_path / "server.log")

    def said(sentence, times=1):
        until(lambda: (tmp_path / "server.log").read_text().count(sentence) >= times, sentence)

    try:
        said("The server is ready")
        before = registered(server)
        assert before.keys() == set(own.values())
        with sqlite3.connect(server / flower.DATABASE) as database:
            database.execute("update node set status = 'unregistered' where public_key = ?", (own[first],))
        (server / certificates.KEYS / f"{second}.pub").unlink()
        os.kill(below(process, "flower-superlink"), signal.SIGKILL)
        said(f"Site '{first}' was unregistered, though its key is in 'keys'; it is registered again.")
        said(f"Node {before[own[second]]} was registered with a key that is not in 'keys'; it is unregistered now.")
        said(f"Site '{second}' has no key in ")
        said("The server is ready", times=2)
        assert registered(server) == {own[first]: before[own[first]]}
    finally:
        supervise.stop(process, 30.0)
