"""Data: where examples come from, how they are dealt out to clients, and the federated dataset they form."""

from __future__ import annotations

from bpfed.data.arrays import from_arrays, synthetic
from bpfed.data.federated import Examples, FederatedData
from bpfed.data.load import fetch, from_frames, load, names, tables
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
