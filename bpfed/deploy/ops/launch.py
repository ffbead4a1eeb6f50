"""A command of Flower's, run so that it ends as a whole, is shut to strangers, and executes our app alone.

``python -m bpfed.deploy.ops.launch flower-superlink ...`` is ``flower-superlink ...`` but for what follows.

It ends when a part of it has ended. One answer of the SuperLink that is an error ends a SuperNode's main loop, but not
its process, which then does nothing any more; and the SuperExec of a SuperLink or SuperNode may end without the other
noticing. What has ended can be started again by a supervisor, what only looks alive cannot.

Its interfaces are behind the gate of `bpfed.deploy.ops.gate`; a SuperLink registers exactly the keys in the server's folder
before it listens.

What is executed, at the server and at sites, is the installed bpfed and nothing else. A SuperNode refuses every bundle
but ours; a SuperExec starts only the app of its side; and the process of an app takes the app from the installed package,
so nothing of a bundle is unpacked or imported, whoever has sent it.

All this replaces parts of Flower by name. Where a version of Flower lacks one of them, the process ends: it never runs
without its guards.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata as metadata_importlib
import io
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from bpfed._util.errors import UserError
from bpfed._util.text import plain
from bpfed.deploy.logs import Log, fail, to_parent, warn
from bpfed.deploy.ops import gate
from bpfed.deploy.ops.gate import Gate, Local
from bpfed.deploy.ops.supervise import LAUNCH, SERVER_FOLDER, SITE_FOLDER

#: To the log of this process.
say = Log()

# --- The app that is handed to Flower ---------------------------------------------------------------------------------
#
# Two lines that import the installed `bpfed`, so that no other code travels.
#
# Flower sends the app of a run, as a bundle, to whoever takes part in it. Ours is the same to the last byte wherever it
# is made, so it can be told from any other. Even of ours nothing is executed: see `bpfed.deploy.ops.launch`.

PACKAGE = "bpfed_deployment"
PROJECT = f"""\
[project]
name = "bpfed-deployment"
version = "1.0.0"
description = "Runs the installed bpfed as server and sites of a federation."
license = {{ file = "LICENSE" }}
dependencies = ["flwr>=1.41.0"]

[tool.flwr.app]
publisher = "bpfed"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "{PACKAGE}.server_app:app"
clientapp = "{PACKAGE}.client_app:app"

[tool.flwr.app.config]
"""
#: The app's files.
FILES = {
    "pyproject.toml": PROJECT,
    "LICENSE": "Apache-2.0: https://www.apache.org/licenses/LICENSE-2.0\n",
    f"{PACKAGE}/__init__.py": '"""See bpfed.deploy."""\n',
    f"{PACKAGE}/client_app.py": 'from bpfed.deploy.apps import client as app\n\n__all__ = ["app"]\n',
    f"{PACKAGE}/server_app.py": 'from bpfed.deploy.apps import server as app\n\n__all__ = ["app"]\n',
}
#: Flower's list of a bundle's files.
CONTENT = ".info/CONTENT"


@cache
def bundle() -> bytes:
    """The app as Flower's bundle (FAB); it depends on nothing but the files above."""
    listed = "\n".join(
        f"{name},{hashlib.sha256(text.encode()).hexdigest()},{8 * len(text.encode())}" for name, text in FILES.items()
    )
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in {**FILES, CONTENT: listed}.items():
            entry = zipfile.ZipInfo(name)  # stored, and dated 1980
            entry.create_system = 3  # else the system's own
            archive.writestr(entry, text)
    return made.getvalue()


def fingerprint(content: bytes) -> str:
    """What Flower knows a bundle by."""
    return hashlib.sha256(content).hexdigest()


def is_ours(content: bytes) -> bool:
    """Whether a bundle is the one of this version of bpfed."""
    return content == bundle()


#: What Flower starts beside a SuperLink or a SuperNode, for all that they have processes for.
PART = "flower-superexec"
#: Seconds that an orderly end has, in which the part ends first.
GRACE = 10.0
#: Milliseconds that the SuperLink waits for its database while a message is written; Flower's 5 s are too few for a
#: large one.
BUSY = "60000"
#: Exit code of a process whose part or main loop has ended.
INCOMPLETE = 70
#: The processes of apps, by the variable that names the folder of their side.
APPS = {SERVER_FOLDER: "flwr-serverapp", SITE_FOLDER: "flwr-clientapp"}


class RecordedPopen(subprocess.Popen[Any]):
    """Notes the part's process when it is started.

    Attributes:
        parts: Those started so far.
        at: Where the part finds its SuperLink or SuperNode, behind the gate; empty: where Flower says.
    """

    parts: ClassVar[list[subprocess.Popen[Any]]] = []
    at: ClassVar[str] = ""

    def __init__(self, args: Any, *rest: Any, **more: Any) -> None:
        part = isinstance(args, list) and bool(args) and os.path.basename(str(args[0])) == PART
        if part and self.at:
            place = args.index("--runtime-api-address") + 1
            args = [*LAUNCH, PART, *args[1:place], self.at, *args[place + 1 :]]
        super().__init__(args, *rest, **more)
        if part:
            self.parts.append(self)


def watch_parts(grace: float = GRACE) -> None:
    """From now on, end this process soon after a part of it has ended."""
    subprocess.Popen = RecordedPopen  # type: ignore[misc]

    def watch() -> None:
        while all(part.poll() is None for part in list(RecordedPopen.parts)):
            time.sleep(1.0)
        time.sleep(grace)
        _end(f"{PART} has ended", INCOMPLETE)

    threading.Thread(target=watch, daemon=True).start()


def be_patient() -> None:
    """Let the SuperLink wait longer for its database. Where this Flower has no such setting, nothing changes."""
    with contextlib.suppress(ImportError, AttributeError):
        from flwr.supercore import sql_mixin

        sql_mixin.SQLITE_PRAGMAS = tuple(  # type: ignore[assignment]
            (name, BUSY if name == "busy_timeout" else value) for name, value in sql_mixin.SQLITE_PRAGMAS
        )


def guard_superlink(folder: Path) -> None:
    """A SuperLink behind the gate, on the port it is given and on one of loopback, that lets in the keys it should."""
    import uvicorn

    from bpfed.deploy.ops import certificates
    from bpfed.deploy.settings import Plan

    main = importlib.import_module("flwr.superlink.main")
    make, members = main.create_app, certificates.public_keys(folder, Plan.read(folder).sites)

    def create_app(*given: Any, **more: Any) -> Any:
        made = make(*given, **more)
        certificates.register(made.state.linkstate_factory.state(), members, say)
        return made

    def run(app: Any, host: str, port: int, **more: Any) -> None:
        listening = [listen(host, port), listen(gate.LOOPBACK, 0)]
        local = gate.write_local(folder, listening[1].getsockname()[1])
        RecordedPopen.at = f"{gate.LOOPBACK}:{local.port}"
        # Uvicorn would believe a header on where a request comes from.
        settings = {**more, "host": host, "port": port, "proxy_headers": False}
        uvicorn.Server(uvicorn.Config(Gate(app, local, say, set(members.values())), **settings)).run(sockets=listening)

    replace(main, create_app=create_app)
    replace(uvicorn, run=run)


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound to this address and no other."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise UserError(f"The server cannot listen at {host}, port {port} ({error.strerror}).") from error
    return made


def guard_supernode(folder: Path) -> None:
    """A SuperNode behind the gate that takes no bundle but ours."""
    local = gate.write_local(folder, int(_argument("--port")))
    RecordedPopen.at = f"{gate.LOOPBACK}:{local.port}"
    main = importlib.import_module("flwr.supernode.main")
    loop = importlib.import_module("flwr.supernode.start_client_internal")
    make = main.create_app
    replace(main, create_app=lambda *given, **more: Gate(make(*given, **more), local, say))
    replace(loop, _pull_and_store_message=only_ours(loop._pull_and_store_message, loop, _argument("--superlink")))


class ForeignApp(Exception):
    """A bundle is not ours."""


def only_ours(pull: Callable[..., Any], loop: Any, server: str) -> Callable[..., Any]:
    """Flower's function that takes a message and the bundle it is for, so that it takes our bundle alone.

    The sender of a message for another app gets an error, as Flower has it for bundles that cannot be verified.

    Args:
        pull: The function.
        loop: Its module.
        server: Who sends, for the log.
    """

    @functools.wraps(pull)
    def pulled(
        *,
        receive: Callable[[], Any],
        get_run: Callable[[int], Any],
        get_fab: Callable[[str, int], Any],
        **more: Any,
    ) -> Any:
        taken: list[Any] = []
        runs: dict[int, Any] = {}

        def received() -> Any:
            found = receive()
            taken.extend(found[:1] if found else ())
            return found

        def run_of(number: int) -> Any:
            runs[number] = get_run(number)
            return runs[number]

        def checked(hash_: str, number: int) -> Any:
            bundle, run = get_fab(hash_, number), runs.get(number)
            if not is_ours(bundle.content) or getattr(run, "primary_task_type", "") == "flwr-agentapp":
                name = plain(f"{getattr(run, 'fab_id', '')} {getattr(run, 'fab_version', '')}", 80)
                raise ForeignApp(
                    f"Refused the app '{name}' (SHA-256 {fingerprint(bundle.content)[:16]}) of run {number}, sent "
                    f"by the server at {server}: a site executes only bpfed's own. If the server runs bpfed, install "
                    "the same version there and here."
                )
            return bundle

        try:
            return pull(receive=received, get_run=run_of, get_fab=checked, **more)
        except ForeignApp as refused:
            warn(say, str(refused))
            reply = loop.Message(loop.FAB_VERIFICATION_ERROR, reply_to=taken[0])
            loop._insert_message(reply, more["state"], more["object_store"])
            return taken[0].metadata.run_id

    return pulled


def guard_superexec(side: str, local: Local) -> None:
    """A SuperExec that starts only the app of its side, and shows the token of a task to nobody."""
    identify(local)
    executor = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    replace(executor.SubprocessExecutor, launch=functools.partialmethod(_launch, side))


def _launch(self: Any, side: str, spec: Any) -> Any:
    """Flower's ``SubprocessExecutor.launch``: our process for the app; its token goes by a pipe, not by an argument."""
    from flwr.supercore.superexec.executor import LaunchResult

    if spec.task_type != APPS[side]:
        warn(
            say,
            f"Refused task {spec.task_id} of kind '{plain(str(spec.task_type), 40)}': only {APPS[side]} is run here.",
        )
        return LaunchResult.failed("This kind of task is not run here.")
    if side == SERVER_FOLDER and spec.fab_hash != fingerprint(bundle()):
        warn(
            say,
            f"Refused to execute an app (SHA-256 {plain(str(spec.fab_hash), 16)}) that was started with the operator's "
            "secret: the server executes only bpfed's own.",
        )
        return LaunchResult.failed("Only bpfed's own app is executed here.")
    command = [*LAUNCH, APPS[side], "--runtime-api-address", spec.runtime_api_address]
    if spec.insecure:
        command.append("--insecure")
    elif spec.root_certificates_path is not None:
        command += ["--root-certificates", spec.root_certificates_path]
    if spec.parent_pid is not None:
        command += ["--parent-pid", str(spec.parent_pid)]
    output = subprocess.DEVNULL if spec.suppress_output else None
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
    assert started.stdin is not None
    with contextlib.suppress(OSError), started.stdin as pipe:  # it may have ended already
        pipe.write(spec.token.encode())
    return LaunchResult.accepted()


def guard_serverapp(local: Local) -> None:
    """The process of the server's app, which is `bpfed.deploy.apps.server`."""
    identify(local)
    runtime = importlib.import_module("flwr.superlink.runtime.run_serverapp")

    def run(grid: Any, context: Any, **more: Any) -> Any:
        from bpfed.deploy import apps

        apps.server(grid=grid, context=context)
        return context

    components = {"tool": {"flwr": {"app": {"components": {"serverapp": "bpfed.deploy.apps:server"}}}}}
    replace(
        runtime,
        install_from_fab=_not_installed,
        get_project_config=lambda *given: components,
        get_fused_config_from_dir=lambda *given: {},
        run_=run,
    )


def guard_clientapp(local: Local) -> None:
    """The process of a site's app, which is `bpfed.deploy.apps.client`."""
    identify(local)
    runtime = importlib.import_module("flwr.supernode.runtime.run_clientapp")

    def load(*given: Any) -> Any:
        from bpfed.deploy.apps import client

        return client

    replace(runtime, install_from_fab=_not_installed, get_load_client_app_fn=lambda **more: load)


def _not_installed(content: bytes, **more: Any) -> None:
    """In place of unpacking a bundle: only see that it is ours."""
    if not is_ours(content):
        warn(say, f"Refused an app (SHA-256 {fingerprint(content)[:16]}): only bpfed's own is executed.")
        raise ForeignApp("Only bpfed's own app is executed here.")


def identify(local: Local) -> None:
    """Let this process's requests to its SuperLink or SuperNode carry the secret."""
    from flwr.supercore.runtime import RuntimeHttpClient

    send, carrying = RuntimeHttpClient._send, gate.Carrying(local.secret)

    def _send(self: Any, context: Any, **more: Any) -> Any:
        return carrying.intercept(context, lambda context: send(self, context, **more))

    replace(RuntimeHttpClient, _send=_send)


def replace(where: Any, **parts: Any) -> None:
    """Put our parts in the place of Flower's.

    Raises:
        UserError: This Flower has no such part, so nobody knows what it would do without ours.
    """
    for name, part in parts.items():
        if not hasattr(where, name):
            version = metadata_importlib.version("flwr")
            raise UserError(
                f"Flower {version} is not supported (it has no {name}); install the version bpfed asks for."
            )
        setattr(where, name, part)


def guard(command: str, environment: Mapping[str, str]) -> None:
    """Shut a command of Flower's to strangers and their code.

    Args:
        command: Its name.
        environment: Of this process; it names the folder of the server or of the site.
    """
    side = next((name for name in APPS if environment.get(name)), "")
    if not side:
        raise UserError("This is started by 'bpfed deploy server' and 'bpfed deploy client'.")
    folder = Path(environment[side])
    if command == "flower-superlink":
        guard_superlink(folder)
    elif command == "flower-supernode":
        guard_supernode(folder)
    else:
        local = gate.read_local(folder)
        if local is None:
            raise UserError(f"'{folder / gate.LOCAL}' cannot be read.")
        if command == PART:
            guard_superexec(side, local)
        elif command == "flwr-serverapp":
            guard_serverapp(local)
        elif command == "flwr-clientapp":
            guard_clientapp(local)
        else:
            raise UserError(f"'{plain(command, 40)}' is not run by bpfed.")


def main() -> None:
    """Run the command; the process ends with it, whatever threads it leaves."""
    name, sys.argv = sys.argv[1], sys.argv[1:]
    to_parent()
    try:
        (command,) = metadata_importlib.entry_points(group="console_scripts", name=name)
        run = command.load()
        guard(name, os.environ)
        if name in APPS.values():
            sys.argv += ["--token", sys.stdin.readline()]  # where no other process can read it
            run()
            return
        be_patient()
        watch_parts()
        run()
    except SystemExit as ended:
        _end("", ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    except UserError as error:
        fail(say, str(error))
        _end("", 2)
    except BaseException:
        traceback.print_exc()
        _end("", 1)
    _end("its main loop is over", INCOMPLETE)


def _argument(name: str) -> str:
    """What this command was given for an option."""
    return sys.argv[sys.argv.index(name) + 1]


def _end(why: str, code: int) -> None:
    if why:
        print(f"bpfed: {os.path.basename(sys.argv[0])} ends, as {why}.", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
