"""``bpfed adapt``, from files to files."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Command, files
from hospitals import read, write_hospital

import bpfed as library


def test_a_newcomer_of_numbers_sees_its_error_before_and_after(command: Command, numbers: Path) -> None:
    shutil.copytree(numbers, ".", dirs_exist_ok=True)
    shown = command.ok("adapt", "run", "--input", "new.csv", "--steps", "200", "--name", "late").out
    (line,) = [line.split() for line in shown.splitlines() if line.strip().startswith("RMSE")]
    count, before, after = (float(word) for word in line[1:])
    assert count == 7
    assert after < before < 100  # in the target's own unit, whose standard deviation is some 20


def test_a_newcomer_joins_and_predicts(command: Command, ward: Path) -> None:
    write_hospital(Path("ward3.csv"), 20, 20)
    outcome = command.ok("adapt", "run", "--input", "ward3.csv", "--steps", "200")
    assert "ward3: how sure it is of the 20 examples it has just learnt from" in " ".join(outcome.out.split())
    assert "probability of 'ill'" in outcome.out
    assert outcome.out.endswith("Client 'ward3': run/adapted/ward3.safetensors\n")
    assert all(line.endswith(" …") for line in outcome.err.splitlines())  # on a slow machine it says what it is doing
    found = read(command.ok("predict", "run", "--client", "ward3", "--input", "new.csv").out)
    truth = [row["outcome"] for row in read(Path("new.csv").read_text())]
    assert sum(row["label"] == t for row, t in zip(found, truth, strict=True)) >= 5
    before = files(Path("run"))
    said = command("adapt", "run", "--input", "ward3.csv", "--steps", "5").sentence
    assert said == (
        "'run/adapted/ward3.safetensors' already exists; add --overwrite to replace it, or choose another --name or --out."
    )
    assert files(Path("run")) == before
    # The same examples under another column and name, kept elsewhere.
    Path("other.csv").write_text(Path("ward3.csv").read_text().replace("outcome", "result"))
    other = ("--target", "result", "--name", "ward3", "--steps", "200", "--out", "w.safetensors")
    command.ok("adapt", "run", "--input", "other.csv", *other)
    assert files(Path("run")) == before
    assert read(command.ok("predict", "run", "--adapted", "w.safetensors", "--input", "new.csv").out) == found


def test_in_python_a_newcomer_joins_with_a_file(command: Command, ward: Path) -> None:
    write_hospital(Path("ward3.csv"), 20, 20)
    command.ok("adapt", "run", "--input", "ward3.csv", "--steps", "200")
    run = library.Run.load("run")
    joined = run.adapt("ward3.csv", name="ward3", steps=200)
    kept = run.newcomer("run/adapted/ward3.safetensors")
    assert torch.equal(joined.predict("new.csv").probs, kept.predict("new.csv").probs)
    Path("other.csv").write_text(Path("ward3.csv").read_text().replace("outcome", "result"))
    same = run.adapt(Path("other.csv"), name="ward3", steps=200, target="result")
    assert torch.equal(joined.predict("new.csv").probs, same.predict("new.csv").probs)
    with pytest.raises(library.UserError, match=r"The targets are in 'ward3.csv'; leave y out"):
        run.adapt("ward3.csv", torch.zeros(20))


def test_a_newcomer_without_examples_is_unsure(command: Command, ward: Path) -> None:
    assert command.ok("adapt", "run").out == "Client 'newcomer': run/adapted/newcomer.safetensors\n"
    found = read(command.ok("predict", "run", "--client", "newcomer", "--input", "new.csv").out)
    assert np.mean([float(row["total"]) for row in found]) > 0.9 * np.log(2)


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("age,dose,ward\n60,1,east\n", (), "'ward3.csv' has no column 'outcome'"),
        ("age,dose,ward,outcome\n60,1,east,dead\n", (), "'dead', which no training row has"),
        ("age,dose,ward,outcome\n60,1,east,\n", (), "has no 'outcome'"),
        (
            "age,dose,ward,outcome\n60,1,east,ill\n",
            ("--target", "ward"),
            "'ward3.csv' has the 'ward' 'east', which no training row has as 'outcome'; it must be one of 'ill', 'well'.",
        ),
        ("age,dose,ward,outcome\n60,1,east,ill\n", ("--name", "bern"), "The run already has a client 'bern'"),
        ("age,dose,ward,outcome\n60,1,east,ill\n", ("--name", "a/b"), "cannot be saved in a file of that name"),
        ("age,dose,ward,outcome\n60,1,east,ill\n", ("--steps", "0"), "steps is 0, but must be at least 1"),
    ],
)
def test_a_newcomers_mistake_is_one_sentence_and_writes_nothing(
    command: Command, ward: Path, text: str, arguments: tuple[str, ...], said: str
) -> None:
    Path("ward3.csv").write_text(text)
    before = files(Path())
    assert said in command("adapt", "run", "--input", "ward3.csv", *arguments).sentence
    assert files(Path()) == before
