"""What a state that travels looks like, and the only thing that may travel to the server: an `Upload`.

Only `Upload.of` makes one, of what `Method.finish` gives to the server; there is no way from a personal state or an
example into it. Tensors travel as plain little-endian numbers: float32, or with ``compression = "half"`` as in
`bpfed.aggregation.updates`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten_with_path, tree_map, tree_unflatten

from bpfed._util.errors import UserError, quoted
from bpfed._util.text import plain
from bpfed.aggregation.updates import Quantised, dequantise, leaf_name, quantise
from bpfed.methods.base import Finished, Method, State, untrained

if TYPE_CHECKING:
    from bpfed.nn.model import Model

#: How tensors are written: flat, little-endian.
RAW = "bpfed.raw"
#: Letters of a sentence on a message that are shown.
SHOWN = 500
#: Of a tensor of levels (see `bpfed.aggregation.updates`), the end of the name of their bounds.
BOUNDS = ".bounds"


class RejectedMessage(Exception):
    """A message that is not let in; one sentence says why, which may hold words of whoever sent it."""

    def __init__(self, why: str) -> None:
        super().__init__(plain(why, SHOWN))


@dataclass(frozen=True)
class StateSchema:
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
    def of(cls, state: State, scales: tuple[str, ...], half: bool = False) -> StateSchema:
        """Of an example without client axis; ``scales`` are the names of fields that hold standard deviations."""
        leaves, spec = tree_flatten_with_path(state)
        named = {leaf_name(path): leaf for path, leaf in leaves}
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
            made[name] = ("uint8" if self._quantised(name) else "float16", shape)
            if self._quantised(name):
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
            name, plain = leaf_name(path), leaf.detach().cpu()
            if self.half and self._quantised(name):
                arrays[name], arrays[name + BOUNDS] = map(_array, quantise(plain))
            else:
                arrays[name] = _array(plain.half() if self.half else plain)
        record = ArrayRecord(arrays)
        try:
            self.read(record)
        except RejectedMessage as refused:  # what we would not let in we do not send
            raise UserError(f"A message was not sent: {refused}") from None
        return record

    def read(self, record: ArrayRecord) -> State:
        """The state in a message, or `RejectedMessage`."""
        forms = self.forms
        if set(record) != set(forms):
            raise RejectedMessage(f"it holds the tensors {listed(record)} where {listed(forms)} are expected.")
        found = {name: _tensor(name, record[name], *form) for name, form in forms.items()}
        leaves = []
        for name in self.shapes:
            bounds = found.get(name + BOUNDS)
            leaf = found[name].float() if bounds is None else dequantise(Quantised(found[name], bounds))
            if not bool(torch.isfinite(leaf).all()):
                raise RejectedMessage(f"'{name}' holds values that are not finite.")
            if name in self.positive and not bool((leaf > 0).all()):
                raise RejectedMessage(f"'{name}' holds scales that are not above 0.")
            if name in self.nonnegative and not bool((leaf >= 0).all()):
                raise RejectedMessage(f"'{name}' holds scales below 0.")
            leaves.append(leaf)
        return tree_unflatten(leaves, self.spec)

    def _quantised(self, name: str) -> bool:
        return name in self.positive | self.nonnegative and math.prod(self.shapes[name][-1:]) > 0


def _array(tensor: Tensor) -> Array:
    plain = tensor.contiguous().numpy()
    return Array(str(plain.dtype), tuple(plain.shape), RAW, plain.astype(plain.dtype.newbyteorder("<")).tobytes())


def _tensor(name: str, array: Array, kind: str, shape: tuple[int, ...]) -> Tensor:
    if array.stype != RAW or array.dtype != kind:
        raise RejectedMessage(f"'{name}' is written as {array.stype} of {array.dtype}, not as plain {kind}.")
    dtype = np.dtype(kind)
    if tuple(array.shape) != shape or len(array.data) != dtype.itemsize * math.prod(shape):
        raise RejectedMessage(
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


class StateSchemas(NamedTuple):
    """What travels each way.

    Attributes:
        first: The server's state in round 1, which is that of `Method.init` in full.
        shared: The server's state in later rounds.
        upload: What a site gives to the server.
        info: Names of what it reports of its training.
    """

    first: StateSchema
    shared: StateSchema
    upload: StateSchema
    info: frozenset[str]

    def down(self, round_: int) -> StateSchema:
        """Of the server's state in the request of a round."""
        return self.first if round_ == 1 else self.shared


def schemas(method: Method, model: Model, half: bool = False) -> StateSchemas:
    """What server and sites of this method exchange; nobody has to train for it.

    Args:
        method: Whose states they are.
        model: The network.
        half: Whether they travel compressed.

    Raises:
        UserError: Clients of this method give nothing to the server.
    """
    first, finished = method.init(model), untrained(method, model)
    made = StateSchemas(
        StateSchema.of(first.shared, method.scales),
        StateSchema.of(first.shared, method.scales, half),
        StateSchema.of(Upload.of(finished).state, method.scales, half),
        frozenset({"nll", *finished.info}),  # see `LocalRound`
    )
    if not made.upload.bytes:
        raise UserError(
            f"Clients of {method.title} give nothing to a server, so there is nothing to deploy; train each site by "
            "itself with 'bpfed run'."
        )
    return made


def listed(names: Any) -> str:
    """A few of these names, quoted."""
    return quoted([str(name) for name in names], most=6) or "none"
