"""The state of a federation on disk: tensors as safetensors, the rest as JSON, nothing that can execute.

A checkpoint is two files, ``round-000012.safetensors`` and ``round-000012.json``; the second holds the hash of the
first and is written last, so it is what makes the checkpoint exist. It also holds a hash of itself, and a word for the
run that it is of. The newest are kept (`Settings.checkpoints`): one that is damaged, or of another run, falls back to
the one before, and a run can go back to any of them (`go_back`). A server's state that is not finite is never written.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from bpfed._util.errors import UserError
from bpfed._util.files import from_json, sha256, to_json, write_whole
from bpfed.aggregation.updates import finite
from bpfed.config.registry import LIKELIHOODS
from bpfed.config.settings import Settings
from bpfed.data.federated import FederatedData
from bpfed.inference import inputs
from bpfed.inference.likelihoods import Categorical, Likelihood, Normal
from bpfed.nn.networks import make_model
from bpfed.nn.parameters import ParameterLayout, Personal
from bpfed.report.manifest import IDENTITY

if TYPE_CHECKING:
    from bpfed.engine.federation import Federation
    from bpfed.methods.base import Method
    from bpfed.nn.model import Model

#: The key of a checkpoint's hash of the rest of its JSON.
RECORD = "record"
#: What reading a damaged file of tensors and words may raise.
DAMAGE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RuntimeError,
    safetensors.SafetensorError,
)


class _Foreign(ValueError):
    """A checkpoint of another run."""


@dataclass(frozen=True)
class Restored:
    """What was read back.

    Attributes:
        round: Rounds done.
        extra: What the caller saved beside the state.
        damaged: Names of newer checkpoints that could not be used.
        foreign: Those among them that are of another run.
    """

    round: int
    extra: dict[str, Any]
    damaged: tuple[str, ...]
    foreign: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """The beginning of a sentence on each checkpoint that could not be used."""
        return [f"Checkpoint {n} is {'of another run' if n in self.foreign else 'damaged'}" for n in self.damaged]


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
    record = {"round": federation.round, "sha256": sha256(data), "lengths": federation.lengths, **extra}
    write_whole(folder / f"{name}.json", to_json({**record, RECORD: _digest(record)}))
    most = min(federation.settings.checkpoints, federation.store.depth)
    kept = sorted(path.stem for path in folder.glob("round-*.json"))[-most:]
    for old in sorted(folder.glob("round-*")):  # of each the JSON first, and what a kill left of one without it
        if old.stem not in kept:
            old.unlink(missing_ok=True)


def restore(folder: Path, federation: Federation, run: str | None = None) -> Restored | None:
    """Put the newest sound checkpoint into ``federation``; None if there is none at all.

    Args:
        folder: Of the checkpoints.
        federation: Of the same settings.
        run: The word for the run that they must be of (`bpfed.report.manifest`); None: it is not known. A checkpoint
            that says nothing of its run is of an earlier version.

    Raises:
        UserError: There are checkpoints, but none of them is sound or fits.
    """
    damaged: list[str] = []
    foreign: list[str] = []
    for path in sorted(folder.glob("round-*.json"), reverse=True):
        try:
            record, data = _sound(path, run)
            _place(federation, safetensors.torch.load(data))
        except DAMAGE as error:
            if isinstance(error, _Foreign):
                foreign.append(path.stem)
            damaged.append(path.stem)
            continue
        federation.round = record.pop("round")
        federation.lengths = record.pop("lengths", {})  # none before 0.8
        record.pop("sha256")
        return Restored(federation.round, record, tuple(damaged), tuple(foreign))
    if damaged:
        what = "of another run" if len(foreign) == len(damaged) else "damaged or of another run"
        raise UserError(
            f"All checkpoints in '{folder}' are {what if foreign else 'damaged'} ({', '.join(damaged)}); "
            f"{'put its own back from a copy, or ' if foreign else ''}start again with a new --out or --overwrite."
        )
    return None


def _sound(path: Path, run: str | None) -> tuple[dict[str, Any], bytes]:
    """The record and the tensors' bytes of a checkpoint; raises one of `DAMAGE` if something of it cannot be right."""
    record = from_json(path.read_bytes())
    own = record.pop(RECORD, None)
    if own != (_digest(record) if own is not None or IDENTITY in record else None):
        raise ValueError("hash of the record")
    if run is not None and record.pop(IDENTITY, run) != run:
        raise _Foreign("another run")
    data = path.with_suffix(".safetensors").read_bytes()
    if sha256(data) != record["sha256"]:
        raise ValueError("hash")
    if type(record["round"]) is not int or path.stem != _name(record["round"]):
        raise ValueError("round")
    float(record.get("seconds", 0.0))
    return record, data


def go_back(folder: Path, round_: int, run: str | None = None) -> int:
    """Remove the checkpoints of all rounds after this one, so that it is the newest; how many those were.

    ``run`` is as in `restore`.

    Raises:
        UserError: There is no sound checkpoint of it; nothing is removed.
    """
    there = {}
    for path in sorted(folder.glob("round-*.json")):
        try:
            there[int(_sound(path, run)[0]["round"])] = path
        except DAMAGE:
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


def model_bytes(model: Model) -> bytes:
    """The content of a file with the network's first weights by name, and in words what it is."""
    return safetensors.torch.save(_weights(model), _words(model))


def is_model(path: Path, model: Model) -> bool:
    """Whether a file is that of `model_bytes`, whatever the order of what is in it."""
    try:
        words, weights = _read(path)
    except (OSError, safetensors.SafetensorError):
        return False
    own, said = _weights(model), _words(model)
    if "layout" not in words:  # written by a version before layouts
        said.pop("layout")
    return words == said and weights.keys() == own.keys() and all(torch.equal(weights[n], t) for n, t in own.items())


def _words(model: Model) -> dict[str, str]:
    layout = model.layout
    order = {"names": layout.names, "shared": len(layout.names) - len(layout.personal_names)}
    words = {"network": str(model.module), "likelihood": repr(model.likelihood), "layout": json.dumps(order)}
    return words | ({"frozen": model.frozen_hash} if model.frozen else {})


def _weights(model: Model) -> dict[str, Tensor]:
    return {n: t.detach().cpu().contiguous() for n, t in model.layout.unflatten(model.initial).items()}


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The words and the tensors of a file."""
    with safetensors.safe_open(path, "pt") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)


def load_model(
    path: Path,
    module: nn.Module | None,
    likelihood: Likelihood | None,
    data: FederatedData,
    method: Method,
    settings: Settings,
) -> Model:
    """The network that was saved there, with its first weights.

    Args:
        path: A file of `model_bytes`.
        module: The module it was; None: the default one.
        likelihood: None: that of the file, if it is one of `bpfed.inference.likelihoods`.
        data: What it was trained on; of which its form matters, so that it needs no examples.
        method: What trained it.
        settings: Of the run.
    """
    try:
        words, weights = _read(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"'{path}' cannot be read ({error}); put it back, or run it again with --overwrite.") from error
    if not all(bool(t.isfinite().all()) for t in weights.values()):
        raise UserError(f"'{path}' is damaged (it has what is not a number); put it back from a copy, or train again.")
    if likelihood is None:
        usual = data.task_type.likelihood(data.classes)
        known = words.get("likelihood", "") == repr(usual)
        likelihood = usual if known else _likelihood(path, words.get("likelihood", ""))
    given, example = module is not None, inputs.each(_blank, data.train.x)
    model = make_model(example, data.task_type, data.classes, method, settings, module, likelihood)
    there = {n: tuple(t.shape) for n, t in weights.items()}
    here = {n: tuple(t.shape) for n, t in model.layout.unflatten(model.initial).items()}
    if not given and (there != here or words.get("network") != str(model.module)):
        raise UserError(f"The run of '{path}' has a network of its own; give the module it was trained with as model.")
    constants = {n for n, p in model.module.named_parameters() if not p.requires_grad}
    for name in sorted({*there} & constants):
        raise UserError(
            f"Parameter '{name}' of the module given is frozen, but was trained in the run of '{path}'; give the module "
            "as it was then, with the same requires_grad."
        )
    for name in sorted({*there, *here}):
        if there.get(name) != here.get(name):
            shapes = (f"shape {list(s)}" if s is not None else "missing" for s in (here.get(name), there.get(name)))
            raise UserError(
                "Parameter '{}' of the module given is {} here and {} in the run of '{}'; give the module it was "
                "trained with.".format(name, *shapes, path)
            )
    if words.get("frozen", "") != model.frozen_hash:
        raise UserError(
            f"The frozen weights of the module given are not those of the run of '{path}' (their hash is another one); "
            "give the module with the same pretrained weights as in training."
        )
    layout = model.layout.arranged(*_layout(path, words.get("layout"), model, method.personal))
    return replace(model, layout=layout, initial=layout.flatten(weights))


def _blank(part: Tensor) -> Tensor:
    """Two examples in the form of others: zeros, or ones where these are ids or a mask."""
    form = (2, *part.shape[1:])
    return part.new_zeros(form) if part.is_floating_point() else part.new_ones(form)


def _layout(path: Path, noted: str | None, model: Model, personal: Personal) -> tuple[tuple[str, ...], int]:
    """The order of the weights in a run's vectors, and how many of its parameters are shared.

    Runs up to version 0.7.0 have not noted it: theirs is the order of registration, and the head what comes last in it.
    """
    if noted is not None:
        try:
            found = json.loads(noted)
            names, shared = tuple(found["names"]), int(found["shared"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"'{path}' is damaged ({error}); put it back, or run it again with --overwrite.") from error
    else:
        extra = model.likelihood.parameters()
        registered = dict(model.module.named_parameters()) | extra
        before = ParameterLayout.of({n: p for n, p in registered.items() if n not in extra}, personal)
        chosen = [*before.personal_names, *(extra if personal != "none" else ())]
        before = ParameterLayout.of(registered, chosen or "none")
        names, shared = before.names, len(before.names) - len(before.personal_names)
    if sorted(names) != sorted(model.layout.names) or not 0 <= shared <= len(names):
        raise UserError(f"'{path}' is of another network; give the module that the run was trained with as model.")
    return names, shared


def _likelihood(path: Path, words: str) -> Likelihood:
    for kind, pattern in (
        (Categorical, r"Categorical\(classes=(\d+)\)"),
        (Normal, r"Normal\(scale=(.+), learnt=(.+)\)"),
    ):
        found = re.fullmatch(pattern, words)
        if found is not None:
            return kind(*(json.loads(value.lower()) for value in found.groups()))
    for name in LIKELIHOODS.plugins():
        if LIKELIHOODS.target(name).rpartition(":")[2] == words.partition("(")[0]:
            return _of_plugin(path, name, words)
    raise UserError(f"The run of '{path}' has a likelihood of its own; give the one it was trained with as likelihood.")


def _of_plugin(path: Path, name: str, words: str) -> Likelihood:
    """The likelihood of another package, from what a run has noted of it: ``Class(setting=value, ...)``."""
    kind = LIKELIHOODS.load(name)
    made: Any = None
    with contextlib.suppress(SyntaxError, ValueError, TypeError):
        call = ast.parse(words, mode="eval").body
        if isinstance(call, ast.Call) and not call.args:
            made = kind(**{str(k.arg): ast.literal_eval(k.value) for k in call.keywords})
    if repr(made) != words:
        raise UserError(
            f"The run of '{path}' has the likelihood {words}, which the package {LIKELIHOODS.package(name)} does not make "
            "from these settings; give it as likelihood."
        )
    likelihood: Likelihood = made
    return likelihood


def _digest(record: dict[str, Any]) -> str:
    # Of what comes back from the file: there is no NaN in it, and a key is text.
    return sha256(json.dumps(from_json(to_json(record)), sort_keys=True))


def _name(round_: int) -> str:
    return f"round-{round_:06d}"


def _place(federation: Federation, tensors: dict[str, Tensor]) -> None:
    leaves, spec = tree_flatten(federation.shared)
    loaded = [tensors[f"shared.{i}"] for i in range(len(leaves))]
    for old, new in zip(leaves, loaded, strict=True):
        if old.shape != new.shape or old.dtype != new.dtype:
            raise ValueError("shape")
    if not finite(tuple(loaded)):  # as versions before 0.8 may have written
        raise ValueError("not finite")
    store = {k.removeprefix("store."): t for k, t in tensors.items() if k.startswith("store.")}
    federation.shared = tree_unflatten([t.to(federation.device) for t in loaded], spec)
    federation.store.restore(store)
