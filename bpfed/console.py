"""The console that the commands write to."""

from __future__ import annotations

from typing import Any

from rich.console import Console as Rich


class Console(Rich):
    """Prints words as they are: a name such as ``folder:hospital`` or ``[a]`` is no emoji, markup or highlight."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"emoji": False, "markup": False, "highlight": False} | settings)
