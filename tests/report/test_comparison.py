"""The combined page: complete, self-contained, and legible with few methods and many."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from pages import Page, plain, record

from bpfed.comparison import Comparison, charts
from bpfed.comparison.charts import pooled
from bpfed.comparison.page import render
from bpfed.metrics import evaluate
from bpfed.metrics.registry import METRICS
from bpfed.report.html import TEMPLATES


def comparison(
    methods: int = 3, seeds: int = 2, task: str = "classification", names: list[str] | None = None
) -> Comparison:
    names = names or [f"m{i}" for i in range(methods)]
    records = {}
    for k, name in enumerate(names):
        runs = {}
        for seed in range(seeds):
            run = record(8, 3 + k % 4, task)  # more rounds are better, in these made-up runs
            runs[seed] = replace(run, summary=run.summary | {"seed": seed})
        records[name] = runs
    return Comparison(records, {name: name.upper() for name in names}, names[0])


def test_every_method_and_figure_is_on_the_page() -> None:
    found = comparison()
    page = Page(render(found))
    words = plain(page.text)
    assert "Comparison on digits: 3 methods, 2 seeds, 8 clients, 3 rounds" in words
    for name in found.names:
        assert found.titles[name] in words
        assert f"{100 * found.mean(name, 'accuracy'):.1f} %" in words
        assert f"{found.mean(name, 'nll'):.3f}" in words
        assert f"{100 * found.floor(name):.1f} %" in words
    assert "10 bins" in words
    assert "paired t over the 2 seeds" in words
    for section in ("Convergence", "Differences from M0", "Calibration", "Clients", "Settings"):
        assert f">{section}</h2>" in render(found)
    # Two of curves, of differences and of clients, the bars, and a small diagram for each method.
    figures = [attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("role") == "img"]
    assert len(figures) == 2 * 7 + 3  # all but the small ones also for a phone


def test_it_needs_nothing_beside_itself_and_is_always_the_same() -> None:
    page = render(comparison())
    assert page == render(comparison())
    assert not re.search(r"https?://|url\(|@import|<link|<img|src=", page.replace("script-src", ""))
    assert "nan" not in re.sub(r"[a-z]+nan|nan[a-z]+", "", page.lower())


@pytest.mark.parametrize(("methods", "seeds"), [(1, 1), (1, 3), (2, 1), (20, 3)])
def test_few_and_many(methods: int, seeds: int) -> None:
    words = plain(Page(render(comparison(methods, seeds))).text)
    assert ("Differences" in words) == (methods > 1)
    assert ("±" in words) == (seeds > 1)
    if methods == 2:
        assert "bootstrap over the 7 clients" in words


def test_regression() -> None:
    words = plain(Page(render(comparison(task="regression"))).text)
    assert "RMSE" in words
    assert "Accuracy" not in words


def test_names_cannot_break_the_page() -> None:
    found = comparison(names=["<script>alert(1)</script>", 'a"b', "x&y"])
    page = render(found)
    assert page.count("<script>") == 1
    assert "<SCRIPT>" not in page
    Page(page)


def test_lines_differ_without_colour() -> None:
    """Neighbours in the list have other dashes, and no two of 20 are alike in both dash and colour."""
    drawn = render(comparison(20, 1))
    kinds = re.findall(r'<g class="method c(\d) d(\d)', drawn)[:20]
    assert len(set(kinds)) == 20
    assert all(one[1] != two[1] for one, two in pairwise(kinds))
    style = (TEMPLATES / "style.css").read_text()
    assert len(re.findall(r"\.d\d \.curve \{ stroke-dasharray", style)) == charts.DASHES - 1


def test_reliability_of_several_runs_is_that_of_all_their_examples() -> None:
    g = torch.Generator().manual_seed(0)
    parts = []
    for n in (40, 25):
        probs = (3 * torch.randn(n, 3, generator=g)).softmax(1).double()
        parts.append((probs, torch.randint(3, (n,), generator=g)))

    def reliability(*chosen: tuple[torch.Tensor, torch.Tensor]) -> dict[str, list[float]]:
        probs, y = (torch.cat(t) for t in zip(*chosen, strict=True))
        return evaluate(probs, y, torch.tensor([0, len(y)])).reliability.record()

    together, expected = pooled([reliability(p) for p in parts]), reliability(*parts)
    assert together["count"] == expected["count"]
    for key in ("confidence", "accuracy"):
        for one, two in zip(together[key], expected[key], strict=True):
            assert one == (None if two is None else pytest.approx(two))


def test_names_of_variants_have_room_and_are_told_apart():
    """Cut to the same letters, two of them would look like one."""
    names = ["BPFed recipe + members", "BPFed recipe + members + calibrated"]
    rows = [charts.Row(name, 0.4, 0.3, 0.5) for name in names]
    lines = [charts.Line(name, [1, 2], [0.5, 0.4]) for name in names]
    for drawn in (charts.bars(rows, METRICS["nll"]), charts.convergence(lines, METRICS["nll"])):
        width = int(re.search(r'viewBox="0 0 (\d+) ', drawn).group(1))
        for name in names:
            style, x = re.search(rf'<text class="([^"]*)" x="([\d.]+)"[^>]*>{re.escape(name)}[< ]\d?', drawn).groups()
            room = float(x) if style.startswith("end") else width - float(x)
            assert room > 6.5 * len(name)


def test_a_small_diagram_says_which_way_a_method_leans() -> None:
    found = comparison(1, 1)
    (name,), (seed,) = found.names, found.seeds
    run = found.records[name][seed]

    def leaning(confidence: float) -> str:
        reliability = {"count": [10], "confidence": [confidence], "accuracy": [0.8]}
        changed = replace(run, evaluation=run.evaluation | {"reliability": reliability})
        return plain(Page(render(replace(found, records={name: {seed: changed}}))).text)

    assert "3.1 points under-confident" in leaning(0.769)
    assert "3.1 points over-confident" in leaning(0.831)
