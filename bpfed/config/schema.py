"""What a configuration may say: its tables, and the fields of each with type, default and description.

The fields are those of the classes that the code itself uses (`Settings`, `DataSettings`, the methods), so a TOML file,
the command's flags, their help and the Python arguments cannot come apart. Nothing here needs torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import Field
from pydantic.fields import FieldInfo

from bpfed._util.errors import UserError, unknown
from bpfed.config.migrations import constant, current_config
from bpfed.config.registry import PREFIX
from bpfed.config.settings import FIELDS, HIDDEN, DataSettings, Settings, is_union

#: The tables whose fields are always the same; those of ``[method]`` are the chosen method's.
TABLES: dict[str, type] = {"data": DataSettings, "run": Settings}

#: Settings that are lists in a file, and flags that may be given several times, with what separates their entries.
LISTS = {
    **dict.fromkeys(("data.ignore", "data.missing", "data.rename", "data.convert", "data.dates", "data.text"), ","),
    "data.map": ";",
}

#: Rounds of every run of a comparison, where nothing else is said.
ROUNDS = 30

#: Where a run's folder of tables is, for whoever goes on with it from elsewhere.
PLACE = "place"

#: What a run notes of itself in its ``config.toml`` beside its settings; None: a whole table.
RECORDED: dict[str, tuple[str, ...] | None] = {"bpfed": (), "data": ("protocol", "fingerprint", PLACE), "model": None}

#: Where things are is not part of what is computed: these are flags, never keys.
PLACES = {
    "data_dir": "--data-dir",
    "out": "--out",
    "resume": "--resume",
    "overwrite": "--overwrite",
    "back_to": "--back-to",
}


def changed(settings: Settings, changes: Mapping[str, Any], fixed: Collection[str] = ()) -> Settings:
    """The settings with single ones given by name; those of ``fixed`` cannot be.

    Raises:
        UserError: There is no such setting, or it is not of its type.
    """
    every = fields_of(Settings).keys()
    known, of_data = every - set(fixed), fields_of(DataSettings).keys() - every
    for name in changes:
        if name in of_data:
            raise UserError(f"'{name}' is a data setting; pass it to bpfed.data.load() and use the result as data=.")
        if name not in known:
            if (such := _of_methods(name)) and name not in every:
                raise UserError(
                    f"'{name}' is a setting of the method; give it to the method itself, such as "
                    f"method=bpfed.methods.{such}({name}={changes[name]!r})."
                )
            if why := constant("bpfed-recipe", name):
                raise UserError(f"The recipe's {why}")
            raise unknown("setting", name, known)
    return replace(settings, **changes)


def _of_methods(name: str) -> str:
    """The class of a method that has this setting; empty: none has."""
    from bpfed.methods import METHODS  # here, since it imports torch, which whoever made a mistake has imported

    return next((cls.__name__ for cls in METHODS.values() if name in fields_of(cls)), "")


def fields_of(settings: type) -> dict[str, FieldInfo]:
    """The fields of a settings class, by name: of a method, a dataclass, described as its docstrings do."""
    if settings in FIELDS:
        return FIELDS[settings]
    kinds, about = get_type_hints(settings), _attributes(settings)
    return {
        f.name: FieldInfo.from_annotated_attribute(
            kinds[f.name], Field(None if f.default is MISSING else f.default, description=about.get(f.name))
        )
        for f in fields(settings)
    }


def _attributes(settings: type) -> dict[str, str]:
    """What the ``Attributes`` of a class and its bases say of each field."""
    found: dict[str, str] = {}
    for cls in reversed(settings.__mro__):
        _, _, entries = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")
        for entry in re.split(r"\n(?= {4}\S)", "\n" + entries):
            name, colon, text = entry.strip().partition(":")
            if colon and name.isidentifier():
                found[name] = text
    return found


def about(field: FieldInfo) -> str:
    """What a setting does, as plain text."""
    return plain(" ".join((field.description or "").split()))


def short(field: FieldInfo) -> str:
    """What a setting may be, in a word, for tables and help."""
    kind: Any = field.annotation
    kind = next(k for k in get_args(kind) if k is not NoneType) if is_union(kind) else kind
    if get_origin(kind) is Literal:
        return "|".join(str(choice) for choice in get_args(kind))
    return {int: "INT", float: "NUMBER", bool: "true|false", str: "TEXT"}.get(kind, "VALUE")


def plain(text: str) -> str:
    """A docstring's text without its markup: code in quotes, references bare."""
    return re.sub(r"`([^`]+)`", r"\1", re.sub(r"``([^`]+)``", r"'\1'", text))


#: What changes how a run is computed, or where, and nothing of what comes out: it may go on with other settings.
HOW = frozenset(
    {
        *("run.chunk", "run.memory", "run.compile", "run.checkpoints", "run.baselines", "run.cache_features"),
        f"data.{PLACE}",
    }
)


def _moved(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether the same tables are in another place."""
    places = {str(config.get("data.name", "")) for config in (old, new)}
    prints = {config.get("data.fingerprint") for config in (old, new)}
    return len(places) == 2 and len(prints) == 1 and None not in prints and all(p.startswith(PREFIX) for p in places)


def differences(there: dict[str, Any], here: dict[str, Any], places: tuple[str, str] = ("there", "here")) -> list[str]:
    """What differs between two configurations, a clause for each setting; not what merely follows from others.

    ``places`` is where each is, in words.
    """
    old, new = (_usual() | _flat(current_config(config)) for config in (there, here))
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name) and name not in HOW]
    if _moved(old, new):
        names.remove("data.name")
    if "method.name" in names:
        names = [name for name in names if name == "method.name" or not name.startswith("method.")]
    follow = {f"{table}.{key}" for table, keys in RECORDED.items() for key in keys or ()}
    names = [name for name in names if name not in follow and not name.startswith("model.")] or names
    first, second = places
    return [f"{name} is {_shown(old.get(name))} {first} and {_shown(new.get(name))} {second}" for name in names]


def _usual() -> dict[str, Any]:
    """The default settings of a run: an older configuration may not have known some of them."""
    usual = {f"run.{name}": field.default for name, field in fields_of(Settings).items()}
    return {name: value for name, value in usual.items() if value is not None} | {"run.hidden": HIDDEN}


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    return {
        (f"{part}.{name}" if name else part): value
        for part, table in config.items()
        for name, value in (table.items() if isinstance(table, dict) else [("", table)])
    }


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)
