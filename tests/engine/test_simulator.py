"""Rounds of whole federations: chunks, order, stacking, stores and absences change nothing that they should not."""

import dataclasses

import numpy as np
import pytest
import scenarios
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from bpfed._util.errors import UserError
from bpfed.config.settings import Settings
from bpfed.engine.evaluate import evaluate_clients
from bpfed.engine.federation import Federation
from bpfed.engine.simulator import Simulator
from bpfed.inference.likelihoods import Normal
from bpfed.methods import BPFed, FedAvg
from bpfed.methods.base import rows

METHOD = BPFed(predict="own")


def states(federation):
    """Everything that a federation knows, clients by name."""
    order = torch.tensor(np.argsort(federation.data.clients))
    return [*tree_flatten(federation.shared)[0], *tree_flatten(federation.personal(order))[0]]


def same(first, second, atol=1e-6):
    for a, b in zip(states(first), states(second), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=atol)


def scores(federation):
    """Metrics by client name, and over all."""
    found, clients = evaluate_clients(federation)
    names = [federation.data.clients[i] for i in clients]
    return {
        (metric, name): value
        for metric in found.scores
        for name, value in (*zip(names, found[metric].clients, strict=True), ("pooled", found[metric].pooled))
    }


@pytest.fixture(scope="module")
def plain():
    """Two rounds, four of five unequal clients in each, as they are run by default."""
    return scenarios.run(METHOD, participants=4)


@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_the_number_of_clients_trained_side_by_side_does_not_matter(plain, chunk):
    chunked = scenarios.run(METHOD, participants=4, chunk=chunk)
    same(chunked, plain)
    assert scores(chunked) == pytest.approx(scores(plain), abs=1e-6)


def test_the_order_of_clients_does_not_matter(plain):
    data = scenarios.reordered(scenarios.classification(), [3, 0, 4, 2, 1])
    turned = scenarios.run(METHOD, data, participants=4)
    same(turned, plain)
    assert scores(turned) == pytest.approx(scores(plain), abs=1e-6)


def test_the_store_does_not_matter(plain, tmp_path):
    settings = dataclasses.replace(plain.settings, store="file")
    federation = Federation.start(METHOD, plain.data, settings, scenarios.small_mlp(), folder=tmp_path)
    simulator = Simulator([federation])
    for _ in range(2):
        simulator.round()
    assert (tmp_path / "personal.f32").exists()
    same(federation, plain, atol=0)


def test_another_seed_is_another_run(plain):
    other = scenarios.run(METHOD, participants=4, seed=1)
    assert (other.shared.mean - plain.shared.mean).abs().max() > 1e-4


def test_a_round_is_what_its_clients_uploaded_on_average(plain):
    before = scenarios.start(METHOD, participants=4)
    clients = before.participants(1)
    finished = scenarios.local_round(before)(scenarios.rows_of(before, clients))
    federation = scenarios.start(METHOD, participants=4)
    (info,) = Simulator([federation]).round()
    torch.testing.assert_close(federation.shared.mean, finished.upload.mean.mean(0))
    torch.testing.assert_close(federation.shared.sigma, finished.upload.sigma.mean(0))
    torch.testing.assert_close(federation.personal(clients).eta.mean, finished.personal.eta.mean)
    assert info.participants == 4
    assert info.values["nll"] == pytest.approx(finished.info["nll"].mean().item(), rel=1e-5)
    assert info.values["kl"] == pytest.approx(finished.info["kl"].mean().item(), rel=1e-5)


# --- who is not there -------------------------------------------------------------------------------------------------


def test_drop_outs_change_the_average_and_nothing_else():
    sure, shaky = (scenarios.start(METHOD, participants=5, drop_rate=rate) for rate in (0.0, 0.4))
    returned = shaky.participants(1)
    lost = torch.tensor([i for i in range(5) if i not in returned])
    assert len(returned)
    assert len(lost)
    for federation in (sure, shaky):
        Simulator([federation]).round()
    first = scenarios.start(METHOD)
    for mine, everybody in zip(
        tree_flatten(shaky.personal(returned))[0], tree_flatten(sure.personal(returned))[0], strict=True
    ):
        torch.testing.assert_close(mine, everybody, rtol=1e-6, atol=1e-6)
    for mine, initial in zip(tree_flatten(shaky.personal(lost))[0], tree_flatten(first.personal(lost))[0], strict=True):
        assert torch.equal(mine, initial)
    uploads = scenarios.local_round(first)(scenarios.rows_of(first, returned)).upload
    torch.testing.assert_close(shaky.shared.mean, uploads.mean.mean(0))
    assert (shaky.shared.mean - sure.shared.mean).abs().max() > 1e-4


def test_a_round_with_nobody_left_changes_nothing():
    federation = scenarios.start(METHOD, participants=1, drop_rate=0.9, rounds=50)
    empty = next(r for r in range(1, 50) if not len(federation.participants(r)))
    federation.round = empty - 1
    before = [t.clone() for t in states(federation)]
    (info,) = Simulator([federation]).round()
    assert info.participants == 0
    assert federation.round == empty
    for now, then in zip(states(federation), before, strict=True):
        assert torch.equal(now, then)


def test_a_client_that_never_took_part_predicts_from_its_first_personal_factors_and_the_shared_ones():
    federation = scenarios.run(METHOD, participants=2, rounds=1)
    everyone = torch.arange(5)
    predictive = METHOD.predictive(federation.model, rows(federation.shared, 5), federation.personal(everyone)).weights
    first = federation.model.layout.split(federation.model.initial)[1]
    novel = torch.cat([federation.shared.mean, first])
    taken = set(federation.participants(1).tolist())
    for client in range(5):
        if client in taken:
            own = federation.personal(torch.tensor([client])).own[0]
            assert torch.equal(predictive.mean[client], own.mean[0])
            assert (predictive.mean[client] != novel).any()
        else:
            assert torch.equal(predictive.mean[client], novel)
            assert torch.equal(predictive.sigma[client, -len(first) :], torch.full((len(first),), METHOD.sigma))


# --- several federations at once --------------------------------------------------------------------------------------


def test_federations_side_by_side_are_federations_apart():
    other = scenarios.classification((6, 11, 4), seed=5)
    kinds = [
        (METHOD, None, {}),
        (dataclasses.replace(METHOD, temperature=0.1, lr=2e-3, discount=0.5, sigma=0.1), None, {"seed": 1}),
        (METHOD, other, {"seed": 3, "participants": 2}),
    ]

    def begun():
        return [
            scenarios.start(method, data, scenarios.small_mlp(seed=k), **settings)
            for k, (method, data, settings) in enumerate(kinds)
        ]

    together, apart = begun(), begun()
    simulator = Simulator(together)
    alone = [Simulator([federation]) for federation in apart]
    for _ in range(2):
        infos = simulator.round()
        for info, one in zip(infos, alone, strict=True):
            (expected,) = one.round()
            assert info.participants == expected.participants
            assert info.values == pytest.approx(expected.values, rel=1e-5, nan_ok=True)
    for mine, theirs in zip(together, apart, strict=True):
        same(mine, theirs)
        assert scores(mine) == pytest.approx(scores(theirs), abs=1e-6)


def test_a_federation_that_is_finished_stays_as_it_is_beside_one_that_goes_on():
    short, long = (scenarios.start(FedAvg(), rounds=rounds, seed=rounds) for rounds in (1, 2))
    simulator = Simulator([short, long])
    simulator.round()
    done = short.shared.weights.clone()
    first, second = simulator.round()
    assert first is None
    assert second.participants == 5
    assert torch.equal(short.shared.weights, done)
    same(long, scenarios.run(FedAvg(), rounds=2, seed=2))
    assert simulator.round() == [None, None]


@pytest.mark.parametrize(
    "change",
    [
        {"method": BPFed(rule="moments")},
        {"method": BPFed(estimator="local")},
        {"method": FedAvg()},
        {"method": BPFed.dirac()},
        {"module": scenarios.small_mlp(hidden=7)},
        {"module": nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))},
        {"batch": 6},
        {"epochs": 3},
    ],
    ids=str,
)
def test_runs_that_cannot_be_stacked_are_refused_in_one_sentence(change):
    second = scenarios.start(**({"method": BPFed()} | change))
    with pytest.raises(UserError, match="run the others apart"):
        Simulator([scenarios.start(BPFed()), second])


def test_runs_with_different_known_noise_are_not_stacked():
    data, settings = scenarios.regression(), Settings(compile="off", device="cpu")

    def known(scale):
        return Federation.start(BPFed(), data, settings, scenarios.small_mlp(3, 1), Normal(scale, learnt=False))

    with pytest.raises(UserError, match="run the others apart"):
        Simulator([known(0.1), known(0.2)])


# --- does it learn ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [BPFed(lr=1e-2), FedAvg(lr=1e-2)], ids=lambda m: m.name)
def test_a_federation_learns_to_classify(method):
    data = scenarios.classification((30, 20, 25), test=40)
    federation = scenarios.start(method, data, epochs=5, batch=10, rounds=6)
    simulator = Simulator([federation])
    before, _ = evaluate_clients(federation)
    losses = [simulator.round()[0].values["nll"] for _ in range(6)]
    after, _ = evaluate_clients(federation)
    assert losses[-1] < 0.7 * losses[0]
    assert after["nll"].mean < 0.8 * before["nll"].mean
    assert after["accuracy"].mean > max(0.7, before["accuracy"].mean)


def test_a_regression_runs_from_end_to_end_and_every_client_learns_its_own_noise():
    scale = (0.1, 1.0)
    g = scenarios.generator(2)
    parts = []
    for s in scale:
        x = torch.randn(60, 3, generator=g)
        parts.append((x, x @ torch.tensor([1.0, -0.5, 0.3]) + s * torch.randn(60, generator=g)))
    data = scenarios.regression((60, 60), test=1)
    data = dataclasses.replace(data, train=type(data.train).of(parts), test=type(data.train).of(parts))
    module = scenarios.seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    federation = scenarios.start(BPFed(lr=1e-2, sigma=0.02, draws=1), data, module, epochs=10, batch=20, rounds=12)
    simulator = Simulator([federation])
    before, _ = evaluate_clients(federation)
    for _ in range(12):
        simulator.round()
    after, _ = evaluate_clients(federation)
    assert federation.model.layout.names[-1] == "likelihood.log_scale"
    assert after["nll"].mean < before["nll"].mean - 0.5
    assert after["rmse"].clients == pytest.approx(scale, abs=0.15)
    learnt = federation.personal(torch.arange(2)).eta.mean[:, -1].exp()
    assert learnt.tolist() == pytest.approx(scale, abs=0.15)
