"""bpfed-linear: closed forms, NUTS, what clients and servers exchange, and what it refuses."""

import json
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import scenarios
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks import nuts
from bpfed import fit
from bpfed._util.errors import UserError
from bpfed.config.settings import Settings
from bpfed.data.federated import Examples, FederatedData
from bpfed.engine.simulator import Simulator
from bpfed.inference.likelihoods import Categorical, Normal
from bpfed.inference.predictive import classify, gaussian_softmax, moments, regress
from bpfed.methods import Linear
from bpfed.methods.base import rows
from bpfed.methods.linear import MOST, Form, Natural
from bpfed.nn.model import Model
from bpfed.nn.networks import linear

pytestmark = pytest.mark.usefixtures("untraced")

QUIET = {"progress": False, "device": "cpu", "baselines": "off", "compile": "off"}


class Fitted:
    """The posterior of a run: means and covariances of θ and of each client's coefficients, the intercept last."""

    def __init__(self, federation):
        self.federation, method, count = federation, federation.method, len(federation)
        numbers = method.hparam_rows(count)
        personal = federation.personal(torch.arange(count))
        local = method.begin(federation.model, rows(federation.shared, count), personal, numbers)
        mean, spread = local.server.moments()
        self.theta, self.theta_covariance = mean[0], (spread @ spread.mT)[0]
        self.mean, spread = local.posterior().moments()
        self.covariance = spread @ spread.mT
        self.deviation, self.noise = federation.shared.deviation.double(), float(federation.shared.noise)


def trained(method, data, rounds=2, likelihood=None, **settings):
    """A run's posterior; one pass over the rows in a round, unless said otherwise."""
    chosen = {"rounds": rounds, "epochs": 1, "eval_every": rounds, "eval_draws": 1} | QUIET | settings
    return Fitted(fit(method, data, likelihood=likelihood, **chosen).federation)


def with_ones(x):
    return torch.cat([x, torch.ones(len(x), 1)], -1).double()


def joint(data, deviation, noise, prior_scale):
    """θ and all w_i of the linear-Gaussian model at once, by its whole precision matrix: mean and covariance."""
    count, width = len(data), data.train.x.shape[1] + 1
    within = torch.eye(width, dtype=torch.float64) / deviation**2
    precision = torch.zeros((count + 1) * width, (count + 1) * width, dtype=torch.float64)
    shift = torch.zeros(len(precision), dtype=torch.float64)
    precision[:width, :width] = torch.eye(width) / prior_scale**2 + count * within
    for i in range(count):
        own = slice((i + 1) * width, (i + 2) * width)
        x, y = data.train.client(i)
        x = with_ones(x)
        precision[own, own] = within + x.T @ x / noise**2
        precision[:width, own] = precision[own, :width] = -within
        shift[own] = x.T @ y.double() / noise**2
    covariance = torch.linalg.inv(precision)
    return covariance @ shift, covariance


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deviation", [0.05, 0.5, 5.0])
@pytest.mark.parametrize("batch", [4, 50])
def test_the_hierarchical_posterior_with_known_scales_is_the_closed_form(deviation, batch):
    data = scenarios.regression(sizes=(12, 7, 20, 2, 1))
    found = trained(Linear(deviation=deviation, learn=False), data, 2, Normal(0.4), batch=batch)
    mean, covariance = joint(data, deviation, 0.4, 3.0)
    width = len(found.theta)
    torch.testing.assert_close(found.theta, mean[:width], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.theta_covariance, covariance[:width, :width], atol=1e-4, rtol=1e-4)
    for i in range(len(data)):
        own = slice((i + 1) * width, (i + 2) * width)
        torch.testing.assert_close(found.mean[i], mean[own], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.covariance[i], covariance[own, own], atol=1e-4, rtol=1e-4)


def test_without_deviations_it_is_the_posterior_of_all_rows_together():
    data = scenarios.regression(sizes=(12, 7, 20))
    found = trained(Linear(deviation=1e-4, learn=False), data, 1, Normal(0.4))
    x, y = with_ones(data.train.x), data.train.y.double()
    covariance = torch.linalg.inv(x.T @ x / 0.4**2 + torch.eye(4) / 9.0)
    for i in range(3):
        torch.testing.assert_close(found.mean[i], covariance @ x.T @ y / 0.4**2, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.covariance[i], covariance, atol=1e-4, rtol=1e-4)


def test_one_round_is_enough_for_numbers_with_known_scales():
    data = scenarios.regression()
    one, many = (trained(Linear(learn=False), data, rounds) for rounds in (1, 6))
    torch.testing.assert_close(one.mean, many.mean, atol=1e-5, rtol=1e-5)


def test_the_noise_and_the_deviations_maximise_what_the_rows_say_of_them():
    """τ and σ against a search in the marginal likelihood of all rows, with the prior of log τ."""
    data = scenarios.regression(sizes=(15, 12, 20, 9, 14, 11), features=2)
    found = trained(Linear(), data, 150)

    def evidence(log_tau, log_sigma):
        parts = [with_ones(data.train.client(i)[0]) for i in range(len(data))]
        x, y = torch.cat(parts), data.train.y.double()
        covariance = torch.block_diag(*(p @ torch.diag(torch.exp(2 * log_tau)) @ p.T for p in parts))
        covariance = covariance + 9.0 * x @ x.T + torch.exp(2 * log_sigma) * torch.eye(len(y))
        normal = torch.distributions.MultivariateNormal(torch.zeros(len(y), dtype=torch.float64), covariance)
        return normal.log_prob(y) + (log_tau - 0.5 * torch.exp(2 * log_tau)).sum()

    at = [found.deviation.log(), torch.tensor(found.noise).double().log()]
    slopes = torch.autograd.functional.jacobian(evidence, tuple(at))
    curved = torch.autograd.functional.hessian(evidence, tuple(at))
    assert (slopes[0].abs() < 0.02).all()
    assert abs(slopes[1]) < 0.02
    assert (curved[0][0].diagonal() < 0).all()


def test_logistic_regression_of_one_variable_is_the_best_gaussian():
    """Without deviations, against the maximum of the evidence lower bound by a general optimiser."""
    g = scenarios.generator(3)
    x = torch.randn(40, 1, generator=g)
    y = (torch.rand(40, generator=g) < torch.sigmoid(1.5 * x[:, 0] - 0.5)).long()
    examples = Examples.of([(x[:25], y[:25]), (x[25:], y[25:])])
    data = FederatedData("one", ("a", "b"), examples, examples, "classification", 2)
    found = trained(Linear(deviation=1e-3, learn=False), data, 25, epochs=3)

    points, shares = np.polynomial.hermite_e.hermegauss(40)
    points, shares = torch.from_numpy(points), torch.from_numpy(shares / shares.sum())
    rows_ = with_ones(x)
    mean = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    root = torch.eye(2, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([mean, root], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def loss():
        optimiser.zero_grad()
        lower = root.tril()
        eta = (rows_ @ mean)[:, None] + (rows_ @ lower).norm(dim=1)[:, None] * points
        logit = torch.where(y[:, None] > 0, 1.0, -1.0) * 2**0.5 * eta  # two classes are ± 1/√2 in contrasts
        fit_ = (torch.nn.functional.logsigmoid(logit) @ shares).sum()
        divergence = 0.5 * (lower.square().sum() + mean.square().sum()) / 9.0 - lower.diagonal().abs().log().sum()
        (divergence - fit_).backward()
        return divergence - fit_

    optimiser.step(loss)
    torch.testing.assert_close(found.theta, mean.detach(), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(found.theta_covariance, (root.tril() @ root.tril().T).detach(), atol=2e-3, rtol=5e-3)


def test_a_factor_is_widened_as_its_covariance_is():
    g = scenarios.generator()
    root = torch.randn(4, 4, generator=g).double()
    covariance, mean, tau = root @ root.T + 0.1 * torch.eye(4), root[0], torch.tensor([0.1, 1.0, 3.0, 1e-4]).double()
    precision = torch.linalg.inv(covariance)
    wide = Natural(precision, precision @ mean).widened(tau)
    wanted = torch.linalg.inv(covariance + torch.diag(tau**2))
    torch.testing.assert_close(wide.precision, wanted)
    torch.testing.assert_close(wide.shift, wanted @ mean)


def test_two_classes_do_not_depend_on_which_is_first():
    data = scenarios.classification(classes=2)
    turned = replace(
        data, **{part: replace(getattr(data, part), y=1 - getattr(data, part).y) for part in ("train", "test")}
    )
    first, second = (trained(Linear(), d, 5) for d in (data, turned))
    torch.testing.assert_close(first.mean, -second.mean, atol=1e-4, rtol=1e-4)


# --- NUTS -------------------------------------------------------------------------------------------------------------

RECORD = json.loads(nuts.RECORD.read_text())
#: Of each problem: how far the mean of a client's coefficient may be off at most, in standard deviations. The scales are
#: points here, and NUTS averages over them: coefficients that few rows determine follow the scale.
FURTHEST = {"radon": 0.3, "hsb82": 0.3, "contraception": 0.35, "three": 0.35, "few": 0.3}


def federated(problem):
    y = torch.from_numpy(problem.y) if problem.classes else torch.from_numpy(problem.y).float()
    x, who = torch.from_numpy(problem.x).float(), torch.from_numpy(problem.who)
    count = int(who.max()) + 1
    examples = Examples.of([(x[who == i], y[who == i]) for i in range(count)])
    task = "classification" if problem.classes else "regression"
    return FederatedData("problem", tuple(f"c{i}" for i in range(count)), examples, examples, task, problem.classes)


def intercept_first(values, inputs):
    apart = values.unflatten(-1, (-1, inputs))
    return torch.cat([apart[..., -1:], apart[..., :-1]], -1).numpy()


@pytest.mark.parametrize("name", nuts.PROBLEMS)
def test_posteriors_agree_with_nuts(name):
    try:
        problem = nuts.PROBLEMS[name]()
    except FileNotFoundError:
        pytest.skip("needs the tables: name the folder that they are in by BPFED_DATA")
    wanted = RECORD[name]
    assert wanted["digest"] == problem.digest
    assert wanted["divergences"] == 0
    found = trained(Linear(), federated(problem), 25, epochs=3)
    inputs = problem.x.shape[1] + 1

    mean, sd = (np.array(wanted["theta"][key]) for key in ("mean", "sd"))
    own = intercept_first(found.theta_covariance.diagonal().sqrt(), inputs)
    assert np.abs((intercept_first(found.theta, inputs) - mean) / sd).max() < 0.1
    # With five clients what is not known of τ widens θ by a fifth; with 30 and more it does not matter.
    assert np.abs(own / sd - 1.0).max() < (0.25 if name == "few" else 0.06)

    mean, sd = (np.array(wanted["coefficients"][key]) for key in ("mean", "sd"))
    off = np.abs(intercept_first(found.mean, inputs) - mean) / sd
    width = intercept_first(found.covariance.diagonal(dim1=-2, dim2=-1).sqrt(), inputs) / sd
    assert off.mean() < 0.08
    assert off.max() < FURTHEST[name]
    assert (off < 0.1).mean() > 0.75
    assert abs(width.mean() - 1.0) < 0.05
    assert (np.abs(width - 1.0) < 0.15).mean() > 0.95

    tau, sd = (np.array(wanted["tau"][key]) for key in ("mean", "sd"))
    assert np.abs((intercept_first(found.deviation, inputs)[0] - tau) / sd).max() < 0.6
    if not problem.classes:
        assert abs(found.noise - wanted["sigma"]["mean"]) < 0.3 * wanted["sigma"]["sd"]


# --- exchange ---------------------------------------------------------------------------------------------------------


def same(first, second, atol=1e-4):
    for name in ("theta", "theta_covariance", "mean", "covariance", "deviation"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), atol=atol, rtol=1e-3)


@pytest.mark.parametrize("data", [scenarios.regression(sizes=(9, 7, 12, 5, 8, 6)), scenarios.classification(classes=2)])
def test_clients_that_take_turns_come_to_the_same_posterior(data):
    together, in_turns = (
        trained(Linear(learn=False), data, rounds, epochs=3, participants=participants)
        for rounds, participants in ((50, None), (120, 2))
    )
    same(together, in_turns, atol=2e-3)


def test_clients_that_fail_to_return_count_with_what_they_told_before():
    data = scenarios.regression(sizes=(9, 7, 12, 5, 8, 6))
    same(trained(Linear(learn=False), data, 3), trained(Linear(learn=False), data, 20, drop_rate=0.5))


@hypothesis_settings(max_examples=8)
@given(order=st.permutations(range(4)), batch=st.integers(1, 25), seed=st.integers(0, 3))
def test_neither_the_order_of_clients_nor_batches_matter(order, batch, seed):
    data = scenarios.regression(sizes=(9, 4, 12, 5), features=2, seed=seed)
    first = trained(Linear(), data, 4)
    second = trained(Linear(), scenarios.reordered(data, order), 4, batch=batch)
    for name in ("theta", "theta_covariance", "deviation"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), atol=1e-4, rtol=1e-3)
    for name in ("mean", "covariance"):
        torch.testing.assert_close(getattr(first, name)[list(order)], getattr(second, name), atol=1e-4, rtol=1e-3)


@hypothesis_settings(max_examples=6)
@given(copies=st.integers(2, 4), seed=st.integers(0, 3))
def test_a_federation_several_times_over_is_as_sure_of_what_is_shared_as_that_many_clients(copies, seed):
    """With known scales and hardly any prior, copies of all clients divide the covariance of θ."""
    data = scenarios.regression(sizes=(9, 4, 12), features=2, seed=seed)
    many = Examples.of([data.train.client(i) for _ in range(copies) for i in range(3)])
    names = tuple(f"{i} {k}" for k in range(copies) for i in range(3))
    again = FederatedData("copies", names, many, many, "regression")
    method = Linear(learn=False, prior_scale=100.0)
    one, several = trained(method, data, 2), trained(method, again, 2)
    torch.testing.assert_close(one.theta_covariance, copies * several.theta_covariance, atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(one.theta, several.theta, atol=1e-3, rtol=1e-2)


def test_rows_weigh_as_they_are_whatever_the_weights_of_uploads():
    data = scenarios.regression()
    same(trained(Linear(), data, 3), trained(Linear(), data, 3, weighting="size"), atol=0.0)


def test_uploads_of_clients_of_any_size_are_within_the_default_bounds_also_late_ones():
    g = scenarios.generator(1)
    parts = []
    for n in (1, 2, 3, 4, 2000, 3, 2, 400):
        x = torch.randn(n, 3, generator=g)
        parts.append((x, x.sum(-1) + 2.0 * torch.randn(1, generator=g) + 0.5 * torch.randn(n, generator=g)))
    examples = Examples.of(parts)
    data = FederatedData("sizes", tuple("abcdefgh"), examples, examples, "regression")
    federation = scenarios.start(Linear(), data, rounds=90, batch=500, participants=8)
    everyone, simulator = federation.participants, Simulator([federation])
    federation.participants = lambda round_: (
        everyone(round_) if round_ > 30 else torch.tensor([i for i in everyone(round_) if i not in (3, 7)])
    )
    for _ in range(90):
        assert simulator.round()[0].refused == {}
    same(Fitted(federation), trained(Linear(), data, 90, batch=500), atol=5e-3)


def test_a_converged_client_uploads_nothing_new_and_is_not_refused():
    federation = scenarios.run(Linear(learn=False), scenarios.regression(), rounds=6)
    everyone = torch.arange(len(federation))
    finished = scenarios.local_round(federation)(scenarios.rows_of(federation, everyone))
    assert all((leaf == 0.0).all() for leaf in tree_leaves(finished.upload))


@pytest.mark.parametrize("lie", [1e6, -1e6, float("nan")])
def test_a_message_that_no_rows_can_have_led_to_is_refused(lie):
    federation = scenarios.start(Linear(), scenarios.regression(sizes=(9, 8, 12, 5)))
    everyone = torch.arange(len(federation))
    finished = scenarios.local_round(federation)(scenarios.rows_of(federation, everyone))
    uploads = tree_map(torch.clone, finished.upload)
    uploads.added.factor.precision[2] *= lie
    assert list(federation.receive(everyone, uploads, finished.personal)) == ["site 2"]


def test_a_client_with_few_rows_uploads_nothing_and_still_learns():
    data = scenarios.regression(sizes=(12, 4, 20))
    federation = scenarios.start(Linear(least_rows=5), data)
    local, everyone = scenarios.local_round(federation), torch.arange(3)
    finished = local(scenarios.rows_of(federation, everyone))
    uploaded = [any((leaf[i] != 0.0).any() for leaf in tree_leaves(finished.upload)) for i in range(3)]
    assert uploaded == [True, False, True]
    assert (finished.personal.site.precision[1] != 0.0).any()
    without = replace(data, train=Examples.of([data.train.client(i) for i in (0, 2)]), clients=data.clients[::2])
    without = replace(without, test=data.test.select(torch.tensor([0, 2])))
    found, wanted = (trained(method, d, 3) for method, d in ((Linear(least_rows=5), data), (Linear(), without)))
    torch.testing.assert_close(found.theta, wanted.theta, atol=1e-4, rtol=1e-3)


def test_one_row_can_be_read_off_what_its_client_uploads():
    """What the module says of privacy: so `least_rows`."""
    x, y = torch.tensor([[0.5, -2.0, 1.0]]), torch.tensor([3.0])
    examples = Examples.of([(x, y), (x, y)])
    federation = scenarios.start(Linear(), FederatedData("two", ("a", "b"), examples, examples, "regression"))
    finished = scenarios.local_round(federation)(scenarios.rows_of(federation, torch.arange(2)))
    tau = federation.shared.deviation.double()
    seen = finished.upload.added.factor.precision[0].double() / torch.outer(tau, tau)
    direction = torch.linalg.eigh(seen).eigenvectors[:, -1]
    torch.testing.assert_close((direction / direction[-1])[:-1], x[0].double(), atol=1e-4, rtol=1e-4)


# --- prediction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [scenarios.regression(), scenarios.classification(), scenarios.classification(classes=2)]
)
def test_draws_have_the_moments_of_the_posterior(data):
    federation = scenarios.run(Linear(), data, rounds=3)
    count, method = len(data), federation.method
    predictive = method.predictive(
        federation.model, rows(federation.shared, count), federation.personal(torch.arange(count))
    )
    key = scenarios.keys(count)
    drawn = torch.stack([predictive.draw(key, i) for i in range(4000)])
    torch.testing.assert_close(drawn.mean(0), predictive.mean, atol=1e-5, rtol=1e-5)
    covariance = predictive.directions @ predictive.directions.mT
    found = torch.einsum("dsp,dsq->spq", drawn - predictive.mean, drawn - predictive.mean) / len(drawn)
    assert (found - covariance).abs().max() < 0.08 * covariance.abs().max()
    if data.task == "regression":
        log_noise = drawn[..., Form.of(federation.model).noise_at]
        torch.testing.assert_close(log_noise, federation.shared.noise.log().expand_as(log_noise))


def test_a_single_pass_is_what_many_draws_tend_to():
    for data in (scenarios.regression(), scenarios.classification()):
        federation = scenarios.run(Linear(), data, rounds=3)
        count = len(data)
        personal = federation.personal(torch.arange(count))
        predictive = federation.method.predictive(federation.model, rows(federation.shared, count), personal)
        x = torch.stack([data.test.client(i)[0] for i in range(count)])
        given_ = (federation.model, predictive, x, scenarios.keys(count), 4000)
        if data.task == "regression":
            many, once = regress(*given_), regress(*given_, how="single-pass")
            torch.testing.assert_close(once.mean, many.mean, atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(once.scale, many.scale, atol=0.01, rtol=0.02)
        else:
            many, once = classify(*given_), classify(*given_, how="single-pass")
            torch.testing.assert_close(once.probs, many.probs, atol=0.02, rtol=0.1)
            assert moments(federation.model, predictive, x).covariance.shape == (count, x.shape[1], 3, 3)
            assert gaussian_softmax(moments(federation.model, predictive, x))[0].shape == once.probs.shape


def test_a_newcomer_has_the_posterior_of_a_client_whose_rows_the_server_never_saw():
    data = scenarios.regression(sizes=(12, 9, 20, 8))
    run = fit(Linear(learn=False), data, likelihood=Normal(0.4), rounds=2, eval_every=2, eval_draws=1, **QUIET)
    x, y = scenarios.regression(sizes=(6,), seed=5).train.client(0)
    client = run.adapt(x.numpy(), y.numpy())
    own = client.run.federation
    predictive = own.method.predictive(own.model, rows(own.shared, 1), own.personal(torch.tensor([0])))
    mean, covariance = joint(data, 0.3, 0.4, 3.0)
    wide = torch.linalg.inv(covariance[:4, :4] + 0.09 * torch.eye(4))
    ones = with_ones(x)
    wanted = torch.linalg.solve(wide + ones.T @ ones / 0.16, wide @ mean[:4] + ones.T @ y.double() / 0.16)
    torch.testing.assert_close(predictive.mean[0, :4].double(), wanted, atol=1e-4, rtol=1e-4)
    nobody = run.adapt().run.federation
    prior = nobody.method.predictive(nobody.model, rows(nobody.shared, 1), nobody.personal(torch.tensor([0])))
    torch.testing.assert_close(prior.mean[0, :4].double(), mean[:4], atol=1e-4, rtol=1e-4)
    wide = (prior.directions @ prior.directions.mT)[0, :4, :4].double()
    torch.testing.assert_close(wide, covariance[:4, :4] + 0.09 * torch.eye(4), atol=1e-4, rtol=1e-4)


# --- what it refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": 0.0}, "lr is 0.0, but must be above 0 and at most 1"),
        ({"prior_scale": 0.0}, "prior_scale is 0.0"),
        ({"deviation": 0.0}, "deviation is 0.0"),
        ({"least_rows": 0}, "least_rows is 0"),
        ({"deviations": "some"}, "deviations"),
        ({"personal": "head"}, "every coefficient has a shared part"),
    ],
)
def test_wrong_settings_are_one_sentence(changes, words):
    with pytest.raises(UserError, match=words):
        Linear(**changes).check()


@pytest.mark.parametrize(
    "module",
    [
        scenarios.small_mlp(),
        nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)),
    ],
)
def test_another_network_is_refused(module):
    with pytest.raises(UserError, match="bpfed-linear is for a network that is one linear layer"):
        Linear().init(scenarios.model_of(module, personal="none"))


def test_too_many_coefficients_are_refused():
    with pytest.raises(UserError, match=f"up to {MOST} coefficients, but 301 inputs"):
        Linear().init(Model.of(linear(300, 4), Categorical(4), torch.zeros(2, 300), "none"))


@pytest.mark.parametrize("settings", [{"robust": "median"}, {"robust": "trimmed:0.2"}, {"compression": "half"}])
def test_rules_that_add_nothing_up_are_refused(settings):
    with pytest.raises(UserError, match="adds up what clients change"):
        scenarios.start(Linear(), **settings)


@pytest.mark.parametrize("settings", [{"clip": 1.0}, {"members": 2}])
def test_what_does_not_go_with_it_is_refused(settings):
    with pytest.raises(UserError):
        fit(Linear(), scenarios.regression(), rounds=1, **settings, **QUIET)


def test_the_network_and_who_takes_part_follow_the_method_where_nothing_is_said():
    data = scenarios.regression(sizes=(3,) * 14)
    run = fit(Linear(), data, rounds=1, **QUIET)
    assert (run.federation.settings.network, run.federation.settings.participants) == ("linear", 14)
    said = fit(Linear(), data, rounds=1, network="linear", participants=3, **QUIET)
    assert said.federation.settings == replace(run.federation.settings, participants=3)
    own = fit(Linear(), data, model=linear(3, 1), rounds=1, **QUIET)
    torch.testing.assert_close(own.federation.shared.shift, run.federation.shared.shift)
    with pytest.raises(UserError, match="one linear layer"):
        fit(Linear(), data, rounds=1, network="mlp", **QUIET)
    assert Settings().network == "auto"


def test_separable_classes_and_extreme_inputs_end_well():
    g = scenarios.generator(4)
    parts = []
    for n in (30, 30, 2):
        x = 10.0 * torch.randn(n, 4, generator=g)
        parts.append((x, (x[:, 0] + 0.3 * x[:, 1] > 0).long()))
    examples = Examples.of(parts)
    data = FederatedData("apart", ("a", "b", "c"), examples, examples, "classification", 2)
    run = fit(Linear(), data, rounds=30, eval_every=30, **QUIET)
    assert run.history[-1]["accuracy"]["pooled"] == 1.0
    assert run.history[-1]["nll"]["pooled"] < 0.1


def test_inputs_that_repeat_each_other_do_no_harm():
    data = scenarios.regression(sizes=(60, 70, 80), test=40)
    parts = {name: getattr(data, name) for name in ("train", "test")}
    twice = {name: replace(part, x=torch.cat([part.x, part.x], 1)) for name, part in parts.items()}
    one, two = (
        fit(Linear(), d, rounds=10, eval_every=10, eval_draws=200, **QUIET) for d in (data, replace(data, **twice))
    )
    assert two.history[-1]["nll"]["pooled"] == pytest.approx(one.history[-1]["nll"]["pooled"], abs=0.02)


def test_tables_of_many_clients_take_few_rounds():
    """160 clients with a handful of rows each."""
    data = scenarios.regression(sizes=tuple(5 + i % 7 for i in range(160)), features=4)
    short, long = (trained(Linear(), data, rounds) for rounds in (12, 60))
    assert ((short.theta - long.theta).abs() < 0.1 * long.theta_covariance.diagonal().sqrt()).all()
    torch.testing.assert_close(short.deviation, long.deviation, atol=0.02, rtol=0.1)
