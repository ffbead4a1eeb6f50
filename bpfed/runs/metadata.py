"""A run in plain data: its configuration, last evaluation and summary, of a simulated and a deployed run alike.

Both are made of a `Federation`. A server's has the clients' names and what their data have in common, but no examples:
what needs those is left out here, or handed over by who knows it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bpfed import __version__
from bpfed._util.errors import UserError
from bpfed._util.files import DATA, from_json
from bpfed.config.registry import PREFIX, located, shown
from bpfed.config.schema import PLACE
from bpfed.data.federated import Examples, FederatedData
from bpfed.data.tabular.preprocessing import Preprocessor
from bpfed.engine.evaluate import sets_of
from bpfed.inference import inputs
from bpfed.inference.calibration import fewest
from bpfed.inference.inputs import Inputs
from bpfed.inference.tasks import get_task, is_task
from bpfed.metrics import SURE, Evaluation
from bpfed.metrics.registry import BUILT_IN, METRICS, shown_at
from bpfed.report.record import temperature_name
from bpfed.report.tasks import task_of

if TYPE_CHECKING:
    from bpfed.engine.federation import Federation

#: The protocol of a deployed run, and its partition where nothing was dealt out: every site has its own data.
DEPLOYED, SITES = "deployed", "sites"


def config(federation: Federation) -> dict[str, Any]:
    """All that is needed to repeat a run, as in ``config.toml``."""
    method, data, model = federation.method, federation.data, federation.model
    record: dict[str, Any] = {
        "name": data.name,
        "partition": None if data.partition == SITES else data.partition,
        "protocol": data.protocol,
        "clients": len(data),
        "test_fraction": data.test_fraction,
        "seed": data.seed,
        **(data.preprocessor.settings() if data.preprocessor is not None else {}),
    }
    if data.name.startswith(PREFIX):
        record[PLACE] = located(data.name).removeprefix(PREFIX)
    if data.protocol == DEPLOYED:
        # Whoever repeats a run from this file is held to its protocol and its fingerprint. The first no simulation has,
        # and the second is a hash of all clients' examples, of which a server sees none.
        del record["protocol"]
    else:
        record["fingerprint"] = fingerprint(data)
    return {
        "bpfed": __version__,
        "data": record,
        "method": {"name": method.name, **method.settings()},
        "run": {**asdict(federation.settings), "device": federation.device.type},
        "model": {
            "network": type(model.module).__name__,
            "weights": model.layout.total,
            "shared": model.layout.shared,
            "personal": list(model.layout.personal_names),
            "initial": hashlib.sha256(model.initial.cpu().numpy().tobytes()).hexdigest()[:16],
            **({"frozen": model.frozen, "frozen_hash": model.frozen_hash[:16]} if model.frozen else {}),
        },
    }


def detail(
    federation: Federation,
    evaluation: Evaluation,
    clients: Sequence[str],
    train: Sequence[int],
    calibration: Sequence[int] | None,
) -> dict[str, Any]:
    """Per-client metrics and reliability of the last evaluated round, as in ``evaluation.json``.

    Args:
        federation: After that round.
        evaluation: Of the clients that were tested.
        clients: Their names.
        train: How many examples each trains on.
        calibration: How many each calibrates with; None: nobody does.
    """
    data = federation.data
    found = evaluation.detail(
        federation.round, list(clients), list(train), None if calibration is None else list(calibration)
    )
    for row, label in zip(found.get("classes", ()), data.class_names, strict=False):
        row["label"] = label
    if calibration is not None:
        sets = sets_of(federation.settings, data)
        if sets == "client":
            found["fewest_calibration"] = fewest(SURE)
        if "sets" in found:
            found["sets"]["by"] = sets
    if task_of(evaluation.scores) != data.task:
        found["task"] = data.task
    own = {name: METRICS[name].record() for name in METRICS if name not in BUILT_IN}
    if own:
        found["metrics"] = own
    if len(data.labels) == 2:
        found["labels"] = list(data.labels)
    if data.task_type.standardised and (made := data.preprocessor) is not None:
        found["target"] = {"name": made.target, "scale": made.target_scale}
    return found


def summary(federation: Federation, history: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """A run in figures, as in ``summary.json``; accuracy and ECE as fractions.

    Args:
        federation: After its last round.
        history: A record for each evaluated round.
        seconds: Time spent.
    """
    data, settings = federation.data, federation.settings
    record: dict[str, Any] = {
        "method": federation.method.name,
        "title": federation.method.title,
        "data": shown(data.name),
        "partition": data.partition,
        "protocol": data.protocol,
        "seed": settings.seed,
        "rounds": federation.round,
        "clients": len(data),
        "device": federation.device.type,
        "seconds": round(seconds, 3),
        "bins": settings.bins,
    }
    if (participants := settings.per_round(len(data))) < len(data):
        record |= {"participants": participants, "never_drawn": int((federation.times_drawn() == 0).sum())}
    # Every site of a deployment knows the seed, and so who was drawn.
    if (epsilon := federation.epsilon(secret=data.protocol != DEPLOYED)) is not None:
        record |= {"epsilon": epsilon, "delta": settings.delta}
    if federation.model.members > 1:
        record["members"] = federation.model.members
    if federation.calibration_temperature != 1.0:
        record["calibration_temperature"] = federation.calibration_temperature
    record["factors"] = federation.method.whose(federation.model)
    return record | figures(history)


def figures(history: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Of each metric its last value, its best, and that of the worst client, as in ``summary.json``."""
    found: dict[str, dict[str, float | None]] = {}
    for metric in (m for m in shown_at("progress", "comparison", "summary") if m in history[-1]):
        pooled = [r[metric]["pooled"] for r in history if metric in r and r[metric]["pooled"] is not None]
        best = (max if METRICS[metric].high_is_good else min)(pooled, default=None)
        last = history[-1][metric]
        found[metric] = {"last": last["pooled"], "best": best, "worst_client": last["worst"]}
    return found


def fingerprint(data: FederatedData) -> str:
    """A short hash of all examples and who owns them."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update("\0".join(data.clients).encode())
    for examples in (data.train, data.test, *([data.calibration] if data.calibration is not None else [])):
        for tensor in (*inputs.parts(examples.x).values(), examples.y, examples.offsets):
            digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()


# --- What a run folder keeps of the data it was trained on ------------------------------------------------------------
#
# All but the examples.

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
        **({} if isinstance(data.train.x, Tensor) else {"inputs": _structure(data.train.x)}),
        "clients": list(data.clients),
        "train_sizes": data.train.sizes.tolist(),
        "test_sizes": data.test.sizes.tolist(),
        **({"classes_seen": _seen(data)} if data.task_type.has_classes else {}),
        "preparation": None if data.preprocessor is None else data.preprocessor.record(),
    }


def _seen(data: FederatedData) -> list[str]:
    """For each client a letter for each class: 1 if it trains on an example of it, else 0."""
    found = torch.zeros(len(data), data.classes, dtype=torch.uint8)
    found[data.train.owner, data.train.y.cpu()] = 1
    return ["".join(map(str, row)) for row in found.tolist()]


#: Types of inputs that are several tensors.
DTYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}


def _structure(x: Inputs) -> dict[str, Any]:
    """Several tensors of inputs, without their examples."""
    kinds = {dtype: name for name, dtype in DTYPES.items()}
    parts = [[name, kinds[t.dtype], list(t.shape[1:])] for name, t in inputs.parts(x).items()]
    return {"kind": "dict" if isinstance(x, dict) else "tuple", "parts": parts}


def _without_rows(record: Mapping[str, Any]) -> Inputs:
    """The inputs of no example, in the form that `_structure` has noted."""
    made: dict[str, torch.Tensor] = {}
    for name, kind, shape in record["parts"]:
        if not isinstance(name, str) or name in made or not all(type(n) is int and 0 < n <= LARGEST for n in shape):
            raise ValueError("'inputs' are not parts by name")
        if math.prod(shape) > LARGEST:
            raise ValueError("'inputs' are too large")
        made[name] = torch.zeros(0, *shape, dtype=DTYPES[kind])
    if not made or record["kind"] not in ("dict", "tuple"):
        raise ValueError("'inputs' are no dict or tuple")
    return made if record["kind"] == "dict" else tuple(made.values())


def without_examples(record: dict[str, Any]) -> FederatedData:
    """The data that such a record is of; every client is there, and none has an example.

    Raises:
        ValueError: It cannot be of any data.
    """
    _check(record)
    none = Examples(
        _without_rows(record["inputs"]) if "inputs" in record else torch.zeros(0, *record["input_shape"]),
        torch.zeros(0, dtype=get_task(record["task"]).dtype),
        torch.zeros(len(record["clients"]) + 1, dtype=torch.int64),
    )
    prepared = record["preparation"]
    data = FederatedData(
        **{name: record[name] for name in PLAIN},
        labels=tuple(record["labels"]),
        clients=tuple(record["clients"]),
        train=none,
        test=none,
        preprocessor=None if prepared is None else Preprocessor.from_record(prepared),
    )
    if (made := data.preprocessor) is not None:
        inputs = made.shape or (len(made.input_names),)
        if inputs != data.input_shape or made.task != data.task or made.labels != data.labels:
            raise ValueError("its preprocessing is of other data")
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
    if not is_task(record["task"]):
        raise ValueError("there is no such task")
    if type(classes) is not int or not 0 <= classes <= LARGEST or (labels and len(labels) != classes):
        raise ValueError("'classes' is not the number of labels")
    if get_task(record["task"]).labelled != (classes > 0):
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


def preprocessor_of(folder: Path) -> Preprocessor | None:
    """How a run folder prepares tables; None: its data are no tables."""
    path = folder / DATA
    try:
        found = from_json(path.read_bytes())["preparation"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"'{path}' cannot be read ({error}); give the folder of another run.") from error
    return None if found is None else Preprocessor.from_record(found)


def uncertain(temperature: float, examples: int, pilots: int, task: str) -> str:
    """A sentence on a temperature that calibration pilots learnt from few held-out examples; empty: there are enough."""
    enough = get_task(task).enough
    if examples >= enough:
        return ""
    better = math.ceil(enough * pilots / examples)
    return (
        f"The {temperature_name(task)} of {temperature:.2f} is learnt from {examples} held-out examples, so it is uncertain; "
        f"calibrate = pilot:{better} would learn it from {enough}."
    )
