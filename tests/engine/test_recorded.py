"""Steps recorded as a CUDA graph do what steps taken one by one do."""

import pytest
import scenarios
import torch

from bpfed import fit
from bpfed.engine.stepper import Recorded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
