"""What a server makes of a round's uploads: options for privacy and robustness, then the method's own rule."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bpfed.compress import travelled
from bpfed.engine.settings import Settings
from bpfed.methods.base import Method, State, rows
from bpfed.privacy import Draw, private_mean
from bpfed.robust import middle
from bpfed.uploads import clipped


def combined(
    method: Method, settings: Settings, shared: State, uploads: State, weights: Tensor, clients: int, draw: Draw
) -> State:
    """The server's new state.

    Where noise or a robust rule makes one upload of all, the method's own rule gets it as often as uploads were
    expected (received); so a rule that depends on their number still does, and one that looks for disagreement finds
    none.

    Args:
        method: Whose rule it is.
        settings: Which options.
        shared: The server's old state.
        uploads: ``[S, ...]``; none at all changes nothing, unless there is noise to be added or the first state, which
            alone is in full, travels compressed from now on.
        weights: Of the uploads, ``[S]``.
        clients: Number of clients in the federation.
        draw: Where the noise for privacy comes from.
    """
    count = len(weights)
    if not count and settings.noise == 0.0:
        return travelled(method, shared) if settings.compression == "half" else shared
    if settings.compression == "half" and count:
        uploads = travelled(method, uploads)
    if settings.noise > 0.0:
        count = settings.per_round(clients)
        one = private_mean(method, shared, uploads, settings.clip, settings.noise, count, draw)
        uploads, weights = rows(one, count), torch.ones(count, device=tree_leaves(shared)[0].device)
    else:
        if settings.clip > 0.0:
            uploads = clipped(method, shared, uploads, settings.clip)
        if settings.trim is not None:
            uploads, weights = rows(middle(uploads, settings.trim), count), torch.ones_like(weights)
    new = method.aggregate(shared, uploads, weights)
    return travelled(method, new) if settings.compression == "half" else new
