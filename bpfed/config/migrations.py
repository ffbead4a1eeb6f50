"""What earlier versions have written or were given: settings that came later, were removed or renamed, states that changed."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bpfed._util.errors import UserError

#: Settings that had another name before 0.10, by table. Old names are accepted, with a word on the new one, until 0.11.
RENAMED: dict[str, dict[str, str]] = {
    "run": {"softness": "calibration_temperature", "rehearsals": "calibrate"},
    "method": {
        "path": "max_lr_epochs",
        "reach": "max_round_lr_steps",
        "span": "max_total_lr_steps",
        "rise": "max_temperature_factor",
        "anchor": "mean_precision",
        "unseen": "unseen_pseudocount",
    },
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
    for table in RENAMED:
        if isinstance(own := found.get(table), dict):
            if table == "method" and own.get("name") not in _RECIPES:
                continue
            new = dict.fromkeys(RENAMED[table].values())
            found[table] = current_settings(
                table, own, {name: None for name in (*own, *new) if name not in RENAMED[table]}
            )
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
