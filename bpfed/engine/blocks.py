"""Runs the element-wise part of a traced step block by block, so that what is between its operations stays in the cache.

A step of a large network on a CPU is mostly element-wise arithmetic on vectors of all weights: noise, draws, gradients of
KL terms, the optimiser. Each operation by itself reads and writes such a vector from memory, a hundred times in a step.
Here these operations are gathered into regions, and a region runs all of its operations on one block before the next.
The numbers are the same, since each element goes through the same operations, up to how PyTorch rounds the exponentials
of the last few elements of a vector.

On a GPU the compiler makes kernels of the regions alone (`compiled_regions`). That takes seconds, where compiling a whole
step of a network with many layers takes minutes, and leaves out only what runs on vectors that are small beside the
weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

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
