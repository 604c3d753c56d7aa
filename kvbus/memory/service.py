"""The ledger as a service: it follows the events, and all else follows from them."""

from __future__ import annotations

import logging
import random
import threading
import time
from types import TracebackType

from kvbus.errors import BusError, BusRefused, ConfigError, InvalidMessage, KVBusError, ProtocolError
from kvbus.memory.config import MemoryConfig
from kvbus.memory.debug import DebugFiles
from kvbus.memory.ledger import Ledger, TurnStatus
from kvbus.metrics import Counters, RateLimitedLog
from kvbus.protocol.codec import EVENT_TYPES, Fields, decode_entry
from kvbus.protocol.events import RequestFinished, WorkerGap, WorkerStarted
from kvbus.protocol.results import Results
from kvbus.settings import default_instance
from kvbus.streams.connection import Bus
from kvbus.streams.dead import set_aside
from kvbus.streams.ledger_store import Issued
from kvbus.streams.log import Entry, Log
from kvbus.streams.position import Gap, GapKind, Position
from kvbus.streams.registry import write_stats
from kvbus.streams.subscription import BATCH, Subscription, message_id

_log = logging.getLogger(__name__)

SWEEP_EVERY_S = 0.25
LOOK_BACK_MS = 60_000
_SWEEPS_AT_ONCE = 64
_RESULT_READS = 16
_TRIES = 3


class MemoryService:
    """One memory process. Any number may run beside it: each event counts once.

    start: where the first process of a namespace begins, "end" or "start" of what the stream holds; later ones go on
    where the ledger stands. name: under which its counters are published. `run` blocks; `start` makes a thread.
    """

    def __init__(
        self, bus: Bus, config: MemoryConfig | None = None, *, name: str | None = None, start: str = "end"
    ) -> None:
        self.bus = bus
        self.ledger = Ledger(bus, config)
        self.config = self.ledger.config
        if not self.config.kvcache_enabled:
            raise ConfigError("kvcache_enabled is false", hint="Set kvcache_enabled to run the memory service.")
        if start not in ("start", "end"):
            raise ConfigError(f"start {start!r} is neither 'start' nor 'end'")
        self.name = name or bus.settings.instance or default_instance()
        self.counters = Counters()
        self._begin_at = start
        self._debug = DebugFiles(self.config.debug_dir, self.config.debug_keep, self.counters)
        self._limited = RateLimitedLog(_log)
        self._log = Log(bus)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._subscription: Subscription | None = None
        self._results: Subscription | None = None
        self._swept_at = self._told_at = float("-inf")

    # -- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run in a thread of its own until `close`."""
        assert self._thread is None, "started already"
        self._thread = threading.Thread(target=self.run, name="kvbus-memory", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Follow the events until `close` is called, riding out whatever happens to the bus."""
        backoff = 0.05
        while not self._stop.is_set():
            try:
                self.turn_over()
                backoff = 0.05
            except BusError as error:
                if self._stop.is_set():
                    break
                self.counters.add("bus_errors")
                self._limited.warning("bus", "the ledger cannot go on, trying again: %s", error)
                self._stop.wait(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 2, 2.0)
            except Exception:  # noqa: BLE001 - whoever started it goes on waiting: its end would be seen by nobody
                self.counters.add("internal_errors")
                _log.exception("unexpected error in the ledger's service; going on")
                self._stop.wait(backoff)
                backoff = min(backoff * 2, 2.0)
        for subscription in (self._subscription, self._results):
            if subscription is not None:
                subscription.disconnect()

    def close(self) -> None:
        """End `run` from any thread. Nothing has to be saved: every step was whole."""
        self._stop.set()
        if self._subscription is not None:
            self._subscription.interrupt()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join((self.bus.settings.block_ms + self.bus.settings.reply_timeout_ms) / 1000 + 1)

    def __enter__(self) -> MemoryService:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- one round ---------------------------------------------------------------------------------------------

    def turn_over(self, *, block_ms: int | None = None, count: int = BATCH) -> int:
        """One round: the next events, then what time brings. Returns how many entries were read. Raises BusError."""
        subscription = self._subscription or self.open()
        wait = int(SWEEP_EVERY_S * 1000) if block_ms is None else block_ms
        before = subscription.position
        batch = subscription.read(block_ms=min(wait, self.bus.settings.block_ms), count=count)
        if batch.gap is not None:
            self._mind(batch.gap, before, subscription.position)
        place = before
        try:
            for entry in batch.entries:
                place = place.advance(entry[0], message_id(*entry), 1)
                self._take(entry, place)
        except BaseException:
            # What was not taken is read again; what was, the ledger knows.
            subscription.position = before
            subscription.disconnect()
            raise
        self._follow_results()
        now = time.monotonic()
        if now - self._swept_at >= SWEEP_EVERY_S:
            self._swept_at = now
            self.sweep()
        if now - self._told_at >= self.bus.settings.stats_ms / 1000:
            self._told_at = now
            self.tell()
        return len(batch.entries)

    def open(self) -> Subscription:
        """Find the place to go on from, and fix it if this namespace has none yet. Raises BusError."""
        key = self.bus.keys.events
        place = self.ledger.store.position()
        if place is None:
            begin = Subscription.from_start if self._begin_at == "start" else Subscription.from_end
            self.ledger.rewind(Position(cursor=""), begin(self.bus, key).position)
            place = self.ledger.store.position()
            assert place is not None
        self._subscription = Subscription(self.bus, key, place)
        return self._subscription

    def _follow_results(self) -> None:
        """Evicts of ours that a worker could not carry out are looked at again. Raises BusError."""
        if self._results is None:
            # The last moments count again: doing so twice does no harm.
            since = max(0, self.bus.now_ms() - LOOK_BACK_MS)
            self._results = Subscription.from_id(self.bus, self.bus.keys.results, f"{since}-0")
        for _ in range(_RESULT_READS):
            before = self._results.position
            batch = self._results.read(block_ms=0)
            try:
                for entry_id, fields in batch.entries:
                    self._take_results(entry_id, fields)
            except BusError:
                self._results.position = before
                self._results.disconnect()
                raise
            if len(batch.entries) < BATCH:
                break

    def _take_results(self, entry_id: str, fields: Fields) -> None:
        try:
            message = decode_entry(entry_id, fields).message
        except ProtocolError as error:
            self._limited.warning("results", "results entry %s passed over: %s", entry_id, error)
            return
        for result in message.results if isinstance(message, Results) else ():
            again = self.ledger.answered(result)
            if again:
                self.counters.add("evict_again_chunks", again)

    def sweep(self) -> None:
        """Do what is due. Raises BusError."""
        for _ in range(_SWEEPS_AT_ONCE):
            done, issued = self.ledger.sweep()
            self._count(issued)
            self.counters.add("swept", done)
            if not done:
                break

    def tell(self) -> None:
        """Publish the counters. Raises BusError."""
        totals = self.ledger.totals()
        for name in totals.__struct_fields__:
            self.counters.set(f"ledger_{name}", getattr(totals, name))
        write_stats(self.bus, f"memory/{self.name}", self.counters.snapshot())

    # -- inside ------------------------------------------------------------------------------------------------

    def _take(self, entry: Entry, place: Position) -> None:
        entry_id, fields = entry
        try:
            envelope = decode_entry(entry_id, fields)
            if envelope.type not in EVENT_TYPES:
                raise InvalidMessage(f"a {envelope.type} is not an event")
        except ProtocolError as error:
            self._refuse(entry, error)
            return
        for tries in range(1, _TRIES + 1):
            try:
                self._apply(entry_id, envelope.message, place)
                return
            except BusRefused as error:
                if tries == _TRIES:
                    # An event that the server cannot take must not hold up all that follow.
                    self.counters.add("failed")
                    self._refuse(entry, error)
                    self.ledger.skip(place)

    def _apply(self, entry_id: str, message: object, place: Position) -> None:
        if isinstance(message, RequestFinished):
            turn = self.ledger.turn(message, place)
            self.counters.add(f"events_{turn.status.name.lower()}")
            if turn.missed:
                self.counters.add("missed", turn.missed)
                self._limited.warning("hole", "%d events of %s never came", turn.missed, message.publisher)
            self._count(turn.commands)
            if self.config.kvcache_debug_enabled and turn.status is TurnStatus.TAKEN:
                self._debug.write(entry_id, message, turn)
        elif isinstance(message, WorkerStarted | WorkerGap):
            issued = self.ledger.worker_event(message, place)
            self.counters.add(f"events_{message.TYPE.replace('.', '_')}")
            self._count(issued)
        else:
            self.ledger.skip(place)

    def _mind(self, gap: Gap, before: Position, after: Position) -> None:
        self.counters.add("gaps")
        self._limited.warning("gap", "events: %s (%s missed)", gap.reason, gap.missed)
        if gap.kind is GapKind.HISTORY_LOST and not self.ledger.rewind(before, after):
            # The ledger stands elsewhere: another process was quicker, or a failover took both back. Its place counts.
            if self._subscription is not None:
                self._subscription.disconnect()
            self._subscription = None

    def _count(self, issued: tuple[Issued, ...]) -> None:
        for item in issued:
            self.counters.add(f"{item.form}_commands")
            self.counters.add(f"{item.form}_chunks", len(item.chunk_hashes))

    def _refuse(self, entry: Entry, error: KVBusError) -> None:
        """One dead letter, however many processes refuse the entry."""
        entry_id, fields = entry
        self.counters.add("refused")
        self._limited.warning("refused", "events entry %s set aside: %s", entry_id, error)
        try:
            set_aside(self._log, self.bus.keys.events, entry_id, fields, error, by=f"memory/{self.name}")
        except BusError as fault:
            # This user may lack the right to write there: the entry stays where it is, and this counter tells of it.
            self.counters.add("refused_untold")
            self._limited.warning("untold", "no dead letter for events entry %s: %s", entry_id, fault)
