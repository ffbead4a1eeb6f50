"""LG-FedAvg: a representation of each client's own with a common last layer.

Liang et al.: Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020. Algorithm 1:
a client trains its local representation and its copy of the global model together, and uploads the latter. Its authors
begin with a network trained by FedAvg; here all clients begin with the same initial weights, as for every other method.

It is ``BPFed.dirac(personal="not-head")``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bpfed.methods.point import Point
from bpfed.nn.parameters import Personal


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
