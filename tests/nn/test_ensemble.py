"""Members: each learns as it would alone, their predictions are averaged, and every method can have them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import scenarios
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenarios import small_conv, small_mlp
from torch import nn

import bpfed
from bpfed._util.errors import UserError
from bpfed.config.settings import Settings
from bpfed.engine.federation import Federation
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.likelihoods import Categorical, Normal
from bpfed.inference.predictive import GaussianPredictive, PointPredictive, classify, regress
from bpfed.methods import METHODS, BPFed, FedAvg, FedPer, Recipe
from bpfed.nn.model import Model
from bpfed.nn.networks import Ensemble, make_ensemble
from bpfed.nn.parameters import ParameterLayout

SETTINGS = Settings(rounds=2, epochs=2, batch=5, eval_draws=6, members=2, device="cpu", compile="off")


def of(module, members=3, likelihood=None, shape=(4,)):
    model = Model.of(module, likelihood or Categorical(3), torch.zeros(2, *shape))
    return model, make_ensemble(model, members, seed=5)


@given(st.integers(1, 4), st.lists(st.integers(1, 3), min_size=0, max_size=2))
def test_apart_and_together_again(members, lead):
    layout = ParameterLayout(
        ("a", "b", "c"), (torch.Size([2, 3]), torch.Size([2]), torch.Size([1, 2])), members * 8, members
    )
    vector = torch.arange(float(math.prod(lead) * layout.total)).reshape(*lead, -1)
    apart = layout.apart(vector)
    assert apart.shape == (*lead, members, layout.total // members)
    assert torch.equal(layout.together(apart), vector)
    if not lead:
        for m, one in enumerate(apart):
            parts = layout.one.unflatten(one)
            for name, values in layout.unflatten(vector).items():
                assert torch.equal(parts[name], values[m] if members > 1 else values)
        shared, personal = layout.split(vector)
        assert torch.equal(layout.one.split(apart)[0].sum(), shared.sum())
        assert torch.equal(layout.one.split(apart)[1].sum(), personal.sum())


def test_members_are_networks_of_one_kind_with_other_first_weights():
    model, several = of(small_mlp())
    assert isinstance(several, Ensemble)
    assert (several.members, several.layout.total, several.one.layout) == (3, 3 * model.layout.total, model.layout)
    rows = several.layout.apart(several.initial)
    assert torch.equal(rows[0], model.initial)
    assert (rows[1:] != model.initial).float().mean() > 0.99
    assert (rows[1] != rows[2]).float().mean() > 0.99
    assert rows.abs().amax() <= 0.5  # as a linear layer of four or six inputs draws them
    assert several.layout.fan_in().sum() == 3 * model.layout.fan_in().sum()
    assert torch.equal(of(small_mlp())[1].initial, several.initial)  # the same run, the same weights
    assert make_ensemble(model, 1, seed=5) is model


@pytest.mark.parametrize(("module", "shape"), [(small_mlp(), (4,)), (small_conv(), (1, 6, 6))])
def test_each_member_has_the_gradient_it_would_have_alone(module, shape):
    model, several = of(module, shape=shape)
    g = scenarios.generator(1)
    weights = several.initial + 0.1 * torch.randn(2, several.layout.total, generator=g)
    x, y, mask = torch.randn(2, 5, *shape, generator=g), torch.randint(3, (2, 5), generator=g), torch.ones(2, 5)
    key = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    value, gradient = several.gradient(weights, x, y, mask, key)
    values = []
    for m in range(3):
        own, wanted = model.gradient(several.layout.apart(weights)[:, m], x, y, mask, key)
        torch.testing.assert_close(several.layout.apart(gradient)[:, m], wanted)
        values.append(own)
    torch.testing.assert_close(value, torch.stack(values).mean(0))
    vector = torch.randn(2, several.layout.total, generator=g)
    product = several.layout.apart(several.hessian_product(weights, vector, x, y, mask, key))[:, 2]
    rows = (several.layout.apart(t)[:, 2] for t in (weights, vector))
    torch.testing.assert_close(product, model.hessian_product(*rows, x, y, mask, key))
    # Noise of its own for each member: where weights are equal, gradients still are not.
    q = Gaussian(
        several.layout.together(weights[:, None, : model.layout.total].expand(2, 3, -1)),
        torch.full_like(weights, 0.3),
    )
    _, mean, _ = several.local_gradient(q, x, y, mask, key)
    first, second, _ = several.layout.apart(mean).unbind(1)
    assert (first != second).any()


def test_predictions_are_the_mean_of_the_members():
    model, several = of(small_mlp())
    g = scenarios.generator(2)
    x, key = torch.randn(2, 7, 4, generator=g), torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    weights = several.initial.expand(2, -1)
    found = classify(several, PointPredictive(weights), x, key, 10)
    apart = several.layout.apart(weights)
    alone = [classify(model, PointPredictive(apart[:, m]), x, key, 10) for m in range(3)]
    torch.testing.assert_close(found.probs, torch.stack([a.probs for a in alone]).mean(0))
    torch.testing.assert_close(found.aleatoric, torch.stack([a.entropy for a in alone]).mean(0))
    assert (found.epistemic > 0.0).all()  # members do not agree, and that is uncertainty
    q = GaussianPredictive(Gaussian(weights, torch.full_like(weights, 0.2)))
    drawn, once = (classify(several, q, x, key, 3000, how).probs for how in ("sample", "single-pass"))
    assert (drawn - once).abs().max() < 0.03


def test_numbers_are_predicted_by_all_members():
    module = scenarios.seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)))
    model, several = of(module, likelihood=Normal(0.5))
    g = scenarios.generator(3)
    x, y, key = (
        torch.randn(1, 7, 4, generator=g),
        torch.randn(1, 7, generator=g),
        torch.tensor([[1, 2]], dtype=torch.int32),
    )
    weights = several.initial[None]
    found = regress(several, PointPredictive(weights), x, key, 1, y)
    alone = [regress(model, PointPredictive(m), x, key, 1, y) for m in several.layout.apart(weights).unbind(1)]
    means = torch.stack([a.mean for a in alone])
    torch.testing.assert_close(found.mean, means.mean(0))
    torch.testing.assert_close(found.epistemic, means.var(0, correction=0))
    torch.testing.assert_close(found.nll, -torch.stack([-a.nll for a in alone]).exp().mean(0).log())
    once = regress(several, PointPredictive(weights), x, key, 1, y, "single-pass")
    torch.testing.assert_close(once.mean, found.mean)
    torch.testing.assert_close(once.scale, found.scale)


def test_a_member_trains_as_it_would_alone():
    """Steps of FedAvg draw no noise, so that a federation of two members is two federations."""
    data = scenarios.classification(sizes=(12, 12, 20))
    both = bpfed.fit(FedAvg(), data, settings=SETTINGS)
    apart = both.federation.model.layout.apart
    first = apart(both.federation.model.initial)
    for m in range(2):
        module = small_mlp(hidden=100)
        model = Model.of(module, Categorical(3), data.train.x[:2])
        for name, value in model.layout.unflatten(first[m]).items():
            module.get_parameter(name).data.copy_(value)
        alone = bpfed.fit(FedAvg(), data, model=module, settings=replace(SETTINGS, members=1))
        torch.testing.assert_close(
            apart(both.federation.shared[0])[m], alone.federation.shared[0], atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.network != "linear"])  # starts at 0: all the same
def test_every_method_can_have_members(name):
    data = scenarios.classification(sizes=(12, 12, 20))
    run = bpfed.fit(METHODS[name](), data, settings=SETTINGS)
    assert run.federation.model.members == 2
    assert math.isfinite(run.history[-1]["nll"]["pooled"])
    said = run.client(data.clients[0]).predict(data.test.client(0)[0])
    torch.testing.assert_close(said.probs.sum(-1), torch.ones(6))


def test_a_run_with_members_goes_on_and_predicts_from_its_folder(tmp_path):
    data = scenarios.classification(sizes=(12, 12, 20))
    whole = bpfed.fit(Recipe(), data, settings=SETTINGS, out=tmp_path / "whole")
    x = data.test.client(1)[0]
    again = bpfed.Run.load(tmp_path / "whole").client(data.clients[1]).predict(x).probs
    torch.testing.assert_close(again, whole.client(data.clients[1]).predict(x).probs)
    newcomer = bpfed.Run.load(tmp_path / "whole").adapt(*data.train.client(0), steps=10, name="new")
    newcomer.save(tmp_path / "new.safetensors")
    loaded = bpfed.Run.load(tmp_path / "whole").newcomer(tmp_path / "new.safetensors")
    torch.testing.assert_close(loaded.predict(x).probs, newcomer.predict(x).probs)


def test_a_run_says_how_many_members_it_has():
    data = scenarios.classification(sizes=(12, 12, 20))
    said = []
    run = bpfed.fit(FedAvg(), data, model=small_mlp(), say=said.append, settings=SETTINGS)
    assert said == ["The first member starts with the module's weights, the others with new ones."]
    assert run.summary().startswith("FedAvg, 2 members on small: 3 clients, round 2")
    assert run.record().title.startswith("FedAvg (2 networks) on small")
    assert repr(run) == "<run of fedavg on 'small': 3 clients, 2 of 2 rounds>"
    alone = bpfed.fit(FedAvg(), data, settings=replace(SETTINGS, members=1))
    assert "member" not in alone.summary() + alone.record().title
    assert "members" not in alone.summary_record()


def test_regression_of_members():
    run = bpfed.fit(BPFed(), scenarios.regression(), settings=SETTINGS)
    assert math.isfinite(run.history[-1]["nll"]["pooled"])


def test_what_is_told_of_a_round_is_of_a_member():
    data = scenarios.classification(sizes=(12, 12, 20))
    one, four = (bpfed.fit(BPFed(), data, settings=replace(SETTINGS, members=m)).history[-1] for m in (1, 4))
    for name in ("train_nll", "train_kl"):
        assert one[name] == pytest.approx(four[name], rel=0.5), name


def test_a_module_that_draws_its_own_weights_is_asked_to():
    class PersonalNetwork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.constant_(self.layer.bias, 7.0)
            nn.init.normal_(self.layer.weight)

        def forward(self, x):
            return self.layer(x)

    _, several = of(PersonalNetwork())
    weights = several.layout.unflatten(several.initial)
    assert weights["layer.bias"].unique().tolist() == [7.0]
    assert len(weights["layer.weight"].unique()) == 36

    class Broken(PersonalNetwork):
        def reset_parameters(self) -> None:
            if hasattr(self, "done"):
                raise ValueError("not twice")
            self.done = True

    with pytest.raises(UserError, match=r"cannot draw its parameters again, .* says 'not twice'"):
        of(Broken())


def test_a_mixture_has_no_outputs_of_its_own():
    with pytest.raises(TypeError, match="no outputs of its own"):
        of(small_mlp())[1].stacked_outputs(torch.zeros(1, 3), torch.zeros(1, 2, 4))


def test_what_cannot_have_members_says_so():
    class PersonalNetwork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.scale * self.layer(x)

    data = scenarios.classification()
    with pytest.raises(UserError, match="has parameters but no reset_parameters"):
        Federation.start(FedAvg(), data, SETTINGS, PersonalNetwork())
    with pytest.raises(UserError, match="laplace works with one network"):
        bpfed.fit(FedPer(laplace=True), data, settings=SETTINGS)
    with pytest.raises(UserError, match="members is -1"):
        bpfed.fit(FedAvg(), data, settings=replace(SETTINGS, members=-1))
