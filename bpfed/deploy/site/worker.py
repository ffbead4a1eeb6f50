"""A site's worker: stays up between rounds, data loaded and steps traced, and answers what its Flower app hands on.

Flower starts a new process for every message. That process only passes the message on to here, over a socket in the
site's own folder, so a round costs neither the start of torch nor the loading of data.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bpfed._util.errors import UserError
from bpfed.deploy import logs
from bpfed.deploy.protocol import codec

SOCKET = "worker.sock"
#: A file that says that the worker has not answered in time.
STUCK = "worker.stuck"
#: Longest path of a socket that systems allow, in bytes.
LONGEST = 100
#: Seconds that whoever asks has to send its message, and to take the answer; others wait meanwhile.
PATIENCE = 60.0


@contextlib.contextmanager
def address(folder: Path) -> Iterator[str]:
    """Where a site's worker listens, in the site's own folder: who cannot go in there cannot ask it."""
    path = str(folder / SOCKET)
    if len(os.fsencode(path)) < LONGEST:
        yield path
        return
    # A longer path is reached through a handle of the folder, so that the socket is in there all the same.
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET}"
    finally:
        os.close(handle)


def listens(folder: Path) -> bool:
    """Whether a worker of this site can be asked."""
    with socket.socket(socket.AF_UNIX) as link:
        try:
            with address(folder) as place:
                link.connect(place)
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
                with address(folder) as place:
                    link.connect(place)
                break
            except FileNotFoundError:
                return None
            except ConnectionRefusedError:  # it is being started again
                if time.monotonic() > until:
                    raise TimeoutError("The site's worker did not come back.") from None
                time.sleep(0.2)
        try:
            codec.send(link, data)
            found = codec.receive(link)
        except ConnectionError:
            found = b""
        except TimeoutError:
            with contextlib.suppress(OSError):  # on a full disk; its words would go to the server
                (folder / STUCK).touch()  # whoever keeps the worker starts another
            raise
        if not found:
            raise TimeoutError("The site's worker went away.")
        return found


def work(folder: Path, say: Callable[[str], None], data: str | None = None) -> None:
    """Answer messages, one after the other, until the end of the process. For ``data`` see `open_site`."""
    from bpfed.deploy.folders import open_site

    site = open_site(folder, say, data)
    (folder / SOCKET).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        with address(folder) as place:
            with contextlib.suppress(OSError):  # before there is a file, which not every system can do
                os.fchmod(listening.fileno(), 0o600)
            try:
                listening.bind(place)
            except FileNotFoundError:  # no handles as files on this system
                raise UserError(f"'{folder}' has too long a path for a socket; move the site's folder.") from None
        (folder / SOCKET).chmod(0o600)
        listening.listen(4)
        say(f"Site '{site.name}' is ready.")
        while True:
            link, _ = listening.accept()
            with link:
                link.settimeout(PATIENCE)
                try:
                    if asked := codec.receive(link):
                        codec.send(link, codec.to_bytes(site.answer(codec.from_bytes(asked))))
                except OSError as error:
                    logs.warn(say, f"The answer could not be handed over ({error}).")
                except codec.Unreadable as error:
                    logs.warn(say, f"A message could not be read ({error}).")


def main() -> None:
    """``python -m bpfed.deploy.site.worker FOLDER [DATA]``."""
    try:
        work(Path(sys.argv[1]), logs.to_terminal(None), *sys.argv[2:3])
    except UserError as error:
        with contextlib.suppress(OSError):  # a log on a full disk
            print(f"bpfed: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
