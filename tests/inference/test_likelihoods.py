"""Likelihoods against torch.distributions."""

import math

import pytest
import scenarios
import torch
from torch import nn

from bpfed._util.errors import UserError
from bpfed.inference.counts import NegativeBinomial, Poisson
from bpfed.inference.likelihoods import Categorical, Curved, Heteroscedastic, Normal
from bpfed.nn.model import Model


def test_categorical_is_the_cross_entropy_of_its_logits():
    g = scenarios.generator()
    logits, y = 5 * torch.randn(20, 4, generator=g), torch.randint(4, (20,), generator=g)
    found = Categorical(4).nll(logits, y, {})
    torch.testing.assert_close(found, -torch.distributions.Categorical(logits=logits).log_prob(y))


def test_categorical_stays_finite_where_the_logits_are_extreme():
    nll = Categorical(2).nll(torch.tensor([[1e4, -1e4], [-1e4, 1e4]]), torch.tensor([0, 0]), {})
    assert nll.tolist() == [0.0, 2e4]


@pytest.mark.parametrize("scale", [0.1, 1.0, 7.0])
@pytest.mark.parametrize("shape", [(20, 1), (20,)])
def test_normal_with_known_noise_is_the_normal_density(scale, shape):
    g = scenarios.generator()
    outputs, y = torch.randn(*shape, generator=g), torch.randn(20, generator=g)
    likelihood = Normal(scale, learnt=False)
    assert likelihood.parameters() == {}
    expected = -torch.distributions.Normal(outputs.reshape(20), scale).log_prob(y)
    torch.testing.assert_close(likelihood.nll(outputs, y, {}), expected, rtol=1e-5, atol=1e-5)


def test_normal_with_learnt_noise_starts_at_its_scale_and_follows_its_parameter():
    likelihood = Normal(0.3)
    ((name, log_scale),) = likelihood.parameters().items()
    assert math.exp(log_scale.item()) == pytest.approx(0.3)
    outputs, y = torch.randn(2, 9, generator=scenarios.generator())
    for scale in (0.3, 2.0):
        expected = -torch.distributions.Normal(outputs, scale).log_prob(y)
        found = likelihood.nll(outputs[:, None], y, {name: torch.tensor([math.log(scale)])})
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_gradient_in_the_learnt_noise_is_zero_at_the_root_mean_square_of_the_residuals():
    residual = torch.tensor([0.5, -1.0, 2.0])
    log_scale = residual.square().mean().sqrt().log().reshape(1).requires_grad_()
    Normal().nll(torch.zeros(3, 1), residual, {"likelihood.log_scale": log_scale}).sum().backward()
    assert abs(log_scale.grad.item()) < 1e-5


@pytest.mark.parametrize("personal", ["head", "all", "1.bias"])
def test_learnt_noise_is_a_personal_factor(personal):
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model = Model.of(module, Normal(0.5), torch.zeros(2, 3), personal)
    assert "likelihood.log_scale" in model.layout.personal_names
    assert "0.weight" not in model.layout.personal_names or personal == "all"
    parameters = model.layout.unflatten(model.initial)
    assert parameters["likelihood.log_scale"].item() == pytest.approx(math.log(0.5))
    for name, value in module.named_parameters():
        assert torch.equal(parameters[name], value)


def test_learnt_noise_is_shared_where_nothing_is_personal():
    model = Model.of(nn.Linear(3, 1), Normal(0.5), torch.zeros(2, 3), "none")
    assert model.layout.personal == 0
    assert "likelihood.log_scale" in model.layout.names


def test_known_noise_is_no_factor():
    model = Model.of(nn.Linear(3, 1), Normal(0.5, learnt=False), torch.zeros(2, 3))
    assert model.layout.total == 4


@pytest.mark.parametrize("shape", [(5, 2), (5,), (5, 4), (5, 3, 1)])
def test_outputs_that_do_not_fit_the_classes_are_one_sentence(shape):
    with pytest.raises(UserError, match=r"shape \[5.*\] for a batch of 5, but the data has 3 classes"):
        Categorical(3).check(torch.zeros(shape))
    Categorical(3).check(torch.zeros(5, 3))


@pytest.mark.parametrize("shape", [(5, 2), (5, 1, 1), (5, 0)])
def test_outputs_that_are_no_single_number_do_not_fit_a_regression(shape):
    with pytest.raises(UserError, match="one number per example"):
        Normal().check(torch.zeros(shape))
    Normal().check(torch.zeros(5, 1))
    Normal().check(torch.zeros(5))


def test_a_head_of_the_wrong_width_is_told_when_the_model_is_made():
    with pytest.raises(UserError, match="3 classes"):
        Model.of(nn.Linear(4, 7), Categorical(3), torch.zeros(2, 4))
    with pytest.raises(UserError, match="one number per example"):
        Model.of(nn.Linear(4, 7), Normal(), torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets"),
    [
        (Normal(0.3, learnt=False), [0.7], None),
        (Normal(0.3), [0.7], None),
        (Heteroscedastic(), [0.7, -1.0], None),
        (Poisson(), [1.2], torch.arange(60.0)),
        (NegativeBinomial(0.4), [1.2], torch.arange(400.0)),
    ],
    ids=["known noise", "learnt noise", "heteroscedastic", "Poisson", "negative binomial"],
)
def test_the_curvature_is_the_mean_second_derivative_by_the_output(likelihood, outputs, targets):
    level = torch.tensor(outputs, dtype=torch.float64)
    parameters = {name: value.double() for name, value in likelihood.parameters().items()}
    y = torch.tensor([-1.0, 2.0]).double() if targets is None else targets.double()

    def nll(output, target):
        return likelihood.nll(torch.cat([output[None], level[1:]])[None], target[None], parameters).sum()

    each = torch.stack([torch.func.grad(torch.func.grad(nll))(level[0], target) for target in y])
    p = torch.stack([torch.exp(-nll(level[0], target)) for target in y])
    assert isinstance(likelihood, Curved)
    # A Gaussian one is the same at every target; of counts it is the mean over all that may occur.
    torch.testing.assert_close(likelihood.curvature(level, parameters), (each * p / p.sum()).sum(), rtol=1e-5, atol=0)


def test_classes_have_no_curvature_of_their_own():
    assert not isinstance(Categorical(3), Curved)
