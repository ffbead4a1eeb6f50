"""A site's examples: its own file, or its part of a named dataset; and what sites tell each other about theirs.

Before the first round every site tells the server its `Source.facts`; the server makes of them what all have in common
(`agreed`) and sends that along, and only then can a site turn its rows into inputs as all others do (`Source.data`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from bpfed.config import Config
from bpfed.data import FederatedData
from bpfed.data.columns import doubts, telling
from bpfed.data.combine import combine
from bpfed.data.folder import DataDir
from bpfed.data.load import names
from bpfed.data.lookalikes import lookalikes, spelling
from bpfed.data.own import TEST_FRACTION, column_names, examples, find_target, held_out
from bpfed.data.preparation import Preparation
from bpfed.data.summary import SPLIT, Summary, client_summary
from bpfed.data.table import Table, read_table
from bpfed.errors import UserError, first_of, quoted
from bpfed.flower.message import BESIDE
from bpfed.flower.pattern import Refused

#: Columns of a table up to which what is told of them fits into a message.
MANY = 1000


class Source(Protocol):
    """Where a site's examples are from."""

    def facts(self) -> dict[str, Any]:
        """What the server is told of them, as plain data; all that is."""
        ...

    def data(self, common: Mapping[str, Any]) -> FederatedData:
        """The federation of this client alone, given what all sites have in common."""
        ...


class Part:
    """One client's part of a named dataset, for demonstrations and tests.

    Args:
        site: The site's name.
        sites: All sites' names; if they are those of the dataset's clients, the site has the part of the client of its
            name, else that of the client in its place.
        config: Says which dataset.
    """

    def __init__(self, site: str, sites: tuple[str, ...], config: Config, data_dir: DataDir = None) -> None:
        whole = part_of(config, len(sites), data_dir)
        client = site if set(sites) == set(whole.clients) else whole.clients[sites.index(site)]
        own, made = one_client(whole, client), whole.preparation
        if made is not None and client in made.local:
            made = replace(made, local={site: made.local[client]})
        self.own = replace(own, clients=(site,), preparation=made)

    def facts(self) -> dict[str, Any]:
        own = self.own
        return {
            "shape": list(own.input_shape),
            "task": own.task,
            "classes": own.classes,
            "train": int(own.train.sizes[0]),
        }

    def data(self, common: Mapping[str, Any]) -> FederatedData:
        here = self.facts()
        if any(common.get(key) != here[key] for key in ("shape", "task", "classes")):
            raise Refused("the other sites' data have a different shape or task.")
        return self.own


class File:
    """A file of rows that never leaves the site; see `bpfed.data.table.read_table`.

    Args:
        site: The site's name.
        path: The file.
        config: Says what to predict and how much to hold out.
    """

    def __init__(self, site: str, path: Path, config: Config) -> None:
        self.site, self.config = site, config
        asked = config.data
        self.table = read_table(path, ignore=column_names(asked.ignore), missing=column_names(asked.missing))
        self.seed = config.data_seed
        self.task = asked.task
        self.ignore = tuple(column_names(asked.ignore))
        self.target = find_target({site: self.table}, asked.target)
        _check_told(self.table, path, self.target, self.ignore)
        fraction = TEST_FRACTION if asked.test_fraction is None else asked.test_fraction
        test = held_out(self.table, self.target, site, task=self.task, test_fraction=fraction, seed=self.seed)
        self.train, self.test = (self.table.take(np.flatnonzero(rows)) for rows in (~test, test))
        if not len(self.train):
            raise UserError(f"'{path}' has no row left for training; give it more rows.")
        # What all sites have in common is longer than what one tells, and goes along with every message.
        if len(self.table.columns) > MANY and (told := len(json.dumps(self.facts()))) > BESIDE // 2:
            raise UserError(
                f"'{path}' has {len(self.table.columns)} columns, and what a deployment has to tell of them takes {told} "
                f"bytes of at most {BESIDE // 2}; leave some out with --ignore when the deployment is made ('bpfed "
                "deploy init')."
            )

    def facts(self) -> dict[str, Any]:
        summary = client_summary(self.train, self.target, client=self.site, task=self.task, ignore=self.ignore)
        return {"summary": summary.record(), "target": self.target, "train": len(self.train)}

    def data(self, common: Mapping[str, Any]) -> FederatedData:
        if "preparation" not in common:
            raise Refused("the other sites' data are not tables.")
        said = tuple(column_names(self.config.data.missing))
        preparation = replace(Preparation.from_record(common["preparation"]), missing=said)
        # This site's own word counts for what it predicts and from what: others can add columns, but not these.
        own = {f.name for f in preparation.features} & {self.target, SPLIT, *self.ignore}
        if preparation.target != self.target or own:
            raise Refused("it would predict another column, or from columns that are left out here.")
        if preparation.standardise == "local":
            preparation = preparation.joined(self.site, self.train)
        return FederatedData(
            name=self.config.data.name,
            clients=(self.site,),
            train=examples(preparation, [(self.site, self.train)], self.seed),
            test=examples(preparation, [(self.site, self.test)], self.seed),
            task=preparation.task,
            classes=len(preparation.labels),
            labels=preparation.labels,
            preparation=preparation,
            notes=doubts({self.site: self.table}, preparation),
        )


def _check_told(table: Table, path: Path, target: str, ignore: tuple[str, ...]) -> None:
    """Refuse, before anything is sent, a file whose words look like dates or identifiers: `File.facts` has them."""
    found = telling(table.without([target, SPLIT, *ignore])) if table.images is None else {}
    if not found:
        return
    what = " and ".join(f"{kind} in {quoted(names, len(names))}" for kind, names in found.items())
    left = ",".join((*ignore, *(name for names in found.values() for name in names)))
    raise UserError(
        f"'{path}' seems to have {what}, and every word there would be sent to the server and all sites; "
        f"leave these columns out with --ignore '{left}' when the deployment is made ('bpfed deploy init'), "
        "or remove them from the file."
    )


def agreed(facts: Mapping[str, Mapping[str, Any]], config: Config) -> dict[str, Any]:
    """What the sites' data have in common, from what each told.

    Args:
        facts: By site, as `bpfed.flower.facts.read_facts` let them in.
        config: What is computed.

    Raises:
        UserError: They cannot be brought together.
    """
    longest = max(int(told["train"]) for told in facts.values())
    summaries = [Summary.from_record(told["summary"]) for told in facts.values() if "summary" in told]
    if summaries and len(summaries) == len(facts):
        asked = config.data
        made = combine(
            summaries,
            _target(facts),
            task=asked.task,
            standardise=asked.standardise,
            ignore=column_names(asked.ignore),
            missing=column_names(asked.missing),
        )
        inputs = made.shape or (len(made.input_names),)
        return {
            "shape": list(inputs),
            "task": made.task,
            "classes": len(made.labels),
            "longest": longest,
            "preparation": replace(made, local={}).record(),
        }
    if summaries:
        file, part = (next(site for site, told in facts.items() if ("summary" in told) is own) for own in (True, False))
        raise UserError(
            f"Site '{file}' has a file of its own and site '{part}' a part of a named dataset; give all the same kind."
        )
    first, told = next(iter(facts.items()))
    for site, other in facts.items():
        if any(told[key] != other[key] for key in ("shape", "task", "classes")):
            raise UserError(
                f"The data of site '{site}' have a different shape or task than those of '{first}'; fix one."
            )
    return {**{key: told[key] for key in ("shape", "task", "classes")}, "longest": longest}


def remarks(facts: Mapping[str, Mapping[str, Any]], common: Mapping[str, Any]) -> list[str]:
    """What whoever runs the deployment should know of the sites' data together, in sentences.

    Args:
        facts: What each site told.
        common: What they have in common, see `agreed`.
    """
    if "preparation" not in common:
        return []
    preparation = Preparation.from_record(common["preparation"])
    found = list(lookalikes(preparation))
    lacking: dict[str, list[str]] = {}
    for site, told in facts.items() if preparation.shape is None else ():
        # Of a site that came late, nobody knows yet whether it has a file.
        summary = told.get("summary")
        columns = summary.get("columns") if isinstance(summary, dict) else None
        # What is only spelt otherwise is told above.
        here = {spelling(name) for name in columns} if isinstance(columns, dict) else set()
        for name in (f.name for f in preparation.features if here and spelling(f.name) not in here):
            lacking.setdefault(name, []).append(site)
    if lacking:
        told_of = first_of([f"'{name}' at {quoted(sites)}" for name, sites in lacking.items()])
        found.append(
            f"Some sites lack columns that others have, which count as missing there: {told_of}; add them at these "
            "sites, or leave them out everywhere with --ignore when the deployment is made ('bpfed deploy init')."
        )
    return found


def _target(facts: Mapping[str, Mapping[str, Any]]) -> str:
    named = {str(told["target"]): site for site, told in facts.items()}
    if len(named) > 1:
        (one, here), (two, there) = list(named.items())[:2]
        raise UserError(f"Site '{here}' predicts '{one}' and '{there}' predicts '{two}'; set data.target for all.")
    return next(iter(named))


def part_of(config: Config, sites: int, data_dir: DataDir = None) -> FederatedData:
    """The named dataset of a configuration, dealt out to so many sites."""
    asked = config.data
    if asked.name not in names():
        raise UserError(f"'{asked.name}' is not a named dataset; give each site its own file with --data.")
    return replace(config, data=replace(asked, clients=sites)).load_data(data_dir)


def one_client(data: FederatedData, client: str) -> FederatedData:
    """The federation of one client alone."""
    who = torch.tensor([data.clients.index(client)])
    return replace(data, clients=(client,), train=data.train.select(who), test=data.test.select(who))
