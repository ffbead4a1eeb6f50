"""What runs of earlier versions have written: settings that came later or were removed, states that changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bpfed._util.errors import UserError

_RECIPES = ("bpfed-recipe", "bpfed-population")
#: By the version that brought a setting, for each method that has it: its value that does what was done before.
CAME: dict[str, dict[str, dict[str, Any]]] = {
    "0.3.0": {name: {"unseen_pseudocount": 0.0} for name in _RECIPES},
    "0.7.0": {"bpfed-population": {"max_temperature_factor": 1.0}},
}
#: By the version that removed a setting: its value at which it did nothing.
WENT: dict[str, dict[str, dict[str, Any]]] = {"0.3.0": {name: {"bias_count": 0.0} for name in _RECIPES}}

#: By the version that changed what a method keeps: the methods, whose earlier states cannot be used.
KEPT: dict[str, tuple[str, ...]] = {"0.6.0": ("fedsoul",)}


class Gone(UserError):
    """A setting that did something was removed.

    Attributes:
        name: Of the setting.
    """

    def __init__(self, name: str, version: str, written: str) -> None:
        super().__init__(
            f"method.{name} was removed in bpfed {version}; use this run with bpfed {written}, or train again."
        )
        self.name = name


def as_then(written: str, method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a method that a run of version ``written`` has noted, as they would be noted now.

    Raises:
        Gone: One of them cannot be.
    """
    now = dict(settings)
    for version in sorted({*CAME, *WENT}, key=_number):
        if _number(written) >= _number(version):
            continue
        for name, idle in WENT.get(version, {}).get(method, {}).items():
            if name in now and now.pop(name) != idle:
                raise Gone(name, version, written)
        now = CAME.get(version, {}).get(method, {}) | now
    return now


def data_as_then(noted: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the data that a run has noted, as they would be noted now; those of tables alone have changed."""
    tables = "standardise" in noted
    return {**({"codes": "number"} if tables else {}), **noted}


def check_states(written: str, method: str, folder: Path) -> None:
    """Raise a `UserError` if the states of a method that version ``written`` has kept in a folder cannot be used."""
    for version, methods in KEPT.items():
        if method in methods and _number(written) < _number(version):
            raise UserError(
                f"The run in '{folder}' is of bpfed {written}, and {method} keeps other states since {version}; use it "
                f"with bpfed {written}, or train again."
            )


def before(name: str) -> Any:
    """What a setting of a method was before it came, if that is not its default; None: nothing is known of it."""
    found = [values[name] for methods in CAME.values() for values in methods.values() if name in values]
    return found[0] if found else None


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
