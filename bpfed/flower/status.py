"""How a deployed run is at this moment: a file in the server's run folder, for whoever watches it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from bpfed.errors import UserError
from bpfed.files import to_json, write_whole
from bpfed.flower.journal import Journal
from bpfed.flower.meeting import Seen

STATUS = "status.json"


class Status:
    """Notes how a run is.

    Args:
        folder: The run folder.
        rounds: Of a training.
        sites: What is known of each site, by name.
    """

    def __init__(self, folder: Path, rounds: int, sites: dict[str, Seen]) -> None:
        self.path, self.rounds, self.sites = folder / STATUS, rounds, sites
        self._state = "starting"

    def write(
        self, journal: Journal, round_: int, state: str | None = None, error: BaseException | None = None
    ) -> None:
        """Note it anew.

        Args:
            journal: Of the training that is under way.
            round_: Its rounds that are done.
            state: What the run is doing; None: as before.
            error: What has stopped it.
        """
        self._state = state or self._state
        sites = {
            site: {
                "connected": seen.node is not None,
                "online": seen.there,
                "counted": journal.counted.get(site, 0),
                "refused": seen.refused,
                "lost": seen.lost,
                "why": seen.why,
            }
            for site, seen in self.sites.items()
        }
        status = {
            "state": self._state,
            "error": "" if error is None else str(error) if isinstance(error, UserError) else type(error).__name__,
            "by_user_error": isinstance(error, UserError),
            "pid": os.getpid(),
            "at": time.time(),
            "round": round_,
            "rounds": self.rounds,
            "sites": sites,
            "metrics": journal.history[-1] if journal.history else None,
        }
        write_whole(self.path, to_json(status))
