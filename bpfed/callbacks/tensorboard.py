"""A run in TensorBoard (extra ``track``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bpfed.callbacks.base import Callback, scalars
from bpfed.errors import UserError

if TYPE_CHECKING:
    from bpfed.engine.simulator import RoundInfo
    from bpfed.run import Run


class TensorBoard(Callback):
    """Writes the metrics of every evaluated round to an event file.

    Args:
        folder: Where; look at it with ``tensorboard --logdir FOLDER``.

    Raises:
        UserError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("TensorBoard is not installed; install it with: pip install 'bpfed[track]'") from error
        self.folder = Path(folder)
        self._open = SummaryWriter
        self._writer: Any = None

    def start(self, run: Run) -> None:
        # On a resume the rounds that are run again replace their first, lost versions.
        done = run.federation.round
        self._writer = self._open(str(self.folder), purge_step=done + 1 if done else None)

    def round(self, run: Run, info: RoundInfo, record: dict[str, Any] | None) -> None:
        for name, value in scalars(record or {}).items():
            self._writer.add_scalar(name, value, run.federation.round)

    def stop(self, run: Run) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
