"""What is said of a full disk in a deployment, where nothing is continued with ``--resume``."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bpfed.errors import UserError


@contextmanager
def when_full(path: Path, then: str) -> Iterator[None]:
    """Say of a disk that is full what there is to do here.

    Args:
        path: What is written inside.
        then: How the sentence ends after ``free some space``, such as ``and run it again``.
    """
    try:
        yield
    except UserError as error:  # see `bpfed.files.writing`
        if getattr(error.__cause__, "errno", 0) not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"The disk is full: '{path}' cannot be written; free some space, {then}.") from error.__cause__
