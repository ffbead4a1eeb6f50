"""Old names of settings, keys and functions: they still work, say the new one, and old run folders can be read."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from scenarios import classification

import bpfed
from bpfed._util.errors import UserError
from bpfed._util.moved import CLASSES
from bpfed.config.migrations import ATTRIBUTES, CONSTANTS, FORMER, RENAMED, current_config
from bpfed.config.reader import Override, read
from bpfed.config.settings import Settings
from bpfed.methods import FedAvg, Recipe
from bpfed.methods.base import RunShape
from bpfed.methods.population import Population
from bpfed.report.manifest import Manifest

TINY = {"rounds": 1, "epochs": 1, "progress": False}


def test_old_settings_are_the_new_ones_in_python() -> None:
    with pytest.warns(FutureWarning, match=r"rehearsals is now calibrate = pilot:3"):
        settings = Settings(rehearsals=3)  # type: ignore[call-arg]
    assert settings == Settings(calibrate="pilot:3")
    with pytest.warns(FutureWarning, match="rehearsals is now calibration_pilots"):
        assert settings.rehearsals == 3  # type: ignore[attr-defined]
    with pytest.warns(FutureWarning):
        assert Settings(rehearsals=0) == Settings()  # type: ignore[call-arg]
    for kind in (Recipe, Population):
        for old, new in FORMER.items():
            with pytest.raises(
                UserError, match=f"^{old} is a constant since bpfed 0.10 .* {ATTRIBUTES.get(new, new)} in"
            ):
                kind(**{old: 1.5})
    with pytest.raises(UserError, match=r"run\.softness is now run\.calibration_temperature, and both are given"):
        Settings(softness=2.0, calibration_temperature=3.0)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        Settings().nothing  # type: ignore[attr-defined]  # noqa: B018


OLD = """
[method]
name = "bpfed-recipe"
[run]
rehearsals = 2
"""


def test_old_keys_of_a_file_are_the_new_ones_and_named(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text(OLD)
    found = read(path)
    assert (found.method, found.run) == (Recipe(), Settings(calibrate="pilot:2"))
    assert [note.partition("is now ")[2].partition(";")[0] for note in found.notes] == ["calibrate = pilot:2"]
    path.write_text(OLD.replace("rehearsals = 2", 'rehearsals = "many"'))
    with pytest.raises(UserError, match="calibrate is 'pilot:many'"):
        read(path).run.check(5)
    path.write_text(OLD + 'calibrate = "none"\n')
    with pytest.raises(UserError, match=r"run\.rehearsals is now run\.calibrate, and both are given"):
        read(path)


@pytest.mark.parametrize(
    ("line", "where", "why"),
    [
        (
            "anchor = 7.0",
            "line 4: ",
            r"method\.anchor is a constant since bpfed 0\.10 \(0\.5 divided by the temp.* weight_decay",
        ),
        ("draws = 2", "line 4: ", r"method\.draws is a constant since bpfed 0\.10 \(1\)"),
        ("sigma = 0.1", "line 4: ", r"method\.sigma is true or false since bpfed 0\.10, and σ at the start a constant"),
    ],
)
def test_a_constant_cannot_be_set_in_a_file_or_by_a_flag(tmp_path: Path, line: str, where: str, why: str) -> None:
    path = tmp_path / "old.toml"
    path.write_text(OLD.replace("[run]", f"{line}\n[run]"))
    with pytest.raises(UserError, match=where + why):
        read(path)
    name, _, value = line.partition(" = ")
    with pytest.raises(UserError, match="--set: " + why):
        read(None, [Override("method.name", "bpfed-recipe"), Override(f"method.{name}", value)])
    with pytest.raises(UserError, match=r"^The recipe's max_lr_epochs is a constant since bpfed 0.10"):
        bpfed.fit(Recipe(), "digits", max_lr_epochs=3.0)


def test_a_run_folder_with_old_names_is_read(tmp_path: Path) -> None:
    """As 0.9.0 wrote it, with settings that are constants now."""
    folder = tmp_path / "a"
    run = bpfed.fit(
        Recipe(temperature=0.2), classification(sizes=(20, 30)), calibrate="pilot:1", out=folder, say=str, **TINY
    )
    names = {new: old for old, new in (RENAMED["run"] | FORMER).items()}
    old = re.sub(r"(?m)^(\w+)(?= = )", lambda m: names.get(m[1], m[1]), (folder / "config.toml").read_text())
    old = re.sub(r'(?m)^bpfed = ".*"', 'bpfed = "0.9.0"', old).replace("sigma = true\n", "", 1)
    constants = CONSTANTS["bpfed-recipe"] | {"mean_precision": 2.5}  # times T = 0.2 as strong as 10 times 0.05
    lines = "".join(f"{names.get(name, name)} = {json.dumps(value)}\n" for name, value in constants.items())
    old = old.replace("[method]\n", f"[method]\n{lines}")
    for name, value, why in (
        (
            "path",
            4.0,
            r"method.path is 4.0 in this run, and is a constant since bpfed 0.10 \(3.0\); use this run with bpfed 0.9.0",
        ),
        (
            "anchor",
            10.0,
            r"method.anchor is 10.0 in this run, and is a constant .* \(0.5 divided by the temperature\); use",
        ),
        ("sigma", 0.1, "method.sigma is 0.1 in this run, and is true or false since bpfed 0.10, and σ"),
    ):
        (tmp_path / "other.toml").write_text(re.sub(rf"(?m)^{name} = .*", f"{name} = {value}", old))
        with pytest.raises(UserError, match=why):
            read(tmp_path / "other.toml")
    written = {"config.toml": old.replace('rehearsals = "pilot:1"', "rehearsals = 1")}
    for file in ("learnt.json", "summary.json", "evaluation.json"):
        written[file] = (folder / file).read_text().replace("fitted_temperature", "fitted_softness")
        written[file] = written[file].replace("calibration_temperature", "softness")
    manifest = Manifest.read(folder)
    assert manifest is not None
    manifest.put(folder, written)
    assert "softness" in json.loads((folder / "learnt.json").read_text())
    loaded = bpfed.Run.load(folder)
    assert loaded.calibration_temperature == run.calibration_temperature != 1.0
    assert loaded.federation.method == run.federation.method
    ours = run.record()
    assert loaded.record() == replace(ours, config=ours.config | {"bpfed": "0.9.0"})
    assert current_config(loaded.config()) == loaded.config()
    with pytest.warns(FutureWarning, match=r"softness is now calibration_temperature"):
        assert loaded.softness == run.calibration_temperature  # type: ignore[attr-defined]


def test_a_method_written_for_an_earlier_version_is_run_as_it_was() -> None:
    with pytest.warns(FutureWarning, match="is now"):

        class Old(Recipe):
            numbers: ClassVar[tuple[str, ...]] = ("lr", *Recipe.stackable)

            def hyper_in(self, course: RunShape, sizes: torch.Tensor) -> dict[str, torch.Tensor]:
                return {**super().hyper_in(course, sizes), "mine": torch.zeros(len(sizes))}  # type: ignore[misc]

            def structure(self) -> tuple[object, ...]:
                return (*super().structure(), "mine")  # type: ignore[misc]

    shape, sizes = RunShape(10, 10, 300, 10, 50), torch.tensor([100.0])
    found, usual = Old().hparams_for_run(shape, sizes), Recipe().hparams_for_run(shape, sizes)
    assert found.keys() == {*usual, "mine"}
    assert all(torch.equal(found[name], usual[name]) for name in usual)  # not those of Method, which are others
    assert Old().trace_key()[-1] == "mine"
    assert Old.stackable[1:] == Recipe.stackable
    with pytest.raises(TypeError, match="defines both numbers and stackable"):
        type("Both", (FedAvg,), {"numbers": ("lr",), "stackable": ("lr",)})


@pytest.mark.parametrize("module", CLASSES)
def test_old_classes_are_the_new_ones(module: str) -> None:
    there = __import__(module, fromlist=["_"])
    for old, new in CLASSES[module].items():
        with pytest.warns(FutureWarning, match=f"{old} is now {new}"):
            assert getattr(there, old) is getattr(there, new)


def test_old_flags_say_the_new_ones(capsys: pytest.CaptureFixture[str]) -> None:
    from bpfed.cli.run import overrides

    found = overrides(None, [], {"rehearsals": "3", "softness": "0.8"})
    assert [(one.key, one.text) for one in found] == [
        ("run.calibration_temperature", "0.8"),
        ("run.calibrate", "pilot:3"),
    ]
    said = capsys.readouterr().err
    assert "--rehearsals 3 is now --calibrate pilot:3" in said
    assert "--softness 0.8 is now --calibration-temperature 0.8" in said
    with pytest.raises(UserError, match="both are given; leave out --rehearsals"):
        overrides(None, [], {"rehearsals": "3", "calibrate": "pilot:2"})
