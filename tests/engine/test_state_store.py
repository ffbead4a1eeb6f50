"""Stores: both give back what was put, and a killed process finds its last two snapshots as they were."""

from typing import NamedTuple

import pytest
import scenarios
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten

from bpfed.engine.state_store import FileStore, MemoryStore, make_store
from bpfed.inference.gaussian import Gaussian

CLIENTS = 6


class State(NamedTuple):
    """Something of everything: nested, a scalar's axis, a matrix, nothing."""

    eta: Gaussian
    steps: torch.Tensor
    matrix: torch.Tensor
    none: tuple = ()


FIRST = State(Gaussian(torch.arange(3.0), torch.ones(3)), torch.zeros(1), torch.full((2, 2), 7.0))


def state(clients, value):
    """A state for each of these clients, told apart by client and value."""
    base = 100.0 * torch.tensor(clients, dtype=torch.float32) + value
    return State(
        Gaussian(base[:, None] + torch.tensor([0.1, 0.2, 0.3]), base[:, None].expand(-1, 3)),
        base[:, None],
        base[:, None, None] + torch.arange(4.0).reshape(2, 2),
    )


def put(store, clients, value):
    store.put(torch.tensor(clients), state(clients, value))


def holds(store, expected):
    """Whether a store holds the value of each client, None for one that was never put."""
    everyone = list(range(CLIENTS))
    found = store.get(torch.tensor(everyone))
    for client in everyone:
        value = expected.get(client)
        wanted = tree_flatten(FIRST if value is None else state([client], value))[0]
        for mine, theirs in zip(tree_flatten(found)[0], wanted, strict=True):
            torch.testing.assert_close(mine[client], theirs.reshape(mine.shape[1:]))
    return True


@pytest.fixture(params=["memory", "file"])
def make(request, tmp_path):
    """Makes a store, or opens the same file again."""
    return lambda: make_store(request.param, FIRST, CLIENTS, torch.device("cpu"), tmp_path)


@pytest.fixture
def reopen(tmp_path):
    """The file store as a new process finds it."""
    return lambda: FileStore(FIRST, CLIENTS, tmp_path / "personal.f32")


def test_the_kind_asked_for_is_made(tmp_path):
    cpu = torch.device("cpu")
    assert isinstance(make_store("file", FIRST, CLIENTS, cpu, tmp_path), FileStore)
    assert isinstance(make_store("memory", FIRST, CLIENTS, cpu, tmp_path), MemoryStore)
    assert isinstance(make_store("auto", FIRST, CLIENTS, cpu, tmp_path), MemoryStore)
    assert isinstance(make_store("auto", FIRST, 10**7, cpu, tmp_path), FileStore)


def test_a_client_that_was_never_put_has_the_first_state(make):
    store = make()
    assert holds(store, {})
    put(store, [2], 1.0)
    assert holds(store, {2: 1.0})


def test_states_come_back_in_the_order_asked_for(make):
    store = make()
    put(store, [4, 1], 5.0)
    found = store.get(torch.tensor([1, 0, 4]))
    assert found.steps.flatten().tolist() == [105.0, 0.0, 405.0]
    assert found.matrix.shape == (3, 2, 2)
    assert found.none == ()


def test_what_was_got_is_not_changed_by_a_later_put(make):
    store = make()
    put(store, [0], 1.0)
    found = store.get(torch.tensor([0]))
    put(store, [0], 2.0)
    store.snapshot()
    put(store, [0], 3.0)
    assert found.steps.item() == 1.0


def test_a_snapshot_brings_that_moment_back(make):
    store = make()
    put(store, [0, 1], 1.0)
    first = store.snapshot()
    put(store, [1, 2], 2.0)
    assert holds(store, {0: 1.0, 1: 2.0, 2: 2.0})
    store.restore(first)
    assert holds(store, {0: 1.0, 1: 1.0})


def test_a_new_store_takes_up_a_snapshot(make):
    store = make()
    put(store, [3, 5], 1.0)
    snapshot = store.snapshot()
    other = make()
    other.restore({name: tensor.clone() for name, tensor in snapshot.items()})
    assert holds(other, {3: 1.0, 5: 1.0})


def test_whoever_only_reads_writes_nothing(tmp_path):
    store = FileStore(FIRST, CLIENTS, tmp_path / "a" / "states")
    put(store, [2], 1.0)
    snapshot = store.snapshot()
    before = (tmp_path / "a" / "states").stat()
    reader = FileStore(FIRST, CLIENTS, tmp_path / "a" / "states")
    reader.restore(snapshot)
    assert holds(reader, {2: 1.0})
    assert "_written" not in vars(reader)  # it was never opened for writing
    assert (tmp_path / "a" / "states").stat().st_mtime_ns == before.st_mtime_ns


def test_methods_that_keep_nothing_need_no_room(tmp_path):
    for kind in ("memory", "file"):
        store = make_store(kind, (), CLIENTS, torch.device("cpu"), tmp_path / kind)
        store.put(torch.tensor([1, 2]), ())
        assert store.get(torch.tensor([1, 2, 3])) == ()
        store.restore(store.snapshot())


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.lists(st.integers(0, CLIENTS - 1), min_size=1, unique=True)),
        st.sampled_from([("snapshot", None), ("back", None), ("back twice", None), ("killed", None)]),
    ),
    max_size=20,
)


@settings(max_examples=30, deadline=None)
@given(operations=OPERATIONS)
def test_both_stores_hold_what_a_dictionary_would_whenever_they_are_killed(operations, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")

    def fresh():
        memory = MemoryStore(FIRST, CLIENTS)
        return memory, FileStore(FIRST, CLIENTS, folder / "personal.f32")

    memory, file = fresh()
    truth, value = {}, 0.0
    kept = [({}, *(store.snapshot() for store in (memory, file)))]  # the last two snapshots, oldest first
    for what, clients in operations:
        if what == "put":
            value += 1.0
            for store in (memory, file):
                put(store, clients, value)
            truth = truth | dict.fromkeys(clients, value)
        elif what == "snapshot":
            kept = [*kept, (dict(truth), memory.snapshot(), file.snapshot())][-2:]
        else:
            if what == "killed":  # a new process, with what the last one left in the file
                memory, file = fresh()
            if what == "back twice":  # the last snapshot turns out to be damaged
                kept = kept[:1]
            truth = dict(kept[-1][0])
            memory.restore(kept[-1][1])
            file.restore(kept[-1][2])
        assert holds(memory, truth)
        assert holds(file, truth)


def test_puts_that_were_never_committed_leave_the_last_two_snapshots_intact(reopen):
    store = reopen()
    put(store, [0, 1], 1.0)
    older = store.snapshot()
    put(store, [0], 2.0)
    last = store.snapshot()
    put(store, [0, 1, 2], 3.0)
    put(store, [0], 4.0)  # and here the process is killed
    store = reopen()
    store.restore(last)
    assert holds(store, {0: 2.0, 1: 1.0})
    store = reopen()
    store.restore(older)
    assert holds(store, {0: 1.0, 1: 1.0})


def test_a_process_killed_again_after_a_restart_can_still_go_back_by_one_more(reopen):
    store = reopen()
    put(store, [0], 1.0)
    older = store.snapshot()
    put(store, [0], 2.0)
    last = store.snapshot()
    for attempt in range(3):  # each time the process restarts, gets on a little, and is killed
        store = reopen()
        store.restore(last)
        assert holds(store, {0: 2.0})
        put(store, [0], 10.0 + attempt)
    store = reopen()
    store.restore(older)  # the last snapshot's own file is damaged
    assert holds(store, {0: 1.0})
    put(store, [0], 20.0)
    assert holds(store, {0: 20.0})


def test_states_are_kept_exactly(make):
    values = torch.randn(4, generator=scenarios.generator())
    store = make()
    kept = state([1], 0.0)._replace(matrix=values.reshape(1, 2, 2))
    store.put(torch.tensor([1]), kept)
    assert torch.equal(store.get(torch.tensor([1])).matrix, kept.matrix)
