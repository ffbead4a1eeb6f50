"""Clipping, robust rules, compression and noise for privacy do in a deployment what they do in the simulator."""

import pytest
import torch
from federations import Deployed, simulated
from scenarios import classification

from bpfed.aggregation.privacy import gaussian_epsilon
from bpfed.methods import FedAvg

SIZES = (7, 12, 9)


#: Nobody is drawn in round 1, and all are in round 2.
NOBODY = {"sampling": "poisson", "participants": 1, "seed": 10}


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 0.05, "robust": "median"},
        {"compression": "half"},
        {"compression": "half", **NOBODY},
        {"clip": 0.05, "robust": "trimmed:0.4"},
    ],
)
def test_options_give_the_simulators_numbers(options, tmp_path):
    data = classification(sizes=SIZES)
    server = Deployed(tmp_path, FedAvg(), data, rounds=2, **options).serve()
    federation, _ = simulated(FedAvg(), data, rounds=2, **options)
    plain, _ = simulated(FedAvg(), data, rounds=2)
    torch.testing.assert_close(server.federation.shared, federation.shared, rtol=0, atol=1e-6)
    assert not torch.allclose(plain.shared.weights, federation.shared.weights, rtol=0, atol=1e-6)


def test_noise_is_secret_and_its_epsilon_is_told_in_every_round(tmp_path):
    data = classification(sizes=SIZES)
    options = {"clip": 0.1, "noise": 2.0, "rounds": 2, "epochs": 1}
    deployed = Deployed(tmp_path / "a", FedAvg(), data, **options)
    server = deployed.serve()
    told = [record["epsilon"] for record in server.history]
    assert told == pytest.approx([gaussian_epsilon(2.0, rounds, 1e-5) for rounds in (1, 2)])
    assert sum("epsilon is" in sentence for sentence in deployed.said) == 2
    again = Deployed(tmp_path / "b", FedAvg(), data, **options).serve()
    apart = (server.federation.shared.weights - again.federation.shared.weights).std()
    assert float(apart) > 0.5 * 2.0 * 0.1 / 3 * 2**0.5  # two rounds of independent noise each, and more
    federation, _ = simulated(FedAvg(), data, **options)
    assert federation.epsilon() == pytest.approx(told[-1])


def test_coins_that_every_site_can_foresee_are_not_counted_on(tmp_path):
    data = classification(sizes=SIZES)
    options = {"clip": 0.1, "noise": 2.0, "rounds": 2, "epochs": 1, "sampling": "poisson", "participants": 2}
    server = Deployed(tmp_path, FedAvg(), data, **options).serve()
    assert server.history[-1]["epsilon"] == pytest.approx(server.federation.epsilon(secret=False))
    assert server.history[-1]["epsilon"] != pytest.approx(server.federation.epsilon())
