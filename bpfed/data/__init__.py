"""Data: where examples come from, how they are dealt out to clients, and the federated dataset they form."""

from bpfed.data.arrays import from_arrays
from bpfed.data.federated import Examples, FederatedData
from bpfed.data.generator import synthetic
from bpfed.data.load import fetch, load, names
from bpfed.data.overview import describe, inspect

__all__ = ["Examples", "FederatedData", "describe", "fetch", "from_arrays", "inspect", "load", "names", "synthetic"]
