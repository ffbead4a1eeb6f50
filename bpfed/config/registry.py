"""Names of methods, datasets and tasks, so that a misspelt one is refused before torch is imported, which takes seconds.

They are those of `bpfed.methods.METHODS`, which cannot be imported if it differs, and of `bpfed.data.names`, which a
test compares. Tasks are made when first asked for (`bpfed.inference.tasks.get_task`).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bpfed._util.errors import UserError, unknown

# fmt: off
METHODS = (
    "bpfed", "bpfed-recipe", "bpfed-population", "bpfed-adaptive", "bpfed-linear", "fedavg", "fedavg-ft", "local", "perfedavg", "pfedme", "pfedbayes",
    "fedper", "lg-fedavg", "fedrep", "fedsoul", "pfedvem", "ditto", "fedbabu",
)
DATASETS = (
    "digits", "mnist", "fmnist", "cifar10", "heart-disease", "wisdm", "wisdm-later", "mnist-small",
    "mnist-large", "fmnist-small", "fmnist-large", "cifar10-small", "cifar10-large",
)
# fmt: on
#: Where each task is, by its name: ``module:class``.
TASKS = {
    "classification": "bpfed.inference.tasks:Classification",
    "regression": "bpfed.inference.tasks:Regression",
    "counts": "bpfed.inference.counts:Counts",
}
if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal[tuple(TASKS)]
#: Models that a method stands for, by name.
MODELS = {"linear": "bpfed-linear"}
#: How a path is told from a dataset's name.
PREFIX = "folder:"


def located(name: str) -> str:
    """The name of a dataset; ``folder:PATH`` as it is called from everywhere."""
    return f"{PREFIX}{Path(name.removeprefix(PREFIX)).expanduser().resolve()}" if name.startswith(PREFIX) else name


def shown(name: str) -> str:
    """The name of a dataset where there is little room: of a whole path its end."""
    path = Path(name.removeprefix(PREFIX))
    return f"{PREFIX}{path.name}" if name.startswith(PREFIX) and path.is_absolute() else name


def check_method(name: str | None) -> None:
    """Raise a `UserError` unless there is a method of that name; None is left to the default."""
    if name is not None and name not in METHODS:
        raise unknown("method", name, METHODS)


def method_named(method: str | None, model: str | None) -> str | None:
    """The name of the method that is asked for, by itself or as a model; None: by neither.

    Raises:
        UserError: There is no such method or model, or both are named.
    """
    check_method(method)
    if model is None:
        return method
    if model not in MODELS:
        raise unknown("model", model, MODELS)
    if method is not None and method != MODELS[model]:
        raise UserError(f"--model {model} stands for --method {MODELS[model]}, but the method is {method}; give one.")
    return MODELS[model]


def check_data(name: str | None, known: Collection[str] = DATASETS) -> None:
    """Raise a `UserError` unless there is such a dataset or it is ``folder:PATH``; None is left to the default."""
    if name is None or name in known or name.startswith(PREFIX):
        return
    if Path(name).exists():
        raise UserError(f"Unknown dataset '{name}'; to use the files there, write '{PREFIX}{name}'.")
    raise unknown("dataset", name, known)
