"""The logs of a server and of sites: Python's logging, with levels.

On a terminal lines are shown by rich; in a file or a service they are plain and begin with the time. The logger is
``bpfed.deploy``, so that whoever starts a part from Python can add handlers of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.logging import RichHandler

from bpfed._util.console import Console, Say
from bpfed._util.errors import UserError, unknown
from bpfed._util.files import append_line
from bpfed._util.text import plain

#: The variable that hands the level on to the processes of a part.
LEVEL = "BPFED_LOG_LEVEL"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

logger = logging.getLogger("bpfed.deploy")


class Log:
    """The log as whoever has something to say is given it: called with a sentence, which is news.

    What is no more than news has a level of its own by `warn` and `fail`.
    """

    def __call__(self, sentence: str) -> None:
        logger.info(sentence)


def warn(say: Say, sentence: str) -> None:
    """Say that something was refused or went wrong and the work goes on; a warning where ``say`` is a log."""
    logger.warning(sentence) if isinstance(say, Log) else say(sentence)


def fail(say: Say, sentence: str) -> None:
    """Say why something cannot be done; an error where ``say`` is a log."""
    logger.error(sentence) if isinstance(say, Log) else say(sentence)


def to_terminal(level: str | None) -> Log:
    """The log of a command in the foreground, from this level on; None: that of the environment, or ``info``.

    The processes that it starts have the same level.
    """
    os.environ[LEVEL] = level = checked(level)
    handler: logging.Handler
    if sys.stderr.isatty():
        handler = _Shown(
            console=Console(stderr=True, soft_wrap=True),
            show_path=False,
            show_level=True,
            omit_repeated_times=False,
            log_time_format="%H:%M:%S",
        )
    else:
        handler = _Lines(lambda record: f"{_time('%Y-%m-%d %H:%M:%S', record)} {_marked(record)}")
    return _with([handler], level)


def to_parent(*more: logging.Handler, one_line: bool = False) -> Log:
    """The log of a process whose output somebody else reads, who puts the time before each line.

    With ``one_line`` a sentence is one line without what a terminal would obey, whatever names are in it.
    """
    try:
        level, wrong = checked(None), ""
    except UserError as error:  # whoever started this has looked at it, unless it was started by hand
        level, wrong = "info", f"{LEVEL}: {error}"
    log = _with([_Lines(lambda record: f"bpfed: {record.getMessage()}"), *more], level, one_line)
    if wrong:
        warn(log, wrong)
    return log


class ToFile(logging.Handler):
    """Adds lines with date and time to a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(UserError):  # a full disk: what must be kept says so itself
            append_line(self.path, f"{_time('%Y-%m-%d %H:%M:%S', record)} {record.getMessage()}")


def checked(level: str | None) -> str:
    """The level that is asked for, or that of the environment; ``info`` where neither says."""
    found = (level or os.environ.get(LEVEL) or "info").lower()
    if found not in LEVELS:
        raise unknown("log level", found, LEVELS)
    return found


class _Lines(logging.Handler):
    """Writes plain lines to stderr; on a full disk nothing, since a server or site runs on."""

    def __init__(self, words: Callable[[logging.LogRecord], str]) -> None:
        super().__init__()
        self.words = words

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            print(self.words(record), file=sys.stderr, flush=True)


class _Shown(RichHandler):
    """Lines on a terminal, of which sites' names are no markup."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing: a terminal that is gone stops no server."""


def _marked(record: logging.LogRecord) -> str:
    """The sentence; what is more than news begins with its level."""
    words = record.getMessage()
    return words if record.levelno <= logging.INFO else f"{record.levelname}: {words}"


def _time(form: str, record: logging.LogRecord) -> str:
    return time.strftime(form, time.localtime(record.created))


def _on_one_line(record: logging.LogRecord) -> bool:
    record.msg, record.args = plain(record.getMessage()), None
    return True


def _with(handlers: list[logging.Handler], level: str, one_line: bool = False) -> Log:
    logger.handlers[:] = handlers
    logger.filters[:] = [_on_one_line] if one_line else []
    logger.setLevel(LEVELS[level])
    logger.propagate = False
    return Log()
