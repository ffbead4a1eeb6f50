"""The state of a federation on disk: tensors as safetensors, the rest as JSON, nothing that can execute.

A checkpoint is two files, ``round-000012.safetensors`` and ``round-000012.json``; the second holds the hash of the
first and is written last, so it is what makes the checkpoint exist. The newest are kept (`Settings.checkpoints`): a
damaged one falls back to the one before, and a run can go back to any of them (`go_back`). A server's state that is not
finite is never written.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from bpfed.data.federated import FederatedData
from bpfed.engine.federation import Federation
from bpfed.engine.settings import Settings
from bpfed.errors import UserError
from bpfed.factors import Personal
from bpfed.files import to_json, write_whole
from bpfed.likelihoods import Categorical, Likelihood, Normal
from bpfed.model import Model
from bpfed.networks import make_model
from bpfed.uploads import finite


@dataclass(frozen=True)
class Restored:
    """What was read back.

    Attributes:
        round: Rounds done.
        extra: What the caller saved beside the state.
        damaged: Names of newer checkpoints that could not be used.
    """

    round: int
    extra: dict[str, Any]
    damaged: tuple[str, ...]


def save(folder: Path, federation: Federation, extra: dict[str, Any]) -> None:
    """Write the state after the last finished round.

    Raises:
        UserError: The server's state is not finite; nothing is written.
    """
    if not finite(federation.shared):
        raise UserError(
            f"The server's state after round {federation.round} is not finite, so it is not kept; resume from the round "
            "before."
        )
    leaves, _ = tree_flatten(federation.shared)
    tensors: dict[str, Tensor] = {f"shared.{i}": t.detach().cpu().contiguous() for i, t in enumerate(leaves)}
    tensors |= {f"store.{k}": t.cpu().contiguous() for k, t in federation.store.snapshot().items()}
    data = safetensors.torch.save(tensors)
    name = _name(federation.round)
    write_whole(folder / f"{name}.safetensors", data)
    record = {"round": federation.round, "sha256": hashlib.sha256(data).hexdigest(), "lengths": federation.lengths}
    write_whole(folder / f"{name}.json", to_json({**record, **extra}))
    most = min(federation.settings.checkpoints, federation.store.depth)
    kept = sorted(path.stem for path in folder.glob("round-*.json"))[-most:]
    for old in sorted(folder.glob("round-*")):  # of each the JSON first, and what a kill left of one without it
        if old.stem not in kept:
            old.unlink(missing_ok=True)


def restore(folder: Path, federation: Federation) -> Restored | None:
    """Put the newest sound checkpoint into ``federation``; None if there is none at all.

    Raises:
        UserError: There are checkpoints, but none of them is sound or fits.
    """
    damaged: list[str] = []
    for path in sorted(folder.glob("round-*.json"), reverse=True):
        try:
            record, data = _read(path)
            _place(federation, safetensors.torch.load(data))
        except _DAMAGE:
            damaged.append(path.stem)
            continue
        federation.round = record.pop("round")
        federation.lengths = record.pop("lengths", {})  # none before 0.8
        record.pop("sha256")
        return Restored(federation.round, record, tuple(damaged))
    if damaged:
        raise UserError(
            f"All checkpoints in '{folder}' are damaged ({', '.join(damaged)}); start again with a new --out "
            "or --overwrite."
        )
    return None


def go_back(folder: Path, round_: int) -> int:
    """Remove the checkpoints of all rounds after this one, so that it is the newest; how many those were.

    Raises:
        UserError: There is no sound checkpoint of it; nothing is removed.
    """
    there = {}
    for path in sorted(folder.glob("round-*.json")):
        try:
            there[int(_read(path)[0]["round"])] = path
        except _DAMAGE:
            continue
    if round_ not in there:
        kept = ", ".join(str(n) for n in there) or "none"
        raise UserError(
            f"There is no checkpoint of round {round_} in '{folder}', so the run cannot go back to it; rounds to go back "
            f"to: {kept} (run.checkpoints says how many are kept)."
        )
    later = [path for path in folder.glob("round-*") if path.stem > _name(round_)]
    # The newest first, and of each the JSON first: killed in between, the run goes on from a whole checkpoint.
    for path in sorted(later, key=lambda path: (path.stem, path.suffix == ".json"), reverse=True):
        path.unlink()
    return len({path.stem for path in later})


def save_model(path: Path, model: Model) -> None:
    """Write the network's first weights by name, and in words what it is."""
    weights = {n: t.detach().cpu().contiguous() for n, t in model.factors.unflatten(model.initial).items()}
    words = {"network": str(model.module), "likelihood": repr(model.likelihood)}
    write_whole(path, safetensors.torch.save(weights, words))


def load_model(
    path: Path,
    module: nn.Module | None,
    likelihood: Likelihood | None,
    data: FederatedData,
    personal: Personal,
    settings: Settings,
) -> Model:
    """The network that was saved there, with its first weights.

    Args:
        path: What `save_model` wrote.
        module: The module it was; None: the default one.
        likelihood: None: that of the file, if it is one of `bpfed.likelihoods`.
        data: What it was trained on; of which its form matters, so that it needs no examples.
        personal: See `Factors.of`.
        settings: Of the run.
    """
    try:
        with safetensors.safe_open(path, "pt") as file:
            words = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is not a dict)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"'{path}' cannot be read ({error}); put it back, or run it again with --overwrite.") from error
    if likelihood is None:
        likelihood = _likelihood(path, words.get("likelihood", ""))
    given, example = module is not None, torch.zeros(2, *data.input_shape)
    model = make_model(example, data.classes, personal, settings, module, likelihood)
    there = {n: tuple(t.shape) for n, t in weights.items()}
    here = {n: tuple(t.shape) for n, t in model.factors.unflatten(model.initial).items()}
    if not given and (there != here or words.get("network") != str(model.module)):
        raise UserError(f"The run of '{path}' has a network of its own; give the module it was trained with as model.")
    for name in sorted({*there, *here}):
        if there.get(name) != here.get(name):
            shapes = (f"shape {list(s)}" if s is not None else "missing" for s in (here.get(name), there.get(name)))
            raise UserError(
                "Parameter '{}' of the module given is {} here and {} in the run of '{}'; give the module it was "
                "trained with.".format(name, *shapes, path)
            )
    return replace(model, initial=model.factors.flatten(weights))


def _likelihood(path: Path, words: str) -> Likelihood:
    for kind, pattern in (
        (Categorical, r"Categorical\(classes=(\d+)\)"),
        (Normal, r"Normal\(scale=(.+), learnt=(.+)\)"),
    ):
        found = re.fullmatch(pattern, words)
        if found is not None:
            return kind(*(json.loads(value.lower()) for value in found.groups()))
    raise UserError(f"The run of '{path}' has a likelihood of its own; give the one it was trained with as likelihood.")


def _name(round_: int) -> str:
    return f"round-{round_:06d}"


#: What reading a damaged checkpoint may raise.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError)


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    """The record of a checkpoint and its tensors as bytes; one of `_DAMAGE` unless both are whole."""
    record = json.loads(path.read_text())
    data = path.with_suffix(".safetensors").read_bytes()
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise ValueError("hash")
    if path.stem != _name(record["round"]):
        raise ValueError("round")
    return record, data


def _place(federation: Federation, tensors: dict[str, Tensor]) -> None:
    leaves, spec = tree_flatten(federation.shared)
    loaded = [tensors[f"shared.{i}"] for i in range(len(leaves))]
    for old, new in zip(leaves, loaded, strict=True):
        if old.shape != new.shape or old.dtype != new.dtype:
            raise ValueError("shape")
    if not finite(loaded):  # as versions before 0.8 may have written
        raise ValueError("not finite")
    store = {k.removeprefix("store."): t for k, t in tensors.items() if k.startswith("store.")}
    federation.shared = tree_unflatten([t.to(federation.device) for t in loaded], spec)
    federation.store.restore(store)
