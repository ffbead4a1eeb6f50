"""The page: complete, self-contained, safe against names, the same every time."""

from __future__ import annotations

import base64
import hashlib
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import scenarios
from pages import Page, plain, record

import bpfed
from bpfed._util.errors import UserError
from bpfed.cli import terminal
from bpfed.metrics.registry import METRICS
from bpfed.report import RunRecord, render, write


def test_the_figures_of_the_last_round_are_on_the_page() -> None:
    run = record()
    page = Page(render(run))
    words = plain(page.text)
    assert "BPFed on digits, 8 clients, 5 rounds, seed 0" in words
    last = run.history[-1]
    for metric in ("accuracy", "ece"):
        assert f"{100 * last[metric]['pooled']:.1f} %" in words
        assert f"{100 * last[metric]['worst']:.1f} %" in words
    for metric in ("nll", "brier"):
        assert f"{last[metric]['pooled']:.3f}" in words
    assert f"{100 * run.evaluation['ece_floor']:.1f} %" in words
    for row in run.evaluation["clients"]:
        assert row["name"] in words
    assert "10 bins" in words
    assert "1 client has no test examples and is not counted in any figure." in words
    assert "lr = 0.001" in words


def test_the_last_round_is_the_headline_and_the_best_is_named_as_such() -> None:
    run = record()
    worse = run.history[-1] | {"accuracy": {"pooled": 0.111, "mean": 0.111, "worst": 0.1}}
    run = RunRecord(run.config, [*run.history[:-1], worse], run.evaluation, run.summary)
    page = render(run)
    assert re.search(r'<h3>Accuracy</h3><p class="big">11.1', page)
    best = max(run.history, key=lambda entry: entry["accuracy"]["pooled"])
    assert f"best, round {best['round']}" in page
    assert f"The ring is the best round ({best['round']})." in page


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("n", [1, 2])
def test_few_clients_and_a_single_round(n: int, task: str) -> None:
    words = Page(render(record(n, rounds=1, task=task))).text
    assert ("Worst client" in words) == (n > 1)
    assert f"{n} client{'s' * (n > 1)}, 1 round, " in words


def test_coverage_of_few_examples_shows_how_little_they_say() -> None:
    run = record(2)
    for row, test, coverage in zip(run.rows, (9, 900), (8 / 9, 0.9), strict=True):
        row |= {"test": test, "coverage": coverage}
    page = render(run)
    assert '<td data-v="0.888889">88.9\u202f% (56–98)</td>' in page
    assert '<td data-v="0.9">90.0\u202f% (88–92)</td>' in page
    assert "In brackets its 95 % interval" in page


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        ("groups:5", "groups:5 partition"),
        ("natural", "clients given by the data"),
        ("sites", "each site with its own data"),
    ],
)
def test_clients_of_their_own_are_no_partition(partition: str, said: str) -> None:
    run = record()
    words = Page(render(replace(run, summary=run.summary | {"partition": partition}))).text
    assert said in words
    assert ("partition" in words) == (partition == "groups:5")


def test_clients_that_count_in_no_figure_are_told() -> None:
    run = record()
    tested = [row for row in run.rows if row["test"]]
    left_out = replace(run, evaluation=run.evaluation | {"clients": tested})  # as the engine leaves it
    assert left_out.untested == run.untested == "1 client has no test examples and is not counted in any figure."
    named = replace(left_out, evaluation=left_out.evaluation | {"untested": ["a", "b", "c", "d"]})
    assert replace(named, summary=run.summary | {"clients": len(tested) + 4}).untested == (
        "4 clients have no test examples and are not counted in any figure: a, b, c and 1 more."
    )
    assert replace(left_out, summary=run.summary | {"clients": 9}).untested.startswith(
        "2 clients have no test examples"
    )
    assert replace(left_out, summary=run.summary | {"clients": 7}).untested == ""
    assert replace(run, config={"run": {"eval_clients": 7}}).untested == "7 of the 8 clients were tested."


def test_calibration_of_clients_with_few_test_examples_is_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    run = record()
    few = {"test": 9, "ece": 0.987, "mce": 0.986}
    rows = [run.rows[0] | few, *run.rows[1:]]
    some = replace(run, evaluation=run.evaluation | {"clients": rows})
    assert some.worst("ece") == max(row["ece"] for row in rows if row["test"] >= 10)
    assert some.worst("nll") == run.last("nll", "worst")
    assert "98.7" not in plain(Page(render(some)).text)
    enough = replace(run, evaluation=run.evaluation | {"clients": [rows[0] | {"test": 10}, *run.rows[1:]]})
    assert enough.worst("ece") == 0.987
    assert "98.7 %" in plain(Page(render(enough)).text)
    none = replace(run, evaluation=run.evaluation | {"clients": [row | few for row in rows]})
    terminal.result(none, Path("report.html"))
    ece = next(line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("ECE"))
    assert ece.split()[-2:] == ["–", "–"]


@pytest.mark.parametrize(("examples", "advised"), [(117, False), (1170, True)])
def test_calibration_is_advised_only_where_the_difference_is_beyond_chance(examples: int, advised: bool) -> None:
    shares = (
        (0.23, 0.556, 0.556),
        (0.27, 0.645, 0.594),
        (0.18, 0.761, 0.857),
        (0.23, 0.851, 0.926),
        (0.09, 0.934, 1.0),
    )
    counts, confidence, accuracy = zip(*((round(n * examples), c, a) for n, c, a in shares), strict=True)
    run = record(2)
    bins = {"count": counts, "confidence": confidence, "accuracy": accuracy}
    found = {"fitted_temperature": 0.76, "reliability": bins, "classes": [{}, {}]}
    advice = replace(run, evaluation=run.evaluation | found).calibration_advice
    assert ("under-confident" in advice) is advised
    more = replace(run, evaluation=run.evaluation | found | {"fitted_temperature": 1.02})
    assert not more.calibration_advice


@pytest.mark.parametrize(("test", "advised"), [(30, False), (3000, True)])
def test_calibration_of_numbers_is_advised_beyond_chance(test: int, advised: bool) -> None:
    run = record(2, task="regression")
    rows = [row | {"test": test} for row in run.rows]
    found = {"fitted_temperature": 1.15, "clients": rows}
    advice = replace(run, config={"run": {}, "data": {}}, evaluation=run.evaluation | found).calibration_advice
    assert ("over-confident" in advice) is advised


def test_the_examples_behind_the_accuracy_if_sure_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    run = record()
    sure = sum(round(row["test"] * (1 - row["abstained"])) for row in run.rows if row["test"])
    terminal.result(run, Path("report.html"))
    assert f"Accuracy if sure (of {sure}) " in capsys.readouterr().out
    assert f"On the rest ({sure} examples) they are right in" in plain(Page(render(run)).text)
    unsure = {"abstained": 1.0, "answered_accuracy": None}
    last = run.history[-1] | {"abstained": {"pooled": 1.0}, "answered_accuracy": {"pooled": None}}
    rows = [row | unsure for row in run.rows]
    none = replace(run, history=[last], evaluation=run.evaluation | {"clients": rows})
    terminal.result(none, Path("report.html"))
    line = next(line for line in capsys.readouterr().out.splitlines() if "Accuracy if sure" in line)
    assert line.split() == ["Accuracy", "if", "sure", "–", "–", "–"]
    assert "of the rest" not in Page(render(none)).text


def test_what_guessing_scores_stands_beside_the_figures() -> None:
    run = record()
    assert "uessing" not in render(run)
    last = run.history[-1] | {"majority": {"pooled": 0.321}, "shares_nll": {"pooled": 1.234}}
    page = render(replace(run, history=[*run.history[:-1], last]))
    assert "<dt>guessing</dt><dd>32.1" in page
    assert "<dt>guessing</dt><dd>1.234</dd>" in page
    assert "Guessing means always predicting the most frequent class" in Page(page).text


def test_a_client_with_few_test_examples_is_not_judged() -> None:
    run = record()
    rows = [row | {"test": 50, "ece": 0.1 + i / 100, "nll": 1.0, "shares_nll": 2.0} for i, row in enumerate(run.rows)]
    rows[0] |= {"test": 9, "ece": 0.9, "nll": 3.0}
    rows[1] |= {"nll": 3.0}
    found = replace(run, evaluation=run.evaluation | {"clients": rows})
    others = [row["ece"] for row in rows[1:]]
    assert found.mean("ece") == pytest.approx(sum(others) / len(others))
    assert found.worst("ece") == max(others) >= found.mean("ece")
    assert found.no_use.startswith(
        f"At 1 of {len(others)} clients with 10 or more test examples the model does no better than a guess"
    )


def test_clients_that_would_do_as_well_without_a_model_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    run = record()
    assert run.no_use == ""
    tested = [row for row in run.rows if row["test"] >= 10]
    rows = [row | {"shares_nll": (row["nll"] or 0.0) + (row is not tested[0]) * 0.1} for row in run.rows]
    found = replace(run, evaluation=run.evaluation | {"clients": rows})
    words = (
        f"At 1 of {len(tested)} clients the model does no better than a guess on the test examples: NLL is not below "
        "that of always predicting its own class shares"
    )
    assert found.no_use == f"{words} ({tested[0]['name']})."
    assert found.no_use in plain(Page(render(found)).text)
    terminal.result(found, Path("report.html"))
    assert words in " ".join(capsys.readouterr().out.split())
    every = replace(run, evaluation=run.evaluation | {"clients": [row | {"shares_nll": 0.0} for row in run.rows]})
    assert f" and {len(tested) - 3} more)." in every.no_use


def test_only_a_protocol_that_says_something_is_named() -> None:
    run = record()
    assert "paper protocol" in Page(render(run)).text
    assert "protocol" not in Page(render(replace(run, summary=run.summary | {"protocol": "own"}))).text


def test_a_wide_table_has_less_room_for_each_column() -> None:
    run = record()
    more: dict[str, float] = {"coverage": 0.9}
    wide = replace(run, evaluation=run.evaluation | {"clients": [row | more for row in run.rows]})
    assert 'class="sortable many"' in render(wide)
    more |= {"set_size": 1.2, "sensitivity": 0.9, "specificity": 0.9}
    widest = replace(run, evaluation=run.evaluation | {"clients": [row | more for row in run.rows]})
    assert 'class="sortable many most"' in render(widest)
    assert 'class="sortable"' in render(record(task="regression"))


def test_many_clients_are_cut_in_the_middle_and_the_page_says_so() -> None:
    run = record(1000)
    page = render(run)
    assert "The 100 worst and the 100 best of 1000 clients; the 800 between them are not shown" in page
    assert page.count('<th scope="row">') - len(re.findall(r'<th scope="row">\d+–', page)) == 200
    tested = [row for row in run.evaluation["clients"] if row["test"]]
    worst = min(tested, key=lambda row: (row["accuracy"], -row["nll"]))
    assert f">{worst['name']} <span" in page
    assert len(page) < 1_000_000


def test_a_hundred_clients_stay_small() -> None:
    run = record(100)
    history = [entry | {"round": 5 * k + entry["round"]} for k in range(20) for entry in run.history]
    assert len(render(RunRecord(run.config, history, run.evaluation, run.summary))) < 500_000


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a&amp;b",
    "Ärzte 'n' Söhne",
    "</style></svg>",
]


def test_names_and_settings_are_only_ever_text() -> None:
    run = record(len(HOSTILE), names=HOSTILE)
    title = {"method": HOSTILE[0], "data": HOSTILE[1], "device": HOSTILE[4]}
    run = RunRecord(
        {"note": HOSTILE[0], HOSTILE[1]: {"x": HOSTILE[4]}}, run.history, run.evaluation, run.summary | title
    )
    page = Page(render(run))
    assert page.count("script") == 1
    assert page.count("style") == 1
    assert page.count("img") == 0
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    for name in HOSTILE:
        assert name in page.text


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_nothing_is_loaded_from_anywhere(task: str) -> None:
    page = render(record(task=task))
    assert "http://" not in page
    assert "https://" not in page
    assert "url(" not in page
    assert "@import" not in page
    loading = {"src", "href", "xlink:href", "action", "data", "srcset"}
    assert not any(loading & attributes.keys() for _, attributes in Page(page).tags)
    assert "default-src 'none'" in page


def test_a_browser_runs_our_script_and_style_alone() -> None:
    page = render(record())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1)
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}';" in policy
    assert "unsafe" not in policy
    assert ' style="' not in page  # which the policy would leave without effect
    assert ' title="' not in page  # which only a mouse could find


def test_the_same_record_gives_the_same_page() -> None:
    assert render(record(30)) == render(record(30))


def test_a_run_that_diverged_can_still_be_reported() -> None:
    run = record()
    gone = {"pooled": None, "mean": None, "worst": None}
    last = run.history[-1] | {"nll": gone, "accuracy": gone, "train_nll": math.nan, "train_kl": math.inf}
    rows = [row | {"nll": None, "accuracy": None, "brier": 1e9} for row in run.evaluation["clients"]]
    words = Page(render(RunRecord({}, [*run.history, last], run.evaluation | {"clients": rows}, run.summary))).text
    assert "–" in words
    assert not re.search(r"\b(nan|none|inf)\b", words, re.IGNORECASE)


def test_every_series_missing_still_gives_a_page() -> None:
    gone = {"pooled": None, "mean": None, "worst": None}
    run = RunRecord({}, [{"round": 1, "accuracy": gone, "nll": gone}], {}, {})
    assert "A run on unnamed data" in Page(render(run)).text


def test_a_run_without_evaluation_says_so() -> None:
    assert "No round of this run was evaluated" in render(RunRecord({}, [], {}, {"method": "FedAvg", "data": "mnist"}))


def test_write_replaces_whole_files_and_leaves_nothing_beside(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "report.html"
    run = record()
    assert write(run, target) == target
    write(record(3), target)
    write(run, str(target))
    assert target.read_text(encoding="utf-8") == render(run)
    assert [p.name for p in target.parent.iterdir()] == ["report.html"]


def test_a_name_that_is_no_unicode_does_not_stop_the_report(tmp_path: Path) -> None:
    run = record(2, names=["caf\udce9", "b"])
    assert "caf?" in write(run, tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write(record(2), tmp_path / "file" / "report.html")


def test_importing_the_report_leaves_no_plotting_state() -> None:
    code = "import sys, bpfed.report; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_auroc_is_the_mean_of_clients_and_not_of_all_their_examples_together(tmp_path: Path) -> None:
    bpfed.fit(
        "bpfed-recipe",
        scenarios.classification(classes=2, test=20),
        rounds=1,
        epochs=1,
        device="cpu",
        out=tmp_path / "run",
    )
    found = RunRecord.read(tmp_path / "run")
    own = [row["auroc"] for row in found.rows if row["auroc"] is not None]
    assert found.last("auroc") == pytest.approx(sum(own) / len(own))
    assert found.history[-1]["auroc"]["pooled"] != pytest.approx(found.last("auroc"))
    assert METRICS["auroc"].full == "AUROC, mean of clients"


def test_the_report_needs_neither_comparisons_nor_numerics() -> None:
    """A leaf: what it is imported by, it does not import, and the command starts without torch."""
    code = "import sys, bpfed.report; print(*{'torch', 'numpy', 'bpfed.comparison', 'bpfed.engine'} & {*sys.modules})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == ""
