"""The theory experiment: teachers, data, the measured distance, slopes, and a file that is gone on with."""

import json
import math
from dataclasses import replace

import pytest
import torch

from bpfed._util.errors import UserError
from bpfed.inference.gaussian import Gaussian
from bpfed.inference.predictive import GaussianPredictive
from bpfed.methods.base import RunShape
from experiments import theory, training
from experiments.bounds import epsilon_n, r_n
from experiments.teachers import Setting, Teachers, task
from experiments.theory import measure, point, run, slope, start, summary, verdict
from experiments.training import OtherResult

SMALL = Setting(
    methods=("bpfed", "bpfed-recipe"),
    examples=(10, 20),
    clients=2,
    many=(2, 3),
    fixed=10,
    width=4,
    teacher=2,
    rounds=1,
    steps=2,
    batch=10,
    draws=4,
    fresh=20,
)


def test_teachers_are_standardised_and_share_their_body():
    setting = replace(SMALL, teacher=3, hidden=2)
    teachers = Teachers.draw(setting, 4, seed=1)
    x = torch.rand(4, 50_000, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    values = teachers(x)
    torch.testing.assert_close(values.mean(-1), torch.zeros(4), atol=0.03, rtol=0)
    torch.testing.assert_close(values.std(-1), torch.ones(4), atol=0.03, rtol=0)
    assert len({tuple(h.tolist()) for h in teachers.heads}) == 4
    # Any of the functions is in the span of one body's features and a constant.
    features = x[0, :200]
    for weight, bias in teachers.body:
        features = torch.relu(features @ weight.T + bias)
    design = torch.cat([features, torch.ones(200, 1)], -1).double()
    wanted = teachers(x[0, :200].expand(4, -1, -1)).T.double()
    torch.testing.assert_close(design @ torch.linalg.lstsq(design, wanted).solution, wanted, atol=1e-4, rtol=0)


def test_a_student_can_be_its_teacher():
    """The approximation error is 0: a wider network with the teacher's weights, and zeros, gives its values."""
    teachers = Teachers.draw(SMALL, 1, seed=0)
    (weight, bias), k = teachers.body[0], SMALL.teacher
    run_, made = start(SMALL, "bpfed", 10, 1, 0, "cpu")
    network = run_.federation.model.module
    with torch.no_grad():
        for p in network.parameters():
            p.zero_()
        network[1].weight[:k], network[1].bias[:k] = weight, bias
        network[3].weight[0, :k] = teachers.heads[0] / teachers.scale[0]
        network[3].bias[0] = -teachers.mean[0] / teachers.scale[0]
        torch.testing.assert_close(network(made.x[0]).squeeze(-1), made.true[0], atol=1e-5, rtol=1e-5)


def test_fewer_examples_and_fewer_clients_are_the_first_of_more():
    few, many = task(SMALL, 10, 2, seed=3), task(SMALL, 20, 3, seed=3)
    for i in range(2):
        for a, b in zip(few.data.train.client(i), many.data.train.client(i), strict=True):
            torch.testing.assert_close(a, b[:10])
    torch.testing.assert_close(few.true, many.true[:2])
    assert not torch.equal(few.x, task(SMALL, 10, 2, seed=4).x)


def test_the_noise_of_the_targets_is_the_known_one_and_not_learnt():
    setting = replace(SMALL, examples=(4000,), noise=0.4)
    made = task(setting, 4000, 2, seed=0)
    x = made.data.train.x.reshape(2, 4000, 2)
    rest = made.data.train.y.reshape(2, 4000) - Teachers.draw(setting, 2, 0)(x)
    assert float(rest.std()) == pytest.approx(0.4, rel=0.03)
    assert abs(float(rest.mean())) < 0.02
    model = start(SMALL, "bpfed", 10, 2, 0, "cpu")[0].federation.model
    assert model.layout.total == SMALL.shape.weights
    assert model.likelihood.scale == SMALL.noise


@pytest.mark.parametrize("n", [10, 20])
def test_local_steps_do_not_depend_on_n(n):
    settings = start(replace(SMALL, steps=4), "bpfed-recipe", n, 2, 0, "cpu")[0].settings
    assert settings.epochs * math.ceil(n / settings.batch) == 4


@pytest.mark.parametrize("name", Setting().methods)
def test_every_point_has_the_experiments_step_size(name):
    setting = Setting()
    for _, n, clients in setting.grid():
        batch = min(setting.batch, n)
        epochs = max(1, round(setting.steps / math.ceil(n / batch)))
        shape = RunShape(clients, clients, setting.rounds, epochs, batch)
        found = setting.method(name).hparams_for_run(shape, torch.full((clients,), n))["lr"]
        assert found.tolist() == pytest.approx([setting.lr] * len(found))


def test_the_error_is_of_draws_and_not_of_their_mean(monkeypatch):
    """With a last bias of known spread s and a mean that is exact, E[d²] = 1 − 1/√(1 + s²/(4 σ²))."""
    run_, made = start(SMALL, "bpfed", 10, 2, 0, "cpu")
    federation, s = run_.federation, 0.6
    names = federation.model.layout.names
    sigma = federation.model.layout.flatten(
        {
            n: torch.full_like(p, s if n == names[-1] else 0.0)
            for n, p in federation.model.layout.unflatten(federation.model.initial).items()
        }
    )
    assert names[-1] == "3.bias"
    weights = Gaussian(*(t.expand(2, -1) for t in (federation.model.initial, sigma)))
    monkeypatch.setattr(type(federation.method), "predictive", lambda *_: GaussianPredictive(weights))
    with torch.no_grad():
        true = federation.model.stacked_outputs(weights.mean, made.x).squeeze(-1)
    error, of_mean = measure(federation, made._replace(true=true), SMALL.noise, 4000)
    assert of_mean == 0.0
    assert error == pytest.approx(1 - (1 + s**2 / (4 * SMALL.noise**2)) ** -0.5, rel=0.03)


def test_training_brings_the_error_down():
    setting = replace(SMALL, rounds=6, steps=20, lr=0.03)
    untrained, made = start(setting, "bpfed", 20, 2, 0, "cpu")
    before, _ = measure(untrained.federation, made, setting.noise, 4)
    found = point(setting, "bpfed", 20, 2, [0], "cpu", lambda _: None, "")
    assert found["hellinger"][0] < 0.7 * before


def test_a_point_says_how_far_it_is(monkeypatch):
    said = []
    monkeypatch.setattr(training, "PAUSE", 0.0)
    point(replace(SMALL, rounds=3), "bpfed", 10, 2, [0], "cpu", said.append, "first")
    assert [sentence.partition(",")[0] for sentence in said] == ["first: round 1 of 3", "first: round 2 of 3"]
    assert all(sentence.endswith(" s left") for sentence in said)


def test_the_slope_of_a_power_and_its_standard_error():
    sizes = [10, 20, 40, 80]
    exact = [[c * n**-0.7 for c in (1.0, 5.0)] for n in sizes]
    assert slope(sizes, exact) == pytest.approx((-0.7, 0.0), abs=1e-7)
    # Of each seed the textbook's least squares; seeds differ, and that is the error.
    x = torch.tensor(sizes).double().log()
    y = torch.tensor([0.0, -0.4, -1.3, -1.6]).double()
    design = torch.stack([torch.ones(4).double(), x], 1)
    solved = torch.linalg.lstsq(design, y[:, None]).solution.squeeze()
    found = slope(sizes, [[math.exp(v), 3.0 * n**-0.7] for v, n in zip(y.tolist(), sizes, strict=True)])
    both = [float(solved[1]), -0.7]
    assert found == pytest.approx((sum(both) / 2, abs(both[0] - both[1]) / 2), rel=1e-9)
    assert math.isnan(slope(sizes, [[1.0 / n] for n in sizes])[1])


def test_summary_puts_the_bound_beside_the_curves_and_says_which_falls_faster():
    def made(rate):
        return [
            {"method": m, "n": n, "clients": c, "hellinger": [n**-rate, 2 * n**-rate], "of_mean": [0.0, 0.0]}
            for m, n, c in SMALL.grid()
        ]

    content = summary(SMALL, made(0.9))
    by_n = content["by_n"]
    assert by_n["n"] == [10, 20]
    assert by_n["methods"]["bpfed"]["slope"] == pytest.approx(-0.9)
    assert by_n["bound"]["r_n"] == [r_n(SMALL.shape, n, 2) for n in (10, 20)]
    assert by_n["bound"]["epsilon_n2"] == [epsilon_n(SMALL.shape, n) ** 2 for n in (10, 20)]
    assert content["by_clients"]["bound"]["r_n"][1] > content["by_clients"]["bound"]["r_n"][0]  # log N, as printed
    assert content["by_clients"]["bound"]["slope"] == pytest.approx(0.0, abs=1e-9)  # ε_n does not know N
    assert all("no slower" in line for line in verdict(content))
    assert all("SLOWER" in line for line in verdict(summary(SMALL, made(0.01))))
    # A point that is not there for every method is left out of the curves.
    assert summary(SMALL, made(0.9)[1:])["by_n"]["n"] == [20]


def test_a_file_is_gone_on_with_point_by_point(tmp_path, monkeypatch):
    out, made = tmp_path / "theory.json", []

    def counted(setting, method, n, clients, seeds, device, say, what):
        made.append((method, n, clients))
        if len(made) == 3:
            raise KeyboardInterrupt
        return {
            "method": method,
            "n": n,
            "clients": clients,
            "hellinger": [1 / n] * len(seeds),
            "of_mean": [0.0] * len(seeds),
            "seconds": 0.0,
        }

    monkeypatch.setattr(theory, "point", counted)
    with pytest.raises(KeyboardInterrupt):
        run(out, 2, "cpu", lambda _: None, SMALL)
    assert len(json.loads(out.read_text())["points"]) == 2
    said = []
    run(out, 2, "cpu", said.append, SMALL)
    assert "2 of 6 points" in said[0]
    assert made[2:] == [made[2], *SMALL.grid()[2:]]
    whole = out.read_text()
    run(out, 2, "cpu", lambda _: None, SMALL)
    assert out.read_text() == whole
    assert len(made) == 3 + 4
    content = json.loads(whole)
    content["setting"]["settings"]["bpfed"]["sigma"] = 0.5  # measured with other defaults of a method: nothing of it
    out.write_text(json.dumps(content))
    said.clear()
    run(out, 2, "cpu", said.append, SMALL)
    assert len(made) == 7 + 3
    assert {method for method, _, _ in made[7:]} == {"bpfed"}
    assert "3 of 6 points" in said[0]
    out.write_text("{}")
    with pytest.raises(UserError, match="not a results file"):
        run(out, 1, "cpu", lambda _: None, SMALL)
    with pytest.raises(UserError, match="at least 1"):
        run(out, 0, "cpu", lambda _: None, SMALL)


def test_nothing_measured_is_lost_to_fewer_seeds_or_another_setting(tmp_path, monkeypatch):
    out, made = tmp_path / "theory.json", []

    def counted(setting, method, n, clients, seeds, device, say, what):
        made.append(len(seeds))
        scores = {name: [1 / (n + seed) for seed in seeds] for name in ("hellinger", "of_mean")}
        return {"method": method, "n": n, "clients": clients, **scores, "seconds": 0.0}

    monkeypatch.setattr(theory, "point", counted)
    run(out, 3, "cpu", lambda _: None, SMALL)
    content = json.loads(out.read_text())
    out.write_text(json.dumps(content | {"points": content["points"][1:]}))
    run(out, 2, "cpu", lambda _: None, SMALL)  # fewer than the file has: what is missing gets as many
    assert json.loads(out.read_text()) == content
    assert made == [3] * 7
    whole = out.read_bytes()
    with pytest.raises(OtherResult, match=r"theory.json' holds results for different noise; delete it to re-run"):
        run(out, 3, "cpu", lambda _: None, replace(SMALL, noise=0.5))
    with pytest.raises(OtherResult, match="different seeds"):
        run(out, 4, "cpu", lambda _: None, SMALL)
    out.write_bytes(b"{" + whole)
    with pytest.raises(UserError, match="is damaged; restore or delete it"):
        run(out, 3, "cpu", lambda _: None, SMALL)
    assert out.read_bytes() == b"{" + whole


def test_a_real_run_writes_every_point(tmp_path):
    out, said = tmp_path / "theory.json", []
    setting = replace(SMALL, methods=("bpfed-recipe",), examples=(10,), many=(2,))
    run(out, 2, "cpu", said.append, setting)
    content = json.loads(out.read_text())
    (found,) = content["points"]
    assert len(found["hellinger"]) == 2
    assert all(0.0 < e < 1.0 for e in found["hellinger"])
    assert content["setting"]["weights"] == SMALL.shape.weights
    assert content["by_n"]["methods"]["bpfed-recipe"]["slope"] is None  # one point has none
    assert said
