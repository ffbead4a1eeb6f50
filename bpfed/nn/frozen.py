"""Frozen parameters: constants of a module, which nobody trains, sends or keeps, and features computed by them.

A parameter is frozen if its ``requires_grad`` is False, or if the setting ``trainable`` does not name it. Frozen
parameters stay in the module, once for all clients and draws and in their own dtype. A run notes their hash, and whoever
loads the run gives the same module again.

Where the frozen part of a network comes first, its outputs for an example are always the same. These features are then
computed once, and the rest of the network runs on them (`Backbone`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bpfed._util.errors import UserError
from bpfed.inference import inputs, rng
from bpfed.inference.inputs import Inputs
from bpfed.nn import function_modes, trial
from bpfed.nn.function_modes import KeyedDropout
from bpfed.nn.parameters import matching, no_parameters

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def freeze(module: nn.Module, trainable: str | None) -> None:
    """Freeze all parameters (in place) but those that these patterns name; None: the module is left as it is.

    Raises:
        UserError: A pattern names no parameter, or one that cannot be trained, or nothing is left to train.
    """
    named = dict(module.named_parameters())
    if not named:
        raise no_parameters()
    if trainable is not None:
        chosen = matching(tuple(named), trainable, "trainable")
        for name, parameter in named.items():
            if name in chosen and not parameter.is_floating_point():
                raise UserError(
                    f"Parameter '{name}' has numbers of type {str(parameter.dtype).removeprefix('torch.')}, which "
                    "cannot be trained; leave it out of trainable."
                )
            parameter.requires_grad_(name in chosen)
    elif not any(p.requires_grad for p in named.values()):
        raise UserError(
            "All parameters of the module are frozen (requires_grad is False), so there is nothing to train; unfreeze "
            "some, or name them in trainable."
        )


def constant_norms(module: nn.Module) -> tuple[str, ...]:
    """Names of the normalisations with running statistics in the frozen part: these stay in evaluation mode.

    One without parameters belongs to the frozen part if the parameter registered last before it does.
    """
    found, frozen = [], False
    for name, layer in module.named_modules(remove_duplicate=False):
        own = list(layer.parameters(recurse=False))
        if own:
            frozen = not any(p.requires_grad for p in own)
        if isinstance(layer, _NORMS) and layer.running_mean is not None and frozen:
            found.append(name)
    return tuple(found)


def digest(module: nn.Module, trained: Collection[str]) -> str:
    """A hash of all that a module computes with beside its trained parameters: frozen ones and saved buffers."""
    named = dict(module.named_parameters())
    own = {id(named[n]) for n in trained if n in named}
    found = hashlib.sha256()
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in own:
            found.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


# --- features ---------------------------------------------------------------------------------------------------------

#: Examples whose features are computed at a time: what a layer of 32 gives still fits into the cache of a core, and with
#: 64 an image took twice as long.
BLOCK = {"cpu": 32, "cuda": 256}
#: Layers that are tried as the last of the frozen part, from the last one back.
TRIED = 12

_RAW, _FROZEN, _TRAINED = 1, 2, 4


class _Skipped(NamedTuple):
    """A call of a layer that is not run again, because what it gives is known.

    Attributes:
        output: What it gives, a tree of tensors.
        inside: How often it calls layers inside it, by name.
    """

    output: Any
    inside: dict[str, int]


class Backbone(NamedTuple):
    """The frozen part of a network that comes first, as far as a certain call of one of its layers.

    Attributes:
        layer: Name of the layer whose output is the features.
        call: Which of its calls in a forward pass, from 0.
        example: One input, ``[1, ...]``: the module's forward starts with it where the features are at hand.
        skipped: Calls of frozen layers before that one, and what they give for the example.
        inside: How often that call calls layers inside it, by name.
    """

    layer: str
    call: int
    example: Any
    skipped: Mapping[tuple[str, int], _Skipped] = {}
    inside: Mapping[str, int] = {}

    @property
    def words(self) -> str:
        """Where it ends."""
        return f"layer '{self.layer}'"

    def to(self, device: torch.device | str) -> Backbone:
        """With its example, and what is known of it, on that device."""
        skipped = {at: one._replace(output=inputs.move(one.output, device)) for at, one in self.skipped.items()}
        return self._replace(example=inputs.move(self.example, device), skipped=skipped)

    @contextmanager
    def replaced(self, module: nn.Module, features: Tensor) -> Iterator[None]:
        """Inside, that call of the layer gives these features, and no frozen layer before it is run."""
        known = {**self.skipped, (self.layer, self.call): _Skipped(features, dict(self.inside))}
        calls: dict[str, int] = dict.fromkeys((name for name, _ in known), 0)

        def skipping(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                call = calls[name]
                calls[name] += 1
                if (one := known.get((name, call))) is None:
                    return run(*args, **kwargs)
                for other, count in one.inside.items():
                    calls[other] = calls.get(other, 0) + count
                # A copy, since what follows may work in place.
                return features if one.output is features else inputs.each(torch.clone, one.output)

            return forward

        layers = {name: module.get_submodule(name) for name in calls}
        before = {name: vars(layer).get("forward") for name, layer in layers.items()}
        for name, layer in layers.items():
            vars(layer)["forward"] = skipping(name, layer.forward)
        try:
            yield
        finally:
            for name, layer in layers.items():
                if (own := before[name]) is None:
                    del vars(layer)["forward"]
                else:
                    vars(layer)["forward"] = own

    def features(self, module: nn.Module, parameters: Mapping[str, Tensor], x: Inputs) -> Tensor:
        """What the layer gives for inputs ``[B, ...]``; nothing after it is run."""

        def stop(output: Tensor) -> Tensor:
            raise _Reached(output)

        try:
            with torch.no_grad(), _hooked(module.eval().get_submodule(self.layer), self.call, stop):
                function_modes.run(module, parameters, x)
        except _Reached as reached:
            return reached.output
        raise AssertionError("the layer was not reached")

    def skipping(self, module: nn.Module, parameters: Mapping[str, Tensor]) -> Backbone:
        """The same with the outermost calls of layers before it that are computed without trained parameters."""
        origins = _Origins()
        named, given = _noted(origins, module, parameters, self.example)
        known: dict[tuple[str, int], _Skipped] = {}
        counts: dict[str, int] = {}
        started: list[dict[str, int]] = []

        def begin(layer: nn.Module, args: Any) -> None:
            started.append(dict(counts))

        def end(name: str) -> Callable[..., None]:
            def hook(layer: nn.Module, args: Any, output: Any) -> None:
                before, call = started.pop(), counts.get(name, 0)
                inside = {n: count - before.get(n, 0) for n, count in counts.items() if count > before.get(n, 0)}
                counts[name] = call + 1
                tensors = tree_leaves(output)
                if (name, call) == (self.layer, self.call) or (
                    tensors
                    and all(isinstance(t, Tensor) and not origins.get(t) & _TRAINED for t in tensors)
                    and isinstance(output, Tensor | tuple | dict)
                ):
                    for at in [at for at in known if at[1] >= before.get(at[0], 0)]:
                        del known[at]
                    known[name, call] = _Skipped(inputs.each(torch.clone, output), inside)
                if (name, call) == (self.layer, self.call):
                    raise _Reached(output)

            return hook

        layers = list(module.eval().named_modules())
        handles = [layer.register_forward_pre_hook(begin) for _, layer in layers]
        handles += [layer.register_forward_hook(end(name)) for name, layer in layers]
        try:
            with trial.Functions(), origins:
                function_modes.run(module, named, given)
        except _Reached:
            pass
        finally:
            for handle in handles:
                handle.remove()
        own = known.pop((self.layer, self.call))
        return self._replace(skipped=known, inside=own.inside)


class _Reached(Exception):
    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output.clone()


@contextmanager
def _hooked(layer: nn.Module, call: int, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    calls = 0

    def hook(layer: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        nonlocal calls
        calls += 1
        return change(output) if calls == call + 1 else None

    with layer.register_forward_hook(hook):
        yield


class _Origins(trial.DispatchMode):
    """Notes of every tensor whether it depends on raw inputs, on frozen parameters and on trained ones.

    What is written into a tensor counts for all that shares its memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[int, int] = {}
        self.kept: list[Tensor] = []  # that memory is held keeps its address its own

    def put(self, tensor: Tensor, origins: int) -> None:
        self.kept.append(tensor)
        place = tensor.untyped_storage()._cdata
        self.of[place] = self.of.get(place, 0) | origins

    def get(self, tensor: Tensor) -> int:
        return self.of.get(tensor.untyped_storage()._cdata, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        origins = 0
        if func.overloadpacket not in trial.EMPTY:
            for tensor in tree_leaves((args, kwargs)):
                origins |= self.get(tensor) if isinstance(tensor, Tensor) else 0
        out = func(*args, **kwargs)
        for tensor in (*tree_leaves(out), *trial.written(func, args, kwargs)):
            if isinstance(tensor, Tensor):
                self.put(tensor, origins)
        return out


class _Call(NamedTuple):
    layer: str
    call: int


def find_backbone(
    module: nn.Module, parameters: Mapping[str, Tensor], constant: Collection[str], x: Inputs, rounding: float
) -> tuple[Backbone | None, str]:
    """The frozen part that comes first, or None and why there is none, in words.

    It ends with the last call of a layer that depends on inputs and frozen parameters alone, if the outputs depend on
    the inputs only through what that call gives. Which tensor depends on which is traced.

    Args:
        module: With frozen parameters.
        parameters: The trained ones by name.
        constant: Names of layers that are always in evaluation mode.
        x: A few examples, ``[B, ...]``.
        rounding: How far outputs may differ and still be the same.
    """
    with torch.no_grad():
        calls = _frozen_calls(module, parameters, x)
        for found in reversed(calls[-TRIED:]):
            if _passes_all(module, parameters, x, found):
                break
        else:
            return None, "its inputs or other parameters enter beside or before it"
        backbone = Backbone(found.layer, found.call, inputs.each(lambda t: t[:1].clone(), x))
        backbone = backbone.skipping(module, parameters)
        features = backbone.features(module, parameters, x)
        key = rng.key(0, rng.Purpose.INIT)
        seen: list[tuple[int, Tensor]] = []

        def look(output: Tensor) -> Tensor:
            seen.append((dropout.calls, output.clone()))
            return output

        module.train()
        for name in constant:
            module.get_submodule(name).eval()
        with KeyedDropout(key) as dropout, _hooked(module.get_submodule(found.layer), found.call, look):
            function_modes.run(module, parameters, x)
        module.eval()
        if seen[0][0]:
            return None, "it has dropout"
        if not trial.same(seen[0][1], features, rounding):
            return None, "it computes something else in training mode"
        try:
            whole = function_modes.run(module, parameters, x)
            with backbone.replaced(module, features):
                rest = function_modes.run(module, parameters, backbone.example)
        except Exception:  # what follows it asks the raw inputs for their number
            return None, "what follows it uses the size of the inputs"
        return (
            (backbone, "")
            if trial.same(rest, whole, rounding)
            else (None, "what follows it uses the size of the inputs")
        )


def _noted(origins: _Origins, module: nn.Module, parameters: Mapping[str, Tensor], x: Inputs) -> Any:
    """Arguments of a pass whose origins are noted."""
    given, named = inputs.each(torch.clone, x), {n: p.clone() for n, p in parameters.items()}
    for tensor in tree_leaves(given):
        origins.put(tensor, _RAW)
    for name, parameter in module.named_parameters():
        if name not in named:
            origins.put(parameter, _FROZEN)
    for trained in named.values():
        origins.put(trained, _TRAINED)
    return named, given


def _frozen_calls(module: nn.Module, parameters: Mapping[str, Tensor], x: Inputs) -> list[_Call]:
    """Calls of layers, as they end, whose output depends on inputs and frozen parameters alone."""
    found: list[_Call] = []
    counts: dict[str, int] = {}
    origins = _Origins()
    named, given = _noted(origins, module, parameters, x)

    def watch(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, output: Any) -> None:
            call = counts[name] = counts.get(name, -1) + 1
            rows = isinstance(output, Tensor) and output.ndim > 0 and len(output) == len(inputs.first(x))
            if rows and origins.get(output) == _RAW | _FROZEN:
                found.append(_Call(name, call))

        return hook

    handles = [layer.register_forward_hook(watch(name)) for name, layer in module.eval().named_modules()]
    try:
        with trial.Functions(), origins:
            function_modes.run(module, named, given)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _passes_all(module: nn.Module, parameters: Mapping[str, Tensor], x: Inputs, found: _Call) -> bool:
    """Whether the outputs depend on the inputs only through what this call gives."""
    origins = _Origins()
    named, given = _noted(origins, module, parameters, x)

    def cut(output: Tensor) -> Tensor:
        fresh = output.detach().clone()
        origins.of[fresh.untyped_storage()._cdata] = 0
        return fresh

    with _hooked(module.eval().get_submodule(found.layer), found.call, cut), trial.Functions(), origins:
        outputs = function_modes.run(module, named, given)
    return all(not origins.get(t) & _RAW for t in tree_leaves(outputs) if isinstance(t, Tensor))
