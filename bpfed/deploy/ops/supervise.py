"""Supervision: a process that is started again whenever it ends, until somebody asks for the end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from bpfed._util.console import Say
from bpfed._util.errors import UserError
from bpfed._util.files import writing
from bpfed.deploy.logs import fail, warn
from bpfed.deploy.settings import Plan
from bpfed.deploy.site.worker import listens


def tied() -> Callable[[], None]:
    """What a child is to do before its program starts, as ``preexec_fn``: ask to be ended with its parent (Linux).

    The parent is the *thread* that starts it, which has to wait for it.
    """
    parent = os.getpid()

    def ask() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(1)

    return ask


# --- Processes of a deployment ----------------------------------------------------------------------------------------
#
# Started, so that none outlives the one that started it, and stopped.

#: What runs a command of Flower's so that it is watched over, shut to strangers, and executes our app alone.
LAUNCH = (sys.executable, "-m", "bpfed.deploy.ops.launch")
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


#: What a SuperNode prints whose key is not (or not yet again) let in; to the system it just failed.
NOT_LET_IN = b"Exit Code: 305"
#: The SuperLink holds a key for 60 s after its SuperNode was killed; whoever is refused longer is refused for good.
LOCK = 150.0
#: Seconds between restarts: the first, and the longest.
BACK_OFF = (2.0, 20.0)
#: Restarts of a process that lived this long start again with the shortest wait.
STEADY = 60.0


def watch(
    name: str, command: Callable[[], Sequence[str]], env: dict[str, str], say: Say, started: Callable[[], None]
) -> None:
    """Keep a process running until somebody asks for the end, which is then a clean one.

    Args:
        name: What to call it.
        command: Its command, made again for every start.
        env: Its environment.
        say: Called with each message for the user.
        started: Called after each start.

    Raises:
        UserError: It is refused for longer than a key can be held.
    """
    wait, refused = BACK_OFF[0], 0.0
    process: subprocess.Popen[bytes] | None = None
    with until_told():
        try:
            while True:
                began = time.monotonic()
                process = start(command(), env, pipe=True)
                echo = Echo(process)
                started()
                code = process.wait()
                lived, shut_out = time.monotonic() - began, echo.not_let_in()
                wait = BACK_OFF[0] if lived > STEADY else wait
                refused = refused + lived + wait if shut_out else 0.0
                if refused > LOCK:
                    raise UserError(
                        "The server refuses this site's key; it belongs to another deployment, is not registered, "
                        "or is in use elsewhere."
                    )
                why = "is not let in (its key may be held for a minute)" if shut_out else f"ended with code {code}"
                warn(say, f"{name} {why}; starting again in {wait:.0f} s.")
                time.sleep(wait)
                wait = min(2.0 * wait, BACK_OFF[1])
        except Stopped:
            if process is not None and process.poll() is None:
                say("Stopping.")
        finally:
            if process is not None:
                stop(process)


class Echo:
    """Passes on what a process prints, by a thread, with the time before it, and notes whether its key was refused."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self.refused = process, False
        self.thread = threading.Thread(target=self._pass_on, daemon=True)
        self.thread.start()

    def not_let_in(self) -> bool:
        """Of a process that has ended: whether that was why."""
        self.thread.join(1.0)  # not for good: what it has started may live a little longer, and prints there too
        return self.refused

    def _pass_on(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.refused = self.refused or NOT_LET_IN in line
            with contextlib.suppress(OSError):  # a log on a full disk; a pipe that nobody reads would stop the process
                sys.stderr.buffer.write(stamp() + line)
                sys.stderr.buffer.flush()


def stamp() -> bytes:
    """The time of day, to milliseconds, before a line of a log."""
    now = time.time()
    return f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now % 1 * 1000):03d} ".encode()


class Supervised:
    """A process that is started again whenever it ends, or hangs (then there is the file ``stuck``), by a thread."""

    def __init__(self, command: Sequence[str], env: dict[str, str], say: Say, stuck: Path) -> None:
        self.command, self.env, self.say, self.stuck = command, env, say, stuck
        self.over, self.failed = threading.Event(), False
        self.thread = threading.Thread(target=self._keep, daemon=True)
        self.thread.start()

    def first(self, folder: Path) -> bool:
        """Wait until the worker listens; False: it never will, and has said why."""
        while not listens(folder):
            if self.failed:
                return False
            time.sleep(0.2)
        return True

    def close(self) -> None:
        """End it for good."""
        self.over.set()
        self.thread.join()

    def _keep(self) -> None:
        wait = BACK_OFF[0]
        while not self.over.is_set() and not self.failed:
            began = time.monotonic()
            try:
                self.stuck.unlink(missing_ok=True)
                process = start(self.command, self.env)
            except UserError as error:
                fail(self.say, str(error))
                self.failed = True
                return
            except OSError as error:  # too many processes, or no memory for one more
                warn(self.say, f"The site's worker could not be started ({error.strerror}); trying again.")
                self.over.wait(BACK_OFF[1])
                continue
            while process.poll() is None and not self.over.wait(0.2):
                if self.stuck.exists():
                    process.kill()
            stop(process)
            self.failed = process.returncode == 2  # said in words, and the same if tried again
            if not self.over.is_set() and not self.failed:
                wait = BACK_OFF[0] if time.monotonic() - began > STEADY else min(2.0 * wait, BACK_OFF[1])
                warn(self.say, f"The site's worker ended with code {process.returncode}; starting it again.")
                self.over.wait(wait)
