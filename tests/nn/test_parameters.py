"""Which weights are shared and which personal, and the vector that holds them."""

import pytest
import scenarios
import torch
from torch import nn

from bpfed._util.errors import UserError
from bpfed.nn.parameters import ParameterLayout, without_running_statistics


class Net(nn.Module):
    """A body, a layer in the middle and a head."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6))
        self.fc1 = nn.Linear(6, 3)
        self.fc10 = nn.Linear(3, 2, bias=False)


def parameters(module=None):
    return {n: p.detach() for n, p in (module or Net()).named_parameters()}


ALL = ("body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias", "fc1.weight", "fc1.bias", "fc10.weight")


@pytest.mark.parametrize(
    ("personal", "chosen"),
    [
        ("head", {"fc10.weight"}),
        ("not-head", set(ALL) - {"fc10.weight"}),
        ("none", set()),
        ("all", set(ALL)),
        ("fc1", {"fc1.weight", "fc1.bias"}),  # and not fc10
        ("body", {n for n in ALL if n.startswith("body")}),
        ("body.2", {"body.2.weight", "body.2.bias"}),
        ("fc1.bias", {"fc1.bias"}),
        ("*.bias", {n for n in ALL if n.endswith("bias")}),
        (["body.0", "fc10"], {"body.0.weight", "body.0.bias", "fc10.weight"}),
    ],
)
def test_personal_parameters_are_chosen_by_word_layer_name_or_pattern(personal, chosen):
    layout = ParameterLayout.of(parameters(), personal)
    assert set(layout.personal_names) == chosen
    assert layout.personal == sum(p.numel() for n, p in parameters().items() if n in chosen)
    assert layout.shared + layout.personal == layout.total == sum(p.numel() for p in parameters().values())
    assert set(layout.names) == set(ALL)


def test_shared_factors_come_first_and_both_keep_the_modules_order():
    layout = ParameterLayout.of(parameters(), ["body.0", "fc1"])
    assert layout.names == (
        "body.2.weight",
        "body.2.bias",
        "fc10.weight",
        "body.0.weight",
        "body.0.bias",
        "fc1.weight",
        "fc1.bias",
    )


def test_a_head_of_weight_and_bias_is_both_of_them():
    assert ParameterLayout.of(parameters(scenarios.small_mlp())).personal_names == ("3.weight", "3.bias")


@pytest.mark.parametrize("personal", ["fc2", ["fc1", "fc2"], "Body", "fc1.weigth"])
def test_an_unknown_name_is_one_sentence_that_lists_the_parameters(personal):
    with pytest.raises(
        UserError,
        match=r"matches personal '(fc2|Body|fc1\.weigth)'; its parameters are: body\.0\.weight, .*fc10\.weight\.$",
    ):
        ParameterLayout.of(parameters(), personal)


def test_a_module_without_parameters_is_refused():
    with pytest.raises(UserError, match="no parameters"):
        ParameterLayout.of({}, "head")


@pytest.mark.parametrize("personal", ["head", "not-head", "none", "all", "*.bias"])
def test_flatten_and_unflatten_undo_each_other(personal):
    named = parameters()
    layout = ParameterLayout.of(named, personal)
    vector = layout.flatten(named)
    back = layout.unflatten(vector)
    assert set(back) == set(named)
    for name, value in named.items():
        assert torch.equal(back[name], value)
    numbers = torch.arange(float(layout.total))
    assert torch.equal(layout.flatten(layout.unflatten(numbers)), numbers)


def test_the_two_parts_of_a_vector_hold_the_weights_they_say():
    named = {n: torch.full_like(p, float("fc10" in n)) for n, p in parameters().items()}
    layout = ParameterLayout.of(named, "head")
    shared, personal = layout.split(layout.flatten(named).expand(3, -1))
    assert shared.shape == (3, layout.shared)
    assert (shared == 0).all()
    assert personal.shape == (3, layout.personal)
    assert (personal == 1).all()


# --- batch normalisation ----------------------------------------------------------------------------------------------


def normalised():
    return scenarios.seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5), nn.BatchNorm1d(5)
        )
    )


def test_a_weights_fan_in_is_what_its_unit_sums_over():
    net = nn.Sequential(nn.Conv2d(3, 4, 5), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 2))
    layout = ParameterLayout.of(parameters(net), "head")
    of = {n: set(t.flatten().tolist()) for n, t in layout.unflatten(layout.fan_in()).items()}
    assert of["0.weight"] == of["0.bias"] == {75.0}
    assert of["3.weight"] == of["3.bias"] == {36.0}
    assert of["1.weight"] == of["1.bias"] == {75.0}  # a normalisation: as the widest layer


def test_batch_normalisation_becomes_group_normalisation_of_the_same_names_and_shapes():
    before = {n: p.shape for n, p in normalised().named_parameters()}
    module, replaced = without_running_statistics(normalised())
    assert replaced == ["1", "5"]
    assert {n: p.shape for n, p in module.named_parameters()} == before
    assert not list(module.buffers())
    assert not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())


def test_the_replaced_layer_keeps_its_weights():
    module = normalised()
    nn.init.constant_(module[1].weight, 3.0)
    nn.init.constant_(module[1].bias, -2.0)
    found, _ = without_running_statistics(module)
    x = torch.randn(2, 8, 4, 4, generator=scenarios.generator())
    out = found[1](x)
    assert out.mean().item() == pytest.approx(-2.0, abs=1e-4)
    assert out.std(correction=0).item() == pytest.approx(3.0, rel=1e-2)


def test_a_replaced_layer_gives_one_example_what_it_has_in_a_batch():
    model = scenarios.model_of(normalised(), (1, 6, 6), classes=5)
    x = torch.randn(7, 1, 6, 6, generator=scenarios.generator())
    for key in (None, scenarios.keys(1)[0]):  # evaluation and training
        together = model.outputs(model.initial, x, key)
        alone = torch.cat([model.outputs(model.initial, example[None], key) for example in x])
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def test_what_was_replaced_is_said():
    model = scenarios.model_of(normalised(), (1, 6, 6), classes=5)
    assert model.notes == ("Batch normalisation replaced by group normalisation in: 1, 5.",)
    assert scenarios.model_of(scenarios.small_mlp()).notes == ()


@pytest.mark.parametrize("channels", [1, 2, 3, 6, 7, 8, 16, 64])
def test_any_number_of_channels_can_be_grouped(channels):
    module, _ = without_running_statistics(nn.Sequential(nn.BatchNorm2d(channels)))
    out = module(torch.randn(3, channels, 4, 4, generator=scenarios.generator()))
    assert out.shape == (3, channels, 4, 4)
    assert out.flatten(1).mean(1).abs().max() < 1e-5


def test_a_module_that_is_itself_a_batch_normalisation_is_replaced_whole():
    module, replaced = without_running_statistics(nn.BatchNorm1d(4))
    assert isinstance(module, nn.GroupNorm)
    assert replaced == ["BatchNorm1d"]


def test_nested_and_tracking_instance_normalisations_are_replaced_and_plain_ones_left():
    module = nn.Sequential(
        nn.Sequential(nn.InstanceNorm2d(4, track_running_stats=True), nn.SyncBatchNorm(4)), nn.InstanceNorm2d(4)
    )
    found, replaced = without_running_statistics(module)
    assert replaced == ["0.0", "0.1"]
    assert isinstance(found[1], nn.InstanceNorm2d)


def test_a_batch_normalisation_used_in_two_places_is_replaced_in_both():
    norm = nn.BatchNorm1d(4)
    module, _ = without_running_statistics(nn.Sequential(norm, nn.Linear(4, 4), norm))
    assert not any(isinstance(layer, nn.BatchNorm1d) for layer in module)
    assert module[0].weight is module[2].weight
