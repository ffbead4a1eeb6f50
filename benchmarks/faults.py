"""Faults of a real deployment on loopback: what happened, rounds lost, seconds to recover; and what a round costs.

    python -m benchmarks.faults [FOLDER]

One federation of three sites runs on; each fault is made in a round of its own and watched until all is as before. Only
processes that this script has started are killed, by their number.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bpfed.config import Override, read
from bpfed.flower import control, keys, processes
from bpfed.flower.deployed import RUN
from bpfed.flower.plan import SERVER, Plan
from bpfed.flower.server import EXCHANGES

ROUNDS = 400  # more than are needed: the script ends the run
WANTED = {"data.name": "digits", "data.clients": 3, "run.rounds": ROUNDS, "run.epochs": 1, "run.eval_every": 1}
PATIENCE = 400.0
TIMEOUT = 90.0


def children(pid: int) -> list[int]:
    """All processes below one."""
    try:
        own = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        for thread in Path(f"/proc/{pid}/task").iterdir():
            own += [int(c) for c in (thread / "children").read_text().split()]
    except OSError:
        return []
    return sorted({p for c in own for p in (c, *children(c))})


def below(process: subprocess.Popen[bytes], word: str) -> int:
    """The process below this one whose command has that word."""
    for pid in children(process.pid):
        try:
            if word in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
        except OSError:
            continue
    raise SystemExit(f"There is no {word} below process {process.pid}.")


class Watched:
    """The run, looked at from outside."""

    def __init__(self, server: Path) -> None:
        self.server = server

    def now(self) -> dict[str, Any]:
        return control.status(self.server) or {"round": 0, "sites": {}, "pid": 0}

    def until(self, holds: Callable[[dict[str, Any]], bool], what: str) -> float:
        """Seconds until something holds."""
        start = time.monotonic()
        while time.monotonic() - start < PATIENCE:
            if holds(self.now()):
                return time.monotonic() - start
            time.sleep(0.2)
        raise SystemExit(f"Not within {PATIENCE:g} s: {what}.")

    def steady(self, site: str) -> None:
        """Wait for a new round in which the site's upload was used."""
        done = self.now()["round"]
        self.until(lambda s: s["round"] > done and s["sites"][site]["counted"] == s["round"], "a steady round")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="bpfed-faults-")).resolve()
    config = read(None, [Override(key, str(value)) for key, value in WANTED.items()])
    plan = Plan(config.load_data().clients, f"127.0.0.1:{processes.free_port()}", timeout=TIMEOUT, wait=300.0)
    control.make(folder / "fed", plan, config)
    server = folder / "fed" / SERVER
    victim = plan.sites[1]
    rows: list[tuple[str, str, str, str]] = []
    watched = Watched(server)

    def say(sentence: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {sentence}", file=sys.stderr, flush=True)

    with control.started(folder / "fed", plan, "digits", say) as running:
        follower = threading.Thread(target=lambda: control.run(server, plan, say, lambda found: None), daemon=True)
        follower.start()
        watched.until(lambda s: s["round"] >= 1, "the first round")

        def fault(name: str, what: str, make: Callable[[], None]) -> None:
            watched.steady(victim)
            before = watched.now()
            say(f"Fault: {name} (round {before['round']} is done).")
            make()
            start = time.monotonic()
            watched.until(lambda s: s["round"] > before["round"] and s["pid"] > 0, "the next round")
            next_round = time.monotonic() - start
            watched.until(
                lambda s: s["round"] > before["round"] and s["sites"][victim]["counted"] == s["round"], "the site again"
            )
            after = watched.now()
            seconds = time.monotonic() - start
            lost = after["sites"][victim]["counted"] - before["sites"][victim]["counted"] - 1
            say(f"  next round after {next_round:.0f} s, all as before after {seconds:.0f} s.")
            rows.append((name, what, f"0 ({lost} without the site)", f"{next_round:.0f} / {seconds:.0f}"))
            print("| " + " | ".join(rows[-1]) + " |", flush=True)

        client = running[victim]
        fault(
            "kill -9 of the server's app",
            "'deploy run' takes the run up after its last round",
            lambda: os.kill(int(watched.now()["pid"]), signal.SIGKILL),
        )
        fault(
            "kill -9 of a site's worker",
            "the client starts another, which reads its state from the disk",
            lambda: os.kill(below(client, "bpfed.flower.worker"), signal.SIGKILL),
        )
        fault(
            "kill -9 of a site's SuperNode",
            "the client starts it again until Flower lets its key in",
            lambda: os.kill(below(client, "flower-supernode"), signal.SIGKILL),
        )
        fault(
            "kill -9 of the SuperLink",
            "'deploy server' starts it again, sites reconnect, the run is taken up",
            lambda: os.kill(below(running[SERVER], "flower-superlink"), signal.SIGKILL),
        )
        fault(
            "a site's worker hangs (SIGSTOP)",
            "time-out, the client replaces the worker",
            lambda: os.kill(below(client, "bpfed.flower.worker"), signal.SIGSTOP),
        )

        def restart() -> None:
            own = control.site_folder(folder / "fed", victim)
            for pid in [*children(client.pid), client.pid]:
                os.kill(pid, signal.SIGKILL)
            client.wait()
            command = [sys.executable, "-m", "bpfed", "deploy", "client", str(own), "--data", "digits"]
            running[victim] = processes.start(command, dict(os.environ), own / "site.log")

        fault("kill -9 of all of a site, and restart", "state read from its disk", restart)

        stranger = folder / "stranger"
        stranger.mkdir()
        replace(plan, site=victim, data="digits").write(stranger)
        for name in ("config.toml", keys.AUTHORITY):
            (stranger / name).write_bytes((server / name).read_bytes())
        keys.make_site(stranger, _copy(server, folder / "elsewhere"), victim)
        start = time.monotonic()
        log = folder / "stranger.log"
        command = [sys.executable, "-m", "bpfed", "deploy", "client", str(stranger), "--data", "digits"]
        alien = running["stranger"] = processes.start(command, dict(os.environ), log)
        watched.until(lambda s: alien.poll() is not None, "the refusal of a stranger")
        said = log.read_text()
        what = "refused" if "refuses this site's key" in said else f"ended with {alien.returncode}"
        tries = said.count("is not let in")
        seconds = time.monotonic() - start
        rows.append(
            ("a site with an unregistered key", f"{what} {tries + 1} times, then it gives up", "0", f"{seconds:.0f}")
        )
        final = watched.now()

    print(
        "| fault | what happened | rounds lost | seconds to the next round / until all is as before |\n|---|---|---|---|"
    )
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print("\nSeconds of a round: " + ", ".join(f"{name} {value}" for name, value in cost(server / RUN).items()))
    print(f"{final['round']} rounds done; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}.")


def cost(run: Path) -> dict[str, float]:
    """Where the seconds of a round go, as medians over the rounds of a deployed run in which all sites answered."""
    lines = [json.loads(line) for line in (run / EXCHANGES).read_text().splitlines()]
    parts: dict[str, list[float]] = {"round": [], "training": [], "site": [], "server": [], "flower": []}
    for before, line in itertools.pairwise(lines):
        if line["round"] != before["round"] + 1 or not line["answered"] == line["asked"] == before["answered"]:
            continue
        whole = line["at"] - before["at"]
        parts["round"].append(whole)
        parts["training"].append(line["site_work"])
        parts["site"].append(line["site_seconds"] - line["site_work"])
        parts["server"].append(whole - line["seconds"])
        parts["flower"].append(line["seconds"] - line["site_seconds"])
    return {name: round(statistics.median(values), 3) for name, values in parts.items()}


def _copy(server: Path, to: Path) -> Path:
    """A server's folder that only gives its certificate."""
    to.mkdir()
    (to / keys.AUTHORITY).write_bytes((server / keys.AUTHORITY).read_bytes())
    return to


if __name__ == "__main__":
    main()
