"""Calibration pilots in a deployment: the simulator's calibration temperature, kept through kills, refused where wrong, gone afterwards."""

import json
import math

import pytest
import torch
from command import Command
from federations import Deployed, simulated
from flwr.app import Message, MetricRecord
from scenarios import classification, regression
from test_faults import Killed, spoil
from test_same_numbers import same
from torch.utils._pytree import tree_leaves

from bpfed._util.errors import UserError
from bpfed.data.federated import held_out
from bpfed.deploy.protocol.messages import Reply, Request
from bpfed.deploy.site.limits import LocalPrivacy
from bpfed.engine.federation import Federation
from bpfed.engine.simulator import Simulator
from bpfed.inference.calibration import PLACES, common_temperature
from bpfed.methods import METHODS, FedAvg, FedPer, PerFedAvg, Recipe
from bpfed.report import RunRecord
from bpfed.report.record import temperature_words
from bpfed.runs.pilot import as_pilot, common
from bpfed.runs.run import Run

DATA = classification(sizes=(30, 40, 21))
ROUNDS = 2
TINY = {"rounds": ROUNDS, "epochs": 1, "calibrate": "pilot:2"}


def as_simulated(server, federation, history):
    assert server.journal.calibration_temperature == pytest.approx(federation.learnt_temperature, rel=1e-3)
    assert federation.learnt_temperature != 1.0
    for ours, theirs in zip(tree_leaves(server.federation.shared), tree_leaves(federation.shared), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    same(server, federation, history, tolerance=1e-3)


@pytest.fixture(scope="module")
def wanted():
    return simulated(FedAvg(), DATA, **TINY)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (Recipe(), {"members": 2, "hidden": 7}),
        (FedPer(), {"calibration": 0.3, "sets": "client"}),
        (PerFedAvg(), {"batch": 50}),  # its clients tune before they predict, in batches wider than any has examples
        (METHODS["bpfed-population"](), {"weighting": "size", "participants": 2, "eval_clients": 2}),
        (FedAvg(), {"compression": "half", "clip": 0.5}),
    ],
    ids=lambda given: getattr(given, "name", None),
)
def test_the_calibration_temperature_and_the_scores_are_those_of_the_simulator(method, options, tmp_path):
    settings = TINY | options
    server = Deployed(tmp_path, method, DATA, **settings).serve()
    as_simulated(server, *simulated(method, DATA, **settings))


@pytest.mark.parametrize("method", [Recipe(), FedPer()], ids=lambda method: method.name)
def test_numbers_are_calibrated_as_in_the_simulator(method, tmp_path):
    data = regression(sizes=(30, 40, 21))
    server = Deployed(tmp_path, method, data, **TINY).serve()
    as_simulated(server, *simulated(method, data, **TINY))


def test_what_was_learnt_is_told_with_the_run_and_sites_predict_with_it(tmp_path, wanted):
    deployed = Deployed(tmp_path, FedAvg(), DATA, **TINY)
    for name, site in deployed.sites.items():
        site.own = tmp_path / "own" / name
    server = deployed.serve()
    as_simulated(server, *wanted)
    record = RunRecord.read(server.journal.folder)
    assert record.summary["calibration_temperature"] == server.journal.calibration_temperature
    assert (
        record.calibration_words
        == f"Predictions are given with a calibration temperature of {temperature_words(server.journal.calibration_temperature)}, fitted in 2 calibration pilots."
    )
    assert record.calibration_words in (tmp_path / "server" / "report.html").read_text()
    assert [r["round"] for r in server.history] == [1, 2]
    told = [s for s in deployed.said if "calibration temperature" in s or s.startswith("Calibration pilot")]
    assert told[0] == "Calibration pilot 1 of 2, round 1 of 2: 3 uploads."
    assert told[-1].startswith(
        f"Calibration pilots are over: predictions will have a calibration temperature of {temperature_words(server.journal.calibration_temperature)}. The "
    )
    assert "is learnt from 36 held-out examples, so it is uncertain; calibrate = pilot:56 would learn it" in told[-1]
    assert json.loads((tmp_path / "server" / "status.json").read_text())["learnt"] == told[-1]
    for i, name in enumerate(DATA.clients):
        own, (x, _) = Run.load(tmp_path / "own" / name), DATA.test.client(i)
        assert own.calibration_temperature == server.journal.calibration_temperature
        assert json.loads((tmp_path / "own" / name / "learnt.json").read_text()) == {
            "calibration_temperature": own.calibration_temperature
        }
        predicted = Run(wanted[0]).client(name).predict(x).probs
        torch.testing.assert_close(own.client(name).predict(x).probs, predicted, rtol=1e-3, atol=1e-4)


def test_pilots_leave_nothing_behind_and_keep_no_model(tmp_path):
    deployed = Deployed(tmp_path, FedPer(), DATA, **TINY)
    for name, site in deployed.sites.items():
        site.own = tmp_path / "own" / name
    seen = {}

    def look(message):
        ask = Request.read(message.content)
        kept = tmp_path / "site b" / "pilots"
        seen[ask.pilot, ask.round] = (len(list(kept.glob("*"))), (tmp_path / "own").exists())
        return answer(message)

    answer = deployed.grid.clients[deployed.node("site b")]
    deployed.grid.clients[deployed.node("site b")] = look
    server = deployed.serve()
    assert seen == {
        (0, 0): (0, False),
        **{(1, r): (int(r > 1), False) for r in (1, 2, 3)},
        **{(2, r): (1 + int(r > 1), False) for r in (1, 2, 3)},
        (0, 1): (2, False),
        (0, 2): (0, False),
        (0, 3): (0, True),  # site a has kept its own by then
    }
    assert not (tmp_path / "server" / "pilots").exists()
    for name in DATA.clients:
        assert {p.name for p in (tmp_path / name).iterdir()} == {server.journal.run, "asked.json"}


def killed_in(deployed, pilot, round_):
    """A server that is killed when it is about to ask for that round; then it may go on."""
    push = deployed.grid.push_messages

    def pushed(messages):
        messages = list(messages)
        asks = [Request.read(m.content) for m in messages]
        if asks and (asks[0].pilot, asks[0].round) == (pilot, round_):
            raise Killed
        return push(messages)

    deployed.grid.push_messages = pushed
    with pytest.raises(Killed):
        deployed.serve()
    deployed.grid.push_messages = push
    return json.loads((deployed.folder / "server" / "status.json").read_text())


@pytest.mark.parametrize(
    ("pilot", "round_", "done"),
    [(1, 2, (1, 1)), (1, 3, (1, 2)), (2, 1, (2, 0)), (2, 2, (2, 1)), (0, 1, (0, 0)), (0, 2, (0, 1))],
)
def test_a_server_that_was_killed_goes_on_where_it_was(pilot, round_, done, tmp_path, wanted):
    deployed = Deployed(tmp_path, FedAvg(), DATA, **TINY)
    status = killed_in(deployed, pilot, round_)
    assert (status["pilot"], status["round"]) == done
    if pilot:
        assert status["metrics"] is None
    before = len(deployed.grid.wire)
    as_simulated(deployed.serve(), *wanted)
    asks = len([way for way, _, _ in deployed.grid.wire[before:] if way == "down"])
    left = {1: 2, 2: 1, 0: 0}[pilot] * (ROUNDS + 1) + ROUNDS + 1 - (round_ - 1)
    assert asks == 3 * (1 + left)  # the sites introduce themselves again, and nothing else is done twice
    assert not (tmp_path / "server" / "pilots").exists()


def test_a_kill_between_the_last_pilot_and_the_run_loses_nothing(tmp_path, wanted, monkeypatch):
    deployed = Deployed(tmp_path, FedAvg(), DATA, **TINY)

    def kill(server):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("bpfed.deploy.server.server.Server._forget_pilots", kill)
        with pytest.raises(Killed):
            deployed.serve()
    assert (tmp_path / "server" / "pilots").exists()
    before = len(deployed.grid.wire)
    as_simulated(deployed.serve(), *wanted)
    assert len(deployed.grid.wire) - before == 2 * 3 * (1 + ROUNDS + 1)
    assert not (tmp_path / "server" / "pilots").exists()


def test_a_site_that_is_started_anew_for_every_message_goes_on_from_its_disk(tmp_path):
    deployed = Deployed(tmp_path, FedPer(), DATA, **TINY)

    def fresh(message):
        site = Deployed(tmp_path, FedPer(), DATA, **TINY).sites["site b"]
        return Message(site.answer(message.content), reply_to=message)

    deployed.grid.clients[deployed.node("site b")] = fresh
    as_simulated(deployed.serve(), *simulated(FedPer(), DATA, **TINY))


def test_a_site_that_is_away_for_a_round_of_a_pilot_is_away_for_that_one_alone(tmp_path, wanted):
    deployed = Deployed(tmp_path, FedAvg(), DATA, **TINY)

    def lost(record, message):
        return None if Request.read(message.content).pilot == 1 else record

    spoil(deployed, "site b", lost, rounds=("1",))
    server = deployed.serve()
    assert server.sites["site b"].lost == 1
    assert server.sites["site b"].why == "in calibration pilot 1 of 2, round 1 it did not answer within 1 s."
    same_shared = zip(tree_leaves(server.federation.shared), tree_leaves(wanted[0].shared), strict=True)
    assert all(torch.allclose(ours, theirs, rtol=0, atol=1e-6) for ours, theirs in same_shared)


def test_pilots_spend_of_what_a_site_may_send(tmp_path):
    deployed = Deployed(tmp_path, FedAvg(), DATA, **TINY)
    site = deployed.sites["site b"]
    site.transform = LocalPrivacy(site.folder, FedAvg(), 0.5, 4.0, 1e-5, 0.0, deployed.said.append)
    deployed.serve()
    assert json.loads((site.folder / "released.json").read_text())["releases"] == 3 * ROUNDS


def test_whoever_asks_is_told_which_pilot_it_is(tmp_path, capsys):
    command, fed = Command(capsys), tmp_path / "fed"
    command.ok(
        "deploy", "init", fed, "--sites", ",".join(DATA.clients), "--calibrate", "pilot:2", "--rounds", str(ROUNDS)
    )
    assert 'calibrate = "pilot:2"' in (fed / "server" / "config.toml").read_text()
    deployed = Deployed(tmp_path, FedAvg(), DATA, **TINY)
    killed_in(deployed, 2, 2)
    (tmp_path / "server").rename(fed / "server" / "run")
    shown = command.ok("deploy", "status", fed).out
    assert "stopped, calibration pilot 2 of 2, round 1 of 2, " in shown
    assert "accuracy" not in shown


def test_a_damaged_finding_is_named_and_found_anew_once_deleted(tmp_path, wanted):
    deployed = Deployed(tmp_path, FedAvg(), DATA, **TINY)
    killed_in(deployed, 2, 1)
    path = tmp_path / "server" / "pilots" / "1" / "found.json"
    path.write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        deployed.serve()
    path.unlink()
    as_simulated(deployed.serve(), *wanted)


def test_pilots_of_another_configuration_are_left_alone(tmp_path):
    killed_in(Deployed(tmp_path, FedAvg(), DATA, **TINY), 1, 2)
    with pytest.raises(UserError, match=r"server' has a different configuration"):
        Deployed(tmp_path, FedAvg(lr=0.5), DATA, **TINY).serve()


def fitted_by_hand(numbers, without=()):
    """The calibration temperature of FedAvg's calibration pilots, each fitted to what clients hold out but for ``without[number]``."""
    base = Federation.start(FedAvg(), DATA, simulated(FedAvg(), DATA, **TINY)[0].settings)
    found = []
    for number in numbers:
        settings = as_pilot(base.settings, number)
        trial = Federation.of(FedAvg(), held_out(DATA, 0.2, settings.seed), settings, base.model)
        for _ in range(ROUNDS):
            Simulator([trial]).round()
        parts = [i for i, name in enumerate(DATA.clients) if name not in without.get(number, ())]
        probs = [Run(trial).client(DATA.clients[i]).predict(trial.data.test.client(i)[0]).probs for i in parts]
        y = [trial.data.test.client(i)[1] for i in parts]
        found.append(common_temperature(torch.cat(probs), torch.cat(y)))
    return common(found)


def in_last_exchange(deployed, name, pilot, change):
    """Let a site's answer at the end of a calibration pilot pass through ``change(record, message)``."""

    def only_then(record, message):
        return change(record, message) if Request.read(message.content).pilot == pilot else record

    spoil(deployed, name, only_then, rounds=(str(ROUNDS + 1),))


def test_a_site_that_is_away_at_the_end_of_a_pilot_costs_its_slopes_only(tmp_path):
    deployed = Deployed(tmp_path, FedAvg(), DATA, **TINY)
    in_last_exchange(deployed, "site b", 1, lambda record, message: None)
    server = deployed.serve()
    assert server.sites["site b"].lost == deployed.plan.attempts
    assert server.sites["site b"].why == "in calibration pilot 1 of 2, round 3 it did not answer within 1 s."
    assert server.journal.calibration_temperature == pytest.approx(fitted_by_hand((1, 2), {1: ["site b"]}), rel=1e-3)
    assert server.journal.counted == dict.fromkeys(DATA.clients, ROUNDS)


def changed(change, examples=lambda told: told):
    def spoilt(record, message):
        told = record["held"]
        record["held"] = MetricRecord({"examples": examples(told["examples"]), "slopes": change(list(told["slopes"]))})
        return record

    return spoilt


def removed(record, message):
    del record["held"]
    return record


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed(lambda v: v[:-1]), "not 257 numbers"),
        (changed(lambda v: [math.nan, *v[1:]]), "not those of 8 examples"),
        (changed(lambda v: [1e6 * x for x in v]), "not those of 8 examples"),
        (changed(lambda v: v[::-1]), "do not rise"),
        (changed(list, lambda n: 10**6), "it reports 1000000 held-out examples, but has only 40 in all"),
        (changed(list, lambda n: -1), "it reports -1 held-out examples"),
        (changed(list, lambda n: float(n)), "what it reports on held-out examples cannot be read"),
        (removed, "no 'held'"),
    ],
    ids=["short", "NaN", "too large", "falling", "of too many", "of less than none", "no count", "none"],
)
def test_bad_slopes_are_refused_and_named(change, words, tmp_path):
    deployed = Deployed(tmp_path, FedAvg(), DATA, **TINY)
    in_last_exchange(deployed, "site b", 2, change)
    server = deployed.serve()
    assert words in server.sites["site b"].why
    assert server.sites["site b"].refused == deployed.plan.attempts
    assert server.journal.calibration_temperature == pytest.approx(fitted_by_hand((1, 2), {2: ["site b"]}), rel=1e-3)


def test_slopes_have_no_place_in_any_other_answer(tmp_path):
    deployed = Deployed(tmp_path, FedAvg(), DATA, **TINY)

    def added(record, message):
        record["held"] = MetricRecord({"examples": 0, "slopes": [0.0] * PLACES})
        return record

    spoil(deployed, "site b", added)
    assert "it holds 'held', which does not belong in it" in deployed.serve().sites["site b"].why


@pytest.mark.parametrize(
    ("pilots", "asked", "words"),
    [
        (2, {"pilot": 3}, "it is for calibration pilot 3, but there are to be 2"),
        (2, {"pilot": -1}, "it is for calibration pilot -1"),
        (0, {"pilot": 1}, "it is for calibration pilot 1, but there are to be 0"),
        (2, {"calibration_temperature": math.nan}, "its calibration temperature is nan"),
        (2, {"calibration_temperature": math.inf}, "its calibration temperature is inf"),
        (2, {"calibration_temperature": 0.001}, "its calibration temperature is 0.001"),
        (2, {"calibration_temperature": -1.0}, "its calibration temperature is -1.0"),
        (2, {"calibration_temperature": 0.5, "pilot": 1}, "but none can have been learnt"),
        (0, {"calibration_temperature": 0.5}, "but none can have been learnt"),
        (2, {"calibration_temperature": 1}, "fields are not those"),
        (2, {"pilot": True}, "fields are not those"),
    ],
)
def test_a_site_refuses_what_its_configuration_has_no_place_for(pilots, asked, words, tmp_path):
    site = Deployed(tmp_path, FedAvg(), DATA, **TINY | {"calibrate": f"pilot:{pilots}" if pilots else "none"}).sites[
        "site b"
    ]
    answer = site.answer(Request(site.fingerprint, "ab", 1, train=True, **asked).write())
    assert words in Reply.read(answer, None, None).refused
    assert not (tmp_path / "site b").exists()


def test_a_site_with_one_example_holds_nothing_out(tmp_path):
    data = classification(sizes=(30, 1, 21))
    server = Deployed(tmp_path, FedAvg(), data, **TINY).serve()
    assert not server.sites[data.clients[1]].refused
    as_simulated(server, *simulated(FedAvg(), data, **TINY))


def test_where_nobody_can_hold_anything_out_it_is_said(tmp_path):
    with pytest.raises(UserError, match=r"nothing was learnt; start the run again .*, or make the deployment without"):
        Deployed(tmp_path, FedAvg(), classification(sizes=(1, 1)), **TINY).serve()


def test_where_those_with_examples_were_away_the_run_goes_on_once_they_are_there(tmp_path):
    deployed = Deployed(tmp_path, FedAvg(), classification(sizes=(1, 30)), **TINY)
    node = deployed.node("site b")
    answer = deployed.grid.clients[node]
    spoil(deployed, "site b", lambda record, message: None, rounds=(str(ROUNDS + 1),))
    with pytest.raises(
        UserError, match="No site that tested the calibration pilot holds out as many training examples"
    ):
        deployed.serve()
    deployed.grid.clients[node] = answer
    as_simulated(deployed.serve(), *simulated(FedAvg(), deployed.data, **TINY))


def test_of_what_is_held_out_nothing_but_its_number_and_slopes_is_told(tmp_path):
    deployed = Deployed(tmp_path, FedAvg(), DATA, **TINY)
    seen = []

    def looked_at(record, message):
        seen.append(set(record))
        return record

    in_last_exchange(deployed, "site b", 1, looked_at)
    deployed.serve()
    assert seen == [{"reply", "held"}]
