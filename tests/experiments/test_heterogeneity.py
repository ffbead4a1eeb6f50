"""The sweeps over heterogeneity and the number of clients: what is dealt, what is written, what is not run again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scenarios import classification

from bpfed._util.errors import UserError
from bpfed.data.federated import Examples, FederatedData
from bpfed.engine.evaluate import evaluate_clients
from bpfed.engine.federation import Federation
from bpfed.engine.simulator import Simulator
from bpfed.methods import FedPer
from experiments import heterogeneity
from experiments.training import of_protocol, seeded, settings_of


def deal(value: float, seed: int) -> FederatedData:
    """More clients for a larger value."""
    return classification((12,) * int(value), seed=seed)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heterogeneity, "DRAWS", 3)
    axis = heterogeneity.AXES["clients"]
    monkeypatch.setitem(heterogeneity.AXES, "clients", replace(axis, values=(3, 5), deal=deal, rounds=1))


def test_first_examples_of_each_client() -> None:
    data = classification((4, 1, 6))
    few = heterogeneity.first(data.train, 3)
    assert few.sizes.tolist() == [3, 1, 3]
    for client in range(3):
        assert torch.equal(few.client(client)[0], data.train.client(client)[0][:3])
        assert torch.equal(few.client(client)[1], data.train.client(client)[1][:3])


def test_deals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed numbers of examples: of all clients over α, of each client over their number."""
    asked = {}

    def load(name: str, **how: object) -> FederatedData:
        asked.update(how, name=name)
        many = Examples.of([classification((80,), seed=i).train.client(0) for i in range(int(how["clients"]))])  # type: ignore[call-overload]
        names = tuple(f"c{i}" for i in range(len(many.sizes)))
        return FederatedData("many", names, many, many, "classification", 3)

    monkeypatch.setattr(heterogeneity, "load", load)
    found = heterogeneity.many_clients(300, 1)
    assert (asked["clients"], asked["partition"], asked["seed"]) == (300, "random", 1)
    assert found.train.sizes.unique().tolist() == [35]
    assert found.test.sizes.unique().tolist() == [33]
    monkeypatch.setattr(heterogeneity, "MOST_TESTS", 50)
    found = heterogeneity.dirichlet(0.3, 2)
    assert (asked["clients"], asked["partition"], asked["seed"]) == (20, "dirichlet:0.3", 2)
    assert asked["test_fraction"] == 0.95
    assert found.train.sizes.unique().tolist() == [80]
    assert found.test.sizes.unique().tolist() == [50]


def test_figures_are_those_of_single_runs() -> None:
    scores = heterogeneity.measure(FedPer(), "clients", 2, 1, "cpu", print)
    for i, value in enumerate((3, 5)):
        for j, settings in enumerate(seeded(settings_of(1, 3, "cpu"), 2)):
            federation = Federation.start(FedPer(), deal(value, j), settings)
            Simulator([federation]).round()
            want = evaluate_clients(federation)[0]
            assert scores["accuracy"][i][j] == want["accuracy"].pooled
            assert scores["nll"][i][j] == pytest.approx(want["nll"].pooled, rel=1e-5)


def test_file_grows_by_methods_and_nothing_is_run_twice(tmp_path: Path) -> None:
    told: list[str] = []

    def go(*methods: str, rounds: int | None = None) -> dict:
        heterogeneity.run(tmp_path, ["clients"], methods, 2, rounds, "cpu", told.append)
        return json.loads((tmp_path / "scale.json").read_text())

    found = go("local")
    assert (found["axis"], found["values"], found["rounds"], found["seeds"]) == ("clients", [3, 5], 1, [0, 1])
    for measure in ("accuracy", "nll", "ece"):
        assert [len(v) for v in found["methods"]["local"][measure]] == [2, 2]
    assert found["methods"]["local"]["title"] == "Local training"
    again = go("fedper", "local")
    assert told[-1] == "Local training over clients: done already"
    assert list(again["methods"]) == ["fedper", "local"]
    assert again["methods"]["local"] == found["methods"]["local"]
    with pytest.raises(UserError, match=r"scale.json' holds results for different rounds; delete it to re-run"):
        go("local", rounds=2)
    assert json.loads((tmp_path / "scale.json").read_text()) == again


def test_unknown_axis(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Unknown axis 'alpa'"):
        heterogeneity.run(tmp_path, ["alpa"])


@pytest.mark.parametrize(("clients", "participants"), [(12, 10), (4, 4)])
def test_as_many_take_part_as_the_protocol_says(clients, participants):
    assert of_protocol(settings_of(1, 3, "cpu"), clients).participants == participants
