"""The reference code's BPFed and pFedBayes: its loop step by step, each difference by itself, and BPFed without them."""

import pytest
import scenarios
import torch
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from bpfed._util.errors import UserError
from bpfed.aggregation.rules import weighted_mean
from bpfed.engine import local as local_module
from bpfed.engine.batching import cyclic
from bpfed.inference import rng
from bpfed.inference.gaussian import Gaussian, softplus_inverse
from bpfed.methods import METHODS, BPFed
from bpfed.methods.base import rows
from experiments.audit import DIFFERENCES
from experiments.reference_methods import PUBLISHED, PublishedBPFed, PublishedPFedBayes


def gaussians(count, size, seed):
    g = scenarios.generator(seed)
    return Gaussian(torch.randn(count, size, generator=g), 0.05 + 0.1 * torch.rand(count, size, generator=g))


def begun(method, clients=2, seed=3):
    """A model, and the local state of clients whose q and π have come apart."""
    model = scenarios.model_of(scenarios.small_mlp(), personal=method.personal)
    first = method.init(model)
    personal = rows(first.personal, clients)._replace(q=(gaussians(clients, model.layout.total, seed),))
    shared = rows(first.shared, clients)
    with torch.no_grad():
        return model, method.begin(model, shared, personal, scenarios.hparams(method, clients)), shared


# --- the loop ----------------------------------------------------------------------------------------------------------


def by_hand(model, method, local, batches, client):
    """The loop of the reference for one client, with torch's own Adam, autograd and distributions."""
    q, prior = ([t[client].clone().requires_grad_() for t in (v.mean, v.rho)] for v in (local.q, local.prior))
    of_q, of_prior = (torch.optim.Adam(v, lr=method.lr) for v in (q, prior))

    def divergence(held_q, held_prior):
        one, other = (
            Normal(mu, F.softplus(rho))
            for mu, rho in (
                [t.detach() for t in q] if held_q else q,
                [t.detach() for t in prior] if held_prior else prior,
            )
        )
        return method.kl_weight * kl_divergence(other, one).sum()  # KL(π ‖ q)

    for batch in batches:
        for k in range(method.inner):
            eps = method.noise_scale * rng.normal(batch[k].key[client], len(q[0]))
            weights = q[0] + F.softplus(q[1]) * eps
            logits = model.outputs(weights, batch[k].x[client])
            loss = F.cross_entropy(logits, batch[k].y[client]) + divergence(False, True)
            of_q.zero_grad()
            loss.backward()
            of_q.step()
        of_prior.zero_grad()
        divergence(True, False).backward()
        of_prior.step()
    return q, prior


@pytest.mark.parametrize("method", [PublishedBPFed(kl_weight=0.02, inner=3, lr=0.01), PublishedPFedBayes(lr=0.01)])
def test_the_loop_is_the_reference_codes_step_by_step(method):
    model, local, _ = begun(method)
    batches = []
    for number in range(2):
        one = scenarios.random_batch(clients=2, examples=6, seed=number)
        batches.append([one._replace(key=rng.fold(one.key, k)) for k in range(method.inner)])
    expected = [by_hand(model, method, local, batches, client) for client in range(2)]
    with torch.no_grad():
        for batch in batches:
            for step in batch:
                local, _ = method.step(model, local, step, scenarios.hparams(method, 2), "all")
    for client, (q, prior) in enumerate(expected):
        for made, wanted in zip((local.q, local.prior), (q, prior), strict=True):
            torch.testing.assert_close(made.mean[client], wanted[0].detach(), rtol=2e-4, atol=2e-5)
            torch.testing.assert_close(made.rho[client], wanted[1].detach(), rtol=2e-4, atol=2e-5)


def test_with_all_differences_as_the_paper_has_them_it_is_bpfed():
    settings = {"rounds": 3, "epochs": 2, "batch": 5}
    printed = {name: value for one in DIFFERENCES for name, value in one.printed.items()}
    ours = scenarios.run(PublishedBPFed(**printed), **settings)
    written = scenarios.run(BPFed(draws=1), **settings)
    for made, wanted in zip(ours.shared, written.shared, strict=True):
        # BPFed's objective is n times this one, which Adam feels through its ε alone.
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=2e-5)
    everyone = torch.arange(len(ours))
    for made, wanted in zip(ours.personal(everyone).eta, written.personal(everyone).eta, strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=2e-5)


QUICK = {"batches": 4, "inner": 2}


@pytest.fixture(scope="module")
def published():
    """Two clients after two rounds of a few steps with the published settings."""
    return scenarios.run(PublishedBPFed(**QUICK), scenarios.classification(sizes=(12, 7)))


@pytest.mark.parametrize(
    "change",
    [
        {"noise_scale": 1.0},
        {"divergence": "posterior-prior"},
        {"kl_weight": None},
        {"overwritten": "both"},
        {"averaged": "sigma"},
        {"batches": 3},
        {"inner": 1},
        {"start": "network"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_difference_makes_a_difference(published, change):
    other = scenarios.run(PublishedBPFed(**(QUICK | change)), scenarios.classification(sizes=(12, 7)))
    gap = max(float((a - b).abs().max()) for a, b in zip(published.shared, other.shared, strict=True))
    assert gap > 1e-8


# --- what the server overwrites, and what it averages ----------------------------------------------------------------------


def test_the_server_overwrites_the_shared_part_of_the_prior_and_never_q():
    method = PublishedBPFed()
    model, local, shared = begun(method)
    q = gaussians(2, model.layout.total, 3)
    torch.testing.assert_close(local.q.gaussian.mean, q.mean)
    torch.testing.assert_close(local.prior.mean[:, : model.layout.shared], shared.mean)
    personal = rows(method.init(model).personal, 2)
    torch.testing.assert_close(local.prior.mean[:, model.layout.shared :], personal.eta.mean)


def test_as_the_paper_has_it_both_start_from_the_servers():
    method = PublishedBPFed(overwritten="both")
    model = scenarios.model_of(scenarios.small_mlp())
    first = method.init(model)
    shared = gaussians(2, model.layout.shared, 5)
    local = method.begin(model, shared, rows(first.personal, 2), scenarios.hparams(method, 2))
    torch.testing.assert_close(local.q.mean, local.prior.mean)
    torch.testing.assert_close(local.q.mean[:, : model.layout.shared], shared.mean)


def test_the_mean_of_rho_is_below_that_of_sigma():
    uploads, weights = gaussians(4, 6, 1), torch.tensor([1.0, 2.0, 1.0, 1.0])
    rho, sigma = (PublishedBPFed(averaged=what).aggregate(uploads, uploads, weights) for what in ("rho", "sigma"))
    torch.testing.assert_close(softplus_inverse(rho.sigma), weighted_mean(softplus_inverse(uploads.sigma), weights))
    torch.testing.assert_close(sigma.sigma, weighted_mean(uploads.sigma, weights))
    assert bool((rho.sigma < sigma.sigma).all())  # softplus is convex
    torch.testing.assert_close(rho.mean, sigma.mean)


def test_pfedbayes_uploads_all_weights_and_bpfed_all_but_the_head():
    for method, uploaded in ((PublishedBPFed(), "shared"), (PublishedPFedBayes(), "total")):
        model = scenarios.model_of(scenarios.small_mlp(), personal=method.personal)
        _, _, upload = scenarios.untrained(method)
        assert upload.mean.shape[-1] == getattr(model.layout, uploaded)


# --- start and prediction --------------------------------------------------------------------------------------------------


def test_the_start_is_normal_and_follows_the_networks_seed():
    def start(seed):
        model = scenarios.model_of(scenarios.small_mlp(hidden=800, seed=seed))
        return PublishedBPFed().init(model).personal.q[0]

    first, again, other = start(0), start(0), start(1)
    rho = softplus_inverse(first.sigma)
    assert abs(float(first.mean.mean())) < 0.01
    assert float(first.mean.std()) == pytest.approx(0.1, rel=0.05)
    assert float(rho.mean()) == pytest.approx(-3.0, abs=0.01)
    assert float(rho.std()) == pytest.approx(0.1, rel=0.05)
    assert torch.equal(first.mean, again.mean)
    assert not torch.equal(first.mean, other.mean)
    assert abs(float(torch.corrcoef(torch.stack([first.mean, rho]))[0, 1])) < 0.05


def test_predictions_have_the_noise_of_training():
    method = PublishedBPFed()
    model = scenarios.model_of(scenarios.small_mlp())
    q = gaussians(2, model.layout.total, 1)
    personal = rows(method.init(model).personal, 2)._replace(q=(q,))
    predictive = method.predictive(model, rows(method.init(model).shared, 2), personal)
    spread = torch.stack([predictive.draw(scenarios.keys(2), i) for i in range(500)]).std(0)
    assert float((spread / q.sigma).mean()) == pytest.approx(0.001, rel=0.05)


# --- mini-batches that go round -----------------------------------------------------------------------------------------------


def test_mini_batches_go_round_in_the_examples_own_order():
    size = torch.tensor([5, 2])
    made = cyclic(scenarios.keys(2), torch.tensor([0, 5]), size, 2, torch.tensor([4, 4]), 4, 2, 3)
    seen = [[made.rows[t, s][made.mask[t, s].bool()].tolist() for t in range(8)] for s in range(2)]
    assert seen[0] == [[2, 3], [2, 3], [4], [4], [0, 1], [0, 1], [2, 3], [2, 3]]
    assert seen[1] == [[5, 6]] * 8
    assert made.steps.tolist() == [8, 8]
    assert len(made.key.reshape(-1, 2).unique(dim=0)) == 16  # repeated batches have noise of their own
    assert bool(((made.rows >= torch.tensor([0, 5])[:, None]) & (made.rows < torch.tensor([5, 7])[:, None])).all())


def test_a_round_goes_on_where_the_one_before_ended(monkeypatch):
    firsts = []

    def spy(key, start, size, batch, first, batches, repeats, width):
        firsts.append((first.unique().tolist(), batches, repeats))
        return cyclic(key, start, size, batch, first, batches, repeats, width)

    monkeypatch.setattr(local_module, "cyclic", spy)
    federation = scenarios.run(PublishedBPFed(batches=3, inner=2), rounds=3)
    assert firsts == [([0], 3, 2), ([3], 3, 2), ([6], 3, 2)]
    assert federation.personal(torch.arange(5)).steps.unique().tolist() == [18.0]


def test_stacked_clients_are_clients_alone():
    data = scenarios.classification(sizes=(12, 7, 20))
    together = scenarios.run(PublishedBPFed(**QUICK), data)
    in_turn = scenarios.run(PublishedBPFed(**QUICK), data, chunk=1)
    torch.testing.assert_close(together.shared.mean, in_turn.shared.mean)


# --- said in words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"divergence": "reverse"}, "divergence"),
        ({"noise_scale": -1.0}, "noise_scale"),
        ({"inner": 0}, "inner"),
        ({"batches": 0}, "set that too"),
        ({"kl_weight": -1.0}, "1/n"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        PublishedBPFed(**settings).check()


def test_nobody_can_join_such_a_run():
    with pytest.raises(UserError, match="no client can join"):
        PublishedBPFed().adapting()


def test_they_are_no_rows_of_an_ordinary_comparison():
    assert set(PUBLISHED) == {"bpfed", "pfedbayes"}
    assert not {cls.name for cls in PUBLISHED.values()} & set(METHODS)
