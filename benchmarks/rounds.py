"""Where the seconds of a deployed round go, from the server's ``exchanges.jsonl`` and the sites' logs, on one clock."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from bpfed._util.files import EXCHANGES

DAY = 86_400.0
#: What marks a moment in a site's log; the times of `bpfed.deploy.ops.supervise.stamp` stand before it.
MARKS = {
    "received": r"Receiving: train message",
    "asked": r"bpfed: .+: asked, (?P<age>[\d.]+) s after",
    "answered": r"bpfed: .+: answered",
    "sending": r"Sending: train message",
    "gone": r"Sent successfully",
}
#: The parts of a round in order, and what they are.
PARTS = {
    "mail": "until the SuperNode asks for mail (it does every 3 s)",
    "launch": "until it has started a process for the message",
    "start": "start of that process: Python, Flower, the message fetched",
    "work": "our code: training and testing",
    "site": "our code: checks, state on disk, messages between processes",
    "back": "until the SuperNode has the answer (it looks every 0.5 s)",
    "up": "the answer on its way to the SuperLink",
    "server": "until the server has it (it looks every 0.5 s)",
    "between": "our code at the server: checks, aggregation, checkpoint, who is there",
}


def moments(log: Path) -> list[dict[str, float]]:
    """For each message that a site has answered, the seconds of the day at which things happened."""
    found: list[dict[str, float]] = []
    for line in log.read_text(errors="replace").splitlines():
        stamp = re.match(r"(\d\d):(\d\d):(\d\d\.\d{3}) ", line)
        if stamp is None:
            continue
        hours, minutes, seconds = stamp.groups()
        at = 3600.0 * int(hours) + 60.0 * int(minutes) + float(seconds)
        for name, pattern in MARKS.items():
            hit = re.search(pattern, line)
            if hit is None:
                continue
            if name == "received":
                found.append({})
            if found:
                found[-1][name] = at
                if name == "asked":
                    found[-1]["started"] = at - float(hit["age"])
    return [message for message in found if {*MARKS, "started"} <= message.keys()]


def split(exchange: Mapping[str, Any], site: str, message: Mapping[str, float]) -> dict[str, float]:
    """The parts of one exchange, by the site whose answer came last, of which this is the message."""
    order = [
        _of_day(exchange["sent"]),
        *(message[k] for k in ("received", "started", "asked", "answered", "sending", "gone")),
    ]
    steps = [(b - a + DAY / 2) % DAY - DAY / 2 for a, b in itertools.pairwise(order)]
    work = exchange["work"][site]
    return {
        "mail": steps[0],
        "launch": steps[1],
        "start": steps[2],
        "work": work,
        "site": steps[3] - work,
        "back": steps[4],
        "up": steps[5],
        "server": exchange["seconds"] - sum(steps),
    }


def measured(run: Path, logs: Mapping[str, Path]) -> list[dict[str, float]]:
    """The parts of every round in which all sites answered, and ``between`` it and the one before."""
    lines = [json.loads(line) for line in (run / EXCHANGES).read_text().splitlines()]
    messages = {site: moments(log) for site, log in logs.items()}
    rows = []
    for before, line in itertools.pairwise(lines):
        if line["round"] != before["round"] + 1 or not line["answered"] == line["asked"] == len(logs):
            continue
        took = {
            site: (took, message)
            for site, found in messages.items()
            for message in found
            if (took := (message["gone"] - _of_day(line["sent"])) % DAY) <= line["seconds"]
        }
        if len(took) == len(logs):
            last = max(took, key=lambda site: took[site][0])
            rows.append(
                split(line, last, took[last][1]) | {"between": line["sent"] - before["sent"] - before["seconds"]}
            )
    return rows


def _of_day(moment: float) -> float:
    """Seconds since midnight."""
    clock = time.localtime(moment)
    return 3600.0 * clock.tm_hour + 60.0 * clock.tm_min + clock.tm_sec + moment % 1.0


def table(run: Path, logs: Mapping[str, Path]) -> str:
    """Medians, as Markdown."""
    rows = measured(run, logs)
    if not rows:
        return "No round in which all sites answered."
    lines = [f"| of a round, median of {len(rows)} | seconds |", "|---|---|"]
    lines += [f"| {words} | {median(row[part] for row in rows):.2f} |" for part, words in PARTS.items()]
    whole = median(sum(row.values()) for row in rows)
    ours = median(row["work"] + row["site"] + row["between"] for row in rows)
    return "\n".join([*lines, f"| all | {whole:.2f} |", f"| of that our code | {ours:.2f} |"])
