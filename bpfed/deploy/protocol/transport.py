"""The transport of a federation: what carries messages between the server and its sites, and Flower's grid as one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError

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
