"""The folders that dataset files are looked for in, and the one that downloads go to."""

from __future__ import annotations

import os
from pathlib import Path

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
