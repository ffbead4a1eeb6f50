"""Evaluation: every client by its own predictive on its own test examples, however they are grouped."""

import dataclasses

import pytest
import scenarios
import torch
from torch.nn import functional as F

from bpfed._util.errors import UserError
from bpfed.data.federated import Examples
from bpfed.engine import evaluate as evaluation
from bpfed.engine.evaluate import evaluate_clients, evaluated_clients
from bpfed.inference.predictive import classify
from bpfed.inference.rng import Purpose
from bpfed.methods import BPFed, FedAvg
from bpfed.methods.base import rows

METHOD = BPFed(sigma=0.3)


def uneven(sizes=(6, 1, 0, 9, 3)):
    """Clients with these numbers of test examples."""
    data = scenarios.classification()
    most = data.test.client
    return dataclasses.replace(
        data,
        test=Examples.of([tuple(t.repeat(2, *(1,) * (t.ndim - 1))[:n] for t in most(i)) for i, n in enumerate(sizes)]),
    )


def different_clients(data, **settings):
    """A federation whose clients all have weights of their own, without training it."""
    federation = scenarios.start(METHOD, data, **settings)
    everyone = torch.arange(len(federation))
    personal = federation.personal(everyone)
    g = scenarios.generator(3)
    eta = personal.eta._replace(mean=personal.eta.mean + torch.randn(personal.eta.mean.shape, generator=g))
    federation.store.put(everyone, personal._replace(eta=eta))
    return federation


def test_scores_are_those_of_every_client_predicting_its_own_examples_alone():
    federation = different_clients(uneven())
    found, clients = evaluate_clients(federation)
    assert clients.tolist() == [0, 1, 3, 4]  # the third has nothing to be tested on
    assert found.sizes.tolist() == [6, 1, 9, 3]
    losses, right = [], []
    for place, client in enumerate(clients):
        one = client[None]
        x, y = federation.data.test.client(int(client))
        predictive = METHOD.predictive(federation.model, rows(federation.shared, 1), federation.personal(one))
        key = federation.keys(0, Purpose.EVALUATION, one)
        probs = classify(federation.model, predictive, x[None], key, federation.settings.eval_draws).probs[0]
        losses.append(F.nll_loss(probs.log(), y, reduction="none"))
        right.append((probs.argmax(-1) == y).float())
        assert found["nll"].clients[place] == pytest.approx(losses[-1].mean().item(), rel=1e-5)
        assert found["accuracy"].clients[place] == pytest.approx(right[-1].mean().item())
    assert found["nll"].pooled == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert found["accuracy"].pooled == pytest.approx(torch.cat(right).mean().item())


@pytest.mark.parametrize("block", [1, 40, 200])
def test_scores_do_not_depend_on_how_many_examples_are_held_at_a_time(block, monkeypatch):
    federation = different_clients(uneven())
    whole, _ = evaluate_clients(federation)
    monkeypatch.setattr(evaluation, "BLOCK", block)
    blocked, _ = evaluate_clients(federation)
    for metric in whole.scores:
        assert blocked[metric].clients == pytest.approx(whole[metric].clients, abs=1e-6)
        assert blocked[metric].pooled == pytest.approx(whole[metric].pooled, abs=1e-6)


def test_regressions_do_not_depend_on_how_many_examples_are_held_at_a_time(monkeypatch):
    federation = scenarios.start(METHOD, scenarios.regression())
    whole, _ = evaluate_clients(federation)
    monkeypatch.setattr(evaluation, "BLOCK", 1)
    blocked, _ = evaluate_clients(federation)
    assert set(whole.scores) == {"rmse", "nll", "ece"}
    for metric in whole.scores:
        assert blocked[metric].clients == pytest.approx(whole[metric].clients, abs=1e-5)


def test_evaluation_repeats_and_changes_nothing():
    federation = different_clients(uneven())
    before = federation.personal(torch.arange(5)).eta.mean.clone()
    first, second = evaluate_clients(federation)[0], evaluate_clients(federation)[0]
    assert first.record() == second.record()
    assert torch.equal(federation.personal(torch.arange(5)).eta.mean, before)


def test_the_clients_evaluated_are_drawn_once_by_name():
    names = tuple(f"person {i}" for i in range(12))
    data = scenarios.classification((3,) * 12, test=1, names=names)
    federation = scenarios.start(FedAvg(), data, eval_clients=5)
    turned = scenarios.start(FedAvg(), scenarios.reordered(data, range(11, -1, -1)), eval_clients=5)
    chosen = {federation.data.clients[i] for i in evaluated_clients(federation)}
    assert len(chosen) == 5
    federation.round = 7
    assert {federation.data.clients[i] for i in evaluated_clients(federation)} == chosen
    assert {turned.data.clients[i] for i in evaluated_clients(turned)} == chosen
    assert len(evaluate_clients(federation)[0]["nll"].clients) == 5
    other = scenarios.start(FedAvg(), data, eval_clients=5, seed=1)
    assert {other.data.clients[i] for i in evaluated_clients(other)} != chosen


def test_clients_are_drawn_among_those_with_test_examples():
    names = tuple(f"person {i}" for i in range(12))
    data = scenarios.classification((3,) * 12, test=1, names=names)
    everyone = evaluated_clients(scenarios.start(FedAvg(), data, eval_clients=12)).tolist()
    for tested in (7, 11):
        x, y = data.test.client(tested)
        alone = Examples.of([(x, y) if i == tested else (x[:0], y[:0]) for i in everyone])
        federation = scenarios.start(FedAvg(), dataclasses.replace(data, test=alone), eval_clients=1)
        found, clients = evaluate_clients(federation)
        assert clients.tolist() == [tested]
        assert found.sizes.tolist() == [1]
    whole = scenarios.start(FedAvg(), data, eval_clients=5)
    assert evaluate_clients(whole)[1].tolist() == evaluated_clients(whole).tolist()


def test_without_any_test_example_there_is_one_sentence():
    with pytest.raises(UserError, match="No client of 'small' has a test example"):
        evaluate_clients(scenarios.start(FedAvg(), uneven((0, 0, 0, 0, 0))))
