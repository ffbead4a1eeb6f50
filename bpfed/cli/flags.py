"""Flags read off the schema: one for each field of ``[data]`` and ``[run]``, described as the field is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from bpfed.config.schema import LISTS, TABLES, about, fields_of, short

#: What several commands are given.
ConfigFile = Annotated[
    Path | None, typer.Argument(help="TOML file of settings, such as the config.toml of a run.", show_default=False)
]
MethodName = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="Method (see 'bpfed methods'). \\[default: bpfed-adaptive for tables, else bpfed-recipe]",
        show_default=False,
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        metavar="linear",
        help="Instead of --method: 'linear' is logistic or linear regression as a hierarchical Bayesian model "
        "(bpfed-linear).",
        show_default=False,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder of the dataset's files. \\[default: BPFED_DATA, then the cache]", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]

#: Flags whose name is not their field's.
NAMES = {"data.name": "--data", "data.seed": "--data-seed", "run.seed": "--seed"}
PANELS = {"data": "Data", "run": "Run"}


def flag(key: str) -> str:
    """The flag of a key such as ``run.eval_every``."""
    return NAMES.get(key, "--" + key.partition(".")[2].replace("_", "-"))


def argument(key: str) -> str:
    """The name under which the command's function receives it."""
    return flag(key).removeprefix("--").replace("-", "_")


def schema_fields() -> Iterator[tuple[str, FieldInfo]]:
    """All fields that have a flag, by key."""
    for table, settings in TABLES.items():
        for name, field in fields_of(settings).items():
            yield f"{table}.{name}", field


def with_schema(function: Callable[..., None], without: Sequence[str] = ()) -> Callable[..., None]:
    """Give a command one flag for each field of the schema; it gets those that were given as ``**flags``, as typed.

    The keys of ``without`` get none.
    """
    signature = inspect.signature(function, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in own]
    flags = [_parameter(*f) for f in schema_fields() if f[0] not in without]
    function.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in inspect.signature(function).parameters.values()}
    return function


def _parameter(key: str, field: FieldInfo) -> inspect.Parameter:
    words = about(field).replace("None:", "default:").replace("[", "\\[")
    default = str(field.default).lower() if isinstance(field.default, bool) else field.default
    text = words if default is None else f"{words} \\[default: {default}]"
    option: Any = typer.Option(
        flag(key), metavar=short(field), help=text, rich_help_panel=PANELS[key.partition(".")[0]], show_default=False
    )
    kind = list[str] if key in LISTS else str
    return inspect.Parameter(
        argument(key), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
