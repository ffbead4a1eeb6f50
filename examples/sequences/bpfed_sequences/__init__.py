"""Two networks for sequences, each a function of the shape of an example and the number of outputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

#: Characters that `Characters` knows; every other one is the last of them.
ALPHABET = " abcdefghijklmnopqrstuvwxyz',.;:!?-\n_"
WIDTH = 32


class GRU(nn.Module):
    """A gated recurrent unit over the steps of a signal, and a linear layer on its last state."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(channels, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(x.flatten(1, -2))  # those of an NPZ file have a further axis of size 1
        return self.head(states[:, -1])


class Characters(nn.Module):
    """A transformer over the characters of a text, and a linear layer that gives the next one."""

    def __init__(self, length: int, outputs: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(ALPHABET), WIDTH)
        self.places = nn.Embedding(length, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        ids = x.flatten(1).long()
        place = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.encoder(self.letters(ids) + self.places(place))[:, -1])


def gru(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """For signals ``[steps, channels]``."""
    if len(input_shape) < 2:
        raise ValueError("a signal has steps and channels; give x as [rows, steps, channels]")
    return GRU(input_shape[-1], outputs)


def characters(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """For texts of a fixed length as places in ``ALPHABET``, ``[length]`` or ``[length, 1]``."""
    return Characters(math.prod(input_shape), outputs)
