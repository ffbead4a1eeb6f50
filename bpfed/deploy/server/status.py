"""How a deployed run is at this moment: a file in the server's run folder, for whoever watches it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bpfed._util.errors import UserError
from bpfed._util.files import to_json, write_whole
from bpfed._util.text import plain
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
