"""One of six clients sends lies, in every round from the first or from a later one: what becomes of the run.

    python -m benchmarks.hostile

Digits, BPFed with each server rule, in the simulator; what a deployed server does with uploads is the same code. The
table that it prints has, for each lie, in how many rounds it was refused, and the accuracy of the honest clients beside
that of a run in which the liar is away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bpfed.config.settings import Settings
from bpfed.data import load
from bpfed.engine.evaluate import evaluate_clients
from bpfed.engine.federation import Federation
from bpfed.engine.simulator import Simulator
from bpfed.engine.state_store import MemoryStore
from bpfed.inference.gaussian import Gaussian
from bpfed.methods import BPFed

#: From what the client would send, the server's state, the round, and the uploads of earlier rounds to what it sends.
Lie = Callable[[Gaussian, Gaussian, int, list[Gaussian]], Gaussian]

#: Of the greatest numbers of float32.
HUGE = 3e38


def _one(values: Tensor, value: float) -> Tensor:
    changed = values.clone()
    changed[3] = value
    return changed


def _noise(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(7)).to(like)


def _signs(like: Tensor) -> Tensor:
    return 1.0 - 2.0 * (torch.arange(len(like), device=like.device) % 2)


def _scaled(upload: Gaussian, shared: Gaussian, factor: float) -> Gaussian:
    return upload._replace(mean=shared.mean + factor * (upload.mean - shared.mean))


#: Lies that no training could have led to.
REFUSED: dict[str, Lie] = {
    "one mean of 1e20": lambda u, s, r, old: u._replace(mean=_one(u.mean, 1e20)),
    "one mean of 1e4": lambda u, s, r, old: u._replace(mean=_one(u.mean, 1e4)),
    "means times 1e6": lambda u, s, r, old: u._replace(mean=1e6 * u.mean),
    "update turned round, times 1000": lambda u, s, r, old: _scaled(u, s, -1000.0),
    "means and noise of 100": lambda u, s, r, old: u._replace(mean=u.mean + 100.0 * _noise(u.mean)),
    "all means 1e10": lambda u, s, r, old: u._replace(mean=torch.full_like(u.mean, 1e10)),
    "means of 1e15 with changing sign": lambda u, s, r, old: u._replace(mean=1e15 * _signs(u.mean)),
    "all numbers 3e38": lambda u, s, r, old: Gaussian(*(torch.full_like(t, HUGE) for t in u)),
    "all means -3e38": lambda u, s, r, old: u._replace(mean=torch.full_like(u.mean, -HUGE)),
    "one mean NaN": lambda u, s, r, old: u._replace(mean=_one(u.mean, float("nan"))),
    "one mean infinite": lambda u, s, r, old: u._replace(mean=_one(u.mean, float("inf"))),
    "one σ NaN": lambda u, s, r, old: u._replace(sigma=_one(u.sigma, float("nan"))),
    "all σ 3e38": lambda u, s, r, old: u._replace(sigma=torch.full_like(u.sigma, HUGE)),
    "all σ 1e-30": lambda u, s, r, old: u._replace(sigma=torch.full_like(u.sigma, 1e-30)),
    "all σ times 1000": lambda u, s, r, old: u._replace(sigma=1000.0 * u.sigma),
    "one σ of 1e6": lambda u, s, r, old: u._replace(sigma=_one(u.sigma, 1e6)),
    "one σ of 1e-20": lambda u, s, r, old: u._replace(sigma=_one(u.sigma, 1e-20)),
    "all numbers 0": lambda u, s, r, old: Gaussian(*(torch.zeros_like(t) for t in u)),
    "all means 0": lambda u, s, r, old: u._replace(mean=torch.zeros_like(u.mean)),
}

#: Lies that may be within the bounds.
WITHIN: dict[str, Lie] = {
    "update grows fourfold each round": lambda u, s, r, old: _scaled(u, s, 4.0 ** len(old)),
    "an earlier upload again": lambda u, s, r, old: old[0],
    "the server's state": lambda u, s, r, old: s,
}


#: Lies of which each is within the factor of the server's σ, and which in round after round would lead anywhere.
CREEPING: dict[str, Lie] = {
    "99 times the server's σ": lambda u, s, r, old: u._replace(sigma=99.0 * s.sigma),
    "the server's σ / 99": lambda u, s, r, old: u._replace(sigma=s.sigma / 99.0),
    "99 times one σ of the server's": lambda u, s, r, old: u._replace(sigma=_one(u.sigma, 99.0 * float(s.sigma[3]))),
}


@dataclass
class Outcome:
    """What became of a run.

    Attributes:
        federation: At its end.
        refused: By round, whose uploads were refused and why.
        accuracy: Of the honest clients together.
    """

    federation: Federation
    refused: dict[int, dict[str, str]] = field(default_factory=dict)
    accuracy: float = 0.0


class Stage:
    """A federation whose last client may lie or be away; traced once, played often."""

    def __init__(self, method: BPFed, **settings: Any) -> None:
        data = load("digits", clients=6, partition="dirichlet:1", seed=0)
        chosen = {"rounds": 6, "epochs": 2, "hidden": 30, "compile": "off", "device": "cpu"} | settings
        self.federation = Federation.start(method, data, Settings(**chosen))
        self.simulator = Simulator([self.federation])
        self.liar = len(data) - 1
        self._first = self.federation.shared
        self._everyone = self.federation.participants

    def play(self, lie: Lie | None, since: int = 1) -> Outcome:
        """A run in which the last client lies from this round on; None: it is away from this round on."""
        state = self.federation
        state.shared = self._first
        state.store = MemoryStore(state.method.init(state.model).personal, len(state))
        state.round, state.lengths, state.taken = 0, {}, None
        sent: list[Gaussian] = []

        def present(round_: int) -> Tensor:
            who = self._everyone(round_)
            return who if lie is not None or round_ < since else who[who != self.liar]

        def receive(clients: Tensor, uploads: Gaussian, personal: Any) -> dict[str, str]:
            if lie is not None and self.liar in clients.tolist():
                at = clients.tolist().index(self.liar)
                own = tree_map(lambda t: t[at], uploads)
                sent.append(own)
                if state.round + 1 >= since:
                    told = lie(own, state.shared, state.round + 1, sent)
                    uploads = tree_map(lambda t, new: t.index_copy(0, torch.tensor([at]), new[None]), uploads, told)
            return Federation.receive(state, clients, uploads, personal)

        state.participants, state.receive = present, receive  # type: ignore[method-assign]
        found = Outcome(state)
        while not state.finished:
            (info,) = self.simulator.round()
            assert info is not None
            found.refused[state.round] = info.refused
        evaluation = evaluate_clients(state)[0]
        honest = evaluation["accuracy"].clients[: self.liar]
        sizes = state.data.test.sizes[: self.liar].tolist()
        found.accuracy = sum(a * n for a, n in zip(honest, sizes, strict=True)) / sum(sizes)
        return found


def main() -> None:
    print("| rule | lie | since round | refused in rounds | accuracy | liar away |")
    print("|---|---|---|---|---|---|")
    for rule in ("mean", "moments", "precision"):
        stage = Stage(BPFed(rule=rule))
        for since in (1, 4):
            away = stage.play(None, since).accuracy
            for name, lie in (REFUSED | WITHIN | CREEPING).items():
                found = stage.play(lie, since)
                liar = found.federation.data.clients[stage.liar]
                told = [r for r, refused in found.refused.items() if liar in refused]
                assert not any(set(refused) - {liar} for refused in found.refused.values())
                rounds = f"{len(told)} of {len(found.refused) - since + 1}"
                print(f"| {rule} | {name} | {since} | {rounds} | {found.accuracy:.2%} | {away:.2%} |", flush=True)


if __name__ == "__main__":
    main()
