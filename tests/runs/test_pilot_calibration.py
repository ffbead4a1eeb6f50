"""How sure to be, learnt in rehearsals: what they see, what comes of them, and that one that is broken off goes on."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import files
from scenarios import classification, regression

import bpfed
from bpfed._util.errors import UserError
from bpfed._util.files import lock, to_toml
from bpfed.callbacks import Callback
from bpfed.callbacks.progress import Progress
from bpfed.config.settings import Settings
from bpfed.data.federated import held_out
from bpfed.engine.federation import Federation
from bpfed.engine.simulator import Simulator
from bpfed.inference.calibration import common_temperature
from bpfed.methods import FedAvg, FedPer, Recipe
from bpfed.report.record import softly
from bpfed.runs import fit, pilot
from bpfed.runs.fit import prepare
from bpfed.runs.pilot import APART, as_rehearsal, common, uncertain
from bpfed.runs.run import Run

pytestmark = pytest.mark.usefixtures("untraced")

TINY = {"rounds": 2, "epochs": 1, "batch": 5, "eval_draws": 3, "progress": False}
DIGITS = ("run", "--clients", "3", "--epochs", "1", "--rounds", "2", "--eval-draws", "2", "--quiet", "--out", "a")


def test_rehearsals_see_training_examples_alone():
    data = classification(sizes=(30, 40))
    wrong = replace(data, test=replace(data.test, x=100.0 * data.test.x, y=(data.test.y + 1) % 3))
    a, b = (bpfed.fit(FedAvg(), d, rehearsals=2, **TINY) for d in (data, wrong))
    assert a.federation.softness == b.federation.softness != 1.0


def test_a_run_with_rehearsals_is_the_run_without_at_what_they_found():
    data = classification(sizes=(30, 40))
    learnt = bpfed.fit(Recipe(), data, rehearsals=2, **TINY)
    given = bpfed.fit(Recipe(), data, softness=learnt.federation.softness, **TINY)
    assert given.history[-1]["nll"] == learnt.history[-1]["nll"]
    assert learnt.seconds > given.seconds


def test_rehearsals_are_fitted_to_what_they_hold_out():
    """Written out by hand: train on four fifths, fit to the fifth, twice; the geometric mean."""
    data = classification(sizes=(30, 40))
    run = bpfed.fit(FedAvg(), data, rehearsals=2, seed=3, **TINY)
    fitted = []
    for number in (1, 2):
        seed = 3 + number * APART
        trial = Federation.of(
            FedAvg(),
            held_out(data, 0.2, seed),
            replace(run.settings, seed=seed, rehearsals=0),
            run.federation.model,
        )
        for _ in range(2):
            Simulator([trial]).round()
        probs, y = [], []
        for i, name in enumerate(data.clients):
            x, labels = trial.data.test.client(i)
            probs.append(Run(trial).client(name).predict(x).probs)
            y.append(labels)
        fitted.append(common_temperature(torch.cat(probs), torch.cat(y)))
    assert run.federation.softness == pytest.approx((fitted[0] * fitted[1]) ** 0.5, rel=1e-3)


def test_a_number_needs_fewer_examples_than_a_class():
    assert uncertain(1.1, 100, 3, "regression") == ""
    assert "rehearsals = 4 would learn it from 100" in uncertain(1.1, 99, 3, "regression")
    assert "rehearsals = 30 would learn it from 1000" in uncertain(1.1, 100, 3, "classification")


def test_few_examples_are_said_to_be_few():
    said: list[str] = []
    data = classification(sizes=(30, 40))
    bpfed.fit(FedAvg(), data, rehearsals=2, say=said.append, **TINY)
    assert len(said) == 1
    assert (
        "is learnt from 28 held-out examples, so it is uncertain; rehearsals = 72 would learn it from 1000." in said[0]
    )
    said.clear()
    bpfed.fit(FedAvg(), classification(sizes=(2600, 2600)), rehearsals=1, say=said.append, **TINY)
    assert said == []
    bpfed.fit(FedAvg(), classification(sizes=(2600, 2600)), rehearsals=1, eval_clients=1, say=said.append, **TINY)
    assert "is learnt from 520 held-out examples" in said[0]  # of the one client that is tested


def test_seeds_side_by_side_rehearse_each_their_own():
    data = classification(sizes=(30, 40))
    both = bpfed.fit_seeds(
        FedAvg(), data, seeds=(0, 1), rehearsals=1, **{k: v for k, v in TINY.items() if k != "progress"}
    )
    alone = [bpfed.fit(FedAvg(), data, seed=s, rehearsals=1, **TINY) for s in (0, 1)]
    assert [r.federation.softness for r in both] == [r.federation.softness for r in alone]
    assert both[0].federation.softness != both[1].federation.softness


def test_cuts_count_alike_whether_too_sure_or_not_sure_enough():
    assert common([0.5, 2.0]) == 1.0
    assert common([0.5]) == 0.5


def test_a_rehearsal_is_run_as_the_run_will_be():
    settings = Settings(rounds=7, rehearsals=3, calibration=0.2, seed=5, epochs=2)
    own = as_rehearsal(settings, 2)
    assert own == replace(settings, rehearsals=0, calibration=0.0, baselines="off", seed=5 + 2 * APART, eval_every=7)


class Stop(Exception):
    pass


class StopAfter(Callback):
    def __init__(self, rounds):
        self.left = rounds

    def round(self, run, info, record):
        self.left -= 1
        if not self.left:
            raise Stop


class Count(Callback):
    rounds = 0

    def round(self, run, info, record):
        self.rounds += 1


@pytest.fixture
def trained(monkeypatch):
    """The rounds that rehearsals were trained for."""
    found: list[int] = []
    train = pilot.train_together

    def counted(runs, callbacks):
        counts = [Count() for _ in runs]
        train(runs, [[*own, count] for own, count in zip(callbacks, counts, strict=True)])
        found.extend(count.rounds for count in counts)
        return runs

    monkeypatch.setattr(pilot, "train_together", counted)
    return found


def test_a_rehearsal_that_is_broken_off_goes_on(tmp_path, trained, monkeypatch):
    data, out = classification(sizes=(30, 40)), tmp_path / "a"
    alone = TINY | {"device": "cpu"}  # one rehearsal after the other; on a GPU they are side by side
    whole = bpfed.fit(FedAvg(), data, rehearsals=2, **alone)
    keep = pilot.Keeper.round

    def stopping(self, run, info, record):
        keep(self, run, info, record)
        if self.path.name == "2":
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(pilot.Keeper, "round", stopping)
        with pytest.raises(Stop):
            bpfed.fit(FedAvg(), data, rehearsals=2, out=out, **alone)
    assert [p.name for p in out.iterdir()] == ["rehearsals"]
    trained.clear()
    before = files(out)
    # As strict as where the run itself has begun.
    with pytest.raises(UserError, match=r"a' already exists; add --resume to continue it or --overwrite to replace it"):
        bpfed.fit(FedAvg(), data, rehearsals=2, out=out, **alone)
    with pytest.raises(
        UserError, match=r"has another configuration: run\.rounds is 2 there and 3 here. Resume it with"
    ):
        bpfed.fit(FedAvg(), data, rehearsals=2, out=out, resume=True, **alone | {"rounds": 3})
    assert files(out) == before
    said: list[str] = []
    run = bpfed.fit(FedAvg(), data, rehearsals=2, out=out, resume=True, say=said.append, **alone)
    assert said[0] == "Resuming the rehearsals."
    assert trained == [0, 1]
    assert run.federation.softness == whole.federation.softness
    assert json.loads((out / "summary.json").read_text())["nll"]["last"] == whole.history[-1]["nll"]["pooled"]
    assert not (out / "rehearsals").exists()


def test_rehearsals_of_another_configuration_are_made_anew(tmp_path, trained):
    data, out = classification(sizes=(30, 40)), tmp_path / "a"
    with pytest.raises(Stop):
        bpfed.fit(FedAvg(), data, rehearsals=1, out=out, callbacks=[StopAfter(1)], **TINY)
    (out / "rehearsals").mkdir()
    (out / "rehearsals/config.toml").write_text("of another run")
    trained.clear()
    bpfed.fit(FedAvg(lr=0.01), data, rehearsals=1, out=out, overwrite=True, **TINY)
    assert trained == [2]
    assert not (out / "rehearsals").exists()


def test_rehearsals_in_progress_are_their_process_s_own(tmp_path, monkeypatch):
    data, out, keep, refused = classification(sizes=(30, 40)), tmp_path / "a", pilot.Keeper.round, []

    def meanwhile(self, run, info, record):
        keep(self, run, info, record)
        kept = (out / "rehearsals/config.toml").read_text()
        with monkeypatch.context() as patch:
            patch.setattr(pilot.Keeper, "round", keep)
            with pytest.raises(UserError, match="Another process is writing to"):
                bpfed.fit(FedAvg(lr=0.01), data, rehearsals=1, out=out, overwrite=True, **TINY)
        assert (out / "rehearsals/config.toml").read_text() == kept
        refused.append(self.path)

    with monkeypatch.context() as patch:
        patch.setattr(pilot.Keeper, "round", meanwhile)
        bpfed.fit(FedAvg(), data, rehearsals=1, out=out, **TINY)
    assert len(refused) == 2
    os.close(lock(out))  # nobody's any more
    assert (out / "summary.json").exists()


def test_a_folder_is_free_again_when_a_rehearsal_fails(tmp_path):
    data, out = classification(sizes=(30, 40)), tmp_path / "a"
    with pytest.raises(UserError, match="In rehearsal 1: Training diverged"):
        bpfed.fit(FedAvg(lr=1e38), data, rehearsals=1, out=out, **TINY)
    bpfed.fit(FedAvg(), data, rehearsals=1, out=out, overwrite=True, **TINY)
    with pytest.raises(UserError, match="In rehearsal 1: Training diverged"):
        bpfed.fit_seeds(FedAvg(lr=1e38), data, (0, 1), out=tmp_path / "b", rehearsals=1, rounds=2)
    for folder in (out, tmp_path / "b/seed-0", tmp_path / "b/seed-1"):
        os.close(lock(folder))


@pytest.mark.parametrize("old", ["of another run", None])
def test_rehearsals_that_cannot_be_removed_are_a_sentence(tmp_path, monkeypatch, old):
    data, out = classification(sizes=(30, 40)), tmp_path / "a"
    (out / "rehearsals").mkdir(parents=True)
    config = prepare(FedAvg(), data, Settings(rehearsals=1, rounds=2)).config()
    (out / "rehearsals/config.toml").write_text(old or to_toml(config))

    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("bpfed.runs.folder.shutil.rmtree", denied)
    with pytest.raises(UserError, match=r"cannot be written \(Permission denied\)"):
        bpfed.fit(FedAvg(), data, rehearsals=1, out=out, overwrite=True, rounds=2, progress=False)


def test_nothing_of_anybody_elses_is_taken_away(tmp_path):
    data = classification(sizes=(30, 40))
    for name in ("a-rehearsals", "a/rehearsals"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="contains other files but no run"):
        bpfed.fit(FedAvg(), data, rehearsals=1, out=tmp_path / "a", **TINY)
    bpfed.fit(FedAvg(), data, rehearsals=1, out=tmp_path / "b", **TINY)
    assert (tmp_path / "a-rehearsals/notes.txt").exists()
    assert (tmp_path / "a/rehearsals/notes.txt").exists()


def test_a_run_that_goes_on_is_not_rehearsed_again(tmp_path, trained):
    data, out = classification(sizes=(30, 40)), tmp_path / "a"
    with pytest.raises(Stop):
        bpfed.fit(FedAvg(), data, rehearsals=2, out=out, callbacks=[StopAfter(1)], **TINY)
    kept = json.loads((out / "learnt.json").read_text())["softness"]
    trained.clear()
    run = bpfed.fit(FedAvg(), data, rehearsals=2, out=out, resume=True, **TINY)
    assert trained == []
    assert run.federation.softness == kept
    assert run.federation.round == 2
    assert bpfed.Run.load(out).federation.softness == kept


def test_what_cannot_go_on_is_said_before_anything_is_rehearsed(tmp_path, trained):
    data, out = classification(sizes=(30, 40)), tmp_path / "a"
    bpfed.fit(FedAvg(), data, out=out, **TINY)
    with pytest.raises(UserError, match=r"run\.rehearsals is 0 there and 2 here"):
        bpfed.fit(FedAvg(), data, rehearsals=2, out=out, resume=True, **TINY)
    assert trained == []
    assert not (out / "rehearsals").exists()


def test_a_display_is_closed_when_a_rehearsal_fails(monkeypatch):
    shown = []
    monkeypatch.setattr(fit, "Progress", lambda **given: shown.append(Progress(**given)) or shown[-1])
    with pytest.raises(UserError, match=r"In rehearsal 1: Training diverged"):
        bpfed.fit(FedAvg(lr=1e38), classification(sizes=(30, 40)), rehearsals=1, **TINY | {"progress": True})
    assert shown[0]._closed
    assert shown[0].stage == ""


def test_a_run_folder_from_before_goes_on(tmp_path):
    """Its configuration knows nothing of either setting."""
    data, out = classification(sizes=(30, 40)), tmp_path / "a"
    with pytest.raises(Stop):
        bpfed.fit(FedAvg(), data, out=out, callbacks=[StopAfter(1)], **TINY)
    path = out / "config.toml"
    path.write_text(re.sub(r"(?m)^(softness|rehearsals) = .*\n", "", path.read_text()))
    assert bpfed.fit(FedAvg(), data, out=out, resume=True, **TINY).federation.round == 2


def test_a_comparison_rehearses_each_seed_and_knows_what_is_finished(tmp_path):
    data = classification(sizes=(30, 40))
    found = [
        bpfed.compare(["fedavg", "fedavg+softness"], data, 2, out=tmp_path / "c", **TINY) for _ in ("once", "again")
    ]
    for comparison in found:
        learnt = [r.summary["softness"] for r in comparison.records["fedavg+softness"].values()]
        assert learnt[0] != learnt[1]
        assert all("softness" not in r.summary for r in comparison.records["fedavg"].values())
    assert found[0].over_seeds("fedavg+softness", "nll") == found[1].over_seeds("fedavg+softness", "nll")
    assert not list((tmp_path / "c").rglob("rehearsals"))


def test_a_user_asks_for_rehearsals(command):
    shown = command.ok(*DIGITS, "--rehearsals", "2")
    kept = json.loads(Path("a/summary.json").read_text())
    sentence = f"Predictions are given with a softness of {softly(kept['softness'])}, learnt in 2 rehearsals."
    assert sentence in " ".join(shown.out.split())
    assert sentence in Path("a/report.html").read_text()
    assert [p.name for p in Path().iterdir()] == ["a"]
    command.ok("run", "a/config.toml", "--quiet", "--out", "b")
    again = json.loads(Path("b/summary.json").read_text())
    assert (again["softness"], again["nll"]) == (kept["softness"], kept["nll"])
    other = command.ok("run", "a/config.toml", "--method", "fedavg", "--quiet", "--out", "c")
    assert sentence not in other.out  # what was learnt for one method is not another's


def test_a_report_says_what_rehearsals_would_do(command):
    command.ok(*DIGITS)
    assert "Trained with --rehearsals 3 the models would learn" in Path("a/report.html").read_text()
    command.ok(*DIGITS[:-1], "b", "--scaling", "client", "--calibration", "0.3")
    assert "--rehearsals" not in Path("b/report.html").read_text()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--softness", "0"), "softness is 0.0, but must be from 0.01 to 100"),
        (("--rehearsals", "-1"), "rehearsals is -1, but must be 0 or more"),
        (("--rehearsals", "1", "--softness", "0.5"), "softness is 0.5, but rehearsals would learn it"),
        (("--rehearsals", "1", "--noise", "1", "--clip", "1"), "not counted in ε; set rehearsals = 0"),
        (
            ("--rehearsals", "1", "--scaling", "client", "--calibration", "0.2"),
            "rehearsals learn a temperature for all clients, but scaling is 'client', one for each",
        ),
    ],
)
def test_what_cannot_be_is_refused(command, given, sentence):
    assert sentence in command(*DIGITS, *given).sentence


def test_numbers_are_rehearsed_too():
    data = regression(sizes=(60, 80), test=200, noise_scale=0.02)
    plain, rehearsed = (bpfed.fit(FedPer(), data, rehearsals=r, **(TINY | {"rounds": 20})) for r in (0, 2))
    assert rehearsed.softness < 0.8  # a noise that starts at 1 is far too wide after few steps
    assert rehearsed.evaluation[0]["nll"].pooled < plain.evaluation[0]["nll"].pooled
    assert rehearsed.evaluation[0]["ece"].pooled < plain.evaluation[0]["ece"].pooled
    assert "Predictions are given with a softness of" in rehearsed.record().softened


def test_a_run_that_is_still_rehearsing_says_so(command, monkeypatch):
    def stopped(self, run, info, record):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pilot.Keeper, "round", stopped)
        assert command(*DIGITS, "--rehearsals", "2").code == 130
    sentence = (
        "The run in 'a' is still rehearsing, so there is no model yet; resume it with: bpfed run --out a --resume"
    )
    Path("new.csv").write_text("x\n1\n")
    for asked in (("report", "a"), ("predict", "a", "--client", "client-01", "--input", "new.csv")):
        assert command(*asked).sentence == sentence
    command.ok("run", "--out", "a", "--resume", "--quiet")
    command.ok("report", "a")
