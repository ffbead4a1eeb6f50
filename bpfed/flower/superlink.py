"""The server's SuperLink, the part of Flower that sites connect to: run, asked, and told which keys to let in."""

from __future__ import annotations

import ipaddress
import json
import ssl
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bpfed.errors import UserError
from bpfed.files import to_toml, write_whole
from bpfed.flower import keys
from bpfed.flower.disk import when_full
from bpfed.flower.plan import Plan
from bpfed.flower.processes import LAUNCH, environment, start_captured
from bpfed.flower.server_app import FOLDER
from bpfed.flower.supervisor import Say, watch
from bpfed.report import text

#: The SuperLink's own memory.
DATABASE = "flower.db"
#: Flower's name for the connection that we configure.
CONNECTION = "deployment"
#: The keys that were registered, and with which database.
REGISTERED = "registered.json"


def serve(folder: Path, plan: Plan, say: Say) -> None:
    """Run the SuperLink until somebody asks for the end."""
    env = {**environment(folder / "flwr", plan), FOLDER: str(folder)}

    def started() -> None:
        if not healthy(folder, plan, 120.0):
            raise UserError(f"The server does not answer at {plan.address}; is the port taken?")
        register(folder, plan, say)
        say(f"The server is ready at {plan.address}.")

    watch("The SuperLink", lambda: command(folder, plan), env, say, started)


def command(folder: Path, plan: Plan) -> list[str]:
    """The command of the server's SuperLink."""
    return [
        *LAUNCH,
        "flower-superlink",
        *("--host", bound_to(plan.host), "--port", str(plan.port)),
        *("--database", str(folder / DATABASE)),
        *("--ssl-ca-certfile", str(folder / keys.AUTHORITY)),
        *("--ssl-certfile", str(folder / keys.SERVER)),
        *("--ssl-keyfile", str(folder / keys.SERVER_KEY)),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    ]


def bound_to(host: str) -> str:
    """The address that a server listens at, if sites reach it at this host: loopback, or all of the host's own."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host if host == "localhost" else "0.0.0.0"
    return host if address.is_loopback else "::" if address.version == 6 else "0.0.0.0"


def healthy(folder: Path, plan: Plan, within: float) -> bool:
    """Whether the SuperLink answers, over TLS, within so many seconds."""
    context = ssl.create_default_context(cafile=str(folder / keys.AUTHORITY))
    until = time.monotonic() + within
    while True:
        try:
            with urllib.request.urlopen(f"https://{plan.address}/health", timeout=5, context=context) as reply:
                return bool(reply.status == 200)
        except (OSError, ValueError):
            if time.monotonic() >= until:
                return False
            time.sleep(0.3)


def ask(folder: Path, plan: Plan, *arguments: str, timeout: float = 120.0) -> dict[str, Any]:
    """Run a command of ``flwr`` against the deployment's SuperLink and read what it prints."""
    home = folder / "flwr"
    known = to_toml({"address": plan.address, "root-certificates": str(folder / keys.AUTHORITY)})
    connection = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n{known}'
    if not (home / "config.toml").exists() or (home / "config.toml").read_text() != connection:
        with when_full(home, "and try again"):
            write_whole(home / "config.toml", connection)
    asked = ["flwr", *arguments, CONNECTION, "--format", "json"]
    process = start_captured(asked, environment(home, plan), timeout)
    try:
        found = json.loads(process[process.index("{") :])
    except ValueError:
        raise UserError(f"'{' '.join(asked)}' failed: {process.strip()[-500:]}") from None
    return dict(found)


def _noted(path: Path) -> dict[str, Any]:
    """What was registered, as far as that can be read: a key that is registered again does no harm."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def register(folder: Path, plan: Plan, say: Say) -> None:
    """Let the sites' keys in; the SuperLink's database remembers those that are in."""
    paths = {site: folder / keys.KEYS / f"{keys.slug(site)}.pub" for site in plan.sites}
    noted = folder / REGISTERED
    database = (folder / DATABASE).stat().st_ino
    known = _noted(noted)
    known = known if known.get("database") == database else {"database": database}
    keys.public_keys(folder, plan.sites)  # or it is said which of them cannot be read
    missing = {site: path for site, path in paths.items() if known.get(site) != path.read_text()}
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda path: ask(folder, plan, "supernode", "register", str(path)), missing.values())
    for site, answer in zip(missing, found, strict=True):
        if not answer.get("success") and "already" not in str(answer):
            raise UserError(f"The key of site '{site}' could not be registered: {answer.get('error-message', answer)}")
        known[site] = paths[site].read_text()
    with when_full(noted, "and start the server again"):
        write_whole(noted, json.dumps(known))
    say(f"{text.many(len(plan.sites), 'site')} may join.")
