"""Modules and classes that had another name before: importing the old name works and says the new one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Old names that the documentation mentioned, and the new ones.
MOVED = {
    "bpfed.adapt": "bpfed.runs.adapt",
    "bpfed.aggregate": "bpfed.aggregation.rules",
    "bpfed.calibration": "bpfed.inference.calibration",
    "bpfed.callbacks.folder": "bpfed.runs.folder",
    "bpfed.client": "bpfed.runs.client",
    "bpfed.engine.settings": "bpfed.config.settings",
    "bpfed.errors": "bpfed._util.errors",
    "bpfed.estimators": "bpfed.inference.estimators",
    "bpfed.factors": "bpfed.nn.parameters",
    "bpfed.gaussian": "bpfed.inference.gaussian",
    "bpfed.likelihoods": "bpfed.inference.likelihoods",
    "bpfed.model": "bpfed.nn.model",
    "bpfed.networks": "bpfed.nn.networks",
    "bpfed.noise": "bpfed.inference.rng",
    "bpfed.optim": "bpfed.inference.optim",
    "bpfed.predict": "bpfed.inference.predictive",
    "bpfed.privacy": "bpfed.aggregation.privacy",
    "bpfed.run": "bpfed.runs.run",
    "bpfed.training": "bpfed.runs.fit",
}

#: Classes that the documentation mentioned, by the module they are in: old names, and the new ones.
CLASSES = {
    "bpfed.comparison": {"Entrant": "Candidate"},
    "bpfed.methods.base": {"Course": "RunShape"},
    "bpfed.nn.parameters": {"Factors": "ParameterLayout"},
}


def old_classes(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module of `CLASSES`."""

    def get(name: str) -> Any:
        if name not in CLASSES[module]:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = CLASSES[module][name]
        warnings.warn(
            f"{module}.{name} is now {new}; the old name works until bpfed 0.11.", FutureWarning, stacklevel=2
        )
        return getattr(sys.modules[module], new)

    return get


class Moved(MetaPathFinder, Loader):
    """Finds an old name where no module has it; asked after all other finders."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        warnings.warn(f"{name} is now {MOVED[name]}; import it from there.", FutureWarning, stacklevel=2)
        there = import_module(MOVED[name])
        module.__getattr__ = lambda attribute: getattr(there, attribute)  # type: ignore[method-assign]
        module.__doc__ = there.__doc__


def install() -> None:
    """Let old names be imported."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.append(Moved())
