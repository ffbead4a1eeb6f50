"""Files are whole or not there, and say what was meant."""

from __future__ import annotations

import errno
import json
import os
import tomllib
from pathlib import Path

import pytest

from bpfed._util.errors import UserError
from bpfed._util.files import append_line, clear_parts, is_part, lock, to_json, to_json_line, to_toml, write_whole


class Full:
    """Stands for a system call on a full disk; lets the first few through."""

    def __init__(self, real: object, free: int = 0, error: int = errno.ENOSPC) -> None:
        self.real, self.free, self.error = real, free, error

    def __call__(self, *arguments: object) -> object:
        self.free -= 1
        if self.free < 0:
            raise OSError(self.error, os.strerror(self.error))
        return self.real(*arguments)  # type: ignore[operator]


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "a.txt"
    write_whole(path, "σ")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_way_up_through_a_folder_that_is_missing_leads_nowhere(tmp_path: Path) -> None:
    """Whoever asked whether there is a file was told no, and would replace it."""
    (tmp_path / "kept.txt").write_text("old")
    path = tmp_path / "missing" / ".." / "kept.txt"
    assert not path.exists()
    with pytest.raises(UserError, match=r"cannot be written \(its folder does not exist\); choose another location"):
        write_whole(path, "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("kept.txt", "old")]
    (tmp_path / "missing").mkdir()
    write_whole(path, "new")
    assert (tmp_path / "kept.txt").read_text() == "new"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "old")
    monkeypatch.setattr(os, call, Full(getattr(os, call)))
    with pytest.raises(UserError, match=r"The disk is full: '.*a.txt' cannot be written; free some space"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_other_reasons_are_said_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written \(.*\); choose another location"):
        write_whole(tmp_path / "file" / "a.txt", "x")


@pytest.mark.parametrize("call", ["fsync", "write"])
def test_a_line_is_added_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "a.jsonl"
    append_line(path, "one")
    append_line(path, "two")
    monkeypatch.setattr(os, call, Full(getattr(os, call)))
    with pytest.raises(UserError, match="The disk is full"):
        append_line(path, "three")
    assert path.read_text() == "one\ntwo\n"


def test_a_line_that_the_disk_takes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, path = os.write, tmp_path / "a.jsonl"
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:2]))
    append_line(path, "seven")
    assert path.read_text() == "seven\n"
    monkeypatch.setattr(os, "write", Full(lambda handle, data: real(handle, data[:2]), free=1))
    with pytest.raises(UserError):
        append_line(path, "eight")
    assert path.read_text() == "seven\n"


def test_only_what_was_not_finished_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "a.txt", "x")
    (tmp_path / ".a.txt.k2x.part").write_text("half")
    (tmp_path / "movie.part").write_text("the user's")
    assert is_part(tmp_path / ".a.txt.k2x.part")
    clear_parts(tmp_path)
    clear_parts(tmp_path / "nowhere")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "movie.part"]


def test_a_folder_is_locked_until_the_handle_is_closed(tmp_path: Path) -> None:
    handle = lock(tmp_path)
    with pytest.raises(UserError, match="Another process is writing to"):
        lock(tmp_path)
    os.close(handle)
    os.close(lock(tmp_path))


def test_json_has_no_nan() -> None:
    value = {"a": [1.5, float("nan"), {"b": float("-inf")}], "c": ("σ", None, True)}
    plain = {"a": [1.5, None, {"b": None}], "c": ["σ", None, True]}
    assert json.loads(to_json(value)) == json.loads(to_json_line(value)) == plain
    assert "\n" not in to_json_line({"text": "two\nlines"})


def test_toml_comes_back_as_it_was() -> None:
    tables = {
        "version": "0.1",
        "data": {"name": 'a "b" \\ σ\n', "n": 3, "x": 1e-07, "on": True, "many": ["a", "b"], "none": None},
        "empty": {},
    }
    found = tomllib.loads(to_toml(tables))
    del tables["data"]["none"]
    assert found == tables
