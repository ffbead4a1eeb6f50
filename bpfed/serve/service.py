"""What the service answers, without HTTP: rows as plain data in, predictions as plain data out.

Rows are read and prepared by the same functions as those of ``bpfed predict``, and written by the same, so both agree to
the digit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from bpfed import __version__
from bpfed._util.errors import UserError, hint, quoted
from bpfed.data.checks.new_rows import FAR, Unusual
from bpfed.data.tabular.preprocessing import Feature, Preprocessor
from bpfed.data.tabular.rows import read_rows
from bpfed.inference.predictive import Classified
from bpfed.inference.tasks import EMPTY_SET
from bpfed.runs.client import prediction_columns

if TYPE_CHECKING:
    from bpfed.runs.client import Client

#: Rows of one request.
MOST_ROWS = 1000
#: Letters of a word.
LONGEST_WORD = 1000
#: Columns of a prediction that are text, by how their names begin.
TEXT = ("label", "labels", "set(", "surely(", "possibly(", "abstain", "unusual")
#: Standard deviations on either side of the mean that are called usual.
USUAL = 2.0


class BadRequest(Exception):
    """A request that cannot be answered, with one sentence for whoever sent it."""


@dataclass(frozen=True)
class Field:
    """A column that a row must have.

    Attributes:
        name: As the files call it.
        kind: ``number``, ``words``, or ``any`` where it is recoded first.
        words: Those that training saw; of numbers that may be codes, these.
        usual: Range in which most numbers of training are.
        always: Whether no training row lacks it.
    """

    name: str
    kind: str
    words: tuple[str, ...] = ()
    usual: tuple[float, float] | None = None
    always: bool = False

    def record(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.name,
            "kind": self.kind,
            "words": list(self.words),
            "usual": None if self.usual is None else list(self.usual),
            "always": self.always,
        }

    def checked(self, value: Any, row: int) -> Any:
        """A value of this column, or `BadRequest`."""
        where = f"Column {quoted([self.name])} of row {row}"
        if value is None:
            return None
        if isinstance(value, bool):
            if self.kind == "number":
                raise BadRequest(f"{where} must be a number or null, but is true or false.")
            return "true" if value else "false"
        if isinstance(value, int | float):
            if not math.isfinite(_float(value)):
                raise BadRequest(f"{where} is too large a number; correct it.")
            return float(value)
        if not isinstance(value, str):
            raise BadRequest(f"{where} is a list or an object, but must be a number, a text or null.")
        if self.kind == "number":
            raise BadRequest(f"{where} must be a number or null, but is a text.")
        if len(value) > LONGEST_WORD:
            raise BadRequest(f"{where} has {len(value)} letters, but at most {LONGEST_WORD} are read.")
        return value


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


class Service:
    """One client's model that answers.

    Args:
        client: Of a run on tables.
        level: Of sets and intervals.
        abstain: Probability of the label below which a row is marked; None: none is.

    Raises:
        UserError: The run is not on tables.
    """

    def __init__(self, client: Client, level: float = 0.9, abstain: float | None = None) -> None:
        made = client.run.data.preparation
        if made is None or made.shape is not None:
            raise UserError(
                f"'{client.run.data.name}' is no table, and the service takes rows of tables; use 'bpfed export' for arrays and "
                "images."
            )
        if abstain is not None and not client.run.data.task_type.has_classes:
            raise UserError("--abstain needs the probability of a label, which this run does not predict; omit it.")
        self.client, self.level, self.abstain = client, level, abstain
        self.made = made
        self.fields = {field.name: field for field in _fields(made, client.name)}
        self._lock = Lock()

    def schema(self) -> dict[str, Any]:
        """What a row must have, and what is predicted."""
        data = self.client.run.data
        return {
            "bpfed": __version__,
            "client": self.client.name,
            "method": self.client.run.federation.method.title,
            "task": data.task,
            "target": self.made.target,
            "labels": list(data.class_names),
            "level": self.level,
            "abstain": self.abstain,
            "columns": [field.record() for field in self.fields.values()],
            "most_rows": MOST_ROWS,
        }

    def predict(self, rows: Any) -> dict[str, Any]:
        """Predictions of rows, each a mapping from columns to values.

        Raises:
            BadRequest: A row is not such.
        """
        columns = self._columns(rows)
        notes: list[str] = []
        data = self.client.run.data
        with self._lock:  # a module runs one prediction at a time
            try:
                taken = read_rows(data, columns, self.client.name, notes.append)
                found = self.client.predict(taken)
                cells = prediction_columns(data, found, self.level, self.abstain, taken.unusual)
            except UserError as error:
                raise BadRequest(str(error)) from error
        cells.pop("unusual", None)
        answers: list[dict[str, Any]] = [
            {name: _value(name, values[k]) for name, values in cells.items()} for k in range(len(rows))
        ]
        if isinstance(found, Classified) and found.scores is not None:
            for answer, held in zip(answers, found.prediction_set(self.level).tolist(), strict=True):
                answer["set"] = [label for label, inside in zip(data.class_names, held, strict=True) if inside]
        for answer, why in zip(answers, self._unusual(taken.unusual, rows), strict=True):
            answer["unusual"] = why
        return {"client": self.client.name, "rows": answers}

    def _columns(self, rows: Any) -> dict[str, list[Any]]:
        if not isinstance(rows, list) or not rows:
            raise BadRequest('The request has no rows; send {"rows": [{...}]} with a column-value object for each row.')
        if len(rows) > MOST_ROWS:
            raise BadRequest(f"The request has {len(rows)} rows; send at most {MOST_ROWS} at a time.")
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                raise BadRequest(f"Row {number} is not an object of columns and values.")
            if extra := [name for name in row if name not in self.fields]:
                raise BadRequest(
                    f"Row {number} has the column {quoted(extra[:1])}, which the model does not use; "
                    f"{hint(extra[0][:100], self.fields)}"
                )
            if lost := [name for name in self.fields if name not in row]:
                raise BadRequest(
                    f"Row {number} has no {quoted(lost)}; give every column, with null where it is not known."
                )
        return {
            name: [field.checked(row[name], number) for number, row in enumerate(rows, 1)]
            for name, field in self.fields.items()
        }

    def _unusual(self, found: Unusual | None, rows: list[Any]) -> list[list[dict[str, str]]]:
        """What is unlike training in each row: the column, and why in words."""
        if found is None:
            return [[] for _ in rows]
        said = {
            "numbers": f"more than {FAR:g} standard deviations from the training mean",
            "own": f"more than {FAR:g} standard deviations from this client's own mean",
            "words": "a word that training did not see",
            "codes": "a number that training did not see, in a column of few numbers",
            "missing": "missing, which it was in no training row",
        }
        return [
            [
                {"column": name, "why": why}
                for part, why in said.items()
                for name, where in getattr(found, part).items()
                if where[k]
            ]
            for k in range(len(rows))
        ]


def _value(name: str, text: str) -> str | float | None:
    """A cell of the predictions; what is not finite has no number in JSON."""
    if name.startswith(TEXT):
        return "" if text == EMPTY_SET else text
    value = float(text)
    return value if math.isfinite(value) else None


def _fields(made: Preprocessor, client: str) -> list[Field]:
    """The columns of files that features are made of, in their order, each once."""
    renames, maps, _, texts = made.recoding._parsed
    called = {r.new: r.column for r in renames if r.client in (None, client)}
    mapped = {m.column for m in maps if m.client in (None, client)}
    found: dict[str, Field] = {}
    for feature in (f for f in made.features if f.inputs):
        source = next((n for n in (*made.recoding.dates, *texts) if feature.name.startswith((f"{n} ", f"{n} #"))), None)
        name = called.get(source or feature.name, source or feature.name)
        if source is not None or feature.name in mapped:
            found.setdefault(name, Field(name, "any"))
        else:
            found[name] = _field(feature, name, made, client)
    return list(found.values())


def _field(feature: Feature, name: str, made: Preprocessor, client: str) -> Field:
    always = not feature.indicator
    if feature.kind == "words":
        return Field(name, "words", feature.levels, None, always)
    mean, scale = made.own.get(client, {}).get(feature.name, (feature.mean, feature.scale))
    converted = any(c.column == feature.name and c.client in (None, client) for c in made.recoding._parsed[2])
    usual = None if converted or not scale else (_short(mean - USUAL * scale), _short(mean + USUAL * scale))
    return Field(name, "number", feature.levels, usual, always)


def _short(value: float) -> float:
    return float(f"{value:.3g}")
