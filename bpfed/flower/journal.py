"""The journal of a deployed run: what its server writes into the run folder, and reads back to go on."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bpfed import __version__
from bpfed.calibration import fewest
from bpfed.config import Config
from bpfed.data.federated import held_back
from bpfed.engine import checkpoint
from bpfed.engine.federation import Federation
from bpfed.errors import UserError
from bpfed.files import append_line, to_json, to_json_line, to_toml, write_whole
from bpfed.flower.meeting import Seen
from bpfed.flower.plan import EXCHANGES
from bpfed.metrics import SURE, Evaluation
from bpfed.report import RunRecord, write
from bpfed.report.record import CONFIG, EVALUATION, METRICS, REPORT, SUMMARY

CHECKPOINT = "checkpoint"


class Journal:
    """What is kept of a run beside the server's state of the method.

    Attributes:
        run: A word for this run.
        facts: What all sites' data have in common.
        counted: The last round in which a site's upload was used, by site; none of whom none was.
        history: A line of metrics for each round that was tested.
        pending: What is known of the last round beside its scores.
        seconds: Time that exchanges and aggregation took.
        evaluation: Scores of the last round that was tested, and of which sites.

    Args:
        folder: The run folder.
        config: What is computed.
        fingerprint: Of that.
        sites: What is known of each site, by name.
        say: Told in words what happens.
    """

    def __init__(
        self, folder: Path, config: Config, fingerprint: str, sites: dict[str, Seen], say: Callable[[str], None]
    ) -> None:
        self.folder, self.config, self.fingerprint, self.sites, self.say = folder, config, fingerprint, sites, say
        self.run = secrets.token_hex(8)
        self.facts: dict[str, Any] = {}
        self.counted: dict[str, int] = {}
        self.history: list[dict[str, Any]] = []
        self.pending: dict[str, Any] = {}
        self.seconds = 0.0
        self.evaluation: tuple[Evaluation, list[str]] | None = None

    # --- going on -------------------------------------------------------------------------------------------------------

    def kept(self) -> dict[str, Any] | None:
        """What the newest readable checkpoint says beside its tensors; None: there is none."""
        for path in sorted((self.folder / CHECKPOINT).glob("round-*.json"), reverse=True):
            try:
                record = json.loads(path.read_text())
                if not path.with_suffix(".safetensors").exists():
                    continue
            except (OSError, ValueError):
                continue
            if record.get("fingerprint") != self.fingerprint:
                raise UserError(
                    f"The run in '{self.folder}' has another configuration; move that folder away to start a new run."
                )
            return dict(record)
        return None

    def restore(self, federation: Federation) -> None:
        """Put the newest sound checkpoint into the federation, and what was kept beside it into this."""
        restored = checkpoint.restore(self.folder / CHECKPOINT, federation)
        assert restored is not None
        for name in restored.damaged:
            self.say(f"Checkpoint {name} is damaged; going on from the one before, round {restored.round}.")
        kept = restored.extra
        self.run, self.seconds, self.history, self.pending = (kept[k] for k in ("run", "seconds", "history", "pending"))
        self.counted = kept["counted"]
        self.say(f"Going on after round {restored.round} of {self.config.run.rounds}.")

    def save(self, federation: Federation) -> None:
        """Write a checkpoint."""
        sites = {s: {k: v for k, v in vars(seen).items() if k != "node"} for s, seen in self.sites.items()}
        extra = {
            "run": self.run,
            "fingerprint": self.fingerprint,
            "seconds": round(self.seconds, 3),
            "facts": self.facts,
            "pending": self.pending,
            "counted": self.counted,
            "sites": sites,
            "history": self.history,
        }
        checkpoint.save(self.folder / CHECKPOINT, federation, extra)

    # --- as it goes -----------------------------------------------------------------------------------------------------

    def begin(self, federation: Federation) -> None:
        """Before the first round of a new run."""
        write_whole(self.folder / CONFIG, to_toml(self._config(federation)))
        write_whole(self.folder / EXCHANGES, "")
        self.save(federation)

    def write_metrics(self) -> None:
        """All lines of metrics so far, as they are known here."""
        write_whole(self.folder / METRICS, "".join(to_json_line(r) + "\n" for r in self.history))

    def note(self, exchange: dict[str, Any]) -> None:
        """A line on an exchange."""
        append_line(self.folder / EXCHANGES, to_json_line(exchange))

    def score(self, round_: int, evaluation: Evaluation, order: list[str], untested: int = 0) -> None:
        """The line of metrics of a round, which these sites have tested; so many more have no test examples."""
        self.evaluation = evaluation, order
        record = {"round": round_, **evaluation.record(), **self.pending}
        record |= {"tested": len(order), **({"untested": untested} if untested else {})}
        record["seconds"] = round(self.seconds, 3)
        self.history = [r for r in self.history if r["round"] != round_] + [record]
        append_line(self.folder / METRICS, to_json_line(record))

    # --- the result -----------------------------------------------------------------------------------------------------

    def finish(self, federation: Federation) -> RunRecord:
        """The files of a finished run, and its report."""
        assert self.evaluation is not None
        evaluation, order = self.evaluation
        sizes = torch.tensor([int((self.sites[site].facts or {}).get("train", 0)) for site in order])
        part = self.config.run.calibration
        held = held_back(sizes, part) if part > 0.0 else torch.zeros_like(sizes)
        kept = held.tolist() if part > 0.0 else None
        detail = evaluation.detail(federation.round, order, (sizes - held).tolist(), kept)
        if kept is not None:
            detail["fewest_calibration"] = fewest(SURE)
        if (made := self.facts.get("preparation")) is not None:
            if self.facts["task"] == "regression":
                detail["target"] = {"name": made["target"], "scale": made["target_scale"]}
            elif len(made["labels"]) == 2:
                detail["labels"] = list(made["labels"])
        write_whole(self.folder / EVALUATION, to_json(detail))
        write_whole(self.folder / SUMMARY, to_json(self._summary(federation)))
        record = RunRecord.read(self.folder)
        write(record, self.folder / REPORT)
        self.save(federation)
        return record

    def _config(self, federation: Federation) -> dict[str, Any]:
        asked, method, factors = self.config.data, self.config.method, federation.model.factors
        return {
            "bpfed": __version__,
            "data": {
                "name": asked.name,
                "partition": asked.partition,
                "clients": len(self.sites),
                "test_fraction": asked.test_fraction,
                "seed": asked.seed,
            },
            "method": {"name": method.name, **method.settings()},
            "run": {**vars(self.config.run), "device": "cpu"},
            "model": {
                "network": type(federation.model.module).__name__,
                "weights": factors.total,
                "shared": factors.shared,
                "personal": list(factors.personal_names),
            },
        }

    def _summary(self, federation: Federation) -> dict[str, Any]:
        from bpfed.run import figures

        method, asked = self.config.method, self.config.data
        record: dict[str, Any] = {
            "method": method.name,
            "title": method.title,
            "data": asked.name,
            "partition": asked.partition or "sites",
            "protocol": "deployed",
            "seed": self.config.run.seed,
            "rounds": federation.round,
            "clients": len(self.sites),
            "device": "cpu",
            "seconds": round(self.seconds, 3),
            "bins": self.config.run.bins,
        }
        if (epsilon := federation.epsilon(secret=False)) is not None:  # every site knows the seed, and so who was drawn
            record |= {"epsilon": epsilon, "delta": self.config.run.delta}
        if self.config.run.members > 1:
            record["members"] = self.config.run.members
        if self.config.run.softness != 1.0:
            record["softness"] = self.config.run.softness
        return record | figures(self.history)
