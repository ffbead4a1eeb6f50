"""What looks the same or nearly so is two, and that is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import PLAIN, Command

from bpfed.data import load
from bpfed.data.checks.spelling import check_spelling

DIFFER = (
    "differ only in case, spaces or the encoding of letters and are treated as different; if they are the same, spell "
    "them alike in all files."
)


def rows(head: str, *lines: str) -> str:
    return "\n".join([head, *lines * 9]) + "\n"


def test_columns_labels_and_words_are_named_where_runs_and_inspect_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sites = tmp_path / "sites"
    sites.mkdir()
    (sites / "a.csv").write_text(rows("Age,by,y", "1,web,Yes", "2,big shop,no"))
    (sites / "b.csv").write_text(rows("age,by,y", "1,Web,yes", "2,big  shop,no"))
    made = load(f"folder:{sites}").preprocessor
    assert made is not None
    assert len(made.labels) == 3  # nothing is merged
    said = (
        f"Columns 'Age' and 'age' {DIFFER}",
        f"Labels 'Yes' and 'yes' of 'y' {DIFFER}",
        f"Words of 'by', such as 'Web' and 'web', {DIFFER}",
    )
    assert check_spelling(made) == said
    command = Command(capsys)
    shown = " ".join(command.ok("data", "inspect", f"folder:{sites}").out.split())
    assert all(entry in shown for entry in ("--rename 'Age=age'", "--map 'y:yes=Yes'", "--map 'by:"))
    small = [a for a in PLAIN if a not in ("--clients", "3")]
    run = command.ok(*small, "--data", f"folder:{sites}", "--rounds", "1", "--out", tmp_path / "run").err
    assert set(said) <= set(run.splitlines())


def test_a_column_like_the_target_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(rows("y,Y,x", "no,1,3", "yes,2,5"))
    made = load(f"folder:{tmp_path}", target="y").preprocessor
    assert made is not None
    assert check_spelling(made) == (f"Columns 'y' and 'Y' {DIFFER}",)


def test_letters_in_two_encodings_are_named(tmp_path: Path) -> None:
    for client, name in (("a", "\u00e9"), ("b", "e\u0301")):  # é in one character, and in two
        (tmp_path / f"{client}.csv").write_text(rows(f"{name},y", "1,no", "2,yes"))
    made = load(f"folder:{tmp_path}", target="y").preprocessor
    assert made is not None
    assert check_spelling(made) == (f"Columns 'e\u0301' and '\u00e9' {DIFFER}",)


def test_clients_that_look_alike_are_named(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    path.write_text(rows("who,x,y", "North,1,no", "north,2.5,yes", "South,3,yes", "North,4,yes"))
    data = load(f"folder:{path}", target="y", client_column="who")
    assert f"Clients 'North' and 'north' {DIFFER}" in data.notes


def test_nothing_is_said_of_what_differs_otherwise(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(rows("age,aged,y", "1,u,no", "2,v,yes"))
    made = load(f"folder:{tmp_path}", target="y").preprocessor
    assert made is not None
    assert check_spelling(made) == ()
