"""Trackers: a run in TensorBoard or MLflow (extra ``track``)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bpfed._util.errors import UserError
from bpfed._util.files import write_whole
from bpfed.callbacks import Callback

if TYPE_CHECKING:
    from bpfed.engine.simulator import RoundInfo
    from bpfed.runs.run import Run


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


# --- A run in MLflow (extra ``track``) --------------------------------------------------------------------------------


class MLflow(Callback):
    """Logs the settings, and the metrics of every evaluated round.

    MLflow's global "active run" is left alone, so this can be used inside a program that has one.

    Args:
        experiment: Name of the experiment; it is made where there is none.
        address: Of the tracking server; None: what ``MLFLOW_TRACKING_URI`` says, else a local folder.
        remember: A file to keep MLflow's id of the run in, so that a resumed run continues it; None: a new one.

    Raises:
        UserError: MLflow is not installed.
    """

    def __init__(
        self, experiment: str = "bpfed", address: str | None = None, remember: str | Path | None = None
    ) -> None:
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise UserError("MLflow is not installed; install it with: pip install 'bpfed[track]'") from error
        self.client: Any = MlflowClient(tracking_uri=address)
        self.experiment = experiment
        self.remember = Path(remember) if remember is not None else None
        self._id: str | None = None
        self._finished = False

    def start(self, run: Run) -> None:
        config = run.config()
        if self.remember is not None and run.federation.round and self.remember.exists():
            self._id = self.remember.read_text().strip()
            self.client.update_run(self._id, status="RUNNING")
            return
        known = self.client.get_experiment_by_name(self.experiment)
        home = known.experiment_id if known is not None else self.client.create_experiment(self.experiment)
        name = f"{config['method']['name']} on {config['data']['name']}, seed {run.settings.seed}"
        self._id = str(self.client.create_run(home, run_name=name).info.run_id)
        for table in ("data", "method", "run", "model"):
            for key, value in config[table].items():
                self.client.log_param(self._id, f"{table}.{key}", value)
        if self.remember is not None:
            write_whole(self.remember, f"{self._id}\n")

    def round(self, run: Run, info: RoundInfo, record: dict[str, Any] | None) -> None:
        for name, value in scalars(record or {}).items():
            self.client.log_metric(self._id, name, value, step=run.federation.round)

    def end(self, run: Run) -> None:
        self._finished = True

    def stop(self, run: Run) -> None:
        if self._id is not None:
            self.client.set_terminated(self._id, status="FINISHED" if self._finished else "KILLED")
            self._id = None


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a line of metrics under flat names, ``accuracy/pooled`` or ``train_nll``."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= {f"{name}/{part}": v for part, v in value.items()} if isinstance(value, dict) else {name: value}
    flat.pop("round", None)
    return {name: float(v) for name, v in flat.items() if isinstance(v, int | float) and math.isfinite(v)}
