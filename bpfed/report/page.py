"""What the page of a run says, from its title down to its settings; ``templates/run.html.j2`` lays it out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from bpfed._util import text
from bpfed._util.files import to_toml
from bpfed.metrics.registry import METRICS, Metric
from bpfed.report import charts, html, sections, svg
from bpfed.report.charts import Curve, wilson
from bpfed.report.html import Figure, Row, Table
from bpfed.report.record import JUDGED, RunRecord, judged, value
from bpfed.report.sections import ranked, worst_names
from bpfed.report.verdicts import against_own, errors_known, headline, verdicts, why

_KL = Metric("train_kl", "KL to the prior", text.decimal, "How far training moved the weights from their prior.")
_DETAILS: tuple[tuple[str, Callable[[Any], str]], ...] = (
    ("protocol", "{} protocol".format),
    ("partition", text.dealt),
    ("device", "on {}".format),
)
#: With more columns than this, each has less room; and with more than that, much less.
ROOMY, CROWDED = 9, 13
#: With more clients than this, the verdicts on the others are folded away.
SHOWN = 8
#: With more clients than this, a field picks some of them by name.
FILTERED = 6
#: With more clients than this, only the worst and the best halves of this number are in the table.
LONGEST = 200


class Tile(NamedTuple):
    """A figure in large type: its heading, itself, what it is, and lines of further figures."""

    title: str
    figure: str
    explain: str
    lines: list[tuple[str, str]]


class Column(NamedTuple):
    """A column of a table that can be sorted.

    Attributes:
        key: Of its numbers in a client's row.
        title: Its heading.
        show: Number to text.
        explain: What it is, in one sentence.
        sort: How rows are sorted by it at first; empty: they are not.
        words: Whether its cells are words rather than numbers.
    """

    key: str
    title: str
    show: Callable[[float], str] = text.count
    explain: str = ""
    sort: str = ""
    words: bool = False


class Cell(NamedTuple):
    """A cell of such a table: its text, the number it is sorted by, its class, a bar before it and what is after it."""

    text: str
    value: str | None = None
    style: str = ""
    meter: str = ""
    beside: str = ""


class Line(NamedTuple):
    """A row of such a table: its heading, a word beside it, its cells, its class, and what its heading links."""

    name: str
    cells: list[Cell]
    tag: str = ""
    style: str = ""
    link: str = ""


def render(run: RunRecord, examples: Mapping[str, Any] | None = None) -> str:
    """The whole page as text. The same record gives the same page, byte for byte.

    Args:
        run: The record.
        examples: Rows of a client, for a page that stays with it: what is ``said`` of them, and ``parts``, tables.
    """
    return html.page(
        "run.html.j2",
        title=run.title,
        details=run_details(run),
        verdict=verdict(run),
        dots=sections.client_dots(run) if run.measures and run.history else [],
        errors=sections.errors(run) if run.measures else None,
        decisions=sections.decisions(run),
        effects=sections.effects(run),
        missing=sections.missing(run),
        card=sections.card(run),
        examples=examples,
        made_with=run.config.get("bpfed", ""),
        tiles=tiles(run),
        basis=basis(run),
        baselines=baselines(run),
        training=training(run),
        calibration=calibration(run),
        further=[(heading, said) for heading, section in run.task.sections if (said := section(run))],
        clients=clients(run),
        settings=[("The full configuration of this run", to_toml(run.config).strip())],
    )


def write(run: RunRecord, path: str | os.PathLike[str]) -> Path:
    """Render to a file, whole or not at all."""
    return html.write_page(render(run), path)


def run_details(run: RunRecord) -> list[str]:
    """Where and how it ran."""
    known = {key: v for key, v in run.summary.items() if v not in (None, "") and (key, v) != ("protocol", "own")}
    found = [words(known[key]) for key, words in _DETAILS if key in known]
    if 0 < (seconds := value(run.summary, "seconds")) < math.inf:
        found.append(text.duration(seconds))
    return found


def verdict(run: RunRecord) -> dict[str, Any] | None:
    """What is said of each client first."""
    found = verdicts(run) if run.measures and run.history else []
    if not found:
        return None
    errors = errors_known(run)
    read = (
        "A difference counts if it is more than twice its standard error over the client's own test examples."
        if errors
        else "Standard errors are not known here, so small differences may be chance."
    )
    return {
        "headline": headline(run, found),
        "why": why(found),
        "own": against_own(run),
        "shown": found[:SHOWN],
        "more": found[SHOWN:],
        "filter": len(run.rows) > FILTERED,
        "read": f"{read} {_guessing(run)}".strip(),
    }


def _guessing(run: RunRecord) -> str:
    if math.isfinite(run.last("majority")):
        return (
            "Guessing means always predicting the most frequent class (accuracy) or the class shares (NLL) of a client's "
            "own training examples."
        )
    return ""


def basis(run: RunRecord) -> str:
    """What the large figures are of."""
    if not run.history:
        return ""
    tested = [row for row in run.rows if row.get("test")]
    over = (
        f", over {text.plural(_total(run), 'test example')} of {text.plural(len(tested), 'client')}" if tested else ""
    )
    return (
        f"The large figures are those of the last round ({run.history[-1]['round']}){over}, all examples pooled."
        f" The best round was picked by looking at the test data, so it is optimistic; it is given because "
        "papers often report it."
    )


def _total(run: RunRecord) -> int:
    return sum(row.get("test") or 0 for row in run.rows)


def tiles(run: RunRecord) -> list[Tile]:
    """The figures of the last round."""
    if not run.history or not run.measures:
        return []
    return [*(_tile(run, measure) for measure in run.measures if measure.prominent), *_worst_tile(run)]


def _tile(run: RunRecord, measure: Metric) -> Tile:
    fine, in_units = _total(run) >= 1000, run.in_units(measure)
    shown = in_units or measure

    def show(x: float) -> str:
        return text.percent(x, 2) if fine and shown.show is text.percent else shown.show(x)

    lines = []
    if in_units:
        lines.append(("in standard deviations", measure.show(run.last(measure.name))))
    if measure.name == "ece":
        floor = value(run.evaluation, "ece_floor")
        lines.append((f"by chance, {run.evaluation.get('bins', '?')} bins", show(floor)))
    name, words = measure.without
    if math.isfinite(without := run.last(name)):
        lines.append((words, show(without)))
    if len(run.rows) != 1:
        lines.append(("client mean", show(run.mean(measure.name))))
        lines.append(("worst client", show(run.worst(measure.name))))
    # A round's calibration error alone ranks nothing: an untrained model that says so is calibrated.
    if measure.has_best_round and (best := run.best(measure.name)):
        lines.append((f"best, round {best[0]}", show(best[1])))
    return Tile(shown.full, show(run.last(measure.name)), shown.explain, lines)


def _worst_tile(run: RunRecord) -> list[Tile]:
    main = run.measures[0]
    ranking = ranked(run.rows, main)
    if len(run.rows) < 2 or math.isnan(value(ranking[0], main.name)):
        return []
    row = ranking[0]
    lines = [("name", text.short(str(row["name"]), 40)), ("tested on", text.count(row["test"]))]
    if main.proportion:
        low, high = wilson(row[main.name], row["test"])
        lines.append(("95 % interval", f"{100 * low:.0f}–{text.percent(high, 0)}"))
    lines.append(("NLL", text.decimal(value(row, "nll"))))
    explain = f"The client whose {main.in_words} is the worst at the last round."
    return [Tile("Worst client", (run.in_units(main) or main).show(value(row, main.name)), explain, lines)]


def baselines(run: RunRecord) -> dict[str, Any] | None:
    """The run beside plain models on the same test rows."""
    said = " ".join(filter(None, (run.verdict, run.skipped_baselines)))
    if not said or not run.baselines:
        return {"said": said, "table": None} if said else None
    shown = [m for m in run.measures if m.name in run.baselines[0]["scores"]]
    heads = ["Model", *((run.in_units(m) or m).full for m in shown), "NLL, client mean", "Clients with a lower NLL"]
    title = str(run.summary.get("title") or run.summary.get("method", "This run"))
    own = {m.name: {part: run.last(m.name, part) for part in ("pooled", "mean")} for m in shown}
    rows = [(value(own, "nll", "pooled"), title, own, text.MISSING, "own")]
    for row, rival in zip(run.baselines, run.rivals, strict=True):
        lower = f"{rival.lower} of {rival.pairs}" if rival.pairs else text.MISSING
        rows.append((rival.nll, row["title"], row["scores"], lower, ""))
    lines = []
    for _, name, scores, lower, style in sorted(rows, key=lambda row: (math.isnan(row[0]), row[0])):
        cells = [(run.in_units(m) or m).show(value(scores, m.name, "pooled")) for m in shown]
        lines.append(Row(name, [*cells, text.decimal(value(scores, "nll", "mean")), lower], style))
    return {"said": said, "table": Table(heads, lines, "Baselines")}


def training(run: RunRecord) -> list[Figure]:
    """How the metrics moved over the rounds."""
    if not run.history or not run.measures:
        return []
    main = run.measures[0]
    figures = [_main_curves(run, main)]
    if main.name != "nll":
        lines = [Curve("test", run.over("nll"), "first"), Curve("training", run.over("train_nll", None), "second")]
        read = (
            "Low is good. If the test line rises while the training line falls, the model overfits. Training is measured "
            "during the steps with one draw of the weights, test with the average over draws."
        )
        drawn = charts.curves(run.rounds, lines, METRICS["nll"])
        figures.append(Figure("Negative log-likelihood (nats per example)", drawn, read))
    if any(map(math.isfinite, run.over("ece"))):
        floor = value(run.evaluation, "ece_floor")
        level = ("by chance", floor) if math.isfinite(floor) else None
        read = (
            "The gap between claimed and observed. The dotted line is what perfectly calibrated predictions would show by "
            "chance on these test examples; a gap of that size means nothing."
        )
        drawn = charts.curves(run.rounds, [Curve("pooled", run.over("ece"), "first")], METRICS["ece"], level=level)
        figures.append(Figure(f"Calibration error (ECE, {run.evaluation.get('bins', '?')} bins)", drawn, read))
    kl = run.over("train_kl", None)
    if any(math.isfinite(v) and v != 0 for v in kl):
        read = "How far local training moved each client’s posterior from its prior in that round; it should settle."
        drawn = charts.curves(run.rounds, [Curve("training", kl, "second")], _KL)
        figures.append(Figure("KL to the prior (nats per example)", drawn, read))
    return figures


def _main_curves(run: RunRecord, main: Metric) -> Figure:
    lines, read = [Curve("pooled", run.over(main.name), "first")], main.explain
    if len(run.rows) != 1:
        lines.append(Curve("worst client", run.over(main.name, "worst"), "second"))
        read += " The dashed line is whichever client is worst in that round."
    best = run.best(main.name)
    if best:
        read += f" The ring is the best round ({best[0]})."
    return Figure(main.full, charts.curves(run.rounds, lines, main, best=best), read)


def calibration(run: RunRecord) -> dict[str, Any] | None:
    """Whether the stated certainty can be believed, over all clients."""
    found = run.evaluation.get("reliability")
    if not found or not any(found["count"]) or not run.measures:
        return None
    bins = int(run.evaluation.get("bins", len(found["count"])))
    intervals = run.task.regions == "intervals"
    if intervals:
        read = "Each dot is one of the models’ own intervals: its nominal level against the share of targets inside. "
    else:
        read = "Each bar is a bin of confidence: as high as the share that was right, its dot at the mean confidence. "
    read += "Dots on the dotted line are perfectly calibrated; a whisker (95 % interval) that crosses it may be."
    return {
        "said": [sentence for sentence in (_verdict(found, intervals), _temperature(run), *_in_use(run)) if sentence],
        "diagram": Figure("Claimed against observed", charts.reliability(found, bins, intervals), read),
        "table": _bins_table(found, bins, intervals),
        "more": [one for one in (sections.client_confidence(run), sections.observed(run)) if one is not None],
    }


def _bins_table(found: dict[str, Any], bins: int, intervals: bool) -> Table:
    """The numbers behind the reliability diagram, one line per bin (or per level of a predictive interval)."""
    first, heads = ("Level", ["Inside"]) if intervals else ("Confidence", ["Examples", "Right"])
    lines = []
    for b, (n, claimed, seen) in enumerate(zip(found["count"], found["confidence"], found["accuracy"], strict=True)):
        if not n or claimed is None or seen is None:
            continue
        low, high = wilson(seen, n)
        points = round(100 * (seen - claimed), 1)
        gap = ("+" if points > 0 else "") + text.decimal(points, 1)
        label = text.percent(claimed, 0) if intervals else f"{100 * b / bins:.3g}–{100 * (b + 1) / bins:.3g}\u202f%"
        middle = [] if intervals else [text.count(n)]
        lines.append(Row(label, [*middle, text.percent(seen), f"{100 * low:.0f}–{text.percent(high, 0)}", gap]))
    return Table([first, *heads, "95 % interval", "Gap, points"], lines, "Claimed against observed")


def _verdict(found: dict[str, Any], intervals: bool) -> str:
    """The calibration in one sentence, which does not make more of a difference than chance allows."""
    entries = [
        (n, c, a)
        for n, c, a in zip(found["count"], found["confidence"], found["accuracy"], strict=True)
        if n and c is not None and a is not None
    ]
    if intervals:
        judged = [min(entries, key=lambda entry: abs(entry[1] - 0.5)), entries[-1]]
        held = " and ".join(f"{text.percent(a)} ({text.percent(c, 0)} intervals)" for _, c, a in judged)
        bounds = [(c, *wilson(a, n)) for n, c, a in judged]
        narrow, wide = any(high < level for level, _, high in bounds), any(low > level for level, low, _ in bounds)
        words = "as wide as they should be, within chance"
        if narrow or wide:
            words = (
                "too wide in the middle and too narrow at the ends"
                if narrow and wide
                else "too narrow"
                if narrow
                else "too wide"
            )
        return f"The models’ own intervals hold {held} of the targets: they are {words}."
    total = sum(n for n, _, _ in entries)
    if not total:
        return "There are no finite predictions to judge."
    claimed = sum(n * c for n, c, _ in entries) / total
    right = sum(n * a for n, _, a in entries) / total
    low, high = wilson(right, total)
    start = f"On average the models claim {text.percent(claimed)} and are right in {text.percent(right)}"
    start += f" of {text.plural(total, 'example')}"
    if claimed > high:
        return f"{start}: they are over-confident."
    if claimed < low:
        return f"{start}: they are under-confident."
    return f"{start}: no difference beyond chance. Single bins may still be off."


def _temperature(run: RunRecord) -> str:
    """What was done about that, or could be."""
    return run.calibration_words or run.calibration_advice


def _in_use(run: RunRecord) -> list[str]:
    """What the predictions are worth to who acts on them, in some sentences."""
    abstained, right = run.last("abstained"), run.last("answered_accuracy")
    rest = f" ({text.plural(run.sure, 'example')})" if run.sure else ""
    abstention, sets = "", ""
    if math.isfinite(abstained):
        abstention = f"On {text.percent(abstained)} of the examples the models are less than 90 % sure and abstain."
        abstention += f" On the rest{rest} they are right in {text.percent(right)}." if math.isfinite(right) else ""
    held, size, width = (run.last(name) for name in ("coverage", "set_size", "interval_width"))
    if math.isfinite(size):
        sets = (
            f"The 90 % prediction sets, calibrated on examples held back, hold the right label in {text.percent(held)} of the "
            f"examples. They have {text.decimal(size, 2)} labels on average."
        )
    elif math.isfinite(held):
        unit = " standard deviations" if run.standardised else ""
        own = run.in_units(METRICS["interval_width"])
        shown = own.show(width) if own else f"{text.decimal(width, 2)}{unit}"
        wide = f" and are {shown} wide on average" if math.isfinite(width) else ""
        sets = (
            f"The calibrated 90 % intervals, widened or narrowed by what examples held back say, hold "
            f"{text.percent(held)} of the targets{wide}. The diagram and the numbers below are of the models’ own intervals."
        )
    return [abstention, " ".join(filter(None, (sets, run.sets_words))), run.uncovered]


def clients(run: RunRecord) -> dict[str, Any] | None:
    """Who is served well and who is not: the worst first, cut in the middle where the table would be endless."""
    if not run.rows or not run.measures:
        return None
    main = run.measures[0]
    ranking = ranked(run.rows, main)
    worst = worst_names(ranking, main)
    intro = "".join(f"{sentence} " for sentence in (run.untested, run.participation_note, run.no_use) if sentence)
    if worst:
        who = "The client" if len(worst) == 1 else f"The {len(worst)} clients"
        intro += f"{who} with the worst {main.in_words} {'is' if len(worst) == 1 else 'are'} marked. "
    intro += "Click a column’s head to sort."
    shown, notes = list(ranking), []
    if len(ranking) > LONGEST:
        half = LONGEST // 2
        shown = [*ranking[:half], *ranking[-half:]]
        notes.append(
            f"The {half} worst and the {half} best of {text.count(len(ranking))} clients; the "
            f"{text.count(len(ranking) - LONGEST)} between them are not shown."
        )
    columns = _columns([run.in_units(m) or m for m in run.listed], any("calibration" in row for row in ranking))
    longest = max((v for row in ranking if math.isfinite(v := value(row, main.name))), default=1.0)
    full = 1.0 if main.show is text.percent else longest
    many = len(columns) > ROOMY
    return {
        "intro": intro,
        "notes": notes,
        "kind": " many most" if len(columns) > CROWDED else " many" if many else "",
        "columns": columns,
        "rows": [_line(row, columns, main, full, row["name"] in worst) for row in shown],
        "definitions": [(column.title, column.explain) for column in columns if column.explain],
    }


def _columns(measures: Sequence[Metric], held_back: bool) -> list[Column]:
    columns = [Column("name", "Client"), Column("train", "Train", explain="Training examples.")]
    if held_back:
        columns.append(Column("calibration", "Held back", explain="Examples held back to calibrate predictions."))
    columns.append(Column("test", "Test", explain="Test examples."))
    for measure in measures:
        more = f" A dash: fewer than {JUDGED} test examples." if measure.calibrates else ""
        more = " In brackets its 95 % interval, by the number of test examples." if measure.name == "coverage" else more
        first = "ascending" if measure.high_is_good else "descending"
        sort = first if measure is measures[0] else ""
        columns.append(Column(measure.name, measure.label, measure.show, measure.explain + more, sort))
        if measure.name == "ece":
            floor = "What perfect calibration would show on so few examples, on average."
            columns.append(Column("ece_floor", "ECE by chance", text.percent, floor))
    return columns


def _line(row: dict[str, Any], columns: Sequence[Column], main: Metric, full: float, bad: bool) -> Line:
    cells = []
    for column in columns[1:]:
        v = judged(row, column.key)
        known, number, meter = math.isfinite(v), column.show(v), ""
        if column.key == main.name and known:
            bar = svg.box(0, 0, 100 * max(0.0, min(1.0, v / full if full else 0.0)), 8, "fill")
            meter = Markup(f'<svg class="meter" viewBox="0 0 100 8" aria-hidden="true">{bar}</svg>')
        elif column.key == "coverage" and known and row.get("test"):
            low, high = wilson(v, row["test"])
            number += f" ({100 * low:.0f}–{100 * high:.0f})"
        # A measured number sorts by itself, not by how it is printed.
        cells.append(Cell(number, f"{v:.6g}" if known else None, meter=meter))
    return Line(str(row["name"]), cells, "worst" if bad else "", "bad" if bad else "")
