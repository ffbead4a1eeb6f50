"""A federation's state goes to disk and comes back bit by bit, or it is known that it did not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import flip
from scenarios import classification
from torch.utils._pytree import tree_flatten, tree_map

from bpfed._util.errors import UserError
from bpfed.config.settings import Settings
from bpfed.engine.federation import Federation
from bpfed.methods import BPFed, FedAvg
from bpfed.methods.base import Method
from bpfed.runs import checkpoint

METHODS = [BPFed(), BPFed(keep_adam=True), BPFed(personal="none"), FedAvg()]


def federation(method: Method, folder: Path | None = None, store: str = "memory", checkpoints: int = 2) -> Federation:
    return Federation.start(method, classification(), Settings(store=store, checkpoints=checkpoints), folder=folder)


def advance(state: Federation, seed: int) -> None:
    """A round in which clients 1 and 3 come back with something."""
    g = torch.Generator().manual_seed(seed)

    def other(t: torch.Tensor) -> torch.Tensor:
        return torch.rand(t.shape, generator=g).to(t.device)

    state.shared = tree_map(other, state.shared)
    who = torch.tensor([1, 3])
    state.store.put(who, tree_map(other, state.store.get(who)))
    state.round += 1


def everything(state: Federation) -> list[torch.Tensor]:
    return tree_flatten((state.shared, state.store.get(torch.arange(len(state)))))[0]


@pytest.mark.parametrize("store", ["memory", "file"])
@pytest.mark.parametrize("method", METHODS)
def test_what_comes_back_is_what_was_saved(tmp_path: Path, method: Method, store: str) -> None:
    saved = federation(method, tmp_path / "state", store)
    for round_ in range(5):
        advance(saved, round_)
        checkpoint.save(tmp_path / "c", saved, {"seconds": 1.5, "word": "σ"})
    there = federation(method, tmp_path / "state", store)
    found = checkpoint.restore(tmp_path / "c", there)
    assert found == checkpoint.Restored(5, {"seconds": 1.5, "word": "σ"}, ())
    assert there.round == 5
    for a, b in zip(everything(saved), everything(there), strict=True):
        assert torch.equal(a, b)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "round-000004.json",
        "round-000004.safetensors",
        "round-000005.json",
        "round-000005.safetensors",
    ]


def test_what_a_kill_left_behind_goes_with_the_next(tmp_path: Path) -> None:
    state = federation(BPFed())
    for round_ in range(4):
        advance(state, round_)
        checkpoint.save(tmp_path / "c", state, {})
        if round_ == 1:  # as if killed between the removal of the two files of a checkpoint
            (tmp_path / "c/round-000001.json").unlink()
    assert sorted(p.stem for p in (tmp_path / "c").glob("*.safetensors")) == ["round-000003", "round-000004"]


def test_nothing_there_is_nothing_found(tmp_path: Path) -> None:
    state = federation(BPFed())
    assert checkpoint.restore(tmp_path / "c", state) is None
    assert state.round == 0


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def a_list(path: Path) -> None:
    path.write_text("[]")


def another_round(path: Path) -> None:
    path.write_text(path.read_text().replace('"round": 3', '"round": 7'))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = [
    ("safetensors", truncated),
    ("safetensors", flip),
    ("safetensors", emptied),
    ("safetensors", Path.unlink),
    ("safetensors", a_folder),
    ("json", emptied),
    ("json", a_list),
    ("json", another_round),
    ("json", truncated),
]


@pytest.mark.parametrize("store", ["memory", "file"])
@pytest.mark.parametrize(("suffix", "damage"), DAMAGE)
def test_damage_is_seen_and_the_one_before_is_taken(
    tmp_path: Path, suffix: str, damage: Callable[[Path], None], store: str
) -> None:
    state = federation(BPFed(), tmp_path / "state", store)
    before: list[torch.Tensor] = []
    for round_ in range(3):
        before = [t.clone() for t in everything(state)]
        advance(state, round_)
        checkpoint.save(tmp_path / "c", state, {})
    damage(tmp_path / f"c/round-000003.{suffix}")
    there = federation(BPFed(), tmp_path / "state", store)
    found = checkpoint.restore(tmp_path / "c", there)
    assert found == checkpoint.Restored(2, {}, ("round-000003",))
    for a, b in zip(before, everything(there), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_never_written(tmp_path: Path, value: float) -> None:
    state = federation(BPFed())
    advance(state, 0)
    checkpoint.save(tmp_path / "c", state, {})
    before = sorted(path.name for path in (tmp_path / "c").iterdir())
    advance(state, 1)
    state.shared = state.shared._replace(mean=torch.full_like(state.shared.mean, value))
    with pytest.raises(UserError, match="state after round 2 is not finite, so it is not kept"):
        checkpoint.save(tmp_path / "c", state, {})
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == before


def test_a_state_that_is_not_finite_is_not_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As earlier versions could write one."""
    state = federation(BPFed())
    monkeypatch.setattr(checkpoint, "finite", lambda state: True)
    for round_ in range(2):
        advance(state, round_)
        if round_:
            state.shared = tree_map(lambda t: torch.full_like(t, float("inf")), state.shared)
        checkpoint.save(tmp_path / "c", state, {})
    monkeypatch.undo()
    there = federation(BPFed())
    assert checkpoint.restore(tmp_path / "c", there) == checkpoint.Restored(1, {}, ("round-000002",))
    assert all(torch.isfinite(t).all() for t in everything(there))


@pytest.mark.parametrize("store", ["memory", "file"])
@pytest.mark.parametrize("back_to", [3, 4, 5, 7])
def test_a_run_goes_back_to_any_round_that_is_kept(tmp_path: Path, store: str, back_to: int) -> None:
    state = federation(BPFed(), tmp_path / "state", store, checkpoints=5)
    after: dict[int, list[torch.Tensor]] = {}
    for round_ in range(7):
        advance(state, round_)
        checkpoint.save(tmp_path / "c", state, {})
        after[state.round] = [t.clone() for t in everything(state)]
    assert checkpoint.go_back(tmp_path / "c", back_to) == 7 - back_to
    there = federation(BPFed(), tmp_path / "state", store, checkpoints=3)  # as a run that goes on with another number
    assert checkpoint.restore(tmp_path / "c", there) == checkpoint.Restored(back_to, {}, ())
    for round_ in range(back_to, 9):
        for a, b in zip(after.get(round_, everything(there)), everything(there), strict=True):
            assert torch.equal(a, b)
        advance(there, round_)
        checkpoint.save(tmp_path / "c", there, {})
    assert len(list((tmp_path / "c").glob("*.json"))) == 3
    checkpoint.go_back(tmp_path / "c", 8)
    checkpoint.restore(tmp_path / "c", there)
    advance(there, 8)
    checkpoint.save(tmp_path / "c", there, {})
    again = everything(there)
    checkpoint.restore(tmp_path / "c", there)
    assert all(torch.equal(a, b) for a, b in zip(again, everything(there), strict=True))


def test_a_file_of_three_slots_goes_on(tmp_path: Path) -> None:
    """As version 0.7 wrote it, with its one older snapshot: no more are kept than it has room for."""
    old = federation(BPFed(), tmp_path / "state", "file", checkpoints=2)
    snapshot = old.store.snapshot
    old.store.snapshot = lambda: {k: v[0] if k == "older" else v for k, v in snapshot().items()}  # type: ignore
    for round_ in range(3):
        advance(old, round_)
        checkpoint.save(tmp_path / "c", old, {})
    there = federation(BPFed(), tmp_path / "state", "file", checkpoints=5)
    assert checkpoint.restore(tmp_path / "c", there) == checkpoint.Restored(3, {}, ())
    assert all(torch.equal(a, b) for a, b in zip(everything(old), everything(there), strict=True))
    for round_ in range(3, 8):
        advance(there, round_)
        checkpoint.save(tmp_path / "c", there, {})
    assert sorted(p.stem for p in (tmp_path / "c").glob("*.json")) == ["round-000007", "round-000008"]


def test_going_back_to_a_round_that_is_not_kept_changes_nothing_and_says_which_are(tmp_path: Path) -> None:
    state = federation(BPFed(), checkpoints=3)
    for round_ in range(4):
        advance(state, round_)
        checkpoint.save(tmp_path / "c", state, {})
    emptied(tmp_path / "c/round-000003.json")
    before = sorted(path.name for path in (tmp_path / "c").iterdir())
    for round_ in (1, 3, 5):
        with pytest.raises(UserError, match=rf"no checkpoint of round {round_} in .*: 2, 4 \(run.checkpoints says"):
            checkpoint.go_back(tmp_path / "c", round_)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == before


def test_the_lengths_of_updates_are_kept(tmp_path: Path) -> None:
    state = federation(BPFed())
    advance(state, 0)
    state.lengths = {"mean": [0.1, 1e-300, 1 / 3]}
    checkpoint.save(tmp_path / "c", state, {})
    there = federation(BPFed())
    checkpoint.restore(tmp_path / "c", there)
    assert there.lengths == state.lengths


def test_if_none_is_sound_it_says_so(tmp_path: Path) -> None:
    state = federation(BPFed())
    for round_ in range(2):
        advance(state, round_)
        checkpoint.save(tmp_path / "c", state, {})
    for path in (tmp_path / "c").glob("*.json"):
        emptied(path)
    with pytest.raises(UserError, match=r"All checkpoints in '.*' are damaged \(round-000002, round-000001\)"):
        checkpoint.restore(tmp_path / "c", federation(BPFed()))


def test_the_state_of_another_method_does_not_fit(tmp_path: Path) -> None:
    state = federation(FedAvg())
    advance(state, 0)
    checkpoint.save(tmp_path / "c", state, {})
    with pytest.raises(UserError, match="are damaged"):
        checkpoint.restore(tmp_path / "c", federation(BPFed()))


def test_nothing_in_a_checkpoint_can_execute(tmp_path: Path) -> None:
    state = federation(BPFed())
    advance(state, 0)
    checkpoint.save(tmp_path / "c", state, {})
    data = (tmp_path / "c/round-000001.safetensors").read_bytes()
    assert data[8:9] == b"{"  # a length and JSON, then bare numbers: no pickle
    assert b"torch" not in data
