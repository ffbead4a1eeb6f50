"""Tables and figures of the paper's experiments: the numbers are those of the files, and nothing is invented."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from paper_records import ROUNDS, put, row, seed_result

from bpfed._util.errors import UserError
from bpfed._util.files import to_json
from experiments import figures, lineup, markdown, panel, published
from experiments.records import read_cell, read_cells
from experiments.render import read_pages, render
from experiments.render import tables as render_tables
from experiments.results import Results

ROOT = Path(__file__).parent.parent.parent
METHODS = ("bpfed-recipe", "bpfed", "pfedbayes", "fedper", "fedper+laplace")
SUMMARY = {
    *("accuracy", "accuracy_sd", "accuracy_best_round", "nll", "brier", "ece", "ece_worst_client", "mce"),
    *("seeds", "rounds", "seconds"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up results of one dataset; FedPer was not run on the large cell."""
    folder = tmp_path_factory.mktemp("results")
    for cell in ("mnist-small", "mnist-large"):
        for k, method in enumerate(METHODS):
            if (cell, method) != ("mnist-large", "fedper"):
                top = 0.95 - 0.01 * k
                put(folder, cell, method, [seed_result(s, [0.5, 0.8, 0.97, top - 0.002 * s]) for s in (0, 1)])
    put(folder, "mnist-small", "bpfed", [seed_result(0, [0.5, 0.8, 0.9, 0.94])], protocol="published", rounds=800)
    put(folder, "mnist-small", "bpfed", [seed_result(0, [0.5, 0.8, 0.9, 0.941])], tag="rounds-36", rounds=36)
    put(folder, "mnist-small", "bpfed", [seed_result(0, [0.5, 0.8, 0.9, 0.91])], tag="rounds-100", rounds=100)
    three = {"accuracy": [[0.7, 0.8], [0.8, 0.9]], "nll": [[0.9, 0.8], [0.5, 0.4]], "ece": [[0.1, 0.1], [0.04, 0.02]]}
    for k, method in enumerate(("fedper", "bpfed")):
        path = folder / "novel/mnist-small" / f"{method}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        points = [{"examples": n, **{m: three[m][i] for m in three}} for i, n in enumerate((1, 50))]
        curve = {"steps": [0, 5, 500], "accuracy": [[0.2, 0.2], *three["accuracy"]]}
        path.write_text(to_json({"cell": "mnist-small", "method": method, "points": points, "curve": curve}))
        three["accuracy"] = [[a + 0.01 * (k + 1) for a in row] for row in three["accuracy"]]
    swept = {"bpfed": three, "fedavg": three}
    metadata = {"data": "20 clients", "rounds": 9, "seeds": [0, 1], "device": "NVIDIA H200"}
    (folder / "heterogeneity.json").write_text(
        to_json({"axis": "alpha", "values": [0.1, 10], "methods": swept, **metadata})
    )
    strange = {what: {"total": [0.81, 0.83], "epistemic": [0.5, None]} for what in ("unseen", "other")}
    shifted = {name: {"rotation": got, "ood": strange} for name, got in swept.items()}
    told = {"data": "mnist-small", "other": "fmnist", "rounds": 9, "seeds": [0, 1]}
    measured = {"bpfed": {"hellinger": [[0.3, 0.5], [0.1, 0.1]], "slope": -0.95, "slope_se": 0.03}}
    bound = {"r_n": [8.0, 4.0], "epsilon_n2": [6.0, 3.0], "slope": -0.5, "slope_r_n": -0.6}
    theory = {
        f"by_{axis}": {axis: x, "methods": measured, "bound": bound}
        for axis, x in (("n", [25, 100]), ("clients", [2, 8]))
    }
    (folder / "theory.json").write_text(to_json({"setting": {}, **theory}))
    (folder / "shift.json").write_text(to_json({**told, "shifts": {"rotation": [0, 30]}, "methods": shifted}))
    return folder


@pytest.fixture(scope="module")
def docs(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    (folder / "results").mkdir()
    (folder / "results/index.md").write_text("# Ours\n\nBy hand.\n\n" + markdown.blank() + "\nAfter.\n")
    said: list[Path] = []
    written = render(results, folder, said.append)
    assert written == said
    return folder


def part(docs: Path, name: str) -> str:
    return (docs / "results/index.md").read_text().split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]


def test_a_record_is_the_mean_over_seeds(tmp_path: Path) -> None:
    runs = [
        seed_result(0, [0.5, 0.9, 0.7, 0.8], [0.4, 0.3, 0.2, 0.1]),
        seed_result(1, [0.5, 0.6, 0.95, 0.9], [0.4, 0.3, 0.2, 0.1]),
    ]
    record = read_cell(put(tmp_path, "mnist-small", "bpfed", runs))
    found = record.row()
    assert set(found) == SUMMARY
    assert found["accuracy"] == pytest.approx(0.85)
    assert found["accuracy_sd"] == pytest.approx(0.1 / 2**0.5)
    assert found["accuracy_best_round"] == pytest.approx((0.9 + 0.95) / 2)
    assert record.best("ece") == pytest.approx((0.3 + 0.2) / 2)  # in the most accurate round, not its own best
    assert found["nll"] == pytest.approx(0.25)
    assert (found["seeds"], found["rounds"], found["seconds"]) == (2, 12, 30.0)
    assert record.seeds == [0, 1]
    rounds, values = record.curve("nll")
    assert rounds.tolist() == ROUNDS
    assert values.shape == (2, 4)


def test_one_seed_has_no_deviation_and_null_is_no_number(tmp_path: Path) -> None:
    run = seed_result(0, [0.5, 0.6, 0.7, 0.8])
    run["last"]["mce"] = None
    record = read_cell(put(tmp_path, "mnist-small", "bpfed", [run]))
    assert np.isnan(record.sd("accuracy"))
    assert np.isnan(record.mean("mce"))
    assert json.loads(to_json(record.row()))["mce"] is None


def test_reliability_is_pooled_by_examples(tmp_path: Path) -> None:
    runs = [seed_result(s, [0.5, 0.6, 0.7, 0.8]) for s in (0, 1)]
    found = read_cell(put(tmp_path, "mnist-small", "bpfed", runs)).reliability()
    assert found is not None
    assert found.count.tolist() == [0, 30, 180]
    np.testing.assert_allclose(found.confidence, [np.nan, 0.5, 0.9])
    np.testing.assert_allclose(found.accuracy, [np.nan, 0.4, 0.95])


def test_what_is_not_a_result_is_said(tmp_path: Path) -> None:
    path = put(tmp_path, "mnist-small", "bpfed", [seed_result(0, [0.5, 0.6, 0.7, 0.8])])
    assert list(read_cells(tmp_path)["paper"]["groups"]["mnist-small"]) == ["bpfed"]
    path.rename(path.with_stem("fedper"))
    with pytest.raises(UserError, match="says that it is paper/groups/mnist-small/bpfed"):
        read_cells(tmp_path)
    path.with_stem("fedper").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        read_cells(tmp_path)
    path.with_stem("fedper").write_text("{}")
    with pytest.raises(UserError, match="'protocol' is missing"):
        read_cells(tmp_path)
    with pytest.raises(UserError, match="no folder of results"):
        render(tmp_path / "nowhere", tmp_path)


def test_the_published_numbers_are_whole() -> None:
    assert published.METHODS.keys() == published.ACCURACY.keys()
    assert all(len(row) == len(published.CELLS) for rows in published.TABLES.values() for row in rows.values())
    best = [max(published.published("accuracy", m, cell) or 0 for m in published.METHODS) for cell in published.CELLS]
    assert best == [0.9475, 0.9851, 0.8968, 0.9354, 0.5437, 0.7399]
    assert published.published("ece", "bpfed", "cifar10-large") == 0.298
    assert published.published("ece", "fedper", "mnist-small") is None
    assert published.published("nll", "bpfed", "mnist-small") is None


def test_ours_stand_beside_the_published_number(docs: Path) -> None:
    text = part(docs, "table1")
    assert row(text, "BPFed")[1:4] == ["93.90 ± 0.14 (94.75)", "93.90 ± 0.14 (98.51)", "– (89.68)"]
    assert row(text, "BPFed recipe")[1:4] == ["**94.90** ± 0.14", "**94.90** ± 0.14", "–"]
    assert row(text, "FedPer")[1:3] == ["91.90 ± 0.14 (93.77)", "– (98.49)"]
    assert row(text, "FedAvg")[1] == "– (88.27)"
    assert row(part(docs, "table1-best"), "BPFed")[1] == "**97.00** (94.75)"  # all have the same best round
    assert row(part(docs, "table2"), "BPFed")[1] == "**4.00** ± 0.00 (4.4)"
    assert row(part(docs, "nll"), "FedPer + laplace")[1:4] == ["**0.250** ± 0.071", "**0.250** ± 0.071", "–"]
    assert "Not run yet." in part(docs, "table1-random")


def test_the_other_tables(docs: Path) -> None:
    assert row(part(docs, "reference"), "BPFed, accuracy %, best round")[1:3] == ["94.00", "–"]
    assert row(part(docs, "reference"), "BPFed, ECE %, printed")[1:] == ["4.4", "1.2", "8.9", "6.6", "42.8", "29.8"]
    assert row(part(docs, "effort"), "BPFed recipe")[1:4] == ["12 x 2, 30 s", "12 x 2, 30 s", "–"]
    assert "12 → 36 | 94.00 → 94.10 | 0.200 → 0.200 | 4.00 → 4.00 | +0.0 %" in part(docs, "longer")
    assert row(part(docs, "hundred"), "BPFed")[1:3] == ["**91.00**", "**0.200**"]
    assert row(part(docs, "novel").split("| NLL |")[0], "BPFed")[1:3] == ["**86.00** ± 7.07", "–"]
    assert row(part(docs, "heterogeneity"), "FedAvg, NLL")[1:] == ["**0.850**", "**0.450**"]
    assert "20 clients, 9 rounds, 2 seeds, NVIDIA H200." in part(docs, "heterogeneity")
    assert row(part(docs, "shift"), "FedAvg")[1:] == ["**82.0** ± 1.4", "–", "**82.0** ± 1.4", "–"]


def test_the_bound_begins_where_the_first_method_does(results: Path, docs: Path) -> None:
    theory = Results.read(results).theory
    assert theory is not None
    for rate in theory.rates["n"]:
        np.testing.assert_allclose(rate.mean, [0.4, 0.2])
    text = part(docs, "theory")
    assert row(text, "BPFed")[1:] == ["−0.95 ± 0.03", "−0.95 ± 0.03"]
    assert row(text, "rate of ε²")[1:] == ["−0.50", "−0.50"]
    assert row(text.split("| examples n |")[1].split("| clients N |")[0], "BPFed, error")[1:] == [
        "**0.4000**",
        "**0.1000**",
    ]


def test_only_what_stands_between_markers_changes(results: Path, docs: Path) -> None:
    page = (docs / "results/index.md").read_text()
    assert page.startswith("# Ours\n\nBy hand.\n")
    assert page.endswith("\nAfter.\n")
    with pytest.raises(UserError, match="no place for 'nll', or more than one"):
        markdown.fill({docs: page.replace("<!-- nll -->", "")}, Results.read(results), {})


def test_every_part_has_its_place_on_one_of_our_pages(results: Path) -> None:
    made = markdown.fill(read_pages(ROOT / "docs"), Results.read(results), {"convergence": ["Figure 3"]})
    assert "Figure 3" in "".join(made.values())


def test_every_figure_is_written_and_linked(docs: Path) -> None:
    page = (docs / "results/index.md").read_text()
    names = {path.stem for path in (docs / "figures").iterdir()}
    assert names == {
        *("figure-3-convergence-mnist", "figure-6-reliability-mnist", "figure-7-novel-mnist"),
        *("heterogeneity", "shift-mnist-small", "theory"),
    }
    for name in names:
        assert f"(../figures/{name}.png)" in page
        assert f"(../figures/{name}.svg)" in page


def test_the_same_results_give_the_same_files(results: Path, docs: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results/index.md").write_text((docs / "results/index.md").read_text())
    program = (
        "import sys; from pathlib import Path; from experiments.render import render;"
        "assert 'matplotlib' not in sys.modules; render(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "SOURCE_DATE_EPOCH": "1"}
    subprocess.run([sys.executable, "-c", program, results, tmp_path], check=True, env=environment, cwd=ROOT)
    files = sorted(path.relative_to(docs) for path in docs.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    for file in files:
        assert (docs / file).read_bytes() == (tmp_path / file).read_bytes(), file


def test_a_figure_shows_the_means_of_the_files(results: Path) -> None:
    found = Results.read(results)
    with panel.style():
        figure = figures.convergence(found.of("paper", "groups"), "mnist")
    assert figure is not None
    accuracy, large, nll, _ = figure.axes
    ends = sorted(np.asarray(line.get_ydata())[-1] for line in accuracy.lines)
    np.testing.assert_allclose(ends, [0.909, 0.919, 0.929, 0.939, 0.949])
    assert len(large.lines) == len(METHODS) - 1
    np.testing.assert_allclose([np.asarray(line.get_ydata())[-1] for line in nll.lines], 0.25)
    assert {text.get_text() for text in accuracy.texts} == {lineup.title(name) for name in METHODS}
    assert figures.convergence({}, "mnist") is None
    assert figures.novel({}, "mnist") is None
    assert figures.sweep(None) is None
    assert figures.shift(None) is None


def test_methods_are_told_apart_without_colour() -> None:
    looks = [(str(ink.dash), ink.marker, ink.filled) for ink in map(panel.ink, lineup.ORDER)]
    assert len(set(looks)) == len(lineup.ORDER)
    chief = [panel.ink(name) for name in panel.CHIEF]
    assert len({str(ink.dash) for ink in chief}) == len({ink.marker for ink in chief}) == len(chief)


@pytest.mark.parametrize("name", ["accuracy", "nll", "ece"])
def test_scales_rise_and_ticks_are_round_and_inside(name: str) -> None:
    measure = panel.MEASURES[name]
    values = np.linspace(0.01, 0.99, 50)
    np.testing.assert_allclose(measure.back(measure.scale(values)), values)
    assert (np.diff(measure.scale(values)) > 0).all()
    for low, high in ((0.02, 0.9), (0.5, 0.55), (0.9401, 0.9499)):
        ticks = panel._ticks(low, high, measure)
        assert 2 <= len(ticks) <= 9
        assert all(low <= tick <= high for tick in ticks)


def test_readme_without_a_place_is_left_alone(results: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "README.md").write_text("# Mine\n")
    render(results, docs)
    assert (tmp_path / "README.md").read_text() == "# Mine\n"


def test_a_place_that_does_not_end_is_known_before_anything_is_written(results: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "README.md").write_text("<!-- measured -->\n")
    with pytest.raises(UserError, match="A page has no place for 'measured'"):
        render(results, docs)
    assert not list(docs.iterdir())


RECIPE_PAGE = "# Recipe\n\n" + "\n\n".join(
    f"About {name}:\n\n<!-- {name} -->\nold\n<!-- /{name} -->" for name in ("calibration", "members", "aims", "rounds")
)


@pytest.fixture
def recipe_pages(tmp_path: Path) -> tuple[Path, Path]:
    """Results of the recipe in two cells, and empty pages for them; returns both folders."""
    results, docs = tmp_path / "results", tmp_path / "docs"
    for cell, accuracy, ece in (("mnist-small", 0.9518, 0.0134), ("mnist-large", 0.985, 0.0066)):
        for variant, more in (("", 0.0), ("+calibrated", 0.001), ("+members+calibrated", 0.002)):
            runs = [seed_result(s, [0.1, 0.2, 0.3, accuracy + more], [0.4, 0.3, 0.2, ece]) for s in (0, 1)]
            calibration_words = {"calibration_temperature": 0.87} if variant else {}
            put(results, cell, f"bpfed-recipe{variant}", [run | calibration_words for run in runs])
    longer = [seed_result(0, [0.1, 0.2, 0.3, 0.97], [0.4, 0.3, 0.2, 0.0234])]
    put(results, "mnist-small", "bpfed-recipe", longer, tag="rounds-36", rounds=36)
    put(results, "mnist-small", "fedper", longer, tag="rounds-36", rounds=36)
    put(results, "mnist-small", "fedper", [seed_result(0, [0.1, 0.2, 0.3, 0.9])])
    (docs / "lab").mkdir(parents=True)
    (docs / "lab" / "recipe-details.md").write_text(RECIPE_PAGE)
    return results, docs


def test_the_pages_of_the_recipe_show_the_numbers_of_the_files(recipe_pages: tuple[Path, Path]) -> None:
    results, docs = recipe_pages
    render(results, docs)
    page = (docs / "lab" / "recipe-details.md").read_text()
    assert "old" not in page
    assert "About aims:" in page

    def table(name: str) -> str:
        return page.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]

    assert row(table("calibration"), "MNIST small, 2 seeds")[1:] == ["0.250, 1.34", "0.250, 1.34", "0.87"]
    assert row(table("members"), "MNIST small, 2 seeds")[1:] == ["95.18, 0.250", "95.28, 0.250", "**95.38**, 0.250"]
    assert row(table("aims"), "aim of the recipe")[1:3] == ["95.2 / 1.3", "98.5 / 0.6"]
    assert row(table("aims"), "aim of the population")[-1] == "78.0 / 1.2"
    printed = row(table("aims"), "best printed accuracy / ECE of BPFed as printed")
    assert (printed[1], printed[-1]) == ("94.75 / 4.4", "73.99 / 29.8")
    # 95.18 and 1.34 % reach 95.2 and 1.3 at one decimal; 0.66 % does not reach 0.6.
    assert row(table("aims"), "**recipe**")[1:4] == ["**95.18 / 1.34**", "98.50 / 0.66", "–"]
    assert len([line for line in table("rounds").splitlines() if "→" in line]) == 1  # the recipe's alone
    assert "| 12 → 36 | 95.18 → 97.00 | 0.200 → 0.200 | 1.34 → 2.34 | +0.0 % |" in table("rounds")


def test_pages_rendered_twice_are_the_same(recipe_pages: tuple[Path, Path]) -> None:
    results, docs = recipe_pages
    render(results, docs)
    pages = {path: path.read_text() for path in (docs / "lab" / "recipe-details.md", docs / "results/index.md")}
    render(results, docs)
    assert pages == {path: path.read_text() for path in pages}


def test_our_pages_say_what_our_results_say() -> None:
    """What `python -m experiments render` would write into README, the recipe and the audit is there already."""
    made = render_tables(Results.read(ROOT / "results"), ROOT / "results", ROOT / "docs")
    others = {"digits.md", "hospitals.md", "accelerometers.md", "audit.md", "recipe-details.md", "recipe-search.md"}
    others |= {"tables.md", "dirichlet.md", "many-classes.md", "cifar100-features.md", "honest-sets.md", "tweets.md"}
    assert {path.name for path in made} == {"README.md", "headline.md", *others}
    for path, text in made.items():
        assert path.read_text() == text, f"{path.name}: run 'python -m experiments render'"


@pytest.mark.parametrize(
    ("accuracy", "ece", "there"),
    [(0.9515, 0.0134, True), (0.9549, 0.0136, False), (0.9514, 0.0, False), (0.96, 0.0, True)],
)
def test_an_aim_is_reached_at_its_own_decimals_in_both_figures(accuracy: float, ece: float, there: bool) -> None:
    assert published.reached("bpfed-recipe", "mnist-small", accuracy, ece) is there
