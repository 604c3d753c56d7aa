"""Appending to streams, and reading pieces of them. Streams are capped by bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import redis

from kvbus.protocol.codec import Fields
from kvbus.streams.connection import Bus, Client, bus_errors
from kvbus.streams.packed import add_packed, can_pack

Entry = tuple[str, Fields]
"""(entry id, fields)"""

_MEASURE_EVERY_S = 10.0
_SMALLEST_MAXLEN = 64


class StreamState(msgspec.Struct, frozen=True):
    """What the server says of a stream. All zero when it does not exist."""

    length: int = 0
    first_id: str = "0-0"
    last_id: str = "0-0"
    """The last id ever given, which may be that of an entry since deleted."""
    entries_added: int = 0
    last_deleted_id: str = "0-0"
    """The highest id that was deleted one by one (XDEL); trimming does not move it."""

    @property
    def removed(self) -> int:
        """Entries that were trimmed or deleted."""
        return self.entries_added - self.length


class StreamCap:
    """Turns a cap in bytes into a length, from the bytes that the server really spends on an entry.

    Measured anew every 10 s, or after an eighth of the cap has been written: a burst of large entries is seen.
    """

    def __init__(self, key: str, cap_bytes: int) -> None:
        self.key = key
        self.cap_bytes = cap_bytes
        self._lock = threading.Lock()
        self._maxlen: int | None = None
        self._measured_at = float("-inf")
        self._written = 0

    def maxlen(self, client: Client, about_to_write: int) -> int | None:
        """The MAXLEN for the next append; None while the stream is empty. Raises BusError."""
        with self._lock:
            self._written += about_to_write
            old = time.monotonic() - self._measured_at > _MEASURE_EVERY_S
            if not old and self._written < self.cap_bytes / 8:
                return self._maxlen
            self._written = 0
            self._measured_at = time.monotonic()
        with bus_errors(f"measure {self.key}"):
            length = client.xlen(self.key)
            if length:
                per_entry = self._bytes_per_entry(client, length)
                # A short stream's fixed cost counts less the longer it grows; the measure is renewed as it does.
                self._maxlen = max(_SMALLEST_MAXLEN, int(self.cap_bytes / per_entry))
        return self._maxlen

    def _bytes_per_entry(self, client: Client, length: int) -> float:
        try:
            used = client.memory_usage(self.key)
            if used:
                return float(used) / length
        except redis.ResponseError as error:  # no such command (fakeredis), or not allowed to this user
            if not _no_memory_usage(error):
                raise
        newest = client.xrevrange(self.key, count=16)
        return sum(_size(fields) for _, fields in newest) / max(1, len(newest)) + 16


class Log:
    """The four streams of a namespace, for writing and for looking into. Safe for threads."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        keys, settings = bus.keys, bus.settings
        self.caps = {key: StreamCap(key, getattr(settings, f"{name}_cap_bytes")) for name, key in keys.streams.items()}

    def maxlen(self, key: str, about_to_write: int = 0) -> int:
        """The cap in entries for the next append, 0 for none. Raises BusError."""
        cap = self.caps.get(key)
        return (cap.maxlen(self.bus.client, about_to_write) or 0) if cap else 0

    def append(self, key: str, fields: Fields) -> str:
        """Append one entry and return its id. Raises BusError; after BusUnavailable it may have been written."""
        maxlen = self.maxlen(key, _size(fields))
        with bus_errors(f"XADD {key}"):
            entry_id: bytes = self.bus.client.xadd(key, fields, maxlen=maxlen or None, approximate=True)
        return entry_id.decode()

    def append_batch(
        self, key: str, batch: Sequence[Fields], *, meanwhile: Callable[[], None] | None = None
    ) -> list[str]:
        """Append all or none, in order, in one MULTI. Raises BusError; after BusUnavailable all may be written.

        meanwhile: work to do while the server does its own; may go uncalled, and must not use this bus.
        """
        if not batch:
            return []
        maxlen = self.maxlen(key, sum(map(_size, batch)))
        with bus_errors(f"XADD {key} x {len(batch)}"):
            client = self.bus.client
            if can_pack(client):
                replies = add_packed(client, key, batch, maxlen, meanwhile)
            else:
                pipe = client.pipeline(transaction=True)
                for fields in batch:
                    pipe.xadd(key, fields, maxlen=maxlen or None, approximate=True)
                replies = pipe.execute()
        return [reply.decode() for reply in replies]

    def state(self, key: str, client: Client | None = None) -> StreamState:
        """Raises BusError."""
        return stream_state(client or self.bus.client, key)

    def get(self, key: str, entry_id: str) -> Fields | None:
        """One entry's fields, or None. Raises BusError."""
        with bus_errors(f"XRANGE {key}"):
            found = self.bus.client.xrange(key, entry_id, entry_id, count=1)
        return found[0][1] if found else None

    def scan(self, key: str, start: str = "-", end: str = "+", *, page: int = 64) -> Iterator[Entry]:
        """Entries from the oldest to the newest, a page at a time, so that memory stays flat. Raises BusError."""
        while True:
            with bus_errors(f"XRANGE {key}"):
                found = self.bus.client.xrange(key, start, end, count=page)
            yield from ((entry_id.decode(), fields) for entry_id, fields in found)
            if len(found) < page:
                return
            start = f"({found[-1][0].decode()}"

    def scan_back(self, key: str, start: str = "+", end: str = "-", *, page: int = 64) -> Iterator[Entry]:
        """Entries from the newest to the oldest. Raises BusError."""
        while True:
            with bus_errors(f"XREVRANGE {key}"):
                found = self.bus.client.xrevrange(key, start, end, count=page)
            yield from ((entry_id.decode(), fields) for entry_id, fields in found)
            if len(found) < page:
                return
            start = f"({found[-1][0].decode()}"


def stream_state(client: Client, key: str) -> StreamState:
    """XINFO STREAM, typed. Raises BusError."""
    with bus_errors(f"XINFO STREAM {key}"):
        try:
            return parse_state(client.xinfo_stream(key))
        except redis.ResponseError as error:
            return parse_state(error)


def parse_state(info: Mapping[str, Any] | list[Any] | Exception) -> StreamState:
    """XINFO STREAM's answer, typed; a stream that does not exist is an empty one."""
    if isinstance(info, Exception):
        if "no such key" in str(info).lower():
            return StreamState()
        raise info
    if isinstance(info, list):
        info = {_text(name): value for name, value in pairs(info).items()}
    first = info.get("first-entry")
    return StreamState(
        length=info["length"],
        first_id=first[0].decode() if first else "0-0",
        last_id=_text(info["last-generated-id"]),
        entries_added=info["entries-added"],
        last_deleted_id=_text(info.get("max-deleted-entry-id", "0-0")),
    )


def pairs(raw: Mapping[bytes, Any] | list[Any]) -> dict[bytes, Any]:
    """A map as it is, or from the flat list that redis-py 8.1 leaves of one in a MULTI on a cluster."""
    return dict(zip(raw[::2], raw[1::2], strict=True)) if isinstance(raw, list) else dict(raw)


def _no_memory_usage(error: redis.ResponseError) -> bool:
    return isinstance(error, redis.exceptions.NoPermissionError) or "unknown" in str(error).lower()


def _size(fields: Fields) -> int:
    return sum(map(len, fields.values())) + 32 * len(fields)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
