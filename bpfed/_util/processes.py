"""Child processes that end when this one does, however it ends."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable


def tied() -> Callable[[], None]:
    """What a child is to do before its program starts, as ``preexec_fn``: ask to be ended with its parent (Linux).

    The parent is the *thread* that starts it, which has to wait for it.
    """
    parent = os.getpid()

    def ask() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(1)

    return ask


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
