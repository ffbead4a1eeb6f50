"""Sites with files of their own: scaled alike by sums alone, and the same numbers as a simulation of all tables."""

import csv
import html
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from command import Command
from federations import OPEN, Deployed, simulated
from loopgrid import node_of
from test_same_numbers import same

from bpfed._util.errors import UserError
from bpfed.config.settings import DataSettings
from bpfed.data.sources.pooled import ATTRIBUTES, HOSPITALS
from bpfed.data.tabular.federate import federate
from bpfed.data.tabular.table import read_table
from bpfed.deploy.settings import Plan
from bpfed.deploy.site.data import File, Part, agreed, check_sites
from bpfed.deploy.site.site import Site
from bpfed.methods import FedAvg, Recipe
from bpfed.report import RunRecord
from bpfed.runs.run import Run

ROUNDS = 2


@pytest.fixture
def files(tmp_path):
    """Three tables of numbers and words, on different scales."""
    made = {}
    for k, name in enumerate(("north", "south", "east")):
        rng = np.random.default_rng(k)
        path = tmp_path / f"{name}.csv"
        with path.open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["age", "height", "ward", "target"])
            for _ in range(20):
                age, sick = rng.normal(40 + 20 * k, 10), rng.integers(2)
                out.writerow([f"{age:.6f}", f"{rng.normal(170 + 5 * sick, 8):.6f}", "ab"[rng.integers(2)], sick])
        made[name] = path
    return made


def deployed(folder, files, method):
    data = federate("files", {name: read_table(path) for name, path in files.items()})
    made = Deployed(folder, method, data, rounds=ROUNDS)
    for i, name in enumerate(data.clients):
        source = File(name, files[name], made.config, OPEN)
        site = Site(
            folder / name, name, made.config, source, say=made.said.append, own=folder / "own" / name, limits=OPEN
        )
        made.sites[name] = site
        made.grid.clients[100 + i] = node_of(site)
    return made, data


def status_of(made):
    """What the server last noted."""
    return json.loads((made.folder / "server" / "status.json").read_text())


def test_the_numbers_are_those_of_a_simulation_and_no_row_travels(tmp_path, files):
    made, data = deployed(tmp_path, files, FedAvg())
    same(made.serve(), *simulated(FedAvg(), data, rounds=ROUNDS))
    wire = made.grid.bytes()
    for path in files.values():
        for row in list(csv.reader(path.open()))[1:]:
            assert row[0].encode() not in wire
            assert row[1].encode() not in wire


def test_codes_are_used_as_in_a_simulation(tmp_path, files):
    """One site has all values, one has gaps, one lacks a value."""
    kinds = {"north": "123", "south": ("2", "3", ""), "east": "13"}
    for name, choice in kinds.items():
        head, *rows = files[name].read_text().splitlines()
        lines = [f"pain,{head}", *(f"{choice[k % len(choice)]},{row}" for k, row in enumerate(rows))]
        files[name].write_text("\n".join(lines))
    made, data = deployed(tmp_path, files, FedAvg())
    server = made.serve()
    wanted = tuple(f"pain{what}" for what in ("", " = 1", " = 2", " = 3", " missing"))
    assert data.preprocessor.input_names == ("age", "height", *wanted, "ward = a", "ward = b")
    for k, name in enumerate(data.clients):
        own = made.sites[name].source.data(server.journal.common)
        assert torch.allclose(own.train.x, data.train.client(k)[0], atol=1e-6)
    same(server, *simulated(FedAvg(), data, rounds=ROUNDS))
    assert any(note.startswith("'pain' has few whole numbers") for note in status_of(made)["notes"])


def test_the_target_of_a_regression_is_named_with_its_spread_and_what_its_mean_would_give(tmp_path, files):
    for path in files.values():
        path.write_text(path.read_text().replace("age,height,ward,target", "target,height,ward,sick"))
    made, data = deployed(tmp_path, files, FedAvg())
    assert data.task == "regression"
    server = made.serve()
    same(server, *simulated(FedAvg(), data, rounds=ROUNDS))
    record = RunRecord.read(server.journal.folder)
    assert record.target == ("target", pytest.approx(data.preprocessor.target_scale))
    assert [row["baseline"] > 0 for row in record.rows] == [True] * 3
    assert "RMSE in SD of 'target' (1 SD = " in html.unescape((server.journal.folder / "report.html").read_text())


def test_the_server_says_which_columns_differ_only_in_case(tmp_path, files):
    files["east"].write_text(files["east"].read_text().replace("height", "Height"))
    made, _ = deployed(tmp_path, files, FedAvg())
    made.serve()
    (note,) = status_of(made)["notes"]  # and not that some lack it
    assert note.startswith("Columns 'Height' and 'height' differ only in case")
    assert made.said.count(note) == 1


def test_the_server_says_which_columns_a_site_lacks(tmp_path, files):
    lines = files["east"].read_text().splitlines()
    files["east"].write_text("\n".join(line.partition(",")[2] for line in lines))
    made, _ = deployed(tmp_path, files, FedAvg())
    made.serve()
    (note,) = status_of(made)["notes"]
    assert note == (
        "Some sites lack columns that others have, which count as missing there: 'age' at 'east'; add them at these "
        "sites, or leave them out everywhere with --ignore when the deployment is made ('bpfed deploy init')."
    )
    assert made.said.count(note) == 1


def test_sites_whose_columns_contradict_each_other_are_told_so(tmp_path, files):
    made, _ = deployed(tmp_path, files, FedAvg())
    lines = files["east"].read_text().splitlines()
    files["east"].write_text("\n".join([lines[0], *(f"old,{line.partition(',')[2]}" for line in lines[1:])]))
    site = Site(tmp_path / "east", "east", made.config, File("east", files["east"], made.config, OPEN), limits=OPEN)
    made.grid.clients[made.node("east")] = node_of(site)
    with pytest.raises(UserError, match="'age' is numeric at 'north' but text at 'east'"):
        made.serve()


@pytest.mark.parametrize("told", [{}, {"summary": "x"}, {"summary": {"columns": 3}}])
def test_what_a_site_told_in_another_form_is_not_remarked_on(tmp_path, files, told):
    made, _ = deployed(tmp_path, files, FedAvg())
    statements = {name: site.source.data_statement() for name, site in made.sites.items()}
    assert check_sites(statements | {"late": told}, agreed(statements, made.config)) == []


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("named", [True, False])
def test_a_part_of_a_named_dataset_is_the_part_of_that_client(tmp_path, monkeypatch, order, named):
    """Whatever the order of the sites' names, and prepared as the configuration says."""
    monkeypatch.setenv("BPFED_DATA", str(tmp_path))
    rng = np.random.default_rng(0)
    for hospital in HOSPITALS:
        rows = [[*(rng.choice([*codes] or 99) for codes in ATTRIBUTES.values()), i % 2] for i in range(10)]
        (tmp_path / f"processed.{hospital}.data").write_text("\n".join(",".join(map(str, row)) for row in rows) + "\n")
    config = Deployed(tmp_path, FedAvg()).config
    config = replace(config, data=DataSettings(name="heart-disease", standardise="local", ignore="age,ca", seed=3))
    data = config.load_data()
    sites = (data.clients if named else ("a", "b", "c", "d"))[::order]
    part = Part(sites[1], sites, config).own
    whose = data.clients.index(sites[1]) if named else 1
    for ours, theirs in ((part.train, data.train), (part.test, data.test)):
        torch.testing.assert_close((ours.x, ours.y), theirs.client(whose))
    own = part.preprocessor
    assert own.local == {sites[1]: data.preprocessor.local[data.clients[whose]]}
    assert replace(own, local={}) == replace(data.preprocessor, local={})


def test_a_file_without_a_target_is_refused_at_the_start(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("age,height\n1,2\n3,4\n")
    config = Deployed(tmp_path, FedAvg()).config
    with pytest.raises(UserError, match="--target"):
        File("a", path, config)


@pytest.mark.parametrize("method", [FedAvg(), Recipe()])
def test_a_site_ends_with_a_model_of_its_own(tmp_path, files, method, capsys):
    """Its run folder predicts for the site's client as the simulated run does, and is the site's alone."""
    made, data = deployed(tmp_path, files, method)
    made.serve()
    state = simulated(method, data, rounds=ROUNDS)[0]
    state.settle()
    for i, name in enumerate(data.clients):
        run = Run.load(tmp_path / "own" / name)
        assert run.finished
        assert run.data.clients == (name,)
        x = data.test.x[data.test.offsets[i] : data.test.offsets[i + 1]]
        wanted = Run(state).client(name).predict(x, prepared=True)
        torch.testing.assert_close(run.client(name).predict(x, prepared=True).probs, wanted.probs, rtol=1e-4, atol=1e-5)
        own = tmp_path / "own" / name
        assert any(s.endswith(f"predict with it: bpfed predict {own} --client {name} --input FILE") for s in made.said)
    whose = [s for s in made.said if s.startswith("Weights of this site and of all sites: personal: ")]
    assert len(whose) == len(data.clients)  # each site says it once
    assert ("personal: nothing" in whose[0]) == isinstance(method, FedAvg)
    told = Command(capsys).ok(
        "predict",
        tmp_path / "own" / "north",
        "--client",
        "north",
        "--input",
        files["north"],
        "--out",
        tmp_path / "p.csv",
    )
    assert told.code == 0
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 21


def test_a_newcomer_at_a_site_is_found_again(tmp_path, files, capsys):
    made, _ = deployed(tmp_path, files, FedAvg())
    site = tmp_path / "site-north"
    Plan(("north", "south", "east"), site="north").write(site)
    made.sites["north"].own = site / "run"
    made.serve()
    command = Command(capsys)
    command.ok("adapt", site, "--input", files["south"], "--name", "ward", "--steps", "2")
    rows = ("--input", files["south"])
    told = [command.ok("predict", place, "--client", "ward", *rows).out for place in (site, site / "run")]
    assert told[0] == told[1]
    assert len(told[0].splitlines()) == 21


def test_a_model_that_cannot_be_kept_costs_no_score(tmp_path, files):
    made, _ = deployed(tmp_path, files, FedAvg())
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "south").write_text("no folder")
    server = made.serve()
    assert not server.sites["south"].refused
    assert any("own model could not be kept" in sentence for sentence in made.said)
    assert (tmp_path / "own" / "south").read_text() == "no folder"


def test_a_site_is_told_once_of_columns_that_look_like_no_inputs(tmp_path, files):
    for k, path in enumerate(files.values()):
        head, *rows = path.read_text().splitlines()
        path.write_text("\n".join([f"patient_id,{head}", *(f"{100 * k + i},{row}" for i, row in enumerate(rows))]))
    made, _ = deployed(tmp_path, files, FedAvg())
    made.serve()
    told = [sentence for sentence in made.said if "There seem to be identifiers" in sentence]
    assert len(told) == len(files)  # each of its own rows
    assert "leave them out with --ignore 'patient_id'. Whoever makes the deployment" in told[0]


def with_words(files):
    """The files with an id and a date in every row, and all of these words."""
    told = []
    for path in files.values():
        head, *rows = path.read_text().splitlines()
        own = [(f"{path.stem}-{i:03d}", f"2024-05-{i + 1:02d}") for i in range(len(rows))]
        lines = [f"{patient},{row},{day}" for (patient, day), row in zip(own, rows, strict=True)]
        path.write_text("\n".join([f"patient,{head},admitted", *lines]))
        told += [word for pair in own for word in pair]
    return told


@pytest.mark.parametrize("rows", [5, 20])
def test_words_that_look_like_dates_or_identifiers_are_refused_before_anything_is_sent(tmp_path, files, rows, capfd):
    with_words(files)
    lines = files["north"].read_text().splitlines()
    files["north"].write_text("\n".join(lines[: rows + 1]))
    bpfed, fed = Command(capfd), tmp_path / "fed"
    bpfed.ok("deploy", "init", fed, "--sites", "north,south,east", "--target", "target")
    outcome = bpfed("deploy", "client", fed / "site-north", "--data", files["north"])
    assert outcome.code == 2
    assert outcome.sentence == (
        f"'{files['north']}' seems to have dates in 'admitted' and identifiers in 'patient', and words "
        "there would be sent to the server and all sites; leave these columns out with --ignore 'admitted,patient' "
        "when the deployment is made ('bpfed deploy init'), or remove them from the file."
    )
    assert "joins" not in outcome.err  # no SuperNode has been started
    assert Plan.read(fed / "site-north").data == ""


def test_words_that_are_left_out_do_not_travel(tmp_path, files):
    told = with_words(files)
    made = Deployed(tmp_path, FedAvg(), rounds=1)
    sites = tuple(files)
    made.plan = replace(made.plan, sites=sites)
    made.config = replace(made.config, data=DataSettings(name="files", ignore="admitted, patient"))
    made.grid.clients = {
        100 + i: node_of(
            Site(tmp_path / name, name, made.config, File(name, files[name], made.config, OPEN), limits=OPEN)
        )
        for i, name in enumerate(sites)
    }
    made.serve()
    wire = made.grid.bytes()
    assert b"ward" in wire
    assert not [word for word in told if word.encode() in wire]
