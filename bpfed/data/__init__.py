"""Data: where examples come from, how they are dealt out to clients, and the federated dataset they form."""

from bpfed.data.federated import Examples, FederatedData

__all__ = ["Examples", "FederatedData"]
