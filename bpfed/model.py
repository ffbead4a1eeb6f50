"""A plain module seen as a function of one flat weight vector, for many clients at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vjp, vmap

from bpfed import noise
from bpfed.errors import UserError
from bpfed.factors import Factors, Personal, without_running_statistics
from bpfed.gaussian import Gaussian
from bpfed.intercept import KeyedDropout, LocalCalls, LocalNoise
from bpfed.kernels.conv import Convolutions
from bpfed.likelihoods import Likelihood


@dataclass(frozen=True)
class Model:
    """Network, likelihood and the order of their weights.

    Every function takes weights as flat vectors. ``S`` is the number of clients stacked, ``B`` the batch size, ``P``
    the number of weights.

    Attributes:
        module: A private copy of the user's module.
        likelihood: Of the targets given the outputs.
        factors: Which weights are shared, which personal, and where each is in the vector.
        initial: The module's own initial weights, ``[P]``.
        local: Names of parameters whose noise can be drawn locally (see `LocalNoise`).
        notes: What was changed in the module, in words.
        levels: Name of the parameter that is added to the outputs unchanged, such as the last layer's bias; None if
            there is none.
    """

    module: nn.Module
    likelihood: Likelihood
    factors: Factors
    initial: Tensor
    local: frozenset[str]
    notes: tuple[str, ...] = field(default=())
    levels: str | None = None

    @classmethod
    def of(cls, module: nn.Module, likelihood: Likelihood, example: Tensor, personal: Personal = "head") -> Model:
        """Take a user's module over.

        Args:
            module: Any module; it is copied, not changed.
            likelihood: Checked against the module's output.
            example: A small batch of inputs, ``[B, ...]``, to try the module on.
            personal: See `Factors.of`.
        """
        if not isinstance(module, nn.Module):
            raise UserError(f"The model is {module!r}, but must be a torch.nn.Module (an object, not a class).")
        frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
        if frozen:
            raise UserError(
                f"Parameter '{frozen[0]}' of the module is frozen; register it as a buffer to keep it constant."
            )
        module, replaced = without_running_statistics(copy.deepcopy(module).cpu())
        notes = (f"Batch normalisation replaced by group normalisation in: {', '.join(replaced)}.",) if replaced else ()
        weights = {n: p.detach().float() for n, p in module.named_parameters()}
        extra = likelihood.parameters()
        factors = Factors.of(weights, personal)
        if extra:  # the noise of a client's targets is that client's own, unless nothing is personal
            chosen = [*factors.personal_names, *(extra if personal != "none" else ())]
            factors = Factors.of(weights | extra, chosen or "none")
        model = cls(module, likelihood, factors, factors.flatten(weights | extra), frozenset(), notes)
        model._try(example)
        return replace(model, local=model._local_names(example), levels=model._levels(example))

    @property
    def members(self) -> int:
        """Networks it consists of; several in a `bpfed.mixture.Mixture`."""
        return self.factors.members

    @property
    def one(self) -> Model:
        """One of them: a function of ``P / members`` weights."""
        return self

    def outputs(self, weights: Tensor, x: Tensor, key: Tensor | None = None) -> Tensor:
        """The network's outputs ``[B, K]`` for one client's weights ``[P]``; with a key ``[2]`` dropout is on."""
        with Convolutions():
            return self._forward(self.factors.unflatten(weights), x, key)

    def _forward(self, parameters: dict[str, Tensor], x: Tensor, key: Tensor | None) -> Tensor:
        self.module.train(key is not None)
        own = {n: p for n, p in parameters.items() if n not in self.likelihood.parameters()}
        with ExitStack() as modes:
            if key is not None:
                modes.enter_context(KeyedDropout(key))
            return functional_call(self.module, own, (x,))

    def _loss(self, weights: Tensor, x: Tensor, y: Tensor, mask: Tensor, key: Tensor) -> Tensor:
        with Convolutions():
            return self._nll(self.factors.unflatten(weights), x, y, mask, key)

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
            means, sigmas = self.factors.unflatten(mean), self.factors.unflatten(sigma)
            for i, name in enumerate(self.factors.names):  # everything else: one draw for the whole batch
                if name not in self.local:
                    eps = noise.normal(noise.fold(key, 0x1000 + i), means[name].numel()).reshape(means[name].shape)
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
        before = {n: b.clone() for n, b in self.module.named_buffers()}
        key = noise.key(0, noise.Purpose.INIT)
        with torch.no_grad(), _in_words(example):
            outputs = self.outputs(self.initial, example, key)
        self.likelihood.check(outputs)
        changed = [n for n, b in self.module.named_buffers() if not torch.equal(b, before[n])]
        if changed:
            raise UserError(
                f"The module changes its buffer '{changed[0]}' while it runs, and state beside the weights is not "
                "federated; use a layer without running statistics."
            )
        with torch.no_grad(), _in_words(example):  # as it will run, many clients at once
            vmap(self.outputs)(self.initial[None], example[None], key[None])

    def _local_names(self, example: Tensor) -> frozenset[str]:
        parameters = self.factors.unflatten(self.initial)
        with LocalCalls(parameters, len(example)) as calls, torch.no_grad():
            self._forward(parameters, example, None)
        return calls.local

    def _levels(self, example: Tensor) -> str | None:
        """Found by trial: whatever is added to the parameter, little or much, is added to the outputs."""
        parameters = self.factors.unflatten(self.initial)
        with torch.no_grad():
            before = self._forward(parameters, example, None)
            for name in reversed(self.factors.names):
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


@contextmanager
def _in_words(example: Tensor) -> Iterator[None]:
    """Whatever goes wrong inside while the user's module runs becomes a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        if "random operation" in reason:
            raise UserError(
                "The module draws random numbers that cannot be keyed to a client; only nn.Dropout may be random."
            ) from error
        shape = f"{list(example.shape[1:])} (a batch of {len(example)})"
        raise UserError(f"The module cannot take inputs of shape {shape}: {reason}.") from error
