"""The Flower app of the server. Its folder is named by `SERVER_FOLDER` in the environment of the SuperLink."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from bpfed._util.errors import UserError
from bpfed._util.files import append_line
from bpfed._util.processes import end_in_time
from bpfed._util.text import plain
from bpfed.deploy.ops.supervise import SERVER_FOLDER

#: What the server says of a run, line by line.
LOG = "run.log"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds that are left."""
    from bpfed.deploy.folders import open_server
    from bpfed.deploy.protocol.transport import GridTransport

    folder = os.environ.get(SERVER_FOLDER)
    if not folder:
        raise RuntimeError(f"{SERVER_FOLDER} is not set; start the server with 'bpfed deploy server'.")
    end_in_time()

    def say(sentence: str) -> None:
        """Flower keeps what this process prints to itself (``flwr log``), so a file of the server's has it too."""
        sentence = plain(sentence)  # sites' names of columns are in some
        with contextlib.suppress(UserError, OSError):  # a full disk: what must be kept says so itself
            print(f"bpfed: {sentence}", file=sys.stderr, flush=True)
        with contextlib.suppress(UserError):
            append_line(Path(folder) / LOG, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}")

    try:
        open_server(Path(folder), say).serve(GridTransport(grid))
    except UserError as error:
        say(str(error))
        raise
