"""Federated methods, one file each, all on the contract of `bpfed.methods.base`."""

from __future__ import annotations

from bpfed._util.errors import unknown
from bpfed.config import registry
from bpfed.methods.adaptive import Adaptive
from bpfed.methods.base import AnyMethod, Method
from bpfed.methods.bpfed import BPFed
from bpfed.methods.ditto import Ditto
from bpfed.methods.fedavg import FedAvg, FedAvgFT
from bpfed.methods.fedbabu import FedBABU
from bpfed.methods.fedper import FedPer
from bpfed.methods.fedrep import FedRep
from bpfed.methods.fedsoul import FedSOUL
from bpfed.methods.lgfedavg import LGFedAvg
from bpfed.methods.linear import Linear
from bpfed.methods.local import LocalOnly
from bpfed.methods.perfedavg import PerFedAvg
from bpfed.methods.pfedbayes import PFedBayes
from bpfed.methods.pfedme import PFedMe
from bpfed.methods.pfedvem import PFedVEM
from bpfed.methods.population import Population
from bpfed.methods.recipe import Recipe

METHODS: dict[str, type[AnyMethod]] = {
    m.name: m
    for m in (
        BPFed,
        Recipe,
        Population,
        Adaptive,
        Linear,
        FedAvg,
        FedAvgFT,
        LocalOnly,
        PerFedAvg,
        PFedMe,
        PFedBayes,
        FedPer,
        LGFedAvg,
        FedRep,
        FedSOUL,
        PFedVEM,
        Ditto,
        FedBABU,
    )
}

if tuple(METHODS) != registry.METHODS:
    differ = ", ".join(sorted({*METHODS} ^ {*registry.METHODS})) or "their order"
    raise ImportError(
        f"bpfed/methods/__init__.py and bpfed/config/registry.py must list the same methods; they differ in {differ}."
    )


def method(name: str) -> type[AnyMethod]:
    """The method of that name."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


__all__ = [
    "METHODS",
    "Adaptive",
    "BPFed",
    "Ditto",
    "FedAvg",
    "FedAvgFT",
    "FedBABU",
    "FedPer",
    "FedRep",
    "FedSOUL",
    "LGFedAvg",
    "Linear",
    "LocalOnly",
    "Method",
    "PFedBayes",
    "PFedMe",
    "PFedVEM",
    "PerFedAvg",
    "Population",
    "Recipe",
    "method",
]
