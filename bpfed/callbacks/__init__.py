"""What may be done around the rounds of a run, one file each: keep it in a folder, show it, track it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bpfed.callbacks.base import Callback
    from bpfed.callbacks.progress import Progress
    from bpfed.callbacks.trackers import MLflow, TensorBoard
    from bpfed.runs.folder import Folder

__all__ = ["Callback", "Folder", "MLflow", "Progress", "TensorBoard"]

# Imported when first asked for, so that a progress display can be up before torch is.
_HOME = {
    "Callback": "bpfed.callbacks.base",
    "Folder": "bpfed.runs.folder",
    "MLflow": "bpfed.callbacks.trackers",
    "Progress": "bpfed.callbacks.progress",
    "TensorBoard": "bpfed.callbacks.trackers",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'bpfed.callbacks' has no attribute '{name}'")
