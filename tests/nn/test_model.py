"""A module as a function of flat weights: the same outputs and gradients, dropout that is a client's own, odd modules refused."""

import copy

import pytest
import scenarios
import torch
from torch import nn
from torch.nn import functional as F

from bpfed._util.errors import UserError
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.likelihoods import Categorical, Normal
from bpfed.nn.model import Model
from bpfed.nn.networks import LeNet


def inputs(*shape, seed=0):
    return torch.randn(*shape, generator=scenarios.generator(seed))


@pytest.mark.parametrize("personal", ["head", "none", "*.bias"])
def test_outputs_are_those_of_the_module(personal):
    module = scenarios.small_mlp()
    model = scenarios.model_of(module, personal=personal)
    x = inputs(5, 4)
    torch.testing.assert_close(model.outputs(model.initial, x), module(x))
    both = torch.stack([model.initial, 2 * model.initial])
    stacked = model.stacked_outputs(both, torch.stack([x, x]))
    torch.testing.assert_close(stacked[0], module(x))
    torch.testing.assert_close(stacked[1], model.outputs(2 * model.initial, x))


@pytest.mark.parametrize(
    ("make", "shape"), [(scenarios.small_mlp, (4,)), (scenarios.small_conv, (1, 6, 6))], ids=["mlp", "conv"]
)
def test_gradients_of_stacked_clients_are_those_of_autograd_one_by_one(make, shape):
    model = scenarios.model_of(make(), shape)
    batch = scenarios.random_batch(3, 5, shape, used=[5, 2, 4])
    weights = model.initial + 0.3 * inputs(3, model.layout.total)
    value, gradient = model.gradient(weights, batch.x, batch.y, batch.mask, batch.key)
    for s, used in enumerate((5, 2, 4)):
        w = weights[s].clone().requires_grad_()
        out = torch.func.functional_call(make(), model.layout.unflatten(w), (batch.x[s, :used],))
        loss = F.cross_entropy(out, batch.y[s, :used], reduction="sum")
        torch.testing.assert_close(value[s], loss.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient[s], torch.autograd.grad(loss, w)[0], rtol=1e-4, atol=1e-5)


def test_the_users_module_is_copied_and_not_changed():
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).eval()
    before = copy.deepcopy(module.state_dict())
    model = scenarios.model_of(module)
    model.outputs(model.initial, inputs(5, 4), scenarios.keys(1)[0])
    assert isinstance(module[1], nn.BatchNorm1d)
    assert not module.training
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_module_may_have_a_part_called_likelihood():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.likelihood = nn.Linear(4, 3)

        def forward(self, x):
            return self.likelihood(x)

    model = scenarios.model_of(Odd())
    assert (model.outputs(torch.zeros(model.layout.total), inputs(2, 4)) == 0).all()


# --- dropout ----------------------------------------------------------------------------------------------------------


class Show(nn.Module):
    """Shows the masks that its layers make of ones, and has a weight, as a module must."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return torch.cat([layer(x).flatten(1) for layer in self.layers], 1) * self.scale


def masks(layers, shape, key, examples=None):
    """What the layers of `Show` make of a batch of ones, ``[L, B, ...]``."""
    model = Model.of(Show(*layers), Any(), torch.ones(2, *shape[1:]))
    out = model.outputs(model.initial, torch.ones(examples or shape[0], *shape[1:]), key)
    return torch.stack([part.unflatten(1, shape[1:]) for part in out.chunk(len(layers), 1)])


class Any:
    """A likelihood for outputs of any shape."""

    def parameters(self):
        return {}

    def check(self, outputs):
        pass


def test_dropout_drops_at_its_rate_and_keeps_the_mean():
    (mask,) = masks([nn.Dropout(0.3)], (400, 100), scenarios.keys(1)[0])
    assert mask.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
    assert (mask == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert mask.mean().item() == pytest.approx(1.0, abs=0.02)


def test_dropout_is_off_without_a_key_and_at_rate_zero():
    assert (masks([nn.Dropout(0.3)], (20, 10), None) == 1).all()
    assert (masks([nn.Dropout(0.0)], (20, 10), scenarios.keys(1)[0]) == 1).all()


def test_dropout_of_everything_leaves_zeros():
    assert (masks([nn.Dropout(1.0)], (20, 10), scenarios.keys(1)[0]) == 0).all()


def overlap(first, second):
    """Share of places where two masks agree; one half for independent masks at rate one half."""
    return (first == second).float().mean().item()


def test_dropout_differs_between_clients_steps_layers_and_examples_and_repeats():
    key = scenarios.keys(2)
    first, second = masks([nn.Dropout(), nn.Dropout()], (100, 100), key[0])
    again, _ = masks([nn.Dropout(), nn.Dropout()], (100, 100), key[0])
    other, _ = masks([nn.Dropout(), nn.Dropout()], (100, 100), key[1])
    assert torch.equal(first, again)
    assert overlap(first, second) == pytest.approx(0.5, abs=0.03)
    assert overlap(first, other) == pytest.approx(0.5, abs=0.03)
    assert overlap(first[1:], first[:-1]) == pytest.approx(0.5, abs=0.03)
    assert overlap(first[:, 1:], first[:, :-1]) == pytest.approx(0.5, abs=0.03)


def test_dropout_of_an_example_does_not_depend_on_the_padded_width():
    layers = [nn.Dropout(), nn.Dropout2d()]
    wide = masks(layers, (50, 3, 4, 4), scenarios.keys(1)[0])
    narrow = masks(layers, (50, 3, 4, 4), scenarios.keys(1)[0], examples=20)
    assert torch.equal(wide[:, :20], narrow)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Dropout1d(), (60, 9, 5)),
        (nn.Dropout2d(), (60, 9, 5, 5)),
        (nn.Dropout3d(), (60, 9, 3, 3, 3)),
    ],
)
def test_channel_dropout_drops_whole_channels(layer, shape):
    (mask,) = masks([layer], shape, scenarios.keys(1)[0])
    maps = mask.flatten(2)
    assert ((maps == 0).all(-1) | (maps == 2).all(-1)).all()
    assert (maps[..., 0] == 0).float().mean().item() == pytest.approx(0.5, abs=0.1)
    assert 0 < (maps[0, :, 0] == 0).sum() < 9


def test_gradients_with_dropout_repeat_and_do_not_depend_on_who_else_is_stacked():
    module = scenarios.seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3)))
    model = scenarios.model_of(module)
    batch = scenarios.random_batch(4)
    weights = model.initial.expand(4, -1)
    value, gradient = model.gradient(weights, batch.x, batch.y, batch.mask, batch.key)
    back = model.gradient(weights, batch.x.flip(0), batch.y.flip(0), batch.mask, batch.key.flip(0))
    torch.testing.assert_close(gradient, back[1].flip(0), rtol=1e-5, atol=1e-6)
    for s in range(4):
        one = slice(s, s + 1)
        alone = model.gradient(weights[one], batch.x[one], batch.y[one], batch.mask[one], batch.key[one])
        torch.testing.assert_close(gradient[one], alone[1], rtol=1e-5, atol=1e-6)
    # The same data with another client's key is dropped otherwise.
    same_data = batch.x[:1].expand_as(batch.x), batch.y[:1].expand_as(batch.y)
    losses = model.gradient(weights, *same_data, batch.mask, batch.key)[0]
    assert len(losses.unique()) == 4
    assert losses[0] == value[0]


# --- modules that cannot be federated ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5)])
def test_dropout_whose_mask_cannot_be_keyed_is_refused_in_one_sentence(layer):
    with pytest.raises(UserError, match=r"^The module uses \w*alpha_dropout, .*use nn\.Dropout\.$"):
        scenarios.model_of(nn.Sequential(nn.Linear(4, 3), layer))


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 0.1 * torch.randn(3)


def test_a_module_with_randomness_of_its_own_is_refused_in_one_sentence():
    with pytest.raises(UserError, match=r"^The module draws random numbers .*nn\.Dropout.*\.$"):
        scenarios.model_of(Noisy(4, 3))


class Counting(nn.Linear):
    """Counts its calls, in a buffer."""

    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1)
        return super().forward(x)


class Averaging(nn.Linear):
    """Keeps a running mean of its inputs, in a buffer that it replaces."""

    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return super().forward(x - self.mean)


@pytest.mark.parametrize(("make", "name"), [(Counting, "count"), (Averaging, "mean")])
def test_a_module_that_changes_a_buffer_is_refused_in_one_sentence(make, name):
    with pytest.raises(UserError, match=f"^The module changes its buffer '{name}'"):
        Model.of(make(), Categorical(3), torch.ones(2, 4))


def test_a_buffer_that_stays_as_it_is_is_welcome():
    module = nn.Linear(4, 3)
    module.register_buffer("constant", torch.ones(1))
    assert scenarios.model_of(module).layout.total == 15


def test_a_bare_assertion_of_a_module_is_a_sentence():
    class Picky(nn.Linear):
        def forward(self, x):
            raise AssertionError  # what 'assert x.ndim == 4' would do, had pytest not taught it to speak

    with pytest.raises(UserError, match=r"^The module cannot take inputs of shape \[4\] .*: AssertionError\.$"):
        scenarios.model_of(Picky(4, 3))


def test_inputs_of_the_wrong_shape_are_one_sentence():
    with pytest.raises(UserError, match=r"^The module cannot take inputs of shape \[5\] \(a batch of 2\): .*[^.]\.$"):
        scenarios.model_of(scenarios.small_mlp(), (5,))


# --- where noise can be drawn locally ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", scenarios.ODD)
def test_noise_is_local_only_where_weight_and_bias_have_one_use_for_each_example(make):
    assert scenarios.model_of(scenarios.seeded(make)).local == {"head.weight", "head.bias"}


def test_noise_is_local_in_all_layers_of_the_papers_networks():
    lenet = Model.of(LeNet(), Categorical(10), torch.zeros(2, 3, 32, 32))
    assert lenet.local == set(lenet.layout.names)
    mlp = scenarios.model_of(scenarios.small_mlp())
    assert mlp.local == set(mlp.layout.names)


@pytest.mark.parametrize(
    ("layer", "local"),
    [
        (nn.Conv2d(2, 4, 3, padding="same"), True),
        (nn.Conv2d(2, 4, 3, stride=2, padding=1, dilation=2, bias=False), True),
        (nn.Conv2d(2, 4, (1, 3), padding=(0, 1), padding_mode="circular"), True),
        (nn.Conv2d(2, 4, 3, groups=2), False),
        (nn.Conv2d(2, 4, 2, padding="same"), False),
    ],
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
def test_plain_convolutions_are_local_and_with_little_noise_give_what_the_module_gives(layer, local):
    module = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(3))
    module(torch.zeros(1, 2, 6, 6))
    model = scenarios.model_of(module, (2, 6, 6))
    assert ("0.weight" in model.local) == local
    batch = scenarios.random_batch(2, 3, (2, 6, 6))
    weights = model.initial.expand(2, -1)
    q = Gaussian(weights, torch.full_like(weights, 1e-9))
    value, mean, _ = model.local_gradient(q, batch.x, batch.y, batch.mask, batch.key)
    expected = model.gradient(weights, batch.x, batch.y, batch.mask, batch.key)
    torch.testing.assert_close(value, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mean, expected[1], rtol=1e-3, atol=1e-4)


def test_a_learnt_noise_scale_is_drawn_with_the_weights():
    model = Model.of(nn.Linear(4, 1), Normal(0.5), torch.zeros(2, 4))
    assert "likelihood.log_scale" not in model.local


def test_weights_reach_every_use_of_a_parameter_with_two_names():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
            self.head.weight = self.body.weight

        def forward(self, x):
            return self.head(torch.tanh(self.body(x)))

    model = scenarios.model_of(scenarios.seeded(Twice), classes=4, personal="none")
    weights = torch.randn(model.layout.total, generator=scenarios.generator())
    own, x = model.layout.unflatten(weights), torch.randn(3, 4, generator=scenarios.generator())
    expected = torch.tanh(x @ own["body.weight"].T + own["body.bias"]) @ own["body.weight"].T + own["head.bias"]
    torch.testing.assert_close(model.outputs(weights, x), expected)
