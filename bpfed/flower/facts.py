"""What a site tells of its data, read at the server's door: nothing of it is believed that cannot be true of any data."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any, get_args

from bpfed.data.federated import Task
from bpfed.data.preparation import whole
from bpfed.data.summary import MOST_CODES, SPLIT, ColumnSummary, Summary
from bpfed.flower.message import LARGEST, MOST
from bpfed.flower.pattern import Refused, listed

#: More pixels than this are not counted without error.
COUNTED = 2**53
#: Axes that an input may have.
AXES = 4


def read_facts(text: str, site: str, ignore: Collection[str] = (), agreed: str = "") -> dict[str, Any]:
    """What a site tells of its data, as plain data: what `bpfed.flower.data.Source.facts` gives, and nothing more.

    Args:
        text: As it came, JSON.
        site: Who told it.
        ignore: Columns that are no inputs anywhere.
        agreed: SHA-256 of the preparation that all have agreed on, and then tell nothing of their columns; empty: none.

    Raises:
        Refused: It cannot be read, or cannot be true.
    """
    try:
        told = json.loads(text)
        if not _count(told["train"], 1):
            raise ValueError("train")
        if "preparation" in told:
            facts = {key: told[key] for key in ("preparation", "target", "train")}
            if not (isinstance(facts["preparation"], str) and isinstance(facts["target"], str)):
                raise ValueError("preparation")
        elif "summary" in told:
            summary, target = Summary.from_record(told["summary"]), told["target"]
            _check_summary(summary, site, target)
            facts = {"summary": summary.record(), "target": target, "train": told["train"]}
        else:
            facts = {key: told[key] for key in ("shape", "task", "classes", "train")}
            _check_part(facts)
    # Deeply nested lists are a RecursionError; what is no mapping has no keys, attributes or items.
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise Refused("what it sent about its data cannot be read.") from None
    if facts.get("preparation", "") != agreed:
        raise Refused(
            "it and the server have not agreed on the same preparation; give all the same file ('preparation' of "
            "deploy.toml)."
        )
    if "summary" in facts:
        _check_columns(summary, {target, SPLIT, *ignore})
    return facts


def _check_part(facts: dict[str, Any]) -> None:
    """A ValueError unless these are facts of a part of a named dataset."""
    shape = facts["shape"]
    if not (isinstance(shape, list) and 0 < len(shape) <= AXES and all(_count(n, 1) for n in shape)):
        raise ValueError("shape")
    if facts["task"] not in get_args(Task) or not _count(facts["classes"], 0):
        raise ValueError("task")


def _check_summary(summary: Summary, site: str, target: Any) -> None:
    """A ValueError unless these are numbers and words of a file of this site."""
    if summary.client != site or not isinstance(target, str) or not _count(summary.rows, 1):
        raise ValueError("client")
    for column in (summary.target, *summary.columns.values()):
        _check_column(column)
    codes = [column.levels for column in summary.columns.values() if not column.words and column.levels is not None]
    if not all(len(levels) <= MOST_CODES and all(map(whole, levels)) for levels in codes):
        raise ValueError("codes")
    if summary.shape is not None:
        if len(summary.shape) != 3 or not all(_count(n, 1) for n in summary.shape):
            raise ValueError("shape")
        if summary.columns.keys() != {f"channel {k}" for k in range(min(summary.shape[0], len(summary.columns) + 1))}:
            raise ValueError("channels")


def _check_column(column: ColumnSummary) -> None:
    if not (_count(column.count, 0, COUNTED) and _count(column.missing, 0, COUNTED) and type(column.words) is bool):
        raise ValueError("count")
    if not (_number(column.mean) and _number(column.squares) and column.squares >= 0.0):
        raise ValueError("mean")
    if column.levels is not None and not all(isinstance(word, str) for word in column.levels):
        raise ValueError("levels")


def _check_columns(summary: Summary, left_out: set[str]) -> None:
    """Refuse columns that nobody may have as inputs: one site's word would make all others use theirs."""
    if strange := sorted(left_out & summary.columns.keys()):
        raise Refused(
            f"what it sent about its data has {listed(strange)} among the inputs; that is left out everywhere."
        )


def _count(value: Any, least: int, most: int = MOST) -> bool:
    return type(value) is int and least <= value <= most


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) <= LARGEST
