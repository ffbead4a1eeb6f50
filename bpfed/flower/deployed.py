"""The folders of a deployment, opened: the server's with its run, a site's with its examples and states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bpfed.config import read
from bpfed.data.load import names
from bpfed.errors import UserError
from bpfed.flower.data import File, Part, Source
from bpfed.flower.guard import Guard
from bpfed.flower.keys import KEYS, public_keys
from bpfed.flower.plan import Plan
from bpfed.flower.server import Server
from bpfed.flower.site import Site
from bpfed.layout import CONFIG, RUN, STATES


def open_server(folder: Path, say: Callable[[str], None]) -> Server:
    """The server of a deployment's ``server`` folder."""
    plan = Plan.read(folder)
    keys = public_keys(folder, plan.sites) if (folder / KEYS).is_dir() else None
    return Server(folder / RUN, plan, read(folder / CONFIG), keys, say=say)


def open_site(folder: Path, say: Callable[[str], None], data: str | None = None) -> Site:
    """The site of a deployment's site folder.

    Args:
        folder: The site's.
        say: Called with each message for the site's owner.
        data: What its examples are from now on, remembered once they could be read; None: what is remembered.
    """
    plan = Plan.read(folder)
    if data is not None:
        plan = replace(plan, data=data)
    if not plan.site:
        raise UserError(f"'{folder}' is not the folder of a site; give one such as '{folder.parent / 'site-a'}'.")
    config = read(folder / CONFIG)
    wanted = plan.data
    source: Source
    if wanted in names():
        if wanted != config.data.name:
            raise UserError(
                f"This federation is on '{config.data.name}', not '{wanted}'; give --data {config.data.name}."
            )
        source = Part(plan.site, plan.sites, config)
    elif wanted:
        if not Path(wanted).is_absolute():
            raise UserError(f"'{wanted}' is neither a file nor the name of a dataset; give one with --data.")
        source = File(plan.site, Path(wanted).expanduser(), config)
    else:
        raise UserError(f"Site '{plan.site}' has no data yet; give it with --data FILE.")
    if data is not None:
        plan.write(folder)
    guard = None
    if plan.noise > 0.0:
        guard = Guard(folder / STATES, config.method, plan.clip, plan.noise, plan.delta, plan.epsilon, say)
    return Site(folder / STATES, plan.site, config, source, guard, say, folder / RUN)
