"""FedAvg: one point-estimate network for all, the mean of what the clients trained.

McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017. Local steps are Adam's,
as for every method here, so that methods differ in what they share and not in their optimiser; Adam starts again in
every round.

It is ``BPFed.dirac(personal="none", keep_adam=False)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bpfed.factors import Personal
from bpfed.methods.base import Phase
from bpfed.methods.point import Point


@dataclass(frozen=True)
class FedAvg(Point):
    """Federated averaging.

    Attributes:
        personal: Always ``none``: all weights are shared.
    """

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "FedAvg"
    paper: ClassVar[str] = "McMahan et al. 2017, arXiv 1602.05629"
    shared_words: ClassVar[str] = "all weights"
    personal_words: ClassVar[str] = "nothing"

    personal: Personal = "none"
    keep_adam: bool = False

    def adaptation(self, epochs: int) -> tuple[Phase, ...]:
        """A newcomer uses the shared weights as they are."""
        return self.tuning(epochs)
