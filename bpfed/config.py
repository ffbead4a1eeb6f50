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

The ``config.toml`` of a run folder is such a file too. What the run noted there beside its settings (a fingerprint of the
data, the network and its first weights) is then a promise: a run from that file has the same, or does not begin.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

from bpfed import __version__
from bpfed.document import Document
from bpfed.engine.settings import Settings
from bpfed.errors import UserError, hint
from bpfed.schema import PLACES, RECORDED, TABLES, DataSettings, Field, fields_of
from bpfed.versions import Gone, as_then

if TYPE_CHECKING:
    from bpfed.data import FederatedData
    from bpfed.data.folder import DataDir
    from bpfed.methods import Method

#: Used where nothing is said.
METHOD = "bpfed-recipe"


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
    """

    data: DataSettings
    method: Method
    run: Settings
    recorded: dict[str, dict[str, Any]]
    document: Document
    notes: tuple[str, ...] = ()

    def load_data(self, data_dir: DataDir = None) -> FederatedData:
        """Load the data that is asked for."""
        from bpfed.data import load

        seed = self.run.seed if self.data.seed is None else self.data.seed
        return load(
            self.data.name,
            clients=self.data.clients,
            partition=self.data.partition,
            seed=seed,
            data_dir=data_dir,
            test_fraction=self.data.test_fraction,
            target=self.data.target,
            client_column=self.data.client_column,
            task=self.data.task,
            standardise=self.data.standardise,
            ignore=self.data.ignore,
        )

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
                        f"{self.document.where(table, key)}{table}.{key} was {value!r} in the run this file is from, but "
                        f"comes out as {here!r} here, so it would not be repeated; delete the {remedy} to run all the same."
                    )


def read(path: Path | None = None, overrides: Sequence[Override] = ()) -> Config:
    """Read a configuration; what is left out has its default, and overrides come before the file.

    Raises:
        UserError: Something in it is unknown or cannot be; names the file, the line and the key.
    """
    document = Document.read(path)
    tables = _tables(document)
    said = [(table, key, o) for o in overrides for table, key in [_split(o)]]
    schema = {table: fields_of(cls) for table, cls in TABLES.items()}
    for table, key, override in said:  # what needs no method is looked at before torch is imported, which takes seconds
        if key in schema.get(table, ()):
            _from_text(override, table, schema[table][key])
    from bpfed.methods import METHODS, method

    name = str(tables["method"].pop("name", METHOD))
    named = [o.text for table, key, o in said if (table, key) == ("method", "name")]
    notes = []
    if named and named[-1] != name:
        if tables["method"]:
            notes.append(f"The [method] table of '{path}' is {name}'s; with --method {named[-1]} it is left aside.")
        name, tables["method"] = named[-1], {}
    if name not in METHODS:
        place = document.where("method", "name") if not named and path is not None else ""
        if (base := name.partition("+")[0]) in METHODS and base != name:
            raise UserError(
                f"{place}'{name}' names a variant, and variants are for 'bpfed compare'; name {base}, and set what it stands for "
                "(see the researcher's guide)."
            )
        raise UserError(f"{place}Unknown method '{name}'; {hint(name, METHODS)}")

    if isinstance(written := document.content.get("bpfed"), str) and not named:
        try:
            tables["method"] = as_then(written, name, tables["method"])
        except Gone as gone:
            raise UserError(f"{document.where('method', gone.name)}{gone}") from None
    schema["method"] = fields_of(method(name))
    recorded = _recorded(tables)
    for table, keys in tables.items():
        for key in keys:
            if key not in schema[table]:
                raise _unknown_key(document.where(table, key), table, key, schema)
        keys |= _valid(table, keys, schema[table], document)
    for table, key, override in said:
        if (table, key) == ("method", "name"):
            continue
        if key not in schema[table]:
            raise _unknown_key(f"{override.flag}: ", table, key, schema)
        tables[table][key] = _from_text(override, table, schema[table][key])

    # Whoever changes the data, the method, the seed or the network does not mean to repeat the file's run.
    if any(table != "run" or key in ("seed", "members", "hidden") for table, key, _ in said):
        recorded = {}
    version = document.content.get("bpfed", __version__)
    if version != __version__:
        notes.append(f"'{path}' was written by bpfed {version} and this is {__version__}; figures may differ.")
    values: dict[str, Any] = {
        table: {k: tuple(v) if isinstance(v, list) else v for k, v in keys.items()} for table, keys in tables.items()
    }
    return Config(
        DataSettings(**values["data"]),
        method(name)(**values["method"]),
        Settings(**values["run"]),
        recorded,
        document,
        tuple(notes),
    )


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
            raise _unknown_key(where, "", name, {table: fields_of(cls) for table, cls in TABLES.items()})
    return tables


def _recorded(tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Take out of the tables what a run noted of itself."""
    found = {"model": tables.pop("model", {})}
    for table, keys in RECORDED.items():
        if keys and table in tables:
            found[table] = {key: tables[table].pop(key) for key in keys if key in tables[table]}
    return found


def _split(override: Override) -> tuple[str, str]:
    table, dot, key = override.key.partition(".")
    if not dot:
        advice = "write it as in --set method.lr=0.01, with data, method or run."
        if override.key in fields_of(Settings):
            advice = f"did you mean 'run.{override.key}'?"
        raise UserError(f"{override.flag}: '{override.key}' names no table; {advice}")
    if table not in ("data", "method", "run"):
        raise UserError(f"{override.flag}: unknown table '{table}'; {hint(table, ('data', 'method', 'run'))}")
    return table, key


def _unknown_key(where: str, table: str, key: str, schema: Mapping[str, Mapping[str, Field]]) -> UserError:
    inside = f" in [{table}]" if table else ""
    if key in PLACES:
        return UserError(f"{where}'{key}' says where, not what, so it is no key; give it as the flag {PLACES[key]}.")
    elsewhere = [f"{other}.{key}" for other, fields in schema.items() if other != table and key in fields]
    known = ["name", *schema[table]] if table else [f"{t}.{k}" for t, fields in schema.items() for k in fields]
    advice = f"did you mean '{elsewhere[0]}'?" if elsewhere else hint(key, known)
    return UserError(f"{where}unknown key '{key}'{inside}; {advice}")


def _valid(table: str, values: dict[str, Any], fields: Mapping[str, Field], document: Document) -> dict[str, Any]:
    """A table's values as their types have them; no type is bent (a text is no number)."""
    types: dict[str, Any] = {f.name: (f.kind, f.default) for f in fields.values()}
    checker = create_model(table, __config__=ConfigDict(strict=True, allow_inf_nan=False), **types)
    try:
        checked = checker.model_validate(values)
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        raise _wrong(document.where(table, key), table, fields[key], values[key]) from None
    return {key: getattr(checked, key) for key in values}


def _from_text(override: Override, table: str, field: Field) -> Any:
    """What was typed, as the field's type."""
    text: Any = override.text
    if field.optional and text.lower() == "none":
        return None
    if text.startswith("["):
        text = _parsed(text)
    adapter: TypeAdapter[Any] = TypeAdapter(field.kind, config=ConfigDict(allow_inf_nan=False))
    try:
        return adapter.validate_python(text)
    except ValidationError:
        raise _wrong(f"{override.flag}: ", table, field, text) from None


def _parsed(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _wrong(where: str, table: str, field: Field, given: Any) -> UserError:
    return UserError(f"{where}{table}.{field.name} is {given!r}, but must be {field.allowed}.")
