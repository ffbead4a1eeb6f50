"""Levels of classes: a head starts with the shares of its client's own labels, and is left alone where these say nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import scenarios
import torch
from hypothesis import given
from hypothesis import strategies as st

import bpfed
from bpfed.config.settings import Settings
from bpfed.data.federated import Examples
from bpfed.engine.federation import Federation
from bpfed.methods import Population, Recipe, recipe
from bpfed.methods.variational import class_biases, class_log_prior

SETTINGS = Settings(rounds=3, epochs=2, batch=5, eval_draws=50, device="cpu", compile="off")
METHODS = pytest.mark.parametrize("method", [Recipe, Population])


def mostly_one(first=60, of_one=57):
    """Three clients, the first with nearly all of its examples of class 0, in training and in the test."""
    data = scenarios.classification(sizes=(400, 40, 24), test=400)

    def skewed(part, size, share):
        clients = [part.client(i) for i in range(len(data))]
        x, y = clients[0]
        taken = torch.cat(
            [torch.where(y == 0)[0][: int(size * share)], torch.where(y == 1)[0][: int(size * (1 - share))]]
        )
        return Examples.of([(x[taken], y[taken]), *clients[1:]])

    share = of_one / first
    return replace(data, train=skewed(data.train, first, share), test=skewed(data.test, first, share))


@given(st.lists(st.lists(st.integers(0, 500), min_size=4, max_size=4), min_size=1, max_size=4))
def test_levels_are_logarithms_of_shares(counts):
    counts = torch.tensor(counts, dtype=torch.float32)
    found = class_log_prior(counts)
    for own, level in zip(counts, found, strict=True):
        seen = own > 0
        assert not level[~seen].any()
        assert float(level.sum()) == pytest.approx(0.0, abs=1e-5)
        wanted = (own[seen] + 1.0).log()
        torch.testing.assert_close(level[seen].diff(), wanted.diff(), atol=1e-5, rtol=1e-5)


@given(st.integers(1, 10_000), st.lists(st.booleans(), min_size=5, max_size=5))
def test_equal_shares_say_nothing_to_the_last_bit(each, has):
    assert not class_log_prior(torch.tensor([[float(each if own else 0) for own in has]])).any()


@METHODS
@pytest.mark.parametrize("members", [1, 2])
def test_a_head_starts_there_and_its_prior_is_around_it(method, members):
    federation = Federation.start(method(), mostly_one(), replace(SETTINGS, members=members))
    model, made = federation.model, federation.method
    local = federation.training_rows(torch.arange(3))
    labels = [federation.data.train.client(i)[1] for i in range(3)]
    counts = torch.stack([torch.bincount(y, minlength=3) for y in labels]).float()
    at, wanted = class_biases(model), class_log_prior(counts).repeat(1, members)
    assert float(wanted[0].max() - wanted[0].min()) > 2.0
    begun = made.begin(model, local.shared, local.personal, local.hparams | {"counts": counts})
    plain = made.begin(model, local.shared, local.personal, local.hparams)
    heads = [model.layout.split(state.q.mean)[1] for state in (begun, plain)]
    torch.testing.assert_close((heads[0] - heads[1])[:, at], wanted)
    assert torch.equal(
        heads[0].index_fill(1, torch.arange(at.start, at.stop), 0.0),
        heads[1].index_fill(1, torch.arange(at.start, at.stop), 0.0),
    )
    priors = [model.layout.split(state.prior.mean)[1][:, at] for state in (begun, plain)]
    moved = torch.zeros_like(wanted) if method is Population else wanted  # whose prior is that of all clients
    torch.testing.assert_close(priors[0] - priors[1], moved)
    # From the second round on a head goes on from where it was.
    later = local.personal._replace(steps=torch.ones_like(local.personal.steps))
    assert torch.equal(
        made.begin(model, local.shared, later, local.hparams | {"counts": counts}).q.mean,
        made.begin(model, local.shared, later, local.hparams).q.mean,
    )


@METHODS
def test_where_classes_are_equally_frequent_nothing_changes(method, monkeypatch):
    """Not one bit: what was measured on the paper's cells stays what it is."""
    data = bpfed.data.load("digits", clients=3, seed=0)

    def balanced(part):
        clients = []
        for i in range(len(data)):
            x, y = part.client(i)
            least = min(int((y == c).sum()) for c in y.unique())
            taken = torch.cat([torch.where(y == c)[0][:least] for c in y.unique()])
            clients.append((x[taken], y[taken]))
        return Examples.of(clients)

    data = replace(data, train=balanced(data.train))
    found = bpfed.fit(method(), data, settings=SETTINGS)
    monkeypatch.setattr(recipe, "class_log_prior", torch.zeros_like)
    plain = bpfed.fit(method(), data, settings=SETTINGS)
    personal = [run.federation.store.get(torch.arange(3)).head.mean for run in (found, plain)]
    assert torch.equal(personal[0], personal[1])
    assert found.history[-1]["nll"] == plain.history[-1]["nll"]


@METHODS
def test_a_client_of_nearly_one_class_knows_so_after_a_short_run(method, monkeypatch):
    """Where inputs say little, as those of patients do."""
    data = mostly_one()
    blurred = [
        replace(part, x=0.3 * part.x + torch.randn(part.x.shape, generator=scenarios.generator(1)))
        for part in (data.train, data.test)
    ]
    data = replace(data, train=blurred[0], test=blurred[1])
    with_ = bpfed.fit(method(), data, settings=SETTINGS).evaluation[0].scores["nll"].clients[0]
    monkeypatch.setattr(recipe, "class_log_prior", torch.zeros_like)
    without = bpfed.fit(method(), data, settings=SETTINGS).evaluation[0].scores["nll"].clients[0]
    assert float(with_) < float(without)
