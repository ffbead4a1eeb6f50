"""Per-FedAvg: the gradient through a client's own step against autograd, tuning on own training data, and its limits."""

from dataclasses import replace

import pytest
import scenarios
import torch
from torch import nn
from torch.autograd.functional import hvp
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from bpfed._util.errors import UserError
from bpfed.engine.batching import plan
from bpfed.inference.estimators import Batch
from bpfed.methods import FedAvg, PerFedAvg
from bpfed.methods.base import TUNE, Weights, rows
from bpfed.methods.perfedavg import parts
from bpfed.nn.kernels.conv import conv2d

CLIENTS, STEPS = 2, 6


def doubled(batch):
    return batch._replace(x=batch.x.double(), mask=batch.mask.double(), size=batch.size.double())


def batches(used=([7, 2], [5, 8], [1, 3])):
    """Full, ragged and tiny batches in turn, in float64."""
    return [doubled(scenarios.random_batch(CLIENTS, 8, seed=t, used=used[t % len(used)])) for t in range(STEPS)]


def small():
    """A model, and what the server sends to each client."""
    model = scenarios.model_of(scenarios.smooth(), personal="none")
    g = scenarios.generator(3)
    return model, model.initial + 0.3 * torch.randn(CLIENTS, len(model.initial), generator=g, dtype=torch.float64)


def begun(method, model, sent):
    nobody = tree_map(lambda t: t.double(), rows(method.init(model).personal, CLIENTS))
    return method.begin(model, Weights(sent), nobody, scenarios.hparams(method, CLIENTS, torch.float64))


def trained(method, model, sent, todo, phase="all"):
    local = begun(method, model, sent)
    losses = []
    for batch in todo:
        local, loss = method.step(model, local, batch, scenarios.hparams(method, CLIENTS, torch.float64), phase)
        losses.append(loss)
    return local, torch.stack(losses)


def loss_of(model, batch, client, keep):
    """Mean −log p of some examples of a client, as a function of its weights."""
    module, x, y = scenarios.smooth().double(), batch.x[client][keep], batch.y[client][keep]
    return lambda w: F.cross_entropy(functional_call(module, model.layout.unflatten(w), (x,)), y)


# --- the Hessian ------------------------------------------------------------------------------------------------------


class Stacked(nn.Conv2d):
    """A convolution as the engine does it on a GPU."""

    def forward(self, x):
        return conv2d(x[None], self.weight[None], self.bias[None]).squeeze(0)


def stacked():
    return scenarios.seeded(
        lambda: nn.Sequential(Stacked(1, 3, 3), nn.Tanh(), Stacked(3, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))
    )


@pytest.mark.parametrize(
    "make", [scenarios.smooth, scenarios.small_conv, stacked], ids=["mlp", "convolution", "kernels"]
)
def test_the_hessian_product_is_autograds(make):
    shape = (4,) if make is scenarios.smooth else (1, 6, 6)
    model = scenarios.model_of(make(), shape, personal="none")
    batch = doubled(scenarios.random_batch(CLIENTS, 5, shape, used=[5, 3]))
    g = scenarios.generator(1)
    weights, vector = (
        model.initial + torch.randn(CLIENTS, len(model.initial), generator=g, dtype=torch.float64) for _ in range(2)
    )
    found = model.hessian_product(weights, vector, batch.x, batch.y, batch.mask, batch.key)
    module = make().double()
    for s, used in enumerate((5, 3)):

        def total(w, s=s, used=used):
            out = functional_call(module, model.layout.unflatten(w), (batch.x[s, :used],))
            return F.cross_entropy(out, batch.y[s, :used], reduction="sum")

        _, expected = hvp(total, weights[s], vector[s])
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(found[s], expected, rtol=1e-9, atol=1e-9)


def test_the_hessian_product_sees_the_same_dropout_as_the_gradient():
    module = scenarios.seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)))
    model = scenarios.model_of(module, personal="none")
    batch = doubled(scenarios.random_batch(CLIENTS, 5))
    weights = rows(model.initial.double(), CLIENTS)
    vector = torch.randn(weights.shape, generator=scenarios.generator(1), dtype=torch.float64)
    found = model.hessian_product(weights, vector, batch.x, batch.y, batch.mask, batch.key)
    step = 1e-5
    ahead, behind = (
        model.gradient(weights + sign * step * vector, batch.x, batch.y, batch.mask, batch.key)[1] for sign in (1, -1)
    )
    torch.testing.assert_close(found, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-7)


# --- the three batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
def test_a_mini_batch_is_dealt_out_in_turn(count):
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1.0], [1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 1, 1, 1]])
    y = torch.arange(21).reshape(3, 7)
    batch = scenarios.random_batch(3, 7)._replace(x=y[..., None].float(), y=y, mask=mask)
    dealt = parts(batch, count)
    for s in range(3):
        examples = y[s][mask[s].bool()]
        for p, part in enumerate(dealt):
            assert part.y[s][part.mask[s].bool()].tolist() == examples[p::count].tolist()
            assert torch.equal(part.x[s, :, 0].long(), part.y[s])
    assert len({tuple(part.key.flatten().tolist()) for part in dealt}) == count


def test_where_examples_are_too_few_for_disjoint_batches_they_are_used_again():
    batch = scenarios.random_batch(4, 6, used=[0, 1, 2, 3])._replace(y=torch.arange(24).reshape(4, 6))
    found = [[part.y[s][part.mask[s].bool()].tolist() for part in parts(batch, 3)] for s in range(4)]
    assert found == [[[], [], []], [[6], [6], [6]], [[12], [13], [12]], [[18], [19], [20]]]


# --- a step -----------------------------------------------------------------------------------------------------------


def by_hand(method, model, sent, client):
    """Algorithm 1 of the paper for one client: autograd, an explicit Hessian, torch.optim.Adam."""
    w = sent[client].clone().requires_grad_()
    optimiser = torch.optim.Adam([w], lr=method.lr)
    count = 3 if method.order == "full" else 2
    losses = []
    for batch in batches():
        used = int(batch.mask[client].sum())
        stride = min(used, count)
        f = [loss_of(model, batch, client, slice(p % stride, used, stride)) for p in range(count)]
        at = w.detach().requires_grad_()
        (inner,) = torch.autograd.grad(f[0](at), at)
        moved = (at - method.inner_lr * inner).detach().requires_grad_()
        loss = f[1](moved)
        (gradient,) = torch.autograd.grad(loss, moved)
        if method.order == "full":
            gradient = gradient - method.inner_lr * torch.autograd.functional.hessian(f[2], at) @ gradient
        w.grad = gradient
        optimiser.step()
        losses.append(loss.detach())
    return w.detach(), torch.stack(losses)


@pytest.mark.parametrize("inner_lr", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("order", ["first", "full"])
def test_local_steps_are_algorithm_1_done_by_hand(order, inner_lr):
    method = PerFedAvg(lr=3e-3, order=order, inner_lr=inner_lr)
    model, sent = small()
    local, losses = trained(method, model, sent, batches())
    for s in range(CLIENTS):
        w, expected = by_hand(method, model, sent, s)
        torch.testing.assert_close(local.weights[s], w, rtol=0, atol=1e-8)
        torch.testing.assert_close(losses[:, s], expected, rtol=0, atol=1e-8)
        assert (w - sent[s]).abs().max() > 3 * method.lr


def test_on_one_and_the_same_batch_the_full_gradient_is_that_of_the_loss_after_the_step():
    # Of a single example all three batches are made.
    model, sent = small()
    (batch, *_) = batches(([1, 1],))
    found = {}
    for order in ("first", "full"):
        method = PerFedAvg(order=order, inner_lr=0.7)
        local, _ = trained(method, model, sent, [batch])
        found[order] = local.memory.first / 0.1  # after one step Adam's mean of gradients is a tenth of the first
    for s in range(CLIENTS):
        f = loss_of(model, batch, s, slice(0, 1))

        def after(w, f=f):
            return f(w - 0.7 * torch.func.grad(f)(w))

        expected = torch.func.grad(after)(sent[s])
        torch.testing.assert_close(found["full"][s], expected, rtol=0, atol=1e-9)
        term = 0.7 * torch.autograd.functional.hessian(f, sent[s]) @ found["first"][s]
        assert term.abs().max() > 0.01 * expected.abs().max()
        torch.testing.assert_close(found["first"][s] - found["full"][s], term, rtol=0, atol=1e-9)


@pytest.mark.parametrize("order", ["first", "full"])
def test_without_inner_steps_it_is_fedavg_on_the_outer_batches(order):
    method, plain = PerFedAvg(order=order, inner_lr=0.0, lr=3e-3), FedAvg(lr=3e-3)
    model, sent = small()
    local = begun(method, model, sent)
    expected = begun(plain, model, sent)
    for batch in batches():
        outer = parts(batch, 3 if order == "full" else 2)[1]
        local, loss = method.step(model, local, batch, scenarios.hparams(method, CLIENTS, torch.float64), "all")
        expected, other = plain.step(model, expected, outer, scenarios.hparams(plain, CLIENTS, torch.float64), "all")
        torch.testing.assert_close(local.weights, expected.weights, rtol=0, atol=1e-9)
        torch.testing.assert_close(loss, other, rtol=0, atol=1e-9)


def test_training_makes_the_loss_after_a_step_small_rather_than_the_loss():
    # Two clients who disagree about every label: no network suits both, but one may be a step away from either.
    g = scenarios.generator()
    x = torch.randn(12, 4, generator=g, dtype=torch.float64)
    y = (x[:, 0] > 0).long()
    batch = doubled(scenarios.random_batch(2, 12))._replace(x=torch.stack([x, x]), y=torch.stack([y, 2 - y]))
    method, plain = PerFedAvg(inner_lr=1.0, lr=0.02), FedAvg(lr=0.02)
    model, _ = small()

    def after_a_step(method_, steps=60):
        shared = rows(Weights(model.initial.double()), 2)
        for _ in range(steps):
            local = begun(method_, model, shared.weights)
            local, _ = method_.step(model, local, batch, scenarios.hparams(method_, CLIENTS, torch.float64), "all")
            shared = rows(method_.aggregate(shared, Weights(local.weights), torch.ones(2)), 2)
        tuned, before = trained(method, model, shared.weights, [batch], TUNE)
        _, after = trained(method, model, tuned.weights, [batch], TUNE)
        return before.mean(), after.mean()

    before, after = after_a_step(method)
    plain_before, plain_after = after_a_step(plain)
    assert after < 0.7 * plain_after
    assert before > plain_before


# --- tuning -----------------------------------------------------------------------------------------------------------


def test_tuning_is_plain_descent_on_the_whole_batch():
    method = PerFedAvg(inner_lr=0.3)
    model, sent = small()
    local, losses = trained(method, model, sent, batches(), TUNE)
    finished = method.finish(model, local, scenarios.hparams(method, CLIENTS, torch.float64))
    for s in range(CLIENTS):
        w = sent[s].clone().requires_grad_()
        descent = torch.optim.SGD([w], lr=0.3)
        for t, batch in enumerate(batches()):
            descent.zero_grad()
            loss = loss_of(model, batch, s, slice(0, int(batch.mask[s].sum())))(w)
            loss.backward()
            descent.step()
            torch.testing.assert_close(losses[t, s], loss.detach(), rtol=0, atol=1e-9)
        torch.testing.assert_close(finished.personal.weights[s], w.detach(), rtol=0, atol=1e-9)
    assert (finished.personal.known == 1).all()


@pytest.mark.parametrize("order", ["first", "full"])
def test_a_client_predicts_with_the_servers_weights_after_its_own_steps_and_else_with_the_servers(order):
    method = PerFedAvg(order=order, tuning_epochs=2)
    federation = scenarios.start(method, scenarios.classification((12, 1, 20)), participants=2)
    everyone = torch.arange(3)
    local_round = scenarios.local_round(federation)
    trained_ = local_round(scenarios.rows_of(federation, everyone))
    shared = rows(federation.shared, 3)
    untuned = method.predictive(federation.model, shared, trained_.personal).draw(None, 0)
    assert torch.equal(untuned, shared.weights)  # local training leaves nothing to predict with
    phases = method.tuning(federation.settings.epochs)
    assert [p.epochs for p in phases] == [2]
    tuned = local_round(scenarios.rows_of(federation, everyone), phases).personal
    weights = method.predictive(federation.model, shared, tuned).draw(None, 0)
    assert torch.equal(weights, tuned.weights)
    expected = federation.shared.weights  # of the client with one example: two steps on it
    x, y = federation.data.train.client(1)
    for _ in range(2):
        _, gradient = federation.model.gradient(expected[None], x[None], y[None], torch.ones(1, 1), scenarios.keys(1))
        expected = expected - method.inner_lr * gradient[0]
    torch.testing.assert_close(weights[1], expected, rtol=0, atol=1e-6)


def test_a_newcomer_is_tuned_too():
    assert PerFedAvg().adaptation(5) == PerFedAvg().tuning(5)


def test_a_traced_step_is_the_step():
    # The engine traces it; a convolution, pooling and dropout must come through the second derivative.
    module = scenarios.seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(8, 3)
        )
    )
    data = scenarios.classification((7, 3), features=36)
    train, test = (replace(part, x=part.x.reshape(-1, 1, 6, 6)) for part in (data.train, data.test))
    federation = scenarios.start(PerFedAvg(), replace(data, train=train, test=test), module, epochs=1)
    method, model, work = federation.method, federation.model, scenarios.rows_of(federation, [0, 1])
    traced = scenarios.local_round(federation)(work).upload.weights
    local = method.begin(model, work.shared, work.personal, work.hparams)
    todo = plan(work.shuffle, work.key, work.start, work.size, 5, 0, 1, 10, 5)
    expected = []
    for t in range(2):
        batch = Batch(train.x[todo.rows[t]], train.y[todo.rows[t]], todo.mask[t], todo.size, todo.key[t])
        local, _ = method.step(model, local, batch, work.hparams, "all")
        expected.append(local.weights)
    torch.testing.assert_close(traced[0], expected[1][0], rtol=0, atol=1e-6)  # seven examples, two steps
    torch.testing.assert_close(traced[1], expected[0][1], rtol=0, atol=1e-6)  # three examples, one


@pytest.mark.parametrize(
    "settings", [{"inner_lr": -1.0}, {"order": "second"}, {"tuning_epochs": 0}, {"personal": "head"}]
)
def test_settings_out_of_range_are_one_sentence(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        PerFedAvg(**settings).check()
