"""A federation from a user's own arrays, one client per id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bpfed._util.errors import UserError
from bpfed.data.checks.clients import of_one_class, unscaled
from bpfed.data.federated import Examples, FederatedData
from bpfed.data.holdout import split
from bpfed.data.partition import client_names, lay_out, streams
from bpfed.data.tabular.statistics import MOST_WHOLE
from bpfed.inference import inputs
from bpfed.inference.inputs import Inputs
from bpfed.inference.tasks import Classification, Task, get_task, inferred


def from_arrays(
    x: Any,
    y: Any,
    ids: Any,
    *,
    name: str = "own",
    task: str | None = None,
    labels: Sequence[str] = (),
    test: Any = None,
    test_fraction: float = 0.5,
    seed: int = 0,
) -> FederatedData:
    """Make a federation from your own arrays (numpy, torch, or lists).

    They are used as they are, unlike tables. A network needs inputs, and the targets of a regression, of about mean 0
    and standard deviation 1: scale them by the training examples, and new inputs in the same way. Where they are far
    from that, ``notes`` of the result says so, as does every training.

    Args:
        x: Inputs, ``[E, ...]`` numbers, or ``[E]`` for one number each. A dict of arrays, or a list of dicts with one for
            each example, is what the module takes by name, and a tuple of arrays what it takes by position; whole
            numbers stay whole in them, and sequences of different lengths are filled up with 0 where there is a mask.
        y: Targets, ``[E]``: words and numbers of a whole type are classes, real ones (also 0.0 and 1.0) are a
            regression. For ``task="survival"`` ``[E, 2]``, times and whether the event was observed (1) or not (0);
            for ``"multilabel"`` ``[E, L]`` of 0 and 1; for ``"tokens"`` ``[E, T]`` whole numbers, -100 where a token does
            not count.
        ids: Whom each example belongs to, ``[E]`` whole numbers or words. Each id is a client, named by it.
        name: What to call the dataset.
        task: What ``y`` is, where its type does not tell.
        labels: A word for each class; ``y`` then runs from 0 to their number less one. By default, the classes are the
            values that occur in ``y``, in order.
        test: Which examples are for testing, ``[E]`` bool; None: a fraction of each client's, drawn at random.
        test_fraction: That fraction, stratified by class.
        seed: Which examples are drawn.
    """
    asked, labelling = get_task(task) if task is not None else None, 0
    targets, who = _array(y, f"The targets of '{name}'"), _identities(ids, name)
    if asked is not None and asked.packed_from != 1 and targets.ndim == 2:
        labelling = targets.shape[1] if asked.labelled else 0
        targets = _packed(targets, asked, name)
    elif asked is not None and asked.labelled and not asked.has_classes and not asked.target_axes:
        raise UserError(
            f"The targets of '{name}' are one number each, but {asked.phrase} needs a 0 or 1 for each label."
        )
    axes = 1 + (asked.target_axes if asked is not None else 0)
    given: Inputs
    if (several := structured(x, name, len(targets) if targets.ndim else 0)) is not None:
        given, shapes = several, {part: array.shape for part, array in inputs.parts(several).items()}
    else:
        given = _numbers(x, f"The inputs of '{name}'")
        given = given[:, None] if given.ndim == 1 else given
        shapes = {"": given.shape}
    count = targets.shape[:1]
    if targets.ndim != axes or count != who.shape or any(s[:1] != count for s in shapes.values()):
        shown = shapes[""] if "" in shapes else ", ".join(f"{shape} in '{part}'" for part, shape in shapes.items())
        raise UserError(
            f"'{name}' has inputs of shape {shown}, targets of {targets.shape} and ids of {who.shape}; "
            "give one target and one id per input."
        )
    if not len(targets):
        raise UserError(f"'{name}' has no examples; give it at least one.")
    doubt = _doubt(targets, name) if task is None else ()
    used = asked or inferred(targets.dtype.kind != "f")
    if used.has_classes:
        targets, words = _classes(targets, tuple(labels), name)
    elif used.target_axes:
        targets, words = _token_classes(targets, tuple(labels), name)
    elif used.labelled:
        targets, words = targets.astype(np.int64), tuple(labels) or tuple(str(k) for k in range(labelling))
    else:
        targets, words = _numbers(targets, f"The targets of '{name}'"), ()
    clients, owners = np.unique(who, return_inverse=True)
    splitting, ordering = streams(seed, 2)
    strata = targets if used.has_classes else np.zeros(len(targets), dtype=np.int64)
    held_out = split(strata, owners, test_fraction, splitting) if test is None else _mask(test, len(targets), name)

    def part(chosen: np.ndarray) -> Examples:
        rows, offsets = lay_out(owners, chosen, len(clients), ordering)
        return Examples(
            inputs.each(lambda part: torch.from_numpy(part[rows]), given), torch.from_numpy(targets[rows]), offsets
        )

    data = FederatedData(
        name=name,
        clients=tuple(str(c) for c in clients),
        train=part(~held_out),
        test=part(held_out),
        task=used.name,
        classes=len(words),
        labels=words,
    ).check()
    return replace(data, notes=(*doubt, *unscaled(data), *of_one_class(data)))


def _packed(y: np.ndarray, task: Task, name: str) -> np.ndarray:
    """Targets of several numbers each, ``[E, C]``, as one, ``[E]``."""
    parts = _numbers(y, f"The targets of '{name}'").astype(np.float64)
    names = tuple(f"y[:, {k}]" for k in range(parts.shape[1]))
    truth = parts[:, 1:] if task.packed_from else parts
    if task.packed_from not in (0, len(names)) or not np.isin(truth, (0.0, 1.0)).all():
        raise UserError(
            f"The targets of '{name}' are {parts.shape[1]} numbers each, but {task.phrase} needs "
            f"{'a time and 0 or 1' if task.packed_from else 'a 0 or 1 for each label'}; correct them."
        )
    if fault := task.packing_fault(names, parts):
        raise UserError(f"'{name}' has {fault}.")
    return task.packed(parts)


def _token_classes(y: np.ndarray, labels: tuple[str, ...], name: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Classes of tokens from 0, `IGNORED` where one does not count, ``[E, T]``, and a word for each."""
    if y.dtype.kind not in "iu":
        raise UserError(f"The targets of '{name}' are {y.dtype}, but classes of tokens must be whole numbers from 0.")
    most = int(y.max(initial=0)) + 1
    return y.astype(np.int64), labels or tuple(str(k) for k in range(max(2, most)))


def structured(x: Any, name: str, count: int | None = None) -> Inputs | None:
    """Inputs that are several arrays, as a dict or tuple of them; None: they are one array.

    Args:
        x: A mapping of arrays, a list of such mappings with one for each example, or a tuple of arrays.
        name: Of the dataset, for what is said of them.
        count: Number of examples, by which a tuple of arrays is told from a tuple of examples; None: it is the first.
    """
    if isinstance(x, list | tuple) and len(x) and all(isinstance(example, Mapping) for example in x):
        names = list(x[0])
        if other := next((i for i, example in enumerate(x) if set(example) != set(names)), None):
            raise UserError(
                f"Example {other} of '{name}' has the inputs {', '.join(map(str, x[other]))}, but the first has "
                f"{', '.join(map(str, names))}; give all the same."
            )
        x = {part: [example[part] for example in x] for part in names}
    if isinstance(x, Mapping):
        if not x or not all(isinstance(part, str) for part in x):
            raise UserError(f"The inputs of '{name}' are a mapping without arrays by name; give it some.")
        masked = any("mask" in part for part in x)
        return {part: _part(values, f"The inputs '{part}' of '{name}'", masked) for part, values in x.items()}
    arrays = isinstance(x, tuple) and all(isinstance(part, torch.Tensor | np.ndarray) and part.ndim for part in x)
    if arrays and x and (count is None or (len(x) != count and all(len(part) == count for part in x))):
        return tuple(_part(values, f"The inputs {i} of '{name}'", False) for i, values in enumerate(x))
    return None


def _part(values: Any, what: str, masked: bool) -> np.ndarray:
    """One array of several, of int64, bool or float32; sequences of different lengths are filled up with 0."""
    if isinstance(values, list | tuple) and values and all(np.ndim(row) == 1 for row in values):
        rows = [_array(row, what) for row in values]
        longest = max(len(row) for row in rows)
        if any(len(row) < longest for row in rows):
            if not masked:
                raise UserError(
                    f"{what} differ in length and no mask says where they end; add one, such as attention_mask, or give "
                    "all the same length."
                )
            rows = [np.pad(row, (0, longest - len(row))) for row in rows]
        values = np.stack(rows)
    array = _array(values, what)
    if array.dtype.kind == "b":
        return array
    return array.astype(np.int64) if array.dtype.kind in "iu" else _numbers(array, what)


def fitted(x: Any, like: Inputs, name: str) -> Inputs:
    """New inputs as tensors of the structure, types and shapes of those of training.

    Shorter sequences are filled up with 0 where there is a mask.

    Args:
        x: As `from_arrays` takes them.
        like: Of training, ``[E, ...]`` each; E may be 0.
        name: Of the dataset, for what is said of them.
    """
    wanted = inputs.parts(like)
    found = structured(x, name)
    if found is None or type(found) is not type(like) or set(inputs.parts(found)) != set(wanted):
        raise UserError(
            f"The inputs are not those of '{name}', which are {inputs.shapes(like)}; give a "
            f"{'dict' if isinstance(like, dict) else 'tuple'} of these arrays."
        )
    masked, made = any("mask" in part for part in wanted), {}
    for part, values in inputs.parts(found).items():
        target = wanted[part]
        if (values.dtype.kind == "f") != target.is_floating_point():
            kinds = [str(t.dtype).removeprefix("torch.") for t in (torch.from_numpy(values[:0]), target)]
            raise UserError(f"The inputs '{part}' are {kinds[0]}, but those of '{name}' are {kinds[1]}.")
        if masked and values.ndim == target.ndim == 2 and values.shape[1] < target.shape[1]:
            values = np.pad(values, ((0, 0), (0, target.shape[1] - values.shape[1])))
        if values.shape[1:] != tuple(target.shape[1:]):
            raise UserError(
                f"The inputs '{part}' have shape {list(values.shape[1:])} each, but those of '{name}' have "
                f"{list(target.shape[1:])}; cut longer ones."
            )
        made[part] = torch.from_numpy(np.ascontiguousarray(values)).to(target.dtype)
    if len({len(t) for t in made.values()}) > 1:
        raise UserError("The inputs differ in their number of examples; give every example one entry in each.")
    for part, tensor in made.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UserError(f"The inputs '{part}' hold NaN or infinite values; clean or drop those rows.")
    return made if isinstance(like, dict) else tuple(made[part] for part in wanted)


def _doubt(y: np.ndarray, name: str) -> tuple[str, ...]:
    """What to say of targets whose type makes them a regression, though in a table they would be classes."""
    if y.dtype.kind != "f" or not np.isfinite(y).all():
        return ()
    values = np.unique(y)
    if len(values) > MOST_WHOLE or not (values == np.trunc(values)).all():
        return ()
    return (
        f"The targets of '{name}' are real numbers by type and so a regression, but all are whole ({len(values)} "
        'different ones); if they are classes, pass task="classification".',
    )


def _array(values: Any, what: str) -> np.ndarray:
    if np.ma.is_masked(values):
        raise _gaps(what)
    try:
        array = _of_tensor(values) if isinstance(values, torch.Tensor) else np.asarray(values)
        if array.dtype.kind == "O":
            # Columns of tables often come as objects; what they hold decides; if that is no one thing, their words do.
            if any(map(_missing, array.flat)):
                raise _gaps(what)
            tight = np.asarray(array.tolist())
            array = tight if tight.dtype.kind in "biufc" else array.astype(str)
    except ValueError as error:
        raise UserError(f"{what} do not all have the same shape; give every example the same shape.") from error
    if array.dtype.kind == "c":
        raise UserError(f"{what} are complex numbers; give real numbers instead.")
    return array


def _of_tensor(values: torch.Tensor) -> np.ndarray:
    # numpy has no bfloat16.
    return (values.float() if values.dtype == torch.bfloat16 else values).detach().cpu().numpy()


def _missing(value: Any) -> bool:
    """Whether this is None, NaN, or what tables write for a gap: something that is not even unequal to itself."""
    try:
        return value is None or bool(value != value)
    except TypeError:
        return True


def _gaps(what: str) -> UserError:
    return UserError(f"{what} have missing values; drop those examples or fill them in.")


def _numbers(values: Any, what: str) -> np.ndarray:
    try:
        array = _array(values, what)
        if array.dtype.kind in "Mm":
            raise TypeError("dates")
        with np.errstate(over="ignore"):  # too large for float32 is infinite, which the check of the whole will name
            return array.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} are not all numbers; turn words and dates into numbers first.") from error


def _identities(ids: Any, name: str) -> np.ndarray:
    array = _array(ids, f"The ids of '{name}'")
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise UserError(f"An example of '{name}' has no id; drop it or give it one.")
        if (array == np.trunc(array)).all():
            array = array.astype(np.int64)  # a column of whole numbers, as tables with gaps give it
    return array


def _classes(y: np.ndarray, labels: tuple[str, ...], name: str) -> tuple[np.ndarray, tuple[str, ...]]:
    if y.dtype.kind == "f":
        if not (np.isfinite(y).all() and (y == np.trunc(y)).all()):
            raise UserError(
                f"The targets of '{name}' are not whole numbers, so they cannot be classes; use task='regression'."
            )
        y = y.astype(np.int64)
    if not labels:
        values, y = np.unique(y, return_inverse=True)
        return y.astype(np.int64), tuple(str(v) for v in values)
    if y.dtype.kind not in "biu":
        place = {word: i for i, word in enumerate(labels)}
        missing = sorted(set(y.tolist()) - set(place))
        if missing:
            raise UserError(f"'{name}' has the class '{missing[0]}', which is not among its labels; add it to labels.")
        return np.array([place[word] for word in y.tolist()], dtype=np.int64), labels
    return y.astype(np.int64), labels


def _mask(test: Any, number: int, name: str) -> np.ndarray:
    mask = _array(test, f"The test marks of '{name}'")
    if mask.shape != (number,) or mask.dtype.kind != "b":
        raise UserError(f"'{name}' needs test to be one True or False per example, {number} in all.")
    return mask


# --- A generator of synthetic federations, quick enough for a hundred thousand clients --------------------------------

TEST_FRACTION = 0.25
SPREAD = 2.0  # distance scale of class centres, in units of the noise
SHIFT = 0.5  # how far a client's inputs lie from everybody's


def synthetic(
    clients: int = 100, examples: int = 20, features: int = 20, classes: int = 10, seed: int = 0
) -> FederatedData:
    """Clients that differ: each holds half of the classes, and sees them shifted by a vector of its own.

    An input is its class's centre + its client's shift + noise. A quarter of each client's examples is for testing.

    Args:
        clients: Number of clients N.
        examples: Examples per client, training and test together.
        features: Length of an input.
        classes: Number of classes in all.
        seed: The same seed gives the same federation.
    """
    wrong = [
        f"{what} {number}"
        for what, number in (("clients", clients), ("examples", examples), ("features", features), ("classes", classes))
        if number < 1
    ]
    if wrong:
        raise UserError(f"Synthetic data needs at least 1 of everything, not {wrong[0]}.")
    (rng,) = streams(seed, 1)
    centres = SPREAD * rng.standard_normal((classes, features), dtype=np.float32)
    shifts = SHIFT * rng.standard_normal((clients, 1, features), dtype=np.float32)
    first = rng.integers(classes, size=(clients, 1))
    y = (first + rng.integers((classes + 1) // 2, size=(clients, examples))) % classes
    x = rng.standard_normal((clients, examples, features), dtype=np.float32)
    x += shifts
    x += centres[y]
    test = int(examples * TEST_FRACTION)

    def part(rows: slice, size: int) -> Examples:
        flat = np.ascontiguousarray(x[:, rows]).reshape(clients * size, features)
        return Examples(
            torch.from_numpy(flat),
            torch.from_numpy(np.ascontiguousarray(y[:, rows]).reshape(-1)),
            torch.arange(clients + 1) * size,
        )

    return FederatedData(
        name="synthetic",
        clients=client_names(clients),
        train=part(slice(test, None), examples - test),
        test=part(slice(0, test), test),
        task=Classification.name,
        classes=classes,
        labels=tuple(str(c) for c in range(classes)),
    ).check()
