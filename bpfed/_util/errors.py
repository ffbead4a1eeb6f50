"""The one exception that means: the user can fix this; and what its sentences are made of."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from numbers import Integral

#: Letters of a name that a sentence shows.
LONGEST = 40
#: How `first_of` ends where a part is a clause, not a name.
OTHERS = " (and {} others like this)"


class UserError(Exception):
    """One sentence that says what was wrong, where, and what to do; the command prints it and exits with 2."""


class Diverged(UserError):
    """The loss of a run is no longer a number."""


def check_count(name: str, value: object) -> None:
    """Raise a `UserError` unless a value is a whole number from 1 on."""
    if not isinstance(value, Integral) or value < 1:
        allowed = "at least 1" if isinstance(value, Integral) else "a whole number"
        raise UserError(f"{name} is {value!r}, but must be {allowed}.")


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """A `UserError` for a name that does not exist, with the nearest one that does."""
    return UserError(f"Unknown {kind} '{name}'; {hint(name, known)}")


def hint(name: str, known: Iterable[str]) -> str:
    """The nearest of the known names, or all of them: the end of a sentence about a name that does not exist."""
    names = sorted(known)
    near = [n for n in names if n.lower() == name.lower()] or [n for n in names if n.startswith(name)]
    near = near or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"choose from: {', '.join(names)}."


def first_of(parts: Sequence[str], and_: str = ", ", more: str = " and {} more", most: int = 5) -> str:
    """Parts of a sentence; of many, only the first, and how many more there are."""
    return and_.join(parts[:most]) + (more.format(len(parts) - most) if len(parts) > most else "")


def quoted(names: Sequence[str], most: int = 5, and_: str = ", ") -> str:
    """Names in quotes for a sentence; of many, only the first, and of long ones the beginning."""
    cut = [name if len(name) <= LONGEST else f"{name[:LONGEST]}..." for name in names]
    return first_of([f"'{name}'" if name.isprintable() else repr(name) for name in cut], and_, most=most)
