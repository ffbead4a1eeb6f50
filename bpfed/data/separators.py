"""Separators in numbers: commas and points that may set off thousands, and would pass silently for decimal marks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

#: A number whose points can only set off thousands: there is a decimal comma too, or there are two of them.
GROUPED = re.compile(r"[+-]?\d{1,3}((\.\d{3})+,\d+|(\.\d{3}){2,})")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}[.,]\d{3}")
_SHORT = re.compile(r"^\s*[+-]?\d{1,3}\s*$", re.MULTILINE)
_LONG = re.compile(r"^\s*[+-]?\d{4,}\s*$", re.MULTILINE)


@dataclass
class Separators:
    """How the numbers of a column are written, of a file in which ``1,5`` is one and a half.

    Attributes:
        decimal: A cell with a comma that can only be a decimal mark, such as ``0,5``.
        comma: One with a comma that may set off thousands, such as ``1,234``.
        rounded: Whether such a one ends in 0, which a program that drops the last zeros of fractions would not write.
        short: Whether there are whole numbers below 1000.
        long: Whether there are whole numbers from 1000 on without a mark.
        point: A cell with a point that may set off thousands, such as ``1.234``.
        grouped: One with points that can only set off thousands, such as ``1.234,5``.
        fraction: Whether there is a point that can only be a decimal mark.
    """

    decimal: str | None = None
    comma: str | None = None
    rounded: bool = False
    short: bool = False
    long: bool = False
    point: str | None = None
    fraction: bool = False
    grouped: str | None = None

    def add(self, cells: Iterable[str]) -> None:
        """Look at more cells; at as few as tell something new, for a table may be long."""
        cells = list(cells)
        text = "\n".join(cells)
        if "," in text and self.decimal is None:
            for cell in dict.fromkeys(cell.strip() for cell in cells if "," in cell):
                if _THOUSANDS.fullmatch(cell):
                    self.comma = self.comma or cell
                    self.rounded |= cell.endswith("0")
                else:
                    self.decimal = self.decimal or cell
        if "." in text and not self.fraction:
            for cell in dict.fromkeys(cell.strip() for cell in cells if "." in cell):
                if GROUPED.fullmatch(cell):
                    self.grouped = self.grouped or cell
                elif _THOUSANDS.fullmatch(cell):
                    self.point = self.point or cell
                else:
                    self.fraction = True
        self.short = self.short or _SHORT.search(text) is not None
        self.long = self.long or _LONG.search(text) is not None

    @property
    def thousands(self) -> str | None:
        """A cell in which a comma sets off thousands, going by the column alone; None if there is none."""
        certain = self.rounded and self.short and not self.long and self.decimal is None
        return self.comma if certain else None


def misread(columns: Mapping[str, Separators]) -> list[str]:
    """Which columns have thousands that were read as fractions, as parts of a sentence that begins with "Column"."""
    found = [f"'{name}' has a comma for thousands ('{c.thousands}')" for name, c in columns.items() if c.thousands]
    decimals = [(name, c.decimal) for name, c in columns.items() if c.decimal is not None]
    for name, column in columns.items():
        if column.point is None or column.fraction:
            continue
        if column.grouped is not None:
            found.append(f"'{name}' has a point ('{column.point}') that sets off thousands, as in '{column.grouped}'")
        elif decimals:
            other, cell = decimals[0]
            found.append(f"'{name}' has a point ('{column.point}') where '{other}' has a decimal comma ('{cell}')")
    return found
