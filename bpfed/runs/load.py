"""A run read back from its folder, without its data: it predicts and takes newcomers in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from bpfed import __version__
from bpfed._util.errors import UserError
from bpfed._util.files import (
    CALIBRATION,
    CHECKPOINT,
    CONFIG,
    DATA,
    LEARNT,
    METRICS,
    MODEL,
    RUN,
    SERVER,
    STATES,
    from_json,
    from_toml,
    part,
)
from bpfed.callbacks import Callback
from bpfed.config import reader
from bpfed.config.migrations import check_states, current_config
from bpfed.data.federated import FederatedData
from bpfed.data.holdout import Holdout
from bpfed.data.tabular.preprocessing import gathered
from bpfed.data.tabular.table import Table
from bpfed.engine.federation import Federation, pick_device
from bpfed.inference.calibration import Calibration
from bpfed.inference.likelihoods import Likelihood
from bpfed.report.manifest import Manifest, finished, remedy
from bpfed.report.record import RunRecord, no_run
from bpfed.runs import checkpoint
from bpfed.runs.folder import learnt, lines
from bpfed.runs.metadata import without_examples
from bpfed.runs.run import Run


class LoadedRun(Run):
    """A run read back from its folder. Made by `Run.load`.

    Attributes:
        folder: Where it is.
        seen: For each client a letter for each class, 1 if it was trained on one; empty where that was not noted.
    """

    def __init__(
        self, folder: Path, federation: Federation, say: Callable[[str], None], seen: Sequence[str] = ()
    ) -> None:
        super().__init__(federation, say)
        self.folder = folder
        self.seen = seen

    @property
    def finished(self) -> bool:
        """Whether all rounds are done and the report is written."""
        return self.federation.finished and finished(self.folder)

    def train(self, callbacks: Sequence[Callback] = ()) -> Run:
        if self.federation.finished:
            return self
        raise UserError(
            f"The run in '{self.folder}' was loaded without its data; resume it with fit(..., resume=True)."
        )

    def config(self) -> dict[str, Any]:
        return current_config(from_toml((self.folder / CONFIG).read_bytes()))

    def detail(self) -> dict[str, Any]:
        return RunRecord.read(self.folder).evaluation

    def baselines(self) -> dict[str, Any]:
        found: dict[str, Any] = self.detail().get("baselines", {})
        return found

    def diagnostics(self) -> dict[str, Any]:
        found: dict[str, Any] = self.detail().get("diagnostics", {})
        return found

    def summary_record(self) -> dict[str, Any]:
        return RunRecord.read(self.folder).summary if self.finished else super().summary_record()


def load_run(
    folder: Path, model: nn.Module | None, likelihood: Likelihood | None, say: Callable[[str], None]
) -> LoadedRun:
    """See `Run.load`."""
    if (folder / RUN / DATA).is_file() and part(folder):  # of a site, whose own model is a folder below
        folder = folder / RUN
    whole = (folder / DATA).is_file() and (folder / MODEL).is_file()
    if not whole and (deployed := part(folder)):
        raise UserError(_of_a_deployment(folder, deployed))
    if not (folder / CONFIG).is_file():
        raise no_run(folder)
    if not whole:
        raise UserError(
            f"'{folder}' lacks what prediction needs ({DATA}, {MODEL}); add it with: bpfed run --out {folder} --resume"
        )
    manifest = Manifest.read(folder)
    if manifest is not None:
        manifest.check(folder, (CONFIG, LEARNT, DATA, MODEL))
    chosen = reader.read(folder / CONFIG)
    for note in chosen.notes:
        say(note)
    check_states(str(chosen.document.content.get("bpfed", __version__)), chosen.method.name, folder)
    try:
        noted = from_json((folder / DATA).read_bytes())
        data = without_examples(noted)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise UserError(
            f"'{folder / DATA}' is damaged ({error}); delete it and resume the run with --resume."
        ) from error
    settings = chosen.run
    if settings.device == "cuda" and not torch.cuda.is_available():
        settings = replace(settings, device="cpu")
    network = checkpoint.load_model(folder / MODEL, model, likelihood, data, chosen.method, settings)
    network = network.to(pick_device(settings.device, settings.tf32))
    federation = Federation.of(chosen.method, data, settings, network, folder / STATES)
    federation.learnt_temperature = learnt(folder)
    if settings.calibration_pilots and federation.learnt_temperature is None:
        raise UserError(
            f"'{folder}' lacks what its calibration pilots have learnt ({LEARNT}); restore it, or learn it again with: bpfed run "
            f"--out {folder} --resume"
        )
    found = checkpoint.restore(folder / CHECKPOINT, federation, manifest.run if manifest is not None else None)
    if found is None:
        raise UserError(
            f"The run in '{folder}' has not done its first round; resume it with: bpfed run --out {folder} --resume"
        )
    for sentence in found.notes:
        say(f"{sentence}; the one before is used, of round {found.round}.")
    run = LoadedRun(folder, federation, say, noted.get("classes_seen", ()))
    run.seconds = float(found.extra.get("seconds", 0.0))
    if run.finished and manifest is not None and CALIBRATION in manifest.files:
        manifest.check(folder, [CALIBRATION])
    listed = manifest is None or CALIBRATION in manifest.files
    if listed and (folder / CALIBRATION).is_file():
        run.calibration = _calibration(folder / CALIBRATION, data)
    elif settings.calibration and run.finished:
        raise UserError(
            f"'{folder}' lacks what was calibrated ({CALIBRATION}); {remedy(folder, 'write it again', CALIBRATION)}"
        )
    try:
        run.history = [r for r in lines(folder / METRICS) if r["round"] <= found.round]
    except UserError as error:  # only a report needs them
        say(f"{str(error).rstrip('.')}; predictions do not depend on it.")
    return run


def _of_a_deployment(folder: Path, deployed: str) -> str:
    """Why nothing can be predicted from a folder of a deployment."""
    if deployed == SERVER:
        return (
            f"'{folder}' belongs to a deployment's server, which has neither the sites' personal factors nor any "
            "examples, so it can neither predict nor take in a newcomer; do so at a site, with its own folder."
        )
    return (
        f"'{folder}' belongs to a deployment's site, which has no model yet: it keeps one when the run is "
        "finished and the site has sent its last scores; run 'bpfed deploy run' while it is online."
    )


def _calibration(path: Path, data: FederatedData) -> Calibration:
    try:
        made = Calibration.from_record(from_json(path.read_bytes()), len(data))
        if made.truth is not None and bool((made.truth >= data.classes).any()):
            raise ValueError("a class is none of the run's")
        return made
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, OverflowError) as error:
        raise UserError(f"'{path}' is damaged ({error}); delete it and resume the run with --resume.") from error


# --- The rows that a run on tables was tested on, found again in its files --------------------------------------------


class Tested(NamedTuple):
    """Test rows of a client.

    Attributes:
        client: Its name.
        numbers: Which of its rows they are, from 1, ``[m]``.
        table: These rows.
        truth: What they have in the column that is predicted, as it is written.
    """

    client: str
    numbers: list[int]
    table: Table
    truth: list[str]


def rows_of(run: LoadedRun, data_dir: Path | None = None) -> list[Tested]:
    """The test rows of all clients of a run, in the order of their files; clients without any are left out.

    Raises:
        UserError: The run is not on tables, or they are not what they were when it was trained.
    """
    asked = reader.read(run.folder / CONFIG)
    made = run.data.preprocessor
    read = asked.tables(data_dir)
    if made is None or not read:
        raise UserError(
            f"'{run.folder}' is not a run on tables, whose test rows could be found in a file; omit --test."
        )
    again = asked.load_data(data_dir, read)
    if again.preprocessor != made:
        raise UserError(
            f"'{asked.data.name}' has changed since the run in '{run.folder}', so its test rows cannot be told; restore it."
        )
    from bpfed.data.tabular import federate

    fraction = federate.TEST_FRACTION if asked.data.test_fraction is None else asked.data.test_fraction
    found = []
    for client in run.data.clients:
        table = gathered(read[client], made.target, made.task)
        held = federate.held_out(
            table,
            made.target,
            client,
            task=made.task,
            test_fraction=fraction,
            seed=asked.data_seed,
            by=Holdout.of(made.holdout),
        )
        if held.any():
            rows = np.flatnonzero(held)
            mine = table.take(rows)
            found.append(Tested(client, (rows + 1).tolist(), mine, mine.words(made.target)))
    return found
