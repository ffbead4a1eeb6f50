"""The rows that a run on tables was tested on, found again in its files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from bpfed import config
from bpfed.data import own
from bpfed.data.holdout import Holdout
from bpfed.data.table import Table
from bpfed.errors import UserError
from bpfed.layout import CONFIG
from bpfed.loaded import LoadedRun


class Tested(NamedTuple):
    """Test rows of a client.

    Attributes:
        client: Its name.
        numbers: Which of its rows they are, from 1, ``[m]``.
        table: These rows.
        truth: What they have in the column that is predicted, as it is written.
    """

    client: str
    numbers: list[int]
    table: Table
    truth: list[str]


def rows_of(run: LoadedRun, data_dir: Path | None = None) -> list[Tested]:
    """The test rows of all clients of a run, in the order of their files; clients without any are left out.

    Raises:
        UserError: The run is not on tables, or they are not what they were when it was trained.
    """
    asked = config.read(run.folder / CONFIG)
    made = run.data.preparation
    read = asked.tables(data_dir)
    if made is None or not read:
        raise UserError(
            f"'{run.folder}' is not a run on tables, whose test rows could be found in a file; omit --test."
        )
    again = asked.load_data(data_dir, read)
    if again.preparation != made:
        raise UserError(
            f"'{asked.data.name}' has changed since the run in '{run.folder}', so its test rows cannot be told; restore it."
        )
    fraction = own.TEST_FRACTION if asked.data.test_fraction is None else asked.data.test_fraction
    found = []
    for client in run.data.clients:
        table = read[client]
        held = own.held_out(
            table,
            made.target,
            client,
            task=made.task,
            test_fraction=fraction,
            seed=asked.data_seed,
            by=Holdout.of(made.holdout),
        )
        if held.any():
            rows = np.flatnonzero(held)
            mine = table.take(rows)
            found.append(Tested(client, (rows + 1).tolist(), mine, mine.words(made.target)))
    return found
