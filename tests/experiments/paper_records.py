"""Made-up records of cells, and rows of the tables that are made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bpfed._util.files import to_json
from experiments import lineup

ROUNDS = [1, 4, 8, 12]


def seed_result(seed: int, accuracy: list[float], ece: list[float] | None = None) -> dict[str, Any]:
    ece = ece or [0.01 * (k + 1) for k in range(len(accuracy))]
    last = {"accuracy": accuracy[-1], "nll": 0.2 + 0.1 * seed, "brier": 0.1, "ece": ece[-1], "mce": 0.3}
    return {
        "seed": seed,
        "last": last | {"ece_worst_client": 0.05, "ece_floor": 0.002, "aurc": 0.01},
        "curve": {"round": ROUNDS, "accuracy": accuracy, "nll": [1.0, 0.5, 0.3, 0.2 + 0.1 * seed], "ece": ece},
        "reliability": {
            "count": [0, 10 * (seed + 1), 90],
            "confidence": [None, 0.5, 0.9],
            "accuracy": [None, 0.4, 1.0 - 0.1 * seed],
        },
    }


def put(results: Path, cell: str, method: str, runs: list[dict[str, Any]], tag: str = "", **more: Any) -> Path:
    named = {"protocol": "paper", "partition": "groups", "cell": cell, "method": method, "title": lineup.title(method)}
    common = {"settings": {}, "rounds": 12, "bins": 3, "device": "NVIDIA H200", "seconds": 30.0}
    record: dict[str, Any] = named | common | {"runs": runs} | more
    path = results / record["protocol"] / record["partition"] / cell / tag / f"{method}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(record))
    return path


def row(text: str, title: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {title} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]
