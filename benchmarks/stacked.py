"""The engine's local step on random data of a given shape, without server and evaluation."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from bpfed.engine.local import LocalRound, Rows, chunk_size
from bpfed.inference import rng
from bpfed.inference.likelihoods import Categorical
from bpfed.inference.rng import Purpose
from bpfed.methods.base import Method, rows
from bpfed.nn.model import Model


class Stacked:
    """Clients of ``examples`` random examples each, about to train in chunks."""

    def __init__(
        self,
        method: Method,
        module: nn.Module,
        shape: tuple[int, ...],
        clients: int = 10,
        examples: int = 250,
        batch: int = 50,
        device: str = "cpu",
        compiled: bool = True,
        epochs: int = 10,
        memory: int = 2048,
    ) -> None:
        self.method, self.clients, self.examples, self.device = method, clients, examples, device
        x = torch.randn(clients * examples, *shape, device=device)
        y = torch.randint(0, 10, (clients * examples,), device=device)
        self.model = Model.of(module, Categorical(10), x[:2].cpu(), method.personal).to(device)
        self.initial = method.init(self.model)
        self.batch, self.epochs = batch, epochs
        self.train = LocalRound(method, self.model, x, y, batch, self.epochs, compiled, min(batch, examples))
        self.chunk = chunk_size(clients, self.model.layout.total, torch.device(device), memory)

    @property
    def steps(self) -> int:
        """Steps of one client in a round."""
        return self.epochs * -(-self.examples // self.batch)

    def round(self, number: int = 1) -> int:
        """One local round of all clients; returns the number of client-steps."""
        for start in range(0, self.clients, self.chunk):
            who = np.arange(start, min(start + self.chunk, self.clients)).astype(np.uint64)
            count = len(who)
            self.train(
                Rows(
                    shared=rows(self.initial.shared, count),
                    personal=rows(self.initial.personal, count),
                    hparams={k: torch.full((count,), v, device=self.device) for k, v in self.method.hparams().items()},
                    start=torch.from_numpy(who.astype(np.int64)).to(self.device) * self.examples,
                    size=torch.full((count,), self.examples, device=self.device),
                    shuffle=rng.keys(0, number, Purpose.SHUFFLE, who).to(self.device),
                    key=rng.keys(0, number, Purpose.WEIGHTS, who).to(self.device),
                )
            )
        return self.steps * self.clients
