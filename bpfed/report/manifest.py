"""The manifest of a run folder: a hash of each file that predictions and reports are made from.

    {"format": 1, "bpfed": "0.7.0", "run": "9f…", "files": {"config.toml": "…", …}, "copies": {…}, "sha256": "…"}

``files`` are SHA-256 hashes, as ``sha256sum`` prints them. ``copies`` are the small files that nothing else could
restore. ``sha256`` is the hash of all the rest of the manifest. ``run`` is a hash of what the run began with. Every
checkpoint carries it, together with hashes of its own files and of the metrics up to its round, so a round needs no new
manifest.

Files are written in an order that a kill at any moment leaves readable or resumable: a manifest never lists a file that
is about to be replaced. It is first written without the file, then the file is, then the manifest with it. A finished
run is one whose manifest lists its summary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bpfed import __version__
from bpfed._util.errors import UserError
from bpfed._util.files import (
    CHECKPOINT,
    CONFIG,
    LEARNT,
    MANIFEST,
    METRICS,
    SUMMARY,
    from_json,
    from_toml,
    part,
    sha256,
    to_json,
    write_whole,
)
from bpfed._util.text import plain

FORMAT = 1
#: What a checkpoint says of the run it belongs to.
IDENTITY = "identity"
#: The files of which the manifest has a copy.
COPIED = (CONFIG, LEARNT)


@dataclass(frozen=True)
class Manifest:
    """What the files of a run must be.

    Attributes:
        run: A word for this run, which its checkpoints carry.
        files: The hash of each file, by name.
        copies: The text of the small ones, by name.
        bpfed: The version that wrote it.
    """

    run: str
    files: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    bpfed: str = __version__

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a run folder; None: the run is of a version that wrote none.

        Raises:
            UserError: It is damaged or has been lost.
        """
        path = folder / MANIFEST
        try:
            found = from_json(path.read_bytes())
            if not isinstance(found, dict) or found.pop("sha256", None) != _digest(found):
                raise ValueError("its own hash is another")
            words = [found["run"], found["bpfed"]]
            for listed in (found["files"], found["copies"]):
                if not isinstance(listed, dict):
                    raise ValueError("what it lists is no table")
                words += listed.values()
            if not all(isinstance(word, str) for word in words) or type(found["format"]) is not int:
                raise ValueError("a value is of another type")
            if found["format"] != FORMAT:
                raise UserError(
                    f"'{path}' has format {found['format']}, but this bpfed {__version__} reads {FORMAT}; use bpfed "
                    f"{plain(found['bpfed'], 20)} or later."
                )
            return cls(found["run"], found["files"], found["copies"], found["bpfed"])
        except FileNotFoundError:
            if not path.is_symlink() and not any(map(_has_identity, (folder / CHECKPOINT).glob("round-*.json"))):
                return None
            raise UserError(f"'{path}' is missing; {remedy(folder, 'write it again')}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"'{path}' is damaged ({_why(error)}); {remedy(folder, 'write it again')}") from error

    @classmethod
    def lenient(cls, folder: Path) -> Manifest | None:
        """The same for whoever can write it again: None also where it is damaged or lost."""
        try:
            return cls.read(folder)
        except UserError:
            return None

    def write(self, folder: Path) -> Manifest:
        """Write it, whole or not at all, unless it is there already."""
        record: dict[str, Any] = {
            "format": FORMAT,
            "bpfed": self.bpfed,
            "run": self.run,
            "files": dict(sorted(self.files.items())),
            "copies": dict(sorted(self.copies.items())),
        }
        content = to_json({**record, "sha256": _digest(record)})
        if _bytes(folder / MANIFEST) != content.encode():
            write_whole(folder / MANIFEST, content)
        return self

    def listing(self, contents: Mapping[str, bytes | str]) -> Manifest:
        """The manifest with these files, by name, as they are to be."""
        copies = {n: c if isinstance(c, str) else c.decode() for n, c in contents.items() if n in COPIED}
        return replace(
            self,
            files=self.files | {name: sha256(content) for name, content in contents.items()},
            copies=self.copies | copies,
        )

    def without(self, names: Iterable[str]) -> Manifest:
        """The manifest without these files; what is copied stays."""
        gone = set(names)
        return replace(self, files={name: own for name, own in self.files.items() if name not in gone})

    def put(self, folder: Path, contents: Mapping[str, bytes | str]) -> Manifest:
        """Write those of these files that are not so already, in their order, and list them all."""
        wanted = self.listing(contents)
        changed = [name for name, own in contents.items() if _hash(folder / name) != sha256(own)]
        if changed and any(name in self.files for name in changed):
            self.without(changed).write(folder)
        for name in changed:
            write_whole(folder / name, contents[name])
        return wanted.write(folder)

    def sound(self, folder: Path, name: str) -> bool:
        """Whether a file is what the manifest says."""
        return name in self.files and _hash(folder / name) == self.files[name]

    def check(self, folder: Path, names: Iterable[str]) -> None:
        """Raise a `UserError` for the first of these files that is not what the manifest says."""
        for name in names:
            if name == LEARNT and name not in self.files and name not in self.copies:
                continue  # there were no calibration pilots
            if not self.sound(folder, name):
                raise self._changed(folder, name)

    def _changed(self, folder: Path, name: str) -> UserError:
        path = folder / name
        if (there := _bytes(path)) is None:
            return UserError(f"'{path}' is missing or cannot be read; {remedy(folder, 'write it again', name)}")
        if name == CONFIG and (differs := _edited(self.copies.get(CONFIG, ""), there)):
            return UserError(
                f"'{path}' has been changed since the run wrote it ({differs}), but a run keeps the settings it began "
                f"with; {remedy(folder, 'restore it', name)} (to train another run with the changed file: bpfed run "
                f"{path} --out NEW)"
            )
        what = "empty" if not there else "damaged, or of another run"
        return UserError(f"'{path}' is {what}: {MANIFEST} has another hash; {remedy(folder, 'write it again', name)}")


def identity(config: str | bytes, data: str | bytes, learnt: str | bytes = "") -> str:
    """A word for a run, of the contents of its ``config.toml``, ``data.json`` and ``learnt.json``."""
    return sha256("".join(sha256(content) for content in (config, data, learnt)))[:32]


def finished(folder: Path) -> bool:
    """Whether the run in a folder has been written to its end."""
    if not (folder / SUMMARY).is_file():
        return False
    manifest = Manifest.lenient(folder)
    return manifest is None or SUMMARY in manifest.files


def remedy(folder: Path, mend: str, name: str = MANIFEST) -> str:
    """What to do about a file, as the end of a sentence; ``mend`` is what resuming does to it."""
    if name == METRICS:
        return "put it back from a copy, or train again with --overwrite."
    if part(folder):
        return "put it back from a copy, or finish the deployment again, at whose end the site's model is written."
    return f"put it back from a copy, or {mend} with: bpfed run --out {folder} --resume"


def _digest(record: Mapping[str, Any]) -> str:
    return sha256(json.dumps(record, sort_keys=True, ensure_ascii=False))


def _has_identity(path: Path) -> bool:
    try:
        return IDENTITY in from_json(path.read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _bytes(path: Path) -> bytes | None:
    """The content of a file; None where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def _hash(path: Path) -> str | None:
    content = _bytes(path)
    return None if content is None else sha256(content)


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__


def _edited(written: str, there: bytes) -> str:
    """In words how a configuration has been edited; empty where that cannot be told."""
    from bpfed.config.schema import differences  # here, since that imports this

    try:
        return "; ".join(differences(from_toml(there), from_toml(written), ("there", "in the run")))
    except (ValueError, AttributeError):
        return ""
