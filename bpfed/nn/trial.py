"""What a module does, found by running it on a few examples: in which order it uses its parameters, which of them are
its head, and what about it cannot be federated.

**The head** is found by what the outputs depend on, whatever the order in which attributes were registered. From the
outputs back, it is the first parameters that meet something computed from the inputs:

- A matrix (linear layer, convolution, look-up) ends the search along its path.
- What scales or shifts single numbers (a bias, the gain of a normalisation) belongs to the head, and the search goes on
  to the matrix before it. So a normalisation after the last linear layer is in the head, together with that layer.
- Where paths are added or joined, as in ``linear(x) + head(body(x))``, the last layers of all paths are the head.
- A parameter with several uses is one parameter: if its last use is in the head, it is personal in all of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bpfed._util.errors import UserError
from bpfed.inference import inputs
from bpfed.inference.inputs import Inputs
from bpfed.nn import function_modes

#: Numbers of examples of two trials: what follows both follows the number of examples.
FEW, MORE = 3, 5
#: How far outputs may differ, as a share of the largest, and still be the same up to rounding.
ROUNDING = 1e-4
#: The same where some of it is computed with 16 bits.
COARSE = 3e-2

_aten = torch.ops.aten
#: Operations that change single numbers: what they do to each depends on no other feature, or as in a normalisation on
#: all of them alike.
_EACH = {
    *(_aten.add, _aten.add_, _aten.sub, _aten.sub_, _aten.rsub, _aten.mul, _aten.mul_, _aten.div, _aten.div_),
    *(_aten.addcmul, _aten.addcmul_, _aten.addcdiv, _aten.addcdiv_, _aten.lerp, _aten.lerp_, _aten.pow, _aten.pow_),
    *(_aten.maximum, _aten.minimum, _aten.clamp, _aten.where, _aten._prelu_kernel),
    *(_aten.native_layer_norm, _aten.native_group_norm, _aten._fused_rms_norm),
}
#: Operations whose result has nothing of the numbers that they are given.
EMPTY = {_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.empty_like, _aten.new_zeros, _aten.new_ones}
EMPTY |= {_aten.new_full, _aten.new_empty, _aten.rand_like, _aten.randn_like}
_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.mv: 0, _aten.dot: 0, _aten.linear: 0, _aten.matmul: 0}
_PRODUCTS |= {_aten.addmm: 1, _aten.baddbmm: 1, _aten.addmv: 1, _aten.addbmm: 1}
#: Normalisations, and where they have their gain.
_NORMS = {_aten.native_layer_norm: 2, _aten.native_group_norm: 1, _aten._fused_rms_norm: 2}
#: Look-ups, and where they have their table and their places.
_LOOK_UPS = {_aten.embedding: 1, _aten._embedding_bag: 1, _aten.index: 1, _aten.index_select: 2, _aten.gather: 2}


@dataclass(frozen=True)
class Found:
    """What a trial has found.

    Attributes:
        order: Names of all parameters, by first use; those that are not used come last, as they were registered.
        head: Names of those in the head.
        inputs: Of each parameter that is part of a matrix, how many numbers a unit of it sums over.
        gains: Names of those that scale what a normalisation gives, or start as ones: they belong around 1.
        again: Names of those in the head that have an earlier use as well.
        looked_up: Whether inputs are places in a table, such as the ids of words.
        outputs: Of the examples, ``[B, ...]``.
        rounding: How far its outputs may differ and still be the same, as a share of the largest.
    """

    order: tuple[str, ...]
    head: frozenset[str]
    inputs: dict[str, int]
    gains: frozenset[str]
    again: tuple[str, ...]
    looked_up: bool
    outputs: Any
    rounding: float = ROUNDING


@dataclass(frozen=True)
class _Value:
    """A tensor that a module has computed, as far as the search needs it.

    Attributes:
        data: Whether it depends on the inputs.
        names: Parameters: of a value without data all that it is made of; else those it was last combined with.
        before: Values it was computed from.
        ends: Whether the search ends with ``names``.
    """

    data: bool
    names: tuple[str, ...]
    before: tuple[_Value, ...] = ()
    ends: bool = False


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that torch does not guard against its compiler.

    To guard one, torch imports the compiler, which takes as long as torch itself; a trial is never compiled.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Trace(DispatchMode):
    """Notes how the tensors of a forward pass come from the inputs and the parameters.

    Args:
        x: The inputs.
        parameters: By name, as the module will use them.
    """

    def __init__(self, x: Inputs, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.order: dict[str, None] = {}
        self.inputs: dict[str, int] = {}
        self.gains: set[str] = set()
        self.looked_up = False
        self._names = {id(p): n for n, p in parameters.items()}
        self._values: dict[int, tuple[Tensor, _Value]] = {}  # that a tensor is held here keeps its id its own
        self._shared: dict[int, list[Tensor]] = {}
        for tensor in tree_leaves(x):
            self._put(tensor, _Value(True, ()))
        for name, parameter in parameters.items():
            self._put(parameter, _Value(False, (name,)))

    def _put(self, tensor: Tensor, value: _Value) -> None:
        if id(tensor) not in self._values:
            self._shared.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        self._values[id(tensor)] = (tensor, value)

    def _value(self, tensor: Tensor) -> _Value | None:
        """What is known of a tensor; of one from elsewhere, what is known of another with the same numbers."""
        if id(tensor) in self._values:
            return self._values[id(tensor)][1]
        known = self._shared.get(tensor.untyped_storage()._cdata)
        return self._values[id(known[-1])][1] if known else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for tensor in given:
            if id(tensor) in self._names:
                self.order.setdefault(self._names[id(tensor)])
        known = [(t, value) for t in given if (value := self._value(t)) is not None]
        if packet in EMPTY:
            known = []
        data = any(value.data for _, value in known)
        names = tuple(dict.fromkeys(n for _, value in known if not value.data for n in value.names))
        if (count := _summed(packet, args)) is not None:
            for name in names:
                self.inputs.setdefault(name, count)
        if packet in _NORMS and id(weight := args[_NORMS[packet]]) in self._names:
            self.gains.add(self._names[id(weight)])
        if packet in _LOOK_UPS and data and names:
            self.looked_up |= any(value.data and not t.is_floating_point() for t, value in known)
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        shapes = {t.shape for t, value in known if value.data}
        same = packet in _EACH and any(t.shape in shapes for t in made)
        value = _Value(data, names, tuple(value for _, value in known if value.data), data and bool(names) and not same)
        for tensor in made:
            self._put(tensor, value)
        for tensor in written(func, args, kwargs):
            for other in self._shared.get(tensor.untyped_storage()._cdata, []):
                if (old := self._values[id(other)][1]) is not value:
                    names = () if data or old.data else tuple(dict.fromkeys((*old.names, *value.names)))
                    both = tuple(v for v in (old, value) if v.data)
                    self._put(other, _Value(bool(both), names, both))
        return out

    def head(self, outputs: Tensor) -> frozenset[str]:
        """The parameters that outputs depend on last."""
        start = self._value(outputs)
        names: set[str] = set()
        waiting, seen = [start] if start is not None else [], set[int]()
        while waiting:
            value = waiting.pop()
            if id(value) not in seen:
                seen.add(id(value))
                names.update(value.names)
                if not value.ends:
                    waiting.extend(value.before)
        return frozenset(names)

    def uses_before(self, outputs: Tensor, head: frozenset[str]) -> tuple[str, ...]:
        """Those of the head that have a use before it, on the way to the outputs."""
        start = self._value(outputs)
        found: dict[str, None] = {}
        waiting, seen = [(start, False)] if start is not None else [], set[tuple[int, bool]]()
        while waiting:
            value, past = waiting.pop()
            if (id(value), past) not in seen:
                seen.add((id(value), past))
                if past:
                    found.update(dict.fromkeys(n for n in value.names if n in head))
                waiting.extend((other, past or value.ends) for other in value.before)
        return tuple(found)


class Functions(TorchFunctionMode):
    """Notes whether a module uses autocast, and so computes with 16 bits.

    While a function mode is on, attention layers take no way of their own through one large operation.
    """

    autocast = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.autocast |= any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        return func(*args, **(kwargs or {}))


def _summed(packet: Any, args: Any) -> int | None:
    """How many numbers a unit of a matrix sums over; None where the operation has no matrix."""
    if packet in _PRODUCTS:
        return args[_PRODUCTS[packet]].shape[-1]
    if packet is _aten.convolution:
        weight, stride, transposed, groups = args[1], args[3], args[6], args[8]
        if not transposed:
            return weight.shape[1:].numel()
        taps = math.prod(-(-k // s) for k, s in zip(weight.shape[2:], stride, strict=True))
        return weight.shape[0] // groups * taps
    if packet in (_aten.embedding, _aten._embedding_bag):
        return 1
    if packet is _aten._trilinear:
        return args[1].shape[1:].numel()
    return None


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes to."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return found


# --- modules before their first run -----------------------------------------------------------------------------------


def own_copy(module: nn.Module) -> nn.Module:
    """A copy of a user's module on the CPU; parts that are compiled are plain in it.

    Raises:
        UserError: It cannot be copied, or has no weights yet.
    """
    lazy = next((n for n, p in module.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise UserError(
            f"Parameter '{lazy}' of the module has no shape yet, because its layer is a lazy one; run the module once "
            "on an example before you give it here."
        )
    hooked = _old_norm(module)
    if hooked:
        raise UserError(
            f"Layer '{hooked}' of the module uses torch.nn.utils.weight_norm, which keeps a computed weight that cannot "
            "be copied; use torch.nn.utils.parametrizations.weight_norm."
        )
    try:
        module = copy.deepcopy(_uncompiled(module)).cpu()
    except Exception as error:
        raise UserError(
            f"The module cannot be copied ({first_line(error)}); give one that copy.deepcopy can."
        ) from error
    for name, part in list(module.named_modules(remove_duplicate=False)):
        if _uncompiled(part) is not part:
            parent, _, own = name.rpartition(".")
            setattr(module.get_submodule(parent), own, _uncompiled(part))
    return module


def _uncompiled(module: nn.Module) -> nn.Module:
    """The module inside a compiled one: the whole local step is compiled here, and a compiled part is in its way."""
    while type(module).__name__ == "OptimizedModule":  # to import its class would load the compiler
        module = module.get_submodule("_orig_mod")
    return module


def _old_norm(module: nn.Module) -> str | None:
    for name, layer in module.named_modules():
        if any(type(hook).__name__ == "WeightNorm" for hook in layer._forward_pre_hooks.values()):
            return name
    return None


# --- a module at its first run ----------------------------------------------------------------------------------------

#: Runs a module on inputs ``[B, ...]``, with or without dropout.
Run = Callable[[Inputs], Tensor]


def find(module: nn.Module, parameters: Mapping[str, Tensor], x: Inputs) -> Found:
    """Run a module once, in evaluation mode, and see what it does.

    Args:
        module: It is left in evaluation mode.
        parameters: By name, as they were registered.
        x: A few examples, ``[B, ...]``.
    """
    named, given = {n: p.clone() for n, p in parameters.items()}, inputs.each(torch.clone, x)
    with torch.no_grad(), Functions() as functions, Trace(given, named) as trace:
        outputs = function_modes.run(module.eval(), named, given)
    if not all(map(torch.equal, tree_leaves(given), tree_leaves(x))):
        raise UserError("The module changes its inputs in place, which would change the data; let it work on a copy.")
    order = tuple(dict.fromkeys((*trace.order, *parameters)))
    if not isinstance(outputs, Tensor):  # which the likelihood refuses
        return Found(order, frozenset(), {}, frozenset(), (), False, outputs)
    head = trace.head(outputs)
    again = trace.uses_before(outputs, head)
    half = any(t.dtype in (torch.bfloat16, torch.float16) for t in (*module.parameters(), *module.buffers()))
    rounding = COARSE if half or functions.autocast else ROUNDING
    gains = trace.gains | {n for n, p in parameters.items() if bool((p == 1.0).all())}
    return Found(order, head, trace.inputs, frozenset(gains), again, trace.looked_up, outputs, rounding)


def rows(example: Inputs, count: int) -> Inputs:
    """So many examples, ``[count, ...]``: those there are, and again from the first."""
    return inputs.take(example, torch.arange(count) % len(inputs.first(example)))


def check_alone(evaluated: Run, trained: Run, example: Inputs, rounding: float = ROUNDING) -> None:
    """Raise a `UserError` unless every example has outputs of its own, whatever else is in its batch.

    Batches are filled up with further rows, and examples are distributed over batches as it is fastest.

    Args:
        evaluated: The module in evaluation mode.
        trained: In training mode, with the same dropout each time.
        example: A few examples, ``[B, ...]``.
        rounding: See `same`.
    """
    x = rows(example, MORE)
    for run, mode in ((evaluated, "evaluation"), (trained, "training")):
        alone = run(inputs.take(x, slice(1)))
        if not same(run(inputs.take(x, slice(1))), alone, rounding):
            raise UserError(
                f"The module's outputs for the same inputs differ from call to call in {mode} mode: it keeps state or "
                "draws random numbers; let them depend on inputs and weights alone."
            )
        whole, first_and_last = run(x), run(inputs.take(x, slice(None, None, MORE - 1)))
        if alone.shape != whole[:1].shape:
            raise UserError(
                f"The module's output for one example alone has shape {list(alone.shape)} instead of "
                f"{list(whole[:1].shape)}; keep the batch axis whatever its size (squeeze() takes it away)."
            )
        parts = [(alone, whole[:1]), (first_and_last[:1], whole[:1])]
        if mode == "evaluation":  # in training the place in a batch has its dropout
            parts.append((run(inputs.each(lambda t: t.flip(0), x)).flip(0), whole))
        if not all(same(*pair, rounding) for pair in parts):
            raise UserError(
                f"The module mixes examples of a batch: in {mode} mode the output for an example depends on which others "
                "are in its batch, and batches here are filled up and divided; compute each example from itself alone."
            )


def same(one: Tensor, other: Tensor, rounding: float = ROUNDING) -> bool:
    """Whether outputs are the same up to a share of the largest; what is not a number is no reason to differ."""
    if one.shape != other.shape:
        return False
    size = other.nan_to_num(0.0, 0.0, 0.0).abs().max() if other.numel() else torch.tensor(0.0)
    return torch.allclose(one, other, rtol=0.0, atol=float(rounding * size) + 1e-6, equal_nan=True)


class Attributes:
    """Plain attributes of a module's parts, to see which of them it changes while it runs."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before = self._all()

    def _all(self) -> dict[str, tuple[Any, Any]]:
        usual = vars(nn.Module()).keys()
        return {
            f"{name}.{key}" if name else key: (value, _state(value))
            for name, part in self.module.named_modules()
            for key, value in vars(part).items()
            if key not in usual and not (key == "_flat_weights" and isinstance(part, nn.RNNBase))  # PyTorch's own
        }

    def changed(self) -> list[str]:
        """Names of those that are not as they were."""
        now = self._all()
        return [
            name
            for name, (value, state) in now.items()
            if name not in self.before or self.before[name][0] is not value or self.before[name][1] != state
        ]


def _state(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value._version
    return copy.copy(value) if isinstance(value, bool | int | float | str) else _length(value)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | dict | set | tuple) else 0


# --- what goes wrong, in words ----------------------------------------------------------------------------------------

#: What PyTorch says, and what it means here.
_MEANT: tuple[tuple[str, str], ...] = (
    (
        "random operation",
        "The module draws random numbers that cannot be keyed to a client; only dropout (nn.Dropout, and that of "
        "attention) may be random.",
    ),
    *(
        (
            sign,
            "The module uses hooks on saved tensors, as gradient checkpointing of other libraries does, which torch.func "
            "cannot follow; switch them off in the module.",
        )
        for sign in ("saved tensor hooks", "_NoopSaveInputs")  # the second where torch traps early stops
    ),
    (
        "must override the setup_context staticmethod",
        "The module uses an autograd.Function that torch.func cannot follow; give the Function a setup_context and a vmap.",
    ),
    (
        "indices' to have one of the following scalar types",
        "The module looks its inputs up in a table (nn.Embedding), but an array of inputs is float32 here; give a tuple or "
        "dict of arrays, such as (ids,), where ids stay whole, or turn them back in its forward: embedding(x.long()).",
    ),
    (
        "tensors used as indices must be",
        "The module uses its inputs as indices, but inputs are float32 here; turn them back in its forward: x.long().",
    ),
    (
        "data-dependent control flow",
        "The module decides by the numbers in a tensor (if, while or .item()), which PyTorch cannot do for many clients "
        "at once; use torch.where.",
    ),
    (
        "output dynamic shape",
        "The module has a tensor whose shape depends on the numbers in another (as of nonzero or a mask as index), which "
        "PyTorch cannot do for many clients at once; use torch.where.",
    ),
    ("Jitted modules", "The module is compiled by TorchScript, which torch.func cannot follow; give the plain one."),
    ("nn.DataParallel module", "The module is an nn.DataParallel; give the module inside it, its attribute module."),
)


def meaning(reason: str) -> str | None:
    """A sentence for what PyTorch says of a module that cannot be run; None where it is not known."""
    for said, sentence in _MEANT:
        if said in reason:
            return sentence
    if "vmap" in reason or "Batching rule" in reason:
        return f"PyTorch cannot run the module for many clients at once (torch.vmap): {reason}."
    return None


def first_line(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@contextmanager
def in_words(example: Inputs) -> Iterator[None]:
    """Whatever goes wrong inside while the user's module runs becomes a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = first_line(error)
        shape = f"{inputs.shapes(example)} (a batch of {len(inputs.first(example))})"
        raise UserError(meaning(reason) or f"The module cannot take inputs of shape {shape}: {reason}.") from error
