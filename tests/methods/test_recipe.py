"""The recipe: its priors are what its equation says, seeds stacked or alone, and nothing of a head is uploaded."""

from __future__ import annotations

import math

import pytest
import scenarios
import torch
from scenarios import small_mlp
from torch import nn

from bpfed._util.errors import UserError
from bpfed.config.migrations import ATTRIBUTES, CONSTANTS, TEMPERATURES
from bpfed.config.settings import Settings
from bpfed.engine.federation import Federation
from bpfed.engine.simulator import Simulator
from bpfed.inference.likelihoods import Categorical, Normal
from bpfed.methods import Population, Recipe
from bpfed.methods.base import RunShape, rows
from bpfed.methods.variational import NOISE_SIGMA, biases, of_likelihood
from bpfed.nn.model import Model
from bpfed.runs.fit import prepare

SETTINGS = Settings(rounds=2, epochs=2, batch=5, eval_draws=2, device="cpu", compile="off")


def federation(method, seed=0, regression=False) -> Federation:
    data = scenarios.regression() if regression else scenarios.classification(sizes=(12,) * 3)
    return Federation.start(method, data, Settings(rounds=2, seed=seed, device="cpu"))


def prior(method, state: Federation):
    hparams = scenarios.hparams(method, 1)
    personal = state.personal(torch.tensor([0]))
    return method.begin(state.model, rows(state.shared, 1), personal, hparams).prior


def test_the_heads_prior_is_the_common_head_times_its_gain():
    """And its biases are free to be what they are here: the last three of the head's weights, one for each class."""
    method = Recipe(head_gain=4.0, head_sigma=0.07)
    state = federation(method)
    start, count = state.model.initial, state.model.layout.shared
    found = prior(method, state)
    torch.testing.assert_close(found.mean[0, count:-3], 4.0 * start[count:-3])
    assert found.mean[0, -3:].tolist() == [0.0] * 3
    assert found.sigma[0, count:].tolist() == pytest.approx([0.07] * (len(start) - count - 3) + [1.0] * 3)
    torch.testing.assert_close(found.mean[0, :count], start[:count])


def test_a_normalisation_is_no_bias():
    """The scale of one is a vector too; around 0 it would tell classes apart by chance."""
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.LayerNorm(3))
    model = Model.of(module, Categorical(3), torch.zeros(2, 4), "head")
    assert biases(model).tolist() == [False] * 24 + [True] * 3 + [False] * 3 + [True] * 3


def test_layers_are_as_noisy_as_their_inputs_allow():
    """Without a posterior's precision (a = 0) a shared weight's prior is s0 over the root of its unit's inputs."""
    method = Recipe(discount=0.0, prior_sigma=3.0)
    state = federation(method)
    layout = state.model.layout
    wanted = 3.0 / layout.split(layout.fan_in())[0].sqrt()
    torch.testing.assert_close(prior(method, state).sigma[0, : layout.shared], wanted)


def test_a_regressions_heads_are_around_zero():
    method = Recipe(head_gain=4.0, head_sigma=0.07)
    state = federation(method, regression=True)
    assert torch.all(prior(method, state).mean[0, state.model.layout.shared :] == 0.0)


def bounded(**bounds: float) -> type[Recipe]:
    """A recipe with other bounds of its step size."""
    return type("Bounded", (Recipe,), bounds)


@pytest.mark.parametrize(("rounds", "wanted"), [(10, (0.01, 0.005)), (20, (0.01, 0.005)), (80, (0.0025, 0.0025))])
def test_steps_are_smaller_the_more_there_are(rounds, wanted):
    """Clients of 10 and 40 examples take 5 and 20 steps in a round: 20 are too far, as are 80 rounds."""
    data = scenarios.classification(sizes=(10, 40))
    method = bounded(max_lr_epochs=1.0, max_round_lr_steps=0.1)(lr=0.01)
    state = Federation.start(method, data, Settings(rounds=rounds, epochs=5, batch=10, device="cpu"))
    both = torch.arange(2)
    assert state.hparams(1, both)["lr"].tolist() == pytest.approx(wanted)
    assert state.hparams(1 + rounds // 2, both)["lr"].tolist() == pytest.approx([w / 2 for w in wanted])


@pytest.mark.parametrize(("rounds", "wanted"), [(50, 0.005), (100, 0.005), (400, 0.00125)])
def test_a_client_with_many_steps_goes_no_farther_in_more_rounds(rounds, wanted):
    """40 examples are 20 steps in a round: a reach of 0.1 in each of them, and of 10 in the whole run."""
    data = scenarios.classification(sizes=(40, 40))
    method = bounded(max_lr_epochs=100.0, max_round_lr_steps=0.1, max_total_lr_steps=10.0)(lr=0.01)
    state = Federation.start(method, data, Settings(rounds=rounds, epochs=5, batch=10, device="cpu"))
    assert state.hparams(1, torch.arange(1))["lr"].item() == pytest.approx(wanted)


@pytest.mark.parametrize("rounds", [10, 400])
@pytest.mark.parametrize(("examples", "farther"), [(500, 1.0), (501, 1.02**0.5), (2000, 2.0)])
def test_with_many_steps_a_clients_reach_grows_as_their_root(rounds, examples, farther):
    """10 epochs of batches of 10: as many steps as examples; more than 500 of them reach farther, in the whole run as in a round."""
    data = scenarios.classification(sizes=(examples, 10))
    method = bounded(max_lr_epochs=1e9, max_round_lr_steps=0.1, max_total_lr_steps=10.0)(lr=0.01)
    state = Federation.start(method, data, Settings(rounds=rounds, epochs=10, batch=10, device="cpu"))
    steps = 10 * math.ceil(examples / 10)
    wanted = farther * min(0.1, 10.0 / rounds) / steps
    assert state.hparams(1, torch.arange(1))["lr"].item() == pytest.approx(wanted)


def test_nothing_of_a_head_is_uploaded():
    method = Recipe()
    run = prepare(method, scenarios.classification(sizes=(12,) * 3), SETTINGS)
    shared = run.train().federation.shared
    assert [t.shape[-1] for t in shared] == [run.federation.model.layout.shared] * 2


@pytest.mark.parametrize("personal", ["head", "all"])
def test_a_newcomers_noise_scale_is_the_likelihoods_own(personal):
    method = Recipe(personal=personal)
    made = method.newcomer(model := Model.of(small_mlp(3, 1), Normal(0.1), torch.zeros(2, 3), personal), None)
    at = of_likelihood(model)
    assert made.head.mean[at].tolist() == pytest.approx([math.log(0.1)])
    assert made.head.sigma[at].tolist() == pytest.approx([NOISE_SIGMA])
    assert torch.all(made.head.mean[~at] == 0.0)


def numbers_of(clients: int, method=None, **settings):
    """The numbers of the first client in the first round, with so many clients."""
    data = scenarios.classification(sizes=(10,) * clients)
    settings = Settings(**{"rounds": 300, "epochs": 10, "device": "cpu", **settings})
    found = Federation.start(method or Recipe(), data, settings).hparams(1, torch.arange(1))
    return {name: value.item() for name, value in found.items()}


def test_where_the_settings_were_chosen_they_are_as_they_are():
    method = Recipe()
    for clients, participants in ((2, None), (10, 10), (20, 10)):
        found = numbers_of(clients, participants=participants)
        assert found["discount"] == pytest.approx(method.discount)
        assert found["mean_precision"] == pytest.approx(method.weight_decay / method.temperature)
        assert found["lr"] == pytest.approx(method.max_lr_epochs / 3000)


def test_in_a_crowd_each_carries_its_part_of_the_prior_and_all_data_count():
    """Five times as many clients: the precision that 1/(1 - a) stands for and the one of the means' prior stay in proportion."""
    few, many = numbers_of(20), numbers_of(100)
    assert many["mean_precision"] == pytest.approx(few["mean_precision"] / 5)
    assert 1 / (1 - many["discount"]) == pytest.approx(5 / (1 - few["discount"]), rel=1e-4)


def test_each_client_is_as_warm_as_its_own_examples_say_in_a_crowd_too():
    examples = torch.tensor([0, 100, 1000, 4500])
    shape = RunShape(clients=100, participants=50, rounds=300, epochs=10, batch=50)
    alike = type("Alike", (Population,), {"max_temperature_factor": 1.0})
    found, plain = (kind().hparams_for_run(shape, examples) for kind in (Population, alike))
    t, a, c = (found[name] for name in ("temperature", "discount", "mean_precision"))
    assert t.tolist() == pytest.approx([0.2, 0.2, 0.1 * 2.0**0.5, 0.1])
    assert (t * c).tolist() == pytest.approx([0.04] * 4)  # 0.2 for 20 clients and fewer
    assert (t * (1.0 - a)).tolist() == pytest.approx([0.002] * 4, rel=1e-4)
    assert torch.equal(found["lr"], plain["lr"])
    assert torch.equal(found["head_budget"], plain["head_budget"])


@pytest.mark.parametrize(("examples", "warmer"), [(1, 2.0), (500, 2.0), (1000, 2.0**0.5), (2000, 1.0), (5000, 1.0)])
def test_a_client_with_few_examples_is_warmer_and_the_pull_on_shared_factors_is_as_strong(examples, warmer):
    method = Population(temperature=0.1)
    data = scenarios.classification(sizes=(examples, 3))
    found = Federation.start(method, data, Settings(rounds=3, device="cpu")).hparams(1, torch.arange(1))
    assert found["temperature"].item() == pytest.approx(0.1 * warmer)
    assert (found["temperature"] * found["mean_precision"]).item() == pytest.approx(method.weight_decay)
    assert (found["temperature"] * (1.0 - found["discount"])).item() == pytest.approx(
        0.1 * (1.0 - method.discount), rel=1e-5
    )


@pytest.mark.parametrize(("clients", "participants", "longer"), [(100, 100, 1), (100, 50, 1), (100, 10, 5), (30, 3, 5)])
def test_clients_that_take_part_seldom_may_take_larger_steps(clients, participants, longer):
    found = numbers_of(clients, participants=participants, rounds=3000)
    assert found["lr"] == pytest.approx(longer * Recipe().max_lr_epochs / 30_000)


def test_the_way_of_a_head_is_its_steps_in_the_whole_run():
    """300 rounds of 10 passes of one batch, of which a client with one chance in four takes a quarter."""
    for participants, part in ((None, 1.0), (2, 0.25)):
        found = numbers_of(8, participants=participants)
        assert found["head_budget"] == pytest.approx(found["lr"] * 3000 * part)


def test_a_head_starts_where_it_can_still_reach_its_prior():
    method = Recipe(head_gain=6.0)
    state = federation(method)
    personal = state.personal(torch.arange(2))
    weights, biases = slice(None, -3), slice(-3, None)
    torch.testing.assert_close(
        personal.head.mean[:, weights], 6.0 * personal.first[:, weights]
    )  # nothing seen: the prior
    assert torch.all(personal.head.mean[:, biases] == 0.0)
    size = personal.first.square().mean(-1).sqrt()
    for way, gain in ((100.0, 1.0), (2.0, 4.0), (0.0, 6.0)):  # in units of h0
        hparams = scenarios.hparams(method, 2) | {"head_budget": way * size}
        begun = method.begin(state.model, rows(state.shared, 2), personal, hparams)
        head = state.model.layout.split(begun.q.mean)[1]
        torch.testing.assert_close(head[:, weights], gain * personal.first[:, weights])
        torch.testing.assert_close(head[:, biases], (way > 0.0) * personal.first[:, biases])


def test_a_head_that_has_been_trained_goes_on_where_it_was():
    method = Recipe()
    state = federation(method)
    kept = state.personal(torch.arange(2))
    kept = kept._replace(head=kept.head._replace(mean=0.3 * kept.first), steps=torch.ones_like(kept.steps))
    begun = method.begin(state.model, rows(state.shared, 2), kept, state.hparams(2, torch.arange(2)))
    torch.testing.assert_close(state.model.layout.split(begun.q.mean)[1], 0.3 * kept.first)


@pytest.mark.parametrize("clients", [20, 100])
def test_the_precision_that_is_carried_on_is_that_of_so_many_clients_data(clients):
    """A conjugate model, whose precision grows by the same in every round: it tends to 1/s0² + (that) / (1 - a)."""
    method = Recipe(prior_sigma=2.0)
    data = scenarios.classification(sizes=(10,) * clients)
    state = Federation.start(method, data, Settings(rounds=2, device="cpu"))
    hparams = {name: value[:1].double() for name, value in state.hparams(1, torch.arange(1)).items()}
    personal = state.personal(torch.arange(1))
    count, grows, shared = state.model.layout.shared, 3.0, rows(state.shared, 1)
    for _ in range(1500):
        prior = method.begin(state.model, shared, personal, hparams).prior.sigma[:, :count].double()
        shared = shared._replace(sigma=(prior**-2 + grows).rsqrt())
    own = state.model.layout.split(state.model.layout.fan_in())[0].double() / 4.0  # 1/s0²
    counted = clients / 20 / (1 - method.discount)
    torch.testing.assert_close((shared.sigma**-2)[0], own + grows * counted, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("personal", ["all", "not-head", "*.bias"])
def test_other_layers_than_heads_start_as_the_network_does(personal):
    state = federation(Recipe(personal=personal))
    found = state.personal(torch.arange(2))
    torch.testing.assert_close(found.head.mean, found.first)
    begun = state.method.begin(state.model, rows(state.shared, 2), found, state.hparams(1, torch.arange(2)))
    for mean in (begun.q.mean, begun.prior.mean):
        torch.testing.assert_close(state.model.layout.split(mean)[1], found.first)


def test_heads_that_grow_and_heads_that_do_not_are_not_stacked():
    runs = [federation(Recipe(head_gain=gain)) for gain in (1.0, 6.0)]
    with pytest.raises(UserError, match="Only runs of the same method"):
        Simulator(runs)


# --- constants and the control ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Recipe, Population])
def test_what_is_told_of_a_constant_is_what_the_class_has(kind):
    for name, value in CONSTANTS[kind.name].items():
        wanted = value * TEMPERATURES[kind.name] if name == "mean_precision" else value
        assert getattr(kind, ATTRIBUTES.get(name, name)) == pytest.approx(wanted)
        with pytest.raises(UserError, match=f"^{name} is .* since bpfed 0.10"):
            kind(**{name: value})
    assert kind().temperature == TEMPERATURES[kind.name]


def test_the_pull_of_the_means_does_not_depend_on_the_temperature_unless_there_is_no_prior():
    assert [t * Recipe(temperature=t).hparams()["mean_precision"] for t in (0.01, 0.05, 1.0, 0.0)] == [
        *([pytest.approx(0.5)] * 3),
        0.0,
    ]


def test_a_step_without_weight_noise_is_one_of_map():
    """The posterior's gradient by autograd, written out, and one step of Adam along it."""
    method = Recipe(sigma=False, lr=0.01, temperature=0.3, prior_sigma=2.0, head_gain=1.0, head_sigma=0.4)
    state = federation(method)
    model, cut = state.model, state.model.layout.shared
    hparams = method.hparam_rows(1) | {"counts": torch.tensor([[4.0, 4.0, 4.0]])}
    local = method.begin(model, rows(state.shared, 1), state.personal(torch.tensor([0])), hparams)
    batch = scenarios.random_batch(1)
    weights = (local.q.mean[0] + 0.1).requires_grad_()  # away from the prior's mean
    local = local._replace(q=local.q._replace(mean=weights.detach().clone()[None]))

    logits = torch.func.functional_call(model.module, model.layout.unflatten(weights), batch.x[0])
    seen = batch.mask[0] > 0
    nll = nn.functional.cross_entropy(logits[seen], batch.y[0][seen])
    fan_in = model.layout.fan_in()[:cut]
    shared_prior = ((weights[:cut] - model.initial[:cut]).square() * fan_in / 2.0**2).sum() / 2
    head, first = weights[cut:-3], model.initial[cut:-3]
    head_prior = (head - first).square().sum() / 0.4**2 / 2 + weights[-3:].square().sum() / 2
    decay = 0.5 * weights[:cut].square().sum() / 2
    loss = batch.size[0] * nll + 0.3 * (shared_prior + head_prior) + decay
    (gradient,) = torch.autograd.grad(loss, weights)
    adam = torch.optim.Adam([weights], lr=0.01)
    weights.grad = gradient
    adam.step()

    after, said = method.step(model, local, batch, hparams, "all")
    assert said.item() == pytest.approx(nll.item(), rel=1e-5)
    torch.testing.assert_close(after.q.adam_mean.first[0], 0.1 * gradient, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.q.mean[0], weights.detach(), rtol=1e-4, atol=1e-6)
    assert not after.q.gaussian.sigma.any()


def test_points_train_and_predict_without_noise():
    """The whole run: no width appears, a prediction is one forward pass, and a newcomer is a point too."""
    data = scenarios.classification(sizes=(12,) * 3)
    run = prepare(Recipe(sigma=False), data, SETTINGS).train()
    states = [run.federation.shared, run.federation.personal(torch.arange(3)).head]
    assert not any(g.sigma.any() for g in states)
    assert all(g.mean.isfinite().all() for g in states)
    who, x = run.client(data.clients[0]), data.test.client(0)[0]
    weights = torch.cat([run.federation.shared.mean, states[1].mean[0]])
    weights[-3:] += run.federation.personal(torch.arange(3)).lowered[0]
    model = run.federation.model
    wanted = torch.func.functional_call(model.module, model.layout.unflatten(weights), x).softmax(-1)
    torch.testing.assert_close(who.predict(x).probs, wanted)
    newcomer = run.adapt(*data.train.client(1), steps=3)
    assert torch.equal(newcomer.predict(x, draws=1).probs, newcomer.predict(x, draws=7).probs)
    with pytest.raises(UserError, match="sigma is False, but bpfed-population"):
        Population(sigma=False).check()
