"""Local training: every client trains a network of its own, and nothing travels.

The reference that a federation must beat. It is ``BPFed.dirac(personal="all")``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bpfed.methods.point import Point
from bpfed.nn.parameters import Personal


@dataclass(frozen=True)
class LocalOnly(Point):
    """Every client by itself; all start from the same weights.

    Attributes:
        personal: Always ``all``: nothing is shared.
    """

    name: ClassVar[str] = "local"
    title: ClassVar[str] = "Local training"
    paper: ClassVar[str] = "no federation"
    shared_words: ClassVar[str] = "nothing"
    personal_words: ClassVar[str] = "all weights"

    personal: Personal = "all"
