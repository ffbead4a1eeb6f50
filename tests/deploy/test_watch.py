"""What whoever watches a deployment sees."""

import io
import time

from rich.console import Console

from bpfed.deploy.server.status import StatusDisplay, done, waited_for


def status(state, round_, metrics=None, **sites):
    words = {"no": (False, False), "joining": (True, False), "yes": (True, True)}
    seen = {site: dict(zip(("online", "ready"), words[word], strict=True)) for site, word in sites.items()}
    return {"state": state, "round": round_, "rounds": 3, "sites": seen, "metrics": metrics, "error": ""}


def shown():
    return Console(file=io.StringIO(), width=200)


def test_who_joins_and_leaves_is_said_once():
    console = shown()
    with StatusDisplay(console) as watched:
        for found in (
            status("waiting for sites", 0, a="no", b="no"),
            status("waiting for sites", 0, a="joining", b="no"),
            status("waiting for sites", 0, a="joining", b="no"),
            status("waiting for sites", 0, a="yes", b="joining"),
            status("running", 1, a="no", b="yes"),
        ):
            watched.status(found)
    lines = [line.partition(" ")[2] for line in console.file.getvalue().splitlines()]
    assert lines == [
        "Waiting for sites, round 0 of 3 done.",
        "Site 'a' has joined.",
        "Site 'a' is ready.",
        "Site 'b' has joined.",
        "Site 'a' is gone.",
        "Site 'b' is ready.",
        "Running, round 1 of 3 done.",
    ]


def test_what_is_refused_is_said_with_the_reason():
    console = shown()
    found = status("running", 1, a="yes", b="yes")
    found["sites"]["a"] |= {"refused": 1, "lost": 0, "why": "its message in round 2 was not used: no."}
    with StatusDisplay(console) as watched:
        watched.status(found)
        watched.status(found)
    assert console.file.getvalue().count("Site 'a': its message in round 2 was not used: no.") == 1


def test_what_is_noted_of_the_data_is_said_once():
    console = shown()
    found = status("running", 1, a="yes") | {"notes": ["Columns 'X' and 'x' differ."]}
    with StatusDisplay(console) as watched:
        for seen in (found, found, found | {"round": 2}, found | {"notes": [*found["notes"], "More."]}):
            watched.status(seen)
    lines = [line.partition(" ")[2] for line in console.file.getvalue().splitlines()]
    assert [lines.count(note) for note in ("Columns 'X' and 'x' differ.", "More.")] == [1, 1]


def test_silence_is_broken_with_what_is_waited_for_and_since_when(monkeypatch):
    monkeypatch.setattr("bpfed.deploy.server.status.SILENCE", (0.0, 0.0))
    console = shown()
    with StatusDisplay(console) as watched:
        watched.status(status("waiting for sites", 0, a="yes", b="no"))
        until = time.monotonic() + 20.0
        while "now." not in console.file.getvalue() and time.monotonic() < until:
            time.sleep(0.05)
    assert "Waiting for 1 of 2 sites (b), for 0:0" in console.file.getvalue()


def test_scores_come_with_the_round_they_are_of():
    console = shown()
    metrics = {"round": 1, "accuracy": {"pooled": 0.5}, "nll": {"pooled": 1.25}, "ece": {"pooled": 0.1}}
    with StatusDisplay(console) as watched:
        watched.status(status("running", 2, metrics, a="yes"))
    assert "Running, round 2 of 3 done. Round 1: accuracy 50" in console.file.getvalue()


def test_what_is_waited_for():
    assert waited_for(status("running", 1, a="yes")) == "round 2 of 3 is under way"
    assert waited_for(status("running", 3, a="yes")) == "waiting for the last round's scores"
    waiting = status("waiting for sites", 0, a="joining", b="no", c="yes")
    assert waited_for(waiting) == "waiting for 2 of 3 sites (a: joined, getting ready; b)"
    assert waited_for(status("waiting for sites", 0, a="yes")) == "round 1 of 3 is under way"


def test_a_pilot_is_called_one():
    console = shown()
    piloted = status("running", 2, a="yes") | {"pilot": 1, "pilots": 2}
    with StatusDisplay(console) as watched:
        for found in (piloted, piloted | {"round": 3}, piloted | {"pilot": 2, "round": 0}):
            watched.status(found)
        for round_ in (0, 1):
            watched.status(piloted | {"pilot": 0, "round": round_, "learnt": "Calibration pilots are over: 0.50."})
    lines = [line.partition(" ")[2] for line in console.file.getvalue().splitlines()]
    assert lines == [
        "Site 'a' is ready.",
        "Running, calibration pilot 1 of 2, round 2 of 3 done.",
        "Running, calibration pilot 1 of 2, round 3 of 3 done.",
        "Running, calibration pilot 2 of 2, round 0 of 3 done.",
        "Calibration pilots are over: 0.50.",
        "Running, round 0 of 3 done.",
        "Running, round 1 of 3 done.",
    ]
    assert waited_for(piloted) == "calibration pilot 1 of 2, round 3 of 3 is under way"
    assert waited_for(piloted | {"round": 3}) == "calibration pilot 1 of 2: testing on the held-out examples"
    assert [done(found) for found in (piloted, piloted | {"pilot": 2}, piloted | {"pilot": 0})] == [
        2,
        5,
        8,
    ]
