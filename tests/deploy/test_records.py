"""What a server writes of a finished run says what a simulated one does."""

import json
import tomllib

import pytest
from federations import OPEN, SETTINGS, Deployed
from loopgrid import node_of
from scenarios import classification

import bpfed
from bpfed._util.files import to_toml
from bpfed.config.reader import read
from bpfed.data.tabular.federate import federate
from bpfed.data.tabular.table import read_table
from bpfed.deploy.site.data import File
from bpfed.deploy.site.site import Site
from bpfed.methods import FedAvg
from bpfed.report import RunRecord

#: A simulation cannot have a deployment's protocol, a server sees no example to take a hash of, and what was neither
#: asked for nor dealt out by us (which rows a site tests on, who owns what) it does not know.
CONFIG = {"data.protocol", "data.fingerprint", "data.test_fraction", "data.partition"}
#: What takes the probability of every example or counts by class, and sites send sums over their examples.
EVALUATION = {"classification": {"fitted_temperature", "classes"}, "regression": {"fitted_temperature"}}


def tables(folder, task):
    """Three files, with two classes or numbers to predict."""
    made = {}
    for k, name in enumerate(("north", "south", "east")):
        rows = [f"{i % 7 + k},{i % 3},{i % 2 if task == 'classification' else i / 7:.2f}" for i in range(21)]
        made[name] = folder / f"{name}.csv"
        made[name].write_text("\n".join(["age,dose,target", *rows]) + "\n")
    return made


def keys(config):
    """Of a configuration, with those of its tables."""
    return {
        f"{name}.{key}" if isinstance(part, dict) else name
        for name, part in config.items()
        for key in (part if isinstance(part, dict) else ("",))
    }


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("classification", {}),
        ("classification", {"participants": 1, "members": 2, "calibration_temperature": 0.8}),
        ("classification", {"calibration": 0.2, "clip": 0.5, "noise": 1.0}),
        ("regression", {"participants": 2}),
    ],
)
def test_a_deployed_run_has_the_keys_of_a_simulated_one(task, options, tmp_path):
    files, settings = tables(tmp_path, task), {"rounds": 2, **options}
    data = federate("small", {name: read_table(path) for name, path in files.items()})
    deployed = Deployed(tmp_path, FedAvg(), data, **settings)
    for i, (name, path) in enumerate(files.items()):
        site = Site(tmp_path / name, name, deployed.config, File(name, path, deployed.config, OPEN), limits=OPEN)
        deployed.grid.clients[100 + i] = node_of(site)
    told = RunRecord.read(deployed.serve().journal.folder)
    run = bpfed.fit(FedAvg(), data, progress=False, **{**SETTINGS, **settings, "sets": "client"})
    assert keys(told.config) ^ keys(tomllib.loads(to_toml(run.config()))) == CONFIG
    assert told.config["model"] == run.config()["model"]  # the hash of the first weights too
    assert (told.config["data"]["target"], told.config["data"]["task"]) == ("target", task)
    wanted = run.summary_record()
    assert told.summary.keys() == wanted.keys()
    same = wanted.keys() - {"seconds", "protocol", "partition", "nll", "brier", "ece", "mce", "rmse", "accuracy"}
    assert {key: told.summary[key] for key in same} == {key: wanted[key] for key in same}
    assert (told.summary["protocol"], told.summary["partition"]) == ("deployed", "sites")
    assert told.evaluation.keys() ^ run.detail().keys() == EVALUATION[task]
    for row, theirs in zip(told.rows, run.detail()["clients"], strict=True):
        assert row.keys() == theirs.keys()


def test_the_report_says_how_many_sites_take_part_and_who_never_did(tmp_path):
    data = classification(sizes=(7, 12, 9))
    server = Deployed(tmp_path, FedAvg(), data, rounds=1, participants=1).serve()
    folder = server.journal.folder
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["participants"], summary["never_drawn"]) == (1, 2)
    assert RunRecord.read(folder).participation_note.startswith(
        "1 of the 3 clients are drawn in a round; 2 were never drawn"
    )
    assert "2 were never drawn" in (folder / "report.html").read_text()


def test_a_deployed_configuration_can_be_read_again(tmp_path):
    server = Deployed(tmp_path, FedAvg(), classification(sizes=(7, 12)), rounds=1).serve()
    again = read(server.journal.folder / "config.toml")
    assert again.run.rounds == 1
    assert again.recorded.keys() == {"model", "data"}
    assert again.recorded["data"] == {}
