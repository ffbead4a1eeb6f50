"""Flower's own processes: how they are started, watched, asked and stopped."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from bpfed.errors import UserError
from bpfed.files import write_whole
from bpfed.flower import keys
from bpfed.flower.plan import Plan
from bpfed.flower.server_app import FOLDER
from bpfed.flower.worker import SOCKET, STUCK, listens
from bpfed.report import text

#: The SuperLink's own memory.
DATABASE = "flower.db"
#: What runs a command of Flower's so that it can be watched over.
LAUNCH = (sys.executable, "-m", "bpfed.flower.launch")
#: Flower's name for the connection that we configure.
CONNECTION = "deployment"
#: What a SuperNode prints whose key is not (or not yet again) let in; to the system it just failed.
NOT_LET_IN = b"Exit Code: 305"
#: The SuperLink holds a key for 60 s after its SuperNode was killed; whoever is refused longer is refused for good.
LOCK = 150.0
#: Seconds between restarts: the first, and the longest.
BACK_OFF = (2.0, 20.0)
#: Restarts of a process that lived this long start again with the shortest wait.
STEADY = 60.0

Say = Callable[[str], None]


def free_port() -> int:
    """A port of loopback that nobody has at this moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment(home: Path, plan: Plan) -> dict[str, str]:
    """For a process of Flower's: its files in a folder of the deployment, and no word to its makers unless allowed."""
    allowed = "1" if plan.telemetry else "0"
    bin_ = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": os.pathsep.join((bin_, os.environ.get("PATH", ""))),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": allowed,
        "FLWR_DISABLE_UPDATE_CHECK": "0" if plan.telemetry else "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        "PYTHONUNBUFFERED": "1",
    }


def superlink(folder: Path, plan: Plan) -> list[str]:
    """The command of the server's SuperLink."""
    host, _, port = plan.address.rpartition(":")
    bind = host if host in ("127.0.0.1", "localhost", "::1") else "0.0.0.0"
    return [
        *LAUNCH,
        "flower-superlink",
        *("--host", bind, "--port", port),
        *("--database", str(folder / DATABASE)),
        *("--ssl-ca-certfile", str(folder / keys.AUTHORITY)),
        *("--ssl-certfile", str(folder / keys.SERVER)),
        *("--ssl-keyfile", str(folder / keys.SERVER_KEY)),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    ]


def supernode(folder: Path, plan: Plan) -> list[str]:
    """The command of a site's SuperNode."""
    return [
        *LAUNCH,
        "flower-supernode",
        *("--superlink", plan.address),
        *("--root-certificates", str(folder / keys.AUTHORITY)),
        *("--auth-supernode-private-key", str(folder / keys.SITE_KEY)),
        *("--host", "127.0.0.1", "--port", str(free_port())),
        *("--node-config", f'folder="{folder}"'),
    ]


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
    parent = os.getpid()

    def die_with_parent() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(1)

    file = log.open("ab") if log is not None else None
    output = subprocess.PIPE if pipe else file
    try:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if pipe else file,
            preexec_fn=die_with_parent,
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
            sys.stderr.buffer.write(stamp() + line)
            sys.stderr.buffer.flush()


def stamp() -> bytes:
    """The time of day, to milliseconds, before a line of a log."""
    now = time.time()
    return f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now % 1 * 1000):03d} ".encode()


def watch(
    name: str, command: Callable[[], Sequence[str]], env: dict[str, str], say: Say, started: Callable[[], None]
) -> None:
    """Keep a process running until somebody asks for the end, which is then a clean one.

    Args:
        name: What to call it.
        command: Its command, made anew for every start.
        env: Its environment.
        say: Told in words what happens.
        started: Called after each start.

    Raises:
        UserError: It is refused for longer than a key can be held.
    """
    wait, refused = BACK_OFF[0], 0.0
    with until_told():
        while True:
            began = time.monotonic()
            process = start(command(), env, pipe=True)
            echo = Echo(process)
            try:
                started()
                code = process.wait()
            except Stopped:
                say("Stopping.")
                stop(process)
                return
            except BaseException:
                stop(process)
                raise
            lived, shut_out = time.monotonic() - began, echo.not_let_in()
            wait = BACK_OFF[0] if lived > STEADY else wait
            refused = refused + lived + wait if shut_out else 0.0
            if refused > LOCK:
                raise UserError(
                    "The server refuses this site's key; it is of another deployment, not registered, or in use elsewhere."
                )
            why = "is not let in (its key may be held for a minute)" if shut_out else f"ended with code {code}"
            say(f"{name} {why}; starting again in {wait:.0f} s.")
            try:
                time.sleep(wait)
            except Stopped:
                return
            wait = min(2.0 * wait, BACK_OFF[1])


# --- the server ---------------------------------------------------------------------------------------------------------


def healthy(folder: Path, plan: Plan, within: float) -> bool:
    """Whether the SuperLink answers, over TLS, within so many seconds."""
    context = ssl.create_default_context(cafile=str(folder / keys.AUTHORITY))
    until = time.monotonic() + within
    while True:
        try:
            with urllib.request.urlopen(f"https://{plan.address}/health", timeout=5, context=context) as reply:
                return bool(reply.status == 200)
        except (OSError, ValueError):
            if time.monotonic() >= until:
                return False
            time.sleep(0.3)


def ask(folder: Path, plan: Plan, *arguments: str, timeout: float = 120.0) -> dict[str, Any]:
    """Run a command of ``flwr`` against the deployment's SuperLink and read what it prints."""
    home = folder / "flwr"
    connection = (
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{plan.address}"\n'
        f'root-certificates = "{folder / keys.AUTHORITY}"\n'
    )
    if not (home / "config.toml").exists() or (home / "config.toml").read_text() != connection:
        write_whole(home / "config.toml", connection)
    command = ["flwr", *arguments, CONNECTION, "--format", "json"]
    process = start_captured(command, environment(home, plan), timeout)
    try:
        found = json.loads(process[process.index("{") :])
    except ValueError:
        raise UserError(f"'{' '.join(command)}' failed: {process.strip()[-500:]}") from None
    return dict(found)


def start_captured(command: Sequence[str], env: dict[str, str], timeout: float) -> str:
    """What a command prints on stdout, or on stderr where that is nothing."""
    try:
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout)
    except FileNotFoundError:
        raise UserError(f"'{command[0]}' is not installed; install Flower with: pip install 'bpfed[deploy]'") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"'{' '.join(command)}' took longer than {timeout:g} s; is the server busy?") from None
    return (done.stdout.strip() or done.stderr).decode(errors="replace")


def register(folder: Path, plan: Plan, say: Say) -> None:
    """Let the sites' keys in; the SuperLink's database remembers those that are in."""
    paths = {site: folder / keys.KEYS / f"{keys.slug(site)}.pub" for site in plan.sites}
    noted = folder / "registered.json"
    database = (folder / DATABASE).stat().st_ino
    known = json.loads(noted.read_text()) if noted.exists() else {}
    known = known if known.get("database") == database else {"database": database}
    missing = {site: path for site, path in paths.items() if known.get(site) != path.read_text()}
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda path: ask(folder, plan, "supernode", "register", str(path)), missing.values())
    for site, answer in zip(missing, found, strict=True):
        if not answer.get("success") and "already" not in str(answer):
            raise UserError(f"The key of site '{site}' could not be registered: {answer.get('error-message', answer)}")
        known[site] = paths[site].read_text()
    write_whole(noted, json.dumps(known))
    say(f"{text.many(len(plan.sites), 'site')} may join.")


def serve(folder: Path, plan: Plan, say: Say) -> None:
    """Run the SuperLink until somebody asks for the end."""
    env = {**environment(folder / "flwr", plan), FOLDER: str(folder)}

    def started() -> None:
        if not healthy(folder, plan, 120.0):
            raise UserError(f"The server does not answer at {plan.address}; is the port taken?")
        register(folder, plan, say)
        say(f"The server is ready at {plan.address}.")

    watch("The SuperLink", lambda: superlink(folder, plan), env, say, started)


def join(folder: Path, plan: Plan, say: Say, data: str | None = None) -> bool:
    """Run a site's SuperNode, and its worker beside it, until somebody asks for the end.

    Args:
        folder: The site's.
        plan: Of the site.
        say: Told in words what happens.
        data: What its examples are, if that is to be remembered; None: what is remembered.

    Returns:
        False: the site cannot take part, and its worker has said why.
    """
    env = environment(folder / "flwr", plan)
    command = [sys.executable, "-m", "bpfed.flower.worker", str(folder), *([] if data is None else [data])]
    worker = Kept(command, env, say, folder / STUCK)
    try:
        with until_told():
            if not worker.first(folder):
                return False
        watch(
            "The SuperNode",
            lambda: supernode(folder, plan),
            env,
            say,
            lambda: say(f"Site '{plan.site}' joins {plan.address}."),
        )
    except Stopped:
        say("Stopping.")
    finally:
        worker.close()
        (folder / SOCKET).unlink(missing_ok=True)
    return True


class Kept:
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
            self.stuck.unlink(missing_ok=True)
            process = start(self.command, self.env)
            while process.poll() is None and not self.over.wait(0.2):
                if self.stuck.exists():
                    process.kill()
            stop(process)
            self.failed = process.returncode == 2  # said in words, and the same if tried again
            if not self.over.is_set() and not self.failed:
                wait = BACK_OFF[0] if time.monotonic() - began > STEADY else min(2.0 * wait, BACK_OFF[1])
                self.say(f"The site's worker ended with code {process.returncode}; starting it again.")
                self.over.wait(wait)
