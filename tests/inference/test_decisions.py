"""Decisions after the fact: least expected cost, thresholds, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bpfed._util.errors import UserError
from bpfed.inference.decisions import FEWEST, Costs, chosen_threshold, split_threshold

LABELS = ("healthy", "ill")


def test_the_decision_costs_least_on_average() -> None:
    costs = Costs.read("ill:healthy=10", LABELS)
    # Treat from a probability of 1 / 11 on, where both decisions cost the same.
    p = torch.tensor([0.05, 0.09, 0.1, 0.5])
    decided, expected = costs.decide(torch.stack([1 - p, p], 1))
    assert decided.tolist() == [0, 0, 1, 1]
    assert expected.tolist() == pytest.approx([0.5, 0.9, 0.9, 0.5], abs=1e-6)


def test_a_third_decision_is_taken_where_labels_are_unsure(tmp_path: Path) -> None:
    said = Costs.read("ill=10,healthy:ask=0.3,ill:ask=0.3", LABELS)
    assert said.decisions == ("healthy", "ill", "ask")
    p = torch.tensor([0.01, 0.3, 0.9])
    assert [said.decisions[k] for k in said.decide(torch.stack([1 - p, p], 1))[0]] == ["healthy", "ask", "ill"]
    (tmp_path / "costs.csv").write_text("truth,ask,ill,healthy\nill,0.3,0,10\nhealthy,0.3,1,0\n")
    filed = Costs.read(str(tmp_path / "costs.csv"), LABELS)
    assert filed.decisions == said.decisions
    assert torch.equal(filed.matrix, said.matrix)


def test_balanced_costs_undo_how_frequent_classes_are() -> None:
    costs = Costs.read("balanced", LABELS, torch.tensor([0.9, 0.1]))
    p = torch.tensor([0.09, 0.11])
    assert costs.decide(torch.stack([1 - p, p], 1))[0].tolist() == [0, 1]


@pytest.mark.parametrize("costs", [None, "ill:healthy=3"])
def test_no_other_threshold_does_better_on_the_same_examples(costs: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(300, generator=generator) < 0.2
    p = torch.sigmoid(torch.randn(300, generator=generator) + 2.0 * truth - 2.0).mul(50).round().div(50)  # with ties
    price = Costs.read(costs, LABELS) if costs else None

    def worth(value: float) -> float:
        yes = p.double() >= value
        hits, alarms = (yes & truth).sum(), (yes & ~truth).sum()
        if price is None:
            return float(hits / truth.sum() - alarms / (~truth).sum())
        return -float(price.matrix[1, 0] * (truth.sum() - hits) + price.matrix[0, 1] * alarms)

    found = chosen_threshold(p, truth, LABELS, 1, price)
    assert worth(found.value) == pytest.approx(max(worth(v) for v in torch.linspace(0, 1, 2001).tolist()))
    # Seen from the other class it is the same cut.
    other = chosen_threshold(1 - p, ~truth, LABELS, 0, price)
    both = torch.stack([1 - p, p], 1)
    assert torch.equal(found.decide(both), other.decide(both))


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("ill", r"--costs has 'ill', but must be TRUTH:DECISION=COST"),
        ("il:healthy=3", "'il'"),
        ("ill:healthy=much", r"'much', but must be a number"),
        ("ill:ask=1", r"not for 'healthy'; add healthy:ask=COST"),
        ("nowhere.csv", "cannot be read"),
        ("balanced", "train with --calibration"),
    ],
)
def test_costs_that_cannot_be_meant_are_refused(said: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Costs.read(said, LABELS)


def test_thresholds_that_cannot_be_meant_are_refused() -> None:
    assert split_threshold("auto", LABELS) == (1, None)
    assert split_threshold("healthy=0.4", LABELS) == (0, 0.4)
    with pytest.raises(UserError, match="is for two classes"):
        split_threshold("auto", ("a", "b", "c"))
    with pytest.raises(UserError, match="must be auto or a probability"):
        split_threshold("1.5", LABELS)
    few = torch.arange(40) < FEWEST - 1
    with pytest.raises(UserError, match="'ill' has 9 and needs 10"):
        chosen_threshold(few.double(), few, LABELS, 1, None)
