"""Uploads as updates: what a client changed in the server's state, as one vector whose norm can be clipped; and how
they are compressed.

An upload has the tensors of the server's state. Its update is their difference, all tensors end to end; a standard
deviation σ counts by ρ, σ = softplus ρ, so that any update of any length leaves σ above 0.

How far an upload is from the server's state is also measured tensor by tensor (`distances`), to tell one that cannot be
the result of training from the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

from bpfed._util.errors import UserError
from bpfed.inference.gaussian import softplus, softplus_inverse

if TYPE_CHECKING:
    from bpfed.methods.base import AnyMethod, State


#: A σ below this counts as this; ρ of 0 is −∞.
LEAST_SIGMA = 1e-8


class Distances(NamedTuple):
    """How far each of S uploads is from the server's state.

    Attributes:
        lengths: By name of a tensor that holds weights or means: the norm of its change, ``[S]`` float64; not finite
            where a number of the upload is not.
        scales: By name of a tensor that holds standard deviations: the least and the greatest σ in units of the
            server's, ``[S, 2]`` float64; infinite where the server's σ is 0 and the upload's is not.
        sigmas: By name of such a tensor: the least and the greatest σ themselves, ``[S, 2]`` float64.
        sizes: The norm of each upload itself, ``[S]`` float64; in practice no two uploads have the same.
        constant: Whether each tensor of weights or means of an upload holds one number only, and the server's does not,
            ``[S]`` bool.
    """

    lengths: dict[str, Tensor]
    scales: dict[str, Tensor]
    sigmas: dict[str, Tensor]
    sizes: Tensor
    constant: Tensor


def distances(method: AnyMethod, shared: State, uploads: State) -> Distances:
    """How far S uploads are from the server's state, tensor by tensor.

    A tensor that the server's state does not have counts from 0, if it holds no standard deviations.
    """
    known = {leaf_name(path): leaf for path, leaf in tree_flatten_with_path(shared)[0]}
    lengths, scales, sigmas, sizes, same = {}, {}, {}, [], []
    for (path, new), scale in zip(tree_flatten_with_path(uploads)[0], scale_leaves(method, uploads), strict=True):
        name = leaf_name(path)
        old = known.get(name)
        if not new[0].numel() or (old is not None and old.shape != new.shape[1:]):
            continue
        sizes.append(torch.linalg.vector_norm(new.flatten(1), dim=-1, dtype=torch.float64))
        if not scale:
            differs = old is not None and bool((old != old.flatten()[0]).any())
            same.append((new.flatten(1) == new.flatten(1)[:, :1]).all(-1) & differs)
            change = new if old is None else new - old
            lengths[name] = torch.linalg.vector_norm(change.flatten(1), dim=-1, dtype=torch.float64)
        elif old is not None:
            ratio = torch.where((old == 0.0) & (new == 0.0), 1.0, new / old).flatten(1)
            scales[name] = torch.stack([ratio.amin(-1), ratio.amax(-1)], -1).double()
            sigmas[name] = torch.stack([new.flatten(1).amin(-1), new.flatten(1).amax(-1)], -1).double()
    count, device = len(tree_leaves(uploads)[0]), tree_leaves(uploads)[0].device
    size = torch.stack(sizes).norm(dim=0) if sizes else torch.zeros(count, dtype=torch.float64, device=device)
    constant = torch.stack(same).all(0) if same else torch.zeros(count, dtype=torch.bool, device=device)
    return Distances(lengths, scales, sigmas, size, constant)


def size_of(method: AnyMethod, state: State) -> float:
    """The norm of all weights and means of a state."""
    flat = [leaf.flatten() for leaf, scale in _leaves(method, state)[0] if not scale]
    return float(torch.linalg.vector_norm(torch.cat(flat), dtype=torch.float64)) if flat else 0.0


def sigmas_of(method: AnyMethod, state: State) -> dict[str, tuple[float, float]]:
    """The least and the greatest σ of each tensor of a state that holds standard deviations, by name."""
    leaves = zip(tree_flatten_with_path(state)[0], scale_leaves(method, state), strict=True)
    return {leaf_name(path): (float(t.min()), float(t.max())) for (path, t), scale in leaves if scale and t.numel()}


def finite(state: State) -> bool:
    """Whether all numbers of a state are finite."""
    return all(bool(torch.isfinite(leaf).all()) for leaf in tree_leaves(state))


def leaf_name(path: tuple[Any, ...]) -> str:
    """The name of a tensor of a state, such as ``head.sigma``."""
    return ".".join(str(getattr(key, "name", getattr(key, "idx", key))) for key in path)


def updates(method: AnyMethod, shared: State, uploads: State) -> Tensor:
    """The updates of S uploads, ``[S, P]``; where the server's σ is 0 (a point), the update of σ is 0."""
    parts = []
    for old, new, scale in paired(method, shared, uploads):
        change = torch.where(old > 0.0, _rho(new) - _rho(old), 0.0) if scale else new - old
        parts.append(change.flatten(1))
    return torch.cat(parts, -1)


def moved(method: AnyMethod, shared: State, changes: Tensor) -> State:
    """The server's state after each of K updates ``[K, P]``: uploads, of which those are the updates."""
    leaves, spec = _leaves(method, shared)
    parts = changes.split([old.numel() for old, _ in leaves], -1)
    made = []
    for (old, scale), part in zip(leaves, parts, strict=True):
        change = part.view(len(changes), *old.shape)
        made.append(torch.where(old > 0.0, softplus(_rho(old) + change), old) if scale else old + change)
    return tree_unflatten(made, spec)


def shortened(changes: Tensor, limit: float) -> Tensor:
    """Updates ``[S, P]`` of norm up to ``limit``: longer ones are scaled down to it, those not finite become 0."""
    return torch.where(torch.isfinite(changes).all(-1, keepdim=True), changes * _factors(changes, limit), 0.0)


def clipped(method: AnyMethod, shared: State, uploads: State, limit: float) -> State:
    """Uploads whose updates have norm up to ``limit``; those that have it already are left as they are."""
    changes = updates(method, shared, uploads)
    near = moved(method, shared, shortened(changes, limit))
    fits = (torch.linalg.vector_norm(changes, dim=-1, dtype=torch.float64) <= limit).nonzero()[:, 0]
    return tree_map(lambda new, old: new.index_copy(0, fits, old[fits]), near, uploads)


def _factors(changes: Tensor, limit: float) -> Tensor:
    """What to multiply updates by, ``[S, 1]``; norms are summed in double precision."""
    norms = torch.linalg.vector_norm(changes, dim=-1, keepdim=True, dtype=torch.float64)
    return (limit / norms.clamp(min=1e-300)).clamp(max=1.0).to(changes.dtype)


def scale_leaves(method: AnyMethod, state: State) -> list[bool]:
    """For each tensor of a state, whether it holds standard deviations (`Method.scales`)."""
    paths = (path for path, _ in tree_flatten_with_path(state)[0])
    return [bool(path) and str(getattr(path[-1], "name", "")) in method.scales for path in paths]


def _leaves(method: AnyMethod, state: State) -> tuple[list[tuple[Tensor, bool]], TreeSpec]:
    leaves, spec = tree_flatten_with_path(state)
    return list(zip((leaf for _, leaf in leaves), scale_leaves(method, state), strict=True)), spec


def paired(method: AnyMethod, shared: State, uploads: State) -> list[tuple[Tensor, Tensor, bool]]:
    """Each tensor of the server's state, that of the uploads, and whether it holds standard deviations."""
    (old, spec), (new, other) = _leaves(method, shared), _leaves(method, uploads)
    same = spec == other and all(a.shape == b.shape[1:] for (a, _), (b, _) in zip(old, new, strict=True))
    if not same:
        raise UserError(
            f"{method.title}'s uploads do not match the server state, so they cannot be clipped; set clip and noise "
            "to 0."
        )
    return [(a, b, scale) for (a, scale), (b, _) in zip(old, new, strict=True)]


def _rho(sigma: Tensor) -> Tensor:
    return softplus_inverse(sigma.clamp(min=LEAST_SIGMA))


# --- Smaller messages: means in half precision, standard deviations as one byte each on a logarithmic scale -----------


#: The greatest number in half precision.
GREATEST = 65504.0


class Quantised(NamedTuple):
    """Standard deviations as levels.

    Attributes:
        level: ``[..., P]`` uint8; 0 is σ = 0, 1 the least σ above 0 and 255 the greatest.
        bounds: Log of that least and greatest, ``[..., 2]`` float32.
    """

    level: Tensor
    bounds: Tensor


def quantise(sigma: Tensor) -> Quantised:
    """One byte for each σ of ``[..., P]``, a scale of its own for each row."""
    log = sigma.log()
    some = sigma > 0.0
    least = torch.where(some, log, torch.inf).amin(-1, keepdim=True).nan_to_num(posinf=0.0)
    greatest = torch.where(some, log, -torch.inf).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    width = (greatest - least).clamp(min=1e-30)
    level = torch.where(some, 1.0 + (254.0 * (log - least) / width).round(), 0.0)
    return Quantised(level.to(torch.uint8), torch.cat([least, greatest], -1).float())


def dequantise(quantised: Quantised) -> Tensor:
    """The σ that they stand for, float32."""
    least, greatest = quantised.bounds[..., :1], quantised.bounds[..., 1:]
    at = (quantised.level.float() - 1.0) / 254.0
    return torch.where(quantised.level > 0, torch.exp(torch.lerp(least, greatest, at)), 0.0)


def compress(method: AnyMethod, state: State) -> list[Tensor | Quantised]:
    """The tensors of a state, each ``[..., P]``, in their order: half precision, or `Quantised` of standard deviations."""
    packed: list[Tensor | Quantised] = []
    for leaf, scale in zip(tree_flatten(state)[0], scale_leaves(method, state), strict=True):
        if scale and leaf.shape[-1]:
            packed.append(quantise(leaf))
            continue
        if bool((leaf.abs() > GREATEST).any()):
            raise UserError(
                f"A weight is beyond {GREATEST:.0f}, the greatest number in half precision; set compression to 'none', "
                "or lower the step size, method.lr, if training has diverged."
            )
        packed.append(leaf.half())
    return packed


def expand(packed: list[Tensor | Quantised], like: State) -> State:
    """The state that was compressed; ``like`` is any of its kind."""
    leaves = [dequantise(part) if isinstance(part, Quantised) else part.float() for part in packed]
    return tree_unflatten(leaves, tree_flatten(like)[1])


def travelled(method: AnyMethod, state: State) -> State:
    """A state as it arrives after it was sent compressed."""
    return expand(compress(method, state), state)
