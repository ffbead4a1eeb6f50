"""What can be said against a run before any example is looked at."""

from __future__ import annotations

from bpfed.data.federated import Task
from bpfed.engine.settings import Settings
from bpfed.errors import UserError
from bpfed.methods.base import Method


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
    if (settings.softness != 1.0 or settings.rehearsals) and task == "regression":
        word = "softness is" if settings.softness != 1.0 else "rehearsals are for a softness"
        raise UserError(f"{word} of class probabilities, but the targets here are numbers; leave it out.")
    if settings.scaling == "client" and settings.calibration == 0.0 and not calibrated:
        raise UserError("scaling needs examples to fit a temperature to; set calibration = 0.2 with it.")
