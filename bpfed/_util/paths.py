"""Names of files and folders: of a run folder, and of the parts of a deployment."""

from __future__ import annotations

from pathlib import Path

from bpfed._util.errors import UserError
from bpfed._util.files import from_toml

#: The files of a run folder.
CONFIG, METRICS, EVALUATION, SUMMARY, REPORT = (
    "config.toml",
    "metrics.jsonl",
    "evaluation.json",
    "summary.json",
    "report.html",
)
#: What was learnt in calibration pilots, and their folder until the run begins.
LEARNT, PILOTS = "learnt.json", "pilots"
#: What a run must know to predict without its data: of the data, the network, and how predictions are calibrated.
DATA, MODEL, CALIBRATION = "data.json", "model.safetensors", "calibration.json"
#: Hashes of the files above that predictions and reports are made from.
MANIFEST = "manifest.json"
#: Folders of what goes on: the federation after its last rounds, and the clients' own states.
CHECKPOINT, STATES = "checkpoint", "state"

#: The file of settings of a part of a deployment, beside its `CONFIG`.
PLAN = "deploy.toml"
#: The preparation that all parts of a deployment have agreed on, where they have.
PREPARATION = "preparation.json"
#: The server's folder in that of a deployment; the run folder of the server, and of a site's own model.
SERVER, RUN = "server", "run"
#: What each exchange cost, in the run folder of a server; no other run has such a file.
EXCHANGES = "exchanges.jsonl"


def of_run(folder: Path) -> Path:
    """The run folder that is meant: of a deployment or of a part of it, the one below; else the folder itself."""
    return next((place / RUN for place in (folder, folder / SERVER) if (place / PLAN).is_file()), folder)


def part(folder: Path) -> str:
    """Which part of a deployment a folder is, or is directly in: ``site`` or ``server``; empty: of none."""
    folder = folder.resolve()
    if (folder / EXCHANGES).is_file():
        return SERVER
    for place in (folder, folder.parent, folder / SERVER):
        if (path := place / PLAN).is_file():
            try:
                return "site" if from_toml(path.read_bytes()).get("site") else SERVER
            except (OSError, ValueError) as error:
                raise UserError(f"'{path}' cannot be read ({error}); fix it.") from error
    return ""
