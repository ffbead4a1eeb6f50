"""What travels: an `Ask` from the server to a site, an `Answer` back, and the door that both sides check them at.

An answer holds an `Upload`, which only `Upload.of` makes, of what `Method.finish` gives to the server; there is no way
from a personal state or an example into a message. Tensors travel as plain little-endian numbers: float32, or with
``compression = "half"`` as in `bpfed.compress`.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten_with_path, tree_map, tree_unflatten

from bpfed import __version__
from bpfed.compress import Levels, from_levels, to_levels
from bpfed.config import Config
from bpfed.errors import UserError
from bpfed.methods.base import Finished, Method, State, rows
from bpfed.metrics import Sums
from bpfed.model import Model

#: Raised whenever a message changes its meaning.
PROTOCOL = 1
#: How tensors are written: flat, little-endian.
RAW = "bpfed.raw"
#: Of a tensor of levels (see `bpfed.compress`), the end of the name of their bounds.
BOUNDS = ".bounds"
#: A message may hold so many bytes beside its tensors.
BESIDE = 1 << 20
#: Settings of a run that have no part in what a site computes.
LOCAL_SETTINGS = ("device", "tf32", "compile", "chunk", "memory", "store")


class Refused(Exception):
    """A message that is not let in; one sentence says why."""


# --- tensors ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pattern:
    """What a state that travels must look like.

    Attributes:
        spec: Its tree.
        shapes: The shape of each leaf by name, such as ``mean``; without a client axis.
        positive: Leaves that are scales, and so above 0 everywhere.
        nonnegative: Scales that may be 0 (those of the Dirac case).
        half: Whether tensors travel in half precision, and scales as levels.
    """

    spec: TreeSpec
    shapes: dict[str, tuple[int, ...]]
    positive: frozenset[str] = frozenset()
    nonnegative: frozenset[str] = frozenset()
    half: bool = False

    @classmethod
    def of(cls, state: State, scales: tuple[str, ...], half: bool = False) -> Pattern:
        """Of an example without client axis; ``scales`` are the names of fields that hold standard deviations."""
        leaves, spec = tree_flatten_with_path(state)
        named = {_name(path): leaf for path, leaf in leaves}
        scale = {name for name in named if name.rpartition(".")[2] in scales}
        positive = frozenset(name for name in scale if bool((named[name] > 0).all()))
        shapes = {name: tuple(leaf.shape) for name, leaf in named.items()}
        return cls(spec, shapes, positive, frozenset(scale - positive), half)

    @property
    def forms(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The arrays that travel, by name: their type and shape."""
        if not self.half:
            return {name: ("float32", shape) for name, shape in self.shapes.items()}
        made: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, shape in self.shapes.items():
            made[name] = ("uint8" if self._levels(name) else "float16", shape)
            if self._levels(name):
                made[name + BOUNDS] = ("float32", (*shape[:-1], 2))
        return made

    @property
    def bytes(self) -> int:
        """Bytes of its tensors as they travel."""
        return sum(np.dtype(kind).itemsize * math.prod(shape) for kind, shape in self.forms.values())

    def write(self, state: State) -> ArrayRecord:
        """A state that fits, as it travels."""
        arrays: dict[str, Array] = {}
        for path, leaf in tree_flatten_with_path(state)[0]:
            name, plain = _name(path), leaf.detach().cpu()
            if self.half and self._levels(name):
                arrays[name], arrays[name + BOUNDS] = map(_array, to_levels(plain))
            else:
                arrays[name] = _array(plain.half() if self.half else plain)
        record = ArrayRecord(arrays)
        try:
            self.read(record)
        except Refused as refused:  # what we would not let in we do not send
            raise UserError(f"A message was not sent: {refused}") from None
        return record

    def read(self, record: ArrayRecord) -> State:
        """The state in a message, or `Refused`."""
        forms = self.forms
        if set(record) != set(forms):
            raise Refused(f"it holds the tensors {_some(record)} where {_some(forms)} are expected.")
        found = {name: _tensor(name, record[name], *form) for name, form in forms.items()}
        leaves = []
        for name in self.shapes:
            bounds = found.get(name + BOUNDS)
            leaf = found[name].float() if bounds is None else from_levels(Levels(found[name], bounds))
            if not bool(torch.isfinite(leaf).all()):
                raise Refused(f"'{name}' holds values that are not finite.")
            if name in self.positive and not bool((leaf > 0).all()):
                raise Refused(f"'{name}' holds scales that are not above 0.")
            if name in self.nonnegative and not bool((leaf >= 0).all()):
                raise Refused(f"'{name}' holds scales below 0.")
            leaves.append(leaf)
        return tree_unflatten(leaves, self.spec)

    def _levels(self, name: str) -> bool:
        return name in self.positive | self.nonnegative and math.prod(self.shapes[name][-1:]) > 0


def _array(tensor: Tensor) -> Array:
    plain = tensor.contiguous().numpy()
    return Array(str(plain.dtype), tuple(plain.shape), RAW, plain.astype(plain.dtype.newbyteorder("<")).tobytes())


def _tensor(name: str, array: Array, kind: str, shape: tuple[int, ...]) -> Tensor:
    if array.stype != RAW or array.dtype != kind:
        raise Refused(f"'{name}' is written as {array.stype} of {array.dtype}, not as plain {kind}.")
    dtype = np.dtype(kind)
    if tuple(array.shape) != shape or len(array.data) != dtype.itemsize * math.prod(shape):
        raise Refused(
            f"'{name}' has shape {list(array.shape)} in {len(array.data)} bytes where {list(shape)} is expected."
        )
    values = np.frombuffer(array.data, dtype=dtype.newbyteorder("<")).astype(dtype)
    return torch.from_numpy(values).reshape(shape)


@dataclass(frozen=True)
class Upload:
    """What one client gives to the server: a state of the method's own, without client axis."""

    state: State

    @classmethod
    def of(cls, finished: Finished) -> Upload:
        """Of a local round of one client."""
        return cls(tree_map(lambda t: t[0], finished.upload))


class Patterns(NamedTuple):
    """What travels each way.

    Attributes:
        first: The server's state in round 1, which is that of `Method.init` in full.
        shared: The server's state in later rounds.
        upload: What a site gives to the server.
    """

    first: Pattern
    shared: Pattern
    upload: Pattern

    def down(self, round_: int) -> Pattern:
        """Of the server's state in the ask of a round."""
        return self.first if round_ == 1 else self.shared


def patterns(method: Method, model: Model, half: bool = False) -> Patterns:
    """What server and sites of this method exchange; nobody has to train for it.

    Args:
        method: Whose states they are.
        model: The network.
        half: Whether they travel compressed.

    Raises:
        UserError: Clients of this method give nothing to the server.
    """
    first = method.init(model)
    hyper = {name: torch.full((1,), value) for name, value in method.hyper().items()}
    with torch.no_grad():
        local = method.begin(model, rows(first.shared, 1), rows(first.personal, 1), hyper)
        upload = Upload.of(method.finish(model, local, hyper)).state
    made = Patterns(
        Pattern.of(first.shared, method.scales),
        Pattern.of(first.shared, method.scales, half),
        Pattern.of(upload, method.scales, half),
    )
    if not made.upload.bytes:
        raise UserError(
            f"Clients of {method.title} give nothing to a server, so there is nothing to deploy; train each site by "
            "itself with 'bpfed run'."
        )
    return made


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "name", getattr(key, "idx", key))) for key in path)


def _some(names: Any) -> str:
    found = [f"'{str(name)[:40]}'" for name in names]
    return ", ".join(found[:6]) + (", ..." if len(found) > 6 else "") if found else "none"


# --- messages -----------------------------------------------------------------------------------------------------------


def fingerprint(config: Config) -> str:
    """A short hash of all that server and sites must agree on: protocol, version, method and settings."""
    run = {k: v for k, v in vars(config.run).items() if k not in LOCAL_SETTINGS}
    agreed = [PROTOCOL, __version__, config.method.name, config.method.settings(), run]
    return hashlib.blake2b(json.dumps(agreed, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Ask:
    """From the server to a site.

    Attributes:
        fingerprint: Of the configuration.
        run: A word for this run; a site keeps its states by it.
        round: The round to train in, from 1; 0: only say what data there is (`Answer.facts`).
        train: Whether to train.
        evaluate: Whether to test the shared state, which is that after round ``round - 1``.
        counted: The last round in which this site's upload was used; it goes on from its own state of that round.
        facts: What all sites' data have in common, as JSON.
        shared: The server's state; None in round 0.
    """

    fingerprint: str
    run: str
    round: int
    train: bool = False
    evaluate: bool = False
    counted: int = 0
    facts: str = ""
    shared: State = None

    def write(self, pattern: Pattern | None = None) -> RecordDict:
        """As it travels."""
        plain = {k: v for k, v in vars(self).items() if k != "shared"}
        record = RecordDict({"ask": ConfigRecord({"protocol": PROTOCOL, "version": __version__, **plain})})
        if pattern is not None:
            record["shared"] = pattern.write(self.shared)
        return record

    @classmethod
    def read(cls, record: RecordDict) -> Ask:
        """Of a message without its tensors, or `Refused`; `shared_of` reads those."""
        plain = _plain(record, "ask", _ASK)
        return cls(**plain)


def shared_of(record: RecordDict, pattern: Pattern) -> State:
    """The server's state in a message, or `Refused`."""
    _only(record, ("ask", "shared"), pattern.bytes)
    return pattern.read(_part(record, "shared", ArrayRecord))


@dataclass(frozen=True)
class Answer:
    """From a site to the server.

    Attributes:
        fingerprint: Of the configuration at the site.
        run: Of the ask.
        round: Of the ask.
        site: The site's name.
        refused: Why the site did not do what it was asked; empty: it did.
        facts: What data the site has, as JSON (round 0 only).
        train: Number of its training examples.
        seconds: Time it took.
        work: Of these, what training and testing took.
        upload: What it gives to the server, if it trained.
        sums: Of its test examples, if it tested.
        info: What is reported of its training.
    """

    fingerprint: str
    run: str
    round: int
    site: str
    refused: str = ""
    facts: str = ""
    train: int = 0
    seconds: float = 0.0
    work: float = 0.0
    upload: Upload | None = None
    sums: Sums | None = None
    info: dict[str, float] = field(default_factory=dict)

    def write(self, pattern: Pattern | None = None) -> RecordDict:
        """As it travels."""
        plain = {k: v for k, v in vars(self).items() if k not in ("upload", "sums", "info")}
        record = RecordDict({"answer": ConfigRecord({"protocol": PROTOCOL, "version": __version__, **plain})})
        if self.upload is not None:
            assert pattern is not None
            assert isinstance(self.upload, Upload)
            record["upload"] = pattern.write(self.upload.state)
        if self.sums is not None:
            cells, losses = self.sums
            record["sums"] = MetricRecord({"cells": cells.flatten().tolist(), "losses": losses.flatten().tolist()})
        if self.info:
            record["info"] = MetricRecord({name: float(v) for name, v in self.info.items()})
        return record

    @classmethod
    def read(cls, record: RecordDict, pattern: Pattern | None, cells: tuple[int, int] | None) -> Answer:
        """Of a message, or `Refused`.

        Args:
            record: The message.
            pattern: What an upload must look like; None: there must be none.
            cells: Rows and bins of `Sums`; None: there must be none.
        """
        allowed = ("answer", *(("upload", "info") if pattern else ()), *(("sums",) if cells else ()))
        _only(record, allowed, pattern.bytes if pattern else 0)
        plain = _plain(record, "answer", _ANSWER)
        if plain["refused"]:
            return cls(**plain)
        if not (plain["train"] >= 0 and math.isfinite(plain["seconds"]) and math.isfinite(plain["work"])):
            raise Refused("its number of examples or its time is no such number.")
        upload = Upload(pattern.read(_part(record, "upload", ArrayRecord))) if pattern else None
        sums = _sums(_part(record, "sums", MetricRecord), *cells) if cells else None
        info: dict[str, float] = {}
        if pattern and "info" in record:
            for name, value in _part(record, "info", MetricRecord).items():
                if isinstance(value, list) or not math.isfinite(value):
                    raise Refused(f"'{name[:40]}' of its training is not a finite number.")
                info[name] = float(value)
        return cls(**plain, upload=upload, sums=sums, info=info)


_ASK: dict[str, type] = {
    "fingerprint": str,
    "run": str,
    "round": int,
    "train": bool,
    "evaluate": bool,
    "counted": int,
    "facts": str,
}
_ANSWER: dict[str, type] = {
    "fingerprint": str,
    "run": str,
    "round": int,
    "site": str,
    "refused": str,
    "facts": str,
    "train": int,
    "seconds": float,
    "work": float,
}


def size(part: Any) -> int:
    """Bytes of a record as Flower writes it, all its parts together."""
    return len(part.deflate()) + sum(size(child) for child in (part.children or {}).values())


def _only(record: RecordDict, names: tuple[str, ...], tensors: int) -> None:
    strange = [name for name in record if name not in names]
    if strange:
        raise Refused(f"it holds {_some(strange)}, which has no place in it.")
    held = size(record)
    if held > tensors + BESIDE:
        raise Refused(f"it has {held} bytes where {tensors} and {BESIDE} more are allowed.")


def _plain(record: RecordDict, name: str, kinds: dict[str, type]) -> dict[str, Any]:
    plain = dict(_part(record, name, ConfigRecord))
    protocol, version = plain.pop("protocol", None), plain.pop("version", None)
    if protocol != PROTOCOL:
        raise Refused(
            f"it speaks protocol {str(protocol)[:20]} and this is {PROTOCOL}; install one version everywhere."
        )
    if version != __version__:
        raise Refused(f"it is of bpfed {str(version)[:20]} and this is {__version__}; install one version everywhere.")
    if set(plain) != set(kinds) or any(type(plain[key]) is not kind for key, kind in kinds.items()):
        raise Refused("its fields are not those of this protocol.")
    if plain["round"] < 0:
        raise Refused(f"its round is {plain['round']}.")
    return plain


def _part(record: RecordDict, name: str, kind: type) -> Any:
    part = record.get(name)
    if not isinstance(part, kind):
        raise Refused(f"it has no '{name}'.")
    return part


def _sums(record: MetricRecord, rows_: int, bins: int) -> Sums:
    made: list[Tensor] = []
    for name, shape in (("cells", (rows_, 1, bins)), ("losses", (2, 1))):
        values = record.get(name)
        if not isinstance(values, list) or len(values) != math.prod(shape):
            raise Refused(f"its '{name}' are not {math.prod(shape)} numbers.")
        tensor = torch.tensor(values, dtype=torch.float64)
        if not bool(torch.isfinite(tensor).all()) or (name == "cells" and bool((tensor < 0).any())):
            raise Refused(f"its '{name}' are not sums.")
        made.append(tensor.reshape(shape))
    return Sums(*made)
