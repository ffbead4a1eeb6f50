"""``bpfed report`` and ``bpfed view`` as a user meets them, and the help that fits a screen."""

from __future__ import annotations

import csv
import http.client
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command import Command

import bpfed
from bpfed.cli import report
from bpfed.methods import FedAvg
from bpfed.report import index


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, untraced: None) -> Path:
    """A folder of tables, and a run on them in ``runs/first``."""
    place = tmp_path_factory.mktemp("place")
    (place / "sites").mkdir()
    for seed, name in enumerate(("north", "south")):
        g = np.random.default_rng(seed)
        age = g.normal(60, 10, 50)
        with (place / "sites" / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["age", "ward", "outcome"])
            writer.writerows(
                zip(age.round(1), g.choice(["a", "b"], 50), np.where(age > 60, "ill", "well"), strict=True)
            )
    data = bpfed.data.load(f"folder:{place / 'sites'}", target="outcome")
    asked = {"rounds": 1, "epochs": 1, "device": "cpu", "progress": False, "say": lambda sentence: None}
    bpfed.fit(FedAvg(), data, out=place / "runs" / "first", **asked)
    return place


@pytest.fixture
def place(runs: Path, command: Command) -> Path:
    shutil.copytree(runs / "runs", "runs")
    return Path("runs")


def test_without_a_command_there_is_help_and_no_error(command: Command) -> None:
    for arguments in ([], ["data"], ["deploy"]):
        assert "Usage: " in command.ok(*arguments).out


def test_help_is_short_and_all_flags_are_one_flag_away(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = (command.ok("run", flag).out for flag in ("--help", "--help-all"))
    assert len(short.splitlines()) < 70
    assert "--help-all" in short
    assert "--eval-draws" not in short
    assert "--eval-draws" in whole
    assert command.ok("run", "--help").out == short


def test_methods_fit_a_narrow_terminal(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert all(len(line) <= 80 for line in command.ok("methods").out.splitlines())


def test_a_report_for_programs(place: Path, command: Command) -> None:
    found = json.loads(command.ok("report", "runs/first", "--json").out)
    assert {one["name"] for one in found["sites"]} == {"north", "south"}
    assert 0 <= found["metrics"]["accuracy"]["last"] <= 1
    assert found["report"] == "runs/first/report.html"


def test_rows_are_in_no_report_but_that_of_their_client(place: Path, runs: Path, command: Command) -> None:
    before = Path("runs/first/report.html").read_text()
    command.ok("report", "runs/first", "--client", "north", "--examples")
    own = Path("runs/first/report-north.html").read_text()
    assert "These are rows of this client" in own
    assert re.search(r'<th scope="row">row \d+</th>', own)
    assert Path("runs/first/report.html").read_text() == before
    assert "row of this client" not in before
    assert "give both" in command("report", "runs/first", "--examples").sentence
    assert "give both" in command("report", "runs/first", "--client", "north").sentence
    assert "Unknown client" in command("report", "runs/first", "--client", "nort", "--examples").sentence
    Path("runs/first/adapted").mkdir()
    Path("runs/first/adapted/east.safetensors").touch()
    assert "took no part in training" in command("report", "runs/first", "--client", "east", "--examples").sentence
    shutil.rmtree("runs/first/adapted")


def test_without_a_browser_there_is_no_pdf(place: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.shutil, "which", lambda name: None)
    assert "No browser was found" in command("report", "runs/first", "--pdf").sentence


def test_an_index_links_the_reports(place: Path, command: Command) -> None:
    (place / "broken").mkdir()
    (place / "broken" / "summary.json").write_text("[")
    assert command.ok("view", "runs").out == "Index: runs/index.html\n"
    page = Path("runs/index.html").read_text()
    assert '<a href="first/report.html">first</a>' in page
    assert "&#39;broken&#39; is damaged and left out." in page
    command.ok("view", "runs", "--out", "elsewhere.html")
    assert '<a href="runs/first/report.html">first</a>' in Path("elsewhere.html").read_text()
    assert command("view", "nowhere").sentence == "'nowhere' is no folder; give one with runs in it."


@pytest.fixture
def port(place: Path) -> Iterator[int]:
    made = index.server(place)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made.server_port
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 200),
        ("/first/report.html", 200),
        ("/first/config.toml", 404),
        ("/first/", 404),
        ("/../sites/north.csv", 404),
        ("/first/../../sites/north.csv", 404),
        ("/%2e%2e/sites/north.csv", 404),
        ("//etc/passwd", 404),
        ("http://[", 404),
    ],
)
def test_only_the_page_and_its_reports_are_served(port: int, path: str, status: int) -> None:
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    asked.putrequest("GET", path, skip_host=True)
    asked.putheader("Host", f"localhost:{port}")
    asked.endheaders()
    answer = asked.getresponse()
    assert answer.status == status
    if status == 200:
        assert b"<!DOCTYPE html>" in answer.read()
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
        policy = answer.getheader("Content-Security-Policy") or ""
        assert "default-src 'none'" in policy  # a stranger's report asks nobody
        assert policy.endswith("sandbox allow-scripts")  # and is of no origin that the others are of


def test_a_page_of_another_name_gets_nothing(port: int) -> None:
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    asked.request("GET", "/", headers={"Host": "evil.example"})
    assert asked.getresponse().status == 403


def test_files_of_a_stranger_neither_run_nor_break_the_pages(place: Path, command: Command) -> None:
    shutil.copytree(place / "first", place / "<svg onload=x>")
    odd = place / "<svg onload=x>"
    summary = json.loads((odd / "summary.json").read_text())
    (odd / "summary.json").write_text(json.dumps(summary | {"data": "<img src=x>", "title": "</script><img src=x>"}))
    command.ok("view", "runs")
    page = (place / "index.html").read_text()
    assert not re.search("<img|<svg onload", page)
    assert "&lt;img src=x&gt;" in page
    assert "manifest.json" in command("report", str(odd)).sentence  # its files are not those that were written
    (odd / "summary.json").write_text(json.dumps(summary | {"clients": 10**400}))
    command.ok("view", "runs")
    assert "is damaged and left out" in (place / "index.html").read_text()
