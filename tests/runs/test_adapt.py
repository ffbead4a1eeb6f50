"""Clients that join a finished run: what they learn, what stays as it was, and how sure they are before any example."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from scenarios import classification, generator, module_for, regression, small_mlp

import bpfed
from bpfed.data.federated import Examples, FederatedData
from bpfed.methods import METHODS, BPFed, FedAvg
from bpfed.methods.base import rows

TRAIN = {"rounds": 4, "epochs": 5, "batch": 10, "eval_draws": 5}


def newcomer(count: int = 8, data_seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples of somebody else."""
    return classification((count,), seed=data_seed).train.client(0)


@pytest.fixture(scope="module")
def run() -> bpfed.Run:
    return bpfed.fit(BPFed(lr=0.01), classification((30, 30, 30)), model=small_mlp(), **TRAIN)


def test_a_newcomer_learns_its_examples_and_leaves_the_shared_factors(run: bpfed.Run) -> None:
    x, y = newcomer()
    before = [t.clone() for t in run.federation.shared]
    client = run.adapt(x, y, name="late", lr=0.02, steps=300)
    assert client.name == "late"
    assert client.examples == torch.bincount(y, minlength=3).tolist()
    nothing = run.adapt(name="late").predict(x)
    found = client.predict(x)
    right = torch.arange(len(y)), y
    assert found.probs[right].log().mean() > nothing.probs[right].log().mean() + 0.3
    assert found.entropy.mean() < nothing.entropy.mean()
    for now, then in zip(run.federation.shared, before, strict=True):
        assert torch.equal(now, then)
    own, cut = client.run.federation, run.federation.model.layout.shared
    weights = own.method.predictive(own.model, rows(own.shared, 1), own.personal(torch.tensor([0]))).weights
    assert torch.equal(weights.mean[0, :cut], run.federation.shared.mean)
    assert torch.equal(weights.sigma[0, :cut], run.federation.shared.sigma)
    assert run.data.clients == ("site a", "site b", "site c")


def test_one_example_is_enough_and_the_same_adaptation_gives_the_same_client(run: bpfed.Run) -> None:
    x, y = newcomer(1)
    one, again = (run.adapt(x, y, steps=50).predict(x).probs for _ in range(2))
    assert torch.equal(one, again)
    other = run.adapt(x, y, steps=50, name="somebody else").predict(x).probs
    assert not torch.equal(one, other)


def test_before_any_example_no_class_is_preferred(run: bpfed.Run) -> None:
    x = torch.cat([newcomer(40, seed)[0] for seed in range(5)])
    found = run.adapt().predict(x)
    assert found.entropy.mean() > 0.98 * math.log(3)
    assert (found.probs.mean(0) - 1 / 3).abs().max() < 0.05
    assert found.epistemic.mean() > 0.0
    known = run.clients()[0].predict(x)
    assert known.entropy.mean() < found.entropy.mean()


def test_more_examples_make_it_surer(run: bpfed.Run) -> None:
    x, y = newcomer(24)
    few, many = (
        run.adapt(x[:n], y[:n], lr=0.02, steps=200).run.federation.personal(torch.tensor([0])) for n in (2, 24)
    )
    assert many.eta.sigma.mean() < few.eta.sigma.mean()


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_takes_newcomers(name: str, tmp_path: Path) -> None:
    method = METHODS[name]()
    run = bpfed.fit(method, classification(), model=module_for(method), rounds=1, epochs=1, eval_draws=2)
    x, y = newcomer()
    client = run.adapt(x, y, steps=20)
    found = client.predict(x, draws=2)
    assert found.probs.isfinite().all()
    again = run.newcomer(client.save(tmp_path / "a.safetensors")).predict(x, draws=2)
    assert torch.equal(found.probs, again.probs)


def test_newcomers_of_regressions() -> None:
    data = regression((30, 30, 30))
    run = bpfed.fit(BPFed(lr=0.01), data, model=small_mlp(3, 1), **TRAIN)
    x, y = regression((40,), seed=3).train.client(0)
    client = run.adapt(x[:30], y[:30], lr=0.02, steps=300)
    assert client.examples == [30]
    after, before = client.predict(x[30:]), run.adapt().predict(x[30:])
    assert (after.mean - y[30:]).square().mean() < 0.5 * (before.mean - y[30:]).square().mean()
    assert after.scale.mean() < before.scale.mean()
    assert before.aleatoric.sqrt().mean() < 2.0  # targets are of unit scale
    assert after.aleatoric.sqrt().mean() < 1.0


def wave(sizes: tuple[int, ...], noise: float, seed: int) -> FederatedData:
    """Targets of unit variance, curved in the inputs; the slope is nearly the same for all clients."""
    g = generator(seed)
    parts = []
    for n in sizes:
        x = torch.randn(n, 4, generator=g)
        slope = torch.tensor([0.6, -0.5, 0.4, 0.3]) + 0.1 * torch.randn(4, generator=g)
        signal = x @ slope + 0.3 * torch.sin(2 * x[:, 0])
        parts.append((x, math.sqrt(1 - noise**2) * signal + noise * torch.randn(n, generator=g)))
    names = tuple(f"site {i}" for i in range(len(sizes)))
    return FederatedData(
        "wave", names, Examples.of(parts), Examples.of([(x[:5], y[:5]) for x, y in parts]), "regression"
    )


@pytest.mark.parametrize("name", ["bpfed", "bpfed-recipe"])
def test_a_newcomers_noise_is_its_residuals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS["bpfed-recipe"], "max_round_lr_steps", 1.0)  # so short a run needs longer steps
    noise = 0.5
    wide = small_mlp(4, 1, hidden=100)  # with as many features, a head of σ = 1 spreads far beyond the targets
    run = bpfed.fit(METHODS[name](lr=0.003), wave((80, 80, 80), noise, 0), model=wide, rounds=4, epochs=10, batch=20)
    x, y = wave((260,), noise, 9).train.client(0)
    before = run.adapt().predict(x[60:])
    assert before.scale.mean() < 2.0  # targets are of unit scale
    for count, most in ((6, 1.6), (60, 1.3)):
        after = run.adapt(x[:count], y[:count]).predict(x[60:])
        residual = (after.mean - y[60:]).square().mean().sqrt()
        assert after.aleatoric.mean().sqrt() < most * (residual if count == 60 else 1.0)
        assert after.aleatoric.mean().sqrt() > 0.7 * noise
    assert residual < 1.5 * noise


def test_a_client_is_kept_in_one_file_and_belongs_to_its_run(run: bpfed.Run, tmp_path: Path) -> None:
    x, y = newcomer()
    client = run.adapt(x, y, steps=20, name="ward 3")
    path = client.save(tmp_path / "deep" / "ward.safetensors")
    again = run.newcomer(path)
    assert (again.name, again.examples) == ("ward 3", client.examples)
    assert torch.equal(again.predict(x).probs, client.predict(x).probs)
    other = bpfed.fit(BPFed(), classification(), model=small_mlp(), rounds=1, epochs=1)
    with pytest.raises(bpfed.UserError, match="is a client of another run"):
        other.newcomer(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(bpfed.UserError, match="is damaged"):
        run.newcomer(path)
    with pytest.raises(bpfed.UserError, match="There is no file"):
        run.newcomer(tmp_path / "b.safetensors")


X, Y = newcomer()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"x": X}, "give both x and y, or neither"),
        ({"x": X[:, :3], "y": Y}, "Inputs have shape [3] each, but those of 'small' have [4]."),
        ({"x": X, "y": Y + 2}, "labels must run from 0 to 2"),
        ({"x": X, "y": Y.float()}, "give classes from 0 to 2"),
        ({"x": X, "y": Y[:3]}, "8 inputs and 3 targets were given; give one target for each input."),
        ({"x": X[:1], "y": 1}, "The targets have shape [], but must be a list with one for each input."),
        ({"x": X, "y": Y[:, None]}, "The targets have shape [8, 1], but must be a list with one for each input."),
        ({"x": X, "y": ["a"] * 8}, "The targets are not an array of numbers; give a tensor, an array or a list"),
        ({"x": [["a"] * 4], "y": [1]}, "The inputs are not an array of numbers"),
        ({"x": 1.0, "y": [1]}, "The inputs are a single number; give a batch"),
        ({"x": X, "y": Y, "name": 3}, "name is 3, but must be text."),
        ({"x": X, "y": Y, "lr": "0.1"}, "lr is '0.1', but must be a number."),
        ({"x": X * float("nan"), "y": Y}, "Client 'newcomer' of 'small' has NaN or infinite values"),
        ({"x": X, "y": Y, "name": "site b"}, "The run already has a client 'site b'"),
        ({"x": X, "y": Y, "steps": 0}, "steps is 0, but must be at least 1"),
        ({"x": X, "y": Y, "steps": 2.5}, "steps is 2.5, but must be a whole number"),
        ({"x": X, "y": Y, "lr": -1.0}, "lr is -1.0"),
        ({"x": 1e30 * X, "y": Y, "lr": 1e30}, "diverged"),
    ],
)
def test_a_mistake_is_one_sentence(run: bpfed.Run, arguments: dict, said: str) -> None:
    with pytest.raises(bpfed.UserError) as error:
        run.adapt(**{"steps": 5, **arguments})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"x": [["a"] * 4]}, "The inputs are not an array of numbers; give a tensor, an array or a list of them."),
        ({"x": np.array([["a"] * 4])}, "The inputs are not an array of numbers"),
        ({"x": None}, "The inputs are not an array of numbers"),
        ({"x": torch.tensor(1.0)}, "The inputs are a single number; give a batch"),
        ({"x": X, "draws": 1.5}, "draws is 1.5, but must be a whole number."),
    ],
)
def test_what_nobody_can_predict_for_is_one_sentence(run: bpfed.Run, arguments: dict, said: str) -> None:
    with pytest.raises(bpfed.UserError) as error:
        run.clients()[0].predict(**arguments)
    assert said in str(error.value)


def test_a_newcomer_keeps_no_examples_to_calibrate_with(run: bpfed.Run) -> None:
    with pytest.raises(
        bpfed.UserError, match="There are no prediction sets, since a newcomer learns from all"
    ) as error:
        run.adapt(X, Y, steps=5).predict(X).prediction_set(0.9)
    assert "calibration=" not in str(error.value)
    with pytest.raises(bpfed.UserError, match=r"train with calibration=0\.2"):
        run.clients()[0].predict(X).prediction_set(0.9)


def test_a_client_says_who_it_is(run: bpfed.Run) -> None:
    assert repr(run.clients()[0]) == "<client 'site a' of 'small': 30 training examples>"
    assert repr(run.adapt(name="late")) == "<newcomer 'late' to 'small': no example yet>"
    assert repr(run.adapt(X[:1], Y[:1], steps=5)) == "<newcomer 'newcomer' to 'small': 1 example of 1 of 3 classes>"


def test_a_method_that_shares_everything_has_nothing_to_adapt() -> None:
    run = bpfed.fit(FedAvg(), classification(), model=small_mlp(), rounds=1, epochs=1)
    assert torch.equal(run.adapt(X, Y, steps=5).predict(X).probs, run.clients()[0].predict(X).probs)


@pytest.fixture(scope="module")
def by_own_statistics(tmp_path_factory: pytest.TempPathFactory) -> bpfed.Run:
    """Two clients whose incomes are standardised by their own."""
    folder = tmp_path_factory.mktemp("incomes")
    for client, income in (("alice", 40_000), ("bob", 900)):
        rows = [f"{income + 10 * i},{i % 2}" for i in range(12)]
        (folder / f"{client}.csv").write_text("\n".join(["income,y", *rows]) + "\n")
    data = bpfed.data.load(f"folder:{folder}", target="y", standardise="local")
    return bpfed.fit(FedAvg(), data, rounds=1, epochs=1)


def test_a_newcomers_file_has_nobody_elses_statistics(by_own_statistics: bpfed.Run, tmp_path: Path) -> None:
    (tmp_path / "carol.csv").write_text("income,y\n50,0\n60,1\n")
    client = by_own_statistics.adapt(tmp_path / "carol.csv", name="carol")
    with safetensors.safe_open(client.save(tmp_path / "carol.safetensors"), "pt") as file:
        kept = file.metadata()["client"]
    assert "carol" in kept
    assert "alice" not in kept
    assert "bob" not in kept
    assert by_own_statistics.newcomer(tmp_path / "carol.safetensors").predict(tmp_path / "carol.csv").probs.shape == (
        2,
        2,
    )


def test_without_examples_a_newcomer_has_everybodys_statistics(by_own_statistics: bpfed.Run, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("income\n900\n40000\n")
    assert by_own_statistics.adapt(name="dave").predict(tmp_path / "rows.csv").probs.isfinite().all()


def test_a_newcomer_read_back_says_what_is_unusual(by_own_statistics: bpfed.Run, tmp_path: Path) -> None:
    (tmp_path / "carol.csv").write_text("income,y\n50,0\n60,1\n70,0\n")
    (tmp_path / "rows.csv").write_text("income\n1e9\n")
    path = by_own_statistics.adapt(tmp_path / "carol.csv", name="carol").save(tmp_path / "carol.safetensors")
    said: list[str] = []
    by_own_statistics.say = said.append
    by_own_statistics.newcomer(path).predict(tmp_path / "rows.csv")
    assert "income" in " ".join(said)


def test_numbers_of_a_newcomer_are_as_wide_as_its_own_noise() -> None:
    """The run's calibration temperature makes up for noise that its clients had not learnt to the end; a newcomer learns its own."""
    run = bpfed.fit(
        "bpfed-recipe", regression((30, 30, 30)), model=small_mlp(3, 1), rounds=2, epochs=1, calibrate="pilot:1"
    )
    assert run.calibration_temperature != 1.0
    assert run.adapt(name="late").run.calibration_temperature == 1.0
    soft = bpfed.fit(
        data=regression((30, 30, 30)), model=small_mlp(3, 1), rounds=1, epochs=1, calibration_temperature=0.5
    )
    assert soft.adapt(name="late").run.calibration_temperature == 1.0


def test_without_examples_it_is_said_what_is_not_known_of_numbers() -> None:
    run = bpfed.fit("bpfed-recipe", regression((30, 30, 30)), model=small_mlp(3, 1), rounds=1, epochs=1)
    run.say = (said := []).append
    run.adapt(name="late")
    assert "'late' has no example, and of numbers that is hardly more than their mean" in said[0]
    run.adapt(*(part[:5] for part in (run.data.train.x, run.data.train.y)), name="later", steps=5)
    assert len(said) == 1
    known = bpfed.fit("bpfed-population", regression((30, 30, 30)), model=small_mlp(3, 1), rounds=1, epochs=1)
    assert known.adapt(name="late").remark == ""
