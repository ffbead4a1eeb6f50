"""Overviews: which datasets there are, and what the clients of one hold, as plain rows."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from bpfed._util.errors import UserError
from bpfed._util.files import DataDir, write_whole
from bpfed.data.datasets import names, source_of
from bpfed.data.federated import Examples, FederatedData
from bpfed.data.partition import CELLS
from bpfed.data.sources.pooled import entry, locate
from bpfed.data.tabular.table import Table, any_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    rows = []
    for name in names():
        source = source_of(name)
        if name in CELLS:
            cell = CELLS[name]
            clients, examples = cell.clients, cell.clients * cell.labels * (cell.train + cell.test)
            sentence = f"The paper's cell: {cell.train} training and {cell.test} test examples per client and label."
        else:
            try:
                known = entry(name)
            except UserError as error:  # of another package
                rows.append(DatasetRow(name, 0, 0, str(error), False))
                continue
            clients, examples, sentence = known.clients, known.examples, known.sentence
        rows.append(DatasetRow(name, examples, clients, sentence, locate(source, data_dir) is not None))
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
    if not data.task_type.has_classes:
        return [()] * len(data)
    counts = torch.bincount(examples.owner * data.classes + examples.y, minlength=len(data) * data.classes)
    return [tuple(row) for row in counts.view(len(data), data.classes).tolist()]


# --- A picture of a federation before anything is trained -------------------------------------------------------------
#
# Who has how many examples, of what, and what is missing.

ENDINGS = (".png", ".svg", ".pdf")
#: Most clients and columns that have a row or column of their own.
CLIENTS, COLUMNS = 60, 40
ROW, LETTER = 0.22, 0.075  # inches


def check_ending(path: Path) -> None:
    """Raise a `UserError` unless a picture can be written under this name."""
    if path.suffix.lower() not in ENDINGS:
        raise UserError(f"'{path}' is not the name of a picture; end it in {any_of(ENDINGS)}.")


def draw(data: FederatedData, missing: Missing, path: Path) -> None:
    """Draw each client's sizes and label mix (or its target's mean and spread), and what is missing."""
    check_ending(path)
    from matplotlib.figure import Figure

    rows = min(len(data), CLIENTS)
    gaps = len(missing.columns) > 0
    columns = min(len(missing.columns), COLUMNS)
    names = max(len(name) for name in data.clients[:rows])
    height = max(2.4, ROW * rows + 1.6) + (LETTER * max(map(len, missing.columns)) if gaps else 0.3)
    width = LETTER * names + 5.2 + (1.2 + 0.3 * columns if gaps else 0.0)
    figure = Figure(figsize=(width, height), layout="constrained")
    ratios = [4.0, 0.6 + 0.3 * columns] if gaps else [4.0]
    panels = figure.subplots(1, len(ratios), sharey=True, squeeze=False, width_ratios=ratios)[0]
    if data.task_type.has_classes:
        _mix(panels[0], data, rows)
    else:
        _targets(panels[0], data, rows)
    sizes = (data.train.sizes + data.test.sizes).tolist()
    words = [
        f"{name} ({sizes[i]})" if not data.task_type.has_classes else name for i, name in enumerate(data.clients[:rows])
    ]
    panels[0].set_yticks(range(rows), [_plain(word) for word in words])
    panels[0].set_ylim(rows - 0.5, -0.5)
    panels[0].spines[["top", "right"]].set_visible(False)
    if gaps:
        _gaps(figure, panels[1], missing, rows, columns)
    cut = f", {rows} of {len(data)} clients" if rows < len(data) else ""
    figure.suptitle(_plain(f"{data.name}{cut}"), fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lower()[1:], dpi=150)
    write_whole(path, buffer.getvalue())


def _mix(axes: Axes, data: FederatedData, rows: int) -> None:
    from matplotlib import colormaps

    counts = np.array([np.add(r.train_labels, r.test_labels) for r in inspect(data)[:rows]])
    palette = colormaps["tab10"] if data.classes <= 10 else colormaps["viridis"]
    left = np.zeros(rows)
    for label in range(data.classes):
        colour = palette(label if data.classes <= 10 else label / (data.classes - 1))
        word = _plain(data.labels[label]) if data.labels else str(label)
        axes.barh(range(rows), counts[:, label], left=left, color=colour, label=word, height=0.8)
        left += counts[:, label]
    axes.set_xlabel("examples, training and test")
    if data.classes <= 20:
        axes.legend(
            fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(5, data.classes)
        )


def _targets(axes: Axes, data: FederatedData, rows: int) -> None:
    units = data.preprocessor.in_units if data.preprocessor is not None else lambda y: y
    targets = [units(data.train.client(i)[1]).numpy() for i in range(rows)]
    means, spreads = [float(t.mean()) for t in targets], [float(t.std()) for t in targets]
    axes.errorbar(means, range(rows), xerr=spreads, fmt="o", capsize=2, markersize=4)
    word = data.preprocessor.target if data.preprocessor is not None else "target"
    axes.set_xlabel(_plain(f"{word}, mean ± standard deviation in training (number of examples)"))


def _gaps(figure: Any, axes: Axes, missing: Missing, rows: int, columns: int) -> None:
    order = np.argsort(-missing.shares.mean(0), kind="stable")[:columns]
    shown = axes.imshow(100 * missing.shares[:rows, order], aspect="auto", cmap="Blues", vmin=0, vmax=100)
    axes.set_xticks(range(columns), [_plain(missing.columns[k]) for k in order], rotation=90)
    axes.tick_params(axis="y", left=False)
    axes.spines[:].set_visible(False)
    more = f" ({columns} of {len(missing.columns)} columns)" if columns < len(missing.columns) else ""
    axes.set_title(f"missing, %{more}", fontsize=9)
    if rows * columns <= 200:
        for i in range(rows):
            for j, k in enumerate(order):
                share = 100 * missing.shares[i, k]
                if share:
                    text = "<1" if share < 1 else f"{share:.0f}"
                    axes.text(
                        j, i, text, ha="center", va="center", fontsize=7, color="white" if share > 60 else "black"
                    )
    else:
        figure.colorbar(shown, ax=axes, shrink=0.8)


def _plain(text: str) -> str:
    """A name without mathematics: matplotlib would set what stands between dollars."""
    return text.replace("$", r"\$")
