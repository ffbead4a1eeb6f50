"""Fixtures of the data tests: no datasets but those asked for, and a web server on this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_files_of_this_machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets that happen to lie on the machine must not make a test pass, nor must a test leave any there."""
    monkeypatch.delenv("BPFED_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def real_data() -> str:
    folder = os.environ.get("BPFED_DATA")
    if not folder:
        pytest.skip("needs the real datasets: name their folder in BPFED_DATA")
    return folder


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """A function that serves a folder over HTTP and gives its address."""
    servers = []

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    def start(folder: Path) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
