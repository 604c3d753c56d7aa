"""The bounded buffer between the thread that finishes requests and the thread that talks to the server."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from kvbus.protocol.limits import MAX_CONTEXT_BYTES
from publisher.finished import FinishedRequest

# What CPython 3.11 spends, measured: an integer of 64 bits takes 48 bytes, a place in a tuple or list 8 more.
_BYTES_EVENT = 800
_BYTES_HASH = 56
_BYTES_TOKEN = 40


class Waiting(msgspec.Struct, frozen=True):
    """An accepted request. seq: its number within the epoch. at: time.monotonic() when it came. size: bytes held."""

    seq: int
    at: float
    finished: FinishedRequest
    size: int


class Buffer:
    """First in, first out, bounded by events and by bytes; the newest is refused when it is full.

    `put` may be called by any thread and never waits for the reader: the reader shares no lock with it. All else is
    for the one reader.
    """

    def __init__(self, max_events: int, max_bytes: int) -> None:
        self.max_events = max_events
        self.max_bytes = max_bytes
        self._queue: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        # Only among writers, held for a few hundred nanoseconds: numbers and places must agree.
        self._lock = threading.Lock()
        self._closed = False
        self._added = self._added_bytes = 0  # written under the lock
        self._taken = self._taken_bytes = 0  # written by the reader alone
        self.next_seq = 0
        self.dropped_full = 0
        self.dropped_closed = 0

    def put(self, finished: FinishedRequest) -> bool:
        """Take it, or refuse it. A refused one has used up its number, so that readers of the stream see a hole."""
        size = _size_of(finished)
        at = time.monotonic()
        with self._lock:
            if self._closed:
                self.dropped_closed += 1
                return False
            seq = self.next_seq
            self.next_seq = seq + 1
            if (
                self._added - self._taken >= self.max_events
                or self._added_bytes - self._taken_bytes + size > self.max_bytes
            ):
                self.dropped_full += 1
                return False
            self._added += 1
            self._added_bytes += size
            self._queue.put(Waiting(seq, at, finished, size))
        return True

    def take(self, limit: int, timeout_s: float = 0.0, linger_s: float = 0.0) -> list[Waiting]:
        """Up to `limit` events, oldest first.

        Waits up to timeout_s for the first; then linger_s for more, so that a busy writer is not met by a reader
        that wakes for each event.
        """
        found: list[Waiting] = []
        try:
            first = self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
            if first is None:  # a wake-up
                return found
            found.append(first)
            if linger_s > 0 and self._queue.qsize() < limit - 1:
                time.sleep(linger_s)
            while len(found) < limit:
                item = self._queue.get_nowait()
                if item is not None:
                    found.append(item)
        except queue.Empty:
            pass
        self._taken += len(found)
        self._taken_bytes += sum(item.size for item in found)
        return found

    def wake(self) -> None:
        """Make a `take` that waits return."""
        self._queue.put(None)

    def close(self) -> None:
        """Refuse whatever comes from now on."""
        with self._lock:
            self._closed = True

    def forget_in_child(self) -> None:
        """After a fork: what is here is the parent's, and its lock may be held by a thread that the child has not."""
        self._lock = threading.Lock()
        self._queue = queue.SimpleQueue()
        self._added = self._added_bytes = self._taken = self._taken_bytes = 0
        self._closed = True

    def __len__(self) -> int:
        return self._added - self._taken

    @property
    def accepted(self) -> int:
        """Events taken since the start."""
        return self._added

    @property
    def nbytes(self) -> int:
        return self._added_bytes - self._taken_bytes


def _size_of(finished: FinishedRequest) -> int:
    size = _BYTES_EVENT + len(finished.request_id)
    if finished.chunk_hashes is not None:
        size += _BYTES_HASH * len(finished.chunk_hashes)
    else:  # the callable holds the tokens
        size += _BYTES_TOKEN * (finished.prompt_tokens + finished.output_tokens)
    context = finished.context
    if context:
        for value in context.values():
            if type(value) is not str:
                return size + _size_of_context(context)
            size += 120 + len(value)
    return size


def _size_of_context(context: Mapping[str, Any]) -> int:
    """Roughly the bytes that a caller's map holds. Looks no further than a map that is within the protocol's limit
    can reach: a larger one is left out before long."""
    size = 0
    nodes = 0
    todo: list[Any] = [context]
    while todo and nodes <= MAX_CONTEXT_BYTES:
        value = todo.pop()
        nodes += 1
        if isinstance(value, str | bytes):
            size += 60 + len(value)
        elif isinstance(value, Mapping):
            size += 240 + 60 * len(value)
            todo.extend(value.values())
        elif isinstance(value, list | tuple):
            size += 60 + 8 * len(value)
            todo.extend(value)
        else:
            size += 32
    return size
