"""The default on tables, many classes and Dirichlet: small runs from end to end, and what their tables say."""

import json
import math

import numpy as np
import pytest
import torch

from bpfed._util.errors import UserError
from bpfed.config.settings import Settings
from bpfed.inference.tasks import get_task
from bpfed.methods import Recipe
from bpfed.methods.recipe import head_width
from bpfed.nn.networks import make_model
from experiments import dirichlet, many_classes, tables
from experiments.jobs import Job, paired, run_jobs


def quiet(sentence):
    pass


def double(number, device):
    if number < 0:
        raise UserError("below 0")
    return {"found": 2 * number}


def test_finished_jobs_are_kept_failures_spare_the_others_and_other_arguments_are_refused(tmp_path):
    jobs = [Job(f"{n}.json", double, {"number": n}) for n in (1, -1, 2)]
    with pytest.raises(UserError, match=r"1 jobs failed \(-1.json\)"):
        run_jobs(jobs, tmp_path, 1, math.inf, quiet)
    assert json.loads((tmp_path / "2.json").read_text())["found"] == 4
    before = (tmp_path / "1.json").stat().st_mtime_ns
    assert run_jobs([jobs[0], jobs[2]], tmp_path, 1, math.inf, quiet) == 0
    assert (tmp_path / "1.json").stat().st_mtime_ns == before
    assert (
        run_jobs([Job("3.json", double, {"number": 3})], tmp_path, 1, 0.0, quiet) == 1
    )  # nothing begins after the budget
    with pytest.raises(UserError, match="not for"):
        run_jobs([Job("1.json", double, {"number": 5})], tmp_path, 1, math.inf, quiet)


def test_paired_differences_have_students_interval():
    difference, half = paired([1.0, 2.0, 4.0], [0.0, 1.0, 1.0])
    assert difference == pytest.approx(5 / 3)
    assert half == pytest.approx(4.302653 * math.sqrt(4 / 3) / math.sqrt(3), rel=1e-5)
    assert math.isnan(paired([1.0], [2.0])[1])


def test_tables_run_and_the_table_compares_the_default_with_the_best_other(tmp_path, monkeypatch):
    drawn = np.random.default_rng(0)
    lines = ["site,a,b,ill"]
    for i in range(90):
        a, b = drawn.normal(size=2)
        lines.append(f"{'uvw'[i % 3]},{a:.4f},{b:.4f},{'yes' if a + drawn.normal() > 0 else 'no'}")
    (tmp_path / "sites.csv").write_text("\n".join(lines))
    monkeypatch.setenv("BPFED_DATA", str(tmp_path))
    one = tables.Table("sites", "sites.csv", {"target": "ill", "client_column": "site"})
    monkeypatch.setattr(tables, "TABLES", {"sites": one})
    results = tmp_path / "results"
    for seed in range(2):
        made = {"rounds": 1, "seed": seed, "data": "sites", "method": "default"}
        record = {"asked": made, "bpfed": "1", "torch": "2", "clients": 3, "scores": {"nll": {"pooled": 0.1 + seed}}}
        (results / "sites").mkdir(parents=True, exist_ok=True)
        (results / "sites" / f"default-{seed}.json").write_text(json.dumps(record))
    tables.main(["--rounds", "1", "--seeds", "2", "--methods", "fedavg,baselines", "--results", str(results)])
    found = json.loads((results / "sites" / "fedavg-0.json").read_text())
    assert found["config"]["run"]["members"] == 3
    assert found["bpfed"]
    assert found["scores"]["nll"]["pooled"] > 0
    row = tables.render(results).splitlines()[2]
    assert row.startswith(("| sites | 3 | 2 | **0.600** | – |", "| sites | 3 | 2 | 0.600 | – |"))


def test_many_classes_are_dealt_so_that_new_ones_are_somebodys(tmp_path, capsys):
    case = many_classes.SIZES["tiny"]
    data = many_classes.federation(case, 0)
    everybody = set(data.train.y.tolist())
    for client in range(case.clients):
        own, tested = (set(part.client(client)[1].tolist()) for part in (data.train, data.test))
        assert tested - own
        assert tested <= everybody
    many_classes.main(
        [
            "--size",
            "tiny",
            "--seeds",
            "1",
            "--methods",
            "fedper,bpfed-recipe",
            "--device",
            "cpu",
            "--results",
            str(tmp_path),
        ]
    )
    many_classes.main(["--size", "tiny", "--render", "--results", str(tmp_path)])
    assert "| BPFed recipe |" in capsys.readouterr().out


@pytest.mark.parametrize(("classes", "hidden", "width"), [(2, 3, 1.0), (10, 100, 1.0), (10, 8, 1.0), (1000, 100, 84.0)])
def test_heads_are_freer_only_where_there_are_many_classes_for_their_features(classes, hidden, width):
    task = get_task("classification")
    model = make_model(torch.zeros(2, 5), task, classes, Recipe(), Settings(hidden=hidden, network="mlp"))
    assert float(head_width(model).median()) == pytest.approx(width)


def test_dirichlet_divides_all_images_and_the_study_is_rendered(tmp_path, monkeypatch):
    drawn = np.random.default_rng(0)
    y = np.repeat(np.arange(4), 60)
    images = (drawn.integers(0, 60, (240, 28, 28)) + 40 * y[:, None, None]).astype(np.uint8)
    np.savez(tmp_path / "images.npz", x=images, y=y.astype(np.uint8))
    skew = []
    for beta in (0.01, 5.0):
        owners = dirichlet.divide(y, 4, beta, np.random.default_rng(1))
        counts = np.array([np.bincount(y[owners == i], minlength=4) for i in range(4)])
        assert counts.sum() == 240
        assert counts.sum(1).min() >= 8
        skew.append((counts > 0).sum())
    assert skew[0] < skew[1]
    monkeypatch.setenv("BPFED_DATA", str(tmp_path))
    given = [
        "--images",
        "images.npz",
        "--betas",
        "0.5",
        "--seeds",
        "1",
        "--rounds",
        "1",
        "--clients",
        "2",
        "--device",
        "cpu",
    ]
    dirichlet.main([*given, "--methods", "fedavg,bpfed-recipe", "--results", str(tmp_path / "found")])
    assert "| method | β = 0.5 |" in dirichlet.render(tmp_path / "found", None)
    with pytest.raises(UserError, match="no records"):
        dirichlet.render(tmp_path / "nothing", None)


def dirichlet_record(folder, beta, name, nll, device="cuda:0"):
    """Write records of some seeds: one file for each seed where there are pilots, one for all otherwise."""
    runs = [
        {
            "seed": seed,
            "device": device,
            "scores": {"nll": {"pooled": value}, "accuracy": {"pooled": 0.9}},
            "chosen_settings": {},
            "config": {"method": {"name": "bpfed-recipe"}},
            "held_out": [
                {"method": kind, "sums": [score * 10, score * 30], "examples": [10.0, 30.0]}
                for kind, score in (("bpfed-adaptive", 9.0), ("bpfed-recipe", 0.25), ("bpfed-adaptive", 0.5))
            ],
        }
        for seed, value in enumerate(nll)
    ]
    (folder / str(beta)).mkdir(parents=True, exist_ok=True)
    for of in [[run] for run in runs] if name == "default" else [runs]:
        number = f"-{of[0]['seed']}" if name == "default" else ""
        asked = {"beta": beta, "method_name": name, "seeds": [run["seed"] for run in of]}
        record = {"asked": asked, "bpfed": "1.2.3", "torch": "2", "runs": of}
        (folder / str(beta) / f"{name}{number}.json").write_text(json.dumps(record))


def test_the_dirichlet_table_has_all_seeds_and_says_where_some_are_missing(tmp_path):
    for beta in (0.1, 5.0):
        for name, nll in {"default": (0.2, 0.3, 0.4), "fedavg": (0.5, 0.5, 0.5), "ditto": (0.6, 0.6, 0.6)}.items():
            few = nll[:2] if (beta, name) == (5.0, "default") else nll
            dirichlet_record(tmp_path, beta, name, few, "cpu" if (beta, name) == (0.1, "ditto") else "cuda:0")
    lines = dirichlet.render(tmp_path, None).splitlines()
    assert lines[2] == "| Default | **0.300** ± 0.100 (90.0) | 0.250 ± 0.071 (90.0), 2 seeds |"
    assert lines[3] == "| FedAvg | 0.500 ± 0.000 (90.0) | **0.500** ± 0.000 (90.0) |"
    assert lines[4] == "| Ditto | 0.600 ± 0.000 (90.0), CPU | 0.600 ± 0.000 (90.0) |"
    assert "Version 1.2.3, 3 seeds on a GPU where a cell says nothing else." in lines[6]
    # The last score of each method counts, per image and not per client.
    assert "| 5 | 1 | 0.250 | 0.500 | +0.250 ± 1.588 | bpfed-recipe | – |" in lines


def test_many_classes_are_compared_with_fedper_at_the_seeds_that_both_have(tmp_path):
    (tmp_path / "large").mkdir()

    def write(name, seed, nll, device):
        kinds = {kind: {"accuracy": 0.5, "nll": 1.0} for kind in ("seen", "new")}
        record = {"scores": {"nll": {"pooled": nll}, "accuracy": {"pooled": 0.5}}, "kinds": kinds, "device": device}
        record |= {"asked": {"method": name, "seed": seed}, "bpfed": "1.2.3", "torch": "2"}
        record["config"] = {"method": {"name": "bpfed-adaptive"}}
        (tmp_path / "large" / f"{name}-{seed}.json").write_text(json.dumps(record))

    for seed in range(3):
        write("default", seed, 1.0 + seed, "cuda:0")
    table = many_classes.render(tmp_path, "large")
    assert "| Default | 50.0 | 2.000 ± 1.000 | 50.0 / 1.00 | 50.0 / 1.00 | – | 3 | GPU |" in table
    assert "The default chose `bpfed-adaptive` at 3 seeds." in table
    write("fedper", 0, 4.0, "cpu")
    table = many_classes.render(tmp_path, "large")
    assert "| 50.0 / 1.00 | −3.00 | 3 | GPU |" in table
    assert "| FedPer | 50.0 | 4.000 | 50.0 / 1.00 | 50.0 / 1.00 | – | 1 | CPU |" in table
    with pytest.raises(UserError, match="no records of size small"):
        many_classes.render(tmp_path, "small")
