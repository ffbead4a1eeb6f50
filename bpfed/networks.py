"""Networks that are chosen when none is given: the paper's two, and a small one for tables."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bpfed.errors import UserError
from bpfed.noise import Purpose, words

#: Units in the hidden layer of an MLP where nothing is said.
HIDDEN = 100


class LeNet(nn.Module):
    """The paper's network for CIFAR-10: conv 3-6 k5, pool, conv 6-16 k5, pool, fc 400-120-84-10. 62 006 weights."""

    def __init__(self, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))


def mlp(inputs: int, outputs: int, hidden: tuple[int, ...] = (HIDDEN,)) -> nn.Sequential:
    """Linear layers with ReLU between; the paper's network for MNIST is ``mlp(784, 10)``. 79 510 weights."""
    layers: list[nn.Module] = [nn.Flatten()]
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def default(input_shape: tuple[int, ...], outputs: int, seed: int = 0, hidden: int | None = None) -> nn.Module:
    """A network for inputs of this shape: LeNet for 32 x 32 colour images, else an MLP; weights drawn from ``seed``.

    ``hidden`` is how many units the MLP has in its hidden layer; None: 100.

    Raises:
        UserError: ``hidden`` is given, and it is LeNet.
    """
    import numpy as np

    images = len(input_shape) == 3 and input_shape[1:] == (32, 32)
    if images and hidden is not None:
        raise UserError(
            "hidden is for a network with one hidden layer, but images of 32 x 32 get a LeNet; leave it out, or in Python give a "
            "network of your own as model."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(words(seed, 0, Purpose.INIT, np.zeros(1, dtype=np.uint64))[0] >> np.uint64(1)))
        if images:
            return LeNet(input_shape[0], outputs)
        return mlp(math.prod(input_shape), outputs, (HIDDEN if hidden is None else hidden,))
