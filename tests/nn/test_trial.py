"""What a trial finds in a module: its head whatever the order of its attributes, and what cannot be federated."""

import math
import warnings

import pytest
import scenarios
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import bpfed
from bpfed._util.errors import UserError
from bpfed.config.settings import Settings
from bpfed.data import from_arrays
from bpfed.inference import inputs
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.likelihoods import Categorical
from bpfed.inference.tasks import get_task
from bpfed.methods import FedAvg, FedPer, Recipe
from bpfed.methods.base import rows
from bpfed.nn.model import Model
from bpfed.nn.networks import LeNet, make_model
from bpfed.runs import checkpoint as saved

X = torch.randn(5, 4, 6, generator=scenarios.generator())
IDS = torch.arange(20.0).remainder(7).reshape(5, 4)


class Net(nn.Module):
    """A module of these parts, registered in this order, and a function that runs them."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


def net(run, *, order=None, seed=0, **parts):
    """Parts are drawn in the order of their names and registered in another."""
    made = scenarios.seeded(lambda: {name: parts[name]() for name in sorted(parts)}, seed)
    return Net(run, **{name: made[name] for name in order or parts})


def linear(inputs, outputs, **form):
    return lambda: nn.Linear(inputs, outputs, **form)


def of(module, example=X[:, 0], personal="head"):
    return Model.of(module, Categorical(3), example, personal)


# --- the head ---------------------------------------------------------------------------------------------------------


def plain(self, x):
    return self.fc2(torch.tanh(self.fc1(x)))


def skip(self, x):
    return self.skip(x) + self.head(torch.relu(self.body(x)))


def functional(self, x):
    return F.linear(torch.tanh(F.linear(x, self.w1)), self.w2) + self.b2


def written(self, x):
    out = x.new_zeros(len(x), 3)
    out[:, :2] = self.two(torch.relu(self.body(x)))
    out[:, 2:] = self.one(x)
    return out


HEADS = {
    "sequential": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), "2.weight 2.bias"),
    "order of attributes": (
        lambda: net(plain, order=["fc2", "fc1"], fc1=linear(6, 5), fc2=linear(5, 3)),
        "fc2.weight fc2.bias",
    ),
    "norm registered last, used first": (
        lambda: net(
            lambda self, x: self.fc(self.norm(x)), order=["fc", "norm"], fc=linear(6, 3), norm=lambda: nn.LayerNorm(6)
        ),
        "fc.weight fc.bias",
    ),
    "norm after the last layer": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), nn.LayerNorm(3)),
        "2.weight 2.bias 3.weight 3.bias",
    ),
    "two paths": (
        lambda: net(skip, skip=linear(6, 3), body=linear(6, 5), head=linear(5, 3)),
        "skip.weight skip.bias head.weight head.bias",
    ),
    "MLP head": (
        lambda: net(
            lambda self, x: self.head(torch.relu(self.body(x))),
            head=lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)),
            body=linear(6, 5),
        ),
        "head.2.weight head.2.bias",
    ),
    "parameters without layers": (
        lambda: Net(
            functional,
            b2=nn.Parameter(torch.zeros(3)),
            w2=nn.Parameter(torch.randn(3, 5)),
            w1=nn.Parameter(torch.randn(5, 6)),
        ),
        "w2 b2",
    ),
    "written into a tensor": (
        lambda: net(written, body=linear(6, 5), one=linear(6, 1), two=linear(5, 2)),
        "one.weight one.bias two.weight two.bias",
    ),
    "weight normalisation": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))),
        "1.bias 1.parametrizations.weight.original0 1.parametrizations.weight.original1",
    ),
    "temperature of the outputs": (
        lambda: Net(
            lambda self, x: self.fc(torch.relu(self.body(x))) * self.scale,
            scale=nn.Parameter(torch.ones(1)),
            fc=nn.Linear(5, 3),
            body=nn.Linear(6, 5),
        ),
        "fc.weight fc.bias scale",
    ),
    "a layer that is never used": (
        lambda: net(plain, fc1=linear(6, 5), fc2=linear(5, 3), unused=linear(2, 2)),
        "fc2.weight fc2.bias",
    ),
}


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_head_is_what_the_outputs_depend_on_last(case):
    make, names = HEADS[case]
    assert set(of(make()).layout.personal_names) == set(names.split())
    rest = of(make(), personal="not-head").layout
    assert set(rest.names) - set(rest.personal_names) == set(names.split())


def test_tied_weights_are_personal_in_both_uses_and_that_is_said():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.out = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x):
            return self.out(torch.tanh(self.body(self.embed(x.long()).mean(1))))

    model = Model.of(Tied(), Categorical(7), IDS)
    assert model.layout.personal_names == ("embed.weight",)
    assert model.notes == ("The head shares embed.weight with an earlier layer (tied weights), so both are personal.",)
    moved = model.initial.clone()
    model.layout.split(moved)[1].mul_(2.0)
    module = Tied()
    module.load_state_dict(
        {**model.layout.unflatten(moved), "out.weight": model.layout.unflatten(moved)["embed.weight"]}
    )
    torch.testing.assert_close(model.outputs(moved, IDS), module(IDS))
    assert model.local == {"body.weight", "body.bias"}


@pytest.mark.parametrize("members", [2])
def test_the_order_of_attributes_changes_nothing(members):
    parts = {"fc1": linear(4, 8), "fc2": linear(8, 3), "norm": lambda: nn.LayerNorm(8)}

    def run(self, x):
        return self.fc2(F.dropout(self.norm(torch.tanh(self.fc1(x))), 0.2, self.training))

    found = [
        bpfed.fit(
            Recipe(),
            scenarios.classification(),
            model=net(run, order=order, **parts),
            rounds=2,
            epochs=1,
            seed=1,
            members=members,
            compile="off",
            device="cpu",
        )
        for order in (["fc1", "norm", "fc2"], ["fc2", "fc1", "norm"])
    ]
    first = found[0].history[-1]["nll"]["pooled"]
    for other in found[1:]:
        assert other.history[-1]["nll"]["pooled"] == pytest.approx(first, abs=1e-6)
        assert other.federation.model.layout == found[0].federation.model.layout
    assert found[0].federation.model.layout.personal_names == ("fc2.weight", "fc2.bias")


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: None, (4,)),
        (LeNet, (3, 32, 32)),
        (scenarios.small_conv, (1, 6, 6)),
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.PReLU(), nn.Linear(6, 10)), (4,)),
    ],
)
def test_networks_used_in_the_order_of_their_layers_have_that_order(make, shape):
    model = make_model(
        torch.zeros(2, *shape),
        get_task("classification"),
        3 if make is scenarios.small_conv else 10,
        FedPer(),
        Settings(),
        make(),
    )
    names = [n for n, _ in model.module.named_parameters()]
    assert list(model.layout.names) == names == list(model.order)


def test_a_run_that_noted_no_layout_is_read_in_the_order_of_registration(tmp_path):
    """As version 0.7.0 wrote it: the flat vectors, with the layer registered last as the head."""
    data = scenarios.classification()
    swapped = net(plain, order=["fc2", "fc1"], fc1=linear(4, 5), fc2=linear(5, 3))
    settings = Settings(seed=0)
    model = make_model(data.train.x[:2], get_task("classification"), 3, FedPer(), settings, swapped)
    now = tmp_path / "now"
    now.write_bytes(saved.model_bytes(model))
    again = saved.load_model(now, swapped, None, data, FedPer(), settings)
    assert again.layout == model.layout
    before = tmp_path / "before"
    weights = {n: t.contiguous() for n, t in model.layout.unflatten(model.initial).items()}
    words = {"network": str(model.module), "likelihood": repr(model.likelihood)}
    before.write_bytes(saved.safetensors.torch.save(weights, words))
    old = saved.load_model(before, swapped, None, data, FedPer(), settings)
    assert old.layout.names == ("fc2.weight", "fc2.bias", "fc1.weight", "fc1.bias")
    assert old.layout.personal_names == ("fc1.weight", "fc1.bias")
    torch.testing.assert_close(old.outputs(old.initial, data.test.x), swapped(data.test.x))


def test_words_on_large_and_divided_modules_are_short():
    deep = nn.Sequential(*(nn.Linear(6, 6) for _ in range(9)), nn.Linear(6, 3))
    assert of(deep).layout.words == (
        "personal: layer 9 (21 weights); shared: layer 0, layer 1, layer 2 and 6 more (378 weights)"
    )
    divided = of(nn.Sequential(nn.Linear(6, 200), nn.Linear(200, 3)), personal="1.bias").layout
    assert divided.words == "personal: 1.bias (3 weights); shared: layer 0, 1.weight (2 000 weights)"


# --- every kind of module works or is refused with the true reason ----------------------------------------------------


class Checkpointed(nn.Sequential):
    reentrant = False

    def forward(self, x):
        return self[1](checkpoint(self[0], x, use_reentrant=self.reentrant))


class Reentrant(Checkpointed):
    reentrant = True


def under_autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.fc(x).float()


def frozen():
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    return module


def encoder(**form):
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, **form)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(24, 3))


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(5, 3)

    def forward(self, x):
        cell = isinstance(self.layer, nn.RNNCellBase)
        out = self.layer(x[:, 0] if cell else x)
        out = out[0] if isinstance(out, tuple) else out
        return self.head(out if cell else out[:, -1])


class Packed(nn.LSTM):
    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), 4), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(super().forward(packed)[0], batch_first=True)[0]


def embedded(self, x):
    return self.fc(self.embed(x.long()).mean(1))


def cut(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


class Residual(nn.Module):
    """A ResNet with three stages of one block each: eight layers of weights beside the ways around."""

    def __init__(self, norm):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), norm(4)
        self.first = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.second = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(norm(4) for _ in range(6))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x[:, None])))
        for i in range(3):
            inner = F.relu(self.norms[2 * i](self.first[i](x)))
            x = F.relu(x + self.norms[2 * i + 1](self.second[i](inner)))
        return self.head(x.mean((2, 3)))


class Vision(nn.Module):
    """A transformer on patches with a token of its own and learnt places, and dropout on its attention."""

    def __init__(self):
        super().__init__()
        self.patches, self.token = nn.Linear(6, 8), nn.Parameter(torch.zeros(1, 1, 8))
        self.places = nn.Parameter(0.02 * torch.randn(1, 5, 8))
        self.mix, self.out, self.norm, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], 1) + self.places
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0)
        return self.head(x[:, 0] + self.out(mixed.transpose(1, 2).flatten(2))[:, 0])


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter that starts at 0, and a head."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(5, 2))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.base(x) + x @ self.lora_A.T @ self.lora_B.T))


class Named(nn.Module):
    """Takes its inputs by name or by place, of which one is whole numbers."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 5), nn.Linear(11, 3)

    def forward(self, ids, signal):
        return self.head(torch.cat([self.table(ids).mean(1), signal.mean(1)], 1))


def prototypes(self, x):
    return -torch.cdist(self.body(x), self.body(self.kept))


def prototyped():
    module = net(prototypes, body=linear(6, 5))
    module.register_buffer("kept", torch.randn(3, 6, generator=scenarios.generator()))
    return module


def remembering(self, x):
    self.seen = x.shape
    return self.fc(x)


def tied(self, x):
    return self.head(F.linear(torch.tanh(self.body(x)), self.body.weight.T))


MANY = r"for many clients at once"
MODULES = {
    "ResNet with group normalisation": (lambda: Residual(lambda n: nn.GroupNorm(2, n)), X, None),
    "ResNet with batch normalisation": (lambda: Residual(nn.BatchNorm2d), X, None),
    "ViT with dropout on its attention": (Vision, X, None),
    "LoRA by hand": (Adapted, X[:, 0], None),
    "head registered first": (
        lambda: net(
            lambda self, x: self.head(torch.tanh(self.body(x))),
            order=("head", "body"),
            head=linear(5, 3),
            body=linear(6, 5),
        ),
        X[:, 0],
        None,
    ),
    "LayerNorm registered last": (
        lambda: net(
            lambda self, x: self.head(self.norm(self.body(x))),
            order=("body", "head", "norm"),
            body=linear(6, 5),
            head=linear(5, 3),
            norm=lambda: nn.LayerNorm(5),
        ),
        X[:, 0],
        None,
    ),
    "tied weights": (lambda: net(tied, body=linear(6, 5), head=linear(6, 3)), X[:, 0], None),
    "examples mixed": (
        lambda: net(lambda self, x: self.fc(x - x.mean(0)), fc=linear(6, 3)),
        X[:, 0],
        r"mixes examples of a batch",
    ),
    "Python state": (lambda: net(remembering, fc=linear(6, 3)), X[:, 0], None),
    "ConvTranspose": (
        lambda: nn.Sequential(nn.ConvTranspose1d(4, 4, 3, 2), nn.Flatten(), nn.Linear(52, 3)),
        X,
        None,
    ),
    "a layer on prototypes": (prototyped, X[:, 0], None),
    "inputs by name": (Named, {"ids": IDS.long(), "signal": X}, None),
    "inputs by place": (Named, (IDS.long(), X), None),
    "batch normalisation": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(24, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        X,
        None,
    ),
    "group normalisation": (
        lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(32, 3)),
        X,
        None,
    ),
    "TransformerEncoder with its dropout": (encoder, X, None),
    "TransformerEncoder without dropout": (lambda: encoder(dropout=0.0), X, None),
    "LSTM": (lambda: Recurrent(nn.LSTM(6, 5, batch_first=True)), X, None),
    "GRU": (lambda: Recurrent(nn.GRU(6, 5, batch_first=True)), X, None),
    "RNN": (lambda: Recurrent(nn.RNN(6, 5, batch_first=True)), X, None),
    "LSTMCell": (lambda: Recurrent(nn.LSTMCell(6, 5)), X, None),
    "packed sequences": (
        lambda: Recurrent(Packed(6, 5, batch_first=True)),
        X,
        r"packs sequences .*decides by the numbers .*padded ones",
    ),
    "GRUCell": (lambda: Recurrent(nn.GRUCell(6, 5)), X, None),
    "RNNCell": (lambda: Recurrent(nn.RNNCell(6, 5)), X, None),
    "Embedding of floats": (
        lambda: nn.Sequential(nn.Embedding(7, 5), nn.Flatten(), nn.Linear(20, 3)),
        IDS,
        r"looks its inputs up .*float32 .*embedding\(x\.long\(\)\)",
    ),
    "Embedding": (lambda: net(embedded, embed=lambda: nn.Embedding(7, 5), fc=linear(5, 3)), IDS, None),
    "frozen": (frozen, X[:, 0], None),
    "autocast": (lambda: net(under_autocast, fc=linear(6, 3)), X[:, 0], None),
    "compiled": (lambda: torch.compile(nn.Linear(6, 3), backend="eager"), X[:, 0], None),
    "compiled part": (
        lambda: nn.Sequential(torch.compile(nn.Linear(6, 5), backend="eager"), nn.Linear(5, 3)),
        X[:, 0],
        None,
    ),
    "lazy": (lambda: nn.LazyLinear(3), X[:, 0], r"'weight' .*no shape yet.*run the module once"),
    "old weight_norm": (
        lambda: nn.Sequential(cut(nn.Linear(6, 3))),
        X[:, 0],
        r"Layer '0' .*use torch\.nn\.utils\.parametrizations\.weight_norm",
    ),
    "gradient checkpointing": (
        lambda: Checkpointed(nn.Linear(6, 5), nn.Linear(5, 3)),
        X[:, 0],
        None,
    ),
    "reentrant checkpointing": (
        lambda: Reentrant(nn.Linear(6, 5), nn.Linear(5, 3)),
        X[:, 0],
        None,
    ),
    "TorchScript": (lambda: torch.jit.script(nn.Linear(6, 3)), X[:, 0], r"TorchScript.*give the plain one"),
    "DataParallel": (lambda: nn.DataParallel(nn.Linear(6, 3)), X[:, 0], r"nn\.DataParallel; give the module inside"),
    "decides by numbers": (
        lambda: net(lambda self, x: self.fc(x if x.sum() > 0 else -x), fc=linear(6, 3)),
        X[:1, 0],
        r"decides by the numbers in a tensor.*torch\.where",
    ),
    "changes its inputs": (
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3)),
        X[:, 0],
        r"changes its inputs in place",
    ),
    "two outputs": (lambda: net(lambda self, x: (self.fc(x), x), fc=linear(6, 3)), X[:, 0], r"returns a tuple"),
}


@pytest.mark.parametrize("case", MODULES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:There is a performance drop")
def test_a_module_trains_or_is_refused_with_the_true_reason(case):
    make, example, reason = MODULES[case]
    x = inputs.each(lambda t: t.repeat(4, *(1,) * (t.ndim - 1)), example)
    count = torch.arange(len(inputs.first(x)))
    data = from_arrays(x, count % 3, count % 2, test_fraction=0.5)

    def fit():
        quick = Settings(rounds=1, epochs=1, eval_draws=2, compile="off", device="cpu")
        return bpfed.fit(Recipe(), data, model=scenarios.seeded(make), settings=quick, say=lambda note: None)

    if reason is None:
        assert math.isfinite(fit().history[-1]["nll"]["pooled"])
        return
    with pytest.raises(UserError, match=rf"^[^\n]*{reason}[^\n]*\.$"):
        fit()


ROWS = torch.randn(40, 6, generator=scenarios.generator())
TARGETS = {
    "1 000 classes": (
        nn.Linear(6, 1000),
        torch.arange(40) % 7,
        {"task": "classification", "labels": [str(k) for k in range(1000)]},
    ),
    "several labels": (nn.Linear(6, 2), (ROWS[:, :2] > 0).long(), {"task": "multilabel"}),
    "a label for each step": (nn.Linear(6, 3), torch.arange(160).reshape(40, 4) % 3, {"task": "tokens"}),
    "noise that depends on inputs": (nn.Linear(6, 2), ROWS.sum(1), {"task": "heteroscedastic"}),
    "counts": (nn.Linear(6, 1), torch.arange(40) % 5, {"task": "counts"}),
}


@pytest.mark.parametrize("case", TARGETS)
def test_targets_of_all_kinds_train(case):
    module, y, form = TARGETS[case]
    x = {"input": ROWS[:, None].expand(-1, 4, -1)} if form["task"] == "tokens" else ROWS
    data = from_arrays(x, y, torch.arange(40) % 2, **form)
    quick = {"rounds": 1, "epochs": 1, "eval_draws": 2, "compile": "off", "device": "cpu"}
    run = bpfed.fit(FedAvg(), data, model=module, say=lambda note: None, **quick)
    assert math.isfinite(run.history[-1]["nll"]["pooled"])


def test_ids_are_not_to_be_scaled_and_other_inputs_are():
    ids = (torch.arange(120) * 7 % 90).reshape(30, 4)
    data = from_arrays(ids, torch.arange(30) % 3, torch.arange(30) % 2)
    told = {}
    for name, module in {
        "ids": net(embedded, embed=lambda: nn.Embedding(90, 5), fc=linear(5, 3)),
        "numbers": nn.Linear(4, 3),
    }.items():
        told[name] = []
        bpfed.fit(FedAvg(), data, model=module, rounds=1, epochs=1, compile="off", say=told[name].append)
    assert [("not scaled" in " ".join(sentences)) for sentences in told.values()] == [False, True]


# --- layers that are computed in another way than PyTorch's ------------------------------------------------------------


LAYERS = {
    "LSTM": lambda: nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True, proj_size=3),
    "GRU": lambda: nn.GRU(6, 5, 2, bidirectional=True, bias=False),
    "RNN": lambda: nn.RNN(6, 5, nonlinearity="relu", batch_first=True),
    "LSTMCell": lambda: nn.LSTMCell(6, 5),
    "checkpointed": lambda: Checkpointed(nn.Linear(6, 5), nn.Linear(5, 3)),
}


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_gradients_of_many_clients_are_those_of_the_layer_as_pytorch_runs_it(case):
    def run(self, x):
        x = x[:, 0] if case == "LSTMCell" else x.transpose(0, 1) if case == "GRU" else x
        out = self.layer(x)
        out = out[0] if isinstance(out, tuple) else out
        return self.head((out.transpose(0, 1) if case == "GRU" else out).flatten(1)[:, :5])

    module = net(run, layer=LAYERS[case], head=linear(5, 3))
    model, y = of(module, X), torch.tensor([0, 1, 2, 0, 1])
    weights = torch.stack([model.initial, 1.5 * model.initial])
    value, gradient = model.gradient(weights, X.expand(2, -1, -1, -1), y.expand(2, -1), torch.ones(2, 5), KEYS)
    for w, total, slope in zip(weights, value, gradient, strict=True):
        named = {n: p.clone().requires_grad_() for n, p in model.layout.unflatten(w).items()}
        loss = F.cross_entropy(torch.func.functional_call(module, named, (X,)), y, reduction="sum")
        torch.testing.assert_close(total, loss.detach())
        expected = torch.autograd.grad(loss, list(named.values()))
        torch.testing.assert_close(slope, torch.cat([g.flatten() for g in expected]), rtol=1e-4, atol=1e-6)


KEYS = scenarios.keys(2)


def test_dropout_between_recurrent_layers_is_the_clients_own():
    model = of(Recurrent(nn.LSTM(6, 5, 2, batch_first=True, dropout=0.5)), X)
    first, other = (model.outputs(model.initial, X, key) for key in KEYS)
    assert torch.equal(first, model.outputs(model.initial, X, KEYS[0]))
    assert not torch.allclose(first, other)
    torch.testing.assert_close(first[:2], model.outputs(model.initial, X[:2], KEYS[0]))


def test_gains_of_norms_are_pulled_towards_one_and_other_weights_towards_zero():
    """One step of Adam, whose sign is that of the gradient, with a pull that outweighs the data."""
    module = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        module[1].weight.copy_(torch.tensor([0.5, 0.8, 1.2, 1.5, 2.0]))
    model, method = of(module, X[:, 0, :4]), Recipe()
    assert model.gains == {"1.weight"}
    first = method.init(model)
    hparams = method.hparam_rows(1) | {"counts": torch.ones(1, 3), "mean_precision": torch.full((1,), 1e9)}
    local = method.begin(model, rows(first.shared, 1), rows(first.personal, 1), hparams)
    after, _ = method.step(model, local, scenarios.random_batch(1), hparams, "all")
    moved = model.layout.unflatten((after.q.mean - local.q.mean)[0])
    for name in ("0.weight", "0.bias", "1.weight"):
        centre = 1.0 if name == "1.weight" else 0.0
        assert torch.equal(moved[name].sign(), (centre - module.get_parameter(name)).sign()), name


# --- attention's dropout ----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Shows what dropout makes of attention weights: the values are the unit vectors, so outputs are the weights."""

    def __init__(self, rate, mask=None, causal=False):
        super().__init__()
        self.rate, self.mask, self.causal = rate, mask, causal
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        value = torch.eye(x.shape[1]).expand(len(x), 1, -1, -1)
        rate = self.rate if self.training else 0.0
        query = x[:, None]
        return F.scaled_dot_product_attention(query, query, value, self.mask, rate, self.causal).flatten(1) * self.scale


class Anything:
    """A likelihood for outputs of any shape."""

    def parameters(self):
        return {}

    def check(self, outputs):
        pass


@pytest.mark.parametrize(
    ("mask", "causal"),
    [(None, False), (None, True), ((torch.arange(4) < 3).expand(4, 4), False), (X[0, :, :4], False)],
)
def test_attention_drops_its_weights_by_the_clients_key(mask, causal):
    model = Model.of(Attention(0.3, mask, causal), Anything(), X)
    x = torch.randn(400, 4, 6, generator=scenarios.generator())
    first, other = scenarios.keys(2)
    full = model.outputs(model.initial, x)
    dropped = model.outputs(model.initial, x, first)
    there = full > 1e-3
    ratio = dropped[there] / full[there]
    kept = ratio != 0
    torch.testing.assert_close(ratio[kept], torch.full_like(ratio[kept], 1 / 0.7), rtol=1e-4, atol=1e-4)
    assert 1 - kept.float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert torch.equal(dropped, model.outputs(model.initial, x, first))
    assert not torch.equal(dropped == 0, model.outputs(model.initial, x, other) == 0)
    torch.testing.assert_close(model.outputs(model.initial, x[:7], first), dropped[:7])


def test_an_attention_layer_drops_by_the_clients_key_with_and_without_its_weights():
    for need in (True, False):
        layer = net(
            lambda self, x, need=need: self.fc(self.attention(x, x, x, need_weights=need)[0].flatten(1)),
            attention=lambda: nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True),
            fc=linear(24, 3),
        )
        model = of(layer, X)
        first, other = (model.outputs(model.initial, X, key) for key in scenarios.keys(2))
        again = model.outputs(model.initial, X, scenarios.keys(1)[0])
        assert torch.equal(first, again)
        assert not torch.allclose(first, other)
        torch.testing.assert_close(model.outputs(model.initial, X), layer.eval()(X))


# --- examples apart from each other -----------------------------------------------------------------------------------


class Place(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.arange(len(x))[:, None]


class OnlyTraining(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0) if self.training else x)


@pytest.mark.parametrize(
    ("make", "mode"),
    [
        (lambda: net(lambda self, x: self.fc(x - x.mean(0)), fc=linear(6, 3)), "evaluation"),
        (lambda: net(lambda self, x: self.fc(x) + self.fc(x).softmax(0), fc=linear(6, 3)), "evaluation"),
        (lambda: nn.Sequential(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0), nn.Linear(6, 3)), "evaluation"),
        (lambda: Place(6, 3), "evaluation"),
        (lambda: OnlyTraining(6, 3), "training"),
    ],
)
def test_a_module_that_mixes_examples_is_refused(make, mode):
    with pytest.raises(UserError, match=f"^The module mixes examples of a batch: in {mode} mode .* itself alone\\.$"):
        of(scenarios.seeded(make))


def test_mixing_is_seen_where_the_first_examples_are_alike():
    x = torch.cat([torch.zeros(10, 4), torch.randn(30, 4, generator=scenarios.generator())])
    data = from_arrays(x, torch.arange(40) % 2, torch.arange(40) % 2, seed=0)
    data.train.x[:5] = 0.0
    module = net(lambda self, x: self.fc(x - x.mean(0)), fc=linear(4, 2))
    with pytest.raises(UserError, match="mixes examples"):
        bpfed.fit(FedAvg(), data, model=module, rounds=1)


def test_an_output_without_its_batch_axis_is_refused():
    with pytest.raises(UserError, match=r"for one example alone has shape \[3\] instead of \[1, 3\]"):
        of(net(lambda self, x: self.fc(x).squeeze(), fc=linear(6, 3)))


class Drifting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1.0 + 0.1 * self.calls)


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        self.calls, self.kept = 0, []

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Always(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5)


@pytest.mark.parametrize("make", [lambda: Drifting(6, 3)])
def test_outputs_that_differ_from_call_to_call_are_refused(make):
    with pytest.raises(UserError, match=r"^The module's outputs for the same inputs differ from call to call"):
        of(make())


def test_dropout_that_is_on_in_evaluation_is_refused():
    with pytest.raises(UserError, match=r"^The module draws random numbers that cannot be keyed"):
        of(Always(6, 3))


def test_an_attribute_that_changes_is_said_and_one_that_stays_is_not():
    (note,) = of(Counting()).notes
    assert note.startswith("The module sets its attribute 'calls' while it runs. ")
    still = nn.Linear(6, 3)
    still.calls, still.kept = 0, [1]
    assert of(still).notes == ()


# --- what the estimator and the priors ask of a module ----------------------------------------------------------------


class Prototypes(nn.Module):
    """Compares each example with two prototypes, which a linear map has embedded: its rows are no examples."""

    def __init__(self, count):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 5), nn.Linear(count, 3)
        self.register_buffer("prototypes", torch.randn(count, 5, generator=scenarios.generator()))
        self.map = nn.Linear(5, 5)

    def forward(self, x):
        return self.head(self.embed(x) @ self.map(self.prototypes).T)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_layer_that_runs_on_prototypes_is_not_taken_for_one_of_examples(count):
    model = of(scenarios.seeded(lambda: Prototypes(count)), X[:count, 0])
    assert model.local == {"embed.weight", "embed.bias", "head.weight", "head.bias"}


def test_the_local_estimator_is_right_where_a_layer_runs_on_two_prototypes():
    """Its mean is that of weight draws: prototypes that are alike stay alike, whatever weights are drawn."""
    module = scenarios.seeded(lambda: Prototypes(2))
    module.prototypes.fill_(2.0)
    with torch.no_grad():
        module.head.weight.copy_(torch.tensor([[2.0, -2.0], [-2.0, 2.0], [0.0, 0.0]]))
    model = of(module, X[:2, 0])
    draws, y = 2000, torch.tensor([0, 1])
    weights = model.initial.expand(draws, -1)
    q = Gaussian(weights, torch.full_like(weights, 0.3))
    same = [t.expand(draws, *t.shape) for t in (X[:2, 0], y, torch.ones(2))]
    local = model.local_gradient(q, *same, scenarios.keys(draws))[0]
    noise = torch.randn(draws, model.layout.total, generator=scenarios.generator())
    drawn = model.gradient(q.draw(noise), *same, scenarios.keys(draws))[0]
    error = (local.var() / draws + drawn.var() / draws).sqrt()
    assert abs(local.mean() - drawn.mean()) < 4 * error, (local.mean(), drawn.mean(), error)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_fan_in_is_what_a_unit_sums_over_in_layers_of_any_kind():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.place = nn.Parameter(torch.zeros(1, 4, 6))
            self.embed = nn.Embedding(7, 6)
            self.up = nn.ConvTranspose1d(4, 8, 4, stride=2, groups=2)
            self.down = nn.Conv1d(8, 4, 3, groups=2)
            self.norm = nn.LayerNorm(12)
            self.cell = nn.GRUCell(48, 5)
            self.head = nn.Linear(5, 3)

        def forward(self, x):
            x = self.up(self.embed(x.long()) + self.place)
            return self.head(self.cell(self.norm(self.down(x)).flatten(1)))

    layout = of(scenarios.seeded(Mixed), IDS).layout
    found = {n: set(t.flatten().tolist()) for n, t in layout.unflatten(layout.fan_in()).items()}
    assert {n: counts.pop() for n, counts in found.items() if len(counts) == 1} == {
        "place": 48.0,  # added to something, as a normalisation's weights are: as in the widest layer
        "embed.weight": 1.0,
        "up.weight": 4.0,  # 2 channels of its group, at each of 2 places
        "up.bias": 4.0,
        "down.weight": 12.0,
        "down.bias": 12.0,
        "norm.weight": 48.0,
        "norm.bias": 48.0,
        "cell.weight_ih": 48.0,
        "cell.weight_hh": 5.0,
        "cell.bias_ih": 48.0,
        "cell.bias_hh": 5.0,
        "head.weight": 5.0,
        "head.bias": 5.0,
    }


def test_a_fedper_run_with_a_skip_path_keeps_both_last_layers_at_the_client():
    module = net(skip, order=["head", "body", "skip"], skip=linear(4, 3), body=linear(4, 5), head=linear(5, 3))
    run = bpfed.fit(FedPer(), scenarios.classification(), model=module, rounds=1, epochs=1, compile="off")
    assert "personal: skip, head (33 weights); shared: body (25 weights)" in run.summary()
