"""Ours beside the best of the others: on the README, seed by seed, and with the others stopped in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from paper_records import put, row, seed_result

from bpfed._util.files import to_json
from experiments import headline, paired
from experiments.markdown import blank, measure_table
from experiments.render import render
from experiments.results import Results


def test_a_page_has_ours_beside_the_best_of_others(tmp_path: Path) -> None:
    """Two seeds each; the population, which uploads moments of personal factors, is none of the others."""
    results, docs = tmp_path / "results", tmp_path / "docs"
    ours = docs / "results/headline.md"
    for method, accuracy in (
        ("bpfed-recipe", 0.95),
        ("bpfed", 0.90),
        ("fedper", 0.92),
        ("pfedbayes", 0.96),
        ("bpfed-population", 0.99),
        ("bpfed-recipe+calibrated", 0.98),
    ):
        put(results, "mnist-small", method, [seed_result(s, [0.1, 0.2, 0.3, accuracy]) for s in (0, 1)])
    diverged = seed_result(0, [0.1, 0.1, 0.1, 0.1])
    put(results, "mnist-small", "bpfed", [diverged | {"last": diverged["last"] | {"nll": None}}])
    ours.parent.mkdir(parents=True)
    (ours.parent / "index.md").write_text(blank())
    ours.write_text("# Mine\n\n<!-- headline -->\nold\n<!-- /headline -->\n\nStays.\n")
    assert ours.resolve() in [path.resolve() for path in render(results, docs)]
    page = ours.read_text()
    assert page.startswith("# Mine\n")
    assert page.endswith("\nStays.\n")
    assert "old" not in page
    lines = dict(line.strip("| ").split(" | ", 1) for line in page.splitlines() if line.startswith("| "))
    assert lines["accuracy %: recipe"].startswith("95.00 | – |")
    assert lines["accuracy %: best that the paper prints"].startswith("94.75 | **98.51** |")
    assert lines["accuracy %: best of the other methods here"].startswith("**96.00** | – |")
    assert lines["accuracy %: recipe, two members, calibrated"].startswith("– | –")
    assert lines["NLL: best of the other methods here"].startswith("**0.250** | – |")


@pytest.fixture
def unevenly_seeded(tmp_path: Path) -> Path:
    """The recipe has four seeds, of which the third and fourth are easy; the others have the first two or one."""
    results = tmp_path / "results"
    put(results, "mnist-small", "bpfed-recipe", [_scored(s, a, 0.3) for s, a in enumerate((0.90, 0.92, 0.99, 0.99))])
    put(results, "mnist-small", "fedper", [_scored(s, a, 0.4 + 0.02 * s) for s, a in enumerate((0.91, 0.94))])
    put(results, "mnist-small", "pfedbayes", [_scored(0, 0.93, 0.5)])  # best where it is, and least is known of it
    put(results, "mnist-small", "fedsoul", [_scored(s, 0.999, 0.01) for s in range(2)])  # uploads moments of heads
    put(results, "mnist-small", "local", [_scored(7, 0.999, 0.01)])  # no seed in common
    return results


def _scored(seed: int, accuracy: float, nll: float) -> dict[str, Any]:
    """A run whose NLL was 0.05 lower in the round before the last."""
    run = seed_result(seed, [0.1, 0.2, 0.3, accuracy])
    curve = run["curve"] | {"nll": [1.0, 0.9, nll - 0.05, nll]}
    return run | {"last": run["last"] | {"nll": nll}, "curve": curve}


def test_ours_and_others_are_compared_on_the_seeds_that_both_have(unevenly_seeded: Path) -> None:
    page = paired.differences(Results.read(unevenly_seeded))
    by_accuracy, points, by_nll, nll, per_cent, stopped = row(page, "MNIST small, `groups`")[1:]
    assert (by_accuracy, points) == ("pFedBayes (1)", "−3.00")  # 0.90 against 0.93 of seed 0, no standard error
    assert (by_nll, nll) == ("FedPer (2)", "−0.1100 ± 0.0100")
    assert per_cent == f"−{100 * (1 - 0.3 / 0.41):.1f} %"
    assert stopped == f"−{100 * (1 - 0.3 / 0.36):.1f} % (FedPer)"  # the other at its best round, ours at its last


def test_the_others_stopped_in_time_stand_beside_our_last_round(unevenly_seeded: Path) -> None:
    page = paired.stopped(Results.read(unevenly_seeded), "groups")
    assert row(page, "BPFed recipe, last round")[1:3] == ["0.300", "–"]
    assert row(page, "… the test before it")[1:3] == ["0.250", "–"]
    assert row(page, "FedPer")[1] == "**0.360** (−16.7 %)"  # has no weight draws: ours with all of them
    assert row(page, "pFedBayes")[1] == "0.450 (−44.4 %)"  # has few: ours with as few
    assert "FedSOUL" not in page
    assert "Local" not in page
    assert paired.stopped(Results.read(unevenly_seeded), "random") == ""


def test_readme_has_the_seeds_of_the_best_other_method(unevenly_seeded: Path) -> None:
    page = headline.markdown(Results.read(unevenly_seeded))
    assert row(page, "accuracy %: recipe")[1] == "90.00"
    assert row(page, "accuracy %: best of the other methods here")[1] == "93.00"
    assert row(page, "NLL: best of the other methods here")[1] == "0.410"


def test_readme_compares_on_common_seeds_and_names_the_versions(tmp_path: Path) -> None:
    results = tmp_path / "results"
    for method, seeds in (("bpfed-recipe", 3), ("fedper", 2), ("fedavg", 2), ("local", 2)):
        put(results, "cifar10-small", method, [_scored(s, 0.5, 0.3 + s) for s in range(seeds)])
    other = {name: {"nll": {"seeds": [0.5, 0.7]}} for name in headline.COLUMNS}
    (results / "other").mkdir()
    record = {"bpfed": "0.9.9", "rounds": 7, "methods": other | {"fedper": {"nll": {"seeds": [0.4, 0.4]}}}}
    (results / "other/digits.json").write_text(to_json(record))
    page = headline.readme(Results.read(results), results)
    assert row(page, headline.ROWS["digits"])[1:] == [
        *("0.600 ± 0.141", "**0.400** ± 0.000", "0.600 ± 0.141", "0.600 ± 0.141", "7, 2", "0.9.9")
    ]
    assert row(page, headline.ROWS["cifar10-small"])[1] == "**0.800** ± 0.707"  # of seeds 0 and 1, which all have
    assert headline.ROWS["heart-disease"] not in page  # it was not run


def test_methods_stand_by_their_mean_rank_over_the_versions_that_made_them(tmp_path: Path) -> None:
    results = tmp_path / "results"
    for cell, scores in (
        ("mnist-small", (0.3, 0.1, 0.2)),
        ("mnist-large", (0.3, 0.2, 0.1)),
        ("fmnist-small", (0.9, 0.1)),
    ):
        for method, nll in zip(("bpfed", "fedper", "fedavg"), scores, strict=False):
            put(results, cell, method, [_scored(0, 0.5, nll)])
            path = results / "paper/groups" / cell / f"{method}.json"
            path.write_text(
                to_json(json.loads(path.read_text()) | {"bpfed": "0.2.0" if method == "bpfed" else "0.1.0"})
            )
    page = measure_table(Results.read(results).of("paper", "groups"), "nll", False)
    assert [line.split(" | ")[0][2:] for line in page.splitlines()[2:5]] == ["FedPer", "FedAvg", "BPFed"]
    assert page.endswith("- bpfed 0.1.0: FedPer, FedAvg\n- bpfed 0.2.0: BPFed")
    assert "MNIST small 12" in page
