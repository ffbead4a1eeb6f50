"""One exchange of messages: asks to sites, their answers let in or refused, and a line on what it cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flwr.app import RecordDict

from bpfed.flower.journal import Journal, sentence
from bpfed.flower.message import Answer, Ask, size
from bpfed.flower.pattern import Pattern, Patterns, Refused, listed
from bpfed.flower.post import Post
from bpfed.methods.base import State
from bpfed.metrics import Form


class Todo(NamedTuple):
    """What a site is asked to do: to train; to test the state that is sent, on test examples or on those held out."""

    train: bool
    test: bool
    held: bool = False


class Exchanged(NamedTuple):
    """What came of it.

    Attributes:
        answers: Those that are let in, by site.
        seconds: From sending to the last answer.
        line: Times and sizes, as plain data.
    """

    answers: dict[str, Answer]
    seconds: float
    line: dict[str, Any]


@dataclass(frozen=True)
class Exchange:
    """How the server asks its sites in a training.

    Attributes:
        journal: Of the training. What is refused and lost is counted with its sites.
        patterns: What travels.
        form: What sums look like.
        timeout: Seconds that a site has to answer.
        say: Called with each message for the user.
    """

    journal: Journal
    patterns: Patterns
    form: Form
    timeout: float
    say: Callable[[str], None]

    def __call__(self, post: Post, number: int, shared: State, todo: Mapping[str, Todo]) -> Exchanged:
        """Ask these sites, in round ``number``, with the server's state."""
        journal, down = self.journal, self.patterns.down(number)
        facts = json.dumps(journal.facts, sort_keys=True)
        asks = {
            site: Ask(
                journal.fingerprint,
                journal.run,
                number,
                train=what.train,
                evaluate=what.test or what.held,
                counted=journal.counted.get(site, 0),
                facts=facts,
                rehearsal=journal.rehearsal,
                softness=1.0 if journal.softness is None else journal.softness,
                shared=shared,
            ).write(down)
            for site, what in todo.items()
        }
        sent, start = time.time(), time.perf_counter()
        replies = self._send(post, asks, number)
        seconds = time.perf_counter() - start
        answers: dict[str, Answer] = {}
        for site, reply in replies.items():
            answer = self._let_in(site, reply, number, todo[site])
            if answer is not None:
                answers[site] = answer
        slowest = max(answers.values(), key=lambda answer: answer.seconds, default=None)
        line = {
            "round": number,
            "sent": round(sent, 3),
            "at": round(time.time(), 3),
            "asked": len(asks),
            "answered": len(answers),
            "seconds": round(seconds, 3),
            "site_seconds": slowest.seconds if slowest else 0.0,
            "site_work": slowest.work if slowest else 0.0,
            "work": {site: answer.work for site, answer in answers.items()},
            "down": max((size(ask) for ask in asks.values()), default=0),
            "up": max((size(r) for r in replies.values() if isinstance(r, RecordDict)), default=0),
            "tensors_down": down.bytes,
            "tensors_up": self.patterns.upload.bytes,
        }
        return Exchanged(answers, seconds, line)

    def _send(self, post: Post, asks: Mapping[str, RecordDict], number: int) -> dict[str, RecordDict | str]:
        nodes = {node: site for site in asks if (node := self.journal.sites[site].node) is not None}
        found = post.exchange({node: asks[site] for node, site in nodes.items()}, number, self.timeout)
        replies = {site: found[node] for node, site in nodes.items() if node in found}
        for site in asks:
            if site not in replies:
                self.journal.sites[site].lost += 1
                place = self.journal.place(number)
                self.journal.sites[site].why = f"in {place} it did not answer within {self.timeout:g} s."
                self.say(f"{sentence(place)}: site '{site}' did not answer within {self.timeout:g} s.")
        return replies

    def _let_in(self, site: str, reply: RecordDict | str, number: int, asked: Todo) -> Answer | None:
        """The answer of a site, if all about it is as it should be; else it is counted and named in the log."""
        try:
            if isinstance(reply, str):
                raise Refused(reply)
            pattern: Pattern | None = self.patterns.upload if asked.train else None
            most = int((self.journal.sites[site].facts or {}).get("train", 0)) if asked.held else -1
            answer = Answer.read(reply, pattern, self.form if asked.test else None, most, self.form.numbers)
            if answer.site != site:
                raise Refused(f"it calls itself '{answer.site[:40]}'.")
            if answer.refused:
                raise Refused(answer.refused[:300])
            if (answer.run, answer.round) != (self.journal.run, number):
                raise Refused(
                    f"it belongs to round {answer.round} of run {answer.run[:16]}, but this is round {number}."
                )
            if answer.fingerprint != self.journal.fingerprint:
                raise Refused("it has a different configuration; give all sites the same config.toml.")
            # A site with few examples reports nothing of its training.
            if asked.train and answer.info and answer.info.keys() != self.patterns.info:
                names = listed(sorted(answer.info)), listed(sorted(self.patterns.info))
                raise Refused("its training reports {} where {} are expected.".format(*names))
            if asked.train and answer.train < 1:
                raise Refused("it reports no training example.")
            told = (self.journal.sites[site].facts or {}).get("train")
            if isinstance(told, int) and answer.train > told:  # what it says before the run is what all can agree on
                raise Refused(f"it reports {answer.train} training examples, but said before that it has {told}.")
            return answer
        except Refused as refused:
            self.refuse(site, number, str(refused))
            return None

    def refuse(self, site: str, number: int, why: str) -> None:
        """Count a message that is not used, and name its site."""
        self.journal.sites[site].refused += 1
        place = self.journal.place(number)
        self.journal.sites[site].why = f"its message in {place} was not used: {why}"
        self.say(f"{sentence(place)}: the message from site '{site}' was not used: {why}")
