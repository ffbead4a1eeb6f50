"""Settings chosen on training examples: what is tried, what it is scored on, and what a user gets of it."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scenarios import classification, images, regression, small_mlp

import bpfed
from bpfed._util.errors import UserError
from bpfed.comparison import Difference, Tuning
from bpfed.comparison.tuning import AS_IT_IS, TEMPERATURES, trials
from bpfed.config.settings import Settings
from bpfed.data.federated import FederatedData, held_out
from bpfed.engine.simulator import Simulator
from bpfed.methods import BPFed, FedAvg, Population, Recipe
from bpfed.report.record import temperature_words

pytestmark = pytest.mark.usefixtures("untraced")

TINY = {"rounds": 2, "epochs": 1, "batch": 5, "eval_draws": 2, "progress": False}
SMALL = ("tune", "--clients", "3", "--epochs", "1", "--eval-draws", "2", "--rounds", "2", "--cuts", "2", "--quiet")
RATES = ("--method", "fedavg", "--grid", "lr=0,0.02", "--out", "a")


@pytest.mark.parametrize("method", [Recipe(), Population()])
def test_a_colder_posterior_keeps_the_prior_of_the_means_as_strong(method):
    """The product of T and the precision of that prior is the pull of the means towards 0."""
    tried = trials(method)
    assert [trial.method.temperature for trial in tried.values()] == [
        method.temperature,
        *(t for t in TEMPERATURES if t != method.temperature),
    ]
    for made in (trial.method for trial in tried.values()):
        assert made.temperature * made.hparams()["mean_precision"] == pytest.approx(method.weight_decay)
    assert [trial.title for trial in tried.values()][:2] == [method.title, "temperature 0.005"]


def test_of_other_methods_the_temperature_alone_is_tried():
    assert [trial.changed for trial in trials(BPFed(temperature=0.2)).values()] == [
        {},
        *({"temperature": t} for t in TEMPERATURES if t != 0.2),
    ]
    with pytest.raises(UserError, match="fedavg has no temperature"):
        trials(FedAvg())


def test_a_grid_is_all_its_combinations_and_the_method_as_it_is():
    tried = trials(BPFed(), {"lr": [0.001, 0.01], "personal": ["head", "*.bias"]})
    assert list(tried) == [AS_IT_IS, "lr=0.001,personal=_.bias", "lr=0.01,personal=head", "lr=0.01,personal=_.bias"]
    assert tried["lr=0.01,personal=_.bias"].method == BPFed(lr=0.01, personal="*.bias")
    with pytest.raises(UserError, match="Unknown setting of bpfed 'learning'"):
        trials(BPFed(), {"learning": [1]})


def test_the_width_of_the_network_is_tried_with_settings_of_the_method():
    tried = trials(FedAvg(), {"hidden": [16, 100], "lr": [0.01, 0.02]})
    made = {name: (trial.method.lr, trial.settings.hidden) for name, trial in tried.items()}
    assert made == {
        AS_IT_IS: (FedAvg().lr, 100),
        "hidden=16,lr=0.01": (0.01, 16),
        "hidden=16,lr=0.02": (0.02, 16),
        "hidden=100,lr=0.01": (0.01, 100),
        "hidden=100,lr=0.02": (0.02, 100),
    }
    assert tried["hidden=16,lr=0.02"].title == "hidden 16, lr 0.02"
    # What the run has already is not tried again.
    assert list(trials(FedAvg(), {"hidden": [16, 100]})) == [AS_IT_IS, "hidden=16"]
    assert list(trials(FedAvg(), {"hidden": [16, 100]}, Settings(hidden=16))) == [AS_IT_IS, "hidden=100"]
    assert [trial.settings for trial in trials(FedAvg(), {"lr": [0.5]}, Settings(rounds=7)).values()] == [
        Settings(rounds=7)
    ] * 2
    with pytest.raises(UserError, match="Unknown setting of fedavg 'epochs'"):
        trials(FedAvg(), {"epochs": [1, 2]})


def rows(data: FederatedData, part: str, client: int) -> list[tuple[float, ...]]:
    examples = getattr(data, part)
    inside = slice(int(examples.offsets[client]), int(examples.offsets[client + 1]))
    return sorted(tuple(row) for row in torch.cat([examples.x[inside], examples.y[inside, None]], -1).tolist())


def test_what_is_scored_is_cut_from_the_training_examples():
    data = classification(sizes=(12, 20))
    for cut in (0, 1):
        made = held_out(data, 0.25, cut)
        assert made.calibration is None
        for client in range(2):
            assert sorted(rows(made, "train", client) + rows(made, "test", client)) == rows(data, "train", client)
            assert len(rows(made, "test", client)) == (3, 5)[client]
    assert rows(held_out(data, 0.25, 0), "test", 1) != rows(held_out(data, 0.25, 1), "test", 1)


def test_no_test_example_takes_part():
    data = classification(sizes=(12, 20))
    wrong = replace(data, test=replace(data.test, x=100.0 * data.test.x, y=(data.test.y + 1) % 3))
    both = [bpfed.tune(FedAvg(), d, {"lr": [0.001, 0.03]}, cuts=2, **TINY) for d in (data, wrong)]
    assert both[0].best == both[1].best
    for name in both[0].trials:
        assert both[0].comparison.over_seeds(name, "nll") == both[1].comparison.over_seeds(name, "nll")


@pytest.mark.parametrize("data", [classification(sizes=(30, 40)), regression(sizes=(30, 40))])
def test_the_lowest_nll_wins(data):
    found = bpfed.tune(FedAvg(lr=0.0), data, {"lr": [0.0, 1e-5, 0.03]}, cuts=2, **TINY)
    assert found.best == "lr=0.03"
    assert found.method == FedAvg(lr=0.03)
    assert found.trials["lr=0.03"].changed == {"lr": 0.03}
    nll = {name: found.comparison.mean(name, "nll") for name in found.trials}
    assert list(nll) == [AS_IT_IS, "lr=1e-05", "lr=0.03"]
    assert nll["lr=0.03"] == min(nll.values())
    assert found.gain == pytest.approx(nll[AS_IT_IS] - nll["lr=0.03"])


def test_the_width_that_is_best_is_handed_back():
    data = classification(sizes=(30, 40))
    found = bpfed.tune(FedAvg(lr=0.02), data, {"hidden": [1, 60]}, cuts=2, **TINY | {"hidden": 2})
    assert {name: found.comparison.records[name][0].config["model"]["weights"] for name in found.trials} == {
        AS_IT_IS: 2 * 8 + 3,
        "hidden=1": 1 * 8 + 3,
        "hidden=60": 60 * 8 + 3,
    }
    assert (found.best, found.hidden, found.method) == ("hidden=60", 60, FedAvg(lr=0.02))
    trained = bpfed.fit(
        found.method, data, calibration_temperature=found.calibration_temperature, hidden=found.hidden, **TINY
    )
    assert trained.config()["model"]["weights"] == 60 * 8 + 3
    assert bpfed.tune(FedAvg(), data, {"lr": [0.02]}, cuts=1, **TINY).hidden is None


def test_what_calibrates_a_finished_model_has_no_part_in_choosing_it():
    given = {"calibration": 0.3, "scaling": "client"} | TINY
    found = bpfed.tune(FedAvg(), classification(sizes=(30, 40)), {"lr": [0.03]}, cuts=1, **given)
    assert found.comparison.first.config["run"]["calibration"] == 0.0
    with pytest.raises(UserError, match="scaling needs examples"):  # but the run to come must be possible
        bpfed.tune(FedAvg(), classification(sizes=(30, 40)), {"lr": [0.03]}, **given | {"calibration": 0.0})


def test_what_diverges_is_left_out():
    said: list[str] = []
    data = classification(sizes=(30, 40))
    found = bpfed.tune(FedAvg(), data, {"lr": [1e38, 0.03]}, cuts=2, say=said.append, **TINY)
    assert list(found.trials) == found.comparison.names == [AS_IT_IS, "lr=0.03"]
    # On a GPU the seeds are side by side.
    assert [sentence for sentence in said if re.match(r"lr=1e\+38, seed 0(, 1)?: Training diverged", sentence)]
    with pytest.raises(UserError, match="Training diverged"):
        bpfed.tune(FedAvg(lr=1e38), data, {"lr": [0.03]}, cuts=1, **TINY)


def test_values_that_look_alike_are_all_tried():
    assert len(trials(BPFed(), {"lr": [0.01234567, 0.01234568]})) == 3
    assert list(trials(BPFed(), {"personal": ["*.bias", "?.bias"]})) == [
        AS_IT_IS,
        "personal=_.bias",
        "personal=_.bias-2",
    ]
    assert len(trials(Recipe(temperature=0.02, discount=0.8))) == len(TEMPERATURES)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cuts": 0}, "cuts is 0"),
        ({"cuts": "3"}, "cuts is '3', but must be a whole number"),
        ({"held": 1.0}, "held is 1.0"),
        ({"grid": {"lr": 0.1}}, "The grid has 0.1 for 'lr', but must have a list"),
        ({"grid": {"personal": "head"}}, "The grid has 'head' for 'personal', but must have a list"),
        ({"method": FedAvg}, "The method is <class .*FedAvg'>, but must be one such as"),
        ({"method": "fedavgg"}, "Unknown method 'fedavgg'; did you mean 'fedavg'?"),
        ({"data": classification(sizes=(1, 1))}, "No client of 'small' has two training examples"),
        ({"grid": {"hidden": [100]}, "data": images()}, "images of 32 x 32 get a LeNet; leave it out"),
        ({"grid": {"hidden": [100]}, "model": small_mlp()}, "one is given as model; leave one of the two out"),
        ({"grid": {"hidden": [5, 0]}}, "hidden is 0, but must be at least 1"),
        ({"grid": {"hidden": 5}}, "The grid has 5 for 'hidden', but must have a list"),
    ],
)
def test_what_cannot_be_is_refused(changes, sentence, monkeypatch):
    monkeypatch.setattr(Simulator, "round", lambda self: pytest.fail("something was trained"))
    with pytest.raises(UserError, match=sentence):
        bpfed.tune(**{"method": FedAvg(), "data": classification(), "grid": {"lr": [0.1]}} | changes, **TINY)


def test_a_user_tunes_and_then_trains_with_what_was_best(command):
    shown = command.ok(*SMALL, *RATES, "--calibration", "0.3", "--seed", "4").out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0] == "Tuning on digits, 20 % of training examples held out: 3 settings, 2 cuts, 3 clients, 2 rounds"
    ranked = [line for line in lines if re.match(r"(\* )?(FedAvg as it is, lr|lr) \S+ \d", line)]
    assert len(ranked) == 3
    assert ranked[0].startswith("* lr 0.02 ")
    assert ranked[-1].startswith("lr 0 ")
    assert lines[-1] == "Train with the best settings: bpfed run a/best.toml"
    best = tomllib.loads(Path("a/best.toml").read_text())
    calibration_temperature = best["run"].pop("calibration_temperature")
    assert calibration_temperature != 1.0
    assert (
        f"best.toml also has a calibration temperature, {temperature_words(calibration_temperature)}, which suits the best setting's predictions"
        in " ".join(lines)
    )
    assert best == {
        "data": {"name": "digits", "clients": 3, "seed": 4},
        "method": {"name": "fedavg", "lr": 0.02},
        "run": {"rounds": 2, "epochs": 1, "eval_draws": 2, "calibration": 0.3, "seed": 4},
    }
    command.ok("run", "a/best.toml", "--quiet", "--out", "b")
    trained = tomllib.loads(Path("b/config.toml").read_text())
    assert (trained["method"]["lr"], trained["run"]["calibration"], trained["data"]["name"]) == (0.02, 0.3, "digits")
    assert trained["run"]["calibration_temperature"] == calibration_temperature
    assert json.loads(Path("b/summary.json").read_text())["rounds"] == 2


def test_what_is_finished_is_not_run_again(command):
    command.ok(*SMALL, *RATES)
    again = command.ok(*SMALL, *RATES)
    assert "All 6 runs in 'a' are finished already" in again.err
    more = command.ok(*SMALL, *RATES[:3], "lr=0,0.02,0.05", "--out", "a")
    assert "finished already" not in more.err
    assert "lr 0.05" in more.out


def test_its_words_are_those_of_a_tuning(command):
    command.ok(*SMALL, *RATES)
    told = Path("a/comparison.md").read_text()
    assert "all held-out training examples of the last round pooled" in told
    assert "Each setting's metric minus FedAvg's on the same client of the same cut" in told
    assert "Cuts share most of their training examples" in told
    assert "test example" not in told
    assert "seed" not in told
    assert "client-cuts with lower NLL" in told


def test_a_comparison_and_a_tuning_do_not_share_a_folder(command):
    command.ok(*SMALL, *RATES)
    compare = ("compare", *SMALL[1:-3], "--seeds", "1", "--quiet", "--methods", "fedavg", "--out", "a")
    assert "'a' holds a tuning, not a comparison, so nothing is written there" in command(*compare).sentence
    other = (*compare[:-1], "b")
    command.ok(*other)
    assert "'b' holds a comparison, not a tuning" in command(*SMALL, *RATES[:-1], "b").sentence


def test_a_tuned_folder_of_tables_is_found_from_anywhere(command, monkeypatch):
    Path("sites").mkdir()
    for site in "ab":
        rows = "".join(f"{i % 5},{'yes' if i % 5 > 2 else 'no'}\n" for i in range(20))
        Path(f"sites/{site}.csv").write_text(f"dose,label\n{rows}")
    command.ok("tune", "--data", "folder:sites", "--rounds", "1", "--cuts", "1", *RATES, "--quiet")
    best = Path("a/best.toml").resolve()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    command.ok("run", best, "--quiet", "--out", "b")


def test_a_user_tunes_the_width_of_the_network(command):
    few = ("tune", "--data", "folder:sites", "--rounds", "2", "--epochs", "2", "--cuts", "1", "--quiet")
    Path("sites").mkdir()
    for site in "ab":
        rows = "".join(f"{i % 5}.5,{'yes' if i % 5 > 2 else 'no'}\n" for i in range(40))  # not whole: no codes
        Path(f"sites/{site}.csv").write_text(f"dose,label\n{rows}")
    command.ok(*few, "--method", "fedavg", "--grid", "lr=0.01", "--hidden", "1", "--out", "a")
    grid = ("--grid", "hidden=1,60", "--grid", "method.lr=0.02", "--hidden", "1")
    lines = [
        " ".join(line.split()) for line in command.ok(*few, "--method", "fedavg", *grid, "--out", "a").out.splitlines()
    ]
    assert [line for line in lines if re.match(r"\* hidden 60, lr 0.02 \d", line)]
    assert [line for line in lines if re.match(r"FedAvg as it is, hidden 1, lr 0.001 \d", line)]
    best = tomllib.loads(Path("a/best.toml").read_text())
    assert best["run"]["hidden"] == 60
    assert best["method"] == {"name": "fedavg", "lr": 0.02}
    command.ok("run", "a/best.toml", "--quiet", "--out", "b")
    assert tomllib.loads(Path("b/config.toml").read_text())["model"]["weights"] == 60 * 4 + 2


def test_the_run_as_it_is_is_one_whether_its_width_is_said_or_not(command):
    command.ok(*SMALL, *RATES)
    shown = command.ok(*SMALL, *RATES[:2], "--grid", "run.hidden=100,5", "--out", "a")
    lines = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert lines[0].startswith("Tuning on digits, 20 % of training examples held out: 2 settings")
    assert [line for line in lines if re.match(r"(\* )?FedAvg as it is, hidden 100 \d", line)]


def test_where_nothing_is_better_it_is_said(command):
    shown = command.ok(*SMALL, "--method", "fedavg", "--grid", "lr=0", "--out", "a").out
    assert "No setting that was tried has a lower NLL than the method as it is." in shown
    assert tomllib.loads(Path("a/best.toml").read_text())["method"] == {"name": "fedavg"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--grid lr", "--grid: 'lr' has no values; write e.g. --grid lr=0.001,0.01."),
        ("--grid lr=", "--grid: 'lr=' has no values; write e.g. --grid lr=0.001,0.01."),
        (
            "--grid epochs=1,2",
            "--grid: 'epochs' is a run setting; only settings of the method, such as lr, and hidden can be tried.",
        ),
        ("--grid run.epochs=1,2", "--grid: 'epochs' is a run setting; only settings of the method"),
        ("--grid data.clients=1,2", "--grid: 'clients' is a data setting; only settings of the method"),
        ("--grid run.lr=1", "--grid: unknown key 'lr' in [run]; did you mean 'method.lr'?"),
        ("--grid method.hidden=1", "--grid: unknown key 'hidden' in [method]; did you mean 'run.hidden'?"),
        ("--grid hidden=wide", "--grid: run.hidden is 'wide', but must be a whole number."),
        ("--grid hidden=16,0", "hidden is 0, but must be at least 1, or left unset."),
        ("--grid lr=fast", "--grid: method.lr is 'fast', but must be a number."),
        ("--grid rate=1", "--grid: unknown key 'rate' in [method]; "),
        ("--grid draws=1,2", "--grid: method.draws is a constant since bpfed 0.10 (1); "),
        (
            "--method fedavg",
            "fedavg has no temperature, which is what is tried where nothing is said; name what to try",
        ),
        ("--method fedavgg", "Unknown method 'fedavgg'; did you mean 'fedavg'?"),
        ("--grid lr=-1", "lr is -1.0, but a step size must be 0 or more."),
    ],
)
def test_a_command_that_cannot_be_says_why(command, words, sentence):
    assert sentence in command(*SMALL, *words.split(), "--out", "a").sentence
    assert not Path("a").exists()


def test_what_moves_along_is_said(command, monkeypatch):
    monkeypatch.setattr(Recipe, "at_temperature", lambda self, t: {"temperature": t, "lr": self.lr * t})
    shown = command.ok(*SMALL, "--cuts", "1", "--out", "a").out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert [line for line in lines if re.match(r"(\* )?BPFed recipe as it is, temperature 0.05 \d", line)]
    assert [line for line in lines if re.match(r"(\* )?temperature 0.005 \d", line)]
    assert "Along with the temperature, lr is adjusted, as the method asks." in " ".join(lines)


def test_a_calibration_temperature_is_told_wherever_best_toml_has_one(command, monkeypatch):
    """Also where it is near 1; and where each client gets a temperature of its own, neither is there."""
    monkeypatch.setattr(Tuning, "calibration_temperature", 1.02)
    for more, there in (((), True), (("--scaling", "client", "--calibration", "0.2"), False)):
        out = "b" if more else "a"
        shown = command.ok(*SMALL, *RATES[:-1], out, *more).out
        assert ("calibration_temperature" in tomllib.loads(Path(out, "best.toml").read_text())["run"]) == there
        assert ("also has a calibration temperature, 1.02 (above 1: less sure" in " ".join(shown.split())) == there


def test_what_a_notebook_shows_is_a_line_or_two():
    data = classification(sizes=(12, 20))
    found = bpfed.tune(FedAvg(), data, {"lr": [0.03]}, cuts=1, **TINY)
    assert (
        repr(data) == f"<data 'small': 2 clients, 32 training and {len(data.test.y)} test examples of [4], 3 classes>"
    )
    assert repr(found).startswith("<Tuning on small, 20 % of training examples held out: 2 settings, 1 cut, 2 clients")
    assert repr(found).endswith(f"; best: {found.best}, calibration temperature {found.calibration_temperature:g}>")
    assert len(repr(found)) < 300


def test_what_cannot_be_told_apart_is_said(command, monkeypatch):
    alike = "not clearly better than the method as it is"
    call = (*SMALL, "--cuts", "5", "--method", "fedavg", "--set", "method.lr=0", "--grid", "lr=0.05", "--out", "a")
    assert alike not in command.ok(*call).out
    monkeypatch.setattr(Difference, "clear", False)
    assert alike in command.ok(*call).out


def test_the_difference_shown_is_of_what_is_ranked():
    found = bpfed.tune(FedAvg(), classification(sizes=(12, 60, 90)), {"lr": [0.0, 0.02, 0.05]}, cuts=2, **TINY)
    for name in found.trials:
        difference = found.difference(name)
        apart = found.comparison.mean(name, "nll") - found.comparison.mean(AS_IT_IS, "nll")
        assert difference.mean == pytest.approx(apart)
        assert difference.low <= difference.mean <= difference.high
    # By which the best is below all others.
    assert found.difference(found.best).mean == min(found.difference(name).mean for name in found.trials)


def test_trials_may_keep_their_states_in_files(tmp_path):
    found = bpfed.tune(
        FedAvg(), classification(), {"lr": [0.01]}, model=small_mlp(), out=tmp_path, store="file", **TINY
    )
    assert len(found.trials) == 2


def test_a_setting_that_predicts_no_numbers_is_left_out():
    """Its last step, which no loss is taken after, goes to infinity."""
    found = bpfed.tune(
        FedAvg(), classification(), {"lr": [1e30]}, model=small_mlp(), cuts=1, **TINY | {"rounds": 1, "batch": 100}
    )
    assert list(found.trials) == [AS_IT_IS]
