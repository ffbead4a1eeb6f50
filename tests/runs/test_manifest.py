"""The manifest of a run folder: what it lists, what is refused for it, and what a kill between two files leaves."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from command import Command, as_before_manifests, files
from damage import COMMANDS, FILES, Folders, cases, run_all, table
from scenarios import classification

import bpfed
from bpfed import Run, UserError, fit
from bpfed._util.files import from_json, from_toml
from bpfed.data import unescaped
from bpfed.data.tabular.csvfile import escaped
from bpfed.methods import FedAvg
from bpfed.report.manifest import Manifest, finished
from bpfed.runs import folder as folder_module

QUICK = {"rounds": 2, "epochs": 1, "progress": False, "say": str}
#: Of all cases of damage, so many are tried here, fewer of those that train; `tests/damage.py` tries them all.
SAMPLED = {
    "predict": 90,
    "predict a newcomer": 60,
    "report": 60,
    "adapt": 25,
    "resume": 25,
    "resume one broken off": 16,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, untraced: None) -> Folders:
    return Folders.make(tmp_path_factory.mktemp("damage"))


def test_no_damage_changes_a_prediction_or_ends_in_a_traceback(folders: Folders) -> None:
    chosen = []
    for command, wanted in SAMPLED.items():
        every = [case for case in cases() if case.command == command]
        chosen += [every[k * len(every) // wanted] for k in range(wanted)]
    counts, wrong = run_all(folders, chosen)
    print("\n" + table(counts))
    assert wrong == []
    tried = {key: n for key, n in counts.items() if key[2] in ("refused", "same")}
    assert sum(tried.values()) >= 239
    assert {command for _, command, _ in tried} == set(COMMANDS)
    assert {file for file, _, _ in tried} == set(FILES)
    assert sum(n for (_, _, word), n in tried.items() if word == "refused") > 100


@pytest.mark.parametrize("value", ["0", "-1", "NaN", "1e999", "1" + "0" * 400, "true", '"1"', "null", "[" * 50_000])
def test_a_run_without_a_manifest_loads_as_before_but_not_with_such_a_calibration_temperature(
    folders: Folders, tmp_path: Path, value: str
) -> None:
    old = as_before_manifests(Path(shutil.copytree(folders.place / "run", tmp_path / "copy")))
    (tmp_path / "new.csv").symlink_to(folders.place / "new.csv")
    assert COMMANDS["predict"](old) == folders.wanted["predict"]
    report = COMMANDS["report"](old).replace(str(tmp_path), str(folders.place))
    assert report == folders.wanted["report"]
    (old / "learnt.json").write_text(f'{{"calibration_temperature": {value}}}')
    with pytest.raises(UserError, match=r"learnt.json' is damaged .*; delete it to repeat the calibration pilots"):
        Run.load(old)


@pytest.mark.parametrize(
    ("file", "pattern", "value", "said"),
    [
        ("data.json", r'"scale": [0-9.]+', '"scale": -1.0', "data.json' is damaged|preprocessing's record is damaged"),
        ("data.json", r'"mean": [0-9.-]+', '"mean": NaN', "data.json' is damaged .NaN is not a number"),
        ("data.json", r'"input_shape": \[\s*\d+', '"input_shape": [99999999999999', "'input_shape' is no shape"),
        ("data.json", r'"classes": \d+', '"classes": 3', "'classes' is not the number of labels"),
        ("data.json", r'"task": "\w+"', '"task": "juggling"', "there is no such task"),
        ("data.json", r'"labels": \[\s*"ill"', '"labels": ["healthy"', "its preprocessing is of other data"),
        ("calibration.json", r'"temperatures": \[[0-9.]+', '"temperatures": [0.0', "not a number above 0"),
        ("calibration.json", r'"offsets": \[0', '"offsets": [1', "its offsets do not fit its scores"),
        ("calibration.json", r'"scores": \[[0-9.e-]+', '"scores": [7.5', "not numbers in rising order"),
    ],
)
def test_the_content_of_a_run_without_a_manifest_is_checked(
    folders: Folders, tmp_path: Path, file: str, pattern: str, value: str, said: str
) -> None:
    path = as_before_manifests(Path(shutil.copytree(folders.place / "run", tmp_path / "old"))) / file
    changed, count = re.subn(pattern, value, path.read_text(), count=1)
    assert count
    path.write_text(changed)
    with pytest.raises(UserError, match=said):
        Run.load(tmp_path / "old")


def test_it_lists_the_hashes_of_all_that_matters_as_sha256sum_prints_them(folders: Folders) -> None:
    run = folders.place / "run"
    found = json.loads((run / "manifest.json").read_text())
    assert (found["format"], found["bpfed"]) == (1, bpfed.__version__)
    listed = {"config.toml", "learnt.json", "data.json", "model.safetensors", "calibration.json"}
    assert set(found["files"]) == {*listed, "evaluation.json", "summary.json", "metrics.jsonl"}
    for name, own in found["files"].items():
        assert hashlib.sha256((run / name).read_bytes()).hexdigest() == own
    assert all(json.loads(p.read_text())["identity"] == found["run"] for p in (run / "checkpoint").glob("*.json"))


def test_an_edited_configuration_is_named_and_restored_by_resuming(command: Command, folders: Folders) -> None:
    run = Path(shutil.copytree(folders.place / "run", "run"))
    before = files(run)
    (run / "config.toml").write_text(
        (run / "config.toml").read_text().replace("calibration_temperature = 1.0", "calibration_temperature = 2.0")
    )
    said = command("predict", "run", "--client", "genf", "--input", folders.place / "new.csv").sentence
    assert said == (
        "'run/config.toml' has been changed since the run wrote it (run.calibration_temperature is 2.0 there and 1.0 in the run), but a "
        "run keeps the settings it began with; put it back from a copy, or restore it with: bpfed run --out run --resume "
        "(to train another run with the changed file: bpfed run run/config.toml --out NEW)"
    )
    assert command("report", "run").sentence == said
    assert command("adapt", "run", "--name", "n").sentence == said
    again = command.ok("run", "--resume", "--out", "run", "-q").err
    assert "'run/config.toml' was damaged or had been changed; it is written again." in again
    assert {k: v for k, v in files(run).items() if k != "report.html"} == {
        k: v for k, v in before.items() if k != "report.html"
    }


def test_resuming_a_finished_run_with_an_empty_model_mends_it_and_says_so(command: Command, folders: Folders) -> None:
    run = Path(shutil.copytree(folders.place / "run", "run"))
    (run / "model.safetensors").write_bytes(b"")
    said = command("predict", "run", "--client", "genf", "--input", folders.place / "new.csv").sentence
    assert said.startswith("'run/model.safetensors' is empty: manifest.json has another hash; put it back")
    again = command.ok("run", "--resume", "--out", "run", "-q").err
    assert "'run/model.safetensors' was damaged or had been changed; it is written again." in again
    shown = command.ok("predict", "run", "--client", "genf", "--input", folders.place / "new.csv").out
    assert shown == folders.wanted["predict"]


def test_a_checkpoint_of_another_run_of_the_same_shape_is_refused(tmp_path: Path) -> None:
    for seed in (0, 1):
        fit(FedAvg(), classification(), out=tmp_path / str(seed), seed=seed, **QUICK)
    for path in (tmp_path / "1/checkpoint").iterdir():
        shutil.copy(path, tmp_path / "0/checkpoint" / path.name)
    with pytest.raises(UserError, match=r"are of another run \(round-000002, round-000001\); put its own back"):
        Run.load(tmp_path / "0")
    with pytest.raises(UserError, match="are of another run"):
        fit(FedAvg(), classification(), out=tmp_path / "0", resume=True, **QUICK)
    # Without the manifest, the checkpoints still tell.
    (tmp_path / "0/manifest.json").unlink()
    with pytest.raises(UserError, match=r"manifest.json' is missing; put it back from a copy, or write it again with"):
        Run.load(tmp_path / "0")
    with pytest.raises(UserError, match="are of another run"):
        fit(FedAvg(), classification(), out=tmp_path / "0", resume=True, **QUICK)


def test_a_lost_manifest_is_written_again_by_resuming(tmp_path: Path) -> None:
    fit(FedAvg(), classification(), out=tmp_path / "a", **QUICK)
    before = files(tmp_path / "a")
    for damage in (Path.unlink, lambda path: path.write_text("{}")):
        damage(tmp_path / "a/manifest.json")
        with pytest.raises(UserError, match=r"manifest\.json' is"):
            Run.load(tmp_path / "a")
        fit(FedAvg(), classification(), out=tmp_path / "a", resume=True, **QUICK)
        assert files(tmp_path / "a") == before


@pytest.mark.parametrize("writes", range(12))
def test_a_kill_between_any_two_files_at_the_end_leaves_a_run_that_resuming_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int, untraced: None
) -> None:
    data, calls = classification(), []
    whole = fit(FedAvg(), data, **QUICK)
    real, original = folder_module.write_whole, bpfed.report.manifest.write_whole

    def dying(path: Path, content: bytes | str) -> None:
        calls.append(path)
        if len(calls) > writes:
            raise ZeroDivisionError
        real(path, content)

    with monkeypatch.context() as patch:
        for module in (folder_module, bpfed.report.manifest, bpfed.runs.checkpoint, bpfed.report.html):
            if hasattr(module, "write_whole"):
                patch.setattr(module, "write_whole", dying)
        try:
            fit(FedAvg(), data, out=tmp_path / "a", **QUICK)
        except ZeroDivisionError:
            assert not finished(tmp_path / "a")
        else:
            assert len(calls) <= writes
    assert original is real
    fit(FedAvg(), data, out=tmp_path / "a", resume=True, **QUICK)
    loaded = Run.load(tmp_path / "a")
    assert loaded.finished
    assert torch.equal(loaded.clients()[0].predict(data.test.x).probs, whole.clients()[0].predict(data.test.x).probs)


def test_resuming_a_finished_run_writes_no_file_that_is_as_it_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(FedAvg(), classification(), out=tmp_path / "a", **QUICK)
    written: list[str] = []
    for module in (folder_module, bpfed.report.manifest):
        monkeypatch.setattr(module, "write_whole", lambda path, content: written.append(path.name))
    fit(FedAvg(), classification(), out=tmp_path / "a", resume=True, **QUICK)
    assert written == []


def test_a_file_of_another_format_names_the_version_to_use(tmp_path: Path) -> None:
    fit(FedAvg(), classification(), out=tmp_path / "a", **QUICK)
    manifest = Manifest.read(tmp_path / "a")
    assert manifest is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpfed.report.manifest, "FORMAT", 2)
        manifest.write(tmp_path / "a")
    with pytest.raises(UserError, match=rf"has format 2, but this bpfed .* reads 1; use bpfed {bpfed.__version__} or"):
        Run.load(tmp_path / "a")


def test_newcomers_of_one_name_are_not_taken_for_others(command: Command, folders: Folders) -> None:
    shutil.copytree(folders.place / "run", "run")
    Path("run/adapted/ward.safetensors").rename("run/adapted/other.safetensors")
    said = command("predict", "run", "--client", "other", "--input", folders.place / "new.csv").sentence
    assert said.startswith("'run/adapted/other.safetensors' is the newcomer 'ward', not 'other'; rename the file")
    adapted = ("--adapted", "run/adapted/other.safetensors")
    shown = command.ok("predict", "run", *adapted, "--input", folders.place / "new.csv").out
    assert shown == folders.wanted["predict a newcomer"]


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=HYPERLINK(1)", "'=HYPERLINK(1)"),
        ("+A1", "'+A1"),
        ("-cmd", "'-cmd"),
        ("@SUM", "'@SUM"),
        ("\tx", "'\tx"),
        ("\rx", "'\rx"),
        ("\nx", "'\nx"),
        (" =1+1", "' =1+1"),
        ("\u200b@x", "'\u200b@x"),
        ("\uff1d1+1", "'\uff1d1+1"),
        (" -1", " -1"),
        ("'=x", "''=x"),
        ("-1", "-1"),
        ("+2.5e3", "+2.5e3"),
        ("-inf", "-inf"),
        ("plain", "plain"),
        ("'quoted'", "'quoted'"),
        ("", ""),
    ],
)
def test_text_that_a_spreadsheet_would_run_is_escaped_and_can_be_read_back(cell: str, written: str) -> None:
    assert escaped(cell) == written
    assert unescaped(written) == cell


def test_labels_that_are_formulas_are_escaped_in_predictions(command: Command) -> None:
    Path("sites").mkdir()
    for site in "ab":
        Path(f"sites/{site}.csv").write_text("x,id,y\n" + '1,@one,"=HYPERLINK(""http://x"")"\n-2,-7,-1\n' * 9)
    asked = ("--ignore", "id", "--method", "fedavg", "--epochs", "20", "--rounds", "3", "-q")
    command.ok("run", "--data", "folder:sites", "--out", "run", *asked)
    out = command.ok("predict", "run", "--client", "a", "--input", "sites/a.csv", "--keep", "id,x").out
    assert re.search(r"^'@one,1,\"'=HYPERLINK\(", out, re.MULTILINE)
    assert re.search(r"^-7,-2,-1,", out, re.MULTILINE)
    assert not re.search(r"(^|,)\"?[=@]", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "9" * 20], f"rounds is {'9' * 20}, but must be at most 999999."),
        (["--bins", "100000000"], "bins is 100000000, but must be at most 1000."),
        (["--epochs", "9" * 20], f"epochs is {'9' * 20}, but must be at most 1000000."),
        (["--batch", "9" * 20], f"batch is {'9' * 20}, but must be at most 1000000000."),
        (["--set", "method.lr=1e300"], "lr is 1e+300, which is more than a network can compute with; choose less."),
    ],
)
def test_absurd_numbers_get_a_sentence(command: Command, arguments: list[str], said: str) -> None:
    assert command("run", "--data", "digits", "-q", *arguments).sentence == said
    assert not Path("runs").exists()


def test_text_nested_too_deeply_is_no_traceback(command: Command) -> None:
    Path("deep.toml").write_text("a = " + "[" * 50_000)
    assert command("run", "deep.toml").sentence.endswith("is not valid TOML: it is nested too deeply.")
    for parse, text in ((from_json, "[" * 50_000), (from_toml, "a = " + "[" * 50_000)):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse(text)
    for wrong in ("NaN", "[1e999]", "-Infinity"):
        with pytest.raises(ValueError, match="is not a number"):
            from_json(wrong)


def test_half_of_a_character_is_no_text() -> None:
    """JSON can hold it, and no file in UTF-8 can."""
    assert from_json(r'["\ud83d\ude00", "\u00e9", "\\ud800"]') == ["\U0001f600", "é", "\\ud800"]
    for wrong in (r'{"\ud800": 1}', r'["\uDC00\uD800"]', '["\ud800"]'):
        with pytest.raises(ValueError, match="half of a character"):
            from_json(wrong)


@pytest.mark.parametrize("record", ["[]", '"x"', "3", "null", "{}", '{"calibration_temperature": []}'])
def test_a_forged_calibration_temperature_is_damaged(record: str) -> None:
    Path("learnt.json").write_text(record)
    with pytest.raises(UserError, match="is damaged"):
        folder_module.learnt(Path())
