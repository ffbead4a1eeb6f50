"""The sites as the server meets them: which node is which site, who is there, and what each told of its data; and what
carries messages to them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError

from bpfed._util.files import from_json
from bpfed._util.text import plain
from bpfed.data.tabular.preprocessing import whole
from bpfed.data.tabular.statistics import MOST_CODES, ColumnStatistics, ColumnSummary
from bpfed.data.tabular.table import SPLIT
from bpfed.deploy.protocol.messages import LARGEST, MOST, Reply, Request
from bpfed.deploy.protocol.state_schema import RejectedMessage, listed
from bpfed.inference.tasks import is_task

# --- What a site tells of its data, read at the server's door ---------------------------------------------------------
#
# Nothing of it is believed that cannot be true of any data.

#: More pixels than this are not counted without error.
COUNTED = 2**53
#: Axes that an input may have.
AXES = 4


def read_statement(text: str, site: str, ignore: Collection[str] = (), agreed: str = "") -> dict[str, Any]:
    """What a site tells of its data, as plain data: what `bpfed.deploy.site.data.Source.data_statement` gives, and
    nothing more.

    Args:
        text: As it came, JSON.
        site: Who told it.
        ignore: Columns that are no inputs anywhere.
        agreed: SHA-256 of the preprocessing that all have agreed on, and then tell nothing of their columns; empty: none.

    Raises:
        Refused: It cannot be read, or cannot be true.
    """
    try:
        told = from_json(text)
        if not _count(told["train"], 1):
            raise ValueError("train")
        if "preparation" in told:
            statement = {key: told[key] for key in ("preparation", "target", "train")}
            if not (isinstance(statement["preparation"], str) and isinstance(statement["target"], str)):
                raise ValueError("preparation")
        elif "summary" in told:
            summary, target = ColumnStatistics.from_record(told["summary"]), told["target"]
            _check_summary(summary, site, target)
            statement = {"summary": summary.record(), "target": target, "train": told["train"]}
        else:
            statement = {key: told[key] for key in ("shape", "task", "classes", "train")}
            _check_part(statement)
    # Deeply nested lists are a RecursionError; what is no mapping has no keys, attributes or items.
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise RejectedMessage("what it sent about its data cannot be read.") from None
    if statement.get("preparation", "") != agreed:
        raise RejectedMessage(
            "it and the server have not agreed on the same preprocessing; give all the same file ('preprocessing' of "
            "deploy.toml)."
        )
    if "summary" in statement:
        _check_columns(summary, {target, SPLIT, *ignore})
    return statement


def _check_part(statement: dict[str, Any]) -> None:
    """A ValueError unless this is the statement of a part of a named dataset."""
    shape = statement["shape"]
    if not (isinstance(shape, list) and 0 < len(shape) <= AXES and all(_count(n, 1) for n in shape)):
        raise ValueError("shape")
    if not is_task(statement["task"]) or not _count(statement["classes"], 0):
        raise ValueError("task")


def _check_summary(summary: ColumnStatistics, site: str, target: Any) -> None:
    """A ValueError unless these are numbers and words of a file of this site."""
    if summary.client != site or not isinstance(target, str) or not _count(summary.rows, 1):
        raise ValueError("client")
    for column in (summary.target, *summary.columns.values()):
        _check_column(column)
    codes = [
        column.categories for column in summary.columns.values() if not column.words and column.categories is not None
    ]
    if not all(len(categories) <= MOST_CODES and all(map(whole, categories)) for categories in codes):
        raise ValueError("codes")
    if summary.shape is not None:
        if len(summary.shape) != 3 or not all(_count(n, 1) for n in summary.shape):
            raise ValueError("shape")
        if summary.columns.keys() != {f"channel {k}" for k in range(min(summary.shape[0], len(summary.columns) + 1))}:
            raise ValueError("channels")


def _check_column(column: ColumnSummary) -> None:
    if not (_count(column.count, 0, COUNTED) and _count(column.missing, 0, COUNTED) and type(column.words) is bool):
        raise ValueError("count")
    if not (_number(column.mean) and _number(column.squares) and column.squares >= 0.0):
        raise ValueError("mean")
    if column.categories is not None and not all(isinstance(word, str) for word in column.categories):
        raise ValueError("categories")


def _check_columns(summary: ColumnStatistics, left_out: set[str]) -> None:
    """Refuse columns that nobody may have as inputs: one site's word would make all others use theirs."""
    if strange := sorted(left_out & summary.columns.keys()):
        raise RejectedMessage(
            f"what it sent about its data has {listed(strange)} among the inputs; that is left out everywhere."
        )


def _count(value: Any, least: int, most: int = MOST) -> bool:
    return type(value) is int and least <= value <= most


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) <= LARGEST


#: Seconds after which a node that did not introduce itself properly is asked again.
GREET = 60.0


@dataclass
class SiteStatus:
    """What the server knows of a site.

    Attributes:
        node: Where it is reached now; None: it is not online.
        statement: What it told of its data; None: nothing yet.
        refused: How many of its messages were refused.
        lost: How many of its answers never came.
        why: Of the last message that was refused or lost, what was said of it.
    """

    node: int | None = None
    statement: dict[str, Any] | None = None
    refused: int = 0
    lost: int = 0
    why: str = ""

    @property
    def ready(self) -> bool:
        """Whether it is online and has introduced itself."""
        return self.node is not None and self.statement is not None


class Roster:
    """Finds out which site each node is: by its key where sites have keys, else by what it says.

    Args:
        sites: What is known of each site, by name; kept up to date.
        keys: The public key of each site, by name; None: sites are believed.
        fingerprint: Of the configuration.
        timeout: Seconds that a site has to introduce itself.
        say: Called with each message for the user.
        ignore: Columns that are no inputs at any site.
        agreed: SHA-256 of the preprocessing that all have agreed on; empty: there is none.
    """

    def __init__(
        self,
        sites: dict[str, SiteStatus],
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

    def look(self, transport: Transport) -> list[int]:
        """See who is online; the nodes that are to be asked who they are and what data they have."""
        nodes = transport.nodes()
        known = {seen.node: site for site, seen in self.sites.items() if seen.node is not None}
        for site, seen in self.sites.items():
            if seen.node is not None and seen.node not in {node.id for node in nodes}:
                seen.node = None
                self.say(f"Site '{site}' is gone.")
        unknown_nodes = []
        for node in nodes:
            if self.named is not None:
                owner = self.named.get(node.key)
                if owner is None:
                    continue  # its key is none of the sites'
                if self.sites[owner].node != node.id:
                    self.sites[owner].node = node.id
                    self.say(f"Site '{owner}' is online.")
                if self.sites[owner].statement is None:
                    unknown_nodes.append(node.id)
            elif node.id not in known:
                unknown_nodes.append(node.id)
        # Who was refused is not asked in every round again: that would be one more exchange each time.
        now = time.monotonic()
        unknown_nodes = [node for node in unknown_nodes if now - self._greeted.get(node, -GREET) >= GREET]
        self._greeted |= dict.fromkeys(unknown_nodes, now)
        return unknown_nodes

    def greet(self, transport: Transport, run: str, nodes: Iterable[int]) -> None:
        """Ask these nodes who they are and what data they have. ``run`` is the word for this run."""
        request = Request(self.fingerprint, run, 0).write()
        by_key = {seen.node: site for site, seen in self.sites.items() if seen.node is not None}
        for node, reply in transport.exchange(dict.fromkeys(nodes, request), 0, self.timeout).items():
            claimed = ""
            try:
                if isinstance(reply, str):
                    raise RejectedMessage(reply)
                answer = Reply.read(reply, None, None)
                claimed = answer.site[:64]
                statement = self._statement(answer, run, node, by_key.get(node))
                if self.sites[claimed].node is None:
                    self.say(f"Site '{claimed}' is online.")
                self.sites[claimed].node, self.sites[claimed].statement = node, statement
            except (RejectedMessage, ValueError) as refused:
                site = by_key.get(node, claimed)
                if site in self.sites:
                    self.sites[site].refused += 1
                    self.sites[site].why = f"its greeting was refused: {refused}"
                who = f"site '{plain(site)}'" if site else f"node {node}"
                self.say(f"The greeting from {who} was refused: {refused}")

    def _statement(self, answer: Reply, run: str, node: int, owner: str | None) -> dict[str, Any]:
        """What a site tells of its data, if it is the site that it says it is; ``owner`` is whose key the node has."""
        claimed = answer.site[:64]
        if answer.refused:
            raise RejectedMessage(answer.refused[:300])
        if answer.round != 0 or answer.run != run or answer.fingerprint != self.fingerprint:
            raise RejectedMessage("it belongs to a different round or configuration.")
        if claimed not in self.sites:
            raise RejectedMessage("no such site belongs to this federation.")
        if self.named is not None and owner != claimed:
            raise RejectedMessage("its key is not that site's.")
        if self.sites[claimed].node not in (None, node):
            raise RejectedMessage("a site of that name is already online.")
        return read_statement(answer.statement, claimed, self.ignore, self.agreed)


# --- Transport --------------------------------------------------------------------------------------------------------


#: Seconds between looks for answers.
POLL = 0.5
#: What comes of reading a message that is none; a lost connection is something else.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, DecodeError)


class Node(NamedTuple):
    """A site that is online: the address of its mail, and its public key (empty where sites have none)."""

    id: int
    key: bytes = b""


class Transport(Protocol):
    """What carries messages to sites and back."""

    def nodes(self) -> list[Node]:
        """Who is online."""
        ...

    def exchange(self, requests: Mapping[int, RecordDict], round_: int, timeout: float) -> dict[int, RecordDict | str]:
        """Send to each node and wait for answers: each a message, or in words why there is none; without lost ones."""
        ...


class GridTransport:
    """Carries messages over a Flower grid."""

    def __init__(self, grid: Grid, poll: float = POLL) -> None:
        self.grid, self.poll, self.apart = grid, poll, False

    def nodes(self) -> list[Node]:
        """Who is online."""
        return [Node(node.node_id, bytes(node.public_key)) for node in self.grid.get_nodes()]

    def exchange(self, requests: Mapping[int, RecordDict], round_: int, timeout: float) -> dict[int, RecordDict | str]:
        """Send to each node and wait for answers: each a message, or in words why there is none; without lost ones."""
        kind = MessageType.TRAIN if round_ else MessageType.QUERY
        # An answer that nobody waits for any more is not to be worked for, hence the time to live.
        messages = [
            Message(request, node, kind, ttl=timeout, group_id=str(round_)) for node, request in requests.items()
        ]
        waiting = {i: node for i, node in zip(self.grid.push_messages(messages), requests, strict=True) if i}
        found: dict[int, RecordDict | str] = {}
        until = time.monotonic() + timeout
        while waiting and time.monotonic() < until:
            for asked, reply in self._pull(list(waiting)):
                node = waiting.pop(asked, None)
                if node is not None:
                    found[node] = reply
            if waiting:
                time.sleep(self.poll)
        return found

    def _pull(self, asked: list[str]) -> Iterator[tuple[str, RecordDict | str]]:
        """Answers that are there, each with what it replies to.

        Flower fails with all of them where one is not as it should be. From then on they are taken one by one, which
        costs a request for each, but such a message costs no more than itself.
        """
        if not self.apart:
            try:
                replies = list(self.grid.pull_messages(asked))
                yield from [(reply.metadata.reply_to_message_id, _content(reply)) for reply in replies]
                return
            except UNREADABLE:
                self.apart = True
        for one in asked:
            try:
                replies = list(self.grid.pull_messages([one]))
                yield from [(one, _content(reply)) for reply in replies]
            except UNREADABLE:
                yield one, "it is not a message of Flower's."


def _content(reply: Message) -> RecordDict | str:
    return f"Flower says: {reply.error.reason}" if reply.has_error() else reply.content
