"""A deployed federation gives the numbers of a simulated one."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from federations import Deployed, configured, simulated
from scenarios import classification, counts, images, packed, regression, survival
from torch.utils._pytree import tree_leaves

from bpfed._util.errors import UserError
from bpfed.data.federated import Examples
from bpfed.deploy.server.rounds import method_rule, server_side
from bpfed.engine.federation import Federation
from bpfed.methods import METHODS, BPFed, FedAvg
from bpfed.report import RunRecord
from bpfed.runs import checkpoint
from bpfed.runs.metadata import card, without_examples
from bpfed.runs.run import Run


def same(server, federation, history, tolerance=1e-6):
    for ours, theirs in zip(tree_leaves(server.federation.shared), tree_leaves(federation.shared), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    last, theirs = server.journal.evaluation[0], history[-1][1]
    assert last.record().keys() == theirs.record().keys()
    for name, score in {**theirs.scores, **theirs.more}.items():
        assert last[name].clients == pytest.approx(score.clients, abs=tolerance, nan_ok=True), name
        pooled = math.nan if name in ("aurc", "auroc") else score.pooled  # these need all examples in one order
        assert last[name].pooled == pytest.approx(pooled, abs=tolerance, nan_ok=True), name
    assert last.ece_floor.pooled == pytest.approx(history[-1][1].ece_floor.pooled, abs=tolerance)


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"local"}))
def test_every_method_deploys_with_the_simulators_numbers(name, tmp_path):
    method, data = METHODS[name](), classification(sizes=(7, 12))
    deployed = Deployed(tmp_path, method, data, rounds=2)
    server = deployed.serve()
    same(server, *simulated(method, data, rounds=2))
    assert not any(seen.refused for seen in server.sites.values())


@pytest.mark.parametrize("name", ["bpfed-recipe", "bpfed-population", "fedper"])
def test_members_deploy_too(name, tmp_path):
    method, data = METHODS[name](), classification(sizes=(7, 12))
    deployed = Deployed(tmp_path, method, data, rounds=2, members=2)
    federation, history = simulated(method, data, rounds=2, members=2)
    assert federation.model.members == 2
    server = deployed.serve()
    same(server, federation, history)
    assert RunRecord.read(server.journal.folder).title.startswith(f"{method.title} (2 networks) on ")


@pytest.mark.parametrize(("name", "data"), [("bpfed-recipe", classification(sizes=(7, 12))), ("fedper", regression())])
def test_the_width_of_the_network_is_the_same_everywhere(name, data, tmp_path):
    method, settings = METHODS[name](), {"rounds": 2, "hidden": 7}
    deployed, site = Deployed(tmp_path, method, data, **settings), data.clients[1]
    deployed.sites[site].own = tmp_path / "own"
    federation, history = simulated(method, data, **settings)
    assert federation.model.layout.shapes[0] == (7, *data.input_shape)
    server = deployed.serve()
    same(server, federation, history)
    own, x = Run.load(tmp_path / "own").client(site), data.test.client(1)[0]
    torch.testing.assert_close(
        own.predict(x).numbers, Run(federation).client(site).predict(x).numbers, rtol=0, atol=1e-5
    )


def test_images_that_have_a_network_of_their_own_are_refused(tmp_path):
    with pytest.raises(UserError, match="images of 32 x 32 get a LeNet; leave it out"):
        Deployed(tmp_path, FedAvg(), images(), rounds=1, hidden=7).serve()


def test_a_site_that_is_down_for_a_round(tmp_path):
    data = classification(sizes=(12, 7, 20))
    deployed = Deployed(tmp_path, BPFed(), data)
    federation, history = simulated(BPFed(), data, away={2: ["site b"]})
    node = deployed.node("site b")
    answer = deployed.grid.clients[node]
    deployed.grid.clients[node] = lambda m: None if m.metadata.group_id == "2" else answer(m)
    server = deployed.serve()
    same(server, federation, history)
    assert [r["round"] for r in server.history] == [1, 2, 3, 4, 5]
    assert server.history[0]["tested"] == 2  # it had no chance to test round 1
    for record, (info, evaluation) in list(zip(server.history, history, strict=True))[1:]:
        assert record["participants"] == info.participants
        assert record["train_nll"] == pytest.approx(info.values["nll"], abs=1e-6)
        assert record["accuracy"]["pooled"] == pytest.approx(evaluation["accuracy"].pooled, abs=1e-6)
        assert record["ece"]["pooled"] == pytest.approx(evaluation["ece"].pooled, abs=1e-6)


def test_a_site_that_joins_late_trains_on_all_its_examples(tmp_path):
    """Though it has more of them than any site that was there when the sites told how many they have."""
    data, settings = classification(sizes=(6, 7, 30)), {"rounds": 2, "batch": 50}
    deployed = Deployed(tmp_path, FedAvg(), data, plan={"min_replies": 1}, **settings)
    node = deployed.node("site c")
    answer = deployed.grid.clients.pop(node)

    def joins(federation, uploads, weights):
        deployed.grid.clients[node] = answer
        return method_rule(federation, uploads, weights)

    server = deployed.serve(rule=joins)
    same(server, *simulated(FedAvg(), data, away={1: ["site c"]}, **settings))
    assert [r["participants"] for r in server.history] == [2, 3]


@pytest.mark.parametrize("make", [partial(classification, classes=2), regression])
def test_a_site_without_test_examples_trains_all_the_same(make, tmp_path):
    data = make(sizes=(7, 12, 9))
    parts = [data.test.client(i) for i in range(3)]
    parts[1] = tuple(t[:0] for t in parts[1])
    data = replace(data, test=Examples.of(parts))
    deployed = Deployed(tmp_path, FedAvg(), data, rounds=2, calibration=0.3)
    name = data.clients[1]
    deployed.sites[name].own = tmp_path / "own"
    server = deployed.serve()
    same(server, *simulated(FedAvg(), data, rounds=2, calibration=0.3, sets="client"))
    assert [(r["participants"], r["tested"], r["untested"]) for r in server.history] == [(3, 2, 1)] * 2
    assert Run.load(tmp_path / "own").client(name).predict(data.train.x[:2]).scores is not None


def test_a_site_fits_no_baselines_to_its_rows_alone(tmp_path):
    data = classification(sizes=(7, 12))
    deployed = Deployed(tmp_path, FedAvg(), data, rounds=1)
    deployed.sites[data.clients[1]].own = tmp_path / "own"
    deployed.serve()
    assert RunRecord.read(tmp_path / "own").evaluation.keys() >= {"clients", "reliability"}
    assert "baselines" not in RunRecord.read(tmp_path / "own").evaluation


def test_sites_that_all_lack_test_examples_are_told_so(tmp_path):
    data = classification(sizes=(7, 12), test=0)
    with pytest.raises(UserError, match="All rounds are done, but no site tells its scores"):
        Deployed(tmp_path, FedAvg(), data, rounds=1).serve()


def test_a_calibration_temperature_that_is_given(tmp_path):
    data = classification(sizes=(60, 70))
    deployed = Deployed(tmp_path, FedAvg(), data, rounds=2, calibration_temperature=0.6)
    same(deployed.serve(), *simulated(FedAvg(), data, rounds=2, calibration_temperature=0.6))


def test_regression_weighted_by_size(tmp_path):
    deployed = Deployed(tmp_path, BPFed(), regression(), weighting="size", rounds=3)
    same(deployed.serve(), *simulated(BPFed(), regression(), weighting="size", rounds=3))


@pytest.mark.parametrize(
    "data",
    [make(sizes=(60, 70)) for make in (classification, regression, counts, survival, partial(packed, "multilabel"))],
    ids=lambda data: data.task,
)
def test_calibrated_sets_and_intervals(data, tmp_path):
    deployed = Deployed(tmp_path, FedAvg(), data, rounds=2, calibration=0.3)
    server = deployed.serve()
    federation, history = simulated(FedAvg(), data, rounds=2, calibration=0.3, sets="client")
    same(server, federation, history)
    assert server.history[-1]["coverage"]["pooled"] > 0.5
    told, wanted = RunRecord.read(server.journal.folder).evaluation, Run(federation).detail()
    assert told.keys() == wanted.keys() - {
        "fitted_temperature",
        "classes",
    }  # which take every probability, and sites tell sums alone
    assert told["fewest_calibration"] == wanted["fewest_calibration"]
    for row, theirs in zip(told["clients"], wanted["clients"], strict=True):
        assert row == pytest.approx(theirs, abs=1e-6)


def test_a_method_that_shares_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="nothing to deploy"):
        Deployed(tmp_path, METHODS["local"](), rounds=1).serve()


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("make", [classification, regression])
def test_simulation_server_and_loaded_run_have_the_same_model_to_the_bit(make, members, tmp_path):
    """All are made by one function, of which the examples see nothing but their shape."""
    data = make()
    config = configured(BPFed(), hidden=6, members=members, seed=3)
    federation = Federation.start(config.method, data, config.run)
    known = {"shape": list(data.input_shape), "task": data.task, "classes": data.classes}
    (tmp_path / "model").write_bytes(checkpoint.model_bytes(federation.model))
    args = config.method, config.run
    loaded = checkpoint.load_model(tmp_path / "model", None, None, without_examples(card(data)), *args)
    for model in (server_side(config, data.clients, known).model, loaded):
        assert torch.equal(model.initial, federation.model.initial)
        assert (model.layout, model.likelihood) == (federation.model.layout, federation.model.likelihood)
        assert (model.local, model.output_bias) == (federation.model.local, federation.model.output_bias)
