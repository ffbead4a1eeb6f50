"""The server of a deployed federation: it meets its sites, and trains with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bpfed.config import Config
from bpfed.data.lookalikes import lookalikes
from bpfed.data.preparation import Preparation
from bpfed.engine.federation import Federation
from bpfed.errors import UserError
from bpfed.flower.data import agreed
from bpfed.flower.journal import Journal
from bpfed.flower.meeting import Meeting, Seen
from bpfed.flower.message import fingerprint
from bpfed.flower.plan import Plan
from bpfed.flower.post import Post
from bpfed.flower.status import Status
from bpfed.flower.training import Rule, Training, method_rule, without_examples
from bpfed.report import RunRecord


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
        self.status = Status(folder, config.run.rounds, self.sites)
        self.training: Training | None = None
        config.method.check()
        config.run.check(len(plan.sites))

    @property
    def federation(self) -> Federation:
        """The server's side of the training that is under way."""
        assert self.training is not None
        return self.training.federation

    @property
    def history(self) -> list[dict[str, Any]]:
        """A line of metrics for each round that was tested."""
        return self.journal.history

    def serve(self, post: Post) -> RunRecord:
        """Run the rounds that are left, and write the report."""
        began = time.perf_counter()
        try:
            training = self._begin(post)
            while not training.federation.finished:
                training.round(post)
                self._note("running")
            training.last_scores(post)
            record = self.journal.finish(training.federation)
            self._note("finished")
            return record
        except BaseException as error:
            self._note("stopped", error)
            raise
        finally:
            self.say(f"The server ran for {time.perf_counter() - began:.1f} s.")

    def _begin(self, post: Post) -> Training:
        """Meet the sites, and take up the training where it is."""
        kept = self.journal.kept()
        if kept is not None:
            for site in self.sites.keys() & kept["sites"].keys():
                self.sites[site] = Seen(**kept["sites"][site])
            self.training = self._training(kept["facts"])
            self.journal.restore(self.training.federation)
        self._note("waiting for sites")
        self._wait(post, len(self.sites) if kept is None else 1)
        if self.training is None:
            self.training = self._training(self._agreed())
            self.journal.begin(self.training.federation)
        self.journal.write_metrics()
        return self.training

    def _agreed(self) -> dict[str, Any]:
        """What the data of the sites that are there have in common."""
        facts = agreed({site: seen.facts for site, seen in self.sites.items() if seen.facts is not None}, self.config)
        if "preparation" in facts:
            for note in lookalikes(Preparation.from_record(facts["preparation"])):
                self.say(note)
        return {**facts, "sites": len(self.plan.sites)}

    def _training(self, facts: dict[str, Any]) -> Training:
        self.journal.facts = facts
        federation = without_examples(self.config, self.plan.sites, facts)
        return Training(self.plan, federation, self.journal, self._meet, self.rule, self.say, self.sleep)

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
        self._note(None)
        if strangers:
            self.meeting.greet(post, self.journal.run, strangers)
            self._note(None)

    def _note(self, state: str | None, error: BaseException | None = None) -> None:
        self.status.write(self.journal, self.training.federation.round if self.training else 0, state, error)
