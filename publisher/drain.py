"""The thread that brings events from the buffer to the server, by way of the spool while the server is away.

Order: what the spool holds is older than what is `ready` here, and that is older than what the buffer holds. One
batch is in flight; after any failure the same events are sent again before younger ones, with the same message ids,
for a lost reply does not tell whether they were written. Readers drop what repeats by (publisher, epoch, seq).
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from pathlib import Path

from kvbus.errors import BusError, KVBusError, ProtocolError
from kvbus.metrics import Counters, RateLimitedLog
from kvbus.settings import Settings
from publisher.buffer import Buffer, Waiting
from publisher.bus import EventBus
from publisher.encode import Record, encode, with_epoch
from publisher.presence import Presence, Snapshot
from publisher.spool import Spool, SpoolBusy

_log = logging.getLogger(__name__)

MAX_BATCH_BYTES = 4 << 20
"""Bodies of one batch: what the server must hold for one MULTI."""
_LINGER_S = 0.002
_SPILL_EVERY_S = 0.05
_BACKOFF_S = (0.05, 2.0)
_SPOOL_TRIES = 5


class Drain:
    """Owns the thread, the connection and the spool. `start` once, `stop` once."""

    def __init__(
        self,
        settings: Settings,
        name: str,
        buffer: Buffer,
        bus: EventBus,
        counters: Counters,
        snapshot: Snapshot,
        spool_path: Path | None,
    ) -> None:
        self._settings = settings
        self._name = name
        self._buffer = buffer
        self._bus = bus
        self._counters = counters
        self._presence = Presence(settings, name, bus, counters, snapshot)
        self._warn = RateLimitedLog(_log)
        self._spool_path = spool_path
        self._spool: Spool | None = None
        self._spool_tries = 0
        self._waiting: deque[Waiting] = deque()  # taken from the buffer, not yet encoded
        self._ready: deque[Record] = deque()
        self._in_flight: list[Record] = []  # sent, with an outcome that is not known
        self._failures = 0
        self._failures_at_stop: int | None = None
        self._retry_at = 0.0
        self._stopping = threading.Event()
        self._interrupted = False
        self._deadline = self._last_try = float("inf")
        self._thread = threading.Thread(target=self._run, name="kvbus-publisher", daemon=True)
        self.delivered_all = False

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Flush, within timeout_s. True if the thread has ended."""
        if not self._thread.ident:
            self._counters.add("events_dropped_at_close", len(self._buffer))
            self.delivered_all = not len(self._buffer)
            return True
        # What is left after the flush (a last spill, closing files) gets a tenth of the time. No attempt to connect,
        # which nothing can cut short, is begun that could outlast the flush.
        self._deadline = time.monotonic() + 0.9 * timeout_s
        self._last_try = self._deadline - min(self._settings.connect_timeout_ms / 1000, 0.45 * timeout_s)
        self._stopping.set()
        self._buffer.wake()
        self._thread.join(0.9 * timeout_s)
        if self._thread.is_alive():
            self._interrupted = True
            self._bus.interrupt()
            self._thread.join(max(0.1 * timeout_s, 0.2))
        return not self._thread.is_alive()

    def forget_in_child(self) -> None:
        """After a fork: close this process's copies of the spool's files. The thread does not exist here."""
        if self._spool is not None:
            self._spool.close()

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._done():
                try:
                    self._step()
                except KVBusError as error:
                    self._failed(error)
                except Exception as error:  # noqa: BLE001
                    if self._interrupted:  # a client whose socket is closed under it may raise anything
                        break
                    # A guest must not die of a fault of its own and leave the host's events to fill the buffer.
                    if not self._failures:
                        _log.exception("the publisher's thread met an error that it does not know, and tries again")
                    self._failed(error)
            self._finish()
        finally:
            self._bus.close()
            if self._spool is not None:
                self._spool.close()

    def _done(self) -> bool:
        if not self._stopping.is_set():
            return False
        if self._failures_at_stop is None:
            self._failures_at_stop = self._failures
            self._retry_at = 0.0  # a last try at once: the server may be back
        now = time.monotonic()
        if now >= self._deadline or (self._failures and now >= self._last_try):
            return True
        in_memory = len(self._buffer) + len(self._waiting) + len(self._ready)
        if in_memory:
            return False
        # What is on disk is safe: it is worth the time only while the server takes it.
        return self._spool is None or self._spool.empty or self._failures > self._failures_at_stop

    def _step(self) -> None:
        if self._spool_path is not None and self._spool is None and not self._open_spool():
            self._rest(min(1.0, self._retry_in() or 1.0))
            return
        if (wait := self._retry_in()) > 0:
            if self._spool is None:
                self._rest(wait)
            else:
                self._spill(wait)
            return
        if not self._presence.registered:
            self._presence.register(self._buffer.next_seq)
            if self._ready and self._ready[0].epoch != self._presence.epoch:
                self._ready = deque(with_epoch(record, self._presence.epoch) for record in self._ready)
        self._presence.beat(self._buffer.next_seq)
        if self._spool is not None and not self._spool.empty:
            self._spill(0)  # behind the older ones
            self._send(self._spool.peek(self._settings.batch_events, MAX_BATCH_BYTES), self._spool)
        else:
            self._fill(self._presence.next_beat_in(), _LINGER_S)
            if not self._ready:
                self._recovered()  # nothing to send, and the heartbeat went through
            self._send(self._batch(), None)

    # --- sending

    def _send(self, batch: list[Record], spool: Spool | None) -> None:
        if not batch:
            if spool is not None:
                self._tell_spool(spool)  # nothing of what was left could be read
            return
        self._in_flight = batch
        self._bus.append([record.fields(self._name) for record in batch], self._encode_more)
        self._in_flight = []
        if spool is not None:
            spool.ack()
            self._tell_spool(spool)  # also when it is empty now, and nothing spills any more
            self._counters.add("events_replayed", len(batch))
        else:
            for _ in batch:
                self._ready.popleft()
        self._counters.add("events_sent", len(batch))
        self._counters.add("batches")
        self._recovered()

    def _batch(self) -> list[Record]:
        """What is ready, as far as one batch holds it."""
        batch: list[Record] = []
        size = 0
        for record in self._ready:
            size += len(record.body)
            if batch and (size > MAX_BATCH_BYTES or len(batch) >= self._settings.batch_events):
                break
            batch.append(record)
        return batch

    def _fill(self, timeout_s: float, linger_s: float) -> None:
        """Take from the buffer and encode, unless something is ready already."""
        if self._ready:
            return
        if not self._waiting:
            if self._stopping.is_set():
                timeout_s = linger_s = 0.0
            self._waiting.extend(self._buffer.take(self._settings.batch_events, timeout_s, linger_s))
        self._encode_waiting()

    def _encode_more(self) -> None:
        """The next batch, while the server writes this one. Not behind the spool: there it would stay in memory."""
        if self._spool is None or self._spool.empty:
            if not self._waiting:
                self._waiting.extend(self._buffer.take(self._settings.batch_events))
            self._encode_waiting()

    def _encode_waiting(self) -> None:
        size = 0
        clock_ms = self._bus.now_ms() - time.monotonic() * 1000
        while self._waiting and size < MAX_BATCH_BYTES and time.monotonic() < self._deadline:
            record = self._encode(self._waiting[0], clock_ms)
            self._waiting.popleft()
            if record is not None:
                self._ready.append(record)
                size += len(record.body)

    def _encode(self, item: Waiting, clock_ms: float) -> Record | None:
        """None for an event that cannot go on the bus: counted, and readers see the hole.

        clock_ms: what makes server time of this process's monotonic one.
        """
        finished = item.finished
        hashes = finished.chunk_hashes
        if hashes is None:
            try:
                hashes = tuple(finished.hashes_later()) if finished.hashes_later is not None else ()
            except Exception as error:  # noqa: BLE001
                # The caller's code may raise anything; that the request has finished is still worth telling.
                self._counters.add("hashes_failed")
                self._warn.error(
                    "hashes", "request %.100s: no hashes, for making them failed: %r", finished.request_id, error
                )
                hashes = ()
        try:
            record, mended = encode(
                finished,
                hashes,
                publisher=self._name,
                epoch=self._presence.epoch,
                seq=item.seq,
                finished_at_ms=max(0, int(clock_ms + item.at * 1000)),
            )
        except (ProtocolError, TypeError, ValueError) as error:
            self._counters.add("events_dropped_invalid")
            self._warn.error("invalid", "request %.100s cannot be published: %s", finished.request_id, error)
            return None
        if mended:
            self._counters.add("events_mended")
            self._warn.warning(
                "mended", "request %.100s: %s left out or cut to fit", finished.request_id, ", ".join(mended)
            )
        return record

    # --- trouble

    def _retry_in(self) -> float:
        return max(0.0, self._retry_at - time.monotonic()) if self._failures else 0.0

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        code = getattr(error, "code", "unexpected")
        self._counters.add("retries")
        self._counters.add(f"errors_{code}")
        self._counters.set("connected", 0)
        if code in ("fenced", "history_lost"):
            self._presence.registered = False
        if code == "bus_unavailable":
            # A server that answers, but is no master any more, would keep this connection for ever.
            self._bus.close()
        shortest, longest = _BACKOFF_S
        delay = min(longest, shortest * 2 ** min(self._failures - 1, 10)) * random.uniform(0.5, 1.0)
        if self._stopping.is_set():
            delay = min(delay, 0.2)
        self._retry_at = time.monotonic() + delay
        if self._failures == 1 or code != "bus_unavailable":
            kept = "spooled" if self._spool is not None else "buffered"
            self._warn.warning(code, "publisher %s: events are %s: %s", self._name, kept, error)

    def _recovered(self) -> None:
        if self._failures:
            _log.info("publisher %s: the server takes events again, after %d failures", self._name, self._failures)
        self._failures = 0
        self._counters.set("connected", 1)

    def _rest(self, wait_s: float) -> None:
        """Wait, but not beyond a stop."""
        if self._stopping.is_set():
            time.sleep(min(wait_s, 0.05))
        else:
            self._stopping.wait(wait_s)

    # --- the spool

    def _open_spool(self) -> bool:
        assert self._spool_path is not None
        settings = self._settings
        try:
            spool = Spool(self._spool_path, settings.spool_cap_bytes, fsync=settings.spool_fsync == "batch")
        except SpoolBusy as error:
            self._warn.warning("spool_busy", "publisher %s waits: %s", self._name, error)
            return False
        except OSError as error:
            self._counters.add("spool_errors")
            self._spool_tries += 1
            if self._spool_tries < _SPOOL_TRIES:
                self._warn.error("spool", "publisher %s waits: spool %s: %s", self._name, self._spool_path, error)
                return False
            _log.error("publisher %s goes on without its spool %s: %s", self._name, self._spool_path, error)
            self._spool_path = None
            return True
        self._presence.use_spool(spool)
        self._spool = spool
        if not spool.empty:
            _log.info("publisher %s: %d bytes left in the spool are sent first", self._name, spool.nbytes)
        return True

    def _spill(self, wait_s: float) -> None:
        """Bring what is in memory to disk, waiting up to wait_s for more. What finds no room stays in memory."""
        spool = self._spool
        assert spool is not None
        self._presence.begin_unregistered()
        until = time.monotonic() + wait_s
        while True:
            wait = min(max(0.0, until - time.monotonic()), _SPILL_EVERY_S)
            self._fill(wait, wait / 2)
            if not self._ready:
                if wait <= 0 or self._stopping.is_set():
                    break
                continue
            try:
                written = spool.append(self._ready)
            except OSError as error:
                written = False
                self._counters.add("spool_errors")
                self._warn.error("spool", "spool %s: %s", spool.directory, error)
            if not written:
                self._counters.add("spool_refused")
                self._rest(max(0.0, until - time.monotonic()))
                break
            self._counters.add("events_spooled", len(self._ready))
            self._ready.clear()
            self._in_flight = []
        self._tell_spool(spool)

    def _tell_spool(self, spool: Spool) -> None:
        self._counters.set("spool_bytes", spool.nbytes)
        self._counters.set("spool_corrupt_bytes", spool.corrupt_bytes)

    # --- the end

    def _finish(self) -> None:
        """What could not be delivered in time goes to disk, or is counted. Nothing accepted is forgotten."""
        if self._spool is not None and (self._ready or self._waiting or len(self._buffer)):
            self._deadline = time.monotonic() + 1.0
            while (before := len(self._ready) + len(self._waiting) + len(self._buffer)) > 0:
                self._spill(0)
                if len(self._ready) + len(self._waiting) + len(self._buffer) >= before:
                    break
        left = len(self._ready) + len(self._waiting) + len(self._buffer)
        if left:
            self._counters.add("events_dropped_at_close", left)
            _log.error("publisher %s: %d events could not be delivered before the stop", self._name, left)
        if left and self._in_flight:  # among those: their reply was lost, so they may have arrived
            self._counters.add("events_in_doubt", len(self._in_flight))
        self.delivered_all = not left and (self._spool is None or self._spool.empty)
        if self._presence.registered and not self._failures and not self._interrupted:
            try:
                self._presence.sign_off(self._buffer.next_seq)
            except BusError as error:
                self._warn.warning(error.code, "publisher %s could not sign off: %s", self._name, error)
