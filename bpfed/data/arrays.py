"""A federation from a user's own arrays, one client per id."""

from __future__ import annotations

from collections.abc import Sequence
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
from bpfed.inference.tasks import Classification, get_task, inferred


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
        x: Inputs, ``[E, ...]`` numbers, or ``[E]`` for one number each.
        y: Targets, ``[E]``: words and numbers of a whole type are classes, real ones (also 0.0 and 1.0) are a
            regression.
        ids: Whom each example belongs to, ``[E]`` whole numbers or words. Each id is a client, named by it.
        name: What to call the dataset.
        task: What ``y`` is, where its type does not tell.
        labels: A word for each class; ``y`` then runs from 0 to their number less one. By default, the classes are the
            values that occur in ``y``, in order.
        test: Which examples are for testing, ``[E]`` bool; None: a fraction of each client's, drawn at random.
        test_fraction: That fraction, stratified by class.
        seed: Which examples are drawn.
    """
    asked = get_task(task) if task is not None else None
    inputs, targets = _numbers(x, f"The inputs of '{name}'"), _array(y, f"The targets of '{name}'")
    inputs = inputs[:, None] if inputs.ndim == 1 else inputs
    who = _identities(ids, name)
    if targets.ndim != 1 or not inputs.shape[:1] == targets.shape == who.shape:
        raise UserError(
            f"'{name}' has inputs of shape {inputs.shape}, targets of {targets.shape} and ids of {who.shape}; "
            "give one target and one id per input."
        )
    if not len(targets):
        raise UserError(f"'{name}' has no examples; give it at least one.")
    doubt = _doubt(targets, name) if task is None else ()
    used = asked or inferred(targets.dtype.kind != "f")
    if used.has_classes:
        targets, words = _classes(targets, tuple(labels), name)
    else:
        targets, words = _numbers(targets, f"The targets of '{name}'"), ()
    clients, owners = np.unique(who, return_inverse=True)
    splitting, ordering = streams(seed, 2)
    strata = targets if used.has_classes else np.zeros(len(targets), dtype=np.int64)
    held_out = split(strata, owners, test_fraction, splitting) if test is None else _mask(test, len(targets), name)

    def part(chosen: np.ndarray) -> Examples:
        rows, offsets = lay_out(owners, chosen, len(clients), ordering)
        return Examples(torch.from_numpy(inputs[rows]), torch.from_numpy(targets[rows]), offsets)

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
