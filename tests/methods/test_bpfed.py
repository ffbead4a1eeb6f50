"""BPFed against plain autograd, against conjugate posteriors, and in its special cases."""

import math

import pytest
import scenarios
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

from bpfed._util.errors import UserError
from bpfed.config.settings import Settings
from bpfed.data.federated import Examples, FederatedData
from bpfed.engine.federation import Federation
from bpfed.engine.simulator import Simulator
from bpfed.inference import likelihoods, rng
from bpfed.inference.gaussian import Gaussian, softplus
from bpfed.methods import BPFed, FedAvg
from bpfed.methods.base import rows

CLIENTS, SIZE = 2, 35.0


def batches(steps, count=CLIENTS):
    """Full and ragged batches in turn."""
    return [
        scenarios.random_batch(count, 5, seed=t, used=[5, 3] if t % 2 else [4, 5], size=SIZE)._replace(
            key=rng.fold(scenarios.keys(count), t)
        )
        for t in range(steps)
    ]


def begun(method, model, count=CLIENTS):
    initial = method.init(model)
    return method.begin(
        model, rows(initial.shared, count), rows(initial.personal, count), scenarios.hparams(method, count)
    )


def trained(method, model, steps):
    local = begun(method, model)
    for batch in batches(steps):
        local, _ = method.step(model, local, batch, scenarios.hparams(method, CLIENTS), "all")
    return local


# --- Eq. 9 and 10 -----------------------------------------------------------------------------------------------------


def by_hand(method, model, client, steps):
    """One client's local steps in float64, as the paper writes them: torch.distributions, autograd, torch.optim."""
    module = scenarios.smooth().double()
    mean, sigma = model.initial.double(), torch.full_like(model.initial, method.sigma).double()
    precision = method.discount / sigma**2 + (1 - method.discount) / method.prior_sigma**2
    q = [mean.clone().requires_grad_(), torch.log(torch.expm1(sigma)).requires_grad_()]
    p = [mean.clone().requires_grad_(), torch.log(torch.expm1(precision**-0.5)).requires_grad_()]
    on_q, on_p = torch.optim.Adam(q, lr=method.lr), torch.optim.Adam(p, lr=method.lr)

    def normal(parameters, held):
        mean, rho = (t.detach() if held else t for t in parameters)
        return Normal(mean, F.softplus(rho))

    for batch in batches(steps):
        used = batch.mask[client].bool()
        x, y = batch.x[client, used].double(), batch.y[client, used]
        on_q.zero_grad()
        data = 0.0
        for m in range(method.draws):
            key = batch.key[client] if m == 0 else rng.fold(batch.key[client], m)
            eps = rng.normal(key, len(mean)).double()
            w = q[0] + F.softplus(q[1]) * eps
            out = functional_call(module, model.layout.unflatten(w), (x,))
            data = data - SIZE / len(y) / method.draws * torch.distributions.Categorical(logits=out).log_prob(y).sum()
        loss = data + method.temperature * kl_divergence(normal(q, held=False), normal(p, held=True)).sum()  # Eq. 9
        loss.backward()
        on_q.step()
        if method.prior_step:
            on_p.zero_grad()
            kl_divergence(normal(q, held=True), normal(p, held=False)).sum().backward()  # Eq. 10
            on_p.step()
    return [t.detach() for t in q], [t.detach() for t in p]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"draws": 3},
        {"temperature": 0.1, "lr": 5e-3},
        {"temperature": 0.0},
        {"temperature": 0.0, "prior_step": False},
        {"prior_step": False, "discount": 0.7, "prior_sigma": 0.2},
        {"discount": 0.5, "prior_sigma": 0.2, "sigma": 0.3},
    ],
    ids=str,
)
def test_local_steps_are_equations_9_and_10_done_by_hand(settings):
    method = BPFed(**settings)
    model = scenarios.model_of(scenarios.smooth())
    local = trained(method, model, steps=8)
    prior = local.prior.gaussian if method.prior_step else local.prior
    moved = 0.0
    for s in range(CLIENTS):
        q, p = by_hand(method, model, s, steps=8)
        for found, expected in (
            (local.q.mean[s], q[0]),
            (softplus(local.q.rho[s]), F.softplus(q[1])),
            (prior.mean[s], p[0]),
            (prior.sigma[s], F.softplus(p[1])),
        ):
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
        moved = max(moved, float((q[0] - model.initial).abs().max()))
    assert moved > 4 * method.lr  # the agreement is not that of two who stayed at home


# --- the parts of a round ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior_step", [True, False])
def test_a_round_begins_with_posterior_and_prior_at_personal_and_shared_factors(prior_step):
    method = BPFed(prior_step=prior_step)
    model = scenarios.model_of(scenarios.smooth())
    initial = method.init(model)
    g = scenarios.generator()
    shared = Gaussian(*(torch.rand(CLIENTS, model.layout.shared, generator=g) + 0.1 for _ in range(2)))
    eta = Gaussian(*(torch.rand(CLIENTS, model.layout.personal, generator=g) + 0.1 for _ in range(2)))
    personal = rows(initial.personal, CLIENTS)._replace(eta=eta)
    local = method.begin(model, shared, personal, scenarios.hparams(method, CLIENTS))
    q, prior = local.q.gaussian, local.prior.gaussian if prior_step else local.prior
    for mine in (q, prior):
        torch.testing.assert_close(mine.mean, torch.cat([shared.mean, eta.mean], -1), rtol=0, atol=0)
        torch.testing.assert_close(mine.sigma, torch.cat([shared.sigma, eta.sigma], -1))
    if prior_step:
        assert torch.equal(q.sigma, prior.sigma)


def test_with_the_prior_step_the_prior_is_uploaded_and_kept():
    method, model = BPFed(), scenarios.model_of(scenarios.smooth())
    local = trained(method, model, 4)
    finished = method.finish(model, local, scenarios.hparams(method, CLIENTS))
    shared, personal = model.layout.split(local.prior.gaussian.mean)
    torch.testing.assert_close(finished.upload.mean, shared)
    torch.testing.assert_close(finished.personal.eta.mean, personal)
    assert (local.prior.mean != local.q.mean).any()


def test_without_the_prior_step_the_prior_is_held_and_the_posterior_uploaded_and_kept():
    method, model = BPFed(prior_step=False), scenarios.model_of(scenarios.smooth())
    start, local = begun(method, model), trained(method, model, 4)
    assert torch.equal(local.prior.mean, start.prior.mean)
    assert torch.equal(local.prior.sigma, start.prior.sigma)
    finished = method.finish(model, local, scenarios.hparams(method, CLIENTS))
    q = local.q.gaussian
    for part in range(2):
        shared, personal = model.layout.split(q[part])
        torch.testing.assert_close(finished.upload[part], shared)
        torch.testing.assert_close(finished.personal.eta[part], personal)


def test_a_weight_that_no_data_sees_stays_at_its_prior():
    # Its gradient is zero but for rounding, of which Adam would make whole steps.
    method, model = BPFed(), scenarios.model_of(scenarios.smooth())
    local = begun(method, model)
    for batch in batches(20):
        x = batch.x.clone()
        x[..., 0] = 0.0
        local, _ = method.step(model, local, batch._replace(x=x), scenarios.hparams(method, CLIENTS), "all")
    unseen = model.layout.unflatten(torch.arange(model.layout.total))["0.weight"][:, 0]
    q = local.q.gaussian
    assert torch.equal(q.mean[:, unseen], model.initial[unseen].expand(CLIENTS, -1))
    torch.testing.assert_close(q.sigma[:, unseen], torch.full((CLIENTS, 5), method.sigma))


def test_a_client_predicts_with_its_own_posterior_or_with_the_aggregated_one_as_asked():
    model = scenarios.model_of(scenarios.smooth())
    for predict in ("own", "aggregated"):
        method = BPFed(predict=predict)
        local = trained(method, model, 3)
        finished = method.finish(model, local, scenarios.hparams(method, CLIENTS))
        server = Gaussian(*(t + 1.0 for t in finished.upload))
        found = method.predictive(model, server, finished.personal).weights
        expected = torch.cat([server.mean, finished.personal.eta.mean], -1)
        torch.testing.assert_close(found.mean, local.q.mean if predict == "own" else expected)


def test_adams_memory_is_kept_over_rounds_where_asked():
    # With one client and nothing random, two rounds of four steps are then one round of eight.
    def run(keep, split):
        method, model = BPFed.dirac(keep_adam=keep), scenarios.model_of(scenarios.smooth())
        numbers, initial = scenarios.hparams(method, CLIENTS), method.init(model)
        shared, personal = rows(initial.shared, CLIENTS), rows(initial.personal, CLIENTS)
        for part in (batches(8)[:split], batches(8)[split:]):
            local = method.begin(model, shared, personal, numbers)
            for batch in part:
                local, _ = method.step(model, local, batch, numbers, "all")
            shared, personal, _ = method.finish(model, local, numbers)
        return shared.mean

    torch.testing.assert_close(run(True, 4), run(True, 8), rtol=0, atol=1e-7)
    assert (run(False, 4) - run(False, 8)).abs().max() > 1e-4


@pytest.mark.parametrize(
    "settings", [{"sigma": 0.0}, {"sigma": 0.0, "temperature": 0.0}, {"sigma": 0.0, "prior_step": False}]
)
def test_a_point_with_a_kl_term_is_refused_in_one_sentence(settings):
    with pytest.raises(UserError, match="temperature = 0 and prior_step = false"):
        BPFed(**settings).check()
    BPFed.dirac().check()


@pytest.mark.parametrize(("setting", "near"), [({"rule": "means"}, "mean"), ({"estimator": "locale"}, "local")])
def test_a_misspelt_setting_is_one_sentence_that_names_the_nearest(setting, near):
    with pytest.raises(UserError, match=f"'{near}'"):
        BPFed(**setting).check()


# --- special cases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["weights", "local"])
def test_the_dirac_case_is_joint_deterministic_training_of_body_and_head(estimator):
    method, model = BPFed.dirac(estimator=estimator), scenarios.model_of(scenarios.smooth())
    local = trained(method, model, 20)
    assert (local.q.gaussian.sigma == 0).all()
    for s in range(CLIENTS):
        module = scenarios.smooth().double()
        optimiser = torch.optim.Adam(module.parameters(), lr=method.lr)
        for batch in batches(20):
            used = batch.mask[s].bool()
            optimiser.zero_grad()
            loss = F.cross_entropy(module(batch.x[s, used].double()), batch.y[s, used], reduction="sum")
            (SIZE / used.sum() * loss).backward()
            optimiser.step()
        expected = model.layout.flatten(dict(module.named_parameters()))
        torch.testing.assert_close(local.q.mean[s].double(), expected, rtol=0, atol=1e-6)


def test_the_dirac_case_with_nothing_personal_is_fedavg():
    points = scenarios.run(BPFed.dirac(personal="none", keep_adam=False), module=scenarios.smooth(), rounds=3)
    averaged = scenarios.run(FedAvg(), module=scenarios.smooth(), rounds=3)
    # FedAvg follows the mean loss, BPFed n times it: to Adam they differ in its epsilon only.
    torch.testing.assert_close(points.shared.mean, averaged.shared.weights, rtol=0, atol=1e-5)


def test_the_dirac_case_with_everything_personal_is_local_training():
    data = scenarios.classification(sizes=(12, 7))
    together = scenarios.run(BPFed.dirac(personal="all"), data, module=scenarios.smooth(), rounds=2)
    alone = FederatedData(
        data.name,
        data.clients[:1],
        data.train.select(torch.tensor([0])),
        data.test.select(torch.tensor([0])),
        data.task,
        data.classes,
    )
    single = scenarios.run(BPFed.dirac(personal="all"), alone, module=scenarios.smooth(), rounds=2)
    first = torch.tensor([0])
    assert not any(t.numel() for t in tree_flatten(together.shared)[0])
    torch.testing.assert_close(together.personal(first).eta.mean, single.personal(first).eta.mean, rtol=0, atol=1e-6)


# --- conjugate posteriors ---------------------------------------------------------------------------------------------

FEATURES, EXAMPLES, SCALE, PRIOR = 3, 256, 4.0, 0.5
START = 0.3  # how far the first guess is from the truth
INFORMATION = EXAMPLES / SCALE**2  # n h: the precision that one client's data adds


def orthogonal_designs(clients=5):
    """Linear regressions with orthogonal inputs (X'X = n I), a little different from client to client."""
    g = scenarios.generator()
    parts = []
    for _ in range(clients):
        x = EXAMPLES**0.5 * torch.linalg.qr(torch.randn(EXAMPLES, FEATURES, generator=g))[0]
        slope = torch.tensor([1.0, -1.0, 2.0]) + 0.05 * torch.randn(FEATURES, generator=g)
        parts.append((x, x @ slope))
    data = Examples.of(parts)
    names = tuple(f"site {i}" for i in range(clients))
    maximum_likelihood = data.x.T @ data.y / len(data.y)
    return FederatedData("orthogonal", names, data, data, "regression"), maximum_likelihood


def regression_federation(discount, rounds, epochs, lr, sigma):
    data, pooled = orthogonal_designs()
    method = BPFed(
        personal="none",
        prior_step=False,
        discount=discount,
        prior_sigma=PRIOR,
        sigma=sigma,
        estimator="local",
        lr=lr,
        keep_adam=False,
    )
    module = nn.Linear(FEATURES, 1, bias=False)
    with torch.no_grad():
        module.weight.copy_(pooled + START)
    settings = Settings(rounds=rounds, epochs=epochs, batch=EXAMPLES, compile="off", device="cpu")
    known = likelihoods.Normal(SCALE, learnt=False)
    return Federation.start(method, data, settings, module, known), pooled


def test_a_discounted_federation_converges_to_the_pooled_posterior_and_stays_there():
    # λ = a λ + (1 − a)/s0² + n h with a = 1 − 1/5 has its fixed point at the pooled posterior's precision.
    federation, pooled = regression_federation(0.8, rounds=500, epochs=10, lr=5e-3, sigma=0.2)
    simulator = Simulator([federation])
    posterior = 1 / PRIOR**2 + 5 * INFORMATION
    assert federation.shared.sigma.square().reciprocal().max() < 0.4 * posterior
    for round_ in range(1, 501):
        simulator.round()
        if round_ in (50, 500):
            ratio = federation.shared.sigma.square().reciprocal() / posterior
            error = ((federation.shared.mean - pooled) / pooled).abs()
            assert ratio.mean().item() == pytest.approx(1.0, abs=0.02)
            assert ratio.sub(1).abs().max() < 0.05
            assert error.max() < 0.02


def test_the_continual_prior_counts_the_data_again_in_every_round():
    # a = 1 and no step on the prior: the precision is that of before plus n h, round after round.
    federation, pooled = regression_federation(1.0, rounds=20, epochs=50, lr=5e-3, sigma=0.15)
    simulator = Simulator([federation])
    precisions = []
    for _ in range(20):
        simulator.round()
        precisions.append(float(federation.shared.sigma.square().reciprocal().mean()))
    for first, last in ((4, 19), (4, 12), (12, 19)):
        slope = (precisions[last] - precisions[first]) / (last - first) / INFORMATION
        assert slope == pytest.approx(1.0, abs=0.08)
    assert precisions[19] > 4 * (1 / PRIOR**2 + 5 * INFORMATION)  # far beyond what the data can say
    # And the first guess is outweighed as if every round had brought new data.
    before, rounds = 1 / 0.15**2, 20 * INFORMATION
    expected = (before * (pooled + START) + rounds * pooled) / (before + rounds)
    torch.testing.assert_close(federation.shared.mean, expected, rtol=0, atol=0.01)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_one_client_with_a_fixed_prior_finds_the_mean_field_posterior_that_posteriors_finds():
    pytest.importorskip("graphviz", reason="torchopt, which posteriors needs, imports it")
    import posteriors
    import torchopt

    g = scenarios.generator(4)
    x = torch.randn(40, 3, generator=g)
    y = (x @ torch.tensor([[1.5, -1.0], [0.0, 1.0], [0.5, 0.5]])).argmax(1)
    prior, lr, steps = 0.4, 0.02, 300

    def zeros():
        module = nn.Linear(3, 2)
        return module.load_state_dict({n: torch.zeros_like(p) for n, p in module.state_dict().items()}) and module

    # Eight clients with the same data each fit a posterior; the server's mean is the mean of the fits.
    names = tuple(f"twin {i}" for i in range(8))
    twins = Examples.of([(x, y)] * 8)
    data = FederatedData("twins", names, twins, twins, "classification", 2)
    method = BPFed(
        personal="none", prior_step=False, discount=0.0, prior_sigma=prior, sigma=0.3, estimator="local", lr=lr
    )
    federation = scenarios.start(method, data, zeros(), rounds=1, epochs=steps, batch=40)
    Simulator([federation]).round()

    layout = federation.model.layout
    module = zeros()

    def log_posterior(parameters, batch):
        logits = functional_call(module, layout.unflatten(parameters), (batch[0],))
        likelihood = torch.distributions.Categorical(logits=logits).log_prob(batch[1]).sum()
        return likelihood + Normal(0.0, prior).log_prob(parameters).sum(), torch.tensor([])

    transform = posteriors.vi.diag.build(log_posterior, torchopt.adam(lr=lr), n_samples=8, init_log_sds=math.log(0.3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = transform.init(torch.zeros(layout.total))
        means, sigmas = [], []
        for step in range(steps):
            state, _ = transform.update(state, (x, y))
            if step >= steps - 150:
                means.append(state.params)
                sigmas.append(state.log_sd_diag.exp())
    mean, sigma = torch.stack(means).mean(0), torch.stack(sigmas).mean(0)
    assert mean.abs().max() > 0.5
    assert sigma.max() < 0.85 * prior
    torch.testing.assert_close(federation.shared.mean, mean, rtol=0, atol=0.05)
    torch.testing.assert_close(federation.shared.sigma, sigma, rtol=0.08, atol=0)
