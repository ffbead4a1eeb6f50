"""What other packages add by entry points: found by name, refused where it is broken, and kept out of sites."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import scenarios
from installed import install

import bpfed
from bpfed._util.errors import UserError
from bpfed.cli import main
from bpfed.config import registry
from bpfed.config.reader import Override, read
from bpfed.data import load
from bpfed.data.tabular.table import read_table
from bpfed.deploy.ops import admin
from bpfed.deploy.protocol.messages import fingerprint
from bpfed.deploy.settings import Plan
from bpfed.deploy.site.site import open_site
from bpfed.methods import method

MODULE = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bpfed.aggregation.rules import mean
from bpfed.data.sources.pooled import Digits, Entry
from bpfed.data.tabular.table import Table
from bpfed.inference.likelihoods import Categorical
from bpfed.methods import FedAvg


@dataclass(frozen=True)
class Halved(FedAvg):
    '''FedAvg with a shorter step.

    Attributes:
        factor: Of the step.
    '''

    name: ClassVar[str] = "halved"
    title: ClassVar[str] = "Halved"
    factor: float = 0.5


class Stale(FedAvg):
    name = "stale"

    def aggregate(self, shared, uploads, weights):
        return shared


def by_parity(y, clients, rng, number=2):
    return np.arange(len(y)) % int(number) % clients


def to_one(y, clients, rng):
    return np.zeros(len(y), int)


def read_pairs(path):
    rows = [line.split() for line in path.read_text().splitlines()]
    return Table(str(path), len(rows), {"a": np.array([float(r[0]) for r in rows]), "b": np.array([float(r[1]) for r in rows])})


@dataclass(frozen=True)
class Smoothed(Categorical):
    amount: float = 0.1


more_digits = Entry(1797, 4, 8.0, tuple("0123456789"), "Digits again.", Digits())
"""
POINTS = """
[bpfed.methods]
halved = addon:Halved
stale = addon:Stale
function = addon:to_one
misnamed = addon:Halved
absent = addon:Nothing
nowhere = addon_that_is_not_there:Method
[bpfed.partitions]
parity = addon:by_parity
to-one = addon:to_one
[bpfed.tables]
pairs = addon:read_pairs
[bpfed.datasets]
more-digits = addon:more_digits
broken-digits = addon:Nothing
[bpfed.rules]
plain = addon:mean
[bpfed.likelihoods]
smoothed = addon:Smoothed
"""
PACKAGE = "addon-package==1.5"
SHORT = {
    "rounds": 1,
    "epochs": 1,
    "eval_draws": 2,
    "compile": "off",
    "device": "cpu",
    "progress": False,
    "baselines": "off",
}


@pytest.fixture
def addon(tmp_path, monkeypatch):
    """A package that is installed for the time of a test; gives the folder that it is in."""
    place = tmp_path / "site-packages"
    install(place, POINTS)
    (place / "addon.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(place))
    yield place
    sys.modules.pop("addon", None)


@pytest.mark.usefixtures("untraced")
def test_a_method_is_run_by_its_name_with_its_settings_and_predicts_from_its_folder(addon, tmp_path, capsys):
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as done:
        main(
            f"run --method halved --set method.factor=0.25 --rounds 1 --epochs 1 --compile off --device cpu --baselines off -q "
            f"--data more-digits --partition parity:4 --out {out}".split()
        )
    assert done.value.code == 0, capsys.readouterr().err
    run = bpfed.Run.load(out)
    assert type(run.federation.method) is method("halved")
    assert run.federation.method.factor == 0.25
    assert (run.data.partition, run.data.name, len(run.data)) == ("parity:4", "more-digits", 4)
    test = load("more-digits", partition="parity:4").test
    assert run.client("client-00").predict(test.x[:3]).probs.shape == (3, 10)

    sys.path.remove(str(addon))
    with pytest.raises(UserError, match="trained with the method 'halved', which is not installed here"):
        bpfed.Run.load(out)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("stale", "has an aggregate without the argument 'clients'"),
        ("function", "is not a subclass of bpfed.methods.Method"),
        ("misnamed", "calls itself 'halved'"),
        ("absent", "cannot be imported (AttributeError: "),
        ("nowhere", "cannot be imported (ModuleNotFoundError: No module named 'addon_that_is_not_there')"),
    ],
)
def test_a_broken_one_is_named_with_its_package(addon, name, why):
    with pytest.raises(UserError) as refused:
        read(None, [Override("method.name", name)])
    assert str(refused.value).startswith(f"The method '{name}' of the package {PACKAGE} {why}")


def test_a_broken_one_breaks_nothing_else(addon, capsys):
    (addon / "damaged-1.dist-info").mkdir()
    (addon / "damaged-1.dist-info" / "entry_points.txt").write_text("[bpfed.methods]\nno equals sign\n")
    assert method("fedavg").name == "fedavg"
    for command in ("methods", "data list"):
        with pytest.raises(SystemExit) as done:
            main(command.split())
        assert done.value.code == 0
    told = capsys.readouterr()
    assert {"halved", "fedper", "parity", "mnist"} <= set(told.out.split())
    assert told.err.count("bpfed: The method '") == 5


def test_a_name_that_two_have_is_refused_and_no_other(addon):
    install(addon, "[bpfed.methods]\nfedavg = addon:Halved\nhalved = addon:Halved\n", "other", "2")
    with pytest.raises(UserError, match=r"'fedavg' is in several packages \(bpfed, other==2\)"):
        method("fedavg")
    with pytest.raises(UserError, match=r"'halved' is in several packages \(.*addon-package==1.5"):
        read(None, [Override("method.name", "halved")])
    assert method("fedper").name == "fedper"


@pytest.mark.usefixtures("untraced")
def test_rules_formats_and_likelihoods_of_other_packages(addon, tmp_path):
    method("bpfed")(rule="plain").check()
    with pytest.raises(UserError, match="Unknown server rule 'plane'; did you mean 'plain'"):
        method("bpfed")(rule="plane").check()
    (tmp_path / "a.pairs").write_text("1 2\n3 4\n")
    table = read_table(tmp_path / "a.pairs", words=["b"])
    assert table.columns["a"].tolist() == [1, 3]
    assert table.words("b") == ["2", "4"]
    (tmp_path / "b.pairs").write_text("1 x\n")
    with pytest.raises(UserError, match=rf"cannot be read by the package {PACKAGE} \(ValueError: could not convert"):
        read_table(tmp_path / "b.pairs")
    made = bpfed.fit("fedavg", scenarios.classification(), likelihood="smoothed", out=tmp_path / "run", **SHORT)
    loaded = bpfed.Run.load(tmp_path / "run").federation.model.likelihood
    assert loaded == made.federation.model.likelihood
    assert repr(loaded) == "Smoothed(classes=3, amount=0.1)"


@pytest.mark.usefixtures("untraced")
def test_a_method_from_no_package_is_trained_and_resumed_but_its_folder_does_not_know_it(tmp_path):
    class Mine(method("fedavg")):
        name = "mine"

    said = {"data": scenarios.classification(), "out": tmp_path / "run", **SHORT}
    assert bpfed.fit(Mine(), **said).federation.finished
    assert bpfed.fit(Mine(), resume=True, **said).federation.finished
    with pytest.raises(UserError, match="trained with the method 'mine', which is not installed here"):
        bpfed.Run.load(tmp_path / "run")

    class Stale(method("fedavg")):
        def aggregate(self, shared, uploads, weights):
            return shared

    with pytest.raises(UserError, match=r"Stale has an aggregate without the argument 'clients'"):
        bpfed.fit(Stale(), scenarios.classification(), **SHORT)


def test_a_partition_may_be_a_function():
    def halves(y, clients, rng):
        return (y < 5).astype(int)

    data = load("digits", clients=2, partition=halves)
    assert np.unique(data.train.y[data.train.owner == 1]).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(UserError, match="gives client 2 no example"):
        load("digits", clients=3, partition=halves)
    with pytest.raises(UserError, match=r"gives client 1, but must give -1 .nobody. to 0"):
        load("digits", clients=1, partition=halves)
    with pytest.raises(UserError, match=r"float64 of shape .3., but must give a whole number for each of 1797"):
        load("digits", clients=1, partition=lambda y, clients, rng: np.ones(3))
    with pytest.raises(UserError, match=r"is the Python function .*halves; load the data with"):
        load("digits", partition=data.partition)


def test_a_site_imports_no_plug_in_that_its_owner_does_not_name(addon, tmp_path):
    config = read(None, [Override("method.name", "halved"), Override("run.rounds", "1")])
    admin.make(tmp_path / "fed", Plan(("client-00", "client-01"), plugins=(PACKAGE,)), config)
    sys.modules.pop("addon", None)
    folder = admin.site_folder(tmp_path / "fed", "client-00")
    with pytest.raises(UserError, match=rf'add "{PACKAGE}" to \'plugins\' of the site\'s deploy.toml'):
        open_site(folder, print, "digits")
    assert "addon" not in sys.modules
    replace(Plan.read(folder), plugins=("addon-package==1.4",)).write(folder)
    with pytest.raises(UserError, match="does not allow"):
        open_site(folder, print, "digits")
    replace(Plan.read(folder), plugins=(PACKAGE,)).write(folder)
    site = open_site(folder, print, "digits")
    assert site.config.method.name == "halved"
    install(addon.parent / "newer", POINTS, version="1.6")
    sys.path.insert(0, str(addon.parent / "newer"))
    try:
        assert fingerprint(site.config) != site.fingerprint  # server and sites have the same version, or do not meet
    finally:
        sys.path.remove(str(addon.parent / "newer"))


def test_a_site_runs_no_module_that_is_not_of_the_package_it_allows(addon, tmp_path, monkeypatch):
    """Not where the package names a module of another, nor where a file in the way has the name of its own."""
    assert registry.METHODS.load("halved")
    with registry.allowing([PACKAGE]):
        assert registry.METHODS.load("halved")
    (tmp_path / "in-the-way").mkdir()
    (tmp_path / "in-the-way" / "addon.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(tmp_path / "in-the-way")
    monkeypatch.delitem(sys.modules, "addon")
    with registry.allowing([PACKAGE]), pytest.raises(UserError, match="no file of that package, so a site does not"):
        registry.METHODS.load("halved")


@pytest.mark.parametrize("strange", ["__init__.py", "inner/__init__.py", "inner/plug.py"])
def test_a_file_that_another_package_has_put_into_its_folder_is_none_of_it(strange, tmp_path, monkeypatch):
    place, files = tmp_path / "site-packages", ["__init__.py", "inner/__init__.py", "inner/plug.py"]
    install(place, "[bpfed.rules]\ndeep = inside.inner.plug:rule\n")
    for file in files:
        path = place / "inside" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("rule = abs")
    (record,) = place.glob("*.dist-info/RECORD")
    listed = record.read_text()
    monkeypatch.syspath_prepend(str(place))
    for kept, allowed in ((files, True), ([file for file in files if file != strange], False)):
        record.write_text(listed + "".join(f"inside/{file},,\n" for file in kept))
        point = next(p for p in registry.RULES._points() if p.name == "deep")
        assert registry._of_its_package(point) is allowed
    assert "inside" not in sys.modules


def test_help_reads_no_metadata():
    code = (
        "import sys; sys.argv = ['bpfed', 'run', '--help']\n"
        "import importlib.metadata as m; m.entry_points = m.distributions = None\n"
        "from bpfed.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr


def test_every_group_has_its_registry():
    found = {known.group for known in vars(registry).values() if isinstance(known, registry.Registry)}
    kinds = "methods networks likelihoods datasets partitions metrics rules tables"
    assert found == {f"bpfed.{kind}" for kind in kinds.split()}
