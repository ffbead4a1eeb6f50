"""The novel-client experiment: newcomers side by side learn what each learns alone, and nobody trains on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import Command
from scenarios import generator, small_mlp
from torch.utils._pytree import tree_flatten, tree_map

from bpfed._util.errors import UserError
from bpfed.config.settings import Settings
from bpfed.data.federated import Examples, FederatedData
from bpfed.engine.federation import Federation
from bpfed.engine.simulator import Simulator
from bpfed.methods import METHODS
from bpfed.metrics import evaluate
from bpfed.runs import adapt as alone
from experiments import novel

CLASSES, EACH = 4, 10


def deal(seed: int = 0) -> FederatedData:
    """Ten clients with two of four labels each, ten training and five test examples of each label."""
    g = generator(seed)
    centres = 2.0 * torch.randn(CLASSES, 4, generator=g)

    def part(client: int, each: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tensor([2 * (client % 2), 2 * (client % 2) + 1]).repeat(each)
        return centres[y] + torch.randn(len(y), 4, generator=g), y

    train, test = (Examples.of([part(c, each) for c in range(10)]) for each in (EACH, 5))
    return FederatedData("little", tuple(f"c{i}" for i in range(10)), train, test, "classification", CLASSES)


def trained(name: str, seeds: int = 2) -> list[Federation]:
    settings = [Settings(rounds=2, epochs=2, batch=8, seed=s, compile="off", device="cpu") for s in range(seeds)]
    data = [novel.without(deal(s.seed), (8, 9)) for s in settings]
    found = [
        Federation.start(METHODS[name](), d, s, small_mlp(4, CLASSES, seed=s.seed))
        for d, s in zip(data, settings, strict=True)
    ]
    simulator = Simulator(found)
    while not found[0].finished:
        simulator.round()
    return found


def newcomers(counts: tuple[int, ...] = (4, 8), seeds: int = 2) -> list[novel.Newcomer]:
    deals = [deal(s) for s in range(seeds)]
    return [
        novel.Newcomer(s, d.clients[c], k, *novel.few(*d.train.client(c), k), *d.test.client(c))
        for k in counts
        for s, d in enumerate(deals)
        for c in (8, 9)
    ]


@pytest.mark.parametrize("name", [name for name in novel.METHODS if name != "fedrep"])  # adapts as FedPer does
def test_side_by_side_is_what_each_learns_alone(name: str) -> None:
    """Of the recipe, noise is drawn per example of a padded batch, so all have equally many examples there.

    With a population, q starts at its prior: where a feature is dead the gradient is how a difference of nothing was
    rounded, and Adam takes a whole step along it. There the newcomer is a stack of its own, which rounds as it
    does alone.
    """
    federations, joining = trained(name), newcomers((8,) if name.startswith("bpfed-") else (8, 4))
    newcomer = joining[-1]  # of the second seed
    stack = joining[-1:] if name == "bpfed-population" else joining
    (found,) = novel.adapt(federations, stack, (12,), print, name)
    client = alone.adapt(federations[newcomer.run], newcomer.x, newcomer.y, steps=12, name=newcomer.name)
    want = tree_flatten(client.run.federation.personal(torch.tensor([0])))[0]
    for a, b in zip(tree_flatten(tree_map(lambda t: t[-1:], found))[0], want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_stops_are_on_the_way() -> None:
    federations, joining = trained("fedper"), newcomers((4, 8))
    before, halfway, end = novel.adapt(federations, joining, (0, 6, 12), print, "")
    (directly,) = novel.adapt(federations, joining, (6,), print, "")
    torch.testing.assert_close(halfway.weights, directly.weights)
    assert torch.equal(before.weights[-1], federations[1].method.newcomer(federations[1].model, None).weights)
    assert not torch.equal(halfway.weights, end.weights)


def test_scores_are_those_of_the_clients_of_a_seed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(novel, "DRAWS", 3)
    monkeypatch.setattr(alone, "DRAWS", 3)
    name = "bpfed"
    federations, joining = trained(name), newcomers((4,))
    for federation in federations:
        federation.settings = replace(federation.settings, eval_draws=3)
    found = novel.score(federations, joining, novel.adapt(federations, joining, (0, 4), print, name)[-1], print, name)
    assert len(found) == 2
    both = [alone.adapt(federations[1], n.x, n.y, steps=4, name=n.name) for n in joining[2:]]
    probs = torch.cat([client.predict(n.test_x).probs for client, n in zip(both, joining[2:], strict=True)])
    y = torch.cat([n.test_y for n in joining[2:]])
    want = evaluate(probs, y, torch.tensor([0, 10, 20]))
    assert found[1]["accuracy"].pooled == want["accuracy"].pooled
    assert found[1]["nll"].pooled == pytest.approx(want["nll"].pooled, rel=1e-3)


def test_steps_and_draws_are_those_of_an_adaptation() -> None:
    assert (novel.STOPS[-1], novel.DRAWS) == (alone.STEPS, alone.DRAWS)
    assert all(stop % novel.STOPS[1] == 0 for stop in novel.STOPS)


def test_held_out_clients_are_of_both_groups_and_take_no_part() -> None:
    assert novel.held_out(10) == [8, 9]
    assert novel.held_out(20) == [16, 17, 18, 19]
    data = deal()
    left = novel.without(data, (8, 9))
    assert left.clients == data.clients[:8]
    assert torch.equal(left.train.x, data.train.x[: 8 * 2 * EACH])


def test_examples_per_class() -> None:
    data = deal()
    x, y = novel.few(*data.train.client(9), 3)
    assert torch.bincount(y, minlength=CLASSES).tolist() == [0, 0, 3, 3]
    own = data.train.client(9)[0]
    assert all(any(torch.equal(row, other) for other in own) for row in x)
    assert novel.per_class([data], [8, 9]) == [1, 2, 5, 10]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(novel, "load", lambda cell, partition, seed: deal(seed))
    monkeypatch.setattr(novel, "STOPS", (0, 5, 10))
    monkeypatch.setattr(novel, "DRAWS", 4)


@pytest.mark.usefixtures("quick")
def test_file_of_a_method_and_a_second_run(tmp_path: Path) -> None:
    told: list[str] = []
    ask = {"methods": ["fedper"], "seeds": 2, "device": "cpu", "say": told.append}
    novel.run(tmp_path, ["mnist-small"], rounds=1, **ask)  # type: ignore[arg-type]
    path = tmp_path / "novel" / "mnist-small" / "fedper.json"
    found = json.loads(path.read_text())
    head = {k: found[k] for k in ("cell", "method", "title", "partition", "seeds", "rounds", "device", "newcomers")}
    assert head == {
        "cell": "mnist-small",
        "method": "fedper",
        "title": "FedPer",
        "partition": "groups",
        "seeds": [0, 1],
        "rounds": 1,
        "device": "CPU",
        "newcomers": ["c8", "c9"],
    }
    assert [p["examples"] for p in found["points"]] == [1, 2, 5, 10]
    assert found["curve"]["steps"] == [0, 5, 10]
    for measure in ("accuracy", "nll", "ece"):
        assert all(len(p[measure]) == 2 for p in found["points"])
        assert [len(seeds) for seeds in found["curve"][measure]] == [2, 2, 2]
        assert found["curve"][measure][-1] == found["points"][-1][measure]
    before = path.read_bytes()
    novel.run(tmp_path, ["mnist-small"], rounds=1, **ask)  # type: ignore[arg-type]
    assert told[-1] == "FedPer on mnist-small: done already"
    assert path.read_bytes() == before
    with pytest.raises(
        UserError, match=r"fedper.json' holds results for different rounds, settings; delete it to re-run"
    ):
        novel.run(tmp_path, ["mnist-small"], rounds=2, **ask)  # type: ignore[arg-type]
    assert path.read_bytes() == before


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="Unknown cell 'mnist-smal'"):
        novel.run(tmp_path, ["mnist-smal"])
    with pytest.raises(UserError, match="FedAvg"):
        novel.run(tmp_path, ["mnist-small"], ["fedavg-ft"])
    asked = ("paper", "novel", "--methods", "fedavg-ft", "--results", tmp_path)
    assert "tunes all weights of a newcomer" in Command(capsys)(*asked).sentence
    assert "Unknown partition 'sites'" in Command(capsys)("paper", "novel", "--partition", "sites").sentence
