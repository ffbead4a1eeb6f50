"""What a run folder keeps of the data it was trained on: all but the examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from bpfed.data.federated import Examples, FederatedData
from bpfed.data.preparation import Preparation
from bpfed.errors import UserError
from bpfed.layout import DATA

#: Fields of `FederatedData` that are written as they are.
PLAIN = ("name", "task", "classes", "partition", "protocol", "test_fraction", "seed")


def card(data: FederatedData) -> dict[str, Any]:
    """The data without its examples, as in ``data.json``."""
    return {
        **{name: getattr(data, name) for name in PLAIN},
        "labels": list(data.labels),
        "input_shape": list(data.input_shape),
        "clients": list(data.clients),
        "train_sizes": data.train.sizes.tolist(),
        "test_sizes": data.test.sizes.tolist(),
        **({"classes_seen": _seen(data)} if data.task == "classification" else {}),
        "preparation": None if data.preparation is None else data.preparation.record(),
    }


def _seen(data: FederatedData) -> list[str]:
    """For each client a letter for each class: 1 if it trains on an example of it, else 0."""
    found = torch.zeros(len(data), data.classes, dtype=torch.uint8)
    found[data.train.owner, data.train.y.cpu()] = 1
    return ["".join(map(str, row)) for row in found.tolist()]


def without_examples(record: dict[str, Any]) -> FederatedData:
    """The data that such a record is of; every client is there, and none has an example."""
    none = Examples(
        torch.zeros(0, *record["input_shape"]),
        torch.zeros(0, dtype=torch.int64 if record["task"] == "classification" else torch.float32),
        torch.zeros(len(record["clients"]) + 1, dtype=torch.int64),
    )
    prepared = record["preparation"]
    return FederatedData(
        **{name: record[name] for name in PLAIN},
        labels=tuple(record["labels"]),
        clients=tuple(record["clients"]),
        train=none,
        test=none,
        preparation=None if prepared is None else Preparation.from_record(prepared),
    )


def preparation_of(folder: Path) -> Preparation | None:
    """How a run folder prepares tables; None: its data are no tables."""
    path = folder / DATA
    try:
        found = json.loads(path.read_text())["preparation"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"'{path}' cannot be read ({error}); give the folder of another run.") from error
    return None if found is None else Preparation.from_record(found)
