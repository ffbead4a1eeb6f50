"""The end of Flower's app processes: they mean to end with what started them, but may wait for a lost peer for good."""

from __future__ import annotations

import math
import os
import threading
import time

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
