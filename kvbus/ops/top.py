"""One look at everything that moves: what a live screen shows, as data."""

from __future__ import annotations

import time
from collections import deque

import msgspec

from kvbus.ops.dead import list_dead
from kvbus.ops.entries import look_at
from kvbus.ops.lag import Lag, read_lag
from kvbus.ops.workers import PublisherView, WorkerView, list_publishers, list_workers
from kvbus.protocol.results import Results, Status
from kvbus.streams.connection import Bus
from kvbus.streams.log import Log, StreamState
from kvbus.streams.position import id_key

KEEP_ERRORS = 8
LOOK_BACK = 256
"""Results that one look reads at most."""
BAD = (Status.FAILED, Status.REJECTED, Status.EXPIRED, Status.PARTIAL)


class StreamRate(msgspec.Struct, frozen=True, kw_only=True):
    """One stream. per_s: entries added a second since the last look; None at the first look, and after a loss."""

    stream: str
    length: int
    added: int
    per_s: float | None = None


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """A command that was not carried out as asked, or an entry that was refused."""

    entry_id: str
    who: str
    what: str
    detail: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at one moment. rates: a worker's counters a second, by worker and counter."""

    at_ms: int
    streams: tuple[StreamRate, ...]
    workers: tuple[WorkerView, ...]
    publishers: tuple[PublisherView, ...]
    lags: tuple[Lag, ...]
    rates: dict[str, dict[str, float]] = {}
    troubles: tuple[Trouble, ...] = ()


class Top:
    """Takes one snapshot after another, and works out the rates between them."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._log = Log(bus)
        self._before: tuple[float, dict[str, StreamState]] | None = None
        self._stats: dict[str, tuple[float, dict[str, float]]] = {}
        self._rates: dict[str, dict[str, float]] = {}
        self._troubles: deque[Trouble] = deque(maxlen=KEEP_ERRORS)
        self._results_seen = "0-0"
        self._dead_seen = "0-0"

    def take(self) -> Snapshot:
        """Raises BusError."""
        bus, now = self._bus, time.monotonic()
        states = {name: self._log.state(key) for name, key in bus.keys.streams.items()}
        streams = tuple(self._rate(name, state, now) for name, state in states.items())
        self._before = (now, states)
        workers = list_workers(bus)
        for worker in workers:
            self._count(worker, now)
        self._look_for_troubles()
        return Snapshot(
            at_ms=bus.now_ms(),
            streams=streams,
            workers=tuple(workers),
            publishers=tuple(list_publishers(bus)),
            lags=tuple(read_lag(bus)),
            rates=dict(self._rates),
            troubles=tuple(self._troubles),
        )

    def _rate(self, name: str, state: StreamState, now: float) -> StreamRate:
        per_s = None
        if self._before is not None:
            then, states = self._before
            added = state.entries_added - states[name].entries_added
            if added >= 0 and now > then:
                per_s = round(added / (now - then), 1)
        return StreamRate(stream=name, length=state.length, added=state.entries_added, per_s=per_s)

    def _count(self, worker: WorkerView, now: float) -> None:
        """Workers write their counters every few seconds: a rate holds from one writing to the next."""
        then, before = self._stats.get(worker.name, (now, worker.stats))
        if worker.stats != before and now > then:
            self._rates[worker.name] = {
                name: round(max(0.0, value - before.get(name, 0)) / (now - then), 1)
                for name, value in worker.stats.items()
                if name.startswith(("chunks_", "kv_", "commands_", "results_"))
            }
        if worker.stats != before or worker.name not in self._stats:
            self._stats[worker.name] = (now, worker.stats)

    def _look_for_troubles(self) -> None:
        found: list[Trouble] = []
        newest = self._results_seen
        for seen, (entry_id, fields) in enumerate(self._log.scan_back(self._bus.keys.results)):
            if seen >= LOOK_BACK or id_key(entry_id) <= id_key(self._results_seen):
                break
            newest = max(newest, entry_id, key=id_key)
            message = getattr(look_at("results", entry_id, fields).envelope, "message", None)
            if isinstance(message, Results):
                found += [
                    Trouble(
                        entry_id=entry_id,
                        who=message.worker,
                        what=f"{result.type} {result.status}",
                        detail=f"[{result.error.code}] {result.error.message}" if result.error else result.command_id,
                    )
                    for result in message.results
                    if result.status in BAD
                ]
        self._results_seen = newest
        newest = self._dead_seen
        for place, dead in enumerate(list_dead(self._bus)):
            if place >= KEEP_ERRORS or id_key(dead.entry_id) <= id_key(self._dead_seen):
                break
            newest = max(newest, dead.entry_id, key=id_key)
            letter = dead.letter
            found.append(
                Trouble(
                    entry_id=dead.entry_id,
                    who=letter.refused_by,
                    what=f"refused {letter.type}",
                    detail=f"[{letter.code}] {letter.message}",
                )
            )
        self._dead_seen = newest
        self._troubles.extend(sorted(found, key=lambda trouble: id_key(trouble.entry_id)))
