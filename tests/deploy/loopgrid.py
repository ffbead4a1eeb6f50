"""A Flower grid without processes: messages are written to bytes, recorded, read again, and answered on the spot.

What is private to Flower (the message's id, the task's identity, the object store's format) is used in this file alone.
"""

from types import SimpleNamespace

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity


class LoopGrid(Grid):
    """Nodes are functions from a message to its reply; None is a reply that got lost.

    Attributes:
        clients: The nodes that are online, by id.
        keys: Their public keys, by id.
        wire: All bytes that went either way, in order: (direction, node, bytes).
    """

    def __init__(self, clients=None, keys=None):
        self.clients, self.keys = dict(clients or {}), dict(keys or {})
        self.wire, self.replies = [], {}
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.clients)

    def get_nodes(self):
        return [SimpleNamespace(node_id=i, public_key=self.keys.get(i, b"")) for i in self.clients]

    def push_messages(self, messages):
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            sent = self._carried(message, "down", node)
            ids.append(sent.metadata.message_id)
            reply = self.clients[node](sent) if node in self.clients else None
            if reply is not None:
                self.replies[sent.metadata.message_id] = self._carried(reply, "up", node)
        return ids

    def pull_messages(self, message_ids):
        return [self.replies.pop(i) for i in message_ids if i in self.replies]

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))

    def bytes(self, direction=None):
        """Everything that went that way."""
        return b"".join(data for way, _, data in self.wire if direction in (None, way))

    def _carried(self, message, way, node):
        message.metadata.__dict__["_message_id"] = message.object_id
        contents = {i: part.deflate() for i, part in get_all_nested_objects(message).items()}
        self.wire.append((way, node, b"".join(contents.values())))
        arrived = inflate_object_from_contents(message.object_id, contents)
        arrived.metadata.__dict__["_message_id"] = message.object_id
        return arrived


def node_of(site):
    """A node that is this site."""
    return lambda message: Message(site.answer(message.content), reply_to=message)
