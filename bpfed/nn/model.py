"""A plain module seen as a function of one flat weight vector, for many clients at once."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vjp, vmap

from bpfed._util.errors import UserError
from bpfed.config.migrations import old_attribute
from bpfed.inference import rng
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.likelihoods import Likelihood
from bpfed.nn import trial
from bpfed.nn.function_modes import KeyedDropout, LocalCalls, LocalNoise
from bpfed.nn.kernels.conv import Convolutions
from bpfed.nn.parameters import ParameterLayout, Personal, no_parameters, without_running_statistics


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

    factors = old_attribute("factors", "layout")

    @classmethod
    def of(cls, module: nn.Module, likelihood: Likelihood, example: Tensor, personal: Personal = "head") -> Model:
        """Take a user's module over.

        Args:
            module: Any module; it is copied, not changed.
            likelihood: Checked against the module's output.
            example: A small batch of inputs, ``[B, ...]``, to try the module on; different ones show whether it mixes
                them.
            personal: See `ParameterLayout.of`.
        """
        if not isinstance(module, nn.Module):
            raise UserError(f"The model is {module!r}, but must be a torch.nn.Module (an object, not a class).")
        module, replaced = without_running_statistics(trial.own_copy(module))
        notes = [f"Batch normalisation replaced by group normalisation in: {', '.join(replaced)}."] if replaced else []
        weights = {n: p.detach().float() for n, p in module.named_parameters()}
        if not weights:
            raise no_parameters()
        kept = trial.Attributes(module)
        with trial.in_words(example[:2]):
            found = trial.find(module, weights, example[:2])
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
        )
        model._try(example)
        if changed := kept.changed():
            notes.append(
                f"The module sets its attribute '{changed[0]}' while it runs. All clients use one module, and a step is "
                "recorded once and then repeated without it, so no result may depend on what is kept there."
            )
        return replace(
            model, local=model._local_names(example), output_bias=model._output_bias(example[:2]), notes=tuple(notes)
        )

    @property
    def members(self) -> int:
        """Networks it consists of; several in a `bpfed.nn.ensemble.Ensemble`."""
        return self.layout.members

    @property
    def one(self) -> Model:
        """One of them: a function of ``P / members`` weights."""
        return self

    def outputs(self, weights: Tensor, x: Tensor, key: Tensor | None = None) -> Tensor:
        """The network's outputs ``[B, K]`` for one client's weights ``[P]``; with a key ``[2]`` dropout is on."""
        with Convolutions():
            return self._forward(self.layout.unflatten(weights), x, key)

    def _forward(self, parameters: dict[str, Tensor], x: Tensor, key: Tensor | None) -> Tensor:
        self.module.train(key is not None)
        own = {n: p for n, p in parameters.items() if n not in self.likelihood.parameters()}
        with ExitStack() as modes:
            if key is not None:
                modes.enter_context(KeyedDropout(key))
            return functional_call(self.module, own, (x,))

    def _loss(self, weights: Tensor, x: Tensor, y: Tensor, mask: Tensor, key: Tensor) -> Tensor:
        with Convolutions():
            return self._nll(self.layout.unflatten(weights), x, y, mask, key)

    def _nll(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor, mask: Tensor, key: Tensor) -> Tensor:
        return (self.likelihood.nll(self._forward(parameters, x, key), y, parameters) * mask).sum()

    def gradient(self, weights: Tensor, x: Tensor, y: Tensor, mask: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
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
        self, weights: Tensor, vector: Tensor, x: Tensor, y: Tensor, mask: Tensor, key: Tensor
    ) -> Tensor:
        """The Hessian of what `gradient` sums, times a vector: ``[S, P]`` and ``[S, P]`` to ``[S, P]``.

        The Hessian is never formed: the product is the derivative of the gradient, pulled back along the vector.
        """

        def product(weights: Tensor, vector: Tensor, x: Tensor, y: Tensor, mask: Tensor, key: Tensor) -> Tensor:
            pulled = vjp(lambda w: grad(self._loss)(w, x, y, mask, key), weights)[1]
            return pulled(vector)[0]

        return vmap(product)(weights, vector, x, y, mask, key)

    def local_gradient(
        self, q: Gaussian, x: Tensor, y: Tensor, mask: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `gradient`, for one draw of Gaussian weights whose noise is drawn locally where it can be.

        Returns:
            The summed −log p ``[S]`` and its gradients with respect to μ and σ, ``[S, P]`` each.
        """

        def loss(mean: Tensor, sigma: Tensor, x: Tensor, y: Tensor, mask: Tensor, key: Tensor) -> Tensor:
            means, sigmas = self.layout.unflatten(mean), self.layout.unflatten(sigma)
            for i, name in enumerate(self.layout.names):  # everything else: one draw for the whole batch
                if name not in self.local:
                    eps = rng.normal(rng.fold(key, 0x1000 + i), means[name].numel()).reshape(means[name].shape)
                    means[name] = means[name] + sigmas[name] * eps
            with Convolutions(), LocalNoise({id(means[n]): sigmas[n] for n in self.local}, key):
                return self._nll(means, x, y, mask, key)

        gradients, value = vmap(grad_and_value(loss, argnums=(0, 1)))(q.mean, q.sigma, x, y, mask, key)
        return value, *gradients

    def stacked_outputs(self, weights: Tensor, x: Tensor) -> Tensor:
        """Outputs without dropout: ``[S, P]`` and ``[S, B, ...]`` to ``[S, B, K]``."""
        return vmap(self.outputs)(weights, x)

    def to(self, device: torch.device | str) -> Model:
        """The same model with its constants on that device."""
        return replace(self, module=copy.deepcopy(self.module).to(device), initial=self.initial.to(device))

    def _try(self, example: Tensor) -> None:
        """Run the module as it will be run; raise a `UserError` if what comes out cannot be right."""
        before = {n: b.clone() for n, b in self.module.named_buffers()}
        key, few = rng.key(0, rng.Purpose.INIT), example[:2]
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
            slopes(self.initial[None], few[None], key[None])
            vmap(self.outputs)(self.initial[None], few[None])
        with torch.no_grad(), trial.in_words(few[:1]):
            trial.check_alone(
                lambda x: self.outputs(self.initial, x), lambda x: self.outputs(self.initial, x, key), example
            )

    def _local_names(self, example: Tensor) -> frozenset[str]:
        """Tried with two numbers of examples: a layer that runs on something else has the same number of rows twice."""
        parameters = self.layout.unflatten(self.initial)
        found = []
        for count in (trial.FEW, trial.MORE):
            with LocalCalls(parameters, count) as calls, torch.no_grad():
                self._forward(parameters, trial.rows(example, count), None)
            found.append(calls.local)
        return found[0] & found[1]

    def _output_bias(self, example: Tensor) -> str | None:
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
