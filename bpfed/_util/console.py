"""The console that the commands write to, and where sentences for the user go without one."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console as Rich
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

#: Called with each sentence that the user should read.
Say = Callable[[str], None]


def to_stderr(sentence: str) -> None:
    """Where sentences for the user go if nobody asked for them."""
    print(sentence, file=sys.stderr, flush=True)


#: What a terminal obeys, or what makes it show letters in another order; names and cells of strangers' files may have it.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class Console(Rich):
    """Prints words as they are: a name such as ``folder:hospital`` or ``[a]`` is no emoji, markup or highlight.

    Signs in them that a terminal would obey are question marks.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"emoji": False, "markup": False, "highlight": False} | settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The parts of what is printed, none of whose words a terminal obeys."""
        for part in super().render(renderable, options):
            shown = part.text if part.control else _OBEYED.sub("?", part.text)
            yield part if shown == part.text else Segment(shown, part.style)
