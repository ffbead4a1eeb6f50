"""What can be said against a deployment before a site has joined: said when it is made, and not at the sites."""

from __future__ import annotations

import torch

from bpfed.config import Config
from bpfed.data.federated import FederatedData, Task
from bpfed.data.holdout import Holdout
from bpfed.engine.checks import check_factors, check_run, suited
from bpfed.errors import UserError
from bpfed.flower.pattern import patterns
from bpfed.networks import make_model
from bpfed.uploads import check_updates

#: Shape of an input and number of classes while those of the sites are not known; nothing checked depends on them.
SHAPE, CLASSES = (1,), 2


def check_deployment(config: Config, sites: int, data: FederatedData | None = None) -> None:
    """Raise a `UserError` if so many sites cannot compute this.

    Args:
        config: What is to be computed.
        sites: How many sites there are.
        data: What they have together, if that is at hand; None: what is asked for is all that is known.
    """
    method, settings = config.method, suited(config.method, config.run, sites)
    task: Task | None = config.data.task if data is None else data.task
    check_run(method, settings, sites, task)
    by = Holdout.of(config.data.holdout)
    if by is not None and by.kind == "group" and settings.calibration > 0.0:
        raise UserError(
            "In a deployment nobody is told how large the groups of a site are, so calibration examples cannot be held out "
            "by group; leave calibration at 0, or use --holdout time:COLUMN."
        )
    if data is None and not isinstance(method.personal, str):
        return  # which parameters there are to name depends on the network, and that on the data
    shape = SHAPE if data is None else data.input_shape
    classes = data.classes if data is not None else 0 if task == "regression" else CLASSES
    model = make_model(torch.zeros(2, *shape), classes, method, settings)
    check_factors(method, model)
    if settings.clip > 0.0:
        check_updates(method, model)
    patterns(method, model)
