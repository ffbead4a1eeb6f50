"""A round of local training: clients side by side are clients alone, and what travels is shared."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import pytest
import scenarios
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map

from bpfed.config.settings import Settings
from bpfed.engine.federation import Federation
from bpfed.engine.local import LocalRound
from bpfed.engine.simulator import Simulator
from bpfed.inference.predictive import PointPredictive
from bpfed.methods import BPFed, FedAvg
from bpfed.methods.base import Finished, Initial, Method, Phase


def leaves(state):
    return tree_flatten(state)[0]


def same(first, second, atol=1e-6):
    for a, b in zip(leaves(first), leaves(second), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=atol)


def with_dropout():
    return scenarios.seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.ReLU(), nn.Linear(6, 3)))


METHODS = {
    "bpfed": BPFed(),
    "bpfed local": BPFed(estimator="local", keep_adam=True),
    "fedavg": FedAvg(),
}


@pytest.mark.parametrize("name", list(METHODS))
def test_unequal_clients_side_by_side_are_each_trained_alone(name):
    # From one example, which is a fraction of a batch, to several batches, the last of them short.
    federation = scenarios.start(METHODS[name], scenarios.classification((13, 1, 20)), with_dropout())
    train = scenarios.local_round(federation)
    together = train(scenarios.rows_of(federation, range(3)))
    for client in range(3):
        alone = train(scenarios.rows_of(federation, [client]))
        same(alone, tree_map(lambda t, c=client: t[c : c + 1], together))


@pytest.mark.parametrize("name", ["bpfed local", "fedavg"])
def test_a_client_trains_the_same_whatever_its_padded_width(name):
    # A site that knows nothing of the others pads to its own size.
    federation = scenarios.start(METHODS[name], scenarios.classification((13, 4)), with_dropout(), batch=10)
    narrow, wide = (scenarios.local_round(federation, width) for width in (4, 10))
    second = scenarios.rows_of(federation, [1])
    same(narrow(second), wide(second))


def test_clients_are_taken_in_any_order():
    federation = scenarios.start(BPFed(), scenarios.classification((13, 1, 7)))
    train = scenarios.local_round(federation)
    straight = train(scenarios.rows_of(federation, [0, 1, 2]))
    turned = train(scenarios.rows_of(federation, [2, 0, 1]))
    same(turned, tree_map(lambda t: t[[2, 0, 1]], straight))


def test_training_starts_from_what_it_is_given_and_leaves_that_alone():
    federation = scenarios.start(BPFed(), scenarios.classification((9, 7)))
    rows = scenarios.rows_of(federation, [0, 1])
    before = tree_map(torch.clone, (rows.shared, rows.personal, rows.hparams))
    train = scenarios.local_round(federation)
    first = train(rows)
    same((rows.shared, rows.personal, rows.hparams), before, atol=0)
    same(train(rows), first, atol=0)


def test_the_reported_loss_is_the_mean_over_steps_of_the_batches_own():
    federation = scenarios.start(FedAvg(lr=0.0), scenarios.classification((10, 4, 1)), epochs=3, batch=5)
    found = scenarios.local_round(federation)(scenarios.rows_of(federation, [0, 1, 2])).info["nll"]
    model = federation.model
    for client in range(3):
        # Nothing moves, so an epoch's mean over its equal batches is the mean over the client's examples.
        x, y = federation.data.train.client(client)
        expected = F.cross_entropy(model.outputs(model.initial, x), y)
        torch.testing.assert_close(found[client], expected, rtol=1e-5, atol=1e-6)


def test_an_upload_is_no_view_of_the_personal_numbers():
    # Saving or sending a view takes the whole of its memory along.
    federation = scenarios.start(BPFed())
    finished = scenarios.local_round(federation)(scenarios.rows_of(federation, [0, 1]))
    for tensor in leaves(finished.upload):
        assert tensor.untyped_storage().nbytes() == 4 * 2 * federation.model.layout.shared


# --- what the engine does with a method's phases and states -----------------------------------------------------------


class Counts(NamedTuple):
    """Steps in each phase, the sum of all keys seen, and the values of one and two steps ago."""

    head: torch.Tensor
    body: torch.Tensor
    seen: torch.Tensor
    now: torch.Tensor
    before: torch.Tensor


class Empty(NamedTuple):
    """Nothing."""


@dataclass(frozen=True)
class Counter(Method):
    """Trains nothing, but counts its steps, in two phases."""

    name: ClassVar[str] = "counter"

    def phases(self, epochs):
        return Phase("head", 1), Phase("body", epochs)

    def init(self, model):
        return Initial(Empty(), Counts(*(torch.zeros(1) for _ in range(5))))

    def begin(self, model, shared, personal, hparams):
        return personal

    def step(self, model, local, batch, hparams, phase):
        one = torch.ones_like(local.head)
        return Counts(
            local.head + one if phase == "head" else local.head,
            local.body + one if phase == "body" else local.body,
            local.seen + batch.mask.sum(-1, keepdim=True),
            local.now + one,
            local.now,  # what the step before left, as momentum methods keep it
        ), batch.mask.sum(-1)

    def finish(self, model, local, hparams):
        return Finished(Empty(), local, {})

    def aggregate(self, shared, uploads, weights):
        return shared

    def predictive(self, model, shared, personal):
        return PointPredictive(model.initial)


@pytest.mark.parametrize("sizes", [(13, 1, 7), (5, 5, 5)], ids=["ragged", "equal"])
def test_every_client_takes_the_steps_of_every_phase_and_hands_states_on(sizes):
    federation = scenarios.start(Counter(), scenarios.classification(sizes), epochs=2, batch=5)
    found = scenarios.local_round(federation)(scenarios.rows_of(federation, range(3))).personal
    per_epoch = [-(-size // 5) for size in sizes]
    assert found.head.flatten().tolist() == per_epoch
    assert found.body.flatten().tolist() == [2 * k for k in per_epoch]
    assert found.seen.flatten().tolist() == [3 * size for size in sizes]
    assert found.now.flatten().tolist() == [3 * k for k in per_epoch]
    assert found.before.flatten().tolist() == [3 * k - 1 for k in per_epoch]


def test_a_batch_that_nobody_fills_costs_nothing(monkeypatch):
    seen, plan = [], LocalRound._plan

    def watched(self, rows, phase, before, longest, width):
        seen.append((longest, width))
        return plan(self, rows, phase, before, longest, width)

    monkeypatch.setattr(LocalRound, "_plan", watched)
    data = scenarios.classification(sizes=(12, 7))
    Simulator([Federation.start(FedAvg(), data, Settings(rounds=1, epochs=1, batch=10**7, device="cpu"))]).round()
    assert set(seen) == {(12, 12), (8, 8)}


@pytest.mark.parametrize(
    ("batch", "longest", "width"), [(5, 0, 5), (50, 0, 12), (50, 30, 30), (50, 3, 12), (20, 30, 20)]
)
def test_batches_are_as_wide_as_the_largest_client_here_or_elsewhere_fills_them(batch, longest, width):
    federation = scenarios.start(FedAvg(), scenarios.classification(sizes=(7, 12)), batch=batch, epochs=3)
    made = LocalRound.of(
        federation.method, federation.model, federation.data.train, federation.settings, longest=longest
    )
    assert (made.width, made.batch, made.epochs, made.compiled) == (width, batch, 3, False)
