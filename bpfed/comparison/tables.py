"""A comparison as text: Markdown for people, CSV and JSON for programs."""

from __future__ import annotations

import csv
import io
import math
from typing import TYPE_CHECKING, Any

from bpfed import __version__
from bpfed._util import text
from bpfed._util.scores import deviation, mean
from bpfed.metrics.registry import Metric
from bpfed.report.record import value

if TYPE_CHECKING:
    from bpfed.comparison.record import Comparison, Difference

PARTS = {"pooled": "", "mean": "_client_mean", "worst": "_worst_client"}


def spread(measure: Metric, centre: float, sd: float) -> str:
    """``95.3 ± 0.4 %`` or ``0.123 ± 0.004``; without the deviation where there is none."""
    shown = measure.show(centre)
    if not math.isfinite(sd):
        return shown
    unit = "\u202f%" if measure.show is text.percent else ""
    return f"{shown.removesuffix(unit)} ± {measure.show(sd)}"


def gap(measure: Metric, found: Difference) -> str:
    """``+0.031 (0.012 to 0.050)``; shares in percentage points."""
    factor, digits = (100.0, 1) if measure.show is text.percent else (1.0, 3)
    centre = signed(factor * found.mean, digits)
    if not math.isfinite(found.low):
        return centre
    return f"{centre} ({signed(factor * found.low, digits)} to {signed(factor * found.high, digits)})"


def signed(x: float, digits: int) -> str:
    """A number with its sign, whichever it is."""
    shown = text.decimal(x, digits)
    return f"+{shown}" if x > 0 else shown


def compared(comparison: Comparison) -> list[Metric]:
    """The metrics whose differences are shown; not ECE, which for one client is mostly chance."""
    return [m for m in comparison.measures if m.name != "ece"]


def caption(comparison: Comparison, marked: str = "in bold") -> str:
    """What the figures of the first table are; ``marked`` is how the best stands out."""
    floors = [comparison.floor(name) for name in comparison.shown]
    seeds = comparison.seeds
    time = comparison.words.time
    over = (
        f"Mean ± standard deviation over {len(seeds)} {time}s" if len(seeds) > 1 else f"{time.capitalize()} {seeds[0]}"
    )
    low, high = (f"{100 * f(floors):.1f}" for f in (min, max))
    floor = f"{low} %" if low == high else f"{low} to {high} %"
    return (
        f"{over}, all {comparison.words.scored} of the last round pooled, lowest NLL first, the best {marked}. "
        f"ECE over {comparison.bins} bins; perfectly calibrated predictions would show {floor} by chance.{_about(comparison)}"
    )


def _about(comparison: Comparison) -> str:
    """What the rows in brackets are; empty where there are none."""
    if not comparison.baselines:
        return ""
    return " In brackets: baselines of scikit-learn, each client alone (per site) or all rows in one place (pooled)."


def pairing(comparison: Comparison) -> str:
    """What the differences are, what is paired, and what their intervals leave out."""
    reference, seeds = comparison.titles[comparison.reference], comparison.seeds
    found = next(iter(comparison.differences(baselines=True).values()), None)
    one, time = comparison.words.one, comparison.words.time
    words = f"Each {one}'s metric minus {reference}'s on the same client of the same {time}, mean over clients. "
    if len(seeds) > 1:
        words += f"A client-{time} is one client of one {time}. "
    if any(m.name == "accuracy" for m in comparison.measures):
        words += "Accuracy is in percentage points. "
    if found is None:
        return words.strip()
    if len(seeds) == 1:
        if not math.isfinite(found.low):
            return words + f"No interval: one {time} with {text.many(found.pairs, 'client')} is not enough."
        return words + (
            f"95 % intervals: bootstrap over the {found.pairs} clients. One {time} says nothing about other splits or "
            "other training."
        )
    dealt = comparison.first.config.get("data", {}).get("seed") != comparison.records[comparison.names[0]][
        seeds[1]
    ].config.get("data", {}).get("seed")
    words += f"95 % intervals: paired t over the {len(seeds)} {time}s. "
    if dealt:
        return words + comparison.words.dealt
    return words + "All seeds train and test on the same split: the intervals say nothing about other splits."


def markdown(comparison: Comparison) -> str:
    """Both tables and their captions."""
    measures, bins = comparison.measures, comparison.bins
    heads = [f"ECE ({bins} bins)" if m.name == "ece" else m.full for m in measures]
    best = {m.name: comparison.best(m.name) for m in measures}
    rows = []
    for name in comparison.shown:
        cells = []
        for m in measures:
            cell = spread(m, comparison.mean(name, m.name), comparison.sd(name, m.name))
            cells.append(f"**{cell}**" if best[m.name] == name else cell)
        nll = comparison.mean(name, "nll", "mean")
        rows.append([comparison.label(name), *cells, text.decimal(nll), text.duration(comparison.seconds(name))])
    parts = [
        f"# {comparison.title}",
        _table([comparison.words.one, *heads, "NLL, client mean", "time"], rows),
        caption(comparison),
        *filter(None, [comparison.verdict]),
    ]
    others = [name for name in comparison.shown if name != comparison.reference]
    if others:
        shown = compared(comparison)
        found = {m.name: comparison.differences(m.name, baselines=True) for m in shown}
        rows = [
            [comparison.label(n), *(gap(m, found[m.name][n]) for m in shown), better(found["nll"][n])] for n in others
        ]
        reference = comparison.titles[comparison.reference]
        heads = [f"{m.label} minus {reference}'s" for m in shown]
        parts += [
            _table([comparison.words.one, *heads, f"{pairs(comparison)} with lower NLL"], rows),
            pairing(comparison),
        ]
    return "\n\n".join(parts).replace("\u202f", " ") + "\n"


def pairs(comparison: Comparison) -> str:
    """What is counted where pairs are: a client of several seeds is a pair in each."""
    return "clients" if len(comparison.seeds) == 1 else f"client-{comparison.words.time}s"


def better(found: Difference) -> str:
    """``12 of 30``: pairs in which the method's NLL is the lower one."""
    return f"{found.lower} of {found.pairs}"


def table_csv(comparison: Comparison) -> str:
    """One line for each run: every metric pooled, as the mean over clients, and of the worst client."""
    names = [m.name for m in comparison.first.measures]
    written = io.StringIO()
    out = csv.writer(written, lineterminator="\n")
    metrics = [f"{n}{tail}" for n in names for tail in PARTS.values()]
    out.writerow(["method", "seed", "rounds", "seconds", *metrics, "ece_floor"])
    for name, runs in comparison.records.items():
        for seed, run in runs.items():
            figures = [run.last(n, part) for n in names for part in PARTS]
            floor = value(run.evaluation, "ece_floor")
            cells = ["" if math.isnan(v) else repr(v) for v in (*figures, floor)]
            out.writerow([name, seed, run.summary["rounds"], run.summary["seconds"], *cells])
    for name, runs in comparison.baselines.items():
        for seed, run in runs.items():
            figures = [run.last(n, part) for n in names for part in PARTS]
            cells = ["" if math.isnan(v) else repr(v) for v in (*figures, value(run.evaluation, "ece_floor"))]
            out.writerow([name, seed, "", "", *cells])
    return written.getvalue()


def record(comparison: Comparison) -> dict[str, Any]:
    """All figures, as in ``comparison.json``."""
    summary = comparison.first.summary
    return {
        "bpfed": __version__,
        "title": comparison.title,
        **{key: summary.get(key) for key in ("data", "partition", "protocol", "rounds", "clients")},
        "seeds": comparison.seeds,
        "reference": comparison.reference,
        "bins": comparison.bins,
        "methods": {name: _method(comparison, name) for name in comparison.ranking},
        **(
            {"baselines": {name: _method(comparison, name) for name in comparison.baselines}}
            if comparison.baselines
            else {}
        ),
        **({"verdict": comparison.verdict} if comparison.verdict else {}),
        "differences": {
            m.name: {name: found._asdict() for name, found in comparison.differences(m.name, baselines=True).items()}
            for m in compared(comparison)
        },
        "about_differences": pairing(comparison),
    }


def _method(comparison: Comparison, name: str) -> dict[str, Any]:
    def figures(values: list[float]) -> dict[str, Any]:
        return {"mean": mean(values), "sd": deviation(values), "seeds": values}

    runs = list(comparison.runs(name).values())
    baseline = name in comparison.baselines
    found: dict[str, Any] = dict(runs[0].summary) if baseline else {"title": comparison.titles[name]}
    for measure in comparison.measures:
        found[measure.name] = figures(comparison.over_seeds(name, measure.name)) | {
            "client_mean": figures(comparison.over_seeds(name, measure.name, "mean")),
            "worst_client": figures(comparison.over_seeds(name, measure.name, "worst")),
        }
    found["ece_floor"] = comparison.floor(name)
    if not baseline:
        found["seconds"] = figures([value(run.summary, "seconds") for run in runs])
    return found


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
