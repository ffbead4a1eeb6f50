"""What keeps strangers and their code out of a deployment: the gate, the address, our app alone, and who may join."""

import asyncio
import base64
import hashlib
import importlib
import io
import json
import socket
import ssl
import threading
import zipfile
from types import SimpleNamespace

import httpx
import pytest
from command import Command
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.supercore.run import Run
from flwr.supercore.superexec.executor import ExecutionSpec
from flwr.supercore.task_identity import TaskIdentity

from bpfed._util.errors import UserError
from bpfed.deploy import logs
from bpfed.deploy.ops import certificates, flower, gate, launch, supervise
from bpfed.deploy.protocol.transport import Node
from bpfed.deploy.server.roster import Roster, SiteStatus
from bpfed.deploy.server.server import open_server
from bpfed.deploy.settings import Plan

LOCAL = gate.Local(4000, "s3cret")
#: What the operator's requests are like.
OPERATOR = {
    "type": "http",
    "method": "POST",
    "path": "/v1/control/start-run",
    "client": ("127.0.0.1", 50000),
    "server": ("127.0.0.1", 4000),
    "headers": [(b"host", b"x"), (gate.HEADER.encode(), b"s3cret")],
}
OUTSIDE = {"client": ("203.0.113.5", 50000), "server": ("198.51.100.1", 8000)}


@pytest.fixture(autouse=True)
def logged(own_log):
    """As in the process of `launch.main`."""
    logs.to_parent()


@pytest.fixture
def bpfed(capsys):
    return Command(capsys)


def through(members=(), **changes):
    """Whether a request reaches the application; else the answer, and what was said of it."""
    reached, sent, said = [], [], []

    async def application(scope, receive, send):
        reached.append(scope["path"])

    async def send(event):
        sent.append(event)

    asyncio.run(gate.Gate(application, LOCAL, said.append, members)({**OPERATOR, **changes}, None, send))
    return True if reached else (sent[0].get("status", sent[0]["type"]), said)


def test_the_operator_is_let_through():
    assert through() is True
    assert through(path="/v1/runtime/acquire-task") is True
    assert through(client=("127.0.0.9", 1)) is True


@pytest.mark.parametrize(
    "changes",
    [
        OUTSIDE,  # even with the secret
        {"client": ("203.0.113.5", 50000)},
        {"server": ("127.0.0.1", 8000)},  # the port of sites
        {"server": ("198.51.100.1", 4000)},
        {"server": None},
        {"client": None},
        {"client": ("localhost", 1)},
        {"headers": []},
        {"headers": [(gate.HEADER.encode(), b"s3cres")]},
        {"headers": [(gate.HEADER.encode(), b"")]},
        {"headers": OPERATOR["headers"] * 2},
        {"headers": [(b"x-forwarded-for", b"127.0.0.1"), (b"authorization", b"s3cret")]},
    ],
)
@pytest.mark.parametrize("path", ["/v1/control/list-nodes", "/v1/runtime/acquire-task", "/docs", "/openapi.json", "/"])
def test_nobody_else_is(changes, path):
    status, said = through(**{**changes, "path": path})
    assert status == 403
    (sentence,) = said
    assert sentence.startswith(f"Refused 'POST {path}' from ")
    assert LOCAL.secret not in sentence


@pytest.mark.parametrize("path", ["/v1/fleet", "/v1/fleets/x", "//v1/fleet/x", "/v1/control/../fleet/x", "/health/"])
def test_only_the_paths_of_sites_are_open(path):
    member, headers = signed()
    assert through({member}, **{**OUTSIDE, "headers": headers, "path": path})[0] == 403


def signed():
    """A new key, and the headers by which Flower's SuperNode shows that it has it."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key, request = ec.generate_private_key(ec.SECP384R1()), httpx.Request("POST", "https://x/v1/fleet/pull-messages")
    shows = NodeAuthHttpInterceptor(key, key.public_key())
    shows.intercept(SimpleNamespace(request=request), lambda context: None)
    return base64.b64decode(request.headers["flwr-public-key"]), list(request.headers.raw)


def test_sites_are_known_by_their_signature_before_anything_is_read():
    (own, headers), (_, others) = signed(), signed()
    headers, others = ([(name.lower(), value) for name, value in one] for one in (headers, others))
    asked = {**OUTSIDE, "path": "/v1/fleet/push-object"}
    assert through({own}, **asked, headers=headers) is True
    mixed = [*(x for x in headers if x[0] != gate.SIGNED[2]), *(x for x in others if x[0] == gate.SIGNED[2])]
    for wrong in (others, [], mixed, headers * 2, [(name, b"\xff") for name in gate.SIGNED]):
        status, (said,) = through({own}, **asked, headers=wrong)
        assert status == 404  # others would end more of a SuperNode than they should
        assert said.startswith("Refused 'POST /v1/fleet/push-object' from 203.0.113.5:50000: it is not signed with")
    assert through((), **asked, headers=headers)[0] == 404  # no site calls a SuperNode
    assert through(**OUTSIDE, headers=[], path="/health") is True


@pytest.mark.parametrize("host", [b"x/v1/control/?", b"x#", b"x\\", b"a@b", b"x?"])
def test_a_site_cannot_give_another_path_by_its_host(host):
    """Of a request whose path seems to be another, Flower does not ask whose node it speaks for."""
    own, headers = signed()
    kept = [(name.lower(), value) for name, value in headers if name.lower() != b"host"]
    asked = {**OUTSIDE, "path": "/v1/fleet/push-messages"}
    for fine in (b"fed.example.org:8000", b"[::1]:8000", b"127.0.0.1"):
        assert through({own}, **asked, headers=[(b"host", fine), *kept]) is True
    status, (said,) = through({own}, **asked, headers=[(b"host", host), *kept])
    assert (status, said.endswith("its header 'Host' names no host.")) == (404, True)


def test_a_web_socket_is_closed_and_letters_a_terminal_obeys_are_not_logged():
    assert through(**{**OUTSIDE, "type": "websocket", "path": "/v1/fleet/x"})[0] == "websocket.close"
    assert through(type="websocket")[0] == "websocket.close"
    assert "\x1b" not in through(**{**OUTSIDE, "path": "/\x1b[2J"})[1][0]


def test_port_and_secret_are_for_the_owner_alone_and_new_for_each_start(tmp_path):
    assert gate.read_local(tmp_path) is None
    one, two = gate.write_local(tmp_path, 1), gate.write_local(tmp_path, 2)
    assert gate.read_local(tmp_path) == two
    assert len({one.secret, two.secret}) == 2
    assert len(one.secret) > 40
    assert (tmp_path / gate.LOCAL).stat().st_mode & 0o777 == 0o600
    (tmp_path / gate.LOCAL).write_text("{")
    assert gate.read_local(tmp_path) is None


def test_no_variable_opens_what_has_no_keys(tmp_path, monkeypatch):
    for name in (*supervise.UNSAFE, supervise.SERVER_FOLDER, supervise.SITE_FOLDER):
        monkeypatch.setenv(name, "1")
    made = supervise.environment(tmp_path, Plan(("a",)))
    assert not made.keys() & {*supervise.UNSAFE, supervise.SERVER_FOLDER, supervise.SITE_FOLDER}


@pytest.mark.parametrize(
    ("host", "bind", "address"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("127.0.0.2", "", "127.0.0.2"),
        ("localhost", "", "127.0.0.1"),
        ("fed.example.org", "", "127.0.0.3"),  # the second of its addresses is this machine's
        ("192.0.2.7", "0.0.0.0", "0.0.0.0"),
        ("192.0.2.7", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_a_server_listens_at_one_address_of_its_machine(tmp_path, monkeypatch, host, bind, address):
    known = socket.getaddrinfo

    def found(name, port, **more):
        if name == "fed.example.org":
            return [(socket.AF_INET, 0, 0, "", (one, port)) for one in ("192.0.2.7", "127.0.0.3")]
        return known(name, port, **more)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    plan = Plan(("a",), f"{host}:{supervise.free_port()}", bind=bind)
    assert flower.bound_to(tmp_path, plan) == address
    command = flower.command(tmp_path, plan, address)
    assert command[command.index("--host") + 1] == address


def test_an_address_of_another_machine_or_a_taken_port_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError) as said:
        flower.bound_to(tmp_path, Plan(("a",), "192.0.2.7:8000"))
    assert str(said.value) == (
        f"192.0.2.7 is not an address of this machine; set bind in '{tmp_path / 'deploy.toml'}' to one that is "
        "(0.0.0.0: all of them)."
    )
    with pytest.raises(UserError, match=r"'fed.invalid' is not known to be an address of this machine"):
        flower.bound_to(tmp_path, Plan(("a",), "fed.invalid:8000"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"Port {port} of 127.0.0.1 is taken; stop what listens there"):
            flower.bound_to(tmp_path, Plan(("a",), f"127.0.0.1:{port}"))


@pytest.mark.parametrize("answers", [(403, 403, 403, 403), (403, 403, 200, 403), (415, 403, 403, 403)])
def test_a_server_that_answers_strangers_is_stopped(tmp_path, monkeypatch, answers):
    local, asked = gate.write_local(tmp_path, 4000), []

    def status(folder, host, port, path, data):
        asked.append((host, port, path))
        return answers[len(asked) - 1]

    monkeypatch.setattr(flower, "_status", status)
    if set(answers) == {403}:
        flower.check_shut(tmp_path, "0.0.0.0", 8000)
        assert {(host, port) for host, port, _ in asked} == {("127.0.0.1", 8000), ("127.0.0.1", local.port)}
    else:
        with pytest.raises(UserError, match="answers strangers"):
            flower.check_shut(tmp_path, "0.0.0.0", 8000)


def test_our_bundle_is_one_that_flower_accepts_and_always_the_same(tmp_path):
    from flwr.cli.install import install_from_fab

    place = install_from_fab(launch.bundle(), tmp_path / "apps", skip_prompt=True)
    assert {name: (place / name).read_text() for name in launch.FILES} == launch.FILES
    # Of another bpfed it may be another; then server and sites refuse each other.
    assert launch.fingerprint(launch.bundle()) == "88e9fa9d6f35da9817da198579bd90cd17c1fdec5d6bb7bc5cb8a60ada7897d8"
    assert launch.is_ours(launch.bundle())
    assert not launch.is_ours(launch.bundle() + b" ")


def strangers_bundle():
    """One of the same name, whose code is another's."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in launch.FILES.items():
            archive.writestr(name, text if name == "pyproject.toml" else "raise SystemExit('executed')\n")
    return made.getvalue()


class SuperNode:
    """Flower's own function for one message, with our check around it."""

    def __init__(self):
        from flwr.supercore.object_store import ObjectStoreFactory
        from flwr.supernode.nodestate import NodeStateFactory

        self.loop = importlib.import_module("flwr.supernode.start_client_internal")
        stores = ObjectStoreFactory()
        self.state, self.store = NodeStateFactory(objectstore_factory=stores).state(), stores.store()
        self.state.set_node_id(7)

    def take(self, bundle, run):
        """A message of this run, for the app in this bundle."""
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run.run_id, 1
        message = Message(RecordDict({"request": ConfigRecord({"round": 0})}), 7, MessageType.QUERY)
        message.metadata.__dict__["_message_id"] = message.object_id
        tree, objects = self.loop.get_object_tree(message), self.loop.get_all_nested_objects(message)
        fab = SimpleNamespace(hash_str=run.fab_hash, content=bundle, verifications={})
        pull = launch.only_ours(self.loop._pull_and_store_message, self.loop, "server:8000")
        return pull(
            state=self.state,
            object_store=self.store,
            node_config={},
            receive=lambda: (message, tree),
            get_run=lambda number: run,
            get_fab=lambda hash_, number: fab,
            pull_object=lambda number, one: objects[one].deflate(),
            confirm_message_received=lambda number, one: None,
            trusted_entities=None,
        )


def run_of(bundle, kind="flwr-serverapp"):
    run = Run.create_empty(5)
    run.fab_id, run.fab_version, run.fab_hash, run.primary_task_type = (
        "bpfed/x",
        "1.0.0",
        launch.fingerprint(bundle),
        kind,
    )
    return run


def test_a_site_takes_our_app(capsys):
    node = SuperNode()
    assert node.take(launch.bundle(), run_of(launch.bundle())) == 5
    assert node.state.get_run(5) is not None
    assert [task.type for task in node.state.get_tasks()] == ["flwr-clientapp"]
    assert node.state.get_messages_legacy(is_reply=True) == []
    assert "Refused" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bundle", "run"),
    [
        (strangers_bundle(), run_of(strangers_bundle())),
        (strangers_bundle(), run_of(launch.bundle())),  # which says that it is ours
        (b"no archive", run_of(b"no archive")),
        (launch.bundle(), run_of(launch.bundle(), kind="flwr-agentapp")),
    ],
)
def test_a_site_refuses_and_names_every_other(capsys, bundle, run):
    node = SuperNode()
    assert node.take(bundle, run) == 5
    assert node.state.get_run(5) is None  # nothing of it is kept, and the next message is looked at again
    assert list(node.state.get_tasks()) == []
    (reply,) = node.state.get_messages_legacy(is_reply=True)
    assert reply.has_error()
    said = capsys.readouterr().err
    assert f"Refused the app 'bpfed/x 1.0.0' (SHA-256 {hashlib.sha256(bundle).hexdigest()[:16]}) of run 5" in said
    assert "sent by the server at server:8000" in said


@pytest.fixture
def put_back(monkeypatch):
    """Lets a module's attributes be replaced until the end of the test."""

    def keep(where, *names):
        for name in names:
            monkeypatch.setattr(where, name, getattr(where, name))
        return where

    return keep


def test_the_process_of_a_sites_app_executes_the_installed_package(put_back, capsys):
    from flwr.supercore.runtime import RuntimeHttpClient

    from bpfed.deploy import apps

    runtime = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    put_back(runtime, "install_from_fab", "get_load_client_app_fn")
    put_back(RuntimeHttpClient, "_send")
    launch.guard_clientapp(LOCAL)
    runtime.install_from_fab(launch.bundle(), skip_prompt=True)
    with pytest.raises(launch.ForeignApp):
        runtime.install_from_fab(strangers_bundle(), skip_prompt=True)
    assert "Refused an app" in capsys.readouterr().err
    load = runtime.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    assert load("stranger/app", "1.0.0", "0" * 64) is apps.client


def test_the_process_of_the_servers_app_executes_the_installed_package(put_back, monkeypatch):
    from flwr.supercore.runtime import RuntimeHttpClient

    from bpfed.deploy import apps

    runtime = importlib.import_module("flwr.superlink.runtime.run_serverapp")
    put_back(runtime, "install_from_fab", "get_project_config", "get_fused_config_from_dir", "run_")
    put_back(RuntimeHttpClient, "_send")
    ran = []
    monkeypatch.setattr(apps, "server", lambda **given: ran.append(given["grid"]))
    launch.guard_serverapp(LOCAL)
    with pytest.raises(launch.ForeignApp):
        runtime.install_from_fab(strangers_bundle(), skip_prompt=True)
    runtime.run_(grid="grid", server_app_dir="/nowhere", server_app_attr="stranger:app", context="context")
    assert ran == ["grid"]


@pytest.mark.parametrize(
    ("side", "task", "hash_", "why"),
    [
        (supervise.SITE_FOLDER, "flwr-agentapp", None, "Refused task 3 of kind 'flwr-agentapp'"),
        (supervise.SITE_FOLDER, "flwr-serverapp", None, "Refused task 3 of kind 'flwr-serverapp'"),
        (supervise.SERVER_FOLDER, "flwr-simulation", None, "Refused task 3 of kind 'flwr-simulation'"),
        (supervise.SERVER_FOLDER, "flwr-serverapp", "ab" * 32, "Refused to execute an app (SHA-256 abababab"),
        (supervise.SERVER_FOLDER, "flwr-serverapp", launch.fingerprint(launch.bundle()), ""),
        (supervise.SITE_FOLDER, "flwr-clientapp", "ab" * 32, ""),  # looked at where it was taken, and by its process
    ],
)
def test_only_the_app_of_its_side_is_started_and_its_token_is_not_shown(
    tmp_path, monkeypatch, capsys, side, task, hash_, why
):
    started = []

    class Started:
        def __init__(self, command, stdin, **more):
            started.append((command, read := (tmp_path / "pipe")))
            self.stdin = read.open("wb")

    monkeypatch.setattr(launch.subprocess, "Popen", Started)
    spec = ExecutionSpec(task, "127.0.0.1:4000", "t0ken", False, "/ca.crt", False, 1, False, 3, hash_)
    result = launch._launch(None, side, spec)
    said = capsys.readouterr().err
    assert result.status == ("failed" if why else "accepted")
    if why:
        assert why in said
        assert started == []
        return
    ((command, pipe),) = started
    assert command[: len(supervise.LAUNCH) + 1] == [*supervise.LAUNCH, task]
    assert not any("t0ken" in word for word in command)
    assert pipe.read_bytes() == b"t0ken"


def test_a_flower_without_the_parts_that_are_guarded_does_not_run():
    with pytest.raises(UserError, match=r"is not supported \(it has no gone\)"):
        launch.replace(SimpleNamespace(), gone=1)
    with pytest.raises(UserError, match="started by 'bpfed deploy server'"):
        launch.guard("flower-superlink", {})


def linkstate(folder):
    """The SuperLink's database, as Flower has it."""
    from flwr.superlink.config_loader import get_federation_manager, get_objectstore_linkstate_factories

    return get_objectstore_linkstate_factories(str(folder / flower.DATABASE), get_federation_manager())[1].state()


def made_sites(folder, *sites):
    certificates.make_server(folder, "localhost")
    for site in sites:
        (folder / site).mkdir()
        certificates.make_site(folder / site, folder, site)
    return certificates.public_keys(folder, sites)


def test_the_database_lets_in_the_keys_of_the_folder_and_no_other_whatever_was_done_to_it(tmp_path):
    own, said = made_sites(tmp_path, "a", "b"), []
    other = made_sites(tmp_path, "x")["x"]
    state = linkstate(tmp_path)

    def admitted():
        return {bytes(node.public_key) for node in state.get_node_info() if node.status != "unregistered"}

    certificates.register(state, own, said.append)
    assert admitted() == set(own.values())
    certificates.register(state, own, said.append)
    assert said == []
    number = state.get_node_id_by_public_key(own["a"])

    state.delete_node(owner_aid=NOOP_FLWR_AID, node_id=number)
    stranger = state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, other, HEARTBEAT_DEFAULT_INTERVAL)
    (tmp_path / "registered.json").write_text(json.dumps({"a": "known"}))  # of an older version; of no account
    certificates.register(state, own, said.append)
    assert admitted() == set(own.values())
    assert state.get_node_id_by_public_key(own["a"]) == number
    assert state.activate_node(number, 30.0)
    assert not state.activate_node(stranger, 30.0)
    assert said == [
        f"Node {stranger} was registered with a key that is not in 'keys'; it is unregistered now.",
        "Site 'a' was unregistered, though its key is in 'keys'; it is registered again.",
    ]

    (tmp_path / certificates.KEYS / "b.pub").unlink()
    certificates.register(state, certificates.public_keys(tmp_path, ["a", "b"]), said.append)
    assert admitted() == {own["a"]}


def test_a_site_whose_key_was_taken_out_stops_nobody_and_is_not_believed(bpfed, tmp_path):
    bpfed.ok("deploy", "init", tmp_path / "fed", "--sites", "a,b", "--data", "digits")
    server = tmp_path / "fed" / "server"
    for name in ("a", "b"):
        (server / certificates.KEYS / f"{name}.pub").unlink()
        assert open_server(server, lambda sentence: None).roster.named is not None
    sites = {"a": SiteStatus()}
    roster = Roster(sites, {}, "", 1.0, lambda sentence: None)
    assert roster.look(SimpleNamespace(nodes=lambda: [Node(1, b"any")])) == []
    (server / certificates.KEYS / "a.pub").write_text("damaged")
    said = bpfed("deploy", "server", tmp_path / "fed").sentence
    assert said.endswith("cannot be read; restore it, or remove the file to shut the site out.")


@pytest.mark.parametrize(("days", "word"), [(-0.01, "expired on"), (20, "expires on"), (certificates.DAYS, "")])
def test_a_certificate_is_looked_at_before_anything_is_started(bpfed, tmp_path, monkeypatch, days, word):
    monkeypatch.setattr(certificates, "DAYS", days)
    fed = tmp_path / "fed"
    bpfed.ok("deploy", "init", fed, "--sites", "a", "--address", f"127.0.0.1:{supervise.free_port()}")
    said = []
    if days < 0:
        for command, folder in (("server", "server"), ("run", "server"), ("client", "site-a")):
            sentence = bpfed("deploy", command, fed / folder).sentence
            assert sentence.startswith(f"The certificate '{fed / folder / certificates.AUTHORITY}' expired on ")
    else:
        certificates.check_dates(fed / "server", said.append)
        assert len(said) == (2 if word else 0)
        assert all(word in sentence and "in 19 days" in sentence for sentence in said)


@pytest.mark.parametrize(("days", "word"), [(-0.01, "has expired; ask its operator"), (10, "made for")])
def test_a_site_says_what_is_wrong_with_the_servers_certificate(bpfed, tmp_path, monkeypatch, days, word):
    fed, (listening, port) = tmp_path / "fed", _listening()
    bpfed.ok("deploy", "init", fed, "--sites", "a", "--address", f"127.0.0.1:{port}")
    authority = (fed / "server" / certificates.AUTHORITY).read_bytes()
    monkeypatch.setattr(certificates, "DAYS", days)
    if days < 0:  # of the same authority
        _expired(fed / "server", monkeypatch)
    else:
        certificates.make_server(fed / "server", "127.0.0.1")
    assert ((fed / "server" / certificates.AUTHORITY).read_bytes() == authority) == (days < 0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(fed / "server" / certificates.SERVER, fed / "server" / certificates.SERVER_KEY)

    def answer():
        link, _ = listening.accept()
        try:
            context.wrap_socket(link, server_side=True).close()
        except OSError:
            link.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    assert word in bpfed("deploy", "client", fed / "site-a").sentence
    thread.join(10.0)
    listening.close()


def _listening():
    listening = socket.create_server(("127.0.0.1", 0))
    return listening, listening.getsockname()[1]


def _expired(server, monkeypatch):
    """A certificate of the server that has expired, by the authority that it has."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    kept = (server / certificates.AUTHORITY).read_bytes()
    authority = serialization.load_pem_private_key((server / certificates.AUTHORITY_KEY).read_bytes(), None)
    own = ec.generate_private_key(ec.SECP384R1())
    made = iter((authority, own))
    monkeypatch.setattr(certificates.ec, "generate_private_key", lambda curve: next(made))
    certificates.make_server(server, "127.0.0.1")
    (server / certificates.AUTHORITY).write_bytes(kept)
