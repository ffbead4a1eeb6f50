"""The journal of a deployed training: what the server writes into the run folder, and reads back to go on."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from bpfed._util import text
from bpfed._util.errors import UserError
from bpfed._util.files import (
    CHECKPOINT,
    CONFIG,
    EVALUATION,
    EXCHANGES,
    MANIFEST,
    METRICS,
    PILOTS,
    REPORT,
    SUMMARY,
    append_line,
    from_json,
    to_json,
    to_json_line,
    to_toml,
    write_whole,
)
from bpfed.config.reader import Config
from bpfed.data.federated import held_back
from bpfed.deploy.server.roster import SiteStatus
from bpfed.metrics import Evaluation
from bpfed.report import RunRecord, write
from bpfed.report.manifest import Manifest
from bpfed.report.record import temperature_name, temperature_words
from bpfed.runs import checkpoint, metadata
from bpfed.runs.metadata import uncertain

if TYPE_CHECKING:
    from bpfed.engine.federation import Federation

#: What a pilot found, in its folder.
FOUND = "found.json"
#: In the folder of all pilots, those of the selection; and the file in there that all of them go by.
SELECTION, GIVEN = "selection", "selection.json"

FoundType = TypeVar("FoundType", bound=tuple[Any, ...])


class Found(NamedTuple):
    """What a calibration pilot found: a temperature, from so many held-out examples, after so many seconds."""

    calibration_temperature: float
    examples: int
    seconds: float


class FoundScores(NamedTuple):
    """What a selection pilot found.

    Attributes:
        scores: By site, the −log p of the training examples that it held out, summed, and how many these are.
        diverged: Whether the candidate cannot be trained; then there are no scores.
    """

    scores: dict[str, tuple[float | None, int]]
    diverged: bool = False


class SelectionPilot(NamedTuple):
    """One of the trainings that settings are chosen by.

    Attributes:
        candidate: The settings that are tried (`bpfed.runs.pilot.with_candidates`).
        fold: Which part of their training examples sites hold out, from 1.
        number: Which of all selection pilots it is, from 1.
        total: How many there are.
    """

    candidate: tuple[int, ...]
    fold: int
    number: int
    total: int

    @property
    def folder(self) -> str:
        """A name for its folder."""
        return "-".join(map(str, (*self.candidate, "fold", self.fold)))


class Journal:
    """What is kept of a training, the run itself or a pilot, beside the server's state of the method.

    Attributes:
        folder: Where: the run folder, or a pilot's own in it.
        run: A word for this training.
        candidate: The settings of the method that were chosen in selection pilots, or that this one tries; empty: its own.
        calibration_temperature: In the run itself, what calibration pilots have learnt; None: there were none.
        held: Held-out examples that it was learnt from, in all calibration pilots together.
        common: What all sites' data have in common.
        counted: The last round in which a site's upload was used, by site; none of whom none was.
        history: A line of metrics for each round that was tested.
        pending: What is known of the last round beside its scores.
        seconds: Time that exchanges and aggregation took.
        evaluation: Scores of the last round that was tested, and of which sites.

    Args:
        home: The run folder.
        config: What is computed.
        fingerprint: Of that.
        sites: What is known of each site, by name.
        say: Called with each message for the user.
        pilot: Which calibration pilot it is, from 1; 0: it is the run itself, or a selection pilot.
        selection: Which selection pilot it is; None: it is none.
    """

    def __init__(
        self,
        home: Path,
        config: Config,
        fingerprint: str,
        sites: dict[str, SiteStatus],
        say: Callable[[str], None],
        pilot: int = 0,
        selection: SelectionPilot | None = None,
    ) -> None:
        self.home, self.config, self.fingerprint, self.sites, self.say = home, config, fingerprint, sites, say
        self.pilot, self.selection = pilot, selection
        self.folder = home / PILOTS / str(pilot) if pilot else home
        if selection is not None:
            self.folder = home / PILOTS / SELECTION / selection.folder
        self.candidate: tuple[int, ...] = () if selection is None else selection.candidate
        self.run = secrets.token_hex(8)
        self.calibration_temperature: float | None = None
        self.held = 0
        self.common: dict[str, Any] = {}
        self.counted: dict[str, int] = {}
        self.history: list[dict[str, Any]] = []
        self.pending: dict[str, Any] = {}
        self.seconds = 0.0
        self.evaluation: tuple[Evaluation, list[str]] | None = None

    @property
    def learnt(self) -> str:
        """In words what calibration pilots have learnt; empty: nothing yet."""
        if self.calibration_temperature is None:
            return ""
        doubt = uncertain(
            self.calibration_temperature, self.held, self.config.run.calibration_pilots, self.common["task"]
        )
        name, given = temperature_name(self.common["task"]), temperature_words(self.calibration_temperature)
        return f"Calibration pilots are over: predictions will have a {name} of {given}. {doubt}".strip()

    def place(self, round_: int) -> str:
        """In words which round of which training, such as ``calibration pilot 1 of 3, round 4``."""
        return place(round_, self.stage)

    @property
    def stage(self) -> str:
        """In words which pilot it is; empty: the run itself."""
        if self.selection is not None:
            return f"selection pilot {self.selection.number} of {self.selection.total}"
        return f"calibration pilot {self.pilot} of {self.config.run.calibration_pilots}" if self.pilot else ""

    # --- going on -----------------------------------------------------------------------------------------------------

    def kept(self) -> dict[str, Any] | None:
        """What the newest readable checkpoint says beside its tensors; None: there is none."""
        for path in sorted((self.folder / CHECKPOINT).glob("round-*.json"), reverse=True):
            try:
                record = from_json(path.read_bytes())
                if not isinstance(record, dict) or not path.with_suffix(".safetensors").exists():
                    continue
            except (OSError, ValueError):
                continue
            if record.get("fingerprint") != self.fingerprint:
                raise UserError(
                    f"The run in '{self.home}' has a different configuration; move that folder away to start a new run."
                )
            return dict(record)
        return None

    def restore(self, federation: Federation) -> None:
        """Put the newest sound checkpoint into the federation, and what was kept beside it into this."""
        (self.folder / MANIFEST).unlink(missing_ok=True)  # the run goes on, and its files are not what they were
        restored = checkpoint.restore(self.folder / CHECKPOINT, federation)
        assert restored is not None
        for name in restored.damaged:
            self.say(f"Checkpoint {name} is damaged; resuming from the one before, round {restored.round}.")
        kept = restored.extra
        self.run, self.seconds, self.history, self.pending = (kept[k] for k in ("run", "seconds", "history", "pending"))
        self.counted, self.calibration_temperature, self.held = (
            kept[k] for k in ("counted", "calibration_temperature", "held")
        )
        federation.learnt_temperature = self.calibration_temperature
        self.say(f"Resuming after {self.place(restored.round)} of {federation.settings.rounds}.")

    def back_to(self, round_: int) -> None:
        """Make the state after a round the newest one, before the run is taken up; later rounds are dropped.

        Each site then goes on from its own state of the last round up to this one in which its upload was used; sites
        keep as many of them as there are checkpoints.

        Raises:
            UserError: There is no sound checkpoint of it; nothing is changed.
        """
        if self.kept() is None:
            raise UserError(
                f"No run has begun in '{self.home}', so there is no round to go back to; leave out --back-to."
            )
        dropped = checkpoint.go_back(self.folder / CHECKPOINT, round_)
        for name in (SUMMARY, EVALUATION, REPORT):  # of a run that was finished
            (self.folder / name).unlink(missing_ok=True)
        self.say(f"Going back to round {round_}; {text.many(dropped, 'later checkpoint')} removed.")
        self.say(
            "Sites go on from their own states of that round; one that no longer has it says so in its log, and goes on "
            "from an older one."
        )

    def save(self, federation: Federation) -> None:
        """Write a checkpoint."""
        sites = {s: {k: v for k, v in vars(seen).items() if k != "node"} for s, seen in self.sites.items()}
        extra = {
            "run": self.run,
            "fingerprint": self.fingerprint,
            "seconds": round(self.seconds, 3),
            "calibration_temperature": self.calibration_temperature,
            "held": self.held,
            "facts": self.common,
            "pending": self.pending,
            "counted": self.counted,
            "sites": sites,
            "history": self.history,
            **({"candidate": self.candidate} if self.candidate else {}),
        }
        checkpoint.save(self.folder / CHECKPOINT, federation, extra)

    # --- as it goes ---------------------------------------------------------------------------------------------------

    def begin(self, federation: Federation) -> None:
        """Before the first round of a new training."""
        federation.learnt_temperature = self.calibration_temperature
        if not self.stage:
            write_whole(self.folder / CONFIG, to_toml(metadata.config(federation)))
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

    # --- of a pilot ---------------------------------------------------------------------------------------------------

    def found(self) -> Found | None:
        """What this calibration pilot found; None: it is not over."""
        return self._found(Found)

    def found_scores(self) -> FoundScores | None:
        """What this selection pilot found; None: it is not over."""
        return self._found(FoundScores)

    def _found(self, kind: type[FoundType]) -> FoundType | None:
        path = self.folder / FOUND
        if not path.exists():
            return None
        try:
            return kind(**from_json(path.read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"'{path}' is damaged ({error}); delete it, and the {self.stage.partition(' pilot')[0]} pilot is tested again."
            ) from error

    def conclude(self, calibration_temperature: float, examples: int) -> None:
        """This calibration pilot is over, and found such a calibration temperature in so many held-out examples."""
        write_whole(
            self.folder / FOUND, to_json(Found(calibration_temperature, examples, round(self.seconds, 3))._asdict())
        )

    def conclude_scores(self, found: FoundScores) -> None:
        """This selection pilot is over."""
        write_whole(self.folder / FOUND, to_json(found._asdict()))

    # --- the result ---------------------------------------------------------------------------------------------------

    def finish(self, federation: Federation) -> RunRecord:
        """The files of a finished run, and its report."""
        assert self.evaluation is not None
        evaluation, order = self.evaluation
        sizes = torch.tensor([int((self.sites[site].statement or {}).get("train", 0)) for site in order])
        part = self.config.run.calibration
        held = held_back(sizes, part) if part > 0.0 else torch.zeros_like(sizes)
        kept = held.tolist() if part > 0.0 else None
        detail = metadata.detail(federation, evaluation, order, (sizes - held).tolist(), kept)
        made = {
            CONFIG: (self.folder / CONFIG).read_text(),
            METRICS: (self.folder / METRICS).read_text(),
            EVALUATION: to_json(detail),
            SUMMARY: to_json(metadata.summary(federation, self.history, self.seconds)),
        }
        Manifest(self.run).put(self.folder, made)
        record = RunRecord.read(self.folder)
        write(record, self.folder / REPORT)
        self.save(federation)
        return record


def place(round_: int, stage: str) -> str:
    """In words which round, and of which pilot; empty: of none."""
    return f"{f'{stage}, ' if stage else ''}round {round_}"


def sentence(words: str) -> str:
    """Words as the beginning of a sentence."""
    return words[:1].upper() + words[1:]
