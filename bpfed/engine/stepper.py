"""Turns a method's step into something fast to call again and again on fixed shapes.

The step is traced once into a flat graph of tensor operations: the module, ``vmap``, the interception modes and the method
itself then cost nothing per step. The graph can be compiled (fused kernels) and, on a GPU, recorded as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from bpfed import noise
from bpfed.engine.plan import Plan
from bpfed.estimators import Batch
from bpfed.methods.base import Method, State
from bpfed.model import Model


class Work(NamedTuple):
    """All that a step reads and writes.

    Attributes:
        local: The clients' local states; written in place.
        step: Number of the next step of the phase, ``[1]`` int64; written in place.
        loss: Running sum of each client's mean −log p over its steps, ``[S]``; written in place.
        x: All training inputs, ``[E, ...]``.
        y: All training targets, ``[E]``.
        plan: Which of them each step uses.
        key: Of the clients' noise in this round, ``[S, 2]``.
        hyper: The method's numbers, ``[S]`` each.
    """

    local: State
    step: Tensor
    loss: Tensor
    x: Tensor
    y: Tensor
    plan: Plan
    key: Tensor
    hyper: dict[str, Tensor]


def advance(method: Method, model: Model, phase: str, ragged: bool, work: Work) -> None:
    """One local step of every client, in place; a client that has done all its steps stays as it is."""
    rows, mask = (t.index_select(0, work.step).squeeze(0) for t in (work.plan.rows, work.plan.mask))
    number = work.plan.first + work.step.int()  # a client's own count, whoever trains beside it
    batch = Batch(work.x[rows], work.y[rows], mask, work.plan.size, noise.fold(work.key, number))
    new, loss = method.step(model, work.local, batch, work.hyper, phase)
    active = work.step < work.plan.steps
    old_leaves, _ = tree_flatten(work.local)
    new_leaves, _ = tree_flatten(new)
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
    """

    def __init__(self, method: Method, model: Model, phase: str, ragged: bool, compiled: bool) -> None:
        self.method, self.model, self.phase, self.ragged, self.compiled = method, model, phase, ragged, compiled
        self.graphs: dict[tuple[Any, ...], Callable[..., None]] = {}

    def run(self, work: Work, steps: int) -> None:
        """Take ``steps`` steps."""
        leaves, spec = tree_flatten(work)
        shape = tuple((tuple(t.shape), t.dtype) for t in leaves)
        if shape not in self.graphs:
            self.graphs[shape] = self._build(leaves, spec)
        call = self.graphs[shape]
        with torch.no_grad():
            for _ in range(steps):
                call(*leaves)

    def _build(self, leaves: list[Tensor], spec: Any) -> Callable[..., None]:
        def step(*flat: Tensor) -> None:
            advance(self.method, self.model, self.phase, self.ragged, tree_unflatten(list(flat), spec))

        copies = [t.clone() for t in leaves]  # tracing runs the step once; it must not run on the real state
        with torch.no_grad():
            graph = make_fx(step)(*copies)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return torch.compile(graph) if self.compiled else graph
