"""Robust server rules and compressed uploads: what strangers can do, and what rounding does."""

import pytest
import scenarios
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from bpfed._util.errors import UserError
from bpfed.aggregation.rules import left_out, middle, trimmed_mean
from bpfed.aggregation.updates import GREATEST, compress, dequantise, expand, quantise, travelled, updates
from bpfed.config.settings import Settings
from bpfed.engine.server import combined
from bpfed.inference.gaussian import Gaussian
from bpfed.methods import METHODS, BPFed, FedAvg
from bpfed.methods.base import Weights


def gaussians(count, width=5, seed=0):
    g = scenarios.generator(seed)
    return Gaussian(torch.randn(count, width, generator=g), 0.01 + torch.rand(count, width, generator=g))


def nothing(count):
    raise AssertionError("no noise was asked for")


def server(method, given, shared, uploads):
    weights = torch.ones(len(tree_leaves(uploads)[0]))
    return combined(method, Settings(**given), shared, uploads, weights, 10, nothing)


# --- robust rules -------------------------------------------------------------------------------------------------------

corrupted = st.one_of(st.floats(-(2.0**90), 2.0**90, width=32), st.just(1e-30))


@settings(max_examples=100, deadline=None)
@given(st.integers(3, 15), st.data())
def test_with_fewer_corrupted_uploads_than_are_left_out_the_result_is_within_the_honest_range(count, data):
    share = data.draw(st.sampled_from([0.1, 0.2, 0.34, 0.5]))
    bad = data.draw(st.integers(0, left_out(share, count)))
    honest = gaussians(count - bad, seed=data.draw(st.integers(0, 10**6)))
    evil = torch.tensor([[data.draw(corrupted) for _ in range(5)] for _ in range(bad)]).reshape(bad, 5)
    sent = Gaussian(torch.cat([evil, honest.mean]), torch.cat([evil.abs().clamp(min=1e-30), honest.sigma]))
    found = middle(sent, share)
    for got, true in zip(found, honest, strict=True):
        assert (got >= true.amin(0) - 1e-6).all()
        assert (got <= true.amax(0) + 1e-6).all()
    assert (found.sigma > 0).all()


def test_one_corrupted_upload_more_than_that_can_do_anything():
    values = torch.tensor([[0.0], [1.0], [2.0], [1e9], [1e9]])
    assert float(trimmed_mean(values, 0.2)) > 1e8
    assert float(trimmed_mean(values, 0.5)) == 2.0


@pytest.mark.parametrize(
    ("share", "count", "cut"), [(0.2, 10, 2), (0.2, 3, 1), (0.1, 30, 3), (0.5, 4, 1), (0.49, 2, 0)]
)
def test_at_least_the_share_is_left_out_and_one_or_two_remain(share, count, cut):
    assert left_out(share, count) == cut


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_a_half_is_the_median(count):
    values = torch.randn(count, 7, generator=scenarios.generator(3))
    torch.testing.assert_close(trimmed_mean(values, 0.5), values.quantile(0.5, dim=0))


@pytest.mark.parametrize("robust", ["median", "trimmed:0.2"])
@pytest.mark.parametrize("name", ["mean", "moments", "precision", "product"])
def test_equal_uploads_give_what_the_methods_own_rule_gives(robust, name):
    one = gaussians(1)
    sent = Gaussian(*(t.expand(6, 5) for t in one))
    plain, found = (
        server(BPFed(rule=name), given, Gaussian(*(t[0] for t in one)), sent) for given in ({}, {"robust": robust})
    )
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if n != "local" and not m.adds])
def test_robust_rules_and_compression_fit_what_every_method_uploads(name):
    method, shared, sent = scenarios.untrained(METHODS[name]())
    clip = 0.0 if name == "bpfed-population" else 1.0  # its uploads are no states of the server
    found = server(method, {"robust": "trimmed:0.2", "clip": clip, "compression": "half"}, shared, sent)
    for leaf, old in zip(tree_leaves(found), tree_leaves(shared), strict=True):
        assert torch.isfinite(leaf).all()
        assert leaf.shape == old.shape


def test_a_corrupted_upload_moves_the_server_by_its_share_of_the_clip_at_most():
    shared, method = Weights(torch.zeros(4)), FedAvg()
    honest = 0.1 * torch.randn(9, 4, generator=scenarios.generator(0))
    sent = Weights(torch.cat([honest, torch.full((1, 4), 1e6)]))
    found = server(method, {"clip": 0.5}, shared, sent).weights
    without = Weights(torch.cat([honest, torch.zeros(1, 4)]))
    expected = server(method, {"clip": 0.5}, shared, without).weights
    assert float((found - expected).norm()) == pytest.approx(0.05, rel=1e-4)
    assert float(server(method, {}, shared, sent).weights.norm()) > 1e5


@pytest.mark.parametrize("bad", ["mode", "trimmed", "trimmed:0.5", "trimmed:x", "median:0.1"])
def test_an_unknown_rule_is_refused(bad):
    with pytest.raises(UserError, match="robust is"):
        Settings(robust=bad).check(10)


def test_sizes_do_not_count_with_a_robust_rule():
    with pytest.raises(UserError, match="weighting is 'size', but with robust"):
        Settings(robust="median", weighting="size").check(10)


# --- compression --------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.floats(-18, 3), st.floats(0.0, 12.0), st.integers(0, 10**6))
def test_levels_keep_every_sigma_within_half_a_step(centre, reach, seed):
    log = centre + reach * (torch.rand(3, 50, generator=scenarios.generator(seed)) - 0.5)
    sigma = log.exp()
    found = dequantise(quantise(sigma))
    reach = (sigma.log().amax(-1) - sigma.log().amin(-1)).double()
    bound = torch.expm1(reach / 508.0)[:, None] + 1e-5
    assert ((found.double() / sigma.double() - 1).abs() <= bound).all()
    again = dequantise(quantise(found))
    torch.testing.assert_close(again, found, rtol=1e-5, atol=0.0)


def test_a_sigma_of_zero_stays_zero_and_no_other_becomes_it():
    sigma = torch.tensor([[0.0, 1e-30, 0.1], [0.0, 0.0, 0.0], [0.2, 0.2, 0.2]])
    found = dequantise(quantise(sigma))
    assert ((found == 0) == (sigma == 0)).all()
    torch.testing.assert_close(found[2], sigma[2])


def test_means_keep_eleven_bits_and_a_gaussian_takes_three_bytes():
    g = gaussians(4, 1000)
    packed = compress(BPFed(), g)
    found = expand(packed, g)
    assert type(found) is Gaussian
    assert ((found.mean - g.mean).abs() <= g.mean.abs() * 2.0**-11 + 2.0**-25).all()
    assert sum(t.nbytes for t in tree_leaves(packed)) == 4 * (1000 * 3 + 8)
    assert not torch.equal(found.mean, g.mean)


def test_a_weight_too_great_for_half_precision_is_refused():
    with pytest.raises(UserError, match="greatest number in half precision"):
        compress(FedAvg(), Weights(torch.tensor([[GREATEST * 1.01]])))


def test_a_compressed_run_stays_close_to_the_full_one_and_its_state_travels_unchanged():
    full, small = (scenarios.run(BPFed(), epochs=1, compression=c) for c in ("none", "half"))
    assert not torch.equal(full.shared.mean, small.shared.mean)
    torch.testing.assert_close(small.shared, full.shared, rtol=0.02, atol=2e-3)
    torch.testing.assert_close(travelled(BPFed(), small.shared), small.shared, rtol=1e-5, atol=0.0)


def test_clipping_sees_what_arrives():
    shared = Gaussian(*(t[0] for t in gaussians(1)))
    sent = gaussians(6, seed=4)
    found = server(BPFed(), {"clip": 0.1, "robust": "median", "compression": "half"}, shared, sent)
    assert float(updates(BPFed(), shared, Gaussian(*(t[None] for t in found))).norm()) < 0.2
