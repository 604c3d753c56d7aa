"""Replaying a recording, or a stream that still stands, into another namespace or server.

Replayed entries keep their content; they get new message ids and issue times, and name the original in `origin`.
How far a replay has come is written in the same MULTI as its entries, so one that was interrupted, or whose server
went away in the middle, goes on without a repeat and without a hole.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import msgspec

from kvbus.errors import BusUnavailable, ConfigError, ProtocolError
from kvbus.ops.entries import STREAMS
from kvbus.ops.recording import Recorded, RecordingReader
from kvbus.ops.tail import history, start_of
from kvbus.ops.when import id_ms
from kvbus.protocol.codec import Fields, decode_entry, encode_entry, new_message_id
from kvbus.protocol.commands import COMMANDS
from kvbus.streams.checkpoint import KEEP_MS
from kvbus.streams.connection import Bus, bus_errors
from kvbus.streams.log import Log
from kvbus.streams.position import id_key
from kvbus.streams.registry import Membership

DEFAULT_STREAMS = ("events", "commands")
"""Results and dead letters are the answers of workers that are not those of the new namespace."""
BATCH_ENTRIES = 64
BATCH_BYTES = 1 << 20
TRY_FOR_S = 30.0
MAX_PAUSE_MS = 3_600_000


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """What of a source is replayed. after: excluded; until: included, None for the end."""

    streams: tuple[str, ...] = DEFAULT_STREAMS
    after: str = "0-0"
    until: str | None = None


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where the entries come from, and under which name this very replay of it is known.

    steady: every reading gives the same entries in the same order. A stream does not: its oldest may be trimmed.
    """

    title: str
    identity: str
    read: Callable[[], Iterable[Recorded]]
    steady: bool


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay would do. refused: entries that cannot be decoded, which are not replayed."""

    source: str
    into: str
    counts: dict[str, int]
    """By type."""
    total: int
    refused: int
    first_id: str
    last_id: str
    span_ms: int
    """From the first to the last entry, by the server's clock at that time."""
    live_workers: tuple[str, ...]
    unfinished: int | None = None
    """Entries that an earlier, interrupted replay of the same has written; None when there was none."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay did. earlier: entries that an interrupted one before it had written."""

    source: str
    into: str
    written: int
    earlier: int
    refused: int
    seconds: float


class _State(msgspec.Struct, frozen=True):
    """A replay's progress, as it stands on the target.

    run: which run it is; taken: entries of the source that it is done with; last: by stream, the last of them.
    """

    run: str
    taken: int = 0
    written: int = 0
    refused: int = 0
    last: dict[str, str] = {}
    finished: bool = False


def from_file(path: Path, chosen: Range) -> Source:
    """A recording as a source. Raises ConfigError, ProtocolError."""
    with RecordingReader(path) as reader:
        identity = reader.header.id

    def read() -> Iterator[Recorded]:
        with RecordingReader(path) as reader:
            for found in reader:
                if found.stream in chosen.streams and _within(found.entry_id, chosen):
                    yield found

    return Source(title=str(path), identity=_identity(identity, chosen), read=read, steady=True)


def from_stream(bus: Bus, chosen: Range) -> Source:
    """Streams of a namespace as a source, up to where they end now. Raises BusError."""
    # Fixed here: a replay into the same namespace must not meet its own entries.
    ends = [Log(bus).state(bus.keys.streams[name]).last_id for name in chosen.streams]
    end = max([*ends, "0-0"], key=id_key)
    until = end if chosen.until is None else min(chosen.until, end, key=id_key)
    title = f"{', '.join(chosen.streams)} of {bus.keys.namespace}"

    def read() -> Iterator[Recorded]:
        for seen in history(bus, chosen.streams, after=chosen.after, until=until):
            yield Recorded(seen.stream, seen.entry_id, seen.fields)

    # Not `until`: a replay that goes on later may have a later end.
    return Source(title=title, identity=_identity(f"{bus.settings.redis_url}|{title}", chosen), read=read, steady=False)


def range_of(bus: Bus, streams: tuple[str, ...], start: str | None, until: str | None) -> Range:
    """A range from how people write its ends. Raises ConfigError, BusError."""
    for name in streams:
        if name not in STREAMS:
            raise ConfigError(f"stream {name!r} is not known", hint=f"Use some of {', '.join(STREAMS)}.")
    return Range(
        streams=tuple(dict.fromkeys(streams)) or DEFAULT_STREAMS,
        after="0-0" if start is None else start_of(bus, start),
        until=None if until in (None, "end") else start_of(bus, str(until)),
    )


def _within(entry_id: str, chosen: Range) -> bool:
    place = id_key(entry_id)
    return place > id_key(chosen.after) and (chosen.until is None or place <= id_key(chosen.until))


def _identity(source: str, chosen: Range) -> str:
    text = f"{source}|{','.join(sorted(chosen.streams))}|{chosen.after}|{chosen.until}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Replay:
    """One replay of one source into one namespace."""

    def __init__(self, source: Source, target: Bus) -> None:
        self.source = source
        self.target = target
        self._log = Log(target)
        self._key = f"{target.keys.prefix}replay:{source.identity}"

    @property
    def into(self) -> str:
        return self.target.keys.namespace

    def plan(self) -> Plan:
        """Read the whole source and write nothing. Raises ProtocolError, BusError."""
        counts: dict[str, int] = {}
        refused = 0
        first = last = ""
        for found in self.source.read():
            first, last = first or found.entry_id, found.entry_id
            try:
                kind = decode_entry(found.entry_id, found.fields).type
            except ProtocolError:
                refused += 1
                continue
            counts[kind] = counts.get(kind, 0) + 1
        state = self._load()
        return Plan(
            source=self.source.title,
            into=self.into,
            counts=counts,
            total=sum(counts.values()),
            refused=refused,
            first_id=first,
            last_id=last,
            span_ms=max(0, id_ms(last) - id_ms(first)) if last else 0,
            live_workers=self._live_workers(),
            unfinished=None if state is None or state.finished else state.written,
        )

    def run(
        self,
        *,
        speed: float | None = 1.0,
        force: bool = False,
        resume: bool = False,
        restart: bool = False,
        max_pause_ms: int = MAX_PAUSE_MS,
        progress: Callable[[int], None] | None = None,
        stop: threading.Event | None = None,
    ) -> Replayed:
        """Write the source's entries. speed: a factor on the original pace; None is at once.

        force: into a namespace with live workers, which will carry the commands out. resume: go on with an
        interrupted replay of the same; restart: begin it anew. stop: ends it as an interruption does.
        Raises ConfigError when it must not begin, ProtocolError for a damaged recording, BusError.
        """
        state = self._begin(force, resume, restart)
        stop = stop or threading.Event()
        earlier, began = state.written, time.monotonic()
        pace = _Pace(speed, max_pause_ms, stop)
        batch: list[tuple[str, Fields]] = []
        size = 0
        for found in self._rest(state):
            if batch and (len(batch) >= BATCH_ENTRIES or size >= BATCH_BYTES or not pace.due(found.entry_id)):
                self._write(batch, state)
                batch, size = [], 0
                if progress is not None:
                    progress(state.written - earlier)
            pace.wait(found.entry_id)
            if stop.is_set():
                break
            state = msgspec.structs.replace(
                state, taken=state.taken + 1, last=state.last | {found.stream: found.entry_id}
            )
            try:
                fields = self._renewed(found)
            except ProtocolError:
                state = msgspec.structs.replace(state, refused=state.refused + 1)
                continue
            batch.append((self.target.keys.streams[found.stream], fields))
            size += sum(map(len, fields.values()))
            state = msgspec.structs.replace(state, written=state.written + 1)
        if not stop.is_set():
            state = msgspec.structs.replace(state, finished=True)
        self._write(batch, state)
        if progress is not None:
            progress(state.written - earlier)
        return Replayed(
            source=self.source.title,
            into=self.into,
            written=state.written - earlier,
            earlier=earlier,
            refused=state.refused,
            seconds=round(time.monotonic() - began, 3),
        )

    def _begin(self, force: bool, resume: bool, restart: bool) -> _State:
        live = self._live_workers()
        if live and not force:
            raise ConfigError(
                f"namespace {self.into} has live workers ({', '.join(live[:4])}), which would carry the commands out",
                hint="Name another namespace with --into, or give --force if that is what you want.",
            )
        state = self._load()
        if resume:
            if state is None:
                raise ConfigError(
                    f"no replay of this range of {self.source.title} into {self.into} was begun",
                    hint="Give the range by the same entry ids or dates: a time ago names another place each time.",
                )
            return msgspec.structs.replace(state, finished=False)
        if state is not None and not state.finished and not restart:
            raise ConfigError(
                f"a replay of {self.source.title} into {self.into} was interrupted after {state.written:,} entries",
                hint="Go on with it by --resume, or begin anew by --restart.",
            )
        return _State(new_message_id())

    def _rest(self, state: _State) -> Iterator[Recorded]:
        """The entries that are not done yet. Ids alone would not tell: a recording may hold two histories."""
        if self.source.steady:
            return islice(self.source.read(), state.taken, None)
        last = {name: id_key(entry_id) for name, entry_id in state.last.items()}
        return (found for found in self.source.read() if id_key(found.entry_id) > last.get(found.stream, (-1, 0)))

    def _live_workers(self) -> tuple[str, ...]:
        return tuple(member.name for member in Membership(self.target).read() if member.alive)

    def _renewed(self, found: Recorded) -> Fields:
        envelope = decode_entry(found.entry_id, found.fields)
        message = envelope.message
        if isinstance(message, COMMANDS):
            message = msgspec.structs.replace(message, issued_at_ms=self.target.now_ms())
        return encode_entry(message, message_id=new_message_id(), origin=envelope.id)

    def _load(self) -> _State | None:
        with bus_errors(f"GET {self._key}"):
            raw: bytes | None = self.target.client.get(self._key)
        return None if raw is None else msgspec.json.decode(raw, type=_State)

    def _write(self, batch: list[tuple[str, Fields]], state: _State) -> None:
        """The batch and the progress behind it, both or neither, once; an outage is waited out."""
        deadline, backoff = time.monotonic() + TRY_FOR_S, 0.1
        while True:
            try:
                if self._load() != state:
                    self._append(batch, state)
                return
            except BusUnavailable:
                # The answer was lost: what stands on the target says whether it was applied.
                if time.monotonic() > deadline:
                    raise
                time.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 2, 2.0)

    def _append(self, batch: list[tuple[str, Fields]], state: _State) -> None:
        sizes: dict[str, int] = {}
        for key, fields in batch:
            sizes[key] = sizes.get(key, 0) + sum(map(len, fields.values()))
        caps: Mapping[str, int] = {key: self._log.maxlen(key, size) for key, size in sizes.items()}
        with bus_errors(f"replay {len(batch)} entries"):
            pipe = self.target.client.pipeline(transaction=True)
            for key, fields in batch:
                pipe.xadd(key, fields, maxlen=caps[key] or None, approximate=True)
            pipe.set(self._key, msgspec.json.encode(state), px=KEEP_MS)
            pipe.execute()


class _Pace:
    """When each entry is due, by the time that had passed between it and the one before."""

    def __init__(self, speed: float | None, max_pause_ms: int, stop: threading.Event) -> None:
        self._speed = speed
        self._max_pause_ms = max_pause_ms
        self._stop = stop
        self._last_ms: int | None = None
        self._due_at = time.monotonic()

    def due(self, entry_id: str) -> bool:
        """It need not wait."""
        return self._next(entry_id) <= time.monotonic()

    def wait(self, entry_id: str) -> None:
        """Until it is due, or stopped."""
        self._due_at = self._next(entry_id)
        self._last_ms = id_ms(entry_id)
        remaining = self._due_at - time.monotonic()
        if remaining > 0:
            self._stop.wait(remaining)

    def _next(self, entry_id: str) -> float:
        if self._speed is None or self._last_ms is None:
            return self._due_at
        pause_ms = min(max(0, id_ms(entry_id) - self._last_ms), self._max_pause_ms)
        return self._due_at + pause_ms / 1000 / self._speed
