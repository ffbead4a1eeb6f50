"""The Flower app of the server. Its folder is named by `FOLDER` in the environment of the SuperLink."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from bpfed.errors import UserError

#: Variable of the environment that names the server's folder. It is the server's machine that decides where files go, not
#: whoever starts a run.
FOLDER = "BPFED_DEPLOY_SERVER"

#: Seconds that this process has to end by itself once its SuperLink is gone.
GRACE = 10.0

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds that are left."""
    from bpfed.flower.deployed import open_server
    from bpfed.flower.post import GridPost

    folder = os.environ.get(FOLDER)
    if not folder:
        raise RuntimeError(f"{FOLDER} is not set; start the server with 'bpfed deploy server'.")
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    try:
        open_server(Path(folder), say).serve(GridPost(grid))
    except UserError as error:
        say(str(error))
        raise


def end_with(parent: int, grace: float = GRACE) -> None:
    """End this process after its parent has ended: Flower means to, but may wait for the lost SuperLink for good."""
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(grace)
    os._exit(1)


def say(sentence: str) -> None:
    """To the server's log."""
    print(f"bpfed: {sentence}", file=sys.stderr, flush=True)
