"""Records that no run has written, with hashes that fit them: a report of such a folder is refused in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command import PLAIN, Command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bpfed._util.errors import UserError
from bpfed._util.files import sha256, to_json
from bpfed.report.manifest import Manifest

RECORDS = ("evaluation.json", "summary.json", "manifest.json")
#: Values of every type that JSON has.
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats(-9.0, 9.0) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, untraced: None) -> Path:
    from bpfed.cli import main

    place = tmp_path_factory.mktemp("forged") / "run"
    with pytest.raises(SystemExit) as ended:
        main([*PLAIN, "--rounds", "1", "--calibration", "0.2", "--baselines", "off", "--out", str(place)])
    assert not ended.value.code
    return place


def places(record: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each value in a record, of lists to the first alone; values inside values too."""
    below = (
        record.items() if isinstance(record, dict) else list(enumerate(record))[:1] if isinstance(record, list) else ()
    )
    return [way, *(found for key, value in below for found in places(value, (*way, key)))]


def put(record: Any, way: tuple[Any, ...], value: Any) -> Any:
    """The record with another value there."""
    if not way:
        return value
    inside: Any = record
    for key in way[:-1]:
        inside = inside[key]
    inside[way[-1]] = value
    return record


def rehashed(manifest: Any) -> str:
    """The text of a manifest whose own hash fits it."""
    if isinstance(manifest, dict):
        manifest.pop("sha256", None)
        manifest["sha256"] = sha256(json.dumps(manifest, sort_keys=True, ensure_ascii=False))
    return to_json(manifest)


@pytest.mark.parametrize("value", [None, 5, 1.5, True, [], [1], {"summary.json": 5}, {"summary.json": None}], ids=str)
@pytest.mark.parametrize("key", ["format", "bpfed", "run", "files", "copies"])
def test_a_manifest_of_other_types_is_damaged(sound: Path, tmp_path: Path, key: str, value: Any) -> None:
    shutil.copytree(sound, tmp_path / "run")
    manifest = json.loads((sound / "manifest.json").read_text())
    (tmp_path / "run" / "manifest.json").write_text(rehashed(manifest | {key: value}))
    with pytest.raises(UserError, match=r"manifest.json' (is damaged|has format)"):
        Manifest.read(tmp_path / "run")


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), file=st.sampled_from(RECORDS))
def test_no_forged_record_ends_in_a_traceback(
    sound: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str], data: Any, file: str
) -> None:
    folder = tmp_path_factory.mktemp("forged", numbered=True) / "run"
    shutil.copytree(sound, folder)
    record = json.loads((folder / file).read_text())
    record = put(record, data.draw(st.sampled_from(places(record))), data.draw(ODD))
    manifest = json.loads((folder / "manifest.json").read_text())
    if file == "manifest.json":
        manifest = record
    else:
        (folder / file).write_text(to_json(record))
        manifest["files"][file] = sha256((folder / file).read_bytes())
    (folder / "manifest.json").write_text(rehashed(manifest))
    outcome = Command(capsys)("report", folder, "--json", "--out", folder / "page.html")
    shutil.rmtree(folder)
    assert outcome.code == 0 or outcome.sentence
