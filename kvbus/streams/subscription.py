"""Reading one stream from an own cursor with XREAD: nothing skipped silently, nothing taken from other readers."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import redis

from kvbus.errors import BusUnavailable
from kvbus.protocol.codec import Fields
from kvbus.streams.connection import Bus, Client, bus_errors
from kvbus.streams.line import Line, can_hold, entries_of
from kvbus.streams.log import Entry, StreamState, pairs, parse_state, stream_state
from kvbus.streams.position import UNKNOWN, Gap, GapKind, Position, after_gap, at_end, at_start, find_gap, id_key

BATCH = 64
"""Entries a read: bodies may have 1.5 MiB, and large reads by slow readers make the server grow."""
CHECK_EVERY_S = 1.0
"""How often a reader compares its place with the server's counters while entries come."""
CHECK_IDLE_S = 5.0
"""The same while none come: a blocked read misses nothing, so this only finds a server that has changed."""
ROLE_EVERY_S = 5.0


class Batch(msgspec.Struct, frozen=True):
    """What one read brought. gap: what was found missing before these entries."""

    entries: list[Entry]
    gap: Gap | None = None


def message_id(entry_id: str, fields: Fields) -> str:
    """The message id as far as it can be read without decoding: the `id` field, else the entry's own id."""
    raw = fields.get(b"id")
    return raw.decode("utf-8", "backslashreplace")[:1024] if raw else entry_id


class Subscription:
    """One reader of one stream. Owned by one thread; after a BusError the next read connects anew and checks.

    position: where to go on; `from_start`, `from_end` make one. The cursor moves as entries are handed out.
    """

    def __init__(self, bus: Bus, key: str, position: Position) -> None:
        self.bus = bus
        self.key = key
        self.position = position
        self._client: Client | None = None
        self._line: Line | None = None
        self._checked_at = float("-inf")
        self._role_at = float("-inf")
        self._busy = False
        self._interrupted = False

    @classmethod
    def from_end(cls, bus: Bus, key: str) -> Subscription:
        """Only what comes after this call. Raises BusError."""
        # `$` inside a loop would lose what is added while reconnecting; it is resolved here, once.
        return cls(bus, key, end_position(bus, key))

    @classmethod
    def from_start(cls, bus: Bus, key: str) -> Subscription:
        """All that the stream still holds. Raises BusError."""
        return cls(bus, key, at_start(stream_state(bus.client, key)))

    @classmethod
    def from_id(cls, bus: Bus, key: str, entry_id: str) -> Subscription:
        """All behind the entry with this id, which need not exist. Raises BusError."""
        return cls(bus, key, position_at(bus, key, entry_id))

    def read(self, *, block_ms: int | None = None, count: int = BATCH) -> Batch:
        """The next entries, waiting up to block_ms (0: not at all; None: the setting). Raises BusError."""
        try:
            if self._interrupted:
                raise BusUnavailable(f"XREAD {self.key}: interrupted")
            due = CHECK_EVERY_S if self._busy else CHECK_IDLE_S
            gap = self._check() if time.monotonic() - self._checked_at >= due else None
            if gap is not None:
                return Batch([], gap)
            wait = self.bus.settings.block_ms if block_ms is None else block_ms
            with bus_errors(f"XREAD {self.key}"):
                reply = self._xread(count, wait)
        except BaseException as error:
            self.disconnect()
            interrupted, self._interrupted = self._interrupted, False
            # What redis-py raises when its socket is taken away is whatever it was about to do with it.
            if interrupted and isinstance(error, Exception):
                raise BusUnavailable(f"XREAD {self.key}: interrupted") from error
            raise
        return self.accept(reply)

    def accept(self, reply: list[tuple[bytes, list[tuple[bytes, Fields]]]]) -> Batch:
        """Take in what XREAD answered, here or at the end of a caller's own pipeline."""
        entries: list[Entry] = []
        last = id_key(self.position.cursor)
        for _, found in reply or ():
            for raw_id, fields in found:
                entry_id = raw_id.decode()
                if id_key(entry_id) <= last:
                    # After FLUSHALL a blocked XREAD gets the next entry whatever its id: another history.
                    self._checked_at = float("-inf")
                    return Batch([])
                entries.append((entry_id, fields or {}))
        self._busy = bool(entries)
        if entries:
            newest, fields = entries[-1]
            self.position = self.position.advance(newest, message_id(newest, fields), len(entries))
        return Batch(entries)

    def check_now(self) -> None:
        """Compare with the server's counters before the next read."""
        self._checked_at = float("-inf")

    def disconnect(self) -> None:
        """Drop the connection; the next read makes a new one and checks the place first."""
        client, self._client, self._line = self._client, None, None
        self.check_now()
        if client is not None:
            self.bus.discard(client)

    def interrupt(self) -> None:
        """From another thread: the read that waits, or else the next one, fails at once with BusUnavailable."""
        self._interrupted = True
        client = self._client
        if client is not None:
            self.bus.interrupt(client)

    def _connected(self) -> Client:
        if self._client is None:
            self._client = self.bus.blocking_client()
            self._line = Line(self._client) if can_hold(self._client) else None
        return self._client

    def _xread(self, count: int, wait_ms: int) -> list[tuple[bytes, list[tuple[bytes, Fields]]]]:
        client = self._connected()
        if self._line is None:
            found: list[tuple[bytes, list[tuple[bytes, Fields]]]] = client.xread(
                {self.key: self.position.cursor}, count=count, block=wait_ms or None
            )
            return found
        block = ("BLOCK", wait_ms) if wait_ms else ()
        words = ("XREAD", "COUNT", count, *block, "STREAMS", self.key, self.position.cursor)
        return entries_of(self._line.call(words))

    def _check(self) -> Gap | None:
        client = self._connected()
        if self._line is not None:
            self._line.give_back()  # what is asked here has to be asked where is read: the pool has no other
        if time.monotonic() - self._role_at >= ROLE_EVERY_S:
            self.bus.check_role(client)
            self._role_at = time.monotonic()
        state, at_cursor = look(client, self.key, self.position.cursor)
        gap = find_gap(self.position, state, at_cursor)
        if gap is not None:
            self.position = after_gap(self.position, state, gap)
            # entries of a new history have been read already if XREAD was quicker than this check: readers know
            # them by message id, and skipping them here could lose the ones in between.
        elif gap is None and id_key(self.position.cursor) == id_key(state.last_id):
            self.position = msgspec.structs.replace(self.position, entries=state.entries_added)
        self._checked_at = time.monotonic()
        return gap


def look(client: Client, key: str, cursor: str) -> tuple[StreamState, str | None]:
    """The stream's state, and the message id at the cursor, at one moment. Raises BusError."""
    with bus_errors(f"XINFO STREAM {key}"):
        try:
            info, found = _look(client, key, cursor, together=True)
        except redis.exceptions.OutOfMemoryError:
            # At maxmemory Redis 7.0 lets nothing into a MULTI, not even reads; but then nobody appends in between.
            info, found = _look(client, key, cursor, together=False)
        state = parse_state(info)
        if isinstance(found, Exception):
            raise found
    return state, message_id(found[0][0].decode(), pairs(found[0][1])) if found else None


def _look(client: Client, key: str, cursor: str, *, together: bool) -> list[Any]:
    pipe = client.pipeline(transaction=together)
    pipe.xinfo_stream(key)
    pipe.xrange(key, cursor, cursor, count=1)
    answers: list[Any] = pipe.execute(raise_on_error=False)
    return answers


def end_position(bus: Bus, key: str) -> Position:
    """The place behind the newest entry. Raises BusError."""
    state = stream_state(bus.client, key)
    with bus_errors(f"XRANGE {key}"):
        found = bus.client.xrange(key, state.last_id, state.last_id, count=1) if state.length else []
    return at_end(state, message_id(state.last_id, found[0][1]) if found else "")


def position_at(bus: Bus, key: str, entry_id: str) -> Position:
    """The place at an entry id that was not reached by reading: what came before it is not counted. Raises BusError."""
    state, at_cursor = look(bus.client, key, entry_id)
    if id_key(entry_id) >= id_key(state.last_id):
        return end_position(bus, key)
    # How many were added up to here is not known; the counters are taken over at the end of the stream.
    return Position(entry_id, at_cursor or "", UNKNOWN)


def is_new_history(gap: Gap | None) -> bool:
    return gap is not None and gap.kind is GapKind.HISTORY_LOST
