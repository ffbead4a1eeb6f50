"""Partitions: disjoint, complete where meant, never empty, and always finished."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bpfed._util.errors import UserError
from bpfed.data import partition
from bpfed.data.partition import KINDS, Partition, parse_partition

ys = st.lists(st.integers(0, 6), min_size=1, max_size=80).map(np.array)
seeds = st.integers(0, 2**32)


def deal(text: str, y: np.ndarray, clients: int, seed: int = 0) -> list[np.ndarray]:
    return dealt(parse_partition(text), y, clients, seed)


def dealt(partition: Partition, y: np.ndarray, clients: int, seed: int = 0) -> list[np.ndarray]:
    """Indices of each client's examples."""
    owners = partition.owners(y, clients, np.random.default_rng(seed))
    return [np.flatnonzero(owners == client) for client in range(clients)]


def check(parts: list[np.ndarray], clients: int) -> np.ndarray:
    """Every client has something and nobody shares; returns all indices, sorted."""
    assert len(parts) == clients
    assert all(len(p) for p in parts)
    indices = np.sort(np.concatenate(parts))
    assert len(np.unique(indices)) == len(indices)
    return indices


@settings(max_examples=150, deadline=None)
@given(y=ys, data=st.data(), alpha=st.floats(5e-324, 1e300), seed=seeds)
@example(y=np.arange(7), data=None, alpha=5e-324, seed=0)
@example(y=np.arange(7), data=None, alpha=1e300, seed=0)
def test_dirichlet_deals_everything_to_everyone(y: np.ndarray, data, alpha: float, seed: int) -> None:
    clients = data.draw(st.integers(1, len(y))) if data else len(y)
    parts = dealt(Partition("dirichlet", alpha), y, clients, seed)
    np.testing.assert_array_equal(check(parts, clients), np.arange(len(y)))


@settings(max_examples=60, deadline=None)
@given(y=ys, data=st.data(), seed=seeds)
def test_iid_sizes_differ_by_one_at_most(y: np.ndarray, data, seed: int) -> None:
    clients = data.draw(st.integers(1, len(y)))
    parts = deal("iid", y, clients, seed)
    np.testing.assert_array_equal(check(parts, clients), np.arange(len(y)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@settings(max_examples=60, deadline=None)
@given(y=ys, data=st.data(), k=st.integers(1, 4), seed=seeds)
def test_shards_are_k_runs_of_the_sorted_labels(y: np.ndarray, data, k: int, seed: int) -> None:
    clients = data.draw(st.integers(1, len(y)))
    if clients * k > len(y):
        with pytest.raises(UserError, match="shards"):
            deal(f"shards:{k}", y, clients, seed)
        return
    parts = deal(f"shards:{k}", y, clients, seed)
    np.testing.assert_array_equal(check(parts, clients), np.arange(len(y)))
    # A run holds at most the labels that begin within it and the one that began before it.
    longest_run = -(-len(y) // (clients * k))
    runs = [np.unique(np.sort(y)[i : i + longest_run]).size for i in range(len(y))]
    assert all(np.unique(y[p]).size <= k * max(runs) for p in parts)


@settings(max_examples=100, deadline=None)
@given(y=ys, data=st.data(), k=st.integers(1, 7), kind=st.sampled_from(["groups", "random"]), seed=seeds)
def test_label_partitions_give_exactly_k_labels_or_say_why_not(
    y: np.ndarray, data, k: int, kind: str, seed: int
) -> None:
    clients = data.draw(st.integers(1, len(y)))
    try:
        parts = deal(f"{kind}:{k}", y, clients, seed)
    except UserError:
        counts = np.unique(y, return_counts=True)[1]
        if kind == "random":
            # Refused only where it cannot be: no choice of labels serves that many clients.
            assert k > len(counts) or np.minimum(counts, clients).sum() < clients * k
        else:
            held = partition.groups(clients, len(counts), k) if k <= len(counts) else None
            assert held is None or (held.sum(0) > counts).any()
        return
    indices = check(parts, clients)
    assert {len(np.unique(y[p])) for p in parts} == {k}
    held = np.isin(y, np.unique(y[indices]))
    np.testing.assert_array_equal(indices, np.flatnonzero(held))  # all of every label that anyone holds
    if clients * k >= len(np.unique(y)):
        assert held.all()


@settings(max_examples=100, deadline=None)
@given(clients=st.integers(1, 40), serves=st.lists(st.integers(0, 50), min_size=3, max_size=10), seed=seeds)
def test_random_labels_are_as_even_as_they_can_be(clients: int, serves: list[int], seed: int) -> None:
    k, most = 3, np.minimum(serves, clients)
    if most.sum() < clients * k:
        with pytest.raises(UserError, match="fewer clients"):
            partition.at_random(clients, np.array(serves), k, np.random.default_rng(seed))
        return
    table = partition.at_random(clients, np.array(serves), k, np.random.default_rng(seed))
    count = table.sum(0)
    assert (table.sum(1) == k).all()
    assert (count <= most).all()
    # Moving a client from a fuller label to an emptier one that has room would never make it more even.
    room = count[count < most]
    assert not len(room) or count.max() - room.min() <= 1


def test_random_label_sets_really_vary() -> None:
    # Dealing labels round without trades would give pairs of clients with complementary sets.
    tables = [partition.at_random(10, np.full(10, 10), 5, np.random.default_rng(s)) for s in range(200)]
    overlap = np.array([(t[0] & t[1]).sum() for t in tables])
    assert np.bincount(overlap, minlength=6)[1:5].min() > 0
    # Two sets of 5 labels of 10: 2.5 in common if free, 20/9 where each label has exactly 5 clients of 10.
    assert abs(overlap.mean() - 20 / 9) < 0.3
    assert abs(np.mean(tables, axis=0) - 0.5).max() < 0.15


def test_the_papers_groups() -> None:
    held = partition.groups(4, 10, 5)
    assert [np.flatnonzero(row).tolist() for row in held] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] * 2
    assert np.flatnonzero(partition.groups(4, 10, 3)[3]).tolist() == [0, 1, 9]


def test_a_class_is_shared_evenly() -> None:
    y = np.repeat(np.arange(10), 103)
    for text in ("groups", "random", "random:3"):
        parts = deal(text, y, 10)
        counts = np.array([np.bincount(y[p], minlength=10) for p in parts])
        for column in counts.T:
            assert np.ptp(column[column > 0]) <= 1


@pytest.mark.parametrize("text", ["dirichlet:1e-9", "dirichlet:0.1"])
def test_very_many_clients_and_strong_skew_end(text: str) -> None:
    y = np.arange(40_000) % 10
    parts = deal(text, y, 30_000)
    np.testing.assert_array_equal(check(parts, 30_000), np.arange(40_000))


def test_alpha_is_the_skew() -> None:
    y = np.arange(20_000) % 10

    def top_share(alpha: float) -> float:
        return float(np.mean([np.bincount(y[p]).max() / len(p) for p in deal(f"dirichlet:{alpha}", y, 20)]))

    shares = [top_share(a) for a in (0.01, 0.3, 3, 1000)]
    assert all(a > b for a, b in pairwise(shares))
    assert shares[0] > 0.9
    assert shares[-1] < 0.12


@pytest.mark.parametrize("text", ["groups", "random:3", "dirichlet:0.3", "shards:2", "iid"])
def test_the_seed_decides(text: str) -> None:
    y = np.arange(1000) % 10
    first, again, other = (deal(text, y, 10, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        *(("groups", "groups"), ("groups:5", "groups"), ("random", "random"), ("random:3", "random:3")),
        *(("dirichlet:0.30", "dirichlet:0.3"), ("dirichlet", "dirichlet:0.3"), ("shards", "shards:2")),
        *(("iid", "iid"), (" iid ", "iid")),
    ],
)
def test_parse(text: str, canonical: str) -> None:
    assert str(parse_partition(text)) == canonical
    assert parse_partition(canonical) == parse_partition(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dirichet:0.3", "did you mean 'dirichlet'"),
        ("", "Unknown partition ''"),
        ("dirichlet:0", "a number above 0"),
        ("dirichlet:-1", "a number above 0"),
        ("dirichlet:nan", "a number above 0"),
        ("dirichlet:inf", "a number above 0"),
        ("dirichlet:", "a number above 0"),
        ("random:0", "a whole number of at least 1"),
        ("random:2.5", "a whole number of at least 1"),
        ("shards:x", "a whole number of at least 1"),
        ("iid:3", "takes no number; write 'iid' instead of 'iid:3'"),
        ("natural", "'natural' is only for data with its own clients; choose another partition: groups, random"),
    ],
)
def test_parse_says_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_partition(text)


@pytest.mark.parametrize(
    ("text", "clients", "words"),
    [
        *((f"{kind}", 11, "11 clients cannot share 10 examples") for kind in KINDS),
        *((f"{kind}", 0, "ask for at least 1") for kind in KINDS),
        ("random:11", 2, "11 labels per client, but the data has 10"),
        ("groups:11", 2, "11 labels per client, but the data has 10"),
        ("groups:5", 4, "A label with 1 examples cannot be given to 2 clients"),
        ("random:5", 4, "use fewer clients"),
        ("shards:3", 4, "12 shards"),
    ],
)
def test_what_cannot_be_is_one_sentence(text: str, clients: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        deal(text, np.arange(10), clients)
