"""How a deployed run is at this moment: a file in the server's run folder, and its display for whoever watches it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from bpfed._util.errors import UserError, first_of
from bpfed._util.files import to_json, write_whole
from bpfed._util.text import plain
from bpfed.callbacks.progress import Progress, clock, figures
from bpfed.config.settings import Settings
from bpfed.deploy.server.journal import Journal, place
from bpfed.deploy.server.roster import SiteStatus
from bpfed.runs.pilot import selection_settings

STATUS = "status.json"


class Status:
    """Notes how a run is.

    Attributes:
        notes: What whoever watches should know of the sites' data, in sentences.
        chosen_in: Rounds of selection pilots, at most, once they are over.

    Args:
        folder: The run folder.
        settings: How it is run.
        sites: What is known of each site, by name.
    """

    def __init__(self, folder: Path, settings: Settings, sites: dict[str, SiteStatus]) -> None:
        self.path, self.settings, self.sites = folder / STATUS, settings, sites
        self.notes: list[str] = []
        self.chosen_in = 0
        self._state = "starting"

    def write(
        self, journal: Journal, round_: int, state: str | None = None, error: BaseException | None = None
    ) -> None:
        """Note it again.

        Args:
            journal: Of the training that is under way.
            round_: Its rounds that are done.
            state: What the run is doing; None: as before.
            error: What has stopped it.
        """
        self._state = state or self._state
        rounds, before = self.settings.rounds, self.chosen_in
        if journal.selection is not None:
            rounds = selection_settings(self.settings).rounds
            before = (journal.selection.number - 1) * rounds
        sites = {
            site: {
                "online": seen.node is not None,
                "ready": seen.ready,
                "counted": journal.counted.get(site, 0),
                "refused": seen.refused,
                "lost": seen.lost,
                "why": seen.why,
            }
            for site, seen in self.sites.items()
        }
        status = {
            "state": self._state,
            "error": ""
            if error is None
            else plain(str(error))
            if isinstance(error, UserError)
            else type(error).__name__,
            "by_user_error": isinstance(error, UserError),
            "pid": os.getpid(),
            "at": time.time(),
            "round": round_,
            "rounds": rounds,
            "stage": journal.stage,
            "before": before,
            "pilot": journal.pilot,
            "pilots": self.settings.calibration_pilots,
            "learnt": journal.learnt,
            "notes": [plain(note) for note in self.notes],
            "sites": sites,
            "metrics": journal.history[-1] if journal.history else None,
        }
        write_whole(self.path, to_json(status))


def where(found: Mapping[str, Any], further: int = 0) -> str:
    """How far a run is by its status, or which round comes so much later: ``calibration pilot 1 of 3, round 4 of 20``."""
    return f"{place(found['round'] + further, stage(found))} of {found['rounds']}"


def stage(found: Mapping[str, Any]) -> str:
    """In words which pilot is under way by its status; empty: the run itself."""
    if "stage" in found or not found.get("pilot"):
        return str(found.get("stage", ""))
    return f"calibration pilot {found['pilot']} of {found['pilots']}"  # by an earlier version


def done(found: Mapping[str, Any]) -> int:
    """Rounds done by its status, those of pilots among them."""
    pilots, before = found.get("pilots", 0), int(found.get("before", 0))
    if found.get("stage", "").startswith("selection"):
        return before + int(found["round"])
    return before + int(((found.get("pilot", 0) or pilots + 1) - 1) * found["rounds"] + found["round"])


# --- How far a deployment is, for whoever watches it: a live display on a terminal, elsewhere lines -------------------


#: Elsewhere than on a terminal, seconds without a line after which there is one: at first, and the most.
SILENCE = (5.0, 60.0)


class StatusDisplay:
    """Shows what is waited for and since when, who joins and leaves or is refused, and the rounds.

    Args:
        console: Where to show it; None: stderr.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.shown = Progress(console)
        self.sites: dict[str, str] = {}
        self.trouble: dict[str, int] = {}
        self.learnt = ""
        self.notes: set[str] = set()
        self._words, self._since = "", time.monotonic()
        self._next, self._silence = self._since, SILENCE[0]
        self._state: tuple[Any, ...] = ()
        self._seen: tuple[int, float] | None = None  # rounds done, pilots' among them, and when
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> StatusDisplay:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.shown.close()

    def say(self, sentence: str) -> None:
        """Print a sentence, with the time."""
        self.shown.console.print(
            f"{time.strftime('%H:%M:%S')} {sentence}", markup=False, highlight=False, soft_wrap=True
        )
        self._next = time.monotonic() + self._silence

    def waiting(self, words: str) -> None:
        """Say what is waited for from now on, such as ``the server starts``; again the same words change nothing."""
        if words != self._words:
            self._words, self._since, self._silence = words, time.monotonic(), SILENCE[0]
            self._next = self._since + self._silence
            self.shown.doing(words)

    def status(self, found: Mapping[str, Any]) -> None:
        """The run as its server last noted it."""
        for site, seen in found["sites"].items():
            now = "is ready" if seen["ready"] else "has joined" if seen["online"] else "is gone"
            if now != self.sites.get(site, "is gone"):
                self.say(f"Site '{site}' {now}.")
            self.sites[site] = now
            trouble = seen.get("refused", 0) + seen.get("lost", 0)
            if trouble > self.trouble.get(site, 0):
                self.say(f"Site '{site}': {seen.get('why', '')}")
            self.trouble[site] = trouble
        for note in found.get("notes", ()):
            if note not in self.notes:
                self.say(note)
                self.notes.add(note)
        learnt = found.get("learnt", "")
        if learnt and learnt != self.learnt:
            self.say(learnt)
            self.learnt = learnt
        metrics = found.get("metrics") or {}
        self._timed(found)
        self.shown.rounds, self.shown.done = found["rounds"], found["round"]
        self.shown.figures = figures(metrics) if metrics else ""
        state = (found["state"], where(found), metrics.get("round"))
        if state != self._state:
            self._state = state
            scores = f" Round {metrics['round']}: {self.shown.figures}." if metrics else ""
            why = f" ({found['error']})" if found.get("error") else ""
            self.say(f"{found['state'].capitalize()}, {where(found)} done.{scores}{why}")
        self.waiting(waited_for(found))

    def _timed(self, found: Mapping[str, Any]) -> None:
        """Learn how long a round takes, and what comes after the current training."""
        now, count = time.monotonic(), done(found)
        if self._seen is not None and count > self._seen[0]:
            self.shown.took((now - self._seen[1]) / (count - self._seen[0]))
        # Waiting for sites is no part of a round.
        if self._seen is None or count != self._seen[0] or found["state"] == "waiting for sites":
            self._seen = count, now
        pilot = int(found.get("pilot", 0) or 0)
        waiting = int(found.get("pilots", 0)) - pilot + 1 if pilot else 0  # the run itself among them
        self.shown.ahead = float(waiting * found["rounds"])

    def _tick(self) -> None:
        while not self._over.wait(0.5):
            now = time.monotonic()
            if self._words and now >= self._next and not self.shown.console.is_terminal:
                self._silence = min(2.0 * self._silence, SILENCE[1])
                left = f", about {clock(self.shown.left)} left" if self.shown.left is not None else ""
                self.say(f"{self._words[0].upper()}{self._words[1:]}, for {clock(now - self._since)} now{left}.")


def waited_for(found: Mapping[str, Any]) -> str:
    """What a run in this state waits for."""
    absent = [site for site, seen in found["sites"].items() if not seen["ready"]]
    if found["state"] == "waiting for sites" and absent:
        named = [f"{site}: joined, getting ready" if found["sites"][site]["online"] else site for site in absent]
        return f"waiting for {len(absent)} of {len(found['sites'])} sites ({first_of(named, '; ', most=6)})"
    if found["round"] < found["rounds"]:
        return f"{where(found, 1)} is under way"
    if pilot := stage(found):
        return f"{pilot}: testing on the held-out examples"
    return "waiting for the last round's scores"
