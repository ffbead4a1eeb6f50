"""Federated methods, one file each, all on the contract of `bpfed.methods.base`."""

from __future__ import annotations

from bpfed.errors import unknown
from bpfed.methods.base import Method
from bpfed.methods.bpfed import BPFed
from bpfed.methods.fedavg import FedAvg

METHODS: dict[str, type[Method]] = {m.name: m for m in (BPFed, FedAvg)}


def method(name: str) -> type[Method]:
    """The method of that name."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


__all__ = ["METHODS", "BPFed", "FedAvg", "Method", "method"]
