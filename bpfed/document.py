"""A TOML document that knows on which line each of its keys is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bpfed.errors import UserError
from bpfed.files import from_toml

#: Endings of files that hold data (those of `bpfed.data.table`, which takes seconds to import).
TABLES = (".csv", ".tsv", ".parquet", ".npz")


@dataclass(frozen=True)
class Document:
    """A TOML file as it was read.

    Attributes:
        path: Where it is; None for no file at all.
        text: Its text.
        content: What it says.
    """

    path: Path | None
    text: str
    content: dict[str, Any]

    @classmethod
    def read(cls, path: Path | None, text: str | None = None) -> Document:
        """Read a file, or say in one sentence why it cannot be; ``text`` is what to take for its content."""
        if path is None:
            return cls(None, "", {})
        if text is not None:
            return cls(path, text, from_toml(text))
        if os.path.isdir(path) or (path.suffix.lower() in TABLES and os.path.exists(path)):
            raise UserError(_of_data(path))
        try:
            text = path.read_text(encoding="utf-8")
            return cls(path, text, from_toml(text))
        except FileNotFoundError:
            raise UserError(f"There is no configuration file '{path}'; check the path.") from None
        except OSError as error:
            raise UserError(
                f"The configuration file '{path}' cannot be read ({error.strerror}); check its path and permissions."
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(f"The configuration file '{path}' is not UTF-8 text; save it as UTF-8.") from error
        except ValueError as error:
            raise UserError(f"The configuration file '{path}' is not valid TOML: {error}.") from error

    def where(self, *keys: str) -> str:
        """``'config.toml', line 7: ``, the place of a key, to begin a sentence with."""
        return f"'{self.path}', line {self.line(*keys)}: " if self.path is not None else ""

    def line(self, *keys: str) -> int:
        """The line (from 1) that a key or table begins on."""
        # The parser keeps no positions, but the beginning of a document is a document wherever a statement ends: the
        # key is in the first such beginning that has it, right after the last one that has not.
        lines, begins = self.text.split("\n"), 1
        for end in range(1, len(lines) + 1):
            try:
                part: Any = from_toml("\n".join(lines[:end]))
            except ValueError:
                continue
            for key in keys:
                part = part.get(key) if isinstance(part, dict) else None
            if part is not None:
                return begins
            begins = end + 1
        return begins


def _of_data(path: Path) -> str:
    """What to say where a folder, or a file of data, is given instead of a configuration."""
    if os.path.isfile(path / "config.toml"):
        return f"'{path}' is a run folder, not a configuration file; use the one in it, '{path / 'config.toml'}'."
    if path.is_dir():
        return f"'{path}' is a folder, not a configuration file; to train on the files in it, use --data folder:{path}."
    return (
        f"'{path}' is data, not a configuration file; use --data folder:{path.parent} for a folder with one file per "
        f"client, or --data folder:{path} --client-column COLUMN for a single file with all rows."
    )
