"""Models that are handed over compute what predict does."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import scenarios
import torch
from safetensors import safe_open
from torch import nn

import bpfed
from bpfed._util.errors import UserError
from bpfed.data import load
from bpfed.data.tabular.rows import read_rows
from bpfed.runs import export as exporting
from bpfed.runs.graph import TableInputs, cholesky
from bpfed.runs.run import Run

pytestmark = pytest.mark.usefixtures("untraced")
QUICK = {"rounds": 1, "epochs": 2, "eval_draws": 4, "compile": "off", "baselines": "off", "device": "cpu"}


def write_table(path: Path, seed: int, target: str) -> None:
    """Numbers with gaps, codes, words with a comma and a gap, and a column that has a name of an output."""
    g = np.random.default_rng(seed)
    age, total = g.normal(1e6, 10, 40), g.normal(size=40)
    ward, grade = g.choice(["east", "west, upper"], 40), g.integers(1, 4, 40)
    score = (age - 1e6) / 10 + total + (ward == "east")
    targets = {
        "outcome": ["ill" if s > 0.5 else "well" for s in score],
        "cost": [f"{5000 + 20 * s:.2f}" for s in score],
        "visits": g.poisson(np.exp(0.3 * score)),
    }
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "total", "ward", "grade", target])
        for i in range(40):
            gaps = ("" if i % 7 == 0 else f"{age[i]:.1f}", f"{total[i]:.3f}", "" if i % 5 == 0 else ward[i])
            writer.writerow([*gaps, grade[i], targets[target][i]])


def trained(place: Path, target: str, method: object = "bpfed", **settings: object) -> Run:
    for i, name in enumerate(("bern", "genf")):
        write_table(place / f"{name}.csv", i, target)
    task = {"task": "counts"} if target == "visits" else {}
    data = load(f"folder:{place}", target=target, **task)
    return bpfed.fit(method, data, progress=False, say=lambda sentence: None, **QUICK | settings)  # type: ignore[arg-type]


ROWS = {
    "age": np.array([1e6, np.nan, 1e6 + 12.5, 1e6 - 30]),
    "total": np.array([0.1, -2.0, 4.0, 0.0]),
    "ward": np.array(["east", "", "north", "west, upper"], dtype=object),
    "grade": np.array([1.0, 2.0, 9.0, 3.0]),
}


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("classes"), "outcome", calibration=0.3)


def by_onnx(path: Path, feed: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    session = pytest.importorskip("onnxruntime", reason="ONNX is the extra 'export'").InferenceSession(path)
    said = json.loads(session.get_modelmeta().custom_metadata_map["bpfed"])
    names = {each["column"]: each["name"] for each in said["inputs"] if "column" in each}
    fed = {names.get(name, name): values for name, values in feed.items()}
    names_out = [output.name for output in session.get_outputs()]
    return dict(zip(names_out, session.run(None, fed), strict=True)), said


@pytest.mark.parametrize("how", ["sample", "single-pass"])
def test_an_onnx_graph_takes_raw_columns_and_gives_what_predict_does(hospitals: Run, how: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="ONNX is the extra 'export'")
    path = hospitals.export("bern", "onnx", tmp_path / "bern.onnx", how=how, level=0.8)  # type: ignore[arg-type]
    found, said = by_onnx(path, ROWS)
    right = hospitals.client("bern").predict(ROWS, how=how)  # type: ignore[arg-type]
    np.testing.assert_allclose(found["probabilities"], right.probs, atol=1e-5)
    np.testing.assert_allclose(found["epistemic"], right.epistemic, atol=1e-5)
    np.testing.assert_allclose(found["aleatoric"], right.aleatoric, atol=1e-5)
    assert (found["label"] == right.label.numpy()).all()
    assert (found["set"] == right.prediction_set(0.8).numpy()).all()
    assert (said["labels"], said["level"], said["client"]) == (["ill", "well"], 0.8, "bern")
    assert "genf" not in json.dumps(said)
    assert str(Path(torch.__file__).parent).encode() not in path.read_bytes()
    assert b"runs/graph.py" not in path.read_bytes()
    one, _ = by_onnx(path, {name: values[:1] for name, values in ROWS.items()})
    np.testing.assert_allclose(one["probabilities"], right.probs[:1], atol=1e-5)


def test_a_torch_program_takes_numbers_and_codes_and_gives_what_predict_does(hospitals: Run, tmp_path: Path) -> None:
    path = hospitals.export("genf", "torch", tmp_path / "genf.pt2")
    extra = {"bpfed.json": ""}
    program = torch.export.load(path, extra_files=extra)
    assert program.example_inputs is None
    assert str(Path(torch.__file__).parent).encode() not in path.read_bytes()
    assert b"runs/graph.py" not in path.read_bytes()
    numbers, codes = json.loads(extra["bpfed.json"])["inputs"]
    x = np.stack([ROWS[name] for name in numbers["columns"]], 1)
    (ward,) = codes["columns"]
    known = {**ward["codes"], "": codes["missing"]}
    words = [[known.get(word, ward["any other word"])] for word in ROWS["ward"]]
    outputs = [each["name"] for each in json.loads(extra["bpfed.json"])["outputs"]]
    found = dict(zip(outputs, program.module()(torch.from_numpy(x), torch.tensor(words)), strict=True))
    right = hospitals.client("genf").predict(ROWS)
    torch.testing.assert_close(found["probabilities"], right.probs, atol=1e-5, rtol=0)
    assert torch.equal(found["set"], right.prediction_set(0.9))


def test_an_ensemble_of_numbers_is_exported_in_the_unit_of_the_target(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="ONNX is the extra 'export'")
    run = trained(tmp_path, "cost", members=2, calibration=0.3)
    found, _ = by_onnx(run.export("bern", "onnx", tmp_path / "model.onnx"), ROWS)
    right, made = run.client("bern").predict(ROWS), run.data.preprocessor
    assert made is not None
    np.testing.assert_allclose(found["mean"], made.in_units(right.mean), rtol=1e-7)
    np.testing.assert_allclose(found["sd"], right.scale * made.target_scale, rtol=1e-5)
    low, high = (made.in_units(end) for end in right.interval(0.9))
    np.testing.assert_allclose(found["low"], low, rtol=1e-7)
    np.testing.assert_allclose(found["high"], high, rtol=1e-7)


def test_counts_are_exported_with_the_mixture_that_their_quantiles_are_of(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="ONNX is the extra 'export'")
    run = trained(tmp_path, "visits")
    found, _ = by_onnx(run.export("bern", "onnx", tmp_path / "model.onnx"), ROWS)
    right = run.client("bern").predict(ROWS)
    np.testing.assert_allclose(found["mean"], right.mean, rtol=1e-5)
    np.testing.assert_allclose((found["rates"] * found["weights"]).sum(1), found["mean"], rtol=1e-5)


def test_times_to_an_event_and_their_median_are_exported(tmp_path: Path) -> None:
    data = scenarios.survival()
    run = bpfed.fit("fedper", data, progress=False, say=lambda sentence: None, **QUICK)  # type: ignore[arg-type]
    path = run.clients()[0].export("torch", tmp_path / "model.pt2")
    extra = {"bpfed.json": ""}
    program = torch.export.load(path, extra_files=extra)
    outputs = [each["name"] for each in json.loads(extra["bpfed.json"])["outputs"]]
    found = dict(zip(outputs, program.module()(data.test.x[:4]), strict=True))
    right = run.clients()[0].predict(data.test.x[:4])
    torch.testing.assert_close(found["survival"], right.survival, atol=1e-5, rtol=0)
    torch.testing.assert_close(found["median"], right.median, atol=1e-3, rtol=1e-3)


def test_images_are_scaled_inside_and_a_frozen_part_goes_with_them(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="ONNX is the extra 'export'")

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.body(x.reshape(-1, 1, 8, 8))).flatten(1))

    data = load("digits", clients=3)
    run = bpfed.fit(
        "bpfed",
        data,
        model=scenarios.seeded(Network),
        trainable="head",
        progress=False,
        say=lambda sentence: None,
        **QUICK,  # type: ignore[arg-type]
    )
    assert run.federation.model.backbone is not None
    x = data.test.x[:5]
    found, said = by_onnx(run.clients()[0].export("onnx", tmp_path / "m.onnx"), {"x": ((x + 1.0) * 8.0).numpy()})
    np.testing.assert_allclose(found["probabilities"], run.clients()[0].predict(x).probs, atol=1e-5)
    assert said["inputs"][0]["scaling"].startswith("inside")


def test_safetensors_hold_the_posterior_by_parameter_and_are_read_without_bpfed(hospitals: Run, tmp_path: Path) -> None:
    path = hospitals.export("bern", "safetensors", tmp_path / "bern.safetensors")
    with safe_open(path, "pt") as file:
        said = json.loads(file.metadata()["bpfed"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {(part["name"], part["part"]) for part in said["layout"]} >= {
        ("1.weight", "shared"),
        ("3.weight", "personal"),
    }
    federation = hospitals.federation
    who = torch.tensor([hospitals.data.clients.index("bern")])
    from bpfed.methods.base import rows

    q = federation.method.predictive(federation.model, rows(federation.shared, 1), federation.ready(who))
    mean, sigma = (federation.model.layout.unflatten(part[0]) for part in q.weights)
    for name in mean:
        assert torch.equal(tensors[f"mean.{name}"], mean[name])
        assert torch.equal(tensors[f"sd.{name}"], sigma[name])


def test_a_graph_that_disagrees_is_not_written(hospitals: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = exporting.reference

    def off(*args: object) -> list[dict[str, torch.Tensor]]:
        return [{n: t + 2e-5 if n == "epistemic" else t for n, t in each.items()} for each in true(*args)]  # type: ignore[arg-type]

    monkeypatch.setattr(exporting, "reference", off)
    monkeypatch.setattr(
        exporting, "_recorded", lambda scorer, raw: setattr(scorer, "outputs", tuple(off_names(scorer, raw)))
    )
    monkeypatch.setattr(exporting, "_torch_file", lambda program, about: b"content")
    scorers = []

    def off_names(scorer: object, raw: tuple[torch.Tensor, ...]) -> tuple[str, ...]:
        scorers.append(scorer)
        with exporting.recording():
            scorer(*raw)  # type: ignore[operator]
        return scorer.outputs  # type: ignore[attr-defined]

    def run(raw: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        with exporting.recording():
            return list(scorers[0](*raw.values()))

    monkeypatch.setattr(exporting, "_torch_runner", lambda content: run)
    with pytest.raises(UserError, match=r"its output 'epistemic' differs in row 1 .* no file is written"):
        hospitals.export("bern", "torch", tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_refused_in_one_sentence(hospitals: Run, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        hospitals.export("bern", "torch", tmp_path / "there")
    with pytest.raises(UserError, match="Unknown format 'pickle'"):
        hospitals.export("bern", "pickle", tmp_path / "x")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="Unknown client 'basel'"):
        hospitals.export("basel", "onnx", tmp_path / "x")
    with pytest.raises(UserError, match=r"The level is 1\.5"):
        hospitals.export("bern", "onnx", tmp_path / "x", level=1.5)
    assert (tmp_path / "there").read_text() == "mine"


def test_cholesky_column_by_column_is_that_of_torch() -> None:
    root = torch.randn(7, 5, 5, dtype=torch.float64, generator=scenarios.generator())
    matrix = root @ root.mT + torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(cholesky(matrix), torch.linalg.cholesky(matrix))


@pytest.mark.parametrize("standardise", ["federated", "local", "none"])
def test_preprocessing_inside_a_graph_is_that_of_tables(standardise: str, tmp_path: Path) -> None:
    """Other names, other units of one client, values that stand for none, codes, gaps and unseen words."""
    for i, name in enumerate(("bern", "genf")):
        write_table(tmp_path / f"{name}.csv", i, "outcome")
    data = load(
        f"folder:{tmp_path}",
        target="outcome",
        standardise=standardise,
        missing="total=9,ward=east",
        rename="grade=class",
        convert="age@bern:-32/1.8,total:*2",
    )
    made = data.preprocessor
    assert made is not None
    rows = {
        **ROWS,
        "total": np.array([9.0, -2.0, np.nan, 0.0]),
        "ward": np.array(["east", "", "x", "west, upper"], object),
    }
    for client in data.clients:
        prepare = TableInputs(made, client)
        assert [c.name for c in prepare.numbers] == ["age", "grade", "total"]
        numbers = torch.from_numpy(np.stack([rows[c.name] for c in prepare.numbers], 1))
        (ward,) = prepare.words
        spelt = [ward.codes.get(word, len(ward.feature.categories)) for word in rows["ward"]]
        found = prepare(numbers, torch.tensor(spelt)[:, None])
        torch.testing.assert_close(found, read_rows(data, rows, client, lambda sentence: None).x, atol=1e-6, rtol=1e-6)


def test_recoding_that_works_on_text_is_refused(tmp_path: Path) -> None:
    for i, name in enumerate(("bern", "genf")):
        write_table(tmp_path / f"{name}.csv", i, "outcome")
    data = load(f"folder:{tmp_path}", target="outcome", map="ward:east=north")
    assert data.preprocessor is not None
    with pytest.raises(UserError, match="recodes columns by --map"):
        TableInputs(data.preprocessor, "bern")


def test_recoding_is_refused_before_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, name in enumerate(("bern", "genf")):
        write_table(tmp_path / f"{name}.csv", i, "outcome")
    data = load(f"folder:{tmp_path}", target="outcome", map="ward:east=north")
    run = bpfed.fit("fedavg", data, rounds=1, progress=False)
    monkeypatch.setattr("bpfed.runs.export.find_spec", lambda name: None)
    with pytest.raises(UserError, match="recodes columns by --map"):
        run.export("bern", "onnx", tmp_path / "bern.onnx")
