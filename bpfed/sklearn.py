"""Estimators of scikit-learn: a federation that is trained by ``fit(X, y, groups=sites)``.

`BPFedClassifier` and `BPFedRegressor` take NaN as a missing value, and columns of text as categories. They pass
scikit-learn's ``check_estimator`` but for the checks in `EXEMPT`, which says why each does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import _safe_indexing, check_array, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from bpfed._util.console import to_stderr
from bpfed._util.errors import UserError
from bpfed.data.federated import FederatedData
from bpfed.data.tabular.federate import federate
from bpfed.data.tabular.frames import is_named, table_of
from bpfed.data.tabular.table import SPLIT, Categorical, Column, as_text, check_client_name
from bpfed.inference.predictive import Classified, Prediction, Regressed
from bpfed.runs.client import Client
from bpfed.runs.fit import fit
from bpfed.runs.run import Run

__all__ = ["BPFedClassifier", "BPFedRegressor"]

#: The client of a fit without groups.
ALONE = "all"
_WEIGHTS = "sample weights that differ are refused"
_ROUNDING = "predictions are computed in float32, whose rounding depends on the rows that are predicted together"
#: scikit-learn's checks that do not apply, and why.
EXEMPT = {
    "check_sample_weights_not_overwritten": _WEIGHTS,
    "check_sample_weight_equivalence_on_dense_data": _WEIGHTS,
    "check_sample_weight_equivalence_on_sparse_data": _WEIGHTS,
    "check_classifiers_one_label_sample_weights": _WEIGHTS,
    "check_methods_sample_order_invariance": _ROUNDING,
    "check_methods_subset_invariance": _ROUNDING,
}


class InvalidInput(UserError, ValueError):
    """A `UserError` that is a ValueError too, as scikit-learn expects."""


@contextmanager
def _value_errors() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise InvalidInput(str(error)) from error


class _Federated(BaseEstimator):
    """What both estimators have in common; for the parameters see `BPFedClassifier`."""

    _task: str

    def __init__(
        self,
        method: Any = None,
        *,
        rounds: int | None = None,
        calibration: float = 0.0,
        random_state: Any = 0,
        verbose: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.method = method
        self.rounds = rounds
        self.calibration = calibration
        self.random_state = random_state
        self.verbose = verbose
        self.settings = settings

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        return tags

    def fit(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> Self:
        """Train a federation on all rows, each with the client that ``groups`` names.

        Args:
            X: ``[n, F]``, an array or a data frame; NaN and None are missing values, text is categories.
            y: ``[n]``, classes or numbers.
            groups: The client of each row, ``[n]``; None: one client has all rows.
            sample_weight: ``[n]``; refused unless all are the same, since rows cannot be weighted.
        """
        with _value_errors():
            X = self._checked(X, reset=True)
            if y is None:
                raise InvalidInput(
                    "This estimator requires y to be passed, but the target y is None; give one per row."
                )
            column = self._target(y)
            check_consistent_length(X, column, sample_weight, groups)
            _check_weights(sample_weight)
            if len(column) < 2:
                raise InvalidInput("X has 1 sample, of which nothing can be learnt; give at least two rows.")
            notes: list[str] = []
            self.run_ = self._train(self._data(X, column, groups), notes)
            self.notes_ = notes
            self.groups_ = np.array(self.run_.data.clients)
            self._grouped = groups is not None
        return self

    def _train(self, data: FederatedData, notes: list[str]) -> Run:
        changes = {**(self.settings or {}), "calibration": self.calibration, "seed": _seed(self.random_state)}
        changes |= {} if self.rounds is None else {"rounds": self.rounds}
        changes.setdefault("eval_every", 10**6)  # there are no test rows; the last round is evaluated all the same

        def say(sentence: str) -> None:
            notes.append(sentence)
            if self.verbose:
                to_stderr(sentence)

        run = fit(self.method, data, progress=bool(self.verbose), say=say, **changes)
        run.say = _silent  # so that the estimator can be pickled
        return run

    def _data(self, X: Any, column: Column, groups: Any) -> FederatedData:
        table = table_of(X, _names(X))
        if SPLIT in table.columns:
            raise UserError(f"X has a column '{SPLIT}', which marks test rows in tables; rename it.")
        target = "target"
        while target in table.columns:
            target += "_"
        table = replace(table, name="X", columns={**table.columns, target: column})
        who = np.array([ALONE] * table.rows) if groups is None else _words(groups)
        tables = {
            check_client_name(name, "groups"): table.take(np.flatnonzero(who == name), name)
            for name in np.unique(who).tolist()
        }
        data = federate("X", tables, target, task=self._task, test_fraction=0.0, seed=_seed(self.random_state))
        return replace(data, test=data.train)

    def _checked(self, X: Any, reset: bool) -> Any:
        """X as an array or a data frame, with the columns of training."""
        if is_named(X) and hasattr(X, "shape"):
            validate_data(self, X, reset=reset, skip_check_array=True)
            if not len(X):
                raise InvalidInput("Found array with 0 sample(s), while a minimum of 1 is required.")
            return X
        return validate_data(self, X, reset=reset, dtype=None, ensure_all_finite="allow-nan")

    def _target(self, y: Any) -> Column:
        raise NotImplementedError

    def _predictions(self, X: Any, groups: Any) -> list[tuple[np.ndarray, Prediction]]:
        """For each client its rows, ``[m]``, and what it predicts for them."""
        check_is_fitted(self)
        with _value_errors():
            X = self._checked(X, reset=False)
            rows = X.shape[0]
            known = self.run_.data.clients
            if groups is None:
                who = np.array([ALONE] * rows) if not self._grouped else None
            else:
                who = _words(groups)
                check_consistent_length(X, who)
            found = []
            if who is not None:
                for name in np.unique(who).tolist():
                    if name in known:
                        at = np.flatnonzero(who == name)
                        found.append((at, self._ask(self.run_.client(name), X, at)))
            rest = np.arange(rows) if who is None else np.flatnonzero(~np.isin(who, known))
            if len(rest):
                found.append((rest, self._ask(self._newcomer(), X, rest)))
        return found

    def _ask(self, client: Client, X: Any, rows: np.ndarray) -> Prediction:
        return client.predict(_safe_indexing(X, rows), columns=_names(X))

    def _newcomer(self) -> Client:
        name = "newcomer"
        while name in self.run_.data.clients:
            name += "_"
        return self.run_.adapt(name=name)

    def _joined(self, X: Any, groups: Any, part: Callable[[Any], np.ndarray]) -> np.ndarray:
        """A part of all predictions in the order of the rows, ``[n, ...]``."""
        found = [(rows, part(prediction)) for rows, prediction in self._predictions(X, groups)]
        made = np.empty((sum(len(rows) for rows, _ in found), *found[0][1].shape[1:]), dtype=found[0][1].dtype)
        for rows, values in found:
            made[rows] = values
        return made


class BPFedClassifier(ClassifierMixin, _Federated):
    """Classifier of a federation: every group of rows is a client with a model of its own.

    In prediction, rows of a group that training had are predicted by that client's model. Rows of an unknown group, and
    rows without groups after a fit with groups, are predicted as those of a newcomer without data: from what the run
    knows of clients in general. Such predictions have no prediction sets.

    Args:
        method: A method or its name; None: as for `bpfed.fit`.
        rounds: Number of rounds; None: the usual number.
        calibration: Fraction of each client's rows that nobody trains on, for `predict_set`.
        random_state: A whole number or a numpy RandomState; None is 0.
        verbose: Whether to show progress and notes on stderr.
        settings: Further settings of `bpfed.Settings` by name, such as ``{"epochs": 5}``.

    Attributes:
        classes_: The classes, ``[K]``.
        groups_: The names of the clients.
        run_: The run. It has no test rows, so its evaluation is on the training rows.
        notes_: What was said of the data and the training, in sentences.
    """

    _task = "classification"

    def _target(self, y: Any) -> Column:
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        _check_no_gaps(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InvalidInput("y has only one class, so there is nothing to learn; give rows of at least two classes.")
        # Classes are in the order of their words, which must be that of classes_.
        return Categorical(codes.astype(np.int64), tuple(f"{k:09d}" for k in range(len(self.classes_))))

    def predict_proba(self, X: Any, groups: Any = None) -> np.ndarray:
        """The probabilities of the classes, ``[n, K]``, in the order of ``classes_``."""

        def probs(found: Classified) -> np.ndarray:
            made = found.probs.double().numpy()
            return made / made.sum(1, keepdims=True)

        return self._joined(X, groups, probs)

    def predict(self, X: Any, groups: Any = None) -> np.ndarray:
        """The most probable class of each row, ``[n]``."""
        check_is_fitted(self)
        return self.classes_[self.predict_proba(X, groups).argmax(1)]

    def predict_set(self, X: Any, groups: Any = None, level: float = 0.9) -> np.ndarray:
        """Prediction sets that hold the right class with probability of at least ``level``, ``[n, K]`` bool.

        They need ``calibration`` above 0, and groups that training had (see `bpfed.inference.predictive`).
        """
        return self._joined(X, groups, lambda found: found.prediction_set(level).numpy())

    def score(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> float:
        """The accuracy."""
        return float(accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight))


class BPFedRegressor(RegressorMixin, _Federated):
    """Regressor of a federation: every group of rows is a client with a model of its own; see `BPFedClassifier`.

    Attributes:
        groups_: The names of the clients.
        run_: The run. It has no test rows, so its evaluation is on the training rows.
        notes_: What was said of the data and the training, in sentences.
    """

    _task = "regression"

    def _target(self, y: Any) -> Column:
        y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
        return column_or_1d(y, warn=True)

    def predict(self, X: Any, groups: Any = None, return_std: bool = False) -> Any:
        """The mean of each row, ``[n]``; with ``return_std`` the predictive standard deviation too, ``[n]``."""

        def both(found: Regressed) -> np.ndarray:
            made = self.run_.data.preprocessor
            assert made is not None
            return np.stack([made.in_units(found.mean).numpy(), found.scale.double().numpy() * made.target_scale], 1)

        mean, deviation = self._joined(X, groups, both).T
        return (mean, deviation) if return_std else mean

    def predict_interval(self, X: Any, groups: Any = None, level: float = 0.9) -> np.ndarray:
        """Intervals that hold the target with probability of at least ``level``, ``[n, 2]``.

        They need ``calibration`` above 0, and groups that training had.
        """

        def ends(found: Regressed) -> np.ndarray:
            made = self.run_.data.preprocessor
            assert made is not None
            return np.stack([made.in_units(end).numpy() for end in found.interval(level)], 1)

        return self._joined(X, groups, ends)

    #: The same, under the name that it has in `BPFedClassifier`.
    predict_set = predict_interval

    def score(self, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> float:
        """R²."""
        return float(r2_score(y, self.predict(X, groups), sample_weight=sample_weight))


def _silent(sentence: str) -> None:
    """Say nothing."""


def _names(X: Any) -> list[str] | None:
    """Names for the columns of an array; None: they have some."""
    return [f"x{k:0{len(str(X.shape[1] - 1))}d}" for k in range(X.shape[1])] if isinstance(X, np.ndarray) else None


def _words(groups: Any) -> np.ndarray:
    """The name of each row's group, ``[n]``."""
    values = column_or_1d(groups.to_numpy() if hasattr(groups, "to_numpy") else np.asarray(groups))
    _check_no_gaps(values, "groups")
    words = as_text(values.tolist())
    if len(set(words)) != len(set(values.tolist())):
        raise InvalidInput("Two groups have the same name as text, such as 1 and '1'; rename one.")
    return np.array(words)


def _check_no_gaps(values: np.ndarray, what: str = "y") -> None:
    gaps = [k for k, value in enumerate(values.tolist()) if value is None or value != value]
    if gaps:
        raise InvalidInput(f"Input {what} contains NaN, first in row {gaps[0] + 1}; fill it in or remove the row.")


def _check_weights(sample_weight: Any) -> None:
    if sample_weight is None:
        return
    weights = np.asarray(sample_weight, dtype=np.float64)
    if weights.ndim != 1:
        raise InvalidInput(f"Sample weights must be 1D, but sample_weight has shape {list(weights.shape)}; omit it.")
    if not weights.any():
        raise InvalidInput("The sample weights are all zero, so no row would count; omit sample_weight.")
    if not (weights == weights[0]).all() or weights[0] < 0:
        raise InvalidInput("Rows cannot be weighted, but sample_weight has different weights; omit it.")


def _seed(random_state: Any) -> int:
    if random_state is None:
        return 0
    if isinstance(random_state, np.random.RandomState):
        return int(check_random_state(random_state).randint(2**31 - 1))
    if not isinstance(random_state, Integral):
        raise InvalidInput(f"random_state is {random_state!r}, but must be a whole number, a RandomState or None.")
    return int(random_state)
