"""Classes that a client has never seen: predicted no more often than its labels say, whoever is stacked with it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import scenarios
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import bpfed
from bpfed.config.settings import Settings
from bpfed.data.federated import Examples
from bpfed.engine.federation import Federation
from bpfed.inference.likelihoods import Categorical, Normal
from bpfed.methods import Population, Recipe
from bpfed.methods.base import rows
from bpfed.methods.variational import class_biases, corrections, noted
from bpfed.nn.model import Model

SETTINGS = Settings(rounds=4, epochs=2, batch=5, eval_draws=50, device="cpu", compile="off")
METHODS = pytest.mark.parametrize("method", [Recipe, Population])


def few_of_one(sizes=(40, 40, 24)):
    """Three clients; the first one has no example of class 2, neither in training nor in the test."""
    data = scenarios.classification(sizes=sizes)

    def without(part):
        clients = [part.client(i) for i in range(len(data))]
        x, y = clients[0]
        return Examples.of([(x[y != 2], y[y != 2]), *clients[1:]])

    return replace(data, train=without(data.train), test=without(data.test))


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=3, max_size=3), min_size=1, max_size=4),
    st.floats(0.01, 10.0),
    st.integers(1, 50),
)
def test_what_is_lowered_brings_a_class_to_the_rule_of_succession_or_of_good_and_turing(counts, extra, steps):
    """And nothing else is: no class that the client has, none that is rare enough, nobody who has no example."""
    counts = torch.tensor(counts, dtype=torch.float32)
    size = counts.sum(-1, keepdim=True)
    probable = torch.tensor([0.5, 0.02, 1e-6])
    seen = torch.zeros(len(counts), 4)
    for _ in range(steps):
        seen = noted(seen, size * probable - torch.where(counts > 0, counts, 0.0))
    found = corrections(seen, counts, extra)
    once, new = ((counts == n).sum(-1, keepdim=True) for n in (1, 0))
    rule = torch.maximum(extra / (3 * (size + extra)), once / (new.clamp(min=1) * (size + extra).clamp(min=1.0)))
    lowered = (counts == 0) & (size > 0) & (probable > rule)
    assert torch.equal(found < 0.0, lowered)
    # An example at which all classes have their mean probability comes out at the rule, where there is anything left to give.
    shares = torch.where(lowered, 0.0, probable.expand_as(counts)).sum(-1, keepdim=True)
    weights = torch.where(lowered, probable * found.exp(), probable)
    rest = 1.0 - torch.where(lowered, probable.expand_as(counts), 0.0).sum(-1, keepdim=True)
    after = weights / (weights.sum(-1, keepdim=True) + rest - shares)
    torch.testing.assert_close(after[lowered], rule.expand_as(after)[lowered], atol=1e-5, rtol=1e-3)
    assert not corrections(torch.zeros_like(seen), counts, extra).any()


def test_where_the_biases_are():
    def where(module, likelihood, personal="head"):
        return class_biases(Model.of(module, likelihood, torch.zeros(2, 4), personal))

    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    assert where(network, Categorical(3)) == slice(24, 27)
    nothing = slice(0, 0)
    assert where(nn.Linear(4, 1), Normal(1.0)) == nothing
    assert where(network, Categorical(3), "0") == nothing  # other biases, eight of them
    assert where(network, Categorical(3), "2.*") == slice(24, 27)  # the head by another name
    assert where(network, Categorical(3), "all") == slice(64, 67)
    assert where(network, Categorical(3), "none") == nothing
    assert where(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3, bias=False)), Categorical(3)) == nothing


class Scaled(nn.Module):
    """Multiplies what it gets."""

    def forward(self, x):
        return 10.0 * x


@pytest.mark.parametrize("last", [Scaled(), nn.Softmax(-1), nn.ReLU(), nn.Linear(3, 3, bias=False)])
def test_a_bias_that_is_no_logit_is_left_alone(last):
    module = nn.Sequential(nn.Linear(4, 3), last)
    assert class_biases(Model.of(module, Categorical(3), torch.randn(2, 4), "0")) == slice(0, 0)
    shifted = nn.Sequential(
        nn.Linear(4, 3), nn.LogSoftmax(-1)
    )  # which takes away what it is given, but not to each class alike
    assert class_biases(Model.of(shifted, Categorical(3), torch.randn(2, 4), "0")) == slice(0, 0)


@pytest.mark.parametrize(("last", "level"), [(nn.ReLU(), 10.0), (nn.ReLU6(), 2.0), (nn.Hardtanh(-5.0, 5.0), 0.0)])
def test_a_bias_is_no_logit_if_it_only_looks_so_at_the_examples_it_is_tried_with(last, level):
    linear = nn.Linear(4, 3)
    nn.init.constant_(linear.bias, level)
    nn.init.zeros_(linear.weight)
    assert class_biases(Model.of(nn.Sequential(linear, last), Categorical(3), torch.randn(2, 4), "0")) == slice(0, 0)


def without_biases():
    return scenarios.seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3, bias=False)))


@METHODS
def test_of_a_head_without_biases_nothing_is_kept(method, tmp_path):
    """So that no row of a file of states is longer than another."""
    settings = replace(SETTINGS, store="file", participants=2)
    run = bpfed.fit(method(), few_of_one(), model=without_biases(), settings=settings, out=tmp_path / "a")
    found = run.federation.personal(torch.arange(3))
    assert found.lowered.shape == (3, 0)
    assert found.head.mean.isfinite().all()


def test_members_are_corrected_each_by_itself():
    data, settings = few_of_one(), replace(SETTINGS, members=2, rounds=1)
    run = bpfed.fit(Recipe(), data, settings=settings)
    first, second = run.federation.personal(torch.arange(3)).lowered.unflatten(1, (2, 3)).unbind(1)
    for lowered in (first, second):
        assert (lowered < 0.0).tolist() == [[False, False, True], [False] * 3, [False] * 3]
    assert first[0, 2] != second[0, 2]
    weights = run.federation.method.predictive(
        run.federation.model, rows(run.federation.shared, 3), run.federation.personal(torch.arange(3))
    ).weights.mean
    head = run.federation.personal(torch.arange(3)).head.mean
    moved = run.federation.model.layout.apart(weights)[:, :, -3:] - head[:, -6:].unflatten(1, (2, 3))
    torch.testing.assert_close(moved, torch.stack([first, second], 1))


def uncorrected(run):
    """The same run, predicting without what is added to its biases."""
    state, everyone = run.federation, torch.arange(3)
    kept = state.personal(everyone)
    state.store.put(everyone, kept._replace(lowered=torch.zeros_like(kept.lowered)))
    return run


@METHODS
def test_predictions_at_the_clients_examples_are_as_rare_as_it_says(method, monkeypatch):
    """The model is asked again here; in training the gradient of the bias told it. Steps are so small that nothing moves."""
    monkeypatch.setattr(method, "start_sigma", 1e-3)
    data, settings = few_of_one(), replace(SETTINGS, rounds=1, batch=64)
    run = bpfed.fit(method(lr=1e-7), data, settings=settings)
    x = data.train.client(0)[0]
    after, others = (
        run.client(data.clients[0]).predict(x).probs,
        [run.client(c).predict(x).probs for c in data.clients[1:]],
    )
    plain = uncorrected(run)
    before = plain.client(data.clients[0]).predict(x).probs
    rule, found = 1.0 / (3 * (len(x) + 1)), float(before[:, 2].mean())
    odds = [float((p[:, 2] / p[:, 0]).mean()) for p in (before, after)]
    assert odds[1] / odds[0] == pytest.approx(rule * (1 - found) / (found * (1 - rule)), rel=0.02)
    assert found > 5.0 * rule
    assert 0.5 * rule < float(after[:, 2].mean()) < 2.0 * rule  # exactly so, where it is the same at every example
    for who, corrected in zip(data.clients[1:], others, strict=True):  # who have all classes
        torch.testing.assert_close(plain.client(who).predict(x).probs, corrected, atol=1e-6, rtol=0)


def test_what_is_counted_are_the_examples_that_a_client_trains_on(monkeypatch):
    data, seen = few_of_one(), []
    finish = Recipe.finish

    def watched(self, model, local, hparams):
        seen.append(hparams["counts"])
        return finish(self, model, local, hparams)

    state = Federation.start(Recipe(), data, SETTINGS)
    monkeypatch.setattr(Recipe, "finish", watched)
    done = scenarios.local_round(state)(scenarios.rows_of(state, [2, 0, 1]), state.method.phases(1))
    wanted = [torch.bincount(data.train.client(i)[1], minlength=3).tolist() for i in (2, 0, 1)]
    assert seen[0].tolist() == wanted
    assert wanted[1][2] == 0
    assert (done.personal.lowered < 0.0).tolist() == [[False] * 3, [False, False, True], [False] * 3]


def test_counting_depends_on_no_chunk():
    one, all_ = (bpfed.fit(Recipe(), few_of_one(), settings=replace(SETTINGS, chunk=c)) for c in (1, 3))
    assert one.history[-1]["nll"]["pooled"] == pytest.approx(all_.history[-1]["nll"]["pooled"], abs=1e-6)


@METHODS
def test_a_class_that_a_client_has_never_seen_is_less_probable_there(method, monkeypatch):
    """And a newcomer's head is corrected as a client's is."""
    monkeypatch.setattr(method, "unseen_pseudocount", 0.3)
    data = few_of_one()
    run = bpfed.fit(method(), data, settings=SETTINGS)
    newcomer, x = run.adapt(*data.train.client(0), steps=40), data.test.client(0)[0]
    assert (newcomer.run.federation.personal(torch.tensor([0])).lowered < 0.0).tolist() == [[False, False, True]]
    few = float(run.client(data.clients[0]).predict(x).probs[:, 2].mean())
    assert few < 0.8 * float(uncorrected(run).client(data.clients[0]).predict(x).probs[:, 2].mean())


def test_a_newcomer_from_before_loads(tmp_path):
    """Its file has no entry for what is empty, and no hash of itself."""
    data, path = few_of_one(), tmp_path / "new.safetensors"
    run = bpfed.fit(Recipe(), data, model=without_biases(), settings=SETTINGS)
    newcomer = run.adapt(*data.train.client(0), steps=5, name="new")
    newcomer.save(path)
    with safe_open(path, "pt") as file:
        words, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    client = {key: value for key, value in json.loads(words["client"]).items() if key != "sha256"}
    kept = {key: value for key, value in tensors.items() if value.numel()}
    save_file(kept, path, words | {"client": json.dumps(client)})
    x = data.test.client(0)[0]
    assert torch.equal(run.newcomer(path).predict(x).probs, newcomer.predict(x).probs)
