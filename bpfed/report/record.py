"""What a report is made from: the plain data of a run folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from bpfed._util import text
from bpfed._util.errors import UserError
from bpfed._util.files import CONFIG, EVALUATION, PILOTS, SUMMARY, from_json, from_toml
from bpfed._util.files import METRICS as METRICS_FILE
from bpfed.config.migrations import current_config, current_record
from bpfed.config.settings import MOST_EVALUATED, Settings
from bpfed.metrics.registry import AS_GIVEN, METRICS, Metric, get_metric
from bpfed.report.manifest import Manifest
from bpfed.report.tasks import REPORTS, TaskReport, measures, task_of

#: A calibration error of a client with fewer test examples than this is what it shows by chance alone.
JUDGED = 10
#: How far the logarithm of a calibration temperature is from 0 before it is worth a word.
NOTICED = 0.1
#: Standard errors that a figure may be off by chance.
BY_CHANCE = 1.96
#: So many clients are named in a sentence.
NAMED = 3
#: What code that reads a record raises where the record is not one that a run wrote.
UNFIT = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class RunRecord:
    """One run as it lies on disk, so that a report can be made again at any time.

    Attributes:
        config: All settings, nested.
        history: One dict per evaluated round, as in ``metrics.jsonl``.
        evaluation: The last evaluated round in detail: ``round, bins, clients, reliability, ece_floor``; of a
            regression on tables ``target``, its name and standard deviation; ``baselines``, where they were fitted;
            ``task``, where the metrics do not tell it; ``metrics``, what those are that the library does not have.
        summary: ``method, data, partition, protocol, seed, rounds, clients, device, seconds`` and figures.
    """

    config: dict[str, Any]
    history: list[dict[str, Any]]
    evaluation: dict[str, Any]
    summary: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """The record of a finished run from its folder, or a `UserError` that says what is wrong there."""
        if not (folder / CONFIG).is_file():
            raise no_run(folder)
        manifest = Manifest.read(folder)
        if not (folder / SUMMARY).exists() or (manifest is not None and SUMMARY not in manifest.files):
            raise UserError(f"The run in '{folder}' is not finished; resume it with: bpfed run --out {folder} --resume")
        if manifest is not None:
            manifest.check(folder, (CONFIG, METRICS_FILE, EVALUATION, SUMMARY))
        return cls(
            _parsed(folder / CONFIG, lambda text: current_config(from_toml(text))),
            _parsed(folder / METRICS_FILE, lambda text: [_table(line, "round") for line in text.splitlines()]),
            _parsed(folder / EVALUATION, lambda text: current_record(_table(text, "clients"))),
            _parsed(folder / SUMMARY, lambda text: current_record(_table(text, "device"))),
        )

    @property
    def title(self) -> str:
        """The run in one line of plain words."""
        name = self.summary.get("title") or self.summary.get("method", "A run")
        if "members" in self.summary:
            name = f"{name} ({text.many(self.summary['members'], 'network')})"
        parts = [f"{name} on {self.summary.get('data', 'unnamed data')}"]
        for key, one in (("clients", "client"), ("rounds", "round")):
            if key in self.summary:
                parts.append(text.many(self.summary[key], one))
        if "seed" in self.summary:
            parts.append(f"seed {self.summary['seed']}")
        return ", ".join(parts)

    @property
    def measures(self) -> list[Metric]:
        """The metrics this run was scored with, the main one first."""
        labels, noted = self.evaluation.get("labels", ()), self.evaluation.get("metrics", {})
        described = {name: Metric.from_record(name, record) for name, record in noted.items()}
        return measures(self._present, self.standardised, *self.target, labels, described)

    @property
    def listed(self) -> list[Metric]:
        """Those that a reader acts on. The others are in the records and in comparisons: one example can decide an MCE."""
        return [measure for measure in self.measures if measure.name not in ("mce", "aurc")]

    @property
    def _present(self) -> set[str]:
        """Names of the metrics that this run was scored with."""
        found = {name for entry in self.history for name, v in entry.items() if isinstance(v, dict) and "pooled" in v}
        return found | {name for row in self.rows for name in row if name in METRICS}

    @property
    def task(self) -> TaskReport:
        """What is said of the task of this run."""
        return REPORTS.get(task_of(self._present, str(self.evaluation.get("task", ""))), TaskReport())

    @property
    def standardised(self) -> bool:
        """Whether a regression's targets are in standard deviations: so it is for tables, and not for arrays."""
        data = self.config.get("data", {})
        return self.task.standardised and (bool(self.target[0]) or str(data.get("name", "")).startswith("folder:"))

    @property
    def target(self) -> tuple[str, float]:
        """Of tables, the column that is predicted and its standard deviation, as far as they are known."""
        known = self.evaluation.get("target", {})
        return str(known.get("name") or self.config.get("data", {}).get("target") or ""), value(known, "scale")

    def in_units(self, measure: Metric) -> Metric | None:
        """A regression's measure in the target's own unit; None: it is in that anyway, has none, or it is not known."""
        name, scale = self.target
        if not measure.in_units or not self.standardised or not math.isfinite(scale):
            return None
        own = METRICS[measure.name]
        title = f"{own.full} of '{name}'" if name and measure.name == "rmse" else own.full
        explain = own.explain.replace(AS_GIVEN, f"of '{name}'" if name else "of the target")
        return replace(own, show=lambda x: text.figure(scale * x), explain=explain, title=title)

    def scaled(self, measure: Metric) -> tuple[Metric, float]:
        """A measure for an axis, and the factor of its values: in the target's own unit, where that is known."""
        own = self.in_units(measure)
        return (measure, 1.0) if own is None else (replace(own, show=text.figure), self.target[1])

    @property
    def untested(self) -> str:
        """A sentence on the clients that are not counted in any figure; empty where all are."""
        tested = sum(bool(row.get("test")) for row in self.rows)
        total = int(self.summary.get("clients", len(self.rows)))
        if tested >= total or not self.rows:
            return ""
        if total > (self.config.get("run", {}).get("eval_clients") or MOST_EVALUATED):
            return f"{text.count(tested)} of the {text.count(total)} clients were tested."
        verb = "has no test examples and is" if total - tested == 1 else "have no test examples and are"
        if (
            self.history and "tested" in self.history[-1]
        ):  # of a deployment: a site may have some, and too few to tell of
            verb = "tells no scores and is" if total - tested == 1 else "tell no scores and are"
        named = self.evaluation.get("untested", [])[:NAMED]
        more = f" and {text.count(total - tested - NAMED)} more" if total - tested > len(named) else ""
        who = f": {', '.join(map(str, named))}{more}" if named else ""
        return f"{text.plural(total - tested, 'client')} {verb} not counted in any figure{who}."

    @property
    def participation_note(self) -> str:
        """A sentence on how many clients take part in a round; empty where all do."""
        if "participants" not in self.summary:
            return ""
        total, never = int(self.summary["clients"]), int(self.summary["never_drawn"])
        drawn = f"{text.count(self.summary['participants'])} of the {text.count(total)} clients are drawn in a round"
        if not never:
            return f"{drawn}; each was at least once."
        verb = "was never drawn and has" if never == 1 else "were never drawn and have"
        return f"{drawn}; {text.count(never)} {verb} nothing personal yet (raise --participants or --rounds)."

    @property
    def uncovered(self) -> str:
        """A sentence on the clients whose sets or intervals hold everything; empty where there are none."""
        sizes = [int(row["calibration"]) for row in self.rows if row.get("test") and "calibration" in row]
        least = int(self.evaluation.get("fewest_calibration", 0))
        short = sum(size < least for size in sizes)
        if not short:
            return ""
        kind = self.task.regions
        start = text.few_calibration(short, len(sizes), least, kind, "tested client" if self.untested else "client")
        own = f"{'their' if short > 1 else 'its'} {kind} hold everything"
        return f"{start}; {own}{' and are left out of the coverage' if short < len(sizes) else ', so coverage says nothing'}."

    @property
    def sets_words(self) -> str:
        """Sentences on how often sets or intervals hold the truth, of each class and by client; empty without any."""
        found, kind = self.evaluation.get("sets", {}), self.task.regions
        if not found.get("clients"):
            return ""
        rows = [r for r in self.evaluation.get("classes", []) if r.get("coverage") is not None]
        said = []
        if 1 < len(rows) <= NAMED:
            shares = [
                f"{text.percent(r['coverage'])} of the {text.count(r['test'])} examples of '{text.short(str(r['label']), 30)}'"
                for r in rows
            ]
            said.append(f"By class they hold the right label in {', '.join(shares)}.")
        elif rows:
            worst = min(rows, key=lambda r: r["coverage"])
            said.append(
                f"Of the classes {text.short(str(worst['label']), 30)} is held least often, in {text.percent(worst['coverage'])}."
            )
        empty = sum(r["empty"] * r["test"] for r in rows)
        if round(empty):
            said.append(f"{text.plural(round(empty), 'set')} {'is' if round(empty) == 1 else 'are'} empty.")
        if found["clients"] > 1:
            what = f"{text.count(found['within'])} of {text.plural(found['clients'], 'client')}"
            said.append(f"At {what} their share is within what chance allows at {text.percent(found['level'])}.")
        how = {
            "class": "They are calibrated by class with examples of all clients, so that the level is met for each class on average over clients and calibrations, and not for each client.",
            "pooled": f"The {kind} of a client are calibrated with its own examples and those of all clients, which together count as {200 if kind == 'intervals' else 50}. The level is met on average over clients and calibrations, and not for each client.",
        }
        said.append(how.get(found.get("by", ""), ""))
        return " ".join(filter(None, said))

    @property
    def calibration_words(self) -> str:
        """A sentence on the calibration temperature of all predictions; empty where they are left as they are."""
        if "calibration_temperature" not in self.summary:
            return ""
        count = Settings(calibrate=self.config.get("run", {}).get("calibrate", "none")).calibration_pilots
        learnt = f", fitted in {text.many(count, 'calibration pilot')}" if count else ""
        name = temperature_name("regression" if any(m.name == "rmse" for m in self.measures) else "classification")
        given = temperature_words(self.summary["calibration_temperature"])
        return f"Predictions are given with a {name} of {given}{learnt}."

    @property
    def calibration_advice(self) -> str:
        """A sentence on how sure the models would learn to be; empty where they have learnt it, or are as sure within chance."""
        fitted, asked = self.evaluation.get("fitted_temperature"), self.config.get("run", {})
        settled = asked.get("calibrate", "none") != "none" or asked.get("scaling") == "client" or asked.get("noise")
        if self.calibration_words or fitted is None or settled or abs(math.log(fitted)) < NOTICED:
            return ""
        if self._confident_by_chance(fitted):
            return ""
        off = "under-confident" if fitted < 1.0 else "over-confident"
        return f"The predictions are {off}. Train with --calibrate pilot:3 to calibrate them on held-out training examples."

    def _confident_by_chance(self, fitted: float) -> bool:
        """Whether calibrated predictions of as many examples would often give a temperature as far from 1.

        For classes it is a score test of a temperature of 1 from the bins of the reliability diagram. A bin of n examples
        with confidence c adds n (share right − c) times the log-odds of c against each other class, all alike. Under
        calibrated predictions its variance is n c (1 − c) times their square. For numbers the logarithm of a fitted scale
        has a standard error of 1 / √(2 n).
        """
        if self.task.regions == "intervals":
            examples = sum(int(row.get("test") or 0) for row in self.rows)
            return abs(math.log(fitted)) < BY_CHANCE / math.sqrt(2.0 * max(examples, 1))
        bins = self.evaluation["reliability"]
        others = max(len(self.evaluation.get("classes", ())) - 1, 1)
        score = variance = 0.0
        for n, claimed, right in zip(bins["count"], bins["confidence"], bins["accuracy"], strict=True):
            if n and claimed is not None and right is not None:
                c = min(max(claimed, 1e-6), 1.0 - 1e-6)
                slope = math.log(others * c / (1.0 - c))
                score += n * (right - c) * slope
                variance += n * c * (1.0 - c) * slope**2
        return abs(score) < BY_CHANCE * math.sqrt(variance)

    @property
    def no_use(self) -> str:
        """A sentence on the clients that would do as well without a model; empty where there are none."""
        ours, without, words = self.task.metric, self.task.without, self.task.useless
        scored = [row for row in self.rows if row.get("test") and math.isfinite(value(row, without))]
        tested = [row for row in scored if row["test"] >= JUDGED]
        names = [str(row["name"]) for row in tested if not value(row, ours) < value(row, without)]
        if not names:
            return ""
        listed = ", ".join(text.short(name, 30) for name in names[:NAMED])
        more = f" and {text.count(len(names) - NAMED)} more" if len(names) > NAMED else ""
        few = f" with {JUDGED} or more test examples" if len(tested) < len(scored) else ""
        of = f"{text.count(len(names))} of {text.plural(len(tested), 'client')}{few}"
        return f"At {of} the model does no better than a guess on the test examples: {words} ({listed}{more})."

    @property
    def diagnostics(self) -> dict[str, Any]:
        """What `bpfed.runs.diagnostics` found; empty in a deployment, and in runs of earlier versions."""
        found: dict[str, Any] = self.evaluation.get("diagnostics", {})
        return found

    @property
    def class_labels(self) -> list[str]:
        """The classes by name, in their order; empty where targets are none."""
        rows = self.evaluation.get("classes", [])
        return [str(row.get("label", k)) for k, row in enumerate(rows)]

    @property
    def baselines(self) -> list[dict[str, Any]]:
        """What `bpfed.runs.baselines.baselines` found of each plain model; empty in runs of earlier versions."""
        rows: list[dict[str, Any]] = self.evaluation.get("baselines", {}).get("rows", [])
        return rows

    @property
    def skipped_baselines(self) -> str:
        """Sentences on the baselines that were not fitted; empty where all were."""
        if self.summary.get("protocol") == "deployed":
            return "Baselines are not fitted in a deployment, where the rows are not in one place."
        return " ".join(self.evaluation.get("baselines", {}).get("skipped", []))

    @property
    def verdict(self) -> str:
        """A sentence on whether a plain model would do better; empty where none was fitted."""
        title = str(self.summary.get("title") or self.summary.get("method", "This run"))
        return verdict(title, self.last("nll"), self.rivals)

    @property
    def rivals(self) -> list[Rival]:
        """The baselines beside this run."""
        return [self._rival(row) for row in self.baselines]

    def _rival(self, row: dict[str, Any]) -> Rival:
        pairs = [
            (theirs, ours)
            for theirs, own in zip(row["clients"]["nll"], self.rows, strict=False)
            if theirs is not None and math.isfinite(ours := value(own, "nll"))
        ]
        lower, higher = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
        gain, error = (value(self.diagnostics.get("overall", {}).get(row["name"], {}), key) for key in GAIN)
        clear = abs(gain) > 2 * error if math.isfinite(gain) and math.isfinite(error) else None
        nll = value(row["scores"], "nll", "pooled")
        return Rival(row["title"], row["pooled"], nll, lower, higher, len(pairs), clear)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per client, in the data's order."""
        rows: list[dict[str, Any]] = self.evaluation.get("clients", [])
        return rows

    @property
    def rounds(self) -> list[int]:
        """The rounds that were evaluated."""
        return [int(entry["round"]) for entry in self.history]

    def over(self, metric: str, part: str | None = "pooled") -> list[float]:
        """A metric at each evaluated round (NaN where it was not measured); ``part`` is None for plain numbers."""
        return [value(entry, metric, part) for entry in self.history]

    def last(self, metric: str, part: str = "pooled") -> float:
        """A metric at the last evaluated round, NaN if it was not measured; AUROC is the mean of clients."""
        part = "mean" if (metric, part) == ("auroc", "pooled") else part
        return value(self.history[-1], metric, part) if self.history else math.nan

    def worst(self, metric: str) -> float:
        """The worst client's at the last evaluated round; of ECE and MCE among the clients that `judged` lets count."""
        if not get_metric(metric).calibrates or not any(metric in row for row in self.rows):
            return self.last(metric, "worst")
        return max(self._judged(metric), default=math.nan)

    def mean(self, metric: str) -> float:
        """The mean over clients at the last evaluated round; of ECE and MCE over those that `judged` lets count."""
        if not get_metric(metric).calibrates or not any(metric in row for row in self.rows):
            return self.last(metric, "mean")
        seen = self._judged(metric)
        return sum(seen) / len(seen) if seen else math.nan

    def _judged(self, metric: str) -> list[float]:
        return [v for row in self.rows if math.isfinite(v := judged(row, metric))]

    @property
    def sure(self) -> int:
        """How many test examples the models are 90 % sure of at the last evaluated round; 0 where none was measured."""
        shares = ((row.get("test") or 0, value(row, "abstained")) for row in self.rows)
        return sum(round(test * (1.0 - share)) for test, share in shares if math.isfinite(share))

    def best(self, metric: str) -> tuple[int, float] | None:
        """The round at which the pooled metric was best, and what it was then."""
        sign = -1 if get_metric(metric).high_is_good else 1
        seen = [(sign * v, e["round"]) for e in self.history if math.isfinite(v := value(e, metric, "pooled"))]
        if not seen:
            return None
        signed, round_ = min(seen)
        return round_, sign * signed


#: Keys of a difference and its standard error.
GAIN = ("gain", "gain_se")


class Rival(NamedTuple):
    """A baseline beside a run.

    Attributes:
        title: Its heading.
        pooled: Whether it needs all rows in one place.
        nll: Its NLL.
        lower: At how many clients it is lower than the run's.
        higher: At how many it is higher.
        pairs: How many clients there are; in a comparison, clients of each seed.
        clear: Whether the difference from the run is more than chance; None: not known.
    """

    title: str
    pooled: bool
    nll: float
    lower: int
    higher: int
    pairs: int
    clear: bool | None = None

    @property
    def in_words(self) -> str:
        """Its heading inside a sentence."""
        return self.title[0].lower() + self.title[1:]

    def state(self, nll: float) -> str:
        """Whether a run with this NLL is better, worse, or about as good (``alike``)."""
        if self.clear is False or text.decimal(self.nll) == text.decimal(nll):
            return "alike"
        return "better" if nll < self.nll else "worse"


def verdict(title: str, nll: float, rivals: Sequence[Rival], what: str = "clients") -> str:
    """Whether a run is better than what each client could do alone, and than models of all rows in one place.

    Args:
        title: The run's method.
        nll: The run's NLL.
        rivals: The baselines.
        what: What is counted in pairs.

    Returns:
        A sentence or two; empty where there is nothing to compare with.
    """
    known = sorted((r for r in rivals if math.isfinite(r.nll)), key=lambda rival: rival.nll)
    if not known or not math.isfinite(nll):
        return ""
    ours = text.decimal(nll)

    def at(count: int, rival: Rival) -> str:
        return f", lower at {text.count(count)} of {text.count(rival.pairs)} {what}" if rival.pairs > 1 else ""

    if all(rival.state(nll) == "better" for rival in known):
        best, every = known[0], "every baseline" if len(known) > 1 else "the baseline"
        against = f"NLL {ours} against {text.decimal(best.nll)} of {best.in_words}"
        return f"{title} is better than {every}: {against}{at(best.higher, best)}."
    said = []
    alone = next((rival for rival in known if not rival.pooled), None)
    if alone is not None:
        state, theirs = alone.state(nll), text.decimal(alone.nll)
        if state == "better":
            said.append(
                f"{title} is better than {alone.in_words} (NLL {ours} against {theirs}{at(alone.higher, alone)})."
            )
        elif state == "alike":
            said.append(f"{title} is about as good as {alone.in_words} (NLL {ours} against {theirs}, within chance).")
        else:
            said.append(
                f"{alone.title} is better (NLL {theirs} against {ours}{at(alone.lower, alone)}); use it instead of "
                f"{title}, or look for a better setting with 'bpfed tune'."
            )
    together = next((rival for rival in known if rival.pooled), None)
    if together is not None:
        state, figures = together.state(nll), f"NLL {text.decimal(together.nll)}"
        figures += "" if said else f" against {ours}"
        if state == "better":
            said.append(f"{title} is better than {together.in_words} ({figures}).")
        elif state == "alike":
            said.append(
                f"{together.title}, which needs all rows in one place, is about as good ({figures}, within chance)."
            )
        else:
            said.append(f"If all rows may be in one place, use {together.in_words}: it is better ({figures}).")
    return " ".join(said)


def no_run(folder: Path) -> UserError:
    """What to say of a folder without a configuration: it is no run folder, or its run is still in calibration pilots."""
    if (folder / PILOTS / CONFIG).is_file():
        return UserError(
            f"The run in '{folder}' is still in its calibration pilots, so there is no model yet; resume it with: bpfed run "
            f"--out {folder} --resume"
        )
    if not folder.exists():
        return UserError(f"The run folder '{folder}' does not exist; check the path.")
    if inside := sorted(path.parent for path in folder.glob(f"*/*/{CONFIG}"))[:1]:
        return UserError(f"'{folder}' is a folder of several runs; give one of them, such as '{inside[0]}'.")
    return UserError(f"'{folder}' is not a run folder: it has no {CONFIG}; give one that bpfed run made.")


def _parsed(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror}); put it back from a copy.") from error
    except ValueError as error:
        raise UserError(f"'{path}' is damaged ({error}); run it again with a new --out.") from error


def _table(text: str, needed: str) -> dict[str, Any]:
    """A table that has at least this key."""
    found = from_json(text)
    if not isinstance(found, dict) or needed not in found:
        raise ValueError(f"there is no '{needed}'")
    return found


def temperature_name(task: str) -> str:
    """What a calibration temperature is called where targets are classes, and where they are numbers."""
    return "scale factor" if task in ("regression", "heteroscedastic") else "calibration temperature"


def temperature_words(temperature: float) -> str:
    """A calibration temperature and what it does: ``1.19 (above 1: less sure than the model was trained to be)``."""
    shown = f"{temperature:.2f}"
    if shown == "1.00":
        return f"{shown} (1: as sure as the model was trained to be)"
    way = "below 1: surer" if temperature < 1.0 else "above 1: less sure"
    return f"{shown} ({way} than the model was trained to be)"


def value(entry: dict[str, Any], metric: str, part: str | None = None) -> float:
    """A number of a history entry or a client's row; what is missing or ``None`` is NaN."""
    found = entry.get(metric)
    if part is not None:
        found = found.get(part) if isinstance(found, dict) else None
    return float(found) if isinstance(found, int | float) else math.nan


def judged(row: dict[str, Any], metric: str) -> float:
    """A number of a client's row; NaN for ECE and MCE where there are too few test examples to judge them by."""
    few = get_metric(metric).calibrates and (row.get("test") or 0) < JUDGED
    return math.nan if few else value(row, metric)
