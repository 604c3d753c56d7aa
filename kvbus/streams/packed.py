"""Many XADDs in one MULTI, packed by hand: a third of the time that redis-py's pipeline spends on an entry.

redis-py builds each command through several layers of general code, and its replies through as many. A publisher
shares the interpreter with a scheduler, so this is time that the host gets back. For a single server only: a cluster's
client has to find the node first, and keeps redis-py's way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import redis

from kvbus.protocol.codec import Fields

_MULTI = b"*1\r\n$5\r\nMULTI\r\n"
_EXEC = b"*1\r\n$4\r\nEXEC\r\n"
_SEND_BYTES = 1 << 16


def can_pack(client: Any) -> bool:
    """Whether the client is redis-py's plain one, Sentinel's included: fakeredis and the cluster client are not."""
    return type(client) is redis.Redis


def add_packed(
    client: Any, key: str, batch: Sequence[Fields], maxlen: int, meanwhile: Callable[[], None] | None = None
) -> list[bytes]:
    """Append all or none, in order; the new ids. maxlen: 0 for none. Raises what redis-py raises.

    meanwhile: called once when all is sent, before the replies are waited for.
    """
    chunks = _pack(key.encode(), batch, maxlen)
    pool = client.connection_pool
    connection = pool.get_connection()
    try:
        connection.send_packed_command(chunks)
        if meanwhile is not None:
            meanwhile()
        return _read(connection, len(batch))
    except redis.ResponseError:
        raise  # all replies have been read
    except BaseException:
        # What is still unread belongs to nobody: the connection must not go back with it.
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


def _pack(key: bytes, batch: Sequence[Fields], maxlen: int) -> list[bytes]:
    words = [b"XADD", key, *((b"MAXLEN", b"~", b"%d" % maxlen) if maxlen else ()), b"*"]
    head = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    chunks: list[bytes] = []
    parts: list[bytes] = [_MULTI]
    size = 0
    for fields in batch:
        parts.append(b"*%d\r\n" % (len(words) + 2 * len(fields)))
        parts.append(head)
        for name, value in fields.items():
            parts.append(b"$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(value)))
            parts.append(value)
            parts.append(b"\r\n")
            size += len(value)
        if size > _SEND_BYTES:
            chunks.append(b"".join(parts))
            parts.clear()
            size = 0
    parts.append(_EXEC)
    chunks.append(b"".join(parts))
    return chunks


def _read(connection: Any, count: int) -> list[bytes]:
    """All replies, errors included: MULTI's, one QUEUED a command, EXEC's list."""
    first: redis.ResponseError | None = None
    for _ in range(count + 1):
        try:
            connection.read_response()
        except redis.ResponseError as error:  # OutOfMemoryError and its like are raised when queued
            first = first or error
    try:
        ids: list[bytes] = connection.read_response()
    except redis.ResponseError as error:
        raise first or error from None
    for reply in ids:
        if isinstance(reply, Exception):
            raise reply
    return ids
