"""Overviews: which datasets there are, and what the clients of one hold, as plain rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from bpfed.data.cells import CELLS
from bpfed.data.federated import Examples, FederatedData
from bpfed.data.folder import DataDir
from bpfed.data.load import names, source_of
from bpfed.data.natural import NATURAL
from bpfed.data.sources import SOURCES, entry, locate
from bpfed.data.table import Table


class DatasetRow(NamedTuple):
    """A dataset that `load` knows, as it comes when nothing else is asked for."""

    name: str
    examples: int
    clients: int
    sentence: str
    present: bool


class ClientRow(NamedTuple):
    """A client: its examples, and how many of each class, ``[C]`` (empty for regression)."""

    client: str
    train: int
    test: int
    train_labels: tuple[int, ...]
    test_labels: tuple[int, ...]


class Missing(NamedTuple):
    """How much is missing: the share of each client's rows ``[N, K]`` without a value, of the K columns with gaps."""

    clients: tuple[str, ...]
    columns: tuple[str, ...]
    shares: np.ndarray


def describe(data_dir: DataDir = None) -> list[DatasetRow]:
    """One row per dataset, in the order of `names`; ``present`` says whether its files are there."""
    present = {source: locate(source, data_dir) is not None for source in (*SOURCES, *NATURAL)}
    rows = []
    for name in names():
        source = source_of(name)
        if name in CELLS:
            cell = CELLS[name]
            clients, examples = cell.clients, cell.clients * cell.labels * (cell.train + cell.test)
            sentence = f"The paper's cell: {cell.train} training and {cell.test} test examples per client and label."
        else:
            clients, examples, sentence = entry(name).clients, entry(name).examples, entry(name).sentence
        rows.append(DatasetRow(name, examples, clients, sentence, present[source]))
    return rows


def inspect(data: FederatedData) -> list[ClientRow]:
    """One row per client: how many examples it has, and of which classes."""
    columns = (
        data.clients,
        data.train.sizes.tolist(),
        data.test.sizes.tolist(),
        _label_counts(data.train, data),
        _label_counts(data.test, data),
    )
    return [ClientRow(*row) for row in zip(*columns, strict=True)]


def missing(tables: Mapping[str, Table]) -> Missing:
    """How much is missing in the clients' tables; a column that a client lacks is all missing there."""
    clients = tuple(sorted(tables))
    columns = sorted({name for table in tables.values() for name in table.columns})
    shares = np.zeros((len(clients), len(columns)))
    for i, client in enumerate(clients):
        shares[i] = [tables[client].missing(name).mean() for name in columns]
    some = np.flatnonzero(shares.any(0))
    return Missing(clients, tuple(columns[k] for k in some), shares[:, some])


def _label_counts(examples: Examples, data: FederatedData) -> list[tuple[int, ...]]:
    if data.task != "classification":
        return [()] * len(data)
    counts = torch.bincount(examples.owner * data.classes + examples.y, minlength=len(data) * data.classes)
    return [tuple(row) for row in counts.view(len(data), data.classes).tolist()]
