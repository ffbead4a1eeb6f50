"""Your own data: tables of clients, from a folder of files or one file, as a federation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bpfed._util.errors import UserError, hint, quoted
from bpfed._util.text import many
from bpfed.data.checks.agreement import disagreements
from bpfed.data.checks.clients import check_clients, of_one_class, rare_classes
from bpfed.data.checks.column_types import PARTS, check_column_types, coded, doubts
from bpfed.data.checks.leakage import check_leakage, check_order
from bpfed.data.checks.spelling import check_spelling
from bpfed.data.federated import Examples, FederatedData
from bpfed.data.holdout import Holdout, split
from bpfed.data.partition import check_seed
from bpfed.data.tabular.combine import combine
from bpfed.data.tabular.image_folder import in_colour, is_image, is_image_folder
from bpfed.data.tabular.preprocessing import Codes, Preprocessor, Standardise, gathered
from bpfed.data.tabular.recode import NOTHING, Recoding, recoded
from bpfed.data.tabular.statistics import MOST_WHOLE, check_words, client_summary
from bpfed.data.tabular.table import (
    AS_THEY_ARE,
    IN_PARTS,
    SHOWN,
    SPLIT,
    ArrayOptions,
    Categorical,
    Table,
    any_of,
    array_format,
    by_column,
    check_client_name,
    column_names,
    ending_of,
    endings,
    is_utf8,
    read_table,
)
from bpfed.inference.rng import client_ids
from bpfed.inference.tasks import get_task, inferred

#: Names that a column to predict goes by.
TARGETS = ("target", "label", "y")
TEST_FRACTION = 0.3
#: Share of a client's rows whose whole number no other row of it has, up to which these numbers are surely classes.
ONCE = 0.1


def read_clients(
    path: str | Path,
    client_column: str | None = None,
    ignore: Sequence[str] = (),
    missing: Sequence[str] = (),
    words: Sequence[str] = (),
    recoding: Recoding = NOTHING,
    arrays: ArrayOptions = AS_THEY_ARE,
) -> dict[str, Table]:
    """The tables of all clients, by name, from a folder with a file or folder for each, or from one file and its client
    column.

    ``ignore`` are columns that are not inputs, ``missing`` words that stand for no value, ``words`` columns that are
    words (see `read_table`), ``recoding`` what is done to columns then, ``arrays`` how images and sequences are read.

    Raises:
        UserError: There is no such place, or a file of it cannot be used.
    """
    path = Path(path).expanduser()
    if not is_utf8(str(path)):
        raise UserError(f"{str(path)!r} is a path that is not UTF-8; rename it.")
    try:
        path.stat()
    except OSError as error:
        raise UserError(f"'{path}' cannot be opened ({error.strerror}); give a folder or a file of tables.") from error
    if path.is_dir() and ending_of(path) != IN_PARTS:
        if client_column is not None:
            raise UserError(
                f"'{path}' is a folder with one file per client, so no column identifies the client; omit "
                "--client-column, or give a single file."
            )
        words = [*words, *recoding.words]
        found = {
            name: read_table(file, words, ignore=ignore, missing=missing, arrays=arrays)
            for name, file in _files(path).items()
        }
        return recoded(alike(found), recoding, missing)
    # Names are words even if they are digits: 007 is not 7, and long numbers would be rounded to the same one.
    words = [*words, *recoding.words, *([client_column] if client_column else ())]
    table = read_table(path, words, ignore=ignore, missing=missing, arrays=arrays)
    if client_column is None:
        raise UserError(
            f"'{path}' is a single file; use --client-column to name the column that identifies the client: "
            f"{quoted(list(table.columns), SHOWN)}."
        )
    return recoded(by_column(table, client_column), recoding, missing)


def alike(tables: Mapping[str, Table]) -> dict[str, Table]:
    """The clients' tables with all images in colour, where those of some folders are and those of others are not."""
    folders = {client: table for client, table in tables.items() if is_image_folder(Path(table.name))}
    channels = {table.images.shape[1] for table in folders.values() if table.images is not None}
    if len(channels) < 2:
        return dict(tables)
    return {
        client: replace(table, images=in_colour(table.images[:, 0]))
        if client in folders and table.images is not None and table.images.shape[1] == 1
        else table
        for client, table in tables.items()
    }


def federate(
    name: str,
    tables: Mapping[str, Table],
    target: str | None = None,
    *,
    task: str | None = None,
    standardise: Standardise = "federated",
    client_column: str | None = None,
    ignore: Sequence[str] = (),
    missing: Sequence[str] = (),
    codes: Codes = "both",
    holdout: str | None = None,
    recoding: Recoding = NOTHING,
    arrays: ArrayOptions = AS_THEY_ARE,
    test_fraction: float | None = None,
    seed: int = 0,
    checked: bool = False,
) -> FederatedData:
    """Make a federation from the clients' tables, to which ``recoding`` has been done; for the arguments see `load`.

    Each client's part is made by itself (`held_out`, `client_summary`, `Preprocessor.inputs`), as a deployed site would.
    """
    check_seed(seed)
    if target is not None and target == client_column:
        raise UserError(f"Column '{target}' identifies the client, so it cannot be predicted; choose another target.")
    tables = {client: gathered(table, target, task) for client, table in tables.items()}
    target = find_target(tables, target)
    marked = [client for client, table in tables.items() if SPLIT in table.columns and target != SPLIT]
    if marked and len(marked) < len(tables):
        without = next(client for client in tables if client not in marked)
        raise UserError(
            f"Client '{marked[0]}' has a column '{SPLIT}' but '{without}' does not; give it to all clients or to none."
        )
    if marked and test_fraction is not None:
        raise UserError(
            f"The column '{SPLIT}' of '{name}' already marks the test rows; do not set a test fraction as well."
        )
    clients, by = sorted(tables), Holdout.of(holdout)
    if by is not None and by.share is not None and test_fraction is not None:
        raise UserError(
            f"--holdout {by} says how many rows are for the test; omit --test-fraction, or use --holdout last."
        )
    fraction = (by.share if by is not None else None) or (TEST_FRACTION if test_fraction is None else test_fraction)
    _ignored(tables, ignore)
    if by is not None:
        check_column(by, target)
        if by.column in recoding.dates:
            raise UserError(
                f"Column '{by.column}' is what rows are held out by (--holdout) and so no input; leave it out of --dates."
            )
        by.check(tables, name)
    left_out = not_inputs(ignore, by)
    for client in clients:
        tables[client].check_filled(target)
    guessed = task is None
    task = task or settled(tables, target)  # of all clients together: one with few rows could not tell
    parts = []
    for client in clients:
        table = tables[client]
        test = held_out(table, target, client, task=task, test_fraction=fraction, seed=seed, by=by)
        parts.append((client, table.take(np.flatnonzero(~test)), table.take(np.flatnonzero(test))))
    empty = [client for client, train, _ in parts if not len(train)]
    if empty:
        raise UserError(f"Client '{empty[0]}' of '{name}' has no training row; remove it or give it one.")
    check_words([train.without([target, SPLIT, *left_out]) for _, train, _ in parts], ignore)
    summaries = [client_summary(train, target, client=client, task=task, ignore=left_out) for client, train, _ in parts]
    preprocessor = combine(
        summaries,
        target,
        task=task,
        standardise=standardise,
        client_column=client_column,
        ignore=ignore,
        missing=missing,
        codes=codes,
        holdout=None if by is None else str(by),
    )
    preprocessor = replace(preprocessor, recoding=recoding, resized=arrays.size is not None).judged_by(summaries)
    data = FederatedData(
        name=name,
        clients=tuple(clients),
        train=examples(preprocessor, [(client, train) for client, train, _ in parts], seed, by),
        test=examples(preprocessor, [(client, test) for client, _, test in parts], seed),
        task=preprocessor.task,
        classes=len(preprocessor.labels),
        labels=preprocessor.labels,
        test_fraction=None if marked else fraction,
        seed=seed,
        preprocessor=preprocessor,
    ).check()
    notes = (
        *about_arrays(preprocessor, arrays),
        *(() if checked else check_columns(tables, preprocessor)),
        *coded(preprocessor),
        *(() if by is None else by.notes(tables)),
        *(() if marked else check_order(tables, preprocessor)),
        *of_one_class(data),
        *rare_classes(data),
        *check_clients(data, summaries, guessed),
        *(() if checked else check_leakage(tables, {client: train for client, train, _ in parts}, preprocessor)),
    )
    return replace(data, notes=notes)


def about_arrays(preprocessor: Preprocessor, asked: ArrayOptions) -> tuple[str, ...]:
    """What inputs that are no columns are taken for, in a sentence.

    Raises:
        UserError: The inputs are columns, of which ``asked`` says something.
    """
    if preprocessor.shape is None:
        if asked.kind is not None or asked.size is not None:
            flag = f"--input {asked.kind}" if asked.kind is not None else "--image-size"
            raise UserError(f"{flag} is for images and sequences, but the inputs are columns of numbers; omit it.")
        return ()
    channels, high, wide = preprocessor.shape
    if preprocessor.array_kind == "sequence":
        other = "" if asked.kind is not None else "; if they are images, use --input image"
        return (f"The inputs are sequences of {wide} steps with {many(channels, 'channel')}{other}.",)
    what = {1: "greyscale images", 3: "colour images (RGB)"}.get(channels, f"images with {channels} channels")
    return (f"The inputs are {what} of {high} x {wide} pixels{', resized' if preprocessor.resized else ''}.",)


def check_columns(tables: Mapping[str, Table], preprocessor: Preprocessor) -> tuple[str, ...]:
    """What to say of columns that are probably not what they are taken for, in sentences."""
    return (
        *check_spelling(preprocessor, sorted(tables)),
        *check_column_types(tables, preprocessor),
        *doubts(tables, preprocessor),
        *disagreements(tables, preprocessor),
    )


def find_target(tables: Mapping[str, Table], target: str | None = None) -> str:
    """The column to predict: the one asked for, or one that is called ``target``, ``label`` or ``y``."""
    if target is None:
        known = [name for name in TARGETS if all(name in table.columns for table in tables.values())]
        if not known:
            columns = quoted(list(next(iter(tables.values())).columns), SHOWN)
            raise UserError(f"Use --target to name the column to predict: {columns}.")
        return known[0]
    for table in tables.values():
        table.column(target)
        if len(table.columns.keys() - {target, SPLIT}) == 0 and table.images is None:
            raise UserError(
                f"'{table.name}' has no column other than '{target}', so there is nothing to predict it from; add "
                "inputs."
            )
    return target


def settled(tables: Mapping[str, Table], target: str) -> str | None:
    """What the target of all clients together is, as `combine` will decide it; None where they do not fit together."""
    columns = [table.column(target) for table in tables.values()]
    numbers = [column for column in columns if not isinstance(column, Categorical)]
    if len(numbers) < len(columns):
        return None if numbers else inferred(classes=True).name
    values = np.unique(np.concatenate([np.unique(column) for column in numbers]))
    return inferred(len(values) <= MOST_WHOLE and bool((values == np.trunc(values)).all())).name


def held_out(
    table: Table,
    target: str,
    client: str,
    *,
    task: str | None = None,
    test_fraction: float = TEST_FRACTION,
    seed: int = 0,
    by: Holdout | None = None,
) -> np.ndarray:
    """Which rows of a client are for testing, ``[n]`` bool: as its column ``split`` says, else by a column, else drawn.

    Drawn is a fraction, of each class alike; each class that the client has keeps a row for training, unless three rows
    or more are drawn and none would be left to test on. It depends on the seed, the task and the client's name and rows,
    not on other clients. Without a task, as at a deployed site that
    knows its own rows alone, whole numbers are classes where they can hardly be anything else (see `_surely_classes`).
    """
    if SPLIT in table.columns and target != SPLIT:
        words = [word.casefold() for word in table.words(SPLIT)]
        strange = next((word for word in words if word not in PARTS), None)
        if strange is not None:
            raise UserError(
                f"Column '{SPLIT}' of '{table.name}' marks the test rows and must be 'train' or 'test', not "
                f"'{strange}'; rename it if it is an input."
            )
        return np.array([PARTS[word] for word in words], dtype=bool)
    if by is not None:
        return by.rows(table, test_fraction, _generator(seed, client, 0))
    column = table.column(target)
    strata = np.zeros(table.rows, dtype=np.int64)
    if isinstance(column, Categorical):
        strata = column.codes
    elif task is None or get_task(task).has_classes:
        values, codes = np.unique(column, return_inverse=True)
        if task is not None or _surely_classes(values, np.bincount(codes)):
            strata = codes
    rng = _generator(seed, client, 0)
    test = split(strata, np.zeros(table.rows, dtype=np.int64), test_fraction, rng)
    kept = test.copy()
    for stratum in np.unique(strata[test]):
        members = strata == stratum
        if test[members].all():
            kept[np.flatnonzero(members)[0]] = False
    return kept if kept.any() or test.sum() < 3 else test


def _surely_classes(values: np.ndarray, counts: np.ndarray) -> bool:
    """Whether numbers are classes, given the different ones, ``[k]``, and how often one client has each, ``[k]``.

    The rows of all clients might be a regression. A value that occurs once would go to training, so that where many do,
    the test would lack what is rare, such as the longest stays; or be empty, where no two prices are the same.
    """
    if len(values) > MOST_WHOLE or not (values == np.trunc(values)).all():
        return False
    return len(values) <= 2 or np.count_nonzero(counts == 1) <= max(1, ONCE * counts.sum())


def examples(
    preprocessor: Preprocessor, tables: Sequence[tuple[str, Table]], seed: int, by: Holdout | None = None
) -> Examples:
    """Inputs and targets of clients' tables, given as (client, table); each client's rows are in random order.

    ``by`` is how they are held out later; None: at random, or not at all.
    """
    xs, ys, keys, sizes = [], [], [], [0]
    for client, table in tables:
        # In random order: whoever trains on rows as they come must not meet one class after the other.
        order = torch.from_numpy(_generator(seed, client, 1).permutation(table.rows))
        xs.append(preprocessor.inputs(table, client)[order])
        ys.append(preprocessor.targets(table)[order])
        sizes.append(table.rows)
        if by is not None:
            keys.append(torch.from_numpy(by.keys(table))[order])
    return Examples(torch.cat(xs), torch.cat(ys), torch.tensor(sizes).cumsum(0), torch.cat(keys) if keys else None)


def _generator(seed: int, client: str, purpose: int) -> np.random.Generator:
    return np.random.default_rng([seed, int(client_ids((client,))[0]), purpose])


def client_files(path: Path) -> dict[str, Path] | None:
    """The file of each client, by its name, of a folder with one for each; None: it is one table of all clients."""
    return _files(path) if path.is_dir() and ending_of(path) != IN_PARTS else None


def _files(folder: Path) -> dict[str, Path]:
    """The file of each client, by its name. Hidden files and Markdown files are skipped, anything else is refused."""
    found: dict[str, Path] = {}
    known = endings()
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise UserError(f"'{folder}' cannot be read ({error.strerror}); fix its permissions.") from error
    for path in paths:
        if path.name.startswith(".") or path.suffix.lower() == ".md":
            continue
        if path.is_dir() and ending_of(path) is None and array_format(path) is not None:
            found[check_client_name(path.name, str(folder))] = path
            continue
        if is_image(path):
            raise UserError(
                f"'{path}' is an image that belongs to no client; use a folder for each client, and in it a folder for each "
                "class or a CSV file with the label of each image."
            )
        if (ending := ending_of(path)) is None:
            what = "a folder" if path.is_dir() else f"not a {any_of(known)} file"
            raise UserError(f"'{path}' is {what}, but everything there must be a client's file; move it elsewhere.")
        name = check_client_name(path.name[: -len(ending)], str(folder))
        if name in found:
            raise UserError(
                f"'{path}' and '{found[name].name}' would both be client '{name}'; rename one or move it elsewhere."
            )
        found[name] = path
    if not found:
        raise UserError(f"'{folder}' contains no {any_of(known)} files; put one there for each client.")
    return found


def check_column(by: Holdout, target: str) -> None:
    """Raise a `UserError` if the column of a hold-out has another use."""
    if by.column and by.column in (target, SPLIT):
        what = "is to be predicted" if by.column == target else "marks the test rows"
        raise UserError(f"Column '{by.column}' {what}, so nothing can be held out by it; choose another for --holdout.")


def not_inputs(ignore: str | Iterable[str] | None, by: Holdout | None) -> list[str]:
    """Columns that are no inputs: those to ignore, and the one by which rows are held out."""
    return list(dict.fromkeys([*column_names(ignore), *(by.columns if by is not None else ())]))


def _ignored(tables: Mapping[str, Table], ignore: Sequence[str]) -> None:
    known = {name for table in tables.values() for name in table.columns}
    strange = [name for name in ignore if name not in known]
    if len(strange) == 1:
        raise UserError(f"No client has the column '{strange[0]}' to ignore; {hint(strange[0], known)}")
    if strange:
        raise UserError(f"No client has the columns {quoted(strange)}; choose from: {quoted(sorted(known), SHOWN)}.")
