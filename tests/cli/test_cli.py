"""What a user does at the command line, and what it says when they err."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command import PLAIN, SMALL, Command, files, metrics

from bpfed._util.errors import UserError
from bpfed.cli import COMMANDS, terminal
from bpfed.config.schema import fields_of
from bpfed.config.settings import Settings
from bpfed.engine.simulator import Simulator
from bpfed.methods import METHODS, FedAvg, Recipe
from bpfed.runs.run import Run


@pytest.fixture
def bpfed(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Command:
    """The command, in an empty folder, on a machine without datasets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("BPFED_DATA", raising=False)
    # It is there, as in every home: PyTorch warns where it cannot keep a GPU kernel that it has made.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    return Command(capsys)


def test_a_run_prints_a_table_and_keeps_everything_in_its_folder(bpfed: Command) -> None:
    outcome = bpfed.ok(*SMALL, "--rounds", "2", "--out", "first")
    assert "BPFed recipe on digits, 3 clients, 2 rounds, seed 0" in outcome.out
    for metric in ("Accuracy", "NLL", "Brier", "ECE (10 bins, "):
        assert metric in outcome.out
    assert outcome.out.endswith("Report: first/report.html\n")
    assert outcome.err == ""
    folder = Path("first")
    names = {p.name for p in folder.iterdir()}
    assert names == {
        "checkpoint",
        "config.toml",
        "data.json",
        "evaluation.json",
        "manifest.json",
        "metrics.jsonl",
        "model.safetensors",
        "report.html",
        "summary.json",
    }
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rounds"] == 2
    assert set(summary["accuracy"]) == {"last", "best", "worst_client"}
    assert f"{100 * summary['accuracy']['last']:.1f}" in outcome.out
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2


def test_without_a_terminal_each_evaluated_round_is_a_plain_line(bpfed: Command) -> None:
    outcome = bpfed.ok(*(a for a in PLAIN if a != "--quiet"), "--rounds", "3", "--eval-every", "2", "--out", "a")
    lines = [line for line in outcome.err.splitlines() if not line.endswith("…")]  # what took more than two seconds
    assert lines[0].startswith("personal: nothing; shared: ")
    assert [line.split()[1] for line in lines[1:]] == ["1/3", "2/3", "3/3"]
    assert all(re.fullmatch(r"round ./3  accuracy \S+ %  NLL \S+  ECE \S+ %  \d+:\d\d", line) for line in lines[1:])


def test_a_run_without_a_folder_gets_a_new_one_each_time(bpfed: Command) -> None:
    first, second = (bpfed.ok(*PLAIN, "--rounds", "1", "--seed", "7") for _ in range(2))
    assert "Report: runs/digits-fedavg-7/report.html" in first.out
    assert "Report: runs/digits-fedavg-7-2/report.html" in second.out


def test_flags_come_before_the_file_and_the_file_before_the_defaults(bpfed: Command) -> None:
    Path("c.toml").write_text(
        '[data]\npartition = "iid"\n[method]\ntemperature = 0.5\nlr = 1\n[run]\nrounds = 9\nbatch = 20\n'
    )
    bpfed.ok(*SMALL, "c.toml", "--rounds", "1", "--set", "method.temperature=0.3", "--out", "a")
    config = tomllib.loads(Path("a/config.toml").read_text())
    assert config["data"]["partition"] == "iid"
    assert config["method"] == {"name": "bpfed-recipe"} | Recipe(temperature=0.3, lr=1.0).settings()
    assert (config["run"]["rounds"], config["run"]["batch"], config["run"]["bins"]) == (1, 20, Settings().bins)


def test_a_linear_model_is_a_flag_and_its_run_can_be_repeated_resumed_and_used(bpfed: Command) -> None:
    lines = [f"{site},{x},{2 * x + 3 * site + (x * 7) % 3}" for site in range(12) for x in range(8)]
    Path("t.csv").write_text("\n".join(["site,x,y", *lines]) + "\n")
    asked = ("run", "--data", "folder:t.csv", "--target", "y", "--client-column", "site", "--rounds", "3", "--quiet")
    outcome = bpfed.ok(*asked, "--model", "linear", "--out", "a")
    assert "BPFed linear on folder:t.csv, 12 clients, 3 rounds, seed 0" in outcome.out
    config = tomllib.loads(Path("a/config.toml").read_text())
    assert config["method"]["name"] == "bpfed-linear"
    assert (config["run"]["network"], config["run"]["participants"]) == ("linear", 12)
    bpfed.ok("run", "a/config.toml", "--out", "b", "--quiet")
    assert metrics(Path("a")) == metrics(Path("b"))
    bpfed.ok("run", "--out", "b", "--resume", "--back-to", "1", "--quiet")
    assert metrics(Path("a")) == metrics(Path("b"))
    bpfed.ok("predict", "a", "--input", "t.csv", "--client", "3", "--out", "p.csv")
    assert len(Path("p.csv").read_text().splitlines()) == 97
    assert "stands for --method bpfed-linear" in bpfed(*asked, "--model", "linear", "--method", "fedavg").sentence


def test_the_config_of_a_run_repeats_it(bpfed: Command) -> None:
    args = ("--partition", "dirichlet:0.123456789", "--test-fraction", "0.3", "--data-seed", "3", "--seed", "5")
    bpfed.ok(*SMALL, "--rounds", "2", *args, "--set", "method.head_sigma=0.02", "--participants", "2", "--out", "a")
    bpfed.ok("run", "a/config.toml", "--out", "b", "--quiet")
    assert metrics(Path("a")) == metrics(Path("b"))
    assert Path("a/config.toml").read_text() == Path("b/config.toml").read_text()


def test_a_config_that_cannot_repeat_its_run_says_so(bpfed: Command) -> None:
    bpfed.ok(*PLAIN, "--rounds", "1", "--out", "a")
    text = Path("a/config.toml").read_text()
    Path("other.toml").write_text(re.sub(r'fingerprint = ".*"', 'fingerprint = "0123"', text))
    line = text[: text.index("fingerprint")].count("\n") + 1
    said = bpfed("run", "other.toml", "--out", "b", "--quiet").sentence
    assert said.startswith(f"'other.toml', line {line}: data.fingerprint was '0123'")
    Path("other.toml").write_text(re.sub(r'network = "(?!auto).*"', 'network = "MyNet"', text))
    assert "model.network was 'MyNet'" in bpfed("run", "other.toml", "--out", "b", "--quiet").sentence
    assert not Path("b").exists()
    # With another seed nobody expects the same.
    bpfed.ok("run", "other.toml", "--seed", "1", "--out", "b", "--quiet")


def test_the_network_of_tables_is_as_wide_as_is_said(bpfed: Command) -> None:
    Path("sites").mkdir()
    for site in "ab":
        rows = "".join(f"{i % 5},{i % 3},{'yes' if i % 5 > 2 else 'no'}\n" for i in range(20))
        Path(f"sites/{site}.csv").write_text(f"dose,age,label\n{rows}")
    Path("settings.toml").write_text("[run]\nhidden = 7\n")
    few = ("--data", "folder:sites", "--rounds", "1", "--epochs", "1", "--method", "fedavg", "--quiet")
    for out, words in (("a", ["--hidden", "7"]), ("b", ["--set", "run.hidden=7"]), ("c", ["settings.toml"])):
        bpfed.ok("run", *words, *few, "--out", out)
        config = tomllib.loads(Path(out, "config.toml").read_text())
        assert (config["run"]["hidden"], config["model"]["weights"]) == (7, 7 * (2 + 1 + 2) + 2)
    bpfed.ok("run", "a/config.toml", "--hidden", "5", "--quiet", "--out", "d")  # another network: no repetition
    config = tomllib.loads(Path("d/config.toml").read_text())
    assert (config["run"]["hidden"], config["model"]["weights"]) == (5, 5 * (2 + 1 + 2) + 2)
    told = [bpfed.ok("predict", run, "--client", "a", "--input", "sites/a.csv").out for run in "abcd"]
    assert told[0].startswith("label,p(no),p(yes),")
    assert told[0] == told[1] == told[2] != told[3]


def test_another_method_leaves_the_files_method_table_aside(bpfed: Command) -> None:
    Path("c.toml").write_text('[method]\nname = "bpfed"\ntemperature = 0.5\n')
    outcome = bpfed.ok(*SMALL, "c.toml", "--method", "fedavg", "--rounds", "1", "--out", "a")
    assert outcome.err == "'c.toml' configures bpfed; its [method] table is ignored because of --method fedavg.\n"
    method = tomllib.loads(Path("a/config.toml").read_text())["method"]
    assert method == {"name": "fedavg"} | FedAvg().settings()


def test_a_folder_that_exists_is_kept_unless_told_otherwise(bpfed: Command) -> None:
    bpfed.ok(*PLAIN, "--rounds", "1", "--out", "a")
    before = files(Path("a"))
    said = bpfed(*PLAIN, "--rounds", "2", "--out", "a").sentence
    assert said.startswith("The run folder 'a' already exists; add --resume")
    # An overwrite that cannot run must not have thrown the old run away.
    assert "Unknown dataset" in bpfed(*PLAIN, "--data", "digitz", "--out", "a", "--overwrite").sentence
    assert "11 labels" in bpfed(*PLAIN, "--partition", "groups:11", "--out", "a", "--overwrite").sentence
    assert "rounds is 0" in bpfed(*PLAIN, "--rounds", "0", "--out", "a", "--overwrite").sentence
    assert "choose one" in bpfed(*PLAIN, "--resume", "--overwrite", "--out", "a").sentence
    assert files(Path("a")) == before
    bpfed.ok(*PLAIN, "--rounds", "2", "--out", "a", "--overwrite")
    assert len(Path("a/metrics.jsonl").read_text().splitlines()) == 2
    assert not Path("a/checkpoint/round-000003.json").exists()


@pytest.mark.parametrize("flag", ["--overwrite", "--resume", "--quiet"])
def test_a_folder_of_something_else_is_never_written_to(bpfed: Command, flag: str) -> None:
    Path("letters").mkdir()
    Path("letters/dear.txt").write_text("Dear")
    assert "contains other files but no run" in bpfed(*SMALL, "--out", "letters", flag).sentence
    assert "cannot be a run folder" in bpfed(*SMALL, "--out", "letters/dear.txt", flag).sentence
    assert files(Path("letters")) == {"dear.txt": b"Dear"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--method bpfd", "Unknown method 'bpfd'; did you mean 'bpfed'?"),
        ("--data digit", "Unknown dataset 'digit'; did you mean 'digits'?"),
        ("--partition group", "Unknown partition 'group'; did you mean 'groups'?"),
        ("--partition random:11", "The partition asks for 11 labels per client, but the data has 10"),
        ("--clients 1798 --partition iid", "1798 clients cannot share 1797 examples"),
        ("--clients 1200 --partition shards:2", "cuts 2400 shards"),
        ("--test-fraction 1", "below 1"),
        ("--rounds many", "--rounds: run.rounds is 'many', but must be a whole number."),
        ("--rounds 0", "rounds is 0, but must be at least 1."),
        ("--chunk 0", "chunk is 0, but must be at least 1, or left unset."),
        ("--hidden 0", "hidden is 0, but must be at least 1, or left unset."),
        ("--hidden wide", "--hidden: run.hidden is 'wide', but must be a whole number."),
        ("--seed -1", "seed"),
        ("--participants 4", "participants is 4, but there are 3 clients; choose 1 to 3."),
        ("--drop-rate nan", "--drop-rate: run.drop_rate is 'nan', but must be a number."),
        ("--compile yes", "--compile: run.compile is 'yes', but must be 'auto', 'on' or 'off'."),
        (
            "--method bpfed --set method.prior_step=maybe",
            "--set: method.prior_step is 'maybe', but must be true or false.",
        ),
        ("--set method.temprature=1", "--set: unknown key 'temprature' in [method]; did you mean 'temperature'?"),
        ("--set run.temperature=1", "--set: unknown key 'temperature' in [run]; did you mean 'method.temperature'?"),
        ("--set methd.lr=1", "--set: unknown table 'methd'; did you mean 'method'?"),
        ("--set lr=1", "--set: 'lr' needs a prefix: data., method. or run.; did you mean 'method.lr'?"),
        ("--method bpfed --set rule=mean", "did you mean 'method.rule'?"),
        ("--set target=x", "did you mean 'data.target'?"),
        ("--set nosuch=1", "--set: 'nosuch' needs a prefix: data., method. or run., e.g. --set method.lr=0.01."),
        ("--set participants=1", "did you mean 'run.participants'?"),
        ("--set method.lr", "--set: 'method.lr' has no value"),
        ("--method bpfed --set method.sigma=0", "sigma = 0 (the Dirac case)"),
        ("--set method.personal=nosuch", "No parameter of the module matches personal 'nosuch'"),
        ("--method bpfed --set method.rule=meen", "did you mean 'mean'?"),
        ("--track tensorbored", "Unknown tracker 'tensorbored'; did you mean 'tensorboard'?"),
        ("--data mnist --data-dir nowhere", "Dataset 'mnist' is not in 'nowhere'"),
        ("nosuch.toml", "There is no configuration file 'nosuch.toml'; check the path."),
        ("--resume", "--resume needs the run folder, such as --out runs/first."),
        ("--overwrite", "--overwrite needs the run folder, such as --out runs/first."),
        ("--device cuda", "no CUDA device is available here"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    bpfed: Command, monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("urllib.request.urlopen", _no_network)
    assert said in bpfed(*SMALL, *shlex.split(arguments)).sentence
    assert list(Path().iterdir()) == []


def _no_network(*_: object, **__: object) -> None:
    raise OSError("no network in tests")


@pytest.mark.parametrize("flag", ["--round", "--lr"])
def test_an_unknown_flag_is_the_users_mistake(bpfed: Command, flag: str) -> None:
    outcome = bpfed("run", flag, "3")
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    assert list(Path().iterdir()) == []


def test_a_full_gpu_is_one_sentence(bpfed: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def full(self: Simulator) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Simulator, "round", full)
    assert "The GPU ran out of memory; give it less at a time" in bpfed(*PLAIN, "--out", "a").sentence


def test_a_report_is_made_again_from_the_files_alone(bpfed: Command) -> None:
    first = bpfed.ok(*PLAIN, "--rounds", "2", "--out", "a")
    before = files(Path("a"))
    Path("a/report.html").unlink()
    assert bpfed.ok("report", "a").out == first.out
    assert files(Path("a")) == before


def test_a_report_can_be_written_elsewhere(bpfed: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bpfed.ok(*PLAIN, "--rounds", "1", "--out", "a")
    page = Path("a/report.html").read_bytes()
    figures = first.out.removesuffix("Report: a/report.html\n")
    assert bpfed.ok("report", "a", "--out", "b/page.html").out == f"{figures}Report: b/page.html\n"
    assert Path("b/page.html").read_bytes() == page

    def read_only(path: Path, content: bytes | str) -> None:
        raise UserError(f"'{path}' cannot be written (Permission denied); choose another location.")

    monkeypatch.setattr("bpfed.report.html.write_whole", read_only)
    refused = bpfed("report", "a")
    assert (refused.code, refused.out) == (2, figures)
    assert refused.err == (
        "bpfed: 'a/report.html' cannot be written (Permission denied); choose another location with --out.\n"
    )


def test_a_report_needs_a_finished_run(bpfed: Command) -> None:
    assert bpfed("report", "nowhere").sentence == "The run folder 'nowhere' does not exist; check the path."
    Path("empty").mkdir()
    assert bpfed("report", "empty").sentence == (
        "'empty' is not a run folder: it has no config.toml; give one that bpfed run made."
    )
    bpfed.ok(*PLAIN, "--rounds", "1", "--out", "several/fedavg/seed-0")
    assert bpfed("report", "several").sentence == (
        "'several' is a folder of several runs; give one of them, such as 'several/fedavg/seed-0'."
    )
    bpfed.ok(*PLAIN, "--rounds", "1", "--out", "a")
    page = Path("a/report.html").read_bytes()
    Path("a/evaluation.json").write_text("{")
    assert bpfed("report", "a").sentence.startswith("'a/evaluation.json' is damaged")
    Path("a/summary.json").unlink()
    assert "is not finished; resume it with: bpfed run --out a --resume" in bpfed("report", "a").sentence
    assert Path("a/report.html").read_bytes() == page


def test_methods_lists_all_and_the_settings_of_one(bpfed: Command) -> None:
    listed = bpfed.ok("methods").out
    for name, method in METHODS.items():
        assert name in listed
        shown = bpfed.ok("methods", name).out
        assert method.paper.split(",")[0] in " ".join(shown.split())  # it may be wrapped
        for key, field in fields_of(method).items():
            assert field.description, f"{name}.{key} is not described"
            assert re.search(rf"^ *{key} +{re.escape(str(field.default).lower())} +\S", shown.lower(), re.M)
    assert "did you mean 'fedavg'" in bpfed("methods", "fedavgg").sentence


def test_data_lists_fetches_and_inspects(bpfed: Command) -> None:
    listed = bpfed.ok("data", "list").out
    assert re.search(r"^ *digits +yes ", listed, re.M)
    assert re.search(r"^ *cifar10-small +no ", listed, re.M)
    assert re.search(r"^ *dirichlet:0.3 +Each class distributed", listed, re.M)
    assert bpfed.ok("data", "fetch", "digits").out == "'digits' is built in.\n"
    shown = bpfed.ok("data", "inspect", "digits", "--clients", "2").out
    assert re.search(r"client-00 +450 +451 +█+░+ +89 +91 +89 +91 +90 +· +· +· +· +·", shown)
    assert "2 clients; 898 training and 899 test examples of 10 classes; 64 inputs each." in shown
    assert "did you mean 'digits'" in bpfed("data", "inspect", "digit").sentence
    assert "did you mean 'mnist'" in bpfed("data", "fetch", "mnis").sentence
    assert "cannot share" in bpfed("data", "inspect", "digits", "--clients", "5000").sentence
    wrong = bpfed("data", "inspect", "digits", "--standardise", "global").sentence
    assert wrong == "--standardise: data.standardise is 'global', but must be 'federated', 'local' or 'none'."
    assert "'standardise'" in bpfed("data", "inspect", "digits", "--standardise", "local").sentence


def test_without_a_terminal_what_takes_long_gets_a_line(bpfed: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("data", "terminal"):
        monkeypatch.setattr(f"bpfed.cli.{module}.PATIENCE", 0.0)
    for name in ("a", "b"):
        Path("own").mkdir(exist_ok=True)
        Path(f"own/{name}.csv").write_text("x,y\n" + "1,no\n2,yes\n" * 9)
    said = bpfed.ok("data", "export", "folder:own", "out").err
    assert "loading folder:own …\n" in said
    assert said.endswith("writing out …\n")
    assert "loading digits …\n" in bpfed.ok("data", "inspect", "digits").err
    assert "downloading mnist …\n" in bpfed("data", "fetch", "mnist").err
    run = bpfed.ok(*(a for a in PLAIN if a != "--quiet"), "--rounds", "1", "--device", "cpu").err
    assert "loading digits …\n" in run
    assert "FedAvg on digits, 3 clients, cpu, round 1: training …\n" in run


def test_who_the_clients_are_is_said_in_words(bpfed: Command) -> None:
    Path("all.csv").write_text("ward,x,y\n" + "east,1,no\nwest,2,yes\neast,2,yes\nwest,1,no\n" * 9)
    shown = bpfed.ok("data", "inspect", "folder:all.csv", "--target", "y", "--client-column", "ward").out
    assert "folder:all.csv, one client per 'ward':" in shown
    assert "digits, partition groups: training" in bpfed.ok("data", "inspect", "digits").out


def test_one_is_no_plural(bpfed: Command) -> None:
    Path("own").mkdir()
    Path("own/bern.csv").write_text("x,y\n" + "1,no\n2,yes\n" * 9)
    data = ("--data", "folder:own", "--target", "y")
    shown = bpfed.ok("data", "inspect", "folder:own", "--target", "y").out
    assert "1 client; " in shown
    assert "folder:own, one client per file:" in shown
    assert bpfed.ok("data", "export", "folder:own", "out").out == "1 file in out, such as bern.csv.\n"
    run = ("run", "--method", "fedavg", "--epochs", "1", "--rounds", "1", *data, "--out", "a")
    assert "FedAvg on folder:own, 1 client, 1 round, seed 0" in bpfed.ok(*run, "--quiet").out
    again = bpfed.ok("run", "--out", "a", "--resume", "--quiet").err
    assert again.endswith("\nThe run in 'a' is finished already: its only round is done.\n")
    assert again.startswith("There is only one client, 'bern', so nobody learns from others; ")
    assert Run.load("a").summary().startswith("FedAvg on folder:own: 1 client, round 1, ")
    Path("new.csv").write_text("x\n1\n")
    assert bpfed.ok("predict", "a", "--client", "bern", "--input", "new.csv", "--out", "p.csv").out == (
        "1 prediction of 'bern': p.csv\n"
    )
    compared = bpfed.ok("compare", *data, "--methods", "fedavg,local", "--seeds", "1", "--rounds", "1", "-q").out
    assert "one seed with 1 client is not enough" in " ".join(compared.split())


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_no_number_is_ever_cut_short(bpfed: Command, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = bpfed.ok("data", "inspect", "digits", "--clients", "2").out
    assert re.search(r"client-00 +450 +451 ", shown)
    assert (" 89 " in shown) == (columns > 60)
    many = bpfed.ok("data", "inspect", "digits", "--clients", "100", "--partition", "iid").out
    assert "100 clients, 40 of 100 shown;" in many


@pytest.mark.parametrize(
    "command",
    [[], ["run"], ["methods"], ["data"], ["data", "list"], ["data", "fetch"], ["data", "inspect"], ["report"]],
)
def test_every_command_has_help_with_an_example(bpfed: Command, command: list[str]) -> None:
    assert "Example: bpfed" in bpfed.ok(*command, "--help").out


@pytest.mark.parametrize(
    ("arguments", "near"), [("runn", "run"), ("data lst", "list"), ("deploy dmo", "demo"), ("paper tabel1", "table1")]
)
def test_a_command_that_does_not_exist_is_refused_with_the_nearest_one_named_once(
    bpfed: Command, arguments: str, near: str
) -> None:
    typed = arguments.split()
    assert bpfed(*typed).sentence == f"Unknown command '{typed[-1]}'; did you mean '{near}'?"


def test_the_version(bpfed: Command) -> None:
    assert re.fullmatch(r"bpfed \d+\.\d+\.\d+\n", bpfed.ok("--version").out)


def test_help_says_what_an_argument_is(bpfed: Command) -> None:
    """Pairs of typer and click that do not fit each other leave it out."""
    assert "Folder of a finished run." in bpfed.ok("predict", "--help").out


def test_the_package_has_the_version_that_the_command_says(bpfed: Command) -> None:
    try:
        installed = importlib.metadata.version("bpfed")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("bpfed runs from its source here; it is not installed")
    assert installed in bpfed.ok("--version").out


def test_help_needs_none_of_what_is_slow_to_import() -> None:
    slow = {"torch", "numpy", "sklearn", "scipy", "matplotlib", "pydantic", "jinja2", "bpfed.cli.run"}
    code = f"import sys, bpfed.cli\ntry: bpfed.cli.main(['--help'])\nfinally: print(*{slow} & {{*sys.modules}}, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "predict" in done.stdout
    assert done.stderr == "\n"


def test_completion_offers_the_commands_and_imports_none_of_them() -> None:
    code = "import sys, bpfed.cli\nsys.argv = ['bpfed']\ntry: bpfed.cli.main()\nfinally: print('bpfed.cli.run' in sys.modules)"
    asked = {"_BPFED_COMPLETE": "complete_bash", "COMP_WORDS": "bpfed r", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env={**os.environ, **asked}
    )
    assert done.stdout.split() == ["run", "report", "False"]


def test_the_help_shows_the_first_paragraph_of_each_commands_own() -> None:
    for name, lazy in COMMANDS.items():
        assert " ".join((lazy.load(name).help or "").partition("\n\n")[0].split()) == lazy.summary


def test_the_installed_command_ends_with_the_right_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bpfed", "run", "--method", "fedavgg", "--out", str(tmp_path / "a")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "bpfed: Unknown method 'fedavgg'; did you mean 'fedavg'?\n"
    assert list(tmp_path.iterdir()) == []


def test_names_are_printed_as_they_are(capsys):
    shown = terminal.table("[bold]a[/bold]", "folder:b", title="Comparison on folder:hospital")
    shown.add_row(":smile:", "[red]x[/red]")
    terminal.put(shown)
    said = capsys.readouterr().out
    for word in ("folder:hospital", "[bold]a[/bold]", "folder:b", ":smile:", "[red]x[/red]"):
        assert word in said


def test_more_examples_held_back_are_no_changed_data(bpfed: Command, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    bpfed.ok(*PLAIN, "--data", "digits", "--rounds", "1", "--out", str(first))
    bpfed.ok("run", str(first / "config.toml"), "--calibration", "0.2", "--quiet", "--out", str(second))
    assert (second / "calibration.json").exists()


def test_the_former_name_of_a_flag_says_the_new_one(bpfed: Command, tmp_path: Path) -> None:
    said = bpfed("deploy", "init", str(tmp_path / "fed"), "--preparation", "columns.json").sentence
    assert said == "--preparation is called --preprocessing now; write --preprocessing columns.json."
