"""A verdict on each client: what is said, how it is ranked, and that chance is not taken for a result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pages import Page, plain, record

from bpfed.report import RunRecord, render
from bpfed.report.verdicts import headline, verdicts, why


def judged(gain: float, error: float, versus: tuple[float, float] | None = None, **row: Any) -> RunRecord:
    """A run of one client with these differences from a guess and from its own logistic regression."""
    run = record(2)
    own = run.rows[0] | {"name": "North", "test": 40, "nll": 0.5, "accuracy": 0.9, "shares_nll": 0.5 + gain} | row
    found: dict[str, Any] = {"clients": {"gain": [gain], "gain_se": [error]}}
    more: dict[str, Any] = {}
    if versus is not None:
        found["versus"] = {"site-logistic": {"gain": [versus[0]], "gain_se": [versus[1]]}}
        scores = {"name": "site-logistic", "title": "Per-site logistic regression", "pooled": False, "scores": {}}
        more = {"baselines": {"rows": [scores | {"clients": {"nll": [0.5 + versus[0]]}}]}}
    evaluation = run.evaluation | {"clients": [own], "diagnostics": found} | more
    return replace(run, evaluation=evaluation, summary=run.summary | {"clients": 1})


@pytest.mark.parametrize(
    ("gain", "error", "level", "said"),
    [
        (0.3, 0.05, "good", "Better than guessing (NLL 0.500 against 0.800)."),
        (0.05, 0.05, "care", "Not clearly better than guessing (NLL 0.500 against 0.550, within chance)."),
        (-0.05, 0.05, "care", "Not clearly better than guessing (NLL 0.500 against 0.450, within chance)."),
        (-0.3, 0.05, "poor", "Worse than guessing (NLL 0.500 against 0.200)."),
    ],
)
def test_a_difference_counts_beyond_twice_its_standard_error(gain: float, error: float, level: str, said: str) -> None:
    (found,) = verdicts(judged(gain, error))
    assert (found.level, plain(found.said[0])) == (level, said)


@pytest.mark.parametrize(
    ("versus", "level", "said"),
    [
        ((0.2, 0.05), "good", "Better than its own logistic regression"),
        ((-0.01, 0.05), "good", "About as good as its own logistic regression"),
        ((-0.2, 0.05), "care", "Worse than its own logistic regression"),
    ],
)
def test_a_plain_model_of_its_own_rows_is_compared_with(versus: tuple[float, float], level: str, said: str) -> None:
    (found,) = verdicts(judged(0.3, 0.05, versus))
    assert found.level == level
    assert found.said[1].startswith(said)


def test_a_class_that_is_missed_is_named() -> None:
    run = judged(0.3, 0.05)
    classes = [{"label": "benign", "test": 20, "recall": 1.0}, {"label": "malignant", "test": 20, "recall": 0.6}]
    clients = run.diagnostics["clients"] | {"confusion": [[[20, 0], [8, 12]]]}
    changed = replace(run, evaluation=run.evaluation | {"classes": classes, "diagnostics": {"clients": clients}})
    (found,) = verdicts(changed)
    assert found.level == "care"
    assert "Its weakest class is ‘malignant’: it finds 12 of 20 test cases (60 %)." in map(plain, found.said)
    assert why([found]) == "Why care is needed: it misses more than a quarter of a class."
    assert "it misses more than a quarter of a class" in Page(render(changed)).text


def test_few_test_examples_are_not_judged_and_the_worst_is_first() -> None:
    run = judged(0.3, 0.05)
    rows = [run.rows[0], run.rows[0] | {"name": "South", "shares_nll": 0.4}, run.rows[0] | {"name": "East", "test": 9}]
    several = replace(
        run, evaluation={k: v for k, v in run.evaluation.items() if k != "diagnostics"} | {"clients": rows}
    )
    found = verdicts(several)
    assert [(one.name, one.level) for one in found] == [("South", "poor"), ("North", "good"), ("East", "unknown")]
    assert headline(several, found) == (
        "It scores better than a guess at 1 of 3 clients: North. Do not rely on it at 1: South. There are too few test "
        "examples to judge it at 1: East."
    )
    assert why(found) == "Why care is needed: it is no better than a guess (at 1)."
    assert "Standard errors are not known here" in Page(render(several)).text


def test_among_clients_of_the_same_verdict_the_worst_score_is_first() -> None:
    run = judged(0.3, 0.05)
    rows = [run.rows[0] | {"name": name, "nll": nll} for name, nll in (("mild", 0.4), ("worst", 0.7), ("bad", 0.6))]
    several = {key: value for key, value in run.evaluation.items() if key != "diagnostics"} | {"clients": rows}
    assert [one.name for one in verdicts(replace(run, evaluation=several))] == ["worst", "bad", "mild"]
