"""Child processes that end when this one does, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
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
