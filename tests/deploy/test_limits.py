"""What a site has in its own files counts, whatever a server asks: rounds, requests, runs, the preprocessing, its model."""

import json
import shutil
from copy import copy
from dataclasses import replace

import pytest
import torch
from federations import Deployed, simulated
from scenarios import classification
from test_few_rows import Federation, rows_of, written_to
from test_same_numbers import same

from bpfed._util.errors import UserError
from bpfed.data.tabular.preprocessing import Preprocessor
from bpfed.deploy.protocol.messages import Request
from bpfed.deploy.protocol.state_schema import RejectedMessage, schemas
from bpfed.deploy.server.roster import GridTransport
from bpfed.deploy.server.rounds import server_side
from bpfed.deploy.settings import Limits
from bpfed.deploy.site.data import File, agreed
from bpfed.deploy.site.limits import ASKED
from bpfed.deploy.site.site import previous
from bpfed.methods import BPFed, FedAvg
from bpfed.runs.run import Run

DATA = classification(sizes=(12, 12))


class Hostile:
    """A server that asks a site for whatever it likes, with a state of its own making; after an honest run, or none."""

    def __init__(self, deployed, name="site b", ran=False):
        self.site, self.deployed = deployed.sites[name], deployed
        if ran:
            server = deployed.serve()
            federation, self.common, self.run = server.federation, server.journal.common, server.journal.run
        else:
            told = {name: site.source.data_statement() for name, site in deployed.sites.items()}
            self.common, self.run = agreed(told, deployed.config) | {"sites": len(told)}, "abcd"
            federation = server_side(deployed.config, deployed.data.clients, self.common)
        self.schemas, self.shared = schemas(federation.method, federation.model), federation.shared

    def ask(self, round_, run=None, shared=None, common=None, **what):
        """Why the site refuses that; empty: it does it."""
        common = json.dumps(self.common if common is None else common)
        shared = self.shared if shared is None else shared
        ask = Request(self.site.fingerprint, run or self.run, round_, common=common, shared=shared, **what)
        answer = self.site.answer(ask.write(self.schemas.down(round_)))
        return answer["reply"]["refused"]

    @property
    def crafted(self):
        return type(self.shared)(*(torch.full_like(leaf, 9.0) for leaf in self.shared))


def deployed(folder, limits=None, method=None, **settings):
    made = Deployed(folder, method or FedAvg(), DATA, **{"rounds": 4, "epochs": 1, **settings})
    for site in made.sites.values():
        site.limits = site.requests.limits = limits or Limits(minimum=1)
    return made


def keeping(folder, **settings):
    """One whose sites keep their own models."""
    made = deployed(folder, rounds=2, **settings)
    for site in made.sites.values():
        site.own = folder / "own" / site.name
    return made


def test_no_round_is_beyond_those_of_the_sites_own_configuration(tmp_path):
    hostile = Hostile(deployed(tmp_path))
    for round_ in (6, 10**9):
        for what in ("train", "evaluate"):
            assert "'rounds' of this site's config.toml is 4" in hostile.ask(round_, **{what: True})
    assert "'rounds' of this site's config.toml is 4" in hostile.ask(5, train=True)
    assert hostile.ask(5, evaluate=True, counted=4) == ""


def test_no_upload_can_have_been_used_that_was_not_made_yet(tmp_path):
    hostile = Hostile(deployed(tmp_path))
    assert "cannot have used an upload of round 3" in hostile.ask(3, train=True, counted=3)
    assert "cannot have used an upload of round -1" in hostile.ask(3, train=True, counted=-1)


def test_scores_are_given_of_the_rounds_that_the_configuration_tests(tmp_path):
    hostile = Hostile(deployed(tmp_path, eval_every=4))
    assert "scores of round 2, which 'eval_every'" in hostile.ask(3, evaluate=True)
    assert "scores of round 0, which 'eval_every'" in hostile.ask(1, evaluate=True)
    assert hostile.ask(2, evaluate=True) == ""


def test_a_round_is_answered_so_often_and_no_more(tmp_path):
    hostile = Hostile(deployed(tmp_path, Limits(minimum=1, asks_per_round=3)))
    assert [hostile.ask(3, train=True, counted=2) for _ in range(3)] == [""] * 3
    for what in ("train", "evaluate"):
        words = "asks for round 3 for the 4th time today; 'asks_per_round' of this site's deploy.toml is the limit"
        assert words in hostile.ask(3, counted=2, **{what: True})
    assert hostile.ask(4, train=True, counted=3) == ""


def test_scores_are_given_so_often_a_day(tmp_path):
    made = deployed(tmp_path, Limits(minimum=1, scores_per_day=6))
    hostile = Hostile(made)
    days = [int(1e5)]
    hostile.site.requests.today = lambda: days[0]
    assert [hostile.ask(5, evaluate=True, counted=4) for _ in range(6)] == [""] * 6
    assert "scores for the 7th time today; 'scores_per_day'" in hostile.ask(5, evaluate=True, counted=4)
    assert hostile.ask(4, train=True, counted=3) == ""
    days[0] -= 1  # a clock that is set back starts no new day
    assert "'scores_per_day'" in hostile.ask(5, evaluate=True, counted=4)
    days[0] += 2
    assert hostile.ask(5, evaluate=True, counted=4) == ""


def test_a_fresh_word_for_every_message_neither_fills_the_disk_nor_goes_on_for_long(tmp_path):
    hostile = Hostile(deployed(tmp_path, Limits(minimum=1, runs_per_day=8, runs_kept=2)))
    refused = [hostile.ask(1, run=f"{k:04x}", train=True) for k in range(100)]
    assert refused[:8] == [""] * 8
    assert all("one more run, and this site takes part in 8 a day; 'runs_per_day'" in why for why in refused[8:])
    folders = [path.name for path in hostile.site.folder.iterdir() if path.is_dir()]
    assert sorted(folders) == ["0006", "0007"]
    assert any("'runs_kept'" in s or "runs_kept in this site's deploy.toml" in s for s in hostile.deployed.said)
    assert (hostile.site.folder / ASKED).stat().st_size < 2000


def test_pilots_have_words_of_their_own_and_are_limited_too(tmp_path):
    hostile = Hostile(deployed(tmp_path, Limits(minimum=1, runs_per_day=2, runs_kept=1), calibrate="pilot:1"))
    refused = [hostile.ask(1, run=f"{k:04x}", train=True, pilot=1) for k in range(50)]
    assert refused[:4] == [""] * 4  # two runs with one calibration pilot each
    assert all("'runs_per_day'" in why for why in refused[4:])
    assert len(list((hostile.site.folder / "pilots").iterdir())) == 2


def test_a_count_that_cannot_be_read_is_not_begun_anew(tmp_path):
    hostile = Hostile(deployed(tmp_path))
    assert hostile.ask(3, train=True) == ""
    for text in ("{", "[]", "{}", '{"day": "x"}'):
        (hostile.site.folder / ASKED).write_text(text)
        assert hostile.ask(3, train=True) == "it cannot do its part; its own log says why."
        assert "restore it, or delete it to count anew" in hostile.deployed.said[-1]


def test_an_honest_run_is_as_it_was_with_the_defaults(tmp_path):
    settings = {"rounds": 2, "epochs": 1, "participants": 1}
    data = classification(sizes=(20, 30), test=12)
    made = Deployed(tmp_path, BPFed(), data, **settings)
    for site in made.sites.values():
        site.limits = site.requests.limits = Limits()
    server = made.serve()
    same(server, *simulated(BPFed(), data, **settings))
    assert not any(seen.refused for seen in server.sites.values())
    shutil.rmtree(tmp_path / "server")  # and once more, which is another run
    assert not any(seen.refused for seen in made.serve().sites.values())


# --- the site's own model ---------------------------------------------------------------------------------------------


def model_of(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.parametrize("method", [FedAvg(), BPFed()], ids=lambda method: method.name)
def test_a_crafted_last_exchange_leaves_the_sites_model_as_it_is(tmp_path, method):
    hostile = Hostile(keeping(tmp_path, method=method), ran=True)
    own = hostile.site.own
    before = model_of(own)
    assert before
    for run in ("beef", hostile.run):  # one in which the site has not trained; and its own again, with another state
        hostile.ask(3, run=run, shared=hostile.crafted, evaluate=True)
        hostile.ask(3, run=run, shared=hostile.crafted, evaluate=True, counted=2)
        assert model_of(own) == before
    assert not previous(own).exists()
    said = hostile.deployed.said
    assert any("has had no part in training in this run" in sentence for sentence in said)
    assert any("has not trained since its own model was written" in sentence for sentence in said)
    assert Run.load(own).finished


def test_a_site_without_a_model_gets_none_that_it_has_not_trained_for(tmp_path):
    hostile = Hostile(keeping(tmp_path), ran=True)
    shutil.rmtree(hostile.site.own)
    hostile.ask(3, run="beef", shared=hostile.crafted, evaluate=True)
    assert not hostile.site.own.exists()
    assert hostile.ask(3, evaluate=True, counted=2) == ""  # deleted by its owner, of a run that it was part of
    assert Run.load(hostile.site.own).finished


def test_the_model_of_another_run_is_kept_beside_the_new_one(tmp_path):
    made = keeping(tmp_path)
    hostile = Hostile(made, ran=True)
    before = model_of(hostile.site.own)
    (hostile.site.own / "newcomers.txt").write_text("mine")
    shutil.rmtree(tmp_path / "server")
    made.serve()
    assert Run.load(hostile.site.own).finished
    assert model_of(previous(hostile.site.own)) == before
    assert (previous(hostile.site.own) / "newcomers.txt").read_text() == "mine"
    assert any("that this site had before is in" in s and "site b-previous" in s for s in made.said)
    assert not [path for path in hostile.site.own.parent.iterdir() if path.name.startswith(".")]


# --- the preprocessing --------------------------------------------------------------------------------------------------


def made_in(folder):
    files = {name: written_to(folder / f"{name}.csv", rows_of(k, 60)) for k, name in enumerate("ab")}
    return Federation(folder, files)


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """A federation, and what its sites have agreed on."""
    made = made_in(tmp_path_factory.mktemp("honest"))
    return made, made.serve().journal.common


def changed(feature, **changes):
    return lambda p: replace(p, features=tuple(replace(f, **changes) if f.name == feature else f for f in p.features))


def only(*names):
    return lambda p: replace(p, features=tuple(f for f in p.features if f.name in names))


LIES = {
    "every input is one column": only("age"),
    "one column twice": lambda p: replace(p, features=(p.features[0], *p.features[:2])),
    "labels swapped": lambda p: replace(p, labels=p.labels[::-1]),
    "a class renamed": lambda p: replace(p, labels=("n", "z")),
    "a class lost": lambda p: replace(p, labels=("a", "n")),
    "a regression": lambda p: replace(p, task="regression", labels=()),
    "words as numbers": changed("ward", kind="number", categories=(), scale=1.0),
    "numbers as words": changed("age", kind="words", categories=("1", "2")),
    "words lost": changed("ward", categories=("east", "north")),
    "words swapped": changed("ward", categories=("west", "east")),
    "a spread of nothing": changed("age", scale=1e-9),
    "a spread beyond measure": changed("age", scale=1e12),
    "not standardised": lambda p: replace(p, standardise="none"),
    "images": lambda p: replace(p, shape=(1, 2, 2)),
    "columns out of order": lambda p: replace(p, features=p.features[::-1]),
}


@pytest.mark.parametrize("lie", LIES)
def test_preprocessing_that_is_not_of_what_the_site_told_is_refused(honest, lie):
    tables, common = honest
    made = LIES[lie](Preprocessor.from_record(common["preparation"]))
    source = tables.sites["a"].source
    source.data(common)
    with pytest.raises(
        RejectedMessage, match="does not hold the columns and classes that this site has told"
    ) as raised:
        source.data(common | {"preparation": made.record()})
    assert not any(word in str(raised.value) for word in ("age", "ward", "east", "'n'"))  # said at home only
    assert "compared with what this site has told" in source.notes[-1]


def test_preprocessing_with_what_is_no_number_is_refused(honest):
    tables, common = honest
    made = changed("age", mean=float("nan"))(Preprocessor.from_record(common["preparation"]))
    with pytest.raises(RejectedMessage, match="its preprocessing cannot be read"):
        tables.sites["a"].source.data(common | {"preparation": made.record()})


def test_classes_that_were_invented_are_limited_by_the_sites_own_number(honest):
    tables, common = honest
    made = Preprocessor.from_record(common["preparation"])
    source = copy(tables.sites["a"].source)

    def with_more(number):
        labels = tuple(sorted({*made.labels, *(f"m{k:03d}" for k in range(number))}))
        return common | {"preparation": replace(made, labels=labels).record()}

    with pytest.raises(RejectedMessage, match=r"has 1002 classes; 'classes' of this site's deploy.toml is 100"):
        source.data(with_more(1000))
    assert source.data(with_more(3)).classes == 5  # of other sites
    source.limits = Limits(classes=4)
    with pytest.raises(RejectedMessage, match=r"has 5 classes; 'classes' of this site's deploy.toml is 4"):
        source.data(with_more(3))


def test_other_sites_may_add_columns_words_and_classes(tmp_path):
    other = [
        [*row[:3], f"{k}.5", "maybe" if k % 3 else row[3]] for k, row in enumerate(rows_of(1, 90, ("east", "north")))
    ]
    files = {
        "a": written_to(tmp_path / "a.csv", rows_of(0, 60)),
        "b": written_to(tmp_path / "b.csv", other, ["age", "dose", "ward", "length", "sick"]),
    }
    server = Federation(tmp_path, files).serve()
    assert list(server.journal.common["preparation"]["labels"]) == ["maybe", "n", "y"]
    assert not any(seen.refused for seen in server.sites.values())


def test_a_lie_costs_the_server_its_round_and_is_in_the_sites_log(tmp_path):
    tables = made_in(tmp_path)
    server = tables.server()
    transport = GridTransport(tables.grid, poll=0.01)
    honest = server._agreed
    server._agreed = lambda: (
        honest()
        | {
            "preparation": only("age")(Preprocessor.from_record(honest()["preparation"])).record(),
            "shape": [1],
        }
    )
    with pytest.raises(UserError, match="got 0 of 2 uploads"):
        server.serve(transport)
    assert any("it lacks the column 'dose'" in sentence for sentence in tables.said)
    assert b"it lacks the column" not in tables.grid.bytes()


def test_a_site_that_was_not_asked_before_the_run_began_is_refused_if_it_has_more(tmp_path, honest):
    """Its own columns and classes have no place in what the others agreed on."""
    tables, common = honest
    rows = [[*row, f"{k}.25"] for k, row in enumerate(rows_of(3, 60))]
    late = written_to(tmp_path / "c.csv", rows, ["age", "dose", "ward", "sick", "pulse"])
    source = File("c", late, tables.config)
    with pytest.raises(RejectedMessage, match="start a new run while all sites are online"):
        source.data(common)
    assert "it lacks the column 'pulse'" in source.notes[-1]
