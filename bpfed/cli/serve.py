"""``bpfed serve``: a client's model as a small scoring service; ``bpfed export``: as a file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bpfed._util.console import Console
from bpfed._util.errors import UserError, quoted
from bpfed.cli.predict import SHOWN, find, finished_run, known
from bpfed.cli.terminal import PATIENCE

EXAMPLE = "Example: bpfed serve runs/first --client cleveland --port 8000"
EXPORT_EXAMPLE = "Example: bpfed export runs/first --client cleveland --format onnx --out cleveland.onnx"

Folder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")]
Name = Annotated[str | None, typer.Option(help="Whose model: a client of the run, or a newcomer.", show_default=False)]


def export(
    folder: Folder,
    client: Name = None,
    format: Annotated[str, typer.Option(help="onnx, torch (a program of torch.export) or safetensors.")] = "onnx",
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default=False)] = None,
    how: Annotated[
        str, typer.Option(help="sample (weight draws, as predict does) or single-pass (moment propagation).")
    ] = "sample",
    draws: Annotated[
        int | None, typer.Option(help="Weight draws inside. \\[default: as in evaluation]", show_default=False)
    ] = None,
    level: Annotated[float, typer.Option(help="Level of the sets or intervals inside.")] = 0.9,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file in --out.")] = False,
) -> None:
    """Write one client's model to a file that other programs use without bpfed.

    A graph (onnx, torch) takes raw inputs and gives what 'bpfed predict' does. It is compared with it on a few rows
    first, and not written if it differs.

    safetensors holds the distribution of the weights alone.
    """
    from bpfed.callbacks.progress import Progress

    progress = Progress(patience=PATIENCE)
    try:
        if out is None:
            raise UserError("Choose the file to write, with --out FILE.")
        progress.doing(f"loading {folder}")
        run = finished_run(folder, progress.say)
        if client is None:
            raise UserError(f"Choose whose model to use, with --client, from: {quoted(known(run), SHOWN)}.")
        progress.doing(f"exporting the model of {client}")
        who = find(run, client)
        path = who.export(format, out, how=how, draws=draws, level=level, overwrite=overwrite)  # type: ignore[arg-type]
    finally:
        progress.close()
    checked = "" if format == "safetensors" else ", the same as predict on rows that were tried"
    Console().print(f"Model of '{client}' as {format}{checked}: {path}", style="bold", soft_wrap=True)
    if run.data.preprocessor is not None:
        Console().print(
            "It holds means, scales and words of the training rows, also those of a single row: whoever gets the file can read them.",
            soft_wrap=True,
        )


def serve(
    folder: Folder,
    client: Name = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8000,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. \\[default: 127.0.0.1]", show_default=False)
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with a token that requests must show; needed with --host.", show_default=False),
    ] = None,
    level: Annotated[float, typer.Option(help="Level of sets and intervals.")] = 0.9,
    abstain: Annotated[
        float | None, typer.Option(help="Mark rows whose label is less probable than this.", show_default=False)
    ] = None,
) -> None:
    """Answer predictions of one client's model over HTTP until Ctrl-C.

    POST /predict takes rows as JSON, GET /schema says what they have, and / is a page to try one by hand.

    It listens on this machine alone unless --host is given. Values of requests are not logged.
    """
    from bpfed.callbacks.progress import Progress
    from bpfed.serve import service

    service.check_installed()
    if host is not None and token_file is None:
        raise UserError(
            f"With --host {host} others reach the service, so it needs a token; give a file with one, with --token-file."
        )
    if not 0.0 < level < 1.0:
        raise UserError(f"--level is {level:g}, but must be above 0 and below 1, such as 0.9.")
    if abstain is not None and not 0.0 <= abstain <= 1.0:
        raise UserError(f"--abstain is {abstain:g}, but must be a probability, such as 0.9.")
    token = None if token_file is None else service.read_token(token_file)
    progress = Progress(patience=PATIENCE)
    try:
        progress.doing(f"loading {folder}")
        run = finished_run(folder, progress.say)
        if client is None:
            raise UserError(f"Choose whose model to use, with --client, from: {quoted(known(run), SHOWN)}.")
        scored = service.Service(find(run, client), level, abstain)
    finally:
        progress.close()
    where = host or service.LOOPBACK

    def ready(taken: int) -> None:
        shown = f"[{where}]" if ":" in where else where
        Console().print(f"Model of '{client}': http://{shown}:{taken} (Ctrl-C ends it)", style="bold", soft_wrap=True)

    service.serve(scored, where, port, token, ready)
