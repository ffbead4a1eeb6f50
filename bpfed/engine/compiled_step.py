"""Turns a method's step into something fast to call again and again on fixed shapes.

The step is traced once into a flat graph of tensor operations: the module, ``vmap``, the interception modes and the
method itself then cost nothing per step. The graph can be compiled (fused kernels) and, on a GPU, recorded as a CUDA
graph.

On a CPU, a step that is taken a few times is called as it is, since tracing takes as long as many steps
(`worth_tracing`); the numbers are the same to the last bit. Compiled ones differ in rounding. So whether to compile is
decided from counts of steps (`worth_compiling`) and not by a clock: a run that is repeated decides alike.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from bpfed.engine.batching import Plan
from bpfed.engine.blocks import LARGE, compiled_regions, in_blocks
from bpfed.inference import inputs
from bpfed.inference.estimators import Batch
from bpfed.inference.inputs import Inputs

if TYPE_CHECKING:
    from bpfed.methods.base import AnyMethod, State
    from bpfed.nn.model import Model

#: How the compiler is to treat a step, by device.
OPTIONS: dict[str, dict[str, Any]] = {"cuda": {"combo_kernels": True}}  # small kernels side by side in one launch

#: Steps of one shape that repay tracing it on a CPU. Both the tracing and the steps take time for each operation:
#: tracing as long as some 80 steps, of which each is faster by a fifth from then on.
TRACE_FROM = 500
#: The same where vectors of all weights are so long that they are taken in blocks (`bpfed.engine.blocks`), which only a
#: traced step can be: there tracing takes as long as a few steps, and a step in blocks half as long as one without.
TRACE_LARGE_FROM = 8
#: Steps of one shape that repay compiling it on a CPU. For the network of digits compiling took as long as some 3000
#: traced steps, so at this many it would add a tenth even if the steps became no faster. Others were not measured.
COMPILE_FROM = 30_000


def worth_tracing(steps: int, weights: int = 0) -> bool:
    """Whether a step on so many weights that is taken so many times in one shape is to be traced on a CPU."""
    return steps >= (TRACE_LARGE_FROM if weights >= LARGE else TRACE_FROM)


def worth_compiling(steps: float, shapes: int) -> bool:
    """Whether steps of a run are to be compiled on a CPU.

    Args:
        steps: That are taken in all.
        shapes: In how many phases and shapes they are; each is compiled by itself.
    """
    return steps >= COMPILE_FROM * shapes


class Work(NamedTuple):
    """All that a step reads and writes.

    Attributes:
        local: The clients' local states; written in place.
        step: Number of the next step of the phase, ``[1]`` int64; written in place.
        loss: Running sum of each client's mean −log p over its steps, ``[S]``; written in place.
        x: All training inputs, ``[E, ...]``.
        y: All training targets, ``[E]``.
        plan: Which of them each step uses.
        hparams: The method's numbers, ``[S]`` each.
    """

    local: State
    step: Tensor
    loss: Tensor
    x: Inputs
    y: Tensor
    plan: Plan
    hparams: dict[str, Tensor]


class Slot(NamedTuple):
    """What the plan holds for one step: rows and mask ``[S, B]``, keys ``[S, 2]``."""

    rows: Tensor
    mask: Tensor
    key: Tensor

    @classmethod
    def select(cls, work: Work) -> Slot:
        """The next step's, by its number on the device."""
        return cls(*(t.index_select(0, work.step).squeeze(0) for t in work.plan[:3]))


def advance(method: AnyMethod, model: Model, phase: str, ragged: bool, work: Work, slot: Slot) -> None:
    """One local step of every client, in place; a client that has done all its steps stays as it is."""
    batch = Batch(inputs.take(work.x, slot.rows), work.y[slot.rows], slot.mask, work.plan.size, slot.key)
    new, loss = method.step(model, work.local, batch, work.hparams, phase)
    active = work.step < work.plan.steps
    old_leaves, _ = tree_flatten(work.local)
    new_leaves, _ = tree_flatten(new)
    # A method may hand on what it was given under another name (the weights before this step): save it from being
    # overwritten.
    given = {id(t) for t in old_leaves}
    new_leaves = [
        t.clone() if id(t) in given and t is not old else t for old, t in zip(old_leaves, new_leaves, strict=True)
    ]
    for old, leaf in zip(old_leaves, new_leaves, strict=True):
        if ragged:
            leaf = torch.where(active.view(-1, *(1,) * (leaf.ndim - 1)), leaf, old)
        old.copy_(leaf)
    work.loss.add_(torch.where(active, loss, 0.0) if ragged else loss)
    work.step.add_(1)


class Stepper:
    """Steps one phase of a method for S clients; made once for each shape and kept.

    Args:
        method: Its structure matters, not its numbers.
        model: On the device of the work.
        phase: Name of the phase.
        ragged: Whether clients may differ in their number of steps.
        compiled: Whether to compile.
        rounds: How many times `run` is to be called with the same shape, at least.
    """

    def __init__(
        self, method: AnyMethod, model: Model, phase: str, ragged: bool, compiled: bool, rounds: int = 1
    ) -> None:
        self.method, self.model, self.phase, self.ragged = method, model, phase, ragged
        self.compiled = compiled and method.recordable
        self.rounds = rounds
        self.loops: dict[tuple[Any, ...], Repeated | Recorded] = {}

    def run(self, work: Work, steps: int) -> None:
        """Take ``steps`` steps."""
        leaves, _ = tree_flatten(work)
        shape = tuple((tuple(t.shape), t.dtype) for t in leaves)
        with torch.no_grad():
            if shape not in self.loops:
                self.loops[shape] = (Recorded if work.y.is_cuda and self.method.recordable else Repeated)(self, work)
            self.loops[shape](work, steps)

    def advance(self, work: Work, slot: Slot) -> None:
        """One step, in place."""
        advance(self.method, self.model, self.phase, self.ragged, work, slot)

    def trace(self, function: Callable[..., None], *example: Any) -> Callable[..., None]:
        """The function as a flat graph of tensor operations on the leaves of its arguments, compiled if wanted."""
        leaves, spec = tree_flatten(example)
        graph = make_fx(lambda *flat: function(*tree_unflatten(list(flat), spec)))(*leaves)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        device = leaves[0].device.type
        if self.compiled and device == "cuda" and (made := compiled_regions(graph)) is not None:
            return made
        if self.compiled:
            return torch.compile(graph, options=OPTIONS.get(device))
        return in_blocks(graph) if device == "cpu" else graph


def _own(work: Work) -> Work:
    """The same work with leaves of its own, but for the training data, which is large and never written."""
    large = {id(t) for t in tree_leaves((work.x, work.y))}
    return tree_map(lambda t: t if id(t) in large else t.clone(), work)


class Repeated:
    """Calls a step again and again, handing it its slot of the plan; traced where that is worth while."""

    def __init__(self, stepper: Stepper, work: Work) -> None:
        self.stepper, self.taken = stepper, 0
        self.call: Callable[..., None] | None = None

    def __call__(self, work: Work, steps: int) -> None:
        stepper = self.stepper
        if self.call is None and (stepper.compiled or self._repays(steps)):
            # Tracing runs the step once; it must not run on the real state.
            self.call = stepper.trace(stepper.advance, _own(work), Slot.select(work))
        self.taken += steps
        leaves, _ = tree_flatten(work)
        for slot in zip(*(t[:steps] for t in work.plan[:3]), strict=True):
            if self.call is None:
                stepper.advance(work, Slot(*slot))
            else:
                self.call(*leaves, *slot)

    def _repays(self, steps: int) -> bool:
        stepper = self.stepper
        return worth_tracing(self.taken + steps * stepper.rounds, stepper.model.layout.total)


class Recorded:
    """Replays steps recorded as a CUDA graph: no launch costs more than the kernel itself.

    A step is traced and compiled once, and recorded several times over, so that one launch replays many. A graph works
    on fixed addresses, so the leaves are copied in and out, except the training data, which stay put.
    """

    #: Steps in a launch. (Compiled as one, the end of a step and the start of the next would share a kernel, but the
    #: compiler would take as many times as long: minutes, where a whole run often takes less.)
    TOGETHER = 10

    def __init__(self, stepper: Stepper, work: Work) -> None:
        self.static = _own(work)
        self.leaves, _ = tree_flatten(self.static)
        self.call = stepper.trace(lambda work: stepper.advance(work, Slot.select(work)), _own(work))
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compilation and warm-up must be over before recording
            for _ in range(2):
                _copy(work, self.static)
                self.call(*self.leaves)
        torch.cuda.current_stream().wait_stream(side)

    def __call__(self, work: Work, steps: int) -> None:
        many, few = divmod(steps, self.TOGETHER)
        _copy(work, self.static)
        for count, times in ((self.TOGETHER, many), (1, few)):
            if times and count not in self.graphs:
                self.graphs[count] = self._recorded(count)  # recording runs nothing
            for _ in range(times):
                self.graphs[count].replay()
        _copy(self.static, work)

    def _recorded(self, count: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with uncollected(), torch.cuda.graph(graph):
            for _ in range(count):
                self.call(*self.leaves)
        return graph


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected inside: if that freed the CUDA graph of an earlier run, one being recorded would be lost."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _copy(source: Work, target: Work) -> None:
    for old, new in zip(tree_flatten(target)[0], tree_flatten(source)[0], strict=True):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)
