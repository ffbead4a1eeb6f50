"""What people run today: one module and one optimiser for each client, a DataLoader, one client after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def deterministic(
    network: Callable[[], nn.Module], clients: list[TensorDataset], batch: int, epochs: int, device: str = "cpu"
) -> int:
    """Train each client's network with Adam; returns the number of client-steps."""
    steps = 0
    for data in clients:
        module = network().to(device)
        optimiser = torch.optim.Adam(module.parameters(), lr=1e-3)
        loader = DataLoader(data, batch, shuffle=True)
        for _ in range(epochs):
            for x, y in loader:
                optimiser.zero_grad()
                F.cross_entropy(module(x.to(device)), y.to(device)).backward()
                optimiser.step()
                steps += 1
    return steps


def bayesian(
    network: Callable[[], nn.Module],
    clients: list[TensorDataset],
    batch: int,
    epochs: int,
    prior_step: bool = True,
    device: str = "cpu",
) -> int:
    """The same with Gaussian weights: Eq. 9 on the posterior, Eq. 10 on the prior, KL by torch.distributions.

    Without ``prior_step`` the prior is held, and there is no Eq. 10.
    """
    steps = 0
    for data in clients:
        module = network().to(device)
        names = [n for n, _ in module.named_parameters()]
        mean = [p.detach().clone().requires_grad_() for p in module.parameters()]
        rho = [torch.full_like(p, -3.0).requires_grad_() for p in mean]
        prior_mean = [p.detach().clone().requires_grad_() for p in mean]
        prior_rho = [p.detach().clone().requires_grad_() for p in rho]
        q_optimiser = torch.optim.Adam([*mean, *rho], lr=1e-3)
        prior_optimiser = torch.optim.Adam([*prior_mean, *prior_rho], lr=1e-3)
        loader = DataLoader(data, batch, shuffle=True)
        for _ in range(epochs):
            for x, y in loader:
                q, prior = _normals(mean, rho), _normals(prior_mean, prior_rho, held=True)
                weights = {n: d.rsample() for n, d in zip(names, q, strict=True)}
                outputs = functional_call(module, weights, (x.to(device),))
                loss = len(data) * F.cross_entropy(outputs, y.to(device)) + _kl(q, prior)
                q_optimiser.zero_grad()
                loss.backward()
                q_optimiser.step()
                steps += 1
                if not prior_step:
                    continue
                loss = _kl(_normals(mean, rho, held=True), _normals(prior_mean, prior_rho))
                prior_optimiser.zero_grad()
                loss.backward()
                prior_optimiser.step()
    return steps


def _normals(mean: list[torch.Tensor], rho: list[torch.Tensor], held: bool = False) -> list[Normal]:
    if held:
        mean, rho = [m.detach() for m in mean], [r.detach() for r in rho]
    return [Normal(m, F.softplus(r)) for m, r in zip(mean, rho, strict=True)]


def _kl(q: list[Normal], p: list[Normal]) -> torch.Tensor:
    return sum((kl_divergence(a, b).sum() for a, b in zip(q, p, strict=True)), q[0].mean.new_zeros(()))
