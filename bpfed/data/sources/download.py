"""A download: one file, fetched whole and checked, or not there at all."""

from __future__ import annotations

import hashlib
import os
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from bpfed._util.console import Console
from bpfed._util.files import whole

CHUNK = 1 << 16
TIMEOUT = 30.0  # seconds without a byte


class DownloadError(Exception):
    """Why a file could not be fetched, as the part of a sentence that follows "because"."""


class Remote(NamedTuple):
    """A file on the net.

    Attributes:
        url: Where it is.
        size: Its length in bytes; a longer answer is cut off, so that no server can fill the disk.
        sha256: What its bytes hash to, or None where the caller checks what is inside it.
    """

    url: str
    size: int
    sha256: str | None


def download(remote: Remote, path: Path) -> None:
    """Fetch ``remote`` into ``path``, with a progress bar on a terminal.

    Raises:
        DownloadError: The file did not arrive, or not as it should be; nothing is left at ``path`` then.
    """
    name = remote.url.rsplit("/", 1)[-1]
    try:
        # The answer first: where there is none, no folder is made for it.
        with urlopen(remote.url, timeout=TIMEOUT) as answer, whole(path) as file, _bar(name, remote.size) as bar:
            digest, size = hashlib.sha256(), 0
            while chunk := answer.read(CHUNK):
                size += len(chunk)
                if size > remote.size:
                    break
                digest.update(chunk)
                file.write(chunk)
                bar.update(bar.task_ids[0], completed=size)
            if size != remote.size or (remote.sha256 is not None and digest.hexdigest() != remote.sha256):
                raise DownloadError(f"{remote.url} sent different bytes from the original file's")
    except (OSError, HTTPException, ValueError) as error:
        why = str(error).strip("<>").removeprefix("urlopen error ")
        raise DownloadError(f"{remote.url} could not be fetched ({why})") from error


def _bar(name: str, size: int) -> Progress:
    # Off a terminal (logs, CI) a bar is noise; on one it goes to stderr, so that piped output stays clean.
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    bar.add_task(name, total=size)
    return bar


# --- The folders that dataset files are looked for in, and the one that downloads go to -------------------------------

DataDir = str | os.PathLike[str] | None


def cache() -> Path:
    """The user's own cache folder, where downloads go unless told otherwise."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "bpfed"


def roots(data_dir: DataDir = None) -> list[Path]:
    """Folders to search, in order: the one asked for, or else the one ``BPFED_DATA`` names and then the cache."""
    if data_dir is not None:
        # Only there: whoever names a folder does not want files of another one.
        return [Path(data_dir).expanduser()]
    named = os.environ.get("BPFED_DATA")
    return [*([Path(named).expanduser()] if named else []), cache()]


def destination(data_dir: DataDir = None) -> Path:
    """Where downloads are written. Never the folder of ``BPFED_DATA``: that is often shared and read-only."""
    return Path(data_dir).expanduser() if data_dir is not None else cache()
