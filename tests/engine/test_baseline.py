"""What a client would predict without a model."""

import pytest
import torch

from bpfed.data.federated import Examples
from bpfed.inference.tasks import class_shares, mean_targets


def examples(*targets: list[float]) -> Examples:
    return Examples.of([(torch.zeros(len(y), 1), torch.tensor(y)) for y in targets])


def test_shares_count_one_more_of_each_class():
    shares = class_shares(examples([0, 0, 2], [1]), 3)
    torch.testing.assert_close(shares, torch.tensor([[3 / 6, 1 / 6, 2 / 6], [1 / 4, 2 / 4, 1 / 4]]).double())


def test_means_are_of_the_clients_own_targets():
    assert mean_targets(examples([1.0, 2.0], [10.0])).tolist() == pytest.approx([1.5, 10.0])
