"""Run folders of earlier versions can be read; who gives an old name himself is told the new one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from scenarios import classification

import bpfed
from bpfed._util.errors import UserError
from bpfed.config.migrations import ATTRIBUTES, CONSTANTS, FORMER, RENAMED, as_then, current_config
from bpfed.config.reader import Override, read
from bpfed.config.settings import Settings
from bpfed.methods import Recipe
from bpfed.methods.population import Population
from bpfed.report.manifest import Manifest

TINY = {"rounds": 1, "epochs": 1, "progress": False}


def test_settings_that_are_constants_now_are_refused_in_python() -> None:
    for kind in (Recipe, Population):
        for old, new in FORMER.items():
            with pytest.raises(
                UserError, match=f"^{old} is a constant since bpfed 0.10 .* {ATTRIBUTES.get(new, new)} in"
            ):
                kind(**{old: 1.5})
    with pytest.raises(TypeError, match=r"^Settings\(\) got an unexpected keyword argument 'softness'"):
        Settings(softness=2.0)  # type: ignore[call-arg]


OLD = """
[method]
name = "bpfed-recipe"
[run]
rehearsals = 2
"""


def test_an_old_key_is_read_where_a_run_wrote_it_and_else_refused_with_its_new_name(tmp_path: Path) -> None:
    path = tmp_path / "old.toml"
    path.write_text(OLD)
    with pytest.raises(UserError, match=r"old.toml', line 5: run.rehearsals is called run.calibrate since bpfed 0.10;"):
        read(path)
    with pytest.raises(
        UserError, match=r"^--set: run.softness is called run.calibration_temperature since bpfed 0.10;"
    ):
        read(None, [Override("run.softness", "2")])
    path.write_text('bpfed = "0.9.0"\n' + OLD)
    assert read(path).run == Settings(calibrate="pilot:2")
    path.write_text('bpfed = "0.9.0"\n' + OLD.replace("rehearsals = 2", 'softness = "many"'))
    with pytest.raises(UserError, match=r"line 6: run.calibration_temperature is 'many', but must be a number"):
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
    names = {new: old for old, new in (RENAMED | FORMER).items()}
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


def test_widths_of_earlier_runs_go_on_at_the_temperature_of_the_means():
    before = {"lr": 0.003, "temperature": 1.0}
    assert as_then("0.11.0", "bpfed-adaptive", before) == before | {"sigma_temperature": 1.0}
    assert as_then("0.12.0", "bpfed-adaptive", before) == before
