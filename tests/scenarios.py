"""Small federations, models and batches that several test files use."""

import torch
from torch import nn
from torch.nn import functional as F

from bpfed.config.settings import Settings
from bpfed.data.federated import Examples, FederatedData
from bpfed.engine.federation import Federation
from bpfed.engine.local import LocalRound, Rows
from bpfed.engine.simulator import Simulator
from bpfed.inference import rng
from bpfed.inference.estimators import Batch
from bpfed.inference.likelihoods import Categorical
from bpfed.methods.base import rows
from bpfed.nn.model import Model
from bpfed.nn.networks import linear, mlp


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def seeded(make, seed=0):
    """What ``make()`` gives, with initial weights that are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def classification(sizes=(12, 7, 20, 5, 9), features=4, classes=3, test=6, seed=0, names=None):
    """Clients with these numbers of training examples; labels follow the inputs."""
    g = generator(seed)
    centres = 1.5 * torch.randn(classes, features, generator=g)

    def examples(counts):
        parts = []
        for n in counts:
            y = torch.randint(classes, (n,), generator=g)
            parts.append((centres[y] + torch.randn(n, features, generator=g), y))
        return Examples.of(parts)

    names = tuple(names or (f"site {chr(97 + i)}" for i in range(len(sizes))))
    return FederatedData("small", names, examples(sizes), examples([test] * len(sizes)), "classification", classes)


def images(names=("a", "b")):
    """Clients with four images of 32 x 32 each, half of them of either class."""
    g = generator()
    examples = Examples.of([(torch.randn(4, 3, 32, 32, generator=g), torch.tensor([0, 1, 0, 1])) for _ in names])
    return FederatedData("images", names, examples, examples, "classification", 2)


def regression(sizes=(12, 7, 20), features=3, test=6, noise_scale=0.3, seed=0):
    """Clients whose targets are linear in the inputs, with a slope of their own each."""
    g = generator(seed)
    slopes = torch.randn(features, generator=g) + 0.3 * torch.randn(len(sizes), features, generator=g)

    def examples(counts):
        xs = [torch.randn(n, features, generator=g) for n in counts]
        return Examples.of(
            [(x, x @ s + noise_scale * torch.randn(len(x), generator=g)) for x, s in zip(xs, slopes, strict=True)]
        )

    names = tuple(f"site {i}" for i in range(len(sizes)))
    return FederatedData("lines", names, examples(sizes), examples([test] * len(sizes)), "regression")


def counts(sizes=(12, 7, 20), features=3, test=6, seed=0):
    """Clients whose targets are Poisson counts; the logarithm of the rate is linear in the inputs."""
    g = generator(seed)
    slope = 0.5 * torch.randn(features, generator=g)

    def examples(numbers):
        xs = [torch.randn(n, features, generator=g) for n in numbers]
        return Examples.of([(x, torch.poisson((1.0 + x @ slope).exp(), generator=g)) for x in xs])

    names = tuple(f"site {i}" for i in range(len(sizes)))
    return FederatedData("visits", names, examples(sizes), examples([test] * len(sizes)), "counts")


def survival(sizes=(12, 7, 20), features=3, test=6, seed=0):
    """Clients whose targets are times to an event with proportional hazards; a minus sign marks a censored one."""
    g = generator(seed)
    slope = 0.7 * torch.randn(features, generator=g)

    def times(x):
        happens, ends = (torch.empty(len(x)).exponential_(generator=g) for _ in range(2))
        happens, ends = happens * torch.exp(-x @ slope), 2.0 * ends
        return torch.where(happens <= ends, happens, -ends)

    def examples(numbers):
        return Examples.of([(x, times(x)) for x in (torch.randn(n, features, generator=g) for n in numbers)])

    names = tuple(f"site {i}" for i in range(len(sizes)))
    return FederatedData("follow-up", names, examples(sizes), examples([test] * len(sizes)), "survival")


def packed(task, sizes=(12, 7, 20), features=3, test=6, seed=0):
    """Clients whose targets are sets of three labels, grades from 0 to 3, or noisy numbers; all follow the inputs."""
    g = generator(seed)
    slope = torch.randn(features, generator=g)

    def target(x):
        noise = torch.randn(len(x), generator=g)
        score = x @ slope + noise * (torch.exp(0.5 * x[:, 0]) if task == "heteroscedastic" else 0.5)
        if task == "multilabel":
            return (score > 0).long() + 2 * (x[:, 0] > 0).long() + 4 * (noise > 0.5).long()
        if task == "ordinal":
            return torch.bucketize(score, torch.tensor([-1.0, 0.0, 1.0]))
        if task == "negative-binomial":
            return torch.poisson((0.5 * score + torch.randn(len(x), generator=g)).exp(), generator=g)
        return score

    def examples(numbers):
        return Examples.of([(x, target(x)) for x in (torch.randn(n, features, generator=g) for n in numbers)])

    names = tuple(f"site {i}" for i in range(len(sizes)))
    labels = {"multilabel": ("a", "b", "c"), "ordinal": ("0", "1", "2", "3")}.get(task, ())
    return FederatedData(task, names, examples(sizes), examples([test] * len(sizes)), task, len(labels), labels)


def reordered(data, order):
    """The same clients in another order."""
    order = torch.as_tensor(order)
    names = tuple(data.clients[i] for i in order)
    return FederatedData(
        data.name, names, data.train.select(order), data.test.select(order), data.task, data.classes, data.labels
    )


def small_mlp(features=4, outputs=3, hidden=6, seed=0):
    return seeded(lambda: mlp(features, outputs, (hidden,)), seed)


def module_for(method, features=4, outputs=3, **options):
    """A small network of the kind that a method is for."""
    return linear(features, outputs) if method.network == "linear" else small_mlp(features, outputs, **options)


def smooth():
    """A network whose every weight has a gradient: a rounding error in one that has none would become a step of Adam."""
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))


def small_conv(channels=1, classes=3, seed=0):
    """A convolution, a pooling layer and a linear head for images of 6 x 6."""
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, classes)
        ),
        seed,
    )


def model_of(module, shape=(4,), classes=3, personal="head"):
    return Model.of(module, Categorical(classes), torch.zeros(2, *shape), personal)


def start(method, data=None, module=None, **settings):
    """A federation before its first round; few epochs, small batches, nothing compiled."""
    data = classification() if data is None else data
    if module is None:
        module = module_for(method, data.input_shape[0], data.classes or 1)
    chosen = {"rounds": 2, "epochs": 2, "batch": 5, "compile": "off", "device": "cpu", "eval_draws": 4} | settings
    return Federation.start(method, data, Settings(**chosen), module)


def run(method, data=None, rounds=2, module=None, **settings):
    """A federation after that many rounds."""
    federation = start(method, data, module, rounds=rounds, **settings)
    simulator = Simulator([federation])
    for _ in range(rounds):
        simulator.round()
    return federation


def keys(count, seed=0, word=0):
    """Keys of ``count`` clients, ``[S, 2]``."""
    return rng.keys(seed, word, rng.Purpose.WEIGHTS, rng.client_ids([f"client {i}" for i in range(count)]))


def random_batch(clients=3, examples=5, shape=(4,), classes=3, seed=0, used=None, size=20.0):
    """A batch of each client; ``used`` of its examples are real, the rest padding."""
    g = generator(seed)
    x = torch.randn(clients, examples, *shape, generator=g)
    y = torch.randint(classes, (clients, examples), generator=g)
    used = torch.full((clients,), examples) if used is None else torch.as_tensor(used)
    mask = (torch.arange(examples) < used[:, None]).float()
    return Batch(x, y, mask, torch.full((clients,), float(size)), keys(clients, seed))


# --- modules whose noise can be drawn locally in the head only ---------------------------------------------------------


class Tied(nn.Module):
    """One matrix used twice, with a bias of its own each time."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class SharedBias(nn.Module):
    """Two matrices with one bias."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.bias = self.first.bias
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Words(nn.Module):
    """One layer for each of an example's two words, another for both words of all examples in one long batch."""

    def __init__(self):
        super().__init__()
        self.each, self.flat, self.head = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        words = torch.tanh(self.each(x.unflatten(1, (2, 2))))
        words = torch.tanh(self.flat(words.flatten(0, 1))).unflatten(0, (-1, 2))
        return self.head(words[:, 0] * words[:, 1])


class Computed(nn.Module):
    """A weight made of two parameters, with a plain bias; and a plain weight with a bias that is made."""

    def __init__(self):
        super().__init__()
        self.direction, self.length = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.ones(4, 1))
        self.bias = nn.Parameter(torch.zeros(4))
        self.plain = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = torch.tanh(F.linear(x, self.length * self.direction, self.bias))
        return self.head(torch.tanh(F.linear(x, self.plain.weight, 2 * self.plain.bias)))


class Listed(nn.Module):
    """A weight of a linear map that another call takes in a list."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        penalty = torch.stack([self.body.weight]).square().mean()
        return self.head(torch.tanh(self.body(x))) * penalty


ODD = (Tied, SharedBias, Words, Computed, Listed)


# --- local rounds -------------------------------------------------------------------------------------------------------


def rows_of(federation, clients, round_=1):
    """These clients of a federation, about to train."""
    clients = torch.as_tensor(clients)
    return Rows(
        shared=rows(federation.shared, len(clients)),
        personal=federation.personal(clients),
        hparams=federation.hparams(round_, clients),
        start=federation.data.train.offsets[clients],
        size=federation.data.train.sizes[clients],
        shuffle=federation.keys(round_, rng.Purpose.SHUFFLE, clients),
        key=federation.keys(round_, rng.Purpose.WEIGHTS, clients),
    )


def local_round(federation, width=None):
    """The federation's local training."""
    train, settings = federation.data.train, federation.settings
    width = width or min(settings.batch, int(train.sizes.max()))
    return LocalRound(
        federation.method, federation.model, train.x, train.y, settings.batch, settings.epochs, False, width
    )


def hparams(method, clients, dtype=torch.float32):
    """A method's numbers, the same for each of so many clients."""
    return {name: torch.full((clients,), value, dtype=dtype) for name, value in method.hparams().items()}


def untrained(method, clients=3):
    """A method, the server's first state, and what clients would upload that train on nothing."""
    model = model_of(module_for(method), personal=method.personal)
    first = method.init(model)
    numbers = hparams(method, clients)
    with torch.no_grad():
        local = method.begin(model, rows(first.shared, clients), rows(first.personal, clients), numbers)
        return method, first.shared, method.finish(model, local, numbers).upload
