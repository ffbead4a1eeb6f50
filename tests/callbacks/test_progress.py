"""The display: what it shows when, on a terminal and elsewhere."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from scenarios import classification, regression

import bpfed
from bpfed.callbacks import Callback, Progress
from bpfed.callbacks.progress import clock, figures
from bpfed.data import FederatedData
from bpfed.methods import FedAvg


def terminal(width: int = 90) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=20, color_system=None)


def text(progress: Progress) -> str:
    """The display at this moment, as one would read it."""
    console = terminal(progress.console.width)
    console.print(progress.render())
    written = console.file
    assert isinstance(written, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())


class Watch(Callback):
    """Takes the display down as text at every hook."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.seen = progress, list[str]()

    def start(self, run: bpfed.Run) -> None:
        self.seen.append(text(self.progress))

    def round(self, run: bpfed.Run, info: object, record: object) -> None:
        self.seen.append(text(self.progress))

    def end(self, run: bpfed.Run) -> None:
        self.seen.append(text(self.progress))


def watched(data: FederatedData, width: int = 90) -> list[str]:
    progress = Progress(terminal(width))
    watch = Watch(progress)
    bpfed.fit(FedAvg(), data, rounds=3, epochs=1, device="cpu", progress=False, callbacks=[progress, watch])
    return watch.seen


def test_from_the_first_moment_to_the_last() -> None:
    before, first, second, third, end = watched(classification())
    assert "FedAvg on small, 5 clients, cpu, round 1: training" in before
    assert "round 0/3" in before
    assert "left" not in before
    assert re.search(r"round 1/3 accuracy \S+ %  NLL \S+  ECE \S+ %", first)
    assert "left" not in first  # the first round says nothing of the others
    assert re.search(r"0:\d\d elapsed, about 0:\d\d left", second)
    assert "round 3/3" in third
    assert "writing the report" in end


def test_regression_shows_what_it_has() -> None:
    assert re.search(r"round 1/3 RMSE \S+  NLL \S+  ECE \S+ %", watched(regression())[1])


@pytest.mark.parametrize("width", [60, 80, 200])
def test_two_lines_at_any_width(width: int) -> None:
    for shown in watched(classification(), width):
        lines = shown.rstrip("\n").split("\n")
        assert len(lines) == 2
        assert all(len(line) <= width - 2 for line in lines)  # where a terminal echoes ^C


def test_pilots_count_in_the_time_left_and_show_no_figures_of_their_own() -> None:
    progress = Progress(terminal(80))
    seen = list[str]()

    class Look(Callback):
        def round(self, run: bpfed.Run, info: object, record: object) -> None:
            seen.append(text(progress))

    progress.stage, progress.ahead = "pilot 1-15 of 27", 20.0
    bpfed.fit(
        FedAvg(), classification(), rounds=3, epochs=1, device="cpu", progress=False, callbacks=[progress, Look()]
    )
    assert all("pilot 1-15 of 27: FedAvg on small" in shown for shown in seen)
    assert not any("NLL" in shown for shown in seen)
    progress._recent.clear()
    progress.took(10.0)
    assert 190 < progress.left <= 200  # nothing of this stage, and what is ahead
    progress.close()


def test_figures_of_an_earlier_round_say_so() -> None:
    progress = Progress(terminal(80))
    bpfed.fit(FedAvg(), classification(), rounds=3, epochs=1, device="cpu", progress=False, callbacks=[progress])
    assert "(at" not in text(progress)
    progress.done, progress.rounds = 5, 9
    assert "round 5/9 (at 3) accuracy" in text(progress)


def test_before_there_is_a_run() -> None:
    progress = Progress(terminal())
    progress.doing("loading digits")
    assert "loading digits" in text(progress)
    assert text(progress).count("\n") == 1
    progress.pause()
    progress.doing("starting")
    progress.close()
    progress.close()


def test_elsewhere_it_is_a_line_for_each_evaluated_round() -> None:
    console = Console(file=io.StringIO(), width=40)
    progress = Progress(console)
    progress.say("A [word] before.")
    bpfed.fit(FedAvg(), classification(), rounds=4, epochs=1, eval_every=2, callbacks=[progress])
    assert isinstance(console.file, io.StringIO)
    head, whose, *lines = console.file.getvalue().splitlines()
    assert head == "A [word] before."
    assert whose.startswith("personal: nothing; shared: ")
    assert [line.split("  ")[0] for line in lines] == ["round 1/4", "round 2/4", "round 4/4"]
    assert all(line.isascii() for line in lines)


def test_a_short_run_shows_nothing_where_that_is_wished() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=90)
    progress = Progress(console, delay=3600.0)
    bpfed.fit(FedAvg(), classification(), rounds=2, epochs=1, progress=False, callbacks=[progress])
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


def test_a_longer_one_opens_it_from_a_timer() -> None:
    console = terminal()
    progress = Progress(console, delay=0.001)
    progress.doing("something slow")
    assert progress._timer is not None
    progress._timer.join()
    progress.close()
    assert isinstance(console.file, io.StringIO)
    assert "something slow" in console.file.getvalue()


def test_elsewhere_what_takes_long_gets_a_line() -> None:
    console = Console(file=io.StringIO(), width=90)
    progress = Progress(console, patience=0.3)
    progress.doing("adapting [ward]")
    assert progress._timer is not None
    progress._timer.join()
    progress.patience = 3600.0
    progress.doing("something quick")
    progress.close()
    progress._timer.join()  # the timer is gone, too
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "adapting [ward] …\n"


def test_elsewhere_the_time_before_the_first_round_gets_a_line() -> None:
    console = Console(file=io.StringIO(), width=90)

    class Quick(Callback):
        def round(self, run: bpfed.Run, info: object, record: object) -> None:
            progress.patience = 3600.0

    progress = Progress(console, patience=0.0)
    asked = {"rounds": 2, "epochs": 1, "device": "cpu", "progress": False}
    bpfed.fit(FedAvg(), classification(), callbacks=[progress, Quick()], **asked)
    assert isinstance(console.file, io.StringIO)
    whose, first, *rounds = console.file.getvalue().splitlines()
    assert whose.startswith("personal: nothing; shared: ")
    assert re.fullmatch(r"FedAvg on .+ clients, cpu, round 1: training …", first)
    assert [line.split("  ")[0] for line in rounds] == ["round 1/2", "round 2/2"]


def test_it_is_silence_that_is_cut_short_not_a_single_step() -> None:
    console = Console(file=io.StringIO(), width=90)
    progress = Progress(console, patience=3600.0)
    progress.doing("starting")
    progress._spoke -= 3600.0
    progress.doing("loading digits")
    progress.close()
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "loading digits …\n"


def test_it_is_taken_down_when_a_run_breaks() -> None:
    progress = Progress(terminal())

    class Breaks(Callback):
        def round(self, run: bpfed.Run, info: object, record: object) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bpfed.fit(FedAvg(), classification(), rounds=2, epochs=1, progress=False, callbacks=[progress, Breaks()])
    assert progress._live is None


def test_numbers_that_are_not_there() -> None:
    assert figures({"accuracy": {"pooled": None}, "nll": {"pooled": -1.5}}) == "accuracy –  NLL -1.500"
    assert [clock(s) for s in (0, 7.4, 61, 3723)] == ["0:00", "0:07", "1:01", "1:02:03"]
