"""The commands of a deployment, as far as they go without processes, and the apps that Flower starts."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from command import Command, files
from federations import Deployed
from loopgrid import LoopGrid, node_of

from bpfed._util.errors import UserError
from bpfed.deploy import apps
from bpfed.deploy.ops import admin, flower, supervise
from bpfed.deploy.protocol.messages import Request, fingerprint
from bpfed.deploy.protocol.transport import GridTransport
from bpfed.deploy.server.server import open_server
from bpfed.deploy.settings import Plan
from bpfed.deploy.site.site import open_site
from bpfed.methods import FedAvg
from bpfed.runs.run import Run


@pytest.fixture
def bpfed(capsys):
    return Command(capsys)


def test_without_a_server_run_soon_says_where_it_looked(bpfed, tmp_path, monkeypatch):
    fed = tmp_path / "fed"
    address = f"127.0.0.1:{supervise.free_port()}"
    bpfed.ok("deploy", "init", fed, "--sites", "north,south", "--address", address)
    assert admin.STARTING <= 20.0
    monkeypatch.setattr(admin, "STARTING", 1.0)
    monkeypatch.setattr("bpfed.deploy.server.status.SILENCE", (0.1, 60.0))
    outcome = bpfed("deploy", "run", fed)
    waits, *_, refuses = outcome.err.splitlines()
    assert (outcome.code, outcome.out) == (2, "")
    assert f"Waiting up to 1 s for the server at {address}, which 'bpfed deploy server {fed}' starts, for 0:0" in waits
    assert refuses == f"bpfed: No server answers at {address}; start it with: bpfed deploy server {fed}"


def test_what_cannot_be_is_said_in_one_sentence(bpfed, tmp_path):
    fed = tmp_path / "fed"
    bpfed.ok("deploy", "init", fed, "--sites", "a,b")
    assert "holds files already" in bpfed("deploy", "init", fed, "--sites", "a,b").sentence
    both = ("--calibrate", "pilot:2", "--calibration-temperature", "0.5")
    assert "use only one of the two" in bpfed("deploy", "init", tmp_path / "x", "--sites", "a,b", *both).sentence
    assert "names a site twice" in bpfed("deploy", "init", tmp_path / "x", "--sites", "a,a").sentence
    assert "host:port" in bpfed("deploy", "init", tmp_path / "x", "--sites", "a", "--address", "here").sentence
    for command in ("server", "client", "run", "status"):  # names the folder that was given
        sentence = f"'{tmp_path / 'r'}' is not a folder of a deployment; make one with 'bpfed deploy init'."
        assert bpfed("deploy", command, tmp_path / "r").sentence == sentence
    assert bpfed("deploy", "client", fed / "server").sentence == (
        f"'{fed / 'server'}' is not the folder of a site; give one such as '{fed / 'site-a'}'."
    )
    assert bpfed("deploy", "client", fed).sentence == (
        f"'{fed}' is the folder of a whole deployment; give that of one site, such as '{fed / 'site-a'}'."
    )
    assert not (tmp_path / "x").exists()
    assert "No run yet" in bpfed.ok("deploy", "status", fed).out
    (fed / "server" / "deploy.toml").write_text('sites = ["a"]\ntimeuot = 3\n')
    assert "did you mean 'timeout'" in bpfed("deploy", "status", fed).sentence


def test_data_is_remembered_once_it_could_be_read(tmp_path, capfd):
    bpfed, fed = Command(capfd), tmp_path / "fed"
    bpfed.ok("deploy", "init", fed, "--data", "digits", "--clients", "2")
    site = fed / "site-client-00"
    before = files(site)
    assert bpfed("deploy", "client", site, "--data", "nosuch.csv").sentence == (
        "'nosuch.csv' is neither a file nor the name of a dataset; give one with --data."
    )
    assert files(site) == before
    open_site(site, print, "digits")
    assert Plan.read(site).data == "digits"
    with pytest.raises(UserError, match=r"'nosuch.csv' is neither a file"):
        open_site(site, print, "nosuch.csv")
    assert open_site(site, print).name == "client-00"


def test_a_deployment_goes_back_to_a_round_that_is_kept(bpfed, tmp_path, monkeypatch):
    fed = tmp_path / "fed"
    small = ("--data", "digits", "--clients", "2", "--rounds", "3", "--epochs", "1", "--method", "fedavg")
    bpfed.ok("deploy", "init", fed, *small)
    server = fed / "server"
    assert "No run has begun in" in bpfed("deploy", "run", fed, "--back-to", "1").err
    made = open_server(server, print)
    sites = {name: open_site(admin.site_folder(fed, name), print, "digits") for name in made.plan.sites}
    grid = LoopGrid({k: node_of(site) for k, site in enumerate(sites.values())})
    grid.keys = {list(sites).index(name): key for key, name in made.roster.named.items()}
    made.serve(GridTransport(grid, poll=0.01))

    status = server / "run" / "status.json"
    noted = json.loads(status.read_text())
    status.write_text(json.dumps(noted | {"state": "running"}))  # by this process, which is alive
    kept = files(server)
    refused = bpfed("deploy", "run", fed, "--back-to", "1")
    assert refused.code == 2
    assert "A run is under way (round 3 of 3), so it cannot go back to round 1" in refused.err
    status.write_text(json.dumps(noted))
    assert "no checkpoint of round 7 in" in bpfed("deploy", "run", fed, "--back-to", "7").err
    status.write_text(json.dumps(noted | {"state": "running"}))
    assert files(server) == kept

    status.write_text(json.dumps(noted))
    monkeypatch.setattr(admin, "STARTING", 0.1)
    said = bpfed("deploy", "run", fed, "--back-to", "1").err  # and no server answers
    assert "Going back to round 1; 2 later checkpoints removed." in said
    assert "No server answers" in said
    again = open_server(server, print)
    again.serve(GridTransport(grid, poll=0.01))
    assert [line["round"] for line in again.history] == [1, 2, 3]
    for before, after in zip(made.federation.shared, again.federation.shared, strict=True):
        assert before.equal(after)


def test_a_finished_run_is_not_run_again_and_predicts_at_its_sites(bpfed, tmp_path):
    fed = tmp_path / "fed"
    bpfed.ok(
        "deploy",
        "init",
        fed,
        "--data",
        "digits",
        "--clients",
        "2",
        "--rounds",
        "1",
        "--epochs",
        "1",
        "--method",
        "fedavg",
    )
    server = fed / "server"
    made = open_server(server, print)
    sites = {name: open_site(admin.site_folder(fed, name), print, "digits") for name in made.plan.sites}
    nodes = {name: k for k, name in enumerate(sites)}
    grid = LoopGrid({nodes[name]: node_of(site) for name, site in sites.items()})
    grid.keys = {nodes[name]: key for key, name in made.roster.named.items()}
    assert admin.finished(server) is None
    made.serve(GridTransport(grid, poll=0.01))

    kept = files(server)
    again = bpfed.ok("deploy", "run", fed)  # and no server answers
    assert "is finished already: its only round is done." in again.err
    assert "Trained for" in again.out
    assert files(server) == kept
    assert re.search(r"Round 1: accuracy \d+\.\d %  NLL \d\.\d{3}", bpfed.ok("deploy", "status", fed).out)

    shown = bpfed.ok("report", server / "run").out
    assert all(bpfed.ok("report", folder).out == shown for folder in (server, fed))
    alone = bpfed.ok("report", fed / "site-client-00").out
    assert alone == bpfed.ok("report", fed / "site-client-00" / "run").out
    assert f"Trained on {'cuda' if torch.cuda.is_available() else 'cpu'}." in alone
    for folder in (server / "run", server, fed):
        for command in (("predict", folder, "--client", "client-00"), ("adapt", folder)):
            said = bpfed(*command, "--input", "x.csv").sentence
            assert "belongs to a deployment's server, which has neither the sites' personal factors" in said
            assert "at a site, with its own folder" in said
    assert Run.load(fed / "site-client-00").client("client-00").name == "client-00"
    own = fed / "site-client-00"
    for folder in (own, own / "run"):
        assert bpfed("predict", folder, "--client", "client-01", "--input", "x.csv").sentence == (
            f"'{own / 'run'}' has only the model of site 'client-00'; the model of 'client-01' is in that site's own "
            "folder, so predict there."
        )
    assert "did you mean 'client-00'?" in bpfed("predict", own, "--client", "client-0", "--input", "x.csv").sentence
    shutil.rmtree(fed / "site-client-00" / "run")
    said = bpfed("predict", fed / "site-client-00", "--client", "client-00", "--input", "x.csv").sentence
    assert "belongs to a deployment's site, which has no model yet" in said
    said = bpfed("report", fed / "site-client-00").sentence
    assert "belongs to a deployment and has no finished run; go on with it on the server's machine" in said
    elsewhere = (server / "run").rename(tmp_path / "copied")
    assert "deployment's server" in bpfed("predict", elsewhere, "--client", "client-00", "--input", "x.csv").sentence
    elsewhere.rename(server / "run")

    last = admin.status(server)
    (server / "run" / "status.json").write_text(json.dumps(last | {"metrics": last["metrics"] | {"tested": 1}}))
    assert admin.finished(server) is None  # a site was away when the last round was tested
    (server / "run" / "status.json").write_text(json.dumps(last))
    config = server / "config.toml"
    config.write_text(config.read_text().replace("rounds = 1", "rounds = 2"))
    assert "has a different configuration" in bpfed("deploy", "run", fed).sentence


@pytest.mark.parametrize(
    ("state", "alive", "word", "online"),
    [
        ("running", True, "running", "yes"),
        ("running", False, "interrupted", "–"),
        ("stopped", True, "stopped", "–"),
        ("finished", False, "finished", "–"),
    ],
)
def test_sites_are_called_online_only_while_the_run_is_under_way(bpfed, tmp_path, state, alive, word, online):
    fed = tmp_path / "fed"
    bpfed.ok("deploy", "init", fed, "--sites", "north,south")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    noted = {
        "state": state,
        "pid": os.getpid() if alive else ended.pid,
        "at": time.time(),
        "round": 1,
        "rounds": 2,
        "sites": {site: {"online": True, "ready": True} for site in ("north", "south")},
        "notes": ["Columns 'X' and 'x' differ."],
    }
    (fed / "server" / "run").mkdir()
    (fed / "server" / "run" / "status.json").write_text(json.dumps(noted))
    shown = bpfed.ok("deploy", "status", fed).out
    assert shown.startswith(f"{word}, round 1 of 2")
    rows = [line.split() for line in shown.splitlines()]
    assert [row[1] for row in rows if row[:1] in (["north"], ["south"])] == [online] * 2
    assert ("Which sites are online is known only during a run." in shown) == (online != "yes")
    assert "Columns 'X' and 'x' differ.\n" in shown


def test_flower_tells_its_makers_nothing_unless_allowed(tmp_path):
    silent = supervise.environment(tmp_path, Plan(("a",)))
    assert (silent["FLWR_TELEMETRY_ENABLED"], silent["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    open_ = supervise.environment(tmp_path, Plan(("a",), telemetry=True))
    assert (open_["FLWR_TELEMETRY_ENABLED"], open_["FLWR_DISABLE_UPDATE_CHECK"]) == ("1", "0")
    assert silent["FLWR_HOME"] == str(tmp_path)


def test_the_fingerprint_follows_what_is_computed_and_not_where(tmp_path):
    base = Deployed(tmp_path, FedAvg()).config
    others = [
        Deployed(tmp_path, FedAvg(lr=0.1)),
        Deployed(tmp_path, FedAvg(), seed=1),
        Deployed(tmp_path, FedAvg(), epochs=3),
    ]
    assert len({fingerprint(base), *(fingerprint(o.config) for o in others)}) == 4
    assert fingerprint(Deployed(tmp_path, FedAvg(), memory=64, chunk=2).config) == fingerprint(base)
    dealt = [replace(base, data=replace(base.data, **{key: value})) for key, value in (("seed", 1), ("ignore", "age"))]
    assert len({fingerprint(base), *map(fingerprint, dealt)}) == 3


@pytest.mark.parametrize(
    ("round_", "pilot", "words"),
    [
        (0, 0, "Greeting"),
        (4, 0, "Round 4"),
        (5, 0, "The last round's scores"),
        (2, 1, "Calibration pilot 1, round 2"),
        (5, 3, "Calibration pilot 3, held-out results"),
        ("2", 0, "A message"),
        (2, -1, "A message"),
    ],
)
def test_a_sites_log_calls_a_message_what_it_is(bpfed, tmp_path, round_, pilot, words):
    bpfed.ok("deploy", "init", tmp_path / "fed", "--sites", "north,south", "--rounds", "4", "--calibrate", "pilot:3")
    rounds = apps.rounds_of(tmp_path / "fed" / "site-north")
    ask = Request("ab", "cd", round_, pilot=pilot).write()["request"]
    assert apps.called(ask, rounds) == words
    assert apps.called({}, rounds) == "A message"


def test_without_a_configuration_a_round_is_called_by_its_number(tmp_path):
    assert apps.called({"round": 5, "pilot": 0}, apps.rounds_of(tmp_path)) == "Round 5"


def test_a_process_that_has_ended_is_not_alive_though_nobody_has_buried_it():
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not admin.alive(child.pid)
    assert admin.alive(os.getpid())
    child.wait()


@pytest.mark.parametrize("how", ["its time is over", "its parent has ended"])
def test_an_app_that_waits_for_good_ends_all_the_same(how):
    wait = "import time; from bpfed.deploy.apps import end_in_time; end_in_time(%s, 0.1); "
    wait += "print(flush=True); time.sleep(600)"
    if how == "its time is over":
        assert subprocess.run([sys.executable, "-c", wait % 0.1], timeout=120).returncode == 1
        return
    child = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid, flush=True); input()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", child, wait % "600.0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    pid = int(parent.stdout.readline())
    parent.stdout.readline()
    parent.communicate(b"\n", timeout=60)
    until = time.monotonic() + 60.0
    while admin.alive(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not admin.alive(pid)


def test_a_folder_that_is_called_as_a_dataset_is_not_meant(tmp_path, capfd, monkeypatch):
    bpfed, fed, given = Command(capfd), tmp_path / "fed", []
    bpfed.ok("deploy", "init", fed, "--data", "digits", "--clients", "2")
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flower, "join", lambda own, plan, say, data: given.append(data) or True)
    bpfed.ok("deploy", "client", fed / "site-client-00", "--data", "digits")
    assert given == ["digits"]
