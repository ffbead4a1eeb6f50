"""FedBABU: only the body is trained and averaged; a client's head is made when it is needed.

Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification, 2022. Algorithm 1: in every
round the head stays at the random value that all clients were given at the start. Before prediction a client fine-tunes
its head, or the whole network, on its own data.

Rounds are those of ``BPFed.dirac(personal="head", keep_adam=False)`` with the head held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from bpfed.methods.base import ADAPT, TUNE, Phase
from bpfed.methods.point import Point

Finetune = Literal["head", "all"]


@dataclass(frozen=True)
class FedBABU(Point):
    """FedBABU: the body is trained and shared, the head tuned before prediction.

    Attributes:
        finetune: What a client fine-tunes before it predicts: the ``head`` or ``all`` weights.
        tune_epochs: Passes over its training data for that; 0: as many as in a local round.
    """

    name: ClassVar[str] = "fedbabu"
    title: ClassVar[str] = "FedBABU"
    paper: ClassVar[str] = "Oh et al. 2022, arXiv 2106.06042"
    shared_words: ClassVar[str] = "all but the last layer"
    personal_words: ClassVar[str] = "the last layer, tuned after training"
    needs: ClassVar[tuple[str, ...]] = ("shared", "personal")
    starts_over: ClassVar[bool] = True

    keep_adam: bool = False
    finetune: Finetune = "head"
    tune_epochs: int = 0

    def check(self) -> None:
        super().check()
        self.require(tune_epochs="0 or more")

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        return (Phase("shared", epochs),)

    def finetuning(self, epochs: int) -> tuple[Phase, ...]:
        return (Phase(TUNE if self.finetune == "all" else ADAPT, self.tune_epochs or epochs),)
