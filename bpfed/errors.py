"""The one exception that means: the user can mend this."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """One sentence that says what was wrong, where, and what to do; the command prints it and exits with 2."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """A `UserError` for a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"known are: {', '.join(names)}."
    return UserError(f"Unknown {kind} '{name}'; {hint}")
