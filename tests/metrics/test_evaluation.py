"""An evaluation as it is kept, and where it is computed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from predictions import METRICS, MORE, made

from bpfed.inference.calibration import temperatures
from bpfed.metrics import Evaluation, evaluate
from bpfed.metrics.evaluation import _summed_in_order, summed


def strict_json(value: object) -> object:
    return json.loads(json.dumps(value, allow_nan=False))


def test_records_are_json() -> None:
    result: Evaluation = evaluate(*made(2, [6, 0, 3], 3))
    assert strict_json(result.record()) == result.record()
    detail = result.detail(7, ["a", "b", "c"], [10, 20, 30])
    assert strict_json(detail) == detail
    assert detail["round"] == 7
    assert detail["bins"] == 10
    assert detail["ece_floor"] == result.ece_floor.pooled
    first, empty, _ = detail["clients"]
    assert list(first) == ["name", "train", "test", *METRICS, "ece_floor", *MORE]
    assert (first["name"], first["train"], first["test"]) == ("a", 10, 6)
    assert first["nll"] == result["nll"].clients[0]
    assert empty == {"name": "b", "train": 20, "test": 0} | dict.fromkeys((*METRICS, "ece_floor", *MORE))


def test_a_name_for_every_client() -> None:
    with pytest.raises(ValueError, match="zip"):
        evaluate(*made(2, [6, 3], 3)).clients(["only one"], [3])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_agrees_and_waits_only_once() -> None:
    probs, y, offsets = made(9, [50, 0, 7, 300], 10)
    gpu = [t.cuda() for t in (probs, y, offsets)]
    evaluate(*gpu)  # the first call may load kernels
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as seen:
            there = evaluate(*gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(seen) == 1
    here = evaluate(probs, y, offsets)
    for metric in METRICS:
        np.testing.assert_allclose(there[metric].clients, here[metric].clients, atol=1e-6)


def test_sums_in_a_fixed_order_are_sums() -> None:
    torch.manual_seed(0)
    for examples, size in ((0, 3), (1, 1), (257, 40), (1000, 7)):
        index = torch.randint(0, 2 * size, (examples,)) // 2 * 2 % size  # some are nobody's
        columns = torch.randn(3, examples, dtype=torch.float64)
        torch.testing.assert_close(_summed_in_order(columns, index, size), summed(list(columns), index, size))
    columns[0, index == 2] = torch.nan
    assert _summed_in_order(columns, index, size)[0].isnan().tolist() == [i == 2 for i in range(size)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_repeats_itself() -> None:
    probs, y, offsets = (t.cuda() for t in made(9, [5000, 0, 70, 300], 2))
    first = evaluate(probs, y, offsets).detail(1, list("abcd"), [1] * 4)
    degrees = temperatures(probs, y, offsets)
    for _ in range(20):
        assert evaluate(probs, y, offsets).detail(1, list("abcd"), [1] * 4) == first
        assert torch.equal(temperatures(probs, y, offsets), degrees)
