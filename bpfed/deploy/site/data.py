"""A site's examples: its own file, or its part of a named dataset; and what sites tell each other about theirs.

Before the first round every site tells the server its `Source.data_statement`; the server makes of them what all have
in common (`agreed`) and sends that along, and only then can a site turn its rows into inputs as all others do
(`Source.data`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from bpfed._util.errors import UserError, first_of, quoted
from bpfed._util.files import PLAN, DataDir, to_json, when_full, write_whole
from bpfed._util.text import spelling
from bpfed.config.reader import Config
from bpfed.data.checks.column_types import coded, doubts, telling
from bpfed.data.checks.spelling import check_spelling
from bpfed.data.datasets import names
from bpfed.data.federated import FederatedData
from bpfed.data.holdout import Holdout
from bpfed.data.tabular.combine import combine, ordered
from bpfed.data.tabular.federate import TEST_FRACTION, check_column, examples, find_target, held_out, not_inputs
from bpfed.data.tabular.preprocessing import Preprocessor, gathered, meant, read_preprocessor
from bpfed.data.tabular.recode import NOTHING, Recoding
from bpfed.data.tabular.statistics import MOST_WHOLE, ColumnStatistics, client_summary, released
from bpfed.data.tabular.table import SPLIT, ArrayOptions, Categorical, Table, column_names, read_table
from bpfed.deploy.protocol.messages import BESIDE
from bpfed.deploy.protocol.state_schema import RejectedMessage
from bpfed.deploy.settings import Limits, Plan

#: Columns of a table up to which what is told of them fits into a message.
MANY = 1000


#: What a site last told of its columns, in the folder of its states.
TOLD = "told.json"
#: By what factor the pooled spread of a column may be more or less than a site's own.
FAR = 1e6


class Agreed(NamedTuple):
    """Preprocessing that all have agreed on, from a file, and the file's SHA-256."""

    preprocessor: Preprocessor
    digest: str


class Source(Protocol):
    """Where a site's examples are from."""

    @property
    def notes(self) -> Sequence[str]:
        """What the site's owner should know of them; none of it is sent."""
        ...

    def data_statement(self) -> dict[str, Any]:
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
        own, made = one_client(whole, client), whole.preprocessor
        if made is not None and client in made.local:
            made = replace(made, local={site: made.local[client]})
        self.own = replace(own, clients=(site,), preprocessor=made)
        self.notes: tuple[str, ...] = ()

    def data_statement(self) -> dict[str, Any]:
        own = self.own
        return {
            "shape": list(own.input_shape),
            "task": own.task,
            "classes": own.classes,
            "train": int(own.train.sizes[0]),
        }

    def data(self, common: Mapping[str, Any]) -> FederatedData:
        here = self.data_statement()
        if any(common.get(key) != here[key] for key in ("shape", "task", "classes")):
            raise RejectedMessage("the other sites' data have a different shape or task.")
        return self.own


class File:
    """A file of rows that never leaves the site; see `bpfed.data.tabular.table.read_table`.

    Args:
        site: The site's name.
        path: The file.
        config: Says what to predict and how much to hold out.
        limits: From how many rows on something is told of them, and how many classes there may be.
        agreed: What all sites have agreed on beforehand; then nothing is told of its columns. None: nothing.
        told: File that keeps what is told of its columns, see `told_before`; None: none does.

    Attributes:
        notes: What is not told, or not used, and why.

    Raises:
        UserError: It cannot be used, or has too few rows to tell anything of them.
    """

    def __init__(
        self,
        site: str,
        path: Path,
        config: Config,
        limits: Limits = Limits(),  # noqa: B008
        agreed: Agreed | None = None,
        told: Path | None = None,
    ) -> None:
        self.site, self.config, self.limits, self.agreed = site, config, limits, agreed
        asked, self.by = config.data, Holdout.of(config.data.holdout)
        self.recoding, known = Recoding.of(**asked.recoding), agreed.preprocessor.words if agreed else ()
        words = (*known, *(self.by.words if self.by else ()), *self.recoding.words)
        ignore, missing = not_inputs(asked.ignore, self.by), column_names(asked.missing)
        arrays = ArrayOptions.of(asked.input, asked.image_size)
        table = read_table(path, words, ignore=ignore, missing=missing, arrays=arrays)
        self.table = self.recoding.apply(table, site, missing, known)
        self.seed = config.data_seed
        self.task = asked.task
        self.ignore = tuple(ignore)
        self.notes: list[str] = []
        aim = agreed.preprocessor.target if agreed else asked.targets
        self.table = gathered(self.table, aim, agreed.preprocessor.task if agreed else asked.task)
        self.target = find_target({site: self.table}, aim)
        if self.by is not None:
            check_column(self.by, self.target)
            self.by.keys(self.table)  # says what does not suit it
            self.notes += self.by.notes({site: self.table})
        if agreed is None:
            _check_told(self.table.without(self.ignore), path, self.target, column_names(asked.ignore))
        else:
            self.task = agreed.preprocessor.task
        fraction = TEST_FRACTION if asked.test_fraction is None else asked.test_fraction
        test = held_out(
            self.table, self.target, site, task=self.task, test_fraction=fraction, seed=self.seed, by=self.by
        )
        self.train, self.test = (self.table.take(np.flatnonzero(rows)) for rows in (~test, test))
        if not len(self.train):
            raise UserError(f"'{path}' has no row left for training; give it more rows.")
        if agreed is not None:
            agreed.preprocessor.targets(self.table)  # says which row does not suit it
            some = self.table if self.table.images is None else self.table.take(np.arange(1))
            agreed.preprocessor.alone(site).inputs(some, site)
            self._statement: dict[str, Any] = {
                "preparation": agreed.digest,
                "target": self.target,
                "train": len(self.train),
            }
            return
        if len(self.train) < limits.minimum:
            raise UserError(
                f"'{path}' has {len(self.train)} training rows, fewer than the {limits.minimum} (minimum in this site's "
                "deploy.toml) that statistics of its columns must be of, so the site does not join; give it more rows, or "
                "agree with all sites on preprocessing made without its data ('bpfed data prepare', then 'bpfed deploy "
                "init --preprocessing FILE')."
            )
        whole = client_summary(self.train, self.target, client=site, task=self.task, ignore=self.ignore)
        summary, why = released(whole, self.train, self.target, limits.minimum)
        if why:
            listed = first_of([f"'{name}' ({reason})" for name, reason in why.items()])
            self.notes.append(
                f"Not told to others, or only in part, as it is of fewer than {limits.minimum} rows: {listed}. Rows with "
                "such words count as one group, and such whole numbers are numbers without an input of their own; rows with "
                "such classes are left out unless other sites have the class."
            )
        self._statement = {"summary": summary.record(), "target": self.target, "train": len(self.train)}
        if told is not None:
            self._statement = told_before(told, self._statement, limits.minimum, self.notes.append)
        # What all sites have in common is longer than what one tells, and goes along with every message.
        if len(self.table.columns) > MANY and (told_bytes := len(json.dumps(self._statement))) > BESIDE // 2:
            raise UserError(
                f"'{path}' has {len(self.table.columns)} columns, and what a deployment has to tell of them takes "
                f"{told_bytes} bytes of at most {BESIDE // 2}; leave some out with --ignore when the deployment is made "
                "('bpfed deploy init')."
            )

    def data_statement(self) -> dict[str, Any]:
        return dict(self._statement)

    def data(self, common: Mapping[str, Any]) -> FederatedData:
        if "preparation" not in common:
            raise RejectedMessage("the other sites' data are not tables.")
        said = tuple(column_names(self.config.data.missing))
        try:
            found = Preprocessor.from_record(common["preparation"])
        except (UserError, TypeError, ValueError):
            raise RejectedMessage("its preprocessing cannot be read.") from None
        if self.agreed is not None:
            here = replace(self.agreed.preprocessor, missing=())
            if replace(found, local={}, missing=(), recoding=NOTHING).record() != here.record():
                raise RejectedMessage(
                    "its preprocessing is not the one that this site has agreed to ('preprocessing' of its deploy.toml)."
                )
            train, test = self.train, self.test
        else:
            try:
                self._check(found)
            except (TypeError, ValueError, AttributeError):  # what should be a name, a number or a list is none
                raise RejectedMessage("its preprocessing cannot be read.") from None
            train, test = self._known(found)
        by = None if self.by is None else str(self.by)
        preprocessor = replace(found, local={}, own={}, missing=said, recoding=self.recoding, holdout=by)
        preprocessor = replace(preprocessor, resized=self.config.data.image_size is not None)
        if preprocessor.shape is None:
            mine = client_summary(train, self.target, client=self.site, task=preprocessor.task, ignore=self.ignore)
            preprocessor = preprocessor.judged_by([mine])
        if preprocessor.standardise == "local":
            preprocessor = preprocessor.joined(self.site, train)
        return FederatedData(
            name=self.config.data.name,
            clients=(self.site,),
            train=examples(preprocessor, [(self.site, train)], self.seed, self.by),
            test=examples(preprocessor, [(self.site, test)], self.seed),
            task=preprocessor.task,
            classes=len(preprocessor.labels),
            labels=preprocessor.labels,
            preprocessor=preprocessor,
            notes=(*doubts({self.site: self.table}, preprocessor), *coded(preprocessor)),
        )

    def _check(self, found: Preprocessor) -> None:
        """Refuse preprocessing that is not of what this site has told: its own columns and classes, as they are.

        Others can add columns, words and classes, but not take this site's away, nor make others of them. What the site
        hears of this names its columns; what the server hears does not.
        """
        # This site's own word counts for what it predicts and from what: others can add columns, but not these.
        own = {f.name for f in found.features} & {self.target, SPLIT, *self.ignore}
        if found.target != self.target or own:
            raise RejectedMessage("it would predict another column, or from columns that are left out here.")
        asked, told = self.config.data, ColumnStatistics.from_record(self._statement["summary"])
        numbers, words = not told.target.words, told.target.words
        classes = found.task_type.has_classes
        if (
            (asked.task or found.task) != found.task
            or (words and not classes)
            or found.standardise != asked.standardise
        ):
            raise self._other("its task or its way to standardise is another")
        if len(found.labels) > self.limits.classes:
            raise RejectedMessage(
                f"its preprocessing has {len(found.labels)} classes; 'classes' of this site's deploy.toml is "
                f"{self.limits.classes}."
            )
        if why := found.fault():
            raise self._other(why)
        if found.shape != told.shape:
            raise self._other("its images have another shape")
        if classes:
            categories = set(told.target.categories or ())
            absent = categories - set(found.labels) - (meant(categories, found.labels).keys() if numbers else set())
            if absent:
                raise self._other(f"it lacks the classes {quoted(sorted(absent))}")
            if found.labels != ordered(found.labels):
                raise self._other("its classes are not in order")
        elif found.task_type.standardised and told.target.scale and not _near(found.target_scale, told.target.scale):
            raise self._other(f"the spread of its target is {found.target_scale:g}, and here {told.target.scale:g}")
        features = {f.name: f for f in found.features}
        if list(features) != sorted(features) and told.shape is None:
            raise self._other("its columns are not in order")
        for name, column in told.columns.items():
            feature = features.get(name)
            if feature is None:
                if column.scale or len(column.categories or ()) > 1:
                    raise self._other(f"it lacks the column '{name}'")
            elif column.count and told.shape is None:
                if (feature.kind == "words") is not column.words:
                    raise self._other(f"'{name}' is of another kind")
                if (feature.kind == "words" or feature.coded) and set(column.categories or ()) - set(
                    feature.categories
                ):
                    raise self._other(f"it lacks words of '{name}'")
                if feature.coded and (column.categories is None or asked.codes == "number"):
                    raise self._other(f"'{name}' is no column of codes")
                if column.scale and not _near(feature.scale, column.scale):
                    raise self._other(f"the spread of '{name}' is {feature.scale:g}, and here {column.scale:g}")
        if any(
            f.categories != (ordered(f.categories) if f.coded else tuple(sorted(f.categories))) for f in found.features
        ):
            raise self._other("the words of a column are not in order")

    def _other(self, why: str) -> RejectedMessage:
        """Of preprocessing that cannot have come of what this site told."""
        self.notes.append(f"The server's preprocessing was refused, compared with what this site has told: {why}.")
        return RejectedMessage(
            "its preprocessing does not hold the columns and classes that this site has told, as they are; start a new run "
            "while all sites are online, or agree on the preprocessing ('bpfed deploy init --preprocessing')."
        )

    def _known(self, preprocessor: Preprocessor) -> tuple[Table, Table]:
        """The rows to train on and to test, without those of classes that no site has often enough to tell."""
        if not preprocessor.task_type.has_classes:
            return self.train, self.test
        parts = []
        for table in (self.train, self.test):
            found = table.words(self.target)
            numbers = set() if isinstance(table.column(self.target), Categorical) else set(found)
            known = {*preprocessor.labels, *meant(numbers, preprocessor.labels)}
            parts.append(table.take(np.array([word in known for word in found], dtype=bool)))
        train, test = parts
        if not len(train):
            raise UserError("No training row of this site is of a class that any site has often enough to tell of it.")
        if left := len(self.train) + len(self.test) - len(train) - len(test):
            note = f"{left} rows of this site are left out: no site has {self.limits.minimum} training rows of their class."
            if note not in self.notes:
                self.notes.append(note)
        return train, test


def _near(pooled: float, own: float) -> bool:
    return own / FAR <= pooled <= own * FAR


def _check_told(table: Table, path: Path, target: str, ignore: Sequence[str]) -> None:
    """Refuse, before anything is sent, a file whose words look like dates or identifiers: `File.data_statement` has them.

    ``ignore`` are columns that have been left out already, for the advice.
    """
    found = telling(table.without([target, SPLIT])) if table.images is None else {}
    if not found:
        return
    what = " and ".join(f"{kind} in {quoted(names, len(names))}" for kind, names in found.items())
    left = ",".join((*ignore, *(name for names in found.values() for name in names)))
    raise UserError(
        f"'{path}' seems to have {what}, and words there would be sent to the server and all sites; "
        f"leave these columns out with --ignore '{left}' when the deployment is made ('bpfed deploy init'), "
        "or remove them from the file."
    )


def told_before(path: Path, statement: Mapping[str, Any], minimum: int, say: Callable[[str], None]) -> dict[str, Any]:
    """What a site tells now, given what it told last: statistics that differ by few rows would tell of these rows.

    If fewer than ``minimum`` rows have come or gone since, each column that was told of is told of as before.

    Args:
        path: Where that is kept.
        statement: Of the site's rows as they are now.
        minimum: Rows that must have come or gone.
        say: Called with a message for the site's owner.
    """
    now, made = ColumnStatistics.from_record(statement["summary"]), dict(statement)
    if path.exists():
        try:
            kept = json.loads(path.read_text())
            before = ColumnStatistics.from_record(kept["summary"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(
                f"'{path}' has what this site told of its columns, and cannot be read; restore it, or delete it to tell "
                "anew."
            ) from None
        if abs(now.rows - before.rows) < minimum and now.shape == before.shape:
            columns = {name: before.columns.get(name, column) for name, column in now.columns.items()}
            aim = before.target if kept["target"] == statement["target"] else now.target
            same = replace(now, rows=before.rows, columns=columns, target=aim)
            if same != now:
                say(
                    f"The site's file has changed by fewer than {minimum} rows since it was told of, so the same is told "
                    f"again: the difference would tell of these rows. To tell anew, delete '{path}'."
                )
            made = {**statement, "summary": same.record(), "train": kept["train"]}
    text = to_json(made)
    if not path.exists() or path.read_text() != text:
        with when_full(path, "and the site rejoins by itself"):
            write_whole(path, text)
    return made


def agreed(
    statements: Mapping[str, Mapping[str, Any]], config: Config, preprocessor: Preprocessor | None = None
) -> dict[str, Any]:
    """What the sites' data have in common, from what each told.

    Args:
        statements: By site, as `bpfed.deploy.server.roster.read_statement` let them in.
        config: What is computed.
        preprocessor: What all have agreed on beforehand, if they have.

    Raises:
        UserError: They cannot be brought together.
    """
    longest = max(int(told["train"]) for told in statements.values())
    if preprocessor is not None:
        _target({**statements, "the preprocessing": {"target": preprocessor.target}})
        return _of_tables(preprocessor, longest)
    summaries = [ColumnStatistics.from_record(told["summary"]) for told in statements.values() if "summary" in told]
    if summaries and len(summaries) == len(statements):
        asked = config.data
        _check_enough(summaries, asked.task)
        made = combine(
            summaries,
            _target(statements),
            task=asked.task,
            standardise=asked.standardise,
            ignore=column_names(asked.ignore),
            missing=column_names(asked.missing),
            codes=asked.codes,
            holdout=asked.holdout,
        )
        return _of_tables(made, longest)
    if summaries:
        file, part = (
            next(site for site, told in statements.items() if ("summary" in told) is own) for own in (True, False)
        )
        raise UserError(
            f"Site '{file}' has a file of its own and site '{part}' a part of a named dataset; give all the same kind."
        )
    first, told = next(iter(statements.items()))
    for site, other in statements.items():
        if any(told[key] != other[key] for key in ("shape", "task", "classes")):
            raise UserError(
                f"The data of site '{site}' have a different shape or task than those of '{first}'; fix one."
            )
    return {**{key: told[key] for key in ("shape", "task", "classes")}, "longest": longest}


def _of_tables(made: Preprocessor, longest: int) -> dict[str, Any]:
    """What sites with tables have in common."""
    inputs = made.shape or (len(made.input_names),)
    return {
        "shape": list(inputs),
        "task": made.task,
        "classes": len(made.labels),
        "longest": longest,
        "preparation": replace(made, local={}).record(),
    }


def _check_enough(summaries: Sequence[ColumnStatistics], task: str | None) -> None:
    """Refuse tables of which too little is told: what is of few rows is withheld, see `released`."""
    fixes = "give sites more rows, or agree on the preprocessing ('bpfed deploy init --preprocessing FILE')"
    columns, told = [c for s in summaries for c in s.columns.values()], {s.client: s.target for s in summaries}
    if columns and not any(column.count for column in columns):
        raise UserError(f"No site tells of any column, as too few rows have values that differ; {fixes}.")
    if not any(aim.count for aim in told.values()):
        raise UserError(f"No site tells of its targets, as too few rows differ; {fixes}.")
    classes = {site: aim.categories for site, aim in told.items() if aim.count and aim.categories is not None}
    numbers = [site for site, aim in told.items() if aim.count and aim.categories is None]
    if classes and not numbers and not any(classes.values()):
        raise UserError(f"No site has enough training rows of a class to tell of it; {fixes}.")
    words = any(aim.words for aim in told.values())
    many = len({category for categories in classes.values() for category in categories or ()}) > MOST_WHOLE
    if task is None and not words and classes and (numbers or many):
        raise UserError(
            f"The targets of site '{next(iter(classes))}' may be classes, so it tells no mean of them, but those of all "
            "sites together look like numbers; say which with --task when the deployment is made ('bpfed deploy init')."
        )


def check_sites(statements: Mapping[str, Mapping[str, Any]], common: Mapping[str, Any]) -> list[str]:
    """What whoever runs the deployment should know of the sites' data together, in sentences.

    Args:
        statements: What each site told.
        common: What they have in common, see `agreed`.
    """
    if "preparation" not in common:
        return []
    preprocessor = Preprocessor.from_record(common["preparation"])
    found = [*check_spelling(preprocessor), *coded(preprocessor)]
    lacking: dict[str, list[str]] = {}
    for site, told in statements.items() if preprocessor.shape is None else ():
        # Of a site that came late, nobody knows yet whether it has a file.
        summary = told.get("summary")
        columns = summary.get("columns") if isinstance(summary, dict) else None
        # What is only spelt otherwise is told above.
        here = {spelling(name) for name in columns} if isinstance(columns, dict) else set()
        for name in (f.name for f in preprocessor.features if here and spelling(f.name) not in here):
            lacking.setdefault(name, []).append(site)
    if lacking:
        told_of = first_of([f"'{name}' at {quoted(sites)}" for name, sites in lacking.items()])
        found.append(
            f"Some sites lack columns that others have, which count as missing there: {told_of}; add them at these "
            "sites, or leave them out everywhere with --ignore when the deployment is made ('bpfed deploy init')."
        )
    return found


def _target(statements: Mapping[str, Mapping[str, Any]]) -> str:
    named = {str(told["target"]): site for site, told in statements.items()}
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


def agreed_preprocessor(folder: Path, plan: Plan, config: Config) -> Agreed | None:
    """The preprocessing that a part of a deployment has agreed to; None: none is named.

    Raises:
        UserError: It cannot be read, is not the one that was agreed to, or does not go with the configuration.
    """
    if not plan.preprocessing:
        return None
    path = folder / plan.preprocessing
    made, digest = read_preprocessor(path)
    if digest != plan.preprocessing_sha256:
        raise UserError(
            f"'{path}' is not the preprocessing that was agreed to: its SHA-256 is {digest}, and preprocessing_sha256 of "
            f"'{folder / PLAN}' is '{plan.preprocessing_sha256}'; restore the file."
        )
    return Agreed(_checked(made, config, path), digest)


def _checked(made: Preprocessor, config: Config, path: Path) -> Preprocessor:
    """The preprocessing, if it does what the configuration says."""
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
