"""Sequences [n, t, c]: recognised or declared, a network of convolutions along time, and new ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from command import Command

import bpfed
from bpfed import data
from bpfed._util.errors import UserError
from bpfed.methods import FedAvg
from bpfed.nn.networks import SequenceNet, default


def waves(seed: int, count: int = 40, steps: int = 48, channels: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Sequences whose class is their frequency; their phase is random."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 2
    turn = 2 * np.pi * np.array([0.06, 0.15])[y][:, None, None] * np.arange(steps)[None, :, None]
    x = np.sin(turn + rng.uniform(0, 2 * np.pi, (count, 1, channels))) + rng.normal(0, 0.3, (count, steps, channels))
    return x.astype(np.float32), np.array(["slow", "fast"])[y]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "npz").mkdir()
    for k, client in enumerate("ab"):
        x, y = waves(k)
        np.savez(tmp_path / "npz" / f"{client}.npz", x=x, y=y)
    return tmp_path / "npz"


def test_what_arrays_of_three_axes_are_taken_for_is_said(folder: Path) -> None:
    loaded = data.load(f"folder:{folder}", standardise="none")
    assert loaded.input_shape == (2, 1, 48)
    assert (
        loaded.notes[0]
        == "The inputs are sequences of 48 steps with 2 channels; if they are images, use --input image."
    )
    x = torch.cat([loaded.train.x, loaded.test.x])
    assert sorted(x[:, 1, 0].sum(1).tolist()) == pytest.approx(
        sorted(np.concatenate([waves(k)[0][:, :, 1].sum(1) for k in (0, 1)]).tolist()), abs=1e-4
    )
    said = data.load(f"folder:{folder}", input="image")
    assert said.input_shape == (1, 48, 2)
    assert said.notes[0] == "The inputs are greyscale images of 48 x 2 pixels."


def test_bytes_and_squares_are_images(tmp_path: Path) -> None:
    for name, x in {"bytes": np.zeros((6, 48, 2), np.uint8), "squares": np.zeros((6, 8, 8))}.items():
        x[::2] = 1
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "a.npz", x=x, y=np.arange(6) % 2)
        assert data.load(f"folder:{tmp_path / name}").input_shape == (1, *x.shape[1:])
    with pytest.raises(UserError, match="'conv1d', which is for sequences, but inputs have shape"):
        default((1, 8, 8), 2, network="conv1d")


def test_tables_have_neither_kind_nor_size(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{k},{k % 2}\n" for k in range(8)))
    for said in ({"input": "sequence"}, {"image_size": "8x8"}):
        with pytest.raises(UserError, match="is for images and sequences, but the inputs are columns of numbers"):
            data.load(f"folder:{tmp_path}", **said)


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 90])
def test_the_network_takes_sequences_of_any_length(steps: int) -> None:
    net = default((3, 1, steps), 4)
    assert isinstance(net, SequenceNet)
    assert net(torch.randn(5, 3, 1, steps)).shape == (5, 4)


def test_sequences_beat_the_same_numbers_as_images(folder: Path, untraced: None) -> None:
    scores = {}
    for kind in ("sequence", "image"):
        loaded = data.load(f"folder:{folder}", input=kind)
        run = bpfed.fit(
            FedAvg(lr=0.2), loaded, rounds=3, epochs=8, batch=10, compile="off", baselines="off", eval_every=3
        )
        scores[kind] = run.history[-1]["nll"]["pooled"]
    assert scores["sequence"] < 0.5 * scores["image"]


def test_a_run_on_folders_of_arrays_and_a_new_array(command: Command, tmp_path: Path) -> None:
    for k, client in enumerate("ab"):
        x, y = waves(k)
        (tmp_path / "npy" / client).mkdir(parents=True)
        np.save(tmp_path / "npy" / client / "x.npy", x)
        np.save(tmp_path / "npy" / client / "y.npy", y)
    run = ("run", "--data", "folder:npy", "--method", "fedavg", "--rounds", "1", "--epochs", "1", "--eval-draws", "1")
    made = command(*run, "--compile", "off", "--out", "r", "--quiet")
    assert "sequences of 48 steps with 2 channels" in made.out + made.err
    new = waves(9, 3)[0]
    np.save("new.npy", new)
    np.savez("new.npz", x=new)
    one, two = (command("predict", "r", "--client", "a", "--input", f"new.{e}").out for e in ("npy", "npz"))
    assert one == two
    assert len(one.splitlines()) == 4
    np.save("short.npy", new[:, :40])
    refused = command("predict", "r", "--client", "a", "--input", "short.npy").err
    assert "contains sequences of [40, 2], but training was on sequences of [48, 2]" in refused
    Path("bad.npy").write_bytes(b"\x93NUMPY\x01\x00junk")
    assert "is not a valid NPY file" in command("predict", "r", "--client", "a", "--input", "bad.npy").err
