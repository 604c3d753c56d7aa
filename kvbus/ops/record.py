"""Recording streams into a file: a range of them, or on and on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvbus.errors import BusError, ConfigError
from kvbus.ops.entries import Seen
from kvbus.ops.recording import RecordingWriter
from kvbus.ops.tail import Follower, Missed, ends_of, history, start_of
from kvbus.streams.connection import Bus
from kvbus.streams.position import UNKNOWN, Position, id_key

Progress = Callable[[int], None]
"""Told how many entries have been recorded so far."""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded. entries: by stream, in the whole file; added: in this run; missed: known to be lacking."""

    path: str
    id: str
    entries: dict[str, int]
    added: int
    missed: int


def record(
    bus: Bus,
    path: Path,
    streams: tuple[str, ...],
    *,
    start: str = "start",
    until: str | None = None,
    follow: bool = False,
    append: bool = False,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Recording:
    """Record what the streams hold, and, with `follow`, what comes until `stop` is set or KeyboardInterrupt.

    append: go on with the recording at the place where it ends. However it ends, what was taken is in the file, and
    the file is closed well. Raises ConfigError, ProtocolError, BusError.
    """
    stop = stop or threading.Event()
    ends = ends_of(bus, streams)
    places = {name: ends[name].cursor if start == "end" else start_of(bus, start) for name in streams}
    last = None if until in (None, "end") else start_of(bus, str(until))
    if append:
        writer = RecordingWriter.append(path)
        unknown = sorted(set(streams) - set(writer.header.streams))
        if writer.header.namespace != bus.keys.namespace or unknown:
            writer.close()
            raise ConfigError(
                f"{path} records {', '.join(writer.header.streams)} of namespace {writer.header.namespace}",
                hint="Record other streams or another namespace into a file of their own.",
            )
        places |= {name: found for name, found in writer.last_ids.items() if name in places}
    else:
        writer = RecordingWriter.create(path, namespace=bus.keys.namespace, streams=streams, now_ms=bus.now_ms())
    before = sum(writer.entries.values())
    with writer:
        taker = _Taker(writer, before, progress)
        # one range for all keeps them in the order of time; what a stream of its own has already is passed over
        for seen in history(bus, streams, after=min(places.values(), key=id_key), until=last):
            if id_key(seen.entry_id) > id_key(places[seen.stream]):
                taker.take(seen)
            if stop.is_set():
                break
        if follow and not stop.is_set():
            _follow(bus, taker, {name: _behind(ends[name], writer.last_ids.get(name)) for name in streams}, stop)
    return Recording(
        path=str(path),
        id=writer.header.id,
        entries=dict(writer.entries),
        added=sum(writer.entries.values()) - before,
        missed=writer.missed,
    )


class _Taker:
    def __init__(self, writer: RecordingWriter, before: int, progress: Progress | None) -> None:
        self.writer = writer
        self._count = 0
        self._progress = progress

    def take(self, seen: Seen) -> None:
        self.writer.add(seen.stream, seen.entry_id, seen.fields)
        self._count += 1
        if self._progress is not None:
            self._progress(self._count)


def _behind(end: Position, last_id: str | None) -> Position:
    """Where to follow from: the end as it was before the look back, or what has been taken beyond it."""
    return end if last_id is None or id_key(last_id) <= id_key(end.cursor) else Position(last_id, "", UNKNOWN)


def _follow(bus: Bus, taker: _Taker, places: dict[str, Position], stop: threading.Event) -> None:
    follower = Follower(bus, places)
    try:
        while not stop.is_set():
            try:
                found = follower.read()
            except BusError:
                taker.writer.flush()
                stop.wait(0.5)
                continue
            for item in found:
                if isinstance(item, Missed):
                    taker.writer.missed += item.gap.missed or 1
                elif isinstance(item, Seen):
                    taker.take(item)
            if not found:
                taker.writer.flush()  # what came before a pause is safe from a kill
    finally:
        follower.close()
