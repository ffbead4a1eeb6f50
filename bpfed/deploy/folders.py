"""The folders of a deployment, opened: the server's with its run, a site's with its examples and states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bpfed._util.errors import UserError, quoted
from bpfed._util.paths import CONFIG, PLAN, RUN, STATES
from bpfed.config.reader import Config, read
from bpfed.config.registry import allowing
from bpfed.data.holdout import Holdout
from bpfed.data.load import names
from bpfed.data.tabular.federate import not_inputs
from bpfed.data.tabular.preprocessing import Preprocessor, read_preparation
from bpfed.data.tabular.statistics import SPLIT
from bpfed.deploy.ops.certificates import KEYS, public_keys
from bpfed.deploy.server.server import Server
from bpfed.deploy.settings import Plan
from bpfed.deploy.site.data import TOLD, Agreed, File, Part, Source
from bpfed.deploy.site.limits import LocalPrivacy
from bpfed.deploy.site.site import Site


def open_server(folder: Path, say: Callable[[str], None]) -> Server:
    """The server of a deployment's ``server`` folder."""
    plan = Plan.read(folder)
    config = read(folder / CONFIG)
    keys = public_keys(folder, plan.sites) if (folder / KEYS).is_dir() else None
    return Server(folder / RUN, plan, config, keys, say=say, agreed=agreed_preparation(folder, plan, config))


def agreed_preparation(folder: Path, plan: Plan, config: Config) -> Agreed | None:
    """The preparation that a part of a deployment has agreed to; None: none is named.

    Raises:
        UserError: It cannot be read, is not the one that was agreed to, or does not go with the configuration.
    """
    if not plan.preparation:
        return None
    path = folder / plan.preparation
    made, digest = read_preparation(path)
    if digest != plan.preparation_sha256:
        raise UserError(
            f"'{path}' is not the preparation that was agreed to: its SHA-256 is {digest}, and preparation_sha256 of "
            f"'{folder / PLAN}' is '{plan.preparation_sha256}'; restore the file."
        )
    return Agreed(_checked(made, config, path), digest)


def _checked(made: Preprocessor, config: Config, path: Path) -> Preprocessor:
    """The preparation, if it does what the configuration says."""
    asked = config.data
    for key, wanted, found in (
        ("target", asked.targets, made.target),
        ("task", asked.task, made.task),
        ("standardise", asked.standardise, made.standardise),
    ):
        if wanted not in (None, found):
            raise UserError(f"'{path}' has the {key} '{found}', but the configuration '{wanted}'; give both the same.")
    left_out = {SPLIT, *not_inputs(asked.ignore, Holdout.of(asked.holdout))} & {f.name for f in made.features}
    if left_out:
        raise UserError(
            f"'{path}' has the inputs {quoted(sorted(left_out))}, which are left out here; remove them from it."
        )
    return made


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
    with allowing(plan.plugins):
        return _opened(folder, plan, read(folder / CONFIG), say, data is not None)


def _opened(folder: Path, plan: Plan, config: Config, say: Callable[[str], None], remember: bool) -> Site:
    wanted = plan.data
    source: Source
    limits, agreed = plan.limits, agreed_preparation(folder, plan, config)
    if wanted in names():
        if agreed is not None:
            raise UserError(
                f"This deployment has agreed on a preparation of files, so '{wanted}' is of no use; give a file."
            )
        if wanted != config.data.name:
            raise UserError(
                f"This federation is on '{config.data.name}', not '{wanted}'; give --data {config.data.name}."
            )
        source, limits = Part(plan.site, plan.sites, config), replace(limits, minimum=1)  # whose rows are public
    elif wanted:
        if not Path(wanted).is_absolute():
            raise UserError(f"'{wanted}' is neither a file nor the name of a dataset; give one with --data.")
        path, told = Path(wanted).expanduser(), folder / STATES / TOLD
        source = File(plan.site, path, config, limits, agreed, told)
    else:
        raise UserError(f"Site '{plan.site}' has no data yet; give it with --data FILE.")
    if remember:
        plan.write(folder)
    local_privacy = None
    if plan.noise > 0.0:
        local_privacy = LocalPrivacy(
            folder / STATES, config.method, plan.clip, plan.noise, plan.delta, plan.epsilon, say
        )
    return Site(folder / STATES, plan.site, config, source, local_privacy, say, folder / RUN, limits, plan.plugins)
