"""What can be said against a run before any example is looked at."""

from __future__ import annotations

from dataclasses import replace

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


def suited(method: Method, settings: Settings, clients: int, own: bool = False) -> Settings:
    """The settings with what the method is made for where they leave it open: the network, and who takes part.

    Args:
        method: Of the run.
        settings: As they were given.
        clients: How many there are.
        own: Whether the network is the user's own.
    """
    if settings.network == "auto" and not own:
        settings = replace(settings, network=method.network)
    if settings.participants is None and method.everyone:
        settings = replace(settings, participants=clients)
    return settings


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
    if method.adds and (settings.trim is not None or settings.compression != "none"):
        option = f"robust is '{settings.robust}'" if settings.trim is not None else "compression is 'half'"
        raise UserError(
            f"{option}, but the server of {method.title} adds up what clients change, and needs each change as it is; "
            "set it to 'none'."
        )
    if settings.scaling == "client" and task == "regression":
        raise UserError(
            "scaling fits a temperature to class probabilities, but the targets here are numbers; leave it out."
        )
    if settings.scaling == "client" and settings.calibration == 0.0 and not calibrated:
        raise UserError("scaling needs examples to fit a temperature to; set calibration = 0.2 with it.")
