"""The commands, as far as they go without processes; and the way between a site's app and its worker."""

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import Command, files
from cryptography import x509
from federations import Deployed
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from loopgrid import LoopGrid, node_of
from scenarios import images

from bpfed.errors import UserError
from bpfed.flower import client_app, control, frame, keys, processes, superlink, worker
from bpfed.flower.deployed import open_server, open_site
from bpfed.flower.message import Answer, Ask, fingerprint
from bpfed.flower.plan import Plan
from bpfed.flower.post import GridPost
from bpfed.methods import BPFed, FedAvg
from bpfed.run import Run


@pytest.fixture
def bpfed(capsys):
    return Command(capsys)


def test_without_a_server_run_soon_says_where_it_looked(bpfed, tmp_path, monkeypatch):
    fed = tmp_path / "fed"
    address = f"127.0.0.1:{processes.free_port()}"
    bpfed.ok("deploy", "init", fed, "--sites", "north,south", "--address", address)
    assert control.STARTING <= 20.0
    monkeypatch.setattr(control, "STARTING", 1.0)
    monkeypatch.setattr("bpfed.flower.following.SILENCE", (0.1, 60.0))
    outcome = bpfed("deploy", "run", fed)
    waits, *_, refuses = outcome.err.splitlines()
    assert (outcome.code, outcome.out) == (2, "")
    assert f"Waiting up to 1 s for the server at {address}, which 'bpfed deploy server {fed}' starts, for 0:0" in waits
    assert refuses == f"bpfed: No server answers at {address}; start it with: bpfed deploy server {fed}"


def test_init_makes_all_that_server_and_sites_need(bpfed, tmp_path):
    fed = tmp_path / "fed"
    said = bpfed.ok(
        "deploy",
        "init",
        fed,
        "--data",
        "digits",
        "--clients",
        "3",
        "--rounds",
        "7",
        "--hidden",
        "9",
        "--method",
        "fedavg",
    ).out
    assert "deploy server" in said
    assert sorted(p.name for p in fed.iterdir()) == ["server", "site-client-00", "site-client-01", "site-client-02"]
    server, site = fed / "server", fed / "site-client-01"
    made = open_server(server, print)
    assert made.plan.sites == ("client-00", "client-01", "client-02")
    assert (made.config.run.rounds, made.config.run.hidden) == (7, 9)
    assert set(made.meeting.named.values()) == set(made.plan.sites)
    Plan.read(site)
    for secret in (server / keys.SERVER_KEY, server / keys.AUTHORITY_KEY, site / keys.SITE_KEY):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(site.stat().st_mode) == 0o700
    root, own = (x509.load_pem_x509_certificate((server / n).read_bytes()) for n in (keys.AUTHORITY, keys.SERVER))
    own.verify_directly_issued_by(root)
    assert not list(site.glob("*ca.key"))
    with pytest.raises(UserError, match="has no data yet"):
        open_site(site, print)
    (site / "deploy.toml").write_text((site / "deploy.toml").read_text().replace('data = ""', 'data = "digits"'))
    opened = open_site(site, print)
    assert opened.fingerprint == made.fingerprint
    assert opened.config.run.hidden == 9
    assert opened.name == "client-01"


def test_what_cannot_be_is_said_in_one_sentence(bpfed, tmp_path):
    fed = tmp_path / "fed"
    bpfed.ok("deploy", "init", fed, "--sites", "a,b")
    assert "holds files already" in bpfed("deploy", "init", fed, "--sites", "a,b").sentence
    both = ("--rehearsals", "2", "--softness", "0.5")
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


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--scaling", "client"), "scaling needs examples to fit a temperature to; set calibration = 0.2 with it."),
        (
            ("--scaling", "client", "--calibration", "0.2", "--task", "regression"),
            "the targets here are numbers; leave it out.",
        ),
        (("--method", "local"), "there is nothing to deploy; train each site by itself with 'bpfed run'."),
        (("--participants", "3"), "choose 1 to 2."),
    ],
)
def test_init_refuses_what_no_site_could_run(bpfed, tmp_path, options, why):
    """As 'bpfed run' does, before anything is made or brought anywhere."""
    outcome = bpfed("deploy", "init", tmp_path / "fed", "--sites", "a,b", *options)
    assert outcome.code == 2
    assert outcome.sentence.endswith(why)
    assert not (tmp_path / "fed").exists()


def test_init_refuses_to_clip_what_has_no_length(tmp_path):
    """An upload that is not a changed state of the server's."""

    class Odd(FedAvg):
        def finish(self, model, local, hyper):
            found = super().finish(model, local, hyper)
            return found._replace(upload=(found.upload, found.upload))

    config = Deployed(tmp_path, Odd()).config
    control.make(tmp_path / "a", Plan(("a", "b")), config)
    with pytest.raises(UserError, match="so they cannot be clipped; set clip and noise to 0"):
        control.make(tmp_path / "b", Plan(("a", "b")), replace(config, run=replace(config.run, clip=0.5)))
    assert not (tmp_path / "b").exists()


def test_init_knows_the_shape_of_a_named_dataset(tmp_path, monkeypatch):
    config = Deployed(tmp_path, FedAvg(), hidden=7).config
    monkeypatch.setattr(type(config), "load_data", lambda self: images())
    with pytest.raises(UserError, match="images of 32 x 32 get a LeNet; leave it out"):
        control.named_sites(config, ())
    assert control.named_sites(config, ("a",)) == ("a",)  # whose files nobody has seen yet


def test_names_of_parameters_are_left_to_the_sites_whose_network_has_them(tmp_path):
    config = Deployed(tmp_path, BPFed(personal=("fc3.weight", "fc3.bias"))).config
    control.make(tmp_path / "a", Plan(("a", "b")), config)
    for place in (tmp_path / "a").iterdir():
        method = tomllib.loads((place / "config.toml").read_text())["method"]
        assert method["personal"] == ["fc3.weight", "fc3.bias"]


def test_a_demonstration_replaces_only_demonstrations(bpfed, tmp_path, monkeypatch):
    fed, earlier = tmp_path / "fed", tmp_path / "demo"
    bpfed.ok("deploy", "init", fed, "--sites", "a,b")
    before = files(fed)
    assert bpfed("deploy", "demo", "--out", fed).sentence == f"'{fed}' contains other files; choose another --out."
    assert files(fed) == before

    def runs(*given):
        raise UserError("It was run.")

    monkeypatch.setattr(control, "started", runs)
    for _ in range(2):
        assert bpfed("deploy", "demo", "--out", earlier, "--sites", "2").err.endswith("bpfed: It was run.\n")
        assert (earlier / "server" / keys.AUTHORITY_KEY).exists()
        assert not (earlier / "old").exists()
        (earlier / "old").write_text("of an earlier one")
    assert bpfed("deploy", "demo", "--out", earlier, "--sites", "70000").code == 2
    assert (earlier / "old").exists()  # nothing is deleted for one that cannot be made


@pytest.mark.parametrize("command", [("init",), ("demo", "--out")])
def test_a_file_is_no_folder_for_a_deployment(bpfed, tmp_path, command):
    (tmp_path / "fed").write_text("mine")
    said = bpfed("deploy", *command, tmp_path / "fed", *(("--sites", "a,b") if command == ("init",) else ())).sentence
    assert said == f"'{tmp_path / 'fed'}' is a file; choose a folder for the deployment."
    assert (tmp_path / "fed").read_text() == "mine"


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("münchen.de", "whose host is not in ASCII; write it as 'xn--mnchen-3ya.de'."),
        (
            "a b",
            "whose host is neither a name (letters, digits, '-' and '.') nor an IP address; write it as host:port.",
        ),
        ("300.1.1.1", "nor an IP address; write it as host:port."),
        ("[127.0.0.1]", "nor an IP address; write it as host:port."),
        ("-x.de", "nor an IP address; write it as host:port."),
        ("x" * 64, "nor an IP address; write it as host:port."),
        ("::1", "whose host is an IPv6 address; write it in brackets and without a zone, as in [::1]:8000."),
        ("[fe80::1%eth0]", "write it in brackets and without a zone, as in [::1]:8000."),
    ],
)
def test_a_host_that_no_certificate_can_name_is_refused_before_anything_is_made(bpfed, tmp_path, host, why):
    said = bpfed("deploy", "init", tmp_path / "fed", "--sites", "a", "--address", f"{host}:8000").sentence
    assert said.startswith(f"The deployment has the address '{host}:8000', ")
    assert said.endswith(why)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "localhost"),
        ("[::1]", "::1"),
        ("[2001:db8::1]", "::"),
        ("10.0.0.1", "0.0.0.0"),
        ("fed.example.org", "0.0.0.0"),
    ],
)
def test_a_server_listens_where_its_sites_look_for_it(bpfed, tmp_path, host, bound):
    bpfed.ok("deploy", "init", tmp_path / "fed", "--sites", "a,b", "--address", f"{host}:8000")
    server = tmp_path / "fed" / "server"
    command = superlink.command(server, Plan.read(server))
    assert command[command.index("--host") + 1 :][:3] == [bound, "--port", "8000"]
    names = x509.load_pem_x509_certificate((server / keys.SERVER).read_bytes()).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    named = [str(name.value) for name in names.value]
    assert named[0] == host.strip("[]")
    assert len(named) == len(set(named))


@pytest.mark.parametrize("there", [False, True])
def test_a_deployment_is_there_whole_or_not_at_all(bpfed, tmp_path, monkeypatch, there):
    fed = tmp_path / "fed"
    if there:
        fed.mkdir()
    sync, syncs = os.fsync, []

    def full(handle):
        syncs.append(os.readlink(f"/proc/self/fd/{handle}"))
        if syncs[-1].endswith(keys.SERVER_KEY):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    init = ("deploy", "init", fed, "--sites", "a,b")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert bpfed(*init).sentence == (
            f"The disk is full: '{fed}' cannot be written; free some space, and make the deployment again."
        )
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*")] == ([Path("fed")] if there else [])
    number = fed.stat().st_ino if there else None
    bpfed.ok(*init)
    assert sorted(path.name for path in fed.iterdir()) == ["server", "site-a", "site-b"]
    assert list(tmp_path.iterdir()) == [fed]
    assert number in (None, fed.stat().st_ino)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("telemetry = 1", "telemetry is 1, but must be a value such as false."),
        ("timeout = true", "timeout is true, but must be a value such as 600.0."),
        ('sites = "a"', 'sites is "a", but must be a value such as ["a", "b"].'),
        ("data = {x = 1}", 'data is a table, but must be a value such as "".'),
    ],
)
def test_a_value_of_another_kind_is_answered_as_the_file_has_it(tmp_path, line, why):
    (tmp_path / "deploy.toml").write_text(line + "\n")
    with pytest.raises(UserError, match=re.escape(why)):
        Plan.read(tmp_path)


def test_init_says_what_each_site_is_started_with(bpfed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("bonn", "cleveland"):
        path = tmp_path / "hospitals" / f"{name}.csv"
        path.parent.mkdir(exist_ok=True)
        path.write_text("age,disease\n" + "".join(f"{40 + k},{'yn'[k % 2]}\n" for k in range(8)))
    said = bpfed.ok("deploy", "init", "a", "--data", "folder:hospitals", "--target", "disease").out
    assert "deploy client a/site-bonn --data hospitals/bonn.csv " in said
    assert "and its own file" in said
    said = bpfed.ok("deploy", "init", "b", "--sites", "bonn,cleveland").out
    assert "deploy client b/site-bonn --data FILE " in said
    assert "and its own file" in said
    said = bpfed.ok("deploy", "init", "c", "--data", "digits", "--clients", "2").out
    assert "deploy client c/site-client-00 --data digits " in said
    assert "file" not in said


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
    sites = {name: open_site(control.site_folder(fed, name), print, "digits") for name in made.plan.sites}
    nodes = {name: k for k, name in enumerate(sites)}
    grid = LoopGrid({nodes[name]: node_of(site) for name, site in sites.items()})
    grid.keys = {nodes[name]: key for key, name in made.meeting.named.items()}
    assert control.finished(server) is None
    made.serve(GridPost(grid, poll=0.01))

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
    assert "Trained on cpu." in alone
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

    last = control.status(server)
    (server / "run" / "status.json").write_text(json.dumps(last | {"metrics": last["metrics"] | {"tested": 1}}))
    assert control.finished(server) is None  # a site was away when the last round was tested
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
    silent = processes.environment(tmp_path, Plan(("a",)))
    assert (silent["FLWR_TELEMETRY_ENABLED"], silent["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    open_ = processes.environment(tmp_path, Plan(("a",), telemetry=True))
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


def test_records_pass_between_app_and_worker_unchanged(tmp_path):
    record = RecordDict(
        {
            "a": ConfigRecord({"x": 1, "y": "z", "flag": True}),
            "m": MetricRecord({"v": [1.5, 0.1], "n": 2}),
            "t": ArrayRecord(
                {"mean": Array("float32", (3,), "raw", b"\0\1\2" * 4), "none": Array("f", (0,), "raw", b"")}
            ),
        }
    )
    there = frame.from_bytes(frame.to_bytes(record))
    assert dict(there["a"]) == dict(record["a"])
    assert type(there["a"]["flag"]) is bool
    assert dict(there["m"]) == dict(record["m"])
    assert there["t"]["mean"].data == record["t"]["mean"].data
    assert there["t"]["none"].shape == (0,)


def test_an_app_asks_its_worker(bpfed, tmp_path):
    assert worker.ask(tmp_path, b"", 1.0) is None  # nobody is there
    fed = tmp_path / "fed"
    bpfed.ok("deploy", "init", fed, "--clients", "2")
    site = fed / "site-client-00"
    (site / "deploy.toml").write_text((site / "deploy.toml").read_text().replace('data = ""', 'data = "digits"'))
    said = []
    threading.Thread(target=worker.work, args=(site, said.append), daemon=True).start()
    while not worker.listens(site):
        pass
    own = open_site(site, print)
    ask = Ask(own.fingerprint, "ab", 0).write()
    answer = Answer.read(frame.from_bytes(worker.ask(site, frame.to_bytes(ask), 30.0)), None, None)
    assert (answer.site, answer.refused) == ("client-00", "")
    assert '"classes": 10' in answer.facts


@pytest.fixture(params=[1, 180])
def working(bpfed, tmp_path, request, monkeypatch):
    """A site of which a worker is running, in a folder of a short or a long path; and what it says."""
    fed = tmp_path / ("f" * request.param)
    bpfed.ok("deploy", "init", fed, "--clients", "2")
    site, said = fed / "site-client-00", []
    (site / "deploy.toml").write_text((site / "deploy.toml").read_text().replace('data = ""', 'data = "digits"'))
    assert worker.ask(site, b"", 30.0) is None  # nobody is there, which is no reason to wait
    monkeypatch.setattr(worker, "PATIENCE", 0.5)
    umask = os.umask(0)
    threading.Thread(target=worker.work, args=(site, said.append), daemon=True).start()
    while not worker.listens(site):
        pass
    os.umask(umask)
    return site, said


def test_a_worker_outlives_whatever_its_socket_brings(working):
    site, said = working
    silent = socket.socket(socket.AF_UNIX)
    with worker.address(site) as place:
        silent.connect(place)  # and never says anything
    own = open_site(site, print)
    for spoilt in (
        b"x",
        b"\1" + b"\0" * 7 + b"3",
        (9).to_bytes(8, "little") + b'{"a": [1]}',
        b"\2" + b"\0" * 7 + b"{}",
    ):
        with contextlib.suppress(TimeoutError):
            worker.ask(site, spoilt, 30.0)
    answer = worker.ask(site, frame.to_bytes(Ask(own.fingerprint, "ab", 0).write()), 30.0)
    assert Answer.read(frame.from_bytes(answer), None, None).site == "client-00"
    silent.close()
    assert any("could not be handed over (timed out)" in sentence for sentence in said)
    assert sum("A message could not be read" in sentence for sentence in said) == 3


def test_only_its_owner_can_ask_a_worker(working):
    site, _ = working
    assert stat.S_IMODE((site / worker.SOCKET).stat().st_mode) == 0o600
    assert stat.S_ISSOCK((site / worker.SOCKET).stat().st_mode)
    assert "@" not in "".join(line for line in Path("/proc/net/unix").read_text().splitlines() if "bpfed" in line)


def test_an_app_says_nothing_to_the_server_of_what_went_wrong(tmp_path, monkeypatch, capsys):
    now = time.time()
    message = SimpleNamespace(metadata=SimpleNamespace(created_at=now, ttl=60.0), content=RecordDict())
    context = SimpleNamespace(node_config={"folder": str(tmp_path / "secret")})
    monkeypatch.setattr(client_app, "end_in_time", lambda left: None)
    for error in (PermissionError(13, "no", "secret"), UserError("secret"), KeyError("secret"), TimeoutError("secret")):

        def fails(*given, error=error):
            raise error

        monkeypatch.setattr(worker, "ask", fails)
        with pytest.raises((RuntimeError, TimeoutError)) as raised:
            client_app._answered(message, context)
        assert "secret" not in str(raised.value)
        assert raised.value.__suppress_context__ or raised.value.__context__ is None
        assert "secret" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("round_", "rehearsal", "words"),
    [
        (0, 0, "Greeting"),
        (4, 0, "Round 4"),
        (5, 0, "The last round's scores"),
        (2, 1, "Rehearsal 1, round 2"),
        (5, 3, "Rehearsal 3, held-out results"),
        ("2", 0, "A message"),
        (2, -1, "A message"),
    ],
)
def test_a_sites_log_calls_a_message_what_it_is(bpfed, tmp_path, round_, rehearsal, words):
    bpfed.ok("deploy", "init", tmp_path / "fed", "--sites", "north,south", "--rounds", "4", "--rehearsals", "3")
    rounds = client_app.rounds_of(tmp_path / "fed" / "site-north")
    ask = Ask("ab", "cd", round_, rehearsal=rehearsal).write()["ask"]
    assert client_app.called(ask, rounds) == words
    assert client_app.called({}, rounds) == "A message"


def test_without_a_configuration_a_round_is_called_by_its_number(tmp_path):
    assert client_app.called({"round": 5, "rehearsal": 0}, client_app.rounds_of(tmp_path)) == "Round 5"


def test_a_process_that_has_ended_is_not_alive_though_nobody_has_buried_it():
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not control.alive(child.pid)
    assert control.alive(os.getpid())
    child.wait()


@pytest.mark.parametrize("how", ["its time is over", "its parent has ended"])
def test_an_app_that_waits_for_good_ends_all_the_same(how):
    wait = "import time; from bpfed.flower.ending import end_in_time; end_in_time(%s, 0.1); "
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
    while control.alive(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not control.alive(pid)
