"""The seconds of a round, read off an exchange and a site's log."""

import json
import time

import pytest

from benchmarks import rounds
from bpfed.deploy import apps
from bpfed.deploy.ops.supervise import stamp

#: Seconds after the server has sent, for each mark in a site's log.
LOG = (
    (2.0, "\x1b[92mINFO \x1b[0m:      Receiving: train message (ID: 4711)"),
    (2.9, "\x1b[92mINFO \x1b[0m:      Received successfully"),
    (5.0, "bpfed: Calibration pilot 1, round 2: asked, 2.75 s after the start of the process."),
    (6.5, "bpfed: Calibration pilot 1, round 2: answered."),
    (7.0, "\x1b[92mINFO \x1b[0m:      Sending: train message (ID: 12)"),
    (7.25, "\x1b[92mINFO \x1b[0m:      Sent successfully"),
)


def logged(base, faster=0.0):
    lines = ["a line without a time"]
    for at, words in LOG:
        moment = base + at - faster
        lines.append(f"{time.strftime('%H:%M:%S', time.localtime(moment))}.{int(moment % 1 * 1000 + 0.5):03d} {words}")
    return "\n".join(lines)


@pytest.mark.parametrize("hour", [12 * 3600.0, 86_400.0 - 4.0])  # past midnight too
def test_parts_add_up_to_the_round_and_are_those_of_the_last_site(tmp_path, hour):
    today = time.localtime()
    base = time.mktime((today.tm_year, today.tm_mon, today.tm_mday, 0, 0, 0, 0, 0, -1)) + hour
    lines = [
        {"round": 1, "sent": base - 10.0, "seconds": 9.6, "asked": 2, "answered": 2, "work": {}},
        {"round": 2, "sent": base, "seconds": 7.5, "asked": 2, "answered": 2, "work": {"a": 0.3, "b": 1.0}},
    ]
    (tmp_path / "exchanges.jsonl").write_text("\n".join(map(json.dumps, lines)))
    logs = {}
    for site, faster in (("a", 0.5), ("b", 0.0)):
        logs[site] = tmp_path / f"{site}.log"
        logs[site].write_text(logged(base, faster))
    (row,) = rounds.measured(tmp_path, logs)
    assert row == pytest.approx(
        {
            "mail": 2.0,
            "launch": 0.25,
            "start": 2.75,
            "work": 1.0,
            "site": 0.5,
            "back": 0.5,
            "up": 0.25,
            "server": 0.25,
            "between": 0.4,
        },
        abs=0.01,
    )
    assert sum(row.values()) == pytest.approx(7.5 + 0.4, abs=0.01)
    assert "| all | 7.90 |" in rounds.table(tmp_path, logs)


def test_a_round_that_a_site_missed_is_not_measured(tmp_path):
    line = {"round": 1, "sent": 0.0, "seconds": 9.0, "asked": 2, "answered": 2, "work": {}}
    lines = [line, line | {"round": 2, "answered": 1}]
    (tmp_path / "exchanges.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "a.log").write_text("")
    assert rounds.measured(tmp_path, {"a": tmp_path / "a.log"}) == []


def test_the_age_of_a_process_grows_with_the_clock():
    before, start = apps.age(), time.monotonic()
    time.sleep(0.2)
    assert apps.age() - before == pytest.approx(time.monotonic() - start, abs=0.1)


def test_a_log_has_the_time_of_day_before_each_line():
    text = stamp().decode()
    assert len(text) == len("12:34:56.789 ")
    assert (
        abs(
            rounds._of_day(time.time())
            - sum(float(part) * unit for part, unit in zip(text.strip().split(":"), (3600, 60, 1), strict=True))
        )
        < 1.0
    )
