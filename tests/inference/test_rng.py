"""Noise: it is what it says (normal, uniform, independent), and it depends on its key and on nothing else."""

import numpy as np
import pytest
import scenarios
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bpfed.inference import rng
from bpfed.inference.rng import Purpose

MANY = 200_000


def correlation(a, b):
    return float(np.corrcoef(a.double().flatten(), b.double().flatten())[0, 1])


# Under independence a correlation of n numbers has standard deviation 1/sqrt(n); five of them never happen by chance.
LIMIT = 5 / MANY**0.5


def test_normal_numbers_have_the_moments_of_the_normal():
    z = rng.normal(scenarios.keys(5), MANY).double()
    n = z.numel()
    assert abs(z.mean()) < 5 / n**0.5
    assert abs(z.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((z**3).mean()) < 5 * (15 / n) ** 0.5
    assert abs((z**4).mean() - 3) < 5 * (96 / n) ** 0.5
    assert 4 < z.abs().max() < 6


@pytest.mark.parametrize("client", range(4))
def test_normal_numbers_pass_a_test_against_the_normal(client):
    z = rng.normal(scenarios.keys(4)[client], 50_000)
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-4


def test_first_numbers_of_many_keys_are_normal_too():
    # A step takes a few numbers from each of very many keys: across keys they must be normal as within one.
    folded = rng.fold(scenarios.keys(1).expand(50_000, 2), torch.arange(50_000, dtype=torch.int32))
    for position in range(3):
        assert stats.kstest(rng.normal(folded, 3)[:, position].numpy(), "norm").pvalue > 1e-4


def test_both_halves_of_a_pair_are_uncorrelated_also_in_size():
    first, second = rng.normal(scenarios.keys(1)[0], 2 * MANY).chunk(2)
    assert abs(correlation(first, second)) < LIMIT
    assert abs(correlation(first.square(), second.square())) < LIMIT


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 1024])
def test_numbers_of_one_key_are_uncorrelated_with_their_neighbours(lag):
    z = rng.normal(scenarios.keys(1)[0], MANY + lag)
    assert abs(correlation(z[lag:], z[:-lag])) < LIMIT


def derived_keys():
    key = scenarios.keys(2)
    return {
        "another client": (key[0], key[1]),
        "another seed": (scenarios.keys(1, seed=0)[0], scenarios.keys(1, seed=1)[0]),
        "another round": (scenarios.keys(1, word=3)[0], scenarios.keys(1, word=4)[0]),
        "the next step": (rng.fold(key[0], 1), rng.fold(key[0], 2)),
        "a fold of it": (key[0], rng.fold(key[0], 0)),
        "a fold of the fold": (rng.fold(key[0], 1), rng.fold(rng.fold(key[0], 1), 1)),
        "a fold in other order": (rng.fold(rng.fold(key[0], 1), 2), rng.fold(rng.fold(key[0], 2), 1)),
        "a key one bit away": (key[0], key[0] ^ torch.tensor([0, 1], dtype=torch.int32)),
    }


@pytest.mark.parametrize("case", list(derived_keys()))
def test_different_keys_give_independent_numbers(case):
    first, second = (rng.normal(key, MANY) for key in derived_keys()[case])
    assert abs(correlation(first, second)) < LIMIT
    assert abs(correlation(first.square(), second.square())) < LIMIT
    # Nor are they the same numbers some places on, as of one generator started twice.
    assert abs(correlation(first[1:], second[:-1])) < LIMIT
    assert abs(correlation(first[:-1], second[1:])) < LIMIT


def test_purposes_do_not_share_numbers():
    ids = rng.client_ids(["a"])
    words = {int(rng.words(0, 1, purpose, ids)[0]) for purpose in Purpose}
    assert len(words) == len(Purpose)


def test_folded_keys_of_clients_and_steps_are_all_different():
    folded = rng.fold(scenarios.keys(200)[:, None].expand(-1, 500, -1), torch.arange(500, dtype=torch.int32))
    assert len(folded.reshape(-1, 2).unique(dim=0)) == 200 * 500


def test_folding_an_int_is_folding_a_tensor_of_it():
    key = scenarios.keys(3)
    assert torch.equal(rng.fold(key, 7), rng.fold(key, torch.tensor([7, 7, 7], dtype=torch.int32)))


def test_uniform_numbers_are_uniform_from_zero_to_below_one():
    u = rng.uniform(scenarios.keys(4), 100_000)
    assert u.min() >= 0
    assert u.max() < 1
    assert u.min() < 1e-4
    assert u.max() > 1 - 1e-4
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-4


def test_bits_are_balanced_and_each_independent_of_its_counter():
    words = rng.bits(scenarios.keys(1)[0], MANY)
    counter = torch.arange(MANY)
    for place in range(32):
        bit = ((words >> place) & 1).double()
        assert abs(bit.mean() - 0.5) < 5 * 0.5 / MANY**0.5
        for low in range(4):
            assert abs(correlation(bit, (counter >> low) & 1)) < LIMIT


def test_one_changed_bit_of_a_counter_changes_half_the_bits_of_its_word():
    words = rng.bits(scenarios.keys(1)[0], 4096)
    for low in range(12):
        changed = words ^ words[torch.arange(4096) ^ (1 << low)]
        flips = torch.stack([(changed >> place) & 1 for place in range(32)]).double().mean(1)
        assert ((flips - 0.5).abs() < 0.1).all()


def test_numbers_repeat_and_do_not_depend_on_who_else_asks():
    key = scenarios.keys(6)
    alone = torch.stack([rng.normal(k, 31) for k in key])
    assert torch.equal(rng.normal(key, 31), alone)
    assert torch.equal(rng.normal(key.flip(0), 31), alone.flip(0))
    assert torch.equal(rng.normal(key.reshape(2, 3, 2), 31).reshape(6, 31), alone)


def test_words_and_uniform_numbers_do_not_depend_on_how_many_are_asked_for():
    key = scenarios.keys(2)
    assert torch.equal(rng.bits(key, 100)[:, :7], rng.bits(key, 7))
    assert torch.equal(rng.uniform(key, 100)[:, :7], rng.uniform(key, 7))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_as_many_numbers_come_as_were_asked_for(count):
    assert rng.normal(scenarios.keys(3), count).shape == (3, count)
    assert rng.uniform(scenarios.keys(3), count).shape == (3, count)


def test_a_key_taken_apart_is_the_same_key():
    key, each = scenarios.keys(3), torch.arange(5, dtype=torch.int32)
    whole = rng.fold(rng.fold(key, 3)[:, None].expand(-1, 5, -1), each)
    apart = rng.fold(rng.fold(rng.SplitKey.of(key[:, None]), 3), each)
    assert torch.equal(torch.cat(apart, -1), whole)
    assert torch.equal(rng.normal(apart, 7), rng.normal(whole, 7))
    assert torch.equal(rng.uniform(apart, 7), rng.uniform(whole, 7))


def test_noise_under_vmap_is_the_noise():
    key = scenarios.keys(4)
    assert torch.equal(torch.func.vmap(lambda k: rng.normal(rng.fold(k, 3), 9))(key), rng.normal(rng.fold(key, 3), 9))


def test_folding_a_key_alone_is_folding_it_under_vmap():
    key = scenarios.keys(5)
    alone = torch.stack([rng.fold(k, 9) for k in key])
    assert torch.equal(torch.func.vmap(lambda k: rng.fold(k, 9))(key), alone)


def test_keys_follow_the_name_and_not_the_position():
    first = rng.keys(0, 1, Purpose.WEIGHTS, rng.client_ids(["ada", "bob", "eve"]))
    second = rng.keys(0, 1, Purpose.WEIGHTS, rng.client_ids(["eve", "ada"]))
    assert torch.equal(second, first[[2, 0]])
    assert len(first.unique(dim=0)) == 3


def test_similar_names_have_unrelated_words():
    ids = rng.client_ids([f"client {i:05d}" for i in range(20_000)])
    assert len(np.unique(ids)) == 20_000
    rank = rng.words(0, 0, Purpose.PARTICIPATION, ids).astype(np.float64) / 2.0**64
    assert stats.kstest(rank, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(rank[1:], rank[:-1])[0, 1]) < 5 / 20_000**0.5


def test_a_seed_may_be_negative_or_large():
    ids = rng.client_ids(["a"])
    seeds = (0, 1, -1, 2**40, 2**64 - 2)
    assert len({int(rng.words(seed, 0, Purpose.INIT, ids)[0]) for seed in seeds}) == len(seeds)


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5), epochs=st.integers(1, 4), spare=st.integers(0, 40))
def test_permutations_are_permutations_and_independent_of_the_longest(sizes, epochs, spare):
    key, sizes = scenarios.keys(len(sizes)), torch.tensor(sizes)
    longest = int(sizes.max())
    orders = rng.permutations(key, sizes, epochs, longest)
    wider = rng.permutations(key, sizes, epochs, longest + spare)
    for s, size in enumerate(sizes):
        for epoch in range(epochs):
            assert orders[s, epoch, :size].sort().values.tolist() == list(range(size))
        assert torch.equal(orders[s, :, :size], wider[s, :, :size])


def test_a_clients_orders_do_not_depend_on_the_number_of_epochs_or_on_other_clients():
    key, sizes = scenarios.keys(3), torch.tensor([9, 4, 7])
    together = rng.permutations(key, sizes, 5, 9)
    for s in range(3):
        alone = rng.permutations(key[s : s + 1], sizes[s : s + 1], 2, int(sizes[s]))
        assert torch.equal(alone[0], together[s, :2, : sizes[s]])


def test_every_order_is_equally_likely():
    key = scenarios.keys(12_000)
    orders = rng.permutations(key, torch.full((12_000,), 3), 2, 3)
    for epoch in range(2):
        _, counts = orders[:, epoch].unique(dim=0, return_counts=True)
        assert len(counts) == 6
        assert stats.chisquare(counts.numpy()).pvalue > 1e-4
    # The order of one epoch says nothing of the next one's.
    place = orders[:, 0, 0] * 3 + orders[:, 1, 0]
    assert stats.chisquare(place.bincount(minlength=9).numpy()).pvalue > 1e-4
