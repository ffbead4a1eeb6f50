"""How far a deployment is, for whoever watches it: a live display on a terminal, elsewhere lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console

from bpfed._util.errors import first_of
from bpfed.callbacks.progress import Progress, clock, figures
from bpfed.deploy.server.status import stage, where

#: Elsewhere than on a terminal, seconds without a line after which there is one: at first, and the most.
SILENCE = (2.0, 15.0)


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
        self.shown.rounds, self.shown.done = found["rounds"], found["round"]
        self.shown.figures = figures(metrics) if metrics else ""
        state = (found["state"], where(found), metrics.get("round"))
        if state != self._state:
            self._state = state
            scores = f" Round {metrics['round']}: {self.shown.figures}." if metrics else ""
            why = f" ({found['error']})" if found.get("error") else ""
            self.say(f"{found['state'].capitalize()}, {where(found)} done.{scores}{why}")
        self.waiting(waited_for(found))

    def _tick(self) -> None:
        while not self._over.wait(0.5):
            now = time.monotonic()
            if self._words and now >= self._next and not self.shown.console.is_terminal:
                self._silence = min(2.0 * self._silence, SILENCE[1])
                self.say(f"{self._words[0].upper()}{self._words[1:]}, for {clock(now - self._since)} now.")


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
