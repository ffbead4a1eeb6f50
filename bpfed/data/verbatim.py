"""Verbatim: columns of a file as they are written there, to be copied and not to be learnt from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bpfed.data.table import ENDINGS


def verbatim(path: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The text of each cell of these columns, by name, of a file that was read before.

    Raises:
        UserError: There is no such column.
    """
    kind = ENDINGS.get(path.suffix.lower())
    if kind == "csv":
        from bpfed.data.csvfile import read_cells as read
    elif kind == "parquet":
        from bpfed.data.parquet import read_cells as read
    else:
        from bpfed.data.npz import read_cells as read
    return read(path, names)
