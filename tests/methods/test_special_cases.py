"""What the framework becomes in the Dirac case: σ = 0 and no KL term together.

Two things separate BPFed's Dirac case from the methods' own files. BPFed follows n times the mean loss of a batch, the others
the mean itself, and Adam cancels such a factor but for its ε (1e-8). So the identities are tested twice: in float64 without ε,
where they are exact, step by step; and as both run, in float32 with ε, over rounds of the simulator.
"""

from dataclasses import replace

import pytest
import scenarios
import torch

from bpfed.inference import optim, rng
from bpfed.methods import BPFed, FedAvg, FedPer, FedRep, LGFedAvg, LocalOnly
from bpfed.methods.base import rows

CLIENTS, SIZE = 3, 35.0
NONE = 1e-300  # no ε in float64, but for 0 / 0: the gradient of a σ that is 0


def dirac(personal, keep_adam=True, **more):
    return BPFed.dirac(personal=personal, keep_adam=keep_adam, draws=1, **more)


def fedrep(**more):
    return dirac("head", order="alternating", body_epochs=2, **more)


def fedrep_by_adam(**more):
    return FedRep(body_epochs=2, optimiser="adam", lr=FedPer().lr, decay=0.0, **more)


CASES = {
    "FedPer": (FedPer(), dirac("head")),
    "FedPer, Adam restarted": (FedPer(keep_adam=False), dirac("head", keep_adam=False)),
    "LG-FedAvg": (LGFedAvg(), dirac("not-head")),
    "FedAvg": (FedAvg(), dirac("none", keep_adam=False)),
    "local": (LocalOnly(), dirac("all")),
    "FedRep": (fedrep_by_adam(keep_adam=True), fedrep()),
    "FedRep, Adam restarted": (fedrep_by_adam(keep_adam=False), fedrep(keep_adam=False)),
}


def batches(round_, steps=4):
    """Batches of several sizes, all of it in float64."""
    found = []
    for t in range(steps):
        used = [5, 3, 4] if t % 2 else [4, 5, 1]
        key = rng.fold(scenarios.keys(CLIENTS), t)
        batch = scenarios.random_batch(CLIENTS, 5, seed=100 * round_ + t, used=used, size=SIZE)._replace(key=key)
        found.append(batch._replace(x=batch.x.double(), mask=batch.mask.double(), size=batch.size.double()))
    return found


def weights(method, local):
    """All weights during a round, ``[S, P]``."""
    return local.q.mean if isinstance(method, BPFed) else local.weights


def path(method, rounds=3):
    """All weights after every local step of a few rounds with aggregation between them, in float64."""
    model = scenarios.model_of(scenarios.smooth(), personal=method.personal)
    model = replace(model, initial=model.initial.double())
    initial = method.init(model)
    shared, personal = initial.shared, rows(initial.personal, CLIENTS)
    hparams = scenarios.hparams(method, CLIENTS, torch.float64)
    seen = [model.initial.expand(CLIENTS, -1)]
    for round_ in range(rounds):
        local = method.begin(model, rows(shared, CLIENTS), personal, hparams)
        for phase in method.phases(1):
            for batch in batches(round_):
                local, _ = method.step(model, local, batch, hparams, phase.name)
                seen.append(weights(method, local))
        finished = method.finish(model, local, hparams)
        shared, personal = method.aggregate(shared, finished.upload, torch.ones(CLIENTS)), finished.personal
    return torch.stack(seen)


@pytest.mark.parametrize("case", CASES)
def test_without_adams_epsilon_the_dirac_case_is_that_method_step_by_step(case, monkeypatch):
    monkeypatch.setattr(optim, "EPS", NONE)
    method, framework = CASES[case]
    expected, found = path(method), path(framework)
    assert (expected[1:] - expected[:-1]).abs().amax((1, 2)).min() > 0.1 * method.lr  # every step moves something
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", ["FedPer", "LG-FedAvg", "FedAvg", "local", "FedRep"])
def test_as_they_run_the_dirac_case_is_that_method_over_rounds(case):
    method, framework = CASES[case]
    one = scenarios.run(method, rounds=3, module=scenarios.smooth(), epochs=2, batch=5)
    other = scenarios.run(framework, rounds=3, module=scenarios.smooth(), epochs=2, batch=5)
    everyone = torch.arange(len(one))

    def drawn(federation):
        shared, personal = rows(federation.shared, len(everyone)), federation.personal(everyone)
        return federation.method.predictive(federation.model, shared, personal).draw(scenarios.keys(len(everyone)), 0)

    assert (drawn(one) - one.model.initial).abs().max() > 5 * method.lr
    torch.testing.assert_close(drawn(other), drawn(one), rtol=0, atol=1e-6)


def test_a_method_differs_from_its_neighbours(monkeypatch):
    # The identities above would be worth little if all methods were alike on these data.
    monkeypatch.setattr(optim, "EPS", NONE)

    def ends(method):
        model = scenarios.model_of(scenarios.smooth(), personal=method.personal)
        return [
            torch.cat([p.flatten() for _, p in sorted(model.layout.unflatten(w).items())]) for w in path(method)[-1]
        ]

    found = [torch.stack(ends(method)) for method in (FedPer(), LGFedAvg(), FedAvg(), LocalOnly(), FedRep())]
    for i, first in enumerate(found):
        for second in found[:i]:
            assert (first - second).abs().max() > 5e-5  # 50 times the tolerance above


# --- the limit that the paper takes -----------------------------------------------------------------------------------


def distance(sigma, steps=150):
    """How far the mean of q gets from its prior in a round with the KL term (T = 1), and the first gradient's length."""
    method = BPFed(sigma=sigma, prior_step=False, keep_adam=False)
    model = scenarios.model_of(scenarios.smooth())
    initial = method.init(model)
    batch = batches(0)[0]
    batch = batch._replace(x=batch.x.float(), mask=batch.mask.float(), size=batch.size.float())
    hparams = scenarios.hparams(method, CLIENTS)
    local = method.begin(model, rows(initial.shared, CLIENTS), rows(initial.personal, CLIENTS), hparams)
    for t in range(steps):  # steps that fade, so that Adam comes to rest
        rate = {"lr": torch.full((CLIENTS,), sigma * 0.3 * (1 - t / steps) ** 3)}
        local, _ = method.step(model, local, batch, hparams | rate, "all")
    _, gradient = model.gradient(model.initial.expand(CLIENTS, -1), batch.x, batch.y, batch.mask, batch.key)
    return (local.q.mean - model.initial).norm(dim=-1), (gradient * batch.scale[:, None]).norm(dim=-1)


def test_sigma_to_zero_with_the_kl_term_pins_every_weight_to_its_prior():
    # The minimiser of data + (μ − μ_π)²/2σ² is at −σ² times the data's gradient for small σ: over a hundred times nearer
    # to the prior for a σ ten times smaller. So σ → 0 alone gives no training at all, and the Dirac case needs T = 0.
    moved = []
    for sigma in (0.03, 0.01, 0.003):
        far, gradient = distance(sigma)
        torch.testing.assert_close(far, sigma**2 * gradient, rtol=0.1, atol=0)
        moved.append(far.max().item())
    assert moved[0] > 8 * moved[1] > 64 * moved[2] > 0
    assert moved[2] < 1e-3
