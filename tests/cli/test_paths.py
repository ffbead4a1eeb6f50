"""Paths that a user gives: what must not be replaced is not, and what cannot be a path is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import PLAIN, Command


def test_a_report_replaces_nothing_but_a_report(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command.ok(*PLAIN, "--data", "digits", "--rounds", "1", "--out", str(out))
    before = (out / "config.toml").read_text()
    said = command("report", str(out), "--out", str(out / "config.toml")).sentence
    assert said.endswith(
        "config.toml' exists and is not a web page, so a report must not replace it; choose another --out."
    )
    assert (out / "config.toml").read_text() == before
    assert command.ok("report", str(out), "--out", str(out / "report.html")).code == 0
    newcomer = ("adapt", str(out), "--name", "n", "--out", str(out / "model.safetensors"), "--overwrite")
    assert "belongs to the run, so a newcomer must not replace it" in command(*newcomer).sentence


@pytest.mark.parametrize(
    "asked", [("report",), ("predict", "--client", "a", "--input", "x.csv"), ("run", "--resume", "--out")]
)
def test_a_path_that_cannot_be_is_one_sentence(command: Command, asked: tuple[str, ...]) -> None:
    name, *options = asked
    long = "x" * 300
    assert "cannot be used (File name too long)" in command(name, *options, long).sentence
