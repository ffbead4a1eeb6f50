"""Networks of a package, walked through as a user does: in Python, on the command line and deployed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from installed import install
from torch.utils._pytree import tree_leaves

import bpfed
from bpfed._util.errors import UserError
from bpfed.config.settings import Settings
from bpfed.data import from_arrays
from bpfed.methods import BPFed

SEQUENCES = Path(__file__).parents[2] / "examples" / "sequences"
sys.path.append(str(Path(__file__).parents[1] / "deploy"))

from federations import Deployed, simulated  # noqa: E402

PACKAGE = "bpfed-sequences==1.0"
PLAYS = Path(os.environ.get("BPFED_DATA", "")) / "tinyshakespeare" / "input.txt"


@pytest.fixture
def walk(tmp_path, monkeypatch):
    """The example's script, with its package installed."""
    project = tomllib.loads((SEQUENCES / "pyproject.toml").read_text())["project"]
    (group, names), *_ = project["entry-points"].items()
    points = f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in names.items())
    shutil.copytree(SEQUENCES / "bpfed_sequences", tmp_path / "installed" / "bpfed_sequences")
    modules = ("bpfed_sequences/__init__.py",)
    install(tmp_path / "installed", points, project["name"], project["version"], modules)
    monkeypatch.delenv("BPFED_DATA", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    spec = importlib.util.spec_from_file_location("walk", SEQUENCES / "walk.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("bpfed_sequences", None)


@pytest.fixture
def two(walk):
    """Signals of two people, and the same for characters of two roles, a few rows each."""

    def some(name):
        if name == "gru":
            x, y, who = walk.signals(2, 18)
        else:
            said = walk.roles(60, 2) if name == "plays" else dict(list(walk.VERSES.items())[:2])
            x, y, who = walk.letters(said)
        labels, y = np.unique(y, return_inverse=True)
        kept = np.concatenate([np.flatnonzero(who == one)[:18] for one in np.unique(who)])
        return from_arrays(x[kept], y[kept], who[kept], name="two", labels=labels.tolist(), task="classification")

    return some


def test_the_script_trains_reports_predicts_and_lets_a_client_join(walk, tmp_path, capsys):
    runs = walk.main(tmp_path / "made", rounds=1)
    said = capsys.readouterr().out
    assert said.count("joins later") == 2
    assert "person 2 joins later" in said
    for run, name in zip(runs, ("activities", "plays"), strict=True):
        assert (tmp_path / "made" / f"{name}.html").stat().st_size > 1000
        assert run.federation.model.layout.personal_names == ("head.weight", "head.bias")


def steered(model):
    """Which shared weights have a gradient, ``[P_shared]`` bool.

    The bias of keys adds the same to all scores of a softmax. So its gradient is 0 up to rounding, of which Adam makes
    whole steps.
    """
    found = torch.ones(model.layout.total, dtype=torch.bool)
    for name, part in model.layout.unflatten(found).items():
        if name.endswith("in_proj_bias"):
            part.view(3, -1)[1] = False
    return found[: model.layout.shared]


@pytest.mark.parametrize("case", ["gru", "characters", "plays"])
def test_two_sites_have_the_simulators_numbers(two, case, tmp_path, monkeypatch):
    if case == "plays":
        if not PLAYS.is_file():
            pytest.skip("tinyshakespeare/input.txt is not in the folder that BPFED_DATA names")
        monkeypatch.setenv("BPFED_DATA", str(PLAYS.parents[1]))
    network = "gru" if case == "gru" else "characters"
    data, settings = two(case), {"rounds": 2, "epochs": 1, "network": network}
    deployed = Deployed(tmp_path, BPFed(), data, **settings)
    for site in deployed.sites.values():
        site.plugins = (PACKAGE,)
    server = deployed.serve()
    federation, history = simulated(BPFed(), data, **settings)
    matters = steered(federation.model)
    for ours, theirs in zip(tree_leaves(server.federation.shared), tree_leaves(federation.shared), strict=True):
        torch.testing.assert_close(ours[matters], theirs[matters], rtol=0, atol=1e-6)
    assert server.journal.evaluation[0]["nll"].clients == pytest.approx(history[-1][1]["nll"].clients, abs=1e-5)
    assert not any(seen.refused for seen in server.sites.values())


def test_a_site_that_has_not_agreed_refuses(two, tmp_path):
    deployed = Deployed(tmp_path, BPFed(), two("gru"), rounds=1, network="gru")
    with pytest.raises(UserError):
        deployed.serve()
    refused = f"which this site does not allow; if its owner trusts the package, add \"{PACKAGE}\" to 'plugins'"
    assert any(refused in sentence for sentence in deployed.said)


@pytest.mark.usefixtures("untraced")
def test_it_is_run_loaded_and_asked_on_the_command_line(walk, tmp_path, command):
    x, y, who = walk.signals(2, 18)
    (tmp_path / "people").mkdir()
    for one in np.unique(who):
        np.savez(tmp_path / "people" / f"{one}.npz", x=x[who == one], y=y[who == one])
    command.ok("run", "--data", f"folder:{tmp_path / 'people'}", "--network", "gru", "--method", "bpfed", "--rounds", "1",
               "--epochs", "1", "--compile", "off", "--device", "cpu", "--out", tmp_path / "run")  # fmt: skip
    run = bpfed.Run.load(tmp_path / "run")
    assert type(run.federation.model.module).__name__ == "GRU"
    np.savez(tmp_path / "new.npz", x=x[:3])
    told = command.ok("predict", tmp_path / "run", "--client", "person 0", "--input", tmp_path / "new.npz").out
    assert "walks" in told


def test_unknown_and_unfit_networks_are_refused_in_a_sentence(walk):
    with pytest.raises(
        UserError, match=r"network is 'grue', but must be 'auto', .*or a network of an installed package"
    ):
        Settings(network="grue")
    data = from_arrays(np.zeros((8, 3), np.float32), np.arange(8) % 2, ["a", "b"] * 4)
    with pytest.raises(
        UserError, match=r"The network 'gru' of the package .* cannot be made for inputs of shape \[3\]"
    ):
        bpfed.fit("bpfed", data, network="gru", progress=False)
    with pytest.raises(UserError, match="hidden is for a network of bpfed itself, but network is 'gru'"):
        bpfed.fit("bpfed", data, network="gru", hidden=3, progress=False)
