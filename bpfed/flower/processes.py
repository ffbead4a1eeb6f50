"""Processes of a deployment: started, so that none outlives the one that started it, and stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from bpfed.children import tied
from bpfed.errors import UserError
from bpfed.files import writing
from bpfed.flower.plan import Plan

#: What runs a command of Flower's so that it is watched over, shut to strangers, and executes our app alone.
LAUNCH = (sys.executable, "-m", "bpfed.flower.launch")
#: Variables of the environment that name the folder of the server, or of the site, to Flower's processes. It is the
#: machine that decides where files go, not whoever starts a run.
SERVER_FOLDER, SITE_FOLDER = "BPFED_DEPLOY_SERVER", "BPFED_DEPLOY_SITE"
#: Variables that would open interfaces of Flower's that have no keys, or let anybody say where a request comes from.
UNSAFE = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API", "FORWARDED_ALLOW_IPS")


def free_port() -> int:
    """A port of loopback that nobody has at this moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment(home: Path, plan: Plan) -> dict[str, str]:
    """For a process of Flower's: its files in a folder of the deployment, and no word to its makers unless allowed."""
    allowed = "1" if plan.telemetry else "0"
    bin_ = str(Path(sys.executable).parent)
    kept = {k: v for k, v in os.environ.items() if k not in (*UNSAFE, SERVER_FOLDER, SITE_FOLDER)}
    return {
        **kept,
        "PATH": os.pathsep.join((bin_, os.environ.get("PATH", ""))),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": allowed,
        "FLWR_DISABLE_UPDATE_CHECK": "0" if plan.telemetry else "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "PYTHONUNBUFFERED": "1",
    }


class Stopped(Exception):
    """Somebody asked for the end, by Ctrl-C or SIGTERM."""


@contextlib.contextmanager
def until_told() -> Iterator[None]:
    """Inside, SIGTERM and Ctrl-C raise `Stopped`."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(
    command: Sequence[str], env: dict[str, str], log: Path | None = None, pipe: bool = False
) -> subprocess.Popen[bytes]:
    """Start a process that ends when this one does, however it ends.

    Args:
        command: Its command.
        env: Its environment.
        log: The file that its output is added to; None: it goes where ours does.
        pipe: Whether its output is for us to read, from ``stdout``.
    """
    file = None
    if log is not None:
        with writing(log):
            file = log.open("ab")
    output = subprocess.PIPE if pipe else file
    try:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if pipe else file,
            preexec_fn=tied(),
        )
    except FileNotFoundError:
        raise UserError(f"'{command[0]}' is not installed; install Flower with: pip install 'bpfed[deploy]'") from None
    finally:
        if file is not None:
            file.close()


def stop(process: subprocess.Popen[bytes], patience: float = 15.0) -> None:
    """Ask a process to end, and end it if it does not."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
