"""An index of the runs and comparisons in a folder: one page that links their reports, as a file or served on loopback."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from bpfed._util import text
from bpfed._util.errors import UserError
from bpfed._util.files import CONFIG, REPORT, SUMMARY, from_json, from_toml
from bpfed.metrics.registry import get_metric
from bpfed.report import html
from bpfed.report.page import Cell, Column, Line
from bpfed.report.record import UNFIT, value

#: The file that a comparison's folder has and no run's.
COMPARISON = "comparison.json"
#: Folders are looked at so deep.
DEPTH = 4
#: Metrics that have a column, where any run has them.
SHOWN = ("accuracy", "nll", "rmse", "c_index", "ece")


class Entry(NamedTuple):
    """A run or a comparison.

    Attributes:
        path: Its folder, below the one that is looked at.
        kind: ``run`` or ``comparison``.
        made: When it was finished, in seconds since 1970.
        data: What it is on.
        method: What it is of.
        clients: How many there are; NaN: not known.
        calibrated: ``yes``, ``no``, or empty.
        scores: Metrics of the last round.
        report: Whether there is a report beside it.
    """

    path: Path
    kind: str
    made: float
    data: str
    method: str
    clients: float
    calibrated: str
    scores: dict[str, float]
    report: bool


def entries(folder: Path) -> tuple[list[Entry], list[str]]:
    """What is in a folder, the newest first, and sentences on what could not be read."""
    found: list[Entry] = []
    wrong: list[str] = []
    for place in _folders(folder, DEPTH):
        read = _comparison if (place / COMPARISON).is_file() else _run
        try:
            found.append(read(folder, place))
        except (OSError, *UNFIT):
            wrong.append(f"'{place.relative_to(folder)}' is damaged and left out.")
    return sorted(found, key=lambda one: -one.made), wrong


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    """Folders of finished runs and of comparisons; the runs of a comparison are not listed by themselves."""
    if (folder / COMPARISON).is_file() or (folder / SUMMARY).is_file():
        yield folder
        return
    if depth:
        with contextlib.suppress(OSError):
            for below in sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()):
                yield from _folders(below, depth - 1)


def _run(folder: Path, place: Path) -> Entry:
    summary = _table(place / SUMMARY)
    config = from_toml((place / CONFIG).read_bytes())
    asked = config.get("run", {})
    calibrated = bool(asked.get("calibration")) or asked.get("calibrate", "none") != "none"
    scores = {name: value(summary, name, "last") for name in SHOWN}
    title = str(summary.get("title") or summary.get("method", ""))
    method = f"{title}, {text.plural(int(summary.get('rounds', 0)), 'round')}"
    return Entry(
        place.relative_to(folder),
        "run",
        (place / SUMMARY).stat().st_mtime,
        str(summary.get("data", "")),
        method,
        value(summary, "clients"),
        "yes" if calibrated else "no",
        scores,
        (place / REPORT).is_file(),
    )


def _comparison(folder: Path, place: Path) -> Entry:
    record = _table(place / COMPARISON)
    methods = record["methods"]
    best = next(iter(methods))
    scores = {name: value(methods[best], name, "mean") for name in SHOWN}
    named = f"{text.plural(len(methods), 'method')}, lowest NLL: {methods[best].get('title', best)}"
    return Entry(
        place.relative_to(folder),
        "comparison",
        (place / COMPARISON).stat().st_mtime,
        str(record.get("data", "")),
        named,
        value(record, "clients"),
        "",
        scores,
        (place / REPORT).is_file(),
    )


def _table(path: Path) -> dict[str, Any]:
    found = from_json(path.read_bytes())
    if not isinstance(found, dict):
        raise TypeError("no table")
    return found


def render(folder: Path, links: str = "") -> str:
    """The page as text.

    Args:
        folder: That is looked at.
        links: What a link to a report begins with, where the page is elsewhere.
    """
    if not folder.is_dir():
        raise UserError(f"'{folder}' is no folder; give one with runs in it.")
    found, wrong = entries(folder)
    shown = [name for name in SHOWN if any(math.isfinite(one.scores[name]) for one in found)]
    columns = [
        Column("name", "Run"),
        *(Column(name, get_metric(name).label, explain=get_metric(name).explain) for name in shown),
        Column("method", "Method", words=True),
        Column("data", "Data", words=True),
        Column("clients", "Clients", explain="How many clients there are."),
        Column(
            "calibrated",
            "Calibrated",
            explain="Whether examples or pilot runs were used to calibrate predictions.",
            words=True,
        ),
        Column("made", "Finished", sort="descending", words=True),
    ]
    return html.page(
        "index.html.j2",
        title=f"Runs in {folder.resolve().name or folder}",
        details=[text.plural(sum(one.kind == kind for one in found), kind) for kind in ("run", "comparison")],
        columns=columns,
        rows=[_line(one, shown, links) for one in found],
        notes=wrong,
        definitions=[(column.title, column.explain) for column in columns if column.explain],
        filter=len(found) > 6,
    )


def _line(one: Entry, shown: list[str], links: str) -> Line:
    when = datetime.fromtimestamp(one.made, tz=UTC).astimezone()
    cells = []
    for name in shown:
        v = one.scores[name]
        cells.append(Cell(get_metric(name).show(v), f"{v:.6g}" if math.isfinite(v) else None))
    cells += [Cell(one.method, style="words"), Cell(one.data.removeprefix("folder:"), style="words short")]
    cells.append(Cell(text.count(one.clients), f"{one.clients:.0f}" if math.isfinite(one.clients) else None))
    cells.append(Cell(one.calibrated or text.MISSING, style="words short"))
    shown_when = when.strftime("%Y-%m-%d %H:%M").replace("-", "\u2011")  # so that a line breaks before the time alone
    cells.append(Cell(shown_when, f"{one.made:.0f}", style="words short"))
    name = str(one.path) if one.path.parts else "this folder"
    return Line(
        name, cells, "comparison" if one.kind == "comparison" else "", link=links + _address(one) if one.report else ""
    )


def _address(one: Entry) -> str:
    """Of its report, relative to the folder."""
    return "/".join(quote(part, safe="") for part in (*one.path.parts, REPORT))


def write(folder: Path, path: Path) -> Path:
    """Write the page to a file, whole or not at all; its links are relative to where it is."""
    between = os.path.relpath(folder.resolve(), path.resolve().parent)
    links = "" if between == "." else f"{quote(between)}/"
    return html.write_page(render(folder, links), path)


#: A report may be of a stranger: its scripts reach neither the other reports nor the net, whatever it says itself.
SERVED_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; sandbox allow-scripts"
)


# --- Served on loopback -----------------------------------------------------------------------------------------------


def server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of the page and the reports that it links, and of nothing else, for this machine alone.

    Args:
        folder: That is looked at, anew for each request of the page.
        port: To listen at; 0: one that is free.
    """
    render(folder)  # or a sentence, before anything is served
    try:
        made = ThreadingHTTPServer(("127.0.0.1", port), _handler(folder))
    except (OSError, OverflowError) as error:
        raise UserError(f"Port {port} cannot be listened at ({error}); choose another --port.") from error
    made.daemon_threads = True
    return made


def _handler(folder: Path) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers with the page, or with a report that it links."""

        server_version, sys_version, timeout = "bpfed", "", 30

        def do_GET(self) -> None:
            self._answer(True)

        def do_HEAD(self) -> None:
            self._answer(False)

        def _answer(self, body: bool) -> None:
            port = getattr(self.server, "server_port", 0)
            # A page of another site could otherwise reach this one under a name of its own (DNS rebinding).
            if self.headers.get_all("Host") not in ([f"127.0.0.1:{port}"], [f"localhost:{port}"]):
                self.send_error(HTTPStatus.FORBIDDEN, "This server is for this machine alone")
                return
            content = None
            with contextlib.suppress(ValueError):  # an address that is none
                content = self._content(unquote(urlsplit(self.path).path))
            if content is None:
                self.send_error(HTTPStatus.NOT_FOUND, "There is no such report")
                return
            self.send_response(HTTPStatus.OK)
            for name, said in (
                ("Content-Type", "text/html; charset=utf-8"),
                ("Content-Length", str(len(content))),
                ("X-Content-Type-Options", "nosniff"),
                ("Content-Security-Policy", SERVED_POLICY),
                ("Cross-Origin-Resource-Policy", "same-origin"),
                ("Referrer-Policy", "no-referrer"),
                ("Cache-Control", "no-store"),
            ):
                self.send_header(name, said)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def _content(self, path: str) -> bytes | None:
            if path == "/":
                return render(folder).encode("utf-8", "replace")
            # Only what the page links is looked up, so that no path leads anywhere else.
            known = {"/" + "/".join((*one.path.parts, REPORT)): one for one in entries(folder)[0] if one.report}
            if path not in known:
                return None
            place = folder / known[path].path / REPORT
            with contextlib.suppress(OSError):
                if place.resolve().is_relative_to(folder.resolve()):
                    return place.read_bytes()
            return None

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the terminal is the user's."""

    return Handler
