"""What runs of earlier versions have written: which settings of methods came later, and which were removed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bpfed.errors import UserError

_RECIPES = ("bpfed-recipe", "bpfed-population")
#: By the version that brought a setting, for each method that has it: its value that does what was done before.
CAME: dict[str, dict[str, dict[str, Any]]] = {"0.3.0": {name: {"unseen": 0.0} for name in _RECIPES}}
#: By the version that removed a setting: its value at which it did nothing.
WENT: dict[str, dict[str, dict[str, Any]]] = {"0.3.0": {name: {"bias_count": 0.0} for name in _RECIPES}}


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


def before(name: str) -> Any:
    """What a setting of a method was before it came, if that is not its default; None: nothing is known of it."""
    found = [values[name] for methods in CAME.values() for values in methods.values() if name in values]
    return found[0] if found else None


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
