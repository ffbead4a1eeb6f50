"""What a site tells of its data, and what the server lets in of it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import OPEN, Deployed, simulated
from flwr.app import ConfigRecord, Message
from scenarios import classification

from bpfed._util.errors import UserError
from bpfed.config.settings import DataSettings
from bpfed.data.tabular.preprocessing import Feature, Preprocessor
from bpfed.data.tabular.statistics import ColumnStatistics
from bpfed.deploy.protocol.messages import fingerprint
from bpfed.deploy.protocol.state_schema import RejectedMessage
from bpfed.deploy.server.roster import read_statement
from bpfed.deploy.site.data import File, agreed
from bpfed.methods import FedAvg

DATA = classification(sizes=(8, 8, 8))
NUMBERS = {"count": 8, "missing": 0, "mean": 1.5, "squares": 2.0, "levels": None, "words": False}
WORDS = {"count": 8, "missing": 0, "mean": 0.0, "squares": 0.0, "levels": ["n", "y"], "words": True}
SUMMARY = {"client": "a", "rows": 8, "columns": {"age": NUMBERS}, "target": WORDS, "shape": None}
FILE = {"summary": SUMMARY, "target": "sick", "train": 8}
PART = {"shape": [4], "task": "classification", "classes": 3, "train": 8}


def column(**changes):
    return FILE | {"summary": SUMMARY | {"columns": {"age": NUMBERS | changes}}}


def images(shape, channels):
    return FILE | {"summary": SUMMARY | {"shape": shape, "columns": {f"channel {k}": NUMBERS for k in range(channels)}}}


UNREADABLE = {
    "no JSON": "{",
    "deeply nested": "[" * 100_000,
    "a list": "[]",
    "a number": "3",
    "nothing": "{}",
    "no examples": PART | {"train": 0},
    "examples that are no number": PART | {"train": True},
    "more examples than there can be": PART | {"train": 10**12},
    "no shape": {key: PART[key] for key in ("task", "classes", "train")},
    "a shape of words": PART | {"shape": ["x"]},
    "a shape of nothing": PART | {"shape": []},
    "a shape that is a number": PART | {"shape": 4},
    "another task": PART | {"task": "poetry"},
    "a list of tasks": PART | {"task": ["classification"]},
    "classes below 0": PART | {"classes": -1},
    "no classes": PART | {"classes": None},
    "half of a character in a column's name": FILE | {"summary": SUMMARY | {"columns": {"age\ud800": NUMBERS}}},
    "half of a character in a class": FILE | {"summary": SUMMARY | {"target": WORDS | {"levels": ["n", "\ud800"]}}},
    "an empty summary": FILE | {"summary": {}},
    "a summary that is a word": FILE | {"summary": "x"},
    "columns that are a number": FILE | {"summary": SUMMARY | {"columns": 3}},
    "columns that are a list": FILE | {"summary": SUMMARY | {"columns": [NUMBERS]}},
    "another site's summary": FILE | {"summary": SUMMARY | {"client": "b"}},
    "no rows": FILE | {"summary": SUMMARY | {"rows": 0}},
    "no target": {key: FILE[key] for key in ("summary", "train")},
    "a target that is a number": FILE | {"target": 3},
    "a target's summary that is a word": FILE | {"summary": SUMMARY | {"target": "sick"}},
    "a count that is a word": column(count="8"),
    "a count below 0": column(count=-8),
    "a mean that is none": column(mean=None),
    "a mean that is no number": column(mean=float("nan")),
    "a mean beyond measure": column(mean=1e200),
    "a mean of too many digits": column(mean=10**400),
    "a spread below 0": column(squares=-1.0),
    "an infinite spread": column(squares=float("inf")),
    "words that are numbers": column(levels=[1, "y"], words=True),
    "words that are a number": column(levels=3),
    "codes that are words": column(levels=["1", "x", "3"]),
    "codes that are fractions": column(levels=["1", "2.5", "3"]),
    "more codes than there may be": column(levels=[str(k) for k in range(11)]),
    "a field too many": column(row=[1, 2]),
    "images without columns": images([1, 4, 4], 0),
    "images of other channels": images([3, 4, 4], 2),
    "images of two axes": images([4, 4], 4),
    "images of words": images(["x", 4, 4], 1),
    "images of more channels than can be counted": images([10**8, 1, 1], 3),
}


@pytest.mark.parametrize(
    "told", [PART, FILE, column(count=0, mean=0.0, squares=0), column(levels=["1", "3"]), images([2, 4, 4], 2)]
)
def test_what_sites_tell_is_let_in_and_nothing_beside_it(told):
    found = read_statement(json.dumps(told | {"more": "x" * 100}), "a")
    assert json.loads(json.dumps(found)) == told


@pytest.mark.parametrize("fault", UNREADABLE)
def test_statements_that_no_data_have_are_refused(fault):
    told = UNREADABLE[fault]
    with pytest.raises(RejectedMessage, match="what it sent about its data cannot be read"):
        read_statement(told if isinstance(told, str) else json.dumps(told), "a")


@pytest.mark.parametrize("name", ["sick", "split", "patient"])
def test_no_site_can_make_others_use_what_is_left_out(name):
    told = FILE | {"summary": SUMMARY | {"columns": {"age": NUMBERS, name: NUMBERS}}}
    with pytest.raises(RejectedMessage, match=f"has '{name}' among the inputs"):
        read_statement(json.dumps(told), "a", ["patient"])


@pytest.mark.parametrize(("target", "inputs"), [("sick", "patient"), ("sick", "sick"), ("age", "height")])
def test_a_site_refuses_to_use_what_is_left_out(tmp_path, target, inputs):
    path = tmp_path / "a.csv"
    path.write_text("patient,age,height,sick\n" + "".join(f"{k},{40 + k},{170 - k},{k % 2}\n" for k in range(20)))
    config = replace(Deployed(tmp_path, FedAvg()).config, data=DataSettings(name="x", ignore="patient", target="sick"))
    made = Preprocessor(target, "classification", (Feature(inputs, "number"),), ("0", "1"))
    with pytest.raises(RejectedMessage, match="another column, or from columns that are left out here"):
        File("a", path, config).data({"preparation": made.record()})


def test_a_site_has_its_own_words_for_what_is_missing(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("age,sick\n" + "".join(f"{'unknown' if k % 5 == 0 else 40 + k},{k % 2}\n" for k in range(20)))
    asked = DataSettings(name="x", missing="unknown", target="sick")
    site = File("a", path, replace(Deployed(tmp_path, FedAvg()).config, data=asked))
    assert site.table.missing("age").sum() == 4
    told = Preprocessor("sick", "classification", (Feature("age", "number"),), ("0", "1"), missing=("41",))
    assert site.data({"preparation": told.record()}).preprocessor.missing == ("unknown",)


def test_a_site_recodes_its_own_file_and_tells_nobody(tmp_path):
    path = tmp_path / "a.csv"
    rows = "".join(f"{88.4 * (1 + k / 9):.3f},{'FM'[k % 2]},2024-0{1 + k % 3}-11,{k % 2}\n" for k in range(40))
    path.write_text("Creatinine,sex,seen,sick\n" + rows)
    config = Deployed(tmp_path, FedAvg()).config
    said = {"rename": "Creatinine=creatinine", "map": "sex:F=female,M=male", "convert": "creatinine@a:/88.4"}
    asked = DataSettings(name="x", target="sick", dates="seen", **said)
    site = File("a", path, replace(config, data=asked), OPEN)
    told = ColumnStatistics.from_record(site.data_statement()["summary"])
    assert told.columns["creatinine"].mean == pytest.approx(1 + 19.5 / 9, rel=0.2)
    assert told.columns["sex"].categories == ("female", "male")
    assert set(told.columns) == {"creatinine", "sex", "seen year", "seen month", "seen weekday", "seen days"}
    common = agreed({"a": site.data_statement()}, replace(config, data=asked))
    assert "88.4" not in json.dumps(common)
    assert "Creatinine" not in json.dumps(common)
    made = site.data(common).preprocessor
    assert made.recoding.settings() == asked.recoding
    assert set(made.own) == {"a"}
    # A site may say so in its own config.toml alone, and still has the same configuration as the server.
    assert fingerprint(replace(config, data=asked)) == fingerprint(
        replace(config, data=DataSettings(name="x", target="sick", dates="seen"))
    )


def test_a_table_that_no_message_could_tell_of_is_refused_at_the_site(tmp_path):
    path, config = tmp_path / "a.csv", Deployed(tmp_path, FedAvg()).config
    for columns, refused in ((2000, False), (9000, True)):
        rows = np.random.default_rng(0).normal(size=(4, columns)).round(3)
        lines = [",".join(map(str, [*row, k % 2])) for k, row in enumerate(rows.tolist())]
        path.write_text("\n".join([",".join([*(f"c{k}" for k in range(columns)), "y"]), *lines]))
        if refused:
            with pytest.raises(UserError, match="has 9001 columns, and what a deployment has to tell of them takes"):
                File("a", path, config, OPEN)
        else:
            File("a", path, config, OPEN)


@pytest.mark.parametrize("fault", ["deeply nested", "an empty summary", "no shape", "a count that is a word"])
def test_a_site_with_a_bad_statement_costs_its_contribution_only(tmp_path, fault):
    deployed = Deployed(tmp_path, FedAvg(), DATA, epochs=1, rounds=2)
    node, told = deployed.node("site b"), UNREADABLE[fault]
    answer = deployed.grid.clients[node]

    def spoilt(message):
        record = answer(message).content
        statement = told if isinstance(told, str) else json.dumps(told)
        record["reply"] = ConfigRecord({**record["reply"], "facts": statement})
        return Message(record, reply_to=message)

    deployed.grid.clients[node] = spoilt
    server = deployed.serve()
    assert "cannot be read" in server.sites["site b"].why
    federation = simulated(FedAvg(), DATA, away={1: ["site b"], 2: ["site b"]}, epochs=1, rounds=2)[0]
    torch.testing.assert_close(server.federation.shared, federation.shared, rtol=0, atol=1e-6)


def test_sites_with_files_and_sites_with_parts_are_named(tmp_path):
    config = Deployed(tmp_path, FedAvg()).config
    for statements in ({"a": FILE, "b": PART}, {"b": PART, "a": FILE}):
        with pytest.raises(UserError, match="Site 'a' has a file of its own and site 'b' a part of a named dataset"):
            agreed(statements, config)
    with pytest.raises(UserError, match="data of site 'b' have a different shape or task than those of 'a'"):
        agreed({"a": PART, "b": PART | {"shape": [5]}}, config)
