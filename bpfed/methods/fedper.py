"""A network in two parts, a body and a head, one of which is personal: FedPer, LG-FedAvg, FedRep and FedBABU.

They differ in which part each client has for itself, and in when the parts are trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from bpfed.methods.base import ADAPT, TUNE, Phase
from bpfed.methods.point import Point
from bpfed.nn.parameters import Personal

# --- FedPer: both parts at once ----------------------------------------------------------------------------------------
#
# Arivazhagan et al.: Federated Learning with Personalization Layers, 2019. Algorithm 1: a client joins the shared base
# layers to its own personalisation layers, trains both at once, and uploads the base layers.
#
# It is ``BPFed.dirac(personal="head")``.


@dataclass(frozen=True)
class FedPer(Point):
    """FedPer: shared base layers, personal last layer, trained together."""

    name: ClassVar[str] = "fedper"
    title: ClassVar[str] = "FedPer"
    paper: ClassVar[str] = "Arivazhagan et al. 2019, arXiv 1912.00818"
    shared_words: ClassVar[str] = "all but the last layer"
    personal_words: ClassVar[str] = "the last layer"
    needs: ClassVar[tuple[str, ...]] = ("shared", "personal")


# --- LG-FedAvg: both at once, the head is shared -----------------------------------------------------------------------
#
# Liang et al.: Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020. Algorithm 1:
# a client trains its local representation and its copy of the global model together, and uploads the latter. Its authors
# begin with a network trained by FedAvg; here all clients begin with the same initial weights, as for every other method.
#
# It is ``BPFed.dirac(personal="not-head")``.


@dataclass(frozen=True)
class LGFedAvg(Point):
    """LG-FedAvg: personal first layers, shared last layer, trained together."""

    name: ClassVar[str] = "lg-fedavg"
    title: ClassVar[str] = "LG-FedAvg"
    paper: ClassVar[str] = "Liang et al. 2020, arXiv 2001.01523"
    shared_words: ClassVar[str] = "the last layer"
    personal_words: ClassVar[str] = "all but the last layer"
    needs: ClassVar[tuple[str, ...]] = ("shared", "personal")

    personal: Personal = "not-head"


# --- FedRep: in turn, the head first -----------------------------------------------------------------------------------
#
# Collins et al.: Exploiting Shared Representations for Personalized Federated Learning, 2021. Algorithm 1: with the body
# held, a client takes many steps on its head; then, with the head held, few on the body, and uploads that. The authors'
# runs on CIFAR-10 have 10 passes for the head and then 5 for the body, as the defaults here; the head has the round's
# ``epochs``. Steps are Adam's with weight decay, the decay of a prior: a client with many examples has little of it.
# How that was chosen is in ``docs/lab/recipe-details.md``.
#
# Without decay (``decay=0.0``) it is ``BPFed.dirac(personal="head", order="alternating", body_epochs=...)``.


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
    needs: ClassVar[tuple[str, ...]] = ("shared", "personal")

    decay: float = 6.0
    body_epochs: int = 5

    def check(self) -> None:
        super().check()
        self.require(body_epochs="at least 1")

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        return (Phase("personal", epochs), Phase("shared", self.body_epochs))


# --- FedBABU: the body alone; a head is made before prediction ---------------------------------------------------------
#
# Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification, 2022. Algorithm 1: in every
# round the head stays at the random value that all clients were given at the start. Before prediction a client
# fine-tunes its head, or the whole network, on its own data.
#
# Rounds are those of ``BPFed.dirac(personal="head", keep_adam=False)`` with the head held.

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
