"""What goes over a real socket, byte by byte: a SuperLink and two SuperNodes without TLS, and a proxy that records."""

import os
import socket
import subprocess
import threading
import time
import urllib.request

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from test_wire import found, secrets

from bpfed._util.paths import SERVER
from bpfed.config.reader import Override, read
from bpfed.deploy.ops import admin, supervise
from bpfed.deploy.ops.certificates import KEYS
from bpfed.deploy.ops.launch import FILES
from bpfed.deploy.settings import Plan
from bpfed.deploy.site import worker
from bpfed.deploy.site.site import States, open_site

pytestmark = pytest.mark.skipif(os.environ.get("BPFED_TEST_DEPLOY") != "1", reason="run by 'make test-deploy'")

ROUNDS = 2
WANTED = {"data.name": "digits", "data.clients": 2, "run.rounds": ROUNDS, "run.epochs": 1, "run.eval_every": 1}
PATIENCE = 400.0


class Proxy:
    """Hands on all that comes to a port, and keeps it."""

    def __init__(self, to):
        self.to, self.streams = to, []
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self.listening.accept()
                far = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                return
            for ends in ((near, far), (far, near)):
                stream = bytearray()
                self.streams.append(stream)
                threading.Thread(target=self._hand_on, args=(*ends, stream), daemon=True).start()

    def _hand_on(self, source, sink, stream):
        try:
            while data := source.recv(1 << 16):
                stream += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            sink.close()

    def taken(self):
        """All bytes so far, connection by connection."""
        return b"".join(map(bytes, list(self.streams)))


def until(holds, what):
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < PATIENCE, what
        time.sleep(0.2)


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def one_at_a_time(site, lock):
    """Sites of one process take turns."""
    answer = site.answer

    def waits(record):
        with lock:
            return answer(record)

    site.answer = waits


def planting(site, told):
    """Let a site put into its last answer what must never be seen, and call ``told`` before it does."""
    answer = site.answer

    def leaky(record):
        made = answer(record)
        if record["request"]["round"] == ROUNDS + 1:
            told()
            own = site.source.own.train
            planted = {
                "personal": States(site.folder, site.name, record["request"]["run"]).at(ROUNDS)[1].numpy(),
                "row": own.x[0].flatten().numpy(),
                "counts": np.bincount(own.y.numpy(), minlength=10),
            }
            made["more"] = ArrayRecord(
                {name: Array(str(v.dtype), v.shape, "numpy.ndarray", v.tobytes()) for name, v in planted.items()}
            )
        return made

    site.answer = leaky


def test_nothing_personal_is_on_the_socket_until_it_is_planted(tmp_path, monkeypatch):
    config = read(None, [Override(key, str(value)) for key, value in WANTED.items()])
    port = supervise.free_port()
    plan = Plan(config.load_data().clients, f"127.0.0.1:{port}", timeout=240.0, wait=300.0, attempts=1)
    folder, (honest, leaky) = tmp_path / "fed", plan.sites
    admin.make(folder, plan, config)
    server = folder / SERVER
    (server / KEYS).rename(server / "no-keys")  # sites without TLS have no keys either
    sites, marked, lock = {}, [], threading.Lock()
    proxy = Proxy(port)

    def opened(own, say, data=None):
        site = open_site(own, say, data)
        sites[site.name] = site
        one_at_a_time(site, lock)
        if site.name == leaky:
            planting(site, lambda: marked or marked.append(proxy.taken()))
        return site

    monkeypatch.setattr("bpfed.deploy.site.site.open_site", opened)
    for name in plan.sites:
        own = admin.site_folder(folder, name)
        text = (own / "deploy.toml").read_text()
        (own / "deploy.toml").write_text(text.replace('data = ""', 'data = "digits"'))
        threading.Thread(target=worker.work, args=(own, lambda sentence: None), daemon=True).start()
        until(lambda own=own: worker.listens(own), "a worker")

    env = supervise.environment(server / "flwr", plan)
    command = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--database", str(server / "flower.db"), "--disable-runtime-dependency-installation"]
    running = [supervise.start(command, {**env, supervise.SERVER_FOLDER: str(server)}, server / "server.log")]
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}/health"), "the SuperLink")
        for name in plan.sites:
            own = admin.site_folder(folder, name)
            command = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{proxy.port}"]
            command += ["--host", "127.0.0.1", "--port", str(supervise.free_port()), "--node-config", f'folder="{own}"']
            running.append(supervise.start(command, supervise.environment(own / "flwr", plan), own / "site.log"))
        (server / "flwr").mkdir(exist_ok=True)
        (server / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "plain"\n\n[superlink.plain]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        for name, text in FILES.items():
            (server / "app" / name).parent.mkdir(parents=True, exist_ok=True)
            (server / "app" / name).write_text(text)
        command = ["flwr", "run", str(server / "app"), "plain"]
        said = subprocess.run(command, env=env, capture_output=True, timeout=120).stdout
        until(lambda: (admin.status(server) or {}).get("state") in ("finished", "stopped"), said)
    finally:
        for process in running:
            supervise.stop(process)
        proxy.listening.close()

    status = admin.status(server)
    assert (status["state"], status["sites"][leaky]["refused"], status["sites"][honest]["refused"]) == (
        "finished",
        1,
        0,
    )
    run = next(path.name for path in sites[honest].folder.iterdir())
    looked_for = list(secrets(sites, run))
    before, after = marked[0], proxy.taken()
    # The capture can be read: the server's last state is in it as it was sent, and all others have room in it.
    shared = sites[honest]._federation[1].shared
    assert shared.mean.numpy().tobytes() in before
    assert len(before) > ROUNDS * 2 * 2 * sites[honest].schemas.upload.bytes
    assert len(looked_for) > 1000
    assert found(before, looked_for) == []
    assert found(after, looked_for) == [f"{what} of {leaky}" for what in ("label counts", "personal state", "row")]
