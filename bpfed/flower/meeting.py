"""The sites as the server meets them: which node is which site, who is there, and what each told of its data."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bpfed.flower.facts import read_facts
from bpfed.flower.message import Answer, Ask
from bpfed.flower.pattern import Refused
from bpfed.flower.post import Post
from bpfed.flower.words import plain

#: Seconds after which a node that did not introduce itself properly is asked again.
GREET = 60.0


@dataclass
class Seen:
    """What the server knows of a site.

    Attributes:
        node: Where it is reached now; None: it is not online.
        facts: What it told of its data; None: nothing yet.
        refused: How many of its messages were refused.
        lost: How many of its answers never came.
        why: Of the last message that was refused or lost, what was said of it.
    """

    node: int | None = None
    facts: dict[str, Any] | None = None
    refused: int = 0
    lost: int = 0
    why: str = ""

    @property
    def ready(self) -> bool:
        """Whether it is online and has introduced itself."""
        return self.node is not None and self.facts is not None


class Meeting:
    """Finds out which site each node is: by its key where sites have keys, else by what it says.

    Args:
        sites: What is known of each site, by name; kept up to date.
        keys: The public key of each site, by name; None: sites are believed.
        fingerprint: Of the configuration.
        timeout: Seconds that a site has to introduce itself.
        say: Called with each message for the user.
        ignore: Columns that are no inputs at any site.
        agreed: SHA-256 of the preparation that all have agreed on; empty: there is none.
    """

    def __init__(
        self,
        sites: dict[str, Seen],
        keys: Mapping[str, bytes] | None,
        fingerprint: str,
        timeout: float,
        say: Callable[[str], None],
        ignore: Collection[str] = (),
        agreed: str = "",
    ) -> None:
        self.sites, self.fingerprint, self.timeout, self.say = sites, fingerprint, timeout, say
        self.ignore, self.agreed = ignore, agreed
        self.named = None if keys is None else {key: site for site, key in keys.items()}
        self._greeted: dict[int, float] = {}

    def look(self, post: Post) -> list[int]:
        """See who is online; the nodes that are to be asked who they are and what data they have."""
        nodes = post.nodes()
        known = {seen.node: site for site, seen in self.sites.items() if seen.node is not None}
        for site, seen in self.sites.items():
            if seen.node is not None and seen.node not in {node.id for node in nodes}:
                seen.node = None
                self.say(f"Site '{site}' is gone.")
        strangers = []
        for node in nodes:
            if self.named is not None:
                owner = self.named.get(node.key)
                if owner is None:
                    continue  # its key is none of the sites'
                if self.sites[owner].node != node.id:
                    self.sites[owner].node = node.id
                    self.say(f"Site '{owner}' is online.")
                if self.sites[owner].facts is None:
                    strangers.append(node.id)
            elif node.id not in known:
                strangers.append(node.id)
        # Who was refused is not asked in every round again: that would be one more exchange each time.
        now = time.monotonic()
        strangers = [node for node in strangers if now - self._greeted.get(node, -GREET) >= GREET]
        self._greeted |= dict.fromkeys(strangers, now)
        return strangers

    def greet(self, post: Post, run: str, nodes: Iterable[int]) -> None:
        """Ask these nodes who they are and what data they have. ``run`` is the word for this run."""
        ask = Ask(self.fingerprint, run, 0).write()
        by_key = {seen.node: site for site, seen in self.sites.items() if seen.node is not None}
        for node, reply in post.exchange(dict.fromkeys(nodes, ask), 0, self.timeout).items():
            claimed = ""
            try:
                if isinstance(reply, str):
                    raise Refused(reply)
                answer = Answer.read(reply, None, None)
                claimed = answer.site[:64]
                facts = self._facts(answer, run, node, by_key.get(node))
                if self.sites[claimed].node is None:
                    self.say(f"Site '{claimed}' is online.")
                self.sites[claimed].node, self.sites[claimed].facts = node, facts
            except (Refused, ValueError) as refused:
                site = by_key.get(node, claimed)
                if site in self.sites:
                    self.sites[site].refused += 1
                    self.sites[site].why = f"its greeting was refused: {refused}"
                who = f"site '{plain(site)}'" if site else f"node {node}"
                self.say(f"The greeting from {who} was refused: {refused}")

    def _facts(self, answer: Answer, run: str, node: int, owner: str | None) -> dict[str, Any]:
        """What a site tells of its data, if it is the site that it says it is; ``owner`` is whose key the node has."""
        claimed = answer.site[:64]
        if answer.refused:
            raise Refused(answer.refused[:300])
        if answer.round != 0 or answer.run != run or answer.fingerprint != self.fingerprint:
            raise Refused("it belongs to a different round or configuration.")
        if claimed not in self.sites:
            raise Refused("no such site belongs to this federation.")
        if self.named is not None and owner != claimed:
            raise Refused("its key is not that site's.")
        if self.sites[claimed].node not in (None, node):
            raise Refused("a site of that name is already online.")
        return read_facts(answer.facts, claimed, self.ignore, self.agreed)
