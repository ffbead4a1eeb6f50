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
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bpfed._util.console import to_stderr
from bpfed._util.errors import UserError
from bpfed._util.files import whole
from bpfed._util.scores import deviation, mean
from bpfed._util.text import plural
from bpfed.config.settings import Settings
from bpfed.data import FederatedData, from_arrays
from bpfed.data.federated import HELD
from bpfed.data.holdout import split
from bpfed.methods import method
from bpfed.runs.fit import prepare
from bpfed.runs.pilot import ForImages, ScoredCandidate, choose, choose_method, score_methods, selection_settings
from bpfed.runs.run import train_together
from experiments.jobs import Job, device_name, paired, records, run_jobs, run_record, settings_chosen
from experiments.lineup import title
from experiments.typeset import NOTHING, figures, interval, strong, table

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
    tried = [ForImages(**change) for change in changes]
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


# --- The tables and the figure ----------------------------------------------------------------------------------------


#: Of a β and a method: its runs by seed.
Runs = dict[float, dict[str, list[dict[str, Any]]]]


def render(results: Path, figures: Path | None) -> str:
    """The tables of all records as Markdown; with a folder, the figure too."""
    found: Runs = {}
    made = records(results, "*/*.json")
    for record in made:
        by = found.setdefault(record["asked"]["beta"], {})
        by.setdefault(record["asked"]["method_name"], []).extend(record["runs"])
    grids = {beta: by.pop(GRID) for beta, by in sorted(found.items()) if GRID in by}
    if not any(found.values()):
        raise UserError(f"'{results}' has no records; run the experiment first.")
    if figures is not None:
        draw(found, figures)
    versions = ", ".join(sorted({record["bpfed"] for record in made}))
    parts = [_scores(found, versions), _choices(found), *(_grid(beta, runs[0]) for beta, runs in grids.items())]
    return "\n\n".join(part for part in parts if part)


def _scores(found: Runs, versions: str) -> str:
    """NLL and accuracy on test images, methods by β; the lowest NLL of a column is bold."""
    betas, names = sorted(found), _methods(found)
    usual = Counter(_made(runs) for by in found.values() for runs in by.values()).most_common(1)[0][0]
    columns = []
    for beta in betas:
        runs = [found[beta].get(name, []) for name in names]
        means = [mean(_values(each, "nll")) for each in runs]
        texts = [figures(m, "nll", deviation(_values(each, "nll"))) for m, each in zip(means, runs, strict=True)]
        # Of other seeds the mean may be lower by chance alone.
        comparable = [m if _made(each)[0] == usual[0] else math.nan for m, each in zip(means, runs, strict=True)]
        texts = strong(comparable, texts, "nll")
        columns.append([f"{text}{_beside(each, usual)}" for text, each in zip(texts, runs, strict=True)])
    rows = [[title(name), *cells] for name, *cells in zip(names, *columns, strict=True)]
    words = (
        "Test NLL, mean ± standard deviation over seeds (accuracy %). "
        f"Version {versions}, {' on a '.join(usual)} where a cell says nothing else."
    )
    return table(["method", *(f"β = {beta:g}" for beta in betas)], rows) + f"\n\n{words}"


def _methods(found: Runs) -> list[str]:
    return [name for name in METHODS if any(name in by for by in found.values())]


def _values(runs: Sequence[dict[str, Any]], measure: str) -> list[float]:
    return [one["scores"][measure]["pooled"] for one in runs]


def _made(runs: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """How many seeds, and on what."""
    return plural(len(runs), "seed"), " and a ".join(sorted({device_name(one) for one in runs}))


def _beside(runs: Sequence[dict[str, Any]], usual: tuple[str, str]) -> str:
    """The accuracy, and what is unusual about these runs."""
    if not runs:
        return ""
    marks = [mark for mark, other in zip(_made(runs), usual, strict=True) if mark != other]
    return "".join([f" ({100 * mean(_values(runs, 'accuracy')):.1f})", *(f", {mark}" for mark in marks)])


def _choices(found: Runs) -> str:
    """What each run without a method chose, and the NLL on held-out training images that it chose by."""
    rows = []
    for beta in sorted(found):
        for one in found[beta].get(DEFAULT, []):
            recipe, adaptive = _last(one, RECIPE), _last(one, ADAPTIVE)
            kept = one["chosen_settings"]
            tau = f"{kept['deviation']:g}, {kept['head_deviation']:g}" if "deviation" in kept else NOTHING
            cells = [f"{beta:g}", str(one["seed"]), f"{_nll(recipe):.3f}", f"{_nll(adaptive):.3f}"]
            rows.append([*cells, _minus(adaptive, recipe, 3), one["config"]["method"]["name"], tau])
    if not rows:
        return ""
    head = ["β", "seed", RECIPE, ADAPTIVE, "difference", "chosen", "τ of body, head"]
    words = "NLL on held-out training images. The difference is paired, with a 95 % interval (clients as units)."
    return table(head, rows) + f"\n\n{words}"


def _last(one: dict[str, Any], name: str) -> dict[str, Any]:
    """The score that a method was chosen by: its last."""
    return next(held for held in reversed(one["held_out"]) if held["method"] == name)


def _nll(held: dict[str, Any]) -> float:
    return float(np.sum(held["sums"]) / np.sum(held["examples"]))


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float]:
    """Difference per held-out image, and half its 95 % interval, clients as units."""
    examples = np.array(ours["examples"])
    sums = [np.array(each["sums"])[examples > 0] for each in (ours, theirs)]
    scale = (examples > 0).sum() / examples.sum()
    return paired((sums[0] * scale).tolist(), (sums[1] * scale).tolist())


def _minus(ours: dict[str, Any], theirs: dict[str, Any], digits: int) -> str:
    return interval(*_difference(ours, theirs), digits)


def _grid(beta: float, one: dict[str, Any]) -> str:
    """Held-out NLL of ``bpfed-adaptive`` over T and s, and over τ at the first of them."""
    first = one["held_out"][0]
    by_prior: dict[tuple[float, float], dict[str, Any]] = {}
    by_tau: dict[tuple[float, float], dict[str, Any]] = {}
    for held in one["held_out"]:
        prior, tau = ((held[a], held[b]) for a, b in (CHOSEN[:2], CHOSEN[2:]))
        if tau == (first["deviation"], first["head_deviation"]):
            by_prior.setdefault(prior, held)
        if prior == (first["temperature"], first["prior_scale"]):
            by_tau.setdefault(tau, held)
    priors = [
        [f"{t:g}", f"{s:g}", f"{_nll(held):.4f}", NOTHING if held is first else _minus(held, first, 4)]
        for (t, s), held in by_prior.items()
    ]
    heads = sorted({head for _, head in by_tau})
    taus = [
        [_tau(body), *(f"{_nll(by_tau[body, head]):.4f}" if (body, head) in by_tau else NOTHING for head in heads)]
        for body in sorted({body for body, _ in by_tau})
    ]
    where = f"Held-out NLL of `{ADAPTIVE}` at β = {beta:g}, seed {one['seed']}"
    return "\n\n".join(
        [
            f"{where}, over T and s:",
            table(["T", "s", "NLL", "minus the first row"], priors),
            f"{where}, over τ, with the T and s of the first row above:",
            table(["τ of body", *(f"τ of head {_tau(head)}" for head in heads)], taus),
        ]
    )


def _tau(value: float) -> str:
    return f"{value:g}" if value < 100.0 else "∞"


def draw(found: Runs, folder: Path) -> None:
    """What decides between the two methods, and the test NLL of every method, over β."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    from experiments import panel

    betas, names = sorted(found), _methods(found)
    with panel.style():
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.4, 3.8), layout="constrained")
        for seed in sorted({one["seed"] for by in found.values() for one in by.get(DEFAULT, [])}):
            runs = [(b, one) for b in betas for one in found[b].get(DEFAULT, []) if one["seed"] == seed]
            differences = [_difference(_last(one, ADAPTIVE), _last(one, RECIPE)) for _, one in runs]
            at = [b * 1.2 ** (seed - 1) for b, _ in runs]  # beside each other
            left.errorbar(at, *zip(*differences, strict=True), fmt="osD^v"[seed % 5], capsize=2, label=f"seed {seed}")
        left.axhline(0.0, color=panel.WORDS, linewidth=1)
        left.set_ylabel("held-out NLL, bpfed-adaptive − bpfed-recipe")
        left.legend(loc="upper left")
        drawn = []
        for name in names:
            values = [[mean(_values(found[b].get(name, []), "nll")) for b in betas]]
            drawn.append(panel.Line(name, title(name), np.array(betas), np.array(values)))
        for axes in (left, right):
            axes.set(xscale="log", xlabel="β (small: unlike clients)")
            axes.set_xticks(betas, [f"{b:g}" for b in betas])
            axes.minorticks_off()
        panel.lines(right, drawn, panel.NLL, 0.0)
        panel.name_ends(right, drawn)
        panel.save(figure, folder, "dirichlet")


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
        "--render", nargs="?", const=True, metavar="FOLDER", help="print the tables, draw the figure there"
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
