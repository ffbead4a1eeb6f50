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
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from bpfed.engine.batching import Plan
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
#: The same where vectors of all weights are so long that they are taken in blocks (`in_blocks`), which only a
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


# --- Element-wise operations block by block ---------------------------------------------------------------------------
#
# What is between the operations of a block stays in the cache. A step of a large network on a CPU is mostly element-wise
# arithmetic on vectors of all weights: noise, draws, gradients of KL terms, the optimiser. Each operation by itself reads
# and writes such a vector from memory, a hundred times in a step. Here these operations are gathered into regions, and a
# region runs all of its operations on one block before the next. The numbers are the same, since each element goes through
# the same operations, up to how PyTorch rounds the exponentials of the last few elements of a vector.
#
# On a GPU the compiler makes kernels of the regions alone (`compiled_regions`). That takes seconds, where compiling a whole
# step of a network with many layers takes minutes, and leaves out only what runs on vectors that are small beside the
# weights.


aten = torch.ops.aten

#: Length from which a vector is taken in blocks: several of them do not fit into the cache of a core.
LARGE = 1 << 18
#: Elements of a block: a few blocks of float32 fit into the cache of a core.
BLOCK = 1 << 16

#: Element-wise operations that PyTorch does not mark as such.
_FURTHER = {aten.copy_.default, aten._to_copy.default}


#: How a region is turned into something that runs.
Compiler = Callable[[fx.GraphModule], Callable[..., None]]


def in_blocks(
    traced: fx.GraphModule, large: int = LARGE, block: int = BLOCK, compiler: Compiler = lambda body: body
) -> fx.GraphModule:
    """The same step with its element-wise operations on vectors of ``large`` elements or more in blocks.

    All other operations stay in their order. An element-wise one moves down to the first that needs its result, and
    those on equally long vectors at the same place make a region.
    """
    nodes = list(traced.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    roots = _roots(nodes)
    written = {
        roots[node.all_input_nodes[0]] for node in nodes if _mutates(node) and node.target is not aten.copy_.default
    }
    written |= {
        roots[node.all_input_nodes[0]] for node in nodes if node.target is aten.copy_.default and not _ending(node)
    }
    members = {n for n in nodes if _elementwise(n, large) and not any(roots[i] in written for i in n.all_input_nodes)}
    at: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        if node in members:
            at[node] = min(
                (at[u] - (_length(u) != _length(node)) if u in members else place[u] for u in node.users),
                default=place[nodes[-1]],
            )
    regions: dict[tuple[int, int], list[fx.Node]] = {}
    for node in nodes:
        if node in members:
            regions.setdefault((at[node], _length(node)), []).append(node)
    if not regions or _conflicts(regions, roots):
        return traced
    return _rebuilt(traced, nodes, place, regions, block, compiler)


def compiled_regions(
    traced: fx.GraphModule,
    large: int = LARGE,
    most: float = 0.2,
    compiler: Compiler = lambda body: torch.compile(body, dynamic=False),
) -> fx.GraphModule | None:
    """The same step with each region compiled, and all else as it is; None if that would leave out too much.

    That is so where more than ``most`` of the numbers that element-wise operations compute is outside of regions.
    """
    inside = outside = 0
    for node in traced.graph.nodes:
        if _pointwise(node) and isinstance(node.meta.get("val"), Tensor):
            if _elementwise(node, large):
                inside += node.meta["val"].numel()
            else:
                outside += node.meta["val"].numel()
    if outside > most * (inside + outside):
        return None
    made = in_blocks(traced, large, sys.maxsize, compiler)
    return None if made is traced else made


def _pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and (
        node.target in _FURTHER or torch.Tag.pointwise in node.target.tags
    )


def _length(node: fx.Node) -> int:
    return int(node.meta["val"].shape[-1])


def _is_large(value: Any, large: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[-1] >= large


def _elementwise(node: fx.Node, large: int) -> bool:
    """Whether each element of the result needs that element of the arguments alone, or one number for the whole row."""
    if node.op != "call_function" or not _is_large(node.meta.get("val"), large):
        return False
    if node.target is aten.arange.default:
        return True
    if not _pointwise(node) or (_mutates(node) and node.target not in _FURTHER):
        return False
    shape = node.meta["val"].shape
    tensors = [n.meta["val"] for n in node.all_input_nodes]
    return all(t.ndim == 0 or t.shape[-1] == 1 or t.shape[-1] == shape[-1] for t in tensors) and (
        node.target is not aten.copy_.default or tensors[0].shape == shape
    )


def _mutates(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and (node.target._schema.is_mutable)
    )


def _ending(node: fx.Node) -> bool:
    """Whether this writes to an argument of the step after all else has read it."""
    target = node.args[0]
    return isinstance(target, fx.Node) and target.op == "placeholder" and not node.users


def _roots(nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Of each node whose memory it may look into: its own, or that of what it is a view of."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        roots[node] = node
        first = node.args[0] if node.args else None
        if node.op == "call_function" and isinstance(first, fx.Node):
            schema = getattr(node.target, "_schema", None)
            view = schema is None or any(a.alias_info is not None for a in schema.arguments)
            if view:  # an operator of Python takes an item of several views
                roots[node] = roots[first]
    return roots


def _conflicts(regions: dict[tuple[int, int], list[fx.Node]], roots: dict[fx.Node, fx.Node]) -> bool:
    """Whether one region writes to what another one reads at the same place, or reads itself with other bounds."""
    for key, region in regions.items():
        targets = {roots[n.all_input_nodes[0]] for n in region if n.target is aten.copy_.default}
        for other, members in regions.items():
            if other[0] < key[0]:
                continue
            for node in members:
                for read in node.all_input_nodes:
                    if roots[read] in targets and (
                        other != key or read.meta["val"].shape != roots[read].meta["val"].shape
                    ):
                        return True
    return False


def _rebuilt(
    traced: fx.GraphModule,
    nodes: list[fx.Node],
    place: dict[fx.Node, int],
    regions: dict[tuple[int, int], list[fx.Node]],
    block: int,
    compiler: Compiler,
) -> fx.GraphModule:
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    due: dict[int, list[list[fx.Node]]] = {}
    for at, length in sorted(regions, key=lambda key: (key[0], place[regions[key][0]])):
        due.setdefault(max(at, 0), []).append(regions[at, length])
    inside = {node for region in regions.values() for node in region}
    root = torch.nn.Module()
    for i, node in enumerate(nodes):
        for region in due.get(i, ()):
            _call(graph, root, region, new, block, compiler)
        if node not in inside:
            new[node] = graph.node_copy(node, lambda n: new[n])
            if node.op == "get_attr":
                setattr(root, str(node.target), getattr(traced, str(node.target)))
    return fx.GraphModule(root, graph)


def _call(
    graph: fx.Graph,
    root: torch.nn.Module,
    region: list[fx.Node],
    new: dict[fx.Node, fx.Node],
    block: int,
    compiler: Compiler,
) -> None:
    """Add the call of a region and its results."""
    own = set(region)
    given = list(dict.fromkeys(i for node in region for i in node.all_input_nodes if i not in own))
    results = [n for n in region if n.target is not aten.copy_.default and any(u not in own for u in n.users)]
    made = Region(region, given, results, block, compiler)
    name = f"region_{len(list(root.children()))}"
    root.add_module(name, made)
    called = graph.call_module(name, tuple(new[i] for i in given))
    for i, node in enumerate(results):
        new[node] = graph.call_function(_item, (called, i))


def _item(values: Sequence[Tensor], index: int) -> Tensor:
    return values[index]


class Region(torch.nn.Module):
    """Some element-wise operations, run on one block of their arguments after the other."""

    def __init__(
        self,
        region: list[fx.Node],
        given: list[fx.Node],
        results: list[fx.Node],
        block: int,
        compiler: Compiler,
    ) -> None:
        super().__init__()
        self.block, self.length = block, _length(region[0])
        self.made = [(n.meta["val"].shape, n.meta["val"].dtype, n.meta["val"].device) for n in results]
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        low, high = graph.placeholder("low"), graph.placeholder("high")
        for i, node in enumerate(given):
            new[node] = graph.placeholder(f"given_{i}")
        for node in region:
            if node.target is aten.arange.default:
                kwargs = dict(node.kwargs)
                new[node] = graph.call_function(aten.arange.start, (low, high), kwargs)
            else:
                new[node] = graph.node_copy(node, lambda n: new[n])
        for i, node in enumerate(results):
            target = graph.placeholder(f"result_{i}")
            graph.call_function(aten.copy_.default, (target, new[node]))
        graph.output(None)
        # Placeholders come first.
        first = next(iter(graph.nodes))
        for node in [n for n in graph.nodes if n.op == "placeholder"]:
            if node is not first:
                first.append(node)
                first = node
        graph.lint()
        self.body = compiler(fx.GraphModule(torch.nn.Module(), graph))
        self.whole = [_is_large(n.meta["val"], 2) and n.meta["val"].shape[-1] == self.length for n in given]

    def forward(self, *given: Tensor) -> list[Tensor]:
        results = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in self.made]
        count = -(-self.length // self.block)
        parts: list[Any] = [
            t.split(self.block, -1) if whole else (t,) * count for t, whole in zip(given, self.whole, strict=True)
        ]
        parts += [t.split(self.block, -1) for t in results]
        for i, blocks in enumerate(zip(*parts, strict=True)):
            low = i * self.block
            self.body(low, min(low + self.block, self.length), *blocks)
        return results
