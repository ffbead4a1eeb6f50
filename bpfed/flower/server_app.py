"""The Flower app of the server. Its folder is named by `FOLDER` in the environment of the SuperLink."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from bpfed.errors import UserError
from bpfed.flower.ending import end_in_time

#: Variable of the environment that names the server's folder. It is the server's machine that decides where files go, not
#: whoever starts a run.
FOLDER = "BPFED_DEPLOY_SERVER"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds that are left."""
    from bpfed.flower.deployed import open_server
    from bpfed.flower.post import GridPost

    folder = os.environ.get(FOLDER)
    if not folder:
        raise RuntimeError(f"{FOLDER} is not set; start the server with 'bpfed deploy server'.")
    end_in_time()
    try:
        open_server(Path(folder), say).serve(GridPost(grid))
    except UserError as error:
        say(str(error))
        raise


def say(sentence: str) -> None:
    """To the server's log."""
    print(f"bpfed: {sentence}", file=sys.stderr, flush=True)
