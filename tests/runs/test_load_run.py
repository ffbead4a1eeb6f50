"""A run read back from its folder predicts as the run itself did, and needs none of its data."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from command import as_before_manifests, metrics
from scenarios import classification, regression, small_mlp
from torch import nn

import bpfed
from bpfed.callbacks import Callback, Folder
from bpfed.inference.likelihoods import Normal
from bpfed.methods import METHODS, BPFed, FedAvg

QUICK = {"rounds": 2, "epochs": 1, "eval_draws": 3}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[bpfed.Run, Path]:
    """A finished run and its folder."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    return bpfed.fit(BPFed(), classification(), out=folder, participants=3, **QUICK), folder


def test_a_loaded_run_says_and_predicts_what_the_run_did(kept: tuple[bpfed.Run, Path], tmp_path: Path) -> None:
    run, folder = kept
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    loaded = bpfed.Run.load(moved)
    assert loaded.finished
    x = run.data.test.x
    assert [c.name for c in loaded.clients()] == list(run.data.clients)
    for one, other in zip(run.clients(), loaded.clients(), strict=True):
        assert torch.equal(one.predict(x).probs, other.predict(x).probs)
    assert loaded.summary() == run.summary()
    assert loaded.record().config == run.record().config
    assert loaded.record().evaluation == json.loads((folder / "evaluation.json").read_text())
    assert loaded.report(tmp_path / "again.html").read_text() == (folder / "report.html").read_text()
    assert loaded.train() is loaded
    assert not len(loaded.data.train.y)


def test_the_data_file_names_everything_but_the_examples(kept: tuple[bpfed.Run, Path]) -> None:
    run, folder = kept
    card = json.loads((folder / "data.json").read_text())
    assert card["clients"] == list(run.data.clients)
    assert card["train_sizes"] == run.data.train.sizes.tolist()
    assert (card["task"], card["classes"], card["input_shape"]) == ("classification", 3, [4])


@pytest.mark.parametrize("store", ["memory", "file"])
def test_regressions_and_stores(tmp_path: Path, store: str) -> None:
    data = regression()
    run = bpfed.fit(BPFed(), data, likelihood=Normal(0.5, learnt=False), out=tmp_path / "a", store=store, **QUICK)
    loaded = bpfed.Run.load(tmp_path / "a")
    one, other = (r.client("site 1").predict(data.test.x) for r in (run, loaded))
    assert torch.equal(one.mean, other.mean)
    assert torch.equal(one.scale, other.scale)


def test_states_that_an_earlier_version_kept_otherwise_are_not_called_damaged(tmp_path: Path) -> None:
    bpfed.fit("fedsoul", classification(), out=tmp_path / "a", **QUICK)
    bpfed.Run.load(as_before_manifests(tmp_path / "a"))
    path = tmp_path / "a" / "config.toml"
    path.write_text(path.read_text().replace(bpfed.__version__, "0.5.0", 1))
    with pytest.raises(
        bpfed.UserError, match=r"is of bpfed 0\.5\.0, and fedsoul keeps other states since 0\.6\.0; use it"
    ):
        bpfed.Run.load(tmp_path / "a")


def test_a_network_of_ones_own_must_be_given_again_and_be_the_same(tmp_path: Path) -> None:
    data, folder = classification(), tmp_path / "a"
    run = bpfed.fit(FedAvg(), data, model=small_mlp(seed=1), out=folder, **QUICK)
    with pytest.raises(bpfed.UserError, match=r"has a network of its own; give the module .* as model\.$"):
        bpfed.Run.load(folder)
    with pytest.raises(bpfed.UserError, match=r"Parameter '.*' of the module given is shape \[7.* and shape \[6"):
        bpfed.Run.load(folder, model=small_mlp(hidden=7))
    with pytest.raises(
        bpfed.UserError, match=r"Parameter '1.bias' of the module given is missing here and shape \[6\] in"
    ):
        bpfed.Run.load(folder, model=nn.Sequential(OrderedDict(a=nn.Linear(4, 6), b=nn.ReLU(), c=nn.Linear(6, 3))))
    loaded = bpfed.Run.load(folder, model=small_mlp(seed=2))  # its first weights do not matter
    assert torch.equal(loaded.clients()[0].predict(data.test.x).probs, run.clients()[0].predict(data.test.x).probs)
    assert torch.equal(loaded.federation.model.initial, run.federation.model.initial)


def test_same_shapes_are_not_the_same_network(tmp_path: Path) -> None:
    twin = nn.Sequential(
        nn.Flatten(), nn.Linear(4, 100), nn.Tanh(), nn.Linear(100, 3)
    )  # the default one, but for the tanh
    bpfed.fit(FedAvg(), classification(), model=twin, out=tmp_path / "a", **QUICK)
    with pytest.raises(bpfed.UserError, match="has a network of its own"):
        bpfed.Run.load(tmp_path / "a")


@pytest.mark.parametrize("hidden", [7, 100])
def test_a_run_knows_how_wide_its_network_is(tmp_path: Path, hidden: int) -> None:
    data, folder = classification(), tmp_path / "a"
    run = bpfed.fit(BPFed(), data, hidden=hidden, out=folder, **QUICK)
    wanted = run.clients()[1].predict(data.test.x).probs
    loaded = bpfed.Run.load(folder)
    assert torch.equal(loaded.clients()[1].predict(data.test.x).probs, wanted)
    newcomer = loaded.adapt(*data.train.client(0), steps=5, name="new")
    assert torch.equal(
        newcomer.predict(data.test.x).probs,
        run.adapt(*data.train.client(0), steps=5, name="new").predict(data.test.x).probs,
    )
    config = as_before_manifests(folder) / "config.toml"  # of an older run, which had no such setting
    config.write_text(config.read_text().replace(f"hidden = {hidden}\n", ""))
    assert "hidden" not in config.read_text()
    if hidden == 100:
        assert torch.equal(bpfed.Run.load(folder).clients()[1].predict(data.test.x).probs, wanted)
    else:
        with pytest.raises(bpfed.UserError, match="has a network of its own"):
            bpfed.Run.load(folder)


def test_a_run_that_was_broken_off_predicts_from_its_last_checkpoint(tmp_path: Path) -> None:
    class Breaks(Callback):
        def round(self, run: bpfed.Run, info: object, record: object) -> None:
            if run.federation.round == 2:
                raise ZeroDivisionError

    data = classification()
    with pytest.raises(ZeroDivisionError):
        bpfed.fit(FedAvg(), data, out=tmp_path / "a", rounds=3, epochs=1, callbacks=[Breaks()])
    loaded = bpfed.Run.load(tmp_path / "a")
    assert not loaded.finished
    assert loaded.federation.round == 2
    whole = bpfed.fit(FedAvg(), data, rounds=2, epochs=1)
    assert torch.equal(loaded.clients()[0].predict(data.test.x).probs, whole.clients()[0].predict(data.test.x).probs)
    assert "round 2" in loaded.summary()
    with pytest.raises(bpfed.UserError, match="loaded without its data"):
        loaded.train()
    with pytest.raises(bpfed.UserError, match="is not finished"):
        loaded.detail()


def test_a_run_whose_folder_lacks_a_file_or_has_a_damaged_one(kept: tuple[bpfed.Run, Path], tmp_path: Path) -> None:
    run, folder = kept
    with pytest.raises(bpfed.UserError, match="is not a run folder"):
        bpfed.Run.load(tmp_path)
    for name in ("data.json", "model.safetensors"):
        broken = Path(shutil.copytree(folder, tmp_path / name))
        (broken / name).write_bytes(b"{}")
        with pytest.raises(
            bpfed.UserError, match=rf"{name}' is damaged, or of another run: .* write it again with: bpfed run"
        ):
            bpfed.Run.load(broken)
        (broken / name).unlink()
        with pytest.raises(bpfed.UserError, match="--resume"):
            bpfed.Run.load(broken)
        # As the sentence says, resuming adds what is missing; an older run is mended so.
        bpfed.fit(BPFed(), classification(), out=broken, resume=True, say=str, participants=3, **QUICK)
        assert torch.equal(
            bpfed.Run.load(broken).clients()[1].predict(run.data.test.x).probs,
            run.clients()[1].predict(run.data.test.x).probs,
        )
    for path in (folder / "checkpoint").iterdir():
        if path.name.startswith("round-000002"):
            (tmp_path / "data.json/checkpoint" / path.name).write_bytes(b"x")
    said_: list[str] = []
    assert bpfed.Run.load(tmp_path / "data.json", say=said_.append).federation.round == 1
    assert said_ == ["Checkpoint round-000002 is damaged; the one before is used, of round 1."]


def test_calibration_is_kept_with_the_run(tmp_path: Path) -> None:
    data = classification((40, 40))
    run = bpfed.fit(BPFed(), data, out=tmp_path / "a", calibration=0.5, scaling="client", **QUICK)
    loaded = bpfed.Run.load(tmp_path / "a")
    for one, other in zip(run.clients(), loaded.clients(), strict=True):
        mine, kept = (client.predict(data.test.x) for client in (one, other))
        assert torch.equal(mine.probs, kept.probs)
        assert torch.equal(mine.prediction_set(0.9), kept.prediction_set(0.9))
    assert mine.raw is not None  # a temperature was applied
    (tmp_path / "a" / "calibration.json").unlink()
    with pytest.raises(bpfed.UserError, match=r"calibration.json' is missing or cannot be read"):
        bpfed.Run.load(tmp_path / "a")
    with pytest.raises(bpfed.UserError, match=r"lacks what was calibrated \(calibration.json\)"):
        bpfed.Run.load(as_before_manifests(tmp_path / "a"))


@pytest.mark.parametrize(
    ("name", "content"),
    [("metrics.jsonl", "5\n"), ("metrics.jsonl", "{}\n"), ("summary.json", "{}"), ("evaluation.json", "[]")],
)
def test_files_of_another_shape_are_damaged(
    kept: tuple[bpfed.Run, Path], tmp_path: Path, name: str, content: str
) -> None:
    broken = Path(shutil.copytree(kept[1], tmp_path / "broken"))
    (broken / name).write_text(content)
    with pytest.raises(bpfed.UserError, match=f"{name}' is damaged"):
        bpfed.Run.load(broken).summary()


def test_a_method_that_tunes_is_resumed_and_loaded_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = classification()

    def fit(out: str, **more: object) -> bpfed.Run:
        method = METHODS["fedavg-ft"]()
        return bpfed.fit(method, data, out=tmp_path / out, rounds=3, epochs=1, participants=2, say=str, **more)  # type: ignore[arg-type]

    whole = fit("whole")
    assert whole.federation.method.tuning(1)

    class Breaks(Callback):
        def round(self, run: bpfed.Run, info: object, record: object) -> None:
            if run.federation.round == 2:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit("broken", callbacks=[Breaks()])
    with pytest.raises(bpfed.UserError, match="finish it first, with --resume"):
        bpfed.Run.load(tmp_path / "broken").clients()[0].predict(data.test.x)
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "end", lambda self, run: 1 / 0)  # once more, after the last checkpoint
        with pytest.raises(ZeroDivisionError):
            fit("broken", resume=True)
    again = fit("broken", resume=True)
    loaded = bpfed.Run.load(tmp_path / "broken")
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")
    assert (tmp_path / "broken/evaluation.json").read_bytes() == (tmp_path / "whole/evaluation.json").read_bytes()
    found = [[c.predict(data.test.x).probs for c in run.clients()] for run in (whole, again, loaded)]
    for first, second, third in zip(*found, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third)
    assert not torch.equal(found[0][0], found[0][1])  # tuned, each client differs, whoever took part last
