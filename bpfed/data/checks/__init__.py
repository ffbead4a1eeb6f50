"""What whoever trains on tables should know of them: findings, and sentences."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bpfed.data.tabular.table import Table


class Finding(NamedTuple):
    """Something in the files that is probably not meant as it would be taken.

    Attributes:
        file: The file it is in; empty: in none alone.
        column: Its column; empty: in none alone.
        row: The first such row, from 1; None: in none alone.
        what: What it is, as the end of a sentence that begins with the column.
        do: What to do, likewise after a semicolon.
        setting: The setting of ``[data]`` that would do it; empty: none does.
        entry: What to add to that setting.
        sure: Whether the entry is likely enough to be used without another look.
    """

    file: str
    column: str
    row: int | None
    what: str
    do: str
    setting: str = ""
    entry: str = ""
    sure: bool = True

    def __str__(self) -> str:
        where = f"Column '{self.column}' of '{self.file}'" if self.column else f"'{self.file}'"
        return f"{where} {self.what}; {self.do}."


def file_of(table: Table, client: str) -> str:
    """What a client's file is called; the client itself, where it has none of its own."""
    return Path(table.name).name if Path(table.name).stem.split(".")[0] == client.split(".")[0] else client
