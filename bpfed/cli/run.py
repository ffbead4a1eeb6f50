"""``bpfed run``: train a federation and keep it in a folder."""

from __future__ import annotations

import shlex
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bpfed._util.errors import UserError, unknown
from bpfed._util.files import CONFIG, PILOTS
from bpfed.cli import terminal
from bpfed.cli.flags import (
    ConfigFile,
    DataDir,
    Json,
    ModelName,
    Quiet,
    argument,
    flag,
    schema_fields,
    with_schema,
)
from bpfed.config.registry import check_data, method_named
from bpfed.config.schema import LISTS

if TYPE_CHECKING:
    from bpfed.callbacks import Callback, Progress
    from bpfed.config.reader import Config, Override
    from bpfed.runs.run import Run

EXAMPLE = "Example: bpfed run --data digits --rounds 30 --seed 0 --set method.temperature=0.3 --out runs/first"
RUNS = Path("runs")
TRACKERS = ("mlflow", "tensorboard")


@with_schema
def run(
    config: ConfigFile = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Method (see 'bpfed methods'). \\[default: bpfed-adaptive for tables; for images and arrays, pilot runs "
            "choose between it and bpfed-recipe]",
            show_default=False,
        ),
    ] = None,
    model: ModelName = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting, e.g. method.temperature=0.3; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder. \\[default: a new runs/DATA-METHOD-SEED]", show_default=False)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in --out, up to the number of rounds it was started with.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")] = False,
    back_to: Annotated[
        int | None,
        typer.Option(
            metavar="ROUND", min=0, help="With --resume: go on from the state after this round.", show_default=False
        ),
    ] = None,
    data_dir: DataDir = None,
    track: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(TRACKERS), help="Also log to this tracker (needs the extra 'track'); repeatable."
        ),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
    **flags: str | None,
) -> None:
    """Train a federation. Settings come from flags, then from the TOML file, then from the defaults.

    With --resume and no file, the settings are those of the run in --out.
    The number of rounds is fixed at the start, because step-size schedules depend on it.
    A rare class needs no weight here: say what mistakes cost to 'bpfed predict --costs'.
    """
    from bpfed.callbacks.progress import Progress

    if out is None and (resume or overwrite or back_to is not None):
        given = "resume" if resume else "overwrite" if overwrite else "back-to"
        raise UserError(f"--{given} needs the run folder, such as --out {_latest()}.")
    progress = Progress(patience=terminal.PATIENCE)
    try:
        if not quiet:
            progress.doing("starting")
        # The display is up before torch is imported, which takes seconds, and what was typed is looked at before that.
        method = method_named(method, model)
        check_data(flags["data"])
        from bpfed.config.reader import read

        source, said = config or _own(out, resume), overrides(method, settings or [], flags)
        chosen = read(source, said, _begun_with(out) if resume and config is None else None)
        from bpfed.callbacks import Folder
        from bpfed.report.record import temperature_name, temperature_words
        from bpfed.runs.fit import RunRequest, decided, get_ready, train_ready

        folder = Folder(out, resume, overwrite, back_to) if out is not None else None  # refused before data are read
        if resume and source is None and not any(override.key == "data.name" for override in said):
            raise UserError(
                f"There is no run to resume in '{out}'; choose another --out, or start a new run with --data."
            )
        _check_trackers(track or [])
        for note in chosen.notes:
            progress.say(note)
        if not quiet:
            loading(progress, chosen.data.name, data_dir)
        data = chosen.load_data(data_dir)
        shown, named = None if quiet else progress, chosen.method if chosen.named else None
        # A folder without a name is named after the method, which may be chosen by the data.
        made, how = decided(named, data, chosen.run, folder=folder, say=progress.say, display=shown)
        out = out or free(data_word(chosen), made.name, how.seed)
        folder = folder or Folder(out, resume, overwrite, back_to)
        callbacks: list[Callback] = [*_trackers(track or [], out), *([] if quiet else [progress])]
        request = RunRequest(made, data, how, folder=folder, callbacks=callbacks, choose=False)
        trained = get_ready(request, progress.say, shown)
        chosen.confirm(trained.config())

        def calibrated(run: Run) -> None:
            if run.federation.learnt_temperature is not None:
                progress.say(
                    f"Calibration pilots are over: predictions will have a {temperature_name(run.data.task)} of "
                    f"{temperature_words(run.calibration_temperature)}."
                )

        train_ready([trained], [request], shown, calibrated)
    except KeyboardInterrupt:
        progress.close()
        progress.say(_stopped(out, data_dir, track or []))
        raise typer.Exit(130) from None
    finally:
        progress.close()
    if json:
        from bpfed.report.verdicts import summary

        terminal.put_json(summary(trained.record()) | {"report": str(folder.report)})
        return
    terminal.result(trained.record(), folder.report)


def free(data: str, method: str, seed: int) -> Path:
    """A folder for this run that does not exist yet: ``runs/DATA-METHOD-SEED``, then with ``-2`` and so on."""
    name = f"{data}-{method}-{seed}"
    return next(p for n in count(1) if not (p := RUNS / (name if n == 1 else f"{name}-{n}")).exists())


def data_word(config: Config) -> str:
    """The data in a word that may be part of a folder's name."""
    data = config.data.name
    if data.startswith("folder:"):
        data = Path(data.removeprefix("folder:")).expanduser().resolve().stem or "folder"
    return data.replace("/", "-")


def _own(out: Path | None, resume: bool) -> Path | None:
    """The configuration of the run that is resumed; before its first round it is with its calibration pilots."""
    if not resume or out is None:
        return None
    return next((path for path in (out / CONFIG, out / PILOTS / CONFIG) if path.exists()), None)


def _begun_with(out: Path | None) -> str | None:
    """The configuration of the run that is resumed, as its manifest has it; None: it has none."""
    from bpfed.report.manifest import Manifest

    manifest = Manifest.lenient(out) if out is not None and (out / CONFIG).exists() else None
    return manifest.copies.get(CONFIG) if manifest is not None else None


def overrides(method: str | None, settings: list[str], flags: dict[str, Any]) -> list[Override]:
    """What was set by flags, and then by ``--set``."""
    from bpfed.config.reader import Override

    found = [Override("method.name", method, "--method")] if method is not None else []
    for key, _ in schema_fields():
        if (text := flags.get(argument(key))) not in (None, []):
            found.append(Override(key, LISTS[key].join(text) if isinstance(text, list) else text, flag(key)))
    return found + [override(setting) for setting in settings]


def override(setting: str) -> Override:
    """What one ``--set`` says."""
    from bpfed.config.reader import Override

    key, equals, text = setting.partition("=")
    if not equals:
        raise UserError(f"--set: '{setting}' has no value; write e.g. --set method.lr=0.01.")
    return Override(key.strip(), text.strip())


def _trackers(names: list[str], out: Path) -> list[Callback]:
    from bpfed.callbacks import MLflow, TensorBoard

    return [
        TensorBoard(out / "tensorboard") if name == "tensorboard" else MLflow(remember=out / "mlflow.txt")
        for name in names
    ]


def _check_trackers(names: list[str]) -> None:
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)


def loading(progress: Progress, name: str, data_dir: Path | None) -> None:
    """Show that the data of this name is being loaded."""
    from bpfed.data.datasets import names, source_of
    from bpfed.data.sources.pooled import locate

    if name not in names() or locate(source_of(name), data_dir) is not None:
        progress.doing(f"loading {name}")
    elif progress.console.is_terminal:
        progress.pause()  # a download has a display of its own
    else:
        progress.doing(f"downloading {source_of(name)}")


def _stopped(out: Path | None, data_dir: Path | None, track: list[str]) -> str:
    if out is None or (config := _own(out, resume=True)) is None:
        return "bpfed: Stopped before the first round; nothing was written."
    if (out / PILOTS / config.name).exists() and config.parent == out:  # the run here is to be overwritten
        return "bpfed: Stopped in a calibration pilot; at most the current round is lost. Resume with the same command."
    again = ["bpfed", "run", "--out", str(out), "--resume"]
    again += ["--data-dir", str(data_dir)] if data_dir is not None else []
    again += [word for name in track for word in ("--track", name)]
    return f"bpfed: Stopped; at most the current round is lost. Resume with: {shlex.join(again)}"


def _latest() -> Path:
    """The run that was touched last, to name it as an example."""
    runs = sorted(RUNS.glob("*/config.toml"), key=lambda path: path.parent.stat().st_mtime)
    return runs[-1].parent if runs else RUNS / "first"
