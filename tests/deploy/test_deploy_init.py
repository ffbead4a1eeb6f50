"""`bpfed deploy init` and `demo`: what they make, whole or not at all, and what they refuse."""

import errno
import os
import re
import stat
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from command import Command, files
from cryptography import x509
from federations import Deployed
from scenarios import images

from bpfed._util.errors import UserError
from bpfed.deploy.ops import admin, certificates
from bpfed.deploy.server.server import open_server
from bpfed.deploy.settings import Plan
from bpfed.deploy.site.site import open_site
from bpfed.methods import BPFed, FedAvg


@pytest.fixture
def bpfed(capsys):
    return Command(capsys)


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
    assert set(made.roster.named.values()) == set(made.plan.sites)
    Plan.read(site)
    for secret in (server / certificates.SERVER_KEY, server / certificates.AUTHORITY_KEY, site / certificates.SITE_KEY):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(site.stat().st_mode) == 0o700
    root, own = (
        x509.load_pem_x509_certificate((server / n).read_bytes()) for n in (certificates.AUTHORITY, certificates.SERVER)
    )
    own.verify_directly_issued_by(root)
    assert not list(site.glob("*ca.key"))
    with pytest.raises(UserError, match="has no data yet"):
        open_site(site, print)
    (site / "deploy.toml").write_text((site / "deploy.toml").read_text().replace('data = ""', 'data = "digits"'))
    opened = open_site(site, print)
    assert opened.fingerprint == made.fingerprint
    assert opened.config.run.hidden == 9
    assert opened.name == "client-01"


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
        (
            ("--holdout", "when"),
            "must be time:COLUMN, group:COLUMN or last:SHARE, such as time:admitted, group:patient or last:0.3.",
        ),
        (("--holdout", "group:patient", "--calibration", "0.2"), "or use --holdout time:COLUMN or last."),
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
        def finish(self, model, local, hparams):
            found = super().finish(model, local, hparams)
            return found._replace(upload=(found.upload, found.upload))

    config = Deployed(tmp_path, Odd()).config
    admin.make(tmp_path / "a", Plan(("a", "b")), config)
    with pytest.raises(UserError, match="so they cannot be clipped; set clip and noise to 0"):
        admin.make(tmp_path / "b", Plan(("a", "b")), replace(config, run=replace(config.run, clip=0.5)))
    assert not (tmp_path / "b").exists()


def test_init_knows_the_shape_of_a_named_dataset(tmp_path, monkeypatch):
    config = Deployed(tmp_path, FedAvg(), hidden=7).config
    monkeypatch.setattr(type(config), "load_data", lambda self: images())
    with pytest.raises(UserError, match="images of 32 x 32 get a LeNet; leave it out"):
        admin.named_sites(config, ())
    assert admin.named_sites(config, ("a",)) == ("a",)  # whose files nobody has seen yet


def test_names_of_parameters_are_left_to_the_sites_whose_network_has_them(tmp_path):
    config = Deployed(tmp_path, BPFed(personal=("fc3.weight", "fc3.bias"))).config
    admin.make(tmp_path / "a", Plan(("a", "b")), config)
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

    monkeypatch.setattr(admin, "started", runs)
    for _ in range(2):
        assert bpfed("deploy", "demo", "--out", earlier, "--sites", "2").err.endswith("bpfed: It was run.\n")
        assert (earlier / "server" / certificates.AUTHORITY_KEY).exists()
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


def test_a_private_deployment_chooses_no_settings(bpfed, tmp_path):
    asked = ("deploy", "init", tmp_path / "fed", "--sites", "a,b", "--address", "localhost:8000", "--noise", "1")
    said = bpfed(*asked, "--clip", "1", "--method", "bpfed-adaptive").sentence
    assert said.endswith("set adapt = 'off' when noise is on.")
    assert list(tmp_path.iterdir()) == []
    bpfed.ok(*asked, "--clip", "1", "--method", "bpfed-adaptive", "--adapt", "off")


def test_a_deployment_notes_what_its_method_is_made_for(bpfed, tmp_path):
    asked = ("deploy", "init", tmp_path / "fed", "--sites", ",".join(f"s{i}" for i in range(12)))
    bpfed.ok(*asked, "--address", "localhost:8000", "--model", "linear")
    config = tomllib.loads((tmp_path / "fed" / "server" / "config.toml").read_text())
    assert config["method"]["name"] == "bpfed-linear"
    assert (config["run"]["network"], config["run"]["participants"]) == ("linear", 12)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[2001:db8::1]", "10.0.0.1", "fed.example.org"])
def test_a_certificate_names_the_host_that_sites_reach(bpfed, tmp_path, host):
    bpfed.ok("deploy", "init", tmp_path / "fed", "--sites", "a,b", "--address", f"{host}:8000")
    server = tmp_path / "fed" / "server"
    names = x509.load_pem_x509_certificate(
        (server / certificates.SERVER).read_bytes()
    ).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    named = [str(name.value) for name in names.value]
    assert named[0] == host.strip("[]")
    assert len(named) == len(set(named))


def test_the_address_to_listen_at_is_the_servers_own_setting(bpfed, tmp_path):
    bpfed.ok("deploy", "init", tmp_path / "fed", "--sites", "a", "--address", "10.0.0.1:8000", "--bind", "0.0.0.0")
    assert Plan.read(tmp_path / "fed" / "server").bind == "0.0.0.0"
    assert Plan.read(tmp_path / "fed" / "site-a").bind == ""
    said = bpfed("deploy", "init", tmp_path / "x", "--sites", "a", "--bind", "eth0").sentence
    assert said.endswith("has bind = 'eth0'; give an IP address of the server's machine, or 0.0.0.0 for all.")


@pytest.mark.parametrize("there", [False, True])
def test_a_deployment_is_there_whole_or_not_at_all(bpfed, tmp_path, monkeypatch, there):
    fed = tmp_path / "fed"
    if there:
        fed.mkdir()
    sync, syncs = os.fsync, []

    def full(handle):
        syncs.append(os.readlink(f"/proc/self/fd/{handle}"))
        if syncs[-1].endswith(certificates.SERVER_KEY):
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
