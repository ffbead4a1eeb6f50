"""The posterior predictive: probabilities, and where their uncertainty comes from."""

import math

import pytest
import scenarios
import torch
from torch import nn

import bpfed
from bpfed._util.errors import UserError
from bpfed.inference import predictive as predict
from bpfed.inference import rng
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.likelihoods import Normal
from bpfed.inference.predictive import GaussianPredictive, PointPredictive, classify, regress
from bpfed.nn.model import Model


def posterior(model, clients=3, sigma=0.5):
    mean = model.initial + 0.1 * torch.randn(clients, model.layout.total, generator=scenarios.generator())
    return GaussianPredictive(Gaussian(mean, torch.full_like(mean, sigma)))


def classified(draws=16, sigma=0.5, clients=3, examples=11, scale=1.0):
    model = scenarios.model_of(scenarios.small_mlp())
    x = scale * torch.randn(clients, examples, 4, generator=scenarios.generator(1))
    return classify(model, posterior(model, clients, sigma), x, scenarios.keys(clients), draws)


def test_probabilities_are_probabilities():
    found = classified()
    assert found.probs.shape == (3, 11, 3)
    assert (found.probs >= 0).all()
    torch.testing.assert_close(found.probs.sum(-1), torch.ones(3, 11))
    assert torch.equal(found.label, found.probs.argmax(-1))
    assert torch.equal(found.confidence, found.probs.max(-1).values)


def test_probabilities_are_the_mean_softmax_over_draws():
    model = scenarios.model_of(scenarios.small_mlp())
    predictive, x = posterior(model), torch.randn(3, 5, 4, generator=scenarios.generator(1))
    draws = [model.stacked_outputs(predictive.draw(scenarios.keys(3), m), x).softmax(-1) for m in range(8)]
    stacked = torch.stack(draws)
    found = classify(model, predictive, x, scenarios.keys(3), 8)
    torch.testing.assert_close(found.probs, stacked.mean(0))
    torch.testing.assert_close(found.entropy, torch.distributions.Categorical(stacked.mean(0)).entropy())
    torch.testing.assert_close(found.aleatoric, torch.distributions.Categorical(stacked).entropy().mean(0))


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_total_uncertainty_is_aleatoric_plus_epistemic_and_no_part_is_negative(scale):
    found = classified(scale=scale)
    assert (found.epistemic >= 0).all()
    assert (found.aleatoric >= 0).all()
    torch.testing.assert_close(found.aleatoric + found.epistemic, found.entropy, rtol=0, atol=1e-6)
    assert (found.entropy <= math.log(3) + 1e-6).all()


def test_surer_weights_are_less_epistemic():
    assert classified(sigma=0.05).epistemic.mean() < 0.2 * classified(sigma=0.8).epistemic.mean()


@pytest.mark.parametrize("draws", [1, 7])
def test_a_point_has_no_epistemic_uncertainty(draws):
    model = scenarios.model_of(scenarios.small_mlp())
    x = torch.randn(2, 9, 4, generator=scenarios.generator())
    weights = model.initial.expand(2, -1)
    dirac = GaussianPredictive(Gaussian(weights, torch.zeros_like(weights)))
    expected = model.stacked_outputs(weights, x).softmax(-1)
    for predictive in (dirac, PointPredictive(weights)):
        found = classify(model, predictive, x, scenarios.keys(2), draws)
        torch.testing.assert_close(found.probs, expected)
        assert found.epistemic.max() < 1e-6


def test_a_point_is_not_drawn_more_than_once():
    assert PointPredictive(torch.zeros(1, 2)).draws(20) == 1


def test_draws_have_the_posteriors_mean_and_sigma_and_differ_between_clients():
    predictive = GaussianPredictive(Gaussian(torch.full((2, 20_000), 3.0), torch.full((2, 20_000), 0.2)))
    first, second = (predictive.draw(scenarios.keys(2), m) for m in range(2))
    assert first.mean().item() == pytest.approx(3.0, abs=0.01)
    assert first.std().item() == pytest.approx(0.2, rel=0.02)
    for a, b in ((first, second), (first[0], first[1])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.04
    assert torch.equal(first, predictive.draw(scenarios.keys(2), 0))


@pytest.mark.parametrize("budget", [1, 2_000, 10**9])
def test_stacked_draws_are_the_draws_one_by_one(budget, monkeypatch):
    model = scenarios.model_of(scenarios.small_mlp())
    predictive, x, key = posterior(model), torch.randn(3, 5, 4, generator=scenarios.generator(1)), scenarios.keys(3)
    loop = torch.stack([model.stacked_outputs(predictive.draw(key, m), x) for m in range(7)])
    monkeypatch.setattr(predict, "STACKED", {"cpu": budget})
    found = classify(model, predictive, x, key, 7)
    torch.testing.assert_close(found.probs, loop.softmax(-1).mean(0))
    torch.testing.assert_close(found.aleatoric, torch.distributions.Categorical(logits=loop).entropy().mean(0))
    regression = line(Normal(0.4))
    q, x, y = posterior(regression), x[..., :2], x[..., 3]
    loop = torch.stack([regression.stacked_outputs(q.draw(key, m), x)[..., 0] for m in range(7)])
    several = regress(regression, q, x, key, 7, y)
    torch.testing.assert_close(several.mean, loop.mean(0))
    torch.testing.assert_close(several.epistemic, loop.var(0, correction=0))
    scales = torch.stack([q.draw(key, m)[:, -1:].exp() for m in range(7)])
    density = torch.distributions.Normal(loop, scales).log_prob(y)
    torch.testing.assert_close(several.nll, math.log(7) - density.logsumexp(0))


def test_one_draw_is_one_function_for_all_examples():
    # The same input twice in a batch has the same probabilities: the draw is of weights, not of outputs.
    model = scenarios.model_of(scenarios.small_mlp())
    x = torch.randn(1, 1, 4, generator=scenarios.generator()).expand(1, 6, 4)
    probs = classify(model, posterior(model, 1), x, scenarios.keys(1), 1).probs
    torch.testing.assert_close(probs, probs[:, :1].expand_as(probs))


# --- regression -------------------------------------------------------------------------------------------------------


def line(likelihood, personal="head"):
    return Model.of(scenarios.seeded(lambda: nn.Linear(2, 1)), likelihood, torch.zeros(2, 2), personal)


def test_a_linear_models_predictive_has_its_closed_form():
    model = line(Normal(0.4, learnt=False))
    weights = Gaussian(torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([[0.3, 0.1, 0.2]]))
    x, y = torch.tensor([[[1.0, 2.0], [0.0, 0.0], [-3.0, 1.0]]]), torch.tensor([[-2.0, 1.0, -4.0]])
    design = torch.cat([x[0], torch.ones(3, 1)], 1)
    mean, variance = design @ weights.mean[0], design.square() @ weights.sigma[0].square()
    rows = GaussianPredictive(Gaussian(*(t.expand(16, -1) for t in weights)))
    found = regress(model, rows, x.expand(16, -1, -1), scenarios.keys(16), 300, y.expand(16, -1))
    torch.testing.assert_close(found.mean.mean(0), mean, rtol=0, atol=0.08)
    torch.testing.assert_close(found.epistemic.mean(0), variance, rtol=0.1, atol=0)
    torch.testing.assert_close(found.aleatoric, torch.full((16, 3), 0.16))
    torch.testing.assert_close(found.scale.mean(0), (variance + 0.16).sqrt(), rtol=0.05, atol=0)
    expected = -torch.distributions.Normal(mean, (variance + 0.16).sqrt()).log_prob(y[0])
    torch.testing.assert_close(found.nll.mean(0), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("how", ["sample", "single-pass"])
def test_a_calibration_temperature_stretches_the_predictive_around_its_mean(how):
    model, key, scale_factor = line(Normal(0.4)), scenarios.keys(1), 3.0
    q, at = posterior(model, 1), torch.linspace(-40, 40, 20_001)
    x = torch.tensor([[[1.0, -0.5]]]).expand(1, len(at), 2)
    plain, soft = (regress(model, q, x, key, 5, at[None], how, s) for s in (1.0, scale_factor))
    density = (-soft.nll[0].double()).exp()
    assert torch.trapezoid(density, at).item() == pytest.approx(1.0, abs=1e-3)
    mean = torch.trapezoid(density * at, at).item()
    assert mean == pytest.approx(plain.mean[0, 0].item(), abs=1e-3)
    variance = torch.trapezoid(density * (at - mean) ** 2, at).item()
    assert variance == pytest.approx(scale_factor**2 * plain.scale[0, 0].square().item(), rel=1e-3)
    torch.testing.assert_close(soft.scale, scale_factor * plain.scale)


def test_a_point_regression_is_the_likelihood_itself():
    model = line(Normal(0.4, learnt=False))
    x, y = torch.randn(2, 5, 2, generator=scenarios.generator()), torch.randn(2, 5, generator=scenarios.generator(1))
    weights = torch.randn(2, 3, generator=scenarios.generator(2))
    found = regress(model, PointPredictive(weights), x, scenarios.keys(2), 9, y)
    assert (found.epistemic == 0).all()
    torch.testing.assert_close(found.nll, -torch.distributions.Normal(found.mean, 0.4).log_prob(y))


def test_learnt_noise_is_each_clients_own_and_averaged_over_draws():
    model = line(Normal(1.0))
    assert model.layout.names[-1] == "likelihood.log_scale"
    weights = torch.zeros(2, 4)
    weights[:, 3] = torch.tensor([math.log(0.1), math.log(2.0)])
    point = regress(model, PointPredictive(weights), torch.zeros(2, 3, 2), scenarios.keys(2), 1)
    torch.testing.assert_close(point.aleatoric, torch.tensor([[0.01], [4.0]]).expand(2, 3))
    assert point.nll is None
    sigma = torch.zeros(2, 4)
    sigma[:, 3] = 0.3
    rows = GaussianPredictive(Gaussian(weights.repeat(16, 1), sigma.repeat(16, 1)))
    found = regress(model, rows, torch.zeros(32, 3, 2), scenarios.keys(32), 200)
    expected = torch.tensor([[0.01], [4.0]]) * math.exp(2 * 0.3**2)  # the mean of a log-normal
    torch.testing.assert_close(found.aleatoric.reshape(16, 2, 3).mean(0), expected.expand(2, 3), rtol=0.05, atol=0)


def test_predictions_depend_on_the_key():
    model = line(Normal())
    x, q = torch.ones(1, 1, 2), posterior(model, 1)
    key = scenarios.keys(1)
    first, second = (regress(model, q, x, k, 3).mean for k in (key, rng.fold(key, 1)))
    assert first != second


# --- a client's own ---------------------------------------------------------------------------------------------------


def test_a_client_predicts_in_either_way_and_in_blocks(monkeypatch):
    data = scenarios.classification()
    run = bpfed.fit(data=data, rounds=2, epochs=2, eval_draws=200, compile="off", tf32=False, progress=False)
    x, client = data.test.x[:9], run.clients()[2]
    sample, single = client.predict(x), client.predict(x, how="single-pass")
    assert sample.scores is None
    assert (sample.probs - single.probs).abs().mean() < 0.01
    torch.testing.assert_close(sample.epistemic, single.epistemic, rtol=0, atol=0.03)
    monkeypatch.setattr("bpfed.runs.client.BLOCK", 8)
    torch.testing.assert_close(client.predict(x).probs, sample.probs)
    torch.testing.assert_close(client.predict(x, how="single-pass").probs, single.probs, rtol=0, atol=1e-6)
    assert client.predict(x[:0]).probs.shape == (0, 3)
    with pytest.raises(UserError, match="single-pass"):
        client.predict(x, how="singlepass")
