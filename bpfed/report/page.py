"""The parts of the page, from the run's title down to its settings."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from bpfed._util import text
from bpfed._util.files import to_toml, write_whole
from bpfed.report import charts, client_table
from bpfed.report.charts import Curve, wilson
from bpfed.report.html import document, figure
from bpfed.report.measures import DETAILS, MEASURES, Measure
from bpfed.report.record import RunRecord, value

_KL = Measure("train_kl", "KL to the prior", text.decimal, "How far training moved the weights from their prior.")


def headline(run: RunRecord) -> str:
    """The title, where and how it ran, and the figures of the last round."""
    known = {key: v for key, v in run.summary.items() if v not in (None, "") and (key, v) != ("protocol", "own")}
    facts = [words(known[key]) for key, words in _FACTS if key in known]
    if 0 < (seconds := value(run.summary, "seconds")) < math.inf:
        facts.append(text.duration(seconds))
    line = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    top = f'<header><h1>{escape(run.title)}</h1><p class="facts">{line}</p></header>'
    if not run.history or not run.measures:
        return top + "<p>No round of this run was evaluated, so there are no figures.</p>"
    tested = [row for row in run.rows if row.get("test")]
    total = sum(row["test"] for row in tested)
    basis = f", over {text.plural(total, 'test example')} of {text.plural(len(tested), 'client')}" if tested else ""
    tiles = [_tile(run, measure, total) for measure in run.measures if measure.name not in DETAILS]
    guessing = (
        " Guessing means always predicting the most frequent class (accuracy) or the class shares (NLL) of a client's "
        "own training examples."
        if math.isfinite(run.last("majority"))
        else ""
    )
    return (
        f'{top}<div class="tiles">{"".join(tiles)}{_worst_tile(run)}</div>'
        f'<p class="note">The large figures are those of the last round ({run.history[-1]["round"]}){basis}, all '
        f"examples pooled.{guessing} The best round was picked by looking at the test data, so it is "
        "optimistic; it is given because papers often report it.</p>"
    )


_FACTS = (("protocol", "{} protocol".format), ("partition", text.dealt), ("device", "on {}".format))


#: What a figure is without a model: the measure, and what that is called where there is little room.
WITHOUT_A_MODEL = {
    "accuracy": ("majority", "guessing"),
    "rmse": ("baseline", "own training mean"),
    "nll": ("shares_nll", "guessing"),
}


def _tile(run: RunRecord, measure: Measure, total: int) -> str:
    fine, in_units = total >= 1000, run.in_units(measure)
    shown = in_units or measure

    def show(x: float) -> str:
        return text.percent(x, 2) if fine and shown.show is text.percent else shown.show(x)

    lines = []
    if in_units:
        lines.append(("in standard deviations", measure.show(run.last(measure.name))))
    if measure.name == "ece":
        floor = value(run.evaluation, "ece_floor")
        lines.append((f"floor, {run.evaluation.get('bins', '?')} bins", show(floor)))
    name, words = WITHOUT_A_MODEL.get(measure.name, ("", ""))
    if math.isfinite(without := run.last(name)):
        lines.append((words, show(without)))
    if len(run.rows) != 1:
        lines.append(("client mean", show(run.mean(measure.name))))
        lines.append(("worst client", show(run.worst(measure.name))))
    # A round's calibration error alone ranks nothing: an untrained model that says so is calibrated.
    if measure.name != "ece" and (best := run.best(measure.name)):
        lines.append((f"best, round {best[0]}", show(best[1])))
    return _card(shown.full, shown.explain, show(run.last(measure.name)), lines)


def _worst_tile(run: RunRecord) -> str:
    main = run.measures[0]
    ranking = client_table.ranked(run.rows, main)
    if len(run.rows) < 2 or math.isnan(value(ranking[0], main.name)):
        return ""
    row = ranking[0]
    lines = [("name", text.short(str(row["name"]), 40)), ("tested on", text.count(row["test"]))]
    if main.name == "accuracy":
        low, high = wilson(row["accuracy"], row["test"])
        lines.append(("95 % interval", f"{100 * low:.0f}–{text.percent(high, 0)}"))
    lines.append(("NLL", text.decimal(value(row, "nll"))))
    explain = f"The client whose {main.label} is the worst at the last round."
    return _card("Worst client", explain, (run.in_units(main) or main).show(value(row, main.name)), lines)


def _card(title: str, explain: str, figure: str, lines: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(shown)}</dd>" for name, shown in lines)
    return (
        f'<section class="tile" title="{escape(explain)}"><h3>{escape(title)}</h3>'
        f'<p class="big">{escape(figure)}</p><dl>{items}</dl></section>'
    )


def baselines(run: RunRecord) -> str:
    """The run beside plain models on the same test rows."""
    said = " ".join(filter(None, (run.verdict, run.skipped_baselines)))
    if not said:
        return ""
    top = f"<section><h2>Baselines</h2><p>{escape(said)}</p>"
    if not run.baselines:
        return f"{top}</section>"
    shown = [m for m in run.measures if m.name in run.baselines[0]["scores"]]
    heads = ["", *((run.in_units(m) or m).full for m in shown), "NLL, client mean", "Clients with a lower NLL"]
    title = str(run.summary.get("title") or run.summary.get("method", "This run"))
    own = {m.name: {part: run.last(m.name, part) for part in ("pooled", "mean")} for m in shown}
    rows = [(value(own, "nll", "pooled"), title, own, text.MISSING, " class=own")]
    for row, rival in zip(run.baselines, run.rivals, strict=True):
        rows.append((rival.nll, row["title"], row["scores"], f"{rival.lower} of {rival.pairs}", ""))
    body = ""
    for _, name, scores, lower, style in sorted(rows, key=lambda row: (math.isnan(row[0]), row[0])):
        cells = [(run.in_units(m) or m).show(value(scores, m.name, "pooled")) for m in shown]
        cells += [text.decimal(value(scores, "nll", "mean")), lower]
        filled = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body += f'<tr{style}><th scope="row">{escape(name)}</th>{filled}</tr>'
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    return (
        f'{top}<div class="scroll" tabindex="0" role="region" aria-label="Baselines"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
        '<p class="note">Plain models of scikit-learn with fixed settings, fitted to the same prepared inputs and scored '
        "on the same test examples, all pooled; lowest NLL first. Per site: each client alone, from its own rows. Pooled: "
        "one model of all rows together, which a federation is meant to avoid.</p></section>"
    )


def training(run: RunRecord) -> str:
    """How the metrics moved over the rounds."""
    if not run.history or not run.measures:
        return ""
    main = run.measures[0]
    figures = [_main_curves(run, main)]
    if main.name != "nll":
        lines = [Curve("test", run.over("nll"), "first"), Curve("training", run.over("train_nll", None), "second")]
        read = (
            "Low is good. Training is measured with single weight draws while learning, test with their average; "
            "test rising while training falls means overfitting."
        )
        drawn = charts.curves(run.rounds, lines, MEASURES["nll"])
        figures.append(figure("Negative log-likelihood (nats per example)", drawn, read))
    if any(map(math.isfinite, run.over("ece"))):
        floor = value(run.evaluation, "ece_floor")
        level = ("floor", floor) if math.isfinite(floor) else None
        read = (
            "The gap between claimed and observed. At the dotted floor it is what chance alone gives perfectly "
            "calibrated predictions on these test examples; a difference of that size means nothing."
        )
        drawn = charts.curves(run.rounds, [Curve("pooled", run.over("ece"), "first")], MEASURES["ece"], level=level)
        figures.append(figure(f"Calibration error (ECE, {run.evaluation.get('bins', '?')} bins)", drawn, read))
    kl = run.over("train_kl", None)
    if any(math.isfinite(v) and v != 0 for v in kl):
        read = "How far local training moved each client’s posterior from its prior in that round; it should settle."
        drawn = charts.curves(run.rounds, [Curve("training", kl, "second")], _KL)
        figures.append(figure("KL to the prior (nats per example)", drawn, read))
    return f'<section><h2>Training</h2><div class="panels">{"".join(figures)}</div></section>'


def _main_curves(run: RunRecord, main: Measure) -> str:
    lines, read = [Curve("pooled", run.over(main.name), "first")], main.explain
    if len(run.rows) != 1:
        lines.append(Curve("worst client", run.over(main.name, "worst"), "second"))
        read += " The dashed line is whichever client is worst in that round."
    best = run.best(main.name)
    if best:
        read += f" The ring is the best round ({best[0]})."
    return figure(main.full, charts.curves(run.rounds, lines, main, best=best), read)


def calibration(run: RunRecord) -> str:
    """Whether the stated certainty can be believed, over all clients."""
    found = run.evaluation.get("reliability")
    if not found or not any(found["count"]) or not run.measures:
        return ""
    bins = int(run.evaluation.get("bins", len(found["count"])))
    intervals = run.measures[0].name != "accuracy"
    if intervals:
        read = "Each dot is one of the models’ own intervals: its nominal level against the share of targets inside. "
    else:
        read = "Each bar is a bin of confidence: as high as the share that was right, its dot at the mean confidence. "
    read += "Dots on the dotted line are perfectly calibrated; a whisker (95 % interval) that crosses it may be."
    diagram = figure("Claimed against observed", charts.reliability(found, bins, intervals), read)
    numbers = f"<figure><h3>The same in numbers</h3>{client_table.reliability(found, bins, intervals)}"
    gap = "Gap is observed minus mean claimed: below zero is over-confident, above zero under-confident."
    numbers += f"<figcaption>{gap}</figcaption></figure>"
    return (
        f"<section><h2>Calibration</h2><p>{_verdict(found, intervals)}{_temperature(run)}{_in_use(run)}</p>"
        f'<div class="panels">{diagram}{numbers}</div></section>'
    )


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
    return f"{start}: no difference beyond chance on average, though single bins may still be off."


def _temperature(run: RunRecord) -> str:
    """What was done about that, or could be."""
    said = run.calibration_words or run.calibration_advice
    return f" {said}" if said else ""


def _in_use(run: RunRecord) -> str:
    """What the predictions are worth to who acts on them, in a sentence or two."""
    abstained, right = run.last("abstained"), run.last("answered_accuracy")
    words, rest = "", f" ({text.plural(run.sure, 'example')})" if run.sure else ""
    if math.isfinite(abstained):
        words += (
            f" Asked to answer only where they are 90 % sure, they abstain on {text.percent(abstained)} of the examples"
        )
        words += f" and are right in {text.percent(right)} of the rest{rest}." if math.isfinite(right) else "."
    held, size, width = (run.last(name) for name in ("coverage", "set_size", "interval_width"))
    if math.isfinite(size):
        words += (
            f" The 90 % prediction sets, calibrated on examples held back, hold the right label in {text.percent(held)}"
        )
        words += f" and have {text.decimal(size, 2)} labels on average."
    elif math.isfinite(held):
        unit = " standard deviations" if run.standardised else ""
        own = run.in_units(MEASURES["interval_width"])
        shown = own.show(width) if own else f"{text.decimal(width, 2)}{unit}"
        wide = f" and are {shown} wide on average" if math.isfinite(width) else ""
        words += (
            f" The calibrated 90 % intervals, widened or narrowed by what examples held back say, hold "
            f"{text.percent(held)} of the targets{wide}; the diagram and the numbers below are of the models’ own intervals."
        )
    return f"{words} {run.uncovered}" if run.uncovered else words


def clients(run: RunRecord) -> str:
    """Who is served well and who is not."""
    if not run.rows or not run.measures:
        return ""
    main = run.measures[0]
    ranking = client_table.ranked(run.rows, main)
    worst = client_table.worst_names(ranking, main)
    untested = sum(not row.get("test") for row in run.rows)
    intro = "".join(f"{sentence} " for sentence in (run.untested, run.participation_note, run.no_use) if sentence)
    if worst:
        who = "The client" if len(worst) == 1 else f"The {len(worst)} clients"
        intro += f"{who} with the worst {main.in_words} {'is' if len(worst) == 1 else 'are'} marked. "
    intro += "Click a column’s head to sort."
    chart = ""
    if len(run.rows) - untested > 1:
        read = "One dot per client, the marked ones filled."
        if main.name == "accuracy" and len(run.rows) <= charts.WITH_INTERVALS:
            read += " Thin lines are 95 % intervals: small test sets scatter widely by chance."
        figures = [figure(main.full, charts.clients(run.rows, main, worst), read)]
        if main.name != "nll":
            note = "Clients high up are the ones whose predictions cost most: wrong, and sure of it."
            figures.append(figure("Negative log-likelihood", charts.clients(run.rows, MEASURES["nll"], worst), note))
        chart = f'<div class="panels">{"".join(figures)}</div>'
    shown = [run.in_units(measure) or measure for measure in run.measures]
    return (
        f"<section><h2>Clients</h2><p>{escape(intro)}</p>{chart}{client_table.clients(ranking, shown, worst)}</section>"
    )


def settings(run: RunRecord) -> str:
    """Every setting of the run, folded."""
    lines = escape(to_toml(run.config).strip())
    whose = f"<p>Weights: {escape(run.summary['factors'])}.</p>" if "factors" in run.summary else ""
    return (
        f"<section><h2>Settings</h2>{whose}<details><summary>The full configuration of this run</summary>"
        f"<pre>{lines}</pre></details></section>"
    )


# --- The report -------------------------------------------------------------------------------------------------------
#
# One HTML page that needs nothing beside itself.


def render(run: RunRecord) -> str:
    """The whole page as text. The same record gives the same page, byte for byte."""
    parts = [headline(run), baselines(run), training(run), calibration(run), clients(run), settings(run)]
    parts.append("<footer>Made by bpfed from the run's own records.</footer>")
    return document(run.title, parts)


def write(run: RunRecord, path: str | os.PathLike[str]) -> Path:
    """Render to a file, whole or not at all: an interrupted write leaves what was there before."""
    target = Path(path)
    # A name that was once a file's may hold what is no UTF-8.
    write_whole(target, render(run).encode("utf-8", "replace"))
    return target
