"""A deployment as its operator sees it: made, run, asked how it is, and shown off on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bpfed._util import text
from bpfed._util.console import Say
from bpfed._util.errors import UserError
from bpfed._util.files import (
    CONFIG,
    PART,
    PREPROCESSING,
    REPORT,
    RUN,
    SERVER,
    sync_folder,
    to_toml,
    when_full,
    write_whole,
    writing,
)
from bpfed.config.reader import Config
from bpfed.config.registry import PREFIX
from bpfed.config.settings import MOST_EVALUATED
from bpfed.data.datasets import names
from bpfed.data.tabular.preprocessing import read_preprocessor
from bpfed.data.tabular.table import endings
from bpfed.deploy.ops import certificates, flower, supervise
from bpfed.deploy.server.server import check_deployment, open_server
from bpfed.deploy.server.status import STATUS, done, where
from bpfed.deploy.settings import Plan
from bpfed.deploy.site.data import agreed_preprocessor
from bpfed.engine.federation import suited
from bpfed.report import RunRecord

#: A run that stops this often without finishing a round is given up.
RESTARTS = 5
#: Seconds that a server is waited for: one that may be starting, and one that was there and may be started again.
STARTING, AGAIN = 20.0, 90.0


def _nobody(words: str) -> None:
    """For words that nobody listens to."""


def site_folder(folder: Path, site: str) -> Path:
    """Where a site's files are made; they are then brought to the site."""
    return folder / f"site-{certificates.slug(site)}"


def empty(folder: Path) -> bool:
    """Whether there is nothing of that name yet, or a folder without files.

    Raises:
        UserError: It is no folder, or cannot be looked into.
    """
    try:
        return not folder.exists() or not any(folder.iterdir())
    except NotADirectoryError:
        raise UserError(f"'{folder}' is a file; choose a folder for the deployment.") from None
    except OSError as error:
        raise UserError(f"'{folder}' cannot be read ({error.strerror}); choose another folder.") from error


def make(folder: Path, plan: Plan, config: Config, preprocessing: Path | None = None) -> None:
    """Make the folders of a deployment: certificates, keys, configuration. All are there in the end, or none.

    Args:
        folder: Where.
        plan: Who belongs to it.
        config: What is computed.
        preprocessing: A file with the preprocessing that all have agreed on; each part gets a copy.
    """
    content = b""
    if preprocessing is not None:
        _, digest = read_preprocessor(preprocessing)
        content = preprocessing.read_bytes()
        plan = replace(plan, preprocessing=PREPROCESSING, preprocessing_sha256=digest)
        agreed_preprocessor(preprocessing.parent, replace(plan, preprocessing=preprocessing.name), config)
    plan.check()
    if not empty(folder):
        raise UserError(f"'{folder}' holds files already; choose another folder for the deployment.")
    if len({site_folder(folder, site) for site in plan.sites}) != len(plan.sites):
        raise UserError("Two site names differ only in characters not allowed in file names; rename one.")
    config = replace(config, run=suited(config.method, config.run, len(plan.sites)))
    check_deployment(config, len(plan.sites))
    there = folder.exists()  # then it stays the folder that it is: a mount, or somebody's working directory
    part = (folder if there else folder.parent) / f".{folder.name}.{secrets.token_hex(4)}{PART}"
    with when_full(folder, "and make the deployment again"), writing(folder):
        part.mkdir(parents=True)
        try:
            _fill(part, plan, config, content)
            if there:
                for place in part.iterdir():
                    place.rename(folder / place.name)
                part.rmdir()
            else:
                part.rename(folder)
            sync_folder(folder.parent)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


def _fill(folder: Path, plan: Plan, config: Config, preprocessing: bytes) -> None:
    """Write the folders of a deployment into an empty one."""
    server, folders = folder / SERVER, [site_folder(folder, site) for site in plan.sites]
    run = {k: v for k, v in vars(config.run).items() if v is not None}
    asked = {k: v for k, v in vars(config.data).items() if v is not None}
    text = to_toml({"data": asked, "method": {"name": config.method.name, **config.method.settings()}, "run": run})
    for place in (server, *folders):
        place.mkdir(parents=True)
        place.chmod(0o700)
        write_whole(place / CONFIG, text)
        if plan.preprocessing:
            write_whole(place / plan.preprocessing, preprocessing)
    plan.write(server)
    certificates.make_server(server, plan.host)
    for site, place in zip(plan.sites, folders, strict=True):
        replace(plan, site=site, bind="", plugins=()).write(place)  # whose plug-ins a site runs, its owner says
        certificates.make_site(place, server, site)


def status(folder: Path) -> dict[str, Any] | None:
    """What the server last noted of its run; None: there is none yet."""
    try:
        return dict(json.loads((folder / RUN / STATUS).read_text()))
    except (OSError, ValueError):
        return None


def finished(folder: Path) -> RunRecord | None:
    """What came out of the server's run; None: there are rounds left, or sites that have not tested the last one.

    Raises:
        UserError: The run was of another configuration.
    """
    last = status(folder) or {}
    if last.get("state") != "finished" or not (folder / RUN / REPORT).is_file():
        return None
    server = open_server(folder, _nobody)
    wanted = min(server.config.run.eval_clients or MOST_EVALUATED, len(server.sites))
    metrics = last.get("metrics") or {}
    if server.journal.kept() is None or metrics.get("tested", 0) + metrics.get("untested", 0) < wanted:
        return None
    return RunRecord.read(folder / RUN)


def go_back(folder: Path, round_: int, say: Say) -> None:
    """Make the state after a round the newest one of the server's run, so that `run` goes on from there.

    Raises:
        UserError: A run is under way, or there is no such state.
    """
    last = status(folder)
    if last is not None and last.get("state") not in ("finished", "stopped") and alive(int(last["pid"])):
        raise UserError(
            f"A run is under way ({where(last)}), so it cannot go back to round {round_}; stop 'bpfed deploy server' and "
            "start it again first, then give --back-to."
        )
    with writing(folder):
        open_server(folder, say).journal.back_to(round_)
        (folder / RUN / STATUS).unlink(missing_ok=True)


def run(
    folder: Path, plan: Plan, say: Say, progress: Callable[[dict[str, Any]], None], waiting: Say = _nobody
) -> RunRecord:
    """Run the rounds that are left, on the server's machine; a run that breaks off is taken up again.

    Args:
        folder: The server's folder.
        plan: Of the server.
        say: Called with each message for the user.
        progress: Called whenever the server has noted its status.
        waiting: Called with a message on what is waited for.
    """
    if (found := finished(folder)) is not None:
        rounds = found.summary["rounds"]
        say(f"The run in '{folder / RUN}' is finished already: {text.done(rounds)}.")
        return found
    failures, most, patience = 0, -1, STARTING
    while True:
        start = f"bpfed deploy server {folder.parent}"
        waiting(f"waiting up to {patience:.0f} s for the server at {plan.address}, which '{start}' starts")
        certificates.check_dates(folder, _nobody)  # else it would only be said that nobody answers
        if not flower.healthy(folder, patience):
            raise UserError(f"No server answers at {plan.address}; start it with: {start}")
        patience = AGAIN
        (folder / RUN / STATUS).unlink(missing_ok=True)
        waiting("the run is being started")
        state = _follow(folder, flower.start_run(folder), progress)
        if state == "finished":
            return RunRecord.read(folder / RUN)
        last = status(folder) or {}
        now = done(last) if last else 0
        failures = 0 if now > most else failures + 1
        most = max(most, now)
        if last.get("state") == "stopped" and last.get("by_user_error"):
            raise UserError(str(last.get("error")))
        if failures >= RESTARTS:
            after = where(last) if last else "round 0"
            raise UserError(f"The run broke off {failures} times after {after}; see the server's log.")
        say("The run broke off; resuming from its last finished round.")
        time.sleep(2.0)


def _follow(folder: Path, run: int, progress: Callable[[dict[str, Any]], None]) -> str:
    """Until the run is finished or has broken off, which word is given back."""
    noted, asked = 0.0, time.monotonic()
    while True:
        found = status(folder)
        if found is not None:
            if found["at"] != noted:
                noted = found["at"]
                progress(found)
            if found["state"] == "finished":
                return "finished"
            if found["state"] == "stopped" or not alive(int(found["pid"])):
                return "stopped"
        if time.monotonic() - asked > 20.0:
            asked = time.monotonic()
            if found is None and _ended(folder, run):
                return "stopped"
        time.sleep(0.3)


def _ended(folder: Path, run: int) -> bool:
    try:
        return flower.run_ended(folder, run)
    except UserError:
        return not flower.healthy(folder, 0.0)


def alive(process: int) -> bool:
    """Whether a process of this number is running on this machine; one that has ended and is not yet buried is not."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return True


@contextlib.contextmanager
def started(
    folder: Path, plan: Plan, data: str, say: Say, waiting: Say = _nobody
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """All of a deployment on this machine, as a person would start it; stopped at the end. Processes by name."""
    bpfed = [sys.executable, "-m", "bpfed", "deploy"]
    env = dict(os.environ)
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        say("Starting the server.")
        waiting("the server is starting")
        server = folder / SERVER
        running[SERVER] = supervise.start([*bpfed, "server", str(folder)], env, server / "server.log")
        until = time.monotonic() + 180.0
        while not flower.healthy(server, 0.0):
            if running[SERVER].poll() is not None or time.monotonic() > until:
                raise UserError(f"The server did not start; see '{server / 'server.log'}'.")
            time.sleep(0.2)
        say(f"Starting {text.many(len(plan.sites), 'site')}.")
        for site in plan.sites:
            own = site_folder(folder, site)
            running[site] = supervise.start([*bpfed, "client", str(own), "--data", data], env, own / "site.log")
        yield running
    finally:
        waiting("server and sites are being stopped")
        for process in running.values():
            if process.poll() is None:
                process.terminate()
        for process in running.values():
            supervise.stop(process, 20.0)


def data_of(config: Config, site: str) -> str:
    """What a site may give as ``--data``: the named dataset, or its file of the folder; else the word ``FILE``."""
    name = config.data.name
    if name in names():
        return name
    if name.startswith(PREFIX):
        place = Path(name.removeprefix(PREFIX))
        for ending in endings():
            if (place.expanduser() / f"{site}{ending}").is_file():
                return str(place / f"{site}{ending}")
    return "FILE"


def named_sites(config: Config, given: Sequence[str]) -> tuple[str, ...]:
    """The sites' names: those given, or the clients of the named dataset, checked to go with the settings."""
    if given:
        return tuple(given)
    data = config.load_data()
    check_deployment(config, len(data), data)
    return data.clients
