"""FedAvg: one network of points for all, the mean of what the clients trained; with fine-tuning; and without averaging.

McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017. Local steps are Adam's,
as for every method here, so that methods differ in what they share and not in their optimiser; Adam starts again in
every round.

It is ``BPFed.dirac(personal="none", keep_adam=False)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bpfed.methods.base import TUNE, Phase
from bpfed.methods.point import Point
from bpfed.nn.parameters import Personal


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


# --- FedAvg with fine-tuning ------------------------------------------------------------------------------------------
#
# Every client trains the common network further on its own data before it predicts.
#
# Yu, Bagdasaryan, Shmatikov: Salvaging Federated Learning by Local Adaptation, 2020 (its fine-tuning). Rounds are those
# of FedAvg, ``BPFed.dirac(personal="none", keep_adam=False)``; fine-tuning is one more local round from the server's
# weights, of which nothing is uploaded.


@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    """Federated averaging, and fine-tuning of all weights before prediction."""

    name: ClassVar[str] = "fedavg-ft"
    title: ClassVar[str] = "FedAvg + fine-tuning"
    paper: ClassVar[str] = "Yu et al. 2020, arXiv 2002.04758"
    personal_words: ClassVar[str] = "all weights, tuned after training"

    def finetuning(self, epochs: int) -> tuple[Phase, ...]:
        return (Phase(TUNE, epochs),)


# --- Local training ----------------------------------------------------------------------------------------------------
#
# Every client trains a network of its own, and nothing travels: the reference that a federation must beat. It is
# ``BPFed.dirac(personal="all")``.


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
