"""The server of a deployed federation: who is asked in a round, what of the answers counts, and what is kept of it.

One exchange makes a round. In exchange r the sites get the shared state after round r - 1; every site tests it, and those
drawn for round r train from it. So the scores of a round arrive with the next one, and a last exchange is for them alone.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor
from torch.utils._pytree import tree_map

from bpfed import __version__, noise
from bpfed.config import Config
from bpfed.data.federated import Examples, FederatedData
from bpfed.engine import checkpoint
from bpfed.engine.evaluate import evaluated_clients
from bpfed.engine.federation import Federation
from bpfed.engine.store import MemoryStore
from bpfed.errors import UserError
from bpfed.files import append_line, to_json, to_json_line, to_toml, write_whole
from bpfed.flower.data import agreed
from bpfed.flower.message import Answer, Ask, fingerprint, size
from bpfed.flower.pattern import Pattern, Refused, patterns
from bpfed.flower.plan import Plan
from bpfed.likelihoods import Categorical, Normal
from bpfed.methods.base import State
from bpfed.metrics import Evaluation, Sums, evaluate_sums
from bpfed.model import Model
from bpfed.networks import default
from bpfed.privacy import secret_normal
from bpfed.report import RunRecord, write
from bpfed.report.record import CONFIG, EVALUATION, METRICS, REPORT, SUMMARY

CHECKPOINT, STATUS, EXCHANGES = "checkpoint", "status.json", "exchanges.jsonl"

#: Seconds after which a node that did not introduce itself properly is asked again.
GREET = 60.0

#: The server's rule: (the federation, uploads ``[S, ...]``, weights ``[S]``) to its new state.
Rule = Callable[[Federation, State, Tensor], State]


def method_rule(federation: Federation, uploads: State, weights: Tensor) -> State:
    """The method's own rule, with the configuration's options; noise for privacy is from the system's randomness."""
    return federation.combined(uploads, weights, secret_normal)


class Node(NamedTuple):
    """A site that is online: the address of its mail, and its public key (empty where sites have none)."""

    id: int
    key: bytes = b""


class Post(Protocol):
    """What carries messages to sites and back."""

    def nodes(self) -> list[Node]:
        """Who is online."""
        ...

    def exchange(self, asks: Mapping[int, RecordDict], round_: int, timeout: float) -> dict[int, RecordDict | str]:
        """Send to each node and wait for its answer: a message, or in words why there is none; lost ones are left out."""
        ...


@dataclass
class Seen:
    """What the server knows of a site.

    Attributes:
        node: Where it is reached now; None: it is not online.
        facts: What it told of its data; None: nothing yet.
        counted: The last round in which its upload was used.
        refused: How many of its messages were refused.
        lost: How many of its answers never came.
    """

    node: int | None = None
    facts: dict[str, Any] | None = None
    counted: int = 0
    refused: int = 0
    lost: int = 0

    @property
    def there(self) -> bool:
        """Whether it is online and has introduced itself."""
        return self.node is not None and self.facts is not None


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
        self.folder, self.plan, self.config, self.rule = folder, plan, config, rule
        self.say, self.sleep = say, sleep
        self.named = {key: site for site, key in (keys or {}).items()}
        self.fingerprint = fingerprint(config)
        self.sites = {site: Seen() for site in plan.sites}
        self.history: list[dict[str, Any]] = []
        self.evaluation: tuple[Evaluation, list[str]] | None = None
        self.run = secrets.token_hex(8)
        self.seconds = 0.0
        self.facts: dict[str, Any] = {}
        self.federation: Federation
        self._greeted: dict[int, float] = {}
        self.pending: dict[str, Any] = {}  # what is known of the last round beside its scores
        config.method.check()
        config.run.check(len(plan.sites))

    # --- the run --------------------------------------------------------------------------------------------------------

    def serve(self, post: Post) -> RunRecord:
        """Run the rounds that are left, and write the report."""
        began = time.perf_counter()
        try:
            self._begin(post)
            while not self.federation.finished:
                self._round(post)
            self._last_scores(post)
            record = self._finish()
            self._status("finished")
            return record
        except BaseException as error:
            self._status("stopped", error)
            raise
        finally:
            self.say(f"The server ran for {time.perf_counter() - began:.1f} s.")

    def _begin(self, post: Post) -> None:
        kept = self._kept()
        if kept is not None:
            self.facts = kept["facts"]
            self.federation = self._start()
            self._restore()
        self._status("waiting for sites")
        self._wait(post, len(self.sites) if kept is None else 1)
        if kept is None:
            told = {site: seen.facts for site, seen in self.sites.items() if seen.facts is not None}
            self.facts = agreed(told, self.config)
            self.federation = self._start()
            write_whole(self.folder / CONFIG, to_toml(self._config()))
            write_whole(self.folder / EXCHANGES, "")
            self._save()
        write_whole(self.folder / METRICS, "".join(to_json_line(r) + "\n" for r in self.history))

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
            asks = {
                site: (site in drawn and site not in uploads, tested and site not in scores and site in self._tested())
                for site in online
            }
            answers = self._exchange(post, number, {site: todo for site, todo in asks.items() if any(todo)})
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
        self.pending = {"participants": len(order)}
        # Every site has the seed and can reckon who is drawn when, so that secret sampling is not counted on.
        epsilon = self.federation.epsilon(secret=False)
        if epsilon is not None:
            self.pending["epsilon"] = epsilon
        for name in dict.fromkeys(n for site in order for n in uploads[site].info):
            values = [uploads[s].info[name] for s in order]
            self.pending[f"train_{name}"] = float(np.mean(values, dtype=np.float32))
        self.seconds += time.perf_counter() - start
        self._save()
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
            answers = self._exchange(post, self.federation.round + 1, dict.fromkeys(missing, (False, True)))
            scores |= {site: answer.sums for site, answer in answers.items() if answer.sums is not None}
            if len(scores) == len(wanted):
                break
        if not scores:
            raise UserError("No site has tested the last round; look after the sites and start the run again.")
        self._record(scores)

    # --- messages -------------------------------------------------------------------------------------------------------

    def _exchange(self, post: Post, number: int, todo: Mapping[str, tuple[bool, bool]]) -> dict[str, Answer]:
        """Ask these sites to (train, test); the answers that are let in, by site."""
        travel, run = self._patterns, self.config.run
        asks = {
            site: Ask(
                self.fingerprint,
                self.run,
                number,
                train,
                evaluate,
                self.sites[site].counted,
                json.dumps(self.facts, sort_keys=True),
                self.federation.shared,
            ).write(travel.down(number))
            for site, (train, evaluate) in todo.items()
        }
        cells = Sums.shape(self.facts["task"] == "classification", run.bins)
        replies, seconds = self._send(post, asks, number)
        answers: dict[str, Answer] = {}
        for site, reply in replies.items():
            train, evaluate = todo[site]
            answer = self._let_in(site, reply, number, travel.upload if train else None, cells if evaluate else None)
            if answer is not None:
                answers[site] = answer
        slowest = max(answers.values(), key=lambda answer: answer.seconds, default=None)
        line = {
            "round": number,
            "at": round(time.time(), 3),
            "asked": len(asks),
            "answered": len(answers),
            "seconds": round(seconds, 3),
            "site_seconds": slowest.seconds if slowest else 0.0,
            "site_work": slowest.work if slowest else 0.0,
            "down": max((size(ask) for ask in asks.values()), default=0),
            "up": max((size(r) for r in replies.values() if isinstance(r, RecordDict)), default=0),
            "tensors_down": travel.down(number).bytes,
            "tensors_up": travel.upload.bytes,
        }
        append_line(self.folder / EXCHANGES, to_json_line(line))
        return answers

    def _send(
        self, post: Post, asks: Mapping[str, RecordDict], number: int
    ) -> tuple[dict[str, RecordDict | str], float]:
        start = time.perf_counter()
        nodes = {node: site for site in asks if (node := self.sites[site].node) is not None}
        found = post.exchange({node: asks[site] for node, site in nodes.items()}, number, self.plan.timeout)
        replies = {site: found[node] for node, site in nodes.items() if node in found}
        for site in asks:
            if site not in replies:
                self.sites[site].lost += 1
                self.say(f"Round {number}: site '{site}' did not answer within {self.plan.timeout:g} s.")
        seconds = time.perf_counter() - start
        self.seconds += seconds
        return replies, seconds

    def _let_in(
        self, site: str, reply: RecordDict | str, number: int, pattern: Pattern | None, cells: tuple[int, int] | None
    ) -> Answer | None:
        """The answer of a site, if all about it is as it should be; else it is counted and named in the log."""
        try:
            if isinstance(reply, str):
                raise Refused(reply)
            answer = Answer.read(reply, pattern, cells)
            if answer.site != site:
                raise Refused(f"it says it is '{answer.site[:40]}'.")
            if answer.refused:
                raise Refused(answer.refused[:300])
            if (answer.run, answer.round) != (self.run, number):
                raise Refused(f"it is of round {answer.round} of run {answer.run[:16]}, and this is round {number}.")
            if answer.fingerprint != self.fingerprint:
                raise Refused("it has another configuration; give all sites the same config.toml.")
            if pattern is not None and answer.train < 1:
                raise Refused("it says it has no training example.")
            return answer
        except Refused as refused:
            self.sites[site].refused += 1
            self.say(f"Round {number}: the message of site '{site}' is not used: {refused}")
            return None

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
        """Find out which site each node is: by its key where sites have keys; and ask those that are new for their data."""
        nodes = post.nodes()
        known = {seen.node: site for site, seen in self.sites.items() if seen.node is not None}
        for site, seen in self.sites.items():
            if seen.node is not None and seen.node not in {node.id for node in nodes}:
                seen.node = None
                self.say(f"Site '{site}' is gone.")
        strangers = []
        for node in nodes:
            if self.named:
                owner = self.named.get(node.key)
                if owner is None:
                    continue  # its key is none of the sites'
                if self.sites[owner].node != node.id:
                    self.sites[owner].node = node.id
                    self.say(f"Site '{owner}' is there.")
                if self.sites[owner].facts is None:
                    strangers.append(node.id)
            elif node.id not in known:
                strangers.append(node.id)
        # Who was refused is not asked in every round again: that would be one more exchange each time.
        now = time.monotonic()
        strangers = [node for node in strangers if now - self._greeted.get(node, -GREET) >= GREET]
        if strangers:
            self._greeted |= dict.fromkeys(strangers, now)
            self._ask_names(post, strangers)
        self._status(None)

    def _ask_names(self, post: Post, nodes: Iterable[int]) -> None:
        ask = Ask(self.fingerprint, self.run, 0).write()
        by_key = {seen.node: site for site, seen in self.sites.items() if seen.node is not None}
        for node, reply in post.exchange(dict.fromkeys(nodes, ask), 0, self.plan.timeout).items():
            claimed = ""
            try:
                if isinstance(reply, str):
                    raise Refused(reply)
                answer = Answer.read(reply, None, None)
                claimed = answer.site[:64]
                if answer.refused:
                    raise Refused(answer.refused[:300])
                if answer.round != 0 or answer.run != self.run or answer.fingerprint != self.fingerprint:
                    raise Refused("it is of another round or configuration.")
                if claimed not in self.sites:
                    raise Refused("no such site belongs to this federation.")
                if self.named and by_key.get(node) != claimed:
                    raise Refused("its key is not that site's.")
                if self.sites[claimed].node not in (None, node):
                    raise Refused("a site of that name is there already.")
                facts = json.loads(answer.facts)
                if not isinstance(facts, dict) or not isinstance(facts.get("train"), int) or facts["train"] < 1:
                    raise Refused("what it says of its data is not readable.")
                if self.sites[claimed].node is None:
                    self.say(f"Site '{claimed}' is there.")
                self.sites[claimed].node, self.sites[claimed].facts = node, facts
            except (Refused, ValueError) as refused:
                site = by_key.get(node, claimed)
                if site in self.sites:
                    self.sites[site].refused += 1
                who = f"site '{site}'" if site else f"node {node}"
                self.say(f"The greeting of {who} is refused: {refused}")

    # --- state ----------------------------------------------------------------------------------------------------------

    def _start(self) -> Federation:
        """The server's side of a federation: the clients' names, and none of their examples."""
        shape, classes = tuple(self.facts["shape"]), int(self.facts["classes"])
        none = Examples(
            torch.zeros(0, *shape),
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(len(self.sites) + 1, dtype=torch.int64),
        )
        asked = self.config.data
        data = FederatedData(asked.name, self.plan.sites, none, none, self.facts["task"], classes)
        likelihood = Categorical(classes) if self.facts["task"] == "classification" else Normal()
        method, settings = self.config.method, self.config.run
        module = default(shape, classes or 1, settings.seed)
        model = Model.of(module, likelihood, torch.zeros(2, *shape), method.personal)
        first = method.init(model)
        self._patterns = patterns(method, model, settings.compression == "half")
        ids = noise.client_ids(self.plan.sites)
        cpu = torch.device("cpu")
        return Federation(method, data, settings, model, cpu, first.shared, MemoryStore(first.personal, 0), ids)

    def _tested(self) -> list[str]:
        """Sites that are tested, always the same ones."""
        return [self.plan.sites[i] for i in evaluated_clients(self.federation).tolist()]

    def _record(self, scores: Mapping[str, Sums]) -> None:
        """The line of metrics of the last finished round, from what its sites say of their test examples."""
        order = [site for site in self.plan.sites if site in scores and float(scores[site].cells[0].sum()) > 0]
        if not order:
            self.say(f"No site has tested round {self.federation.round}; it has no line of metrics.")
            return
        evaluation = evaluate_sums(Sums.join([scores[site] for site in order]), self.config.run.bins)
        self.evaluation = evaluation, order
        record = {"round": self.federation.round, **evaluation.record(), **self.pending}
        record |= {"tested": len(order), "seconds": round(self.seconds, 3)}
        self.history = [r for r in self.history if r["round"] != record["round"]] + [record]
        append_line(self.folder / METRICS, to_json_line(record))

    def _save(self) -> None:
        sites = {s: {k: v for k, v in vars(seen).items() if k != "node"} for s, seen in self.sites.items()}
        extra = {
            "run": self.run,
            "fingerprint": self.fingerprint,
            "seconds": round(self.seconds, 3),
            "facts": self.facts,
            "pending": self.pending,
            "sites": sites,
            "history": self.history,
        }
        checkpoint.save(self.folder / CHECKPOINT, self.federation, extra)

    def _kept(self) -> dict[str, Any] | None:
        """What the newest readable checkpoint says beside its tensors."""
        for path in sorted((self.folder / CHECKPOINT).glob("round-*.json"), reverse=True):
            try:
                record = json.loads(path.read_text())
                if not path.with_suffix(".safetensors").exists():
                    continue
            except (OSError, ValueError):
                continue
            if record.get("fingerprint") != self.fingerprint:
                raise UserError(
                    f"The run in '{self.folder}' has another configuration; move that folder away to start a new run."
                )
            return record
        return None

    def _restore(self) -> None:
        """Back to the newest sound checkpoint."""
        restored = checkpoint.restore(self.folder / CHECKPOINT, self.federation)
        assert restored is not None
        for name in restored.damaged:
            self.say(f"Checkpoint {name} is damaged; going on from the one before, round {restored.round}.")
        kept = restored.extra
        self.run, self.seconds, self.history, self.pending = (kept[k] for k in ("run", "seconds", "history", "pending"))
        for site in self.sites.keys() & kept["sites"].keys():
            self.sites[site] = Seen(**kept["sites"][site])
        self.say(f"Going on after round {restored.round} of {self.config.run.rounds}.")

    def _status(self, state: str | None, error: BaseException | None = None) -> None:
        if state is not None:
            self._state = state
        federation = getattr(self, "federation", None)
        sites = {
            site: {"online": seen.there, "counted": seen.counted, "refused": seen.refused, "lost": seen.lost}
            for site, seen in self.sites.items()
        }
        status = {
            "state": getattr(self, "_state", "starting"),
            "error": "" if error is None else str(error) if isinstance(error, UserError) else type(error).__name__,
            "by_user_error": isinstance(error, UserError),
            "pid": os.getpid(),
            "at": time.time(),
            "round": federation.round if federation is not None else 0,
            "rounds": self.config.run.rounds,
            "sites": sites,
            "metrics": self.history[-1] if self.history else None,
        }
        write_whole(self.folder / STATUS, to_json(status))

    # --- the result -----------------------------------------------------------------------------------------------------

    def _config(self) -> dict[str, Any]:
        asked, method = self.config.data, self.config.method
        factors = self.federation.model.factors
        return {
            "bpfed": __version__,
            "data": {
                "name": asked.name,
                "partition": asked.partition,
                "clients": len(self.sites),
                "test_fraction": asked.test_fraction,
                "seed": asked.seed,
            },
            "method": {"name": method.name, **method.settings()},
            "run": {**vars(self.config.run), "device": "cpu"},
            "model": {
                "network": type(self.federation.model.module).__name__,
                "weights": factors.total,
                "shared": factors.shared,
                "personal": list(factors.personal_names),
            },
        }

    def _finish(self) -> RunRecord:
        assert self.evaluation is not None
        evaluation, order = self.evaluation
        sizes = [int((self.sites[site].facts or {}).get("train", 0)) for site in order]
        write_whole(self.folder / EVALUATION, to_json(evaluation.detail(self.federation.round, order, sizes)))
        write_whole(self.folder / SUMMARY, to_json(self._summary()))
        record = RunRecord.read(self.folder)
        write(record, self.folder / REPORT)
        self._save()
        return record

    def _summary(self) -> dict[str, Any]:
        from bpfed.run import HIGHER_IS_BETTER

        method, asked = self.config.method, self.config.data
        record: dict[str, Any] = {
            "method": method.name,
            "title": method.title,
            "data": asked.name,
            "partition": asked.partition or "sites",
            "protocol": "deployed",
            "seed": self.config.run.seed,
            "rounds": self.federation.round,
            "clients": len(self.sites),
            "device": "cpu",
            "seconds": round(self.seconds, 3),
            "bins": self.config.run.bins,
        }
        last = self.history[-1]
        for metric in (m for m in ("accuracy", "rmse", "nll", "brier", "ece", "mce") if m in last):
            pooled = [r[metric]["pooled"] for r in self.history if r[metric]["pooled"] is not None]
            best = (max if metric in HIGHER_IS_BETTER else min)(pooled, default=None)
            record[metric] = {"last": last[metric]["pooled"], "best": best, "worst_client": last[metric]["worst"]}
        return record
