"""Rows held out by time or by group at deployed sites: as in a simulation, and the column stays at the site."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from federations import OPEN, Deployed, simulated
from loopgrid import node_of
from test_deployed_pilots import as_simulated

from bpfed._util.errors import UserError
from bpfed.data.tabular.federate import federate
from bpfed.data.tabular.table import read_table
from bpfed.deploy.protocol.state_schema import RejectedMessage
from bpfed.deploy.server.roster import read_statement
from bpfed.deploy.server.server import check_deployment
from bpfed.deploy.site.data import File
from bpfed.deploy.site.site import Site
from bpfed.methods import FedAvg

TINY = {"rounds": 2, "epochs": 1, "calibrate": "pilot:2"}
HEAD = ["age", "dose", "patient", "seen", "target"]


@pytest.fixture
def files(tmp_path):
    """Two tables whose rows have a patient and a date, in no order."""
    made = {}
    for k, name in enumerate(("north", "south")):
        rng, path = np.random.default_rng(k), tmp_path / f"{name}.csv"
        rows = []
        for day in rng.permutation(60):
            sick = int(rng.integers(2))
            seen = np.datetime64("2031-01-01") + int(day)
            rows.append([f"{rng.normal(50 + 9 * sick, 9):.5f}", f"{rng.normal():.5f}", f"pat-{day % 9}", seen, sick])
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([HEAD, *rows])
        made[name] = path
    return made


def deployed(folder, files, holdout, **settings):
    left = "patient" if holdout.startswith("time") else "seen"
    tables = {name: read_table(path) for name, path in files.items()}
    data = federate("files", tables, "target", ignore=[left], holdout=holdout)
    made = Deployed(folder, FedAvg(), data, **{**TINY, **settings})
    made.config = replace(made.config, data=replace(made.config.data, target="target", ignore=left, holdout=holdout))
    for i, name in enumerate(data.clients):
        source = File(name, files[name], made.config, OPEN)
        made.sites[name] = Site(folder / name, name, made.config, source, say=made.said.append, limits=OPEN)
        made.grid.clients[100 + i] = node_of(made.sites[name])
    return made, data


@pytest.mark.parametrize("holdout", ["time:seen", "group:patient"])
def test_sites_hold_out_what_a_simulation_does(tmp_path, files, holdout):
    made, data = deployed(tmp_path, files, holdout)
    server = made.serve()
    as_simulated(server, *simulated(FedAvg(), data, **TINY))
    column = holdout.partition(":")[2]
    assert any(f"by '{column}' are held out; the column is used for this alone" in sentence for sentence in made.said)
    wire = made.grid.bytes()
    assert b"2031-" not in wire
    assert b"pat-" not in wire
    for i, name in enumerate(data.clients):
        own = made.sites[name].source.data(server.journal.common)
        assert own.preprocessor.input_names == ("age", "dose")
        assert own.holdout == data.holdout
        assert own.test.sizes.tolist() == [int(data.test.sizes[i])]


def test_calibration_examples_are_held_out_by_time_and_not_by_group(tmp_path, files):
    made, data = deployed(tmp_path, files, "time:seen", calibration=0.2)
    as_simulated(made.serve(), *simulated(FedAvg(), data, **TINY, calibration=0.2, sets="client"))
    config = replace(made.config, data=replace(made.config.data, holdout="group:patient"))
    with pytest.raises(UserError, match="nobody is told how large the groups of a site are, so calibration examples"):
        check_deployment(config, 2)


def test_server_and_sites_must_agree_on_it(tmp_path, files):
    made, _ = deployed(tmp_path, files, "time:seen")
    made.config = replace(made.config, data=replace(made.config.data, holdout=None))
    with pytest.raises(UserError, match="Only 0 of 2 sites joined"):
        made.serve()


@pytest.mark.parametrize(
    ("holdout", "why"),
    [
        ("time:when", "has no column 'when'"),
        ("time:patient", "must have numbers or ISO dates"),
        ("group:target", "is to be predicted"),
        ("when", "must be time:COLUMN, group:COLUMN or last:SHARE"),
    ],
)
def test_a_site_that_cannot_do_it_says_so_before_it_joins(tmp_path, files, holdout, why):
    made, _ = deployed(tmp_path, files, "time:seen")
    config = replace(made.config, data=replace(made.config.data, holdout=holdout))
    with pytest.raises(UserError, match=why):
        File("north", files["north"], config, OPEN)


def test_no_site_can_make_the_column_an_input(tmp_path, files):
    made, _ = deployed(tmp_path, files, "time:seen")
    server = made.server()
    assert list(server.roster.ignore) == ["patient", "seen"]
    plain = replace(made.config, data=replace(made.config.data, ignore="patient", holdout=None))
    files["north"].write_text(files["north"].read_text().replace("2031-", "").replace("-", ""))
    told = File("north", files["north"], plain, OPEN).data_statement()
    assert "seen" in told["summary"]["columns"]
    with pytest.raises(RejectedMessage, match="has 'seen' among the inputs"):
        read_statement(json.dumps(told), "north", server.roster.ignore)
