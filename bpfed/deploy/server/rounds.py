"""One training of a deployed federation, on the server's side: its rounds.

One exchange makes a round. In exchange r the sites get the shared state after round r - 1; every site tests it, and
those drawn for round r train from it. So the scores of a round arrive with the next one, and a last exchange is for
them alone. In a pilot there is nothing but that last exchange to test, with what the sites hold out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor
from torch.utils._pytree import tree_map

from bpfed._util import text
from bpfed._util.errors import Diverged, UserError, first_of
from bpfed.aggregation.privacy import secret_normal
from bpfed.aggregation.updates import finite
from bpfed.config.reader import Config
from bpfed.data.federated import FederatedData
from bpfed.deploy.protocol.messages import Reply, Request, size
from bpfed.deploy.protocol.state_schema import RejectedMessage, StateSchema, StateSchemas, listed, schemas
from bpfed.deploy.server.journal import FoundScores, Journal, sentence
from bpfed.deploy.server.roster import Transport
from bpfed.deploy.settings import Plan
from bpfed.engine.evaluate import evaluated_clients
from bpfed.engine.federation import Federation, check_run, suited
from bpfed.engine.server import remembered
from bpfed.engine.state_store import MemoryStore
from bpfed.inference import rng
from bpfed.inference.calibration import fitted
from bpfed.inference.tasks import Task
from bpfed.methods.base import State
from bpfed.metrics import Form, Sums
from bpfed.nn.networks import make_model
from bpfed.runs.metadata import DEPLOYED, SITES, without_examples
from bpfed.runs.pilot import as_pilot, selection_settings, with_candidates

# --- One exchange of messages -----------------------------------------------------------------------------------------
#
# Asks to sites, their answers let in or refused, and a line on what it cost.


class SiteTask(NamedTuple):
    """What a site is asked to do: to train; to test the state that is sent, on test examples or on those held out.

    Of those held out a site tells slopes (``held``) in a calibration pilot, and a score in a selection pilot.
    """

    train: bool
    test: bool
    held: bool = False
    score: bool = False


class Exchanged(NamedTuple):
    """What came of it.

    Attributes:
        answers: Those that are let in, by site.
        seconds: From sending to the last answer.
        line: Times and sizes, as plain data.
    """

    answers: dict[str, Reply]
    seconds: float
    line: dict[str, Any]


@dataclass(frozen=True)
class Exchange:
    """How the server asks its sites in a training.

    Attributes:
        journal: Of the training. What is refused and lost is counted with its sites.
        patterns: What travels.
        task: Of the sites' data.
        form: What sums look like.
        timeout: Seconds that a site has to answer.
        say: Called with each message for the user.
    """

    journal: Journal
    schemas: StateSchemas
    task: Task
    form: Form
    timeout: float
    say: Callable[[str], None]

    def __call__(self, transport: Transport, number: int, shared: State, todo: Mapping[str, SiteTask]) -> Exchanged:
        """Ask these sites, in round ``number``, with the server's state."""
        journal, down = self.journal, self.schemas.down(number)
        common = json.dumps(journal.common, sort_keys=True)
        requests = {
            site: Request(
                journal.fingerprint,
                journal.run,
                number,
                train=what.train,
                evaluate=what.test or what.held or what.score,
                counted=journal.counted.get(site, 0),
                common=common,
                pilot=journal.pilot,
                calibration_temperature=1.0
                if journal.calibration_temperature is None
                else journal.calibration_temperature,
                candidate=journal.candidate,
                fold=0 if journal.selection is None else journal.selection.fold,
                shared=shared,
            ).write(down)
            for site, what in todo.items()
        }
        sent, start = time.time(), time.perf_counter()
        replies = self._send(transport, requests, number)
        seconds = time.perf_counter() - start
        answers: dict[str, Reply] = {}
        for site, reply in replies.items():
            answer = self._let_in(site, reply, number, todo[site])
            if answer is not None:
                answers[site] = answer
        slowest = max(answers.values(), key=lambda answer: answer.seconds, default=None)
        line = {
            "round": number,
            "sent": round(sent, 3),
            "at": round(time.time(), 3),
            "asked": len(requests),
            "answered": len(answers),
            "seconds": round(seconds, 3),
            "site_seconds": slowest.seconds if slowest else 0.0,
            "site_work": slowest.work if slowest else 0.0,
            "work": {site: answer.work for site, answer in answers.items()},
            "down": max((size(request) for request in requests.values()), default=0),
            "up": max((size(r) for r in replies.values() if isinstance(r, RecordDict)), default=0),
            "tensors_down": down.bytes,
            "tensors_up": self.schemas.upload.bytes,
        }
        return Exchanged(answers, seconds, line)

    def _send(
        self, transport: Transport, requests: Mapping[str, RecordDict], number: int
    ) -> dict[str, RecordDict | str]:
        nodes = {node: site for site in requests if (node := self.journal.sites[site].node) is not None}
        found = transport.exchange({node: requests[site] for node, site in nodes.items()}, number, self.timeout)
        replies = {site: found[node] for node, site in nodes.items() if node in found}
        for site in requests:
            if site not in replies:
                self.journal.sites[site].lost += 1
                place = self.journal.place(number)
                self.journal.sites[site].why = f"in {place} it did not answer within {self.timeout:g} s."
                self.say(f"{sentence(place)}: site '{site}' did not answer within {self.timeout:g} s.")
        return replies

    def _let_in(self, site: str, reply: RecordDict | str, number: int, asked: SiteTask) -> Reply | None:
        """The answer of a site, if all about it is as it should be; else it is counted and named in the log."""
        try:
            if isinstance(reply, str):
                raise RejectedMessage(reply)
            schema: StateSchema | None = self.schemas.upload if asked.train else None
            most = int((self.journal.sites[site].statement or {}).get("train", 0))
            answer = Reply.read(
                reply,
                schema,
                self.form if asked.test else None,
                most if asked.held else -1,
                self.task,
                most if asked.score else -1,
            )
            if answer.site != site:
                raise RejectedMessage(f"it calls itself '{answer.site[:40]}'.")
            if answer.refused:
                raise RejectedMessage(answer.refused[:300])
            if (answer.run, answer.round) != (self.journal.run, number):
                raise RejectedMessage(
                    f"it belongs to round {answer.round} of run {answer.run[:16]}, but this is round {number}."
                )
            if answer.fingerprint != self.journal.fingerprint:
                raise RejectedMessage("it has a different configuration; give all sites the same config.toml.")
            # A site with few examples reports nothing of its training.
            if asked.train and answer.info and answer.info.keys() != self.schemas.info:
                names = listed(sorted(answer.info)), listed(sorted(self.schemas.info))
                raise RejectedMessage("its training reports {} where {} are expected.".format(*names))
            if asked.train and answer.train < 1:
                raise RejectedMessage("it reports no training example.")
            told = (self.journal.sites[site].statement or {}).get("train")
            if isinstance(told, int) and answer.train > told:  # what it says before the run is what all can agree on
                raise RejectedMessage(
                    f"it reports {answer.train} training examples, but said before that it has {told}."
                )
            return answer
        except RejectedMessage as refused:
            self.refuse(site, number, str(refused))
            return None

    def refuse(self, site: str, number: int, why: str) -> None:
        """Count a message that is not used, and name its site."""
        self.journal.sites[site].refused += 1
        place = self.journal.place(number)
        self.journal.sites[site].why = f"its message in {place} was not used: {why}"
        self.say(f"{sentence(place)}: the message from site '{site}' was not used: {why}")


#: The server's rule: (the federation, uploads ``[S, ...]``, weights ``[S]``) to its new state.
Rule = Callable[[Federation, State, Tensor], State]


def method_rule(federation: Federation, uploads: State, weights: Tensor) -> State:
    """The method's own rule, with the configuration's options; noise for privacy is from the system's randomness."""
    return federation.combined(uploads, weights, secret_normal)


class Training:
    """One training, the run itself or a pilot: the rounds that are left of it, and the test of its last one.

    Args:
        plan: Who belongs to it, how long to wait.
        federation: The server's side of it, see `server_side`.
        journal: What is kept of it.
        meet: Sees which sites are there.
        rule: How uploads become the new state.
        say: Called with each message for the user.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        plan: Plan,
        federation: Federation,
        journal: Journal,
        meet: Callable[[Transport], None],
        rule: Rule,
        say: Callable[[str], None],
        sleep: Callable[[float], None],
    ) -> None:
        self.plan, self.federation, self.journal, self.meet = plan, federation, journal, meet
        self.rule, self.say, self.sleep = rule, say, sleep
        settings = federation.settings
        self.exchange = Exchange(
            journal,
            schemas(federation.method, federation.model, settings.compression == "half"),
            federation.data.task_type,
            federation.data.task_type.sums_form(federation.data.classes, settings.bins, settings.calibration > 0.0),
            plan.timeout,
            say,
        )

    def round(self, transport: Transport) -> None:
        """One round: asked again, of those that are missing, until enough sites have answered."""
        number = self.federation.round + 1
        here = sentence(self.journal.place(number))
        drawn = [self.plan.sites[i] for i in self.federation.participants(number).tolist()]
        least = min(len(drawn), self.plan.min_replies or -(-len(drawn) // 2))
        tested = self._tested() if number > 1 and self._scored(number - 1) else []
        uploads: dict[str, Reply] = {}
        scores: dict[str, Sums] = {}
        for attempt in range(self.plan.attempts):
            if attempt:
                self.say(f"{here}: {len(uploads)} of {len(drawn)} uploads, {least} needed; asking again.")
                self.sleep(self.plan.pause)
            self.meet(transport)
            todo = {
                site: SiteTask(site in drawn and site not in uploads, site in tested and site not in scores)
                for site, seen in self.journal.sites.items()
                if seen.ready
            }
            answers = self._asked(transport, number, {site: what for site, what in todo.items() if any(what)})
            uploads |= {site: answer for site, answer in answers.items() if answer.upload is not None}
            uploads = self._bounded(number, uploads)
            scores |= {site: answer.sums for site, answer in answers.items() if answer.sums is not None}
            if len(uploads) >= least:
                break
        else:
            raise UserError(
                f"{here} got {len(uploads)} of {len(drawn)} uploads, {least} needed, in {self.plan.attempts} attempts. "
                f"{self._missing(site for site in drawn if site not in uploads)} Mend that and start the run again; it "
                "resumes from here."
            )
        if tested:
            self._record(scores)
        self._aggregate(number, [site for site in drawn if site in uploads], uploads)

    def last_scores(self, transport: Transport) -> None:
        """After the last round of a run: its scores."""
        scores = {site: answer.sums for site, answer in self._last(transport).items() if answer.sums is not None}
        if not any(sums.examples for sums in scores.values()):
            raise UserError(
                "All rounds are done, but no site tells its scores: each has no test example, or fewer than the minimum in "
                "its deploy.toml; for scores, give sites more rows, or make the deployment with a larger test_fraction."
            )
        self._record(scores)

    def held_out(self, transport: Transport) -> tuple[float, int]:
        """After the last round of a calibration pilot: the calibration temperature that suits what sites hold out, and
        how many examples."""
        told = [answer.held for answer in self._last(transport).values() if answer.held is not None]
        examples = sum(each.examples for each in told)
        if not examples:
            raise UserError(
                "No site that tested the calibration pilot holds out as many training examples as the minimum in its deploy.toml, "
                "so nothing was learnt; start the run again when others are online, or make the deployment without "
                "calibration pilots."
            )
        return fitted(torch.stack([each.slopes for each in told]).sum(0)), examples

    def held_out_scores(self, transport: Transport) -> FoundScores:
        """After the last round of a selection pilot: how the candidate did on what each site holds out."""
        told = {site: answer.score for site, answer in self._last(transport).items() if answer.score is not None}
        if not any(score.examples for score in told.values()):
            raise UserError(
                "No site that tested the selection pilot holds out as many training examples as the minimum in its "
                "deploy.toml, so nothing can be chosen; start the run again when others are online, or make the deployment "
                "with --adapt off."
            )
        return FoundScores({site: (score.nll, score.examples) for site, score in told.items()})

    def _last(self, transport: Transport) -> dict[str, Reply]:
        """What the sites say of the last round, each tested on its own examples."""
        found: dict[str, Reply] = {}
        wanted, selection, stage = self._tested(), self.journal.selection is not None, self.journal.stage
        todo = SiteTask(train=False, test=not stage, held=self.journal.pilot > 0, score=selection)
        for attempt in range(self.plan.attempts):
            if attempt:
                what = f"the held-out results of {stage}" if stage else "the last round's scores"
                missing_from = text.many(len(wanted) - len(found), "site")
                self.say(f"Still waiting for {what} from {missing_from}; asking again.")
                self.sleep(self.plan.pause)
            self.meet(transport)
            missing = [s for s in wanted if s not in found and self.journal.sites[s].ready]
            before = {site: self.journal.sites[site].refused for site in missing}
            found |= self._asked(transport, self.federation.round + 1, dict.fromkeys(missing, todo))
            if len(found) == len(wanted):
                break
            # A site that refuses selection pilots does so in each of them.
            refused = [site for site in missing if self.journal.sites[site].refused > before[site]]
            if selection and len(found) + len(refused) == len(wanted):
                break
        if not found:
            raise UserError(
                f"No site has tested the last round. {self._missing(wanted)} Mend that and start the run again."
            )
        return found

    def _missing(self, sites: Iterable[str]) -> str:
        """What happened to sites of which nothing could be used, a sentence each; of many, the first."""
        seen = self.journal.sites
        told = [
            f"Site '{site}': {seen[site].why if seen[site].ready and seen[site].why else 'it is not online.'}"
            for site in sites
        ]
        return first_of(told, " ", " And {} more.")

    def _bounded(self, number: int, uploads: dict[str, Reply]) -> dict[str, Reply]:
        """The uploads that are within the bounds; the others are refused, and their sites named."""
        if not uploads:
            return uploads
        found = self.federation.judge(_stacked([uploads[site] for site in uploads]))
        for site, why in zip(uploads, found.why, strict=True):
            if why:
                self.exchange.refuse(site, number, why)
        return {site: answer for (site, answer), why in zip(uploads.items(), found.why, strict=True) if not why}

    def _asked(self, transport: Transport, number: int, todo: Mapping[str, SiteTask]) -> dict[str, Reply]:
        found = self.exchange(transport, number, self.federation.shared, todo)
        self.journal.seconds += found.seconds
        self.journal.note(found.line)
        return found.answers

    def _aggregate(self, number: int, order: list[str], uploads: Mapping[str, Reply]) -> None:
        start, settings = time.perf_counter(), self.federation.settings
        stacked = _stacked([uploads[site] for site in order])
        sizes = torch.tensor([float(uploads[site].train) for site in order])
        weights = sizes if self.federation.by_size else torch.ones(len(order))
        shared = self.rule(self.federation, stacked, weights)
        found = self.federation.judge(stacked) if order else None
        if not finite(shared):
            raise self._not_finite(number, "" if found is None else found.furthest(order))
        self.federation.shared = shared
        if found is not None:
            self.federation.lengths = remembered(self.federation.lengths, found)
        self.journal.counted |= dict.fromkeys(order, number)
        self.federation.round = number
        pending: dict[str, Any] = {"participants": len(order)}
        # Every site has the seed and can compute who is drawn when, so that secret sampling is not counted on.
        epsilon = self.federation.epsilon(secret=False)
        if epsilon is not None:
            pending["epsilon"] = epsilon
        for name in dict.fromkeys(n for site in order for n in uploads[site].info):
            values = [uploads[s].info[name] for s in order if name in uploads[s].info]
            pending[f"train_{name}"] = float(np.mean(values, dtype=np.float32))
        self.journal.pending = pending
        self.journal.seconds += time.perf_counter() - start
        self.journal.save(self.federation)
        spent = "" if epsilon is None else f" epsilon is {text.epsilon(epsilon, 3)} now, delta {settings.delta:g}."
        here = sentence(self.journal.place(number))
        self.say(f"{here} of {settings.rounds}: {len(order)} uploads.{spent}")

    def _not_finite(self, number: int, furthest: str) -> Diverged:
        """A round whose result cannot be used: the server stays where it is."""
        who = f"Site {furthest}. Stop that site, or set" if furthest else "Set"
        return Diverged(
            f"{sentence(self.journal.place(number))} is not accepted, since the server's state would not be finite. "
            f"{who} max_update_ratio = 20 and max_sigma_ratio = 100 in the server's config.toml, so that such uploads "
            f"are refused, and start the run again; it resumes after round {number - 1}, or from an earlier one with "
            "--back-to."
        )

    def _scored(self, round_: int) -> bool:
        """Whether the scores of a round are asked for with the next one."""
        return not self.journal.stage and self.federation.settings.evaluated(round_)

    def _tested(self) -> list[str]:
        """Sites that are tested, always the same ones."""
        return [self.plan.sites[i] for i in evaluated_clients(self.federation).tolist()]

    def _record(self, scores: Mapping[str, Sums]) -> None:
        """The line of metrics of the last finished round, from what its sites say of their test examples."""
        order = [site for site in self.plan.sites if site in scores and scores[site].examples]
        if not order:
            self.say(f"No site tested round {self.federation.round}, so it has no line of metrics.")
            return
        sums, data = Sums.join([scores[site] for site in order]), self.federation.data
        evaluation = data.task_type.evaluate_sums(sums, self.federation.settings.bins)
        self.journal.score(self.federation.round, evaluation, order, len(scores) - len(order))


def _stacked(answers: Sequence[Reply]) -> State:
    """The uploads of these answers, ``[S, ...]``; of none nothing."""
    states = [answer.upload.state for answer in answers if answer.upload is not None]
    return tree_map(lambda *leaves: torch.stack(leaves), *states) if states else ()


def server_side(
    config: Config,
    sites: tuple[str, ...],
    common: Mapping[str, Any],
    pilot: int = 0,
    candidate: tuple[int, ...] = (),
    fold: int = 0,
) -> Federation:
    """The server's side of a federation: the clients' names, and none of their examples.

    Args:
        config: What is computed.
        sites: The clients' names.
        common: What their data have in common.
        pilot: Which calibration pilot it is, from 1; 0: the run itself. All start with the run's first weights.
        candidate: Settings of the method that were chosen, or are tried (`bpfed.runs.pilot.with_candidates`).
        fold: In a selection pilot, which part of their training examples sites hold out, from 1; 0: it is none.
    """
    method, data = with_candidates(config.method, candidate), _known(config, sites, common)
    asked = replace(config.run, sets="client", adapt="off" if candidate else config.run.adapt)
    settings = suited(method, selection_settings(asked, fold - 1) if fold else asked, len(sites))
    check_run(method, settings, len(sites), common["task"])
    model = make_model(torch.zeros(2, *data.input_shape), data.task_type, data.classes, method, settings)
    first = method.init(model)
    settings = as_pilot(settings, pilot) if pilot else settings
    ids, cpu = rng.client_ids(sites), torch.device("cpu")
    return Federation(method, data, settings, model, cpu, first.shared, MemoryStore(first.personal, 0), ids)


def _known(config: Config, sites: tuple[str, ...], common: Mapping[str, Any]) -> FederatedData:
    """What the server knows of the sites' data, which it does not have."""
    asked, preprocessor = config.data, common.get("preparation")
    return without_examples(
        {
            "name": asked.name,
            "clients": sites,
            "input_shape": common["shape"],
            "task": common["task"],
            "classes": int(common["classes"]),
            "labels": () if preprocessor is None else preprocessor["labels"],  # of a named dataset no site tells them
            "partition": asked.partition or SITES,
            "protocol": DEPLOYED,
            "test_fraction": asked.test_fraction,  # None: each site's own; its file may say which rows are for testing
            "seed": config.data_seed,
            "preparation": preprocessor,
        }
    )
