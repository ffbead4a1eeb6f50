"""What can be said against a run before any example is looked at."""

from __future__ import annotations

from bpfed.data.federated import FederatedData, Task
from bpfed.engine.settings import Settings
from bpfed.errors import UserError, first_of
from bpfed.methods.base import Method
from bpfed.model import Model


def check_data(data: object) -> None:
    """Raise a `UserError` unless this is federated data."""
    if not isinstance(data, FederatedData):
        raise UserError(
            f"The data is a {type(data).__name__}, but must be the name of a dataset or federated data; make such data "
            "of arrays with bpfed.data.from_arrays()."
        )


def check_factors(method: Method, model: Model) -> None:
    """Raise a `UserError` if ``personal``, by whatever name or pattern, leaves a method without weights it needs."""
    factors = model.factors
    found = {"shared": factors.shared, "personal": factors.personal}
    for part in method.needs:
        if not found[part]:
            some = "some but not all" if "shared" in method.needs else "some"
            raise UserError(
                f"personal is {method.personal!r}, which leaves {method.title} without {part} weights; choose {some} "
                f"of the network's parameters: {first_of(factors.names)}."
            )


def check_run(
    method: Method, settings: Settings, clients: int, task: Task | None = None, calibrated: bool = False
) -> None:
    """Raise a `UserError` if method and settings cannot be run together.

    Args:
        method: What clients and server do.
        settings: How.
        clients: How many there are.
        task: Of their data; None: it is not known yet, and what depends on it is not checked.
        calibrated: Whether the data have calibration examples of their own.
    """
    method.check()
    settings.check(clients)
    if settings.scaling == "client" and task == "regression":
        raise UserError(
            "scaling fits a temperature to class probabilities, but the targets here are numbers; leave it out."
        )
    if settings.scaling == "client" and settings.calibration == 0.0 and not calibrated:
        raise UserError("scaling needs examples to fit a temperature to; set calibration = 0.2 with it.")
