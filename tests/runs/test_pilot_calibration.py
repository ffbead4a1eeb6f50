"""How sure to be, learnt in calibration pilots: what they see, what comes of them, and that one that is broken off goes on."""

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
from bpfed.report.record import temperature_words
from bpfed.runs import fit, pilot
from bpfed.runs.fit import prepare
from bpfed.runs.metadata import uncertain
from bpfed.runs.pilot import APART, as_pilot, common
from bpfed.runs.run import Run

pytestmark = pytest.mark.usefixtures("untraced")

TINY = {"rounds": 2, "epochs": 1, "batch": 5, "eval_draws": 3, "progress": False}
DIGITS = ("run", "--clients", "3", "--epochs", "1", "--rounds", "2", "--eval-draws", "2", "--quiet", "--out", "a")


def test_pilots_see_training_examples_alone():
    data = classification(sizes=(30, 40))
    wrong = replace(data, test=replace(data.test, x=100.0 * data.test.x, y=(data.test.y + 1) % 3))
    a, b = (bpfed.fit(FedAvg(), d, calibrate="pilot:2", **TINY) for d in (data, wrong))
    assert a.federation.calibration_temperature == b.federation.calibration_temperature != 1.0


def test_a_run_with_pilots_is_the_run_without_at_what_they_found():
    data = classification(sizes=(30, 40))
    learnt = bpfed.fit(Recipe(), data, calibrate="pilot:2", **TINY)
    given = bpfed.fit(Recipe(), data, calibration_temperature=learnt.federation.calibration_temperature, **TINY)
    assert given.history[-1]["nll"] == learnt.history[-1]["nll"]
    assert learnt.seconds > given.seconds


def test_pilots_are_fitted_to_what_they_hold_out():
    """Written out by hand: train on four fifths, fit to the fifth, twice; the geometric mean."""
    data = classification(sizes=(30, 40))
    run = bpfed.fit(FedAvg(), data, calibrate="pilot:2", seed=3, **TINY)
    fitted = []
    for number in (1, 2):
        seed = 3 + number * APART
        trial = Federation.of(
            FedAvg(),
            held_out(data, 0.2, seed),
            replace(run.settings, seed=seed, calibrate="none"),
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
    assert run.federation.calibration_temperature == pytest.approx((fitted[0] * fitted[1]) ** 0.5, rel=1e-3)


def test_a_number_needs_fewer_examples_than_a_class():
    assert uncertain(1.1, 100, 3, "regression") == ""
    assert "calibrate = pilot:4 would learn it from 100" in uncertain(1.1, 99, 3, "regression")
    assert "calibrate = pilot:30 would learn it from 1000" in uncertain(1.1, 100, 3, "classification")


def test_few_examples_are_said_to_be_few():
    said: list[str] = []
    data = classification(sizes=(30, 40))
    bpfed.fit(FedAvg(), data, calibrate="pilot:2", say=said.append, **TINY)
    assert len(said) == 1
    assert (
        "is learnt from 28 held-out examples, so it is uncertain; calibrate = pilot:72 would learn it from 1000."
        in said[0]
    )
    said.clear()
    bpfed.fit(FedAvg(), classification(sizes=(2600, 2600)), calibrate="pilot:1", say=said.append, **TINY)
    assert said == []
    bpfed.fit(
        FedAvg(), classification(sizes=(2600, 2600)), calibrate="pilot:1", eval_clients=1, say=said.append, **TINY
    )
    assert "is learnt from 520 held-out examples" in said[0]  # of the one client that is tested


def test_seeds_side_by_side_run_pilots_each_their_own():
    data = classification(sizes=(30, 40))
    both = bpfed.fit_seeds(
        FedAvg(), data, seeds=(0, 1), calibrate="pilot:1", **{k: v for k, v in TINY.items() if k != "progress"}
    )
    alone = [bpfed.fit(FedAvg(), data, seed=s, calibrate="pilot:1", **TINY) for s in (0, 1)]
    assert [r.federation.calibration_temperature for r in both] == [r.federation.calibration_temperature for r in alone]
    assert both[0].federation.calibration_temperature != both[1].federation.calibration_temperature


def test_cuts_count_alike_whether_too_sure_or_not_sure_enough():
    assert common([0.5, 2.0]) == 1.0
    assert common([0.5]) == 0.5


def test_a_pilot_is_run_as_the_run_will_be():
    settings = Settings(rounds=7, calibrate="pilot:3", calibration=0.2, seed=5, epochs=2)
    own = as_pilot(settings, 2)
    assert own == replace(
        settings, calibrate="none", calibration=0.0, baselines="off", seed=5 + 2 * APART, eval_every=7
    )


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
    """The rounds that calibration pilots were trained for."""
    found: list[int] = []
    train = pilot.train_together

    def counted(runs, callbacks):
        counts = [Count() for _ in runs]
        train(runs, [[*own, count] for own, count in zip(callbacks, counts, strict=True)])
        found.extend(count.rounds for count in counts)
        return runs

    monkeypatch.setattr(pilot, "train_together", counted)
    return found


def test_a_pilot_that_is_broken_off_goes_on(tmp_path, trained, monkeypatch):
    data, out = classification(sizes=(30, 40)), tmp_path / "a"
    alone = TINY | {"device": "cpu"}  # one calibration pilot after the other; on a GPU they are side by side
    whole = bpfed.fit(FedAvg(), data, calibrate="pilot:2", **alone)
    keep = pilot.PilotFolder.round

    def stopping(self, run, info, record):
        keep(self, run, info, record)
        if self.path.name == "2":
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(pilot.PilotFolder, "round", stopping)
        with pytest.raises(Stop):
            bpfed.fit(FedAvg(), data, calibrate="pilot:2", out=out, **alone)
    assert [p.name for p in out.iterdir()] == ["pilots"]
    trained.clear()
    before = files(out)
    # As strict as where the run itself has begun.
    with pytest.raises(UserError, match=r"a' already exists; add --resume to continue it or --overwrite to replace it"):
        bpfed.fit(FedAvg(), data, calibrate="pilot:2", out=out, **alone)
    with pytest.raises(
        UserError, match=r"has another configuration: run\.rounds is 2 there and 3 here. Resume it with"
    ):
        bpfed.fit(FedAvg(), data, calibrate="pilot:2", out=out, resume=True, **alone | {"rounds": 3})
    assert files(out) == before
    said: list[str] = []
    run = bpfed.fit(FedAvg(), data, calibrate="pilot:2", out=out, resume=True, say=said.append, **alone)
    assert said[0] == "Resuming the calibration pilots."
    assert trained == [0, 1]
    assert run.federation.calibration_temperature == whole.federation.calibration_temperature
    assert json.loads((out / "summary.json").read_text())["nll"]["last"] == whole.history[-1]["nll"]["pooled"]
    assert not (out / "pilots").exists()


def test_pilots_of_another_configuration_are_made_anew(tmp_path, trained):
    data, out = classification(sizes=(30, 40)), tmp_path / "a"
    with pytest.raises(Stop):
        bpfed.fit(FedAvg(), data, calibrate="pilot:1", out=out, callbacks=[StopAfter(1)], **TINY)
    (out / "pilots").mkdir()
    (out / "pilots/config.toml").write_text("of another run")
    trained.clear()
    bpfed.fit(FedAvg(lr=0.01), data, calibrate="pilot:1", out=out, overwrite=True, **TINY)
    assert trained == [2]
    assert not (out / "pilots").exists()


def test_pilots_in_progress_are_their_process_s_own(tmp_path, monkeypatch):
    data, out, keep, refused = classification(sizes=(30, 40)), tmp_path / "a", pilot.PilotFolder.round, []

    def meanwhile(self, run, info, record):
        keep(self, run, info, record)
        kept = (out / "pilots/config.toml").read_text()
        with monkeypatch.context() as patch:
            patch.setattr(pilot.PilotFolder, "round", keep)
            with pytest.raises(UserError, match="Another process is writing to"):
                bpfed.fit(FedAvg(lr=0.01), data, calibrate="pilot:1", out=out, overwrite=True, **TINY)
        assert (out / "pilots/config.toml").read_text() == kept
        refused.append(self.path)

    with monkeypatch.context() as patch:
        patch.setattr(pilot.PilotFolder, "round", meanwhile)
        bpfed.fit(FedAvg(), data, calibrate="pilot:1", out=out, **TINY)
    assert len(refused) == 2
    os.close(lock(out))  # nobody's any more
    assert (out / "summary.json").exists()


def test_a_folder_is_free_again_when_a_pilot_fails(tmp_path):
    data, out = classification(sizes=(30, 40)), tmp_path / "a"
    with pytest.raises(UserError, match="In calibration pilot 1: Training diverged"):
        bpfed.fit(FedAvg(lr=1e38), data, calibrate="pilot:1", out=out, **TINY)
    bpfed.fit(FedAvg(), data, calibrate="pilot:1", out=out, overwrite=True, **TINY)
    with pytest.raises(UserError, match="In calibration pilot 1: Training diverged"):
        bpfed.fit_seeds(FedAvg(lr=1e38), data, (0, 1), out=tmp_path / "b", calibrate="pilot:1", rounds=2)
    for folder in (out, tmp_path / "b/seed-0", tmp_path / "b/seed-1"):
        os.close(lock(folder))


@pytest.mark.parametrize("old", ["of another run", None])
def test_pilots_that_cannot_be_removed_are_a_sentence(tmp_path, monkeypatch, old):
    data, out = classification(sizes=(30, 40)), tmp_path / "a"
    (out / "pilots").mkdir(parents=True)
    config = prepare(FedAvg(), data, Settings(calibrate="pilot:1", rounds=2)).config()
    (out / "pilots/config.toml").write_text(old or to_toml(config))

    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("bpfed.runs.folder.shutil.rmtree", denied)
    with pytest.raises(UserError, match=r"cannot be written \(Permission denied\)"):
        bpfed.fit(FedAvg(), data, calibrate="pilot:1", out=out, overwrite=True, rounds=2, progress=False)


def test_nothing_of_anybody_elses_is_taken_away(tmp_path):
    data = classification(sizes=(30, 40))
    for name in ("a-pilots", "a/pilots"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="contains other files but no run"):
        bpfed.fit(FedAvg(), data, calibrate="pilot:1", out=tmp_path / "a", **TINY)
    bpfed.fit(FedAvg(), data, calibrate="pilot:1", out=tmp_path / "b", **TINY)
    assert (tmp_path / "a-pilots/notes.txt").exists()
    assert (tmp_path / "a/pilots/notes.txt").exists()


def test_a_run_that_goes_on_is_not_calibrated_again(tmp_path, trained):
    data, out = classification(sizes=(30, 40)), tmp_path / "a"
    with pytest.raises(Stop):
        bpfed.fit(FedAvg(), data, calibrate="pilot:2", out=out, callbacks=[StopAfter(1)], **TINY)
    kept = json.loads((out / "learnt.json").read_text())["calibration_temperature"]
    trained.clear()
    run = bpfed.fit(FedAvg(), data, calibrate="pilot:2", out=out, resume=True, **TINY)
    assert trained == []
    assert run.federation.calibration_temperature == kept
    assert run.federation.round == 2
    assert bpfed.Run.load(out).federation.calibration_temperature == kept


def test_what_cannot_go_on_is_said_before_anything_is_calibrated(tmp_path, trained):
    data, out = classification(sizes=(30, 40)), tmp_path / "a"
    bpfed.fit(FedAvg(), data, out=out, **TINY)
    with pytest.raises(UserError, match=r"run\.calibrate is 'none' there and 'pilot:2' here"):
        bpfed.fit(FedAvg(), data, calibrate="pilot:2", out=out, resume=True, **TINY)
    assert trained == []
    assert not (out / "pilots").exists()


def test_a_display_is_closed_when_a_pilot_fails(monkeypatch):
    shown = []
    monkeypatch.setattr(fit, "Progress", lambda **given: shown.append(Progress(**given)) or shown[-1])
    with pytest.raises(UserError, match=r"In calibration pilot 1: Training diverged"):
        bpfed.fit(FedAvg(lr=1e38), classification(sizes=(30, 40)), calibrate="pilot:1", **TINY | {"progress": True})
    assert shown[0]._closed
    assert shown[0].stage == ""


def test_a_run_folder_from_before_goes_on(tmp_path):
    """Its configuration knows nothing of either setting."""
    data, out = classification(sizes=(30, 40)), tmp_path / "a"
    with pytest.raises(Stop):
        bpfed.fit(FedAvg(), data, out=out, callbacks=[StopAfter(1)], **TINY)
    path = out / "config.toml"
    path.write_text(re.sub(r"(?m)^(calibration_temperature|calibrate) = .*\n", "", path.read_text()))
    assert bpfed.fit(FedAvg(), data, out=out, resume=True, **TINY).federation.round == 2


def test_a_comparison_calibrates_each_seed_and_knows_what_is_finished(tmp_path):
    data = classification(sizes=(30, 40))
    found = [
        bpfed.compare(["fedavg", "fedavg+calibrated"], data, 2, out=tmp_path / "c", **TINY) for _ in ("once", "again")
    ]
    for comparison in found:
        learnt = [r.summary["calibration_temperature"] for r in comparison.records["fedavg+calibrated"].values()]
        assert learnt[0] != learnt[1]
        assert all("calibration_temperature" not in r.summary for r in comparison.records["fedavg"].values())
    assert found[0].over_seeds("fedavg+calibrated", "nll") == found[1].over_seeds("fedavg+calibrated", "nll")
    assert not list((tmp_path / "c").rglob("pilots"))


def test_a_user_asks_for_pilots(command):
    shown = command.ok(*DIGITS, "--calibrate", "pilot:2")
    kept = json.loads(Path("a/summary.json").read_text())
    sentence = f"Predictions are given with a calibration temperature of {temperature_words(kept['calibration_temperature'])}, fitted in 2 calibration pilots."
    assert sentence in " ".join(shown.out.split())
    assert sentence in Path("a/report.html").read_text()
    assert [p.name for p in Path().iterdir()] == ["a"]
    command.ok("run", "a/config.toml", "--quiet", "--out", "b")
    again = json.loads(Path("b/summary.json").read_text())
    assert (again["calibration_temperature"], again["nll"]) == (kept["calibration_temperature"], kept["nll"])
    other = command.ok("run", "a/config.toml", "--method", "fedavg", "--quiet", "--out", "c")
    assert sentence not in other.out  # what was learnt for one method is not another's


def test_a_report_says_what_pilots_would_do(command):
    command.ok(*DIGITS)
    assert (
        "Train with --calibrate pilot:3 to calibrate them on held-out training examples."
        in Path("a/report.html").read_text()
    )
    command.ok(*DIGITS[:-1], "b", "--scaling", "client", "--calibration", "0.3")
    assert "--calibrate" not in Path("b/report.html").read_text()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--calibration-temperature", "0"), "calibration_temperature is 0.0, but must be from 0.01 to 100"),
        (
            ("--calibrate", "pilot:-1"),
            "calibrate is 'pilot:-1', but must be none, or pilot with a number from 1 to 1000",
        ),
        (
            ("--calibrate", "pilot:1", "--calibration-temperature", "0.5"),
            "calibration_temperature is 0.5, but calibrate = 'pilot:1' would fit it",
        ),
        (("--calibrate", "pilot:1", "--noise", "1", "--clip", "1"), "not counted in ε; set calibrate to none"),
        (
            ("--calibrate", "pilot:1", "--scaling", "client", "--calibration", "0.2"),
            "calibrate is 'pilot:1', one temperature for all clients, but scaling is 'client', one for each",
        ),
    ],
)
def test_what_cannot_be_is_refused(command, given, sentence):
    assert sentence in command(*DIGITS, *given).sentence


def test_numbers_are_calibrated_too():
    data = regression(sizes=(60, 80), test=200, noise_scale=0.02)
    plain, piloted = (
        bpfed.fit(FedPer(), data, calibrate=how, **(TINY | {"rounds": 20})) for how in ("none", "pilot:2")
    )
    assert piloted.calibration_temperature < 0.8  # a noise that starts at 1 is far too wide after few steps
    assert piloted.evaluation[0]["nll"].pooled < plain.evaluation[0]["nll"].pooled
    assert piloted.evaluation[0]["ece"].pooled < plain.evaluation[0]["ece"].pooled
    assert "Predictions are given with a scale factor of" in piloted.record().calibration_words


def test_a_run_that_is_still_in_its_pilots_says_so(command, monkeypatch):
    def stopped(self, run, info, record):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pilot.PilotFolder, "round", stopped)
        assert command(*DIGITS, "--calibrate", "pilot:2").code == 130
    sentence = "The run in 'a' is still in its calibration pilots, so there is no model yet; resume it with: bpfed run --out a --resume"
    Path("new.csv").write_text("x\n1\n")
    for asked in (("report", "a"), ("predict", "a", "--client", "client-01", "--input", "new.csv")):
        assert command(*asked).sentence == sentence
    command.ok("run", "--out", "a", "--resume", "--quiet")
    command.ok("report", "a")
