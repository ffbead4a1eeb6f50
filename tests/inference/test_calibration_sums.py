"""A temperature from what clients tell of their examples, against the one from all examples in one place."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bpfed.inference.calibration import (
    PLACES,
    HeldOutSlopes,
    betas,
    common_scale_factor,
    common_temperature,
    fault,
    fault_of_numbers,
    fitted,
    slopes,
    slopes_of_numbers,
)


def predicted(seed, examples, classes, sharpness, wrong):
    """Probabilities, and labels that are the likeliest but for a part of them."""
    g = torch.Generator().manual_seed(seed)
    probs = (sharpness * torch.randn(examples, classes, generator=g)).softmax(1)
    at_random = torch.rand(examples, generator=g) < wrong
    return probs, torch.where(at_random, torch.randint(classes, (examples,), generator=g), probs.argmax(1))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 400), st.integers(2, 12), st.floats(0.05, 30), st.floats(0, 1))
@example(0, 400, 2, 0.05, 0.0)  # right and hardly sure of it
@example(0, 400, 10, 30.0, 1.0)  # certain and mostly wrong
def test_the_temperature_is_that_of_all_examples_together(seed, examples, classes, sharpness, wrong):
    probs, y = predicted(seed, examples, classes, sharpness, wrong)
    cut = examples // 3
    told = [slopes(probs[part], y[part]) for part in (slice(cut), slice(cut, None))]
    assert [fault(HeldOutSlopes(n, part)) for part, n in zip(told, (cut, examples - cut), strict=True)] == ["", ""]
    wanted = common_temperature(probs, y)
    assert fitted(told[0] + told[1]) == pytest.approx(min(max(wanted, 0.01), 100.0), rel=1e-4)


def test_nothing_told_leaves_predictions_as_they_are():
    assert fitted(slopes(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))) == pytest.approx(1.0, rel=1e-9)


def test_a_temperature_beyond_the_places_is_that_of_their_end():
    surer = torch.tensor([[0.501, 0.499]]).repeat(10**4, 1)
    assert common_temperature(surer, torch.zeros(10**4, dtype=torch.int64)) < 0.01
    assert fitted(slopes(surer, torch.zeros(10**4, dtype=torch.int64))) == 0.01
    wrong = torch.tensor([[1.0, 0.0]]).repeat(10**4, 1)
    assert common_temperature(wrong, torch.ones(10**4, dtype=torch.int64)) > 100
    assert fitted(slopes(wrong, torch.ones(10**4, dtype=torch.int64))) == 100.0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 400), st.floats(1e-3, 30))
def test_the_calibration_temperature_of_numbers_is_that_of_all_examples_together(seed, examples, scale):
    squares = (scale * torch.randn(examples, generator=torch.Generator().manual_seed(seed))).square().clamp(max=100.0)
    cut = examples // 3
    told = [slopes_of_numbers(squares[part].double()) for part in (slice(cut), slice(cut, None))]
    assert [fault_of_numbers(HeldOutSlopes(n, s)) for s, n in zip(told, (cut, examples - cut), strict=True)] == ["", ""]
    wanted = common_scale_factor(squares.double())
    assert fitted(told[0] + told[1]) == pytest.approx(min(max(wanted, 0.01), 100.0), rel=1e-4)


def test_what_cannot_be_slopes_of_numbers_is_told_apart():
    told = slopes_of_numbers(torch.rand(50, dtype=torch.float64))
    assert fault_of_numbers(HeldOutSlopes(50, told)) == ""
    far = betas() * 1e30 - 50 / betas()
    spoilt = told.clone().index_fill_(0, torch.tensor([3]), math.nan)
    for wrong, words in (
        (told[:-1], "not 257 numbers"),
        (told.flip(0), "not those"),
        (far, "not those"),
        (spoilt, "not those"),
    ):
        assert words in fault_of_numbers(HeldOutSlopes(50, wrong))
    assert "not those of 49 examples" in fault_of_numbers(HeldOutSlopes(49, told))
    assert "not those of 50 examples" in fault_of_numbers(HeldOutSlopes(50, told - 1e4 * betas()))


def test_what_cannot_be_slopes_is_told_apart():
    probs, y = predicted(0, 50, 4, 2.0, 0.3)
    told = slopes(probs, y)
    assert (len(told), len(betas())) == (PLACES, PLACES)
    assert fault(HeldOutSlopes(50, told)) == ""
    for spoilt, words in (
        (told[:-1], "not 257 numbers"),
        (told.flip(0), "do not rise"),
        (told * 100.0, "not those of 50 examples"),
        (torch.full_like(told, math.nan), "not those of 50 examples"),
        (told.clone().index_fill_(0, torch.tensor([3]), math.inf), "not those of 50 examples"),
    ):
        assert words in fault(HeldOutSlopes(50, spoilt))
    assert "not those of 0 examples" in fault(HeldOutSlopes(0, told))
