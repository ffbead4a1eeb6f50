"""FedRep: a common representation with a personal head for each client, trained in turn, the head first.

Collins et al.: Exploiting Shared Representations for Personalized Federated Learning, 2021. Algorithm 1: with the body held,
a client takes many steps on its head; then, with the head held, few on the body, and uploads that. The authors' runs on
CIFAR-10 have 10 passes for the head and then 5 for the body, as the defaults here; the head has the round's ``epochs``.

The authors' steps are those of ``optimiser="sgd", lr=0.01, keep_adam=False``. In validation (20 % of the training data) these
were as accurate as Adam's on `mnist-small` (92.5 % after 100 rounds) with a better NLL (0.24 against 0.35), and worse on
`digits` (93.9 against 96.1 % after 30 rounds: few steps), so Adam is the default, as for the other methods.

With Adam it is ``BPFed.dirac(personal="head", order="alternating", body_epochs=...)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bpfed.methods.base import Phase
from bpfed.methods.point import Point


@dataclass(frozen=True)
class FedRep(Point):
    """FedRep: shared body, personal last layer, trained in turn.

    Attributes:
        body_epochs: Passes over the data for the body, after the round's passes for the head.
    """

    name: ClassVar[str] = "fedrep"
    title: ClassVar[str] = "FedRep"
    paper: ClassVar[str] = "Collins et al. 2021, arXiv 2102.07078"
    shared_words: ClassVar[str] = "all but the last layer"
    personal_words: ClassVar[str] = "the last layer, trained first"

    body_epochs: int = 5

    def check(self) -> None:
        super().check()
        self.require(body_epochs="at least 1")

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        return (Phase("personal", epochs), Phase("shared", self.body_epochs))
