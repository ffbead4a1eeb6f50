"""The network that is made where none is given, and how wide its hidden layer is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from scenarios import classification, images, regression, small_mlp

import bpfed
from bpfed._util.errors import UserError
from bpfed.data.federated import FederatedData
from bpfed.inference.likelihoods import Categorical, Normal
from bpfed.methods import FedAvg, Recipe
from bpfed.nn.model import Model
from bpfed.nn.networks import LeNet, SkipMLP, default

QUICK = {"rounds": 1, "epochs": 1, "eval_draws": 2}


def widths(module: torch.nn.Module) -> list[tuple[int, ...]]:
    return [tuple(weight.shape) for weight in module.parameters()]


def test_the_hidden_layer_is_as_wide_as_is_said_and_100_where_nothing_is() -> None:
    assert widths(default((4,), 3, hidden=7)) == [(7, 4), (7,), (3, 7), (3,)]
    assert widths(default((2, 3), 1)) == [(100, 6), (100,), (1, 100), (1,)]
    for one, other in zip(default((4,), 3, 5).parameters(), default((4,), 3, 5, 100).parameters(), strict=True):
        assert torch.equal(one, other)
    assert isinstance(default((3, 32, 32), 10), LeNet)


@pytest.mark.parametrize(
    ("shape", "network"), [((4,), "mlp"), ((4,), "skip"), ((4,), "linear"), ((2, 3), "auto"), ((1, 32, 32), "auto")]
)
def test_networks_of_this_package_pass_the_trial_that_they_are_spared(shape: tuple[int, ...], network: str) -> None:
    x = torch.randn(6, *shape, generator=torch.Generator().manual_seed(0))
    tried, spared = (Model.of(default(shape, 3, network=network), Categorical(3), x, tried=t) for t in (False, True))
    assert (tried.layout, tried.head, tried.notes) == (spared.layout, spared.head, spared.notes)


@pytest.mark.parametrize(("data", "weights"), [(classification(), 7 * (4 + 1 + 3) + 3), (regression(), 7 * 5 + 2)])
def test_a_run_has_the_network_that_is_asked_for(data: FederatedData, weights: int) -> None:
    run = bpfed.fit(FedAvg(), data, hidden=7, **QUICK)
    assert run.config()["model"]["weights"] == weights  # in a regression with the scale of its noise
    assert run.config()["run"]["hidden"] == 7
    calibrate = "pilot:1" if data.task == "classification" else "none"
    both = bpfed.fit(Recipe(), data, hidden=7, members=2, calibrate=calibrate, **QUICK)
    assert both.config()["model"]["weights"] == 2 * weights


@pytest.mark.parametrize("data", [classification(), regression()])
@pytest.mark.parametrize("network", ["linear", "skip"])
def test_networks_for_tables_start_at_zero_and_are_learnt(data: FederatedData, network: str) -> None:
    run = bpfed.fit(FedAvg(), data, network=network, members=2, **QUICK)
    model = run.federation.model
    assert model.head == (
        {"1.weight", "1.bias"} if network == "linear" else {"linear.weight", "output.weight", "output.bias"}
    )
    first = model.one.layout if model.members == 1 else model.layout
    assert not any(first.unflatten(model.initial)[name].any() for name in model.head)
    assert run.config()["run"]["network"] == network
    learnt = model.layout.unflatten(run.federation.shared.weights)
    assert all(learnt[name].any() for name in model.head)


def test_a_skip_network_is_a_regression_beside_an_mlp() -> None:
    module, x = SkipMLP(4, 3, 5), torch.randn(6, 4)
    for layer in (module.linear, module.output):
        torch.nn.init.normal_(layer.weight)
    expected = x @ module.linear.weight.T + module.output(torch.relu(module.hidden(x)))
    torch.testing.assert_close(module(x), expected)
    assert module(x).shape == (6, 3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"network": "linear"}, "hidden is for a network with a hidden layer, but network is 'linear';"),
        (
            {"hidden": None, "network": "skip", "model": small_mlp()},
            "network is for the network that is made where none is given, but one is given as model;",
        ),
        ({"data": images()}, "hidden is for a network with one hidden layer, but images of 32 x 32 get a LeNet;"),
        (
            {"model": small_mlp()},
            "hidden is for the network that is made where none is given, but one is given as model;",
        ),
        ({"hidden": 0}, "hidden is 0, but must be at least 1, or left unset."),
        ({"hidden": 7.0}, "hidden is 7.0, but must be a whole number."),
    ],
)
def test_where_it_cannot_be_it_is_refused_and_nothing_is_written(tmp_path: Path, settings: dict, said: str) -> None:
    given = {"method": FedAvg(), "data": classification(), "hidden": 7, "out": tmp_path / "a", **QUICK} | settings
    with pytest.raises(bpfed.UserError) as error:
        bpfed.fit(**given)
    assert str(error.value).startswith(said)
    assert not list(tmp_path.iterdir())


def test_all_methods_of_a_comparison_have_it() -> None:
    found = bpfed.compare(["fedavg", "local"], classification(), seeds=1, hidden=7, say=str, progress=False, **QUICK)
    for name in found.names:
        config = found.records[name][0].config
        assert (config["run"]["hidden"], config["model"]["weights"]) == (7, 7 * (4 + 1 + 3) + 3)


@dataclass(frozen=True)
class Laplacian:
    """A likelihood that a user might write."""

    def parameters(self) -> dict[str, torch.Tensor]:
        return {}

    def nll(self, outputs: torch.Tensor, y: torch.Tensor, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return (outputs.reshape(y.shape) - y).abs()

    def check(self, outputs: torch.Tensor) -> None:
        """Anything."""


class Smoothed(Categorical):
    """Logits again, so that predictions are as always."""

    def nll(self, outputs: torch.Tensor, y: torch.Tensor, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return 0.9 * super().nll(outputs, y, parameters) - 0.1 * outputs.log_softmax(-1).mean(-1)


@pytest.mark.parametrize(
    ("data", "likelihood", "name"),
    [
        (regression(), Laplacian(), "Normal"),
        (regression(), Categorical(1), "Normal"),
        (classification(), Laplacian(), "Categorical"),
        (classification(), Normal(), "Categorical"),
    ],
)
def test_a_likelihood_that_nobody_could_predict_with_is_refused(data: FederatedData, likelihood, name: str) -> None:
    with pytest.raises(
        UserError, match=rf"The likelihood is a {type(likelihood).__name__}, .*bpfed\.inference\.likelihoods\.{name}"
    ):
        bpfed.fit(FedAvg(), data, likelihood=likelihood, **QUICK)


def test_a_likelihood_with_the_same_outputs_may_be_ones_own() -> None:
    run = bpfed.fit(FedAvg(), classification(), likelihood=Smoothed(3), **QUICK)
    assert run.federation.round == 1
