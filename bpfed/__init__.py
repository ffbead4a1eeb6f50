"""Bayesian personalised federated learning: every client its own model, and each model knows how sure it is."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bpfed import callbacks, config, data, methods
    from bpfed.client import Client
    from bpfed.comparison import Comparison, Tuning, compare, tune
    from bpfed.engine.settings import Settings
    from bpfed.errors import UserError
    from bpfed.run import Run
    from bpfed.training import fit, fit_seeds

__version__ = "0.9.0"

__all__ = [
    "Client",
    "Comparison",
    "Run",
    "Settings",
    "Tuning",
    "UserError",
    "__version__",
    "callbacks",
    "compare",
    "config",
    "data",
    "fit",
    "fit_seeds",
    "methods",
    "tune",
]

# Imported when first asked for: torch takes two seconds, and `bpfed --help` needs none of it.
_HOME = {
    "Client": "bpfed.client",
    "Comparison": "bpfed.comparison",
    "Run": "bpfed.run",
    "Settings": "bpfed.engine.settings",
    "Tuning": "bpfed.comparison",
    "UserError": "bpfed.errors",
    "compare": "bpfed.comparison",
    "fit": "bpfed.training",
    "fit_seeds": "bpfed.training",
    "tune": "bpfed.comparison",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in __all__:
        return import_module(f"bpfed.{name}")
    raise AttributeError(f"module 'bpfed' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
