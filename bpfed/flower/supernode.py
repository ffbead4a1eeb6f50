"""A site's SuperNode, the part of Flower that connects it to the server, and the site's worker beside it."""

from __future__ import annotations

import socket
import ssl
import sys
from pathlib import Path

from bpfed.errors import UserError
from bpfed.flower import keys
from bpfed.flower.plan import Plan
from bpfed.flower.processes import LAUNCH, SITE_FOLDER, Stopped, environment, free_port, until_told
from bpfed.flower.supervisor import Say, Supervised, watch
from bpfed.flower.worker import SOCKET, STUCK

#: OpenSSL's number for a certificate that has expired.
EXPIRED = 10


def join(folder: Path, plan: Plan, say: Say, data: str | None = None) -> bool:
    """Run a site's SuperNode, and its worker beside it, until somebody asks for the end.

    Args:
        folder: The site's.
        plan: Of the site.
        say: Called with each message for the user.
        data: What its examples are, if that is to be remembered; None: what is remembered.

    Returns:
        False: the site cannot take part, and its worker has said why.
    """
    keys.check_dates(folder, say, (keys.AUTHORITY,))
    _check_server(folder, plan)
    env = {**environment(folder / "flwr", plan), SITE_FOLDER: str(folder)}
    working = [sys.executable, "-m", "bpfed.flower.worker", str(folder), *([] if data is None else [data])]
    worker = Supervised(working, env, say, folder / STUCK)
    try:
        with until_told():
            if not worker.first(folder):
                return False
        watch(
            "The SuperNode",
            lambda: command(folder, plan),
            env,
            say,
            lambda: say(f"Site '{plan.site}' joins {plan.address}."),
        )
    except Stopped:
        say("Stopping.")
    finally:
        worker.close()
        (folder / SOCKET).unlink(missing_ok=True)
    return True


def _check_server(folder: Path, plan: Plan) -> None:
    """Say of a server whose certificate is not good any more that this is so; one that is away comes later.

    Raises:
        UserError: Its certificate has expired, or is none of this deployment's.
    """
    context = ssl.create_default_context(cafile=str(folder / keys.AUTHORITY))
    try:
        with (
            socket.create_connection((plan.host, plan.port), timeout=10.0) as link,
            context.wrap_socket(link, server_hostname=plan.host),
        ):
            pass
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == EXPIRED:
            raise UserError(
                f"The certificate of the server at {plan.address} has expired; ask its operator for a new one."
            ) from None
        raise UserError(
            f"The server at {plan.address} is not the one this site was made for ({error.verify_message}); see that "
            f"'{keys.AUTHORITY}' is the server's."
        ) from None
    except OSError:
        pass


def command(folder: Path, plan: Plan) -> list[str]:
    """The command of a site's SuperNode."""
    return [
        *LAUNCH,
        "flower-supernode",
        *("--superlink", plan.address),
        *("--root-certificates", str(folder / keys.AUTHORITY)),
        *("--auth-supernode-private-key", str(folder / keys.SITE_KEY)),
        *("--host", "127.0.0.1", "--port", str(free_port())),
        *("--node-config", f'folder="{folder}"'),
    ]
