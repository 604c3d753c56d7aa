"""Counts results on the stream itself, by a reader of its own: what was lost, what came twice."""

from __future__ import annotations

import threading
import time
from collections import Counter

import msgspec

from kvbus.errors import BusError, ProtocolError
from kvbus.protocol import Results, Status, decode_entry
from kvbus.streams.connection import Bus
from kvbus.streams.subscription import Subscription


class Counted(msgspec.Struct, frozen=True):
    """finals: final results seen. pairs: distinct (command, worker) among them. duplicates: the difference.

    carried_out: command id to how many workers carried it out, not counting those that rejected it.
    """

    finals: int
    pairs: int
    statuses: dict[str, int]
    carried_out: dict[str, int]

    @property
    def duplicates(self) -> int:
        return self.finals - self.pairs

    def carried_out_by(self, workers: int) -> int:
        """Commands that so many workers carried out."""
        return sum(number == workers for number in self.carried_out.values())


class Census:
    """Reads the results stream from now on, in a thread of its own, until `count`."""

    def __init__(self, bus: Bus) -> None:
        self._subscription = Subscription.from_end(bus, bus.keys.results)
        self._pairs: set[tuple[str, str]] = set()
        self._finals = 0
        self._statuses: Counter[str] = Counter()
        self._carried_out: Counter[str] = Counter()
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
        return Counted(self._finals, len(self._pairs), dict(self._statuses), dict(self._carried_out))

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
                try:
                    message = decode_entry(entry_id, fields).message
                except ProtocolError:
                    continue
                if not isinstance(message, Results):
                    continue
                for result in message.results:
                    self._statuses[result.status.value] += 1
                    if result.status.final:
                        self._finals += 1
                        new = (result.command_id, message.worker) not in self._pairs
                        self._pairs.add((result.command_id, message.worker))
                        self._carried_out[result.command_id] += new and result.status is not Status.REJECTED
