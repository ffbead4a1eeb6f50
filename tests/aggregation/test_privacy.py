"""Differential privacy of clients: the mechanism's sensitivity and noise, and the accountant against independent ones."""

import math

import pytest
import scenarios
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves, tree_leaves_with_path

import bpfed
from bpfed._util.errors import UserError
from bpfed.aggregation.privacy import (
    gaussian_epsilon,
    noise_for,
    noised,
    poisson_epsilon,
    private_mean,
    renyi,
    secret_normal,
)
from bpfed.aggregation.updates import clipped, moved, shortened, updates
from bpfed.callbacks.progress import figures
from bpfed.config.settings import Settings
from bpfed.engine.server import combined
from bpfed.inference.gaussian import Gaussian, softplus_inverse
from bpfed.methods import METHODS, BPFed, FedAvg
from bpfed.methods.base import Weights, rows

#: Made with Google's dp-accounting 0.6.0 (its RdpAccountant and its PLDAccountant, default settings, add-or-remove-one):
#: rate, noise, rounds, delta; epsilon by Rényi orders, epsilon by privacy loss distributions (tight to about 1e-4).
REFERENCE = [
    (1.0, 1.0, 1, 1e-5, 4.728507, 4.377178),
    (1.0, 4.0, 20, 1e-5, 5.377728, 4.983306),
    (1.0, 10.0, 100, 1e-5, 4.728507, 4.377178),
    (1.0, 0.5, 1, 1e-6, 11.688627, 10.997151),
    (0.1, 1.0, 100, 1e-5, 7.903850, 7.046603),
    (0.01, 1.1, 1000, 1e-5, 1.711770, 1.515370),
    (0.25, 2.0, 50, 1e-5, 4.884259, 4.440302),
    (0.2, 0.7, 30, 1e-5, 17.229315, 15.270082),
    (0.5, 5.0, 200, 1e-6, 7.989937, 7.440798),
]


def server(width=5, seed=0):
    g = scenarios.generator(seed)
    return Gaussian(torch.randn(width, generator=g), 0.05 + torch.rand(width, generator=g))


def uploads(shared, count=4, spread=1.0, seed=1):
    g = scenarios.generator(seed)
    width = len(shared.mean)
    return Gaussian(
        shared.mean + spread * torch.randn(count, width, generator=g),
        shared.sigma * torch.exp(spread * torch.randn(count, width, generator=g)),
    )


def none(count):
    raise AssertionError("no noise was asked for")


# --- updates ------------------------------------------------------------------------------------------------------------


def test_an_update_is_the_change_of_mean_and_rho_as_one_vector_and_moving_by_it_gives_the_upload():
    shared = server()
    sent = uploads(shared)
    found = updates(BPFed(), shared, sent)
    expected = torch.cat([sent.mean - shared.mean, softplus_inverse(sent.sigma) - softplus_inverse(shared.sigma)], -1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(moved(BPFed(), shared, found), sent, rtol=1e-5, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(-3, 8), st.integers(0, 10**6))
def test_no_update_is_longer_than_the_limit_and_directions_stay(limit, log_spread, seed):
    changes = math.exp(log_spread) * torch.randn(4, 6, generator=scenarios.generator(seed))
    short = shortened(changes, limit).double()
    before, after = changes.double().norm(dim=-1), short.norm(dim=-1)
    assert (after <= limit * (1 + 1e-6)).all()
    torch.testing.assert_close(after, before.clamp(max=limit), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(short / after[:, None], changes.double() / before[:, None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_counts_as_none(bad):
    changes = torch.ones(2, 3)
    changes[1, 0] = bad
    assert shortened(changes, 10.0).tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


def test_clipping_leaves_short_updates_bit_by_bit_as_they_are_and_scales_the_others():
    shared = server()
    sent = Gaussian(*(torch.cat(p) for p in zip(uploads(shared, 2, 1e-3), uploads(shared, 2, 3.0), strict=True)))
    found = clipped(BPFed(), shared, sent, 0.5)
    assert torch.equal(found.mean[:2], sent.mean[:2])
    assert torch.equal(found.sigma[:2], sent.sigma[:2])
    torch.testing.assert_close(
        updates(BPFed(), shared, found)[2:].norm(dim=-1), torch.full((2,), 0.5), rtol=1e-3, atol=0.0
    )
    assert (found.sigma > 0).all()


def test_points_stay_points():
    shared = Gaussian(torch.zeros(3), torch.zeros(3))
    sent = Gaussian(torch.ones(2, 3), torch.zeros(2, 3))
    found = private_mean(BPFed.dirac(), shared, sent, 9.0, 1.0, 2, lambda count: torch.ones(count))
    assert found.sigma.tolist() == [0.0] * 3
    assert found.mean.tolist() == [1.0 + 9.0 / 2] * 3


# --- the mechanism ------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 10.0), st.floats(-3, 3), st.integers(0, 10**6))
def test_one_client_more_or_less_moves_the_sum_by_no_more_than_the_clip(clip, log_spread, seed):
    shared, method = Weights(torch.zeros(6)), FedAvg()
    sent = Weights(math.exp(log_spread) * torch.randn(5, 6, generator=scenarios.generator(seed)))
    fewer = Weights(sent.weights[:-1])
    with_, without = (private_mean(method, shared, u, clip, 0.0, 8, none).weights for u in (sent, fewer))
    assert float((with_ - without).norm()) <= clip / 8 * (1 + 1e-5)


def test_the_noise_is_that_of_the_multiplier_whoever_returned():
    shared, method = Weights(torch.zeros(20_000)), FedAvg()
    sent = Weights(torch.zeros(3, 20_000))
    for returned in (sent, Weights(sent.weights[:0]), ()):
        found = private_mean(method, shared, returned, 0.5, 4.0, 10, secret_normal).weights
        assert float(found.std()) == pytest.approx(4.0 * 0.5 / 10, rel=0.03)


def test_a_site_that_trusts_nobody_sends_its_clipped_update_with_noise_of_its_own():
    shared, method = Weights(torch.zeros(20_000)), FedAvg()
    long = torch.full((5, 20_000), 3.0)
    sent = noised(method, shared, Weights(long), 0.5, 4.0, secret_normal).weights
    assert float(sent.std(dim=1).mean()) == pytest.approx(4.0 * 0.5, rel=0.03)
    assert float(sent.mean()) == pytest.approx(0.0, abs=0.05)  # the update itself has norm 0.5, 0.0035 in each
    quiet = noised(method, shared, Weights(long), 0.5, 0.0, secret_normal).weights
    torch.testing.assert_close(quiet.norm(dim=1), torch.full((5,), 0.5), rtol=1e-4, atol=0.0)
    mean = private_mean(method, shared, Weights(sent), math.inf, 0.0, 5, none).weights
    assert float(mean.std()) == pytest.approx(4.0 * 0.5 / math.sqrt(5), rel=0.03)


def test_secret_noise_is_standard_normal_and_never_the_same():
    drawn = secret_normal(100_001)
    assert drawn.shape == (100_001,)
    assert abs(float(drawn.mean())) < 0.02
    assert float(drawn.std()) == pytest.approx(1.0, abs=0.02)
    assert float((drawn.abs() < 1.0).double().mean()) == pytest.approx(0.6827, abs=0.01)
    assert float((drawn.abs() < 2.0).double().mean()) == pytest.approx(0.9545, abs=0.005)
    assert not torch.equal(drawn, secret_normal(100_001))


# --- the accountant -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "noise", "rounds", "delta", "by_orders", "tight"), REFERENCE)
def test_epsilon_is_that_of_an_independent_accountant(rate, noise, rounds, delta, by_orders, tight):
    found = poisson_epsilon(noise, rate, rounds, delta)
    if rate == 1.0:
        assert found == pytest.approx(tight, rel=2e-4)
    else:
        assert found >= tight - 1e-3  # a bound
        assert found == pytest.approx(by_orders, rel=1e-2)  # the grids of orders differ


@pytest.mark.parametrize("order", [2, 3, 8, 40])
@pytest.mark.parametrize(("noise", "rate"), [(0.5, 0.1), (1.0, 0.01), (4.0, 0.5)])
def test_renyi_divergence_of_whole_orders_is_the_binomial_sum(order, noise, rate):
    """Mironov, Talwar, Zhang 2019: A_α = Σ_k C(α, k) (1 − q)^(α−k) q^k exp((k² − k) / 2z²)."""
    terms = [
        math.log(math.comb(order, k))
        + (order - k) * math.log(1 - rate)
        + k * math.log(rate)
        + (k * k - k) / (2 * noise**2)
        for k in range(order + 1)
    ]
    expected = float(torch.logsumexp(torch.tensor(terms, dtype=torch.float64), 0)) / (order - 1)
    assert renyi(float(order), noise, rate) == pytest.approx(expected, rel=1e-9, abs=1e-13)


def test_exact_epsilon_meets_the_definition():
    """δ(ε) = E[(1 − e^(ε − L))₊] with the privacy loss L ~ N(μ²/2, μ²), by plain numerical integration."""
    noise, rounds, delta = 3.0, 7, 1e-4
    mu = math.sqrt(rounds) / noise
    epsilon = gaussian_epsilon(noise, rounds, delta)
    loss = torch.linspace(mu**2 / 2 - 12 * mu, mu**2 / 2 + 12 * mu, 400_001, dtype=torch.float64)
    density = torch.exp(-0.5 * ((loss - mu**2 / 2) / mu) ** 2) / (mu * math.sqrt(2 * math.pi))
    lost = torch.trapezoid(density * (1 - torch.exp(epsilon - loss)).clamp(min=0.0), loss)
    assert float(lost) == pytest.approx(delta, rel=1e-4)


def test_rounds_add_up_and_noise_and_chance_help():
    assert gaussian_epsilon(2.0, 4, 1e-5) == pytest.approx(gaussian_epsilon(1.0, 1, 1e-5), rel=1e-6)
    assert gaussian_epsilon(1.0, 0, 1e-5) == 0.0
    assert gaussian_epsilon(0.0, 3, 1e-5) == math.inf
    spent = [poisson_epsilon(1.0, q, 20, 1e-5) for q in (0.05, 0.2, 0.8, 1.0)]
    assert spent == sorted(spent)
    assert poisson_epsilon(1.0, 0.999, 20, 1e-5) <= gaussian_epsilon(1.0, 20, 1e-5)


@pytest.mark.parametrize(("epsilon", "rounds", "rate"), [(8.0, 50, 0.2), (2.0, 50, 0.2), (0.5, 10, 1.0)])
def test_noise_for_an_epsilon_spends_it_and_no_more(epsilon, rounds, rate):
    noise = noise_for(epsilon, 1e-5, rounds, rate)
    assert poisson_epsilon(noise, rate, rounds, 1e-5) <= epsilon
    assert poisson_epsilon(noise * 0.999, rate, rounds, 1e-5) > epsilon


def test_noise_for_nothing_is_refused():
    with pytest.raises(UserError, match=r"epsilon is 0\.0"):
        noise_for(0.0, 1e-5, 10)


# --- in a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if n != "local" and not m.adds])
def test_the_noise_fits_what_every_method_uploads(name):
    method, shared, sent = scenarios.untrained(METHODS[name]())
    given = Settings(clip=0.1, noise=1.0)
    found = combined(method, given, shared, sent, torch.ones(3), 3, secret_normal)
    assert updates(method, shared, rows(found, 1)).norm() > 0
    for (path, leaf), old in zip(
        *(f(s) for f, s in ((tree_leaves_with_path, found), (tree_leaves, shared))), strict=True
    ):
        assert torch.isfinite(leaf).all()
        assert leaf.shape == old.shape
        if path[-1].name in method.scales:
            assert (leaf > 0).all()


class Sums(FedAvg):
    """FedAvg that uploads its weights under another type than the server's."""

    def finish(self, model, local, hparams):
        done = super().finish(model, local, hparams)
        return done._replace(upload=(done.upload.weights,))


def test_a_method_whose_uploads_are_no_states_of_the_server_is_refused_before_it_trains():
    with pytest.raises(UserError, match="uploads do not match the server state"):
        scenarios.start(Sums(), clip=1.0)


def test_noise_follows_the_seed_and_the_round_and_not_the_chunks():
    whole, parts = (scenarios.run(FedAvg(), epochs=1, clip=0.1, noise=0.5, chunk=c) for c in (None, 1))
    torch.testing.assert_close(whole.shared, parts.shared)
    drawn = []
    for seed, done in ((0, 0), (0, 1), (1, 0)):
        federation = scenarios.start(FedAvg(), clip=0.1, noise=0.5, seed=seed)
        federation.round = done
        before = federation.shared.weights
        federation.receive(torch.zeros(0, dtype=torch.int64), (), ())
        drawn.append(federation.shared.weights - before)
    assert not any(torch.allclose(drawn[a], drawn[b], atol=1e-3) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_without_noise_and_with_a_wide_clip_a_run_is_what_it_was():
    plain, wide = scenarios.run(BPFed(), epochs=1), scenarios.run(BPFed(), epochs=1, clip=1e6)
    assert torch.equal(plain.shared.mean, wide.shared.mean)
    assert torch.equal(plain.shared.sigma, wide.shared.sigma)
    assert plain.epsilon() is None


def test_little_noise_and_a_wide_clip_are_the_mean_of_updates():
    method = FedAvg()
    plain = scenarios.run(method, rounds=1)
    quiet = scenarios.run(method, rounds=1, clip=100.0, noise=1e-9)
    torch.testing.assert_close(quiet.shared, plain.shared, rtol=1e-4, atol=1e-5)


def test_epsilon_is_that_of_the_busiest_client_or_of_secret_coins():
    federation = scenarios.start(FedAvg(), rounds=6, participants=2, clip=1.0, noise=2.0)
    times = torch.zeros(len(federation), dtype=torch.int64)
    assert federation.epsilon() == 0.0
    for number in range(1, 7):
        times[federation.participants(number)] += 1
        federation.round = number
        assert federation.epsilon() == pytest.approx(gaussian_epsilon(2.0, int(times.max()), 1e-5))
    assert 2 <= int(times.max()) < 6
    coins = scenarios.start(FedAvg(), rounds=6, participants=2, clip=1.0, noise=2.0, sampling="poisson")
    coins.round = 6
    assert coins.epsilon() == pytest.approx(poisson_epsilon(2.0, 2 / len(coins), 6, 1e-5))
    known = torch.bincount(torch.cat([coins.participants(r) for r in range(1, 7)]), minlength=len(coins)).max()
    assert coins.epsilon(secret=False) == pytest.approx(gaussian_epsilon(2.0, int(known), 1e-5))


def test_coins_take_each_client_with_the_rate_and_independently():
    federation = scenarios.start(FedAvg(), participants=1, sampling="poisson")
    drawn = [federation.participants(r) for r in range(1, 2001)]
    rate = 1 / len(federation)
    times = torch.bincount(torch.cat(drawn), minlength=len(federation)) / 2000
    assert (times - rate).abs().max() < 5 * math.sqrt(rate * (1 - rate) / 2000)
    empty = sum(not len(d) for d in drawn) / 2000
    assert empty == pytest.approx((1 - rate) ** len(federation), abs=0.05)


def test_a_round_of_nobody_gets_noise_all_the_same():
    federation = scenarios.start(FedAvg(), clip=1.0, noise=1.0)
    before = federation.shared.weights.clone()
    federation.receive(torch.zeros(0, dtype=torch.int64), (), ())
    spread = float((federation.shared.weights - before).std())
    assert spread == pytest.approx(1.0 / federation.settings.per_round(len(federation)), rel=0.5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"noise": 1.0}, "in units of clip"),
        ({"noise": 1.0, "clip": 1.0, "weighting": "size"}, "weighting is 'size'"),
        ({"noise": 1.0, "clip": 1.0, "robust": "median"}, "take no sum"),
        ({"clip": -1.0}, "clip is -1.0"),
        ({"clip": float("nan")}, "clip is nan"),
        ({"delta": 0.0}, "delta is 0.0"),
        ({"sampling": "dice"}, "sampling is 'dice'"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_one_sentence(given, words):
    with pytest.raises(UserError, match=words):
        Settings(**given).check(10)


def test_rows_of_one_upload_are_what_the_method_gets():
    one = Gaussian(torch.ones(3), torch.full((3,), 0.5))
    for name in ("mean", "moments", "precision"):
        torch.testing.assert_close(BPFed(rule=name).aggregate(one, rows(one, 4), torch.ones(4)), one)


def test_an_epsilon_without_bound_is_told_in_words(tmp_path):
    run = bpfed.fit(FedAvg(), scenarios.classification(), rounds=1, epochs=1, clip=1.0, noise=1e-4, out=tmp_path / "a")
    assert "epsilon   without bound" in run.summary()
    assert "epsilon   without bound" in bpfed.Run.load(tmp_path / "a").summary()
    assert figures(run.history[-1] | {"epsilon": None}).endswith("epsilon without bound")
