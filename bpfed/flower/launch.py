"""A command of Flower's that ends as a whole: ``python -m bpfed.flower.launch flower-supernode ARGUMENTS``.

One answer of the SuperLink that is an error ends a SuperNode's main loop, but not its process, which then does nothing
any more; and the SuperExec of a SuperLink or SuperNode may end without the other noticing. What has ended can be
started again by a supervisor, what only looks alive cannot.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import sys
import threading
import time
import traceback
from typing import Any, ClassVar

#: What Flower starts beside a SuperLink or a SuperNode, for all that they have processes for.
PART = "flower-superexec"
#: Seconds that an orderly end has, in which the part ends first.
GRACE = 10.0
#: Milliseconds that the SuperLink waits for its database while a message is written; Flower's 5 s are too few for a
#: large one.
BUSY = "60000"
#: Exit code of a process whose part or main loop has ended.
INCOMPLETE = 70


class Noted(subprocess.Popen[Any]):
    """Notes the part's process when it is started."""

    parts: ClassVar[list[subprocess.Popen[Any]]] = []

    def __init__(self, args: Any, *rest: Any, **more: Any) -> None:
        super().__init__(args, *rest, **more)
        if isinstance(args, list) and args and os.path.basename(str(args[0])) == PART:
            self.parts.append(self)


def watch_parts(grace: float = GRACE) -> None:
    """From now on, end this process soon after a part of it has ended."""
    subprocess.Popen = Noted  # type: ignore[misc]

    def watch() -> None:
        while all(part.poll() is None for part in list(Noted.parts)):
            time.sleep(1.0)
        time.sleep(grace)
        _end(f"{PART} has ended", INCOMPLETE)

    threading.Thread(target=watch, daemon=True).start()


def be_patient() -> None:
    """Let the SuperLink wait longer for its database. Where this Flower has no such setting, nothing changes."""
    with contextlib.suppress(ImportError, AttributeError):
        from flwr.supercore import sql_mixin

        sql_mixin.SQLITE_PRAGMAS = tuple(  # type: ignore[assignment]
            (name, BUSY if name == "busy_timeout" else value) for name, value in sql_mixin.SQLITE_PRAGMAS
        )


def main() -> None:
    """Run the command; the process ends with it, whatever threads it leaves."""
    name, sys.argv = sys.argv[1], sys.argv[1:]
    (command,) = importlib.metadata.entry_points(group="console_scripts", name=name)
    run = command.load()
    be_patient()
    watch_parts()
    try:
        run()
    except SystemExit as ended:
        _end("", ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    except BaseException:
        traceback.print_exc()
        _end("", 1)
    _end("its main loop is over", INCOMPLETE)


def _end(why: str, code: int) -> None:
    if why:
        print(f"bpfed: {os.path.basename(sys.argv[0])} ends, as {why}.", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
