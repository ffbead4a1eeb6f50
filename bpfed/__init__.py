"""Bayesian personalised federated learning: every client its own model, and each model knows how sure it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bpfed._util.imports import lazily

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
__getattr__ = lazily(
    __name__,
    {
        **dict.fromkeys(("BPFedClassifier", "BPFedRegressor"), "bpfed.sklearn"),
        **dict.fromkeys(("Comparison", "Tuning", "compare", "tune"), "bpfed.comparison"),
        **dict.fromkeys(("fit", "fit_seeds"), "bpfed.runs.fit"),
        "Client": "bpfed.runs.client",
        "Run": "bpfed.runs.run",
        "Settings": "bpfed.config.settings",
        "UserError": "bpfed._util.errors",
        **{name: f"bpfed.{name}" for name in ("callbacks", "config", "data", "methods")},
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
