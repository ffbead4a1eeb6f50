"""The console that the commands write to, and where sentences for the user go without one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console as Rich

#: Called with each sentence that the user should read.
Say = Callable[[str], None]


def to_stderr(sentence: str) -> None:
    """Where sentences for the user go if nobody asked for them."""
    print(sentence, file=sys.stderr, flush=True)


class Console(Rich):
    """Prints words as they are: a name such as ``folder:hospital`` or ``[a]`` is no emoji, markup or highlight."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"emoji": False, "markup": False, "highlight": False} | settings)
