"""FedAvg: Adam on the mean loss at the clients, the mean of their weights at the server."""

import scenarios
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

from bpfed.engine.simulator import Simulator
from bpfed.methods import FedAvg
from bpfed.methods.base import Weights, rows

STEPS = 10


def test_local_steps_are_those_of_adam_on_the_mean_loss():
    method = FedAvg(lr=3e-3)
    model = scenarios.model_of(scenarios.small_mlp(), personal=method.personal)
    initial, hparams = method.init(model), {"lr": torch.full((2,), method.lr)}
    local = method.begin(model, rows(initial.shared, 2), rows(initial.personal, 2), hparams)
    batches = [scenarios.random_batch(2, 5, seed=t, used=[5, 3]) for t in range(STEPS)]
    for batch in batches:
        local, loss = method.step(model, local, batch, hparams, "all")
    for s, used in enumerate((5, 3)):
        module = scenarios.small_mlp().double()
        optimiser = torch.optim.Adam(module.parameters(), lr=method.lr)
        for batch in batches:
            optimiser.zero_grad()
            expected = F.cross_entropy(module(batch.x[s, :used].double()), batch.y[s, :used])
            expected.backward()
            optimiser.step()
        weights = model.layout.flatten(dict(module.named_parameters()))
        torch.testing.assert_close(local.weights[s].double(), weights, rtol=0, atol=1e-6)
        torch.testing.assert_close(loss[s].double(), expected.detach(), rtol=1e-5, atol=1e-6)


def test_nothing_is_personal_and_nothing_is_kept():
    federation = scenarios.start(FedAvg())
    assert federation.model.layout.personal == 0
    assert not any(t.numel() for t in tree_flatten(federation.personal(torch.tensor([0, 1])))[0])


def test_the_server_takes_the_weighted_mean():
    uploads = Weights(torch.tensor([[0.0, 4.0], [1.0, 0.0], [3.0, 2.0]]))
    found = FedAvg().aggregate(Weights(torch.zeros(2)), uploads, torch.tensor([1.0, 2.0, 1.0]))
    torch.testing.assert_close(found.weights, torch.tensor([1.25, 1.5]))


def test_one_client_that_always_takes_part_trains_as_if_alone():
    # Every round begins Adam anew; apart from that a federation of one is plain training.
    data = scenarios.classification((10,))
    federation = scenarios.start(FedAvg(lr=3e-3), data, epochs=1, batch=10, rounds=4)
    simulator = Simulator([federation])
    module = scenarios.small_mlp().double()
    for _ in range(4):
        simulator.round()
        optimiser = torch.optim.Adam(module.parameters(), lr=3e-3)
        F.cross_entropy(module(data.train.x.double()), data.train.y).backward()
        optimiser.step()
        module.zero_grad()
    expected = federation.model.layout.flatten(dict(module.named_parameters()))
    torch.testing.assert_close(federation.shared.weights.double(), expected, rtol=0, atol=1e-6)


def test_every_client_predicts_with_the_servers_weights_and_without_epistemic_uncertainty():
    federation = scenarios.run(FedAvg(), rounds=1)
    predictive = federation.method.predictive(
        federation.model, rows(federation.shared, 3), federation.personal(torch.arange(3))
    )
    assert predictive.draws(20) == 1
    assert torch.equal(predictive.draw(scenarios.keys(3), 0), federation.shared.weights.expand(3, -1))


def test_a_newcomer_uses_the_servers_weights_and_trains_nothing():
    assert FedAvg().adaptation(5) == ()
    assert FedAvg().tuning(5) == ()
