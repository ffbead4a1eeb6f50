"""Where the personal states of all clients live between rounds: in memory, or in a file.

Either way a round touches the rows of its participants only. A client that was never put has the common first state.
"""

from __future__ import annotations

import os
import sys
import zlib
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from bpfed._util.errors import UserError
from bpfed._util.files import writing

if TYPE_CHECKING:
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
    """What the engine asks of a store.

    Attributes:
        depth: So many of the newest snapshots can be restored.
    """

    depth: int

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
    """Rows in one tensor; memory of clients that never took part is not touched.

    A snapshot is a copy of all rows, so that any one can be restored.
    """

    depth = sys.maxsize

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
    """Rows in a file, for each client one slot more than there are snapshots to go back to.

    A put writes to a slot that none of the last ``depth`` snapshots points at, and a snapshot is only the slot numbers
    and a checksum (CRC-32) of each client's row. So a checkpoint costs some ten bytes per client, and whatever moment a
    process is killed at, these snapshots are intact. A row that is read is held against its checksum. The file that a
    run has begun keeps its number of slots.

    The file is read and written row by row and not mapped into memory: a full disk is then an error with a name, where
    a map would end the process. It is made or opened when first needed, so a run that is refused has touched nothing.
    """

    def __init__(self, template: State, clients: int, path: Path, depth: int = 2) -> None:
        self.layout = Layout(template)
        self.path, self.clients, self.depth = path, clients, depth
        self.first = self.layout.first.cpu()
        self.slot = torch.full((clients,), -1, dtype=torch.int8)  # -1: never put
        self.sums = torch.full((clients,), -1, dtype=torch.int64)  # -1: not known
        self.kept = self.slot.repeat(depth, 1)  # of the last snapshots, newest first, [depth, clients]

    @property
    def slots(self) -> int:
        """Slots of a client."""
        return self.depth + 1

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.clients * self.slots * self.layout.width * 4

    @cached_property
    def _written(self) -> FileIO:
        """The file, open for writing; sparse, blocks are taken as clients take part."""
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = FileIO(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644), "r+")
            file.truncate(self.size)
            return file

    @cached_property
    def _read(self) -> FileIO:
        """The file, open for reading: whoever only predicts need not be allowed to write."""
        try:
            return FileIO(self.path, "r")
        except OSError as error:
            raise UserError(f"'{self.path}' cannot be read ({error.strerror}); put it back from a copy.") from error

    def get(self, clients: Tensor) -> State:
        rows = self.first.repeat(len(clients), 1)
        known = zip(clients.tolist(), self.slot[clients].tolist(), self.sums[clients].tolist(), strict=True)
        for row, (client, slot, wanted) in zip(rows.numpy(), known, strict=True):
            if slot < 0 or not row.nbytes:
                continue
            if os.preadv(self._read.fileno(), [row], self._at(client, slot)) != row.nbytes:
                raise UserError(
                    f"'{self.path}' has been cut short, so the run cannot go on; start again with --overwrite."
                )
            if wanted >= 0 and zlib.crc32(row.data) != wanted:
                raise UserError(
                    f"'{self.path}' is damaged: the state of client number {client + 1} has another checksum; put it "
                    "back from a copy, or start again with --overwrite."
                )
        return self.layout.unpack(rows)

    def put(self, clients: Tensor, state: State) -> None:
        free = torch.stack([(self.kept[:, clients] != s).all(0) for s in range(self.slots)], -1).int().argmax(-1)
        rows = self.layout.pack(state).cpu().contiguous().numpy() if self.layout.width else np.zeros((0, 0), np.float32)
        if len(rows) and rows.shape[1] != self.layout.width:  # it would be written over the next client's
            raise ValueError(f"A state of {rows.shape[1]} numbers does not fit a row of {self.layout.width}.")
        for row, client, slot in zip(rows, clients.tolist(), free.tolist(), strict=False):
            data, at = row.tobytes(), self._at(client, slot)
            self.sums[client] = zlib.crc32(data)
            with writing(self.path):
                while data:
                    done = os.pwrite(self._written.fileno(), data, at)
                    data, at = data[done:], at + done
        self.slot[clients] = free.to(torch.int8)

    def snapshot(self) -> dict[str, Tensor]:
        with writing(self.path):
            os.fsync(self._written.fileno())
        self.kept = torch.cat([self.slot[None], self.kept[:-1]])
        return {"slot": self.kept[0].clone(), "older": self.kept[1:].clone(), "sums": self.sums.clone()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        slot, older = tensors["slot"], tensors["older"]
        kept = torch.cat(
            [slot[None], older.reshape(-1, len(slot))]
        )  # until 0.7 there was one older row, without an axis
        width = self.clients * self.layout.width * 4
        if not self.path.exists() or self.path.stat().st_size != (len(kept) + 1) * width or len(slot) != self.clients:
            raise ValueError(f"'{self.path}' is missing or has another size.")
        if kept.dtype != torch.int8:
            raise ValueError("Its slots are not slots.")
        self.slot, self.kept, self.depth = slot.clone(), kept, len(kept)
        self.sums = tensors.get("sums", torch.full_like(self.sums, -1)).clone()  # earlier versions kept none

    def _at(self, client: int, slot: int) -> int:
        return (client * self.slots + slot) * self.layout.width * 4


def make_store(
    kind: str, template: State, clients: int, device: torch.device, folder: Path | None, depth: int = 2
) -> Store:
    """A store of that kind; ``auto`` is a file where the rows would fill over 64 MiB and there is a folder for it.

    ``depth`` is how many of the newest snapshots can be restored, at least.
    """
    if kind == "file" and folder is None:
        raise UserError("store is 'file', but there is no run folder to keep the file in; give one with out (--out).")
    size = 4 * Layout(template).width * clients
    if folder is not None and (kind == "file" or (kind == "auto" and size > 64 << 20)):
        return FileStore(template, clients, folder / "personal.f32", depth)
    return MemoryStore(template, clients, device)
