"""Ordered classes, several labels, tokens, noise that depends on inputs and overdispersed counts, against closed forms."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import scenarios
import torch
from command import Command
from scipy.stats import nbinom
from torch import nn

import bpfed
from bpfed._util.errors import UserError
from bpfed.inference.counts import DISPERSION, Dispersed, NegativeBinomial
from bpfed.inference.labels import Labelled, Tagged
from bpfed.inference.likelihoods import CUTS, IGNORED, Bernoulli, Heteroscedastic, Ordinal, Tokens

QUICK = {"progress": False, "baselines": "off", "device": "cpu", "compile": "off", "say": lambda sentence: None}
FLAGS = ["--rounds", "3", "--epochs", "2", "--hidden", "4", "--method", "fedper", "--device", "cpu", "--quiet"]


def test_the_noise_of_a_heteroscedastic_regression_is_an_output() -> None:
    outputs, y = torch.randn(5, 2), torch.randn(5)
    wanted = -torch.distributions.Normal(outputs[:, 0], (0.5 * outputs[:, 1]).exp()).log_prob(y)
    torch.testing.assert_close(Heteroscedastic().nll(outputs, y, {}), wanted)
    data = scenarios.packed("heteroscedastic", sizes=(200, 200), test=200)
    settings = {**QUICK, "rounds": 15, "epochs": 5, "network": "linear", "eval_draws": 4}
    runs = {}
    for task in ("regression", "heteroscedastic"):
        told = bpfed.data.federated.replace(data, task=task)
        runs[task] = bpfed.fit(bpfed.methods.FedAvg(lr=0.03), told, **settings)
    nll = {task: run.history[-1]["nll"]["pooled"] for task, run in runs.items()}
    assert nll["heteroscedastic"] < nll["regression"] - 0.03
    found = runs["heteroscedastic"].clients()[0].predict(torch.tensor([[-2.0, 0.0, 0.0], [2.0, 0.0, 0.0]]))
    assert float(found.scale[1]) > 2.0 * float(found.scale[0])


def test_negative_binomial_probabilities_are_scipys() -> None:
    y, rates, sizes = np.array([0.0, 3.0, 17.0]), np.array([0.5, 4.0]), np.array([2.0, 0.7])
    found = Dispersed.mixed(*(torch.from_numpy(part).expand(3, 2) for part in (rates, sizes)))
    share = sizes / (sizes + rates)
    pmf, cdf = (f(y[:, None], sizes, share).mean(1) for f in (nbinom.pmf, nbinom.cdf))
    np.testing.assert_allclose(found.log_prob(torch.from_numpy(y)).exp(), pmf, rtol=1e-9)
    np.testing.assert_allclose(found.cdf(torch.from_numpy(y)), cdf, rtol=1e-9)
    spread = rates.var()
    np.testing.assert_allclose(found.scale[0] ** 2, (rates + rates**2 / sizes).mean() + spread, rtol=1e-5)
    nll = NegativeBinomial().nll(torch.tensor([[0.3]]), torch.tensor([2.0]), {DISPERSION: torch.tensor([0.4])})
    size = np.exp(-0.4)
    assert float(nll) == pytest.approx(-nbinom.logpmf(2, size, size / (size + np.exp(0.3))), rel=1e-5)


def test_ordered_classes_are_differences_of_logistic_curves() -> None:
    outputs, first, gaps = torch.randn(6, 1), torch.tensor([-0.7]), torch.tensor([0.3, -1.0])
    cuts = torch.cat([first, first + gaps.exp().cumsum(0)])
    upto = torch.sigmoid(cuts - outputs)
    ends = torch.cat([torch.zeros(6, 1), upto, torch.ones(6, 1)], 1)
    logs = Ordinal(4).log_probs(outputs, {CUTS: torch.cat([first, gaps])})
    torch.testing.assert_close(logs.exp(), ends.diff(dim=1))
    torch.testing.assert_close(
        Ordinal(5).log_probs(torch.zeros(1, 1), Ordinal(5).parameters()).exp(), torch.full((1, 5), 0.2)
    )
    far = torch.tensor([[80.0], [-80.0]], requires_grad=True)
    Ordinal(4).nll(far, torch.tensor([1, 2]), {CUTS: torch.cat([first, gaps])}).sum().backward()
    assert far.grad is not None
    assert bool(far.grad.isfinite().all())
    data = scenarios.packed("ordinal", sizes=(200, 200), test=100)
    run = bpfed.fit(bpfed.methods.FedAvg(lr=0.02), data, rounds=10, epochs=4, network="linear", **QUICK)
    last = run.history[-1]
    assert last["nll"]["pooled"] < 0.8 * last["shares_nll"]["pooled"]
    assert last["class_distance"]["pooled"] < 0.6


def test_several_labels_are_a_yes_or_no_each() -> None:
    outputs, y = torch.randn(4, 3), torch.tensor([0, 5, 2, 7])
    bits = torch.tensor([[0, 0, 0], [1, 0, 1], [0, 1, 0], [1, 1, 1]])
    assert torch.equal(Bernoulli(3).bits(y), bits)
    wanted = -torch.distributions.Bernoulli(logits=outputs).log_prob(bits.float()).sum(1)
    torch.testing.assert_close(Bernoulli(3).nll(outputs, y, {}), wanted)
    x, ids = torch.randn(40, 2), [0, 1] * 20
    data = bpfed.data.from_arrays(
        x, torch.stack([x[:, 0] > 0, x[:, 1] > 0], 1), ids, task="multilabel", labels=["u", "v"]
    )
    assert (data.classes, data.labels, int(data.train.y.max())) == (2, ("u", "v"), 3)
    with pytest.raises(UserError, match="a 0 or 1 for each label"):
        bpfed.data.from_arrays(x, torch.randn(40, 2), ids, task="multilabel")


def test_a_set_of_labels_lies_between_what_is_sure_and_what_is_possible() -> None:
    data = scenarios.packed("multilabel", sizes=(200, 200), test=150)
    run = bpfed.fit(bpfed.methods.FedAvg(lr=0.02), data, rounds=8, epochs=4, network="linear", calibration=0.3, **QUICK)
    last, (evaluation, _) = run.history[-1], run.evaluation
    assert evaluation.sizes.tolist() == [150, 150]
    assert last["nll"]["pooled"] < last["shares_nll"]["pooled"]
    assert 0.84 < last["coverage"]["pooled"] < 0.98
    x, y = data.test.client(0)
    found = run.clients()[0].predict(x)
    assert isinstance(found, Labelled)
    surely, possibly = found.prediction_set(0.9)
    present = Bernoulli(3).bits(y).bool()
    inside = ((surely <= present) & (present <= possibly)).all(1).double().mean()
    assert float(inside) == pytest.approx(evaluation["coverage"].clients[0], abs=0.02)
    assert evaluation["exact"].clients[0] == pytest.approx(
        float((found.labels == present).all(1).double().mean()), abs=0.02
    )


def test_a_table_of_labels_and_one_of_grades_are_trained_reported_and_predicted(command: Command, tmp_path) -> None:
    tables = tmp_path / "tables"
    tables.mkdir()
    many, grades = (scenarios.packed(task, sizes=(60, 60)) for task in ("multilabel", "ordinal"))
    for i, name in enumerate("ab"):
        bits = Bernoulli(3).bits(many.train.client(i)[1]).tolist()
        rows = zip(many.train.client(i)[0].tolist(), bits, grades.train.client(i)[1].tolist(), strict=True)
        with (tables / f"{name}.csv").open("w") as file:
            head = ["u", "v", "w", "fever", "cough", "rash", "grade"]
            csv.writer(file).writerows([head, *([*x, *bit, grade] for x, bit, grade in rows)])
    data, out = ("--data", f"folder:{tables}"), tmp_path / "run"
    asked = ("--target", "fever,cough,rash", "--task", "multilabel", "--ignore", "grade", "--calibration", "0.3")
    assert "All right" in command.ok("run", *data, *asked, *FLAGS, "--out", out).out
    assert "Each label of an example is a yes or no" in (out / "report.html").read_text()
    header, *rows = csv.reader(
        command.ok("predict", out, "--client", "a", "--input", tables / "b.csv").out.splitlines()
    )
    assert header[:4] == ["labels", "p(fever)", "p(cough)", "p(rash)"]
    assert "possibly(0.9)" in header
    assert len(rows) == 60
    command.ok("adapt", out, "--input", tables / "b.csv", "--name", "new")
    asked = ("--target", "grade", "--task", "ordinal", "--ignore", "fever,cough,rash")
    assert "Class distance" in command.ok("run", *data, *asked, *FLAGS, "--out", tmp_path / "grades").out
    (tables / "a.csv").write_text("u,grade\n1,low\n2,high\n3,low\n4,high\n")
    (tables / "b.csv").write_text("u,grade\n1,low\n2,high\n3,low\n4,high\n")
    said = command("run", *data, "--target", "grade", "--task", "ordinal", *FLAGS, "--out", tmp_path / "x").sentence
    assert "whose place in the order is not known" in said
    assert "--map 'COLUMN:low=1,high=2'" in said


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids))


def test_tokens_are_classified_where_they_count() -> None:
    outputs, y = torch.randn(2, 4, 3), torch.tensor([[0, 2, 1, IGNORED], [1, IGNORED, IGNORED, IGNORED]])
    wanted = nn.functional.cross_entropy(outputs.transpose(1, 2), y, reduction="none").sum(1)
    torch.testing.assert_close(Tokens(3).nll(outputs, y, {}), wanted)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 10, (120, 5), generator=g)
    tags = torch.where(torch.arange(5) < torch.randint(1, 6, (120, 1), generator=g), ids % 3, IGNORED)
    who = [i % 2 for i in range(120)]
    data = bpfed.data.from_arrays({"ids": ids}, tags, who, task="tokens", labels=["x", "y", "z"])
    assert data.train.y.shape[1:] == (5,)
    settings = {**QUICK, "rounds": 6, "epochs": 5, "calibration": 0.3}
    run = bpfed.fit(bpfed.methods.FedAvg(lr=0.05), data, model=Tagger(), **settings)
    last = run.history[-1]
    assert last["accuracy"]["pooled"] > 0.95
    assert last["exact"]["pooled"] > 0.9
    found = run.clients()[0].predict({"ids": ids[:4]})
    assert isinstance(found, Tagged)
    assert found.prediction_set(0.8).shape == (4, 5, 3)
    counted = data.test.client(0)[1] != IGNORED
    right = (run.clients()[0].predict(data.test.client(0)[0]).label == data.test.client(0)[1])[counted]
    assert run.evaluation[0]["accuracy"].clients[0] == pytest.approx(float(right.double().mean()))
