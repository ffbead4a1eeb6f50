"""What a configuration may say: its tables, and the fields of each with type, default and description.

The schema is read off the dataclasses that the code itself uses (`Settings`, the methods, `DataSettings`), so a TOML
file, the command's flags, their help and the Python arguments cannot come apart. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from bpfed._util.errors import UserError, unknown
from bpfed.config.migrations import constant, current_config, current_settings, warn
from bpfed.config.registry import PREFIX, TaskName
from bpfed.config.settings import HIDDEN, Settings, check_types, is_union, words


@dataclass(frozen=True)
class DataSettings:
    """Which data, and how it is distributed over clients.

    Attributes:
        name: Name of the dataset (see ``bpfed data list``), or ``folder:PATH`` for your own tables.
        clients: Number of clients; None: the dataset's own.
        partition: How examples are distributed: ``groups``, ``random:3``, ``dirichlet:0.3``, ``shards:2`` or ``iid``;
            None: ``groups``, but tables come with their own clients.
        test_fraction: Fraction of each client's examples held out for testing; None: 0.5, or 0.3 for tables.
        seed: Random seed of the partition and the test split; None: the run's seed.
        target: For tables: the column to predict; None: the one called target, label or y.
        client_column: For a single table: the column that identifies the client.
        task: For tables: the kind of target; None: text and up to 20 distinct whole numbers are classes.
        standardise: For tables: scale numbers by statistics of all clients (``federated``), by each client's own
            (``local``), or not at all (``none``).
        ignore: For tables: columns that are not inputs, separated by commas.
        missing: For tables: words that stand for no value, beside blanks, ``?``, ``NA`` and the like, separated by
            commas; ``age=999`` is one in that column alone.
        codes: For tables: use columns with 3 to 10 different whole numbers as numbers with one more input per value
            (``both``), or as numbers alone (``number``).
        holdout: For tables: hold out the last rows of each client by a column of numbers or ISO dates
            (``time:COLUMN``), or whole groups of rows (``group:COLUMN``), for the test and wherever training rows are
            held out; None: rows drawn at random.
    """

    name: str = "digits"
    clients: int | None = None
    partition: str | None = None
    test_fraction: float | None = None
    seed: int | None = None
    target: str | None = None
    client_column: str | None = None
    task: TaskName | None = None
    standardise: Literal["federated", "local", "none"] = "federated"
    ignore: str | None = None
    missing: str | None = None
    codes: Literal["both", "number"] = "both"
    holdout: str | None = None


#: The tables whose fields are always the same; those of ``[method]`` are the chosen method's.
TABLES: dict[str, type] = {"data": DataSettings, "run": Settings}

#: Settings that are lists in a file, and flags that may be given several times or with commas.
LISTS = frozenset({"data.ignore", "data.missing"})

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


@dataclass(frozen=True)
class Field:
    """One setting.

    Attributes:
        name: Its key.
        kind: Its type.
        default: Its value when it is not set.
        about: What it does, in words.
    """

    name: str
    kind: Any
    default: Any
    about: str

    @property
    def optional(self) -> bool:
        """Whether it may be None, that is, left to the program."""
        return NoneType in get_args(self.kind)

    @property
    def allowed(self) -> str:
        """What it may be, in words: ``a whole number``, ``'equal' or 'size'``."""
        return words(self.kind)

    @property
    def short(self) -> str:
        """What it may be, in a word, for tables and help."""
        kinds = [k for k in (get_args(self.kind) if is_union(self.kind) else (self.kind,)) if k is not NoneType]
        if get_origin(kinds[0]) is Literal:
            return "|".join(str(choice) for choice in get_args(kinds[0]))
        return {int: "INT", float: "NUMBER", bool: "true|false", str: "TEXT"}.get(kinds[0], "VALUE")


def changed(settings: Settings, changes: Mapping[str, Any], fixed: Collection[str] = ()) -> Settings:
    """The settings with single ones given by name; those of ``fixed`` cannot be.

    Raises:
        UserError: There is no such setting, or it is not of its type.
    """
    every = {f.name for f in dataclasses.fields(Settings)}
    changes = current_settings("run", changes, dict.fromkeys(every), lambda sentence: warn(sentence, 4))
    known, of_data = every - set(fixed), {f.name for f in dataclasses.fields(DataSettings)} - every
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
    found = dataclasses.replace(settings, **changes)
    check_types(found)
    return found


def _of_methods(name: str) -> str:
    """The class of a method that has this setting; empty: none has."""
    from bpfed.methods import METHODS  # here, since it imports torch, which whoever made a mistake has imported

    return next((cls.__name__ for cls in METHODS.values() if name in fields_of(cls)), "")


def fields_of(settings: type) -> dict[str, Field]:
    """The fields of a settings dataclass, by name, described as its docstrings do."""
    kinds, about = get_type_hints(settings), descriptions(settings)
    return {
        f.name: Field(f.name, kinds[f.name], None if f.default is MISSING else f.default, about.get(f.name, ""))
        for f in dataclasses.fields(settings)
    }


def descriptions(settings: type) -> dict[str, str]:
    """What the ``Attributes`` of a class and its bases say of each field, as plain text."""
    found: dict[str, str] = {}
    for cls in reversed(settings.__mro__):
        _, _, entries = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")
        for entry in re.split(r"\n(?= {4}\S)", "\n" + entries):
            name, colon, text = entry.strip().partition(":")
            if colon and name.isidentifier():
                found[name] = plain(" ".join(text.split()))
    return found


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
    return {f"run.{f.name}": f.default for f in fields(Settings) if f.default is not None} | {"run.hidden": HIDDEN}


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    return {
        (f"{part}.{name}" if name else part): value
        for part, table in config.items()
        for name, value in (table.items() if isinstance(table, dict) else [("", table)])
    }


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)
