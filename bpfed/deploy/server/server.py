"""The server of a deployed federation: it meets its sites, runs pilots if asked to, and makes the run."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bpfed._util import text
from bpfed._util.errors import Diverged, UserError
from bpfed._util.files import CONFIG, PILOTS, RUN, to_json, when_full, write_whole, writing
from bpfed.config.reader import Config, read
from bpfed.config.registry import NETWORKS
from bpfed.data.federated import FederatedData
from bpfed.data.holdout import Holdout
from bpfed.data.tabular.federate import not_inputs
from bpfed.deploy.ops.certificates import KEYS, public_keys
from bpfed.deploy.protocol.messages import fingerprint
from bpfed.deploy.protocol.state_schema import schemas
from bpfed.deploy.server.journal import FOUND, GIVEN, SELECTION, Found, FoundScores, Journal, SelectionPilot
from bpfed.deploy.server.roster import Roster, SiteStatus, Transport
from bpfed.deploy.server.rounds import Rule, Training, method_rule, server_side
from bpfed.deploy.server.status import Status
from bpfed.deploy.settings import Plan
from bpfed.deploy.site.data import Agreed, agreed, agreed_preprocessor, check_sites
from bpfed.engine.federation import Federation, check_layout, check_run, check_updates, suited
from bpfed.inference.tasks import get_task, inferred
from bpfed.nn.networks import make_model
from bpfed.report import RunRecord
from bpfed.report.record import temperature_name
from bpfed.runs.pilot import (
    FOLDS,
    Scores,
    Unscored,
    candidate_count,
    check_selection,
    common,
    offers_choice,
    select,
    selection_folds,
    selection_settings,
)

# --- What can be said against a deployment before a site has joined: said when it is made, and not at the sites -------

#: Shape of an input and number of classes while those of the sites are not known; nothing checked depends on them.
SHAPE, CLASSES = (1,), 2


def check_deployment(config: Config, sites: int, data: FederatedData | None = None) -> None:
    """Raise a `UserError` if so many sites cannot compute this.

    Args:
        config: What is to be computed.
        sites: How many sites there are.
        data: What they have together, if that is at hand; None: what is asked for is all that is known.
    """
    method, settings = config.method, suited(config.method, config.run, sites)
    task = config.data.task if data is None else data.task
    check_run(method, settings, sites, task)
    check_selection(method, settings)
    if settings.sets not in ("auto", "client"):
        raise UserError(
            f"sets is '{settings.sets}', but in a deployment each site calibrates its sets alone, and nobody is told its "
            "scores; leave sets out, or use 'client'."
        )
    by = Holdout.of(config.data.holdout)
    if by is not None and by.kind == "group" and settings.calibration > 0.0:
        raise UserError(
            "In a deployment nobody is told how large the groups of a site are, so calibration examples cannot be held out "
            "by group; leave calibration at 0, or use --holdout time:COLUMN or last."
        )
    if data is None and (not isinstance(method.personal, str) or settings.network not in NETWORKS.own):
        return  # which parameters there are to name depends on the network, and that on the data
    shape = SHAPE if data is None else data.input_shape
    used = get_task(task) if task is not None else inferred(classes=True)
    classes = data.classes if data is not None else CLASSES if used.labelled else 0
    model = make_model(torch.zeros(2, *shape), used, classes, method, settings)
    check_layout(method, model)
    if settings.clip > 0.0:
        check_updates(method, model)
    schemas(method, model)


class Server:
    """The server of one deployed run; goes on from the last finished round where there is one.

    Attributes:
        sites: What is known of each site, by name.
        journal: Of the run itself.
        training: The pilot or run that is under way; None: none is yet.
        candidate: The settings of the method that were chosen in selection pilots; empty: there were none.

    Args:
        folder: Where the run is kept: the files of any run folder, and ``status.json``.
        plan: Who belongs to it, how long to wait.
        config: What is computed.
        keys: The public key of each site, by name; None: sites are believed.
        rule: How uploads become the new state.
        say: Called with each message for the user.
        sleep: Waits so many seconds.
        agreed: The preprocessing that all have agreed on beforehand; None: it is made of what sites tell.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        config: Config,
        keys: Mapping[str, bytes] | None = None,
        rule: Rule = method_rule,
        say: Callable[[str], None] = lambda sentence: None,
        sleep: Callable[[float], None] = time.sleep,
        agreed: Agreed | None = None,
    ) -> None:
        check_deployment(config, len(plan.sites))
        self.plan, self.config, self.rule, self.say, self.sleep = plan, config, rule, say, sleep
        self.fingerprint = fingerprint(config)
        self.sites = {site: SiteStatus() for site in plan.sites}
        ignore = not_inputs(config.data.ignore, Holdout.of(config.data.holdout))
        self.agreed, digest = agreed, agreed.digest if agreed else ""
        self.roster = Roster(self.sites, keys, self.fingerprint, plan.timeout, say, ignore, digest)
        self.journal = self._journal(folder, 0)
        self.pilots = [self._journal(folder, number) for number in range(1, config.run.calibration_pilots + 1)]
        self.status = Status(folder, config.run, self.sites)
        self.training: Training | None = None
        self.candidate: tuple[int, ...] = ()

    @property
    def federation(self) -> Federation:
        """The server's side of the training that is under way."""
        assert self.training is not None
        return self.training.federation

    @property
    def history(self) -> list[dict[str, Any]]:
        """A line of metrics for each round that was tested."""
        return self.journal.history

    def serve(self, transport: Transport) -> RunRecord:
        """Run the rounds that are left, and write the report."""
        began = time.perf_counter()
        try:
            with when_full(self.journal.home, "and start the run again; it resumes from its last finished round"):
                return self._serve(transport)
        except BaseException as error:
            with contextlib.suppress(UserError):  # on a full disk; what stopped the run is to be known, not this
                self._note("stopped", error)
            raise
        finally:
            self.say(f"The server ran for {time.perf_counter() - began:.1f} s.")

    def _serve(self, transport: Transport) -> RunRecord:
        training = self._begin(transport)
        if training is None:
            common = self._given() or self._agreed()
            if offers_choice(self.config.method, self.config.run):
                self._select(transport, common)
            training = self._take_up(common)
        while training.journal.pilot:
            self._rounds(transport, training)
            self._conclude(training, *training.held_out(transport))
            training = self._take_up(training.journal.common)
        self._rounds(transport, training)
        training.last_scores(transport)
        record = self.journal.finish(training.federation)
        self._note("finished")
        return record

    def _begin(self, transport: Transport) -> Training | None:
        """Meet the sites, and take up the run where it is; None: neither it nor a calibration pilot has begun."""
        newest = (self.journal, *reversed(self.pilots))
        kept = next((found for journal in newest if (found := journal.kept()) is not None), None)
        if kept is not None:
            for site in self.sites.keys() & kept["sites"].keys():
                self.sites[site] = SiteStatus(**kept["sites"][site])
            self.candidate = tuple(kept.get("candidate", ()))
            self._take_up(kept["facts"])
        self._note("waiting for sites")
        self._wait(transport, len(self.sites) if kept is None else 1)
        return self.training

    # --- selection pilots ---------------------------------------------------------------------------------------------

    def _select(self, transport: Transport, common: dict[str, Any]) -> None:
        """Choose the settings that the method offers, as `bpfed.runs.pilot.choose` does in a simulation.

        Selection pilots that are over are not repeated after a restart.
        """
        method, settings = self.config.method, self.config.run
        folds, rounds = self._folds(common), selection_settings(settings).rounds
        count = candidate_count(method)
        self.say(
            f"Choosing between {count} settings on held-out training examples first, in {count * folds} selection pilots of "
            f"{text.many(rounds, 'round')}: {count * folds * rounds} rounds before the {settings.rounds} of the run. A deployment that is "
            "made with --adapt off has none."
        )
        numbers = itertools.count(1)

        def scored(candidates: Sequence[tuple[int, ...]]) -> list[Scores]:
            pilots = [
                [SelectionPilot(candidate, fold, next(numbers), count * folds) for fold in range(1, folds + 1)]
                for candidate in candidates
            ]
            return [self._scores([self._piloted(transport, common, pilot) for pilot in each]) for each in pilots]

        try:
            choice = select(method, scored)
        except Unscored:
            for path in (self.journal.home / PILOTS / SELECTION).glob(f"*/{FOUND}"):
                path.unlink()  # so that they are tested again, when other sites are there
            raise
        self.candidate = choice.chosen
        self.say(choice.words)
        told = [stage[at].examples > 0 for stage, at in zip(choice.stages, choice.chosen, strict=True)]
        if silent := [
            site for site, all_told in zip(self.plan.sites, np.all(told, axis=0), strict=True) if not all_told
        ]:
            self.say(f"Sites without a score of every candidate had no part in this choice: {', '.join(silent)}.")

    def _piloted(self, transport: Transport, common: dict[str, Any], pilot: SelectionPilot) -> FoundScores:
        """What a selection pilot finds, or has found before."""
        journal = Journal(self.journal.home, self.config, self.fingerprint, self.sites, self.say, selection=pilot)
        journal.common = common
        if (before := journal.found_scores()) is not None:
            return before
        federation = server_side(self.config, self.plan.sites, common, candidate=pilot.candidate, fold=pilot.fold)
        self.training = Training(self.plan, federation, journal, self._meet, self.rule, self.say, self.sleep)
        if journal.kept() is not None:
            journal.restore(federation)
        else:
            journal.begin(federation)
        try:
            self._rounds(transport, self.training)
            found = self.training.held_out_scores(transport)
        except Diverged as error:
            self.say(f"These settings are not chosen. {error}")
            found = FoundScores({}, diverged=True)
        journal.conclude_scores(found)
        return found

    def _scores(self, folds: Sequence[FoundScores]) -> Scores:
        """The scores of a candidate, summed over folds, in the order of the sites; 0 where a site has told none."""
        if any(found.diverged for found in folds):
            return Scores(np.full(len(self.plan.sites), math.inf), np.ones(len(self.plan.sites)))
        sums, examples = np.zeros((2, len(self.plan.sites)))
        for found in folds:
            for at, site in enumerate(self.plan.sites):
                nll, number = found.scores.get(site, (0.0, 0))
                sums[at] += math.inf if nll is None else nll  # a file has null for what is not finite
                examples[at] += number
        return Scores(sums, examples)

    def _folds(self, common: dict[str, Any]) -> int:
        """How many folds there are: as before, where selection pilots were broken off."""
        path = self.journal.home / PILOTS / GIVEN
        if path.exists():
            return int(json.loads(path.read_text())["folds"])
        by = Holdout.of(self.config.data.holdout)
        examples = sum(int(told.get("train", 0)) for told in self._statements().values())
        folds = selection_folds(examples, by is not None and by.ordered)
        write_whole(path, to_json({"fingerprint": self.fingerprint, "folds": folds, "facts": common}))
        return folds

    def _given(self) -> dict[str, Any] | None:
        """What all sites' data have in common by selection pilots that were broken off; None: none were."""
        path = self.journal.home / PILOTS / GIVEN
        if not path.exists():
            return None
        try:
            given = json.loads(path.read_text())
            same, common = given["fingerprint"] == self.fingerprint, dict(given["facts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"'{path}' is damaged ({error}); delete '{path.parent}' to choose again.") from error
        if not same:
            raise UserError(
                f"The run in '{self.journal.home}' has a different configuration; move that folder away to start a new run."
            )
        return common

    # --- calibration pilots and the run -------------------------------------------------------------------------------

    def _take_up(self, common: dict[str, Any]) -> Training:
        """What is next: the run where it has begun, else the first calibration pilot that is not over, else the run."""
        over = [] if self.journal.kept() is not None else [pilot.found() for pilot in self.pilots]
        journal = self.pilots[over.index(None)] if None in over else self.journal
        journal.common, journal.candidate = common, self.candidate
        if self.candidate:
            self.status.chosen_in = (
                candidate_count(self.config.method) * FOLDS * selection_settings(self.config.run).rounds
            )
        self._remark(common)
        federation = server_side(self.config, self.plan.sites, common, journal.pilot, journal.candidate)
        training = Training(self.plan, federation, journal, self._meet, self.rule, self.say, self.sleep)
        if journal.kept() is not None:
            journal.restore(federation)
        else:
            if journal is self.journal:
                self._learn([found for found in over if found is not None])
            journal.begin(federation)
        if journal is self.journal:
            self._forget_pilots()
            journal.write_metrics()
        self.training = training
        return training

    def _rounds(self, transport: Transport, training: Training) -> None:
        """The rounds that are left of a training."""
        while not training.federation.finished:
            training.round(transport)
            self._note("running")

    def _conclude(self, pilot: Training, calibration_temperature: float, examples: int) -> None:
        """Keep what a calibration pilot has found."""
        pilot.journal.conclude(calibration_temperature, examples)
        name = temperature_name(pilot.federation.data.task)
        stage = f"Calibration pilot {pilot.journal.pilot} of {len(self.pilots)}"
        self.say(f"{stage} is over: from {examples} held-out examples, the {name} is {calibration_temperature:.2f}.")

    def _learn(self, found: Sequence[Found]) -> None:
        """Before the run begins: what all calibration pilots say."""
        if not found:
            return
        self.journal.calibration_temperature = common(each.calibration_temperature for each in found)
        self.journal.held = sum(each.examples for each in found)
        self.journal.seconds = sum(each.seconds for each in found)
        self.say(self.journal.learnt)

    def _forget_pilots(self) -> None:
        """Once the run has begun and knows what they found."""
        folder = self.journal.home / PILOTS
        if folder.exists():
            with writing(folder):
                shutil.rmtree(folder)

    def _agreed(self) -> dict[str, Any]:
        """What the data of the sites that are there have in common."""
        preprocessor = self.agreed.preprocessor if self.agreed else None
        return {**agreed(self._statements(), self.config, preprocessor), "sites": len(self.plan.sites)}

    def _statements(self) -> dict[str, dict[str, Any]]:
        """What the sites have told of their data, by site."""
        return {site: seen.statement for site, seen in self.sites.items() if seen.statement is not None}

    def _remark(self, common: Mapping[str, Any]) -> None:
        """Say what is to be known of the sites' data together, each sentence once; the status has all of them."""
        notes = check_sites(self._statements(), common)
        for note in notes:
            if note not in self.status.notes:
                self.say(note)
        self.status.notes = notes

    def _journal(self, folder: Path, pilot: int) -> Journal:
        return Journal(folder, self.config, self.fingerprint, self.sites, self.say, pilot)

    def _wait(self, transport: Transport, wanted: int) -> None:
        """Until so many sites are there, or the time for it is over and there are enough."""
        enough = self.plan.min_replies or -(-self.config.run.per_round(len(self.sites)) // 2)
        waited = 0.0
        while True:
            self._meet(transport)
            here = [site for site, seen in self.sites.items() if seen.ready]
            if len(here) >= wanted or (waited >= self.plan.wait and len(here) >= min(enough, wanted)):
                self.say(f"{len(here)} of {len(self.sites)} sites are online: {', '.join(here)}.")
                return
            if waited >= self.plan.wait:
                raise UserError(
                    f"Only {len(here)} of {len(self.sites)} sites joined within {self.plan.wait:g} s; start the others "
                    "with 'bpfed deploy client' and run again."
                )
            self.sleep(1.0)
            waited += 1.0

    def _meet(self, transport: Transport) -> None:
        unknown_nodes = self.roster.look(transport)
        self._note(None)
        if unknown_nodes:
            self.roster.greet(transport, self.journal.run, unknown_nodes)
            if self.training is not None:
                self._remark(self.training.journal.common)
            self._note(None)

    def _note(self, state: str | None, error: BaseException | None = None) -> None:
        """Write the status; before anything is known of the sites, that of the first training."""
        if self.training is not None:
            journal, round_ = self.training.journal, self.training.federation.round
        else:
            journal, round_ = (*self.pilots, self.journal)[0], 0
        self.status.write(journal, round_, state, error)


def open_server(folder: Path, say: Callable[[str], None]) -> Server:
    """The server of a deployment's ``server`` folder."""
    plan = Plan.read(folder)
    config = read(folder / CONFIG)
    keys = public_keys(folder, plan.sites) if (folder / KEYS).is_dir() else None
    return Server(folder / RUN, plan, config, keys, say=say, agreed=agreed_preprocessor(folder, plan, config))
