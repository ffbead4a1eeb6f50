"""A run in plain data: its configuration, last evaluation and summary, of a simulated and a deployed run alike.

Both are made of a `Federation`. A server's has the clients' names and what their data have in common, but no examples:
what needs those is left out here, or handed over by who knows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bpfed import __version__
from bpfed.calibration import fewest
from bpfed.data.federated import FederatedData
from bpfed.engine.federation import Federation
from bpfed.metrics import BEST_IS_HIGH, SURE, Evaluation
from bpfed.names import PREFIX, located, shown
from bpfed.schema import PLACE

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
        **(data.preparation.settings() if data.preparation is not None else {}),
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
            "weights": model.factors.total,
            "shared": model.factors.shared,
            "personal": list(model.factors.personal_names),
            "initial": hashlib.sha256(model.initial.cpu().numpy().tobytes()).hexdigest()[:16],
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
    if calibration is not None:
        found["fewest_calibration"] = fewest(SURE)
    if len(data.labels) == 2:
        found["labels"] = list(data.labels)
    if data.task == "regression" and (made := data.preparation) is not None:
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
    if settings.members > 1:
        record["members"] = settings.members
    if federation.softness != 1.0:
        record["softness"] = federation.softness
    record["factors"] = federation.method.whose(federation.model)
    return record | figures(history)


def figures(history: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Of each metric its last value, its best, and that of the worst client, as in ``summary.json``."""
    found: dict[str, dict[str, float | None]] = {}
    for metric in (m for m in ("accuracy", "rmse", "nll", "brier", "ece", "mce") if m in history[-1]):
        pooled = [r[metric]["pooled"] for r in history if r[metric]["pooled"] is not None]
        best = (max if metric in BEST_IS_HIGH else min)(pooled, default=None)
        last = history[-1][metric]
        found[metric] = {"last": last["pooled"], "best": best, "worst_client": last["worst"]}
    return found


def fingerprint(data: FederatedData) -> str:
    """A short hash of all examples and who owns them."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update("\0".join(data.clients).encode())
    for examples in (data.train, data.test, *([data.calibration] if data.calibration is not None else [])):
        for tensor in (examples.x, examples.y, examples.offsets):
            digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()
