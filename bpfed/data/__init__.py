"""Data: where examples come from, how they are dealt out to clients, and the federated dataset they form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bpfed._util.imports import lazily

if TYPE_CHECKING:
    from bpfed.data.arrays import from_arrays, synthetic
    from bpfed.data.datasets import fetch, from_frames, load, names, tables
    from bpfed.data.federated import Examples, FederatedData
    from bpfed.data.overview import describe, inspect, missing
    from bpfed.data.tabular.csvfile import unescaped
    from bpfed.data.tabular.preprocessing import Preprocessor
    from bpfed.data.tabular.table import Table, read_table

__all__ = [
    "Examples",
    "FederatedData",
    "Preprocessor",
    "Table",
    "describe",
    "fetch",
    "from_arrays",
    "from_frames",
    "inspect",
    "load",
    "missing",
    "names",
    "read_table",
    "synthetic",
    "tables",
    "unescaped",
]

# Imported when first asked for: a prediction reads rows and needs no datasets.
__getattr__ = lazily(
    __name__,
    {
        **dict.fromkeys(("from_arrays", "synthetic"), "bpfed.data.arrays"),
        **dict.fromkeys(("fetch", "from_frames", "load", "names", "tables"), "bpfed.data.datasets"),
        **dict.fromkeys(("Examples", "FederatedData"), "bpfed.data.federated"),
        **dict.fromkeys(("describe", "inspect", "missing"), "bpfed.data.overview"),
        "unescaped": "bpfed.data.tabular.csvfile",
        "Preprocessor": "bpfed.data.tabular.preprocessing",
        **dict.fromkeys(("Table", "read_table"), "bpfed.data.tabular.table"),
    },
)
