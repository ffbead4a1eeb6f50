"""What goes wrong at sites, at the server and between them, and that a run survives it."""

import errno
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from federations import Deployed, simulated
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from scenarios import classification
from test_same_numbers import same

from bpfed._util.errors import UserError
from bpfed.deploy.protocol.messages import Reply, Request
from bpfed.deploy.server.roster import GridTransport
from bpfed.deploy.site.site import States
from bpfed.methods import BPFed, FedAvg, Recipe

DATA = classification(sizes=(8, 8, 8))
ROUNDS = 3


def spoil(deployed, name, change, rounds=("2",)):
    """Let a site's answers in these rounds pass through ``change(record, message)``; None: the answer got lost."""
    node = deployed.node(name)
    answer = deployed.grid.clients[node]

    def spoilt(m):
        reply = answer(m)
        if m.metadata.group_id not in rounds:
            return reply
        changed = change(reply.content, m)
        return changed if isinstance(changed, Message | None) else Message(changed, reply_to=m)

    deployed.grid.clients[node] = spoilt


def tensor(record, name, change):
    array = record["upload"][name]
    values = np.frombuffer(array.data, "<f4").copy()
    values = change(values)
    parts = dict(record["upload"])
    parts[name] = Array(str(values.dtype), tuple(values.shape), array.stype, values.tobytes())
    record["upload"] = ArrayRecord(parts)
    return record


def one(value):
    def change(values):
        values[3] = value
        return values

    return change


def field(key, value):
    def change(record, m):
        record["reply"] = ConfigRecord({**record["reply"], key: value})
        return record

    return change


def without(key):
    def change(record, m):
        del record[key]
        return record

    return change


def summed(name, *values):
    def change(record, m):
        record["sums"][name] = list(values)
        return record

    return change


def counted(value):
    """As many examples in every bin."""

    def change(record, m):
        sums = record["sums"]
        sums["cells"] = [value] * len(sums["cells"])
        return record

    return change


def hits(value):
    """As many hits in every bin."""

    def change(record, m):
        cells = record["sums"]["cells"]
        bins = len(cells) // 4
        record["sums"]["cells"] = [*cells[: 2 * bins], *[value] * bins, *cells[3 * bins :]]
        return record

    return change


def told(name, value):
    def change(record, m):
        record["info"][name] = value
        return record

    return change


def lost(name):
    def change(record, m):
        del record["info"][name]
        return record

    return change


def added(record, m):
    record["more"] = ConfigRecord({"x": b"0" * 10})
    return record


BAD = {
    "NaN": (lambda r, m: tensor(r, "mean", one(np.nan)), "not finite"),
    "infinite": (lambda r, m: tensor(r, "sigma", one(np.inf)), "not finite"),
    "sigma of 0": (lambda r, m: tensor(r, "sigma", one(0.0)), "not above 0"),
    "sigma below 0": (lambda r, m: tensor(r, "sigma", one(-1.0)), "not above 0"),
    "another shape": (lambda r, m: tensor(r, "mean", lambda v: v[:-1]), "has shape"),
    "another type": (lambda r, m: tensor(r, "mean", lambda v: v.astype("<f8")), "not as plain float32"),
    "oversized": (lambda r, m: tensor(r, "mean", lambda v: np.zeros(1_000_000, "<f4")), "bytes; the limit is"),
    "of many equal pieces": (lambda r, m: tensor(r, "mean", lambda v: np.zeros(8_000_000, "<f4")), "it is 3200"),
    "an old round": (field("round", 1), "it belongs to round 1"),
    "another run": (field("run", "00"), "of run 00"),
    "another protocol": (field("protocol", 0), "protocol 0"),
    "another version": (field("version", "0.0"), "bpfed 0.0"),
    "another configuration": (field("fingerprint", "0"), "it has a different configuration"),
    "another name": (field("site", "site a"), "it calls itself"),
    "no examples": (field("train", 0), "no training example"),
    "more examples than it has": (field("train", 9), "reports 9 training examples, but said before that it has 8"),
    "no upload": (without("upload"), "no 'upload'"),
    "no scores": (without("sums"), "no 'sums'"),
    "a score too many": (summed("labels", 1.0), "its sums hold 'labels'"),
    "a score below 0": (summed("sure", -1.0), "its 'sure' are not sums"),
    "a score beyond measure": (summed("losses", 1e308, 1.0), "its 'losses' are not sums"),
    "more examples than a number can be": (counted(1e99), "the counts in its sums are not numbers of examples"),
    "more hits than examples": (hits(1e100), "its 'cells' are more than its examples allow"),
    "more that are sure than examples": (summed("sure", 7.0), "its 'sure' are more than its examples allow"),
    "more that are right than sure": (summed("sure_right", 6.0), "its 'sure_right' are more than its examples allow"),
    "more examples than are believed": (field("train", 2**62), "its number of examples or its time is not valid"),
    "a loss beyond measure": (told("nll", 1e300), "'nll' of its training is not a finite number"),
    "words that a terminal would obey": (field("refused", "\x1b[2J\nRound 9"), "was not used: ?[2J?Round 9"),
    "an error of many words": (lambda r, m: Message(Error(0, "boom" * 10**5), reply_to=m), "boom"),
    "parts of examples": (counted(0.5), "the counts in its sums are not numbers of examples"),
    "a loss too many": (
        told("labels", 1.0),
        "its training reports 'kl', 'labels', 'nll' where 'kl', 'nll' are expected",
    ),
    "not all losses": (lost("nll"), "its training reports 'kl' where 'kl', 'nll' are expected"),
    "something more": (added, "does not belong in it"),
    "a field too many": (field("labels", [1, 2, 3]), "fields are not"),
    "an error of Flower's": (lambda r, m: Message(Error(0, "boom"), reply_to=m), "boom"),
    "empty": (lambda r, m: RecordDict(), "has no 'reply'"),
}


@pytest.fixture(scope="module")
def away():
    """The federation simulated with 'site b' down in round 2."""
    return simulated(FedAvg(), DATA, away={2: ["site b"]}, epochs=1, rounds=ROUNDS)


@pytest.fixture(scope="module")
def away_gaussian():
    return simulated(BPFed(), DATA, away={2: ["site b"]}, epochs=1, rounds=ROUNDS)


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_answer_is_refused_named_and_counted_and_the_round_goes_on(fault, tmp_path, away_gaussian):
    change, words = BAD[fault]
    deployed = Deployed(tmp_path, BPFed(), DATA, epochs=1, rounds=ROUNDS)
    spoil(deployed, "site b", change)
    server = deployed.serve()
    assert server.sites["site b"].refused == 1
    assert [s for s in deployed.said if "'site b'" in s and words in s]
    assert all(s.isprintable() and len(s) < 1000 for s in deployed.said)
    assert words in json.loads((tmp_path / "server" / "status.json").read_text())["sites"]["site b"]["why"]
    same(server, *away_gaussian)  # as if it had been away


LIES = {
    "one mean of 1e20": ("mean", one(1e20), "it moved 'mean' by 1e+20"),
    "all sigma 3e38": ("sigma", lambda v: np.full_like(v, 3e38), "'sigma' is not finite, too large"),
    "all sigma 1e-30": ("sigma", lambda v: np.full_like(v, 1e-30), "times the server's"),
    "one sigma of 1e6": ("sigma", one(1e6), "times the server's"),
    "means times 1e6": ("mean", lambda v: v * np.float32(1e6), "it moved 'mean' by"),
    "all means -3e38": ("mean", lambda v: np.full_like(v, -3e38), "all its weights are the same number"),
    "all means 0": ("mean", np.zeros_like, "all its weights are the same number"),
}


@pytest.mark.parametrize("rule", ["mean", "moments", "precision"])
def test_finite_lies_are_refused_named_and_the_run_is_that_without_the_liar(rule, tmp_path):
    method, everyday = BPFed(rule=rule), {"epochs": 1, "rounds": len(LIES)}
    deployed = Deployed(tmp_path, method, DATA, **everyday)
    for number, (name, change, _) in enumerate(LIES.values(), 1):
        spoil(deployed, "site b", lambda r, m, name=name, change=change: tensor(r, name, change), (str(number),))
    server = deployed.serve()
    for number, (_, _, words) in enumerate(LIES.values(), 1):
        said = f"Round {number}: the message from site 'site b' was not used: "
        assert [s for s in deployed.said if s.startswith(said) and words in s], number
    assert server.sites["site b"].refused == len(LIES)
    assert server.journal.counted == {"site a": len(LIES), "site c": len(LIES)}
    away = {number: ["site b"] for number in range(1, len(LIES) + 1)}
    same(server, *simulated(method, DATA, away=away, **everyday))


def test_a_state_that_is_not_finite_is_neither_kept_nor_sent(tmp_path):
    """With the bounds off; then on again, for which no site has to change anything."""
    off = {"max_update_ratio": 0.0, "max_sigma_ratio": 0.0}
    method, everyday = BPFed(rule="moments"), {"epochs": 1, "rounds": ROUNDS}
    deployed = Deployed(tmp_path, method, DATA, **everyday, **off)
    spoil(deployed, "site b", lambda r, m: tensor(r, "mean", one(1e20)))
    with pytest.raises(
        UserError, match=r"^Round 2 is not accepted.* Site 'site b' moved it furthest, 'mean' by 1e\+20"
    ):
        deployed.serve()
    kept = sorted(path.stem for path in (tmp_path / "server" / "checkpoint").glob("*.json"))
    assert kept == ["round-000000", "round-000001"]
    clients, deployed = deployed.grid.clients, Deployed(tmp_path, method, DATA, **everyday)
    deployed.grid.clients = clients
    same(deployed.serve(), *simulated(method, DATA, away={2: ["site b"]}, **everyday))


@pytest.mark.parametrize("back_to", [0, 2, 4])
def test_a_run_that_went_back_ends_as_it_did(back_to, tmp_path):
    everyday = {"epochs": 1, "rounds": 4, "participants": 2}
    deployed = Deployed(tmp_path, BPFed(), DATA, **everyday)
    done = deployed.serve()
    again = deployed.server()
    again.journal.back_to(back_to)
    assert not (tmp_path / "server" / "summary.json").exists()
    again.serve(GridTransport(deployed.grid, poll=0.01))
    for before, after in zip(done.federation.shared, again.federation.shared, strict=True):
        assert torch.equal(before, after)
    lines = [[{k: v for k, v in line.items() if k != "seconds"} for line in s.history] for s in (done, again)]
    assert lines[0] == lines[1]
    assert again.journal.counted == done.journal.counted
    assert not any("is lost" in said for said in deployed.said)
    same(again, *simulated(BPFed(), DATA, **everyday))


def test_going_back_where_that_cannot_be_is_one_sentence(tmp_path):
    deployed = Deployed(tmp_path, FedAvg(), DATA, epochs=1, rounds=ROUNDS, checkpoints=2)
    with pytest.raises(UserError, match="No run has begun in"):
        deployed.server().journal.back_to(1)
    deployed.serve()
    with pytest.raises(UserError, match=r"no checkpoint of round 1 in .*; rounds to go back to: 2, 3"):
        deployed.server().journal.back_to(1)


def test_a_reply_that_flower_cannot_read_costs_its_site_only(tmp_path):
    """Flower takes all replies off at once, and fails with all of them."""
    deployed = Deployed(tmp_path, FedAvg(), DATA, epochs=1, rounds=ROUNDS, plan={"min_replies": 2})
    pull, bad = deployed.grid.pull_messages, set()

    def pulled(ids):
        if bad & set(ids):
            raise KeyError("no such type of object")
        return pull(ids)

    spoil(deployed, "site b", lambda r, m: bad.add(m.metadata.message_id), ("1", "2", "3", "4"))
    deployed.grid.pull_messages = pulled
    server = deployed.serve()
    assert server.sites["site b"].refused >= ROUNDS
    assert "it is not a message of Flower's" in server.sites["site b"].why
    assert server.journal.counted == {"site a": ROUNDS, "site c": ROUNDS}


def test_from_the_first_such_reply_on_each_is_read_by_itself():
    def broken(ids):
        asked.append(list(ids))
        if "b" in ids:
            raise ValueError("not a message")
        return [SimpleNamespace(metadata=None, has_error=lambda: False, content=f"of {i}") for i in ids]

    asked = []
    transport = GridTransport(SimpleNamespace(pull_messages=broken))
    found = dict(transport._pull(["a", "b", "c"]))
    assert found == {"a": "of a", "b": "it is not a message of Flower's.", "c": "of c"}
    assert asked == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    transport.grid.pull_messages = lambda ids: (_ for _ in ()).throw(ConnectionError("gone"))
    with pytest.raises(ConnectionError):
        list(transport._pull(["a"]))


def test_a_site_that_never_answers_costs_its_contribution_only(tmp_path, away):
    deployed = Deployed(tmp_path, FedAvg(), DATA, epochs=1, rounds=ROUNDS)
    spoil(deployed, "site b", lambda r, m: None)
    server = deployed.serve()
    assert server.sites["site b"].lost == 1
    same(server, *away)


def test_a_site_restarted_goes_on_from_its_disk(tmp_path):
    deployed = Deployed(tmp_path, BPFed(), DATA, epochs=1, rounds=ROUNDS)
    node = deployed.node("site b")

    def fresh(m):
        site = Deployed(tmp_path, BPFed(), DATA, epochs=1, rounds=ROUNDS).sites["site b"]
        return Message(site.answer(m.content), reply_to=m)

    deployed.grid.clients[node] = fresh  # a new process for every message
    same(deployed.serve(), *simulated(BPFed(), DATA, epochs=1, rounds=ROUNDS))


def test_a_site_with_another_node_id_is_the_same_site(tmp_path):
    deployed = Deployed(tmp_path, BPFed(), DATA, epochs=1, rounds=ROUNDS)
    node = deployed.node("site b")
    answer = deployed.grid.clients[node]

    def moves(m):
        reply = answer(m)
        if m.metadata.group_id == "1":
            deployed.grid.clients[999] = deployed.grid.clients.pop(node)
        return reply

    deployed.grid.clients[node] = moves
    same(deployed.serve(), *simulated(BPFed(), DATA, epochs=1, rounds=ROUNDS))


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", ["before the sites answer", "after they answered", "before the last scores"])
def test_a_server_that_was_killed_goes_on_from_its_last_finished_round(moment, tmp_path):
    deployed = Deployed(tmp_path, BPFed(), DATA, epochs=1, rounds=ROUNDS)
    when = "4" if moment == "before the last scores" else "2"
    push, pull = deployed.grid.push_messages, deployed.grid.pull_messages

    def pushed(messages):
        messages = list(messages)
        if messages and messages[0].metadata.group_id == when and moment != "after they answered":
            raise Killed
        ids = push(messages)
        if messages and messages[0].metadata.group_id == when:
            raise Killed  # the sites have trained, and nobody hears of it
        return ids

    deployed.grid.push_messages = pushed
    with pytest.raises(Killed):
        deployed.serve()
    deployed.grid.push_messages, deployed.grid.pull_messages = push, pull
    server = deployed.serve()
    assert any("Resuming after round" in s for s in deployed.said)
    assert [r["round"] for r in server.history] == [1, 2, 3]
    same(server, *simulated(BPFed(), DATA, epochs=1, rounds=ROUNDS))


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path):
    deployed = Deployed(tmp_path, BPFed(), DATA, epochs=1, rounds=ROUNDS)
    deployed.serve()
    newest = sorted((tmp_path / "server" / "checkpoint").glob("*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-8])
    server = deployed.serve()
    assert any("damaged" in s for s in deployed.said)
    same(server, *simulated(BPFed(), DATA, epochs=1, rounds=ROUNDS))


def test_a_full_disk_at_a_site_costs_its_contribution_only(tmp_path, away, monkeypatch):
    deployed = Deployed(tmp_path, FedAvg(), DATA, epochs=1, rounds=ROUNDS)
    sync, writing = os.fsync, []

    def full(handle):
        path = os.readlink(f"/proc/self/fd/{handle}")
        if "site b" in path and "round-000002" in path:
            writing.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    server = deployed.serve()
    assert server.sites["site b"].refused == len(writing) == 1
    assert any("rejoins by itself" in sentence for sentence in deployed.said)
    assert b"disk is full" not in deployed.grid.bytes()  # the site's words stay at the site
    assert not list((tmp_path / "site b").rglob("*.part"))
    same(server, *away)


@pytest.mark.parametrize("where", ["round-000002", "server"])
def test_a_full_disk_at_the_server_stops_the_run_with_a_sentence_and_it_goes_on_later(tmp_path, monkeypatch, where):
    deployed = Deployed(tmp_path, FedAvg(), DATA, epochs=1, rounds=ROUNDS)
    sync, begun = os.fsync, []

    def full(handle):
        path = os.readlink(f"/proc/self/fd/{handle}")
        begun.append("round-000002" in path)
        if any(begun) and f"{tmp_path / 'server'}" in path and where in path:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(UserError) as raised:
            deployed.serve()
    assert str(raised.value) == (
        f"The disk is full: '{tmp_path / 'server'}' cannot be written; free some space, and start the run again; it "
        "resumes from its last finished round."
    )
    same(deployed.serve(), *simulated(FedAvg(), DATA, epochs=1, rounds=ROUNDS))


def test_a_site_that_fails_sends_no_word_of_why(tmp_path):
    deployed = Deployed(tmp_path, FedAvg(), DATA, rounds=1)

    def fails(upload, shared, round_):
        raise RuntimeError("patient 4711 has a value of 12.5")

    deployed.sites["site b"].transform = fails
    server = deployed.serve()
    assert server.sites["site b"].refused == 1
    assert b"patient" not in deployed.grid.bytes()


def test_too_few_uploads_stop_the_run_with_a_sentence_and_it_goes_on_later(tmp_path):
    deployed = Deployed(tmp_path, FedAvg(), DATA, epochs=1, rounds=ROUNDS, plan={"min_replies": 3})
    answer = dict(deployed.grid.clients)
    spoil(deployed, "site b", lambda r, m: None)
    with pytest.raises(
        UserError,
        match=r"Round 2 got 2 of 3 uploads, 3 needed, in 3 attempts\. Site 'site b': in round 2 it did not answer within 1",
    ):
        deployed.serve()
    status = json.loads((tmp_path / "server" / "status.json").read_text())
    assert (status["state"], status["round"]) == ("stopped", 1)
    deployed.grid.clients = answer
    same(deployed.serve(), *simulated(FedAvg(), DATA, epochs=1, rounds=ROUNDS))


def test_a_site_refuses_a_server_of_another_configuration(tmp_path):
    deployed = Deployed(tmp_path, FedAvg(), DATA, rounds=1)
    other = Deployed(tmp_path, FedAvg(lr=0.5), DATA, rounds=1)
    other.grid.clients = deployed.grid.clients
    with pytest.raises(UserError, match="Only 0 of 3 sites joined within"):
        other.serve()
    assert any("server's configuration differs from this site's" in s for s in other.said)


@pytest.mark.parametrize("field", ["sites", "longest"])
@pytest.mark.parametrize("value", [None, 0, -1, 2.5, True, "3", float("inf"), 10**400])
def test_a_site_refuses_what_cannot_be_true_of_the_others(field, value, tmp_path):
    deployed = Deployed(tmp_path, FedAvg(), DATA, rounds=1)
    common = deployed.serve().journal.common | {field: value}
    site = deployed.sites["site b"]
    answer = site.answer(Request(site.fingerprint, "ab", 1, train=True, common=json.dumps(common)).write())
    words = "what it sent about the sites' data cannot be read" if value == float("inf") else "the number of sites"
    assert words in Reply.read(answer, None, None).refused
    assert "Traceback" not in "".join(deployed.said)


def test_a_site_knows_the_whole_run(tmp_path):
    """Sites that are not there count too: the numbers of a method go by all of them, as in a simulation."""
    data, method = classification(sizes=(8,) * 25), Recipe()
    deployed = Deployed(tmp_path, method, data, rounds=1, epochs=1, participants=5)
    deployed.serve()
    state = simulated(method, data, rounds=1, epochs=1, participants=5)[0]
    wanted = state.hparams(1, torch.tensor([0]))
    asked = [site for site in deployed.sites.values() if site._federation is not None]
    assert asked
    for site in asked:
        found = site._federation[1].hparams(1, torch.tensor([0]))
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_name_is_believed_only_with_its_key(tmp_path):
    keys = {name: f"key of {name}".encode() for name in DATA.clients}
    deployed = Deployed(tmp_path, FedAvg(), DATA, rounds=1, keys=keys)
    deployed.grid.keys = {deployed.node(name): key for name, key in keys.items()}
    a, b = deployed.node("site a"), deployed.node("site b")
    deployed.grid.clients[a], deployed.grid.clients[666] = deployed.grid.clients[b], deployed.grid.clients[a]
    server = deployed.serve()
    assert any("its key is not that site's" in s for s in deployed.said)
    assert server.journal.counted == {"site b": 1, "site c": 1}
    assert 666 not in {node for _, node, _ in deployed.grid.wire}  # whose key is nobody's is not spoken to


def test_a_run_folder_of_another_configuration_is_left_alone(tmp_path):
    Deployed(tmp_path, FedAvg(), DATA, rounds=1).serve()
    with pytest.raises(UserError, match="has a different configuration"):
        Deployed(tmp_path, FedAvg(lr=0.5), DATA, rounds=1).serve()


def test_states_are_kept_by_site_and_round(tmp_path):
    states = States(tmp_path, "a", "ab12")
    for round_ in range(1, 8):
        states.put(round_, torch.full((3,), float(round_)), counted=round_ - 1)
    assert states.at(6)[0] == 6
    assert states.at(3)[0] == 0  # long gone
    path = tmp_path / "ab12" / "round-000006.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert states.at(6)[0] == 5
    with pytest.raises(UserError, match="state of site 'a', not of 'b'"):
        States(tmp_path, "b", "ab12").at(5)
