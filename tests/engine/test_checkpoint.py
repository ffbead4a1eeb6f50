"""A federation's state goes to disk and comes back bit by bit, or it is known that it did not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import flip
from scenarios import classification
from torch.utils._pytree import tree_flatten, tree_map

from bpfed.engine import checkpoint
from bpfed.engine.federation import Federation
from bpfed.engine.settings import Settings
from bpfed.errors import UserError
from bpfed.methods import BPFed, FedAvg
from bpfed.methods.base import Method

METHODS = [BPFed(), BPFed(keep_adam=True), BPFed(personal="none"), FedAvg()]


def federation(method: Method, folder: Path | None = None, store: str = "memory") -> Federation:
    return Federation.start(method, classification(), Settings(store=store), folder=folder)


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


def test_a_run_that_diverged_is_not_damaged(tmp_path: Path) -> None:
    state = federation(BPFed())
    advance(state, 0)
    state.shared = tree_map(lambda t: torch.full_like(t, float("nan")), state.shared)
    checkpoint.save(tmp_path / "c", state, {})
    assert checkpoint.restore(tmp_path / "c", federation(BPFed())) == checkpoint.Restored(1, {}, ())


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
