"""Data: where examples come from, how they are dealt out to clients, and the federated dataset they form."""

from bpfed.data.arrays import from_arrays
from bpfed.data.csvfile import unescaped
from bpfed.data.federated import Examples, FederatedData
from bpfed.data.generator import synthetic
from bpfed.data.load import fetch, load, names, tables
from bpfed.data.overview import describe, inspect, missing
from bpfed.data.preparation import Preparation
from bpfed.data.table import Table, read_table

__all__ = [
    "Examples",
    "FederatedData",
    "Preparation",
    "Table",
    "describe",
    "fetch",
    "from_arrays",
    "inspect",
    "load",
    "missing",
    "names",
    "read_table",
    "synthetic",
    "tables",
    "unescaped",
]
