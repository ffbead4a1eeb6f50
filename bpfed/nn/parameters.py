"""Which weights are shared and which are personal, and the flat vector that holds them.

The vector has the shared weights first and the personal weights last, so that the two are slices and no other code
needs masks, names or layers.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from bpfed._util.errors import UserError

Personal = str | Sequence[str]

#: Layers that a sentence names.
NAMED = 3


@dataclass(frozen=True)
class ParameterLayout:
    """The order and shapes of the weights in the flat vector.

    Attributes:
        names: Parameter names, shared ones first.
        shapes: Their shapes in one network, in the same order.
        shared: Number of shared weights; ``vector[..., :shared]`` are the shared weights.
        members: Networks of the same kind whose weights are in the vector (`bpfed.nn.networks`), parameter by parameter.
        inputs: Of each parameter how many numbers a unit sums over; 0: it is no part of a matrix. Nothing: not known,
            and taken from the shapes.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    shared: int
    members: int = 1
    inputs: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        parameters: Mapping[str, Tensor],
        personal: Personal = "head",
        head: Collection[str] = (),
        inputs: Mapping[str, int] | None = None,
    ) -> ParameterLayout:
        """Split named parameters.

        Args:
            parameters: Name to tensor, in the order of the vector.
            personal: ``"head"`` (the last layer, `bpfed.nn.trial`), ``"not-head"`` (all but that), ``"none"``, ``"all"``,
                or one or several parameter names, layer names or patterns (``"fc2"``, ``"*.bias"``,
                ``"classifier|lora_B"``).
            head: Names of the parameters of the head; nothing: those of the layer that comes last.
            inputs: How many numbers a unit of a matrix sums over, by name; None: as the shapes say.
        """
        chosen = _personal_names(tuple(parameters), personal, set(head))
        names = (*(n for n in parameters if n not in chosen), *(n for n in parameters if n in chosen))
        shared = sum(parameters[n].numel() for n in names if n not in chosen)
        counts = () if inputs is None else tuple(inputs.get(n, 0) for n in names)
        return cls(names, tuple(parameters[n].shape for n in names), shared, inputs=counts)

    @property
    def sizes(self) -> list[int]:
        """Number of weights of each parameter, in all members."""
        return [self.members * shape.numel() for shape in self.shapes]

    @property
    def total(self) -> int:
        """Number of weights in all, P."""
        return sum(self.sizes)

    @property
    def personal(self) -> int:
        """Number of personal weights; ``vector[..., shared:]`` are the personal weights."""
        return self.total - self.shared

    @property
    def personal_names(self) -> tuple[str, ...]:
        """Names of the personal parameters."""
        starts = accumulate(self.sizes, initial=0)
        return tuple(n for n, start in zip(self.names, starts, strict=False) if start >= self.shared)

    @property
    def words(self) -> str:
        """Which layers are whose: ``personal: fc2 (1 010 weights); shared: fc1 (78 500 weights)``."""
        sizes = dict(zip(self.names, self.sizes, strict=True))
        own = set(self.personal_names)
        parts = {"personal": own, "shared": sizes.keys() - own}
        return "; ".join(f"{part}: {_listed(sizes, names)}" for part, names in parts.items())

    def arranged(self, names: Sequence[str], shared: int) -> ParameterLayout:
        """The same parameters in this order, of which the first ``shared`` are the shared ones."""
        own = dict(zip(self.names, zip(self.shapes, self.inputs or (0,) * len(self.names), strict=True), strict=True))
        shapes = tuple(own[n][0] for n in names)
        count = self.members * sum(shape.numel() for shape in shapes[:shared])
        inputs = tuple(own[n][1] for n in names) if self.inputs else ()
        return replace(self, names=tuple(names), shapes=shapes, shared=count, inputs=inputs)

    def fan_in(self) -> Tensor:
        """Of each weight the number of inputs that its unit sums over, ``[P]``; that of a bias is its layer's.

        A layer without a matrix (a normalisation) sums over nothing, and counts as the widest one.
        """
        own = self.inputs or [shape.numel() // shape[0] if len(shape) > 1 else 0 for shape in self.shapes]
        layers = {_layer(n): count for n, count in zip(self.names, own, strict=True) if count}
        widest = max(*own, 1)
        counts = [float(count or layers.get(_layer(n), widest)) for n, count in zip(self.names, own, strict=True)]
        return torch.cat([torch.full((size,), n) for size, n in zip(self.sizes, counts, strict=True)])

    def flatten(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Named parameters to one vector ``[P]``."""
        return torch.cat([parameters[n].detach().reshape(-1) for n in self.names])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """One vector ``[P]`` to named parameters (views); of several members these have a first axis for them."""
        parts = torch.split(vector, self.sizes)
        lead = (self.members,) if self.members > 1 else ()
        return {n: part.view(*lead, *shape) for n, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    @property
    def one(self) -> ParameterLayout:
        """Those of one member."""
        return replace(self, shared=self.shared // self.members, members=1)

    def apart(self, vector: Tensor) -> Tensor:
        """``[..., P]`` to the vectors of the members, ``[..., members, P / members]``."""
        parts = torch.split(vector, self.sizes, -1)
        return torch.cat([part.unflatten(-1, (self.members, -1)) for part in parts], -1)

    def together(self, members: Tensor) -> Tensor:
        """``[..., members, P / members]`` to ``[..., P]``, back from `apart`."""
        parts = torch.split(members, self.one.sizes, -1)
        return torch.cat([part.flatten(-2) for part in parts], -1)

    def split(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., P]`` to its shared and its personal part (views)."""
        return vector[..., : self.shared], vector[..., self.shared :]


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _listed(sizes: Mapping[str, int], names: Collection[str]) -> str:
    """Some of a module's parameters in a few words: by layer where a layer is among them as a whole."""
    if not names:
        return "nothing"
    split = {_layer(n) for n in names} & {_layer(n) for n in sizes.keys() - names} | {""}
    layers = list(dict.fromkeys(n if _layer(n) in split else _layer(n) for n in sizes if n in names))
    shown = [f"layer {layer}" if layer.isdecimal() else layer for layer in layers[:NAMED]]
    more = [f"{len(layers) - NAMED} more"] if len(layers) > NAMED else []
    count = sum(sizes[n] for n in names)
    weights = f"{number(count)} weight{'' if count == 1 else 's'}"
    return f"{', '.join(shown)}{' and ' if more else ''}{''.join(more)} ({weights})"


def number(count: int) -> str:
    """A count with its digits in groups: ``78 500``."""
    return f"{count:,}".replace(",", " ")


def no_parameters() -> UserError:
    """What to say of a module without parameters."""
    return UserError("The module has no parameters, so there is nothing to train; give it at least one layer.")


def _personal_names(names: tuple[str, ...], personal: Personal, head: set[str]) -> set[str]:
    if not names:
        raise no_parameters()
    if personal == "none":
        return set()
    if personal == "all":
        return set(names)
    head = head or {n for n in names if _layer(n) == _layer(names[-1])}
    if personal == "head":
        return head
    if personal == "not-head":
        return set(names) - head
    return matching(names, personal, "personal")


def matching(names: tuple[str, ...], patterns: Personal, setting: str) -> set[str]:
    """The parameters that names or patterns choose, several with ``|`` between them.

    A pattern is that of a parameter or of a layer from the outermost one on (``encoder.layer.0``); where there is no
    such, that of one at any depth (``lora_*``).

    Raises:
        UserError: One of them, in this setting, chooses nothing.
    """
    given = [patterns] if isinstance(patterns, str) else list(patterns)
    chosen: set[str] = set()
    for pattern in (part.strip() for several in given for part in several.split("|")):
        found: set[str] = set()
        for form in (pattern, f"*.{pattern}"):
            inside = f"{form}.*"
            found = found or {n for n in names if fnmatch.fnmatchcase(n, form) or fnmatch.fnmatchcase(n, inside)}
        if not found:
            raise UserError(
                f"No parameter of the module matches {setting} '{pattern}'; its parameters are: {', '.join(names)}."
            )
        chosen |= found
    return chosen


def without_running_statistics(module: nn.Module, constant: Collection[str] = ()) -> tuple[nn.Module, list[str]]:
    """Replace every batch normalisation in ``module`` (in place) by group normalisation of the same parameters.

    Running statistics are neither shared nor personal weights: they are not weights, have no posterior, and averaging
    them over clients with different data describes nobody. Group normalisation keeps the layer's weight and bias (names
    and shapes), needs no statistics of other examples, and gives one example alone the same prediction as in a batch.

    Args:
        module: It is changed.
        constant: Names of layers that are left as they are, because nothing trains them or their statistics.

    Returns:
        The module and the names of the layers replaced.
    """
    replaced = []
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if name not in constant and isinstance(
            layer, nn.modules.batchnorm._BatchNorm | nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
        ):
            if not layer.track_running_stats and not isinstance(layer, nn.modules.batchnorm._BatchNorm):
                continue
            channels = layer.num_features
            groups = next(g for g in (8, 4, 2, 1) if (channels % g == 0 and channels >= 2 * g) or g == 1)
            group = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
            if layer.affine:
                group.weight, group.bias = layer.weight, layer.bias
            parent = module.get_submodule(_layer(name))
            if parent is layer:
                return group, [type(layer).__name__]
            setattr(parent, name.rpartition(".")[2], group)
            replaced.append(name)
    return module, replaced
