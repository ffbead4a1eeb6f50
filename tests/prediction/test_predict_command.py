"""``bpfed predict``, from files to files."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from command import PLAIN, Command, as_before_manifests, files
from hospitals import read

import bpfed as library
from bpfed._util.errors import UserError
from bpfed.cli.predict import table
from bpfed.data import FederatedData, Preprocessor, load
from bpfed.data.federated import Examples
from bpfed.data.tabular.rows import read_rows
from bpfed.inference.calibration import Conformal
from bpfed.inference.predictive import Classified, Regressed


def test_each_row_has_a_line_in_its_order(command: Command, ward: Path) -> None:
    outcome = command.ok("predict", "run", "--client", "genf", "--input", "new.csv", "--abstain", "0.9")
    found = read(outcome.out)
    assert list(found[0]) == ["label", "p(ill)", "p(well)", "total", "epistemic", "aleatoric", "abstain", "unusual"]
    assert len(found) == 7
    assert {row["unusual"] for row in found} == {""}
    run = library.Run.load(ward / "run")
    x = run.data.preprocessor.inputs(library.data.read_table("new.csv"))
    said = run.client("genf").predict(x, prepared=True)
    for row, probs, entropy in zip(found, said.probs.tolist(), said.entropy.tolist(), strict=True):
        assert [float(row["p(ill)"]), float(row["p(well)"])] == pytest.approx(probs, rel=1e-4)
        assert float(row["total"]) == pytest.approx(entropy, rel=1e-4)
        assert float(row["epistemic"]) + float(row["aleatoric"]) == pytest.approx(entropy, rel=1e-3, abs=1e-5)
        assert row["label"] == ("ill" if probs[0] > probs[1] else "well")
        assert row["abstain"] == ("yes" if max(probs) < 0.9 else "no")
    assert outcome.err.splitlines() == [
        "No sets or intervals: the run has no calibration examples (train with --calibration 0.2 to get them)."
    ]


def test_a_prediction_needs_no_compiler_and_none_of_what_only_training_needs(ward: Path) -> None:
    slow = {"torch._dynamo", "sympy", "sklearn", "scipy", "matplotlib", "pandas", "jinja2"}
    slow |= {"bpfed.data.datasets", "bpfed.data.tabular.frames", "bpfed.engine.simulator", "bpfed.methods.linear"}
    slow |= {"bpfed.runs.baselines", "bpfed.runs.diagnostics"}
    words = ["predict", "run", "--client", "genf", "--input", "new.csv"]
    code = f"import sys, bpfed.cli\ntry: bpfed.cli.main({words})\nfinally: print('imported:', *{slow} & {{*sys.modules}}, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.count("\n") == 8
    assert done.stderr.splitlines()[-1] == "imported:"


def test_in_python_a_file_is_predicted_as_the_command_does(command: Command, ward: Path) -> None:
    Path("odd.csv").write_text(Path("new.csv").read_text() + "61,1e6,east,ill\n")
    found = read(command.ok("predict", "run", "--client", "zug", "--input", "odd.csv").out)
    said: list[str] = []
    client = library.Run.load("run", say=said.append).client("zug")
    probs = client.predict("odd.csv").probs
    assert probs[:, 0].tolist() == pytest.approx([float(row["p(ill)"]) for row in found], rel=1e-4)
    assert any("'dose'" in sentence for sentence in said)
    rows = client.read(Path("odd.csv"))
    assert torch.equal(client.predict(rows).probs, probs)
    assert rows.unusual is not None
    assert [" | ".join(names) for names in rows.unusual.names()] == [row["unusual"] for row in found]


def test_the_order_of_columns_and_other_columns_do_not_matter(command: Command, ward: Path) -> None:
    with open("new.csv") as file:
        rows = list(csv.DictReader(file))
    with open("turned.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["remark", "ward", "dose", "age"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**row, "remark": "none"} for row in rows)
    first, second = (
        command.ok("predict", "run", "--client", "zug", "--input", name).out for name in ("new.csv", "turned.csv")
    )
    assert first == second


@pytest.mark.parametrize("rows", ["1,250.00", "2,007", "1,250.00\n1,250.00\n2,V45"])
def test_codes_that_read_as_numbers_are_still_words(command: Command, tmp_path: Path, rows: str) -> None:
    """A few rows may hold none but such codes; the column is words, since it was in training."""
    codes = ["250.00", "V45", "007", "E11"]
    for site in "ab":
        lines = [f"{i % 7},{codes[i % 4]},{'yes' if i % 4 else 'no'}" for i in range(20)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["dose,code,label", *lines]))
    data = load(f"folder:{tmp_path}")
    Path("new.csv").write_text(f"dose,code\n{rows}\n")
    found = read_rows(data, Path("new.csv"), "a", print).x
    at = {name.removeprefix("code = "): i for i, name in enumerate(data.preprocessor.input_names)}  # type: ignore[union-attr]
    for x, row in zip(found, rows.splitlines(), strict=True):
        assert [word for word, i in at.items() if word in codes and x[i] == 1.0] == [row.partition(",")[2]]


def test_a_column_that_is_missing_is_said(command: Command, ward: Path) -> None:
    Path("short.csv").write_text("age,ward\n61,east\n40,west\n")
    outcome = command.ok("predict", "run", "--client", "zug", "--input", "short.csv")
    assert len(read(outcome.out)) == 2
    assert "'short.csv' has no column 'dose'; it is treated as missing in every row." in outcome.err


def test_what_training_never_saw_is_said(command: Command, ward: Path) -> None:
    Path("odd.csv").write_text("age,Dose,ward\n61,0,north\n4500,1,north\n-900,0,west\n,1,\n60,0,south\n")
    said = command.ok("predict", "run", "--client", "zug", "--input", "odd.csv").err.splitlines()
    assert said[:4] == [
        "'odd.csv' has no column 'dose'; it is treated as missing in every row.",
        "'odd.csv' has 'Dose' (training had 'dose'), which is ignored; if that is the same column, spell it as in "
        "training.",
        "'odd.csv' has words that were not seen in training in 'ward' (3 of 5 rows, such as 'north'); the model treats "
        "them as if there were no word.",
        "'odd.csv' has numbers more than 10 standard deviations from the training mean in 'age' (2 of 5 rows, such as "
        "4500); the predictions there may mean little.",
    ]


def test_each_row_says_what_of_it_training_never_saw_and_far_numbers_abstain(command: Command, ward: Path) -> None:
    Path("odd.csv").write_text("age,dose,ward\n61,0,north\n4500,1,north\n-900,0,west\n,1,\n60,0,east\n")
    call = ("predict", "run", "--client", "zug", "--input", "odd.csv")
    found = read(command.ok(*call, "--abstain", "0").out)
    assert [row["unusual"] for row in found] == ["ward", "age | ward", "age", "age | ward", ""]
    assert [row["abstain"] for row in found] == ["no", "yes", "yes", "no", "no"]
    assert "abstain" not in read(command.ok(*call).out)[0]


def test_a_file_is_not_replaced_unless_that_was_said_and_the_input_never(command: Command, ward: Path) -> None:
    call = ("predict", "run", "--client", "zug", "--input", "new.csv", "--out")
    Path("training.csv").write_text("age,outcome\n61,ill\n")
    Path("link.csv").symlink_to("new.csv")
    before = files(Path())
    assert command(*call, "training.csv").sentence == (
        "'training.csv' already exists; add --overwrite to replace it, or choose another --out."
    )
    assert command(*call, "run/model.safetensors", "--overwrite").sentence == (
        "'run/model.safetensors' belongs to the run, so predictions must not replace it; choose another --out."
    )
    for same in ("new.csv", "./new.csv", "link.csv"):
        assert command(*call, same, "--overwrite").sentence == (
            f"'{Path(same)}' is the input itself, which predictions must not replace; choose another --out."
        )
    assert files(Path()) == before
    assert command.ok(*call, "training.csv", "--overwrite").out == "7 predictions of 'zug': training.csv\n"
    assert len(read(Path("training.csv").read_text())) == 7


def test_a_value_that_training_never_lacked_is_said_and_named_in_its_row(command: Command, ward: Path) -> None:
    Path("gaps.csv").write_text("age,dose,ward\n61,,east\n,1,\n60,0,west\n")
    outcome = command.ok("predict", "run", "--client", "zug", "--input", "gaps.csv")
    assert [row["unusual"] for row in read(outcome.out)] == ["dose", "age | ward", ""]
    assert outcome.err.splitlines()[0] == (
        "'gaps.csv' lacks values in 'age' (1 of 3 rows), 'dose' (1 of 3 rows), 'ward' (1 of 3 rows), which no training "
        "row did; the model treats them as average, so the predictions there may mean little."
    )
    Path("less.csv").write_text("age,ward\n61,east\n4500,west\n")
    outcome = command.ok("predict", "run", "--client", "zug", "--input", "less.csv")
    assert [row["unusual"] for row in read(outcome.out)] == ["dose", "age | dose"]
    assert "lacks values" not in outcome.err  # that the column is not there is said already


def test_a_column_written_a_little_differently_is_named(command: Command, ward: Path) -> None:
    Path("other.csv").write_text("age,ward, DO_SE \n61,east,1\n")
    said = command.ok("predict", "run", "--client", "zug", "--input", "other.csv").err
    assert "'other.csv' has 'DO_SE' (training had 'dose'), which is ignored" in said


def test_numbers_are_in_their_own_units_with_intervals(command: Command, numbers: Path) -> None:
    shutil.copytree(numbers, ".", dirs_exist_ok=True)
    out = command.ok("predict", "run", "--client", "bern", "--input", "new.csv", "--level", "0.8", "--out", "p.csv")
    assert out.out == "7 predictions of 'bern': p.csv\n"
    shown = " ".join(command.ok("report", "run").out.split())  # it may be wrapped
    assert "RMSE in SD of 'outcome'" in shown
    target = json.loads(Path("run/evaluation.json").read_text())["target"]
    assert target["name"] == "outcome"
    last = json.loads(Path("run/summary.json").read_text())["rmse"]["last"]
    in_units = re.search(r"RMSE of 'outcome' ([\d.]+)", shown)
    assert in_units is not None
    assert float(in_units[1]) == pytest.approx(target["scale"] * last, rel=0.01)
    assert "RMSE of own training mean" in shown
    assert "infinite" not in out.err
    found = read(Path("p.csv").read_text())
    assert list(found[0]) == ["mean", "sd", "epistemic", "aleatoric", "low(0.8)", "high(0.8)", "unusual"]
    values = {name: np.array([float(row[name]) for row in found]) for name in list(found[0])[:-1]}
    assert np.abs(values["mean"] - [float(r["outcome"]) for r in read(Path("new.csv").read_text())]).mean() < 25
    assert 30 < values["mean"].mean() < 100  # 50 and 20 per unit: not the standardised numbers
    assert values["sd"] == pytest.approx(np.hypot(values["epistemic"], values["aleatoric"]), rel=1e-3)
    middle = (values["low(0.8)"] + values["high(0.8)"]) / 2
    assert middle == pytest.approx(values["mean"], abs=1e-2)
    assert (
        "this run predicts numbers"
        in command("predict", "run", "--client", "bern", "--input", "new.csv", "--abstain", "0.9").sentence
    )


def test_columns_are_kept_as_they_are(command: Command, ward: Path) -> None:
    rows = ["age,dose,ward,patient no,label,note", '61,0.50,east,0017,a,"x, ""y"""', "60,1,west,NA,b, 57% ", ""]
    Path("ids.csv").write_text("\n".join(rows))
    call = ("predict", "run", "--client", "zug", "--input", "ids.csv")
    plain = read(command.ok(*call).out)
    found = read(command.ok(*call, "--keep", "patient no, note,dose").out)
    assert list(found[0]) == ["patient no", "note", "dose", *plain[0]]
    assert [(row.pop("patient no"), row.pop("note"), row.pop("dose")) for row in found] == [
        ("0017", 'x, "y"', "0.50"),
        ("NA", " 57% ", "1"),
    ]
    assert found == plain
    for keep, said in (
        ("label", "--keep: 'label' of the input would clash with a column of the predictions; rename it in the input."),
        ("Ward", "'ids.csv' has no column 'Ward'; did you mean 'ward'?"),
        (
            "a,b",
            "'ids.csv' has no columns 'a', 'b'; choose from: 'age', 'dose', 'ward', 'patient no', 'label', 'note'.",
        ),
    ):
        before = files(Path())
        refused = command(*call, "--keep", keep, "--out", "p.csv")
        assert refused.code == 2
        assert refused.err.splitlines()[-1] == f"bpfed: {said}"
        assert files(Path()) == before


@pytest.mark.parametrize("kind", ["parquet", "npz"])
def test_what_is_kept_of_other_files_keeps_its_digits(command: Command, ward: Path, kind: str) -> None:
    number = 2**62 + 1
    columns = {"age": [60.0, 50.0], "dose": [0.0, 1.0], "ward": ["east", "west"], "key": [number, number + 2]}
    if kind == "npz":
        np.savez("new.npz", **{name: np.array(column) for name, column in columns.items()})
    else:
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), "new.parquet")
    found = read(command.ok("predict", "run", "--client", "zug", "--input", f"new.{kind}", "--keep", "key").out)
    assert [row["key"] for row in found] == [str(number), str(number + 2)]


def test_an_empty_set_does_not_look_like_a_missing_value() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.55, 0.45]])
    entropy = torch.special.entr(probs).sum(-1)
    held = torch.full((4,), 0.2)  # each example held back had 0.8 for its label
    data = replace(load("digits", clients=2), labels=("ill", "well"), classes=2)
    text = table(data, Classified(probs, entropy, entropy, scores=Conformal(held)), 0.5, None)
    assert [row["set(0.5)"] for row in read(text)] == ["ill", "(empty)"]


def test_numbers_far_from_0_are_written_as_finely_as_they_differ() -> None:
    made = Preprocessor("t", "regression", (), target_mean=1234567.0, target_scale=2.0)
    none = Examples(torch.zeros(0, 1), torch.zeros(0), torch.zeros(2, dtype=torch.int64))
    data = FederatedData("far", ("a",), none, none, "regression", preprocessor=made)
    found = Regressed(
        torch.tensor([0.1, -0.75]), torch.full((2,), 0.05), torch.full((2,), 0.2), scores=Conformal(torch.ones(20))
    )
    rows = read(table(data, found, 0.9, None))
    assert [float(row["mean"]) for row in rows] == pytest.approx([1234567.2, 1234565.5], abs=1e-4)
    assert [float(row["sd"]) for row in rows] == [1.0, 1.0]
    assert [float(row["low(0.9)"]) for row in rows] == pytest.approx([1234566.2, 1234564.5], abs=1e-4)


def test_intervals_without_end_are_explained(command: Command, numbers: Path) -> None:
    shutil.copytree(numbers, ".", dirs_exist_ok=True)
    run = library.Run.load("run")
    assert run.calibration is not None
    held = len(run.calibration.client(run.data.clients.index("bern"))[1])
    enough = held / (held + 1) - 1e-6
    rows = ("predict", "run", "--client", "bern", "--input", "new.csv", "--level")
    assert "infinite" not in command.ok(*rows, f"{enough}").err
    outcome = command.ok(*rows, "0.99")
    assert {row["high(0.99)"] for row in read(outcome.out)} == {"inf"}
    assert (
        f"The intervals are infinite: all clients together have {len(run.calibration.scores)} calibration examples, and a "
        "level of 0.99 needs" in outcome.err
    )
    assert "needs at least 99;" in outcome.err


def test_labels_that_a_client_has_never_seen_are_said(command: Command, tmp_path: Path) -> None:
    """Which classes it has is in the run's folder, since the examples are not."""
    g = torch.Generator().manual_seed(0)
    parts = []
    for classes in ([0, 1, 2], [0, 1, 2], [0, 1]):
        y = torch.tensor(classes * 12)
        parts.append((3.0 * torch.eye(3)[y] + 0.3 * torch.randn(len(y), 3, generator=g), y))
    examples = Examples.of(parts)
    data = FederatedData("three", ("a", "b", "c"), examples, examples, "classification", 3, ("red", "green", "blue"))
    library.fit(library.methods.FedAvg(lr=0.01), data, out="run", rounds=5, epochs=5)
    noted = json.loads(Path("run/data.json").read_text())
    assert noted["classes_seen"] == ["111", "111", "110"]
    np.savez("new.npz", x=3.0 * np.eye(3, dtype=np.float32)[[0, 2, 2]])
    said = command.ok("predict", "run", "--client", "c", "--input", "new.npz").err
    assert "2 rows are predicted as 'blue', of which 'c' has no training example." in said
    assert "of which" not in command.ok("predict", "run", "--client", "a", "--input", "new.npz").err
    np.savez("two.npz", x=3.0 * np.eye(3, dtype=np.float32)[[0, 1]], y=np.array([0, 1]))
    said = command.ok("adapt", "run", "--input", "two.npz", "--name", "d", "--steps", "2").err
    assert "It has no example of 'blue', so it will rarely predict that class." in said
    said = command.ok("predict", "run", "--client", "d", "--input", "new.npz").err
    assert "2 rows are predicted as 'blue', of which 'd' has no training example." in said
    del noted["classes_seen"]  # a run from before it was noted
    (as_before_manifests(Path("run")) / "data.json").write_text(json.dumps(noted))
    assert "of which" not in command.ok("predict", "run", "--client", "c", "--input", "new.npz").err


def test_arrays_of_a_built_in_dataset(command: Command) -> None:
    command.ok(*PLAIN, "--rounds", "1", "--out", "run")
    data = load("digits", clients=3)
    x, y = data.test.x[:30].numpy(), data.test.y[:30].numpy()
    np.savez("a.npz", x=x, y=y)
    np.savez("raw.npz", x=np.round((x + 1) * 8).astype(np.uint8), y=np.array([str(v) for v in y]))
    first, second = (
        command.ok("predict", "run", "--client", data.clients[0], "--input", name).out for name in ("a.npz", "raw.npz")
    )
    assert first == second
    assert len(read(first)) == 30
    assert list(read(first)[0])[:3] == ["label", "p(0)", "p(1)"]
    command.ok("adapt", "run", "--input", "raw.npz", "--steps", "5")
    np.savez("flat.npz", x=x.reshape(30, -1)[:, :60])
    np.savez("empty.npz", y=y)
    np.savez("ids.npz", x=x, who=np.arange(30), few=np.arange(3))
    client = ("predict", "run", "--client", data.clients[0], "--input", "ids.npz", "--keep")
    assert [row["who"] for row in read(command.ok(*client, "who").out)] == [str(k) for k in range(30)]
    assert command(*client, "few").sentence == "'few' of 'ids.npz' has 3 entries for 30 rows; choose another column."
    Path("b.npz").write_bytes(b"junk")
    Path("cut.npz").write_bytes(Path("a.npz").read_bytes()[:-100])
    with Path("array.npz").open("wb") as file:
        np.save(file, x)
    Path("c.csv").write_text("a\n1\n")
    for name, said in (
        ("flat.npz", "but must be numbers of shape [n, "),
        ("empty.npz", "'empty.npz' has no array 'x'; it contains: y."),
        ("b.npz", "'b.npz' is not a valid NPZ file"),
        ("cut.npz", "'cut.npz' is not a valid NPZ file"),
        ("array.npz", "'array.npz' is not a valid NPZ file"),
        ("c.csv", "'digits' was trained on arrays, not on a table; give an NPZ file with x of shape [n, "),
        ("d.npz", "There is no file 'd.npz'"),
    ):
        assert said in command("predict", "run", "--client", data.clients[0], "--input", name).sentence


def test_numbers_that_name_classes_are_names_and_not_places(tmp_path: Path) -> None:
    """Classes 1, 2 and 3 are the first, second and third; where classes are words, numbers count them from 0."""
    x = np.arange(12.0)[:, None]
    for values, given, wanted in (([1, 2, 3], [1, 3, 2], [0, 2, 1]), (["a", "b", "c"], [0, 2, 1], [0, 2, 1])):
        data = library.data.from_arrays(x, np.array(values * 4), ["s"] * 12)
        np.savez(tmp_path / "new.npz", x=x[:3], y=np.array(given))
        found = read_rows(data, tmp_path / "new.npz", "new", print, labelled=True).y
        assert found is not None
        assert found.tolist() == wanted
    data = library.data.from_arrays(x, np.array([1, 2, 3] * 4), ["s"] * 12)
    np.savez(tmp_path / "new.npz", x=x[:1], y=np.array([0]))
    with pytest.raises(UserError, match="has the label '0', but it must be one of '1', '2', '3'"):
        read_rows(data, tmp_path / "new.npz", "new", print, labelled=True)


def unfinished() -> None:
    Path("run/summary.json").unlink()


def header_only() -> None:
    Path("new.csv").write_text("age,dose,ward\n")


def foreign() -> None:
    Path("new.csv").write_text("colour,size\nred,3\n")


def nothing() -> None: ...


@pytest.mark.parametrize(
    ("spoil", "arguments", "said"),
    [
        (nothing, ("--client", "gemf"), "Unknown client 'gemf'; did you mean 'genf'?"),
        (nothing, (), "Choose whose model to use, with --client, from: 'bern', 'genf', 'zug'."),
        (
            nothing,
            ("--client", "zug", "--adapted", "w.safetensors"),
            "Choose whose model to use, with either --client NAME or --adapted FILE.",
        ),
        (nothing, ("--client", "genf", "--level", "2"), "--level is 2, but must be above 0 and below 1"),
        (nothing, ("--client", "genf", "--abstain", "90"), "--abstain is 90, but must be a probability"),
        (nothing, ("--client", "genf", "--draws", "0"), "draws is 0, but must be at least 1."),
        (nothing, ("--adapted", "none.safetensors"), "There is no file 'none.safetensors'"),
        (nothing, ("--adapted", "new.csv"), "'new.csv' is not a client that bpfed adapt wrote"),
        (
            unfinished,
            ("--client", "genf"),
            "The run in 'run' is not finished; resume it with: bpfed run --out run --resume",
        ),
        (header_only, ("--client", "genf"), "no rows"),
        (foreign, ("--client", "genf"), "'new.csv' has none of the columns that training used"),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(
    command: Command, ward: Path, spoil: Callable[[], None], arguments: tuple[str, ...], said: str
) -> None:
    spoil()
    before = files(Path())
    assert said in command("predict", "run", "--input", "new.csv", "--out", "p.csv", *arguments).sentence
    assert files(Path()) == before
