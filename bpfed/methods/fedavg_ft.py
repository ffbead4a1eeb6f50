"""FedAvg with fine-tuning: every client trains the common network further on its own data before it predicts.

Yu, Bagdasaryan, Shmatikov: Salvaging Federated Learning by Local Adaptation, 2020 (its fine-tuning). Rounds are those
of FedAvg, ``BPFed.dirac(personal="none", keep_adam=False)``; fine-tuning is one more local round from the server's
weights, of which nothing is uploaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bpfed.methods.base import TUNE, Phase
from bpfed.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    """Federated averaging, and fine-tuning of all weights before prediction."""

    name: ClassVar[str] = "fedavg-ft"
    title: ClassVar[str] = "FedAvg + fine-tuning"
    paper: ClassVar[str] = "Yu et al. 2020, arXiv 2002.04758"
    personal_words: ClassVar[str] = "all weights, tuned after training"

    def finetuning(self, epochs: int) -> tuple[Phase, ...]:
        return (Phase(TUNE, epochs),)
