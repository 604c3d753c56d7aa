"""Who this publisher is to the others: its name, its epoch, its heartbeat. Used by the drain thread alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from kvbus.errors import BusError, BusFull
from kvbus.metrics import Counters, RateLimitedLog
from kvbus.settings import Settings
from publisher.bus import EventBus
from publisher.spool import Spool

_log = logging.getLogger(__name__)

Snapshot = Callable[[], Mapping[str, int | float]]


class Presence:
    """Registration and heartbeat of one publisher. epoch: 0 until there is one."""

    def __init__(self, settings: Settings, name: str, bus: EventBus, counters: Counters, snapshot: Snapshot) -> None:
        self._settings = settings
        self._name = name
        self._bus = bus
        self._counters = counters
        self._snapshot = snapshot
        self._warn = RateLimitedLog(_log)
        self._spool: Spool | None = None
        self._noted_epoch = 0  # the highest one in the spool before this process came
        self._attempted_epoch = 0
        self._beat_at = self._stats_at = 0.0
        self._told_seq = -1
        self.epoch = 0
        self.registered = False

    def use_spool(self, spool: Spool) -> None:
        self._spool = spool
        self._noted_epoch = spool.last_epoch

    def begin_unregistered(self) -> None:
        """Have an epoch, to spool under, before the server could be asked for one."""
        if not self.epoch:
            self._begin(self._first_epoch())

    def register(self, next_seq: int) -> None:
        """Take the name and begin an epoch above all earlier ones; `epoch` may change. Raises BusError."""
        self._bus.claim()
        previous = self._bus.registered_epoch()
        if previous == 0 or previous != self._attempted_epoch:  # else the reply to our own registration was lost
            self._begin(self._choose(previous))
            self._attempted_epoch = self.epoch
            granted = self._bus.register(self.epoch, next_seq)
            if granted != self.epoch:  # somebody registered in between, without a claim; the next round sees it
                self._attempted_epoch = 0
                raise BusError(f"publisher {self._name}: epoch {self.epoch} was asked for, {granted} given")
        self.registered = True
        self._beat_at = self._stats_at = 0.0
        _log.info("publisher %s registered, epoch %d", self._name, self.epoch)

    def beat(self, next_seq: int) -> None:
        """Whatever is due: heartbeat, counters, a look at the others. Raises BusError."""
        now = time.monotonic()
        if now >= self._beat_at:
            try:
                if next_seq == self._told_seq and now < self._stats_at:
                    self._bus.claim()  # nothing to tell but that we live
                else:
                    self._bus.beat(self.epoch, next_seq)
                    self._told_seq = next_seq
            except BusFull:
                self._counters.add("heartbeats_refused")
            self._beat_at = now + self._settings.heartbeat_ms / 1000
        if now >= self._stats_at:
            self._stats_at = now + self._settings.stats_ms / 1000
            try:
                self._bus.write_stats(self._snapshot())
            except BusFull:
                self._counters.add("stats_refused")
            self._look_around()

    def next_beat_in(self) -> float:
        """Seconds until `beat` has something to do."""
        return max(0.0, min(self._beat_at, self._stats_at) - time.monotonic())

    def sign_off(self, next_seq: int) -> None:
        """Leave the last numbers, and give the name back. Raises BusError."""
        self._bus.write_stats(self._snapshot())
        self._bus.retire(self.epoch, next_seq)

    def _first_epoch(self) -> int:
        return max(self._bus.now_ms(), self._noted_epoch + 1)

    def _choose(self, previous: int) -> int:
        """This process's epoch. `previous` is the one registered last.

        Spooled events keep the epoch that they were spooled under, unless readers have meanwhile seen a higher one
        that this spool knows nothing of (the name was used on another machine, or a clock ran behind): under their
        old one they would be taken for repeats.
        """
        own = self.epoch or self._first_epoch()
        spool = self._spool
        if spool is not None and not spool.empty and previous > self._noted_epoch:
            return spool.rename_epochs(own, previous)
        return max(own, previous + 1)

    def _begin(self, epoch: int) -> None:
        if epoch == self.epoch:
            return
        if self._spool is not None:
            try:
                self._spool.note_epoch(epoch)
            except OSError as error:  # needed only when the next life begins without a server
                self._counters.add("spool_errors")
                self._warn.error("spool", "spool %s: epoch %d: %s", self._spool.directory, epoch, error)
        self.epoch = epoch
        self._counters.set("epoch", epoch)

    def _look_around(self) -> None:
        """What makes all events useless, or loses them later, is told loudly and again."""
        others = self._bus.other_fingerprints()
        self._counters.set("fingerprint_mismatches", len(others))
        if others:
            worker, fingerprint = min(others.items())
            self._warn.error(
                "fingerprint",
                "publisher %s hashes as %s, worker %s as %s (%d workers differ): no chunk can ever match; "
                "give all processes the same chunk size, hash algorithm and PYTHONHASHSEED",
                *(self._name, self._bus.hash_fingerprint, worker, fingerprint, len(others)),
            )
        if policy := self._bus.risky_eviction():
            self._warn.warning(
                "eviction", "the server's maxmemory-policy %s may remove whole streams; noeviction is safe", policy
            )
