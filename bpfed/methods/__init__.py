"""Federated methods, all on the contract of `bpfed.methods.base`; those that differ in a few lines share a file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from bpfed._util.imports import lazily
from bpfed.config import registry
from bpfed.methods.base import AnyMethod, Method, unfit

if TYPE_CHECKING:
    from bpfed.methods.adaptive import Adaptive
    from bpfed.methods.bpfed import BPFed
    from bpfed.methods.ditto import Ditto
    from bpfed.methods.fedavg import FedAvg, FedAvgFT, LocalOnly
    from bpfed.methods.fedper import FedBABU, FedPer, FedRep, LGFedAvg
    from bpfed.methods.fedsoul import FedSOUL
    from bpfed.methods.linear import Linear
    from bpfed.methods.perfedavg import PerFedAvg
    from bpfed.methods.pfedbayes import PFedBayes
    from bpfed.methods.pfedme import PFedMe
    from bpfed.methods.pfedvem import PFedVEM
    from bpfed.methods.population import Population
    from bpfed.methods.recipe import Recipe

    #: Those of this package, for reading; `method` knows those of others too, which entry points name.
    METHODS: Mapping[str, type[AnyMethod]]

# Imported when first asked for: a prediction needs the one method of its run.
_named = lazily(__name__, registry.METHODS.homes())


def __getattr__(name: str) -> Any:
    if name == "METHODS":
        own = {known: registry.METHODS.load_own(known) for known in registry.METHODS.own}
        return globals().setdefault(name, MappingProxyType(own))
    return _named(name)


#: What a method says of itself, for lists and reports.
WORDS = ("name", "title", "paper", "shared_words", "personal_words", "random_words")


def names() -> tuple[str, ...]:
    """Names that `method` knows: those of `METHODS`, then those of other packages."""
    return (*registry.METHODS.own, *registry.METHODS.plugins())


def method(name: str) -> type[AnyMethod]:
    """The method of that name, of this package or of another.

    Raises:
        UserError: There is none, several packages have one, or it is not on the contract of `bpfed.methods.base`.
    """
    if name in registry.METHODS.own:
        registry.METHODS.refuse_clash(name)
        return registry.METHODS.load_own(name)
    found = registry.METHODS.load(name)
    if why := unfit(found):
        raise registry.METHODS.unfit(name, why)
    if lacking := [word for word in WORDS if not isinstance(getattr(found, word, None), str)]:
        raise registry.METHODS.unfit(name, f"does not set {', '.join(lacking)}")
    if found.name != name:  # a run notes its method by the class's name, and is loaded by it
        raise registry.METHODS.unfit(name, f"calls itself '{found.name}'")
    return found


def as_method(given: AnyMethod | str) -> AnyMethod:
    """The method itself, or the one of that name with its usual settings."""
    return method(given)() if isinstance(given, str) else given


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
    "names",
]
