"""Where the personal states of all clients live between rounds: in memory, or in a memory-mapped file.

Either way a round touches the rows of its participants only. A client that was never put has the common first state.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from bpfed.methods.base import State


class Layout:
    """A state without client axis, as one row of numbers."""

    def __init__(self, template: State) -> None:
        leaves, self.spec = tree_flatten(template)
        self.shapes = [t.shape for t in leaves]
        self.sizes = [t.numel() for t in leaves]
        self.width = sum(self.sizes)
        self.first = torch.cat([t.detach().reshape(-1).float() for t in leaves]) if leaves else torch.zeros(0)

    def pack(self, state: State) -> Tensor:
        """Leaves ``[S, ...]`` to rows ``[S, width]``."""
        leaves, _ = tree_flatten(state)
        return torch.cat([t.reshape(len(t), -1) for t in leaves], -1)

    def unpack(self, rows: Tensor) -> State:
        """Rows ``[S, width]`` to leaves ``[S, ...]``."""
        parts = rows.split(self.sizes, -1)
        leaves = [p.reshape(len(rows), *shape) for p, shape in zip(parts, self.shapes, strict=True)]
        return tree_unflatten(leaves, self.spec)


class Store(Protocol):
    """What the engine asks of a store."""

    def get(self, clients: Tensor) -> State:
        """States of the clients at these indices ``[S]``."""
        ...

    def put(self, clients: Tensor, state: State) -> None:
        """Keep these states (they are not committed before `snapshot`)."""
        ...

    def snapshot(self) -> dict[str, Tensor]:
        """Commit: what a checkpoint must hold to get back to exactly this moment."""
        ...

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Back to the moment of that snapshot."""
        ...


class MemoryStore:
    """Rows in one tensor; memory of clients that never took part is not touched."""

    def __init__(self, template: State, clients: int, device: torch.device | str = "cpu") -> None:
        self.layout = Layout(template)
        self.device = torch.device(device)
        self.first = self.layout.first.to(self.device)
        self.seen = torch.zeros(clients, dtype=torch.bool)
        self.rows = torch.zeros(clients, self.layout.width, device=self.device)

    def get(self, clients: Tensor) -> State:
        if self.layout.width == 0:
            return self.layout.unpack(torch.zeros(len(clients), 0))
        seen = self.seen[clients].to(self.device)[:, None]
        return self.layout.unpack(torch.where(seen, self.rows[clients.to(self.device)], self.first))

    def put(self, clients: Tensor, state: State) -> None:
        if self.layout.width:
            self.rows[clients.to(self.device)] = self.layout.pack(state).to(self.device)
        self.seen[clients] = True

    def snapshot(self) -> dict[str, Tensor]:
        who = self.seen.nonzero().flatten()
        return {"clients": who, "rows": self.rows[who.to(self.device)].cpu()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.seen.zero_()
        self.seen[tensors["clients"]] = True
        self.rows[tensors["clients"].to(self.device)] = tensors["rows"].to(self.device)


class FileStore:
    """Rows in a memory-mapped file, three slots for each client.

    A put writes to a slot that neither of the last two snapshots points at, and a snapshot is only the slot numbers. So
    a checkpoint costs a byte per client, and whatever moment a process is killed at, the last two snapshots are intact.
    """

    SLOTS = 3

    def __init__(self, template: State, clients: int, path: Path) -> None:
        self.layout = Layout(template)
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (clients, self.SLOTS, max(self.layout.width, 1))
        size = math.prod(shape) * 4
        if not path.exists() or path.stat().st_size != size:
            with open(path, "wb") as file:  # sparse: blocks are taken as clients take part
                file.truncate(size)
        self.rows = np.memmap(path, dtype=np.float32, mode="r+", shape=shape)
        self.slot = torch.full((clients,), -1, dtype=torch.int8)  # -1: never put
        self.kept = (self.slot.clone(), self.slot.clone())  # of the last two snapshots

    def get(self, clients: Tensor) -> State:
        slots = self.slot[clients].long()
        rows = torch.from_numpy(self.rows[clients.numpy(), slots.clamp(min=0).numpy(), : self.layout.width])
        return self.layout.unpack(torch.where((slots >= 0)[:, None], rows, self.layout.first))

    def put(self, clients: Tensor, state: State) -> None:
        last, older = (kept[clients] for kept in self.kept)
        free = torch.stack([(last != s) & (older != s) for s in range(self.SLOTS)], -1).int().argmax(-1)
        if self.layout.width:
            self.rows[clients.numpy(), free.numpy(), : self.layout.width] = self.layout.pack(state).cpu().numpy()
        self.slot[clients] = free.to(torch.int8)

    def snapshot(self) -> dict[str, Tensor]:
        self.rows.flush()
        self.kept = (self.slot.clone(), self.kept[0])
        return {"slot": self.slot.clone()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.slot = tensors["slot"].clone()
        self.kept = (self.slot.clone(), self.slot.clone())


def make_store(kind: str, template: State, clients: int, device: torch.device, folder: Path | None) -> Store:
    """A store of that kind; ``auto`` is a file where the rows would fill over 64 MiB and there is a folder for it."""
    size = 4 * Layout(template).width * clients
    if folder is not None and (kind == "file" or (kind == "auto" and size > 64 << 20)):
        return FileStore(template, clients, folder / "personal.f32")
    return MemoryStore(template, clients, device)
