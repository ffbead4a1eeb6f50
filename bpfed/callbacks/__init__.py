"""What may be done around the rounds of a run, one file each: keep it in a folder, show it, track it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bpfed._util.imports import lazily

if TYPE_CHECKING:
    from bpfed.callbacks.base import Callback
    from bpfed.callbacks.progress import Progress
    from bpfed.callbacks.trackers import MLflow, TensorBoard
    from bpfed.runs.folder import Folder

__all__ = ["Callback", "Folder", "MLflow", "Progress", "TensorBoard"]

# Imported when first asked for, so that a progress display can be up before torch is.
__getattr__ = lazily(
    __name__,
    {
        "Callback": "bpfed.callbacks.base",
        "Folder": "bpfed.runs.folder",
        "MLflow": "bpfed.callbacks.trackers",
        "Progress": "bpfed.callbacks.progress",
        "TensorBoard": "bpfed.callbacks.trackers",
    },
)
