"""A verdict on each client in plain words: is its model better than a guess, and than a plain model; where does it fail?

A difference counts if it is more than twice its standard error over the client's test examples, paired. Without the
errors, as in a deployment, where only sums are told, a verdict says who scores better and no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from bpfed._util import text
from bpfed.metrics.registry import Metric, get_metric
from bpfed.report.charts import wilson
from bpfed.report.record import JUDGED, RunRecord, value

#: A class with a lower recall than this, seen in at least so many test examples, is a weakness.
WEAK, SEEN = 0.75, 5

Level = Literal["good", "care", "poor", "unknown"]
#: What stands beside a client's name.
WORDS: dict[Level, str] = {
    "good": "can be used",
    "care": "use with care",
    "poor": "do not rely on it",
    "unknown": "too few test examples",
}
#: What a plain model of a client's own rows is called in a sentence, by its key in the records.
PLAIN = {
    "site-logistic": "its own logistic regression",
    "site-ridge": "its own ridge regression",
    "site-cox": "its own Cox regression",
}


#: Why a model is not simply good, in the order in which it is told.
REASONS = (
    "it is no better than a guess",
    "it is not clearly better than a guess",
    "the client's own plain model is better",
    "it misses more than a quarter of a class",
    "it claims more than it should",
)


class Verdict(NamedTuple):
    """What is said of a client.

    Attributes:
        name: The client.
        level: How good it is.
        said: Sentences, the most important first.
        test: Test examples.
        word: The level in words.
        reasons: Why it is no better, in the order of `REASONS`.
    """

    name: str
    level: Level
    said: list[str]
    test: int
    word: str
    reasons: tuple[str, ...] = ()


class Recall(NamedTuple):
    """Of a class at a client: its label, how many test examples of it there are, and how many are found."""

    label: str
    found: int
    test: int

    @property
    def share(self) -> float:
        """The recall; NaN without any example."""
        return self.found / self.test if self.test else math.nan


def verdicts(run: RunRecord) -> list[Verdict]:
    """A verdict on each tested client, the worst first."""
    order: list[Level] = ["poor", "care", "good", "unknown"]
    measure = get_metric(run.task.metric)

    def badness(row: dict[str, Any]) -> float:
        score = value(row, measure.name)
        return math.inf if math.isnan(score) else -score if measure.high_is_good else score

    found = [(_verdict(run, place, row), badness(row)) for place, row in enumerate(run.rows) if row.get("test")]
    return [one for one, bad in sorted(found, key=lambda pair: (order.index(pair[0].level), -pair[1]))]


def headline(run: RunRecord, found: Sequence[Verdict]) -> str:
    """The verdicts in a sentence or two."""
    if not found:
        return ""
    total = text.count(len(found))
    if len(found) == 1:
        return f"{text.short(found[0].name, 40)}: {found[0].word}."
    parts: tuple[tuple[Level, str], ...] = (
        ("good", "It can be used at" if errors_known(run) else "It scores better than a guess at"),
        ("care", "Use it with care at"),
        ("poor", "Do not rely on it at"),
        ("unknown", "There are too few test examples to judge it at"),
    )
    said: list[str] = []
    for level, start in parts:
        if named := [text.short(one.name, 30) for one in found if one.level == level]:
            of = f"{text.count(len(named))} of {total} clients" if not said else text.count(len(named))
            if len(named) == len(found):
                return f"{start} all {total} clients."
            rest = f" and {text.count(len(named) - 3)} more" if len(named) > 4 else ""
            said.append(f"{start} {of}: {', '.join(named[: 3 if rest else 4])}{rest}.")
    return " ".join(said)


def why(found: Sequence[Verdict]) -> str:
    """Why care is needed, and at how many clients, in a sentence; empty where it is not."""
    counts = [(reason, sum(reason in one.reasons for one in found)) for reason in REASONS]
    told = [reason if len(found) == 1 else f"{reason} (at {text.count(n)})" for reason, n in counts if n]
    return f"Why care is needed: {'; '.join(told)}." if told else ""


def against_own(run: RunRecord) -> str:
    """At how many clients the run is better than a plain model of the client's own rows; empty where there is none."""
    measure = get_metric(run.task.metric)
    rows = [place for place, row in enumerate(run.rows) if (row.get("test") or 0) >= JUDGED]
    rivals = [rival for place in rows if (rival := own_model(run, place, measure)) is not None]
    if len(rivals) < 2:
        return ""
    words = {"better": "better", "alike": "about as good", "worse": "worse"}
    words |= {"lower": "a better score", "not lower": "no better score"}
    counts = [(said, sum(state == key for _, _, state in rivals)) for key, said in words.items()]
    told = ", ".join(f"{said} at {text.count(n)}" for said, n in counts if n)
    plain = rivals[0][0].replace("its own", "a client's own")
    few = "" if len(rivals) == len(run.rows) else f" (clients with {JUDGED} or more test examples)"
    return f"Against {plain}: {told} of {text.count(len(rivals))} clients{few}."


def summary(run: RunRecord) -> dict[str, Any]:
    """The report for programs: what the run is, its metrics, and the verdict on each client."""
    found = verdicts(run) if run.measures and run.history else []
    keys = ("method", "data", "partition", "protocol", "rounds", "clients", "seed", "seconds", "device")
    return {
        "title": run.title,
        "bpfed": run.config.get("bpfed"),
        **{key: run.summary[key] for key in keys if key in run.summary},
        "metrics": {
            m.name: {"last": run.last(m.name), "client_mean": run.mean(m.name), "worst_client": run.worst(m.name)}
            for m in run.measures
        },
        "verdict": headline(run, found),
        "against_own_models": against_own(run),
        "against_baselines": run.verdict,
        "sites": [
            {"name": one.name, "verdict": one.word, "said": [text.typed(s) for s in one.said], "test": one.test}
            for one in found
        ],
        "notes": [
            text.typed(note) for note in (run.untested, run.participation_note, run.uncovered, run.no_use) if note
        ],
    }


def _verdict(run: RunRecord, place: int, row: dict[str, Any]) -> Verdict:
    name, test = str(row["name"]), int(row["test"])
    if test < JUDGED:
        few = f"Only {text.plural(test, 'test example')}: too few to judge."
        return Verdict(name, "unknown", [few], test, WORDS["unknown"])
    level: Level = "good"
    said, reasons = [], []
    useless, unclear, own, weakness, overconfident = REASONS
    measure = get_metric(run.task.metric)
    ours, guess = value(row, measure.name), value(row, run.task.without)
    if math.isfinite(ours) and math.isfinite(guess):
        state = _state(ours, guess, *_gain(run.diagnostics.get("clients", {}), place))
        figures = _figures(run, measure, ours, guess)
        said.append(f"{_compared(state)} {run.task.guess} ({figures}{_by_chance(state)}).")
        if state not in ("better", "lower"):
            level = "care" if state == "alike" else "poor"
            reasons.append(unclear if state == "alike" else useless)
    if (rival := own_model(run, place, measure)) is not None:
        model, theirs, state = rival
        figures = _figures(run, measure, ours, theirs)
        behind = state in ("worse", "not lower")
        start = "About as good as" if state == "alike" else _compared(state)
        advice = ", so consider that model here" if behind else ""
        said.append(f"{start} {model} ({figures}{_by_chance(state)}){advice}.")
        level = "care" if behind and level == "good" else level
        reasons += [own] if behind else []
    weak, sentence = _weakness(recalls(run, place))
    if sentence:
        said.append(sentence)
        level = "care" if weak and level == "good" else level
        reasons += [weakness] if weak else []
    over, sentence = _confidence(run, place, row)
    if sentence:
        said.append(sentence)
        level = "care" if over and level == "good" else level
        reasons += [overconfident] if over else []
    word = WORDS[level] if level != "good" or errors_known(run) else "better than a guess"
    return Verdict(name, level, said, test, word, tuple(reasons))


def errors_known(run: RunRecord) -> bool:
    """Whether there are standard errors of the differences from a guess, so that chance can be told from a result."""
    return "gain" in run.diagnostics.get("clients", {})


def own_model(run: RunRecord, place: int, measure: Metric) -> tuple[str, float, str] | None:
    """The plain model of a client's own rows: its name, its score, and whether the run is better; None: there is none."""
    for baseline in run.baselines:
        model = PLAIN.get(baseline["name"])
        scores = baseline["clients"].get(measure.name, [])
        if model is None or place >= len(scores) or scores[place] is None:
            continue
        ours, theirs = value(run.rows[place], measure.name), float(scores[place])
        gain = _gain(run.diagnostics.get("versus", {}).get(baseline["name"], {}), place)
        return model, theirs, _state(ours, theirs, *gain)
    return None


def recalls(run: RunRecord, place: int) -> list[Recall]:
    """The recall of each class at a client; empty where it is not known."""
    clients, labels = run.diagnostics.get("clients", {}), run.class_labels
    if place < len(clients.get("confusion", [])):
        matrix = clients["confusion"][place]
        return [Recall(label, row[k], sum(row)) for k, (label, row) in enumerate(zip(labels, matrix, strict=False))]
    if place < len(clients.get("recall", [])):
        return [Recall(label, *pair) for label, pair in zip(labels, clients["recall"][place], strict=False)]
    return []


def _gain(found: dict[str, Any], place: int) -> tuple[float, float]:
    """By how much the run is better on average over examples, and the standard error of that; NaN: not known."""
    gain, error = (found.get(key, []) for key in ("gain", "gain_se"))
    known = place < len(gain) and gain[place] is not None and error[place] is not None
    return (float(gain[place]), float(error[place])) if known else (math.nan, math.nan)


def _state(ours: float, theirs: float, gain: float, error: float) -> str:
    if math.isfinite(gain) and abs(gain) <= 2 * error:
        return "alike"
    if math.isfinite(gain):
        return "better" if gain > 0 else "worse"
    return "lower" if ours < theirs else "not lower"  # which may be chance


def _compared(state: str) -> str:
    """A state as the start of a sentence."""
    return {
        "better": "Better than",
        "alike": "Not clearly better than",
        "worse": "Worse than",
        "lower": "A better score than",
        "not lower": "No better score than",
    }[state]


def _by_chance(state: str) -> str:
    return {"alike": ", within chance", "lower": "; chance was not ruled out"}.get(state, "")


def _figures(run: RunRecord, measure: Metric, ours: float, theirs: float) -> str:
    shown = run.in_units(measure) or measure
    return f"{shown.in_words} {shown.show(ours)} against {shown.show(theirs)}"


def _weakness(found: Sequence[Recall]) -> tuple[bool, str]:
    """The class that is found least often, in a sentence, and whether that is a weakness."""
    known = [one for one in found if one.test >= SEEN]
    if not known:
        return False, ""
    least = min(known, key=lambda one: one.share)
    if least.found == least.test:
        return False, ""
    label = f"‘{text.short(least.label, 30)}’"
    sentence = f"Its weakest class is {label}: it finds {least.found} of {least.test} test cases ({text.percent(least.share, 0)})."
    return least.share < WEAK, sentence


def _confidence(run: RunRecord, place: int, row: dict[str, Any]) -> tuple[bool, str]:
    """Whether a client claims more than it should, beyond chance; and a sentence if it claims too much or too little."""
    claimed = run.diagnostics.get("clients", {}).get("claimed", [])
    right, test = value(row, "accuracy"), int(row["test"])
    if place < len(claimed) and claimed[place] is not None and math.isfinite(right):
        low, high = wilson(right, test)
        told = f"it claims {text.percent(claimed[place], 0)} and is right in {text.percent(right, 0)}."
        if claimed[place] > high:
            return True, f"Over-confident: {told}"
        return False, f"Under-confident: {told}" if claimed[place] < low else ""
    held = value(row, "coverage")
    if run.task.regions == "intervals" and math.isfinite(held) and wilson(held, test)[1] < 0.9:
        return True, f"Its 90 % intervals are too narrow: they hold {text.percent(held, 0)} of the targets."
    return False, ""
