"""Bayesian personalised federated learning: every client its own model, and each model knows how sure it is."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bpfed import callbacks, config, data, methods
    from bpfed._util.errors import UserError
    from bpfed.comparison import Comparison, Tuning, compare, tune
    from bpfed.config.settings import Settings
    from bpfed.runs.client import Client
    from bpfed.runs.fit import fit, fit_seeds
    from bpfed.runs.run import Run
    from bpfed.sklearn import BPFedClassifier, BPFedRegressor

__version__ = "0.12.0"

__all__ = [
    "BPFedClassifier",
    "BPFedRegressor",
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
    "BPFedClassifier": "bpfed.sklearn",
    "BPFedRegressor": "bpfed.sklearn",
    "Client": "bpfed.runs.client",
    "Comparison": "bpfed.comparison",
    "Run": "bpfed.runs.run",
    "Settings": "bpfed.config.settings",
    "Tuning": "bpfed.comparison",
    "UserError": "bpfed._util.errors",
    "compare": "bpfed.comparison",
    "fit": "bpfed.runs.fit",
    "fit_seeds": "bpfed.runs.fit",
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
