"""The server's SuperLink, the part of Flower that sites connect to: run, and told what its operator wants."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request as request_urllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bpfed._util import text
from bpfed._util.console import Say
from bpfed._util.errors import UserError
from bpfed._util.files import PLAN
from bpfed.deploy.ops import certificates, gate, launch
from bpfed.deploy.ops.supervise import (
    LAUNCH,
    SERVER_FOLDER,
    SITE_FOLDER,
    Stopped,
    Supervised,
    environment,
    free_port,
    until_told,
    watch,
)
from bpfed.deploy.settings import Plan
from bpfed.deploy.site.worker import SOCKET, STUCK

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient


#: The SuperLink's own memory.
DATABASE = "flower.db"


def serve(folder: Path, plan: Plan, say: Say) -> None:
    """Run the SuperLink until somebody asks for the end."""
    certificates.check_dates(folder, say)
    certificates.public_keys(folder, plan.sites)  # or it is said which of them cannot be read
    address = bound_to(folder, plan)
    env = {**environment(folder / "flwr", plan), SERVER_FOLDER: str(folder)}
    host = f"[{address}]" if ":" in address else address

    def started() -> None:
        if not healthy(folder, 120.0):
            raise UserError(
                f"The server did not answer at {plan.address} within 120 s; look above for the reason, or start it again if this "
                "machine is very busy."
            )
        say("Checking that strangers are refused, by four requests:")
        check_shut(folder, address, plan.port)
        known = certificates.public_keys(folder, plan.sites)
        for site in plan.sites:
            if site not in known:
                say(f"Site '{site}' has no key in '{folder / certificates.KEYS}', so it may not join.")
        say(f"{text.many(len(known), 'site')} may join.")
        say(f"The server is ready at {plan.address}; it listens at {host}:{plan.port}.")
        if _is_loopback(address) and not _is_loopback(plan.host):
            say(f"Only this machine reaches {address}; if sites are elsewhere, set bind in '{folder / PLAN}'.")

    watch("The SuperLink", lambda: command(folder, plan, address), env, say, started)


def command(folder: Path, plan: Plan, address: str) -> list[str]:
    """The command of the server's SuperLink, which listens at this address."""
    return [
        *LAUNCH,
        "flower-superlink",
        *("--host", address, "--port", str(plan.port)),
        *("--database", str(folder / DATABASE)),
        *("--ssl-ca-certfile", str(folder / certificates.AUTHORITY)),
        *("--ssl-certfile", str(folder / certificates.SERVER)),
        *("--ssl-keyfile", str(folder / certificates.SERVER_KEY)),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    ]


def bound_to(folder: Path, plan: Plan) -> str:
    """The one address of this machine that the server listens at: ``bind``, or that of the host that sites reach.

    Raises:
        UserError: It is not this machine's, or the port is taken.
    """
    wanted, instead = plan.bind or plan.host, f"set bind in '{folder / PLAN}' to one that is (0.0.0.0: all of them)"
    try:
        found = socket.getaddrinfo(wanted, plan.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(
            f"'{wanted}' is not known to be an address of this machine ({error.strerror}); {instead}."
        ) from None
    addresses = list(dict.fromkeys(str(place[0]) for *_, place in sorted(found, key=lambda one: one[0])))
    for address in addresses:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((address, plan.port))
                trial.listen(1)
                return address
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
                    raise UserError(
                        f"Port {plan.port} of {address} {why}; stop what listens there, or make the deployment with "
                        "another port."
                    ) from None
    named = wanted if wanted in addresses else f"{wanted} ({', '.join(addresses)})"
    raise UserError(f"{named} is not an address of this machine; {instead}.")


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def healthy(folder: Path, within: float) -> bool:
    """Whether the SuperLink answers its operator, over TLS, within so many seconds."""
    until = time.monotonic() + within
    while True:
        local = gate.read_local(folder)
        with contextlib.suppress(OSError, ValueError):
            if local is not None and _status(folder, gate.LOOPBACK, local.port, gate.HEALTH) == 200:
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.3)


def check_shut(folder: Path, address: str, port: int) -> None:
    """See that the running server refuses what strangers must not do.

    Raises:
        UserError: It does not, or does not answer: whatever the reason, it must not run.
    """
    local = gate.read_local(folder)
    assert local is not None
    anywhere = {"0.0.0.0": gate.LOOPBACK, "::": "::1"}
    for host, number in ((anywhere.get(address, address), port), (gate.LOOPBACK, local.port)):
        for path in ("/v1/control/list-nodes", "/v1/runtime/acquire-task"):
            until = time.monotonic() + 60.0  # it may be busy with the sites that wait for it
            while True:
                try:
                    found = _status(folder, host, number, path, b"")
                    break
                except (OSError, ValueError) as error:
                    if time.monotonic() > until:
                        raise UserError(
                            f"The server does not answer at {host}:{number} ({error}), so it is stopped."
                        ) from None
                    time.sleep(0.3)
            if found != 403:
                raise UserError(
                    f"The server answers strangers ({path}: {found}), so it is stopped; install the version of Flower "
                    "that bpfed asks for."
                )


def _status(folder: Path, host: str, port: int, path: str, data: bytes | None = None) -> int:
    """What the server answers, over TLS with its own certificate; by that and not by a name it is known."""
    context = ssl.create_default_context(cafile=str(folder / certificates.AUTHORITY))
    context.check_hostname = False
    host = f"[{host}]" if ":" in host else host
    asked = request_urllib.Request(f"https://{host}:{port}{path}", data, {"Content-Type": "application/protobuf"})
    opener = request_urllib.build_opener(request_urllib.ProxyHandler({}), request_urllib.HTTPSHandler(context=context))
    try:
        with opener.open(asked, timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@contextlib.contextmanager
def control(folder: Path) -> Iterator[ControlHttpClient]:
    """Flower's Control interface of the running server, as its operator.

    Raises:
        UserError: There is no server, or it does not do what it is asked inside.
    """
    import httpx
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    local = gate.read_local(folder)
    if local is None:
        raise UserError(f"No server was started in '{folder}'; start it with: bpfed deploy server {folder.parent}")
    client = ControlHttpClient.from_server_address(
        f"{gate.LOOPBACK}:{local.port}",
        insecure=False,
        root_certificates=(folder / certificates.AUTHORITY).read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="bpfed"), gate.Carrying(local.secret)],
    )
    try:
        yield client
    except httpx.HTTPStatusError as error:
        raise UserError(f"The server refused: {error.response.text[:300]}") from None
    except (httpx.HTTPError, OSError) as error:
        raise UserError(f"The server cannot be asked ({error}); see its log.") from None
    finally:
        client.close()


def start_run(folder: Path) -> int:
    """Start a run of our app; the number that Flower gives it."""
    from flwr.common.serde import fab_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.fab import Fab

    content = launch.bundle()
    with control(folder) as client:
        answer = client.StartRun(StartRunRequest(fab=fab_to_proto(Fab(launch.fingerprint(content), content, {}))))
    if not answer.HasField("run_id"):
        raise UserError("The run could not be started; see the server's log.")
    return int(answer.run_id)


def run_ended(folder: Path, run: int) -> bool:
    """Whether Flower has a run down as ended."""
    from flwr.common.constant import Status
    from flwr.proto.control_pb2 import ListRunsRequest

    with control(folder) as client:
        found = client.ListRuns(ListRunsRequest(run_id=run)).run_dict
    return run in found and found[run].status.status == Status.FINISHED


# --- A site's SuperNode, the part of Flower that connects it to the server, and the site's worker beside it -----------

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
    certificates.check_dates(folder, say, (certificates.AUTHORITY,))
    _check_server(folder, plan)
    env = {**environment(folder / "flwr", plan), SITE_FOLDER: str(folder)}
    working = [sys.executable, "-m", "bpfed.deploy.site.worker", str(folder), *([] if data is None else [data])]
    worker = Supervised(working, env, say, folder / STUCK)
    try:
        with until_told():
            if not worker.first(folder):
                return False
        watch(
            "The SuperNode",
            lambda: supernode_command(folder, plan),
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
    context = ssl.create_default_context(cafile=str(folder / certificates.AUTHORITY))
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
            f"'{certificates.AUTHORITY}' is the server's."
        ) from None
    except OSError:
        pass


def supernode_command(folder: Path, plan: Plan) -> list[str]:
    """The command of a site's SuperNode."""
    return [
        *LAUNCH,
        "flower-supernode",
        *("--superlink", plan.address),
        *("--root-certificates", str(folder / certificates.AUTHORITY)),
        *("--auth-supernode-private-key", str(folder / certificates.SITE_KEY)),
        *("--host", "127.0.0.1", "--port", str(free_port())),
        *("--node-config", f'folder="{folder}"'),
    ]
