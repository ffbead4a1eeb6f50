"""Cells of the tables: run once, gone on with, refused when settings differ; the summary; the search; the command."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from command import Command

from bpfed._util.errors import UserError
from bpfed.data import load
from experiments import cell as cells
from experiments import cli as commands
from experiments import protocol, search, summary
from experiments.cell import Cell
from experiments.training import OtherResult, check_same, has_seeds, read


@pytest.fixture
def digits(monkeypatch):
    """The small built-in data instead of the paper's."""
    dealt = []

    def deal(name, partition="groups", seed=0):
        dealt.append((name, seed))
        return replace(load("digits", partition=partition, seed=seed), name=name, protocol="paper")

    monkeypatch.setattr(cells, "load", deal)
    monkeypatch.setattr(search, "load", deal)
    return dealt


def tiny(method: str = "fedper", **changes) -> Cell:
    return Cell("mnist-small", method, rounds=2, seeds=changes.pop("seeds", (0,)), **changes)


def test_a_cell_is_run_once_and_more_seeds_are_added(digits, tmp_path):
    said = []
    cells.run(tiny(), tmp_path, "cpu", said.append)
    first = tiny().record(tmp_path)
    assert tiny().missing(tmp_path) == []
    cells.run(tiny(), tmp_path, "cpu", said.append)
    assert len(digits) == 1
    more = tiny(seeds=(0, 1))
    assert more.missing(tmp_path) == [1]
    cells.run(more, tmp_path, "cpu", said.append)
    record = more.record(tmp_path)
    assert [run["seed"] for run in record["runs"]] == [0, 1]
    assert record["runs"][0] == first["runs"][0]
    assert record["runs"][0]["last"]["accuracy"] != record["runs"][1]["last"]["accuracy"]
    assert record["runs"][0]["curve"]["round"] == [1, 2]
    assert len(said) == 2


def test_a_record_names_every_device_that_a_seed_ran_on(digits, tmp_path, monkeypatch):
    for seeds, device in (((0,), "CPU"), ((0, 1), "a GPU"), ((0, 1, 2), "CPU")):
        monkeypatch.setattr(cells, "device_name", lambda asked, device=device: device)
        cells.run(tiny(seeds=seeds), tmp_path, "cpu", lambda sentence: None)
    assert tiny().record(tmp_path)["device"] == "CPU, a GPU"


def test_a_record_names_every_version_that_made_a_seed(digits, tmp_path, monkeypatch):
    for seeds, version in (((0,), "0.1.0"), ((0, 1), "0.2.0")):
        monkeypatch.setattr("bpfed.__version__", version)
        cells.run(tiny(seeds=seeds), tmp_path, "cpu", lambda sentence: None)
    assert tiny().record(tmp_path)["bpfed"] == "0.1.0, 0.2.0"


def test_a_record_of_other_settings_is_refused(digits, tmp_path):
    cells.run(tiny(), tmp_path, "cpu", lambda sentence: None)
    with pytest.raises(UserError, match="rounds 2, now 3"):
        replace(tiny(), rounds=3).missing(tmp_path)
    path = tiny().path(tmp_path)
    path.write_text("{")
    with pytest.raises(UserError, match="damaged"):
        tiny().missing(tmp_path)


def test_a_whole_record_stands_however_its_calibration_temperature_was_learnt(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "PILOTS", {"small": 1, "large": 1})
    calibration_words = tiny("bpfed-recipe+calibrated")
    cells.run(calibration_words, tmp_path, "cpu", lambda sentence: None)
    monkeypatch.setattr(protocol, "PILOTS", {"small": 2, "large": 1})
    assert calibration_words.missing(tmp_path) == []
    with pytest.raises(OtherResult, match="pilots 1, now 2"):  # seeds of both kinds are not put into one record
        replace(calibration_words, seeds=(0, 1)).missing(tmp_path)


def test_results_that_cannot_be_written_are_known_before_the_training(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "train", lambda *a: pytest.fail("Nothing should be trained."))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written \(Not a directory\); choose another location"):
        cells.run(tiny(), tmp_path / "file", "cpu", lambda sentence: None)


def test_a_damaged_result_is_never_measured_again(tmp_path):
    path = tmp_path / "shift.json"
    assert read(path) == {}
    assert read(tmp_path / "shift.json" / "none.json") == {}
    for text in ("<<<<<<< HEAD\n{}\n=======\n", "[]", ""):
        path.write_text(text)
        with pytest.raises(UserError, match=r"shift.json' is damaged; restore or delete it\."):
            read(path)
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\)"):
        read(tmp_path)


def test_the_last_round_is_tested_with_more_draws(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "DRAWS", 1)
    monkeypatch.setattr(protocol, "LAST_DRAWS", 40)
    cells.run(tiny("bpfed-recipe"), tmp_path, "cpu", lambda sentence: None)
    run = tiny("bpfed-recipe").record(tmp_path)["runs"][0]
    assert run["curve"]["nll"][-1] == pytest.approx(run["last"]["nll"], abs=1e-5)
    monkeypatch.setattr(protocol, "LAST_DRAWS", 1)
    other = tmp_path / "one"
    cells.run(tiny("bpfed-recipe"), other, "cpu", lambda sentence: None)
    assert tiny("bpfed-recipe").record(other)["runs"][0]["last"]["nll"] > run["last"]["nll"]


def test_the_summary_has_the_promised_keys(digits, tmp_path):
    cells.run(tiny(seeds=(0, 1)), tmp_path, "cpu", lambda sentence: None)
    found = json.loads(summary.write(tmp_path).read_text())
    row = found["paper"]["groups"]["mnist-small"]["fedper"]
    keys = "accuracy accuracy_sd accuracy_best_round nll brier ece ece_worst_client mce seeds rounds seconds"
    assert set(row) == set(keys.split())
    assert row["seeds"] == 2
    assert row["rounds"] == 2
    assert 0.0 <= row["accuracy"] <= row["accuracy_best_round"] + 1e-5 <= 1.0


def test_names_of_cells_and_methods():
    assert len(protocol.cells()) == 6
    assert protocol.cells("small") == ("mnist-small", "fmnist-small", "cifar10-small")
    assert protocol.cells("mnist, cifar10-small") == ("mnist-small", "mnist-large", "cifar10-small")
    assert protocol.methods("table") == protocol.TABLE
    assert protocol.methods("bpfed-recipe,table")[-1] == "bpfed-recipe"
    for asked in (
        lambda: protocol.cells("mnist-huge"),
        lambda: protocol.methods("fedprox"),
        lambda: protocol.cells(" , "),
    ):
        with pytest.raises(UserError):
            asked()


def test_a_search_sees_training_examples_only(digits):
    whole = cells.load("mnist-small", seed=11)
    cut = search.Cut.of("mnist-small").deal(11)
    rows = {tuple(row.tolist()) for row in whole.train.x.flatten(1)}
    assert {tuple(row.tolist()) for row in cut.test.x.flatten(1)} <= rows
    assert len(cut.train.y) + len(cut.test.y) == len(whole.train.y)
    assert torch.all(cut.test.sizes > 0)


def test_a_sharp_search_cuts_a_small_cell_out_of_the_large_ones_training_examples(digits, tmp_path):
    cut = search.Cut.of("cifar10-small", sharp=True)
    assert cut.cell == "cifar10-large"
    assert cut.held == pytest.approx(1 - 25 / 450)
    whole, dealt = cells.load("cifar10-large", seed=11), cut.deal(11)
    assert len(dealt.train.y) < len(dealt.test.y)
    assert len(dealt.train.y) + len(dealt.test.y) == len(whole.train.y)
    rows = {tuple(row.tolist()) for row in whole.train.x.flatten(1)}
    assert {tuple(row.tolist()) for row in dealt.test.x.flatten(1)} <= rows
    search.run(tmp_path, ["mnist-small"], "fedper", [{}], 1, "cpu", lambda _: None, sharp=True)
    (found,) = (tmp_path / "search").glob("*.json")
    assert found.name == "fedper-sharp-mnist-small-1.json"
    assert json.loads(found.read_text())["cut_from"] == "mnist-large"
    search.run(tmp_path, ["mnist-small"], "fedper", [{}], 1, "cpu", lambda _: None)
    assert len(list((tmp_path / "search").glob("*.json"))) == 2
    with pytest.raises(UserError, match="without --sharp"):
        search.Cut.of("mnist-large", sharp=True)


def test_a_search_is_a_table_with_the_best_sum_marked(digits, tmp_path):
    grid = [{"temperature": 0.1}, {"temperature": 5.0}]
    found = search.search("mnist-small", "bpfed-recipe", grid, rounds=2, seeds=(11, 12), device="cpu")
    assert [len(row["nll"]) for row in found["tried"]] == [2, 2]
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "mine-mnist-small-2.json").write_text(json.dumps(found))
    table = search.markdown(tmp_path)
    assert "mine, 2 rounds" in table
    best = min(found["tried"], key=lambda row: sum(row["nll"]))["settings"]["temperature"]
    (marked,) = [line for line in table.splitlines() if "**" in line]
    assert f"T = {best:g} " in marked


def searched(folder, cell, **scores):
    """The file of a search: for each pair of settings and NLL a row."""
    tried = [
        {"settings": json.loads(settings), "accuracy": [0.9], "nll": [nll], "over_confidence": [0.0]}
        for settings, nll in scores["tried"]
    ]
    (folder / "search").mkdir(exist_ok=True)
    found = {"cell": cell, "rounds": 2, "tried": tried}
    (folder / "search" / f"mine-{cell}-2.json").write_text(json.dumps(found))


def test_cells_searched_with_other_grids_are_joined_by_settings(tmp_path):
    searched(
        tmp_path,
        "mnist-small",
        tried=[('{"mean_precision": 1, "lr": 0.1}', 0.1), ('{"mean_precision": 3, "lr": 0.1}', 0.3)],
    )
    tried = [
        ('{"lr": 0.1, "mean_precision": 3.0}', 0.4),
        ('{"mean_precision": 9, "lr": 0.1}', 0.9),
        ('{"mean_precision": 8, "lr": 0.1}', 0.8),
    ]
    searched(tmp_path, "fmnist-small", tried=tried)
    rows = dict(line.strip("| ").split(" | ", 1) for line in search.markdown(tmp_path).splitlines()[2:])
    assert rows == {
        "c = 1, lr = 0.1": "90.0 / 0.100 / +0.0 | – | –",
        "c = 3, lr = 0.1": "90.0 / 0.300 / +0.0 | 90.0 / 0.400 / +0.0 | **0.700**",
        "c = 9, lr = 0.1": "– | 90.0 / 0.900 / +0.0 | –",
        "c = 8, lr = 0.1": "– | 90.0 / 0.800 / +0.0 | –",
    }


def test_a_sum_has_its_paired_difference_from_the_first_row(tmp_path):
    (tmp_path / "search").mkdir()
    for cell, shift in (("mnist-small", 0.0), ("fmnist-small", 0.1)):
        first, second = [0.3 + shift, 0.5 + shift], [0.28 + shift, 0.46 + shift]  # 0.02 and 0.04 lower
        tried = [
            {"settings": {"mean_precision": c}, "accuracy": [0.9, 0.9], "nll": nll, "over_confidence": [0.0, 0.0]}
            for c, nll in ((1, first), (3, second))
        ]
        found = {"cell": cell, "rounds": 2, "tried": tried}
        (tmp_path / "search" / f"mine-{cell}-2.json").write_text(json.dumps(found))
    first, second = search.markdown(tmp_path).splitlines()[2:]
    assert first.endswith("| 0.900 |")
    assert second.endswith("| **0.840** (−0.060 ± 0.014) |")  # each cell's standard error is 0.01


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"cell": "nowhere", "rounds": 2, "tried": []}'])
def test_a_damaged_search_is_one_sentence(text, tmp_path):
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "mine-mnist-small-2.json").write_text(text)
    with pytest.raises(UserError, match=r"mine-mnist-small-2.json' is not"):
        search.markdown(tmp_path)


def test_a_search_calls_the_prior_s_scale_what_it_was(tmp_path):
    """s0 in the first searches, k since then; both are recorded as prior_sigma."""
    tried = [
        {"settings": {"prior_sigma": value}, "accuracy": [0.9], "nll": [0.3], "over_confidence": [0.0]}
        for value in (0.15, 2.8)
    ]
    found = {"cell": "mnist-small", "rounds": 2, "tried": tried}
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "mine-mnist-small-2.json").write_text(json.dumps(found))
    table = search.markdown(tmp_path)
    assert "| s0 = 0.15 |" in table
    assert "| k = 2.8 |" in table


def test_mistakes_on_the_command_line_are_one_sentence(tmp_path, capsys):
    bpfed = Command(capsys)
    for arguments, words in (
        (["table1", "--cells", "mnist-tiny"], "mnist-tiny"),
        (["table1", "--methods", "fedprox"], "fedprox"),
        (["table2", "--partitions", "iid"], "iid"),
        (["table1", "--device", "gpu"], "--device is 'gpu', but must be one of: auto, cpu, cuda."),
        (["search", "--device", "CUDA"], "--device is 'CUDA'"),
        (["render", "--results", str(tmp_path / "none")], "no results"),
    ):
        assert words in bpfed("paper", *arguments).sentence


def test_the_tables_are_shown(digits, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(protocol.ROUNDS, "small", 2)
    bpfed = Command(capsys)
    asked = ("--cells", "mnist-small", "--methods", "fedper", "--seeds", "1", "--device", "cpu", "--results", tmp_path)
    shown = bpfed.ok("paper", "table2", *asked)
    assert "nll" in shown.out
    assert "FedPer" in shown.out
    assert "Runs done now: 1, there already: 0" in shown.err
    assert "Runs done now: 0, there already: 1" in bpfed.ok("paper", "table1", *asked).err
    (path,) = (tmp_path / "paper").rglob("*.json")
    record = json.loads(path.read_text())
    record["settings"]["method"]["lr"] = 0.7
    path.write_text(json.dumps(record))
    kept = bpfed.ok("paper", "table1", *asked)
    assert "was made with other settings (lr 0.7, now 0.001) and is kept; delete it to run the cell again." in kept.err
    assert "Runs done now: 0, there already: 0" in kept.err
    assert json.loads(path.read_text()) == record
    assert len(digits) == 1


@pytest.mark.parametrize("name", ["novel", "theory", "published", "audit", "heterogeneity", "shift", "search"])
def test_a_command_calls_its_experiment_as_it_wants_to_be_called(name, tmp_path, capsys, monkeypatch):
    module = import_module("experiments." + {"published": "reference"}.get(name, name))
    wanted, called = inspect.signature(module.run), []
    monkeypatch.setattr(module, "run", lambda *given, **named: called.append(wanted.bind(*given, **named).arguments))
    Command(capsys).ok("paper", name, "--results", tmp_path, "--device", "cpu")
    (given,) = called
    assert given["out"] == (tmp_path / "theory.json" if name == "theory" else tmp_path)
    assert given["device"] == "cpu"
    assert callable(given["say"])


@pytest.mark.parametrize("name", ["novel", "published", "heterogeneity", "shift"])
def test_help_names_the_methods_of_an_experiment(name, capsys):
    module = import_module("experiments." + {"published": "reference"}.get(name, name))
    methods = module.PUBLISHED if name == "published" else module.METHODS
    shown = Command(capsys).ok("paper", name, "--help").out
    assert f"default:{','.join(methods)}" in "".join(re.sub("[│|]", "", shown).split())


def test_help_has_one_default_for_each_option(capsys):
    for name in ("audit", "shift", "novel", "table1", "search"):
        shown = re.sub("[│|]", "", Command(capsys).ok("paper", name, "--help").out)
        about = " ".join(shown.split()).partition("--cells")[2].partition(" --")[0]
        assert about.count("[default: ") == 1, about


def test_options_that_choose_a_part_of_an_experiment(tmp_path, capsys, monkeypatch):
    bpfed, called = Command(capsys), []
    for name in ("audit", "novel", "search"):
        module = import_module(f"experiments.{name}")
        wanted = inspect.signature(module.run)
        monkeypatch.setattr(
            module, "run", lambda *given, wanted=wanted, **named: called.append(wanted.bind(*given, **named).arguments)
        )
    bpfed.ok("paper", "audit", "--only", "published, printed/noise")
    bpfed.ok("paper", "novel", "--partition", "random")
    bpfed.ok("paper", "search", "--grid", '[{"temperature": 0.3}]', "--method", "bpfed-population", "--cells", "mnist")
    audit, novel, searched = called
    assert audit["only"] == ["published", "printed/noise"]
    assert novel["partition"] == "random"
    assert (searched["name"], searched["grid"]) == ("bpfed-population", [{"temperature": 0.3}])
    assert searched["cells"] == ("mnist-small", "mnist-large")
    assert "--grid is not JSON" in bpfed("paper", "search", "--grid", "{").sentence
    assert "--grid is not a list of settings" in bpfed("paper", "search", "--grid", "{}").sentence


def test_a_search_is_kept_under_its_method_cell_and_rounds(digits, tmp_path):
    told = []
    grid = [{"temperature": 0.1, "lr": 0.001}]
    search.run(tmp_path, ["mnist-small"], "bpfed-recipe", grid, 1, "cpu", told.append)
    found = json.loads((tmp_path / "search/bpfed-recipe-mnist-small-1.json").read_text())
    assert found["tried"][0]["settings"] == grid[0]
    assert told[0].startswith("mnist-small, T = 0.1, lr = 0.001: accuracy 0.")


def test_a_search_is_not_run_again_and_another_one_does_not_replace_it(digits, tmp_path, monkeypatch):
    told, grid = [], [{"sigma": True, "lr": 0.001}]
    ask = (["mnist-small"], "bpfed-recipe")
    search.run(tmp_path, *ask, grid, 1, "cpu", told.append)
    assert told[0].startswith("mnist-small, sigma = True, lr = 0.001: accuracy 0.")
    before = (tmp_path / "search/bpfed-recipe-mnist-small-1.json").read_bytes()
    monkeypatch.setattr(search, "search", lambda *a, **k: pytest.fail("It was there already."))
    search.run(tmp_path, *ask, grid, 1, "cpu", told.append)
    assert told[-1] == "bpfed-recipe on mnist-small: done already"
    with pytest.raises(OtherResult, match="holds results for different grid; delete it to re-run"):
        search.run(tmp_path, *ask, [{"lr": 0.002}], 1, "cpu", told.append)
    assert (tmp_path / "search/bpfed-recipe-mnist-small-1.json").read_bytes() == before


def test_settings_that_cannot_be_tried_are_refused_before_anything_is_loaded(digits, tmp_path):
    for values, words in (
        ({"temprature": 0.1}, "Unknown setting 'temprature'; did you mean 'temperature'?"),
        ({"seed": 1}, "Unknown setting 'seed'"),
        ({"temperature": "hot"}, "temperature is 'hot', but must be a number."),
        ({"mean_precision": 3.0}, "mean_precision is a constant since bpfed 0.10 (0.5 divided by the temperature)"),
    ):
        with pytest.raises(UserError) as error:
            search.run(tmp_path, ["mnist-small"], grid=[{"lr": 0.001}, values], rounds=1, device="cpu")
        assert words in str(error.value)
    assert not digits


def test_all_goes_on_where_a_result_is_kept_and_says_so(monkeypatch, capsys, tmp_path):
    """The audit's is of other rounds: what follows is run and rendered nevertheless; a wrong name stops at once."""
    command, done = Command(capsys), []
    for name in ("_run_cells", "novel", "published", "heterogeneity", "shift", "theory", "_render"):
        monkeypatch.setattr(commands, name, lambda *a, name=name, **k: done.append(name))
    path = tmp_path / "audit.json"
    monkeypatch.setattr(commands, "audit", lambda **k: check_same({"rounds": 60, "seeds": [0]}, {"rounds": 200}, path))
    assert "holds results for different rounds" in command("paper", "all").sentence
    assert done == ["_run_cells", "novel", "published", "heterogeneity", "shift", "theory", "_render"]

    monkeypatch.undo()
    assert "nknown cell" in command("paper", "all", "--cells", "nowhere", "--results", tmp_path).sentence


def test_a_result_is_there_with_all_its_seeds_or_more_and_settings_that_came_later():
    def asked(seeds, **method):
        return {"seeds": list(range(seeds)), "settings": {"method": {"lr": 0.1, **method}, "run": {}}}

    found, path = asked(3), Path("x.json")
    check_same({}, asked(3), path)
    assert not has_seeds({}, asked(3))
    assert not has_seeds({}, {})
    assert [has_seeds(found, asked(seeds)) for seeds in (1, 3, 5)] == [True, True, False]
    for wanted in (asked(1), asked(5), asked(3, momentum=0.5)):
        check_same(found, wanted, path)
    with pytest.raises(OtherResult, match="different settings"):
        check_same(found, asked(3, lr=0.2), path)
    now = asked(3, head_gain=5.0, temperature=0.1, sigma=True)
    then = {"head_gain": 5.0, "temperature": 0.1, "sigma": 0.05, "mean_precision": 5.0}  # T times this is a constant
    check_same(asked(3, **then, unseen_pseudocount=1.0), now, path)
    for other in ({}, {"unseen_pseudocount": 1.0, "max_lr_epochs": 4.0}):  # without the first, it was 0
        with pytest.raises(OtherResult, match="different settings"):
            check_same(asked(3, **then, **other), now, path)
    with pytest.raises(OtherResult, match="different seeds"):
        check_same(found, asked(5), path, more=False)


def test_nothing_is_rendered_from_a_folder_without_results(capsys, tmp_path):
    (tmp_path / "results").mkdir()
    said = Command(capsys)("paper", "render", "--results", tmp_path / "results", "--docs", tmp_path / "docs").sentence
    assert said.startswith("There are no results in")
    assert not (tmp_path / "docs").exists()
