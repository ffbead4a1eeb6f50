"""What earlier versions have written or were given: settings that came later, were removed or renamed, states that changed."""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from bpfed._util.errors import UserError

#: Settings that had another name before 0.10, by table. Old names are accepted, with a word on the new one, until 0.11.
RENAMED: dict[str, dict[str, str]] = {
    "run": {"softness": "calibration_temperature", "rehearsals": "calibrate"},
    "method": {},
}
#: Variants of methods in a comparison that had another name.
RENAMED_VARIANTS = {"softness": "calibrated"}
#: Keys of ``learnt.json``, ``summary.json`` and ``evaluation.json`` that had another name.
RENAMED_KEYS = {"softness": "calibration_temperature", "fitted_softness": "fitted_temperature"}
#: What a subclass of `Method` may define that had another name.
RENAMED_IN_METHODS = {
    "numbers": "stackable",
    "hyper": "hparams",
    "hyper_in": "hparams_for_run",
    "rows_of_numbers": "hparam_rows",
    "structure": "trace_key",
    "counting": "needs_class_counts",
}
#: With what a site marked the states of calibration pilots.
OLD_PILOT = "rehearsal "

_RECIPES = ("bpfed-recipe", "bpfed-population")
#: By the version that brought a setting, for each method that has it: its value that does what was done before.
CAME: dict[str, dict[str, dict[str, Any]]] = {
    "0.3.0": {name: {"unseen_pseudocount": 0.0} for name in _RECIPES},
    "0.7.0": {"bpfed-population": {"max_temperature_factor": 1.0}},
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


def current_setting(table: str, name: str, value: Any) -> tuple[str, Any]:
    """A setting under its name of today, and its value as that has it; one that has kept its name is left alone."""
    if (table, name) == ("run", "rehearsals"):
        return "calibrate", "none" if str(value).strip() == "0" else f"pilot:{value}"
    return RENAMED[table].get(name, name), value


def current_settings(
    table: str, settings: Mapping[str, Any], known: Mapping[str, Any], say: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Settings under their names of today.

    Args:
        table: ``run`` or ``method``.
        settings: By name.
        known: The names there are today. An old name that is among them, or whose new one is not, is left alone.
        say: Called with a sentence for each that was renamed.

    Raises:
        UserError: A setting is given by both names.
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        new, converted = current_setting(table, name, value) if name in RENAMED[table] else (name, value)
        if new == name or name in known or new not in known:
            found[name] = value
            continue
        if new in settings:
            raise UserError(f"{table}.{name} is now {table}.{new}, and both are given; leave out {name}.")
        if say is not None:
            say(f"{name} is now {_shown(new, converted)}; the old name works until bpfed 0.11.")
        found[new] = converted
    return found


def _shown(name: str, value: Any) -> str:
    return f"{name} = {value}" if name == "calibrate" else name


def current_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a run folder, with the names of today in its table of the run and of the method."""
    found = dict(config)
    if isinstance(own := found.get("run"), dict):
        known = {name: None for name in (*own, *RENAMED["run"].values()) if name not in RENAMED["run"]}
        found["run"] = current_settings("run", own, known)
    if isinstance(own := found.get("method"), dict):
        found["method"] = without_constants(str(own.get("name")), own)
    return found


def current_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of a run folder with the keys of today."""
    return {RENAMED_KEYS.get(key, key): value for key, value in record.items()}


def accepts_old_names(table: str) -> Callable[[type[T]], type[T]]:
    """A decorator of a settings dataclass: old names of settings can still be given and read, with a `FutureWarning`."""

    def wrap(cls: type[T]) -> type[T]:
        init: Callable[..., None] = cls.__init__
        known = dict.fromkeys(getattr(cls, "__dataclass_fields__", {}))

        @functools.wraps(init)
        def accept(self: T, *given: Any, **settings: Any) -> None:
            init(self, *given, **current_settings(table, settings, known, lambda sentence: warn(sentence, 3)))

        cls.__init__ = accept  # type: ignore[method-assign, assignment]
        cls.__getattr__ = _old_setting(table)  # type: ignore[attr-defined]
        return cls

    return wrap


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


def _old_setting(table: str) -> Callable[[Any, str], Any]:
    def get(self: Any, name: str) -> Any:
        if name not in RENAMED[table]:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        new = "calibration_pilots" if name == "rehearsals" else RENAMED[table][name]
        value = getattr(self, new)
        warn(f"{name} is now {new}; the old name works until bpfed 0.11.", 2)
        return value

    return get


def old_attribute(old: str, new: str) -> Any:
    """A property that is an attribute under its old name, with a `FutureWarning`."""

    def get(self: Any) -> Any:
        warn(f"{type(self).__name__}.{old} is now {new}; the old name works until bpfed 0.11.", 2)
        return getattr(self, new)

    get.__doc__ = f"The old name of `{new}`."
    return property(get)


def old_method_names(cls: type) -> None:
    """Let a class of methods define or call what `RENAMED_IN_METHODS` lists by its old name, beside the new one.

    Each class has both, so that ``super()`` finds the same function by either name.
    """
    for old, new in RENAMED_IN_METHODS.items():
        if old in vars(cls):
            if new in vars(cls):
                raise TypeError(f"{cls.__name__} defines both {old} and {new}, its new name; leave out {old}.")
            warn(f"{cls.__name__}.{old} is now {new}; the old name works until bpfed 0.11.", 4)
            setattr(cls, new, vars(cls)[old])
        elif new in vars(cls):
            setattr(cls, old, vars(cls)[new])


def warn(sentence: str, level: int) -> None:
    """A `FutureWarning` where the caller of the caller is, ``level`` calls up."""
    warnings.warn(sentence, FutureWarning, stacklevel=level + 1)
