"""Temperatures against an independent optimum; conformal sets by simulation; examples kept from training."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import scenarios
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax
from scipy.stats import norm

import bpfed
from bpfed._util.errors import UserError
from bpfed.cli import terminal
from bpfed.data.federated import Examples, FederatedData
from bpfed.engine.evaluate import calibrate, evaluate_clients
from bpfed.inference.calibration import (
    CELLS,
    POOLED,
    PRIOR,
    Calibration,
    Conformal,
    Ranks,
    Scales,
    by_client,
    counted,
    ends,
    fewest,
    pooled_bounds,
    temperatures,
    threshold,
)
from bpfed.inference.predictive import Classified, Regressed, tempered
from bpfed.methods import BPFed, FedAvg
from bpfed.metrics import SURE
from bpfed.report import RunRecord
from bpfed.runs.run import Run


def offsets_of(*sizes):
    return torch.tensor([0, *sizes]).cumsum(0)


def sorted_scores(scores, offsets):
    return scores[by_client(scores, offsets)]


# --- temperature ------------------------------------------------------------------------------------------------------


def objective(log_beta, probs, y):
    """Loss as it is documented, written apart."""
    beta = math.exp(log_beta)
    logp = log_softmax(beta * np.log(np.maximum(probs, 1e-12)), axis=1)
    return -logp[np.arange(len(y)), y].sum() + PRIOR * (beta - 1 - log_beta)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**31), st.lists(st.integers(0, 60), min_size=1, max_size=5), st.integers(2, 6), st.floats(0.1, 12)
)
def test_temperatures_are_the_minimum_of_each_clients_loss(seed, sizes, classes, sharpness):
    g = torch.Generator().manual_seed(seed)
    probs = (sharpness * torch.randn(sum(sizes), classes, generator=g)).softmax(1).double()
    y = torch.randint(classes, (sum(sizes),), generator=g)
    offsets = offsets_of(*sizes)
    found = temperatures(probs, y, offsets)
    for i, n in enumerate(sizes):
        own = slice(int(offsets[i]), int(offsets[i + 1]))
        p, labels = probs[own].numpy(), y[own].numpy()
        best = minimize_scalar(objective, bounds=(-9, 9), args=(p, labels), method="bounded", options={"xatol": 1e-10})
        here = objective(-math.log(found[i]), p, labels)
        assert here <= best.fun + 1e-7 * max(1.0, abs(best.fun))
        if n == 0:
            assert found[i] == 1.0


def test_the_temperature_that_spoilt_the_logits_is_found():
    g = scenarios.generator()
    logits = 2.0 * torch.randn(2, 5_000, 5, generator=g)
    y = torch.distributions.Categorical(logits=logits).sample().flatten()
    spoilt = torch.stack([logits[0] * 3.0, logits[1] / 2.0]).flatten(0, 1).softmax(1)
    found = temperatures(spoilt, y, offsets_of(5_000, 5_000))
    assert found.tolist() == pytest.approx([3.0, 0.5], rel=0.1)
    cooled = tempered(spoilt, found.repeat_interleave(5_000))
    torch.testing.assert_close(cooled, logits.flatten(0, 1).softmax(1), rtol=0, atol=0.05)


@pytest.mark.parametrize("right", [True, False])
def test_a_handful_of_examples_cannot_send_a_temperature_to_an_end(right):
    probs = torch.tensor([[0.999999, 0.000001]] * 4)
    y = torch.full((4,), 0 if right else 1)
    (found,) = temperatures(probs, y, offsets_of(4)).tolist()
    assert (0.7 < found <= 1.0) if right else (1.5 < found < 20)
    certain = torch.tensor([[1.0, 0.0]])
    assert 1.0 < temperatures(certain, torch.tensor([1]), offsets_of(1)).item() < 20


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.7, 5), st.floats(0.7, 5))
def test_tempering_keeps_the_order_sums_to_one_and_composes(seed, a, b):
    probs = (1.5 * torch.randn(20, 4, generator=torch.Generator().manual_seed(seed))).softmax(1).double()
    both = tempered(tempered(probs, a), b)
    torch.testing.assert_close(both, tempered(probs, a * b), rtol=0, atol=1e-6)
    torch.testing.assert_close(both.sum(1), torch.ones(20, dtype=torch.float64))
    assert torch.equal(tempered(probs, a).argsort(1), probs.argsort(1))
    assert torch.equal(tempered(probs, 1.0), probs)


def test_a_tempered_prediction_keeps_the_share_of_each_uncertainty():
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.3, 0.3]])
    entropy = torch.special.entr(probs).sum(-1)
    found = Classified(probs, entropy, 0.25 * entropy).at(2.0)
    torch.testing.assert_close(found.probs, probs.sqrt() / probs.sqrt().sum(1, keepdim=True))
    torch.testing.assert_close(found.aleatoric / found.entropy, torch.tensor([0.25, 0.25]))
    assert torch.equal(found.raw, probs)


# --- conformal sets ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 5, 8, 9, 10, 19, 50])
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_coverage_is_what_theory_says_for_exchangeable_scores(n, level):
    g = scenarios.generator(n)
    trials = 4000
    scores = torch.rand(trials, n + 1, generator=g)
    held = sorted_scores(scores[:, :n].flatten(), torch.arange(trials + 1) * n)
    bounds = Calibration("sample", 1, torch.ones(trials), held, torch.arange(trials + 1) * n).thresholds(level)
    coverage = (scores[:, n] <= bounds).double().mean().item()
    rank = math.ceil(round((n + 1) * level, 9))
    exact = 1.0 if rank > n else rank / (n + 1)
    assert exact >= level
    assert coverage == pytest.approx(exact, abs=4 * math.sqrt(0.25 / trials))
    for i in range(5):
        assert threshold(held[i * n : (i + 1) * n], level) == pytest.approx(bounds[i].item())


def test_too_few_examples_give_every_label_and_infinite_intervals():
    probs = torch.tensor([[0.98, 0.01, 0.01]])
    few, enough = torch.zeros(8), torch.zeros(9)
    entropy = torch.zeros(1)
    assert Classified(probs, entropy, entropy, scores=Conformal(few)).prediction_set(0.9).all()
    assert (
        not Classified(probs, entropy, entropy, scores=Conformal(enough)).prediction_set(0.9).any()
    )  # none is as typical as those
    assert Classified(probs, entropy, entropy, scores=Conformal(torch.zeros(0))).prediction_set(0.5).all()
    low, high = Regressed(entropy, entropy, entropy + 1, scores=Conformal(few)).interval(0.9)
    assert (low == -math.inf).all()
    assert (high == math.inf).all()


def test_sets_are_those_of_untempered_probabilities():
    probs = torch.tensor([[0.6, 0.3, 0.1]])
    entropy = torch.special.entr(probs).sum(-1)
    found = Classified(probs, entropy, entropy, scores=Conformal(torch.linspace(0.05, 0.75, 19)))
    assert found.prediction_set(0.9).tolist() == [[True, True, False]]
    assert torch.equal(found.at(5.0).prediction_set(0.9), found.prediction_set(0.9))


def test_intervals_are_scaled_by_the_predicted_deviation():
    found = Regressed(
        torch.tensor([1.0, 2.0]), torch.zeros(2), torch.tensor([1.0, 4.0]), scores=Conformal(torch.full((20,), 1.5))
    )
    low, high = found.interval(0.9)
    assert low.tolist() == [-0.5, -1.0]
    assert high.tolist() == [2.5, 5.0]


@pytest.mark.parametrize("level", [0.0, 1.0, 90, -0.1])
def test_a_level_that_cannot_be_is_refused(level):
    with pytest.raises(UserError, match="above 0 and below 1"):
        threshold(torch.zeros(3), level)


def test_without_calibration_examples_the_user_is_told_how_to_get_them():
    half = torch.full((1, 2), 0.5)
    with pytest.raises(UserError, match=r"calibration=0\.2"):
        Classified(half, half[:, 0], half[:, 0]).prediction_set()
    with pytest.raises(UserError, match=r"calibration=0\.2"):
        Regressed(half[0], half[0], half[0]).interval()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.floats(0, 1, width=32), max_size=12), min_size=1, max_size=5), st.floats(0.01, 0.99))
def test_all_thresholds_at_once_are_the_single_ones_and_a_record_gives_them_back(scores, level):
    flat = torch.tensor([s for own in scores for s in own])
    offsets = offsets_of(*map(len, scores))
    made = Calibration("sample", 20, torch.ones(len(scores)).double(), sorted_scores(flat, offsets), offsets)
    again = Calibration.from_record(json.loads(json.dumps(made.record())))
    for i, own in enumerate(scores):
        expected = threshold(torch.tensor(sorted(own)), level)
        assert made.thresholds(level)[i].item() == again.thresholds(level)[i].item() == pytest.approx(expected)
        assert again.client(i)[1].scores.tolist() == sorted(torch.tensor(own).tolist())
    assert (again.how, again.draws) == ("sample", 20)


# --- examples kept from training --------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.floats(0.01, 0.95), st.integers(0, 1000))
def test_a_part_of_each_clients_examples_is_moved_of_each_class_alike(sizes, fraction, seed):
    data = scenarios.classification(tuple(sizes), seed=1)
    held = data.hold_out(fraction, seed)
    for i, n in enumerate(sizes):
        x, y = data.train.client(i)
        parts = [held.train.client(i), held.calibration.client(i)]
        rows = [tuple(r.tolist()) for part, _ in parts for r in part]
        assert sorted(rows) == sorted(tuple(r.tolist()) for r in x)
        count = min(n - 1, max(1, round(n * fraction))) if n > 1 else 0
        assert abs(len(parts[1][1]) - count) <= (abs(n * fraction % 1 - 0.5) < 1e-4)
        share = len(parts[1][1]) / n
        for c in range(3):
            kept, of = int((parts[1][1] == c).sum()), int((y == c).sum())
            assert math.floor(of * share - 1e-9) <= kept <= math.ceil(of * share + 1e-9)
    assert torch.equal(held.test.x, data.test.x)


def test_who_is_moved_depends_on_seed_and_name_alone():
    data = scenarios.classification((30, 30, 30), names=("a", "b", "c"))
    twice = [data.hold_out(0.3, 0).calibration.x, data.hold_out(0.3, 0).calibration.x]
    assert torch.equal(*twice)
    assert not torch.equal(twice[0], data.hold_out(0.3, 1).calibration.x)
    order = torch.tensor([2, 0])
    fewer = bpfed.data.FederatedData(
        "fewer", ("c", "a"), data.train.select(order), data.test.select(order), "classification", 3
    )
    torch.testing.assert_close(
        fewer.hold_out(0.3, 0).calibration.client(1)[0], data.hold_out(0.3, 0).calibration.client(0)[0]
    )


def test_every_example_has_the_same_chance():
    data = scenarios.classification((7, 5))
    taken = torch.zeros(12)
    for seed in range(600):
        moved = data.hold_out(0.4, seed).calibration.x
        taken += (data.train.x[:, None] == moved).all(-1).any(1).float()
    expected = torch.tensor([3 / 7] * 7 + [2 / 5] * 5)
    assert (taken / 600 - expected).abs().max() < 0.08


def test_data_with_calibration_examples_is_not_split_again():
    data = scenarios.classification().hold_out(0.3, 0)
    with pytest.raises(UserError, match="already"):
        data.hold_out(0.3, 0)
    with pytest.raises(UserError, match="already"):
        scenarios.start(FedAvg(), data, calibration=0.2)


# --- a run ------------------------------------------------------------------------------------------------------------


def fitted(data=None, method=None, **changes):
    data = data or scenarios.classification((40, 40, 60), test=40)
    chosen = {"rounds": 3, "epochs": 3, "eval_draws": 8, "compile": "off", "progress": False} | changes
    return bpfed.fit(method or BPFed(), data, **chosen)


@pytest.fixture(scope="module")
def run():
    return fitted(calibration=0.3, scaling="client", sets="client")


def test_a_calibrated_run_predicts_with_sets_and_temperatures(run):
    made = calibrate(run.federation)
    assert made.offsets.tolist() == [0, 12, 24, 42]
    for i, client in enumerate(run.clients()):
        x, y = run.data.calibration.client(i)
        found = client.predict(x)
        temperature, scores = made.client(i)
        raw = 1.0 - found.raw.gather(1, y[:, None]).squeeze(1)
        torch.testing.assert_close(raw.sort().values, scores.scores, rtol=0, atol=1e-6)
        torch.testing.assert_close(found.probs, tempered(found.raw, temperature))
        assert temperature != 1.0
        assert torch.equal(found.prediction_set(0.9), 1.0 - found.raw <= found.scores.bound(0.9))
    record = run.history[-1]
    assert 0.0 < record["coverage"]["pooled"] <= 1.0
    row = run.detail()["clients"][0]
    assert row["coverage"] is not None
    assert row["set_size"] > 0.0


def test_evaluation_uses_temperatures_and_counts_its_sets(run):
    found, clients = evaluate_clients(run.federation)
    for place, i in enumerate(clients.tolist()):
        x, y = run.data.test.client(i)
        prediction = run.clients()[i].predict(x)
        nll = -prediction.probs.gather(1, y[:, None]).log().mean().item()
        assert found["nll"].clients[place] == pytest.approx(nll, rel=1e-4)
        sets = prediction.prediction_set(SURE)
        assert found["coverage"].clients[place] == pytest.approx(sets.gather(1, y[:, None]).float().mean().item())
        assert found["set_size"].clients[place] == pytest.approx(sets.sum(1).float().mean().item())


@pytest.mark.parametrize("how", ["sample", "single-pass"])
def test_sets_of_a_run_hold_the_truth_as_often_as_they_should(how):
    data = scenarios.classification((60,) * 8, test=300, seed=3)
    run = fitted(data, calibration=0.5, sets="client")
    inside = []
    for i, client in enumerate(run.clients()):
        x, y = run.data.test.client(i)
        inside.append(client.predict(x, how=how).prediction_set(0.8).gather(1, y[:, None]))
    # 30 examples each: coverage 25/31 on average, with a standard deviation of 7 % for a client.
    assert torch.cat(inside).float().mean().item() == pytest.approx(25 / 31, abs=0.075)


def test_a_regression_has_intervals():
    run = fitted(scenarios.regression((60, 60, 60), test=100), calibration=0.4)
    inside = []
    for i, client in enumerate(run.clients()):
        x, y = run.data.test.client(i)
        low, high = client.predict(x).interval(0.8)
        inside.append((low <= y) & (y <= high))
    assert torch.cat(inside).float().mean().item() == pytest.approx(0.8, abs=0.12)
    assert run.history[-1]["coverage"]["pooled"] > 0.75


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.95, 0.99])
def test_the_fewest_examples_are_those_with_which_a_threshold_becomes_finite(level):
    least = fewest(level)
    assert math.isinf(threshold(torch.zeros(least - 1), level))
    assert threshold(torch.zeros(least), level) == 0.0
    with pytest.raises(UserError, match="below 1"):
        fewest(1.0)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_clients_with_too_few_calibration_examples_count_in_no_coverage(task, tmp_path, capsys):
    sizes, said = (40, 8, 60, 9), []
    data = getattr(scenarios, task)(sizes, test=40)
    run = fitted(data, calibration=0.3, sets="client", say=said.append, out=tmp_path / "run")
    kind, size = ("sets", "set_size") if task == "classification" else ("intervals", "interval_width")
    start = f"2 of 4 clients have fewer than the 9 calibration examples that 90 % {kind} need"
    assert [sentence for sentence in said if sentence.startswith(start)]
    rows = run.detail()["clients"]
    assert [row["calibration"] for row in rows] == [12, 2, 18, 3]
    for metric in ("coverage", size):
        values = [row[metric] for row in rows]
        assert values[1] is values[3] is None
        found = run.history[-1][metric]
        assert found["pooled"] == pytest.approx((values[0] + values[2]) / 2)
        assert found["mean"] == pytest.approx(found["pooled"])
        assert found["worst"] == pytest.approx((min if metric == "coverage" else max)(values[0], values[2]))
    if task == "regression":
        low, high = run.clients()[0].predict(run.data.test.client(0)[0]).interval(SURE)
        assert rows[0][size] == pytest.approx((high - low).mean().item(), rel=1e-4)
    sentence = f"{start}; their {kind} hold everything and are left out of the coverage."
    terminal.result(RunRecord.read(tmp_path / "run"), tmp_path / "run" / "report.html")
    assert sentence in " ".join(capsys.readouterr().out.split())
    assert sentence in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_where_all_clients_have_too_few_there_is_no_coverage(task, capsys, tmp_path):
    run = fitted(getattr(scenarios, task)((12, 8, 20), test=6), calibration=0.2, sets="client")
    kind, size = ("sets", "set_size") if task == "classification" else ("intervals", "interval_width")
    for metric in ("coverage", size):
        assert run.history[-1][metric] == {"pooled": None, "mean": None, "worst": None}
    sentence = (
        f"All 3 clients have fewer than the 9 calibration examples that 90 % {kind} need; their {kind} hold everything, "
        "so coverage says nothing."
    )
    report = run.report(tmp_path / "report.html")
    capsys.readouterr()
    terminal.result(run.record(), report)
    out = " ".join(capsys.readouterr().out.split())
    assert sentence in out
    assert f"Coverage of 90 % {kind} – – –" in out
    assert sentence in report.read_text()
    assert "calibrated 90 % intervals" not in report.read_text()
    assert "The 90 % prediction sets" not in report.read_text()


def test_enough_calibration_examples_need_no_word(run, tmp_path):
    assert run.record().uncovered == ""
    assert "calibration examples that" not in run.report(tmp_path / "report.html").read_text()
    said = []
    fitted(calibration=0.3, say=said.append)
    assert not [sentence for sentence in said if "calibration" in sentence]


def test_a_kept_calibration_serves_where_the_data_are_gone(run):
    x = run.data.test.x[:5]
    before = run.clients()[1].predict(x)
    bare = Run(replace(run.federation, data=replace(run.data, calibration=None)))
    bare.calibration = Calibration.from_record(calibrate(run.federation).record())
    after = bare.clients()[1].predict(x)
    torch.testing.assert_close(after.probs, before.probs)
    assert torch.equal(after.prediction_set(), before.prediction_set())
    other = bare.clients()[1].predict(x, draws=5)
    with pytest.raises(UserError, match="leave draws and how"):
        other.prediction_set()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"scaling": "client"}, "set calibration"), ({"calibration": 1.0}, "below 1"), ({"calibration": -0.1}, "below 1")],
)
def test_settings_that_cannot_be_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        fitted(**changes)


def test_numbers_have_no_temperature():
    with pytest.raises(UserError, match="targets here are numbers"):
        fitted(scenarios.regression(), calibration=0.2, scaling="client")
    with pytest.raises(UserError, match="calibration"):
        calibrate(scenarios.start(FedAvg(), scenarios.classification()))


# --- sets that borrow from all clients --------------------------------------------------------------------------------


def weighted_bound(own, everyone, level, grid):
    """The bound as it is documented, written apart: scores and weights, one by one."""
    borrowed = min(POOLED["sets"], len(everyone))
    scores = [*own, *everyone]
    weights = np.array([1.0] * len(own) + [borrowed / len(everyone)] * len(everyone))
    # An example of the client's own is in both, as one with the sum of both weights.
    mine = [1.0 + borrowed / len(everyone)] * len(own)
    single = np.array(mine + [borrowed / len(everyone)] * (len(everyone) - len(own)))
    effective = single.sum() ** 2 / (single**2).sum()
    wanted = level * (1.0 + 1.0 / effective)
    if wanted > 1.0:
        return math.inf
    cells = np.searchsorted(grid[:-1], scores)
    share = np.cumsum(np.bincount(cells, weights, minlength=CELLS)) / weights.sum()
    return grid[np.flatnonzero(share >= wanted - 1e-9)[0]]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 40), min_size=1, max_size=6), st.sampled_from([0.5, 0.8, 0.9]))
def test_pooled_bounds_are_weighted_quantiles(seed, sizes, level):
    scores = np.random.default_rng(seed).beta(0.6, 2.0, sum(sizes)).astype(np.float32)
    offsets, grid = offsets_of(*sizes), ends("sets").numpy()
    own = counted(torch.from_numpy(scores), None, offsets, 1, "sets")
    found = pooled_bounds(own, own.sum(0), level, "sets")[:, 0]
    for i in range(len(sizes)):
        mine = scores[int(offsets[i]) : int(offsets[i + 1])]
        wanted = weighted_bound(mine, scores, level, grid) if len(scores) else math.inf
        assert found[i].item() == pytest.approx(wanted)
        one = Conformal(torch.from_numpy(np.sort(mine)), None, own.sum(0), "sets")
        assert one.bounds(level).item() == found[i].item()
    if len(sizes) == 1 and sizes[0]:  # nobody to borrow from: the client's own bound, rounded up to the end of a cell
        exact = threshold(torch.from_numpy(scores).sort().values, level)
        assert found[0].item() == (math.inf if math.isinf(exact) else grid[np.searchsorted(grid[:-1], exact)])


def test_a_pool_by_class_survives_its_record():
    scores, classes = torch.tensor([0.1, 0.2, 0.7, 0.3]), torch.tensor([0, 1, 1, 0])
    pool = counted(scores, classes, torch.tensor([0, 4]), 2, "sets")[0]
    made = Calibration("sample", 20, torch.ones(2).double(), scores, offsets_of(3, 1), classes, pool)
    again = Calibration.from_record(json.loads(json.dumps(made.record())), 2)
    assert torch.equal(again.pool, pool)
    assert torch.equal(again.thresholds(0.5), made.thresholds(0.5))
    assert torch.equal(made.thresholds(0.5)[1], made.client(1)[1].bounds(0.5))
    for part, wrong in (("classes", [0, 1, 2, 0]), ("pool", {**made.record()["pool"], "cell": [CELLS] * 4})):
        with pytest.raises(ValueError, match="its"):
            Calibration.from_record({**made.record(), part: wrong}, 2)


def test_scales_are_shrunk_by_what_differs_between_clients():
    g = torch.Generator().manual_seed(0)
    sizes = [12] * 400
    offsets, owner = offsets_of(*sizes), torch.arange(400).repeat_interleave(12)
    noise = torch.randn(4800, generator=g, dtype=torch.float64).abs()
    alike = Scales.of(noise, offsets)
    assert alike.square == pytest.approx(1.0, abs=0.1)
    assert alike.strength > 50.0
    factor = torch.randn(400, generator=g, dtype=torch.float64).mul(0.5).exp()
    differing = Scales.of(noise * factor[owner], offsets)
    assert differing.strength < 10.0
    _, scale = differing.divided(noise * factor[owner], offsets)
    assert (scale.log() - factor.log()).std() < 0.8 * factor.log().std()
    assert Scales.of(noise[:0], offsets_of(0, 0)).square == 1.0
    assert Scales.of(noise[:12], offsets_of(12)).strength == 1e6  # of one client nothing can be said


def test_intervals_follow_the_spread_of_each_client():
    g = torch.Generator().manual_seed(1)
    offsets, owner = offsets_of(*[12] * 300), torch.arange(300).repeat_interleave(12)
    factor = torch.randn(300, generator=g, dtype=torch.float64).mul(0.4).exp()
    scores = torch.randn(3600, generator=g, dtype=torch.float64).abs() * factor[owner]
    scores = scores[by_client(scores, offsets)].float()
    new = torch.randn(300, 200, generator=g, dtype=torch.float64).abs() * factor[:, None]

    def made(scales):
        divided = scores if scales is None else scales.divided(scores, offsets)[0]
        pool = counted(divided, None, torch.tensor([0, 3600]), 1, "intervals")[0]
        return Calibration("sample", 20, torch.ones(300).double(), scores, offsets, None, pool, "intervals", scales)

    shared, own = made(None), made(Scales.of(scores, offsets))
    held = [(new <= c.thresholds(0.9)).double().mean(1) for c in (shared, own)]
    assert all(float(h.mean()) == pytest.approx(0.9, abs=0.015) for h in held)
    assert float(held[1].std()) < 0.8 * float(held[0].std())
    again = Calibration.from_record(json.loads(json.dumps(own.record())), 300)
    assert torch.equal(again.thresholds(0.9), own.thresholds(0.9))
    assert torch.equal(own.client(7)[1].bounds(0.9), own.thresholds(0.9)[7])
    assert own.unknown is not None
    assert bool(own.unknown.bounds(0.9).isfinite())
    with pytest.raises(ValueError, match="its scales"):
        Calibration.from_record({**own.record(), "scales": {"square": 0.0, "strength": 1.0}}, 300)


# --- ranks of scores among those that a client's model predicts ---------------------------------------------------------


def ranks_with(mean, deviation):
    """Of one client and one class."""
    return Ranks(torch.tensor([[mean]]).double(), torch.tensor([[deviation]]).double(), torch.ones(2, 1).double())


def ranked(ranks, scores):
    return ranks.ranked(scores, torch.zeros(len(scores), dtype=torch.long), offsets_of(len(scores)))


@settings(max_examples=40, deadline=None)
@given(st.floats(-9, 6), st.floats(0.3, 5), st.floats(-8, 8))
def test_a_rank_is_the_predicted_share_of_the_class_that_is_as_probable(mean, deviation, odds):
    score = float(torch.tensor(1.0 - expit(odds)).float())
    at = math.log((1.0 - score) / score)
    lowest, top = (max(-12.0, mean - 9 * deviation), min(12.0, mean + 9 * deviation))

    def mass(low, high):
        return quad(lambda t: norm.pdf(t, mean, deviation) * expit(t), low, high, limit=400)[0] if high > low else 0.0

    at = min(max(at, lowest), top)
    share = mass(at, top) / (mass(lowest, at) + mass(at, top))
    found = ranked(ranks_with(mean, deviation), torch.tensor([score]))
    assert found.item() == pytest.approx(0.99 * share + 0.01 * score, abs=0.012)


@settings(max_examples=40, deadline=None)
@given(
    st.floats(-12, 12),
    st.floats(0.25, 12),
    st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30),
    st.floats(0, 1),
)
def test_ranks_rise_with_scores_and_a_bound_of_ranks_is_one_of_scores(mean, deviation, scores, bound):
    ranks, scores = ranks_with(mean, deviation), torch.tensor(sorted(scores))
    found = ranked(ranks, scores)
    assert bool(((found > 0.0) & (found < 1.0)).all())
    assert bool((found.diff() >= 0.0).all())
    of_scores = ranks.scores(torch.tensor([[bound]]).double()).item()
    assert 0.0 <= of_scores <= 1.0
    inside, near = scores.double() <= of_scores, (found - bound).abs() < 1e-7
    assert bool((inside | (found > bound) | near).all())  # what has a rank below the bound is in the set
    unclear = near | (scores < 1e-5) | (scores > 1.0 - 1e-5)  # log odds are clamped there
    assert bool((~inside | (found <= bound) | unclear).all())
    assert ranks.scores(torch.tensor([[math.inf]]).double()).item() == math.inf


def test_clients_are_described_by_their_training_inputs_as_far_as_these_tell():
    g = torch.Generator().manual_seed(2)
    sizes = [30] * 300
    owner, shift = torch.arange(300).repeat_interleave(30), torch.randn(300, generator=g, dtype=torch.float64)

    def made(shifts, factor=1.0):
        odds = shifts[owner] + factor * torch.randn(9000, generator=g, dtype=torch.float64) - 2.0
        return Ranks.of(torch.stack([torch.sigmoid(-odds), torch.sigmoid(odds)], 1), offsets_of(*sizes))

    differing, alike = made(shift), made(0.0 * shift)
    assert (differing.mean[:, 1] + 2.0 - shift).std() < 0.25
    torch.testing.assert_close(differing.mean[:, 0], -differing.mean[:, 1], rtol=0, atol=0.002)
    assert alike.mean[:, 1].std() < 0.06  # 1 / √30 = 0.18 without shrinkage
    assert alike.deviation[:, 1].std() < 0.06
    assert alike.deviation[:, 1].mean() == pytest.approx(1.0, abs=0.03)
    spread = made(0.0 * shift, torch.where(owner < 150, 0.5, 2.0))
    assert spread.deviation[:150].mean() < 0.7
    assert spread.deviation[150:].mean() > 1.7
    # A client without training examples is like all; of one client there is nothing to shrink to but itself.
    few = Ranks.of(torch.tensor([[0.9, 0.1], [0.7, 0.3]]), offsets_of(2, 0))
    assert torch.equal(few.mean[1], few.common[0])
    assert torch.equal(few.take(slice(1, 2)).mean, few.unknown.mean)
    alone = Ranks.of(torch.full((5, 3), 1 / 3), offsets_of(5))
    assert torch.equal(alone.deviation, torch.full((1, 3), 0.25).double())  # all inputs alike
    assert torch.equal(alone.mean[0], alone.common[0])


def by_ranks(scores, classes, offsets, rows, ranks):
    order = by_client(scores, offsets)
    scores, classes = scores[order].float(), classes[order]
    found = ranks.ranked(scores, classes, offsets)
    pool = counted(found, classes, torch.tensor([0, len(scores)]), rows, "ranks")[0]
    clients = torch.ones(len(offsets) - 1).double()
    return Calibration("sample", 20, clients, scores, offsets, classes, pool, "ranks", None, None, ranks)


@pytest.mark.parametrize("right", [True, False])
def test_each_class_is_held_as_often_as_it_should_be_and_clients_alike_if_the_model_is_right(right):
    g = torch.Generator().manual_seed(5)
    clients, each, new = 300, 25, 200
    rate = torch.linspace(-4.0, 0.0, clients, dtype=torch.float64)

    def drawn(count):
        odds = rate[:, None] + 1.5 * torch.randn(clients, count, generator=g, dtype=torch.float64)
        y = (torch.rand(clients, count, generator=g, dtype=torch.float64) < torch.sigmoid(odds)).long()
        p = torch.sigmoid(odds if right else 3.0 * torch.sin(7.0 * odds))  # a model that makes no sense
        return torch.stack([1.0 - p, p], -1).flatten(0, 1), y.flatten()

    offsets = torch.arange(clients + 1) * each
    (train, _), (held, y), (probs, truth) = drawn(each), drawn(each), drawn(new)
    scores = 1.0 - held.gather(1, y[:, None])[:, 0]
    own = by_ranks(scores, y, offsets, 2, Ranks.of(train, offsets))
    order = by_client(scores, offsets)
    pool = counted(scores[order], y[order], torch.tensor([0, len(y)]), 2, "sets")[0]
    plain = Calibration("sample", 20, torch.ones(clients), scores[order], offsets, y[order], pool)
    inside = []
    for made in (own, plain):
        bounds = made.thresholds(0.9)
        assert bool(bounds.isfinite().all())
        sets = (1.0 - probs).float().double() <= bounds.repeat_interleave(new, 0)
        hits = sets.gather(1, truth[:, None])[:, 0].double()
        for k in range(2):
            assert hits[truth == k].mean().item() == pytest.approx(0.9, abs=0.02)
        inside.append(hits.view(clients, new).mean(1))
    if right:
        few, many = (part.mean().item() for part in (inside[0][:60], inside[0][-60:]))
        assert few == pytest.approx(0.9, abs=0.025)
        assert many == pytest.approx(0.9, abs=0.025)
        assert inside[1][:60].mean() > 0.94  # by scores, clients with few of the rare class are held too often
        assert inside[0].std() < 0.8 * inside[1].std()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.floats(0.05, 0.95))
def test_the_only_client_has_its_own_split_conformal_bound(seed, n, level):
    g = torch.Generator().manual_seed(seed)
    probs = (2.0 * torch.randn(2 * n, 3, generator=g)).softmax(1)
    y, offsets = torch.zeros(n, dtype=torch.long), offsets_of(n)
    scores = 1.0 - probs[:n, 0]
    made = by_ranks(scores, y, offsets, 3, Ranks.of(probs[n:], offsets))
    found, exact = made.thresholds(level)[0], threshold(scores.sort().values, level)
    assert bool(found[1:].isinf().all())  # no calibration example of these
    if math.isinf(exact):
        assert found[0].item() == math.inf
        return
    assert found[0] >= exact - 1e-9
    rank = made.ranks.ranked(torch.tensor([exact, min(found[0].item(), 1.0)]), y[:1].repeat(2), offsets_of(2))
    assert torch.logit(rank).diff().item() < 0.03  # rounded up to the end of a cell, and no further


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 12), min_size=1, max_size=6))
def test_bounds_by_rank_rise_with_the_level_and_survive_their_record(seed, sizes):
    g = torch.Generator().manual_seed(seed)
    offsets, e = offsets_of(*sizes), sum(sizes)
    probs = (3.0 * torch.randn(e + 20, 3, generator=g)).softmax(1)
    y = torch.randint(2, (e,), generator=g)  # never the third class
    ranks = Ranks.of(probs[e:], torch.tensor([0] + [20] * len(sizes)))
    made = by_ranks(1.0 - probs[:e].gather(1, y[:, None])[:, 0], y, offsets, 3, ranks)
    again = Calibration.from_record(json.loads(json.dumps(made.record())), len(sizes))
    found = [made.thresholds(level) for level in (0.3, 0.5, 0.8)]
    assert all(bool((b >= a).all()) for a, b in pairwise(found))
    assert all(bool(bounds[:, 2].isinf().all()) for bounds in found)
    for bounds, level in zip(found, (0.3, 0.5, 0.8), strict=True):
        assert torch.equal(again.thresholds(level), bounds)
        for i in range(len(sizes)):  # one client's alone, where the last bit may be rounded in another way
            torch.testing.assert_close(again.client(i)[1].bounds(level), bounds[i], rtol=1e-12, atol=0.0)
    assert again.unknown is not None
    assert again.unknown.bounds(0.5).shape == (3,)
    wrong = {
        "its ranks are not those of": {"mean": [[0.0] * 3] * (len(sizes) + 1)},
        "its ranks are not made of": {"deviation": [[0.0] * 3] * len(sizes)},
    }
    for words, change in wrong.items():
        with pytest.raises(ValueError, match=words):
            Calibration.from_record({**made.record(), "ranks": {**made.record()["ranks"], **change}}, len(sizes))
    with pytest.raises(ValueError, match="its ranks do not fit its pool"):
        Calibration.from_record({**made.record(), "regions": "sets"}, len(sizes))


#: As version 0.11 wrote it, and the bounds that it had.
EARLIER = {
    "how": "sample",
    "draws": 20,
    "temperatures": [1.0, 1.0, 1.0],
    "scores": [0.0, 0.0, 0.0, 0.01, 0.08, 0.22, 0.6, 0.0, 0.02, 0.16, 0.2, 0.21, 0.35, 0.55, 0.64, 0.79],
    "offsets": [0, 7, 7, 16],
    "regions": "sets",
    "pool": {
        "rows": 2,
        "cells": CELLS,
        "row": [0] * 10 + [1] * 4,
        "cell": [0, 308, 431, 442, 444, 447, 508, 516, 523, 555, 0, 338, 398, 474],
        "count": [2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1],
    },
    "classes": [0, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0],
}
EARLIER_BOUNDS = [
    *(0.2103785227274111, 0.08099845557184164),
    *(0.2103785227274111, 0.020397321083780794),
    *(0.22261342502889175, 0.020397321083780794),
]


def test_a_record_of_an_earlier_version_bounds_scores_as_it_did():
    made = Calibration.from_record(EARLIER, 3)
    assert made.ranks is None
    assert made.thresholds(0.5).flatten().tolist() == pytest.approx(EARLIER_BOUNDS, rel=1e-12)
    assert made.record() == EARLIER | {"scores": made.scores.tolist()}


def test_a_run_by_class_has_the_same_sets_from_its_folder_and_in_its_evaluation(tmp_path):
    data = scenarios.classification((120,) * 4, test=60, seed=5)
    run = fitted(data, calibration=0.6, out=tmp_path / "run")
    assert run.detail()["sets"]["by"] == "class"
    loaded = bpfed.Run.load(tmp_path / "run")
    assert loaded.calibration.ranks is not None
    for i, (client, kept) in enumerate(zip(run.clients(), loaded.clients(), strict=True)):
        x, y = run.data.test.client(i)
        sets = client.predict(x).prediction_set(SURE)
        assert torch.equal(kept.predict(x, prepared=True).prediction_set(SURE), sets)
        held = sets.gather(1, y[:, None]).float().mean().item()
        assert run.detail()["clients"][i]["coverage"] == pytest.approx(held, abs=1e-6)
        assert bool(client.predict(x).scores.bounds(SURE).isfinite().all())


@pytest.fixture(scope="module")
def small_clients():
    """133 clients with 20 calibration examples, of which one in eight is of the rare class, and 40 test examples each."""
    g = np.random.default_rng(0)
    names, train, test = [], [], []
    for i in range(133):
        shift = 0.4 * g.normal()
        x = g.normal(size=(80, 3)).astype(np.float32)
        y = (x[:, 0] + 0.5 * x[:, 1] + shift + g.logistic(size=80) * 0.6 > 1.6).astype(np.int64)
        names.append(f"class-{i}")
        train.append((torch.from_numpy(x[:40]), torch.from_numpy(y[:40])))
        test.append((torch.from_numpy(x[40:]), torch.from_numpy(y[40:])))
    return FederatedData("schools", tuple(names), Examples.of(train), Examples.of(test), "classification", 2)


def test_sets_of_133_small_clients_hold_each_class_alike_and_leave_out_labels(small_clients):
    run = fitted(small_clients, "bpfed-linear", calibration=0.5, rounds=5, epochs=1)
    found, rare = run.detail(), float((small_clients.train.y == 1).float().mean())
    assert 0.1 < rare < 0.2
    assert found["sets"]["by"] == "class"
    assert 0.88 <= run.history[-1]["coverage"]["pooled"] <= 0.92
    assert all(0.85 <= row["coverage"] <= 0.95 for row in found["classes"])
    assert found["sets"]["clients"] == 133  # all have bounds
    assert found["sets"]["within"] >= 0.95 * 133
    # With one bound for both classes the rare one is left out far more often.
    plain = fitted(small_clients, "bpfed-linear", calibration=0.5, rounds=5, epochs=1, sets="pooled")
    assert 0.88 <= plain.history[-1]["coverage"]["pooled"] <= 0.92
    assert plain.detail()["classes"][1]["coverage"] < 0.75
    assert f"and those of all clients, which together count as {POOLED['sets']:g}." in plain.record().sets_words


def test_intervals_of_small_clients_are_finite_and_hold_the_target():
    said = []
    run = fitted(scenarios.regression((12,) * 30, test=40), calibration=0.4, say=said.append)
    assert [s for s in said if s.startswith("All 30 clients have fewer than the 9 calibration examples")]
    assert run.history[-1]["interval_width"]["worst"] < math.inf
    assert run.history[-1]["coverage"]["pooled"] == pytest.approx(0.9, abs=0.06)
    assert f"and those of all clients, which together count as {POOLED['intervals']:g}." in run.record().sets_words
    with pytest.raises(UserError, match=r"sets is 'class', but a regression has no sets of classes"):
        fitted(scenarios.regression(), calibration=0.2, sets="class")
