"""Looking at streams: from any place, to the end or on and on. Steals nothing, creates nothing."""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable, Iterable, Iterator

import msgspec

from kvbus.errors import BusError, ConfigError
from kvbus.ops.entries import STREAMS, Filter, Filters, Seen, look_at
from kvbus.ops.when import parse_place
from kvbus.protocol.codec import Fields
from kvbus.streams.connection import Bus
from kvbus.streams.log import Entry, Log
from kvbus.streams.position import UNKNOWN, Gap, Position, id_key
from kvbus.streams.subscription import Subscription, end_position

PAGE = 128


class Missed(msgspec.Struct, frozen=True):
    """While following, entries were removed, or the server lost its history, before we came to them."""

    stream: str
    gap: Gap


class Outage(msgspec.Struct, frozen=True):
    """While following, the bus went away; the next entry, or another outage, comes when it has been tried again."""

    error: BusError


Item = Seen | Missed | Outage
Worth = Callable[[str, Fields], bool]


def choose_streams(name: str) -> tuple[str, ...]:
    """The short names behind "events", "all", ... Raises ConfigError."""
    if name == "all":
        return STREAMS
    if name not in STREAMS:
        raise ConfigError(f"stream {name!r} is not known", hint=f"Use one of {', '.join(STREAMS)}, all.")
    return (name,)


def start_of(bus: Bus, text: str) -> str:
    """The id to begin behind: of "start", an entry id, a date or a time ago. Raises ConfigError, BusError."""
    return "0-0" if text == "start" else parse_place(text, bus.now_ms())


def history(
    bus: Bus,
    streams: Iterable[str],
    *,
    after: str = "0-0",
    until: str | None = None,
    filters: Filters | None = None,
    worth: Worth | None = None,
) -> Iterator[Seen]:
    """What the streams hold, merged by entry id, oldest first; a page of each in memory. Raises BusError.

    after: excluded; until: included, None for the end. worth: told a stream and raw fields, whether to decode at all.
    """
    log, chosen = Log(bus), Filter(filters or Filters())
    end = until or "+"

    def one(name: str) -> Iterator[tuple[tuple[int, int], str, Entry]]:
        for entry in log.scan(bus.keys.streams[name], _behind(after), end, page=PAGE):
            if worth is None or worth(name, entry[1]):
                yield id_key(entry[0]), name, entry

    yield from _chosen(heapq.merge(*(one(name) for name in streams), key=lambda item: item[0]), chosen)


def newest(bus: Bus, streams: Iterable[str], count: int, *, filters: Filters | None = None) -> list[Seen]:
    """The last `count` entries that pass the filters, oldest first. Raises BusError."""
    log, chosen = Log(bus), Filter(filters or Filters())

    def one(name: str) -> Iterator[tuple[tuple[int, int], str, Entry]]:
        page = min(PAGE, max(1, count)) if not chosen.filters.any else PAGE
        for entry in log.scan_back(bus.keys.streams[name], page=page):
            yield id_key(entry[0]), name, entry

    merged = heapq.merge(*(one(name) for name in streams), key=lambda item: item[0], reverse=True)
    found: list[Seen] = []
    if count > 0:
        for seen in _chosen(merged, chosen):
            found.append(seen)
            if len(found) >= count:
                break
    return found[::-1]


def _chosen(merged: Iterable[tuple[tuple[int, int], str, Entry]], chosen: Filter) -> Iterator[Seen]:
    for _, name, (entry_id, fields) in merged:
        if chosen.may_match(fields):
            seen = look_at(name, entry_id, fields)
            if chosen.matches(seen):
                yield seen


def _behind(after: str) -> str:
    return "-" if after == "0-0" else f"({after}"


class Follower:
    """Follows streams from given places, each with a subscription of its own, and rides out an outage of the bus.

    One thread reads; `stop` may be called from any.
    """

    def __init__(self, bus: Bus, places: dict[str, Position], *, filters: Filters | None = None) -> None:
        """places: short name of a stream to the place to go on from, as `ends_of` makes them."""
        self._filter = Filter(filters or Filters())
        self._stopped = threading.Event()
        self._subscriptions = {name: Subscription(bus, bus.keys.streams[name], place) for name, place in places.items()}

    def stop(self) -> None:
        self._stopped.set()

    def __iter__(self) -> Iterator[Item]:
        backoff = 0.1
        try:
            while not self._stopped.is_set():
                try:
                    yield from self.read()
                    backoff = 0.1
                except BusError as error:
                    yield Outage(error)
                    self._stopped.wait(backoff * random.uniform(0.5, 1.0))
                    backoff = min(backoff * 2, 2.0)
        finally:
            self.close()

    def read(self, block_ms: int = 200) -> list[Item]:
        """What has come. Waits only while nothing comes, at most block_ms for each stream. Raises BusError."""
        found = [item for name in self._subscriptions for item in self._read(name, 0)]
        if not found:
            wait = block_ms // len(self._subscriptions)
            found = [item for name in self._subscriptions for item in self._read(name, wait)]
        found.sort(key=lambda item: id_key(item.entry_id) if isinstance(item, Seen) else (0, 0))
        return found

    def _read(self, name: str, block_ms: int) -> list[Item]:
        batch = self._subscriptions[name].read(block_ms=block_ms)
        if batch.gap is not None:
            return [Missed(name, batch.gap)]
        seen = (look_at(name, entry_id, fields) for entry_id, fields in batch.entries if self._filter.may_match(fields))
        return [item for item in seen if self._filter.matches(item)]

    def close(self) -> None:
        for subscription in self._subscriptions.values():
            subscription.disconnect()


def tail(
    bus: Bus,
    streams: tuple[str, ...],
    *,
    start: str | None = None,
    last: int | None = None,
    until: str | None = None,
    follow: bool = False,
    filters: Filters | None = None,
) -> Iterator[Item]:
    """Entries from a place on: `start` as `start_of` takes it ("end" too), or the `last` ones; then what comes.

    Raises ConfigError, BusError; while it follows, an outage is an item and no error.
    """
    # Where following begins is fixed before the look back, so that nothing falls between the two.
    places = ends_of(bus, streams) if follow else {}
    begun: Iterable[Seen] = ()
    if last is not None:
        begun = newest(bus, streams, last, filters=filters)
    elif start != "end":
        stop = None if until in (None, "end") else start_of(bus, until)
        begun = history(bus, streams, after=start_of(bus, start or "start"), until=stop, filters=filters)
    for seen in begun:
        place = places.get(seen.stream)
        if place is not None and id_key(seen.entry_id) > id_key(place.cursor):
            # what the filters left out between the two was not counted
            places[seen.stream] = Position(seen.entry_id, seen.message_id, UNKNOWN)
        yield seen
    if follow:
        yield from Follower(bus, places, filters=filters)


def ends_of(bus: Bus, streams: Iterable[str]) -> dict[str, Position]:
    """The place behind the newest entry of each stream. Raises BusError."""
    return {name: end_position(bus, bus.keys.streams[name]) for name in streams}
