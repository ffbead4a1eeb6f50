"""What a run's report says beyond its metrics: against plain models at each client, and which columns matter where.

`bpfed.metrics.diagnostics` has what predictions alone tell. Here is what needs the models: a column is shuffled among a
client's own test rows, and its importance is how much the NLL rises (permutation importance). All shuffled copies are
predicted in one call, and how many rows and columns take part is bounded, so that it takes a second or two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bpfed._util import text
from bpfed.data.federated import Examples, FederatedData
from bpfed.engine.evaluate import predict_examples
from bpfed.engine.federation import Federation
from bpfed.engine.local import threads
from bpfed.inference.rng import Purpose, words
from bpfed.metrics import Evaluation
from bpfed.metrics.diagnostics import MOST_CLIENTS, gains
from bpfed.runs.baselines import Losses

#: Columns whose effects are shown; with more, these are the first by a short look at all, up to so many.
COLUMNS, MOST_COLUMNS = 20, 200
#: Rows of a client that are shuffled, clients that are, how often, and weight draws of each prediction.
ROWS, CLIENTS, REPEATS, DRAWS = 200, 50, 3, 8
#: Rows of a client at least; fewer say nothing of a column.
LEAST = 10
#: Rows times weights times draws that are computed at most, which takes about two seconds on one core.
MOST_WORK = 4_000_000_000


def diagnostics(
    federation: Federation, evaluation: Evaluation, clients: Tensor, losses: Mapping[str, Losses]
) -> dict[str, Any]:
    """All of it, as in ``evaluation.json``; empty where only sums are known.

    Args:
        federation: After the round that was evaluated.
        evaluation: Of these clients.
        clients: Indices, ``[C]``.
        losses: Of the test rows under each baseline, in the order of the clients.
    """
    found: dict[str, Any] = evaluation.diagnose() if evaluation.diagnose is not None else {}
    if evaluation.example_nll is not None:
        nll = evaluation.example_nll().cpu()
        one = torch.zeros(len(nll), dtype=torch.long)
        over_all = {name: gains(nll, theirs.nll, one, 1) for name, theirs in losses.items()}
        found["overall"] = {name: {key: g[key][0] for key in ("gain", "gain_se")} for name, g in over_all.items()}
    if evaluation.losses is not None and len(clients) <= MOST_CLIENTS and losses:
        own = evaluation.losses().cpu()
        owner = torch.repeat_interleave(torch.arange(len(clients)), federation.data.test.sizes[clients])
        versus = {
            name: gains(own, theirs.loss, owner, len(clients))
            for name, theirs in losses.items()
            if name.startswith("site-") and theirs.loss is not None
        }
        found["versus"] = {name: {key: g[key] for key in ("gain", "gain_se")} for name, g in versus.items()}
    if effects := column_effects(federation, clients):
        found["effects"] = effects
    return found


def column_effects(federation: Federation, clients: Tensor) -> dict[str, Any]:
    """The permutation importance of columns at each client, ready for JSON; empty where the data are no tables.

    Returns:
        ``columns``, by falling importance over all rows; ``pooled``, the rise of the NLL of each; ``clients``, names;
        ``rises``, of each of these clients the rise of each column (None: too few rows); ``rows``, how many took part;
        or ``skipped``, a sentence.
    """
    data, made = federation.data, federation.data.preprocessor
    if made is None or not data.flat or not len(data.test.y) or not isinstance(data.test.x, Tensor):
        return {}
    groups: dict[str, list[int]] = {}
    place = 0
    for feature in made.features:
        count = len(feature.inputs)
        if count:
            groups[feature.name] = list(range(place, place + count))
        place += count
    if place != data.test.x.shape[1] or not groups:
        return {}
    chosen = clients[:CLIENTS]
    draws = min(DRAWS, federation.settings.eval_draws)
    sizes = data.test.sizes[chosen]
    if int(sizes.max()) < LEAST:
        return {"skipped": f"No client has {LEAST} test rows, so nothing can be said of single columns."}
    names = list(groups)
    if len(names) > MOST_COLUMNS:
        return {
            "skipped": f"There are {len(names)} columns, and above {MOST_COLUMNS} their effects would take too long to compute."
        }
    each = len(chosen) * federation.model.computed * draws
    if len(names) > COLUMNS:
        few = _affordable(each * (1 + len(names)), 40)
        if not few:
            return {"skipped": _too_long(data)}
        rises = _rises(federation, chosen, groups, few, 1, draws)
        if rises is None:
            return {}
        order = rises.pooled.argsort(descending=True)[:COLUMNS].tolist()
        names = [names[k] for k in order]
    rows = _affordable(each * (1 + len(names) * REPEATS), ROWS)
    repeats = REPEATS if rows else 1
    rows = rows or _affordable(each * (1 + len(names)), ROWS)
    if not rows:
        return {"skipped": _too_long(data)}
    found = _rises(federation, chosen, {name: groups[name] for name in names}, rows, repeats, draws)
    if found is None:
        return {}
    order = found.pooled.argsort(descending=True).tolist()
    return {
        "columns": [names[k] for k in order],
        "pooled": [_short(found.pooled[k]) for k in order],
        "clients": [data.clients[c] for c in chosen.tolist()],
        "rises": [[_short(row[k]) for k in order] for row in found.clients],
        "rows": found.rows,
        "of": len(groups),
    }


def _affordable(each: int, most: int) -> int:
    """Rows of a client that can be predicted for; 0: too few to say anything."""
    rows = min(most, MOST_WORK // max(1, each))
    return rows if rows >= LEAST else 0


def _too_long(data: FederatedData) -> str:
    return f"Effects of columns were not computed: with {text.many(len(data), 'client')} and this network they would take too long."


class _Rises:
    """How much the NLL rises: over all rows ``[F]``, of each client ``[C, F]`` (NaN: too few rows), and the rows."""

    def __init__(self, pooled: Tensor, clients: Tensor, rows: int) -> None:
        self.pooled, self.clients, self.rows = pooled, clients, rows


def _rises(
    federation: Federation, clients: Tensor, groups: Mapping[str, list[int]], rows: int, repeats: int, draws: int
) -> _Rises | None:
    """Shuffle each group of inputs among the rows of each client, ``repeats`` times, and predict all copies at once."""
    test, task = federation.data.test, federation.data.task_type
    assert isinstance(test.x, Tensor)
    seed = words(federation.settings.seed, 0, Purpose.SAMPLE, federation.ids[clients.numpy()])
    copies = 1 + len(groups) * repeats
    xs, ys, sizes = [], [], torch.zeros(len(test.sizes), dtype=torch.int64)
    kept: list[int] = []
    for at, client in enumerate(clients.tolist()):
        generator = torch.Generator().manual_seed(int(seed[at].sum()) % 2**31)
        x, y = test.client(client)
        assert isinstance(x, Tensor)
        chosen = torch.randperm(len(y), generator=generator)[:rows].to(x.device)
        x, y = x[chosen], y[chosen]
        made = [x]
        for columns in groups.values():
            for _ in range(repeats):
                other, shuffled = x.clone(), torch.randperm(len(y), generator=generator).to(x.device)
                other[:, columns] = x[shuffled][:, columns]
                made.append(other)
        xs.append(torch.cat(made))
        ys.append(y.repeat(copies))
        sizes[client] = len(y) * copies
        kept.append(len(y))
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    order = clients.argsort().tolist()  # examples lie in the order of all clients
    examples = Examples(torch.cat([xs[k] for k in order]), torch.cat([ys[k] for k in order]), offsets)
    with threads(1):
        predicted = predict_examples(federation, examples, clients, draws)
    nll = task.example_nll(predicted)
    if nll is None or not bool(nll.isfinite().all()):
        return None
    sums = torch.zeros(len(clients), 1 + len(groups), dtype=torch.float64)
    for at, part in enumerate(nll.double().cpu().split([n * copies for n in kept])):
        means = part.view(copies, kept[at]).sum(1)
        sums[at, 0] = means[0]
        sums[at, 1:] = means[1:].view(len(groups), repeats).mean(1)
    count = torch.tensor(kept, dtype=torch.float64)
    rise = sums[:, 1:] - sums[:, :1]
    few = (count < LEAST)[:, None]
    return _Rises(rise.sum(0) / count.sum(), (rise / count[:, None]).masked_fill(few, math.nan), int(count.sum()))


def _short(value: Tensor) -> float | None:
    number = float(value)
    return float(f"{number:.4g}") if math.isfinite(number) else None
