"""A site's SuperNode, the part of Flower that connects it to the server, and the site's worker beside it."""

from __future__ import annotations

import sys
from pathlib import Path

from bpfed.flower import keys
from bpfed.flower.plan import Plan
from bpfed.flower.processes import LAUNCH, Stopped, environment, free_port, until_told
from bpfed.flower.supervisor import Say, Supervised, watch
from bpfed.flower.worker import SOCKET, STUCK


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
    env = environment(folder / "flwr", plan)
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
