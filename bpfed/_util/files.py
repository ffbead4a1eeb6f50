"""Files that are written, or downloaded, whole or not at all; and the names of those of a run and of a deployment."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from bpfed._util.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress

#: What a file is called while it is being written; a killed process may leave one behind.
PART = ".part"


@contextmanager
def whole(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Write a file under another name beside ``path``, and give it that name only when all of it is on the disk.

    After a crash at any moment ``path`` is the old file or the new one. Until then only its owner can read it. Folders
    that are missing are made, but not for a way that leads up again: another file may be there once they exist, and who
    asked whether there is one was told no.
    """
    if ".." in path.parts and not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "its folder does not exist", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_whole(path: Path, content: bytes | str, mode: int = 0o644) -> None:
    """Write a file whole or not at all (see `whole`).

    Raises:
        UserError: It cannot be written.
    """
    with writing(path), whole(path, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def append_line(path: Path, line: str) -> None:
    """Add a line and wait until it is on the disk; if it cannot be added whole, none of it is."""
    data = line.encode() + b"\n"
    with writing(path):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        before = os.fstat(handle).st_size
        try:
            while data:
                data = data[os.write(handle, data) :]
            os.fsync(handle)
        except BaseException:
            os.ftruncate(handle, before)
            raise
        finally:
            os.close(handle)


def is_part(path: Path) -> bool:
    """Whether this is a file that a killed process did not finish."""
    return path.name.startswith(".") and path.suffix == PART


def clear_parts(folder: Path) -> None:
    """Remove what killed processes did not finish. Only for who holds the folder's lock."""
    with writing(folder):
        for path in [p for p in folder.iterdir() if is_part(p)] if folder.is_dir() else []:
            path.unlink(missing_ok=True)


def lock(folder: Path) -> int:
    """Take a folder for this process alone, until the handle given back is closed or the process ends, however it does.

    Raises:
        UserError: Another process has it.
    """
    with writing(folder):
        handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(
            f"Another process is writing to '{folder}'; wait for it to finish, or choose another --out."
        ) from None
    except OSError:
        pass  # some network file systems have no locks; then there is only the user's care
    return handle


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in one sentence why a file could not be written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"The disk is full: '{path}' cannot be written; free some space, then repeat the command (for a run, "
                "with --resume)."
            ) from error
        raise UserError(f"'{path}' cannot be written ({error.strerror}); choose another location.") from error


@contextmanager
def when_full(path: Path, then: str) -> Iterator[None]:
    """Say of a disk that is full what there is to do in a deployment, where nothing goes on with ``--resume``.

    Args:
        path: What is written inside.
        then: How the sentence ends after ``free some space``, such as ``and run it again``.
    """
    try:
        yield
    except UserError as error:  # see `writing`
        if getattr(error.__cause__, "errno", 0) not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"The disk is full: '{path}' cannot be written; free some space, {then}.") from error.__cause__


def sha256(content: bytes | str) -> str:
    """The SHA-256 hash of a file's content, as ``sha256sum`` prints it."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def from_json(content: bytes | str) -> Any:
    """What a file of JSON says.

    Raises:
        ValueError: It is not JSON of UTF-8 text, is nested too deeply, has NaN or an infinite number, or has half of a
            character, as in ``"\\ud800"``, which no file and no message can hold.
    """
    text = content if isinstance(content, str) else content.decode("utf-8")
    try:
        found = json.loads(text, parse_constant=_no_number, parse_float=_number)
        check_characters(text, found)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def check_characters(text: str, found: Any) -> None:
    """Raise a `ValueError` if what was found in a text of JSON has half of a character."""
    try:
        if _HALF.search(text):
            json.dumps(found, ensure_ascii=False).encode()  # two halves in a row are a character
    except UnicodeEncodeError:
        raise ValueError("it has half of a character") from None


def from_toml(content: bytes | str) -> dict[str, Any]:
    """What a file of TOML says.

    Raises:
        ValueError: It is not TOML of UTF-8 text, or is nested too deeply.
    """
    text = content if isinstance(content, str) else content.decode("utf-8")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


#: What may be half of a character, as JSON writes it, or already is one.
_HALF = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def _number(text: str) -> float:
    value = float(text)
    return value if abs(value) != float("inf") else _no_number(text)


def renamed(record: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A record with other names for some of its keys, in the same order: files keep the names that they began with."""
    return {names.get(name, name): value for name, value in record.items()}


def to_json(value: Any) -> str:
    """JSON for people: indented, no NaN (null instead)."""
    return json.dumps(_finite(value), indent=2, ensure_ascii=False) + "\n"


def to_json_line(value: Any) -> str:
    """JSON on one line, no NaN (null instead)."""
    return json.dumps(_finite(value), ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def to_toml(tables: dict[str, Any]) -> str:
    """TOML of scalars, lists of scalars and one level of tables; None is left out."""
    plain = [f"{k} = {_toml(v)}" for k, v in tables.items() if not isinstance(v, dict) and v is not None]
    parts = ["\n".join(plain)] if plain else []
    for name, table in tables.items():
        if isinstance(table, dict):
            rows = [f"{k} = {_toml(v)}" for k, v in table.items() if v is not None]
            parts.append("\n".join([f"[{name}]", *rows]))
    return "\n\n".join(parts) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return toml_text(str(value))


def toml_text(words: str) -> str:
    """Words as TOML writes them, in quotes; it allows one control character less than JSON."""
    return json.dumps(words, ensure_ascii=False).replace("\x7f", "\\u007f")


# --- A download: one file, fetched whole and checked, or not there at all ---------------------------------------------


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
    from http.client import HTTPException  # these take a tenth of a second
    from urllib.request import urlopen

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
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from bpfed._util.console import Console

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


# --- Names of files and folders: of a run folder, and of the parts of a deployment ------------------------------------


#: The files of a run folder.
CONFIG, METRICS, EVALUATION, SUMMARY, REPORT = (
    "config.toml",
    "metrics.jsonl",
    "evaluation.json",
    "summary.json",
    "report.html",
)
#: What was learnt in calibration pilots, and their folder until the run begins.
LEARNT, PILOTS = "learnt.json", "pilots"
#: What a run must know to predict without its data: of the data, the network, and how predictions are calibrated.
DATA, MODEL, CALIBRATION = "data.json", "model.safetensors", "calibration.json"
#: Hashes of the files above that predictions and reports are made from.
MANIFEST = "manifest.json"
#: Folders of what goes on: the federation after its last rounds, and the clients' own states.
CHECKPOINT, STATES = "checkpoint", "state"

#: The file of settings of a part of a deployment, beside its `CONFIG`.
PLAN = "deploy.toml"
#: The preprocessing that all parts of a deployment have agreed on, where they have.
PREPROCESSING = "preprocessing.json"
#: The server's folder in that of a deployment; the run folder of the server, and of a site's own model.
SERVER, RUN = "server", "run"
#: What each exchange cost, in the run folder of a server; no other run has such a file.
EXCHANGES = "exchanges.jsonl"


def of_run(folder: Path) -> Path:
    """The run folder that is meant: of a deployment or of a part of it, the one below; else the folder itself."""
    return next((place / RUN for place in (folder, folder / SERVER) if (place / PLAN).is_file()), folder)


def part(folder: Path) -> str:
    """Which part of a deployment a folder is, or is directly in: ``site`` or ``server``; empty: of none."""
    folder = folder.resolve()
    if (folder / EXCHANGES).is_file():
        return SERVER
    for place in (folder, folder.parent, folder / SERVER):
        if (path := place / PLAN).is_file():
            try:
                return "site" if from_toml(path.read_bytes()).get("site") else SERVER
            except (OSError, ValueError) as error:
                raise UserError(f"'{path}' cannot be read ({error}); fix it.") from error
    return ""
