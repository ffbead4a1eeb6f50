"""Sections of a run's page that go beyond its metrics: errors by class, decisions, each client, columns, the model card.

Each is a function from the run to what its template lays out, or None where the run has no such record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from bpfed import __version__
from bpfed._util import text
from bpfed.metrics.registry import METRICS, Metric, get_metric
from bpfed.report import charts
from bpfed.report.charts import Path, wilson
from bpfed.report.charts import Row as Line
from bpfed.report.html import Figure, Row, Table
from bpfed.report.record import JUDGED, RunRecord, value
from bpfed.report.verdicts import own_model, recalls, verdicts

#: With more clients than this a chart has the worst and the best halves of this number.
ROWS = 24
#: Columns in the table of effects at each client, and clients.
TOP_COLUMNS, TOP_CLIENTS = 6, 20
#: Steps of shading.
SHADES = 9
#: Test examples below which a client's or a class's figures vary widely by chance.
FEW = 30


class Shade(NamedTuple):
    """A cell of a shaded table: its text, and its class."""

    text: str
    style: str = ""


class Matrix(NamedTuple):
    """A shaded table: its heading, the columns' heads, and rows, each a name and cells; what is read with it."""

    title: str
    heads: list[str]
    rows: list[tuple[str, list[Shade]]]
    read: str
    corner: str = ""


# --- Clients, from the worst to the best ------------------------------------------------------------------------------


def ranked(rows: Sequence[dict[str, Any]], main: Metric) -> list[dict[str, Any]]:
    """The rows from the worst client to the best by the main metric (ties by NLL); untested clients last."""

    def badness(row: dict[str, Any]) -> tuple[bool, float, float]:
        v, nll = value(row, main.name), value(row, "nll")
        return math.isnan(v), v if main.high_is_good else -v, -nll if math.isfinite(nll) else 0.0

    return sorted(rows, key=badness)


def worst_names(ranking: Sequence[dict[str, Any]], main: Metric) -> frozenset[str]:
    """Names of the worst tenth of the tested clients: at least one and at most ten, none if all are alike."""
    tested = [row for row in ranking if math.isfinite(value(row, main.name))]
    if len({value(row, main.name) for row in tested}) < 2:
        return frozenset()
    return frozenset(row["name"] for row in tested[: min(10, max(1, len(tested) // 10))])


def client_dots(run: RunRecord) -> list[Figure]:
    """A dot for each client, the worst at the top, beside what a guess and a plain model of its own score."""
    figures = []
    for measure in dict.fromkeys((run.measures[0], get_metric("nll"))):
        ranking = [row for row in ranked(run.rows, measure) if row.get("test")]
        if len(ranking) < 2:
            return []
        cut = len(ranking) > ROWS
        shown = [*ranking[: ROWS // 2], *ranking[-ROWS // 2 :]] if cut else ranking
        own, factor = run.scaled(measure)
        lines, plain, guess, bounds = [], "", False, False
        worst = worst_names(ranking, measure)
        for row in shown:
            place = run.rows.index(row)
            low, high = (factor * end for end in interval(run, place, measure))
            rival = own_model(run, place, measure)
            without = factor * value(row, measure.without[0])
            plain = rival[0] if rival is not None else plain
            guess |= math.isfinite(without)
            bounds |= math.isfinite(low)
            v = factor * value(row, measure.name)
            note = f"{own.show(v)}, {text.plural(row['test'], 'test example')}"
            if math.isfinite(low):
                note = (
                    f"{own.show(v)} ({own.show(low)} to {own.show(high)}), {text.plural(row['test'], 'test example')}"
                )
            ring = factor * rival[1] if rival is not None else math.nan
            lines.append(
                Line(str(row["name"]), v, low, high, floor=without, ring=ring, note=note, chief=row["name"] in worst)
            )
        read = f"{own.explain} The worst client is at the top."
        read += " Thin lines are 95 % intervals: small test sets scatter widely by chance." if bounds else ""
        read += f" Upright stroke: {run.task.guess}." if guess else ""
        read += f" Ring: {plain}." if plain else ""
        read += f" The {ROWS // 2} worst and the {ROWS // 2} best of {text.count(len(ranking))} clients." if cut else ""
        title = "Negative log-likelihood" if measure.name == "nll" else own.full
        figures.append(Figure(f"{title}, client by client", charts.dots(lines, own, own.label), read))
    return figures


def interval(run: RunRecord, place: int, measure: Metric) -> tuple[float, float]:
    """The 95 % interval of a metric of a client by its test examples; NaN: not known."""
    row = run.rows[place]
    v, test = value(row, measure.name), row.get("test") or 0
    if measure.proportion and math.isfinite(v) and test:
        return wilson(v, test)
    found = run.diagnostics.get("clients", {}).get("se", [])
    error = found[place] if place < len(found) else None
    loss = run.diagnostics.get("loss")
    if error is None or not math.isfinite(v):
        return math.nan, math.nan
    if measure.name == "nll" and loss == "nll":
        return max(0.0, v - 1.96 * error), v + 1.96 * error
    if measure.name == "rmse" and loss == "square":
        return math.sqrt(max(0.0, v * v - 1.96 * error)), math.sqrt(v * v + 1.96 * error)
    return math.nan, math.nan


def client_confidence(run: RunRecord) -> Figure | None:
    """What each client's model claims beside how often it is right; of intervals, how often they hold."""
    clients = run.diagnostics.get("clients", {})
    claimed = clients.get("claimed", [])
    lines: list[tuple[float, Line]] = []
    for place, row in enumerate(run.rows):
        test = row.get("test") or 0
        if test < JUDGED:
            continue
        if place < len(claimed) and claimed[place] is not None:
            seen, said = value(row, "accuracy"), float(claimed[place])
        else:
            seen, said = value(row, "coverage"), 0.9
        if not math.isfinite(seen):
            continue
        low, high = wilson(seen, test)
        off = max(low - said, said - high, 0.0)
        note = f"claimed {text.percent(said)}, observed {text.percent(seen)} ({text.percent(low, 0)} to {text.percent(high, 0)})"
        lines.append((said - seen, Line(str(row["name"]), seen, low, high, floor=said, note=note, chief=off > 0)))
    if len(lines) < 2 or (not claimed and run.task.regions == "sets"):
        return None
    lines.sort(key=lambda pair: -pair[0])
    cut = len(lines) > ROWS
    shown = [*lines[: ROWS // 2], *lines[-ROWS // 2 :]] if cut else lines
    measure = METRICS["accuracy" if claimed else "coverage"]
    what = (
        "Dot: share that is right, with its 95 % interval. Upright stroke: what the model claims on average."
        if claimed
        else "Dot: share of targets inside the calibrated 90 % intervals, with its 95 % interval. Upright stroke: 90 %."
    )
    read = f"{what} The most over-confident client is at the top; orange dots are off by more than chance."
    read += f" Clients with fewer than {JUDGED} test examples are left out."
    read += f" The {ROWS // 2} first and last of {text.count(len(lines))}." if cut else ""
    drawn = charts.dots([line for _, line in shown], measure, "claimed and observed")
    return Figure("Claimed and observed, client by client", drawn, read)


# --- Errors by class --------------------------------------------------------------------------------------------------


def errors(run: RunRecord) -> dict[str, Any] | None:
    """Which classes are found, and what they are taken for: of all clients, and of the worst one."""
    classes = run.evaluation.get("classes", [])
    if len(classes) < 2 or not run.rows:
        return None
    labels = run.class_labels
    matrices = []
    confusion = run.diagnostics.get("confusion")
    if confusion:
        matrices.append(_matrix("All clients", labels, confusion))
    place = worst_place(run)
    each = run.diagnostics.get("clients", {}).get("confusion", [])
    if place is not None and place < len(each) and len(run.rows) > 1:
        name = text.short(str(run.rows[place]["name"]), 40)
        matrices.append(_matrix(f"Worst client: {name}", labels, each[place]))
    return {
        "matrices": matrices,
        "wide": len(labels) > 5,
        "table": _class_table(run, place),
        "missing": "" if confusion else _missing(run, "confusion matrices"),
    }


def worst_place(run: RunRecord) -> int | None:
    """The worst client with enough test examples to be judged, by its place; None: there is none."""
    judged = [row for row in run.rows if (row.get("test") or 0) >= JUDGED]
    return run.rows.index(ranked(judged, run.measures[0])[0]) if judged and run.measures else None


def _matrix(title: str, labels: Sequence[str], counts: Sequence[Sequence[int]]) -> Matrix:
    lines = []
    for k, (label, row) in enumerate(zip(labels, counts, strict=False)):
        total = sum(row)
        cells = [_shaded(n, n / total if total else 0.0, text.count(n), j == k) for j, n in enumerate(row)]
        lines.append((text.short(label, 24), cells))
    right, total = sum(row[k] for k, row in enumerate(counts)), sum(map(sum, counts))
    read = f"Rows: what it is. Columns: what was predicted. {text.count(right)} of {text.count(total)} are right."
    return Matrix(title, [text.short(label, 24) for label in labels], lines, read, "truth \\ predicted")


def _shaded(number: float, share: float, shown: str, right: bool = False) -> Shade:
    step = min(SHADES, math.ceil(SHADES * share)) if number > 0 else 0
    return Shade(shown, f"{'r' if right else 'w'}{step}")


def _class_table(run: RunRecord, place: int | None) -> Table:
    found = run.evaluation["classes"]
    held = any(row.get("coverage") is not None for row in found)
    own = recalls(run, place) if place is not None and len(run.rows) > 1 else []
    heads = ["Class", "Test", "Recall", "95 % interval"]
    heads += [f"Recall at {text.short(str(run.rows[place or 0]['name']), 24)}"] if own else []
    heads += ["Coverage of sets", "Set size", "Empty sets"] if held else []
    lines = []
    for k, row in enumerate(found):
        recall, test = value(row, "recall"), int(row.get("test") or 0)
        span = text.MISSING
        if test and math.isfinite(recall):
            low, high = wilson(recall, test)
            span = f"{100 * low:.0f}–{text.percent(high, 0)}"
        cells = [text.count(test), text.percent(recall), span]
        if own:
            cells.append(
                f"{text.percent(own[k].share, 0)} ({own[k].found} of {own[k].test})" if own[k].test else text.MISSING
            )
        if held:
            cells += [text.percent(value(row, "coverage")), text.decimal(value(row, "set_size"), 2)]
            cells.append(text.percent(value(row, "empty")))
        lines.append(Row(text.short(run.class_labels[k], 40), cells))
    return Table(heads, lines, "Recall of each class")


def _missing(run: RunRecord, what: str) -> str:
    """Why a section lacks something, in a sentence."""
    if run.summary.get("protocol") == "deployed":
        return f"Sites of a deployment tell sums alone, so there are no {what}."
    if len(run.class_labels) > 20:
        return f"With {len(run.class_labels)} classes there are no {what}."
    return f"This run has no record of {what}; runs of version 0.11 and later do."


def missing(run: RunRecord) -> str:
    """A sentence on the sections that this page lacks; empty where it has them."""
    if run.diagnostics or not run.rows:
        return ""
    return _missing(run, "confusion matrices, decision curves and effects of columns")


# --- Decisions --------------------------------------------------------------------------------------------------------


def decisions(run: RunRecord) -> list[Figure]:
    """What comes of acting on predictions: thresholds, net benefit, abstention, and the sizes of sets."""
    return [one for one in (_thresholds(run), _net_benefit(run), _abstention(run), _set_sizes(run)) if one is not None]


def _thresholds(run: RunRecord) -> Figure | None:
    found = run.diagnostics.get("thresholds")
    if not found or not 0 < found["positive"] < found["examples"] or len(run.class_labels) != 2:
        return None
    positive, negative = found["positive"], found["examples"] - found["positive"]
    first, second = (text.short(label, 12) for label in run.class_labels)
    lines = [
        Path("sensitivity", [(t, n / positive) for t, n in zip(found["at"], found["true"], strict=True)], "first"),
        Path(
            "specificity", [(t, 1 - n / negative) for t, n in zip(found["at"], found["false"], strict=True)], "second"
        ),
    ]
    drawn = charts.paths(lines, f"threshold of the probability of ‘{second}’", "Sensitivity and specificity")
    read = (
        f"A case counts as ‘{second}’ if its probability is at least the threshold. Sensitivity: share of the ‘{second}’ "
        f"cases that are found. Specificity: share of the ‘{first}’ cases that are not taken for ‘{second}’. All clients pooled."
    )
    return Figure("Sensitivity and specificity by threshold", drawn, read)


def _net_benefit(run: RunRecord) -> Figure | None:
    found = run.diagnostics.get("thresholds")
    if not found or not 0 < found["positive"] < found["examples"] or len(run.class_labels) != 2:
        return None
    n, positive = found["examples"], found["positive"]
    at = [t for t in found["at"] if t <= 0.8]
    model = [(t, (a - b * t / (1 - t)) / n) for t, a, b in zip(at, found["true"], found["false"], strict=False)]
    everyone = [(t, (positive - (n - positive) * t / (1 - t)) / n) for t in at]
    top = max(b for _, b in [*model, *everyone])
    lines = [
        Path("model", model, "first"),
        Path("act on all", everyone, "second"),
        Path("act on none", [(t, 0.0) for t in at], "quiet"),
    ]
    second = text.short(run.class_labels[1], 12)
    drawn = charts.paths(lines, "threshold probability", "Net benefit", text.decimal, low=-0.2 * top)
    read = (
        f"Decision curve: ‘{second}’ cases that are found, minus false alarms weighted by the odds of the threshold, as a "
        "share of all cases. Acting on the model helps where its line is above both others."
    )
    return Figure("Net benefit of acting on the model", drawn, read)


def _abstention(run: RunRecord) -> Figure | None:
    found = run.diagnostics.get("risk")
    if not found or not found["share"] or not run.measures:
        return None
    squares = run.diagnostics.get("loss") == "square"
    measure, factor = run.scaled(run.measures[0])
    losses = [factor * math.sqrt(v) if squares else v for v in found["loss"]]
    points = list(zip(found["share"], losses, strict=True))
    show = measure.show if squares else text.percent
    what = measure.label if squares else "error rate"
    drawn = charts.paths(
        [Path(what, points, "first")],
        "share of cases that are answered, the surest first",
        f"{what} by share answered",
        show,
    )
    half = points[len(points) // 2 - 1]
    read = (
        f"If only the surest cases are answered and the rest is left to a person: with half of them answered the {what if squares else 'error rate'} "
        f"is {show(half[1])}, with all {show(points[-1][1])}. If the line rises to the right, the model errs most where it is least sure."
    )
    return Figure("Leaving unsure cases to a person", drawn, read)


def _set_sizes(run: RunRecord) -> Figure | None:
    sizes = run.diagnostics.get("set_sizes")
    if not sizes or not sum(sizes):
        return None
    total = sum(sizes)
    share = Metric("share", "share of test examples", text.percent)
    names = {0: "no label", 1: "1 label"}
    lines = [
        Line(names.get(k, f"{k} labels"), n / total, note=f"{text.percent(n / total)}, {text.plural(n, 'example')}")
        for k, n in enumerate(sizes)
        if n or k
    ]
    read = (
        "How many labels the calibrated 90 % prediction sets hold. One label is an answer. More are a short list for a "
        "person. None means that no label is likely enough, so a person should look."
    )
    return Figure("Sizes of prediction sets", charts.bars(lines, share), read)


def observed(run: RunRecord) -> Figure | None:
    """Predicted against observed numbers, by groups of examples."""
    found = run.diagnostics.get("groups")
    if not found or len(found) < 2 or not run.measures:
        return None
    name, scale = run.target
    known = run.standardised and math.isfinite(scale)
    factor = scale if known else 1.0
    scaled = [[n, factor * p, factor * o, factor * e] for n, p, o, e in found]
    unit = " (from its mean)" if run.standardised else ""
    drawn = charts.groups(scaled, lambda v: text.decimal(v, 2), f"{name or 'number'}{unit}")
    read = "Test examples in groups of equal size by their prediction. On the dotted line predictions are right on average; whiskers are 95 % intervals."
    return Figure("Predicted against observed", drawn, read)


# --- Columns ----------------------------------------------------------------------------------------------------------


def effects(run: RunRecord) -> dict[str, Any] | None:
    """Which columns the predictions depend on, over all clients and at each."""
    found = run.diagnostics.get("effects")
    if not found:
        return None
    if "skipped" in found:
        return {"said": found["skipped"], "figure": None, "matrix": None}
    names, pooled = found["columns"], found["pooled"]
    rise = Metric("rise", "rise of the NLL", _plain)
    lines = [
        Line(text.short(name, 24), v, note=_plain(v)) for name, v in zip(names, pooled, strict=True) if v is not None
    ]
    read = "How much the NLL rises if the column is shuffled among a client's own test rows. Near 0: the predictions hardly depend on it."
    more = f" These are the first {len(names)} of {found['of']} columns." if found.get("of", 0) > len(names) else ""
    said = (
        f"Permutation importance over {text.plural(found['rows'], 'test row')}, with each client's own model.{more} It "
        "says what the models use, not what causes what. Two columns that hold the same may both look unimportant."
    )
    matrix = None
    usable = [(name, row) for name, row in zip(found["clients"], found["rises"], strict=True) if None not in row]
    if len(usable) > 1:
        top = max((v for _, row in usable for v in row[:TOP_COLUMNS]), default=0.0) or 1.0
        matrix = Matrix(
            "At each client",
            [text.short(name, 16) for name in names[:TOP_COLUMNS]],
            [
                (
                    text.short(str(name), 30),
                    [_shaded(v, max(0.0, v / top), _plain(v, 2), True) for v in row[:TOP_COLUMNS]],
                )
                for name, row in usable[:TOP_CLIENTS]
            ],
            "The stronger the colour, the more the predictions of this client depend on the column."
            + (f" The first {TOP_CLIENTS} of {len(usable)} clients." if len(usable) > TOP_CLIENTS else ""),
            "client",
        )
    return {"said": said, "figure": Figure("Over all clients", charts.bars(lines, rise), read), "matrix": matrix}


def _plain(x: float, digits: int = 3) -> str:
    """A number without the minus of one that is rounded to 0."""
    return text.decimal(round(x, digits) + 0.0, digits)


# --- The model card ---------------------------------------------------------------------------------------------------


def card(run: RunRecord) -> list[tuple[str, list[str]]]:
    """What the model is, what it was made from, and what it is not good for: headings with sentences."""
    summary, config = run.summary, run.config
    data, settings = config.get("data", {}), config.get("run", {})
    tested = [row for row in run.rows if row.get("test")]
    total = sum(row["test"] for row in tested)
    trained = sum(row.get("train") or 0 for row in run.rows)
    clients = int(summary.get("clients", len(run.rows)))
    about = [f"{summary.get('data', 'Unnamed data')}: {text.plural(clients, 'client')}."]
    if run.target[0] and run.task.standardised:
        about.append(f"Predicts the number ‘{run.target[0]}’.")
    elif labels := run.class_labels:
        told = ", ".join(text.short(label, 20) for label in labels[:6])
        about.append(f"Predicts one of {len(labels)} classes: {told}{', …' if len(labels) > 6 else ''}.")
    if trained:
        about.append(
            f"{text.plural(trained, 'training example')} and {text.plural(total, 'test example')} of the tested clients."
        )
    if data.get("test_fraction") is not None:
        about.append(
            f"{text.percent(float(data['test_fraction']), 0)} of each client's examples were held out for testing."
        )
    made = [
        f"{summary.get('title') or summary.get('method', 'Unknown method')}, {text.plural(int(summary.get('rounds', 0)), 'round')}, seed {summary.get('seed', '?')}."
    ]
    if factors := summary.get("factors"):
        made.append(f"Weights: {factors}.")
    if config.get("model", {}).get("network"):
        network = config["model"]
        made.append(f"Network: {network['network']}.")
    made.append(f"Trained with bpfed {config.get('bpfed', 'of an unknown version')}; page made with {__version__}.")
    deployed = summary.get("protocol") == "deployed"
    where = "The rows stayed at the sites." if deployed else "A simulation: all rows were on one machine."
    privacy = "Updates were sent without differential privacy."
    if "epsilon" in summary:
        privacy = f"Differential privacy of a client: ε = {text.epsilon(summary['epsilon'], 2)}, δ = {summary.get('delta', 0):g}."
    found = [("Data", about), ("Model", made), ("Privacy", [where, privacy]), ("Limits", limits(run))]
    if settings.get("calibrate", "none") != "none" or run.calibration_words:
        found.insert(2, ("Calibration", [run.calibration_words or "Nothing was changed by calibration."]))
    return [(heading, [sentence for sentence in said if sentence]) for heading, said in found]


def limits(run: RunRecord) -> list[str]:
    """What the figures of this page do not show, and where the model is weak."""
    found = [
        "The scores are of held-out examples of the same clients. Later data, or a client that took no part, may be harder.",
    ]
    tested = [row for row in run.rows if row.get("test")]
    few = [str(row["name"]) for row in tested if row["test"] < FEW]
    if few:
        who = ", ".join(text.short(name, 24) for name in few[:3]) + (
            f" and {len(few) - 3} more" if len(few) > 3 else ""
        )
        found.append(f"Fewer than {FEW} test examples, so their figures vary widely by chance: {who}.")
    rare = [
        text.short(label, 24)
        for label, row in zip(run.class_labels, run.evaluation.get("classes", []), strict=False)
        if (row.get("test") or 0) < FEW
    ]
    if rare:
        found.append(
            f"Classes with fewer than {FEW} test examples: {', '.join(rare[:6])}{', …' if len(rare) > 6 else ''}."
        )
    poor = [text.short(one.name, 24) for one in verdicts(run) if one.level == "poor"]
    if poor:
        found.append(
            f"Do not rely on it at {', '.join(poor[:3])}{f' and {len(poor) - 3} more' if len(poor) > 3 else ''}: there it is no better than a guess."
        )
    if not math.isfinite(run.last("coverage")):
        found.append(
            f"There are no calibrated prediction {run.task.regions}; train with --calibration 0.2 to get them."
        )
    return found
