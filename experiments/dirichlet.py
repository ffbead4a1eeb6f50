"""How much clients share as they become more alike: Fashion-MNIST over 20 clients by Dirichlet(β).

    python -m experiments dirichlet --prepare fmnist-part.npz     # a part of Fashion-MNIST as one small file
    python -m experiments dirichlet --images fmnist-part.npz --workers 7
    python -m experiments dirichlet --render docs/figures

Each class in turn is divided among the clients in Dirichlet(β) proportions; a client that has 1/20 of all images already
gets no more of it. A quarter of every client's images is for testing, all clients take part in every round, and every
method has the network MLP 784-100-10, 50 rounds and one network, and none is calibrated. ``default`` is what `bpfed.fit` does
where no method is given: it chooses between the recipe and ``bpfed-adaptive`` on held-out training images.
``bpfed-adaptive`` chooses its settings there too. ``grid`` trains nothing but pilots: ``bpfed-adaptive`` with more values of
τ than are chosen from, to see how much sharing held-out images prefer.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bpfed._util.console import to_stderr
from bpfed._util.errors import UserError
from bpfed._util.files import whole
from bpfed._util.scores import mean
from bpfed.config.settings import Settings
from bpfed.data import FederatedData, from_arrays
from bpfed.data.federated import HELD
from bpfed.data.holdout import split
from bpfed.methods import method
from bpfed.runs.fit import prepare
from bpfed.runs.pilot import ScoredCandidate, choose, choose_method, score_methods, selection_settings
from bpfed.runs.run import train_together
from experiments.jobs import Job, paired, records, run_jobs, run_record, settings_chosen

RESULTS = Path("results/dirichlet")
BETAS = (0.01, 0.1, 0.5, 5.0)
DEFAULT, ADAPTIVE, RECIPE, GRID = "default", "bpfed-adaptive", "bpfed-recipe", "grid"
METHODS = (DEFAULT, ADAPTIVE, RECIPE, "fedavg", "fedper", "local", "ditto", "fedrep")
CLIENTS, TEST_FRACTION, SEEDS, ROUNDS, EPOCHS = 20, 0.25, 3, 50, 5
#: T and s, and τ of the body and the head, of the grid.
PRIORS = ((0.3, 2.0), (0.3, 4.0), (0.1, 2.0), (0.1, 4.0), (0.3, 8.0))
DEVIATIONS = (
    *((body, head) for body in (0.0, 0.03, 0.1, 0.3, 1.0) for head in (0.1, 0.3, 1.0, 3.0)),
    (0.0, 0.0),
    (0.0, 100.0),
    (100.0, 100.0),
)
#: Images of each class in the small file.
EACH = 1_400
#: Jobs that are begun first.
COST = {DEFAULT: 9.0, RECIPE: 5.0, ADAPTIVE: 3.0, GRID: 0.5}
CHOSEN = ("temperature", "prior_scale", "deviation", "head_deviation")


@dataclass(frozen=True)
class Images:
    """Grey images ``[E, 28, 28]`` as bytes, and their classes ``[E]``."""

    x: np.ndarray
    y: np.ndarray

    @classmethod
    def read(cls, path: Path) -> Images:
        """From the file of `make_images`, here or in the folder of data."""
        path = path if path.exists() else Path(os.environ.get("BPFED_DATA", "data")) / path
        if not path.exists():
            raise UserError(f"'{path}' is missing; make it with --prepare.")
        with np.load(path) as found:
            return cls(found["x"], found["y"].astype(np.int64))

    def federation(self, beta: float, seed: int, clients: int) -> FederatedData:
        """The clients for one β."""
        drawn = np.random.default_rng([seed, round(1000 * beta), 11])
        owners = divide(self.y, clients, beta, drawn)
        test = split(self.y, owners, TEST_FRACTION, drawn)
        names = np.array([f"client-{i:02d}" for i in range(clients)])[owners]
        x = (self.x.astype(np.float32) / 127.5 - 1.0)[:, None]
        labels = tuple(str(k) for k in range(int(self.y.max()) + 1))
        return from_arrays(x, self.y, names, name=f"fmnist-{beta:g}", labels=labels, task="classification", test=test)


def divide(y: np.ndarray, clients: int, beta: float, drawn: np.random.Generator) -> np.ndarray:
    """The client of each image, ``[E]``; everybody has at least eight."""
    for _ in range(1_000):
        owners, sizes = np.zeros(len(y), dtype=np.int64), np.zeros(clients, dtype=np.int64)
        for label in np.unique(y):
            members = drawn.permutation(np.flatnonzero(y == label))
            # Those who have their part of all images get no more; with a tiny β the draw can be all zeros.
            part = drawn.dirichlet(np.full(clients, beta)) * (sizes < len(y) / clients)
            part = part / part.sum() if part.sum() > 0.0 else np.eye(clients)[int(sizes.argmin())]
            cuts = np.rint(part.cumsum() * len(members)).astype(np.int64)
            cuts[-1] = len(members)
            owners[members] = np.repeat(np.arange(clients), np.diff(cuts, prepend=0))
            sizes += np.diff(cuts, prepend=0)
        if sizes.min() >= 8:
            return owners
        if beta <= 0.05:  # fewer classes than clients: some would wait for ever
            return fill(owners, clients, drawn)
    raise UserError(f"No division by Dirichlet({beta:g}) gives each of {clients} clients an image; use fewer clients.")


def fill(owners: np.ndarray, clients: int, drawn: np.random.Generator) -> np.ndarray:
    """Give half of the largest client's images to each client with fewer than eight, one after the other."""
    owners = owners.copy()
    for client in range(clients):
        sizes = np.bincount(owners, minlength=clients)
        if sizes[client] < 8:
            most = drawn.permutation(np.flatnonzero(owners == sizes.argmax()))
            owners[most[: len(most) // 2]] = client
    return owners


def train(
    images: str, beta: float, method_name: str, seeds: Sequence[int], rounds: int, clients: int, device: Any
) -> dict[str, Any]:
    """The record of one method at one β, these seeds side by side."""
    read, kept, runs = Images.read(Path(images)), [], []
    for seed in seeds:
        data = read.federation(beta, seed, clients)
        settings = Settings(
            rounds=rounds, epochs=EPOCHS, seed=seed, device=device, eval_every=rounds, baselines="off", members=1
        )
        if method_name == GRID:
            kept.append({"seed": seed, "held_out": grid(data, settings)})
            continue
        used, held = chosen(method_name, data, settings)
        runs.append(prepare(used, data, replace(settings, adapt="off")))
        kept.append({"seed": seed, "held_out": held, "chosen_settings": settings_chosen(used, CHOSEN)})
    if not runs:
        return {"runs": kept}
    train_together(runs, [[] for _ in runs])
    found = [k | run_record(run) for k, run in zip(kept, runs, strict=True)]
    return {"runs": found, "words": "; ".join(f"{one['words']} {one['chosen_settings']}" for one in found)}


def chosen(name: str, data: FederatedData, settings: Settings) -> tuple[Any, list[dict[str, Any]]]:
    """The method with what its pilots choose, and the scores of all candidates on held-out training images."""
    if name == DEFAULT:
        found = choose_method(data, settings)
        stages = () if found.settings is None else found.settings.stages
        return found.method, [_scored(one) for stage in (*stages, found.tried) for one in stage]
    if name == ADAPTIVE:
        choice = choose(method(name)(), data, settings)
        return choice.method, [_scored(one) for stage in choice.stages for one in stage]
    return method(name)(), []


def grid(data: FederatedData, settings: Settings) -> list[dict[str, Any]]:
    """Scores of the priors with τ 0.1 and 0.3, and of all τ with the first prior."""
    how = selection_settings(settings)
    changes: list[dict[str, Any]] = [{"temperature": t, "prior_scale": s} for t, s in PRIORS]
    changes += [{"temperature": 0.3, "prior_scale": 2.0, "deviation": b, "head_deviation": h} for b, h in DEVIATIONS]
    tried = [method(ADAPTIVE)(**change) for change in changes]
    scores = score_methods(tried, data.folds(1, HELD, how.seed), how, None, None)
    return [_scored(ScoredCandidate(*one)) for one in zip(tried, changes, *zip(*scores, strict=True), strict=True)]


def _scored(one: ScoredCandidate) -> dict[str, Any]:
    """A candidate ready for JSON."""
    of = {"method": one.method.name} | settings_chosen(one.method, CHOSEN)
    return of | {"sums": one.sums.tolist(), "examples": one.examples.tolist()}


def jobs(
    images: str, betas: Sequence[float], methods: Sequence[str], seeds: int, rounds: int, clients: int, device: str
) -> list[Job]:
    """One for each β and method, and for each seed where there are pilots."""
    common = {"images": images, "rounds": rounds, "clients": clients}
    made = []
    for beta in betas:
        for name in methods:
            long = name in (DEFAULT, ADAPTIVE, GRID)
            for own in [[seed] for seed in range(seeds)] if long else [list(range(seeds))]:
                path = f"{beta:g}/{name}-{own[0]}.json" if long else f"{beta:g}/{name}.json"
                asked = {"beta": beta, "method_name": name, "seeds": own, **common}
                made.append(Job(path, train, asked, COST.get(name, 1.0), device))
    return made


def make_images(path: Path, each: int = EACH) -> None:
    """Write the first images of each class of Fashion-MNIST's training part to a file."""
    from bpfed.data.sources import pooled

    source = pooled.read("fmnist", None, False)
    rows = np.sort(np.concatenate([np.flatnonzero(source.y == k)[:each] for k in np.unique(source.y)]))
    grey = np.rint((source.inputs(rows).numpy()[:, 0] + 1.0) * 127.5).astype(np.uint8)
    with whole(path) as file:
        np.savez_compressed(file, x=grey, y=source.y[rows].astype(np.uint8))


# --- The table and the figure -----------------------------------------------------------------------------------------


def render(results: Path, figures: Path | None) -> str:
    """The table of all records as Markdown; with a folder, the figure of τ and NLL over β too."""
    found: dict[float, dict[str, list[dict[str, Any]]]] = {}
    for record in records(results, "*/*.json"):
        found.setdefault(record["asked"]["beta"], {})[record["asked"]["method_name"]] = record["runs"]
    if not found:
        raise UserError(f"'{results}' has no records; run the experiment first.")
    names = [name for name in METHODS if any(name in by for by in found.values())]
    lines = [
        f"| β | {' | '.join(names)} | τ body, head | held out, adaptive − recipe |",
        "|---" * (len(names) + 3) + "|",
    ]
    for beta in sorted(found):
        by = found[beta]
        cells = [_cell(by[name]) if name in by else "–" for name in names]
        tau = ", ".join(_tau(one) for one in by.get(ADAPTIVE, []))
        lines.append(f"| {beta:g} | {' | '.join(cells)} | {tau} | {_held_out(by)} |")
    if figures is not None:
        draw(found, names, figures / "dirichlet.svg")
    return "\n".join([*lines, "", "Cells: NLL (accuracy %), mean over seeds."])


def _cell(runs: Sequence[dict[str, Any]]) -> str:
    nll, accuracy = (mean([one["scores"][m]["pooled"] for one in runs]) for m in ("nll", "accuracy"))
    return f"{nll:.3f} ({100 * accuracy:.1f})"


def _tau(one: dict[str, Any]) -> str:
    chosen = one["chosen_settings"]
    return f"{chosen['deviation']:g}/{chosen['head_deviation']:g}"


def _held_out(by: dict[str, list[dict[str, Any]]]) -> str:
    """Difference per held-out image of each seed with its 95 % interval, clients as units."""
    if ADAPTIVE not in by or RECIPE not in by:
        return "–"
    shown = []
    for ours, theirs in zip(by[ADAPTIVE], by[RECIPE], strict=True):
        examples = np.array(ours["held_out"]["examples"])
        sums = [np.array(one["held_out"]["sums"])[examples > 0] for one in (ours, theirs)]
        scale = (examples > 0).sum() / examples.sum()
        difference, half = paired((sums[0] * scale).tolist(), (sums[1] * scale).tolist())
        shown.append(f"{difference:+.3f} ± {half:.3f}")
    return ", ".join(shown)


def draw(found: dict[float, dict[str, list[dict[str, Any]]]], names: Sequence[str], path: Path) -> None:
    """τ that was chosen and NLL of every method over β."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    betas = sorted(found)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for key, label, marker in (("deviation", "other layers", "o"), ("head_deviation", "last layer", "s")):
        points = [(b, one["chosen_settings"][key]) for b in betas for one in found[b].get(ADAPTIVE, [])]
        left.plot(*zip(*points, strict=True), marker, fillstyle="none", label=label)
    left.set(xscale="log", xlabel="β", ylabel="τ chosen on held-out images (100: ∞)")
    left.set_yscale("symlog", linthresh=0.05)
    for name in names:
        shown = [
            (b, mean([one["scores"]["nll"]["pooled"] for one in found[b][name]])) for b in betas if name in found[b]
        ]
        right.plot(*zip(*shown, strict=True), marker="o", label=name, linewidth=2 if name == ADAPTIVE else 1)
    right.set(xscale="log", yscale="log", xlabel="β", ylabel="test NLL")
    left.legend()
    right.legend(fontsize=7)
    with whole(path) as file:
        figure.savefig(file, format="svg")
    with whole(path.with_suffix(".png")) as file:
        figure.savefig(file, format="png", dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the top of this file."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m experiments dirichlet", description=about)
    parser.add_argument("--images", default="fmnist-part.npz", help="the file that --prepare made")
    parser.add_argument("--prepare", type=Path, metavar="FILE", help="make that file, and stop")
    parser.add_argument("--betas", default=",".join(f"{beta:g}" for beta in BETAS), help="with commas between them")
    parser.add_argument("--methods", default=",".join(METHODS), help="which, with commas between them")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many, from 0")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=1, help="jobs at a time")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no job is begun")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--render", nargs="?", const=True, metavar="FOLDER", help="print the table, draw the figure there"
    )
    given = parser.parse_args(arguments)
    if given.prepare is not None:
        make_images(given.prepare)
        return
    if given.render:
        print(render(given.results, None if given.render is True else Path(given.render)))
        return
    betas = [float(beta) for beta in given.betas.split(",")]
    asked = jobs(given.images, betas, given.methods.split(","), given.seeds, given.rounds, given.clients, given.device)
    run_jobs(asked, given.results, given.workers, given.budget, to_stderr)


if __name__ == "__main__":
    main()
