"""``bpfed adapt``: let a client that took no part in training join a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bpfed._util import text
from bpfed._util.console import Console
from bpfed._util.errors import UserError, quoted
from bpfed.cli import terminal
from bpfed.cli.predict import ADAPTED, finished_run, newcomers_of
from bpfed.cli.terminal import PATIENCE

if TYPE_CHECKING:
    from torch import Tensor

    from bpfed.runs.adapt import NewClient

EXAMPLE = "Example: bpfed adapt runs/first --name ward3 --input ward3.csv"


def adapt(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    rows: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help="The newcomer's labelled rows: a table as in training, or NPZ with x and y. \\[default: none]",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The newcomer's name. \\[default: the input file's name]", show_default=False)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="Column with its labels. \\[default: the run's target]", show_default=False
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Local steps, rounded up to whole passes. \\[default: 500]", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help=f"File to save it in. \\[default: RUN/{ADAPTED}/NAME.safetensors]", show_default=False),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a newcomer of that name.")] = False,
) -> None:
    """Let a newcomer join a finished run: it learns its own weights, and the shared ones stay as they are.

    One example is enough; without any, it predicts from what the run knows about clients in general.
    """
    from bpfed.callbacks.progress import Progress

    name = name or (rows.stem if rows is not None else "newcomer")
    if out is None:
        if Path(name).name != name:
            raise UserError(
                f"A newcomer called '{name}' cannot be saved in a file of that name; choose another --name or --out."
            )
        out = newcomers_of(folder) / f"{name}.safetensors"
    if out.exists() and not overwrite:
        raise UserError(f"'{out}' already exists; add --overwrite to replace it, or choose another --name or --out.")
    if out.exists() and folder.resolve() in out.resolve().parents and out.parent.name != ADAPTED:
        raise UserError(f"'{out}' belongs to the run, so a newcomer must not replace it; choose another --out.")
    progress = Progress(patience=PATIENCE)
    try:
        progress.doing(f"loading {folder}")
        run = finished_run(folder, progress.say)
        from bpfed.data.tabular.rows import read_rows
        from bpfed.runs.adapt import adapt as join

        x = y = preprocessor = None
        if rows is not None:
            read = read_rows(run.data, rows, name, progress.say, labelled=True, target=target)
            x, y, preprocessor = read.x, read.y, read.preprocessor
        progress.doing(f"adapting {name}")
        client = join(run.federation, x, y, steps=steps, name=name, preprocessor=preprocessor)
        before = join(run.federation, name=name, preprocessor=preprocessor)
        shown = _shown(before, client, x, y) if x is not None and y is not None else None
        client.save(out)
    finally:
        progress.close()
    if shown is not None:
        terminal.put(shown)
    if client.remark:
        progress.say(client.remark)
    if run.data.task_type.has_classes and any(client.examples) and not all(client.examples):
        missing = [label for label, count in zip(run.data.class_names, client.examples, strict=True) if not count]
        progress.say(
            f"It has no example of {quoted(missing)}, so it will rarely predict "
            f"{'that class' if len(missing) == 1 else 'those classes'}."
        )
    Console().print(f"Client '{name}': {out}", style="bold", soft_wrap=True)


def _shown(before: NewClient, after: NewClient, x: Tensor, y: Tensor) -> terminal.Table:
    """How many examples there are, and how sure the model was and is of them."""
    from bpfed.inference.predictive import Classified, Regressed

    data, preprocessor = after.run.data, after.run.data.preprocessor
    found = [client.predict(x, prepared=True) for client in (before, after)]
    title = f"{after.name}: how sure it is of the {text.many(len(y), 'example')} it has just learnt from"
    shown = terminal.table("", "examples", "before", "after", title=title, right=3)
    for k, label in enumerate(data.class_names if data.task_type.has_classes else ()):
        if after.examples[k]:
            sure = [float(f.probs[y == k, k].mean()) for f in found if isinstance(f, Classified)]
            shown.add_row(f"probability of '{label}'", str(after.examples[k]), *(f"{p:.2f}" for p in sure))
    if data.task_type.has_classes:
        spread = [float(f.entropy.mean()) for f in found if isinstance(f, Classified)]
        shown.add_row("uncertainty in nats", str(len(y)), *(f"{e:.2f}" for e in spread))
    elif not isinstance(found[0], Regressed):
        from bpfed.inference.labels import Labelled

        kind = "uncertainty in nats" if isinstance(found[0], Labelled) else "spread of the outputs"
        # The second of the numbers that every prediction has says how unsure it is.
        shown.add_row(kind, str(len(y)), *(f"{float(f.numbers[1].mean()):.2f}" for f in found))
    else:
        unit = 1.0 if preprocessor is None else preprocessor.target_scale
        numbers = [f for f in found if isinstance(f, Regressed)]
        error = [unit * float((f.mean - y).square().mean().sqrt()) for f in numbers]
        shown.add_row("RMSE", str(len(y)), *(text.typed(text.figure(e)) for e in error))
        spread = [unit * float(f.scale.mean()) for f in numbers]
        shown.add_row("predicted sd", str(len(y)), *(text.typed(text.figure(sd)) for sd in spread))
    return shown
