"""The service: what it answers, rows as plain data in and predictions as plain data out; then the same over HTTP.

Rows are read and prepared by the same functions as those of ``bpfed predict``, and written by the same, so both agree to
the digit.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from bpfed import __version__
from bpfed._util.errors import UserError, hint, quoted
from bpfed._util.files import check_characters
from bpfed.data.checks.new_rows import FAR, Unusual
from bpfed.data.tabular.preprocessing import Feature, Preprocessor
from bpfed.data.tabular.rows import read_rows
from bpfed.inference.predictive import Classified
from bpfed.inference.tasks import EMPTY_SET
from bpfed.runs.client import prediction_columns

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from bpfed.runs.client import Client

#: Rows of one request.
MOST_ROWS = 1000
#: Letters of a word.
LONGEST_WORD = 1000
#: Columns of a prediction that are text, by how their names begin.
TEXT = ("label", "labels", "set(", "surely(", "possibly(", "abstain", "unusual")
#: Standard deviations on either side of the mean that are called usual.
USUAL = 2.0


class BadRequest(Exception):
    """A request that cannot be answered, with one sentence for whoever sent it."""


@dataclass(frozen=True)
class Field:
    """A column that a row must have.

    Attributes:
        name: As the files call it.
        kind: ``number``, ``words``, or ``any`` where it is recoded first.
        words: Those that training saw; of numbers that may be codes, these.
        usual: Range in which most numbers of training are.
        always: Whether no training row lacks it.
    """

    name: str
    kind: str
    words: tuple[str, ...] = ()
    usual: tuple[float, float] | None = None
    always: bool = False

    def record(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.name,
            "kind": self.kind,
            "words": list(self.words),
            "usual": None if self.usual is None else list(self.usual),
            "always": self.always,
        }

    def checked(self, value: Any, row: int) -> Any:
        """A value of this column, or `BadRequest`."""
        where = f"Column {quoted([self.name])} of row {row}"
        if value is None:
            return None
        if isinstance(value, bool):
            if self.kind == "number":
                raise BadRequest(f"{where} must be a number or null, but is true or false.")
            return "true" if value else "false"
        if isinstance(value, int | float):
            if not math.isfinite(_float(value)):
                raise BadRequest(f"{where} is too large a number; correct it.")
            return float(value)
        if not isinstance(value, str):
            raise BadRequest(f"{where} is a list or an object, but must be a number, a text or null.")
        if self.kind == "number":
            raise BadRequest(f"{where} must be a number or null, but is a text.")
        if len(value) > LONGEST_WORD:
            raise BadRequest(f"{where} has {len(value)} letters, but at most {LONGEST_WORD} are read.")
        return value


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


class Service:
    """One client's model that answers.

    Args:
        client: Of a run on tables.
        level: Of sets and intervals.
        abstain: Probability of the label below which a row is marked; None: none is.

    Raises:
        UserError: The run is not on tables.
    """

    def __init__(self, client: Client, level: float = 0.9, abstain: float | None = None) -> None:
        made = client.run.data.preprocessor
        if made is None or made.shape is not None:
            raise UserError(
                f"'{client.run.data.name}' is no table, and the service takes rows of tables; use 'bpfed export' for arrays and "
                "images."
            )
        if abstain is not None and not client.run.data.task_type.has_classes:
            raise UserError("--abstain needs the probability of a label, which this run does not predict; omit it.")
        self.client, self.level, self.abstain = client, level, abstain
        self.made = made
        self.fields = {field.name: field for field in _fields(made, client.name)}
        self._lock = Lock()

    def schema(self) -> dict[str, Any]:
        """What a row must have, and what is predicted."""
        data = self.client.run.data
        return {
            "bpfed": __version__,
            "client": self.client.name,
            "method": self.client.run.federation.method.title,
            "task": data.task,
            "target": self.made.target,
            "labels": list(data.class_names),
            "level": self.level,
            "abstain": self.abstain,
            "columns": [field.record() for field in self.fields.values()],
            "most_rows": MOST_ROWS,
        }

    def predict(self, rows: Any) -> dict[str, Any]:
        """Predictions of rows, each a mapping from columns to values.

        Raises:
            BadRequest: A row is not such.
        """
        columns = self._columns(rows)
        notes: list[str] = []
        data = self.client.run.data
        with self._lock:  # a module runs one prediction at a time
            try:
                taken = read_rows(data, columns, self.client.name, notes.append)
                found = self.client.predict(taken)
                cells = prediction_columns(data, found, self.level, self.abstain, taken.unusual)
            except UserError as error:
                raise BadRequest(str(error)) from error
        cells.pop("unusual", None)
        answers: list[dict[str, Any]] = [
            {name: _value(name, values[k]) for name, values in cells.items()} for k in range(len(rows))
        ]
        if isinstance(found, Classified) and found.scores is not None:
            for answer, held in zip(answers, found.prediction_set(self.level).tolist(), strict=True):
                answer["set"] = [label for label, inside in zip(data.class_names, held, strict=True) if inside]
        for answer, why in zip(answers, self._unusual(taken.unusual, rows), strict=True):
            answer["unusual"] = why
        return {"client": self.client.name, "rows": answers}

    def _columns(self, rows: Any) -> dict[str, list[Any]]:
        if not isinstance(rows, list) or not rows:
            raise BadRequest('The request has no rows; send {"rows": [{...}]} with a column-value object for each row.')
        if len(rows) > MOST_ROWS:
            raise BadRequest(f"The request has {len(rows)} rows; send at most {MOST_ROWS} at a time.")
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                raise BadRequest(f"Row {number} is not an object of columns and values.")
            if extra := [name for name in row if name not in self.fields]:
                raise BadRequest(
                    f"Row {number} has the column {quoted(extra[:1])}, which the model does not use; "
                    f"{hint(extra[0][:100], self.fields)}"
                )
            if lost := [name for name in self.fields if name not in row]:
                raise BadRequest(
                    f"Row {number} has no {quoted(lost)}; give every column, with null where it is not known."
                )
        return {
            name: [field.checked(row[name], number) for number, row in enumerate(rows, 1)]
            for name, field in self.fields.items()
        }

    def _unusual(self, found: Unusual | None, rows: list[Any]) -> list[list[dict[str, str]]]:
        """What is unlike training in each row: the column, and why in words."""
        if found is None:
            return [[] for _ in rows]
        said = {
            "numbers": f"more than {FAR:g} standard deviations from the training mean",
            "own": f"more than {FAR:g} standard deviations from this client's own mean",
            "words": "a word that training did not see",
            "codes": "a number that training did not see, in a column of few numbers",
            "missing": "missing, which it was in no training row",
        }
        return [
            [
                {"column": name, "why": why}
                for part, why in said.items()
                for name, where in getattr(found, part).items()
                if where[k]
            ]
            for k in range(len(rows))
        ]


def _value(name: str, text: str) -> str | float | None:
    """A cell of the predictions; what is not finite has no number in JSON."""
    if name.startswith(TEXT):
        return "" if text == EMPTY_SET else text
    value = float(text)
    return value if math.isfinite(value) else None


def _fields(made: Preprocessor, client: str) -> list[Field]:
    """The columns of files that features are made of, in their order, each once."""
    renames, maps, _, texts = made.recoding._parsed
    called = {r.new: r.column for r in renames if r.client in (None, client)}
    mapped = {m.column for m in maps if m.client in (None, client)}
    found: dict[str, Field] = {}
    for feature in (f for f in made.features if f.inputs):
        source = next((n for n in (*made.recoding.dates, *texts) if feature.name.startswith((f"{n} ", f"{n} #"))), None)
        name = called.get(source or feature.name, source or feature.name)
        if source is not None or feature.name in mapped:
            found.setdefault(name, Field(name, "any"))
        else:
            found[name] = _field(feature, name, made, client)
    return list(found.values())


def _field(feature: Feature, name: str, made: Preprocessor, client: str) -> Field:
    always = not feature.indicator
    if feature.kind == "words":
        return Field(name, "words", feature.categories, None, always)
    mean, scale = made.own.get(client, {}).get(feature.name, (feature.mean, feature.scale))
    converted = any(c.column == feature.name and c.client in (None, client) for c in made.recoding._parsed[2])
    usual = None if converted or not scale else (_short(mean - USUAL * scale), _short(mean + USUAL * scale))
    return Field(name, "number", feature.categories, usual, always)


def _short(value: float) -> float:
    return float(f"{value:.3g}")


# --- Over HTTP --------------------------------------------------------------------------------------------------------
#
# Who may ask, how much, and what page there is to try a row by hand. The service listens on loopback, or elsewhere behind
# a token. A page of another site cannot ask it: the header ``Host`` must be the service's own, and a POST must come from
# its own page or from no page at all. Values of requests are written nowhere.


STATIC = Path(__file__).parent / "static"
LOOPBACK = "127.0.0.1"
#: Addresses that mean every interface of the machine, whose names nobody can list.
ANYWHERE = ("0.0.0.0", "::")
#: Bytes of a request's body.
MOST_BYTES = 1_000_000
#: Seconds within which a request's header must have come, and likewise its body.
PATIENCE = 10.0
#: Requests that are served at a time.
CONCURRENT = 64
#: Letters of a token, at least.
SHORTEST_TOKEN = 16
#: Nothing is loaded but the service's own files, and nobody may put the page into another.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
#: What is served without a token: files that say nothing of the model.
PUBLIC = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")


def read_token(path: Path) -> str:
    """The token in a file, without the space around it."""
    try:
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The token file '{path}' cannot be read; give a text file with one token in it.") from error
    if len(token) < SHORTEST_TOKEN or not token.isascii() or len(token.split()) != 1:
        raise UserError(
            f"The token in '{path}' must be one word of at least {SHORTEST_TOKEN} letters; make one with: python -c "
            "'import secrets; print(secrets.token_urlsafe())'"
        )
    return token


def make_app(service: Service, host: str = LOOPBACK, port: int = 8000, token: str | None = None) -> Starlette:
    """The application.

    Args:
        service: What answers.
        host: Address that it listens on.
        port: Likewise.
        token: That requests must show; None: whoever reaches it may ask.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    hosts = {f"{name}:{port}" for name in (LOOPBACK, "localhost", "[::1]", f"[{host}]" if ":" in host else host)}
    hosts |= {name.rpartition(":")[0] for name in hosts} if port == 80 else set()

    def refused(sentence: str, status: int) -> Response:
        return JSONResponse({"error": sentence}, status, HEADERS)

    def fault(request: Request) -> Response | None:
        """The refusal of a request that may not be answered; None: it may."""
        said = request.headers.getlist("host")
        if len(said) != 1 or not (_HOST.fullmatch(said[0]) if host in ANYWHERE else said[0].lower() in hosts):
            return refused("The request names another host than this service; use the address that it printed.", 421)
        if request.method == "POST":
            origin = request.headers.get("origin")
            if origin is not None and origin.lower() not in (f"http://{said[0].lower()}", f"https://{said[0].lower()}"):
                return refused("A page of another site may not ask this service.", 403)
            if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
                return refused("A page of another site may not ask this service.", 403)
        if token is not None and request.url.path not in (*PUBLIC, "/health"):
            shown = request.headers.get("authorization", "")
            if not hmac.compare_digest(shown.encode(), f"Bearer {token}".encode()):
                return refused("This service asks for a token; send it as 'Authorization: Bearer TOKEN'.", 401)
        return None

    async def body(request: Request) -> bytes:
        found = b""
        async for part in request.stream():
            found += part
            if len(found) > MOST_BYTES:
                raise _TooLarge
        return found

    async def predict(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return refused("The body must be JSON, with the header 'Content-Type: application/json'.", 415)
        length = request.headers.get("content-length", "0")
        try:
            if not length.isdecimal() or int(length[:20]) > MOST_BYTES:
                raise _TooLarge
            content = await asyncio.wait_for(body(request), PATIENCE)
            rows = parsed(content)
            return JSONResponse(await run_in_threadpool(service.predict, rows), headers=HEADERS)
        except _TooLarge:
            return refused(f"The body has more than {MOST_BYTES} bytes; send fewer rows at a time.", 413)
        except TimeoutError:
            return refused("The body did not come in time.", 408)
        except BadRequest as error:
            return refused(str(error), 422)

    async def schema(request: Request) -> Response:
        return JSONResponse(service.schema(), headers=HEADERS)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"}, headers=HEADERS)

    async def file(request: Request) -> Response:
        name, kind = PUBLIC[request.url.path]
        return Response((STATIC / name).read_bytes(), headers=HEADERS, media_type=kind)

    def guarded(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def ask(request: Request) -> Response:
            return fault(request) or await answer(request)

        return ask

    async def lost(request: Request, error: Exception) -> Response:
        return fault(request) or refused("There is nothing at this address; see /schema and /predict.", 404)

    async def wrong_method(request: Request, error: Exception) -> Response:
        return fault(request) or refused(
            "This address is asked in another way: /predict by POST, the others by GET.", 405
        )

    async def failed(request: Request, error: Exception) -> Response:
        return refused("The service failed to answer; its terminal says more.", 500)

    return Starlette(
        routes=[
            Route("/predict", guarded(predict), methods=["POST"]),
            Route("/schema", guarded(schema)),
            Route("/health", guarded(health)),
            *(Route(path, guarded(file)) for path in PUBLIC),
        ],
        exception_handlers={404: lost, 405: wrong_method, 500: failed},
    )


class _TooLarge(Exception):
    pass


def parsed(content: bytes) -> Any:
    """The rows in a body, or `BadRequest`."""

    def no_number(word: str) -> float:
        raise BadRequest(f"The body has {word}, which is no number of JSON; send null where a value is not known.")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise BadRequest("An object of the body has a key twice; name each column once.")
        return found

    try:
        text = content.decode("utf-8")
        read = json.loads(text, parse_constant=no_number, object_pairs_hook=once)
        check_characters(text, read)
    except (ValueError, RecursionError) as error:
        raise BadRequest('The body is not JSON; send {"rows": [{...}]}.') from error
    if not isinstance(read, dict) or set(read) != {"rows"}:
        raise BadRequest('The body must be an object with "rows" and nothing else.')
    return read["rows"]


def check_installed() -> None:
    """Raise a `UserError` unless there is what serves HTTP."""
    if lost := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise UserError(
            f"The service needs the package '{lost[0]}', which is not installed; run: pip install 'bpfed[serve]'"
        )


def serve(service: Service, host: str, port: int, token: str | None, ready: Callable[[int], None]) -> None:
    """Answer until somebody ends it; ``ready`` is called with the port once it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind((host, port))
        except OSError as error:
            raise UserError(
                f"Port {port} of {host} cannot be used ({error.strerror}); choose another --port."
            ) from error
        port = taken.getsockname()[1]
        made = server(make_app(service, host, port, token))
        ready(port)
        made.run(sockets=[taken])


def server(app: Starlette) -> uvicorn.Server:
    """What serves the application, and logs no request."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Prompt(H11Protocol):
        """Ends a connection on which no whole header comes in time: such ones would take all the places there are."""

        late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.wait()

        def on_response_complete(self) -> None:
            self.wait()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.late is not None:
                self.late.cancel()
            super().connection_lost(exc)

        def wait(self) -> None:
            if self.late is not None:
                self.late.cancel()
            self.late = self.loop.call_later(PATIENCE, self.end)

        def end(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=Prompt,
            ws="none",
            access_log=False,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONCURRENT,
            timeout_keep_alive=5,
            lifespan="off",
        )
    )
