"""A federation in progress: the server's state, the clients' states, and one round of the protocol."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bpfed import noise
from bpfed.data.federated import FederatedData
from bpfed.engine.settings import Settings
from bpfed.engine.store import Store, make_store
from bpfed.errors import UserError
from bpfed.likelihoods import Categorical, Likelihood, Normal
from bpfed.methods.base import Method, State
from bpfed.model import Model
from bpfed.networks import default
from bpfed.noise import Purpose


@dataclass
class Federation:
    """One method on one dataset with one seed.

    Attributes:
        method: What clients and server do.
        data: What they do it on.
        settings: How.
        model: The network as a function of flat weights, on the device.
        device: Where the arithmetic runs.
        shared: The server's state.
        store: The clients' states.
        ids: A word for each client's name, ``[N]`` uint64; all randomness of a client follows it.
        round: Rounds done.
    """

    method: Method
    data: FederatedData
    settings: Settings
    model: Model
    device: torch.device
    shared: State
    store: Store
    ids: np.ndarray
    round: int = 0

    @classmethod
    def start(
        cls,
        method: Method,
        data: FederatedData,
        settings: Settings,
        module: nn.Module | None = None,
        likelihood: Likelihood | None = None,
        folder: Path | None = None,
    ) -> Federation:
        """Before the first round. ``folder`` is where a file of personal states may be kept."""
        if not isinstance(method, Method):
            raise UserError(f"The method is {method!r}, but must be one such as bpfed.methods.BPFed().")
        data.check()
        method.check()
        settings.check(len(data))
        if not len(data.test.y):
            raise UserError(f"No client of '{data.name}' has a test example; set a test_fraction above 0.")
        device = pick_device(settings.device, settings.tf32)
        if likelihood is None:
            likelihood = Categorical(data.classes) if data.task == "classification" else Normal()
        if module is None:
            module = default(data.input_shape, data.classes or 1, settings.seed)
        model = Model.of(module, likelihood, data.train.x[:2], method.personal).to(device)
        if data.task == "regression":
            model = replace(model, notes=(*model.notes, *_unusual_scale(data)))
        initial = method.init(model)
        store = make_store(settings.store, initial.personal, len(data), device, folder)
        ids = noise.client_ids(data.clients)
        return cls(method, data, settings, model, device, initial.shared, store, ids)

    def __len__(self) -> int:
        return len(self.data)

    @property
    def finished(self) -> bool:
        """Whether all rounds are done."""
        return self.round >= self.settings.rounds

    def participants(self, round_: int) -> Tensor:
        """Indices of the clients that train and return in this round, in the order of their words, ``[S]``.

        Every client has a random rank in every round, and the lowest ranks take part: uniform without replacement, and a
        client's rank depends on nobody else.
        """
        ranks = noise.words(self.settings.seed, round_, Purpose.PARTICIPATION, self.ids)
        count = self.settings.per_round(len(self))
        drawn = np.argpartition(ranks, count - 1)[:count] if count < len(self) else np.arange(len(self))
        drawn = drawn[np.argsort(self.ids[drawn], kind="stable")]
        if self.settings.drop_rate > 0.0:
            luck = noise.words(self.settings.seed, round_, Purpose.ABSENCE, self.ids[drawn]) >> np.uint64(11)
            drawn = drawn[luck.astype(np.float64) * 2.0**-53 >= self.settings.drop_rate]
        return torch.from_numpy(drawn.astype(np.int64))

    def keys(self, round_: int, purpose: Purpose, clients: Tensor) -> Tensor:
        """Keys of these clients, ``[S, 2]``, on the device."""
        return noise.keys(self.settings.seed, round_, purpose, self.ids[clients.numpy()]).to(self.device)

    def hyper(self, round_: int) -> dict[str, float]:
        """The method's numbers in this round (from 1); the schedule acts on the step size."""
        numbers = self.method.hyper()
        if self.settings.schedule == "cosine":
            numbers["lr"] *= 0.5 * (1.0 + float(np.cos(np.pi * (round_ - 1) / self.settings.rounds)))
        return numbers

    def personal(self, clients: Tensor) -> State:
        """Personal states of these clients, on the device."""
        return tree_map(lambda t: t.to(self.device), self.store.get(clients))

    def receive(self, clients: Tensor, uploads: State, personal: State) -> None:
        """End a round: the server aggregates the uploads, each client keeps its own. No uploads: nothing changes."""
        if len(clients):
            weights = torch.ones(len(clients), device=self.device)
            if self.settings.weighting == "size":
                weights = self.data.train.sizes[clients].float().to(self.device)
            self.shared = self.method.aggregate(self.shared, uploads, weights)
            self.store.put(clients, personal)
        self.round += 1


def pick_device(name: str, tf32: bool = True) -> torch.device:
    """``auto`` is CUDA where there is one; there ``tf32`` says how matrix products and convolutions are computed."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device is 'cuda', but no CUDA device is available here; use 'cpu' or 'auto'.")
    device = torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
    return device


def _unusual_scale(data: FederatedData) -> tuple[str, ...]:
    """A word of warning where targets are far from the size that a network's outputs start at."""
    mean, spread = float(data.train.y.mean()), float(data.train.y.std(correction=0))
    if abs(mean) <= 5.0 and 0.1 <= spread <= 10.0:
        return ()
    return (
        f"The targets of '{data.name}' have mean {mean:.4g} and standard deviation {spread:.4g}; training will be slow or "
        "fail unless you bring them near 0 and 1.",
    )
