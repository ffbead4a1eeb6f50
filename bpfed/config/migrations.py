"""Migrations: settings of earlier versions that are new, were removed or renamed, and states that changed."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from bpfed._util.errors import UserError

#: Settings of a run that had another name before 0.10; run folders of before have them.
RENAMED = {"softness": "calibration_temperature", "rehearsals": "calibrate"}
#: Keys of ``learnt.json``, ``summary.json`` and ``evaluation.json`` that had another name.
RENAMED_KEYS = {"softness": "calibration_temperature", "fitted_softness": "fitted_temperature"}
#: With what a site marked the states of calibration pilots.
OLD_PILOT = "rehearsal "

_RECIPES = ("bpfed-recipe", "bpfed-population")
#: By the version that brought a setting, for each method that has it: its value that does what was done before.
CAME: dict[str, dict[str, dict[str, Any]]] = {
    "0.3.0": {name: {"unseen_pseudocount": 0.0} for name in _RECIPES},
    "0.7.0": {"bpfed-population": {"max_temperature_factor": 1.0}},
    "0.12.0": {"bpfed-adaptive": {"sigma_temperature": 1.0}},
}
#: By the version that removed a setting: its value at which it did nothing.
WENT: dict[str, dict[str, dict[str, Any]]] = {"0.3.0": {name: {"bias_count": 0.0} for name in _RECIPES}}

#: The version since which some settings of the recipes are constants of the class,
CONSTANT_SINCE = "0.10.0"
#: their values by method, and, where it is another, the name of the class's attribute.
CONSTANTS: dict[str, dict[str, Any]] = {
    "bpfed-recipe": {
        "sigma": 0.05,
        "bias_sigma": 1.0,
        "unseen_pseudocount": 1.0,
        "mean_precision": 10.0,
        "max_lr_epochs": 3.0,
        "max_round_lr_steps": 0.2,
        "max_total_lr_steps": 20.0,
        "max_temperature_factor": 1.0,
        "estimator": "local",
        "draws": 1,
        "newcomer_lr": 0.01,
    }
}
CONSTANTS["bpfed-population"] = CONSTANTS["bpfed-recipe"] | {
    "bias_sigma": 0.3,
    "mean_precision": 2.0,
    "max_lr_epochs": 4.0,
    "max_temperature_factor": 2.0,
}
ATTRIBUTES = {"sigma": "start_sigma", "mean_precision": "weight_decay"}
#: The temperature at which ``mean_precision`` has that value; their product is the constant.
TEMPERATURES = {"bpfed-recipe": 0.05, "bpfed-population": 0.1}
#: What these settings were called before 0.10.
FORMER = {
    "path": "max_lr_epochs",
    "reach": "max_round_lr_steps",
    "span": "max_total_lr_steps",
    "rise": "max_temperature_factor",
    "anchor": "mean_precision",
    "unseen": "unseen_pseudocount",
}

#: By the version that changed what a method keeps: the methods, whose earlier states cannot be used.
KEPT: dict[str, tuple[str, ...]] = {"0.6.0": ("fedsoul",)}


class Gone(UserError):
    """A run has a setting that is no longer there, or a constant now, with another value than what is done today.

    Attributes:
        name: Of the setting, as the run has it.
    """

    def __init__(self, name: str, what: str, written: str) -> None:
        super().__init__(f"method.{name} {what}; use this run with bpfed {written}, or train again.")
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
                raise Gone(name, f"was removed in bpfed {version}", written)
        now = CAME.get(version, {}).get(method, {}) | now
    if _number(written) < _number(CONSTANT_SINCE):
        now = without_constants(method, now)
        for name, value in now.items():
            if _constant(method, name, value):
                raise Gone(name, f"is {value} in this run, and {_constant(method, name, value)}", written)
    return now


def without_constants(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a method from before 0.10, without those that are constants now and had their value."""
    values, now = CONSTANTS.get(method, {}), dict(settings)
    temperature = settings.get("temperature", TEMPERATURES.get(method))
    for name, value in settings.items():
        new = FORMER.get(name, name)
        if new not in values or isinstance(value, bool):
            continue
        usual = values[new]
        if new == "mean_precision" and isinstance(temperature, int | float):
            usual = usual * TEMPERATURES[method] / temperature if temperature else value
        if math.isclose(value, usual, rel_tol=1e-6) if isinstance(value, int | float) else value == usual:
            del now[name]
            now |= {"sigma": True} if name == "sigma" else {}
    return now


def recipe_with(names: Collection[str]) -> str:
    """Which recipe has settings of these names: the name of the method, or nothing."""
    if "head_gain" not in names:
        return ""
    return "bpfed-population" if "head_rate" in names else "bpfed-recipe"


def constant(method: str, name: str, value: Any = None) -> str:
    """Why a setting cannot be given to a recipe any more, as a sentence; empty: it can be, or never could.

    Args:
        method: Its name.
        name: Of the setting.
        value: What it is to be, as text or as it is. A number is no value of ``sigma``, which is a switch now.
    """
    if not (why := _constant(method, name, value)):
        return ""
    attribute = ATTRIBUTES.get(FORMER.get(name, name), FORMER.get(name, name))
    kind = "Population" if method == "bpfed-population" else "Recipe"
    return f"{name} {why}; leave it out, or set {attribute} in a subclass of bpfed.methods.{kind}."


def _constant(method: str, name: str, value: Any) -> str:
    """What became of a setting that is a constant now, as the end of a sentence; empty: it is none."""
    values, new, version = CONSTANTS.get(method, {}), FORMER.get(name, name), CONSTANT_SINCE.removesuffix(".0")
    if new not in values:
        return ""
    if new == "sigma":
        switch = value is None or isinstance(value, bool) or not _is_number(value) or str(value) in ("0", "1")
        return (
            "" if switch else f"is true or false since bpfed {version}, and σ at the start a constant ({values[new]})"
        )
    if new == "mean_precision":
        return (
            f"is a constant since bpfed {version} ({values[new] * TEMPERATURES[method]:g} divided by the temperature)"
        )
    return f"is a constant since bpfed {version} ({values[new]})"


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


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


def came(method: str) -> dict[str, Any]:
    """The settings of a method that came with a later version, and their values that do what was done before."""
    return {name: value for methods in CAME.values() for name, value in methods.get(method, {}).items()}


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


# --- Names ------------------------------------------------------------------------------------------------------------

T = TypeVar("T")


def current_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that a run folder has noted, under their names of today."""
    found = {RENAMED.get(name, name): value for name, value in settings.items()}
    if "rehearsals" in settings:
        found["calibrate"] = "none" if settings["rehearsals"] == 0 else f"pilot:{settings['rehearsals']}"
    return found


def current_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a run folder, with the names of today in its table of the run and of the method."""
    found = dict(config)
    if isinstance(own := found.get("run"), dict):
        found["run"] = current_settings(own)
    if isinstance(own := found.get("method"), dict):
        found["method"] = without_constants(str(own.get("name")), own)
    return found


def current_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of a run folder with the keys of today."""
    return {RENAMED_KEYS.get(key, key): value for key, value in record.items()}


def refuses_constants(cls: type[T]) -> type[T]:
    """A decorator of a recipe: a setting that is a constant now is refused in a sentence that says so."""
    init: Callable[..., None] = cls.__init__
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]

    @functools.wraps(init)
    def accept(self: T, *given: Any, **settings: Any) -> None:
        for name, value in settings.items():
            if (name not in known or name == "sigma") and (why := constant(recipe_with(known), name, value)):
                raise UserError(why)
        init(self, *given, **settings)

    cls.__init__ = accept  # type: ignore[method-assign, assignment]
    return cls
