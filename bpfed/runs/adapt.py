"""Newcomers: clients that took no part in training; they get the run's shared weights and learn personal ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from bpfed._util.errors import UserError, check_count
from bpfed._util.files import from_json, write_whole
from bpfed.data.arrays import fitted
from bpfed.data.federated import Examples, FederatedData
from bpfed.data.tabular.preprocessing import Preprocessor
from bpfed.engine.federation import Federation
from bpfed.engine.local import LocalRound, Rows
from bpfed.inference import inputs, rng
from bpfed.inference.rng import Purpose
from bpfed.methods.base import Method, State, rows
from bpfed.runs.checkpoint import DAMAGE
from bpfed.runs.client import Client, as_numbers, check_shape
from bpfed.runs.metadata import card, without_examples
from bpfed.runs.run import Run

#: Local steps of an adaptation, at least: few examples are passed over often enough to be learnt.
STEPS = 500
#: Weight draws of a newcomer's prediction, at least. Its head is wide, and the mean of few draws of it would look sure.
DRAWS = 200


class NewClient(Client):
    """A client that joined a finished run. Made by `Run.adapt` or `Run.newcomer`.

    Attributes:
        examples: Examples that it learnt from; of a classification, of each class.
    """

    unscored: ClassVar[str | None] = (
        "a newcomer learns from all of its examples and keeps none for calibration; use its probabilities or its scale"
    )

    def __init__(self, run: Run, examples: list[int]) -> None:
        super().__init__(run, 0)
        self.examples = examples

    def __repr__(self) -> str:
        count, data = sum(self.examples), self.run.data
        learnt = f"{count} example{'' if count == 1 else 's'}" if count else "no example yet"
        if count and data.task_type.has_classes:
            learnt += f" of {sum(n > 0 for n in self.examples)} of {data.classes} classes"
        return f"<newcomer '{self.name}' to '{data.name}': {learnt}>"

    @property
    def remark(self) -> str:
        """A sentence on what it cannot know; empty if there is nothing to say."""
        federation = self.run.federation
        method, head = federation.method, federation.model.layout.personal
        if any(self.examples) or self.run.data.task_type.labelled or method.population or not head:
            return ""
        return (
            f"'{self.name}' has no example, and of {self.run.data.task_type.targets} that is hardly more than their mean: the layers that clients "
            f"of {method.name} have of their own never leave them; give it some rows."
        )

    def save(self, path: str | Path) -> Path:
        """Write this client's own state to one safetensors file, whole or not at all; `Run.newcomer` reads it."""
        federation = self.run.federation
        leaves, _ = tree_flatten(federation.personal(torch.tensor([0])))
        tensors = {f"personal.{i}": t.cpu().contiguous() for i, t in enumerate(leaves)}
        words = {"data": card(federation.data), "examples": self.examples, "shared": _shared_hash(federation)}
        words["sha256"] = _digest(tensors, words)
        write_whole(Path(path), safetensors.torch.save(tensors, {"client": json.dumps(words, ensure_ascii=False)}))
        return Path(path)


def adapt(
    federation: Federation,
    x: Tensor | None = None,
    y: Tensor | None = None,
    *,
    steps: int | None = None,
    lr: float | None = None,
    name: str = "newcomer",
    preprocessor: Preprocessor | None = None,
) -> NewClient:
    """See `Run.adapt`; ``preprocessor`` is the newcomer's own, where it has one."""
    data = _data(federation.data, name, x, y, preprocessor)
    if name in federation.data.clients:
        raise UserError(f"The run already has a client '{name}'; give the newcomer another name.")
    if steps is not None:
        check_count("steps", steps)
    method = federation.method.adapting()
    if lr is not None:
        method = replace(method, lr=lr)
    method.check()
    alone = _alone(federation, method, data)
    personal = rows(method.newcomer(alone.model, alone.shared), 1)
    if count := len(data.train.y):
        epochs = -(-(STEPS if steps is None else steps) // -(-count // alone.settings.batch))
        key = alone.keys(0, Purpose.ADAPTATION, torch.tensor([0]))
        train = LocalRound.of(method, alone.model, alone.inputs(data.train), replace(alone.settings, epochs=epochs))
        newcomer = joining(method, rows(alone.shared, 1), personal, data.train, key)
        personal = train(newcomer, method.adaptation(epochs)).personal
        if not all(bool(t.isfinite().all()) for t in tree_flatten(personal)[0]):
            raise UserError(f"The adaptation of '{name}' diverged; lower the step size, or look for extreme values.")
    alone.store.put(torch.tensor([0]), personal)
    classes = torch.bincount(data.train.y, minlength=data.classes).tolist() if data.task_type.has_classes else [count]
    return NewClient(Run(alone), classes)


def joining(method: Method, shared: State, personal: State, examples: Examples, key: Tensor) -> Rows:
    """Newcomers about to learn, S of them.

    Args:
        method: As they use it.
        shared: The state of each one's run, ``[S, ...]`` leaves.
        personal: What each begins with, likewise.
        examples: What each learns from.
        key: Of each one's order and noise, ``[S, 2]``, on the device.
    """
    return Rows(
        shared=shared,
        personal=personal,
        hparams=method.hparam_rows(len(key), key.device),
        start=examples.offsets[:-1].to(key.device),
        size=examples.sizes.to(key.device),
        shuffle=rng.fold(key, 0),
        key=rng.fold(key, 1),
    )


def load_newcomer(federation: Federation, path: Path) -> NewClient:
    """See `Run.newcomer`."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            words = from_json((file.metadata() or {})["client"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is not a dict)
        # Earlier versions wrote no hash; of theirs at least the numbers are looked at.
        own = words.pop("sha256", None)
        if own is not None and own != _digest(tensors, words):
            raise ValueError("its hash is another")
        if not all(bool(t.isfinite().all()) for t in tensors.values()):
            raise ValueError("it has what is not a number")
        alone = _alone(federation, federation.method.adapting(), without_examples(words["data"]))
        if words["shared"] != _shared_hash(alone):
            raise UserError(f"'{path}' is a client of another run, or of another round of this one; adapt it again.")
        leaves, spec = tree_flatten(alone.personal(torch.tensor([0])))
        kept = [tensors[f"personal.{i}"] if leaf.numel() else leaf for i, leaf in enumerate(leaves)]
        personal = tree_unflatten(kept, spec)
        alone.store.put(torch.tensor([0]), tree_map(lambda t: t.to(alone.device), personal))
        return NewClient(Run(alone), list(words["examples"]))
    except FileNotFoundError:
        raise UserError(f"There is no file '{path}'; make it with bpfed adapt.") from None
    except DAMAGE as error:
        raise UserError(f"'{path}' is not a client that bpfed adapt wrote, or is damaged; make it again.") from error


def _alone(federation: Federation, method: Method, data: FederatedData) -> Federation:
    """A finished federation of one client, with the shared state of another."""
    settings = federation.settings
    # A newcomer to a regression learns its own noise to the end; the run's calibration temperature makes up for clients
    # that do not.
    calibration_temperature = federation.calibration_temperature if data.task_type.has_classes else 1.0
    settings = replace(
        settings,
        store="memory",
        eval_draws=max(DRAWS, settings.eval_draws),
        calibration=0.0,
        scaling="none",
        calibrate="none",
        calibration_temperature=calibration_temperature,
    )
    alone = Federation.of(method, data, settings, federation.model)
    alone.shared, alone.round = federation.shared, settings.rounds
    return alone


def _data(of: FederatedData, name: str, x: Any, y: Any, preprocessor: Preprocessor | None) -> FederatedData:
    if (x is None) != (y is None):
        raise UserError("A newcomer's examples are inputs and targets; give both x and y, or neither.")
    kind = of.task_type.dtype
    if x is None:
        x, y = inputs.take(of.train.x, slice(0)), torch.zeros(0, dtype=kind)
    if not isinstance(name, str):
        raise UserError(f"name is {name!r}, but must be text.")
    several = not isinstance(of.train.x, Tensor)
    x = fitted(x, of.train.x, of.name) if several else as_numbers(x, "inputs", torch.float32).cpu()
    y = as_numbers(y, "targets").cpu()
    if y.ndim != 1:
        raise UserError(f"The targets have shape {list(y.shape)}, but must be a list with one for each input.")
    if (one := inputs.first(x)).ndim and len(one) != len(y):
        raise UserError(f"{len(one)} inputs and {len(y)} targets were given; give one target for each input.")
    if not several:
        check_shape(x, of)
    if of.task_type.has_classes and y.is_floating_point():
        raise UserError(
            f"The labels are {str(y.dtype).removeprefix('torch.')} numbers; give classes from 0 to {of.classes - 1}."
        )
    train = Examples(x, y.to(kind), torch.tensor([0, len(y)]))
    none = Examples(inputs.take(x, slice(0)), train.y[:0], torch.zeros(2, dtype=torch.int64))
    kept = preprocessor or of.preprocessor
    kept = kept.alone(name) if kept is not None else None
    data = replace(of, clients=(name,), train=train, test=none, calibration=None, preprocessor=kept)
    return data.check() if len(y) else data


def _digest(tensors: Mapping[str, Tensor], words: Mapping[str, Any]) -> str:
    """A hash of all that is in a newcomer's file."""
    digest = hashlib.sha256(json.dumps(words, sort_keys=True, ensure_ascii=False).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _shared_hash(federation: Federation) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_flatten(federation.shared)[0]:
        digest.update(leaf.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()
