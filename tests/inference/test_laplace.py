"""The Laplace approximation of the last layer, against autograd and closed forms."""

import math

import pytest
import scenarios
import torch
from torch import nn
from torch.nn import functional as F

from bpfed._util.errors import UserError
from bpfed.engine.evaluate import evaluate_clients
from bpfed.inference.estimators import Batch
from bpfed.inference.laplace import CURVATURE, GRID, Curvature, Head, best_precision, evidence, laplace
from bpfed.inference.likelihoods import Categorical, Normal
from bpfed.methods import FedAvg, FedAvgFT, FedBABU, FedPer, FedRep, LGFedAvg, LocalOnly
from bpfed.methods.base import rows
from bpfed.nn.model import Model

SCALE = 0.5


def linear(bias=True):
    return scenarios.seeded(lambda: nn.Linear(4, 3, bias=bias))


def deep(bias=True):
    return scenarios.seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=bias)))


def measured(model, weights, *batches):
    """The curvature after these batches, at weights ``[S, P]``."""
    curvature = rows(Curvature.zero(model), len(weights))
    for batch in batches:
        curvature, loss = curvature.plus(model, weights, batch)
        assert (loss > 0).all()
    return curvature


def kronecker(curvature, s=0):
    """G ⊗ A / n of one client, ``[K I, K I]``."""
    return torch.kron(curvature.outputs[s], curvature.inputs[s]) / curvature.examples[s]


def by_autograd(model, weights, batch, s=0):
    """Hessian of Σ −log p in the last layer (weight and bias as rows of one matrix), ``[K I, K I]``, in float64."""
    layer = Head.of(model)
    used = batch.mask[s].bool()

    def loss(flat):
        moved = layer.put(weights[s : s + 1].double(), flat.view(1, *layer.shape))[0]
        outputs = model.outputs(moved, batch.x[s, used].double())
        parameters = model.layout.unflatten(moved)
        return model.likelihood.nll(outputs, batch.y[s, used], parameters).sum()

    return torch.func.hessian(loss)(layer.get(weights.double())[s].flatten()).float()


# --- curvature --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("personal", ["head", "not-head", "none", "all", "2.weight"])
def test_of_one_example_it_is_the_hessian(bias, personal):
    model = scenarios.model_of(deep(bias), personal=personal)
    weights = model.initial.expand(2, -1)
    batch = scenarios.random_batch(2, 5, used=[1, 1])
    found = measured(model, weights, batch)
    for s in range(2):
        torch.testing.assert_close(kronecker(found, s), by_autograd(model, weights, batch, s), rtol=1e-4, atol=1e-6)


def test_where_all_examples_curve_alike_it_is_the_hessian_of_all():
    # With a last layer of zeros every class is as likely: Λ is the same for all examples, and the factors are exact.
    model = scenarios.model_of(deep())
    weights = model.initial.expand(2, -1)
    weights = Head.of(model).put(weights, torch.zeros(2, 3, 6))
    batch = scenarios.random_batch(2, 5, used=[5, 3])
    found = measured(model, weights, batch)
    for s in range(2):
        torch.testing.assert_close(kronecker(found, s), by_autograd(model, weights, batch, s), rtol=1e-4, atol=1e-6)


def test_otherwise_its_factors_are_the_sums_they_say_and_it_is_near_the_hessian():
    model = scenarios.model_of(deep())
    weights = model.initial.expand(2, -1)
    batches = [scenarios.random_batch(2, 5, seed=t, used=[5, 2]) for t in range(3)]
    found = measured(model, weights, *batches)
    assert found.examples.flatten().tolist() == [15.0, 6.0]
    for s in range(2):
        x = torch.cat([b.x[s, b.mask[s].bool()] for b in batches])
        hidden = torch.cat([torch.tanh(deep()[0](x)), torch.ones(len(x), 1)], 1)
        p = torch.softmax(deep()(x), -1)
        torch.testing.assert_close(found.inputs[s], hidden.T @ hidden)
        torch.testing.assert_close(found.outputs[s], torch.diag(p.sum(0)) - p.T @ p)
        exact = sum(by_autograd(model, weights, b, s) for b in batches)
        assert (kronecker(found, s) - exact).norm() < 0.1 * exact.norm()


def test_of_a_convolutional_network_too():
    model = scenarios.model_of(scenarios.small_conv(), (1, 6, 6))
    batch = scenarios.random_batch(2, 4, (1, 6, 6), used=[1, 1])
    found = measured(model, model.initial.expand(2, -1), batch)
    expected = by_autograd(model, model.initial.expand(2, -1), batch, 1)
    torch.testing.assert_close(kronecker(found, 1), expected, rtol=1e-4, atol=1e-5)


# --- posteriors in closed form ----------------------------------------------------------------------------------------


def test_a_draw_does_not_depend_on_how_eigenvectors_were_chosen():
    """They have no sign, and of few examples most eigenvalues are 0, so that any basis will do for these."""
    model = scenarios.model_of(deep())
    weights = model.initial.expand(2, -1)
    found = laplace(model, weights, measured(model, weights, scenarios.random_batch(2, 2)), 1.0)
    key, last = scenarios.keys(2), found.inputs[..., 1:]
    for other in (torch.cat([-found.inputs[..., :1], last], -1), found.inputs[..., [1, 0, *range(2, 6)]]):
        torch.testing.assert_close(found._replace(inputs=other).draw(key, 3), found.draw(key, 3), rtol=0, atol=1e-5)


def gaussian(predictive, s=0, draws=4000):
    """Mean and covariance of the drawn last layer of one client."""
    key = scenarios.keys(len(predictive.weights))
    drawn = torch.stack([predictive.layer.get(predictive.draw(key, m))[s].flatten() for m in range(draws)])
    return drawn.mean(0), torch.cov(drawn.T)


def covariance(predictive, s=0):
    """The covariance that the draws have, in closed form."""
    basis = torch.kron(predictive.outputs[s], predictive.inputs[s])
    return basis @ torch.diag(predictive.sigma[s].flatten().square()) @ basis.T


def test_draws_have_the_mean_and_the_covariance_of_the_posterior():
    model = scenarios.model_of(linear())
    weights = model.initial.expand(2, -1)
    found = laplace(model, weights, measured(model, weights, scenarios.random_batch(2, 5, used=[5, 3])), 2.0)
    assert found.draws(20) == 20
    mean, drawn = gaussian(found, 1)
    expected = covariance(found, 1)
    torch.testing.assert_close(mean, Head.of(model).get(weights)[1].flatten(), rtol=0, atol=0.05)
    torch.testing.assert_close(drawn, expected, rtol=0, atol=0.05)
    assert expected.diagonal().max() > 0.3


def test_only_the_last_layer_is_random():
    model = scenarios.model_of(deep())
    weights = model.initial.expand(2, -1)
    found = laplace(model, weights, measured(model, weights, scenarios.random_batch(2, 5)), 2.0)
    drawn = found.draw(scenarios.keys(2), 0)
    cut = model.layout.shared
    assert torch.equal(drawn[:, :cut], weights[:, :cut])
    assert (drawn[:, cut:] != weights[:, cut:]).all()


def lines(learnt, count=9):
    """A linear regression with noise of known size, its batch and weights ``[1, P]``."""
    data = scenarios.regression(sizes=(count,))
    module = scenarios.seeded(lambda: nn.Linear(3, 1))
    model = Model.of(module, Normal(SCALE, learnt=learnt), data.train.x[:2], "all")
    x, y = data.train.x[None], data.train.y[None]
    return model, Batch(x, y, torch.ones(1, count), torch.tensor([float(count)]), scenarios.keys(1))


@pytest.mark.parametrize("learnt", [True, False])
def test_bayesian_linear_regression(learnt):
    model, batch = lines(learnt)
    curvature = measured(model, model.initial[None], batch)
    x = torch.cat([batch.x[0], torch.ones(9, 1)], 1).double()
    for precision in (0.1, 30.0):
        found = laplace(model, model.initial[None], curvature, precision)
        exact = torch.linalg.inv(x.T @ x / SCALE**2 + precision * torch.eye(4, dtype=torch.double))
        torch.testing.assert_close(covariance(found).double(), exact, rtol=1e-4, atol=1e-6)


def test_the_evidence_is_the_marginal_likelihood_of_linear_regression_and_chooses_the_best_precision():
    model, batch = lines(False)
    x, y = torch.cat([batch.x[0], torch.ones(9, 1)], 1).double(), batch.y[0].double()
    curvature = measured(model, model.initial[None], batch)
    values = torch.linalg.eigvalsh(curvature.inputs) * curvature.outputs[:, 0] / curvature.examples
    for precision in GRID:
        mode = torch.linalg.solve(x.T @ x / SCALE**2 + precision * torch.eye(4, dtype=torch.double), x.T @ y / SCALE**2)
        likelihood = torch.distributions.Normal(x @ mode, SCALE).log_prob(y).sum()
        found = likelihood + evidence(values, mode.square().sum()[None].float(), precision)
        marginal = torch.distributions.MultivariateNormal(
            torch.zeros(9, dtype=torch.double), x @ x.T / precision + SCALE**2 * torch.eye(9, dtype=torch.double)
        )
        torch.testing.assert_close(found[0].double(), marginal.log_prob(y), rtol=1e-4, atol=1e-3)
    # For given weights the best of the grid is, but for its spacing, where the formula's slope changes sign.
    square = torch.tensor([0.7])
    best = float(best_precision(values, square))
    effective = float((values / (values + best)).sum())
    assert best == pytest.approx(effective / 0.7, rel=0.35)  # δ ‖w‖² = the number of well-determined weights


def test_bayesian_logistic_regression_at_its_mode():
    # Two classes, inputs ±x, at the mode: every example then has the same p, and (Σ p (1 − p) x xᵀ + δ)⁻¹ is exact.
    precision, x = 1.5, torch.tensor([1.0, -0.5, 2.0, 0.3])
    model = Model.of(linear_pair(), Categorical(2), torch.zeros(2, 4), "all")
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    y = (signs < 0).long()
    slope = 0.0  # by symmetry the mode is w = ±t x for the two classes
    for _ in range(200):
        p = 1 / (1 + math.exp(2 * slope * float(x @ x)))
        slope = slope - 0.05 * (precision * slope - 6 * p)
    weights = model.layout.flatten({"weight": torch.stack([slope * x, -slope * x])})[None]
    batch = Batch((signs[:, None] * x)[None], y[None], torch.ones(1, 6), torch.tensor([6.0]), scenarios.keys(1))
    _, gradient = model.gradient(weights, batch.x, batch.y, batch.mask, batch.key)
    torch.testing.assert_close(gradient, -precision * weights, rtol=1e-3, atol=1e-4)  # it is the mode
    found = laplace(model, weights, measured(model, weights, batch), precision)
    outer = 6 * p * (1 - p) * torch.outer(x, x)
    # w₁ − w₂ has the posterior of logistic regression with prior variance 2/δ.
    exact = torch.linalg.inv(outer + precision / 2 * torch.eye(4))
    both = covariance(found).view(2, 4, 2, 4)
    difference = both[0, :, 0] + both[1, :, 1] - both[0, :, 1] - both[1, :, 0]
    torch.testing.assert_close(difference, exact, rtol=1e-3, atol=1e-4)


def linear_pair():
    return scenarios.seeded(lambda: nn.Linear(4, 2, bias=False))


# --- as an option of methods ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FedAvg, FedAvgFT, LocalOnly, FedPer, LGFedAvg, FedRep, FedBABU])
def test_every_method_measures_the_curvature_last_and_uses_its_own_weights(kind):
    method = kind(laplace=True)
    method.check()
    for phases in (method.tuning(3), method.adaptation(3)):
        assert (phases[-1].name, phases[-1].epochs) == (CURVATURE, 1)
    assert len(method.adaptation(3)) == len(kind().adaptation(3)) + 1
    model = scenarios.model_of(deep(), personal=method.personal)
    initial, hparams = method.init(model), {"lr": torch.full((2,), 1e-2)}
    shared, batch = rows(initial.shared, 2), scenarios.random_batch(2, 5, used=[5, 3])
    local = method.begin(model, shared, rows(initial.personal, 2), hparams)
    for phase in method.tuning(1):
        local, _ = method.step(model, local, batch, hparams, phase.name)
    personal = method.finish(model, local, hparams).personal
    found = method.predictive(model, shared, personal)
    assert torch.equal(found.weights, local.weights)
    torch.testing.assert_close(personal.curvature[0], measured(model, local.weights, batch))
    assert (found.draw(scenarios.keys(2), 0) != found.weights).any()
    again = method.begin(model, shared, personal, hparams)  # the next one does not add to the last
    assert not any(t.any() for t in again.curvature[0])


def test_a_client_without_a_measured_example_keeps_its_point():
    method = FedPer(laplace=True)
    model = scenarios.model_of(deep())
    initial = method.init(model)
    found = method.predictive(model, rows(initial.shared, 2), rows(initial.personal, 2))
    assert torch.equal(found.draw(scenarios.keys(2), 0), model.initial.expand(2, -1))


def test_a_federation_measures_every_example_once():
    federation = scenarios.run(FedPer(laplace=True), rounds=1, batch=5)
    evaluation, _ = evaluate_clients(federation)
    assert evaluation is not None
    tuned = federation.tuned(torch.arange(len(federation)))
    assert torch.equal(tuned.curvature[0].examples[:, 0], federation.data.train.sizes.float())


class Follows(nn.Module):
    def __init__(self, after):
        super().__init__()
        self.body, self.head, self.after = nn.Linear(4, 5), nn.Linear(5, 3), after

    def forward(self, x):
        return self.after(self.head(torch.tanh(self.body(x))))


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(4, 3))

    def forward(self, x):
        return x @ self.matrix


@pytest.mark.parametrize(
    "module", [nn.Sequential(nn.Linear(4, 4), Product()), nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))]
)
def test_a_network_that_does_not_end_in_a_linear_layer_is_refused_before_training(module):
    with pytest.raises(UserError, match=r"ends in a linear layer.*set laplace = false"):
        FedPer(laplace=True).init(scenarios.model_of(module))
    FedPer().init(scenarios.model_of(module))


def test_what_follows_the_last_layer_may_reshape_it_and_nothing_else():
    batch = scenarios.random_batch(1, 5)
    plain, flat, bent = (
        scenarios.model_of(scenarios.seeded(lambda a=after: Follows(a)))
        for after in (nn.Identity(), nn.Flatten(), lambda out: F.log_softmax(out, -1))
    )
    weights = plain.initial[None]
    torch.testing.assert_close(measured(flat, weights, batch), measured(plain, weights, batch))
    with pytest.raises(UserError, match=r"something follows the layer of 'head\.weight'"):
        measured(bent, weights, batch)
