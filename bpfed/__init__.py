"""Bayesian personalised federated learning: every client its own model, and each model knows how sure it is."""

__version__ = "0.1.0"

from bpfed import data, methods
from bpfed.engine.settings import Settings
from bpfed.errors import UserError
from bpfed.run import Client, Run, fit

__all__ = ["Client", "Run", "Settings", "UserError", "__version__", "data", "fit", "methods"]
