"""Optimisers against torch's, row by row."""

import math

import pytest
import scenarios
import torch

from bpfed._util.errors import UserError
from bpfed.inference.optim import OPTIMIZERS, Adam, adam, get_optimizer


def gradients(steps, rows, width=7, seed=0):
    """Gradients of very different sizes."""
    g = scenarios.generator(seed)
    return torch.randn(steps, rows, width, generator=g) * torch.logspace(-6, 3, width)


def torch_adam(start, gradients, rate, make=torch.optim.Adam):
    variable = start.double().requires_grad_()
    optimiser = make([variable], lr=rate)
    for gradient in gradients.double():
        variable.grad = gradient
        optimiser.step()
    return variable.detach()


THEIRS = {"adam": torch.optim.Adam, "sgd": lambda weights, lr: torch.optim.SGD(weights, lr, momentum=0.9)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_are_those_of_torch_with_a_rate_for_each_row(name):
    rates, hparams = torch.tensor([1e-3, 1e-2, 0.3]), {"momentum": torch.full((3,), 0.9)}
    all_gradients, optimizer = gradients(10, 3), get_optimizer(name)
    variable = start = torch.randn(3, 7, generator=scenarios.generator(1))
    memory = optimizer.init(variable)
    for step, gradient in enumerate(all_gradients, 1):
        variable, memory = optimizer.update(variable, gradient, memory, torch.full((3,), float(step)), rates, hparams)
    for row in range(3):
        expected = torch_adam(start[row], all_gradients[:, row], float(rates[row]), THEIRS[name])
        torch.testing.assert_close(variable[row].double(), expected, rtol=1e-6, atol=2e-6 * float(rates[row]) + 2e-7)


def test_an_optimiser_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(UserError, match="adam, sgd"):
        get_optimizer("rprop")


def test_every_row_counts_its_own_steps():
    # The second row has three steps behind it when the first begins.
    before, after = gradients(3, 1, seed=2), gradients(4, 2, seed=3)
    start = torch.zeros(2, 7)
    ahead, memory = start[1:], Adam.like(start[1:])
    for step, gradient in enumerate(before, 1):
        ahead, memory = adam(ahead, gradient, memory, torch.tensor([float(step)]), torch.tensor([0.1]))
    variable = torch.cat([start[:1], ahead])
    memory = Adam(*(torch.cat([torch.zeros(1, 7), m]) for m in memory))
    for step, gradient in enumerate(after, 1):
        variable, memory = adam(variable, gradient, memory, torch.tensor([step, step + 3.0]), torch.tensor([0.1, 0.1]))
    late = torch_adam(start[0], after[:, 0], 0.1)
    early = torch_adam(start[1], torch.cat([before[:, 0], after[:, 1]]), 0.1)
    torch.testing.assert_close(variable.double(), torch.stack([late, early]), rtol=1e-5, atol=1e-6)


def test_a_row_with_rate_zero_stays():
    variable = torch.randn(2, 7, generator=scenarios.generator())
    moved, _ = adam(variable, gradients(1, 2)[0], Adam.like(variable), torch.ones(2), torch.tensor([0.0, 0.1]))
    assert torch.equal(moved[0], variable[0])
    assert (moved[1] != variable[1]).all()


def test_adam_does_not_change_what_it_is_given():
    variable, gradient = torch.ones(2, 7), gradients(1, 2)[0]
    memory = Adam.like(variable)
    before = [t.clone() for t in (variable, gradient, *memory)]
    adam(variable, gradient, memory, torch.ones(2), torch.ones(2))
    for now, then in zip((variable, gradient, *memory), before, strict=True):
        assert torch.equal(now, then)


def test_a_variable_at_minus_infinity_stays_there_under_zero_gradients():
    # ρ = −∞ is the Dirac case.
    rho = torch.full((1, 3), -math.inf)
    moved, _ = adam(rho, torch.zeros(1, 3), Adam.like(rho), torch.ones(1), torch.ones(1))
    assert torch.equal(moved, rho)
