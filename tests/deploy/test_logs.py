"""The logs of a server and of sites: levels, plain lines with the time, and what a process hands to its parent."""

import os
import re
import sys

import pytest
from command import Command

from bpfed.deploy import logs
from bpfed.deploy.ops.supervise import environment
from bpfed.deploy.settings import Plan


def said(say):
    say("Site 'a' joins; 100 % of [red]sites[/red].")
    logs.warn(say, "A message was refused.")
    logs.fail(say, "The disk is full.")


def test_in_a_file_lines_are_plain_with_date_and_time_and_the_level_of_what_is_more_than_news(capsys):
    said(logs.to_terminal(None))
    lines = capsys.readouterr().err.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    assert [line[20:] for line in lines] == [
        "Site 'a' joins; 100 % of [red]sites[/red].",
        "WARNING: A message was refused.",
        "ERROR: The disk is full.",
    ]


def test_a_level_leaves_out_what_is_below_it_here_and_in_processes_that_are_started(capsys, tmp_path):
    said(logs.to_terminal("warning"))
    assert capsys.readouterr().err.count("\n") == 2
    assert environment(tmp_path, Plan(("a",)))[logs.LEVEL] == "warning"
    said(logs.to_parent(logs.ToFile(tmp_path / "run.log")))
    assert capsys.readouterr().err == "bpfed: A message was refused.\nbpfed: The disk is full.\n"
    assert [line[20:] for line in (tmp_path / "run.log").read_text().splitlines()] == [
        "A message was refused.",
        "The disk is full.",
    ]


def test_on_a_terminal_the_level_is_shown_and_names_are_no_markup(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "dumb")
    said(logs.to_terminal("info"))
    shown = capsys.readouterr().err
    assert re.search(r"^\S*\d\d:\d\d:\d\d\S* +WARNING +A message was refused\.", shown, re.MULTILINE), shown
    assert "100 % of [red]sites[/red]." in shown


def test_what_a_site_sends_cannot_begin_a_line_of_the_servers_log(capsys, tmp_path):
    logs.to_parent(logs.ToFile(tmp_path / "run.log"), one_line=True)("Column 'a\n\x1b[2Jbpfed: all is well' is new.")
    assert capsys.readouterr().err == "bpfed: Column 'a??[2Jbpfed: all is well' is new.\n"
    assert (tmp_path / "run.log").read_text().count("\n") == 1


def test_a_full_disk_ends_nothing(monkeypatch, tmp_path):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        said(logs.to_terminal("info"))
        said(logs.to_parent(logs.ToFile(tmp_path / "missing" / "run.log")))
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space"):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what it still holds goes nowhere


def test_an_unknown_level_is_refused(capsys):
    assert Command(capsys)("deploy", "server", "nowhere", "--log-level", "warn").sentence == (
        "Unknown log level 'warn'; did you mean 'warning'?"
    )
