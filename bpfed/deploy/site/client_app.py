"""The Flower app of a site. Its folder is named by the SuperNode's configuration, ``--node-config 'folder="..."'``.

Flower runs it in a process of its own for every message, so it only hands the message on to the site's worker. Where
none is running (a SuperNode that was started by hand), it does the work itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import tomllib
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from bpfed._util.errors import UserError
from bpfed._util.paths import CONFIG
from bpfed._util.processes import end_in_time
from bpfed.deploy.protocol import codec
from bpfed.deploy.site import worker

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One exchange: test what the server sends, train from it, answer."""
    return _answered(message, context)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Before the first round: say what data there is."""
    return _answered(message, context)


def _answered(message: Message, context: Context) -> Message:
    """The site's answer. Flower would send the words of any error to the server, so there are none but our own."""
    try:
        return _answer(message, context)
    except TimeoutError as error:
        say(str(error))
        raise TimeoutError("The site did not answer in time.") from None
    except UserError as error:
        say(str(error))
    except Exception:
        say(traceback.format_exc())
    raise RuntimeError("The site cannot do its part; its own log says why.")


def _answer(message: Message, context: Context) -> Message:
    folder = Path(str(context.node_config["folder"]))
    # What is left of the time: a site that has fallen behind must not work on what nobody waits for any more.
    left = message.metadata.created_at + message.metadata.ttl - time.time()
    if left <= 0:
        raise TimeoutError("The message is too old.")
    end_in_time(left)
    request = message.content.get("request")
    what = called(request if isinstance(request, ConfigRecord) else {}, rounds_of(folder))
    say(f"{what}: asked, {age():.2f} s after the start of the process.")
    done = worker.ask(folder, codec.to_bytes(message.content), left)
    if done is not None:
        reply = Message(codec.from_bytes(done), reply_to=message)
        say(f"{what}: answered.")
        return reply

    from bpfed.deploy.folders import open_site

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


def say(sentence: str) -> None:
    """To the site's own log."""
    with contextlib.suppress(OSError):  # a log on a full disk
        print(f"bpfed: {sentence}", file=sys.stderr, flush=True)
