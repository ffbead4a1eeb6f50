"""Datasets: one by its name, distributed over clients and split into training and test examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from bpfed._util.errors import UserError
from bpfed._util.files import DataDir
from bpfed.config.registry import DATASETS, PREFIX, check_data
from bpfed.config.settings import with_event
from bpfed.data.checks.clients import of_one_class
from bpfed.data.federated import Examples, FederatedData
from bpfed.data.holdout import Holdout, split
from bpfed.data.partition import CELLS, OWN, Cell, Partition, client_names, deal_cell, lay_out, parse_partition, streams
from bpfed.data.sources import pooled
from bpfed.data.sources.pooled import NATURAL, SOURCES, Natural, Source
from bpfed.data.tabular import federate, frames
from bpfed.data.tabular.preprocessing import Codes, Standardise
from bpfed.data.tabular.recode import Recoding, recoded
from bpfed.data.tabular.table import ArrayOptions, Table, column_names
from bpfed.inference.tasks import Classification

PARTITION = "groups"
TEST_FRACTION = 0.5
#: What data frames are called where no other name is given.
FRAMES = "own"


def names() -> tuple[str, ...]:
    """Names that `load` knows: sources first, then the paper's six cells, then datasets of other packages.

    Beside them it knows ``folder:PATH``.
    """
    return (*SOURCES, *NATURAL, *CELLS, *DATASETS.plugins())


def load(
    name: Any = "digits",
    *,
    clients: int | None = None,
    partition: str | Callable[..., Any] | None = None,
    seed: int = 0,
    data_dir: DataDir = None,
    test_fraction: float | None = None,
    download: bool = True,
    target: str | None = None,
    event: str | None = None,
    client_column: str | None = None,
    task: str | None = None,
    standardise: Standardise = "federated",
    ignore: str | Iterable[str] | None = None,
    missing: str | Iterable[str] | None = None,
    codes: Codes = "both",
    holdout: str | None = None,
    rename: str | Iterable[str] | None = None,
    map: str | Iterable[str] | None = None,
    convert: str | Iterable[str] | None = None,
    dates: str | Iterable[str] | None = None,
    text: str | Iterable[str] | None = None,
    input: Literal["image", "sequence"] | None = None,
    image_size: str | None = None,
    read: Mapping[str, Table] | None = None,
    checked: bool = False,
) -> FederatedData:
    """Load a dataset as a federation of clients.

    Args:
        name: One of `names`, or ``folder:PATH`` for your own tables: a folder with a file of rows for each client, or
            one such file (see ``docs/how-to/data.md``); or a data frame of pandas or polars, or a dataset of Hugging Face
            (``datasets``), with a ``client_column``; or a ``FederatedDataset`` of Flower Datasets, each partition of which
            is a client. For one data frame or dataset per client see `from_frames`.
        clients: Number of clients; default: the dataset's own (10, or 20 for CIFAR-10).
        partition: How examples are distributed: ``"groups"`` (the default), ``"random:3"``, ``"dirichlet:0.3"``,
            ``"shards:2"`` or ``"iid"``; or a function of the classes ``[E]``, the number of clients and a numpy
            generator to the client of each example ``[E]``, -1 for nobody.
        seed: Which examples go where. The same seed gives the same federation.
        data_dir: Folder of the dataset's files; default: the one ``BPFED_DATA`` names, then the cache folder.
        test_fraction: Fraction of each client's examples held out for testing, stratified by class; default: 0.5, or
            0.3 for tables.
        download: Whether missing files may be downloaded.
        target: For tables: the column to predict, or several with commas between them (task ``"multilabel"``); default:
            the one called ``target``, ``label`` or ``y``.
        event: For tables and the task ``"survival"``: the column that says whether the event was observed (1, yes) or
            the time in ``target`` is censored (0, no).
        client_column: For a single table: the column that identifies the client.
        task: For tables: what the target is, such as ``"classification"`` or ``"survival"``; default: text and up to 20
            distinct whole numbers are classes.
        standardise: For tables: scale numbers by statistics of all clients (``"federated"``), by each client's own
            (``"local"``), or not at all (``"none"``).
        ignore: For tables: columns that are not inputs, as a list or as one text with commas between them.
        missing: For tables: words that stand for no value, given in the same way; ``age=999`` is one in that column.
        codes: For tables: use columns with 3 to 10 different whole numbers as numbers with one more input per value
            (``"both"``), or as numbers alone (``"number"``).
        holdout: For tables: hold out the last rows of each client by a column of numbers or ISO dates
            (``"time:COLUMN"``), or as they are in its file (``"last"``, ``"last:0.3"``), or whole groups of rows
            (``"group:COLUMN"``), for the test and wherever training rows are held out; the column is no input. Default:
            rows drawn at random.
        rename: For tables: other names of columns, ``"OLD=NEW"`` or ``"OLD@CLIENT=NEW"`` each.
        map: For tables: other words of a column, ``"sex:F=female,M=male"`` or ``"sex@CLIENT:..."`` each; in one text,
            semicolons are between them.
        convert: For tables: other units, ``"creatinine@CLIENT:/88.4"`` or ``"temperature:-32/1.8"`` each; steps are done
            from left to right.
        dates: For tables: columns whose dates become year, month, weekday and days since 2000.
        text: For tables: columns whose words are counted in 256 hashed columns, or in as many as ``"COLUMN:NUMBER"``
            says.
        input: For arrays of three axes in files: images ``[n, height, width]`` or sequences ``[n, steps, channels]``;
            None: as their shape suggests, which a note says.
        image_size: For folders of images: ``"HEIGHTxWIDTH"`` that all are resized to; None: all have the same size.
        read: For tables: what `tables` returned, where that has been called already.
        checked: For tables: whether their columns need no check any more (`bpfed.data.checks.findings`).

    Raises:
        UserError: The name is unknown, the request cannot be met, or the files are missing or damaged.
    """
    if not isinstance(seed, Integral):
        raise UserError(f"seed is {seed!r}, but must be a whole number.")
    said = {"rename": rename, "map": map, "convert": convert, "dates": dates, "text": text}
    recoding = Recoding.of(**said)
    if in_memory := not isinstance(name, str):
        read = frames.clients_of_frame(
            name,
            client_column,
            *_columns_of_frame(ignore, missing, holdout),
            recoding,
            ArrayOptions.of(input, image_size),
        )
        name = FRAMES
    if in_memory or is_table(name):
        _natural_only(name, partition)
        data = federate.federate(
            name,
            tables(
                name,
                client_column=client_column,
                data_dir=data_dir,
                download=download,
                ignore=ignore,
                missing=missing,
                holdout=holdout,
                input=input,
                image_size=image_size,
                **said,
            )
            if read is None
            else read,
            _target(name, with_event(target, event)),
            task=task,
            standardise=standardise,
            client_column=client_column,
            ignore=column_names(ignore),
            missing=column_names(missing),
            codes=codes,
            holdout=holdout,
            recoding=recoding,
            arrays=ArrayOptions.of(input, image_size),
            test_fraction=test_fraction,
            seed=seed,
            checked=checked,
        )
        if clients not in (None, len(data)):
            raise UserError(f"'{name}' has its own clients ({len(data)}), so it cannot have {clients}; omit --clients.")
        return data
    check_data(name)
    _no_table(
        name,
        target=target,
        event=event,
        client_column=client_column,
        task=task,
        standardise=None if standardise == "federated" else standardise,
        ignore=ignore,
        missing=missing,
        codes=None if codes == "both" else codes,
        holdout=holdout,
        input=input,
        image_size=image_size,
        **said,
    )
    dealt = parse_partition(partition if partition is not None else PARTITION)
    if name in CELLS:
        _cell_only(name, CELLS[name], clients, test_fraction)
        return _load_cell(name, CELLS[name], dealt, seed, data_dir, download)
    fraction = TEST_FRACTION if test_fraction is None else test_fraction
    return _load_source(name, clients, dealt, seed, data_dir, fraction, download)


def from_frames(
    given: Mapping[str, Any],
    target: str | None = None,
    *,
    event: str | None = None,
    name: str = FRAMES,
    task: str | None = None,
    standardise: Standardise = "federated",
    ignore: str | Iterable[str] | None = None,
    missing: str | Iterable[str] | None = None,
    codes: Codes = "both",
    holdout: str | None = None,
    rename: str | Iterable[str] | None = None,
    map: str | Iterable[str] | None = None,
    convert: str | Iterable[str] | None = None,
    dates: str | Iterable[str] | None = None,
    text: str | Iterable[str] | None = None,
    test_fraction: float | None = None,
    seed: int = 0,
) -> FederatedData:
    """Make a federation from a data frame of pandas or polars, or a dataset of Hugging Face, for each client.

    The result is the same as that of `load` for the same rows in CSV files.

    Args:
        given: The data frame of each client, by the client's name.
        target: The column to predict; None: the one called ``target``, ``label`` or ``y``.
        name: What to call the dataset.

    For the other arguments see `load`.
    """
    if not isinstance(seed, Integral):
        raise UserError(f"seed is {seed!r}, but must be a whole number.")
    recoding = Recoding.of(rename=rename, map=map, convert=convert, dates=dates, text=text)
    return federate.federate(
        name,
        frames.clients_of_frames(given, *_columns_of_frame(ignore, missing, holdout), recoding),
        with_event(target, event),
        task=task,
        standardise=standardise,
        ignore=column_names(ignore),
        missing=column_names(missing),
        codes=codes,
        holdout=holdout,
        recoding=recoding,
        test_fraction=test_fraction,
        seed=int(seed),
    )


def _columns_of_frame(
    ignore: str | Iterable[str] | None, missing: str | Iterable[str] | None, holdout: str | None
) -> tuple[list[str], list[str], tuple[str, ...]]:
    """Columns that may be of any type, words for no value, and columns that are words."""
    by = Holdout.of(holdout)
    ignored = [name for name in column_names(ignore) if by is None or name != by.column]
    return ignored, column_names(missing), by.words if by is not None else ()


def is_table(name: str) -> bool:
    """Whether the dataset of this name is tables, with natural clients."""
    return name.startswith(PREFIX) or _natural(name) is not None


def _natural(name: str) -> Natural | None:
    """What is known of a dataset that is tables with natural clients; None: it is none."""
    if name not in SOURCES and name not in CELLS and name in DATASETS:
        known = pooled.entry(name)
        return known if isinstance(known, Natural) else None
    return None


def tables(
    name: str,
    *,
    client_column: str | None = None,
    data_dir: DataDir = None,
    download: bool = True,
    ignore: str | Iterable[str] | None = None,
    missing: str | Iterable[str] | None = None,
    holdout: str | None = None,
    input: Literal["image", "sequence"] | None = None,
    image_size: str | None = None,
    **said: str | Iterable[str] | None,
) -> dict[str, Table]:
    """The tables of ``folder:PATH`` or of a dataset that is tables, by client; for the arguments see `load`."""
    recoding = Recoding.of(**said)
    if name.startswith(PREFIX):
        by = Holdout.of(holdout)
        return federate.read_clients(
            name.removeprefix(PREFIX),
            client_column,
            federate.not_inputs(ignore, by),
            column_names(missing),
            by.words if by is not None else (),
            recoding,
            ArrayOptions.of(input, image_size),
        )
    if (known := _natural(name)) is None:
        check_data(name)
        raise UserError(f"'{name}' is not a table; use {', '.join(NATURAL)} or {PREFIX}PATH.")
    if client_column is not None:
        raise UserError(f"'{name}' has its own clients; omit --client-column.")
    if missing is not None:
        raise UserError(f"What is missing in '{name}' is known; omit --missing.")
    return recoded(known.files.read(pooled.obtain(name, data_dir, download)), recoding)


def fetch(name: str, data_dir: DataDir = None) -> Path | None:
    """Make sure that the files of a dataset are present, downloading them if not.

    Returns:
        The folder (or archive) they are in; None for a dataset that is built in.
    """
    check_data(name)
    source = source_of(name)
    place = pooled.obtain(source, data_dir)
    return place if pooled.entry(source).files.wanted else None


def source_of(name: str) -> str:
    """The source that a dataset of this name takes its examples from."""
    return CELLS[name].source if name in CELLS else name


def _natural_only(name: str, partition: str | Callable[..., Any] | None) -> None:
    if partition is not None and not (isinstance(partition, str) and partition.strip() == OWN):
        raise UserError(f"'{name}' has its own clients, so '{parse_partition(partition)}' does not apply; omit it.")


def _target(name: str, target: str | None) -> str | None:
    if (known := _natural(name)) is None:
        return target
    if target not in (None, known.target):
        raise UserError(f"'{name}' predicts '{known.target}'; omit --target, or export it and use {PREFIX}PATH.")
    return known.target


def target_of(name: str, read: Mapping[str, Table], target: str | None) -> str | None:
    """The column to predict; None: nobody says, and no column of these tables is called so."""
    wanted = _target(name, target)
    try:
        return wanted or federate.find_target(read)
    except UserError:
        return None


def _no_table(name: str, **options: str | Iterable[str] | None) -> None:
    for option, value in options.items():
        if value is not None:
            raise UserError(f"'{name}' is not a table, so '{option}' does not apply; omit it.")


def _cell_only(name: str, cell: Cell, clients: int | None, test_fraction: float | None) -> None:
    if clients not in (None, cell.clients):
        raise UserError(
            f"'{name}' is a cell of the paper and has {cell.clients} clients, not {clients}; "
            f"use '{cell.source}' for another number."
        )
    if test_fraction is not None:
        raise UserError(
            f"'{name}' is a cell of the paper and has {cell.train} training and {cell.test} test examples per client "
            f"and label; use '{cell.source}' for another test fraction."
        )


def _load_cell(
    name: str, cell: Cell, partition: Partition, seed: int, data_dir: DataDir, download: bool
) -> FederatedData:
    dealing, ordering = streams(seed, 2)
    source = pooled.read(cell.source, data_dir, download)
    owners, test = deal_cell(cell, source.y, partition, dealing)
    data = _federated(source, owners, test, client_names(cell.clients), ordering)
    return replace(data, name=name, partition=str(partition), protocol="paper", seed=seed).check()


def _load_source(
    name: str,
    clients: int | None,
    partition: Partition,
    seed: int,
    data_dir: DataDir,
    test_fraction: float,
    download: bool,
) -> FederatedData:
    dealing, splitting, ordering = streams(seed, 3)
    source = pooled.read(name, data_dir, download)
    number = pooled.entry(name).clients if clients is None else clients
    owners = partition.owners(source.y, number, dealing)
    test = split(source.y, owners, test_fraction, splitting)
    data = _federated(source, owners, test, client_names(number), ordering)
    return replace(data, name=name, partition=str(partition), test_fraction=test_fraction, seed=seed).check()


def _federated(
    source: Source,
    owners: np.ndarray,
    test: np.ndarray,
    clients: tuple[str, ...],
    rng: np.random.Generator,
) -> FederatedData:
    def part(chosen: np.ndarray) -> Examples:
        rows, offsets = lay_out(owners, chosen, len(clients), rng)
        return Examples(source.inputs(rows), torch.from_numpy(source.y[rows]), offsets)

    data = FederatedData(
        name=source.name,
        clients=clients,
        train=part(~test),
        test=part(test),
        task=Classification.name,
        classes=len(source.labels),
        labels=source.labels,
    )
    return replace(data, notes=of_one_class(data))
