"""The server of a deployed federation: its rounds.

One exchange makes a round. In exchange r the sites get the shared state after round r - 1; every site tests it, and those
drawn for round r train from it. So the scores of a round arrive with the next one, and a last exchange is for them alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bpfed import noise
from bpfed.config import Config
from bpfed.data.federated import Examples, FederatedData
from bpfed.data.lookalikes import lookalikes
from bpfed.data.preparation import Preparation
from bpfed.engine.evaluate import evaluated_clients
from bpfed.engine.federation import Federation
from bpfed.engine.store import MemoryStore
from bpfed.errors import UserError
from bpfed.flower.data import agreed
from bpfed.flower.exchange import Exchange, Todo
from bpfed.flower.journal import Journal
from bpfed.flower.meeting import Meeting, Seen
from bpfed.flower.message import Answer, fingerprint
from bpfed.flower.pattern import patterns
from bpfed.flower.plan import Plan
from bpfed.flower.post import Post
from bpfed.likelihoods import Categorical, Normal
from bpfed.methods.base import State
from bpfed.metrics import Form, Sums, evaluate_sums
from bpfed.mixture import mixture
from bpfed.model import Model
from bpfed.networks import default
from bpfed.privacy import secret_normal
from bpfed.report import RunRecord

#: The server's rule: (the federation, uploads ``[S, ...]``, weights ``[S]``) to its new state.
Rule = Callable[[Federation, State, Tensor], State]


def method_rule(federation: Federation, uploads: State, weights: Tensor) -> State:
    """The method's own rule, with the configuration's options; noise for privacy is from the system's randomness."""
    return federation.combined(uploads, weights, secret_normal)


class Server:
    """The server of one deployed run; goes on from the last finished round where there is one.

    Args:
        folder: Where the run is kept: the files of any run folder, and ``status.json``.
        plan: Who belongs to it, how long to wait.
        config: What is computed.
        keys: The public key of each site, by name; empty: sites are believed.
        rule: How uploads become the new state.
        say: Told in words what happens.
        sleep: Waits so many seconds.
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
    ) -> None:
        self.plan, self.config, self.rule, self.say, self.sleep = plan, config, rule, say, sleep
        self.fingerprint = fingerprint(config)
        self.sites = {site: Seen() for site in plan.sites}
        self.meeting = Meeting(self.sites, keys or {}, self.fingerprint, plan.timeout, say)
        self.journal = Journal(folder, config, self.fingerprint, self.sites, say)
        self.federation: Federation
        self.exchange: Exchange
        config.method.check()
        config.run.check(len(plan.sites))

    @property
    def history(self) -> list[dict[str, Any]]:
        """A line of metrics for each round that was tested."""
        return self.journal.history

    def serve(self, post: Post) -> RunRecord:
        """Run the rounds that are left, and write the report."""
        began = time.perf_counter()
        try:
            self._begin(post)
            while not self.federation.finished:
                self._round(post)
            self._last_scores(post)
            record = self.journal.finish(self.federation)
            self._status("finished")
            return record
        except BaseException as error:
            self._status("stopped", error)
            raise
        finally:
            self.say(f"The server ran for {time.perf_counter() - began:.1f} s.")

    def _begin(self, post: Post) -> None:
        kept = self.journal.kept()
        if kept is not None:
            self._start(kept["facts"])
            self.journal.restore(self.federation)
        self._status("waiting for sites")
        self._wait(post, len(self.sites) if kept is None else 1)
        if kept is None:
            told = {site: seen.facts for site, seen in self.sites.items() if seen.facts is not None}
            facts = agreed(told, self.config)
            if "preparation" in facts:
                for note in lookalikes(Preparation.from_record(facts["preparation"])):
                    self.say(note)
            self._start(facts)
            self.journal.begin(self.federation)
        self.journal.write_metrics()
        self.exchange = Exchange(
            self.sites,
            self.fingerprint,
            self.journal.run,
            self.journal.facts,
            self.patterns,
            Form.of(self.journal.facts["classes"], self.config.run.bins, self.config.run.calibration > 0.0),
            self.plan.timeout,
            self.say,
        )

    def _start(self, facts: dict[str, Any]) -> None:
        self.journal.facts = facts = {**facts, "sites": len(self.plan.sites)}
        self.federation = without_examples(self.config, self.plan.sites, facts)
        self.patterns = patterns(self.config.method, self.federation.model, self.config.run.compression == "half")

    def _wait(self, post: Post, wanted: int) -> None:
        """Until so many sites are there, or the time for it is over and there are enough."""
        enough = self.plan.min_replies or -(-self.config.run.per_round(len(self.sites)) // 2)
        waited = 0.0
        while True:
            self._meet(post)
            here = [site for site, seen in self.sites.items() if seen.there]
            if len(here) >= wanted or (waited >= self.plan.wait and len(here) >= min(enough, wanted)):
                self.say(f"{len(here)} of {len(self.sites)} sites are there: {', '.join(here)}.")
                return
            if waited >= self.plan.wait:
                raise UserError(
                    f"Only {len(here)} of {len(self.sites)} sites came within {self.plan.wait:g} s; start the others with "
                    "'bpfed deploy client' and run again."
                )
            self.sleep(1.0)
            waited += 1.0

    def _meet(self, post: Post) -> None:
        strangers = self.meeting.look(post)
        self._status(None)
        if strangers:
            self.meeting.greet(post, self.journal.run, strangers)
            self._status(None)

    def _round(self, post: Post) -> None:
        """One round: asked again, of those that are missing, until enough sites have answered."""
        number = self.federation.round + 1
        drawn = [self.plan.sites[i] for i in self.federation.participants(number).tolist()]
        least = min(len(drawn), self.plan.min_replies or -(-len(drawn) // 2))
        tested = number > 1 and self.config.run.evaluated(number - 1)
        uploads: dict[str, Answer] = {}
        scores: dict[str, Sums] = {}
        for attempt in range(self.plan.attempts):
            if attempt:
                self.say(f"Round {number}: {len(uploads)} of {len(drawn)} uploads, {least} are needed; asking again.")
                self.sleep(self.plan.pause)
            self._meet(post)
            online = [site for site, seen in self.sites.items() if seen.there]
            todo = {
                site: Todo(
                    site in drawn and site not in uploads, tested and site not in scores and site in self._tested()
                )
                for site in online
            }
            answers = self._asked(post, number, {site: what for site, what in todo.items() if any(what)})
            uploads |= {site: answer for site, answer in answers.items() if answer.upload is not None}
            scores |= {site: answer.sums for site, answer in answers.items() if answer.sums is not None}
            if len(uploads) >= least:
                break
        else:
            raise UserError(
                f"Round {number} got {len(uploads)} uploads of {len(drawn)} where {least} are needed, {self.plan.attempts} "
                "times; look after the sites and start the run again, it goes on from here."
            )
        if tested:
            self._record(scores)
        self._aggregate(number, [site for site in drawn if site in uploads], uploads)

    def _asked(self, post: Post, number: int, todo: Mapping[str, Todo]) -> dict[str, Answer]:
        found = self.exchange(post, number, self.federation.shared, todo)
        self.journal.seconds += found.seconds
        self.journal.note(found.line)
        return found.answers

    def _aggregate(self, number: int, order: list[str], uploads: Mapping[str, Answer]) -> None:
        start = time.perf_counter()
        states = [uploads[site].upload.state for site in order]  # type: ignore[union-attr]
        stacked = tree_map(lambda *leaves: torch.stack(leaves), *states) if states else ()
        sizes = torch.tensor([float(uploads[site].train) for site in order])
        weights = sizes if self.config.run.weighting == "size" else torch.ones(len(order))
        self.federation.shared = self.rule(self.federation, stacked, weights)
        for site in order:
            self.sites[site].counted = number
        self.federation.round = number
        pending: dict[str, Any] = {"participants": len(order)}
        # Every site has the seed and can reckon who is drawn when, so that secret sampling is not counted on.
        epsilon = self.federation.epsilon(secret=False)
        if epsilon is not None:
            pending["epsilon"] = epsilon
        for name in dict.fromkeys(n for site in order for n in uploads[site].info):
            values = [uploads[s].info[name] for s in order]
            pending[f"train_{name}"] = float(np.mean(values, dtype=np.float32))
        self.journal.pending = pending
        self.journal.seconds += time.perf_counter() - start
        self.journal.save(self.federation)
        self._status("running")
        spent = "" if epsilon is None else f" epsilon is {epsilon:.3f} now, delta {self.config.run.delta:g}."
        self.say(f"Round {number} of {self.config.run.rounds}: {len(order)} uploads.{spent}")

    def _last_scores(self, post: Post) -> None:
        scores: dict[str, Sums] = {}
        wanted = self._tested()
        for attempt in range(self.plan.attempts):
            if attempt:
                self.say(f"The last round's scores of {len(wanted) - len(scores)} sites are missing; asking again.")
                self.sleep(self.plan.pause)
            self._meet(post)
            missing = [s for s in wanted if s not in scores and self.sites[s].there]
            answers = self._asked(post, self.federation.round + 1, dict.fromkeys(missing, Todo(False, True)))
            scores |= {site: answer.sums for site, answer in answers.items() if answer.sums is not None}
            if len(scores) == len(wanted):
                break
        if not scores:
            raise UserError("No site has tested the last round; look after the sites and start the run again.")
        if not any(map(_examples, scores.values())):
            raise UserError(
                "No site has a test example; move the server's run away and set data.test_fraction above 0."
            )
        self._record(scores)

    def _tested(self) -> list[str]:
        """Sites that are tested, always the same ones."""
        return [self.plan.sites[i] for i in evaluated_clients(self.federation).tolist()]

    def _record(self, scores: Mapping[str, Sums]) -> None:
        """The line of metrics of the last finished round, from what its sites say of their test examples."""
        order = [site for site in self.plan.sites if site in scores and _examples(scores[site])]
        if not order:
            self.say(f"No site has tested round {self.federation.round}; it has no line of metrics.")
            return
        evaluation = evaluate_sums(Sums.join([scores[site] for site in order]), self.config.run.bins)
        self.journal.score(self.federation.round, evaluation, order, len(scores) - len(order))

    def _status(self, state: str | None, error: BaseException | None = None) -> None:
        federation = getattr(self, "federation", None)
        self.journal.status(state, federation.round if federation is not None else 0, error)


def _examples(sums: Sums) -> int:
    """Test examples behind these sums."""
    return int(sums.cells[0].sum())


def without_examples(config: Config, sites: tuple[str, ...], facts: Mapping[str, Any]) -> Federation:
    """The server's side of a federation: the clients' names, and none of their examples.

    Args:
        config: What is computed.
        sites: The clients' names.
        facts: What their data have in common.
    """
    shape, classes = tuple(facts["shape"]), int(facts["classes"])
    offsets = torch.zeros(len(sites) + 1, dtype=torch.int64)
    none = Examples(torch.zeros(0, *shape), torch.zeros(0, dtype=torch.int64), offsets)
    data = FederatedData(config.data.name, sites, none, none, facts["task"], classes)
    likelihood = Categorical(classes) if facts["task"] == "classification" else Normal()
    method, settings = config.method, config.run
    module = default(shape, classes or 1, settings.seed)
    model = Model.of(module, likelihood, torch.zeros(2, *shape), method.personal)
    model = mixture(model, settings.members, settings.seed)
    first = method.init(model)
    ids, cpu = noise.client_ids(sites), torch.device("cpu")
    return Federation(method, data, settings, model, cpu, first.shared, MemoryStore(first.personal, 0), ids)
