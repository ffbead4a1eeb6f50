"""How far a run is, on a terminal as a live display, elsewhere as one plain line for each evaluated round."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from bpfed._util import text
from bpfed._util.console import Console as Plain
from bpfed.callbacks import Callback
from bpfed.config.registry import shown
from bpfed.metrics.registry import METRICS, shown_at
from bpfed.report.record import value

if TYPE_CHECKING:
    from bpfed.engine.simulator import RoundInfo
    from bpfed.runs.run import Run

#: Rounds that the remaining time is computed from.
RECENT = 20
#: On a terminal of fewer columns words are shorter.
ROOMY = 90
#: Room at the right for the ^C that a terminal echoes; on a full line it would push the display down.
MARGIN = 3


class Progress(Callback):
    """Shows the round, the last evaluation, and the time gone and left.

    Args:
        console: Where to show it; None: stderr, so that what is piped stays clean.
        delay: Show nothing in a run that takes less than so many seconds.
        patience: Without a terminal, print a line on what is going on after so many silent seconds; None: do not.
    """

    def __init__(self, console: Console | None = None, delay: float = 0.0, patience: float | None = None) -> None:
        self.console = console or Plain(stderr=True)
        self.delay, self.patience = delay, patience
        self.title, self.words, self.figures = "", "", ""
        #: What is shown, if it is not the run itself, such as ``calibration pilot 1 of 3``; the display outlives it.
        self.stage = ""
        self.done, self.rounds = 0, 0
        #: What comes after the stage that is shown, in rounds that take as long as its own.
        self.ahead = 0.0
        self._evaluated = 0  # the round that the figures are of
        self._whose = ""  # which weights are whose, until it is printed
        self._began = self._last = self._spoke = time.perf_counter()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._spinner = Spinner("dots", style="cyan")
        self._live: Live | None = None
        self._timer: threading.Timer | None = None
        self._switch = threading.Lock()  # between the timer that opens the display and whoever closes it
        self._closed = False

    def doing(self, words: str) -> None:
        """Say what is going on before the first round is done, such as ``loading digits``."""
        self.words = words
        self._open()
        self._announce()

    def say(self, sentence: str) -> None:
        """Print a sentence without breaking the display."""
        self._spoke = time.perf_counter()
        self.console.print(sentence, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def pause(self) -> None:
        """Take the display down until there is more to show."""
        with self._switch:
            if self._live is not None:
                self._live.stop()
                self._live = None

    def close(self) -> None:
        """Take the display down for good."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.pause()

    def start(self, run: Run) -> None:
        self.title = self._title(run)
        self.rounds, self.done = run.settings.rounds, run.federation.round
        self.figures = figures(run.history[-1]) if run.history and not self.stage else ""
        self._evaluated = int(run.history[-1]["round"]) if run.history else 0
        self._recent.clear()
        self._last = time.perf_counter()
        step = "compiling the local step, once" if run.compiled else "training"
        self.words = f"round {self.done + 1}: {step}" if self.done < self.rounds else "evaluating"
        self._whose = self._told_first(run)
        self._open()
        if self._live is not None:
            self._print_first()
        self._announce()

    def _told_first(self, run: Run) -> str:
        """What stands above all that is shown of a run."""
        return "" if self.stage else run.federation.method.whose(run.federation.model)

    def _print_first(self) -> None:
        line, self._whose = self._whose, ""
        if line:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _title(self, run: Run) -> str:
        clients, stage = text.many(len(run.data), "client"), f"{self.stage}: " if self.stage else ""
        return (
            f"{stage}{run.federation.method.title} on {shown(run.data.name)}, {clients}, {run.federation.device.type}"
        )

    def round(self, run: Run, info: RoundInfo, record: dict[str, Any] | None) -> None:
        self._advance(run, record)
        # What a pilot scores is no result of the run.
        due = self.done == self.rounds if self.stage else record is not None
        if due and not self.console.is_terminal and self._last - self._began >= self.delay:
            stage, shown = (f"{self.stage}, ", "") if self.stage else ("", f"{self.figures}  ")
            left = f", about {clock(self.left)} left" if self.stage and self.left is not None else ""
            line = f"{stage}round {self.done}/{self.rounds}  {shown}{clock(run.seconds)}{left}"
            self._spoke = self._last
            self._print_first()
            self.console.print(line, highlight=False, soft_wrap=True)

    def _advance(self, run: Run, record: dict[str, Any] | None) -> None:
        now = time.perf_counter()
        if self.words:
            self.words = ""  # the first round of a sitting may trace or compile: its time says nothing of the others
        else:
            self._recent.append(now - self._last)
        self._announce()
        self._last, self.done = now, run.federation.round
        if record is not None and not self.stage:
            self.figures, self._evaluated = figures(record), self.done

    def end(self, run: Run) -> None:
        if not self.stage:
            self.words = "writing the report"
            self._announce()

    def stop(self, run: Run) -> None:
        if not self.stage:
            self.close()

    @property
    def left(self) -> float | None:
        """Seconds until the last round is done, those after this stage among them, as far as can be said."""
        if not self._recent:
            return None
        since = time.perf_counter() - self._last
        return max(0.0, sum(self._recent) / len(self._recent) * (self.rounds - self.done + self.ahead) - since)

    def took(self, seconds: float) -> None:
        """A round that somebody else has run took so long."""
        self._recent.append(seconds)
        self._last = time.perf_counter()

    def _open(self) -> None:
        if not self.console.is_terminal or self._live is not None or self._timer is not None:
            return
        if self.delay > 0.0:
            self._wait(self.delay, self._go_live)
        else:
            self._go_live()

    def _announce(self) -> None:
        """Elsewhere than on a terminal, say what is going on once it has been silent for too long."""
        if self.patience is None or self.console.is_terminal:
            return
        if self._timer is not None:
            self._timer.cancel()
        left = self._spoke + self.patience - time.perf_counter()
        if self.words and left > 0.0:
            self._wait(left, self._tell)
        elif self.words:
            self._tell()

    def _tell(self) -> None:
        if self.words and not self._closed:
            self._spoke = time.perf_counter()
            self._print_first()
            words = f"{self.title}, {self.words}" if self.title else self.words
            self.console.print(f"{words} …", markup=False, highlight=False, soft_wrap=True)

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        """Do something later, unless the display is closed or something else is waited for by then."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, then)
        self._timer.daemon = True
        self._timer.start()

    def _go_live(self) -> None:
        with self._switch:
            if not self._closed:
                live = Live(get_renderable=self.render, console=self.console, transient=True, refresh_per_second=8)
                live.start(refresh=True)
                self._live = live
                self._print_first()

    def render(self) -> RenderableType:
        """The display at this moment."""
        roomy = self.console.width >= ROOMY
        gone = clock(time.perf_counter() - self._began) + (" elapsed" if roomy else "")
        left = "" if self.left is None else f", {'about ' if roomy else '~'}{clock(self.left)} left"
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column()
        head.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        head.add_column(justify="right", no_wrap=True)
        room = self.console.width - MARGIN - len(gone) - len(left) - 4
        whole = f"{self.title}{', ' if self.title and self.words else ''}"
        # Where both do not fit, what is going on now says more than the title.
        fits = not self.words or len(whole) + len(self.words) <= room
        what = Text(whole if fits else f"{self.stage}, " if self.stage else "", style="bold")
        if self.words:
            what.append(self.words, style="not bold cyan")
        head.add_row(self._spinner, what, Text(f"{gone}{left}", style="dim"))
        if not self.rounds:
            return Constrain(head, self.console.width - MARGIN)
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_column(no_wrap=True, justify="right")
        bar.add_row(
            ProgressBar(total=self.rounds, completed=self.done),
            Text(f"round {self.done}/{self.rounds}", style="green"),
            Text(self._said_of),
        )
        return Constrain(Group(head, *self._above(), bar), self.console.width - MARGIN)

    @property
    def _said_of(self) -> str:
        """The last figures, with the round that they are of where it is not the one that is shown."""
        old = self.figures and self._evaluated and self._evaluated != self.done
        return f"(at {self._evaluated}) {self.figures}" if old else self.figures

    def _above(self) -> list[RenderableType]:
        """What stands above the bar of rounds."""
        return []


class CellProgress(Progress):
    """Shows how far many runs are: cells done and the time left for all, and the rounds of the current one.

    Elsewhere than on a terminal it is a line for each finished cell, and one now and then during a long one.

    Args:
        console: Where to show it; None: stderr.
        delay: Show nothing before so many seconds.
        patience: As of `Progress`, for what comes before the first round of a cell.
    """

    #: Seconds without a line after which a round gets one, where there is no terminal.
    SILENCE = 10.0

    def __init__(self, console: Console | None = None, delay: float = 0.0, patience: float | None = None) -> None:
        super().__init__(console, delay, patience)
        self._waiting: list[tuple[str, int]] = []
        self._current: list[tuple[str, int]] = []
        self._took: dict[str, list[float]] = {}
        self._cells = 0
        self._cell_began = self._said = time.perf_counter()

    def expect(self, cells: list[tuple[str, int]]) -> None:
        """All cells, a name and a seed each, in the order they are run."""
        self._waiting, self._cells = list(cells), len(cells)

    def found(self, name: str, seed: int, seconds: float | None) -> None:
        """A cell was finished in an earlier sitting."""
        self._waiting.remove((name, seed))
        if seconds is not None:
            self._took.setdefault(name, []).append(seconds)

    def begin(self, name: str, title: str, seeds: list[int]) -> None:
        """Cells of one name are run side by side."""
        self._current = [(name, seed) for seed in seeds]
        self._waiting = [cell for cell in self._waiting if cell not in self._current]
        self._entrant, self.figures = f"{title}, seed {', '.join(map(str, seeds))}", ""
        self._recent.clear()
        self._cell_began = time.perf_counter()

    def leave_out(self, name: str) -> None:
        """Cells of this name, the current ones among them, are not run after all."""
        before = len(self._waiting) + len(self._current)
        self._waiting = [cell for cell in self._waiting if cell[0] != name]
        self._cells -= before - len(self._waiting)
        self._current, self.rounds, self.title, self.words = [], 0, "", ""

    def finished(self) -> None:
        """The current cells are done."""
        took = time.perf_counter() - self._cell_began
        self._took.setdefault(self._current[0][0], []).append(took / len(self._current))
        self._current, self.rounds, self.title, self.words = [], 0, "", ""
        self._announce()
        left = "" if self.left is None else f", about {clock(self.left)} left"
        self._line(f"cell {self._over}/{self._cells}  {self._entrant}  {self.figures}  {clock(took)}{left}")

    def _title(self, run: Run) -> str:
        cell, stage = f"cell {self._over + 1}/{self._cells}", f", {self.stage}" if self.stage else ""
        return f"{cell}{stage}: {self._entrant}, {shown(run.data.name)}, {run.federation.device.type}"

    def _told_first(self, run: Run) -> str:
        return ""

    def round(self, run: Run, info: RoundInfo, record: dict[str, Any] | None) -> None:
        self._advance(run, record)
        if record is not None and time.perf_counter() - self._said >= self.SILENCE:
            self._line(f"{self.title}  round {self.done}/{self.rounds}  {self.figures}")

    def stop(self, run: Run) -> None:
        """The display stays up for the next cell."""

    @property
    def left(self) -> float | None:
        """Seconds until the last cell is done: a cell takes as long as others of its name did, or as all did."""
        every = [took for known in self._took.values() for took in known]
        current = super().left if self._current else 0.0
        if current is None or (self._waiting and not every):
            return None
        typical = {name: sum(known) / len(known) for name, known in self._took.items()}
        return current + sum(typical.get(name, sum(every) / len(every)) for name, _ in self._waiting)

    @property
    def _over(self) -> int:
        return self._cells - len(self._waiting) - len(self._current)

    def _above(self) -> list[RenderableType]:
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            ProgressBar(total=self._cells, completed=self._over), Text(f"{self._over}/{self._cells} cells", "green")
        )
        return [bar]

    def _line(self, line: str) -> None:
        now = time.perf_counter()
        if not self.console.is_terminal and now - self._began >= self.delay:
            self._said = self._spoke = now
            self.console.print(line, highlight=False, soft_wrap=True)


def figures(record: dict[str, Any]) -> str:
    """The pooled metrics of an evaluated round in one line."""
    shown = [(METRICS[name], value(record, name, "pooled")) for name in shown_at("progress") if name in record]
    privacy = [f"epsilon {text.epsilon(record['epsilon'], 2)}"] if "epsilon" in record else []
    return "  ".join([*(f"{measure.in_words} {measure.typed(x)}" for measure, x in shown), *privacy])


def clock(seconds: float) -> str:
    """``0:07``, ``12:31``, ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
