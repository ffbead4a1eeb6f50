"""The experiment on shifted inputs: the shifts, the AUROC, the file; and what the experiments can do without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scenarios import generator

from bpfed.data.federated import Examples, FederatedData
from bpfed.engine.evaluate import evaluate_clients
from bpfed.engine.federation import Federation
from bpfed.methods import METHODS
from bpfed.metrics import ood_auroc
from experiments import shift
from experiments.training import settings_of


def deal(seed: int = 0) -> FederatedData:
    """Four clients with two of four kinds of images each: one bright quarter."""
    g = generator(seed)
    kinds = -torch.ones(4, 1, 6, 6)
    for k in range(4):
        kinds[k, 0, 3 * (k // 2) : 3 * (k // 2) + 3, 3 * (k % 2) : 3 * (k % 2) + 3] = 1.0

    def part(client: int, each: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tensor([2 * (client % 2), 2 * (client % 2) + 1]).repeat(each)
        return (kinds[y] + 0.3 * torch.randn(len(y), 1, 6, 6, generator=g)).clamp(-1, 1), y

    train, test = (Examples.of([part(c, each) for c in range(4)]) for each in (10, 6))
    return FederatedData("quarters", tuple("abcd"), train, test, "classification", 4)


def test_rotation_of_a_quarter_turn_and_back() -> None:
    x = torch.rand(3, 2, 7, 7, generator=generator()) * 2 - 1
    torch.testing.assert_close(shift.rotated(x, 90), torch.rot90(x, 1, (2, 3)), atol=1e-5, rtol=0)
    torch.testing.assert_close(shift.rotated(x[:, 0], 180), torch.rot90(x[:, 0], 2, (1, 2)), atol=1e-5, rtol=0)
    assert shift.rotated(x, 0) is x
    dark = -torch.ones(1, 1, 8, 8)
    torch.testing.assert_close(shift.rotated(dark, 33), dark)  # what comes in from outside is dark too


def test_noise_is_the_same_for_all_methods_and_grows() -> None:
    x = torch.zeros(200, 1, 10, 10)
    weak, strong = (shift.noisy(x, s, 3) for s in (0.1, 0.4))
    torch.testing.assert_close(4 * weak, strong)
    assert strong.std().item() == pytest.approx(0.4, rel=0.02)
    assert not torch.equal(shift.noisy(x, 0.1, 4), weak)
    assert shift.noisy(x, 0, 3) is x


def federation(name: str) -> Federation:
    found = shift.train(METHODS[name](), [deal()], [settings_of(3, 5, "cpu")], print, name)
    return found[0]


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shift, "DRAWS", 8)


def test_unshifted_is_as_evaluated_and_shifted_is_worse() -> None:
    made = federation("fedper")
    plain = evaluate_clients(made)[0]
    for kind in shift.SHIFTS:
        assert evaluate_clients(shift.shifted(made, kind, 0))[0]["nll"].pooled == plain["nll"].pooled
    turned = evaluate_clients(shift.shifted(made, "rotation", 90))[0]
    assert turned["accuracy"].pooled < plain["accuracy"].pooled - 0.3
    assert turned["nll"].pooled > plain["nll"].pooled


def test_auroc_is_of_labels_that_a_client_never_saw() -> None:
    made = federation("bpfed")
    data = made.data
    strange = torch.rand(20, 1, 6, 6, generator=generator())
    found = shift.told_apart(made, strange)
    total, epistemic = [], []
    for client in range(4):
        mine = shift.uncertainties(made, client, data.test.client(client)[0])
        unseen = data.test.x[~torch.isin(data.test.y, data.train.client(client)[1])]
        assert len(unseen) == 24
        other = shift.uncertainties(made, client, unseen)
        total.append(float(ood_auroc(mine[0], other[0])))
        epistemic.append(float(ood_auroc(mine[1], other[1])))
    assert found["unseen"]["total"] == pytest.approx(sum(total) / 4)
    assert found["unseen"]["epistemic"] == pytest.approx(sum(epistemic) / 4)
    assert found["unseen"]["total"] > 0.7
    assert 0.0 <= found["other"]["total"] <= 1.0


def test_one_network_has_no_epistemic_uncertainty() -> None:
    found = shift.told_apart(federation("fedper"), torch.rand(20, 1, 6, 6, generator=generator()))
    assert found["unseen"]["epistemic"] == found["other"]["epistemic"] == 0.5
    assert found["unseen"]["total"] != 0.5


def test_file_and_second_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shift, "load", lambda name, seed: deal(seed))
    monkeypatch.setattr(shift, "others", lambda cell, seed: torch.rand(9, 1, 6, 6, generator=generator(seed)))
    told: list[str] = []

    def go(*methods: str) -> dict:
        shift.run(tmp_path, ["mnist-small"], methods, 2, 1, "cpu", told.append)
        return json.loads((tmp_path / "shift.json").read_text())

    found = go("local")
    assert found["data"] == "mnist-small"
    assert found["shifts"] == {"rotation": [0, 15, 30, 45, 60], "noise": [0, 0.1, 0.2, 0.4, 0.8]}
    mine = found["methods"]["local"]
    for kind in ("rotation", "noise"):
        for measure in ("accuracy", "nll", "ece"):
            assert [len(seeds) for seeds in mine[kind][measure]] == [2] * 5
    for kind in ("unseen", "other"):
        assert {name: len(v) for name, v in mine["ood"][kind].items()} == {"total": 2, "epistemic": 2}
    both = go("local", "fedper")
    assert "Local training on mnist-small: done already" in told
    assert list(both["methods"]) == ["fedper", "local"]
    assert both["methods"]["local"] == mine


def test_no_experiment_needs_the_command_or_pictures() -> None:
    """Machines with an accelerator often have little more than torch and pydantic."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(('typer', 'matplotlib'));"
        "import experiments.novel, experiments.heterogeneity, experiments.shift"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
