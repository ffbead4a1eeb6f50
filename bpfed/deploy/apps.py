"""The two Flower apps of a deployment: the server's, and a site's.

The folder of the server is named by `SERVER_FOLDER` in the environment of the SuperLink, that of a site by the
SuperNode's configuration, ``--node-config 'folder="..."'``. Flower runs a site's app in a process of its own for every
message, so it only hands the message on to the site's worker. Where none is running (a SuperNode that was started by
hand), it does the work itself. Nothing here needs torch before a message asks for it.
"""

from __future__ import annotations

import math
import os
import threading
import time
import tomllib
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from bpfed._util.console import Say
from bpfed._util.errors import UserError
from bpfed._util.paths import CONFIG
from bpfed.deploy import logs
from bpfed.deploy.site import worker

#: What the server says of a run, line by line.
LOG = "run.log"

server, client = ServerApp(), ClientApp()


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Run the rounds that are left."""
    from bpfed.deploy.ops.supervise import SERVER_FOLDER
    from bpfed.deploy.protocol.transport import GridTransport
    from bpfed.deploy.server.server import open_server

    folder = os.environ.get(SERVER_FOLDER)
    if not folder:
        raise RuntimeError(f"{SERVER_FOLDER} is not set; start the server with 'bpfed deploy server'.")
    end_in_time()
    # Flower keeps what this process prints to itself (``flwr log``), so a file of the server's has it too.
    say = logs.to_parent(logs.ToFile(Path(folder) / LOG), one_line=True)  # sites' names of columns are in some
    try:
        open_server(Path(folder), say).serve(GridTransport(grid))
    except UserError as error:
        logs.fail(say, str(error))
        raise


@client.train()
def train(message: Message, context: Context) -> Message:
    """One exchange: test what the server sends, train from it, answer."""
    return _answered(message, context)


@client.query()
def query(message: Message, context: Context) -> Message:
    """Before the first round: say what data there is."""
    return _answered(message, context)


def _answered(message: Message, context: Context) -> Message:
    """The site's answer. Flower would send the words of any error to the server, so there are none but our own."""
    say = logs.to_parent()
    try:
        return _answer(message, context, say)
    except TimeoutError as error:
        logs.fail(say, str(error))
        raise TimeoutError("The site did not answer in time.") from None
    except UserError as error:
        logs.fail(say, str(error))
    except Exception:
        logs.fail(say, traceback.format_exc())
    raise RuntimeError("The site cannot do its part; its own log says why.")


def _answer(message: Message, context: Context, say: Say) -> Message:
    folder = Path(str(context.node_config["folder"]))
    # What is left of the time: a site that has fallen behind must not work on what nobody waits for any more.
    left = message.metadata.created_at + message.metadata.ttl - time.time()
    if left <= 0:
        raise TimeoutError("The message is too old.")
    end_in_time(left)
    request = message.content.get("request")
    what = called(request if isinstance(request, ConfigRecord) else {}, rounds_of(folder))
    say(f"{what}: asked, {age():.2f} s after the start of the process.")
    done = worker.ask(folder, worker.to_bytes(message.content), left)
    if done is not None:
        reply = Message(worker.from_bytes(done), reply_to=message)
        say(f"{what}: answered.")
        return reply

    from bpfed.deploy.site.site import open_site

    return Message(open_site(folder, say).answer(message.content), reply_to=message)


def called(request: Mapping[str, Any], rounds: int | None) -> str:
    """What a message of the server's asks for, in words.

    Args:
        ask: Its plain fields, not yet checked.
        rounds: Of the run, and of each calibration pilot; None: nobody knows.
    """
    round_, pilot = (number if type(number := request.get(key)) is int else -1 for key in ("round", "pilot"))
    if round_ < 0 or pilot < 0:
        return "A message"
    if not round_:
        return "Greeting"
    if rounds is not None and round_ > rounds:
        return f"Calibration pilot {pilot}, held-out results" if pilot else "The last round's scores"
    return f"Calibration pilot {pilot}, round {round_}" if pilot else f"Round {round_}"


def rounds_of(folder: Path) -> int | None:
    """How many rounds the site's own configuration has; None where it cannot be read."""
    try:
        return int(tomllib.loads((folder / CONFIG).read_text())["run"]["rounds"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def age() -> float:
    """Seconds since this process was started; 0 where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


# --- The end of Flower's app processes --------------------------------------------------------------------------------
#
# They mean to end with what started them, but may wait for a lost peer for good.

#: Seconds that a process has to end by itself.
GRACE = 10.0


def end_in_time(seconds: float = math.inf, grace: float = GRACE) -> None:
    """End this process soon after its parent has ended or so many seconds are over, whatever it waits for."""
    parent, until = os.getppid(), time.monotonic() + seconds

    def watch() -> None:
        while os.getppid() == parent and time.monotonic() < until:
            time.sleep(0.5)
        time.sleep(grace)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
