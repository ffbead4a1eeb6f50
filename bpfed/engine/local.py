"""One round of local training for a set of clients: the simulator calls it with many, a deployed site with one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bpfed.config.settings import Settings
from bpfed.data.federated import Examples
from bpfed.engine.batching import Plan, cyclic, plan
from bpfed.engine.compiled_step import Stepper, Work
from bpfed.inference import inputs
from bpfed.inference.inputs import Inputs
from bpfed.inference.likelihoods import Categorical
from bpfed.methods.base import ADAPT, AnyMethod, Finished, Phase, State

if TYPE_CHECKING:
    from bpfed.nn.model import Model

#: Below this many weights in all stacked clients a step runs on one thread.
SMALL = 100_000
#: Batches of clients with few examples are padded to a power of two, and to this at least.
NARROWEST = 8
#: State of clients trained side by side on a CPU should stay in its cache.
CPU_CHUNK_BYTES = 24 << 20


@dataclass(frozen=True)
class Rows:
    """S clients about to train.

    Attributes:
        shared: The server's state, a row for each client (``[S, ...]`` leaves).
        personal: The clients' own states.
        hparams: The method's numbers, ``[S]`` each.
        start: Where each client's examples begin, ``[S]`` int64.
        size: How many it has, ``[S]`` int64.
        shuffle: Keys of the order of examples, ``[S, 2]``.
        key: Keys of the noise, ``[S, 2]``.
        done: Rounds before this one, ``[S]`` int64, which say where a phase of ``batches`` goes on; nothing: none.
    """

    shared: State
    personal: State
    hparams: dict[str, Tensor]
    start: Tensor
    size: Tensor
    shuffle: Tensor
    key: Tensor
    done: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.start)

    def take(self, index: Tensor) -> Rows:
        """These rows, in this order (a row may be taken twice)."""
        return Rows(**{name: tree_map(lambda t: t[index], getattr(self, name)) for name in self.__dataclass_fields__})


@dataclass
class LocalRound:
    """Local training of stacked clients; keeps its traced or compiled steps between calls.

    Attributes:
        batch: Mini-batch size.
        epochs: Local passes over the data.
        compiled: Whether steps are compiled.
        width: Most that a batch is padded to (see `padded`).
        rounds: How many rounds are to come, as far as is known.
    """

    method: AnyMethod
    model: Model
    x: Inputs
    y: Tensor
    batch: int
    epochs: int
    compiled: bool
    width: int
    rounds: int = 1
    steppers: dict[Any, Stepper] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        method: AnyMethod,
        model: Model,
        examples: Examples,
        settings: Settings,
        compiled: bool = False,
        longest: int = 0,
        rounds: int = 1,
    ) -> LocalRound:
        """Of clients with these examples, on the device of ``model``.

        Args:
            method: What they do.
            model: The network.
            examples: Of all clients that may train.
            settings: Of which batch size and epochs matter.
            compiled: Whether steps are compiled.
            longest: Most examples of a client that is not here; 0: all are.
            rounds: How many rounds are to come.
        """
        device, batch = model.initial.device, settings.batch
        width = min(batch, max(longest, int(examples.sizes.max())))
        x, y = inputs.move(examples.x, device), examples.y.to(device)
        return cls(method, model, x, y, batch, settings.epochs, compiled, width, rounds)

    def __call__(self, rows: Rows, phases: Sequence[Phase] | None = None) -> Finished[State, State]:
        """Train these clients for a round, from what the server sent and what they kept; reports are per example.

        Args:
            rows: The clients.
            phases: What to run instead of the method's own local round, such as its `Method.tuning`.
        """
        # Threads cost more than they bring where an operation is short, and very much more on a busy machine.
        small = len(rows) * self.model.computed < SMALL
        with threads(1 if small else torch.get_num_threads()):
            return self._train(rows, self.method.phases(self.epochs) if phases is None else phases)

    def in_chunks(self, rows: Rows, chunk: int, phases: Sequence[Phase] | None = None) -> Finished[State, State]:
        """As a call, ``chunk`` clients of similar size side by side at a time; their order is that of ``rows``."""
        order = rows.size.argsort(descending=True, stable=True)
        widths = torch.tensor([self.padded(size) for size in rows.size[order].tolist()])
        counts = widths.unique_consecutive(return_counts=True)[1].tolist()
        done = []
        for alike in order.split(counts):
            # Every chunk has the same shape (one traced step for all): the last is filled up with a row done already.
            # Groups of other sizes differ from round to round, so theirs are powers of two.
            many = chunk if len(counts) == 1 else min(chunk, 1 << (len(alike) - 1).bit_length())
            for index in alike.split(many):
                filled = torch.cat([index, index[-1:].expand(many - len(index))])
                own = slice(len(index))
                done.append(tree_map(lambda t, own=own: t[own], self(rows.take(filled), phases)))
        back = order.argsort()
        return tree_map(lambda *leaves: torch.cat(leaves)[back], *done)

    def padded(self, size: int) -> int:
        """How wide the batches of a client with so many examples are.

        It depends on nothing else, so that a client's arithmetic does not depend on who trains beside it. A compiled or
        recorded step has one width for all, since each further one takes seconds to make.
        """
        if self.compiled or self.y.is_cuda:
            return self.width
        return min(self.width, max(NARROWEST, 1 << (size - 1).bit_length()))

    def stops(self, rows: Rows, stops: Sequence[int], told: Callable[[int], None] = lambda step: None) -> list[State]:
        """Let clients take exactly so many steps in the phase `ADAPT`, whether or not these end an epoch.

        Args:
            rows: The clients, S of them.
            stops: Numbers of steps in rising order, multiples of the first that is not 0.
            told: Called with the number of steps that are done, now and then.

        Returns:
            Personal states (``[S, ...]`` leaves) after each of these numbers.
        """
        with torch.no_grad():
            local, hparams = self._begin(rows)
            todo, loss = self._first(rows, stops[-1]), torch.zeros(len(rows), device=self.y.device)
            # As many steps at a time, so that there is one shape to trace.
            unit, states = next(stop for stop in stops if stop), []
            for done in range(0, stops[-1] + 1, unit):
                if done:
                    part = todo._replace(**{n: getattr(todo, n)[done - unit : done] for n in ("rows", "mask", "key")})
                    step = torch.zeros(1, dtype=torch.int64, device=self.y.device)
                    self._stepper(ADAPT, False).run(Work(local, step, loss, self.x, self.y, part, rows.hparams), unit)
                    told(done)
                if done in stops:
                    states.append(tree_map(torch.clone, self.method.finish(self.model, local, hparams).personal))
        return states

    def _train(self, rows: Rows, phases: Sequence[Phase]) -> Finished[State, State]:
        batches = -(-rows.size // self.batch)
        most = int(batches.max())
        ragged = int(batches.min()) != most
        # Up to a power of two of batches, so that clients of many sizes make a few shapes to trace and not one each.
        width = self.padded(int(rows.size.max()))
        longest = width * (1 << (most - 1).bit_length())
        local, hparams = self._begin(rows)
        loss = torch.zeros(len(rows), device=self.y.device)
        taken = torch.zeros(len(rows), device=self.y.device)
        before = 0
        for phase in phases:
            todo = self._plan(rows, phase, before, longest, width)
            step = torch.zeros(1, dtype=torch.int64, device=self.y.device)
            work = Work(local, step, loss, self.x, self.y, todo, rows.hparams)
            steps = phase.batches * phase.repeats or most * phase.epochs
            self._stepper(phase.name, ragged and not phase.batches).run(work, steps)
            before += phase.epochs
            taken = taken + todo.steps
        finished = self.method.finish(self.model, local, hparams)
        # What travels is a copy: a view of the whole weight vector, once saved or sent, would take the personal part
        # along.
        upload = tree_map(lambda t: t.clone(memory_format=torch.contiguous_format), finished.upload)
        told = {name: value / (rows.size * self.model.members) for name, value in finished.info.items()}
        return Finished(upload, finished.personal, {"nll": loss / taken.clamp(min=1.0), **told})

    def _begin(self, rows: Rows) -> tuple[State, dict[str, Tensor]]:
        """Local states of their own, which steps write to; the method's numbers, with counts if it asks for them."""
        hparams = rows.hparams | ({"counts": self._counts(rows)} if self.method.needs_class_counts else {})
        local = self.method.begin(self.model, rows.shared, rows.personal, hparams)
        return tree_map(lambda t: t.clone(memory_format=torch.contiguous_format), local), hparams

    def _counts(self, rows: Rows) -> Tensor:
        """Examples of each class that the clients train on, ``[S, K]``; of a regression ``[S, 0]``."""
        classes = self.model.likelihood.classes if isinstance(self.model.likelihood, Categorical) else 0
        counts = torch.zeros(len(rows), classes, device=self.y.device)
        if classes:
            slot = torch.arange(int(rows.size.max()), device=self.y.device)
            own = slot < rows.size[:, None]
            counts.scatter_add_(1, self.y[rows.start[:, None] + torch.where(own, slot, 0)], own.float())
        return counts

    def _plan(self, rows: Rows, phase: Phase, before: int, longest: int, width: int) -> Plan:
        if phase.batches:
            first = rows.done[0] * phase.batches if rows.done else torch.zeros_like(rows.size)
            return cyclic(rows.key, rows.start, rows.size, self.batch, first, phase.batches, phase.repeats, width)
        return plan(rows.shuffle, rows.key, rows.start, rows.size, self.batch, before, phase.epochs, longest, width)

    def _first(self, rows: Rows, steps: int) -> Plan:
        """The first ``steps`` mini-batches of each client, which has as many epochs as that takes."""
        parts = []
        for i, size in enumerate(rows.size.tolist()):
            own, epochs = slice(i, i + 1), -(-steps // -(-size // self.batch))
            keys, place = (rows.shuffle[own], rows.key[own]), (rows.start[own], rows.size[own])
            parts.append(plan(*keys, *place, self.batch, 0, epochs, size, self.width))
        at, mask, key = (torch.cat([part[i][:steps] for part in parts], 1) for i in range(3))
        return Plan(at, mask, key, torch.full_like(rows.size, steps).int(), rows.size.float())

    def _stepper(self, phase: str, ragged: bool) -> Stepper:
        at = (phase, ragged)
        if at not in self.steppers:
            self.steppers[at] = Stepper(self.method, self.model, phase, ragged, self.compiled, self.rounds)
        return self.steppers[at]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def held_by(method: AnyMethod, model: Model) -> int:
    """Numbers that a client in training holds, about: its state, and as many more as the frozen part computes with."""
    return method.held(model) + model.computed - model.layout.total


def chunk_size(clients: int, weights: int, device: torch.device, memory: int) -> int:
    """How many of these clients to train side by side, given their number of weights and a budget in MiB."""
    per_client = 14 * 4 * weights  # posterior, prior, both with two moments, gradient and draw
    budget = memory << 20
    if device.type == "cpu":
        budget = min(budget, CPU_CHUNK_BYTES)
    fits = min(clients, max(1, budget // per_client))
    return min(range(1, fits + 1), key=lambda chunk: (-clients % chunk > chunk // 4, -chunk))  # few rows of filling
