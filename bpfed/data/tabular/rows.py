"""Rows of a file, or of a table in memory, as a run takes them: prepared as its training data was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bpfed._util.errors import UserError, quoted
from bpfed.data.checks.new_rows import Unusual, check_new_rows, unusual
from bpfed.data.federated import FederatedData
from bpfed.data.tabular.npz import read_arrays
from bpfed.data.tabular.preprocessing import SHOWN, Preprocessor, gathered
from bpfed.data.tabular.table import Table, column_names, read_table
from bpfed.inference import inputs


@dataclass(frozen=True)
class Rows:
    """What was read.

    Attributes:
        x: Inputs, ``[n, ...]``.
        y: Targets, ``[n]``; None where they were not asked for.
        preprocessor: That of the run, with the client's own statistics where it has some; None for arrays.
        unusual: Where they are unlike the rows of training; None for arrays and images.
    """

    x: Tensor
    y: Tensor | None
    preprocessor: Preprocessor | None
    unusual: Unusual | None = None


def read_rows(
    data: FederatedData,
    source: Any,
    client: str,
    say: Callable[[str], None],
    *,
    labelled: bool = False,
    target: str | None = None,
    columns: Sequence[str] | None = None,
    y: Any = None,
) -> Rows:
    """Read rows of a file or of a table in memory.

    Args:
        data: Of the run.
        source: The path of a file of rows for a run on tables, and NPZ with ``x`` (and ``y``) for one
            on arrays; or, for a run on tables, rows in memory (`bpfed.data.tabular.frames`).
        client: Whose rows.
        say: Called with sentences that the user should read.
        labelled: Whether targets are wanted; the client is then a newcomer.
        target: Column of the targets; None: the one that the run predicts.
        columns: Names of the columns of an array in memory.
        y: Targets of rows in memory, as the tables of training have them; None: they are in the column ``target``.
    """
    in_file = isinstance(source, str | Path)
    if in_file and (columns is not None or y is not None):
        what = "columns have names and its targets a column" if y is not None else "columns have names"
        raise UserError(f"'{source}' is a file, whose {what} there; omit {'y' if y is not None else 'columns'}.")
    preprocessor = data.preprocessor
    if preprocessor is None:
        if not in_file:
            raise UserError(f"'{data.name}' was trained on arrays, not on a table; give an array without column names.")
        return _arrays(data, Path(source), labelled)
    wanted = target or preprocessor.target
    needed = {f.name for f in preprocessor.features} | ({wanted, *column_names(wanted)} if labelled else set())
    if in_file:
        recoding = preprocessor.recoding
        table = read_table(
            source,
            [*preprocessor.words, *recoding.words],
            used=needed | recoding.columns,
            missing=preprocessor.missing,
            arrays=preprocessor.arrays,
        )
    else:
        table = _in_memory(preprocessor, source, client, columns, needed, say)
        if y is not None:
            if wanted in table.columns:
                raise UserError(f"The targets are given twice, as y and in the column '{wanted}'; omit one of them.")
            from bpfed.data.tabular.frames import column_table  # files need none of it

            table = column_table(table, wanted, y, preprocessor.missing)
    table = preprocessor.recoding.apply(table, client, preprocessor.missing, preprocessor.words)
    found = None
    if labelled:
        table = gathered(table, wanted, preprocessor.task)
        found = preprocessor.targets(table, wanted)
        kept = table.without({wanted, preprocessor.target} - {wanted}).columns
        named = {preprocessor.target if name == wanted else name: column for name, column in kept.items()}
        table = replace(table, columns=named)
        preprocessor = preprocessor.joined(client, table)
    if preprocessor.shape is None and in_file:
        lost = [f.name for f in preprocessor.features if f.name not in table.columns]
        if lost and len(lost) < len(preprocessor.features):
            what = "column" if len(lost) == 1 else "columns"
            it = "it is" if len(lost) == 1 else "they are"
            say(f"'{source}' has no {what} {quoted(lost)}; {it} treated as missing in every row.")
    made = Rows(preprocessor.inputs(table, client), found, preprocessor)
    for sentence in check_new_rows(preprocessor, table, client):
        say(sentence)
    return made if preprocessor.shape is not None else replace(made, unusual=unusual(preprocessor, table, client))


def _in_memory(
    preprocessor: Preprocessor,
    source: Any,
    client: str,
    columns: Sequence[str] | None,
    needed: set[str],
    say: Callable[[str], None],
) -> Table:
    """Rows in memory as a table that has every column of training; others are ignored with a word."""
    from bpfed.data.tabular.frames import is_dataset, is_named, table_of

    if preprocessor.shape is not None and columns is None and is_dataset(source):
        words, arrays = [*preprocessor.words, *preprocessor.recoding.words], preprocessor.arrays
        table = table_of(source, words=words, used=needed, missing=preprocessor.missing, arrays=arrays)
        if table.images is None:
            raise UserError(
                "The dataset has no column of images, but the run was trained on images; cast one to Image."
            )
        return table
    if preprocessor.shape is not None:
        raise UserError(
            "The run was trained on images or sequences of files, which it scales; give the path of one, or inputs that are "
            "scaled as run.data is, with prepared=True."
        )
    used = [f.name for f in preprocessor.features if f.inputs]
    if columns is None and not isinstance(source, Table) and not is_named(source):
        raise UserError(
            "The run was trained on tables, whose columns it knows by name and scales, but the inputs have no names; "
            f"name them with columns=[{quoted(used, 3)}], or give a data frame or the path of a file (inputs that are "
            "prepared as run.data is need prepared=True)."
        )
    if isinstance(source, Table) and columns is None:
        table = source
    else:
        table = table_of(
            source,
            columns,
            words=[*preprocessor.words, *preprocessor.recoding.words],
            used=needed | preprocessor.recoding.columns,
            missing=preprocessor.missing,
        )
    made = preprocessor.recoding.apply(table, client, preprocessor.missing).columns
    if lost := [name for name in used if name not in made]:
        what = "column" if len(lost) == 1 else "columns"
        raise UserError(
            f"The {table.name} has no {what} {quoted(lost, SHOWN)}; give every column that training used"
            f"{', with NaN where a value is not known' if len(lost) < len(used) else f' ({quoted(used, SHOWN)})'}."
        )
    known = {
        *needed,
        preprocessor.target,
        *column_names(preprocessor.target),
        *preprocessor.left_out,
        preprocessor.client_column,
        *preprocessor.recoding.columns,
    }
    if extra := [name for name in table.columns if name not in known]:
        many = len(extra) > 1
        say(
            f"The {table.name} has {'columns' if many else 'the column'} {quoted(extra, SHOWN)}, which training did not "
            f"use; {'they are' if many else 'it is'} ignored."
        )
    return table


def _arrays(data: FederatedData, path: Path, labelled: bool) -> Rows:
    shape = ", ".join(["n", *map(str, data.input_shape)])
    if path.suffix.lower() != ".npz" and not isinstance(data.train.x, torch.Tensor):
        raise UserError(
            f"'{data.name}' was trained on several arrays; give an NPZ file with {', '.join(inputs.parts(data.train.x))}."
        )
    if path.suffix.lower() != ".npz":
        raise UserError(
            f"'{data.name}' was trained on arrays, not on a table; give an NPZ file with x of shape [{shape}]."
        )
    try:
        found = read_arrays(path)
    except FileNotFoundError as error:
        raise UserError(f"There is no file '{path}'; give an NPZ file.") from error
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror}); give an NPZ file.") from error
    several = None if isinstance(data.train.x, torch.Tensor) else inputs.parts(data.train.x)
    for name in (*(several or ("x",)), *(("y",) if labelled else ())):
        if name not in found:
            raise UserError(f"'{path}' has no array '{name}'; it contains: {', '.join(found) or 'nothing'}.")
    if several is not None:
        chosen = {name: found[name] for name in several}
        given: Any = chosen if isinstance(data.train.x, dict) else tuple(chosen.values())
        y = torch.from_numpy(_targets(data, path, found["y"])) if labelled else None
        return Rows(given, y, None)
    x = found["x"]
    if x.dtype.kind not in "fiub" or x.shape[1:] != data.input_shape:
        raise UserError(f"x of '{path}' is {x.dtype} of shape {list(x.shape)}, but must be numbers of shape [{shape}].")
    if x.dtype.kind != "f":
        x = _scaled(data, path, x)
    y = None
    if labelled:
        y = torch.from_numpy(_targets(data, path, found["y"]))
        if len(y) != len(x):
            raise UserError(f"'{path}' has {len(x)} inputs and {len(y)} targets; give one target per input.")
    return Rows(torch.from_numpy(x.astype(np.float32)), y, None)


def _scaled(data: FederatedData, path: Path, x: Any) -> Any:
    """Raw pixels of a built-in dataset, as it scales them."""
    # Only these need what loads datasets.
    from bpfed.data.datasets import names, source_of
    from bpfed.data.sources.pooled import Entry, entry

    source = source_of(data.name) if data.name in names() else ""
    if not source or not isinstance(known := entry(source), Entry):
        raise UserError(f"x of '{path}' is {x.dtype}, but training was on real numbers; scale it in the same way.")
    return x / known.half - 1.0


def _targets(data: FederatedData, path: Path, y: Any) -> Any:
    if y.ndim != 1:
        raise UserError(f"y of '{path}' has shape {list(y.shape)}, but must be one target per input.")
    if not data.task_type.has_classes:
        if y.dtype.kind not in "fiu":
            raise UserError(f"y of '{path}' is {y.dtype}, but must be numbers.")
        return torch.from_numpy(y).to(data.task_type.dtype).numpy()
    named = bool(data.labels) and all(label.removeprefix("-").isdecimal() for label in data.labels)
    if y.dtype.kind in "iu" and not named:  # else a number is the class of that name, wherever it stands among them
        return y.astype(np.int64)
    words = [str(word) for word in y.tolist()]
    strange = [word for word in words if word not in data.labels]
    if strange:
        raise UserError(f"'{path}' has the label '{strange[0]}', but it must be one of {quoted(list(data.labels))}.")
    return np.array([data.labels.index(word) for word in words], dtype=np.int64)
