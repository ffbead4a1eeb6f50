"""Federations: who takes part, by what numbers, and what the server and the clients keep."""

import math

import numpy as np
import pytest
import scenarios
import torch
from scipy import stats
from torch.utils._pytree import tree_flatten

from bpfed._util.errors import UserError
from bpfed.config.settings import Settings
from bpfed.engine.federation import pick_device
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.rng import Purpose
from bpfed.methods import METHODS, BPFed, FedAvg

MANY = tuple(f"person {i}" for i in range(12))


def many(order=None, **settings):
    data = scenarios.classification((3,) * 12, test=1, names=MANY)
    return scenarios.start(FedAvg(), data if order is None else scenarios.reordered(data, order), **settings)


def names(federation, round_):
    return {federation.data.clients[i] for i in federation.participants(round_)}


def test_as_many_take_part_as_were_asked_for_and_nobody_twice():
    federation = many(participants=5)
    for round_ in range(1, 30):
        drawn = federation.participants(round_)
        assert len(drawn) == len(drawn.unique()) == 5
    assert len(many(participants=12).participants(1)) == 12
    assert len(many().participants(1)) == 12  # all of them


def test_everybody_takes_part_equally_often_and_pairs_meet_equally_often():
    federation = many(participants=4)
    taken = np.zeros((3000, 12))
    for round_ in range(3000):
        taken[round_, federation.participants(round_).numpy()] = 1
    assert stats.chisquare(taken.sum(0)).pvalue > 1e-4
    together = (taken.T @ taken)[np.triu_indices(12, 1)]
    assert stats.chisquare(together).pvalue > 1e-4
    # A round says nothing of the next: whoever took part does so again with chance 4/12.
    again = (taken[1:] * taken[:-1]).sum() / taken[:-1].sum()
    assert again == pytest.approx(1 / 3, abs=0.02)


def test_who_takes_part_follows_from_the_seed():
    first, second, other = many(participants=4, seed=1), many(participants=4, seed=1), many(participants=4, seed=2)
    rounds = range(1, 20)
    assert [names(first, r) for r in rounds] == [names(second, r) for r in rounds]
    assert [names(first, r) for r in rounds] != [names(other, r) for r in rounds]


def test_who_takes_part_follows_the_name_and_not_the_position():
    straight, turned = many(participants=4), many(order=range(11, -1, -1), participants=4)
    for round_ in range(1, 20):
        assert names(straight, round_) == names(turned, round_)
        # And they are summed in the same order, so that rounding is the same too.
        first, second = (f.participants(round_).tolist() for f in (straight, turned))
        assert first == [11 - i for i in second]


def test_a_client_more_takes_places_but_changes_no_ranks():
    whole, fewer = many(participants=4), many(order=range(11), participants=4)
    for round_ in range(1, 20):
        assert len(names(whole, round_) & names(fewer, round_)) >= 3


def test_drop_outs_are_those_drawn_less_some_at_the_rate_asked_for():
    sure, shaky = many(participants=8), many(participants=8, drop_rate=0.3)
    returned = 0
    for round_ in range(600):
        assert names(shaky, round_) <= names(sure, round_)
        returned += len(shaky.participants(round_))
    assert returned / (600 * 8) == pytest.approx(0.7, abs=0.03)


def test_keys_follow_seed_round_purpose_and_name():
    federation, turned = many(), many(order=range(11, -1, -1))
    clients = torch.tensor([0, 3])
    key = federation.keys(1, Purpose.WEIGHTS, clients)
    assert torch.equal(key, turned.keys(1, Purpose.WEIGHTS, torch.tensor([11, 8])))
    others = [
        federation.keys(2, Purpose.WEIGHTS, clients),
        federation.keys(1, Purpose.SHUFFLE, clients),
        many(seed=1).keys(1, Purpose.WEIGHTS, clients),
        federation.keys(1, Purpose.WEIGHTS, clients + 1),
    ]
    assert not any((key == other).all(-1).any() for other in others)


def test_the_cosine_schedule_takes_the_step_size_from_all_to_nothing():
    constant, cosine = many(rounds=10), many(rounds=10, schedule="cosine")
    first = torch.tensor([0])
    assert all(float(constant.hparams(r, first)["lr"]) == pytest.approx(1e-3) for r in range(1, 11))
    rates = [float(cosine.hparams(r, first)["lr"]) for r in range(1, 11)]
    assert rates[0] == pytest.approx(1e-3)
    assert rates == sorted(rates, reverse=True)
    assert rates[5] == pytest.approx(5e-4)
    assert rates[-1] == pytest.approx(0.5e-3 * (1 + math.cos(0.9 * math.pi)))


def test_the_schedule_acts_on_the_step_size_alone():
    federation = scenarios.start(BPFed(temperature=0.3), schedule="cosine", rounds=10)
    found = {name: float(value) for name, value in federation.hparams(9, torch.tensor([1])).items()}
    assert found.pop("lr") < federation.method.lr
    assert found == pytest.approx({name: value for name, value in federation.method.hparams().items() if name != "lr"})


@pytest.mark.parametrize(("weighting", "weights"), [("equal", (1, 1)), ("size", (12, 20))])
def test_uploads_count_equally_or_by_size(weighting, weights):
    federation = scenarios.start(BPFed(), weighting=weighting, max_update_ratio=0.0)
    width = federation.model.layout.shared
    uploads = Gaussian(torch.stack([torch.zeros(width), torch.ones(width)]), torch.ones(2, width))
    clients = torch.tensor([0, 2])
    federation.receive(clients, uploads, federation.personal(clients))
    torch.testing.assert_close(federation.shared.mean, torch.full((width,), weights[1] / sum(weights)))


def test_a_round_that_nobody_returned_from_changes_nothing_but_the_count():
    federation = scenarios.start(BPFed())
    before = federation.shared
    federation.receive(torch.tensor([], dtype=torch.int64), (), ())
    assert federation.shared is before
    assert federation.round == 1


def test_a_federation_starts_everybody_from_the_same_weights():
    federation = scenarios.start(BPFed(sigma=0.07))
    personal = federation.personal(torch.arange(len(federation)))
    weights = torch.cat([federation.shared.mean.expand(len(federation), -1), personal.eta.mean], -1)
    assert torch.equal(weights, federation.model.initial.expand_as(weights))
    for state in (federation.shared.sigma, personal.eta.sigma):
        assert (state == 0.07).all()


def test_without_a_module_one_is_made_from_the_seed():
    data = scenarios.classification()
    settings = {"compile": "off", "device": "cpu"}

    def begun(seed):
        from bpfed.engine.federation import Federation

        return Federation.start(FedAvg(), data, Settings(seed=seed, **settings)).shared.weights

    assert torch.equal(begun(1), begun(1))
    assert not torch.equal(begun(1), begun(2))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"participants": 6}, "choose 1 to 5"),
        ({"participants": 0}, "choose 1 to 5"),
        ({"rounds": 0}, "rounds is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"eval_draws": 0}, "eval_draws is 0"),
        ({"drop_rate": 1.0}, "drop_rate is 1.0"),
    ],
)
def test_settings_that_cannot_be_run_are_one_sentence(settings, word):
    with pytest.raises(UserError, match=word):
        scenarios.start(FedAvg(), **settings)


def test_a_method_that_contradicts_itself_is_refused_before_anything_runs():
    with pytest.raises(UserError, match="Dirac"):
        scenarios.start(BPFed(sigma=0.0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("name", ["fedper", "fedrep", "lg-fedavg", "fedbabu", "fedsoul", "pfedvem", "bpfed-population"])
def test_a_split_that_leaves_nothing_personal_is_refused_whatever_it_is_called(name):
    kind = METHODS[name]
    with pytest.raises(
        UserError, match=rf"personal is \[\], which leaves {kind.title} without personal weights; choose"
    ):
        scenarios.start(kind(personal=[]))


@pytest.mark.parametrize("name", ["fedper", "fedrep", "lg-fedavg", "fedbabu"])
def test_a_split_that_leaves_nothing_shared_is_refused_whatever_it_is_called(name):
    kind = METHODS[name]
    said = rf"personal is '\*', which leaves {kind.title} without shared weights; choose some but not all of .*weight"
    with pytest.raises(UserError, match=said):
        scenarios.start(kind(personal="*"))


def test_a_missing_device_is_one_sentence(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="use 'cpu' or 'auto'"):
        pick_device("cuda")
    assert pick_device("auto").type == "cpu"


def test_rounds_are_evaluated_first_last_and_ten_to_twenty_times():
    for rounds in (*range(1, 100), 401):
        settings = Settings(rounds=rounds)
        evaluated = [r for r in range(1, rounds + 1) if settings.evaluated(r)]
        assert {1, rounds} <= set(evaluated)
        assert min(rounds, 11) <= len(evaluated) <= 21
    settings = Settings(rounds=10, eval_every=4)
    assert [r for r in range(1, 11) if settings.evaluated(r)] == [1, 4, 8, 10]


def test_states_are_on_the_device_of_the_federation():
    federation = scenarios.start(BPFed())
    for tensor in tree_flatten((federation.shared, federation.personal(torch.tensor([0]))))[0]:
        assert tensor.device == federation.device
