"""One connection to a single server, held and packed by hand: for the few calls that are made all the time.

redis-py builds a command, finds a connection, looks whether it still stands and hands out the reply through several
layers of general code. For a worker that carries out a command and answers it, that was half of all it did.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import redis

LOOK_AFTER_S = 1.0
"""Idle for longer than this, a connection may have been closed by the server: look before it is used."""

Word = str | bytes | int


def can_hold(client: Any) -> bool:
    """Whether the client is redis-py's plain one, Sentinel's included: fakeredis and the cluster client are not."""
    return type(client) is redis.Redis


class Packed(NamedTuple):
    """Words that are the same at every call, packed once."""

    words: int
    raw: bytes

    @classmethod
    def of(cls, words: Sequence[Word]) -> Packed:
        return cls(len(words), pack(words).partition(b"\r\n")[2])


class Line:
    """A connection out of a plain client's pool. For one thread at a time; after an error the next call connects anew.

    The client's other calls take other connections: `give_back` before a call that has to go over this one.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self._connection: Any = None
        self._pid = 0
        self._used_at = 0.0

    def call(self, words: Sequence[Word | Packed]) -> Any:
        """Send one command and return its reply, as the server gave it. Raises what redis-py raises."""
        connection = self._taken()
        try:
            connection.send_packed_command([pack(words)], check_health=False)
            reply = connection.read_response()
        except redis.ResponseError:
            raise  # the reply has been read
        except BaseException:
            self.close()  # what is still unread belongs to nobody
            raise
        self._used_at = time.monotonic()
        return reply

    def give_back(self) -> None:
        """Let the pool have the connection; the next call takes one again."""
        connection, self._connection = self._connection, None
        if connection is not None and self._pid == os.getpid():
            self.client.connection_pool.release(connection)

    def close(self) -> None:
        """Close the connection. The next call makes one anew."""
        connection = self._connection
        if connection is not None and self._pid == os.getpid():
            connection.disconnect()
        self.give_back()

    def _taken(self) -> Any:
        if self._connection is not None and self._pid != os.getpid():
            self._connection = None  # the parent's; this process must not speak on it
        if self._connection is None:
            self._pid = os.getpid()
            self._connection = self.client.connection_pool.get_connection()
        elif time.monotonic() - self._used_at > LOOK_AFTER_S:
            self.give_back()  # the pool looks
            self._connection = self.client.connection_pool.get_connection()
        return self._connection


def pack(words: Sequence[Word | Packed]) -> bytes:
    """A command in the server's protocol."""
    parts = [b""]
    count = len(words)
    for word in words:
        if type(word) is Packed:
            count += word.words - 1
            parts.append(word.raw)
            continue
        raw = word if type(word) is bytes else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    parts[0] = b"*%d\r\n" % count
    return b"".join(parts)


def entries_of(reply: Any) -> list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]:
    """XREAD's bare reply in the form that redis-py makes of it."""
    return [
        (key, [(entry_id, dict(zip(flat[::2], flat[1::2], strict=True)) if flat else {}) for entry_id, flat in found])
        for key, found in reply or ()
    ]
