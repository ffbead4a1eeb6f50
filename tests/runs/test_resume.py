"""A run that is broken off, in any way and at any moment, goes on as if nothing had happened."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command import SMALL, Command, as_before_manifests, files, flip, metrics, process
from scenarios import classification

from bpfed import Run, UserError, fit
from bpfed._util.files import lock
from bpfed.cli import main
from bpfed.engine.simulator import Simulator
from bpfed.methods import FedAvg

ROUNDS = 4
#: Checkpoints that are left of a run of so many rounds and more.
KEPT = 2
#: Kills at random times in the test that has them; the more the better, and the longer.
KILLS = int(os.environ.get("BPFED_KILLS", "3"))
SHORT = (*SMALL, "--data", "digits", "--rounds", str(ROUNDS), "--participants", "2", "--checkpoints", str(KEPT))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    child = process([*SHORT, "--out", str(folder / "run")], folder / "log")
    child.start()
    child.join()
    assert child.exitcode == 0, (folder / "log").read_text()
    return folder / "run"


def no_litter(folder: Path) -> bool:
    """Whether only whole files are left, and no more checkpoints than are kept."""
    checkpoints = list((folder / "checkpoint").glob("*.safetensors"))
    return not any(p.name.endswith(".part") for p in folder.rglob("*")) and len(checkpoints) == KEPT


@pytest.mark.parametrize("store", ["memory", "file"])
def test_killed_in_the_middle_of_writing_again_and_again(whole: Path, tmp_path: Path, store: str) -> None:
    chance, out = random.Random(f"moments {store}"), tmp_path / "run"
    arguments = [*SHORT, "--store", store, "--out", str(out)]
    for runner in range(4):
        # A sitting has some dozen operations on files for each round: before, between and after them, and half of a line.
        child = process([*arguments, *(["--resume"] if runner else [])], tmp_path / "log", chance.randrange(1, 40))
        child.start()
        child.join()
        assert child.exitcode in (0, -9), (tmp_path / "log").read_text()
    child = process([*arguments, "--resume"], tmp_path / "log")
    child.start()
    child.join()
    assert child.exitcode == 0, (tmp_path / "log").read_text()
    assert metrics(out) == metrics(whole)
    assert (out / "evaluation.json").read_bytes() == (whole / "evaluation.json").read_bytes()
    assert no_litter(out)


def test_killed_at_random_times(tmp_path: Path) -> None:
    # When a kill comes depends on the machine; what must hold then does not.
    chance, out = random.Random(), tmp_path / "run"
    arguments = [*SMALL, "--data", "digits", "--rounds", str(4 * KILLS), "--eval-every", "1", "--resume"]
    arguments += ["--checkpoints", str(KEPT)]
    for kill in range(KILLS):
        child = process([*arguments, "--out", str(out)], tmp_path / "log")
        child.start()
        wanted = _lines(out) + chance.randrange(3) if kill else 0
        while child.is_alive() and _lines(out) < wanted:
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.2))
        child.kill()
        child.join()
        assert child.exitcode in (0, -9), (tmp_path / "log").read_text()
    for folder in (out, tmp_path / "whole"):
        child = process([*arguments, "--out", str(folder)], tmp_path / "log")
        child.start()
        child.join()
        assert child.exitcode == 0, (tmp_path / "log").read_text()
    assert metrics(out) == metrics(tmp_path / "whole")
    assert no_litter(out)
    print((tmp_path / "log").read_text())  # where it went on, for whoever wants to see it


def _lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture(scope="module")
def broken_off(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a kill in the last of four rounds would leave it: the checkpoints of rounds 2 and 3, and no summary."""
    folder = tmp_path_factory.mktemp("broken") / "run"
    real, calls = Simulator.round, []

    def interrupted(self: Simulator) -> object:
        calls.append(self)
        if len(calls) == ROUNDS:
            raise KeyboardInterrupt
        return real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Simulator, "round", interrupted)
        with pytest.raises(SystemExit):
            main([*SHORT, "--out", str(folder)])
    return folder


@pytest.fixture
def unfinished(broken_off: Path, command: Command) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(broken_off, "run"))


def test_a_resume_needs_no_flags_but_the_folder(command: Command, unfinished: Path, whole: Path) -> None:
    assert command.ok("run", "--resume", "--out", unfinished, "-q").err == "Resuming after round 3 of 4.\n"
    assert metrics(unfinished) == metrics(whole)


@pytest.mark.parametrize("store", ["memory", "file"])
def test_a_run_that_went_back_ends_bit_by_bit_as_it_did(command: Command, store: str) -> None:
    out = Path("run")
    arguments = [*SMALL, "--data", "digits", "--rounds", "4", "--participants", "2", "--store", store, "--out", out]
    command.ok(*arguments)
    line, state = metrics(out), (out / "checkpoint/round-000004.safetensors").read_bytes()
    evaluation = (out / "evaluation.json").read_bytes()
    for round_ in (1, 3):
        said = command.ok("run", "--resume", "--out", out, "--back-to", str(round_), "-q").err
        assert f"Going back to round {round_}; {4 - round_} later checkpoint" in said
        assert f"Resuming after round {round_} of 4." in said
        assert metrics(out) == line
        assert (out / "evaluation.json").read_bytes() == evaluation
        if store == "memory":  # in a file, which slots hold the states may differ, and the states do not
            assert (out / "checkpoint/round-000004.safetensors").read_bytes() == state
    assert (out / "summary.json").exists()


def test_going_back_where_that_cannot_be_is_one_sentence_and_changes_nothing(
    command: Command, unfinished: Path
) -> None:
    before = files(unfinished)
    resume = ("run", "--out", unfinished, "-q")
    kept = "rounds to go back to: 2, 3 (run.checkpoints says how many are kept)"
    assert kept in command(*resume, "--resume", "--back-to", "1").sentence
    assert "add --resume" in command(*resume, "--data", "digits", "--back-to", "1").sentence
    assert "--back-to needs the run folder" in command("run", "--back-to", "1").sentence
    assert files(unfinished) == before
    none = command("run", "--out", "none", "--resume", "--data", "digits", "--back-to", "1").sentence
    assert none == "There is no run in 'none' that could go back to round 1; leave out --back-to."
    with pytest.raises(UserError, match="back_to needs the run folder"):
        fit(FedAvg(), classification(), back_to=1)


def test_no_run_to_resume_and_nothing_to_start(command: Command) -> None:
    said = command("run", "--resume", "--out", "none", "--rounds", "1").sentence
    assert said == "There is no run to resume in 'none'; choose another --out, or start a new run with --data."
    assert not Path("none").exists()
    begun = command.ok(*SMALL, "--method", "fedavg", "--data", "digits", "--rounds", "1", "--out", "none", "--resume")
    assert begun.err == "There is no run in 'none' yet, so it starts from the first round.\n"


def test_a_finished_run_says_so_and_shows_its_table_again(command: Command, whole: Path) -> None:
    before = files(Path(shutil.copytree(whole, "run")))
    again = command.ok("run", "--resume", "--out", "run", "-q")
    assert again.out == command.ok("report", "run").out
    assert again.err == "The run in 'run' is finished already: all 4 rounds are done.\n"
    assert files(Path("run")) == before


def test_the_help_says_that_rounds_cannot_be_added(command: Command) -> None:
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", command.ok("run", "--help").out).split())
    assert "The number of rounds is fixed at the start" in shown
    assert "up to the number of rounds it was started with" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "5"], "run.rounds is 4 there and 5 here. Resume"),
        (["--rounds", "3"], "run.rounds is 4 there and 3 here. Resume"),
        (["--set", "method.temperature=0.5"], "method.temperature is 0.05 there and 0.5 here. Resume"),
        (["--method", "fedavg"], "method.name is 'bpfed-recipe' there and 'fedavg' here. Resume"),
        (["--members", "2"], "run.members is 1 there and 2 here. Resume"),
        (["--hidden", "16"], "run.hidden is 100 there and 16 here. Resume"),
        (["--participants", "none"], "run.participants is 2 there and not set here. Resume"),
        (
            ["--clients", "4", "--bins", "5"],
            "data.clients is 3 there and 4 here; run.bins is 10 there and 5 here. Resume",
        ),
    ],
)
def test_another_configuration_is_named_and_refused(
    command: Command, unfinished: Path, arguments: list[str], said: str
) -> None:
    before = files(unfinished)
    outcome = command("run", "--resume", "--out", unfinished, "-q", *arguments)
    assert outcome.code == 2
    assert f"The run in 'run' has another configuration: {said}" in outcome.err
    assert files(unfinished) == before


def test_what_a_run_has_by_default_may_be_said(command: Command, unfinished: Path, whole: Path) -> None:
    same = ("--hidden", "100", "--members", "1")
    assert command.ok("run", "--resume", "--out", unfinished, "-q", *same).err == "Resuming after round 3 of 4.\n"
    assert metrics(unfinished) == metrics(whole)


def test_a_refused_resume_leaves_the_file_of_states_alone_and_its_loss_is_damage(command: Command) -> None:
    command.ok(*SHORT, "--store", "file", "--out", "run")
    before = files(Path("run"))
    assert "state/personal.f32" in before
    assert command("run", "--resume", "--out", "run", "-q", "--set", "method.personal=all").code == 2
    assert command("run", "--resume", "--out", "run", "-q", "--clients", "5").code == 2
    assert files(Path("run")) == before
    Path("run/state/personal.f32").unlink()
    assert (
        "All checkpoints in 'run/checkpoint' are damaged" in command("run", "--resume", "--out", "run", "-q").sentence
    )


def test_a_damaged_checkpoint_falls_back_and_says_so(command: Command, unfinished: Path, whole: Path) -> None:
    flip(unfinished / "checkpoint/round-000003.safetensors")
    said = command.ok("run", "--resume", "--out", unfinished, "-q").err.splitlines()
    assert said == [
        "Checkpoint round-000003 is damaged; resuming from the one before, round 2.",
        "Resuming after round 2 of 4.",
    ]
    assert metrics(unfinished) == metrics(whole)
    assert no_litter(unfinished)


def test_if_all_checkpoints_are_damaged_nothing_is_touched(command: Command, unfinished: Path) -> None:
    for path in (unfinished / "checkpoint").glob("*.safetensors"):
        flip(path)
    before = files(unfinished)
    said = command("run", "--resume", "--out", unfinished, "-q").sentence
    assert "are damaged (round-000003, round-000002); start again with a new --out or --overwrite." in said
    assert files(unfinished) == before


def test_half_a_line_is_no_line_and_a_lost_line_is_said(command: Command, unfinished: Path, whole: Path) -> None:
    path = unfinished / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]))
    before = files(unfinished)
    assert "has no entry for round 1" in command("run", "--resume", "--out", unfinished, "-q").sentence
    assert files(unfinished) == before
    path.write_text("".join(lines) + '{"round": 4, "accuracy": {"poo')
    command.ok("run", "--resume", "--out", unfinished, "-q")
    assert metrics(unfinished) == metrics(whole)


def test_a_damaged_configuration_is_restored_or_said(command: Command, unfinished: Path, whole: Path) -> None:
    written = (unfinished / "config.toml").read_text()
    (unfinished / "config.toml").write_text("[data")
    said = command.ok("run", "--resume", "--out", unfinished, "-q").err.splitlines()
    assert said[0] == "'run/config.toml' was damaged or had been changed; it is written again."
    assert (unfinished / "config.toml").read_text() == written
    assert metrics(unfinished) == metrics(whole)
    (as_before_manifests(unfinished) / "config.toml").write_text("[data")
    assert "is not valid TOML" in command("run", "--resume", "--out", unfinished, "-q").sentence


def test_two_processes_do_not_write_to_one_folder(command: Command, unfinished: Path, whole: Path) -> None:
    handle, before = lock(unfinished), files(unfinished)
    said = command("run", "--resume", "--out", unfinished, "-q").sentence
    assert said.startswith("Another process is writing to 'run'; wait")
    assert files(unfinished) == before
    os.close(handle)
    command.ok("run", "--resume", "--out", unfinished, "-q")
    assert metrics(unfinished) == metrics(whole)


@pytest.mark.parametrize(("store", "after"), [("memory", 0), ("memory", 11), ("file", 18)])
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_later(
    command: Command, whole: Path, monkeypatch: pytest.MonkeyPatch, store: str, after: int
) -> None:
    calls = []

    def full(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            calls.append(real)
            if len(calls) > after:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments)

        return call

    with monkeypatch.context() as patch:
        for name in ("fsync", "write", "pwrite"):
            patch.setattr(os, name, full(getattr(os, name)))
        said = command(*SHORT, "--store", store, "--out", "run").sentence
    assert said.startswith("The disk is full: 'run/")
    assert said.endswith("cannot be written; free some space, then repeat the command (for a run, with --resume).")
    if after == 0:
        assert not Path("run").exists()
    else:
        assert not any(name.endswith(".part") for name in files(Path("run")))
        lines = Path("run/metrics.jsonl").read_text() if after > 1 else ""
        assert all(line.endswith("}\n") for line in lines.splitlines(keepends=True))
        assert not Path("run/summary.json").exists()
    again = command.ok(*SHORT, "--store", store, "--out", "run", "--resume")
    if after == 0:
        assert again.err == "There is no run in 'run' yet, so it starts from the first round.\n"
    assert metrics(Path("run")) == metrics(whole)


@pytest.fixture
def on_tables(command: Command) -> Command:
    """The command in a folder with a run on the tables of three sites."""
    Path("sites").mkdir()
    for site in "abc":
        Path(f"sites/{site}.csv").write_text("x,y\n" + "1,no\n2,yes\n" * 9)
    short = ("--method", "fedavg", "--epochs", "1", "--rounds", "1", "-q")
    command.ok("run", *short, "--data", "folder:sites", "--out", "run")
    return command


def test_a_run_whose_tables_have_changed_is_not_told_to_omit_what_it_was_not_given(on_tables: Command) -> None:
    Path("sites/b.csv").unlink()
    assert on_tables("run", "--out", "run", "--resume").sentence == (
        "'folder:sites' has changed since the run of 'run/config.toml' began, when it had 3 clients, not 2; restore it, "
        "or start a new run with another --out."
    )


def test_a_run_may_go_on_with_less_memory_as_it_is_told_to(command: Command, unfinished: Path, whole: Path) -> None:
    less = ("--chunk", "1", "--memory", "900", "--compile", "off")
    assert command.ok("run", "--resume", "--out", unfinished, "-q", *less).err == "Resuming after round 3 of 4.\n"
    assert metrics(unfinished).count("\n") == metrics(whole).count("\n")


def test_a_run_on_tables_goes_on_from_elsewhere_and_when_they_have_moved(
    on_tables: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert "is finished already" in on_tables.ok("run", "--out", "../run", "--resume", "-q").err
    shutil.move("../sites", "moved")
    assert "cannot be opened" in on_tables("run", "--out", "../run", "--resume").sentence
    assert (
        "is finished already" in on_tables.ok("run", "--out", "../run", "--resume", "-q", "--data", "folder:moved").err
    )
    Path("moved/a.csv").write_text("x,y\n" + "3,no\n2,yes\n" * 9)
    said = on_tables("run", "--out", "../run", "--resume", "-q", "--data", "folder:moved")
    assert said.code == 2
    assert "has another configuration" in said.err


def test_what_pilots_have_learnt_is_learnt_again_if_it_is_lost(tmp_path: Path) -> None:
    asked = {"rounds": 2, "epochs": 1, "calibrate": "pilot:1", "progress": False, "say": str, "out": tmp_path / "run"}
    run = fit(FedAvg(), classification(), **asked)
    (tmp_path / "run" / "learnt.json").unlink()
    with pytest.raises(
        UserError, match=r"learnt.json' is missing or cannot be read; .* write it again with: bpfed run"
    ):
        Run.load(tmp_path / "run")
    fit(FedAvg(), classification(), resume=True, **asked)
    assert Run.load(tmp_path / "run").calibration_temperature == run.calibration_temperature
