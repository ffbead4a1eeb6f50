"""Frozen parameters: constants of a module that nobody trains, sends or keeps, and features that are computed once."""

from typing import ClassVar

import pytest
import scenarios
import torch
from torch import nn

import bpfed
from bpfed._util.errors import UserError
from bpfed.data import from_arrays
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.likelihoods import Categorical
from bpfed.methods import BPFed, FedAvg, FedPer
from bpfed.nn.model import Model

X = torch.randn(40, 3, 6, 6, generator=scenarios.generator())
Y = (X.mean((1, 2, 3)) > 0).long()
DATA = from_arrays(X, Y, torch.arange(40) % 2)
QUICK = {"rounds": 2, "epochs": 1, "eval_draws": 2, "compile": "off", "device": "cpu", "say": lambda sentence: None}


class Watched(nn.Conv2d):
    """A convolution that notes how many examples it runs on."""

    batches: ClassVar[list[int]] = []

    def forward(self, x):
        self.batches.append(len(x))
        return super().forward(x)


class Net(nn.Module):
    """A convolution and a norm with running statistics, frozen; a body with dropout and a head."""

    def __init__(self, before=0.0, skip=False):
        super().__init__()
        self.conv, self.norm, self.early = Watched(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(before)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.body, self.drop, self.head = nn.Linear(16, 8), nn.Dropout(0.3), nn.Linear(8, 2)
        self.skip = skip
        self.norm.running_mean.normal_()
        for part in (self.conv, self.norm):
            part.requires_grad_(False)

    def forward(self, x):
        features = self.pool(torch.relu(self.norm(self.early(self.conv(x))))).flatten(1)
        out = self.head(self.drop(torch.tanh(self.body(features))))
        return out + x.mean((1, 2, 3))[:, None] if self.skip else out


def net(**form):
    return scenarios.seeded(lambda: Net(**form))


def trained(method, **changes):
    return bpfed.fit(method, DATA, model=net(), **QUICK | changes)


def test_outputs_and_gradients_on_features_are_those_of_the_whole_network():
    whole = Model.of(net(), Categorical(2), X[:4])
    rest = whole.on_features(X[:4])
    assert rest.backbone.layer == "pool"
    assert rest.local == whole.local == set(whole.layout.names)
    weights = torch.stack([whole.initial, 2 * whole.initial])
    q, key, y, mask = Gaussian(weights, 0.1 * weights.abs()), scenarios.keys(2), Y.view(2, 20), torch.ones(2, 20)

    def computed(model):
        x = model.features(X).unflatten(0, (2, 20))
        gradients = model.gradient(weights, x, y, mask, key), model.local_gradient(q, x, y, mask, key)
        return model.stacked_outputs(weights, x), *gradients

    torch.testing.assert_close(computed(rest), computed(whole), rtol=1e-4, atol=1e-5)


def test_a_run_on_features_trains_predicts_calibrates_and_adapts_as_one_without():
    cached, whole = (trained(FedPer(), cache_features=how, calibration=0.2) for how in ("auto", "off"))
    assert (cached.federation.model.backbone is None, whole.federation.model.backbone) == (False, None)
    assert cached.history[-1]["nll"]["pooled"] == pytest.approx(whole.history[-1]["nll"]["pooled"], rel=1e-4)
    one, other = (run.clients()[1].predict(X[:7]) for run in (cached, whole))
    torch.testing.assert_close((one.probs, one.scores.scores), (other.probs, other.scores.scores), rtol=1e-4, atol=1e-5)
    one, other = (run.adapt(X[:6], Y[:6], steps=1).predict(X[:7]).probs for run in (cached, whole))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_step_on_features_does_not_run_the_frozen_part():
    model = bpfed.runs.fit.prepare(FedPer(), DATA, bpfed.Settings(device="cpu"), net()).federation.model
    features = model.features(X)
    Watched.batches.clear()
    key = scenarios.keys(2)
    model.gradient(model.initial.expand(2, -1), features.unflatten(0, (2, 20)), Y.view(2, 20), torch.ones(2, 20), key)
    assert Watched.batches == []


class Twice(nn.Module):
    """A frozen layer that is used inside another frozen one and again after it."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(108, 108).requires_grad_(False), nn.Linear(108, 2)
        self.outer = nn.Sequential(self.inner, nn.Tanh())

    def forward(self, x):
        return self.head(self.inner(torch.sin(self.outer(x.flatten(1)))))


def test_calls_of_a_layer_are_counted_though_some_are_not_run():
    whole = Model.of(scenarios.seeded(Twice), Categorical(2), X[:4])
    rest = whole.on_features(X[:4])
    assert (rest.backbone.layer, rest.backbone.call, list(rest.backbone.skipped)) == ("inner", 1, [("outer", 0)])
    torch.testing.assert_close(rest.outputs(rest.initial, rest.features(X)), whole.outputs(whole.initial, X))
    assert "forward" not in vars(rest.module.inner)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: net(before=0.2), "it has dropout"),
        (lambda: net(skip=True), "its inputs or other parameters enter beside or before it"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Frozen(), nn.Flatten(), nn.Linear(64, 2)), "before it"),
    ],
)
def test_features_are_not_kept_where_they_change_or_are_not_all(make, why):
    model = Model.of(make(), Categorical(2), X[:4]).on_features(X[:4])
    assert model.backbone is None
    assert why in model.notes[-1]


class Frozen(nn.Conv2d):
    def __init__(self):
        super().__init__(4, 4, 1)
        self.requires_grad_(False)


def test_frozen_weights_are_no_part_of_a_state_and_their_norm_keeps_its_statistics():
    model = Model.of(net(), Categorical(2), X[:4])
    assert set(model.layout.names) == {"body.weight", "body.bias", "head.weight", "head.bias"}
    assert model.frozen == 3 * 4 * 9 + 4 + 8
    assert model.notes == ()  # the norm is not exchanged
    assert isinstance(model.module.norm, nn.BatchNorm2d)
    key = scenarios.keys(1)[0]
    model.outputs(model.initial, X, key)  # in training mode
    assert torch.equal(model.module.norm.running_mean, net().norm.running_mean)
    torch.testing.assert_close(model.outputs(model.initial, X), net().eval()(X))


def test_a_run_keeps_a_hash_of_frozen_weights_and_asks_for_the_same_ones(tmp_path):
    run = trained(FedPer(), out=tmp_path / "run")
    assert "frozen: 120 weights" in run.summary()
    assert not any(b"conv.weight" in path.read_bytes() for path in tmp_path.rglob("*.safetensors"))
    again = bpfed.Run.load(tmp_path / "run", net())
    torch.testing.assert_close(again.clients()[0].predict(X[:5]).probs, run.clients()[0].predict(X[:5]).probs)
    for change in (lambda m: m.conv.weight.data.mul_(2.0), lambda m: m.norm.running_var.mul_(2.0)):
        other = net()
        change(other)
        with pytest.raises(UserError, match=r"frozen weights of the module given are not those of the run .*hash"):
            bpfed.Run.load(tmp_path / "run", other)
    with pytest.raises(UserError, match=r"'body\.bias' of the module given is frozen, but was trained in the run"):
        bpfed.Run.load(tmp_path / "run", only_head())
    with pytest.raises(UserError, match=r"model\.frozen_hash is"):
        bpfed.fit(FedPer(), DATA, model=other, out=tmp_path / "run", resume=True, **QUICK)


def only_head():
    module = net().requires_grad_(False)
    module.head.requires_grad_(True)
    return module


def test_trainable_names_what_is_trained_by_patterns():
    plain = net().requires_grad_(True)
    model = Model.of(plain, Categorical(2), X[:4], trainable="body.bias | head")
    assert set(model.layout.names) == {"body.bias", "head.weight", "head.bias"}
    assert all(p.requires_grad for p in plain.parameters())  # the user's own module is as it was
    deep = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(108, 4), nn.Linear(4, 2)))
    assert set(Model.of(deep, Categorical(2), X[:4], trainable="bias").layout.names) == {"1.0.bias", "1.1.bias"}
    with pytest.raises(UserError, match=r"matches trainable 'lora_\*'; its parameters are: conv\.weight"):
        Model.of(plain, Categorical(2), X[:4], trainable="lora_*")
    with pytest.raises(UserError, match="All parameters of the module are frozen"):
        Model.of(net().requires_grad_(False), Categorical(2), X[:4])


class Quantised(nn.Module):
    """Frozen weights in eight bits and in bfloat16."""

    def __init__(self):
        super().__init__()
        self.code = nn.Parameter(torch.randint(-9, 9, (6, 108), dtype=torch.int8), requires_grad=False)
        self.coarse = nn.Linear(6, 5, dtype=torch.bfloat16).requires_grad_(False)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        x = x.flatten(1) @ (0.1 * self.code.float()).T
        return self.head(self.coarse(x.bfloat16()).float())


def test_frozen_weights_keep_their_dtype():
    module = scenarios.seeded(Quantised)
    run = bpfed.fit(FedAvg(), DATA, model=module, **QUICK)
    kept = run.federation.model.module
    assert (kept.code.dtype, kept.coarse.weight.dtype) == (torch.int8, torch.bfloat16)
    assert torch.equal(kept.code, module.code)
    with pytest.raises(UserError, match=r"'code' has numbers of type int8, which cannot be trained"):
        bpfed.fit(FedAvg(), DATA, model=module, trainable="code", **QUICK)


class Adapted(nn.Module):
    """A frozen layer with a low-rank change that starts at 0."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(108, 6), nn.Linear(108, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.up.weight)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(torch.tanh(self.base(x) + self.up(self.down(x))))


def test_members_share_what_is_frozen_and_their_adapters_start_at_zero():
    run = bpfed.fit(FedPer(), DATA, model=scenarios.seeded(Adapted), members=2, **QUICK)
    model = run.federation.model
    first, second = (model.layout.one.unflatten(w) for w in model.layout.apart(model.initial))
    assert not torch.equal(first["down.weight"], second["down.weight"])
    assert not second["up.weight"].any()
    assert model.frozen == 108 * 6 + 6


# --- networks of torchvision and timm ---------------------------------------------------------------------------------


def resnet18():
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed (pip install torchvision)")
    return torchvision.models.resnet18(num_classes=2), "fc"


def vision_transformer():
    timm = pytest.importorskip("timm", reason="timm is not installed (pip install timm)")
    form = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "attn_drop_rate": 0.0, "num_classes": 2}
    return timm.models.VisionTransformer(img_size=32, **form), "head"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("make", [resnet18, vision_transformer])
def test_networks_of_torchvision_and_timm_train_whole_or_by_their_head_on_features(make, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    images = torch.randn(12, 3, 32, 32, generator=scenarios.generator())
    data = from_arrays(images, torch.arange(12) % 2, torch.arange(12) // 6, test_fraction=0.34)
    module, head = scenarios.seeded(make)
    exact = {"device": device, "tf32": False}
    whole = bpfed.fit(FedPer(), data, model=module, **QUICK | exact | {"rounds": 1})
    assert whole.federation.model.frozen == 0
    assert whole.federation.model.layout.personal_names == (f"{head}.weight", f"{head}.bias")
    cached, uncached = (
        bpfed.fit(BPFed(personal="none"), data, model=module, trainable=head, cache_features=how, **QUICK | exact)
        for how in ("auto", "off")
    )
    assert (cached.federation.model.backbone is None, uncached.federation.model.backbone) == (False, None)
    one, other = (run.clients()[1].predict(images[:7]).probs for run in (cached, uncached))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(one, whole.clients()[1].predict(images[:7]).probs, atol=1e-3)
