"""A site's worker: stays up between rounds, data loaded and steps traced, and answers what its Flower app hands on.

Flower starts a new process for every message. That process only passes the message on to here, over a socket in the
site's own folder, so a round costs neither the start of torch nor the loading of data.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bpfed.errors import UserError
from bpfed.flower import frame

SOCKET = "worker.sock"
#: A file that says that the worker has not answered in time.
STUCK = "worker.stuck"
#: Longest path of a socket that systems allow.
LONGEST = 100


def address(folder: Path) -> str:
    """Where a site's worker listens."""
    path = str(folder / SOCKET)
    # A longer path has a name in the abstract name space (Linux) instead.
    return path if len(path) < LONGEST else f"\0bpfed-{os.getuid()}-{hash_of(path)}"


def hash_of(path: str) -> str:
    """A short word for a path."""
    return hashlib.blake2b(path.encode(), digest_size=16).hexdigest()


def listens(folder: Path) -> bool:
    """Whether a worker of this site can be asked."""
    with socket.socket(socket.AF_UNIX) as link:
        try:
            link.connect(address(folder))
        except OSError:
            return False
    return True


def ask(folder: Path, data: bytes, timeout: float) -> bytes | None:
    """What the worker of a site answers; None: there is no worker.

    Raises:
        TimeoutError: It did not answer in time, or went away.
    """
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(timeout)
        until = time.monotonic() + timeout
        while True:
            try:
                link.connect(address(folder))
                break
            except FileNotFoundError:
                return None
            except ConnectionRefusedError:  # it is being started again
                if time.monotonic() > until:
                    raise TimeoutError("The site's worker did not come back.") from None
                time.sleep(0.2)
        frame.send(link, data)
        try:
            found = frame.receive(link)
        except ConnectionError:
            found = b""
        except TimeoutError:
            (folder / STUCK).touch()  # whoever keeps the worker starts another
            raise
        if not found:
            raise TimeoutError("The site's worker went away.")
        return found


def work(folder: Path, say: Callable[[str], None], data: str | None = None) -> None:
    """Answer messages, one after the other, until the end of the process. For ``data`` see `open_site`."""
    from bpfed.flower.deployed import open_site

    site = open_site(folder, say, data)
    place = address(folder)
    if not place.startswith("\0"):
        Path(place).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen(4)
        say(f"Site '{site.name}' is ready.")
        while True:
            link, _ = listening.accept()
            with link:
                try:
                    if asked := frame.receive(link):
                        frame.send(link, frame.to_bytes(site.answer(frame.from_bytes(asked))))
                except OSError as error:
                    say(f"The answer could not be handed over ({error}).")


def main() -> None:
    """``python -m bpfed.flower.worker FOLDER [DATA]``."""

    def say(sentence: str) -> None:
        print(f"bpfed: {sentence}", file=sys.stderr, flush=True)

    try:
        work(Path(sys.argv[1]), say, *sys.argv[2:3])
    except UserError as error:
        say(str(error))
        sys.exit(2)


if __name__ == "__main__":
    main()
