"""What SCAFFOLD promises, on a small federation."""

import numpy as np
import torch
from bpfed_scaffold import Local, Personal, Scaffold, Shared, quantity
from torch import nn

from bpfed.inference.estimators import Batch
from bpfed.inference.likelihoods import Categorical
from bpfed.methods.base import rows
from bpfed.nn.model import Model

CLIENTS, EXAMPLES = 3, 8
METHOD = Scaffold(lr=0.1)
HYPER = {"lr": torch.full((CLIENTS,), 0.1)}


def model() -> Model:
    torch.manual_seed(0)
    return Model.of(
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), Categorical(3), torch.zeros(2, 4), "none"
    )


def batch() -> Batch:
    """Other examples for each client."""
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(CLIENTS, EXAMPLES, 4, generator=g), torch.randint(0, 3, (CLIENTS, EXAMPLES), generator=g)
    full = torch.full((CLIENTS,), float(EXAMPLES))
    return Batch(x, y, torch.ones(CLIENTS, EXAMPLES), full, torch.zeros(CLIENTS, 2, dtype=torch.int64))


def local_round(net: Model, shared: Shared, personal: Personal, steps: int):
    local: Local = METHOD.begin(net, rows(shared, CLIENTS), personal, HYPER)
    for _ in range(steps):
        local, _ = METHOD.step(net, local, batch(), HYPER, "all")
    return METHOD.finish(net, local, HYPER)


def test_with_control_variates_of_the_same_point_all_clients_take_the_step_of_the_mean_gradient():
    net = model()
    first = METHOD.init(net)
    found = local_round(net, first.shared, rows(first.personal, CLIENTS), steps=1)
    server = METHOD.aggregate(first.shared, found.upload, torch.ones(CLIENTS), clients=CLIENTS)
    # After one step from zero, c_i is the client's gradient and c their mean: from the same point nobody drifts.
    torch.testing.assert_close(server.control, found.personal.control.mean(0))
    again = local_round(net, Shared(first.shared.weights, server.control), found.personal, steps=1)
    expected = first.shared.weights - 0.1 * server.control
    torch.testing.assert_close(again.upload.weights, expected.expand(CLIENTS, -1))
    assert (found.upload.weights - expected).abs().max() > 1e-3  # without them they do


def test_the_servers_control_variate_moves_by_the_share_of_clients_that_took_part():
    old = Shared(torch.zeros(2), torch.tensor([1.0, 1.0]))
    uploads = Shared(torch.ones(2, 2), torch.tensor([[3.0, 1.0], [5.0, 1.0]]))
    found = METHOD.aggregate(old, uploads, torch.ones(2), clients=8)
    torch.testing.assert_close(found, Shared(torch.ones(2), torch.tensor([1.75, 1.0])))


def test_every_client_has_examples_and_the_first_has_most():
    owners = quantity(np.zeros(1000), 5, np.random.default_rng(0), number=1.5)
    sizes = np.bincount(owners, minlength=5)
    assert sizes.sum() == 1000
    assert sizes.min() >= 1
    assert sizes[0] > 2 * sizes[1] > 2 * sizes[4]
