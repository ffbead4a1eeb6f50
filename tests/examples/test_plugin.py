"""The template of a plug-in: installed as its ``pyproject.toml`` says, on the contract of methods, and run by its name."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import tomllib
from pathlib import Path

import pytest
from installed import install

import bpfed

PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"
sys.path.append(str(Path(__file__).parents[1] / "methods"))

import test_contract as contract  # noqa: E402


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """The package, as if it were installed."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"].items()
    points = "".join(f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in names.items()) for group, names in groups)
    install(tmp_path / "installed", points, project["name"], project["version"])
    for place in (PLUGIN, tmp_path / "installed"):
        monkeypatch.syspath_prepend(str(place))
    yield project
    sys.modules.pop("bpfed_scaffold", None)


def checks(module):
    """The tests of a module that need at most some clients of a method."""
    named = [f for name, f in vars(module).items() if name.startswith("test_")]
    return [f for f in named if set(inspect.signature(f).parameters) <= {"client"}]


@pytest.mark.parametrize("check", [f for f in checks(contract) if inspect.signature(f).parameters])
def test_its_method_is_on_the_contract(plugin, check):
    check(contract.Client("scaffold"))


def test_its_own_tests_pass(plugin):
    spec = importlib.util.spec_from_file_location("test_scaffold", PLUGIN / "tests" / "test_scaffold.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert len(checks(module)) == 3
    for check in checks(module):
        check()


@pytest.mark.usefixtures("untraced")
def test_it_is_run_and_loaded_by_its_name(plugin, tmp_path, command):
    command.ok("run", "--data", "digits", "--method", "scaffold", "--partition", "quantity:1.5", "--clients", "4",
               "--participants", "2", "--rounds", "2", "--epochs", "1", "--compile", "off", "--device", "cpu",
               "--baselines", "off", "--set", "method.lr=0.1", "--out", tmp_path / "run")  # fmt: skip
    run = bpfed.Run.load(tmp_path / "run")
    assert (run.federation.method.title, run.federation.method.lr) == ("SCAFFOLD", 0.1)
    assert run.federation.shared.control.abs().max() > 0
    assert run.data.partition == "quantity:1.5"
    assert "corrected by control variates" in command.ok("methods", "scaffold").out
