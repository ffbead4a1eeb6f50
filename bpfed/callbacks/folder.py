"""The run folder: configuration, metrics, checkpoints, summary and report, each written whole."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bpfed.callbacks.base import Callback
from bpfed.engine import checkpoint
from bpfed.engine.simulator import RoundInfo
from bpfed.errors import UserError
from bpfed.files import append_line, to_json, to_json_line, to_toml, write_whole

if TYPE_CHECKING:
    from bpfed.run import Run

CONFIG, METRICS, SUMMARY, EVALUATION, REPORT, CHECKPOINT = (
    "config.toml",
    "metrics.jsonl",
    "summary.json",
    "evaluation.json",
    "report.html",
    "checkpoint",
)


class Folder(Callback):
    """Keeps a run in a folder, so that a kill at any moment loses at most the current round.

    Args:
        path: The folder.
        resume: Go on with what is there (start afresh if nothing is).
        overwrite: Throw away what is there.
    """

    def __init__(self, path: Path, resume: bool = False, overwrite: bool = False) -> None:
        self.path, self.resume = path, resume
        if (path / CONFIG).exists() or (path.exists() and any(path.iterdir())):
            if overwrite:
                if not (path / CONFIG).exists():
                    raise UserError(f"'{path}' is not a run folder, so it is not overwritten; choose another --out.")
                shutil.rmtree(path)
            elif not resume:
                raise UserError(
                    f"The run folder '{path}' exists already; add --resume to go on with it, --overwrite to replace it, "
                    "or choose another --out."
                )

    def start(self, run: Run) -> None:
        config = run.config()
        if (self.path / CONFIG).exists():
            self._same(config)
            found = checkpoint.restore(self.path / CHECKPOINT, run.federation)
            if found is not None:
                for name in found.damaged:
                    run.say(f"Checkpoint {name} is damaged; going on from the one before, round {found.round}.")
                run.seconds = float(found.extra["seconds"])
                run.history = [r for r in self._metrics() if r["round"] <= found.round]
        else:
            write_whole(self.path / CONFIG, to_toml(config))
        lines = "".join(to_json_line(r) + "\n" for r in run.history)
        write_whole(self.path / METRICS, lines)

    def round(self, run: Run, info: RoundInfo, record: dict[str, Any] | None) -> None:
        if record is not None:
            append_line(self.path / METRICS, to_json_line(record))
        checkpoint.save(self.path / CHECKPOINT, run.federation, {"seconds": run.seconds})

    def end(self, run: Run) -> None:
        write_whole(self.path / EVALUATION, to_json(run.detail()))
        write_whole(self.path / SUMMARY, to_json(run.summary_record()))
        run.report(self.path / REPORT)

    def _metrics(self) -> list[dict[str, Any]]:
        """All whole lines; a line cut short by a crash is not one."""
        records = []
        path = self.path / METRICS
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                records.append(json.loads(line))
            except ValueError:
                break
        return records

    def _same(self, config: dict[str, Any]) -> None:
        path = self.path / CONFIG
        try:
            there = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"'{path}' cannot be read ({error}); start again with --overwrite.") from error
        wanted = tomllib.loads(to_toml(config))
        differs = [
            f"{part}.{name} is {_shown(old.get(name))} there and {_shown(new.get(name))} here"
            for part in sorted({*there, *wanted})
            for old, new in [(_table(there, part), _table(wanted, part))]
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
        ]
        if differs:
            raise UserError(
                f"The run in '{self.path}' has another configuration: {'; '.join(differs)}. "
                "Resume it with its own settings, or choose another --out."
            )


def _table(config: dict[str, Any], part: str) -> dict[str, Any]:
    value = config.get(part, {})
    return value if isinstance(value, dict) else {part: value}


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)
