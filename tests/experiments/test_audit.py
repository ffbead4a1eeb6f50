"""The published protocol and the audit: what is switched, what is written, what is kept, and the tables made of it."""

import json

import numpy as np
import pytest
import scenarios
import torch

from bpfed._util.errors import UserError
from bpfed.nn.networks import LeNet
from experiments import audit, reference
from experiments.audit import DIFFERENCES, Variant, markdown, measured, variants
from experiments.records import read_cell
from experiments.reference_methods import PublishedBPFed
from experiments.slices import Slices, cut


@pytest.fixture
def small(monkeypatch):
    """Ten small clients in place of every cell; what was asked for."""
    asked = []

    def load(cell, partition, seed):
        asked.append((cell, partition, seed))
        return scenarios.classification(sizes=(12,) * 10, seed=seed)

    monkeypatch.setattr(reference, "load", load)
    monkeypatch.setattr(reference, "load_slices", lambda cell: load(cell, "slices", 0))
    return asked


# --- the reference's split --------------------------------------------------------------------------------------------


def test_slices_are_consecutive_and_each_image_is_with_one_client():
    y = np.tile(np.arange(10), 60)
    parts = cut(y, Slices(4, 3, 5))
    rows = np.concatenate([np.concatenate(part) for part in parts])
    assert len(set(rows)) == len(rows) == 4 * 5 * 8
    assert [len(train) for train, _ in parts] == [15] * 4
    assert set(y[np.concatenate(parts[0])]) == {0, 1, 2, 3, 4}
    assert set(y[np.concatenate(parts[1])]) == {5, 6, 7, 8, 9}
    first, third = (np.sort(np.concatenate(parts[i])) for i in (0, 2))
    assert first.max() < third.min()  # the next slice of the same labels
    assert all(
        np.array_equal(a, b)
        for one, two in zip(parts, cut(y, Slices(4, 3, 5)), strict=True)
        for a, b in zip(one, two, strict=True)
    )


# --- what is switched -------------------------------------------------------------------------------------------------


def test_the_bases_are_the_published_and_the_printed_settings():
    assert Variant("published").method == PublishedBPFed()
    assert Variant("printed").method == PublishedBPFed(
        noise_scale=1.0,
        divergence="posterior-prior",
        kl_weight=None,
        overwritten="both",
        averaged="sigma",
        batches=0,
        inner=1,
        start="network",
    )


@pytest.mark.parametrize("base", ["published", "printed"])
def test_a_switch_changes_one_difference_and_nothing_else(base):
    start = Variant(base)
    for one in DIFFERENCES:
        other = Variant(base, one.name)
        was, now = start.method.settings(), other.method.settings()
        target = one.printed if base == "published" else one.published
        assert {name: value for name, value in now.items() if value != was[name]} == target
        other.method.check()
        assert (other.partition != start.partition) == (one.name == "labels")
        assert (other.one_pool != start.one_pool) == (one.name == "network")
        ran, runs = start.settings(100, "cpu"), other.settings(100, "cpu")
        assert (ran.batch != runs.batch) == (one.name == "work")
        assert (ran.eval_draws != runs.eval_draws) == (one.name == "noise")


def test_the_larger_network_is_switched_where_there_are_colour_images():
    assert "published/network" not in [v.name for v in variants("mnist-small")]
    assert "published/network" in [v.name for v in variants("cifar10-small")]
    assert len({v.name for v in variants("cifar10-large")}) == 2 + 2 * len(DIFFERENCES)


def test_the_references_network_has_one_pooling_layer_less():
    wide, plain = (reference.network((3, 32, 32), 10, 0, one_pool) for one_pool in (True, False))
    assert sum(p.numel() for p in wide.parameters()) == 206_006
    assert type(plain) is LeNet
    assert sum(p.numel() for p in plain.parameters()) == 62_006
    assert wide(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    again, other = (reference.network((3, 32, 32), 10, seed) for seed in (0, 1))
    assert torch.equal(wide.fc1.weight, again.fc1.weight)
    assert not torch.equal(wide.fc1.weight, other.fc1.weight)
    assert sum(p.numel() for p in reference.network((1, 28, 28), 10, 0).parameters()) == 79_510


def test_the_published_settings_are_the_reference_codes():
    how = reference.settings()
    assert (how.rounds, how.batch, how.participants, how.eval_draws) == (800, 100, 10, 1)


# --- what is written and kept -----------------------------------------------------------------------------------------


def test_a_cell_is_written_as_every_other_is_and_not_run_again(tmp_path, small, monkeypatch):
    said = []
    reference.run(tmp_path, (0,), 2, "cpu", said.append, ["mnist-small"], ["bpfed"])
    path = tmp_path / "published" / "groups" / "mnist-small" / "bpfed.json"
    made = read_cell(path)
    assert (made.protocol, made.partition, made.method, made.rounds) == ("published", "groups", "bpfed", 2)
    assert made.runs[0]["curve"]["round"] == [1, 2]
    assert made.best() == pytest.approx(max(made.runs[0]["curve"]["accuracy"]))
    assert made.settings["method"]["noise_scale"] == 0.001
    assert said[-1].startswith("BPFed on mnist-small: best round's accuracy")

    reference.run(tmp_path, (0, 1), 2, "cpu", said.append, ["mnist-small"], ["bpfed"])
    assert len(small) == 2  # seed 0 was not run again
    assert [run["seed"] for run in read_cell(path).runs] == [0, 1]
    assert read_cell(path).runs[0] == made.runs[0]

    monkeypatch.setattr(reference, "train", lambda *a: pytest.fail("It was there already."))
    reference.run(tmp_path, (0, 1), 2, "cpu", said.append, ["mnist-small"], ["bpfed"])
    assert said[-1] == "BPFed on mnist-small: there already"


def test_an_audit_keeps_each_variant_as_it_is_done(tmp_path, small, monkeypatch):
    only = ["published", "published/labels"]
    audit.run(tmp_path, (0, 1), 2, "cpu", lambda sentence: None, only=only)
    record = json.loads((tmp_path / "audit.json").read_text())
    found = record["cells"]["mnist-small"]
    assert list(found) == only
    assert small == [("mnist-small", how, seed) for how in ("groups", "random") for seed in (0, 1)]
    assert [run["seed"] for run in found["published"]["runs"]] == [0, 1]
    assert "published/labels" not in markdown({"cells": {"mnist-small": found}})  # words, not keys
    assert "drawn at random" in markdown(record)

    before = (tmp_path / "audit.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(audit, "train", lambda *a: pytest.fail("It was there already."))
        for seeds in ((0, 1), (0,)):  # all of them, or more than are asked for
            audit.run(tmp_path, seeds, 2, "cpu", lambda sentence: None, only=only)
    assert (tmp_path / "audit.json").read_bytes() == before

    with pytest.raises(UserError, match="holds results for different settings; delete it to re-run"):
        audit.run(tmp_path, (0,), 1, "cpu", lambda sentence: None, only=["published"])
    assert (tmp_path / "audit.json").read_bytes() == before


def test_names_that_do_not_exist_are_refused(tmp_path):
    with pytest.raises(UserError, match="variant"):
        audit.run(tmp_path, (0,), 1, "cpu", print, only=["published/nois"])
    with pytest.raises(UserError, match="cell"):
        audit.run(tmp_path, (0,), 1, "cpu", print, cells=["mnist"])
    with pytest.raises(UserError, match="method"):
        reference.run(tmp_path, (0,), 1, "cpu", print, methods=["fedavg"])


# --- tables -----------------------------------------------------------------------------------------------------------


def variant(accuracies, eces, seeds=2):
    runs = []
    for seed in range(seeds):
        a, e = ([v + 0.01 * seed for v in values] for values in (accuracies, eces))
        curve = {"round": [1, 2, 3], "accuracy": a, "nll": [0.3, 0.2, 0.4], "ece": e}
        runs.append({"seed": seed, "last": {"accuracy": a[-1], "ece": e[-1], "nll": 0.4}, "curve": curve})
    return {"seeds": list(range(seeds)), "rounds": 3, "device": "CPU", "runs": runs}


def test_the_best_round_is_found_and_the_last_is_kept_apart():
    figures = measured(variant([0.80, 0.95, 0.90], [0.10, 0.04, 0.05], seeds=1))
    assert figures["accuracy"][0] == pytest.approx(90.0)
    assert figures["best"][0] == pytest.approx(95.0)
    assert figures["ece"][0] == pytest.approx(5.0)
    assert figures["best_ece"][0] == pytest.approx(4.0)
    assert figures["accuracy"][1] != figures["accuracy"][1]  # one seed has no deviation
    mean, deviation = measured(variant([0.80, 0.95, 0.90], [0.10, 0.04, 0.05]))["accuracy"]
    assert (mean, deviation) == pytest.approx((90.5, 0.5**0.5))


def test_the_table_shows_the_change_from_its_base():
    found = {
        "published": variant([0.80, 0.95, 0.90], [0.1, 0.04, 0.05]),
        "published/noise": variant([0.80, 0.90, 0.88], [0.1, 0.04, 0.02]),
        "printed": variant([0.80, 0.90, 0.89], [0.1, 0.04, 0.02], seeds=1),
        "printed/noise": variant([0.80, 0.90, 0.90], [0.1, 0.04, 0.06], seeds=1),
    }
    text = markdown({"cells": {"mnist-small": found}})
    assert "| as published | 90.50 ± 0.71 | 95.50 ± 0.71 | 5.5 ± 0.7 | 0.400 ± 0.000 |" in text
    assert "| noise ε ~ N(0, I) | 88.50 ± 0.71 (−2.00 ± 0.00) |" in text
    assert "| noise ε ~ N(0, 0.001² I) | 90.00 (+1.00) | 90.00 (+0.00) | 6.0 (+4.0) | 0.400 (+0.000) |" in text
    assert "3 rounds, 1 seed, CPU" in text


def test_an_empty_record_says_so():
    assert markdown({"cells": {}}) == "Nothing has been measured yet.\n"
