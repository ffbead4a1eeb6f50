"""A message's records as bytes, between a site's Flower app and the worker that does the work. Needs no torch."""

from __future__ import annotations

import json
import socket
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

_KINDS: dict[str, type] = {"config": ConfigRecord, "metric": MetricRecord}


def to_bytes(record: RecordDict) -> bytes:
    """A header in JSON, its length before it, then the arrays' own bytes end to end."""
    head: dict[str, Any] = {}
    blobs: list[bytes] = []
    for name, part in record.items():
        if isinstance(part, ArrayRecord):
            arrays = {key: [a.dtype, list(a.shape), a.stype, len(a.data)] for key, a in part.items()}
            blobs += [a.data for a in part.values()]
            head[name] = ["array", arrays]
        else:
            kind = "config" if isinstance(part, ConfigRecord) else "metric"
            head[name] = [kind, dict(part)]
    text = json.dumps(head).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *blobs])


class Unreadable(ValueError):
    """Bytes that `to_bytes` did not write."""


def from_bytes(data: bytes) -> RecordDict:
    """What `to_bytes` wrote.

    Raises:
        Unreadable: It did not write this.
    """
    try:
        return _record(data)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from error


def _record(data: bytes) -> RecordDict:
    start = 8 + int.from_bytes(data[:8], "little")
    record = RecordDict()
    for name, (kind, parts) in json.loads(data[8:start]).items():
        if kind == "array":
            arrays = {}
            for key, (dtype, shape, stype, length) in parts.items():
                arrays[key] = Array(dtype, tuple(shape), stype, data[start : start + length])
                start += length
            record[name] = ArrayRecord(arrays)
        else:
            record[name] = _KINDS[kind](parts)
    return record


def send(link: socket.socket, data: bytes) -> None:
    """Write one message, its length before it."""
    link.sendall(len(data).to_bytes(8, "little") + data)


def receive(link: socket.socket) -> bytes:
    """Read one message; empty where the other side has nothing to say any more."""
    length = int.from_bytes(_exactly(link, 8), "little")
    return _exactly(link, length)


def _exactly(link: socket.socket, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = link.recv(min(count, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
