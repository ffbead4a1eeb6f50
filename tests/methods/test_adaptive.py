"""The adaptive method: its corners are the methods they should be, and its fixed point is that of pooled rows."""

import math
from dataclasses import replace

import pytest
import scenarios
import torch
from torch import nn

from bpfed._util.errors import UserError
from bpfed.config.settings import Settings
from bpfed.data.federated import Examples, FederatedData
from bpfed.engine.federation import Federation
from bpfed.engine.simulator import Simulator
from bpfed.inference import optim
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.likelihoods import Normal
from bpfed.methods import Adaptive, BPFed, FedAvg, FedPer, LocalOnly
from bpfed.methods.base import RunShape, rows

CLIENTS, SIZE = 3, 35.0
INF = 100.0
NOISE = 0.5


def corner(deviation, head):
    return Adaptive(
        deviation=deviation,
        head_deviation=head,
        temperature=0.0,
        dual=0.0,
        sigma=False,
        lr=FedAvg().lr,
    )


CORNERS = {
    "FedAvg": (FedAvg(keep_adam=True), corner(0.0, 0.0)),
    "FedPer": (FedPer(), corner(0.0, INF)),
    "local": (LocalOnly(), corner(INF, INF)),
}


def batches(round_):
    found = []
    for t in range(4):
        batch = scenarios.random_batch(CLIENTS, 5, seed=100 * round_ + t, used=[5, 3, 4], size=SIZE)
        found.append(batch._replace(x=batch.x.double(), mask=batch.mask.double(), size=batch.size.double()))
    return found


def path(method):
    """All weights by name after every step of three rounds, in float64."""
    model = scenarios.model_of(scenarios.smooth(), personal=method.personal)
    model = replace(model, initial=model.initial.double())
    initial = method.init(model)
    shared, personal = initial.shared, rows(initial.personal, CLIENTS)
    hparams = scenarios.hparams(method, CLIENTS, torch.float64)
    seen = []
    for round_ in range(3):
        local = method.begin(model, rows(shared, CLIENTS), personal, hparams)
        for batch in batches(round_):
            local, _ = method.step(model, local, batch, hparams, "all")
            weights = local.shared + local.mean if isinstance(method, Adaptive) else local.weights
            seen.append(torch.stack([named(model, w) for w in weights]))
        finished = method.finish(model, local, hparams)
        shared = method.aggregate(shared, finished.upload, torch.ones(CLIENTS), clients=CLIENTS)
        personal = finished.personal
    return torch.stack(seen)


def named(model, weights):
    return torch.cat([part.flatten() for _, part in sorted(model.layout.unflatten(weights).items())])


@pytest.mark.parametrize("name", CORNERS)
def test_a_corner_is_that_method_step_by_step(name, monkeypatch):
    monkeypatch.setattr(optim, "EPS", 1e-300)  # the methods differ by the factor n, which Adam cancels but for its ε
    expected, found = (path(method) for method in CORNERS[name])
    assert (expected[1:] - expected[:-1]).abs().max() > 1e-4
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def lines(sizes=(40, 10, 20), seed=0):
    """Clients of one line, whose inputs are spread very differently: averaging their own fits is not the pooled fit."""
    g = scenarios.generator(seed)
    slope = torch.tensor([1.0, -2.0])
    parts = []
    for i, n in enumerate(sizes):
        x = torch.randn(n, 2, generator=g) * torch.tensor([1.0, 0.3 + i])
        parts.append((x, x @ slope + 0.7 * i + 0.5 * torch.randn(n, generator=g)))
    examples = Examples.of(parts)
    return FederatedData("lines", ("a", "b", "c"), examples, examples, "regression")


def pooled_ridge(data, noise=NOISE):
    """Mean of the posterior of one linear regression on all rows."""
    x, y = data.train.x.double(), data.train.y.double()
    design = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    prior = torch.tensor([2.0, 2.0, 1.0], dtype=torch.float64)  # fan-in 2 of both weights, 1 of the bias of the output
    return torch.linalg.solve(design.T @ design / noise**2 + prior.diag(), design.T @ y / noise**2)


def slopes(dual, noise=NOISE):
    """Shared weights and bias after rounds in which every client all but solves its own problem."""
    data = lines()
    method = Adaptive(temperature=1.0, deviation=0.0, head_deviation=0.0, sigma=False, dual=dual, lr=0.02)
    module = nn.Linear(2, 1)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    settings = Settings(rounds=60, epochs=20, batch=100, weighting="size", compile="off", device="cpu")
    federation = Federation.start(method, data, settings, module, Normal(noise, learnt=False))
    simulator = Simulator([federation])
    for _ in range(settings.rounds):
        simulator.round()
    found = federation.model.layout.unflatten(federation.shared.weights)
    return torch.cat([found["weight"].flatten(), found["bias"]]).double()


def test_the_fixed_point_is_the_posterior_mean_of_pooled_rows():
    torch.testing.assert_close(slopes(1.0), pooled_ridge(lines()), rtol=0, atol=5e-3)


@pytest.mark.parametrize("noise", [0.05, 3.0])
def test_the_fixed_point_is_reached_however_small_the_noise_is(noise):
    torch.testing.assert_close(slopes(0.3, noise), pooled_ridge(lines(), noise), rtol=0, atol=2e-2)


def test_without_the_dual_variable_copies_drift():
    assert (slopes(0.0) - pooled_ridge(lines())).abs().max() > 0.05


def test_a_newcomer_without_examples_predicts_with_the_prior_of_deviations():
    method = Adaptive(deviation=0.1, head_deviation=0.4)
    model = scenarios.model_of(scenarios.small_mlp(), personal="none")
    start = method.newcomer(model, method.init(model).shared)
    sigma = model.layout.unflatten(start.deviation.sigma)
    torch.testing.assert_close(sigma["1.weight"], torch.full_like(sigma["1.weight"], 0.1 / math.sqrt(4)))
    torch.testing.assert_close(sigma["3.weight"], torch.full_like(sigma["3.weight"], 0.4 / math.sqrt(6)))
    torch.testing.assert_close(sigma["3.bias"], torch.full_like(sigma["3.bias"], math.sqrt(0.4)))
    assert not start.deviation.mean.any()


def test_an_adapting_newcomer_leaves_the_shared_part_alone():
    method = Adaptive()
    model = scenarios.model_of(scenarios.small_mlp(), personal="none")
    initial = method.init(model)
    hparams = scenarios.hparams(method, CLIENTS)
    local = method.begin(
        model, rows(initial.shared, CLIENTS), rows(method.newcomer(model, initial.shared), CLIENTS), hparams
    )
    new, _ = method.step(model, local, scenarios.random_batch(CLIENTS, 5), hparams, "adapt")
    assert torch.equal(new.shared, local.shared)
    assert (new.mean != local.mean).any()


def test_where_clients_do_not_deviate_their_weights_have_one_mean():
    federation = scenarios.run(Adaptive(deviation=0.0, head_deviation=0.2), rounds=2)
    drawn = federation.method.predictive(
        federation.model, rows(federation.shared, 5), federation.personal(torch.arange(5))
    ).weights
    assert isinstance(drawn, Gaussian)
    parts = [federation.model.layout.unflatten(row) for row in drawn.sigma]
    assert all((part["1.weight"] > 0).all() and (part["3.weight"] > 0).all() for part in parts)
    means = [federation.model.layout.unflatten(row) for row in drawn.mean]
    assert all(torch.equal(mean["1.weight"], means[0]["1.weight"]) for mean in means)
    assert not all(torch.equal(mean["3.weight"], means[0]["3.weight"]) for mean in means)


@pytest.mark.parametrize(("clients", "tau", "kappa"), [(2, 0.0, 1.0), (8, 0.0, 1.0), (8, INF, 1.0), (8, 0.0, 0.4)])
def test_the_width_of_a_weight_is_that_of_the_pooled_or_of_the_own_posterior(clients, tau, kappa):
    # Mean-field width of a linear regression: 1/σ² is the sum of squares of an input over the noise, plus the prior's. A
    # temperature κ of the widths counts the sum 1/κ times.
    g = scenarios.generator(0)
    x = torch.randn(30, 2, generator=g)
    parts = [(x, x @ torch.tensor([1.0, -2.0]) + NOISE * torch.randn(30, generator=g)) for _ in range(clients)]
    examples = Examples.of(parts)
    data = FederatedData("alike", tuple(f"c{i}" for i in range(clients)), examples, examples, "regression")
    method = Adaptive(temperature=1.0, deviation=tau, head_deviation=tau, sigma_temperature=kappa, lr=0.02)
    rounds = 200 if kappa == 1.0 else 300  # narrower widths are farther from where they start
    torch.manual_seed(0)  # of the first weights
    settings = Settings(rounds=rounds, epochs=20, batch=30, compile="off", device="cpu")
    federation = Federation.start(method, data, settings, nn.Linear(2, 1), Normal(NOISE, learnt=False))
    simulator, last = Simulator([federation]), []
    for at in range(rounds):
        simulator.round()
        if at >= rounds - 40:  # steps go on, so widths move about where they belong
            last.append(federation.personal(torch.arange(clients)).deviation.sigma.mean(0))
    found = federation.model.layout.unflatten(torch.stack(last).mean(0))
    counted = 1 if tau else clients
    expected = (counted * x.square().sum(0) / NOISE**2 / kappa + 2.0).rsqrt()
    torch.testing.assert_close(found["weight"][0], expected, rtol=0.03, atol=0)


def test_copies_are_averaged_where_not_all_clients_take_part():
    method, sizes = Adaptive(dual=0.5), torch.tensor([10, 20])
    all_, some = (method.hparams_for_run(RunShape(4, part, 10, 1, 5), sizes)["dual"].tolist() for part in (4, 3))
    assert (all_, some) == ([0.5, 0.5], [0.0, 0.0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"personal": "head"}, "every weight has a shared part"),
        ({"deviation": -0.1}, "deviation is -0.1, but must be 0 or more"),
        ({"prior_scale": 0.0}, "prior_scale is 0.0, but must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        Adaptive(**changes).check()


def test_what_is_personal_is_said_though_every_weight_is_shared():
    model = scenarios.model_of(scenarios.small_mlp(), personal="none")
    assert Adaptive().whose(model) == "personal: a deviation of every weight; shared: layer 1, layer 3 (51 weights)"
    assert FedAvg().whose(model) == "personal: nothing; shared: layer 1, layer 3 (51 weights)"
    assert BPFed(personal="none").whose(model) == FedAvg().whose(model)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter that starts at 0, and a head."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 5).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(5, 2))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.base(x) + x @ self.lora_A.T @ self.lora_B.T))


def adapted():
    return scenarios.model_of(scenarios.seeded(Adapted, 0), personal="none")


@pytest.mark.parametrize("phase", ["all", "adapt"])
def test_adapters_are_points_and_the_head_is_not(phase):
    method, model = Adaptive(), adapted()
    assert model.adapters == {"lora_A", "lora_B"}
    initial = method.init(model)
    kept = initial.personal if phase == "all" else method.newcomer(model, initial.shared)
    hparams = scenarios.hparams(method, CLIENTS)
    local = method.begin(model, rows(initial.shared, CLIENTS), rows(kept, CLIENTS), hparams)
    for seed in range(3):
        local, _ = method.step(model, local, scenarios.random_batch(CLIENTS, 5, seed=seed), hparams, phase)
    finished = method.finish(model, local, hparams).personal
    for deviation in (kept.deviation, finished.deviation):
        sigma = model.layout.unflatten(deviation.sigma[0] if deviation.sigma.ndim > 1 else deviation.sigma)
        assert not sigma["lora_A"].any()
        assert not sigma["lora_B"].any()
        assert (sigma["head.weight"] > 0.0).all()
    moved = model.layout.unflatten(finished.deviation.mean[0])
    assert moved["lora_B"].abs().max() > 0.0


def test_the_prior_of_adapters_is_wider_than_that_of_other_weights_by_its_factor():
    """The pull towards the first weights is one over the square of the scale: 16 times weaker than without a name."""
    model = adapted()
    plain = replace(model)
    plain.__dict__["adapters"] = frozenset()
    scales = [Adaptive().begin(one, *_started(one)).prior.shared[0] for one in (model, plain)]
    wide, narrow = (one.layout.unflatten(scale) for one, scale in zip((model, plain), scales, strict=True))
    torch.testing.assert_close(wide["lora_A"], torch.full((2, 4), 4.0 / math.sqrt(4)))
    torch.testing.assert_close(wide["lora_B"], torch.full((5, 2), 4.0 / math.sqrt(2)))
    torch.testing.assert_close(wide["lora_B"], 4.0 * narrow["lora_B"])
    for name in ("head.weight", "head.bias"):
        assert torch.equal(wide[name], narrow[name])


def _started(model):
    initial = Adaptive().init(model)
    return rows(initial.shared, CLIENTS), rows(initial.personal, CLIENTS), scenarios.hparams(Adaptive(), CLIENTS)


def test_no_noise_is_made_for_points_whatever_their_scale_is():
    model = adapted()
    batch = scenarios.random_batch(CLIENTS, 5)
    mean = model.initial.expand(CLIENTS, -1)
    wide = Gaussian(mean, torch.full_like(mean, 0.3))
    adapters = torch.cat(
        [
            torch.full((size,), n in model.adapters)
            for n, size in zip(model.layout.names, model.layout.sizes, strict=True)
        ]
    )
    none = Gaussian(mean, torch.where(adapters, 0.0, wide.sigma))
    value, slope, spread = model.local_gradient(wide, batch.x, batch.y, batch.mask, batch.key, model.adapters)
    expected = model.local_gradient(none, batch.x, batch.y, batch.mask, batch.key)
    torch.testing.assert_close(value, expected[0])
    torch.testing.assert_close(slope, expected[1])
    assert not spread[:, adapters].any()
    noisy = model.local_gradient(wide, batch.x, batch.y, batch.mask, batch.key)[0]
    assert (noisy != value).any()
