"""Commands to engine verbs: whose they are, in which order, until when, and what is tried again.

Evicts, lookups and pings are short and done at once by the reading thread; prefetches are long and have a thread of
their own (prefetches.py). So an evict never waits behind a long prefetch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec

from kvbus.errors import KVBusError, Overloaded
from kvbus.metrics import Counters
from kvbus.protocol.commands import DDR, Command, Evict, Lookup, Ping, Prefetch
from kvbus.protocol.hashes import ChunkHash
from kvbus.protocol.results import CommandResult, Counts, Held, Outcome, Status
from kvbus.streams.worker_log import Task, WorkerLog
from worker_plugin.engine_types import ChunkOutcome, Engine
from worker_plugin.prefetches import Prefetches, PrefetchJob
from worker_plugin.tally import Tally, failure

_log = logging.getLogger(__name__)

SLICE = 256
"""Chunks an engine call: between two calls a stop is noticed."""
MAX_QUEUED_HASHES = 1_000_000
"""Chunks of waiting prefetches altogether; a hash costs some 100 bytes while it waits."""
_HELD, _NOWHERE = ChunkOutcome(Outcome.RESIDENT), ChunkOutcome(Outcome.MISSING)
_AWAITED = ChunkOutcome(Outcome.BUSY)
_COUNTERS = tuple("kv_bytes" if name == "bytes" else f"chunks_{name}" for name in Counts.__struct_fields__)


class _Timed:
    """A command that is being carried out at once, and since when."""

    def __init__(self, task: Task, command: Evict | Lookup, tally: Tally, deadline_ms: int, at_ms: int) -> None:
        self.task = task
        self.command = command
        self.tally = tally
        self.deadline_ms = deadline_ms
        self._at_ms = at_ms
        self._began = time.monotonic()

    def result(
        self, status: Status | None = None, error: KVBusError | None = None, held: Held | None = None
    ) -> CommandResult:
        return self.tally.result(
            self.task.envelope.id,
            self.command,
            status=status,
            error=error,
            held=held,
            attempt=self.task.attempt,
            started_at_ms=self._at_ms,
            duration_us=int((time.monotonic() - self._began) * 1e6),
        )


class _Eviction:
    """An evict, deferred while some of its chunks are held by running requests or awaited by an earlier prefetch.

    prefetches: how many came before it. superseded: chunks that a later prefetch wants to stay.
    """

    def __init__(self, timed: _Timed, command: Evict, prefetches: int) -> None:
        self.timed = timed
        self.command = command
        self.prefetches = prefetches
        self.superseded: set[ChunkHash] = set()

    def open_places(self) -> list[int]:
        chunks = self.command.chunk_hashes
        return [place for place in self.timed.tally.open_places() if chunks[place] not in self.superseded]


class Executor:
    """Carries out one worker's commands. All but `stop` and what only looks is called by the reading thread.

    retry_ms: between two tries of a chunk in use. long_done: told when a prefetch's result waits to be committed.
    """

    def __init__(
        self,
        log: WorkerLog,
        engine: Engine,
        *,
        retry_ms: int,
        counters: Counters,
        long_done: Callable[[], None],
    ) -> None:
        self._worker_log = log
        self._engine = engine
        self._clock = log.bus.clock
        self._retry_s = retry_ms / 1000
        self._counters = counters
        self._prefetches = Prefetches(engine, self._clock, done=long_done)
        self._deferred: list[_Eviction] = []
        self._retry_at = 0.0
        self._busy_since: float | None = None
        self._stopping = False

    def start(self) -> None:
        self._prefetches.start()

    def stop(self, timeout_s: float) -> bool:
        """Leave what is not finished in hand. True when the long lane has ended."""
        self._stopping = True
        return self._prefetches.stop(timeout_s)

    @property
    def busy_s(self) -> float:
        """How long the engine call that is under way has taken, 0 when there is none."""
        began = [since for since in (self._busy_since, self._prefetches.busy_since) if since is not None]
        return time.monotonic() - min(began) if began else 0.0

    @property
    def deferred(self) -> int:
        return len(self._deferred)

    @property
    def queued(self) -> int:
        return self._prefetches.waiting

    def wait_ms(self, longest_ms: int) -> int:
        """How long the reader may wait for news before `retry` is due."""
        if not self._deferred:
            return longest_ms
        return max(1, min(longest_ms, int((self._retry_at - time.monotonic()) * 1000)))

    def run(self, task: Task) -> None:
        """Carry a command out, or put it in its lane. Raises nothing: those behind it wait for their turn."""
        command: Command = task.envelope.message  # type: ignore[assignment]  # WorkerLog hands out commands only
        try:
            self._begin(task, command)
        except Exception as fault:  # noqa: BLE001 - it would stay in hand for ever
            _log.exception("%s %s failed", command.TYPE, task.envelope.id)
            self._close(task, command, Status.FAILED, failure(fault))

    def _begin(self, task: Task, command: Command) -> None:
        self._counters.add(f"commands_{command.TYPE}")
        now_ms = self._clock.now_ms()
        # A time of issue in the future is somebody's wrong clock.
        issued = now_ms if command.issued_at_ms is None else min(command.issued_at_ms, now_ms)
        deadline_ms = issued + command.ttl_ms
        registration = self._worker_log.registration
        target = command.target
        if target is not None and not target.matches(
            model=registration.model, instance=registration.instance, rank=registration.rank
        ):
            self._close(task, command, Status.NOT_APPLICABLE)
        elif now_ms > deadline_ms:
            self._close(task, command, Status.EXPIRED)
        elif isinstance(command, Ping):
            self._close(task, command, Status.DONE)
        elif not self._engine.info.stores:
            self._close(task, command, Status.NOT_APPLICABLE)
        elif isinstance(command, Prefetch):
            self._queue(task, command, deadline_ms)
        else:
            self._at_once(task, command, deadline_ms)

    def settle(self) -> None:
        """Wait until the long lane is empty: after a crash commands are carried out one at a time."""
        while not self._stopping and not self._prefetches.wait_idle(0.2):
            pass

    def retry(self) -> None:
        """Try deferred chunks again, if it is time."""
        if not self._deferred or time.monotonic() < self._retry_at:
            return
        self._retry_at = time.monotonic() + self._retry_s
        for evict in list(self._deferred):
            item = evict.timed
            places = evict.open_places()
            if not self._guarded(item, partial(self._evict, evict, places)):
                if self._stopping:
                    return  # it stays in hand
                self._deferred.remove(evict)  # failed, and answered
            elif not evict.open_places() or self._clock.now_ms() > item.deadline_ms:
                self._deferred.remove(evict)
                self._finish_timed(item)

    # -- lanes -------------------------------------------------------------------------------------------------

    def _queue(self, task: Task, command: Prefetch, deadline_ms: int) -> None:
        if self._worker_log.full or self._prefetches.hashes + len(command.chunk_hashes) > MAX_QUEUED_HASHES:
            error = Overloaded(f"{self._prefetches.waiting} prefetches wait already")
            self._close(task, command, Status.FAILED, error)
            return
        self._supersede(command)
        self._prefetches.submit(PrefetchJob(task, command, deadline_ms, lambda result: self._finish(task, result)))

    def _at_once(self, task: Task, command: Evict | Lookup, deadline_ms: int) -> None:
        item = _Timed(task, command, Tally(command.chunk_hashes), deadline_ms, self._clock.now_ms())
        if isinstance(command, Lookup):
            self._guarded(item, lambda: self._lookup(item, command))
            return
        evict = _Eviction(item, command, self._prefetches.submitted)
        everything = range(len(command.chunk_hashes))
        if not self._guarded(item, lambda: self._evict(evict, everything)):
            return
        if item.tally.open_places() and not self._worker_log.full:
            self._defer(evict)
        else:
            self._finish_timed(item)

    def _guarded(self, item: _Timed, verb: Callable[[], bool]) -> bool:
        """What the verb says; False after an error, which has then been answered."""
        try:
            return verb()
        except Exception as fault:  # noqa: BLE001 - whatever the engine raises is this command's failure, not ours
            _log.exception("%s %s failed in the engine", item.command.TYPE, item.task.envelope.id)
            self._finish_timed(item, Status.FAILED, failure(fault))
            return False
        finally:
            self._busy_since = None

    def _lookup(self, item: _Timed, command: Lookup) -> bool:
        self._busy_since = time.monotonic()
        found = self._engine.lookup(command.chunk_hashes, tags=command.tags)
        tiers = self._engine.info.tiers[:8]
        bits = {tier: 1 << bit for bit, tier in enumerate(tiers)}
        masks = bytes(sum(bits.get(tier, 0) for tier in location.tiers) for location in found)
        for place, location in enumerate(found):
            outcome = _HELD if location.tiers else _NOWHERE
            item.tally.put(place, outcome)
        self._finish_timed(item, held=Held(tiers, masks))
        return True

    def _evict(self, evict: _Eviction, places: range | list[int]) -> bool:
        """Evict the chunks at these places, tail first; False when a stop came in between."""
        command, tally = evict.command, evict.timed.tally
        chunks = command.chunk_hashes
        awaited = self._overtake(evict, places) if self._prefetches.waiting else set()
        if awaited:
            for place in places:
                if chunks[place] in awaited:
                    tally.put(place, _AWAITED)
            places = [place for place in places if chunks[place] not in awaited]
        for end in range(len(places), 0, -SLICE):
            if self._stopping:
                return False
            part = places[max(0, end - SLICE) : end]
            wanted = chunks[part.start : part.stop] if isinstance(part, range) else [chunks[place] for place in part]
            self._busy_since = time.monotonic()
            outcomes = self._engine.evict(wanted, tags=command.tags, locations=command.locations)
            if isinstance(part, range):  # the first time, and all of them
                tally.put_run(part.start, outcomes)
            else:
                for place, outcome in zip(part, outcomes, strict=True):
                    tally.put(place, outcome)
        self._busy_since = None
        return True

    def _overtake(self, evict: _Eviction, places: range | list[int]) -> set[ChunkHash]:
        """Tell earlier prefetches what they need not bring any more; the chunks that one of them still needs."""
        command = evict.command
        wanted = {command.chunk_hashes[place] for place in places}
        if command.locations is None or DDR in command.locations:
            self._prefetches.drop(wanted, command.tags)
            return set()
        # From the SSD alone: a prefetch that came before still needs what it has not read.
        return self._prefetches.awaits(wanted, command.tags, evict.prefetches)

    def _defer(self, evict: _Eviction) -> None:
        self._counters.add("deferred")
        self._worker_log.interim(evict.timed.task.entry_id, evict.timed.result(Status.DEFERRED))
        if not self._deferred:
            self._retry_at = time.monotonic() + self._retry_s
        self._deferred.append(evict)

    def _supersede(self, command: Prefetch) -> None:
        """A prefetch that comes after a deferred evict keeps the chunks: per chunk the later command holds."""
        wanted = set(command.chunk_hashes)
        for item in self._deferred:
            if item.command.tags == command.tags and (item.command.locations is None or DDR in item.command.locations):
                item.superseded |= wanted.intersection(item.command.chunk_hashes)

    # -- results -----------------------------------------------------------------------------------------------

    def _finish_timed(
        self, item: _Timed, status: Status | None = None, error: KVBusError | None = None, held: Held | None = None
    ) -> None:
        self._finish(item.task, item.result(status, error, held))

    def _close(self, task: Task, command: Command, status: Status, error: KVBusError | None = None) -> None:
        """A result for which the engine is not asked."""
        result = Tally(() if isinstance(command, Ping) else command.chunk_hashes).result(
            task.envelope.id,
            command,
            status=status,
            error=error,
            attempt=task.attempt,
            started_at_ms=self._clock.now_ms(),
        )
        self._finish(task, result)

    def _finish(self, task: Task, result: CommandResult) -> None:
        counted = zip(_COUNTERS, msgspec.structs.astuple(result.counts), strict=True)
        self._counters.add_all({f"results_{result.status}": 1, **{name: value for name, value in counted if value}})
        self._worker_log.finish(task.entry_id, result)
