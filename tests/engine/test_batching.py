"""Plans: every example once an epoch, in batches of the right size, whoever else trains."""

import scenarios
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bpfed.engine.batching import plan
from bpfed.inference import rng

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5)


def planned(sizes, batch, epochs, before=0, longest=None, width=None):
    size = torch.tensor(sizes)
    longest = longest or int(size.max())
    return plan(
        shuffle=scenarios.keys(len(sizes), word=1),
        key=scenarios.keys(len(sizes), word=2),
        start=torch.cat([torch.zeros(1, dtype=torch.int64), size.cumsum(0)[:-1]]),
        size=size,
        batch=batch,
        epochs_before=before,
        epochs=epochs,
        longest=longest,
        width=width or min(batch, longest),
    )


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, batch=st.integers(1, 12), epochs=st.integers(1, 3))
def test_every_example_is_seen_once_in_every_epoch_in_batches_of_the_right_size(sizes, batch, epochs):
    found = planned(sizes, batch, epochs)
    begin = 0
    for s, size in enumerate(sizes):
        per_epoch = -(-size // batch)
        assert found.steps[s] == per_epoch * epochs
        assert found.size[s] == size
        for epoch in range(epochs):
            steps = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
            mask = found.mask[steps, s].bool()
            seen = found.rows[steps, s][mask]
            assert sorted(seen.tolist()) == list(range(begin, begin + size))
            expected = [min(batch, size - k * batch) for k in range(per_epoch)]
            assert mask.sum(-1).tolist() == expected
            # Examples come first, padding after them.
            assert all(row[:n].all() for row, n in zip(mask, expected, strict=True))
        assert not found.mask[per_epoch * epochs :, s].any()
        # Padding is some row of the same client, never another client's.
        assert ((found.rows[:, s] >= begin) & (found.rows[:, s] < begin + size)).all()
        begin += size
    assert len(found.rows) >= int(found.steps.max())


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, batch=st.integers(1, 12), spare=st.integers(0, 30))
def test_a_clients_plan_depends_on_neither_its_neighbours_nor_the_padding(sizes, batch, spare):
    longest = max(sizes)
    together = planned(sizes, batch, 2)
    wider = planned(sizes, batch, 2, longest=longest + spare, width=min(batch, longest) + spare)
    width = min(batch, longest)
    for s in range(len(sizes)):
        steps = int(together.steps[s])
        mask = together.mask[:steps, s]
        assert torch.equal(mask, wider.mask[:steps, s, :width])
        assert not wider.mask[:steps, s, width:].any()
        real = mask.bool()
        assert torch.equal(together.rows[:steps, s][real], wider.rows[:steps, s, :width][real])
        assert torch.equal(together.key[:steps, s], wider.key[:steps, s])


def test_orders_differ_between_epochs_and_clients():
    found = planned([30, 30], batch=30, epochs=2)
    first, second = found.rows[0], found.rows[1]
    assert (first[0] != second[0]).any()
    assert (first[0] != first[1] - 30).any()


def test_a_later_phase_goes_on_where_the_earlier_one_ended():
    whole = planned([7, 12], batch=5, epochs=3)
    late = planned([7, 12], batch=5, epochs=2, before=1)
    for s, per_epoch in enumerate((2, 3)):
        steps = 2 * per_epoch
        real = late.mask[:steps, s].bool()
        assert torch.equal(late.mask[:steps, s], whole.mask[per_epoch : per_epoch + steps, s])
        assert torch.equal(late.rows[:steps, s][real], whole.rows[per_epoch : per_epoch + steps, s][real])
        assert torch.equal(late.key[:steps, s], whole.key[per_epoch : per_epoch + steps, s])


def test_every_step_of_every_client_has_a_key_of_its_own():
    found = planned([7, 12, 1], batch=2, epochs=3)
    assert len(found.key.reshape(-1, 2).unique(dim=0)) == found.key[..., 0].numel()
    second = rng.fold(scenarios.keys(3, word=2)[1], 4)
    assert torch.equal(found.key[4, 1], second)
