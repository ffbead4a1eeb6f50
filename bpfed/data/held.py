"""Training examples instead of test examples: what settings are chosen on, so that a test stays a test."""

from __future__ import annotations

from dataclasses import replace

from bpfed.data.federated import FederatedData
from bpfed.errors import UserError

#: Fraction of each client's training examples that is held out by default.
HELD = 0.2


def held_out(data: FederatedData, held: float, cut: int) -> FederatedData:
    """As `parted`, or a `UserError` where nothing is held out."""
    kept = parted(data, held, cut)
    if not len(kept.test.y) and (by := data.holdout) is not None and by.kind == "group":
        raise UserError(
            f"The training rows of each client of '{data.name}' are of one '{by.column}', so no group can be held out to "
            "choose settings on; choose another column for --holdout."
        )
    if not len(kept.test.y):
        raise UserError(
            f"No client of '{data.name}' has two training examples, so none can be held out to choose settings on; "
            "give them more."
        )
    return kept


def parted(data: FederatedData, held: float, cut: int) -> FederatedData:
    """The data with a part of the training examples instead of the test examples, which are left out.

    Args:
        data: Its calibration examples, if any, are left out too.
        held: How large a part of each client's; of one with a single training example none.
        cut: Which part: another number, another part.
    """
    kept = replace(data, calibration=None).hold_out(held, cut)
    assert kept.calibration is not None
    name = f"{data.name}, {100 * held:g} % of training examples held out"
    return replace(kept, name=name, seed=cut, test=kept.calibration, calibration=None)
