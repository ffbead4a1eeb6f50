"""The run folder: configuration, metrics, checkpoints, summary and report, each written whole."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bpfed._util import text
from bpfed._util.errors import UserError
from bpfed._util.files import (
    CALIBRATION,
    CHECKPOINT,
    CONFIG,
    DATA,
    EVALUATION,
    LEARNT,
    METRICS,
    MODEL,
    PILOTS,
    REPORT,
    STATES,
    SUMMARY,
    append_line,
    clear_parts,
    from_json,
    from_toml,
    is_part,
    lock,
    to_json,
    to_json_line,
    to_toml,
    write_whole,
    writing,
)
from bpfed.callbacks import Callback
from bpfed.config.migrations import current_record
from bpfed.config.schema import differences
from bpfed.config.settings import MAX_TEMPERATURE, MIN_TEMPERATURE
from bpfed.engine.evaluate import calibrate
from bpfed.report.manifest import IDENTITY, Manifest, identity
from bpfed.runs import checkpoint
from bpfed.runs.metadata import card

if TYPE_CHECKING:
    from bpfed.engine.simulator import RoundInfo
    from bpfed.runs.run import Run


class Folder(Callback):
    """Keeps a run in a folder, so that a kill at any moment loses at most the current round.

    Args:
        path: The folder.
        resume: Resume the run there (start from the beginning if there is none).
        overwrite: Throw away what is there.
        back_to: Resume from the state after this round, and drop the rounds after it; None: from the last.

    Raises:
        UserError: There is a run already and neither was asked for, or there is something else. Nothing is written.
    """

    def __init__(self, path: Path, resume: bool = False, overwrite: bool = False, back_to: int | None = None) -> None:
        if resume and overwrite:
            raise UserError("A run cannot be both resumed and overwritten; choose one of --resume and --overwrite.")
        if back_to is not None and not resume:
            raise UserError(f"--back-to {back_to} is for a run that is resumed; add --resume.")
        self.path, self.resume, self.overwrite, self.back_to = path, resume, overwrite, back_to
        self._lock: int | None = None
        self._manifest: Manifest | None = None
        self._metrics = hashlib.sha256()
        self._check()
        if self._piloting and not (resume or overwrite):
            raise self._exists()
        if back_to is not None and not (path / CONFIG).exists():
            raise UserError(f"There is no run in '{path}' that could go back to round {back_to}; leave out --back-to.")

    @property
    def states(self) -> Path:
        """Where a file of personal states may be kept."""
        return self.path / STATES

    @property
    def report(self) -> Path:
        """Where the report is once the run is finished."""
        return self.path / REPORT

    @property
    def pilots(self) -> Path:
        """Where calibration pilots are kept until the run begins."""
        return self.path / PILOTS

    @property
    def begun(self) -> Path | None:
        """The configuration of the run that is resumed here; None: it has not begun."""
        places = (self.path / CONFIG, self.pilots / CONFIG) if self.resume else ()
        return next((path for path in places if path.exists()), None)

    @property
    def learnt(self) -> float | None:
        """The calibration temperature that the run here has learnt, if it is to go on and has."""
        return learnt(self.path, lenient=True) if self.resume and (self.path / CONFIG).exists() else None

    def begin_pilots(self, run: Run) -> None:
        """Before the first calibration pilot: the folder is this process's own from here on, until `release` or the
        run's end.

        Calibration pilots of another configuration are thrown away.

        Raises:
            UserError: There is another run here, and it is to be resumed; or another process writes here.
        """
        config = to_toml(run.config())
        with self._held():
            if self.resume and (self.path / CONFIG).exists():
                self._same(run.config())
            kept = self.pilots / CONFIG
            with writing(self.path):
                if self.pilots.exists() and not _same_run(kept, config):
                    shutil.rmtree(self.pilots)
                self.pilots.mkdir(parents=True, exist_ok=True)
            write_whole(kept, config)

    def check_pilots(self, run: Run) -> None:
        """Raise unless the calibration pilots that are kept here are of this run; say that they are resumed."""
        if self.resume and self._piloting:
            self._same(run.config(), self.pilots / CONFIG)
            run.say("Resuming the calibration pilots.")

    @property
    def _piloting(self) -> bool:
        """Whether a run was begun here and had not finished its calibration pilots."""
        return (self.pilots / CONFIG).exists() and not (self.path / CONFIG).exists()

    def start(self, run: Run) -> None:
        with self._held():
            if (self.path / CONFIG).exists() and not self.overwrite:
                self._go_on(run)
            else:
                self._begin(run)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the folder for this process alone, also afterwards; one made for nothing is taken away again."""
        made = not self.path.exists()
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        try:
            if self._lock is None:
                self._lock = lock(self.path)
            self._check()  # once more: another process may have come first
            yield
        except BaseException:
            if made and not any(self.path.iterdir()):
                self.path.rmdir()
            raise

    def round(self, run: Run, info: RoundInfo, record: dict[str, Any] | None) -> None:
        # The line before the checkpoint: a round that counts as done has its line.
        if record is not None:
            line = to_json_line(record)
            append_line(self.path / METRICS, line)
            self._metrics.update(line.encode() + b"\n")
        assert self._manifest is not None
        extra = {"seconds": run.seconds, "metrics": self._metrics.hexdigest(), IDENTITY: self._manifest.run}
        checkpoint.save(self.path / CHECKPOINT, run.federation, extra)

    def end(self, run: Run) -> None:
        made = {METRICS: as_lines(run.history), EVALUATION: to_json(run.record().evaluation)}
        if run.data.calibration is not None:
            made[CALIBRATION] = to_json_line(calibrate(run.federation).record()) + "\n"
        run.report(self.report)
        made[SUMMARY] = to_json(run.summary_record())  # last: it marks the run as finished, once the manifest lists it
        assert self._manifest is not None
        self._manifest = self._manifest.put(self.path, made)

    def stop(self, run: Run) -> None:
        self.release()

    def release(self) -> None:
        """Let other processes write here again."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check(self) -> None:
        """Raise unless this folder may be written to as it was asked."""
        try:
            there = [p.name for p in self.path.iterdir() if not is_part(p)]
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(
                f"'{self.path}' cannot be a run folder ({error.strerror}); choose another --out."
            ) from error
        piloted = (self.pilots / CONFIG).exists()
        if there and CONFIG not in there and not piloted:
            raise UserError(
                f"'{self.path}' contains other files but no run, so nothing is written there; choose another --out."
            )
        if CONFIG in there and not (self.resume or self.overwrite):
            raise self._exists()

    def _exists(self) -> UserError:
        return UserError(
            f"The run folder '{self.path}' already exists; add --resume to continue it or --overwrite to replace it, or "
            "choose another --out."
        )

    def _begin(self, run: Run) -> None:
        if self.resume and not self.pilots.exists():
            run.say(f"There is no run in '{self.path}' yet, so it starts from the first round.")
        clear_parts(self.path)
        with writing(self.path):  # the old configuration goes last, for without it this would be no run folder
            for old in [p for p in self.path.iterdir() if p.name not in (CONFIG, PILOTS)]:
                shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
        own = self._learnt_text(run)
        if own:
            write_whole(self.path / LEARNT, own)
        config = to_toml(run.config())
        write_whole(self.path / CONFIG, config)
        self._forget_pilots()
        write_whole(self.path / METRICS, "")
        self._describe(run, config, own)

    def _learnt_text(self, run: Run) -> str:
        """The content of ``learnt.json``; empty: there were no calibration pilots."""
        temperature = run.federation.learnt_temperature
        return "" if temperature is None else to_json({"calibration_temperature": temperature})

    def _describe(self, run: Run, config: str, own: str) -> None:
        """See that all that a run begins with is in the folder and in the manifest."""
        data = to_json(card(run.data))
        made: dict[str, str | bytes] = {CONFIG: config, **({LEARNT: own} if own else {}), DATA: data}
        manifest = self._manifest or Manifest(identity(config, data, own))
        path = self.path / MODEL
        # Not of bytes: two files of the same weights may differ in the order of their words.
        kept = manifest.sound(self.path, MODEL) or MODEL not in manifest.files
        if kept and checkpoint.is_model(path, run.federation.model):
            made[MODEL] = path.read_bytes()
        else:
            made[MODEL] = checkpoint.model_bytes(run.federation.model)
        mended = [
            name
            for name in made
            if self.resume and (self.path / name).exists() and not same(self.path / name, made[name])
        ]
        self._manifest = manifest.put(self.path, made)
        for name in mended:
            run.say(f"'{self.path / name}' was damaged or had been changed; it is written again.")

    def _forget_pilots(self) -> None:
        with writing(self.path):
            if self.pilots.exists():
                shutil.rmtree(self.pilots)

    def _go_on(self, run: Run) -> None:
        self._manifest = manifest = Manifest.lenient(self.path)
        config, own = self._written(), self._learnt_text(run)
        self._same(run.config())
        self._forget_pilots()
        # Without a manifest, which may have been lost, its checkpoints still tell whose they are.
        name = manifest.run if manifest is not None else identity(config, to_json(card(run.data)), own)
        if self.back_to is not None:
            with writing(self.path):
                dropped = checkpoint.go_back(self.path / CHECKPOINT, self.back_to, name)
            run.say(f"Going back to round {self.back_to}; {text.many(dropped, 'later checkpoint')} removed.")
        found = checkpoint.restore(self.path / CHECKPOINT, run.federation, name)
        if found is not None:
            for sentence in found.notes:
                run.say(f"{sentence}; resuming from the one before, round {found.round}.")
            run.seconds = float(found.extra.get("seconds", 0.0))
            run.history = self._history(run, found)
        elif (self.path / SUMMARY).exists() or len(lines(self.path / METRICS)) > 1:
            raise UserError(
                f"The run in '{self.path}' has lost its checkpoints ('{self.path / CHECKPOINT}'); put them back from a "
                "copy, or start again with --overwrite."
            )
        clear_parts(self.path)
        clear_parts(self.path / CHECKPOINT)
        done, rounds = run.federation.round, run.settings.rounds
        if done < rounds:  # if its last checkpoint was damaged, it is not finished any more
            if manifest is not None:
                self._manifest = manifest.without((METRICS, EVALUATION, CALIBRATION, SUMMARY)).write(self.path)
            (self.path / SUMMARY).unlink(missing_ok=True)
        history = as_lines(run.history)
        self._metrics = hashlib.sha256(history.encode())
        if not same(self.path / METRICS, history):
            write_whole(self.path / METRICS, history)
        self._describe(run, config, own)
        if done >= rounds:
            run.say(f"The run in '{self.path}' is finished already: {text.done(rounds)}.")
        elif done:
            run.say(f"Resuming after round {done} of {rounds}.")

    def _history(self, run: Run, found: checkpoint.Restored) -> list[dict[str, Any]]:
        """The lines of metrics up to the round that was restored."""
        path, done = self.path / METRICS, found.round
        records = [r for r in lines(path) if r["round"] <= done]
        missing = {k for k in range(1, done + 1) if run.settings.evaluated(k)} - {r["round"] for r in records}
        if missing:
            raise UserError(
                f"'{path}' has no entry for round {min(missing)}, so the run cannot be resumed; restore the file, or "
                "start again with --overwrite."
            )
        if found.extra.get("metrics", own := hashlib.sha256(as_lines(records).encode()).hexdigest()) != own:
            raise UserError(
                f"'{path}' is damaged: the checkpoint of round {done} has another hash, so the run cannot be resumed; "
                "restore the file, or start again with --overwrite."
            )
        return records

    def _written(self) -> str:
        """The configuration that the run here began with, as it was written."""
        if self._manifest is not None and CONFIG in self._manifest.copies:
            return self._manifest.copies[CONFIG]
        path = self.path / CONFIG
        try:
            return path.read_bytes().decode("utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"'{path}' cannot be read ({error}); start again with --overwrite.") from error

    def _same(self, config: dict[str, Any], path: Path | None = None) -> None:
        """Raise unless the run of this configuration may go on here; ``path`` is that of the run that was begun."""
        try:
            there = from_toml(self._written() if path is None else path.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(
                f"'{path or self.path / CONFIG}' cannot be read ({error}); start again with --overwrite."
            ) from error
        if (version := there.get("bpfed")) != config["bpfed"]:
            raise UserError(
                f"The run in '{self.path}' was started with bpfed {version}, but this is {config['bpfed']}; resume "
                "with that version, or start again with another --out."
            )
        differs = differences(there, from_toml(to_toml(config)))
        if differs:
            raise UserError(
                f"The run in '{self.path}' has another configuration: {'; '.join(differs)}. "
                "Resume it with its own settings, or choose another --out."
            )


def begun(folder: Path) -> bool:
    """Whether a run was begun in a folder, if only its calibration pilots."""
    return (folder / CONFIG).exists() or (folder / PILOTS / CONFIG).exists()


def learnt(folder: Path, lenient: bool = False) -> float | None:
    """The calibration temperature that the run in a folder has learnt; None if there were no calibration pilots.

    Args:
        folder: Of the run.
        lenient: Whether to take it from the manifest, where the file is damaged or lost.
    """
    path = folder / LEARNT
    manifest = Manifest.lenient(folder) if lenient else Manifest.read(folder)
    try:
        if manifest is not None:
            if not lenient:
                manifest.check(folder, [LEARNT])
            return _temperature(manifest.copies[LEARNT]) if LEARNT in manifest.copies else None
        return _temperature(path.read_bytes()) if path.exists() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"'{path}' is damaged ({error}); delete it to repeat the calibration pilots.") from error


def _temperature(content: str | bytes) -> float:
    found = current_record(from_json(content))["calibration_temperature"]
    if not isinstance(found, int | float) or isinstance(found, bool) or not MIN_TEMPERATURE <= found <= MAX_TEMPERATURE:
        raise ValueError(
            f"a calibration temperature of {str(found)[:40]}, where {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g} is allowed"
        )
    return float(found)


def same(path: Path, content: str | bytes) -> bool:
    """Whether a file has this content."""
    try:
        return path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    except OSError:
        return False


def as_lines(history: list[dict[str, Any]]) -> str:
    """The content of ``metrics.jsonl``."""
    return "".join(to_json_line(r) + "\n" for r in history)


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics; one cut short by a crash is none."""
    records: list[dict[str, Any]] = []
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror}); restore it, or train again.") from error
    for line in content.splitlines():
        try:
            record = from_json(line)
        except UnicodeDecodeError:
            raise UserError(
                f"'{path}' is damaged in line {len(records) + 1}: it is not UTF-8 text; restore it, or train again."
            ) from None
        except ValueError:
            break
        if not isinstance(record, dict) or type(record.get("round")) is not int:
            raise UserError(f"'{path}' is damaged in line {len(records) + 1}; restore it, or train again.")
        records.append(record)
    return records


def _same_run(path: Path, config: str) -> bool:
    """Whether a file is the configuration of this run, as far as it matters to what comes out."""
    try:
        return not differences(from_toml(path.read_bytes()), from_toml(config))
    except (OSError, ValueError):
        return False
