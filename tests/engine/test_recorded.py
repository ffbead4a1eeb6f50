"""Steps recorded as a CUDA graph do what steps taken one by one do."""

import gc

import pytest
import scenarios
import torch

from bpfed import fit
from bpfed.engine.compiled_step import Recorded, uncollected

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@CUDA
@pytest.mark.parametrize("together", [1, 4, 10])
def test_a_run_on_a_gpu_is_the_run_on_a_cpu(monkeypatch, together):
    """With launches of 1 step, of 4 with some left over, and of 10, which is more than a round may have."""
    monkeypatch.setattr(Recorded, "TOGETHER", together)
    settings = {"rounds": 2, "epochs": 5, "batch": 4, "eval_draws": 4, "tf32": False, "compile": "off"}
    runs = [fit("bpfed-recipe", scenarios.classification(), device=device, **settings) for device in ("cpu", "cuda")]
    one, other = (run.federation.shared for run in runs)
    torch.testing.assert_close(other.mean.cpu(), one.mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(other.sigma.cpu(), one.sigma, rtol=1e-3, atol=1e-4)
    assert abs(runs[0].history[-1]["nll"]["pooled"] - runs[1].history[-1]["nll"]["pooled"]) < 1e-3


@CUDA
def test_the_graph_of_an_earlier_run_is_not_freed_while_one_is_recorded(untraced):
    """Steps that are called as they are make garbage while they are recorded, and the collector would come."""
    settings = {"rounds": 1, "epochs": 3, "batch": 4, "eval_draws": 2, "device": "cuda", "compile": "off"}
    before = gc.get_threshold()
    try:
        for _ in range(3):
            graph, held = torch.cuda.CUDAGraph(), torch.zeros(3, device="cuda")
            with torch.cuda.graph(graph):
                held += 1
            cycle = [graph]
            cycle.append(cycle)  # only the collector frees it
            del graph, cycle
            gc.set_threshold(50, 1, 1)
            run = fit("fedavg", scenarios.classification(), **settings)
            gc.set_threshold(*before)
            assert run.federation.round == 1
    finally:
        gc.set_threshold(*before)


def test_the_collector_comes_back():
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
