"""Counts results on the stream itself, by a reader of its own: what was lost, what came twice."""

from __future__ import annotations

import threading
import time
from collections import Counter

import msgspec

from kvbus.errors import BusError
from kvbus.protocol import Results, decode_entry
from kvbus.streams.connection import Bus
from kvbus.streams.subscription import Subscription


class Counted(msgspec.Struct, frozen=True):
    """finals: final results seen. pairs: distinct (command, worker) among them. duplicates: the difference."""

    finals: int
    pairs: int
    statuses: dict[str, int]

    @property
    def duplicates(self) -> int:
        return self.finals - self.pairs


class Census:
    """Reads the results stream from now on, in a thread of its own, until `count`."""

    def __init__(self, bus: Bus) -> None:
        self._subscription = Subscription.from_end(bus, bus.keys.results)
        self._pairs: set[tuple[str, str]] = set()
        self._finals = 0
        self._statuses: Counter[str] = Counter()
        self._seen: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="census", daemon=True)
        self._thread.start()

    def count(self, *, until: int, timeout_s: float) -> Counted:
        """The counts once `until` pairs were seen, or when the time is over; a moment more to catch late repeats."""
        deadline = time.monotonic() + timeout_s
        while len(self._pairs) < until and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.0)
        self._stop.set()
        self._subscription.interrupt()
        self._thread.join(10)
        return Counted(self._finals, len(self._pairs), dict(self._statuses))

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                entries = self._subscription.read(block_ms=500, count=256).entries
            except BusError:
                self._stop.wait(0.05)
                continue
            for entry_id, fields in entries:
                if entry_id in self._seen:
                    continue  # read again after a reconnect
                self._seen.add(entry_id)
                message = decode_entry(entry_id, fields).message
                if not isinstance(message, Results):
                    continue
                for result in message.results:
                    self._statuses[result.status.value] += 1
                    if result.status.final:
                        self._finals += 1
                        self._pairs.add((result.command_id, message.worker))
