"""A plain module seen as a function of one flat weight vector, for many clients at once."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vjp, vmap

from bpfed._util.errors import UserError
from bpfed.inference import inputs, rng
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.inputs import Inputs
from bpfed.inference.likelihoods import Likelihood
from bpfed.nn import frozen as constants
from bpfed.nn import function_modes, trial
from bpfed.nn.function_modes import KeyedDropout, LocalCalls, LocalNoise
from bpfed.nn.kernels.conv import Convolutions
from bpfed.nn.parameters import ParameterLayout, Personal, without_running_statistics


@dataclass(frozen=True)
class Model:
    """Network, likelihood and the order of their weights.

    Every function takes weights as flat vectors. ``S`` is the number of clients stacked, ``B`` the batch size, ``P``
    the number of weights.

    Attributes:
        module: A private copy of the user's module.
        likelihood: Of the targets given the outputs.
        layout: Which weights are shared, which personal, and where each is in the vector.
        initial: The module's own initial weights, ``[P]``.
        local: Names of parameters whose noise can be drawn locally (see `LocalNoise`).
        notes: What was changed in the module, in words.
        output_bias: Name of the parameter that is added to the outputs unchanged, such as the last layer's bias; None if
            there is none.
        order: Names of the module's parameters by first use in its forward.
        looked_up: Whether the module takes inputs for places in a table, such as the ids of words.
        head: Names of the parameters of the last layers on the way to the outputs (`bpfed.nn.trial`).
        gains: Names of parameters that scale what a normalisation gives and so belong around 1.
        frozen: Number of weights that are constants of the module (`bpfed.nn.frozen`); ``P`` does not count them.
        constant: Names of normalisations in the frozen part, which are always in evaluation mode.
        backbone: The frozen part that comes first, if the inputs ``x`` of all functions are its outputs.
        rounding: How far outputs may differ and still be the same (`bpfed.nn.trial`).
    """

    module: nn.Module
    likelihood: Likelihood
    layout: ParameterLayout
    initial: Tensor
    local: frozenset[str]
    notes: tuple[str, ...] = field(default=())
    output_bias: str | None = None
    order: tuple[str, ...] = ()
    looked_up: bool = False
    head: frozenset[str] = frozenset()
    gains: frozenset[str] = frozenset()
    frozen: int = 0
    constant: tuple[str, ...] = ()
    backbone: constants.Backbone | None = None
    rounding: float = trial.ROUNDING

    @classmethod
    def of(
        cls,
        module: nn.Module,
        likelihood: Likelihood,
        example: Inputs,
        personal: Personal = "head",
        trainable: str | None = None,
        tried: bool = False,
    ) -> Model:
        """Take a user's module over.

        Args:
            module: Any module; it is copied, not changed.
            likelihood: Checked against the module's output.
            example: A small batch of inputs, ``[B, ...]`` or a tree of such (`bpfed.inference.inputs`), to try the
                module on; different ones show whether it mixes them.
            personal: See `ParameterLayout.of`.
            trainable: Patterns of the parameters that are trained; None: those whose ``requires_grad`` is True.
            tried: Whether it is known to run under ``torch.func`` and not to mix examples, as networks of this package;
                to try that imports torch's compiler, which takes as long as torch itself.
        """
        if not isinstance(module, nn.Module):
            raise UserError(f"The model is {module!r}, but must be a torch.nn.Module (an object, not a class).")
        module = trial.own_copy(module)
        constants.freeze(module, trainable)
        constant = constants.constant_norms(module)
        module, replaced = without_running_statistics(module, constant)
        notes = [f"Batch normalisation replaced by group normalisation in: {', '.join(replaced)}."] if replaced else []
        weights = {n: p.detach().float() for n, p in module.named_parameters() if p.requires_grad}
        kept = trial.Attributes(module)
        few = inputs.take(example, slice(2))
        with trial.in_words(few):
            found = trial.find(module, weights, few)
        likelihood.check(found.outputs)
        if personal in ("head", "not-head") and found.again:
            notes.append(
                f"The head shares {', '.join(found.again)} with an earlier layer (tied weights), so "
                f"{'both are personal' if personal == 'head' else 'neither is personal'}."
            )
        weights = {n: weights[n] for n in found.order}
        extra = likelihood.parameters()
        layout = ParameterLayout.of(weights, personal, found.head, found.inputs)
        if extra:  # the noise of a client's targets is that client's own, unless nothing is personal
            chosen = [*layout.personal_names, *(extra if personal != "none" else ())]
            layout = ParameterLayout.of(weights | extra, chosen or "none", found.head, found.inputs)
        model = cls(
            module,
            likelihood,
            layout,
            layout.flatten(weights | extra),
            frozenset(),
            tuple(notes),
            order=found.order,
            looked_up=found.looked_up,
            head=found.head,
            gains=found.gains,
            rounding=found.rounding,
            frozen=sum(p.numel() for p in module.parameters() if not p.requires_grad),
            constant=constant,
        )
        if not tried:
            model._try(example)
        if changed := kept.changed():
            notes.append(
                f"The module sets its attribute '{changed[0]}' while it runs. All clients use one module, and a step is "
                "recorded once and then repeated without it, so no result may depend on what is kept there."
            )
        return replace(
            model, local=model._local_names(example), output_bias=model._output_bias(few), notes=tuple(notes)
        )

    @property
    def members(self) -> int:
        """Networks it consists of; several in a `bpfed.nn.networks.Ensemble`."""
        return self.layout.members

    @property
    def one(self) -> Model:
        """One of them: a function of ``P / members`` weights."""
        return self

    @cached_property
    def module_info(self) -> function_modes.ModuleInfo:
        """What has to be known of the module in every call."""
        return function_modes.ModuleInfo.of(self.module)

    @cached_property
    def centre(self) -> Tensor:
        """What weights are around where nothing is known, ``[P]``: 1 for gains of normalisations, else 0."""
        ones = torch.tensor([float(name in self.gains) for name in self.layout.names])
        return ones.repeat_interleave(torch.tensor(self.layout.sizes)).to(self.initial.device)

    @cached_property
    def adapters(self) -> frozenset[str]:
        """Names of the parameters of low-rank adapters, as peft calls them (``lora_A``, ``lora_B`` and the like)."""
        return frozenset(n for n in self.layout.names if any(part.startswith("lora_") for part in n.split(".")))

    @property
    def computed(self) -> int:
        """Number of weights that a pass computes with: ``P``, and the frozen ones unless their outputs are at hand."""
        return self.layout.total + (self.frozen if self.backbone is None else 0)

    @property
    def wide(self) -> bool:
        """Whether a pass runs a frozen part, whose layers are often large beside the trained ones."""
        return self.computed > self.layout.total

    @cached_property
    def frozen_hash(self) -> str:
        """Of the constants of a module with frozen parameters; empty where there are none."""
        return constants.digest(self.module, self.layout.names) if self.frozen else ""

    def on_features(self, example: Inputs) -> Model:
        """The same model as a function of what its frozen part gives, where that comes first; else itself.

        Its notes say which, and why not. ``example`` is a small batch of inputs, ``[B, ...]``.
        """
        if not self.frozen:
            return self
        few = trial.rows(example, trial.FEW)
        parameters = self._own(self.layout.unflatten(self.initial))
        with trial.in_words(few):
            found, why = constants.find_backbone(self.module, parameters, self.constant, few, self.rounding)
        if found is None:
            return self.uncached(why)
        model = replace(self, backbone=found)
        try:  # as it will run, many clients at once
            with torch.no_grad():
                vmap(grad(lambda weights, x: model.outputs(weights, x).sum()))(
                    self.initial[None], model.features(few)[None]
                )
        except Exception as error:
            return self.uncached(f"the rest cannot run by itself ({trial.first_line(error)})")
        note = (
            f"The frozen part of the network, up to {found.words}, is computed once for each example "
            "(cache_features='off': in every step)."
        )
        return replace(model, notes=(*self.notes, note))

    def uncached(self, why: str) -> Model:
        """The same model as a function of raw inputs, with a note why."""
        notes = [note for note in self.notes if self.backbone is None or self.backbone.words not in note]
        note = f"The frozen part of the network is computed in every step, because {why}."
        return replace(self, backbone=None, notes=(*notes, note))

    def features(self, x: Inputs) -> Inputs:
        """Raw inputs ``[E, ...]`` as all other functions take them: the outputs of the frozen part, if it comes first."""
        if self.backbone is None:
            return x
        parameters, device = self._own(self.layout.unflatten(self.initial)), self.initial.device
        found = [
            self.backbone.features(self.module, parameters, inputs.move(block, device)).to(inputs.first(x).device)
            for block in inputs.blocks(x, constants.BLOCK[device.type])
        ]
        return torch.cat(found)

    def outputs(self, weights: Tensor, x: Inputs, key: Tensor | None = None) -> Tensor:
        """The network's outputs ``[B, K]`` for one client's weights ``[P]``; with a key ``[2]`` dropout is on."""
        with Convolutions():
            return self._forward(self.layout.unflatten(weights), x, key)

    def _forward(self, parameters: dict[str, Tensor], x: Inputs, key: Tensor | None) -> Tensor:
        with ExitStack() as modes:
            if key is not None:
                modes.enter_context(KeyedDropout(key))
            return self.call(parameters, x, key is not None)

    def call(self, parameters: dict[str, Tensor], x: Inputs, training: bool = False) -> Tensor:
        """The module's outputs with these parameters, by name; those of the likelihood may be among them."""
        if self.module.training != training:  # to walk through all layers takes as long as a small step
            self.module.train(training)
            for name in self.constant:
                self.module.get_submodule(name).eval()
        own = self._own(parameters)
        if self.backbone is None:
            return function_modes.run(self.module, own, x, self.module_info)
        with self.backbone.replaced(self.module, x):
            return function_modes.run(self.module, own, self.backbone.example, self.module_info)

    def random_names(self, sigma: Tensor) -> list[str]:
        """Names of the module's parameters whose standard deviations, among those of all ``[S, P]``, are not all 0."""
        spread = self._own(self.layout.unflatten(sigma.amax(0)))
        widest = torch.stack([part.amax() for part in spread.values()]).tolist()
        return [name for name, largest in zip(spread, widest, strict=True) if largest > 0.0]

    def _own(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of the module."""
        return {n: p for n, p in parameters.items() if n not in self.likelihood.parameters()}

    def _loss(self, weights: Tensor, x: Inputs, y: Tensor, mask: Tensor, key: Tensor) -> Tensor:
        with Convolutions():
            return self._nll(self.layout.unflatten(weights), x, y, mask, key)

    def _nll(self, parameters: dict[str, Tensor], x: Inputs, y: Tensor, mask: Tensor, key: Tensor) -> Tensor:
        return (self.likelihood.nll(self._forward(parameters, x, key), y, parameters) * mask).sum()

    def gradient(self, weights: Tensor, x: Inputs, y: Tensor, mask: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of −log p over each client's batch, and its gradient.

        Args:
            weights: ``[S, P]``.
            x: ``[S, B, ...]``.
            y: ``[S, B]``.
            mask: 1 for an example, 0 for padding, ``[S, B]``.
            key: ``[S, 2]``.

        Returns:
            ``[S]`` and ``[S, P]``.
        """
        gradient, value = vmap(grad_and_value(self._loss))(weights, x, y, mask, key)
        return value, gradient

    def hessian_product(
        self, weights: Tensor, vector: Tensor, x: Inputs, y: Tensor, mask: Tensor, key: Tensor
    ) -> Tensor:
        """The Hessian of what `gradient` sums, times a vector: ``[S, P]`` and ``[S, P]`` to ``[S, P]``.

        The Hessian is never formed: the product is the derivative of the gradient, pulled back along the vector.
        """

        def product(weights: Tensor, vector: Tensor, x: Inputs, y: Tensor, mask: Tensor, key: Tensor) -> Tensor:
            pulled = vjp(lambda w: grad(self._loss)(w, x, y, mask, key), weights)[1]
            return pulled(vector)[0]

        return vmap(product)(weights, vector, x, y, mask, key)

    def local_gradient(
        self, q: Gaussian, x: Inputs, y: Tensor, mask: Tensor, key: Tensor, points: frozenset[str] = frozenset()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `gradient`, for one draw of Gaussian weights whose noise is drawn locally where it can be.

        Parameters with names in ``points`` are at their means: no noise is made for them.

        Returns:
            The summed −log p ``[S]`` and its gradients with respect to μ and σ, ``[S, P]`` each.
        """

        def loss(mean: Tensor, sigma: Tensor, x: Inputs, y: Tensor, mask: Tensor, key: Tensor) -> Tensor:
            means, sigmas = self.layout.unflatten(mean), self.layout.unflatten(sigma)
            for i, name in enumerate(self.layout.names):  # everything else: one draw for the whole batch
                if name not in self.local and name not in points:
                    eps = rng.normal(rng.fold(key, 0x1000 + i), means[name].numel()).reshape(means[name].shape)
                    means[name] = means[name] + sigmas[name] * eps
            with Convolutions(), LocalNoise({id(means[n]): sigmas[n] for n in self.local - points}, key):
                return self._nll(means, x, y, mask, key)

        gradients, value = vmap(grad_and_value(loss, argnums=(0, 1)))(q.mean, q.sigma, x, y, mask, key)
        return value, *gradients

    def stacked_outputs(self, weights: Tensor, x: Inputs) -> Tensor:
        """Outputs without dropout: ``[S, P]`` and ``[S, B, ...]`` to ``[S, B, K]``."""
        return vmap(self.outputs)(weights, x)

    def save_adapter(self, weights: Tensor, folder: Path) -> None:
        """Write the adapter of a peft model with weights ``[P]``; see `bpfed.nn.function_modes.save_adapter`."""
        if self.members > 1:
            raise UserError("An adapter is of one network, but members is above 1; train with members = 1.")
        function_modes.save_adapter(self.module, self._own(self.layout.unflatten(weights)), folder)

    def to(self, device: torch.device | str) -> Model:
        """The same model with its constants on that device."""
        return replace(
            self,
            module=copy.deepcopy(self.module).to(device),
            initial=self.initial.to(device),
            backbone=None if self.backbone is None else self.backbone.to(device),
        )

    def _try(self, example: Inputs) -> None:
        """Run the module as it will be run; raise a `UserError` if what comes out cannot be right."""
        before = {n: b.clone() for n, b in self.module.named_buffers()}
        key, few = rng.key(0, rng.Purpose.INIT), inputs.take(example, slice(2))
        with torch.no_grad(), trial.in_words(few):
            self.likelihood.check(self.outputs(self.initial, few, key))
        changed = [n for n, b in self.module.named_buffers() if not torch.equal(b, before[n])]
        if changed:
            raise UserError(
                f"The module changes its buffer '{changed[0]}' while it runs, and state beside the weights is not "
                "federated; use a layer without running statistics."
            )
        with torch.no_grad(), trial.in_words(few):  # as it will run, many clients at once
            slopes = vmap(grad(lambda weights, x, key: self.outputs(weights, x, key).sum()))
            slopes(self.initial[None], inputs.take(few, None), key[None])
            vmap(self.outputs)(self.initial[None], inputs.take(few, None))
        with torch.no_grad(), trial.in_words(inputs.take(few, slice(1))):
            trial.check_alone(
                lambda x: self.outputs(self.initial, x),
                lambda x: self.outputs(self.initial, x, key),
                example,
                self.rounding,
            )

    def _local_names(self, example: Inputs) -> frozenset[str]:
        """Tried with two numbers of examples: a layer that runs on something else has the same number of rows twice."""
        parameters = self.layout.unflatten(self.initial)
        found = []
        for count in (trial.FEW, trial.MORE):
            with LocalCalls(parameters, count) as calls, torch.no_grad():
                self._forward(parameters, trial.rows(example, count), None)
            found.append(calls.local)
        return found[0] & found[1]

    def _output_bias(self, example: Inputs) -> str | None:
        """Found by trial: whatever is added to the parameter, little or much, is added to the outputs."""
        parameters = self.layout.unflatten(self.initial)
        with torch.no_grad():
            before = self._forward(parameters, example, None)
            for name in reversed(self.layout.names):
                if parameters[name].shape != before.shape[1:] or name in self.likelihood.parameters():
                    continue
                added = torch.linspace(0.5, 1.0, parameters[name].numel())
                tried = [much * added for much in (1.0, 100.0, -100.0)]
                outputs = [self._forward(parameters | {name: parameters[name] + more}, example, None) for more in tried]
                if all(
                    torch.allclose(after - before, more.expand_as(before), atol=1e-4)
                    for after, more in zip(outputs, tried, strict=True)
                ):
                    return name
        return None
