"""Many classes, of which each client has some, and test rows of classes that a client never saw.

    python -m experiments many-classes                 # 200 classes, for a CPU
    python -m experiments many-classes --size large    # 1 000 classes, for a GPU

A class is a Gaussian cluster around a centre of its own. Every client draws some of the classes; a part of its test rows
is of classes that are not among its training rows but are among those of other clients. All methods have the same
network (one hidden layer, or a linear path beside it for ``bpfed-adaptive``), rounds and number of networks.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bpfed._util.console import to_stderr
from bpfed._util.errors import UserError
from bpfed._util.scores import deviation, mean
from bpfed._util.text import plural
from bpfed.data import FederatedData, from_arrays
from bpfed.methods import Method, method
from bpfed.runs.fit import fit
from experiments.jobs import Job, device_name, paired, records, run_jobs, run_record, settings_chosen
from experiments.lineup import title
from experiments.typeset import figures, interval, table

RESULTS = Path("results/many-classes")
DEFAULT = "default"
METHODS = (DEFAULT, "bpfed-recipe", "bpfed-adaptive", "fedper", "fedavg", "local")
SEEDS = 3
#: Settings that pilots choose, where a method has them.
CHOSEN = ("temperature", "prior_scale", "deviation", "head_deviation", "head_gain")


@dataclass(frozen=True)
class Case:
    """The data and the length of a run.

    Attributes:
        classes: K.
        clients: Of them.
        own: Classes of a client.
        rows: Training rows of a client's class.
        tests: Test rows of a client.
        new: Part of the test rows that is of classes the client has no training row of.
        inputs: Dimension.
        spread: Standard deviation of the centres; rows have 1 around their centre.
        rounds: Of every method.
    """

    classes: int
    clients: int
    own: int
    rows: int
    tests: int
    new: float
    inputs: int
    spread: float
    rounds: int


SIZES = {
    "tiny": Case(30, 3, 12, 3, 40, 0.2, 16, 1.0, 2),
    "small": Case(200, 8, 50, 4, 300, 0.2, 32, 1.0, 30),
    "large": Case(1000, 20, 200, 5, 1000, 0.2, 64, 0.7, 50),
}


def federation(case: Case, seed: int) -> FederatedData:
    """The clients of a case."""
    drawn = np.random.default_rng([seed, 47])
    centres = case.spread * drawn.standard_normal((case.classes, case.inputs))
    # Every class is somebody's: classes are dealt out like cards, pack after pack.
    packs = -(-case.clients * case.own // case.classes)
    cards = np.concatenate([drawn.permutation(case.classes) for _ in range(packs)])
    y, ids, test = [], [], []
    held = cards[: case.clients * case.own].reshape(case.clients, case.own)
    known = np.unique(held)
    for client, owned in enumerate(held):
        own = np.unique(owned)
        others = np.setdiff1d(known, own)
        fresh = round(case.new * case.tests)
        tested = np.concatenate([drawn.choice(own, case.tests - fresh), drawn.choice(others, fresh)])
        y += [np.repeat(own, case.rows), tested]
        ids.append(np.full(len(own) * case.rows + case.tests, f"client-{client:02d}"))
        test += [np.zeros(len(own) * case.rows, bool), np.ones(case.tests, bool)]
    classes = np.concatenate(y)
    x = (centres[classes] + drawn.standard_normal((len(classes), case.inputs))).astype(np.float32)
    labels = tuple(f"class-{k:04d}" for k in range(case.classes))
    return from_arrays(
        x,
        classes,
        np.concatenate(ids),
        name="many-classes",
        labels=labels,
        task="classification",
        test=np.concatenate(test),
    )


def with_settings(name: str, changes: dict[str, Any]) -> Method | None:
    """A method by its name, with other settings; None: whichever is chosen where no method is given."""
    return None if name == DEFAULT else method(name)(**changes)


def train(size: str, method: str, seed: int, members: int, device: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """The record of one run."""
    case, said = SIZES[size], list[str]()
    data = federation(case, seed)
    run = fit(
        with_settings(method, changes),
        data,
        rounds=case.rounds,
        seed=seed,
        members=members,
        device=device,
        baselines="off",
        eval_every=case.rounds,
        say=said.append,
        progress=False,
    )
    words = next((sentence for sentence in said if sentence.startswith("Chosen on")), "")
    record = run_record(run, chosen=words)
    kinds = seen_and_new(run, data)
    record["words"] += "".join(f", {kind} {s['accuracy']:.3f} / {s['nll']:.3f}" for kind, s in kinds.items())
    chosen = settings_chosen(run.federation.method, CHOSEN)
    return record | {"case": asdict(case), "kinds": kinds, "chosen_settings": chosen}


def seen_and_new(run: Any, data: FederatedData) -> dict[str, dict[str, float]]:
    """Accuracy and NLL over test rows of classes that their client has, and of those that it has not."""
    found: dict[str, list[tuple[bool, float]]] = {"seen": [], "new": []}
    for place, client in enumerate(run.clients()):
        x, y = data.test.client(place)
        probs = np.asarray(client.predict(x.numpy()).probs)
        own = set(data.train.client(place)[1].tolist())
        for row, label in zip(probs, y.tolist(), strict=True):
            kind = "seen" if label in own else "new"
            found[kind].append((bool(row.argmax() == label), -float(np.log(max(row[label], 1e-30)))))
    return {
        kind: {"accuracy": mean([float(right) for right, _ in rows]), "nll": mean([nll for _, nll in rows])}
        for kind, rows in found.items()
    }


def jobs(
    size: str, methods: Sequence[str], seeds: int, members: int, device: str, changes: dict[str, Any]
) -> list[Job]:
    """One for each method and seed."""
    made = []
    for name in methods:
        for seed in range(seeds):
            asked = {
                "size": size,
                "method": name,
                "seed": seed,
                "members": members,
                "changes": changes,
            }
            made.append(
                Job(
                    f"{size}/{name}-{seed}.json",
                    train,
                    asked,
                    3.0 if name in (DEFAULT, "bpfed-adaptive") else 1.0,
                    device,
                )
            )
    return made


def render(results: Path, size: str) -> str:
    """The table of all records of a size as Markdown; a method is compared with FedPer at the seeds that both have."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for record in records(results, f"{size}/*.json"):
        found.setdefault(record["asked"]["method"], {})[record["asked"]["seed"]] = record
    if not found:
        raise UserError(f"'{results}' has no records of size {size}; run the experiment first.")
    of_fedper = found.get("fedper", {})
    rows = []
    for name in sorted(found, key=METHODS.index):
        made = [found[name][seed] for seed in sorted(found[name])]
        nll, right = ([one["scores"][m]["pooled"] for one in made] for m in ("nll", "accuracy"))
        parts = [
            f"{100 * mean([one['kinds'][kind]['accuracy'] for one in made]):.1f} / "
            f"{mean([one['kinds'][kind]['nll'] for one in made]):.2f}"
            for kind in ("seen", "new")
        ]
        both = sorted(found[name].keys() & of_fedper.keys()) if name != "fedper" else []
        difference = paired(*([by[s]["scores"]["nll"]["pooled"] for s in both] for by in (found[name], of_fedper)))
        cells = [
            f"{100 * mean(right):.1f}",
            figures(mean(nll), "nll", deviation(nll)),
            *parts,
            interval(*difference, 2),
        ]
        where = " and ".join(sorted({device_name(one) for one in made}))
        rows.append([title(name), *cells, str(len(made)), where])
    versions = ", ".join(sorted({one["bpfed"] for by_seed in found.values() for one in by_seed.values()}))
    head = ["method", "accuracy %", "NLL", "classes seen: % / NLL", "classes new: % / NLL", "NLL − FedPer's"]
    return table([*head, "seeds", "device"], rows) + f"\n\nMeans over seeds. Version {versions}.{_chosen(found)}"


def _chosen(found: dict[str, dict[int, dict[str, Any]]]) -> str:
    """What was chosen where no method was given, as a sentence."""
    names = [one["config"]["method"]["name"] for one in found.get(DEFAULT, {}).values()]
    chosen = ", ".join(f"`{name}` at {plural(count, 'seed')}" for name, count in sorted(Counter(names).items()))
    return f" The default chose {chosen}." if chosen else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """See the top of this file."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m experiments many-classes", description=about)
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--methods", default=",".join(METHODS), help="which, with commas between them")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=NUMBER", help="a setting of the methods")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many, from 0")
    parser.add_argument("--members", type=int, default=1, help="networks of every method")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=1, help="jobs at a time")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no job is begun")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--render", action="store_true", help="print the table of the records, and run nothing")
    given = parser.parse_args(arguments)
    if given.render:
        print(render(given.results, given.size))
        return
    changes = {name: float(value) for name, value in (each.split("=") for each in given.set)}
    asked = jobs(given.size, given.methods.split(","), given.seeds, given.members, given.device, changes)
    run_jobs(asked, given.results, given.workers, given.budget, to_stderr)


if __name__ == "__main__":
    main()
