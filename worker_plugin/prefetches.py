"""The long lane: prefetches wait here and are carried out by one thread, a chunk at a time.

Order holds per chunk, not per command: a later evict of a chunk overtakes, and the prefetch then leaves that chunk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from kvbus.errors import KVBusError
from kvbus.protocol.commands import DDR, Prefetch
from kvbus.protocol.hashes import ChunkHash
from kvbus.protocol.results import CommandResult, Outcome, Status
from kvbus.streams.connection import ServerClock
from kvbus.streams.worker_log import Task
from worker_plugin.engine_types import ChunkOutcome, Engine, PrefetchSession, Tags, to_begin
from worker_plugin.tally import AGAIN, Tally, failure

_log = logging.getLogger(__name__)

BUSY_TRIES = 20
BUSY_WAIT_S = 0.05


class PrefetchJob:
    """One prefetch in hand.

    number: its place among all that were submitted. remaining: the chunks to whom its turn has yet to come, and how
    often; one that was busy comes again.
    """

    def __init__(
        self, task: Task, command: Prefetch, deadline_ms: int, finish: Callable[[CommandResult], None]
    ) -> None:
        self.task = task
        self.command = command
        self.deadline_ms = deadline_ms
        self.finish = finish
        self.number = 0
        self.remaining = Counter(command.chunk_hashes)
        self.loading: ChunkHash | None = None
        self.dropped: set[ChunkHash] = set()


class Prefetches:
    """The queue and its thread. `submit`, `drop` and `awaits` may be called from any thread."""

    def __init__(self, engine: Engine, clock: ServerClock, *, done: Callable[[], None]) -> None:
        self._engine = engine
        self._clock = clock
        self._done = done
        self._lock = threading.Condition()
        self._queue: deque[PrefetchJob] = deque()
        self._running: PrefetchJob | None = None
        self._hashes = 0
        self._submitted = 0
        self._stop = False
        self._thread: threading.Thread | None = None
        self._busy_since: float | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvbus-prefetch", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End after the chunk that is being loaded; what is not finished stays in hand. True when the thread ended."""
        with self._lock:
            self._stop = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    @property
    def busy_since(self) -> float | None:
        """time.monotonic() at the start of the engine call that is under way."""
        return self._busy_since

    @property
    def waiting(self) -> int:
        with self._lock:
            return len(self._queue) + (self._running is not None)

    @property
    def hashes(self) -> int:
        """Chunks of all prefetches in hand."""
        with self._lock:
            return self._hashes

    @property
    def submitted(self) -> int:
        """How many there have been."""
        return self._submitted

    def submit(self, job: PrefetchJob) -> None:
        with self._lock:
            self._submitted += 1
            job.number = self._submitted
            self._queue.append(job)
            self._hashes += len(job.command.chunk_hashes)
            self._lock.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Until nothing is queued or running."""
        with self._lock:
            return self._lock.wait_for(lambda: not (self._queue or self._running), timeout_s)

    def drop(self, chunks: set[ChunkHash], tags: Tags) -> None:
        """An evict from DDR overtakes: prefetches that came before it leave these chunks."""
        with self._lock:
            for job in self._jobs(tags):
                job.dropped |= job.remaining.keys() & chunks
                if job.loading in chunks and job.loading is not None:
                    job.dropped.add(job.loading)

    def awaits(self, chunks: set[ChunkHash], tags: Tags, up_to: int) -> set[ChunkHash]:
        """Those of the chunks that one of the first `up_to` prefetches has yet to come to."""
        found: set[ChunkHash] = set()
        with self._lock:
            for job in self._jobs(tags):
                if job.number > up_to:
                    continue
                found |= (job.remaining.keys() & chunks) - job.dropped
                if job.loading in chunks and job.loading is not None:
                    found.add(job.loading)
        return found

    def _jobs(self, tags: Tags) -> list[PrefetchJob]:
        jobs = [*([self._running] if self._running else []), *self._queue]
        return [job for job in jobs if job.command.tags == tags]

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._stop or bool(self._queue))
                if self._stop:
                    return
                job = self._running = self._queue.popleft()
            try:
                result = self._carry_out(job)
                if result is not None:
                    job.finish(result)
            except Exception:  # noqa: BLE001 - the lane must outlive whatever becomes of one command
                _log.exception("prefetch %s could not be answered", job.task.envelope.id)
            with self._lock:
                self._running = None
                self._hashes -= len(job.command.chunk_hashes)
                self._lock.notify_all()
            self._done()

    def _carry_out(self, job: PrefetchJob) -> CommandResult | None:
        """The result; None when the stop came first."""
        began, started_at_ms = time.monotonic(), self._clock.now_ms()
        tally = Tally(job.command.chunk_hashes)
        status: Status | None = None
        error: KVBusError | None = None
        try:
            with self._engine.prefetching(tags=job.command.tags, sources=job.command.sources) as session:
                status = self._load_all(job, session, tally)
                self._busy_since = time.monotonic()  # its end waits for what is still being read
        except Exception as fault:  # noqa: BLE001 - whatever the engine raises is this command's failure, not ours
            _log.exception("prefetch %s failed in the engine", job.task.envelope.id)
            status, error = Status.FAILED, failure(fault)
        finally:
            self._busy_since = None
        if status is None and self._stop and tally.untried():
            return None
        return tally.result(
            job.task.envelope.id,
            job.command,
            status=status,
            error=error,
            attempt=job.task.attempt,
            started_at_ms=started_at_ms,
            duration_us=int((time.monotonic() - began) * 1e6),
        )

    def _load_all(self, job: PrefetchJob, session: PrefetchSession, tally: Tally) -> Status | None:
        chunks = job.command.chunk_hashes
        for place, chunk in enumerate(chunks):
            if self._stop:
                return None
            if self._clock.now_ms() > job.deadline_ms:
                return Status.EXPIRED
            for later in to_begin(chunks, place):
                if later not in job.dropped:
                    session.ahead(later)
            tally.put(place, self._load(job, session, chunk))
        # Chunks that were being written at that moment are in DDR or on the SSD a little later.
        for _ in range(BUSY_TRIES):
            places = tally.open_places()
            if not places or self._stop or self._clock.now_ms() > job.deadline_ms:
                break
            time.sleep(BUSY_WAIT_S)
            for place in places:
                tally.put(place, self._load(job, session, job.command.chunk_hashes[place]))
        return None

    def _load(self, job: PrefetchJob, session: PrefetchSession, chunk: ChunkHash) -> ChunkOutcome:
        with self._lock:
            if job.remaining[chunk] > 1:
                job.remaining[chunk] -= 1
            else:
                del job.remaining[chunk]
            dropped = chunk in job.dropped
            job.loading = None if dropped else chunk
        self._busy_since = time.monotonic()
        if dropped:
            session.leave(chunk)  # waits where its file is being read
            self._busy_since = None
            return ChunkOutcome(Outcome.EVICTED)
        outcome = session.load(chunk)
        with self._lock:
            job.loading = None
            overtaken = chunk in job.dropped
            if outcome.outcome in AGAIN:
                job.remaining[chunk] += 1
        if overtaken and outcome.outcome in (Outcome.LOADED, Outcome.RESIDENT):
            # The evict looked before the chunk was there.
            [evicted] = self._engine.evict([chunk], tags=job.command.tags, locations=(DDR,))
            if evicted.outcome in (Outcome.EVICTED, Outcome.MISSING):
                outcome = ChunkOutcome(Outcome.EVICTED, bytes=outcome.bytes)
            # Else a request has taken hold of it: it stays, and the evict tells so and tries again.
        self._busy_since = None
        return outcome
