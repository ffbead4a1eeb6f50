"""What leaves a site that has few rows, or few of a kind: nothing that determines one of them."""

import csv
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from command import Command
from federations import Deployed
from flwr.app import Message
from loopgrid import LoopGrid

from bpfed._util.errors import UserError
from bpfed.config.settings import DataSettings
from bpfed.data.tabular.federate import federate
from bpfed.data.tabular.preprocessing import Preprocessor, digest, read_preprocessor, write_preprocessor
from bpfed.data.tabular.statistics import OTHER, client_summary, released
from bpfed.data.tabular.table import Categorical, Table, read_table
from bpfed.deploy.ops import admin
from bpfed.deploy.protocol.state_schema import RejectedMessage
from bpfed.deploy.server.server import open_server
from bpfed.deploy.settings import Limits, Plan
from bpfed.deploy.site.data import TOLD, Agreed, File, agreed
from bpfed.deploy.site.site import Site, open_site
from bpfed.methods import BPFed, FedAvg, Linear
from bpfed.report import RunRecord

HEAD = ["age", "dose", "ward", "sick"]
DATA = DataSettings(name="x", target="sick", task="classification")


def rows_of(seed, number, wards=("east", "west")):
    """Rows of numbers and words, each number with many digits, so that none is found by chance."""
    rng = np.random.default_rng(seed)
    sick = np.arange(number) % 2
    return [
        [f"{rng.normal(40 + 10 * s, 9):.7f}", f"{rng.normal(5, 2):.7f}", wards[rng.integers(len(wards))], "yn"[s]]
        for s in sick
    ]


def written_to(path, rows, head=HEAD):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    return path


class Federation(Deployed):
    """Sites with these files, and a server; ``agreed`` is a preprocessing file for all."""

    def __init__(self, folder, files, agreed=None, method=None, limits=None, config=DATA, own=False, **settings):
        super().__init__(folder, method or FedAvg(), **{"rounds": 2, "epochs": 1, **settings})
        self.config = replace(self.config, data=config)
        self.plan = replace(self.plan, sites=tuple(files))
        self.agreed = None if agreed is None else Agreed(*read_preprocessor(agreed))
        limits = limits or {}
        self.sites = {}
        for name, path in files.items():
            limit = limits.get(name, Limits())
            source = File(name, path, self.config, limit, self.agreed, folder / name / TOLD)
            kept = folder / "own" / name if own else None
            site = Site(folder / name, name, self.config, source, say=self.said.append, own=kept, limits=limit)
            self.sites[name] = site
        self.answers = {name: [] for name in files}
        self.grid = LoopGrid({100 + i: self.recorded(name) for i, name in enumerate(files)})

    def recorded(self, name):
        """A node that is this site, whose answers are kept."""

        def answer(message):
            self.answers[name].append(self.sites[name].answer(message.content))
            return Message(self.answers[name][-1], reply_to=message)

        return answer

    def node(self, name):
        return 100 + list(self.sites).index(name)

    def server(self, **changes):
        return super().server(agreed=self.agreed, **changes)

    def numbers(self, name, part):
        """All numbers of that part of what a site has answered."""
        values = [value for record in self.answers[name] for value in record.get(part, {}).values()]
        return [number for value in values for number in (value if isinstance(value, list) else [value])]

    def sent(self, name):
        """All bytes that a site sent."""
        return b"".join(data for way, node, data in self.grid.wire if (way, node) == ("up", self.node(name)))


def forms(value):
    """A number as it might be in a message."""
    yield from (repr(value).encode(), f"{value:.7f}".encode(), f"{value:g}".encode())
    for kind in ("<f4", "<f8", ">f4", ">f8"):
        yield np.array([value], kind).tobytes()


def telling(source):
    """All that tells of this site's rows: cells, prepared inputs, statistics of columns, words; as (what, bytes)."""
    for table in (source.train, source.test):
        for name, column in table.columns.items():
            for value in column.words() if isinstance(column, Categorical) else column.tolist():
                if isinstance(value, str):
                    yield f"{name} {value}", f'"{value}"'.encode()
                else:
                    yield from ((f"{name} {value}", form) for form in forms(value))
    for name, column in client_summary(source.train, source.target).columns.items():
        found = (column.mean, column.squares, column.mean * column.count) if not column.words else ()
        for value in filter(None, found):  # the spread of a single row is 0
            yield from ((f"statistic of {name}", form) for form in forms(value))
    for row in source.data({"preparation": source.agreed.preprocessor.record()}).train.x.numpy():
        yield "row", row.tobytes()
        yield "row", row.astype("<f8").tobytes()


@pytest.fixture(scope="module")
def preprocessor(tmp_path_factory):
    """A file that all sites agree on, made of other tables."""
    folder = tmp_path_factory.mktemp("public")
    tables = {f"p{k}": read_table(written_to(folder / f"p{k}.csv", rows_of(50 + k, 30))) for k in range(2)}
    made = federate("public", tables, "sick", task="classification").preprocessor
    write_preprocessor(folder / "preprocessing.json", made)
    return folder / "preprocessing.json"


# --- a site with few rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_a_small_site_does_not_join_and_is_told_what_to_do(tmp_path, rows):
    files = {"a": written_to(tmp_path / "a.csv", [[*row, "train"] for row in rows_of(0, rows)], [*HEAD, "split"])}
    words = f"has {rows} training rows, fewer than the 10 .*give it more rows, or agree with all sites on preprocessing"
    with pytest.raises(UserError, match=words):
        Federation(tmp_path, files)
    assert not (tmp_path / "a").exists()  # not a word is kept to be sent
    files["a"] = written_to(tmp_path / "a.csv", [[*row, "train"] for row in rows_of(0, 10)], [*HEAD, "split"])
    Federation(tmp_path, files)


@pytest.mark.parametrize(
    ("rows", "method"),
    [(1, FedAvg()), (2, FedAvg()), (3, FedAvg()), (9, FedAvg()), (9, BPFed()), (1, Linear()), (9, Linear())],
    ids=lambda given: getattr(given, "name", given),
)
def test_with_an_agreed_preprocessing_no_byte_tells_of_a_row_of_a_small_site(tmp_path, preprocessor, rows, method):
    """Nine rows have two or three for testing, and in a calibration pilot hold out one."""
    files = {"a": written_to(tmp_path / "a.csv", rows_of(1, rows)), "b": written_to(tmp_path / "b.csv", rows_of(2, 80))}
    made = Federation(tmp_path, files, preprocessor, method, calibrate="pilot:1")
    server = made.serve()
    assert server.journal.counted == {"a": 2, "b": 2}  # it trains
    assert [seen.refused for seen in server.sites.values()] == [0, 0]
    sent, source = made.sent("a"), made.sites["a"].source
    found = {what for what, data in telling(source) if data in sent}
    assert found == set()
    assert b"summary" not in sent
    assert b'"train": 10' in sent
    assert server.journal.evaluation[1] == ["b"]  # no scores of the small one
    assert (
        RunRecord.read(server.journal.folder).untested == "1 client tells no scores and is not counted in any figure."
    )
    for part in ("sums", "held", "info"):
        assert not any(made.numbers("a", part)), part
    assert {record["reply"]["train"] for record in made.answers["a"]} == {0, 10}  # never how many it has


def test_sums_of_few_rows_are_not_uploaded(tmp_path, preprocessor):
    """The messages of linear models are sums over rows, and of few rows they are the rows."""
    files = {"a": written_to(tmp_path / "a.csv", rows_of(1, 9)), "b": written_to(tmp_path / "b.csv", rows_of(2, 80))}
    made = Federation(tmp_path, files, preprocessor, Linear())
    server = made.serve()
    assert server.journal.counted == {"a": 2, "b": 2}
    uploaded = {
        site: any(any(array.data) for record in answers if "upload" in record for array in record["upload"].values())
        for site, answers in made.answers.items()
    }
    assert uploaded == {"a": False, "b": True}


def test_what_is_searched_for_is_found_in_a_site_that_tells_of_every_row(tmp_path, preprocessor):
    """The search above would see it: statistics and words of a site without a minimum."""
    files = {"a": written_to(tmp_path / "a.csv", rows_of(1, 9)), "b": written_to(tmp_path / "b.csv", rows_of(2, 80))}
    made = Federation(tmp_path, files, limits={"a": Limits(minimum=1)})
    made.serve()
    made.sites["a"].source.agreed = Agreed(*read_preprocessor(preprocessor))
    sent = made.sent("a")
    found = {what for what, data in telling(made.sites["a"].source) if data in sent}
    assert found >= {"statistic of age", "statistic of dose"}
    assert any(made.numbers("a", "sums"))
    assert any(made.numbers("a", "info"))


def test_where_all_sites_are_small_they_have_their_models_and_no_scores_are_told(tmp_path, preprocessor):
    files = {name: written_to(tmp_path / f"{name}.csv", rows_of(k, 9)) for k, name in enumerate("ab")}
    made = Federation(tmp_path, files, preprocessor, own=True)
    with pytest.raises(UserError, match="All rounds are done, but no site tells its scores"):
        made.serve()
    assert all((tmp_path / "own" / name / "model.safetensors").exists() for name in "ab")
    assert any("so its scores are not sent" in sentence for sentence in made.said)


def test_slopes_of_few_held_out_examples_are_not_told(tmp_path):
    files = {"a": written_to(tmp_path / "a.csv", rows_of(1, 40)), "b": written_to(tmp_path / "b.csv", rows_of(2, 120))}
    made = Federation(tmp_path, files, calibrate="pilot:1")
    made.serve()
    assert not any(made.numbers("a", "held"))
    assert any(made.numbers("b", "held"))
    assert any("fewer than its minimum of 10, so it tells nothing of them" in sentence for sentence in made.said)


# --- few rows of a kind -----------------------------------------------------------------------------------------------


def table(**columns):
    made = {k: Categorical.of(v) if isinstance(v[0], str) else np.array(v, dtype=float) for k, v in columns.items()}
    return Table("t", len(next(iter(made.values()))), made)


def told_of(minimum=10, **columns):
    rows = table(**columns, y=["n", "p"] * (len(next(iter(columns.values()))) // 2))
    return released(client_summary(rows, "y"), rows, "y", minimum)


NOTHING = {"count": 0, "missing": 0, "mean": 0.0, "squares": 0.0, "categories": None, "words": False}
RNG = np.random.default_rng(0)
MANY = RNG.normal(size=40)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([*MANY[:9], *[np.nan] * 31], "only 9 values"),
        ([0.0] * 39 + [7.25], "too rare"),
        ([3.0] * 37 + [1.0, 2.0, 7.25], "nearly all its values are the same"),
        ([0.0] * 35 + [1.0] * 5, "too rare"),
        ([0.0] * 20 + [1.0] * 17 + [2.0] * 3, "too rare"),
        ([*MANY[:39], 1e6], "far from all others"),
    ],
)
def test_a_column_whose_statistics_give_single_rows_is_not_told(values, why):
    made, reasons = told_of(x=values)
    assert vars(made.columns["x"]) == NOTHING
    assert why in reasons["x"]


@pytest.mark.parametrize("values", [[2.5] * 40, [0.0] * 20 + [1.0] * 20, list(MANY), [*MANY[:30], *[np.nan] * 10]])
def test_a_column_of_enough_rows_is_told_as_it_is(values):
    rows = table(x=values, y=["n", "p"] * 20)
    whole = client_summary(rows, "y")
    assert released(whole, rows, "y", 10) == (whole, {})


def test_few_missing_values_are_not_told():
    made, _ = told_of(x=[*MANY[:37], *[np.nan] * 3])
    full = client_summary(table(x=list(MANY[:37]), y=["n"] * 37), "y").columns["x"]
    column = made.columns["x"]
    assert (column.count, column.missing) == (40, 0)
    assert (column.mean, column.scale) == pytest.approx((full.mean, full.scale))


def test_rare_words_are_one_group_if_that_is_large_enough():
    common = ["blue"] * 20
    made, _ = told_of(x=[*common, *["green"] * 9, *["red"] * 3, *[""] * 8])
    assert made.columns["x"].categories == (OTHER, "blue")
    made, _ = told_of(x=[*common, *["white"] * 12, *["green"] * 8])
    assert made.columns["x"].categories == ("blue", "white")


def test_rare_whole_numbers_are_not_told():
    made, why = told_of(x=[*[1.0] * 12, *[2.0] * 10, *[3.0] * 10, *[9.0] * 8])
    assert made.columns["x"].categories == ("1", "2", "3")
    assert why["x"] == "1 of 4 whole numbers are too rare"
    made, why = told_of(x=[1.0, 2.0, 3.0, 9.0] * 10)
    assert (made.columns["x"].categories, why) == (("1", "2", "3", "9"), {})
    made, _ = told_of(x=[*np.arange(10.0), *np.arange(10.0), *np.arange(10.0), *np.arange(10.0)])
    assert made.columns["x"].categories == ()  # all are rare


def test_of_classes_no_mean_and_no_rare_one_is_told():
    rows = table(x=list(MANY), y=[0] * 12 + [1] * 25 + [2] * 3)
    made, why = released(client_summary(rows, "y"), rows, "y", 10)
    assert vars(made.target) == {**NOTHING, "count": 40, "categories": ("0", "1")}
    assert "1 of 3 classes are too rare" in why["y"]


def rare_federation(tmp_path, **changes):
    """Three rows of site a in a ward and two of a class that nobody else has, and twelve that are in wards of one row each."""
    one = rows_of(1, 60, ("east",))
    for row in one[:3]:
        row[2] = "leprosarium"
    for k, row in enumerate(one[3:23]):
        row[2] = f"hermitage-{k}"
    one += [["41.1234567", "4.7654321", "east", "kuru"]] * 2
    files = {"a": written_to(tmp_path / "a.csv", one), "b": written_to(tmp_path / "b.csv", rows_of(2, 60))}
    return Federation(tmp_path, files, **changes)


def test_no_byte_has_a_rare_word_or_class(tmp_path):
    made = rare_federation(tmp_path)
    server = made.serve()
    wire = made.grid.bytes()
    assert not [word for word in (b"leprosarium", b"hermitage", b"kuru") if word in wire]
    assert b"east" in wire
    assert b"minimum" not in wire  # no message sets it
    found = server.journal.common["preparation"]
    assert list(found["labels"]) == ["n", "y"]
    ward = next(f for f in found["features"] if f["name"] == "ward")
    assert list(ward["levels"]) == [OTHER, "east", "west"]
    assert server.journal.counted == {"a": 2, "b": 2}
    assert any("2 rows of this site are left out" in sentence for sentence in made.said)
    # As many rows as it told before: the difference would be how many are of the rare class.
    own = made.sites["a"].source
    assert {record["reply"]["train"] for record in made.answers["a"]} == {0, len(own.train)}
    inputs = own.data(server.journal.common).preprocessor
    column = inputs.input_names.index(f"ward = {OTHER}")
    rare = [word not in ("east", "west") for word in own.train.words("ward")]
    x = inputs.inputs(own.train)[:, column]
    assert x.tolist() == [float(r) for r in rare]
    assert sum(rare) > 9


CODES = ("30001117", "30001118", "30001119", "30001120")
RARE_CODE = "90007771"


def coded_federation(tmp_path, **changes):
    """Wards as long whole numbers, so that none is found by chance; three rows of site a have one that is rare."""
    files = {}
    for k, name in enumerate("ab"):
        rows = [[*row[:2], CODES[i % 4], row[3]] for i, row in enumerate(rows_of(1 + k, 100))]
        for row in rows[:3] if name == "a" else ():
            row[2] = RARE_CODE
        parts = ["train"] * 80 + ["test"] * 20
        marked = [[*row, part] for row, part in zip(rows, parts, strict=True)]
        tmp_path.mkdir(exist_ok=True)
        files[name] = written_to(tmp_path / f"{name}.csv", marked, [*HEAD, "split"])
    return Federation(tmp_path, files, **changes)


def test_no_byte_has_a_rare_code_and_all_sites_use_the_others(tmp_path):
    made = coded_federation(tmp_path)
    server, wire = made.serve(), made.grid.bytes()
    assert [word for word in CODES if f'"{word}"'.encode() not in wire] == []
    assert not [form for form in (RARE_CODE.encode(), *forms(float(RARE_CODE))) if form in wire]
    source = made.sites["a"].source
    assert any("'ward' (1 of 5 whole numbers are too rare)" in note for note in source.notes)
    prepared = source.data(server.journal.common).preprocessor
    ward = next(f for f in prepared.features if f.name == "ward")
    assert (ward.kind, ward.categories) == ("number", CODES)
    at = prepared.input_names.index("ward") + 1
    x = prepared.inputs(source.train)[:, at : at + 4]
    rare = [word == RARE_CODE for word in source.train.words("ward")]
    assert (x.sum(1) == 0).tolist() == rare
    assert any("'ward' has few whole numbers, which may be codes" in sentence for sentence in made.said)


def test_a_rare_code_is_seen_on_the_wire_without_a_minimum(tmp_path):
    made = coded_federation(tmp_path, limits={"a": Limits(minimum=1)})
    made.serve()
    assert f'"{RARE_CODE}"'.encode() in made.grid.bytes()


def test_with_an_agreed_preprocessing_no_byte_has_a_code_of_a_small_site(tmp_path):
    """The file has codes that are common elsewhere; those of the small site are used as numbers."""
    public = coded_federation(tmp_path / "public", limits={"a": Limits(minimum=1)})
    common = agreed({name: site.source.data_statement() for name, site in public.sites.items()}, public.config)
    made = Preprocessor.from_record(common["preparation"])
    write_preprocessor(tmp_path / "p.json", made)
    rows = [[*row[:2], ward, row[3]] for row, ward in zip(rows_of(3, 9), [RARE_CODE, "41117771"] * 5, strict=False)]
    big = rows_of(4, 100, CODES)
    files = {"a": written_to(tmp_path / "a.csv", rows), "b": written_to(tmp_path / "b.csv", big)}
    deployed = Federation(tmp_path, files, tmp_path / "p.json")
    server = deployed.serve()
    assert server.journal.counted == {"a": 2, "b": 2}
    sent = deployed.sent("a")
    assert not [
        form for word in (RARE_CODE, "41117771") for form in (word.encode(), *forms(float(word))) if form in sent
    ]
    x = deployed.sites["a"].source.data(server.journal.common).train.x
    assert x.shape[1] == len(made.input_names) == 2 + 1 + 5
    assert set(x[:, 3:].sum(1).tolist()) == {0.0, 1.0}  # one of them is in the file, the other is not


def test_a_site_refuses_codes_that_it_has_not(tmp_path):
    made = coded_federation(tmp_path)
    source = made.sites["a"].source
    common = agreed({name: site.source.data_statement() for name, site in made.sites.items()}, made.config)
    assert source.data(common).preprocessor.input_names[2:] == ("ward", *(f"ward = {code}" for code in CODES))
    told = "does not hold the columns and classes that this site has told"
    for categories, words in ((CODES[1:], told), (CODES[::-1], told), (("1.5", *CODES), "cannot be read")):
        changed = json.loads(json.dumps(common))
        next(f for f in changed["preparation"]["features"] if f["name"] == "ward")["levels"] = list(categories)
        with pytest.raises(RejectedMessage, match=words):
            source.data(changed)
    next(f for f in common["preparation"]["features"] if f["name"] == "age")["levels"] = ["40", "41", "42"]
    with pytest.raises(RejectedMessage, match="does not hold the columns"):
        source.data(common)


def test_a_rare_word_is_seen_on_the_wire_without_a_minimum(tmp_path):
    made = rare_federation(tmp_path, limits={"a": Limits(minimum=1)})
    made.serve()
    wire = made.grid.bytes()
    assert [word for word in (b"leprosarium", b"hermitage", b"kuru") if word not in wire] == []


def test_no_class_is_common_enough(tmp_path):
    files = {name: written_to(tmp_path / f"{name}.csv", rows_of(k, 20)) for k, name in enumerate("ab")}
    with pytest.raises(
        UserError, match="No site has enough training rows of a class to tell of it; give sites more rows"
    ):
        Federation(tmp_path, files).serve()


def test_no_column_has_values_that_differ_often_enough(tmp_path):
    files = {}
    for k, name in enumerate("ab"):
        rows = [["1.5" if i % 20 else "2.5", row[3]] for i, row in enumerate(rows_of(k, 60))]
        files[name] = written_to(tmp_path / f"{name}.csv", rows, ["age", "sick"])
    made = Federation(tmp_path, files)
    with pytest.raises(UserError, match="No site tells of any column, as too few rows have values that differ"):
        made.serve()


def test_numbers_that_may_be_classes_here_and_are_none_there(tmp_path):
    files = {}
    for k, name in enumerate("ab"):
        rows = [[*row[:3], str(i % 2) if k else f"{i / 7:.4f}"] for i, row in enumerate(rows_of(k, 60))]
        files[name] = written_to(tmp_path / f"{name}.csv", rows)
    with pytest.raises(UserError, match="targets of site 'b' may be classes, so it tells no mean of them"):
        Federation(tmp_path, files, config=replace(DATA, task=None)).serve()


# --- the same rows, and one more --------------------------------------------------------------------------------------


def test_statistics_are_told_anew_only_when_many_rows_have_come(tmp_path):
    rows = [[*row, "train"] for row in rows_of(1, 75)]
    path, told_at, head = tmp_path / "a.csv", tmp_path / TOLD, [*HEAD, "split"]
    config = replace(Deployed(tmp_path, FedAvg()).config, data=DATA)

    def statement(number, more=()):
        written_to(path, [*rows[:number], *more], head)
        made = File("a", path, config, Limits(), None, told_at)
        return made.data_statement(), made.notes

    first, notes = statement(60)
    assert not notes
    assert statement(60) == (first, [])
    again, notes = statement(60, [["99.9999999", "9.9999999", "east", "y", "train"]])
    assert again == first
    assert "changed by fewer than 10 rows since it was told of, so the same is told again" in notes[0]
    anew, notes = statement(70)
    assert not notes
    assert anew["summary"]["columns"]["age"]["mean"] != first["summary"]["columns"]["age"]["mean"]
    told_at.write_text("{")
    with pytest.raises(UserError, match=r"cannot be read; restore it, or delete it to tell anew"):
        statement(70)


@pytest.mark.parametrize("more", [-3, 3])
def test_a_site_with_a_few_other_rows_takes_part_and_tells_the_same_number(tmp_path, more):
    head, files = [*HEAD, "split"], {}
    for k, name in enumerate("ab"):
        rows = [[*row, "test" if i % 4 == 0 else "train"] for i, row in enumerate(rows_of(k, 80))]
        files[name] = written_to(tmp_path / f"{name}.csv", rows, head)
    Federation(tmp_path / "fed", files)
    extra = [[*row, "train"] for row in rows_of(9, 3)]
    written_to(files["b"], [*rows, *extra] if more > 0 else rows[: 80 + more], head)
    made = Federation(tmp_path / "fed", files)
    made.serve()
    assert {answer["reply"]["train"] for answer in made.answers["b"]} == {0, 60}  # in the greeting it is a fact
    assert not [sentence for sentence in made.said if "was not used" in sentence]


# --- preprocessing that all agree on ------------------------------------------------------------------------------------


def test_sites_and_server_must_have_agreed_on_the_same(tmp_path, preprocessor):
    files = {name: written_to(tmp_path / f"{name}.csv", rows_of(k, 60)) for k, name in enumerate("ab")}
    made = Federation(tmp_path / "1", files, preprocessor)
    made.agreed = None
    with pytest.raises(UserError, match="Only 0 of 2 sites joined"):
        made.serve()
    assert any("have not agreed on the same preprocessing" in sentence for sentence in made.said)
    made = Federation(tmp_path / "2", files)
    made.agreed = Agreed(*read_preprocessor(preprocessor))
    with pytest.raises(UserError, match="Only 0 of 2 sites joined"):
        made.serve()


def test_a_server_that_changes_what_was_agreed_on_is_refused(tmp_path, preprocessor):
    files = {name: written_to(tmp_path / f"{name}.csv", rows_of(k, 60)) for k, name in enumerate("ab")}
    made = Federation(tmp_path, files, preprocessor)
    made.agreed = made.agreed._replace(preprocessor=replace(made.agreed.preprocessor, labels=("y", "n")))
    with pytest.raises(UserError, match="got 0 of 2 uploads"):
        made.serve()
    assert any("not the one that this site has agreed to ('preprocessing' of its deploy.toml)" in s for s in made.said)


def test_preprocessing_is_written_by_a_command_named_by_all_and_pinned(tmp_path, capsys):
    bpfed, public = Command(capsys), tmp_path / "public"
    public.mkdir()
    for k in range(2):
        written_to(public / f"p{k}.csv", rows_of(50 + k, 30))
    out = tmp_path / "preprocessing.json"
    said = bpfed.ok("data", "prepare", f"folder:{public}", "--target", "sick", "--out", out).out
    assert digest(out.read_bytes()) in said
    assert "whoever gets the file can read them" in said
    assert "choose another --out" in bpfed("data", "prepare", f"folder:{public}", "--target", "sick", "--out", out).err
    record = json.loads(out.read_text())
    assert [f["name"] for f in record["features"]] == ["age", "dose", "ward"]
    assert "local" not in record
    fed = tmp_path / "fed"
    bpfed.ok("deploy", "init", fed, "--sites", "a,b", "--target", "sick", "--preprocessing", out, "--rounds", "2")
    for place in fed.iterdir():
        plan = Plan.read(place)
        assert (plan.preprocessing, plan.preprocessing_sha256) == ("preprocessing.json", digest(out.read_bytes()))
        assert (place / "preprocessing.json").read_bytes() == out.read_bytes()
    small = written_to(tmp_path / "a.csv", rows_of(1, 9))
    site = open_site(admin.site_folder(fed, "a"), print, str(small))
    assert site.source.data_statement() == {
        "preparation": digest(out.read_bytes()),
        "target": "sick",
        "train": len(site.source.train),
    }
    assert open_server(fed / "server", print).roster.agreed == digest(out.read_bytes())
    old = fed / "server" / "deploy.toml"  # as it was written before 0.12
    old.write_text(
        old.read_text().replace("preprocessing =", "preparation =").replace("preprocessing_sha", "preparation_sha")
    )
    assert "preparation_sha256 = " in old.read_text()
    assert Plan.read(fed / "server").preprocessing_sha256 == digest(out.read_bytes())
    own = admin.site_folder(fed, "a") / "preprocessing.json"
    own.write_text(own.read_text().replace('"mean": ', '"mean": 1'))
    with pytest.raises(UserError, match="is not the preprocessing that was agreed to: its SHA-256 is"):
        open_site(admin.site_folder(fed, "a"), print)
    outcome = bpfed("deploy", "init", tmp_path / "x", "--sites", "a,b", "--target", "age", "--preprocessing", out)
    assert (outcome.code, (tmp_path / "x").exists()) == (2, False)
    assert "has the target 'sick', but the configuration 'age'" in outcome.sentence


def test_preprocessing_is_taken_from_a_run(tmp_path, capsys):
    made = Federation(
        tmp_path, {n: written_to(tmp_path / f"{n}.csv", rows_of(k, 60)) for k, n in enumerate("ab")}, own=True
    )
    server = made.serve()
    Command(capsys).ok("data", "prepare", tmp_path / "own" / "a", "--out", tmp_path / "p.json")
    found, _ = read_preprocessor(tmp_path / "p.json")
    wanted = made.sites["a"].source.data(server.journal.common).preprocessor
    assert (found.features, found.labels) == (wanted.features, wanted.labels)


HAND = {
    "target": "sick",
    "task": "classification",
    "labels": ["n", "y"],
    "features": [
        {"name": "age", "kind": "number", "mean": 50, "scale": 15},
        {"name": "ward", "kind": "words", "levels": ["east", "west"]},
    ],
}


def test_preprocessing_can_be_written_by_hand(tmp_path):
    path = tmp_path / "hand.json"
    path.write_text(json.dumps(HAND))
    files = {name: written_to(tmp_path / f"{name}.csv", rows_of(k, 60)) for k, name in enumerate("ab")}
    made = Federation(tmp_path, files, path)
    server = made.serve()
    assert server.journal.counted == {"a": 2, "b": 2}
    assert server.federation.model is not None
    assert server.journal.common["shape"] == [3]
    x = made.sites["a"].source.data(server.journal.common).train.x
    assert torch.isfinite(x).all()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"labels": ["n"]}, "its 1 classes are not 2 to 100 different ones"),
        ({"labels": ["n", "n"]}, "different ones"),
        ({"task": "poetry"}, "its task is 'poetry'"),
        ({"features": []}, "it has no column"),
        ({"features": HAND["features"][:1] * 2}, "or one twice"),
        ({"target": "age"}, "the target 'age' is among its columns"),
        ({"features": [{"name": "age", "kind": "number", "scale": -1}]}, "mean and scale of 'age'"),
        ({"features": [{"name": "age", "kind": "number", "scale": True}]}, "mean and scale of 'age'"),
        ({"features": [{"name": "age", "kind": "letters"}]}, "the kind of 'age'"),
        ({"features": [{"name": "age", "kind": "channel"}]}, "the kind of 'age'"),
        ({"features": [{"name": "w", "kind": "words", "levels": ["a", "a"]}]}, "levels of 'w'"),
        ({"features": [{"name": "age", "kind": "number", "levels": ["a", "b"]}]}, "up to 10 whole numbers"),
        ({"features": [{"name": "w", "kind": "words"}]}, "'w' gives no input"),
        ({"features": [{"name": "w", "kind": "words", "levels": [1, 2]}]}, "is not a text"),
        ({"features": [{"name": "age", "kind": "number", "width": 3}]}, "width"),
        ({"features": 3}, "not iterable"),
        ({"rows": [[1, 2]]}, "rows"),
        ({"version": 9}, "version 9"),
        ({"local": {}}, "not for all sites"),
    ],
)
def test_what_is_no_preprocessing_is_refused_in_one_sentence(tmp_path, changes, why):
    path = tmp_path / "hand.json"
    path.write_text(json.dumps(HAND | changes))
    with pytest.raises(UserError, match=re.escape(why)) as raised:
        read_preprocessor(path)
    assert "is not a preprocessing file" in str(raised.value)
    for text in ("{", "[]", "3", "[" * 100_000, "{}"):
        path.write_text(text)
        with pytest.raises(UserError, match="is not a preprocessing file"):
            read_preprocessor(path)


def test_the_rows_of_named_datasets_are_public(tmp_path, capsys):
    Command(capsys).ok("deploy", "init", tmp_path / "fed", "--clients", "2", "--method", "fedavg")
    folder = admin.site_folder(tmp_path / "fed", "client-00")
    assert open_site(folder, print, "digits").limits == Limits(minimum=1)
    rows = written_to(tmp_path / "a.csv", rows_of(1, 60), [*HEAD[:3], "target"])
    assert open_site(folder, print, str(rows)).limits == Limits()


def test_existing_files_of_sites_have_the_defaults(tmp_path):
    (tmp_path / "deploy.toml").write_text('sites = ["a", "b"]\nsite = "a"\n')
    plan = Plan.read(tmp_path)
    assert plan.limits == Limits() == Limits(10, 100, 50, 10_000, 10, 5)
    assert plan.preprocessing == ""
    for key, value in (("minimum", 0), ("classes", 1), ("runs_kept", 0), ("preprocessing", "x.json")):
        given = f'"{value}"' if isinstance(value, str) else value
        (tmp_path / "deploy.toml").write_text(f'sites = ["a", "b"]\nsite = "a"\n{key} = {given}\n')
        with pytest.raises(UserError, match=key):
            Plan.read(tmp_path)
