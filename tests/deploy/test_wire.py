"""What goes over the wire, byte by byte."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from federations import Deployed
from flwr.app import Array, ArrayRecord
from scenarios import classification, regression

from bpfed.deploy.protocol.messages import SHARES, Reply
from bpfed.deploy.protocol.state_schema import RAW, RejectedMessage, Upload, schemas
from bpfed.deploy.site.site import Site, States
from bpfed.methods import BPFed, FedAvg
from bpfed.metrics import Sums


def personal_parts(site, name, run):
    """Any four numbers in a row of a site's personal states, as bytes."""
    states = States(site.folder, name, run)
    for round_ in states.rounds():
        row = states.at(round_)[1].numpy()
        for start in range(0, len(row) - 3, 4):
            part = row[start : start + 4]
            if np.unique(part).size > 2:  # zeros and equal numbers are found anywhere
                yield part.astype("<f4").tobytes()


def secrets(sites, run):
    """What must not be seen: personal tensors (any four numbers in a row), raw rows, label counts; as bytes.

    What the states of all sites hold alike, the head that everybody starts with, is nobody's.
    """
    parts = {name: list(personal_parts(site, name, run)) for name, site in sites.items()}
    common = set.intersection(*map(set, parts.values())) if len(parts) > 1 else set()
    for name, site in sites.items():
        for part in parts[name]:
            if part not in common:
                yield f"personal state of {name}", part
        own = site.source.own
        for rows in (own.train.x, own.test.x):
            for row in rows.flatten(1).numpy():
                yield f"row of {name}", row.astype("<f4").tobytes()
                yield f"row of {name}", row.astype("<f8").tobytes()
        counts = np.bincount(own.train.y.numpy(), minlength=own.classes)
        for kind in ("<i8", "<i4", "<f4", "<f8"):
            yield f"label counts of {name}", counts.astype(kind).tobytes()
        yield f"label counts of {name}", ", ".join(str(c) for c in counts).encode()


def found(wire, looked_for):
    """What of (words, bytes) occurs in the wire's bytes; all are looked for at once, by a telling part of each."""
    parts, seen = {}, set()
    for what, data in looked_for:
        if len(data) < 8:
            seen |= {what} if data in wire else set()
            continue
        at = max(range(0, len(data) - 7, 4), key=lambda i: len(set(data[i : i + 8])))
        parts.setdefault(data[at : at + 8], []).append((what, data, at))
    heads = np.frombuffer(b"".join(parts), "<u8")
    for offset in range(min(8, len(wire))):
        words = np.frombuffer(wire, "<u8", (len(wire) - offset) // 8, offset)
        for place in (offset + 8 * np.flatnonzero(np.isin(words, heads))).tolist():
            seen |= {what for what, data, at in parts[wire[place : place + 8]] if wire.startswith(data, place - at)}
    return sorted(seen)


def seen(deployed, run):
    return found(deployed.grid.bytes(), secrets(deployed.sites, run))


DATA = classification(sizes=(8, 8))


def test_nothing_personal_is_in_any_byte(tmp_path):
    deployed = Deployed(tmp_path, BPFed(), DATA, rounds=2)
    server = deployed.serve()
    assert len(list(secrets(deployed.sites, server.journal.run))) > 100
    assert seen(deployed, server.journal.run) == []


def test_nothing_personal_of_a_pilot_is_in_any_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(Site, "_forget_pilots", lambda site: None)
    deployed = Deployed(tmp_path, BPFed(), DATA, rounds=2, calibrate="pilot:1")
    server = deployed.serve()
    (run,) = {path.name for name in DATA.clients for path in (tmp_path / name / "pilots").iterdir()}
    assert run != server.journal.run
    sites = {n: SimpleNamespace(folder=s.folder / "pilots", source=s.source) for n, s in deployed.sites.items()}
    looked_for = list(secrets(sites, run))
    assert sum(what.startswith("personal") for what, _ in looked_for) > 50
    assert found(deployed.grid.bytes(), looked_for) == []


class Leaky(Site):
    """A site whose answers carry something more; the door of our own messages is left open for it."""

    leak = None

    def answer(self, record):
        answer = super().answer(record)
        values = self.leak(self, record["request"]["run"])
        if values is not None:
            data = np.ascontiguousarray(values)
            answer["more"] = ArrayRecord({"x": Array(str(data.dtype), data.shape, "numpy.ndarray", data.tobytes())})
        return answer


@pytest.mark.parametrize(
    ("what", "leak"),
    [
        ("personal state", lambda site, run: States(site.folder, site.name, run).at(1)[1]),
        ("row", lambda site, run: site.source.own.train.x[:1].numpy()),
        ("label counts", lambda site, run: np.bincount(site.source.own.train.y.numpy(), minlength=3)),
    ],
)
def test_a_planted_secret_is_found_and_refused(what, leak, tmp_path):
    """The search above finds what it looks for; and the server lets no such message in."""

    class Planted(Leaky):
        pass

    Planted.leak = staticmethod(leak)
    deployed = Deployed(tmp_path, BPFed(), DATA, rounds=1, site_class=Planted)
    server = deployed.server()
    with pytest.raises(Exception, match=r"sites joined|uploads"):
        deployed.serve()
    runs = {p.name for site in deployed.sites for p in (tmp_path / site).glob("*/")} or {server.journal.run}
    assert any(found.startswith(what) for run in runs for found in seen(deployed, run))
    assert any("does not belong in it" in said for said in deployed.said)


def test_a_personal_tensor_cannot_be_put_into_an_upload(tmp_path):
    """Whatever a transform makes of an upload, only what fits the method's own pattern is written."""
    deployed = Deployed(tmp_path, BPFed(), DATA, rounds=1)
    for site in deployed.sites.values():
        site.transform = lambda upload, shared, round_: Upload(upload.state._replace(mean=torch.zeros(999)))
    with pytest.raises(Exception, match="got 0 of 2 uploads"):
        deployed.serve()


@pytest.mark.parametrize("regression_", [False, True])
def test_sums_are_bounded_by_their_examples_and_those_of_real_ones_pass(tmp_path, regression_):
    data = regression((20, 20)) if regression_ else classification((20, 20), classes=2)
    deployed = Deployed(tmp_path, FedAvg(), data, rounds=1, calibration=0.5)
    server = deployed.serve()
    assert not any(seen.refused for seen in server.sites.values())
    form = server.training.exchange.form
    sums = server.journal.evaluation[0].sums
    own = Sums(sums.cells[:, :1], sums.losses[:, :1], {name: part[:1] for name, part in sums.further.items()})

    def read(changed):
        return Reply.read(Reply("", "", 1, "a", sums=changed).write(), None, form).sums

    assert read(own).further == own.further
    bounded = {"counted", "coverage"} | (set() if regression_ else {*SHARES, "in_order"})
    for name in bounded:
        spoilt = own._replace(further=own.further | {name: torch.tensor([1000.0], dtype=torch.float64)})
        with pytest.raises(RejectedMessage, match=f"its '{name}' are more than its examples allow"):
            read(spoilt)


@pytest.mark.parametrize(("method", "tensors"), [(BPFed(), 2), (FedAvg(), 1)])
def test_bytes_of_a_round_are_those_of_the_shared_tensors_and_a_small_constant(method, tensors, tmp_path):
    constants = set()
    for features in (4, 40):
        data = classification(sizes=(8, 8), features=features)
        deployed = Deployed(tmp_path / str(features), method, data, rounds=1, eval_every=1)
        server = deployed.serve()
        shared = server.federation.model.layout.shared
        sent = {way: [len(d) for w, _, d in deployed.grid.wire if w == way] for way in ("down", "up")}
        down, up = sent["down"][2], sent["up"][2]  # the first two are greetings
        constants.add((down - tensors * shared * 4 < 2600, up - tensors * shared * 4 < 2600))
    assert constants == {(True, True)}


def test_compression_takes_three_bytes_for_a_gaussian_on_the_wire(tmp_path):
    deployed = Deployed(tmp_path, BPFed(), classification(sizes=(8, 8), features=40), rounds=2, compression="half")
    server = deployed.serve()
    shared = server.federation.model.layout.shared
    sent = {way: [len(d) for w, _, d in deployed.grid.wire if w == way] for way in ("down", "up")}
    assert (
        8 * shared < sent["down"][2] < 8 * shared + 2600
    )  # the first state follows from the seed, and travels in full
    assert 3 * shared < sent["down"][4] < 3 * shared + 2600
    assert 3 * shared < sent["up"][2] < 3 * shared + 2600


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("sigma.bounds", np.array([np.nan, 0.0], "<f4"), "not finite"),
        ("sigma.bounds", np.array([1e9, 1e9], "<f4"), "not finite"),
        ("sigma.bounds", np.array([-1e9, -1e9], "<f4"), "not above 0"),
        ("sigma", None, "not above 0"),
        ("mean", np.zeros(3, "<f4"), "not as plain float16"),
    ],
)
def test_compressed_tensors_are_checked_at_the_door(name, values, words, tmp_path):
    model = Deployed(tmp_path, BPFed(), DATA, rounds=1, epochs=1).serve().federation.model
    schema = schemas(BPFed(), model, half=True).upload
    record = schema.write(BPFed().init(model).shared)
    values = np.zeros(record[name].shape, "u1") if values is None else values
    spoilt = {**record, name: Array(str(values.dtype), values.shape, RAW, values.tobytes())}
    with pytest.raises(RejectedMessage, match=words):
        schema.read(ArrayRecord(spoilt))


def test_the_raw_form_is_plain_little_endian_float32(tmp_path):
    model = Deployed(tmp_path, BPFed(), DATA, rounds=1).serve().federation.model
    travel = schemas(BPFed(), model)
    state = BPFed().init(model).shared
    record = travel.shared.write(state)
    assert record["mean"].data == state.mean.numpy().astype("<f4").tobytes()
    assert torch.equal(travel.shared.read(record).mean, state.mean)
