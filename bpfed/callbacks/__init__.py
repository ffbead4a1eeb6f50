"""What may be done around the rounds of a run, one file each: keep it in a folder, show it, track it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bpfed.callbacks.base import Callback
    from bpfed.callbacks.folder import Folder
    from bpfed.callbacks.mlflow import MLflow
    from bpfed.callbacks.progress import Progress
    from bpfed.callbacks.tensorboard import TensorBoard

__all__ = ["Callback", "Folder", "MLflow", "Progress", "TensorBoard"]

# Imported when first asked for, so that a progress display can be up before torch is.
_HOME = {
    "Callback": "base",
    "Folder": "folder",
    "MLflow": "mlflow",
    "Progress": "progress",
    "TensorBoard": "tensorboard",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"bpfed.callbacks.{_HOME[name]}"), name)
    raise AttributeError(f"module 'bpfed.callbacks' has no attribute '{name}'")
