"""FedPer: a common body with a personal head for each client, trained together.

Arivazhagan et al.: Federated Learning with Personalization Layers, 2019. Algorithm 1: a client joins the shared base
layers to its own personalisation layers, trains both at once, and uploads the base layers.

It is ``BPFed.dirac(personal="head")``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bpfed.methods.point import Point


@dataclass(frozen=True)
class FedPer(Point):
    """FedPer: shared base layers, personal last layer, trained together."""

    name: ClassVar[str] = "fedper"
    title: ClassVar[str] = "FedPer"
    paper: ClassVar[str] = "Arivazhagan et al. 2019, arXiv 1912.00818"
    shared_words: ClassVar[str] = "all but the last layer"
    personal_words: ClassVar[str] = "the last layer"
    needs: ClassVar[tuple[str, ...]] = ("shared", "personal")
