"""The table of clients: the worst first, sortable by any column, cut in the middle where it would be endless."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from bpfed._util import text
from bpfed.report import svg
from bpfed.report.charts import wilson
from bpfed.report.measures import Measure
from bpfed.report.record import JUDGED, judged, value

#: With more columns than this, each has less room; and with more than that, much less.
ROOMY, CROWDED = 9, 13
#: With more clients than this, only the worst and the best halves of this number are shown.
LONGEST = 200


def ranked(rows: Sequence[dict[str, Any]], main: Measure) -> list[dict[str, Any]]:
    """The rows from the worst client to the best by the main metric (ties by NLL); untested clients last."""

    def badness(row: dict[str, Any]) -> tuple[bool, float, float]:
        v, nll = value(row, main.name), value(row, "nll")
        return math.isnan(v), v if main.high_is_good else -v, -nll if math.isfinite(nll) else 0.0

    return sorted(rows, key=badness)


def worst_names(ranking: Sequence[dict[str, Any]], main: Measure) -> frozenset[str]:
    """Names of the worst tenth of the tested clients: at least one and at most ten, none if all are alike."""
    tested = [row for row in ranking if math.isfinite(value(row, main.name))]
    if len({value(row, main.name) for row in tested}) < 2:
        return frozenset()
    return frozenset(row["name"] for row in tested[: min(10, max(1, len(tested) // 10))])


def clients(ranking: Sequence[dict[str, Any]], measures: Sequence[Measure], worst: frozenset[str]) -> str:
    """The table, and a sentence before it where clients were left out."""
    shown, note = list(ranking), ""
    if len(ranking) > LONGEST:
        half = LONGEST // 2
        shown = [*ranking[:half], *ranking[-half:]]
        note = (
            f'<p class="note">The {half} worst and the {half} best of {text.count(len(ranking))} clients; the '
            f"{text.count(len(ranking) - LONGEST)} between them are not shown.</p>"
        )
    main = measures[0]
    columns = _columns(measures, any("calibration" in row for row in ranking))
    longest = max((v for row in ranking if math.isfinite(v := value(row, main.name))), default=1.0)
    full = 1.0 if main.show is text.percent else longest
    head = "".join(
        f'<th scope="col"{_sorted(key, main)} title="{escape(explain)}">'
        f'<button type="button">{escape(title)}</button></th>'
        for key, title, _, explain in columns
    )
    body = "".join(_row(row, columns, main, full, row["name"] in worst) for row in shown)
    many = len(columns) > ROOMY
    kind = " many most" if len(columns) > CROWDED else " many" if many else ""
    if many:
        note += '<p class="note sideways">Scroll right for more columns.</p>'
    return (
        f'{note}<div class="scroll" tabindex="0" role="region" aria-label="Clients">'
        f'<table class="sortable{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


Column = tuple[str, str, Callable[[float], str], str]


def _columns(measures: Sequence[Measure], held_back: bool) -> list[Column]:
    columns: list[Column] = [
        ("name", "Client", text.count, "The client's name"),
        ("train", "Train", text.count, "Training examples"),
        ("test", "Test", text.count, "Test examples"),
    ]
    if held_back:
        columns.insert(2, ("calibration", "Held back", text.count, "Examples held back to calibrate predictions"))
    for measure in measures:
        more = f" A dash: fewer than {JUDGED} test examples." if measure.calibrates else ""
        more = " In brackets its 95 % interval, by the number of test examples." if measure.name == "coverage" else more
        columns.append((measure.name, measure.label, measure.show, measure.explain + more))
        if measure.name == "ece":
            floor = "What perfect calibration would show on so few examples, on average"
            columns.append(("ece_floor", "ECE floor", text.percent, floor))
    return columns


def _sorted(key: str, main: Measure) -> str:
    return f' aria-sort="{"ascending" if main.high_is_good else "descending"}"' if key == main.name else ""


def _row(row: dict[str, Any], columns: Sequence[Column], main: Measure, full: float, bad: bool) -> str:
    mark = ' <span class="tag">worst</span>' if bad else ""
    cells = [f'<th scope="row">{escape(str(row["name"]))}{mark}</th>']
    for key, _, show, _ in columns[1:]:
        v = judged(row, key)
        number = show(v)
        if key == main.name and math.isfinite(v):
            bar = svg.box(0, 0, 100 * max(0.0, min(1.0, v / full if full else 0.0)), 8, "fill")
            meter = f'<svg class="meter" viewBox="0 0 100 8" aria-hidden="true">{bar}</svg>'
            number = f'{meter}<span class="beside">{number}</span>'
        elif key == "coverage" and math.isfinite(v) and row.get("test"):
            low, high = wilson(v, row["test"])
            number += f" ({100 * low:.0f}–{100 * high:.0f})"
        # A measured number sorts by itself, not by how it is printed.
        data = f' data-v="{v:.6g}"' if math.isfinite(v) else ""
        cells.append(f"<td{data}>{number}</td>")
    return f"<tr{' class=bad' if bad else ''}>{''.join(cells)}</tr>"


def reliability(reliability: dict[str, Any], bins: int, intervals: bool) -> str:
    """The numbers behind the reliability diagram, one line per bin (or per level of a predictive interval)."""
    first, heads = ("Level", ("Inside",)) if intervals else ("Confidence", ("Examples", "Right"))
    head = "".join(f'<th scope="col">{h}</th>' for h in (first, *heads, "95 % interval", "Gap, points"))
    lines = []
    columns = (reliability["count"], reliability["confidence"], reliability["accuracy"])
    for b, (n, claimed, seen) in enumerate(zip(*columns, strict=True)):
        if not n or claimed is None or seen is None:
            continue
        low, high = wilson(seen, n)
        span = f"{100 * low:.0f}–{text.percent(high, 0)}"
        gap = ("+" if seen > claimed else "") + text.decimal(100 * (seen - claimed), 1)
        label = text.percent(claimed, 0) if intervals else f"{100 * b / bins:.3g}–{100 * (b + 1) / bins:.3g}\u202f%"
        middle = [] if intervals else [text.count(n)]
        cells = "".join(f"<td>{cell}</td>" for cell in [*middle, text.percent(seen), span, gap])
        lines.append(f'<tr><th scope="row">{label}</th>{cells}</tr>')
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="fits"><table class="binned">{body}</table></div>'
