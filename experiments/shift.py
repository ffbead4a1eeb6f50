"""Beyond the paper: test inputs that are not what clients trained on.

Every client of a trained cell is tested on its own test images turned or with noise added, and is asked how sure it is
of images that it cannot know: of the labels it never saw, and of another dataset. What separates those from its own
test images is the AUROC of total uncertainty (entropy of the prediction) and of epistemic uncertainty (mutual
information), the mean over clients of each client's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bpfed._util.console import Say, to_stderr
from bpfed._util.errors import unknown
from bpfed._util.text import plural
from bpfed.config.settings import Device, Settings
from bpfed.data import Examples, FederatedData, load
from bpfed.data.partition import CELLS
from bpfed.engine.evaluate import evaluate_clients
from bpfed.engine.federation import Federation, pick_device
from bpfed.inference.predictive import classify
from bpfed.inference.rng import Purpose
from bpfed.methods import method as method_of
from bpfed.methods.base import Method, rows
from bpfed.metrics import ood_auroc
from experiments.training import Measured, Progress, Shared, each, seeded, settings_of, tests_on, train

METHODS = ("bpfed-recipe", "bpfed-population", "bpfed", "pfedbayes", "fedper", "fedavg-ft", "local")
MEASURES = ("accuracy", "nll", "ece")
ROUNDS = 100
DRAWS = 50
#: Degrees, anticlockwise; and standard deviation of Gaussian noise on inputs that run from -1 to 1.
SHIFTS: dict[str, tuple[float, ...]] = {"rotation": (0, 15, 30, 45, 60), "noise": (0, 0.1, 0.2, 0.4, 0.8)}
#: Where images of another kind come from.
OTHERS = {"mnist": "fmnist", "fmnist": "mnist", "cifar10": "fmnist"}
#: Images of each kind that a client is asked about, at most.
IMAGES = 1000


def run(
    out: Path,
    cells: Sequence[str] = ("mnist-small",),
    methods: Sequence[str] = METHODS,
    seeds: int = 3,
    rounds: int = ROUNDS,
    device: Device = "auto",
    say: Say = to_stderr,
) -> None:
    """Run every method; write ``OUT/shift.json`` of mnist-small, ``OUT/shift-CELL.json`` of others, method by method.

    Args:
        out: Folder of results.
        cells: Names of the paper's cells.
        methods: Names of methods; those that are in the file already are left as they are.
        seeds: How many, from 0 up.
        rounds: Communication rounds.
        device: ``auto``, ``cpu`` or ``cuda``.
        say: Told how far it is.
    """
    for cell in cells:
        if cell not in CELLS:
            raise unknown("cell", cell, CELLS)
    chosen = {name: method_of(name)() for name in methods}
    for cell in cells:
        path = out / ("shift.json" if cell == "mnist-small" else f"shift-{cell}.json")
        _cell(path, cell, chosen, seeds, settings_of(rounds, DRAWS, device), say)


def _cell(path: Path, cell: str, methods: dict[str, Method], seeds: int, settings: Settings, say: Say) -> None:
    """Run methods on one cell and write the file after each of them."""
    asked: dict[str, Any] = {
        "data": cell,
        "other": OTHERS[CELLS[cell].source],
        "shifts": {kind: list(values) for kind, values in SHIFTS.items()},
        "rounds": settings.rounds,
        "seeds": list(range(seeds)),
    }
    file = Shared(path, asked, METHODS, settings)
    deals: list[FederatedData] = []
    strange: list[Tensor] = []

    def ready() -> None:
        file.check_writable()
        if not deals:
            say(f"{cell}: loading {plural(file.seeds, 'seed')}")
            device = pick_device(settings.device)
            deals.extend(tests_on(load(cell, seed=seed), device) for seed in range(file.seeds))
            strange.extend(others(cell, seed) for seed in range(file.seeds))

    def found(method: Method) -> Measured:
        federations = train(method, deals, seeded(settings, file.seeds), say, f"{method.title} on {cell}")
        scores = measure(federations, strange, say)
        unseen = scores["ood"]["unseen"]["total"]
        return Measured(scores, f"AUROC {100 * sum(unseen) / len(unseen):.1f} %")

    each(methods, f"on {cell}", file.has, found, file.keep, say, ready)


def measure(federations: Sequence[Federation], strange: Sequence[Tensor], say: Say) -> dict[str, Any]:
    """Test finished runs, one for each seed, under every shift.

    Args:
        federations: The runs.
        strange: Images of another dataset, for each run ``[M, ...]``.
        say: Told how far it is.
    """
    method, data = federations[0].method, federations[0].data
    progress = Progress(say, f"{method.title} on {data.name}: testing", len(federations), "seed")
    found: dict[str, Any] = {kind: {m: [[] for _ in values] for m in MEASURES} for kind, values in SHIFTS.items()}
    known: dict[str, dict[str, list[float]]] = {k: {"total": [], "epistemic": []} for k in ("unseen", "other")}
    for number, (federation, images) in enumerate(zip(federations, strange, strict=True), 1):
        for kind, values in SHIFTS.items():
            for i, value in enumerate(values):
                evaluation, _ = evaluate_clients(shifted(federation, kind, value))
                for name in MEASURES:
                    found[kind][name][i].append(evaluation[name].pooled)
        for kind, scores in told_apart(federation, images).items():
            for name, score in scores.items():
                known[kind][name].append(score)
        progress.done(number)
    return {**found, "ood": known}


def shifted(federation: Federation, kind: str, value: float) -> Federation:
    """The same federation with other test inputs."""
    test = federation.data.test
    x = rotated(test.x, value) if kind == "rotation" else noisy(test.x, value, federation.settings.seed)
    return replace(federation, data=replace(federation.data, test=Examples(x, test.y, test.offsets)))


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Images ``[E, C, H, W]`` or ``[E, H, W]`` turned anticlockwise about their middle; what comes in is -1."""
    if degrees == 0:
        return x
    images = x if x.ndim == 4 else x[:, None]
    angle = math.radians(degrees)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    parts = []
    for part in images.split(10_000):
        grid = F.affine_grid(turn.to(x).expand(len(part), 2, 3), list(part.shape), align_corners=False)
        parts.append(F.grid_sample(part + 1.0, grid, align_corners=False) - 1.0)
    return torch.cat(parts).reshape(x.shape)


def noisy(x: Tensor, sigma: float, seed: int) -> Tensor:
    """Inputs with Gaussian noise; for one seed it is the same noise at every σ, and for every method."""
    g = torch.Generator().manual_seed(seed)
    return x + sigma * torch.randn(x.shape, generator=g).to(x.device) if sigma else x


def told_apart(federation: Federation, strange: Tensor) -> dict[str, dict[str, float]]:
    """AUROC of total and epistemic uncertainty for labels that a client never saw and for images of another dataset."""
    data = federation.data
    scores: dict[str, dict[str, list[float]]] = {k: {"total": [], "epistemic": []} for k in ("unseen", "other")}
    order = torch.randperm(len(data.test.y), generator=torch.Generator().manual_seed(federation.settings.seed))
    order = order.to(data.test.y.device)
    for client in range(len(data)):
        own = data.train.client(client)[1].unique().to(order.device)
        unseen = order[~torch.isin(data.test.y[order], own)][:IMAGES]
        inside = uncertainties(federation, client, data.test.client(client)[0])
        for kind, x in (("unseen", data.test.x[unseen]), ("other", strange)):
            if not len(x):  # it has seen all labels
                continue
            outside = uncertainties(federation, client, x)
            for name, familiar, other in zip(scores[kind], inside, outside, strict=True):
                scores[kind][name].append(float(ood_auroc(familiar, other)))
    return {kind: {name: sum(v) / len(v) if v else math.nan for name, v in scores[kind].items()} for kind in scores}


def uncertainties(federation: Federation, client: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Total and epistemic uncertainty of one client's predictions, ``[E]`` each; one network has none of the latter."""
    who = torch.tensor([client])
    with torch.no_grad():
        predictive = federation.method.predictive(
            federation.model, rows(federation.shared, 1), federation.personal(who)
        )
        key = federation.keys(0, Purpose.EVALUATION, who)
        found = classify(federation.model, predictive, x[None].to(federation.device), key, DRAWS)
    total = found.entropy[0]
    # Of one draw the two entropies are equal but for rounding, which must not be taken for knowledge.
    return total, found.epistemic[0] if predictive.draws(DRAWS) > 1 else torch.zeros_like(total)


def others(cell: str, seed: int) -> Tensor:
    """Images of another dataset in the shape of this cell's, ``[1000, ...]``."""
    data = load(OTHERS[CELLS[cell].source], seed=seed)
    x = data.test.x[torch.randperm(len(data.test.x), generator=torch.Generator().manual_seed(seed))[:IMAGES]]
    if CELLS[cell].source == "cifar10":  # grey 28 x 28 in a frame, three times for colours
        return F.pad(x.reshape(-1, 1, 28, 28), (2, 2, 2, 2), value=-1.0).expand(-1, 3, -1, -1).contiguous()
    return x
