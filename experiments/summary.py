"""``results/summary.json``: the figures of all tables as fractions, ``[protocol][partition][cell][method]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bpfed._util.files import to_json, write_whole
from experiments.records import read_cells

FILE = "summary.json"


def summary(results: Path) -> dict[str, Any]:
    """The row of every record."""
    return {
        protocol: {
            partition: {
                cell: {name: record.row() for name, record in methods.items()} for cell, methods in cells.items()
            }
            for partition, cells in partitions.items()
        }
        for protocol, partitions in read_cells(results).items()
    }


def write(results: Path) -> Path:
    """Write it, whole."""
    path = results / FILE
    write_whole(path, to_json(summary(results)))
    return path
