"""Bayesian personalised federated learning: every client its own model, and each model knows how sure it is."""

from bpfed.errors import UserError

__version__ = "0.1.0"
__all__ = ["UserError", "__version__"]
