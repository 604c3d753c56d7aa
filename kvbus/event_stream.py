"""Reading the events stream: resumable, without repeats, and with the holes told."""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Literal

import msgspec

from kvbus.errors import BusError, InvalidMessage, ProtocolError
from kvbus.metrics import Counters, RateLimitedLog
from kvbus.protocol.codec import EVENT_TYPES, Fields, decode_entry
from kvbus.protocol.events import Event, RequestFinished
from kvbus.streams.connection import Bus
from kvbus.streams.dead import set_aside
from kvbus.streams.log import Log
from kvbus.streams.position import Gap, Position
from kvbus.streams.registry import load_reader, save_reader
from kvbus.streams.subscription import Subscription, message_id

_log = logging.getLogger(__name__)

Start = Literal["start", "end"] | str
"""Where a reader begins: before the oldest entry, behind the newest, or behind the entry with this id."""

KEEP_PUBLISHERS = 4_096
"""Whose numbers are remembered, of all that ever were: those that were heard last."""


class Hole(msgspec.Struct, frozen=True):
    """Events of one publisher that never reached the stream, or were trimmed from it: first to last, both missing."""

    publisher: str
    epoch: int
    first: int
    last: int

    @property
    def missed(self) -> int:
        return self.last - self.first + 1


class Place(msgspec.Struct, frozen=True):
    """How far one publisher's events have been delivered."""

    publisher: str
    epoch: int
    next_seq: int


class SequenceTracker:
    """Knows repeats and holes by (publisher, epoch, seq). Pure; bounded by KEEP_PUBLISHERS."""

    def __init__(self, places: tuple[Place, ...] = ()) -> None:
        self._places = {place.publisher: place for place in places}

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(self._places.values())

    def take(self, event: RequestFinished) -> tuple[bool, Hole | None]:
        """(deliver it?, the hole before it). The first event ever seen of a publisher tells of no hole."""
        place = self._places.get(event.publisher)
        hole = None
        if place is not None:
            if (event.epoch, event.seq) < (place.epoch, place.next_seq):
                return False, None
            if event.epoch == place.epoch and event.seq > place.next_seq:
                hole = Hole(event.publisher, event.epoch, place.next_seq, event.seq - 1)
            elif event.epoch > place.epoch and event.seq > 0:
                hole = Hole(event.publisher, event.epoch, 0, event.seq - 1)
        self._places.pop(event.publisher, None)  # to the end: the first is the one heard longest ago
        self._places[event.publisher] = Place(event.publisher, event.epoch, event.seq + 1)
        if len(self._places) > KEEP_PUBLISHERS:
            del self._places[next(iter(self._places))]
        return True, hole


class Delivery(msgspec.Struct, frozen=True):
    """One event. hole: events of its publisher missing before it. gap: what this reader itself missed before it."""

    entry_id: str
    event: Event
    hole: Hole | None = None
    gap: Gap | None = None


class EventStream:
    """An endless iterator of deliveries; `close`, from any thread, ends it. Rides out an outage of the bus by itself.

    Entries that are not events become dead letters, and are counted. Safe for one reading thread.
    """

    def __init__(self, bus: Bus, *, reader: str | None, start: Start, block_ms: int | None = None) -> None:
        self.bus = bus
        self.reader = reader
        self.counters = Counters()
        self._block_ms = block_ms
        self._stop = threading.Event()
        self._limited = RateLimitedLog(_log)
        saved = load_reader(bus, reader) if reader is not None else None
        key = bus.keys.events
        if saved is not None:
            self._subscription = Subscription(bus, key, saved.position)
            self._tracker = SequenceTracker(_decode_places(saved.extra))
        else:
            self._tracker = SequenceTracker()
            if start == "end":
                self._subscription = Subscription.from_end(bus, key)
            elif start == "start":
                self._subscription = Subscription.from_start(bus, key)
            else:
                self._subscription = Subscription.from_id(bus, key, start)
        self._delivered = self._subscription.position
        self._pending_gap: Gap | None = None
        self._log = Log(bus)
        self._waiting: deque[tuple[Position, Fields]] = deque()

    @property
    def position(self) -> Position:
        """The last event handed out."""
        return self._delivered

    def __iter__(self) -> Iterator[Delivery]:
        backoff = 0.05
        while not self._stop.is_set():
            try:
                yield from self.read()
                backoff = 0.05
            except BusError as error:
                if self._stop.is_set():
                    return
                self.counters.add("bus_errors")
                self._limited.warning("bus", "events cannot be read, trying again: %s", error)
                self._stop.wait(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 2, 2.0)

    def read(self, *, block_ms: int | None = None, count: int = 32) -> Iterator[Delivery]:
        """One round: what has come, waiting up to block_ms for it. Raises BusError."""
        if not self._waiting:
            place = self._subscription.position
            batch = self._subscription.read(block_ms=self._block_ms if block_ms is None else block_ms, count=count)
            if batch.gap is not None:
                self.counters.add("gaps")
                self._limited.warning("gap", "events: %s (%s missed)", batch.gap.reason, batch.gap.missed)
                self._pending_gap = batch.gap
            for entry_id, fields in batch.entries:
                place = place.advance(entry_id, message_id(entry_id, fields), 1)
                self._waiting.append((place, fields))
        # Whoever stops in the middle of a round finds the rest in the next one.
        while self._waiting:
            place, fields = self._waiting.popleft()
            delivery = self._delivery(place.cursor, fields)
            self._delivered = place
            if delivery is not None:
                yield delivery

    def _delivery(self, entry_id: str, fields: Fields) -> Delivery | None:
        """The entry as an event; None for a repeat, and for what is no event at all."""
        try:
            envelope = decode_entry(entry_id, fields)
            if envelope.type not in EVENT_TYPES:
                raise InvalidMessage(f"a {envelope.type} is not an event")
        except ProtocolError as error:
            self._refuse(entry_id, fields, error)
            return None
        event: Event = envelope.message  # type: ignore[assignment]
        hole = None
        if isinstance(event, RequestFinished):
            fresh, hole = self._tracker.take(event)
            if not fresh:
                self.counters.add("repeats")
                return None
            if hole is not None:
                self.counters.add("holes", hole.missed)
        self.counters.add("events")
        told, self._pending_gap = self._pending_gap, None
        return Delivery(entry_id, event, hole, told)

    def save(self) -> None:
        """Keep the place under the reader's name: what was handed out so far is done with. Raises BusError."""
        assert self.reader is not None, "give the reader a name to save its place"
        save_reader(
            self.bus,
            self.reader,
            self.bus.keys.events,
            self._delivered,
            extra=msgspec.json.encode(self._tracker.places),
        )

    def close(self) -> None:
        """End the iteration, from any thread."""
        self._stop.set()
        self._subscription.interrupt()

    def _refuse(self, entry_id: str, fields: Fields, error: ProtocolError) -> None:
        self.counters.add("refused")
        self._limited.warning("refused", "events entry %s set aside: %s", entry_id, error)
        try:
            set_aside(self._log, self.bus.keys.events, entry_id, fields, error, by=self.reader or "events-reader")
        except BusError as fault:
            # A reader may lack the right to write: the entry stays where it is, and this counter tells of it.
            self.counters.add("refused_untold")
            self._limited.warning("untold", "no dead letter for events entry %s: %s", entry_id, fault)

    def __enter__(self) -> EventStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._subscription.disconnect()


def _decode_places(raw: bytes) -> tuple[Place, ...]:
    return msgspec.json.decode(raw, type=tuple[Place, ...]) if raw else ()
