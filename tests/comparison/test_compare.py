"""Comparisons: what is run and what is not, who takes part, and what a user reads."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Command, files, metrics
from scenarios import classification, regression

import bpfed
from bpfed._util.errors import UserError
from bpfed._util.files import lock
from bpfed.cli import main
from bpfed.comparison import VARIANTS, runner, tables
from bpfed.comparison.candidates import candidates, changes, listed
from bpfed.comparison.record import chosen_reference
from bpfed.comparison.runner import run_cells
from bpfed.config.reader import METHOD
from bpfed.config.settings import Settings
from bpfed.engine.simulator import Simulator
from bpfed.methods import METHODS, BPFed, FedAvg

TINY = {"epochs": 1, "batch": 5, "eval_draws": 2, "progress": False}
SMALL = ("compare", "--clients", "3", "--epochs", "1", "--eval-draws", "2", "--rounds", "2", "--seeds", "2", "--quiet")
PAIR = (*SMALL, "--methods", "fedavg,fedper")


pytestmark = pytest.mark.usefixtures("untraced")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished comparison, to be copied."""
    folder = tmp_path_factory.mktemp("finished") / "a"
    with pytest.raises(SystemExit) as ended:
        main([*PAIR, "--out", str(folder)])
    assert not ended.value.code
    return folder


@pytest.fixture
def kept(finished: Path, command: Command) -> Path:
    """A copy of it, ``a``, where the command runs."""
    shutil.copytree(finished, "a")
    return Path("a")


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in history]


# --- cells ---------------------------------------------------------------------------------------------------------------


def test_a_cell_is_what_fit_gives() -> None:
    found = bpfed.compare(
        {"plain": FedAvg(), "fast": FedAvg(lr=0.01)}, lambda seed: classification(seed=seed), 2, **TINY, rounds=2
    )
    assert list(found.records) == ["plain", "fast"]
    for name, lr in (("plain", 1e-3), ("fast", 0.01)):
        for seed in (0, 1):
            alone = bpfed.fit(FedAvg(lr=lr), classification(seed=seed), seed=seed, rounds=2, **TINY)
            assert timeless(found.records[name][seed].history) == timeless(alone.history)


def test_stacked_seeds_give_the_same(tmp_path: Path) -> None:
    who = candidates(["bpfed", "fedavg"], Settings(rounds=2, epochs=1, batch=5, eval_draws=2))
    data = {seed: classification(seed=seed) for seed in (0, 1)}
    apart = run_cells(who, data.__getitem__, 2, stack=False)
    together = run_cells(who, data.__getitem__, 2, out=tmp_path / "a", stack=True)
    for name in ("bpfed", "fedavg"):
        for part in ("pooled", "mean"):
            assert together.over_seeds(name, "nll", part) == pytest.approx(
                apart.over_seeds(name, "nll", part), rel=1e-4
            )
    assert (tmp_path / "a/bpfed/seed-1/report.html").exists()


def test_all_methods_of_a_seed_share_its_split_and_seeds_differ(command: Command, kept: Path) -> None:
    prints = {(m, s): _config(f"a/{m}/seed-{s}")["data"]["fingerprint"] for m in ("fedavg", "fedper") for s in (0, 1)}
    assert prints["fedavg", 0] == prints["fedper", 0]
    assert prints["fedavg", 1] == prints["fedper", 1]
    assert prints["fedavg", 0] != prints["fedavg", 1]
    assert (
        "Every seed splits the same examples anew"
        in json.loads(Path("a/comparison.json").read_text())["about_differences"]
    )
    outcome = command.ok(*PAIR, "--rounds", "1", "--set", "data.seed=0", "--out", "b")
    assert _config("b/fedavg/seed-0")["data"]["fingerprint"] == _config("b/fedavg/seed-1")["data"]["fingerprint"]
    assert "All seeds train and test on the same split" in " ".join(outcome.out.split())


def test_what_is_finished_is_not_run_again(command: Command, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = (kept / "comparison.json").read_text()
    before = {k: v for k, v in files(Path("a")).items() if "seed-" in k}
    trained: list[str] = []
    real = Simulator.round

    def watched(self: Simulator) -> Any:
        trained.append(self.federations[0].method.name)
        return real(self)

    monkeypatch.setattr(Simulator, "round", watched)
    again = command.ok(*PAIR, "--out", "a")
    assert trained == []
    assert "All 4 runs in 'a' are finished already; none was run again.\n" in again.err
    assert (kept / "comparison.json").read_text() == result
    wider = command.ok(*SMALL, "--methods", "fedavg,fedper,local", "--out", "a")
    assert set(trained) == {"local"}
    assert len(trained) == (2 if torch.cuda.is_available() else 4)  # two rounds of two seeds, on a GPU side by side
    assert "Local" in wider.out
    assert "finished already" not in wider.err
    after = files(Path("a"))
    assert all(after[name] == content for name, content in before.items())


def test_other_settings_are_refused_and_touch_nothing(command: Command, kept: Path) -> None:
    before = files(Path("a"))
    said = command(*PAIR, "--out", "a", "--set", "method.lr=0.5").sentence
    assert said.startswith("'a/fedavg/seed-0' was run with other settings: method.lr is 0.001 there and 0.5 here")
    assert "run.batch is 50 there and 10 here" in command(*PAIR, "--out", "a", "--batch", "10").sentence
    assert "data.partition" in command(*PAIR, "--out", "a", "--partition", "iid").sentence
    assert files(Path("a")) == before


def test_the_first_seed_of_all_methods_is_looked_at_before_one_is_trained(command: Command, kept: Path) -> None:
    shutil.rmtree(kept / "fedavg")
    before = files(Path("a"))
    assert "fedper/seed-0" in command(*PAIR, "--out", "a", "--set", "fedper.lr=0.5").sentence
    assert files(Path("a")) == before


def test_an_interrupted_comparison_goes_on(command: Command, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, rounds = Simulator.round, []

    def interrupted(self: Simulator) -> Any:
        rounds.append(self)
        if len(rounds) == 4:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Simulator, "round", interrupted)
    stopped = command(*PAIR, "--out", "a b", "--set", "fedper.lr=0.001")
    assert stopped.code == 130
    hint = stopped.err.strip().rpartition("Resume with: ")[2]
    monkeypatch.setattr(Simulator, "round", real)
    assert not Path("a b/comparison.json").exists()
    gone_on = command.ok(*shlex.split(hint)[1:])
    assert "Resuming after round 1 of 2." in gone_on.err
    for name in ("fedavg", "fedper"):
        for seed in (0, 1):
            cell = f"{name}/seed-{seed}"
            assert metrics(Path("a b") / cell) == metrics(kept / cell)


def test_one_at_a_time(command: Command, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    handle = lock(tmp_path / "a")
    assert "Another process is writing to 'a'" in command(*PAIR, "--out", "a").sentence
    assert handle


def test_a_folder_of_something_else_is_left_alone(command: Command) -> None:
    Path("a").mkdir()
    Path("a/thesis.tex").write_text("x")
    assert "holds other files, not a comparison" in command(*PAIR, "--out", "a").sentence
    assert [p.name for p in Path("a").iterdir()] == ["thesis.tex"]
    assert "Unknown dataset" in command(*PAIR, "--data", "digitz", "--out", "b").sentence
    assert not Path("b").exists()


def test_a_cell_is_a_run_folder_like_any_other(command: Command, kept: Path) -> None:
    (kept / "fedavg/seed-1/report.html").unlink()
    told = command.ok("report", "a/fedavg/seed-1").out
    assert (kept / "fedavg/seed-1/report.html").exists()
    assert "FedAvg on digits, 3 clients, 2 rounds, seed 1" in told


def test_training_that_fails_names_its_cell(tmp_path: Path) -> None:
    data = classification()
    bad = replace(data, train=replace(data.train, x=data.train.x * 1e30))
    with pytest.raises(UserError, match=r"^wild, seed 0: Training diverged"):
        bpfed.compare({"wild": FedAvg(lr=1e30)}, bad, 1, out=tmp_path / "a", rounds=3, **TINY)


# --- who takes part ------------------------------------------------------------------------------------------------------


def test_all_is_every_method_once() -> None:
    every = [name for name in METHODS if name != "bpfed-linear"]  # which is for tables alone
    assert listed("all") == every
    assert listed("fedavg, all") == ["fedavg", *(m for m in every if m != "fedavg")]
    assert listed("all, bpfed-linear") == [*every, "bpfed-linear"]
    assert listed("all,fedper+laplace")[-1] == "fedper+laplace"


def test_variants_are_settings_under_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIANTS, "cold", {"method.temperature": 0.1, "run.batch": 7})
    one, two = candidates(["bpfed", "bpfed+cold"], Settings())
    assert (one.method, one.settings) == (BPFed(), Settings())
    assert (two.method, two.settings) == (BPFed(temperature=0.1), Settings(batch=7))
    assert two.title == "BPFed + cold"
    with pytest.raises(UserError, match=r"^The variant 'cold' does not apply to fedavg; it applies to: bpfed.*\.$"):
        changes("fedavg+cold")
    with pytest.raises(UserError, match="Unknown variant 'cld'; did you mean 'cold'"):
        changes("bpfed+cld")
    with pytest.raises(UserError, match="Unknown method 'bpfad'"):
        changes("bpfad+cold")


def test_a_variant_and_what_all_are_given_must_agree() -> None:
    """Else the plain method could have more members than what is called its variant with members."""
    with pytest.raises(UserError, match=r"^'fedper\+members' stands for run.members = 2, but run.members is 3 for all"):
        candidates("fedper,fedper+members", Settings(members=3))
    same = candidates("fedper+members", Settings(members=2))
    assert same[0].settings.members == 2
    with pytest.raises(UserError, match="has the variant 'members' twice"):
        candidates("fedper+members+members", Settings())


def test_every_variant_applies_to_some_method() -> None:
    for variant in VARIANTS:
        assert any(_applies(f"{name}+{variant}") for name in METHODS), variant


def _applies(name: str) -> bool:
    try:
        return bool(changes(name))
    except UserError:
        return False


def test_settings_for_all_and_for_one(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIANTS, "quick", {"method.lr": 0.2})
    settings = ("--set", "method.lr=0.01", "--set", "fedper.lr=0.02")
    command.ok(
        *SMALL, "--methods", "fedavg,fedper,fedavg+quick", "--rounds", "1", "--seeds", "4,", *settings, "--out", "a"
    )
    rates = {name: _config(f"a/{name}/seed-4")["method"]["lr"] for name in ("fedavg", "fedper", "fedavg+quick")}
    assert rates == {"fedavg": 0.01, "fedper": 0.02, "fedavg+quick": 0.2}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--set", "method.sigma=1"], "--set: fedavg has no setting 'sigma'; to set it for one method only, name"),
        (["--set", "bpfed.sigma=1"], "--set: 'bpfed' is not part of this comparison"),
        (["--set", "lr"], "--set: 'lr' has no value"),
        (["--set", "lr=1"], "--set: 'lr' needs a prefix: data., method. or run.; did you mean 'method.lr'?"),
        (["--set", "run.seed=3"], "--set: run.seed cannot be set here; use --seeds."),
        (["--set", "fedavg.lr=-1"], "fedavg: lr is -1.0, but a step size must be 0 or more."),
        (["--methods", ","], "No method is named"),
        (["--methods", "fedavgg"], "Unknown method 'fedavgg'; did you mean 'fedavg'?"),
        (["--seeds", "x"], "--seeds: 'x' is not a number or a list of numbers"),
        (["--seeds", "0"], "seeds is 0, but must be at least one"),
        (["--seeds", "1,1"], "seeds is [1, 1], but must be at least one whole number, none below 0 and none twice."),
        (["--reference", "bpfed"], "The reference 'bpfed' is not one of the methods"),
        (["--partition", ""], "Unknown partition ''"),
        (["--rounds", "0"], "rounds is 0, but must be at least 1."),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing(command: Command, arguments: list[str], sentence: str) -> None:
    assert command(*PAIR, "--out", "a", *arguments).sentence.startswith(sentence)
    assert not Path("a").exists()


def test_names_of_ones_own_must_be_able_to_name_a_folder() -> None:
    with pytest.raises(UserError, match="cannot name a method"):
        bpfed.compare({"../x": FedAvg()}, classification(), 1, **TINY)
    with pytest.raises(UserError, match="is no file of the comparison"):
        bpfed.compare({"report.html": FedAvg()}, classification(), 1, **TINY)
    with pytest.raises(UserError, match="'1' cannot name a method"):
        bpfed.compare({1: FedAvg()}, classification(), 1, **TINY)  # type: ignore[dict-item]
    with pytest.raises(UserError, match="No method is given"):
        bpfed.compare({}, classification(), 1, **TINY)
    with pytest.raises(UserError, match="Unknown setting 'seed'"):
        bpfed.compare(["fedavg"], classification(), 1, seed=3, **TINY)


def test_methods_may_be_given_as_they_are() -> None:
    found = bpfed.compare([FedAvg(lr=0.01), "local"], classification(), 1, rounds=1, **TINY)
    assert found.names == ["fedavg", "local"]
    with pytest.raises(UserError, match="Two of the methods have the same name"):
        bpfed.compare([FedAvg(), FedAvg(lr=0.1)], classification(), 1, **TINY)


def test_a_variant_stays_what_its_name_says(command: Command) -> None:
    asked = ("compare", "--data", "digits", "--seeds", "1", "--rounds", "1", "--epochs", "1", "--clients", "3")
    command.ok(*asked, "--methods", "fedavg+sgd", "--set", "fedavg.optimiser=adam", "--out", "a")
    assert 'optimiser = "sgd"' in Path("a/fedavg+sgd/seed-0/config.toml").read_text()
    undone = ("--set", "fedavg+sgd.optimiser=adam", "--out", "b")
    said = command(*asked, "--methods", "fedavg+sgd", *undone).sentence
    assert (
        said == "--set: fedavg+sgd would no longer be what its name says with another optimiser; set that for fedavg."
    )


# --- tables --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> bpfed.Comparison:
    methods = {"slow": FedAvg(lr=1e-4), "fast": FedAvg(lr=0.02), "mean|odd": FedAvg(lr=0.01)}
    return bpfed.compare(methods, lambda seed: classification(seed=seed), 3, rounds=2, **TINY)


def test_the_files_hold_the_same_figures(found: bpfed.Comparison, tmp_path: Path) -> None:
    runner.save(found, tmp_path)
    written = json.loads((tmp_path / "comparison.json").read_text())
    for name in found.names:
        for metric in ("accuracy", "nll", "brier", "ece"):
            values = [found.records[name][s].history[-1][metric]["pooled"] for s in (0, 1, 2)]
            assert written["methods"][name][metric]["mean"] == pytest.approx(np.mean(values))
            assert written["methods"][name][metric]["sd"] == pytest.approx(np.std(values, ddof=1))
    assert list(written["methods"]) == sorted(found.names, key=lambda n: written["methods"][n]["nll"]["mean"])
    lines = list(csv.DictReader(io.StringIO((tmp_path / "comparison.csv").read_text())))
    assert len([line for line in lines if not line["method"].startswith("baseline:")]) == 9
    one = next(line for line in lines if (line["method"], line["seed"]) == ("fast", "2"))
    assert float(one["nll_client_mean"]) == found.records["fast"][2].history[-1]["nll"]["mean"]
    text = (tmp_path / "comparison.md").read_text()
    best = found.best("nll")
    mean, sd = found.mean(best, "nll"), found.sd(best, "nll")
    assert f"**{mean:.3f} ± {sd:.3f}**" in text
    assert "ECE (10 bins)" in text
    assert "mean\\|odd" in text
    assert all(line.replace("\\|", "").count("|") == 8 for line in text.splitlines()[2:10])
    for name in ("comparison.json", "comparison.csv", "comparison.md"):
        assert "NaN" not in (tmp_path / name).read_text()


def test_the_reference_is_the_default_method_where_it_takes_part() -> None:
    assert chosen_reference(["fedper", "bpfed", METHOD], None) == METHOD == "bpfed-recipe"
    assert chosen_reference(["fedper", "bpfed"], None) == "bpfed"
    assert chosen_reference(["fedper", "fedavg"], None) == "fedper"
    assert chosen_reference(["fedper", "bpfed", METHOD], "fedper") == "fedper"


def test_differences_are_from_the_reference(found: bpfed.Comparison) -> None:
    assert found.reference == "slow"
    for name, one in found.differences("nll").items():
        means = [
            found.records[name][s].history[-1]["nll"]["mean"] - found.records["slow"][s].history[-1]["nll"]["mean"]
            for s in (0, 1, 2)
        ]
        assert one.seeds == pytest.approx(means)
        assert one.mean == pytest.approx(np.mean(means))
    assert set(found.differences()) == {"fast", "mean|odd"}
    back = replace(found, reference="fast").difference("slow")
    assert back.mean == pytest.approx(-found.difference("fast").mean)


def test_regression_has_its_own_columns() -> None:
    found = bpfed.compare(["fedavg", "fedper"], regression(), 2, rounds=1, **TINY)
    assert [m.name for m in found.measures] == ["rmse", "nll", "ece"]
    assert "| RMSE |" in found.summary()
    assert "Accuracy |" not in found.summary()
    assert tables.record(found)["differences"].keys() == {"rmse", "nll"}


def test_one_seed_has_no_deviation_and_one_method_no_difference() -> None:
    found = bpfed.compare(["fedavg"], classification(), [3], rounds=1, baselines="off", **TINY)
    assert "±" not in found.summary().split("\n\n")[1]
    assert "Seed 3, all test examples" in found.summary()
    assert "minus" not in found.summary()


def test_the_command_marks_the_best_and_shows_both_tables(command: Command, kept: Path) -> None:
    out = command.ok(*PAIR, "--out", "a", "--reference", "fedper").out
    result = json.loads(Path("a/comparison.json").read_text())
    written = result["methods"] | result["baselines"]
    best = min(written, key=lambda name: written[name]["nll"]["mean"])
    assert f"*{written[best]['nll']['mean']:.3f} ± {written[best]['nll']['sd']:.3f}" in out
    heads = {name: one["short"] if "short" in one else f"{one['title']} " for name, one in written.items()}
    assert out.index(heads[best]) < min(out.index(head) for name, head in heads.items() if name != best)
    assert "Differences from FedPer, mean over clients" in out
    pairs = json.loads(Path("a/comparison.json").read_text())["differences"]["nll"]["fedavg"]
    assert f"{pairs['lower']} of {pairs['pairs']} client-seeds" in out
    assert f"lower for {pairs['lower']} of {pairs['pairs']} client-seeds" in Path("a/report.html").read_text()
    assert "ECE over 10 bins; perfectly calibrated predictions would show" in " ".join(out.split())
    assert out.endswith("Report: a/report.html\n")


# --- the guide -----------------------------------------------------------------------------------------------------------


def test_the_method_of_the_guide_takes_part(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent.parent / "docs/tutorials/add-a-method.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.S)[0]
    made: dict[str, Any] = {"__name__": "guide"}
    exec(compile(code, "guide", "exec", dont_inherit=True), made)
    assert len([line for line in code.split("class Weights")[1].splitlines() if line.strip()]) <= 45
    prox = made["FedProx"]
    methods = {"free": prox(mu=0.0), "held": prox(mu=0.5), "fixed": prox(lr=0.0)}
    found = bpfed.compare(methods, classification(), 1, rounds=5, **TINY)
    free, held, fixed = (found.mean(name, "nll") for name in methods)
    assert free < held < fixed  # the pull keeps it nearer to where it was


def _config(folder: str) -> dict[str, Any]:
    return tomllib.loads((Path(folder) / "config.toml").read_text())
