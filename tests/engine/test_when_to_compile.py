"""Steps are traced and compiled where there are enough of them, and tracing changes no bit."""

from __future__ import annotations

import pytest
import scenarios
import torch
from torch.utils._pytree import tree_leaves

from bpfed.config.settings import Settings
from bpfed.engine import compiled_step
from bpfed.engine.compiled_step import (
    COMPILE_FROM,
    LARGE,
    TRACE_FROM,
    TRACE_LARGE_FROM,
    Stepper,
    worth_compiling,
    worth_tracing,
)
from bpfed.engine.federation import Federation
from bpfed.engine.simulator import Simulator
from bpfed.methods.base import Method
from bpfed.methods.bpfed import BPFed
from bpfed.methods.fedavg import FedAvg


def test_it_is_decided_by_the_number_of_steps_of_each_shape() -> None:
    assert not worth_tracing(TRACE_FROM - 1)
    assert worth_tracing(TRACE_FROM)
    assert not worth_tracing(TRACE_LARGE_FROM - 1, LARGE)
    assert worth_tracing(TRACE_LARGE_FROM, LARGE)  # only traced steps run in blocks
    assert not worth_tracing(TRACE_LARGE_FROM, LARGE - 1)
    assert not worth_compiling(COMPILE_FROM - 1, 1)
    assert worth_compiling(COMPILE_FROM, 1)
    assert not worth_compiling(COMPILE_FROM, 2)
    assert worth_compiling(2 * COMPILE_FROM, 2)


@pytest.mark.parametrize(
    ("rounds", "sizes", "how", "compiled"),
    [
        (COMPILE_FROM // 4, (10, 10), "auto", True),  # 2 batches, 2 epochs
        (COMPILE_FROM // 4 - 1, (10, 10), "auto", False),
        (COMPILE_FROM // 4, (20, 5), "auto", False),  # two shapes
        (999_999, (10, 10), "off", False),
        (1, (10, 10), "on", True),
    ],
)
def test_auto_counts_the_steps_of_the_run(rounds: int, sizes: tuple[int, ...], how: str, compiled: bool) -> None:
    settings = Settings(rounds=rounds, epochs=2, batch=5, compile=how, device="cpu")
    federation = Federation.start(FedAvg(), scenarios.classification(sizes=sizes), settings)
    assert Simulator([federation]).train.compiled is compiled


@pytest.mark.parametrize("method", [BPFed(draws=2), FedAvg()], ids=lambda m: m.name)
def test_a_step_is_traced_when_enough_are_taken_and_stays_the_same(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced, trace = [], Stepper.trace

    def watched(self: Stepper, function: object, *example: object) -> object:
        traced.append(self.phase)
        return trace(self, function, *example)  # type: ignore[arg-type]

    monkeypatch.setattr(Stepper, "trace", watched)
    plain = scenarios.run(method, rounds=3)
    assert not traced
    monkeypatch.setattr(compiled_step, "TRACE_FROM", 1)
    other = scenarios.run(method, rounds=3)
    assert traced
    for one, two in zip(tree_leaves(plain.shared), tree_leaves(other.shared), strict=True):
        assert torch.equal(one, two)
