"""A configuration: what is computed, said in a TOML file, by flags, or both, and checked against one schema.

    [data]
    name = "digits"
    partition = "dirichlet:0.3"

    [method]
    name = "bpfed"
    temperature = 0.3

    [run]
    rounds = 30
    seed = 0

The ``config.toml`` of a run folder is such a file too. What the run noted there beside its settings (a fingerprint of
the data, the network and its first weights) is then a promise: a run from that file has the same, or does not begin.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo

from bpfed import __version__
from bpfed._util.errors import UserError, hint
from bpfed._util.files import from_toml
from bpfed.config.migrations import RENAMED, Gone, as_then, constant, current_settings, data_as_then, recipe_with
from bpfed.config.registry import DATASETS, FORMATS, METHODS, NETWORKS, PARTITIONS, PREFIX, RULES
from bpfed.config.schema import LISTS, PLACE, PLACES, RECORDED, fields_of
from bpfed.config.schema import TABLES as schema_TABLES
from bpfed.config.settings import DataSettings, Settings, words

if TYPE_CHECKING:
    from bpfed._util.files import DataDir
    from bpfed.data import FederatedData
    from bpfed.data.tabular.table import Table
    from bpfed.methods.base import AnyMethod


# --- A TOML document that knows on which line each of its keys is -----------------------------------------------------

#: Endings of files that hold data (those of `bpfed.data.tabular.table`, which takes seconds to import).
TABLES = tuple(f".{name}" for name in FORMATS.own)


@dataclass(frozen=True)
class Document:
    """A TOML file as it was read.

    Attributes:
        path: Where it is; None for no file at all.
        text: Its text.
        content: What it says.
    """

    path: Path | None
    text: str
    content: dict[str, Any]

    @classmethod
    def read(cls, path: Path | None, text: str | None = None) -> Document:
        """Read a file, or say in one sentence why it cannot be; ``text`` is what to take for its content."""
        if path is None:
            return cls(None, "", {})
        if text is not None:
            return cls(path, text, from_toml(text))
        if os.path.isdir(path) or (path.name.lower().endswith(TABLES) and os.path.exists(path)):
            raise UserError(_of_data(path))
        try:
            text = path.read_text(encoding="utf-8")
            return cls(path, text, from_toml(text))
        except FileNotFoundError:
            raise UserError(f"There is no configuration file '{path}'; check the path.") from None
        except OSError as error:
            raise UserError(
                f"The configuration file '{path}' cannot be read ({error.strerror}); check its path and permissions."
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(f"The configuration file '{path}' is not UTF-8 text; save it as UTF-8.") from error
        except ValueError as error:
            raise UserError(f"The configuration file '{path}' is not valid TOML: {error}.") from error

    def where(self, *keys: str) -> str:
        """``'config.toml', line 7: ``, the place of a key, to begin a sentence with."""
        return f"'{self.path}', line {self.line(*keys)}: " if self.path is not None else ""

    def line(self, *keys: str) -> int:
        """The line (from 1) that a key or table begins on."""
        # A run folder of before may have an old name.
        old = next(
            (name for name, new in RENAMED.items() if keys == ("run", new) and name in self.content["run"]), None
        )
        keys = keys if old is None else ("run", old)
        # The parser keeps no positions, but the beginning of a document is a document wherever a statement ends: the
        # key is in the first such beginning that has it, right after the last one that has not.
        lines, begins = self.text.split("\n"), 1
        for end in range(1, len(lines) + 1):
            try:
                part: Any = from_toml("\n".join(lines[:end]))
            except ValueError:
                continue
            for key in keys:
                part = part.get(key) if isinstance(part, dict) else None
            if part is not None:
                return begins
            begins = end + 1
        return begins


def _of_data(path: Path) -> str:
    """What to say where a folder, or a file of data, is given instead of a configuration."""
    if os.path.isfile(path / "config.toml"):
        return f"'{path}' is a run folder, not a configuration file; use the one in it, '{path / 'config.toml'}'."
    if path.is_dir():
        return f"'{path}' is a folder, not a configuration file; to train on the files in it, use --data folder:{path}."
    return (
        f"'{path}' is data, not a configuration file; use --data folder:{path.parent} for a folder with one file per "
        f"client, or --data folder:{path} --client-column COLUMN for a single file with all rows."
    )


#: The method where none is named, and the key that names one.
METHOD, METHOD_KEY = "bpfed-recipe", "method.name"


class Override(NamedTuple):
    """A setting from the command line.

    Attributes:
        key: Its full name, such as ``run.rounds``.
        text: Its value as it was typed.
        flag: What it was given by, such as ``--rounds``.
    """

    key: str
    text: str
    flag: str = "--set"


class ParsedOverride(NamedTuple):
    """An override, and the table and key that it sets."""

    table: str
    key: str
    override: Override


@dataclass(frozen=True)
class Config:
    """A checked configuration.

    Attributes:
        data: Which data.
        method: The method with its settings.
        run: How it is run.
        recorded: What an earlier run noted of itself, by table, to be met again.
        document: The file it came from.
        notes: What the user should know, in words.
        named: Whether the method is named, or one of its settings is given; else it may be chosen by the data.
    """

    data: DataSettings
    method: AnyMethod
    run: Settings
    recorded: dict[str, dict[str, Any]]
    document: Document
    notes: tuple[str, ...] = ()
    named: bool = True

    @property
    def data_seed(self) -> int:
        """The seed of the partition and the test split."""
        return self.run.seed if self.data.seed is None else self.data.seed

    @property
    def plugins(self) -> list[str]:
        """The packages that what is named here comes from, with their versions; none for what is of bpfed itself."""
        named = (
            (METHODS, self.method.name),
            (RULES, str(getattr(self.method, "rule", ""))),
            (NETWORKS, self.run.network),
            (DATASETS, self.data.name),
            (PARTITIONS, (self.data.partition or "").partition(":")[0]),
        )
        return sorted({package for known, name in named if (package := known.package(name)) is not None})

    def tables(self, data_dir: DataDir = None) -> dict[str, Table]:
        """The tables that are asked for, by client; none where the data are no tables."""
        from bpfed.data.datasets import is_table, tables

        if not is_table(self.data.name):
            return {}
        asked = self.data
        return tables(
            asked.name,
            client_column=asked.client_column,
            data_dir=data_dir,
            ignore=asked.ignore,
            missing=asked.missing,
            holdout=asked.holdout,
            input=asked.input,
            image_size=asked.image_size,
            **asked.recoding,
        )

    def load_data(
        self, data_dir: DataDir = None, read: Mapping[str, Table] | None = None, checked: bool = False
    ) -> FederatedData:
        """Load the data that is asked for.

        ``read`` are its tables, where they have been read already, and ``checked`` whether their columns have been checked.
        """
        from bpfed.data.datasets import is_table, load

        # The number that a run noted of its own tables is no request, and if it is another now, they have changed.
        noted = bool(self.recorded.get("data")) and is_table(self.data.name)
        data = load(
            self.data.name,
            clients=None if noted else self.data.clients,
            partition=self.data.partition,
            seed=self.data_seed,
            data_dir=data_dir,
            test_fraction=self.data.test_fraction,
            target=self.data.targets,
            client_column=self.data.client_column,
            task=self.data.task,
            standardise=self.data.standardise,
            ignore=self.data.ignore,
            missing=self.data.missing,
            codes=self.data.codes,
            holdout=self.data.holdout,
            input=self.data.input,
            image_size=self.data.image_size,
            **self.data.recoding,
            read=read,
            checked=checked,
        )
        if noted and self.data.clients not in (None, len(data)):
            raise UserError(
                f"'{self.data.name}' has changed since the run of '{self.document.path}' began, when it had "
                f"{self.data.clients} clients, not {len(data)}; restore it, or start a new run with another --out."
            )
        return data

    def confirm(self, made: Mapping[str, Any]) -> None:
        """Raise a `UserError` unless a run with configuration ``made`` is what the file's own run was.

        Args:
            made: What `Run.config` gives.
        """
        for table, noted in self.recorded.items():
            for key, value in noted.items():
                here = made[table].get(key)
                if here != value:
                    remedy = "line" if table == "data" else f"[{table}] table"
                    raise UserError(
                        f"{self.document.where(table, key)}{table}.{key} was {value!r} in the run this file is from, "
                        f"but is {here!r} here, so the run cannot be reproduced exactly or resumed; "
                        f"{'restore its files, or ' if table == 'data' else ''}delete the {remedy} to run anew anyway."
                    )


def read(path: Path | None = None, overrides: Sequence[Override] = (), text: str | None = None) -> Config:
    """Read a configuration; what is left out has its default, and overrides come before the file.

    ``text`` is taken for the content of the file, where it is known better than the file.

    Raises:
        UserError: Something in it is unknown or not allowed; names the file, the line and the key.
    """
    document = Document.read(path, text)
    tables = _tables(document)
    said = [ParsedOverride(*_split(o, _wanted_method(tables, overrides)), o) for o in overrides]
    schema = {table: fields_of(cls) for table, cls in schema_TABLES.items()}
    _check_values(said, schema)
    named = bool(tables["method"]) or any(s.table == "method" for s in said)
    name, notes = _method_name(document, tables, said)
    chosen = _method(name)
    schema["method"] = fields_of(chosen)
    if "bpfed" in document.content:
        tables["run"] = current_settings(tables["run"])
    recorded = _recorded(tables)
    place = recorded.get("data", {}).pop(PLACE, None)
    own = tables["data"].get("name")
    if recorded.get("data"):
        tables["data"] = data_as_then(tables["data"])
    _merged(tables, said, schema, document)
    if place is not None and own == tables["data"].get("name"):
        tables["data"]["name"] = _from_here(str(own), str(place))
    if not _repeats(said):
        recorded = {}
    values: dict[str, Any] = {
        table: {k: tuple(v) if isinstance(v, list) else v for k, v in keys.items()} for table, keys in tables.items()
    }
    return Config(
        DataSettings(**values["data"]),
        chosen(**values["method"]),
        Settings(**values["run"]),
        recorded,
        document,
        (*notes, *_noted(document)),
        named,
    )


def _method(name: str) -> type[AnyMethod]:
    from bpfed.methods import method  # here, since it imports torch, which takes seconds

    return method(name)


def _method_names() -> tuple[str, ...]:
    from bpfed.methods import names

    return names()


def _wanted_method(tables: Mapping[str, Mapping[str, Any]], overrides: Sequence[Override]) -> str:
    """The name of the method that is asked for, whether or not there is such a method."""
    named = [o.text for o in overrides if o.key == METHOD_KEY]
    return named[-1] if named else str(tables["method"].get("name", METHOD))


def _check_values(said: Sequence[ParsedOverride], schema: Mapping[str, Mapping[str, FieldInfo]]) -> None:
    """Check the values that need no method, before torch is imported."""
    for table, key, override in said:
        if key in schema.get(table, ()):
            _from_text(override, f"{table}.{key}", schema[table][key])


def _method_name(
    document: Document, tables: dict[str, dict[str, Any]], said: Sequence[ParsedOverride]
) -> tuple[str, list[str]]:
    """The method's name, taken out of its table, and notes; the table is as this version has it.

    It is emptied where the command line names another method than the file.
    """
    notes = []
    name = _wanted_method(tables, [s.override for s in said])
    named = any(s.override.key == METHOD_KEY for s in said)
    in_file = str(tables["method"].pop("name", METHOD))
    if name != in_file:
        if tables["method"]:
            notes.append(
                f"'{document.path}' configures {in_file}; its [method] table is ignored because of --method {name}."
            )
        tables["method"] = {}
    if name not in (methods := _method_names()):
        place = document.where("method", "name") if not named and document.path is not None else ""
        if (base := name.partition("+")[0]) in methods and base != name:
            raise UserError(
                f"{place}'{name}' is a variant, which only 'bpfed compare' accepts; use {base} and set what the "
                "variant changes (see the researcher's guide)."
            )
        if not named and "bpfed" in document.content:
            raise UserError(
                f"{place}the run of this file was trained with the method '{name}', which is not installed here; install "
                "the package that has it as a plug-in."
            )
        raise UserError(f"{place}Unknown method '{name}'; {hint(name, methods)}")
    # To name the method that the file has anyway changes none of its settings.
    if isinstance(written := document.content.get("bpfed"), str) and (tables["method"] or not named):
        try:
            tables["method"] = as_then(written, name, tables["method"])
        except Gone as gone:
            raise UserError(f"{document.where('method', gone.name)}{gone}") from None
    return name, notes


def _merged(
    tables: dict[str, dict[str, Any]],
    said: Sequence[ParsedOverride],
    schema: Mapping[str, Mapping[str, FieldInfo]],
    document: Document,
) -> None:
    """Check the file's tables against the schema, and put what the command line says over them."""
    for table, keys in tables.items():
        for key, value in keys.items():
            if why := _constant(table, key, value, schema):
                raise UserError(f"{document.where(table, key)}{why}")
            if key not in schema[table]:
                raise _unknown_key(document.where(table, key), table, key, schema)
        keys |= {k: _joined(v, LISTS[f"{table}.{k}"]) for k, v in keys.items() if f"{table}.{k}" in LISTS}
        keys |= _valid(table, keys, schema[table], document)
    for table, key, override in said:
        if override.key == METHOD_KEY:
            continue
        if why := _constant(table, key, override.text, schema):
            raise UserError(f"{override.flag}: {why}")
        if key not in schema[table]:
            raise _unknown_key(f"{override.flag}: ", table, key, schema)
        tables[table][key] = _from_text(override, f"{table}.{key}", schema[table][key])


def _repeats(said: Sequence[ParsedOverride]) -> bool:
    """Whether the file's own run is to be repeated: nobody changes its data, method, seed or network.

    Examples that are held back for calibration are none of those that a run trains on.
    """
    return not any(s.table != "run" or s.key in ("seed", "members", "network", "hidden", "calibration") for s in said)


def _noted(document: Document) -> list[str]:
    """What to say of a file that another version wrote."""
    version = document.content.get("bpfed", __version__)
    if version == __version__:
        return []
    return [f"'{document.path}' was written by bpfed {version}, but this is {__version__}; results may differ."]


def _tables(document: Document) -> dict[str, dict[str, Any]]:
    """The document's tables, empty where it has none."""
    tables: dict[str, dict[str, Any]] = {"data": {}, "method": {}, "run": {}}
    for name, value in document.content.items():
        where = document.where(name)
        if name in tables or name == "model":
            if not isinstance(value, dict):
                raise UserError(f"{where}'{name}' must be a table; write [{name}] on a line of its own.")
            tables[name] = dict(value)
        elif isinstance(value, dict):
            raise UserError(f"{where}unknown table [{name}]; {hint(name, ('data', 'method', 'run'))}")
        elif name not in RECORDED:
            raise _unknown_key(where, "", name, {table: fields_of(cls) for table, cls in schema_TABLES.items()})
    return tables


def _from_here(name: str, place: str) -> str:
    """The name of a run's folder of tables, from wherever this is called."""
    if not name.startswith(PREFIX) or Path(name.removeprefix(PREFIX)).expanduser().exists() or not Path(place).exists():
        return name
    return f"{PREFIX}{place}"


def _recorded(tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Take out of the tables what a run noted of itself."""
    found = {"model": tables.pop("model", {})}
    for table, keys in RECORDED.items():
        if keys and table in tables:
            found[table] = {key: tables[table].pop(key) for key in keys if key in tables[table]}
    return found


def _split(override: Override, method: str) -> tuple[str, str]:
    table, dot, key = override.key.partition(".")
    if not dot:
        raise no_prefix(override, method)
    if table not in ("data", "method", "run"):
        raise UserError(f"{override.flag}: unknown table '{table}'; {hint(table, ('data', 'method', 'run'))}")
    return table, key


def no_prefix(override: Override, method: str) -> UserError:
    """A `UserError` for a key without its table, with the table that has such a key.

    Args:
        override: What was given.
        method: Name of the method that is to be run.
    """
    key, schema = override.key, {table: fields_of(cls) for table, cls in schema_TABLES.items()}
    if method in _method_names():
        schema = {"method": fields_of(_method(method))} | schema
    found = [f"{table}.{key}" for table, fields in schema.items() if key in fields]
    advice = f"did you mean '{found[0]}'?" if found else "e.g. --set method.lr=0.01."
    return UserError(f"{override.flag}: '{key}' needs a prefix: data., method. or run.{';' if found else ','} {advice}")


def _constant(table: str, key: str, value: Any, schema: Mapping[str, Mapping[str, FieldInfo]]) -> str:
    """Why this cannot be set, if an earlier version's recipe had such a setting and it is a constant now."""
    known = schema[table]
    if table != "method" or (key in known and key != "sigma"):
        return ""
    why = constant(recipe_with(known), key, value)
    return f"method.{why}" if why else ""


def _unknown_key(where: str, table: str, key: str, schema: Mapping[str, Mapping[str, FieldInfo]]) -> UserError:
    inside = f" in [{table}]" if table else ""
    if key in PLACES:
        return UserError(f"{where}'{key}' is a location, not a setting; pass it as {PLACES[key]} instead.")
    if table == "run" and key in RENAMED:
        return UserError(f"{where}run.{key} is called run.{RENAMED[key]} since bpfed 0.10; use that name.")
    elsewhere = [f"{other}.{key}" for other, fields in schema.items() if other != table and key in fields]
    known = ["name", *schema[table]] if table else [f"{t}.{k}" for t, fields in schema.items() for k in fields]
    advice = f"did you mean '{elsewhere[0]}'?" if elsewhere else hint(key, known)
    return UserError(f"{where}unknown key '{key}'{inside}; {advice}")


def _valid(table: str, values: dict[str, Any], fields: Mapping[str, FieldInfo], document: Document) -> dict[str, Any]:
    """A table's values, checked; no type is converted (text is not a number)."""
    types: dict[str, Any] = {name: (field.annotation, field.default) for name, field in fields.items()}
    checker = create_model(table, __config__=ConfigDict(strict=True, allow_inf_nan=False), **types)
    try:
        checked = checker.model_validate(values)
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        raise _wrong(document.where(table, key), f"{table}.{key}", fields[key], values[key]) from None
    return {key: getattr(checked, key) for key in values}


def _from_text(override: Override, key: str, field: FieldInfo) -> Any:
    """What was typed, as the field's type."""
    text: Any = override.text
    if text.lower() == "none" and NoneType in get_args(field.annotation):
        return None
    if text.startswith("["):
        text = _parsed(text)
        separator = LISTS.get(key)
        text = text if separator is None else _joined(text, separator)
    kind: Any = field.annotation
    adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))
    try:
        return adapter.validate_python(text)
    except ValidationError:
        raise _wrong(f"{override.flag}: ", key, field, text) from None


def _joined(names: Any, separator: str) -> Any:
    """A list of columns as the one text that the setting is; anything else as it is."""
    listed = isinstance(names, list) and all(isinstance(name, str) and separator not in name for name in names)
    return separator.join(names) if listed else names


def _parsed(text: str) -> Any:
    try:
        return from_toml(f"value = {text}")["value"]
    except ValueError:
        return text


def _wrong(where: str, key: str, field: FieldInfo, given: Any) -> UserError:
    return UserError(f"{where}{key} is {given!r}, but must be {words(field.annotation)}.")
