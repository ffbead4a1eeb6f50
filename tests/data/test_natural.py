"""The hospitals and the phone users, and a person's way with a folder of files: export, inspect, train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Command

import bpfed
from bpfed._util.errors import UserError
from bpfed.data import FederatedData, describe, fetch, inspect, load, missing, tables
from bpfed.data.sources import pooled as natural_module
from bpfed.data.sources.pooled import ARFF, ATTRIBUTES, HOSPITALS, HeartFiles
from bpfed.runs.metadata import fingerprint


def write_heart(folder: Path, rows: int = 30) -> None:
    """Four hospitals in the format of the original; the second has no thal, the third no cholesterol."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for k, hospital in enumerate(HOSPITALS):
        lines = []
        for i in range(rows):
            cells = []
            for name, codes in ATTRIBUTES.items():
                value = rng.choice(list(codes)) if codes else rng.integers(1, 200)
                unknown = (k == 1 and name == "thal") or (name == "ca" and rng.random() < 0.5)
                cells.append("?" if unknown else "0" if k == 2 and name == "chol" else f"{value:.1f}")
            lines.append(",".join([*cells, str(i % 5 if i % 2 else 0)]))
        (folder / f"processed.{hospital}.data").write_text("\n".join(lines) + "\n")


def write_wisdm(folder: Path) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    head = '@relation r\n\n@attribute "UNIQUE_ID" numeric\n@attribute "user" {1,2}\n@attribute "X0" numeric\n'
    rows = [
        f"{i},{i % 2 + 1},{rng.random():.3f},{'?' if i % 7 else '3'},{'Walking' if i % 3 else 'Sitting'}"
        for i in range(40)
    ]
    body = '@attribute "XPEAK" numeric\n@attribute class {Walking,Sitting}\n\n@data\n' + "\n".join(rows) + "\n"
    (folder / ARFF).write_text(head + body)


def same(a: FederatedData, b: FederatedData) -> bool:
    return fingerprint(a) == fingerprint(b) and a.labels == b.labels and a.preprocessor == b.preprocessor


def test_a_table_is_built_in_and_trains_as_a_folder(tmp_path: Path, capsys) -> None:
    data = load("breast-cancer", data_dir=tmp_path, download=False)
    assert data.clients == ("east", "north", "south", "west")
    read = tables("breast-cancer")
    assert sum(table.rows for table in read.values()) == 569
    assert np.max(read["east"].column("mean_radius")) <= 17.0 < np.max(read["north"].column("mean_radius"))
    folder = tmp_path / "hospitals"
    assert Command(capsys).ok("data", "export", "breast-cancer", folder).out.startswith("4 files in")
    assert same(load(f"folder:{folder}", target="diagnosis"), data)


def test_hospitals(tmp_path: Path) -> None:
    write_heart(tmp_path / "heart-disease")
    data = load("heart-disease", data_dir=tmp_path, download=False)
    assert data.clients == ("cleveland", "hungarian", "switzerland", "va")
    assert (data.labels, data.partition, data.test_fraction) == (("no", "yes"), "natural", 0.3)
    gaps = missing(tables("heart-disease", data_dir=tmp_path))
    assert gaps.columns == ("ca", "chol", "thal")
    assert gaps.shares[:, 1].tolist() == [0, 0, 1, 0]
    assert gaps.shares[:, 2].tolist() == [0, 1, 0, 0]
    assert {row.name for row in describe(tmp_path) if row.present} == {"digits", "breast-cancer", "heart-disease"}
    assert fetch("heart-disease", tmp_path) == tmp_path / "heart-disease"


def test_users(tmp_path: Path) -> None:
    write_wisdm(tmp_path / "wisdm")
    data = load("wisdm", data_dir=tmp_path, download=False)
    assert (data.clients, data.labels) == (("user-01", "user-02"), ("Sitting", "Walking"))
    assert data.preprocessor is not None
    assert data.preprocessor.input_names == ("X0", "XPEAK missing")  # XPEAK is 3 or nothing
    later = load("wisdm-later", data_dir=tmp_path, download=False)
    assert later.preprocessor is not None
    assert later.preprocessor.input_names == data.preprocessor.input_names
    assert fingerprint(later) == fingerprint(load("wisdm-later", data_dir=tmp_path, download=False, seed=0))


def test_later_rows_are_the_last_of_each_user_and_activity(tmp_path: Path) -> None:
    write_wisdm(tmp_path / "wisdm")
    for name, table in tables("wisdm-later", data_dir=tmp_path).items():
        groups: dict[str, list[str]] = {}
        for activity, part in zip(table.words("activity"), table.words("split"), strict=True):
            groups.setdefault(activity, []).append(part)
        assert len(groups) == 2, name
        for parts in groups.values():
            late = int(0.3 * len(parts))
            assert parts == ["train"] * (len(parts) - late) + ["test"] * late


@pytest.mark.parametrize("standardise", ["federated", "local", "none"])
def test_exported_it_is_the_same_federation(
    standardise: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_heart(tmp_path / "heart-disease")
    out = Command(capsys).ok("data", "export", "heart-disease", tmp_path / "sites", "--data-dir", tmp_path).out
    assert out.startswith("4 files in ")
    options = {"standardise": standardise, "seed": 2}
    exported = load(f"folder:{tmp_path / 'sites'}", target="disease", **options)  # type: ignore[arg-type]
    assert same(exported, load("heart-disease", data_dir=tmp_path, **options))  # type: ignore[arg-type]
    before = (tmp_path / "sites" / "va.csv").read_bytes()
    said = Command(capsys)("data", "export", "heart-disease", tmp_path / "sites", "--data-dir", tmp_path).sentence
    assert "is not empty" in said
    assert (tmp_path / "sites" / "va.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "iid"}, "has its own clients"),
        ({"target": "age"}, "'heart-disease' predicts 'disease'"),
        ({"client_column": "sex"}, "omit --client-column"),
    ],
)
def test_what_the_hospitals_cannot_be(options: dict, words: str, tmp_path: Path) -> None:
    write_heart(tmp_path)
    with pytest.raises(UserError, match=words):
        load("heart-disease", data_dir=tmp_path, **options)
    with pytest.raises(UserError, match="'digits' is not a table, so '"):
        load("digits", task="regression")


def test_damaged_and_missing_originals(tmp_path: Path) -> None:
    write_heart(tmp_path)
    for junk in ("1,2\n", "x" * 80, "1,9" + ",1" * 12 + "\n", "\x00"):
        (tmp_path / "processed.va.data").write_text(junk)
        with pytest.raises(UserError, match=r"va.data' is damaged"):
            load("heart-disease", data_dir=tmp_path)
    with pytest.raises(UserError, match=r"'wisdm' is not in .* is not downloaded by bpfed; put WISDM_ar"):
        load("wisdm", data_dir=tmp_path)
    (tmp_path / ARFF).write_text("@attribute a\n@data\n1,2\n")
    with pytest.raises(UserError, match=r"is damaged .1 attributes but 2 columns"):
        load("wisdm", data_dir=tmp_path)


def test_the_hospitals_are_fetched_and_checked(
    tmp_path: Path, serve: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    write_heart(tmp_path / "server")
    known = {}
    for hospital in HOSPITALS:
        content = (tmp_path / "server" / f"processed.{hospital}.data").read_bytes()
        known[hospital] = (len(content), hashlib.sha256(content).hexdigest())
    files = HeartFiles(base=serve(tmp_path / "server"))
    entry = replace(natural_module.NATURAL["heart-disease"], files=files)
    monkeypatch.setitem(natural_module.NATURAL, "heart-disease", entry)
    with pytest.raises(UserError, match="sent different bytes from the original"):
        load("heart-disease", data_dir=tmp_path / "data")
    monkeypatch.setattr(natural_module, "HOSPITALS", known)
    assert len(load("heart-disease", data_dir=tmp_path / "data")) == 4


def test_inspect_shows_sizes_classes_and_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_heart(tmp_path / "heart-disease")
    command = Command(capsys)
    picture = tmp_path / "plot.svg"
    out = command.ok("data", "inspect", "heart-disease", "--data-dir", tmp_path, "--plot", picture).out
    assert "4 clients; 84 training and 36 test examples of 2 classes" in out
    table = out[out.index("Missing, % of rows") :]
    gaps = next(line for line in table.splitlines() if line.strip().startswith("thal"))
    assert gaps.split()[1:] == ["·", "100", "·", "·"]
    assert picture.read_bytes().startswith(b"<?xml")
    said = command("data", "inspect", "heart-disease", "--data-dir", tmp_path, "--plot", tmp_path / "plot.txt").sentence
    assert "is not the name of a picture; end it in .png, .svg or .pdf" in said


def test_inspect_of_numbers_and_of_many_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "all.csv"
    rows = "".join(f"{k % 9},{'' if k % 50 == 7 else k},{100 + k % 7 + 0.5},u{k % 50:02d}\n" for k in range(400))
    table.write_text("a,b,price,who\n" + rows)
    out = (
        Command(capsys)
        .ok(
            "data",
            "inspect",
            f"folder:{table}",
            "--target",
            "price",
            "--client-column",
            "who",
            "--plot",
            tmp_path / "p.png",
        )
        .out
    )
    assert "mean and standard deviation of 'price'" in " ".join(out.split())
    assert "50 clients, 40 of 50 shown" in out
    told, gaps = (line.split() for line in out.splitlines() if line.startswith(" b "))
    assert told == ["b", "numbers,", "some", "missing", "2"]
    assert gaps == ["b", "1", "2", "100", "u07"]


def test_a_folder_is_trained_resumed_and_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_heart(tmp_path / "heart-disease")
    command, out = Command(capsys), tmp_path / "run"
    command.ok("data", "export", "heart-disease", tmp_path / "sites", "--data-dir", tmp_path)
    small = ["--epochs", "1", "--eval-draws", "2", "--quiet", "--method", "fedavg"]
    data = [
        "--data",
        f"folder:{tmp_path / 'sites'}",
        "--target",
        "disease",
        "--standardise",
        "local",
        "--ignore",
        "ca,sex",
    ]
    command.ok("run", *data, *small, "--rounds", "1", "--out", out)
    config = (out / "config.toml").read_text()
    for line in ('target = "disease"', 'standardise = "local"', 'ignore = "ca,sex"', 'partition = "natural"'):
        assert line in config
    command.ok("run", "--out", out, "--resume", "--quiet")
    command.ok("run", out / "config.toml", "--out", tmp_path / "again", "--quiet")
    first, again = ((folder / "metrics.jsonl").read_text().splitlines()[-1] for folder in (out, tmp_path / "again"))
    assert first.split('"seconds"')[0] == again.split('"seconds"')[0]


def test_fit_takes_a_folder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, shift in (("a", -1.0), ("b", 1.0)):
        x = rng.standard_normal((60, 2)) + shift  # each client has a threshold of its own
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.where(x[:, 0] > shift, "above", "below"))
    run = bpfed.fit(bpfed.methods.BPFed(lr=0.03), f"folder:{tmp_path}", rounds=3, epochs=10, batch=10, progress=False)
    assert run.data.labels == ("above", "below")
    assert run.history[-1]["accuracy"]["pooled"] > 0.7
    assert isinstance(run.data.preprocessor, bpfed.data.Preprocessor)
    new = bpfed.data.read_table(tmp_path / "a.npz")
    probabilities = run.client("a").predict(run.data.preprocessor.inputs(new, "a"), prepared=True).probs
    assert torch.equal(run.client("a").predict(new).probs, probabilities)
    assert (probabilities.argmax(1) == run.data.preprocessor.targets(new)).float().mean() > 0.7


def test_hospitals_and_users_from_the_real_files(real_data: str) -> None:
    heart = load("heart-disease", data_dir=real_data, download=False)
    rows = {row.client: np.add(row.train_labels, row.test_labels).tolist() for row in inspect(heart)}
    assert rows == {"cleveland": [164, 139], "hungarian": [188, 106], "switzerland": [8, 115], "va": [51, 149]}
    users = load("wisdm", data_dir=real_data, download=False)
    assert (len(users), users.classes, len(users.train.y) + len(users.test.y)) == (36, 6, 5418)
    assert users.preprocessor is not None
    assert len([f for f in users.preprocessor.features if f.kind == "number"]) == 42  # XAVG is 0 everywhere
    assert torch.isfinite(users.train.x).all()
