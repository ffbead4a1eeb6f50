"""Selection pilots in a deployment: the simulator's choice, kept through kills, and of sites that take part in them."""

import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from federations import SETTINGS, Deployed, configured, simulated
from flwr.app import MetricRecord
from scenarios import classification
from test_faults import Killed, spoil
from test_same_numbers import same

from bpfed._util.errors import UserError
from bpfed.config.settings import Settings
from bpfed.deploy.protocol.messages import HeldOutScore, Reply, Request
from bpfed.deploy.protocol.state_schema import RejectedMessage
from bpfed.deploy.server.rounds import method_rule
from bpfed.deploy.server.server import check_deployment
from bpfed.deploy.settings import Limits
from bpfed.deploy.site.limits import check_candidate
from bpfed.inference.tasks import get_task
from bpfed.methods import Adaptive
from bpfed.report import RunRecord
from bpfed.runs.pilot import ScoredCandidate, choose, comparable, select

DATA = classification(sizes=(30, 30, 30))
#: The first candidate does not learn; the data do not tell the other two apart.
CHOSEN = (1, 0)
TINY = {"rounds": 1, "epochs": 1, "batch": 50, "members": 2, "hidden": 4}


@dataclass(frozen=True)
class Short(Adaptive):
    """With two stages of two candidates, which are three trainings."""

    def candidates(self):
        return ({"lr": 1e-9}, {"lr": 0.1}), ({"deviation": 0.1}, {"deviation": 1.0})


@pytest.fixture(autouse=True)
def one_fold(monkeypatch):
    """Which data with many rows have; three of them take three times as long."""
    monkeypatch.setattr("bpfed.runs.pilot.FEW", 0)


def wanted():
    return choose(Short(), DATA, Settings(**{**SETTINGS, **TINY}))


def deployment(folder):
    return Deployed(folder, Short(), DATA, adapt="auto", **TINY)


def watch(deployed, look):
    """Let ``look(request)`` see what the server is about to ask."""
    push = deployed.grid.push_messages

    def pushed(messages):
        messages = list(messages)
        for message in messages:
            look(Request.read(message.content))
        return push(messages)

    deployed.grid.push_messages = pushed
    return push


def test_the_choice_its_scores_and_the_run_are_those_of_the_simulator(tmp_path, monkeypatch):
    monkeypatch.setattr("bpfed.runs.pilot.FEW", 1000)
    deployed, found, choice = deployment(tmp_path), [], wanted()
    monkeypatch.setattr("bpfed.deploy.server.server.select", lambda *given: found.append(select(*given)) or found[0])
    server = deployed.serve()
    assert server.candidate == choice.chosen == CHOSEN
    for ours, theirs in zip(found[0].stages, choice.stages, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.sums == pytest.approx(other.sums, abs=1e-4)
            assert (one.examples == other.examples).all()
    same(server, *simulated(choice.method, DATA, **TINY))
    told = RunRecord.read(server.journal.folder).config
    assert (told["method"]["lr"], told["run"]["adapt"]) == (0.1, "off")
    assert any("in 9 selection pilots of 1 round: 9 rounds before the 1 of the run" in s for s in deployed.said)
    assert not (tmp_path / "server" / "pilots").exists()
    assert {p.name for p in (tmp_path / "site b").iterdir()} == {server.journal.run, "asked.json"}


@pytest.mark.parametrize("candidate", [(1, 1), CHOSEN])
def test_a_server_that_was_killed_goes_on_and_chooses_the_same(candidate, tmp_path):
    """In the second stage, and in the run itself."""
    deployed, asked = deployment(tmp_path), []

    def kill(ask):
        if (ask.candidate, ask.fold, ask.round) == (candidate, 0 if candidate == CHOSEN else 1, 2):
            raise Killed

    push = watch(deployed, kill)
    with pytest.raises(Killed):
        deployed.serve()
    assert json.loads((tmp_path / "server" / "status.json").read_text())["round"] == 1
    deployed.grid.push_messages = push
    watch(deployed, asked.append)
    server = deployed.serve()
    assert server.candidate == CHOSEN
    left = {(1, 1): 1, CHOSEN: 0}[candidate]  # selection pilots, the one that was broken off among them
    assert len([ask for ask in asked if ask.fold]) == 3 * (2 * left - bool(left))


def test_a_site_may_refuse_and_one_that_is_away_once_has_no_part(tmp_path):
    """Scores of one candidate by some sites and of another by others must not be compared."""
    deployed = deployment(tmp_path)
    deployed.plan = replace(deployed.plan, timeout=0.1, attempts=1)
    deployed.sites["site a"].limits = Limits(minimum=1, selection_pilots=False)

    def away(record, message):
        return None if Request.read(message.content).candidate == (0,) else record

    spoil(deployed, "site b", away, rounds=("2",))
    server = deployed.serve()
    assert server.candidate == CHOSEN
    assert "Sites without a score of every candidate had no part in this choice: site a, site b." in deployed.said
    assert "'selection_pilots' of this site's deploy.toml refuses them" in " ".join(deployed.said)
    assert [record["participants"] for record in server.history] == [3]


def test_scores_of_too_few_rows_are_not_told(tmp_path):
    deployed, seen = deployment(tmp_path), []
    for site in deployed.sites.values():
        site.limits = Limits(minimum=7 if site.name == "site a" else 1)

    def look(record, message):
        if Request.read(message.content).fold:
            seen.append((set(record), dict(record["score"])))
        return record

    spoil(deployed, "site a", look, rounds=("2",))
    deployed.serve()
    assert seen == [({"reply", "score"}, {"examples": 0, "nll": 0.0})] * 3
    assert any(
        s.startswith("This site holds out 6 training examples in a selection pilot, fewer") for s in deployed.said
    )


@pytest.mark.parametrize(
    "score",
    [
        {"examples": 6, "nll": math.nan},
        {"examples": 31, "nll": 1.0},
        {"nll": 1.0},
        {"examples": 0, "nll": math.inf},
        {"examples": 6, "nll": -1.0},
        {"examples": 6, "nll": 200.0},
    ],
)
def test_a_score_that_cannot_be_is_refused(score):
    """For classes that is also one below 0, or beyond the least probability that is told apart from 0."""
    task = get_task("classification")
    answer = Reply("", "a", 3, "site a", score=HeldOutScore(6, 4.5)).write()
    assert Reply.read(answer, None, None, task=task, most_scored=30).score == (6, 4.5)
    answer["score"] = MetricRecord({"examples": 6, "nll": 6 * 27.6310211})  # of examples that are as unlikely as can be
    assert Reply.read(answer, None, None, task=task, most_scored=30).score is not None
    answer["score"] = MetricRecord(score)
    with pytest.raises(RejectedMessage):
        Reply.read(answer, None, None, task=task, most_scored=30)


@pytest.mark.parametrize("score", [-1e9, 1e9])
def test_a_density_has_no_such_bounds(score):
    answer = Reply("", "a", 3, "site a", score=HeldOutScore(6, score)).write()
    assert Reply.read(answer, None, None, task=get_task("regression"), most_scored=30).score == (6, score)


def test_a_site_that_scores_no_candidate_with_a_number_does_not_end_the_run(tmp_path):
    """Where all say so, nothing can be chosen."""
    deployed = deployment(tmp_path)

    def lie(record, message):
        if Request.read(message.content).fold:
            record["score"] = MetricRecord({**record["score"], "nll": math.inf})
        return record

    spoil(deployed, "site b", lie, rounds=("2",))
    assert [record["participants"] for record in deployed.serve().history] == [3]
    assert "Sites without a score of every candidate had no part in this choice: site b." in deployed.said
    sums = np.array([[1.0, np.inf, np.inf], [np.inf, np.inf, 1.0]])
    tried = [ScoredCandidate(Short(), {}, one, np.ones(3)) for one in sums]
    assert [one.nll for one in comparable(tried)] == [math.inf, math.inf]  # two of three


def test_a_candidate_that_no_number_can_be_given_for_is_not_chosen_while_there_are_others():
    """It is the honest site's word that training fails there."""
    sums = np.array([[1.0, np.inf, 1.0], [5.0, 5.0, 5.0]])
    tried = comparable([ScoredCandidate(Short(), {}, one, np.ones(3)) for one in sums])
    assert [one.nll for one in tried] == [math.inf, 5.0]


def test_settings_with_which_training_diverges_are_not_chosen(tmp_path):
    def rule(federation, uploads, weights):
        state = method_rule(federation, uploads, weights)
        return state if federation.method.lr != 0.1 else state._replace(weights=state.weights * torch.nan)

    deployed = deployment(tmp_path)
    assert deployed.serve(rule=rule).candidate[0] == 0
    assert [
        s for s in deployed.said if s.startswith("These settings are not chosen. Selection pilot 2 of 3, round 1 is")
    ]


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"fold": 1, "candidate": (2,)}, "which is none that bpfed-adaptive offers"),
        ({"fold": 1}, "which is none that"),
        ({"fold": 4, "candidate": (0,)}, "it is for fold 4"),
        ({"candidate": (0,)}, "which is none that"),
        ({"candidate": (0, -1)}, "which is none that"),
    ],
)
def test_a_site_takes_no_settings_that_its_own_method_does_not_offer(request_, why):
    config = configured(Short(), adapt="auto")
    check_candidate(Request("", "a", 1, candidate=(1, 1)), config, Limits())
    with pytest.raises(RejectedMessage, match=why):
        check_candidate(Request("", "a", 1, **request_), config, Limits())
    off = replace(config, run=replace(config.run, adapt="off"))
    with pytest.raises(RejectedMessage):
        check_candidate(Request("", "a", 1, fold=1, candidate=(0,)), off, Limits())


def test_noise_is_refused():
    config = configured(Short(), adapt="auto", noise=1.0, clip=1.0)
    with pytest.raises(UserError, match="set adapt = 'off' when noise is on"):
        check_deployment(config, 3)
