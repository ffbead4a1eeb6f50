"""A site's worker: stays up between rounds, data loaded and steps traced, and answers what its Flower app hands on.

Flower starts a new process for every message. That process only passes the message on to here, over a socket in the
site's own folder, so a round costs neither the start of torch nor the loading of data.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from bpfed._util.errors import UserError
from bpfed.deploy import logs

_KINDS: dict[str, type] = {"config": ConfigRecord, "metric": MetricRecord}


def to_bytes(record: RecordDict) -> bytes:
    """A header in JSON, its length before it, then the arrays' own bytes end to end."""
    head: dict[str, Any] = {}
    blobs: list[bytes] = []
    for name, part in record.items():
        if isinstance(part, ArrayRecord):
            arrays = {key: [a.dtype, list(a.shape), a.stype, len(a.data)] for key, a in part.items()}
            blobs += [a.data for a in part.values()]
            head[name] = ["array", arrays]
        else:
            kind = "config" if isinstance(part, ConfigRecord) else "metric"
            head[name] = [kind, dict(part)]
    text = json.dumps(head).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *blobs])


class Unreadable(ValueError):
    """Bytes that `to_bytes` did not write."""


def from_bytes(data: bytes) -> RecordDict:
    """What `to_bytes` wrote.

    Raises:
        Unreadable: It did not write this.
    """
    try:
        return _record(data)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from error


def _record(data: bytes) -> RecordDict:
    start = 8 + int.from_bytes(data[:8], "little")
    record = RecordDict()
    for name, (kind, parts) in json.loads(data[8:start]).items():
        if kind == "array":
            arrays = {}
            for key, (dtype, shape, stype, length) in parts.items():
                arrays[key] = Array(dtype, tuple(shape), stype, data[start : start + length])
                start += length
            record[name] = ArrayRecord(arrays)
        else:
            record[name] = _KINDS[kind](parts)
    return record


def send(link: socket.socket, data: bytes) -> None:
    """Write one message, its length before it."""
    link.sendall(len(data).to_bytes(8, "little") + data)


def receive(link: socket.socket) -> bytes:
    """Read one message; empty where the other side has nothing to say any more."""
    length = int.from_bytes(_exactly(link, 8), "little")
    return _exactly(link, length)


def _exactly(link: socket.socket, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = link.recv(min(count, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


# --- The worker -------------------------------------------------------------------------------------------------------


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
            send(link, data)
            found = receive(link)
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
    from bpfed.deploy.site.site import open_site

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
                    if asked := receive(link):
                        send(link, to_bytes(site.answer(from_bytes(asked))))
                except OSError as error:
                    logs.warn(say, f"The answer could not be handed over ({error}).")
                except Unreadable as error:
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
