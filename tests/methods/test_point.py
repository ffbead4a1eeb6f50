"""Point-estimate methods on the split: who moves when, what is kept, what is tuned; against plain PyTorch."""

import pytest
import scenarios
import torch
from torch import nn
from torch.nn import functional as F

from bpfed._util.errors import UserError
from bpfed.data.federated import FederatedData
from bpfed.methods import FedAvg, FedAvgFT, FedBABU, FedPer, FedRep, LGFedAvg, LocalOnly
from bpfed.methods.base import ADAPT, TUNE, Phase, Weights, rows
from bpfed.methods.point import MOVES

CLIENTS, RATE = 2, 3e-3


class Clients:
    """Some clients of a method on a network with a body ``0`` and a head ``2``."""

    def __init__(self, method):
        self.method = method
        self.model = scenarios.model_of(module(), personal=method.personal)
        self.initial = method.init(self.model)
        self.hparams = {n: torch.full((CLIENTS,), v) for n, v in {**method.hparams(), "lr": RATE}.items()}

    def begin(self, shared=None, personal=None):
        shared = rows(self.initial.shared if shared is None else shared, CLIENTS)
        personal = rows(self.initial.personal, CLIENTS) if personal is None else personal
        return self.method.begin(self.model, shared, personal, self.hparams)

    def steps(self, local, phase, numbers):
        for t in numbers:
            local, _ = self.method.step(self.model, local, batch(t), self.hparams, phase)
        return local

    def train(self, phases, shared=None, personal=None, count=3):
        local, t = self.begin(shared, personal), 0
        for phase in phases:
            local = self.steps(local, phase.name, range(t, t + count))
            t += count
        return self.method.finish(self.model, local, self.hparams)

    def weights(self, shared, personal):
        shared = rows(shared, CLIENTS) if shared.weights.ndim == 1 else shared
        return self.method.predictive(self.model, shared, personal).draw(scenarios.keys(CLIENTS), 0)


def module():
    return scenarios.seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))


def batch(t):
    return scenarios.random_batch(CLIENTS, 5, seed=t, used=[5, 3])


def by_hand(model, client, parts, count=3, start=None, optimiser=torch.optim.Adam, **options):
    """One client in float64: for each part (names of its layers) a new optimiser, ``count`` steps on the mean loss."""
    net = module().double()
    if start is not None:
        net.load_state_dict({n: p.double() for n, p in model.layout.unflatten(start).items()})
    t = 0
    for layers in parts:
        steps = optimiser([p for n, p in net.named_parameters() if n[0] in layers], lr=RATE, **options)
        for _ in range(count):
            used = [5, 3][client]
            steps.zero_grad()
            F.cross_entropy(net(batch(t).x[client, :used].double()), batch(t).y[client, :used]).backward()
            steps.step()
            t += 1
    return model.layout.flatten(dict(net.named_parameters())).float()


class Descent(torch.optim.SGD):
    """Plain PyTorch's, at the step size of the test of momentum."""

    def __init__(self, params, lr, **options):
        super().__init__(params, lr=100 * lr, **options)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


# --- rounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        (FedPer(), ["02"]),
        (LGFedAvg(), ["02"]),
        (LocalOnly(), ["02"]),
        (FedRep(optimiser="adam", decay=0.0), ["2", "0"]),  # the head, then the body with the new head
        (FedBABU(), ["0"]),
    ],
    ids=lambda v: v.name if hasattr(v, "name") else "",
)
def test_a_round_is_that_of_plain_pytorch(method, parts):
    clients = Clients(method)
    finished = clients.train(method.phases(1))
    found = torch.cat([finished.upload.weights, finished.personal.weights], -1)
    for s in range(CLIENTS):
        close(found[s], by_hand(clients.model, s, parts))


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.5, 2.0)])
def test_a_round_of_descent_with_momentum_is_that_of_plain_pytorch(momentum, decay):
    # Many times Adam's step size: an error in the momentum is then far above the tolerance.
    method = FedRep(optimiser="sgd", momentum=momentum, decay=decay)
    clients = Clients(method)
    clients.hparams["lr"] *= 100
    finished = clients.train(method.phases(1))
    found = torch.cat([finished.upload.weights, finished.personal.weights], -1)
    for s in range(CLIENTS):
        share = decay / float(batch(0).size[s])  # PyTorch's is of the mean loss
        expected = by_hand(clients.model, s, ["2", "0"], optimiser=Descent, momentum=momentum, weight_decay=share)
        close(found[s], expected)


def test_fedrep_trains_its_head_for_the_rounds_passes_and_its_body_for_few():
    assert FedRep(body_epochs=2).phases(10) == (Phase("personal", 10), Phase("shared", 2))


@pytest.mark.parametrize("phase", MOVES)
def test_a_part_that_does_not_move_is_not_touched_nor_are_its_memory_and_its_count(phase):
    clients = Clients(FedPer())
    before = clients.steps(clients.begin(), "all", range(2))
    after = clients.steps(before, phase, range(2, 4))
    for moves, old, new in zip(MOVES[phase], before[:2], after[:2], strict=True):
        assert torch.equal(new.steps, old.steps + (2 if moves else 0))
        assert torch.equal(new.weights, old.weights) != moves
        assert torch.equal(new.memory.first, old.memory.first) != moves


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("keep", [True, False])
def test_the_optimisers_memory_is_kept_over_rounds_where_asked(keep, optimiser):
    # Each client its own server: two rounds of three steps are then one round of six, if memory is kept.
    clients = Clients(FedPer(keep_adam=keep, optimiser=optimiser))
    first = clients.method.finish(clients.model, clients.steps(clients.begin(), "all", range(3)), clients.hparams)
    local = clients.method.begin(clients.model, first.upload, first.personal, clients.hparams)
    found = clients.steps(local, "all", range(3, 6)).weights
    expected = clients.steps(clients.begin(), "all", range(6)).weights
    assert torch.allclose(found, expected, rtol=0, atol=1e-7) == keep


def test_only_the_last_layer_of_lg_fedavg_travels():
    clients = Clients(LGFedAvg())
    assert clients.model.layout.personal_names == ("0.weight", "0.bias")
    assert clients.train(LGFedAvg().phases(1)).upload.weights.shape == (CLIENTS, 5 * 3 + 3)


def test_nothing_of_local_training_travels_and_every_client_is_by_itself():
    data = scenarios.classification(sizes=(12, 7))
    first = torch.tensor([0])
    one = FederatedData(
        data.name, data.clients[:1], data.train.select(first), data.test.select(first), data.task, data.classes
    )
    together, alone = (scenarios.run(LocalOnly(), d, rounds=2) for d in (data, one))
    assert together.shared.weights.numel() == 0
    close(together.personal(first).weights, alone.personal(first).weights)


# --- tuning -----------------------------------------------------------------------------------------------------------


def test_fedavg_with_fine_tuning_has_the_rounds_of_fedavg():
    tuned, plain = (scenarios.run(method, rounds=2) for method in (FedAvgFT(), FedAvg()))
    assert torch.equal(tuned.shared.weights, plain.shared.weights)


@pytest.mark.parametrize("method", [FedAvgFT(), FedBABU(finetune="all")], ids=["fedavg-ft", "fedbabu"])
def test_a_network_that_is_tuned_whole_is_the_servers_trained_further_and_predicts(method):
    clients = Clients(method)
    body = clients.initial.shared.weights + 0.1
    trained = clients.train(method.phases(1), Weights(body))
    head = clients.model.layout.split(clients.model.initial)[1]
    start = torch.cat([body, head])
    untuned = clients.weights(Weights(body), trained.personal)
    assert torch.equal(untuned, start.expand(CLIENTS, -1))  # a round is no tuning: the server's weights predict
    tuned = clients.train(method.tuning(1), Weights(body), trained.personal)
    found = clients.weights(Weights(body), tuned.personal)
    for s in range(CLIENTS):
        close(found[s], by_hand(clients.model, s, ["02"], start=start))
    assert torch.equal(clients.weights(Weights(body + 1), tuned.personal), found)  # its own, whatever the server has


def test_fedbabus_head_is_held_in_rounds_and_made_from_its_first_value_before_prediction():
    method = FedBABU()
    clients = Clients(method)
    head = clients.model.layout.split(clients.model.initial)[1]
    finished = clients.train(method.phases(2))
    assert torch.equal(finished.personal.weights, head.expand(CLIENTS, -1))
    body = Weights(finished.upload.weights.mean(0))
    tuned = clients.train(method.tuning(1), body, finished.personal)
    for s in range(CLIENTS):
        start = torch.cat([body.weights, head])
        close(clients.weights(body, tuned.personal)[s], by_hand(clients.model, s, ["2"], start=start))
    again = clients.train(method.tuning(1), body, tuned.personal)  # not from the head that was tuned last
    assert torch.equal(again.personal.weights, tuned.personal.weights)
    assert torch.equal(clients.train(method.phases(1), body, tuned.personal).personal.weights, head.expand(CLIENTS, -1))


def test_how_many_passes_of_tuning():
    assert FedBABU().tuning(7) == FedBABU().adaptation(7) == (Phase(ADAPT, 7),)
    assert FedBABU(tune_epochs=3, finetune="all").tuning(7) == (Phase(TUNE, 3),)
    assert FedAvgFT().tuning(7) == FedAvgFT().adaptation(7) == (Phase(TUNE, 7),)
    assert FedPer().tuning(7) == ()
    assert FedPer().adaptation(7) == LocalOnly().adaptation(7) == (Phase(ADAPT, 7),)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (FedAvg(personal="head"), "FedAvg shares all weights; leave it at 'none'"),
        (LocalOnly(personal="head"), "keeps all weights with the client; leave it at 'all'"),
        (FedPer(personal="none"), "the method that shares all weights is 'fedavg'"),
        (LGFedAvg(personal="all"), "the method that keeps all weights with the client is 'local'"),
        (FedRep(body_epochs=0), "body_epochs is 0, but must be at least 1"),
        (FedBABU(finetune="heads"), "finetune is 'heads', but must be 'head' or 'all'"),
        (FedBABU(tune_epochs=-1), "tune_epochs is -1, but must be 0 or more"),
        (FedPer(optimiser="sdg"), "optimiser is 'sdg', but must be 'adam' or 'sgd'"),
        (FedPer(decay=-0.1), "decay is -0.1, but must be 0 or more"),
        (FedPer(momentum=1.0), "momentum is 1.0, but must be at least 0 and below 1"),
        (FedPer(laplace_precision=-1.0), "laplace_precision is -1.0, but must be 0 or more"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_one_sentence(method, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        method.check()
    assert str(error.value).endswith((".", "?"))


def test_a_split_may_be_any_split():
    for method in (FedPer(personal="*.bias"), FedRep(personal=["0", "2.bias"]), LGFedAvg(personal="0")):
        method.check()
