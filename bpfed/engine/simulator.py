"""Runs rounds of one federation, or of several side by side, with all clients stacked along one axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bpfed._util.errors import UserError
from bpfed.data.federated import Examples
from bpfed.engine.compiled_step import worth_compiling
from bpfed.engine.local import LocalRound, Rows, chunk_size, held_by
from bpfed.methods.base import Finished, State

if TYPE_CHECKING:
    from bpfed.engine.federation import Federation

#: What federations must have in common to be stacked.
_KINDS: tuple[Callable[[Federation], object], ...] = (
    lambda f: f.method.trace_key(),
    lambda f: f.model.layout,
    lambda f: f.model.likelihood,
    lambda f: str(f.model.module),
    lambda f: f.model.frozen_hash,
)


@dataclass(frozen=True)
class RoundInfo:
    """A report on a round.

    Attributes:
        participants: How many uploads were used.
        values: The mean of what these clients' methods report (nats per example).
        refused: Why uploads were not used, by client.
    """

    participants: int
    values: dict[str, float]
    refused: dict[str, str] = field(default_factory=dict)


class Simulator:
    """Local training for federations that share method structure, network and data shapes.

    Several federations (other seeds, other settings, other splits) are stacked as if their clients were one
    federation's; each keeps its own server. On a GPU that costs little more than one.
    """

    def __init__(self, federations: list[Federation]) -> None:
        first = federations[0]
        for other in federations[1:]:
            if any(kind(other) != kind(first) for kind in _KINDS):
                raise UserError(
                    "Only runs of the same method, network, frozen weights and kind of settings can be stacked; run the others apart."
                )
            if (other.settings.batch, other.settings.epochs) != (first.settings.batch, first.settings.epochs):
                raise UserError("Only runs with the same batch size and epochs can be stacked; run the others apart.")
        self.federations = federations
        self.device, self.settings = first.device, first.settings
        parts = [f.inputs(f.data.train) for f in federations]
        self.base = [0]
        for part in parts:
            self.base.append(self.base[-1] + len(part.y))
        together = parts[0] if len(parts) == 1 else Examples.join(parts)
        left = max(f.settings.rounds - f.round for f in federations)
        self.train = LocalRound.of(
            first.method, first.model, together, first.settings, self._compiled(), rounds=max(1, left)
        )
        for federation, base in zip(federations, self.base[:-1], strict=True):
            federation.training, federation.base = self.train, base

    def round(self) -> list[RoundInfo | None]:
        """One round of every federation; None for one that is finished already."""
        active = [(k, f) for k, f in enumerate(self.federations) if not f.finished]
        clients = [f.participants(f.round + 1) for _, f in active]
        finished = self._train([f.training_rows(who) for (_, f), who in zip(active, clients, strict=True)])
        infos: list[RoundInfo | None] = [None] * len(self.federations)
        start = 0
        for (k, federation), who in zip(active, clients, strict=True):
            mine = slice(start, start + len(who))
            start += len(who)
            refused = federation.receive(who, _slice(finished.upload, mine), _slice(finished.personal, mine))
            used = [i not in refused for i in (federation.data.clients[c] for c in who.tolist())]
            infos[k] = _info(finished, mine, torch.tensor(used, dtype=torch.bool), refused)
            if federation.finished:
                federation.settle()
        return infos

    def _train(self, parts: list[Rows]) -> Finished[State, State]:
        """Train all rows in chunks; the results are in the order of the rows."""
        if not sum(len(part) for part in parts):
            return Finished((), (), {})
        everyone = parts[0] if len(parts) == 1 else _concatenate(parts)
        return self.train.in_chunks(everyone, self._chunk()[0])

    def _chunk(self) -> tuple[int, int]:
        """The number of clients that are stacked, and the number drawn, with those that will fail to return."""
        drawn = sum(f.settings.per_round(len(f)) for f in self.federations)
        first = self.federations[0]
        held = held_by(first.method, first.model)
        chunk = self.settings.chunk or chunk_size(drawn, held, self.device, self.settings.memory)
        return min(chunk, drawn), drawn

    def _compiled(self) -> bool:
        if self.settings.compile != "auto":
            return self.settings.compile == "on"
        if self.device.type == "cuda":
            return True
        chunk, drawn = self._chunk()
        sizes = torch.cat([f.data.train.sizes for f in self.federations])
        batches = -(-sizes // self.settings.batch)
        phases = self.federations[0].method.phases(self.settings.epochs)
        mean = float(batches.double().mean())
        steps = sum(phase.batches * phase.repeats or mean * phase.epochs for phase in phases)
        # All rounds count, also those that are done: a resumed run decides as it did at its start.
        rounds = max(f.settings.rounds for f in self.federations)
        shapes = len({(int(count) - 1).bit_length() for count in batches.unique()}) * len({p.name for p in phases})
        return worth_compiling(steps * rounds * -(-drawn // chunk), shapes)


def _info(finished: Finished[State, State], mine: slice, used: Tensor, refused: dict[str, str]) -> RoundInfo:
    means: dict[str, float] = {}
    for name, value in finished.info.items():
        own = value[mine][used.to(value.device)] if refused else value[mine]
        means[name] = float(own.mean()) if len(own) else float("nan")
    return RoundInfo(int(used.sum()), means, refused)


def _slice(state: State, index: slice) -> State:
    return tree_map(lambda t: t[index], state)


def _concatenate(parts: list[Rows]) -> Rows:
    names = parts[0].__dataclass_fields__
    return Rows(**{n: tree_map(lambda *t: torch.cat(t), *(getattr(p, n) for p in parts)) for n in names})
