"""How sure to be, learnt in rehearsals: what they see, what comes of them, and that one that is broken off goes on."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scenarios import classification, regression
from scipy.optimize import minimize_scalar

import bpfed
from bpfed.calibration import common_temperature, tempered
from bpfed.callbacks import Callback
from bpfed.engine.evaluate import evaluate_clients
from bpfed.engine.settings import Settings
from bpfed.errors import UserError
from bpfed.methods import BPFed, FedAvg, Recipe
from bpfed.rehearsal import as_rehearsal, common

pytestmark = pytest.mark.usefixtures("untraced")

TINY = {"rounds": 2, "epochs": 1, "batch": 5, "eval_draws": 3, "progress": False}
DIGITS = ("run", "--clients", "3", "--epochs", "1", "--rounds", "2", "--eval-draws", "2", "--quiet", "--out", "a")


def labels_at(softness: float, seed: int = 0, examples: int = 4000):
    """Probabilities, and labels that are drawn from what they are at a softness."""
    g = torch.Generator().manual_seed(seed)
    probs = torch.randn(examples, 4, generator=g).mul(2.0).softmax(1)
    return probs, torch.multinomial(tempered(probs, softness), 1, generator=g).squeeze(1)


@pytest.mark.parametrize("softness", [0.5, 1.0, 1.7])
def test_the_softness_behind_labels_is_found(softness):
    probs, y = labels_at(softness)
    found = common_temperature(probs, y)
    assert found == pytest.approx(softness, rel=0.08)
    nll = minimize_scalar(
        lambda t: -tempered(probs, t).gather(1, y[:, None]).log().mean().item(), bounds=(0.2, 4), method="bounded"
    )
    assert found == pytest.approx(nll.x, rel=0.01)


def test_a_softness_is_that_of_every_prediction():
    data = classification(sizes=(30, 40))
    hard, soft = (bpfed.fit(BPFed(), data, softness=s, **TINY) for s in (1.0, 2.0))
    x, y = data.test.client(0)
    at_one, at_two = (run.client(data.clients[0]).predict(x) for run in (hard, soft))
    assert torch.allclose(at_two.probs, tempered(at_one.probs, 2.0))
    assert torch.allclose(at_two.entropy, torch.special.entr(at_two.probs).sum(-1), atol=1e-6)
    assert at_two.raw is None
    own = -at_two.probs.gather(1, y[:, None]).log().mean().item()
    assert soft.evaluation[0]["nll"].clients[0] == pytest.approx(own, rel=1e-5)
    with_labels = [run.adapt(x, y, steps=3).predict(x).probs for run in (hard, soft)]
    assert torch.allclose(with_labels[1], tempered(with_labels[0], 2.0), atol=1e-6)


def test_sets_are_calibrated_at_the_softness_they_are_made_with():
    data = classification(sizes=(60, 60))
    run = bpfed.fit(BPFed(), data, softness=0.6, calibration=0.4, **TINY)
    x, y = run.data.calibration.client(0)
    made = run.client(data.clients[0]).predict(x)
    right = 1.0 - made.probs.gather(1, y[:, None]).squeeze(1)
    assert torch.allclose(made.scores, right.sort().values, atol=1e-6)


def test_what_a_test_would_prefer_is_told_and_not_used():
    run = bpfed.fit(FedAvg(), classification(sizes=(30, 40)), **TINY)
    told = run.detail()["softness"]
    assert told > 0.0
    assert run.settings.softness == 1.0
    run.federation.settings = replace(run.settings, softness=told)
    better = evaluate_clients(run.federation)[0]["nll"].pooled
    assert better <= run.evaluation[0]["nll"].pooled


def test_rehearsals_see_training_examples_alone():
    data = classification(sizes=(30, 40))
    wrong = replace(data, test=replace(data.test, x=100.0 * data.test.x, y=(data.test.y + 1) % 3))
    a, b = (bpfed.fit(FedAvg(), d, rehearsals=2, **TINY) for d in (data, wrong))
    assert a.settings.softness == b.settings.softness != 1.0


def test_a_run_with_rehearsals_is_the_run_without_at_what_they_found():
    data = classification(sizes=(30, 40))
    tuned = bpfed.tune(Recipe(), data, {"lr": [0.002]}, cuts=1, **TINY)
    learnt = bpfed.fit(Recipe(), data, rehearsals=1, **TINY)
    assert learnt.settings.softness == tuned.softness
    given = bpfed.fit(Recipe(), data, softness=tuned.softness, **TINY)
    assert given.history[-1]["nll"] == learnt.history[-1]["nll"]


def test_cuts_count_alike_whether_too_sure_or_not_sure_enough():
    assert common([0.5, 2.0]) == 1.0
    assert common([0.5]) == 0.5


def test_a_rehearsal_is_run_as_the_run_will_be():
    settings = Settings(rounds=7, rehearsals=3, calibration=0.2, seed=5, epochs=2)
    own = as_rehearsal(settings, 2)
    assert own == replace(settings, rehearsals=0, calibration=0.0, seed=6, eval_every=7)


class Stop(Exception):
    pass


class StopAfter(Callback):
    def __init__(self, rounds):
        self.left = rounds

    def round(self, run, info, record):
        self.left -= 1
        if not self.left:
            raise Stop


def test_a_rehearsal_that_is_broken_off_goes_on(tmp_path, monkeypatch):
    data = classification(sizes=(30, 40))
    whole = bpfed.fit(FedAvg(), data, rehearsals=2, **TINY)
    begun: list[int] = []
    train = bpfed.run.Run.train

    def counted(run, callbacks=()):
        callbacks = [*callbacks, StopAfter(1)] if len(begun) == 1 else callbacks
        begun.append(run.federation.round)
        return train(run, callbacks)

    monkeypatch.setattr(bpfed.run.Run, "train", counted)
    with pytest.raises(Stop):
        bpfed.fit(FedAvg(), data, rehearsals=2, out=tmp_path / "a", **TINY)
    assert not (tmp_path / "a").exists()
    assert sorted(p.name for p in (tmp_path / "a-rehearsals").iterdir()) == ["1", "2"]
    run = bpfed.fit(FedAvg(), data, rehearsals=2, out=tmp_path / "a", **TINY)
    assert run.settings.softness == whole.settings.softness
    assert json.loads((tmp_path / "a/summary.json").read_text())["nll"]["last"] == whole.history[-1]["nll"]["pooled"]
    assert not (tmp_path / "a-rehearsals").exists()


def test_a_run_that_goes_on_is_not_rehearsed_again(tmp_path, monkeypatch):
    data = classification(sizes=(30, 40))
    with pytest.raises(Stop):
        bpfed.fit(FedAvg(), data, rehearsals=2, out=tmp_path / "a", callbacks=[StopAfter(1)], **TINY)
    kept = tomllib.loads((tmp_path / "a/config.toml").read_text())["run"]
    assert kept["rehearsals"] == 2
    run = bpfed.fit(FedAvg(), data, rehearsals=2, out=tmp_path / "a", resume=True, **TINY)
    assert run.settings.softness == kept["softness"]
    assert run.federation.round == 2


def test_a_comparison_rehearses_each_seed_and_knows_what_is_finished(tmp_path):
    data = classification(sizes=(30, 40))
    found = [
        bpfed.compare(["fedavg", "fedavg+softness"], data, 2, out=tmp_path / "c", **TINY) for _ in ("once", "again")
    ]
    for comparison in found:
        learnt = [r.config["run"]["softness"] for r in comparison.records["fedavg+softness"].values()]
        assert 1.0 not in learnt
        assert learnt[0] != learnt[1]
        assert [r.config["run"]["softness"] for r in comparison.records["fedavg"].values()] == [1.0, 1.0]
    assert found[0].over_seeds("fedavg+softness", "nll") == found[1].over_seeds("fedavg+softness", "nll")
    assert not list((tmp_path / "c/fedavg+softness").glob("*-rehearsals"))


def test_a_user_asks_for_rehearsals(command):
    shown = command.ok(*DIGITS, "--rehearsals", "2")
    kept = tomllib.loads(Path("a/config.toml").read_text())["run"]
    sentence = f"Probabilities are given with a softness of {kept['softness']:.2f}, learnt in 2 rehearsals."
    assert sentence in shown.out
    assert sentence in Path("a/report.html").read_text()
    assert [p.name for p in Path().iterdir()] == ["a"]
    command.ok("run", "a/config.toml", "--quiet", "--out", "b")
    one, two = (json.loads(Path(run, "summary.json").read_text())["nll"] for run in "ab")
    assert one == two
    assert tomllib.loads(Path("b/config.toml").read_text())["run"] == kept


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--softness", "0"), "softness is 0.0, but must be above 0"),
        (("--rehearsals", "-1"), "rehearsals is -1, but must be 0 or more"),
        (
            ("--rehearsals", "1", "--scaling", "client", "--calibration", "0.2"),
            "softness is a temperature for all clients, scaling one for each",
        ),
    ],
)
def test_what_cannot_be_is_refused(command, given, sentence):
    assert sentence in command(*DIGITS, *given).sentence


@pytest.mark.parametrize("given", [{"softness": 0.5}, {"rehearsals": 1}])
def test_numbers_have_no_softness(given):
    with pytest.raises(UserError, match="of class probabilities, but the targets here are numbers"):
        bpfed.fit(FedAvg(), regression(sizes=(30, 40)), **given, **TINY)
