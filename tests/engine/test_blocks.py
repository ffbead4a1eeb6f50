"""Element-wise operations in blocks give what they give at once."""

from __future__ import annotations

from typing import Any

import pytest
import scenarios
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from bpfed.engine import compiled_step
from bpfed.engine.compiled_step import Region, compiled_regions, in_blocks
from bpfed.methods import BPFed, FedAvg, FedPer, Recipe
from bpfed.methods.base import Method


@pytest.mark.parametrize(
    "method",
    [
        BPFed(draws=1),
        BPFed(draws=2, order="alternating"),
        BPFed(optimiser="ivon"),
        BPFed(estimator="antithetic", prior_step=False),
        Recipe(),
        FedPer(),
        FedAvg(optimiser="sgd", decay=0.1),
    ],
    ids=lambda m: f"{m.name}-{getattr(m, 'optimiser', '')}-{getattr(m, 'order', '')}",
)
def test_a_run_in_blocks_is_the_same_run(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scenarios.run(method, rounds=2, compile="off")
    regions: list[Region] = []

    def small_blocks(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
        made = in_blocks(graph, large=20, block=7)
        regions.extend(m for m in made.children() if isinstance(m, Region))
        return made

    monkeypatch.setattr(compiled_step, "in_blocks", small_blocks)
    monkeypatch.setattr(compiled_step, "TRACE_FROM", 0)
    blocks = scenarios.run(method, rounds=2, compile="off")
    assert len(regions) >= 1
    for one, other in zip(tree_leaves(whole.shared), tree_leaves(blocks.shared), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    everyone = torch.arange(len(whole.data))
    for one, other in zip(tree_leaves(whole.personal(everyone)), tree_leaves(blocks.personal(everyone)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [BPFed(draws=2), FedPer()], ids=lambda m: m.name)
def test_a_run_with_compiled_regions_is_the_same_run(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scenarios.run(method, rounds=2, compile="off")
    compiled = []

    def small(graph: torch.fx.GraphModule, *how: Any) -> torch.fx.GraphModule:
        if how:  # the call that `compiled_regions` makes
            return in_blocks(graph, *how)

        def compiler(body: torch.fx.GraphModule) -> torch.fx.GraphModule:
            compiled.append(len(body.graph.nodes))
            return body

        made = compiled_regions(graph, large=20, most=1.0, compiler=compiler)
        assert made is not None
        return made

    monkeypatch.setattr(compiled_step, "in_blocks", small)
    monkeypatch.setattr(compiled_step, "TRACE_FROM", 0)
    parts = scenarios.run(method, rounds=2, compile="off")
    assert compiled
    for one, other in zip(tree_leaves(whole.shared), tree_leaves(parts.shared), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_step_that_is_mostly_something_else_is_not_taken_apart() -> None:
    def step(x: torch.Tensor, images: torch.Tensor) -> None:
        images.copy_(torch.relu(images) * 2.0 + 1.0)
        x.copy_(x * 3.0)

    x, images = torch.randn(1, 100), torch.randn(40, 40)
    assert compiled_regions(make_fx(step)(x.clone(), images.clone()), large=50) is None
    assert compiled_regions(make_fx(step)(x.clone(), images[:1, :2].clone()), large=50) is not None


def test_operations_become_one_region_that_ends_in_the_argument() -> None:
    def step(x: torch.Tensor, rate: torch.Tensor) -> None:
        x.copy_(torch.sqrt(x * x + 1.0) - rate * torch.arange(100))

    x, rate = torch.randn(1, 100), torch.tensor([[0.5]])
    wanted = x.clone()
    step(wanted, rate)
    made = in_blocks(make_fx(step)(x.clone(), rate), large=50, block=30)
    regions = [m for m in made.children() if isinstance(m, Region)]
    assert len(regions) == 1
    assert not regions[0].made
    made(x, rate)
    assert torch.equal(x, wanted)


def test_what_is_read_shifted_is_not_written_in_blocks() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        shifted = x[1:] * 2.0  # of another length
        y.copy_(shifted)
        x.copy_(x * 3.0)

    first = (torch.randn(101), torch.zeros(100))
    wanted, found = ([t.clone() for t in first] for _ in range(2))
    step(*wanted)
    in_blocks(make_fx(step)(*(t.clone() for t in first)), large=50, block=30)(*found)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
