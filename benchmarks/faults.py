"""Faults of a real deployment on loopback: what happened, rounds lost, seconds to recover; and what a round costs.

    python -m benchmarks.faults [FOLDER [WORD ...]]

One federation of four sites runs on; each fault is made in a round of its own and watched until all is as before. One of the
sites is a member that spoils its answers when told to. Only processes that this script has started are killed, by their
number. As root, one site's states are on a disk of a few megabytes (a tmpfs), which is filled. With words, only faults that
have one of them in their name are made.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import rounds
from bpfed._util.files import RUN, SERVER, STATES, write_whole
from bpfed.config.reader import Override, read
from bpfed.deploy.ops import admin, certificates, supervise
from bpfed.deploy.settings import Plan

ROUNDS = 400  # more than are needed: the script ends the run
WANTED = {"data.name": "digits", "data.clients": 4, "run.rounds": ROUNDS, "run.epochs": 1, "run.eval_every": 1}
PATIENCE = 1200.0
TIMEOUT = 240.0
#: Megabytes of the site's small disk.
DISK = 4
COLUMNS = (
    "fault",
    "what happened",
    "rounds lost",
    "rounds without the site",
    "seconds to the next round",
    "seconds until as before",
)


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


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A folder on a disk of its own; whether that could be made."""
    folder.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "tmpfs", str(folder)], stderr=subprocess.DEVNULL
    )
    try:
        yield made.returncode == 0
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Write a file until the disk has no byte left."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"0" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return path


class Watched:
    """The run, looked at from outside."""

    def __init__(self, server: Path) -> None:
        self.server, self.most, self.back = server, 0, 0

    def now(self) -> dict[str, Any]:
        found = admin.status(self.server)
        if found is None or found["state"] == "starting":
            return {"round": 0, "sites": {}, "pid": 0}
        self.most = max(self.most, found["round"])
        self.back = max(self.back, self.most - found["round"])  # finished rounds that the server no longer has
        return found

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

    def unused(self, site: str) -> str:
        """What the server says of the last answer of a site that was not used, or that never came."""
        return str(self.now()["sites"][site]["why"])


class Faults:
    """Makes faults in a running federation, one after the other, and notes what came of each."""

    def __init__(self, watched: Watched, words: list[str], say: Callable[[str], None]) -> None:
        self.watched, self.words, self.say = watched, words, say
        self.rows: list[tuple[str, ...]] = []

    def wanted(self, name: str) -> bool:
        return not self.words or any(word in name for word in self.words)

    def note(self, *cells: str) -> None:
        self.rows.append(cells)
        print("| " + " | ".join(cells) + " |", flush=True)

    def make(self, name: str, what: str | Callable[[], str], site: str, fault: Callable[[], None]) -> None:
        """A fault at or near a site."""
        if not self.wanted(name):
            return
        watched = self.watched
        watched.steady(site)
        before = watched.now()
        self.say(f"Fault: {name} (round {before['round']} is done).")
        watched.back = 0
        start = time.monotonic()
        fault()
        watched.until(lambda s: s["round"] > before["round"] and s["pid"] > 0, "the next round")
        next_round = time.monotonic() - start
        counted = before["sites"][site]["counted"]
        watched.until(
            lambda s: s["round"] > before["round"] and s["sites"][site]["counted"] > counted, "the site again"
        )
        seconds, after = time.monotonic() - start, watched.now()
        lost = after["sites"][site]["counted"] - counted - 1
        said = what if isinstance(what, str) else what()
        self.note(name, said, str(watched.back), str(lost), f"{next_round:.0f}", f"{seconds:.0f}")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="bpfed-faults-")).resolve()
    config = read(None, [Override(key, str(value)) for key, value in WANTED.items()])
    plan = Plan(config.load_data().clients, f"127.0.0.1:{supervise.free_port()}", timeout=TIMEOUT, wait=600.0)
    fed = folder / "fed"
    admin.make(fed, plan, config)
    server = fed / SERVER
    *honest, rogue = plan.sites
    victim, tight = honest[1], honest[2]
    watched = Watched(server)

    def say(sentence: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {sentence}", file=sys.stderr, flush=True)

    faults = Faults(watched, sys.argv[2:], say)
    with (
        supervise.until_told(),
        small_disk(admin.site_folder(fed, tight) / STATES) as small,
        admin.started(fed, replace(plan, sites=tuple(honest)), "digits", say) as running,
    ):
        own = admin.site_folder(fed, rogue)
        replace(plan, site=rogue, data="digits").write(own)
        command = [sys.executable, "-m", "benchmarks.rogue", str(own)]
        running[rogue] = supervise.start(command, dict(os.environ), own / "site.log")
        follower = threading.Thread(target=lambda: admin.run(server, plan, say, lambda found: None), daemon=True)
        follower.start()
        watched.until(lambda s: s["round"] >= 1, "the first round")
        quiet = watched.now()["round"] + 3
        watched.until(lambda s: s["round"] >= quiet, "rounds without a fault")
        _spoilt_answers(faults, own, rogue)
        if small:
            _full_disk(faults, admin.site_folder(fed, tight) / STATES, tight)
        else:
            say("No disk of its own could be mounted; the fault 'full disk' is left out.")
        _killed(faults, fed, running, victim)
        _stranger(faults, folder, server, plan, victim, running)
        final = watched.now()

    print("\n| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for row in faults.rows:
        print("| " + " | ".join(row) + " |")
    print(f"\n{final['round']} rounds done; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}.")
    print(f"Sites: {final['sites']}\n")
    print(rounds.table(server / RUN, {site: admin.site_folder(fed, site) / "site.log" for site in plan.sites}))


def _spoilt_answers(faults: Faults, own: Path, rogue: str) -> None:
    for word, name in (
        ("nan", "a site sends NaN"),
        ("shape", "a site sends another shape"),
        ("sigma", "a site sends σ = 0"),
        ("beyond", "a site sends a mean of 1e20"),
        ("wide", "a site sends σ = 3e38"),
        ("old", "a site sends an answer of an old round"),
        ("gigabyte", "a site sends 1 GB"),
    ):
        faults.make(
            name,
            lambda: faults.watched.unused(rogue),
            rogue,
            partial(write_whole, own / "spoil", word),
        )


def _full_disk(faults: Faults, disk: Path, site: str) -> None:
    def full() -> None:
        refused = faults.watched.now()["sites"][site]["refused"]
        filler = fill(disk)
        try:
            faults.watched.until(lambda s: s["sites"][site]["refused"] > refused, "a site without a disk")
        finally:
            filler.unlink()

    faults.make(
        f"a full disk at a site (a tmpfs of {DISK} MB, filled, and emptied after the refusal)",
        lambda: faults.watched.unused(site),
        site,
        full,
    )


def _killed(faults: Faults, fed: Path, running: dict[str, subprocess.Popen[bytes]], victim: str) -> None:
    client = running[victim]

    def kill(whose: subprocess.Popen[bytes], word: str, with_: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
        return lambda: os.kill(below(whose, word), with_)

    faults.make(
        "`kill -9` of the server's app",
        "`deploy run` takes the run up after its last round",
        victim,
        lambda: os.kill(int(faults.watched.now()["pid"]), signal.SIGKILL),
    )
    faults.make(
        "`kill -9` of a site's worker",
        "the client starts another, which reads its state from the disk",
        victim,
        kill(client, "bpfed.deploy.site.worker"),
    )
    faults.make(
        "`kill -9` of a site's SuperNode",
        "the client starts it again until Flower lets its key in",
        victim,
        kill(client, "flower-supernode"),
    )
    faults.make(
        "`kill -9` of the SuperLink",
        "`deploy server` starts it again, sites reconnect, the run is taken up",
        victim,
        kill(running[SERVER], "flower-superlink"),
    )
    faults.make(
        "a site's worker hangs (`SIGSTOP`)",
        "time-out, the client replaces the worker",
        victim,
        kill(client, "bpfed.deploy.site.worker", signal.SIGSTOP),
    )

    def restart() -> None:
        own = admin.site_folder(fed, victim)
        for pid in [*children(client.pid), client.pid]:
            os.kill(pid, signal.SIGKILL)
        client.wait()
        command = [sys.executable, "-m", "bpfed", "deploy", "client", str(own), "--data", "digits"]
        running[victim] = supervise.start(command, dict(os.environ), own / "site.log")

    faults.make("`kill -9` of all of a site, and restart", "its state is read from its disk", victim, restart)


def _stranger(
    faults: Faults,
    folder: Path,
    server: Path,
    plan: Plan,
    victim: str,
    running: dict[str, subprocess.Popen[bytes]],
) -> None:
    """A site's folder as it should be, but for the key."""
    name = "a site with an unregistered key"
    if not faults.wanted(name):
        return
    own, elsewhere = folder / "stranger", folder / "elsewhere"
    own.mkdir()
    elsewhere.mkdir()
    replace(plan, site=victim, data="digits").write(own)
    for file in ("config.toml", certificates.AUTHORITY):
        (own / file).write_bytes((server / file).read_bytes())
    (elsewhere / certificates.AUTHORITY).write_bytes((server / certificates.AUTHORITY).read_bytes())
    certificates.make_site(own, elsewhere, victim)
    start, log, before = time.monotonic(), folder / "stranger.log", faults.watched.now()["round"]
    command = [sys.executable, "-m", "bpfed", "deploy", "client", str(own), "--data", "digits"]
    alien = running["stranger"] = supervise.start(command, dict(os.environ), log)
    faults.watched.until(lambda s: alien.poll() is not None, "the refusal of a stranger")
    said, seconds = log.read_text(errors="replace"), time.monotonic() - start
    what = "refused" if "refuses this site's key" in said else f"ended with {alien.returncode}"
    went_on = faults.watched.now()["round"] - before
    tries = said.count("is not let in") + 1
    faults.note(
        name,
        f"{what} {tries} times, then it gives up; {went_on} rounds were done meanwhile",
        "0",
        "0",
        "",
        f"{seconds:.0f}, to give up",
    )


if __name__ == "__main__":
    main()
