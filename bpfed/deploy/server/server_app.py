"""The Flower app of the server. Its folder is named by `SERVER_FOLDER` in the environment of the SuperLink."""

from __future__ import annotations

import os
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from bpfed._util.errors import UserError
from bpfed._util.processes import end_in_time
from bpfed.deploy import logs
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
    # Flower keeps what this process prints to itself (``flwr log``), so a file of the server's has it too.
    say = logs.to_parent(logs.ToFile(Path(folder) / LOG), one_line=True)  # sites' names of columns are in some
    try:
        open_server(Path(folder), say).serve(GridTransport(grid))
    except UserError as error:
        logs.fail(say, str(error))
        raise
