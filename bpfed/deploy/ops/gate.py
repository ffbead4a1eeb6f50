"""The gate before Flower's interfaces: from outside, only that for sites is reached; the rest needs a secret.

Flower serves all its interfaces on one port, and asks nobody for a key but SuperNodes. Its Control interface starts
runs and registers sites; its Runtime interface hands out their messages. With the gate, both are reached only through
a second port that listens on loopback, and only by who knows a secret that is made anew for each start. Port and secret
are in `LOCAL`, in the folder of the server or the site, for its owner's eyes alone.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import ipaddress
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from bpfed._util.errors import UserError
from bpfed._util.files import write_whole
from bpfed._util.text import plain
from bpfed.deploy.logs import warn

#: Where the port on loopback and the secret are.
LOCAL = "local.json"
#: The header of a request that carries the secret.
HEADER = "x-bpfed-secret"
#: The address of the port that only this machine reaches.
LOOPBACK = "127.0.0.1"
#: What SuperNodes call, and the headers by which they show whose they are: a key, a time, and its signature.
FLEET = "/v1/fleet/"
SIGNED = (b"flwr-public-key", b"flwr-timestamp", b"flwr-signature")
#: Tells that somebody listens, and no more.
HEALTH = "/health"
#: What the header ``Host`` may be. Some versions of Starlette, on which Flower is built, take a path in it for that of the
#: request, and Flower decides by that path whom it asks for a key.
HOST = re.compile(rb"[A-Za-z0-9._:\[\]-]*")
#: What is answered to others.
REFUSAL = "Refused: only the operator may do this, on the server's machine, with 'bpfed deploy'."
UNKNOWN = "Refused: this key is none of the sites'."

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Local(NamedTuple):
    """Where the operator's port is on loopback, and the secret that opens it."""

    port: int
    secret: str


def write_local(folder: Path, port: int) -> Local:
    """Make a new secret for the listener at this port, and note both for the owner of the folder alone."""
    made = Local(port, secrets.token_urlsafe(32))
    write_whole(folder / LOCAL, json.dumps(made._asdict()), mode=0o600)
    return made


def read_local(folder: Path) -> Local | None:
    """What was noted at the last start; None: nothing that can be used.

    Raises:
        UserError: It is not for us to read.
    """
    try:
        found = json.loads((folder / LOCAL).read_text())
        return Local(int(found["port"]), str(found["secret"]))
    except PermissionError:
        raise UserError(
            f"'{folder / LOCAL}' cannot be read; use the account that 'bpfed deploy server' runs under."
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Carrying:
    """Lets requests of Flower's clients carry the secret (a ``ProtobufClientInterceptor``)."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        """Add the secret, and go on."""
        context.request.headers[HEADER] = self.secret
        return call_next(context)


class Gate:
    """Lets through to an ASGI application what may be called, and refuses and names all else.

    Args:
        app: The application.
        local: The listener on loopback, and the secret that requests there must carry.
        say: Called with a sentence on each request that is refused.
        members: The public keys of those sites that may call here, from anywhere; none: no site does.
    """

    def __init__(self, app: App, local: Local, say: Callable[[str], None], members: Collection[bytes] = ()) -> None:
        self.app, self.local, self.say, self.members = app, local, say, members

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection's request, as ASGI has it."""
        if scope["type"] == "lifespan" or not (why := self.refused(scope)):
            await self.app(scope, receive, send)
            return
        client = scope.get("client") or ("nowhere", 0)
        what = f"{scope.get('method', scope['type'])} {scope.get('path', '')}"
        warn(self.say, f"Refused '{plain(what, 200)}' from {client[0]}:{client[1]}: {why}.")
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        # A SuperNode takes 401 for the end of its process, and 403 for that of a run.
        fleet = scope["path"].startswith(FLEET)
        body = json.dumps({"detail": UNKNOWN if fleet else REFUSAL}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        # What it sends is not read, so the connection is of no further use.
        headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": 404 if fleet else 403, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def refused(self, scope: Scope) -> str:
        """Why a request is refused; empty: it is let through."""
        path = scope.get("path", "")
        if not all(HOST.fullmatch(value) for name, value in scope.get("headers", ()) if name == b"host"):
            return "its header 'Host' names no host"
        if scope["type"] == "http" and path == HEALTH:
            return ""
        if scope["type"] == "http" and path.startswith(FLEET):
            return "" if self._member(scope) else "it is not signed with a site's key"
        if not _loopback(scope.get("client")) or tuple(scope.get("server") or ()) != (LOOPBACK, self.local.port):
            return "it did not come by the operator's port on loopback"
        given = [value for name, value in scope.get("headers", ()) if name == HEADER.encode()]
        if len(given) != 1 or not hmac.compare_digest(given[0], self.local.secret.encode()):
            return f"it does not carry the secret in '{LOCAL}'"
        return "" if scope["type"] == "http" else "it is no HTTP request"

    def _member(self, scope: Scope) -> bool:
        """Whether a request is signed with a site's key: Flower looks at that too, but only once it has read it all."""
        from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

        given = {name: [value for other, value in scope.get("headers", ()) if other == name] for name in SIGNED}
        if any(len(values) != 1 for values in given.values()):
            return False
        key, time, signature = (given[name][0] for name in SIGNED)
        try:
            key, signature = (base64.b64decode(value, validate=True) for value in (key, signature))
            return key in self.members and verify_signature(bytes_to_public_key(key), time, signature)
        except ValueError:
            return False


def _loopback(client: Any) -> bool:
    with contextlib.suppress(ValueError, TypeError, IndexError):
        return ipaddress.ip_address(client[0]).is_loopback
    return False
