"""The Flower app of a site. Its folder is named by the SuperNode's configuration, ``--node-config 'folder="..."'``.

Flower runs it in a process of its own for every message, so it only hands the message on to the site's worker. Where none
is running (a SuperNode that was started by hand), it does the work itself.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from bpfed.errors import UserError
from bpfed.flower import frame, worker
from bpfed.flower.ending import end_in_time

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
    folder = Path(str(context.node_config["folder"]))
    # What is left of the time: a site that has fallen behind must not work on what nobody waits for any more.
    left = message.metadata.created_at + message.metadata.ttl - time.time()
    if left <= 0:
        raise TimeoutError("The message is too old.")
    end_in_time(left)
    number = message.metadata.group_id
    say(f"Round {number}: asked, {age():.2f} s after the start of the process.")
    done = worker.ask(folder, frame.to_bytes(message.content), left)
    if done is not None:
        reply = Message(frame.from_bytes(done), reply_to=message)
        say(f"Round {number}: answered.")
        return reply

    from bpfed.flower.deployed import open_site

    try:
        site = open_site(folder, say)
    except UserError as error:  # Flower would send the error's own words to the server
        say(str(error))
        raise RuntimeError("The site cannot do its part; its own log says why.") from None
    return Message(site.answer(message.content), reply_to=message)


def age() -> float:
    """Seconds since this process was started; 0 where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def say(sentence: str) -> None:
    """To the site's own log."""
    print(f"bpfed: {sentence}", file=sys.stderr, flush=True)
