"""The default against the recipe on small cells of the paper, paired by seed.

    python -m experiments small-cells --prepare small-cells.npz     # a part of their images as one small file
    python -m experiments small-cells --images small-cells.npz --workers 6
    python -m experiments small-cells --render

A client has the 250 training images of the cell and the first 100 of its 4 750 test images. There are 50 rounds instead of
the paper's 300, with its batches of 50 and 10 local epochs. ``default`` chooses between the
recipe and ``bpfed-adaptive`` on held-out training images, so it may be either.
"""

from __future__ import annotations

import argparse
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bpfed._util.console import to_stderr
from bpfed._util.errors import UserError
from bpfed._util.files import whole
from bpfed._util.scores import mean
from bpfed.data import FederatedData, from_arrays, load
from bpfed.runs.fit import fit
from experiments.jobs import Job, paired, records, run_jobs, run_record
from experiments.typeset import signed

RESULTS = Path("results/small-cells")
CELLS, DEFAULT, RECIPE = ("mnist-small", "fmnist-small"), "default", "bpfed-recipe"
SEEDS, ROUNDS, TESTS = 3, 50, 100


def make_images(path: Path, seeds: int = SEEDS) -> None:
    """Write the images of all cells and seeds to a file: bytes ``[E, 28, 28]``, classes, clients, and which are for testing."""
    parts: dict[str, np.ndarray] = {}
    for cell in CELLS:
        for seed in range(seeds):
            data, x, y, owner, test = load(cell, seed=seed), [], [], [], []
            for place in range(len(data)):
                for part, most, held in ((data.train, None, False), (data.test, TESTS, True)):
                    images, classes = part.client(place)
                    x.append(np.rint((images[:most, 0].numpy() + 1.0) * 127.5).astype(np.uint8))
                    y.append(classes[:most].numpy().astype(np.uint8))
                    owner.append(np.full(len(y[-1]), place, dtype=np.uint8))
                    test.append(np.full(len(y[-1]), held))
            named = {"x": x, "y": y, "owner": owner, "test": test}
            parts |= {f"{cell}-{seed}-{key}": np.concatenate(value) for key, value in named.items()}
    with whole(path) as file, lzma.open(file, "wb") as packed:
        np.savez(packed, **parts)  # type: ignore[arg-type]  # names of arrays, not allow_pickle


def federation(images: Path, cell: str, seed: int) -> FederatedData:
    """The clients of a cell."""
    if not images.exists():
        raise UserError(f"'{images}' is missing; make it with --prepare.")
    with lzma.open(images) as packed, np.load(packed) as found:
        x, y, owner, test = (found[f"{cell}-{seed}-{key}"] for key in ("x", "y", "owner", "test"))
    names = np.array([f"client-{i:02d}" for i in range(int(owner.max()) + 1)])[owner]
    scaled = (x.astype(np.float32) / 127.5 - 1.0)[:, None]
    labels = tuple(str(k) for k in range(10))
    return from_arrays(scaled, y.astype(np.int64), names, name=cell, labels=labels, task="classification", test=test)


def train(images: str, cell: str, method: str, seed: int, rounds: int, device: Any) -> dict[str, Any]:
    """The record of one run."""
    said: list[str] = []
    run = fit(
        None if method == DEFAULT else method,
        federation(Path(images), cell, seed),
        rounds=rounds,
        batch=50,
        epochs=10,
        seed=seed,
        device=device,
        baselines="off",
        eval_every=rounds,
        say=said.append,
        progress=False,
    )
    words = next((sentence for sentence in said if sentence.startswith("Chosen on")), "")
    return run_record(run, chosen=words)


def render(results: Path) -> str:
    """The table of all records as Markdown."""
    found: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for record in records(results, "*.json"):
        asked = record["asked"]
        found.setdefault(asked["cell"], {})[asked["method"], asked["seed"]] = record
    lines = ["| cell | seeds | default | recipe | default − recipe | chosen |", "|---" * 6 + "|"]
    for cell, by in found.items():
        seeds = sorted(seed for name, seed in by if name == DEFAULT and (RECIPE, seed) in by)
        nll = [[by[name, seed]["scores"]["nll"]["pooled"] for seed in seeds] for name in (DEFAULT, RECIPE)]
        difference, half = paired(*nll)
        taken = ", ".join(by[DEFAULT, seed]["config"]["method"]["name"] for seed in seeds)
        lines.append(
            f"| {cell} | {len(seeds)} | {mean(nll[0]):.3f} | {mean(nll[1]):.3f} | {signed(difference, 3)} ± {half:.3f} | {taken} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the top of this file."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m experiments small-cells", description=about)
    parser.add_argument("--images", default="small-cells.npz", help="the file that --prepare made")
    parser.add_argument("--prepare", type=Path, metavar="FILE", help="make that file, and stop")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many, from 0")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=1, help="jobs at a time")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no job is begun")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--render", action="store_true", help="print the table of the records, and run nothing")
    given = parser.parse_args(arguments)
    if given.prepare is not None:
        make_images(given.prepare, given.seeds)
        return
    if given.render:
        print(render(given.results))
        return
    asked = [
        Job(
            f"{cell}-{name}-{seed}.json",
            train,
            {"images": given.images, "cell": cell, "method": name, "seed": seed, "rounds": given.rounds},
            5.0 if name == DEFAULT else 1.0,
            given.device,
        )
        for cell in CELLS
        for name in (DEFAULT, RECIPE)
        for seed in range(given.seeds)
    ]
    run_jobs(asked, given.results, given.workers, given.budget, to_stderr)


if __name__ == "__main__":
    main()
