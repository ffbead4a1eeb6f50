"""Types of settings: in words, and whether values are of them. Nothing here needs torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from bpfed.errors import UserError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

#: The largest number that float32 has, roughly.
LARGEST = 3e38


def check_types(settings: Any) -> None:
    """Raise a `UserError` unless every field of a settings dataclass is of its type; nothing is converted."""
    from pydantic import ValidationError

    kinds = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        kind, value = kinds[field.name], getattr(settings, field.name)
        try:
            _adapter(kind).validate_python(value)
        except ValidationError:
            raise UserError(f"{field.name} is {value!r}, but must be {words(kind)}.") from None
        if isinstance(value, float) and LARGEST < abs(value) < float("inf"):
            raise UserError(f"{field.name} is {value!r}, which is more than a network can compute with; choose less.")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter  # here, since a command's help need not wait for it

    return TypeAdapter(kind, config=ConfigDict(strict=True, arbitrary_types_allowed=True))


def words(kind: Any) -> str:
    """A type as a person would say it."""
    if is_union(kind):
        return " or ".join(words(k) for k in get_args(kind) if k is not NoneType)
    if get_origin(kind) is Literal:
        *others, last = (f"'{choice}'" for choice in get_args(kind))
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(kind) in (Sequence, list, tuple):
        return f"a list of {words(get_args(kind)[0])}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, str(kind))


def is_union(kind: Any) -> bool:
    """Whether it is one of several types, such as ``int | None``."""
    return get_origin(kind) in (Union, UnionType)
