"""Inputs of any structure: one tensor, or a dict or tuple of tensors with the same first axes.

A dict is what a module takes by name, ``module(**x)``, and a tuple what it takes by position, ``module(*x)``. Whole
numbers stay whole, so that ids can be looked up. Functions of the tree ``x`` act on all its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

#: One tensor ``[B, ...]``, or a dict or tuple of them.
Inputs = Any


def each(change: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """The inputs with each tensor changed."""
    return tree_map(change, x)


def take(x: Inputs, index: Any) -> Inputs:
    """Those at these places of the first axis."""
    return tree_map(lambda t: t[index], x)


def first(x: Inputs) -> Tensor:
    """One of the tensors, for what all have in common: the first axes and the device."""
    leaf: Tensor = tree_leaves(x)[0]
    return leaf


def numbers(x: Inputs) -> int:
    """How many there are in all tensors."""
    return sum(t.numel() for t in tree_leaves(x))


def move(x: Inputs, device: torch.device | str) -> Inputs:
    """The same on that device."""
    return tree_map(lambda t: t.to(device), x)


def join(parts: list[Inputs]) -> Inputs:
    """Inputs of one structure, end to end."""
    return tree_map(lambda *leaves: torch.cat(leaves), *parts)


def blocks(x: Inputs, size: int) -> Iterator[Inputs]:
    """So many of them at a time; at least one block, which may be empty."""
    for start in range(0, max(1, len(first(x))), size):
        yield take(x, slice(start, start + size))


def parts(x: Inputs) -> dict[str, Any]:
    """The tensors by name; that of one alone is empty, those of a tuple are numbers."""
    if isinstance(x, Tensor):
        return {"": x}
    return dict(x) if isinstance(x, Mapping) else {str(i): t for i, t in enumerate(x)}


def shapes(x: Inputs) -> str:
    """Of one example, in words: ``[4]``, or ``{input_ids: [16], attention_mask: [16]}``."""
    found = {name: str(list(t.shape[1:])) for name, t in parts(x).items()}
    return found[""] if isinstance(x, Tensor) else "{" + ", ".join(f"{n}: {s}" for n, s in found.items()) + "}"
