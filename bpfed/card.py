"""What a run folder keeps of the data it was trained on: all but the examples."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from bpfed.data.federated import Examples, FederatedData
from bpfed.data.preparation import Preparation
from bpfed.errors import UserError
from bpfed.layout import DATA

#: Fields of `FederatedData` that are written as they are.
PLAIN = ("name", "task", "classes", "partition", "protocol", "test_fraction", "seed")
#: More classes, or numbers of an input, than any network here could take.
LARGEST = 1 << 30


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
    """The data that such a record is of; every client is there, and none has an example.

    Raises:
        ValueError: It cannot be of any data.
    """
    _check(record)
    none = Examples(
        torch.zeros(0, *record["input_shape"]),
        torch.zeros(0, dtype=torch.int64 if record["task"] == "classification" else torch.float32),
        torch.zeros(len(record["clients"]) + 1, dtype=torch.int64),
    )
    prepared = record["preparation"]
    data = FederatedData(
        **{name: record[name] for name in PLAIN},
        labels=tuple(record["labels"]),
        clients=tuple(record["clients"]),
        train=none,
        test=none,
        preparation=None if prepared is None else Preparation.from_record(prepared),
    )
    if (made := data.preparation) is not None:
        inputs = made.shape or (len(made.input_names),)
        if inputs != data.input_shape or made.task != data.task or made.labels != data.labels:
            raise ValueError("its preparation is of other data")
    return data


def _check(record: dict[str, Any]) -> None:
    """Raise a `ValueError` unless the entries are of the right kind and fit together."""
    clients, labels, shape, classes = (record[name] for name in ("clients", "labels", "input_shape", "classes"))
    for name, texts in (("clients", clients), ("labels", labels)):
        if (
            not isinstance(texts, list | tuple)
            or not all(isinstance(t, str) for t in texts)
            or len(set(texts)) < len(texts)
        ):
            raise ValueError(f"'{name}' is no list of different texts")
    if not clients:
        raise ValueError("there are no clients")
    if record["task"] not in ("classification", "regression"):
        raise ValueError("there is no such task")
    if type(classes) is not int or not 0 <= classes <= LARGEST or (labels and len(labels) != classes):
        raise ValueError("'classes' is not the number of labels")
    if (record["task"] == "classification") != (classes > 0):
        raise ValueError("'classes' does not fit the task")
    if not isinstance(shape, list | tuple) or not all(type(n) is int and 0 < n <= LARGEST for n in shape):
        raise ValueError("'input_shape' is no shape")
    if math.prod(shape) > LARGEST:
        raise ValueError("'input_shape' is too large")
    seen = record.get("classes_seen", [])
    letters = isinstance(seen, list) and all(
        isinstance(s, str) and len(s) == classes and not s.strip("01") for s in seen
    )
    if not letters or len(seen) not in (0, len(clients)):
        raise ValueError("'classes_seen' does not fit the clients")


def preparation_of(folder: Path) -> Preparation | None:
    """How a run folder prepares tables; None: its data are no tables."""
    path = folder / DATA
    try:
        found = json.loads(path.read_text())["preparation"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"'{path}' cannot be read ({error}); give the folder of another run.") from error
    return None if found is None else Preparation.from_record(found)
