"""The asyncio face of kvbus.client: the same commands, handles and events, awaited.

    async with AsyncKVBus() as bus:
        handle = await bus.evict(old_chunks)
        state = await handle.wait(5.0)
        async for delivery in bus.events():
            ...

The threads underneath are those of kvbus.client: one sends what many tasks ask for in few round trips, and one reader
of the results stream wakes every task that waits, so that a thousand waiting tasks cost no thread and no call to the
server.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from kvbus.answers import Answer, CommandState
from kvbus.client import SEND_TIMEOUT_S, CommandHandle, Hashes, KVBus
from kvbus.errors import BusError, ProtocolError, Stopped
from kvbus.event_stream import Delivery, Start
from kvbus.metrics import RateLimitedLog
from kvbus.protocol.codec import new_message_id
from kvbus.protocol.commands import (
    EVICT_TTL_MS,
    LOOKUP_TTL_MS,
    PREFETCH_TTL_MS,
    Command,
    Evict,
    Lookup,
    Ping,
    Prefetch,
    Tags,
    Target,
)
from kvbus.protocol.hashes import to_hashes
from kvbus.settings import Settings
from kvbus.streams.registry import Member

_log = logging.getLogger(__name__)

T = TypeVar("T")
THREADS = 8
"""For calls that wait for the server; one of them sends."""
BATCH = 64
"""Commands that go in one round trip."""
EVENTS_BLOCK_MS = 1_000
"""How long a cancelled event reader may still wait for the server."""


def settled(state: CommandState) -> bool:
    """The usual end of a wait: every live worker has given its final answer."""
    return state.settled


class _Wakeups:
    """Resolves futures of one loop from other threads: one wake-up of the loop serves all that are resolved by then."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._done: deque[tuple[asyncio.Future[Any], Any]] = deque()
        self._lock = threading.Lock()
        self._scheduled = False

    def resolve(self, future: asyncio.Future[Any], outcome: Any) -> None:
        """Set the future's result, or its exception if the outcome is one, unless it is done already."""
        self._done.append((future, outcome))
        with self._lock:
            if self._scheduled:
                return
            self._scheduled = True
        try:
            self.loop.call_soon_threadsafe(self._run)
        except RuntimeError:
            if not self.loop.is_closed():  # a loop that has ended has nobody left to wake
                raise

    def _run(self) -> None:
        with self._lock:
            self._scheduled = False
        while self._done:
            future, outcome = self._done.popleft()
            if future.done():
                continue
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


class AsyncHandle:
    """A command on its way, see kvbus.client.CommandHandle."""

    def __init__(self, handle: CommandHandle, wakeups: _Wakeups) -> None:
        self.sync = handle
        self.command = handle.command
        self.command_id = handle.command_id
        self.entry_id = handle.entry_id
        self.members = handle.members
        self._wakeups = wakeups

    def __repr__(self) -> str:
        return f"AsyncHandle({self.command.TYPE} {self.command_id})"

    @property
    def state(self) -> CommandState:
        """What is known now."""
        return self.sync.state

    async def wait(
        self, timeout_s: float | None = None, *, until: Callable[[CommandState], bool] = settled
    ) -> CommandState:
        """What is known when `until` first holds, or when the time is over, which is no error.

        timeout_s: None takes the command's own time to live and a little more. until: called in the reader's thread
        at every change; must not block.
        """
        reached: asyncio.Future[None] = self._wakeups.loop.create_future()
        latest = [CommandState(self.command_id)]

        def see(state: CommandState) -> None:
            latest[0] = state
            if until(state):
                self._wakeups.resolve(reached, None)

        end = self.sync.watch(see)
        try:
            async with asyncio.timeout(self.command.ttl_ms / 1000 + 5.0 if timeout_s is None else timeout_s):
                await reached
        except TimeoutError:
            pass  # what there is counts
        finally:
            end()
        return latest[0]

    async def results(self, timeout_s: float | None = None) -> dict[str, Answer]:
        """The final results by worker, but raises NotAnswered, naming them, unless every live worker has answered."""
        return self.sync.finals(await self.wait(timeout_s))


class _Sending:
    """A command that waits for its turn to be sent."""

    def __init__(
        self, command: Command, command_id: str | None, timeout_s: float, need_workers: bool, wakeups: _Wakeups
    ) -> None:
        self.command = command
        self.command_id = command_id
        self.timeout_s = timeout_s
        self.need_workers = need_workers
        self.wakeups = wakeups
        self.sent: asyncio.Future[CommandHandle] = wakeups.loop.create_future()

    @property
    def goes_with(self) -> tuple[float, bool]:
        return self.timeout_s, self.need_workers

    def resolve(self, outcome: CommandHandle | BaseException) -> None:
        self.wakeups.resolve(self.sent, outcome)


class AsyncKVBus:
    """One memory system's end of the bus, for one event loop at a time.

    settings: None reads KVBUS_* from the environment. client: one that exists already, which is then not closed.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        issuer: str | None = None,
        client: KVBus | None = None,
        threads: int = THREADS,
    ) -> None:
        self.sync = client or KVBus(settings, issuer=issuer)
        self._owned = client is None
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvbus-aio")
        self._wakeups: _Wakeups | None = None
        self._outbox: deque[_Sending] = deque()
        self._lock = threading.Lock()
        self._draining = False

    async def prefetch(
        self,
        chunk_hashes: Hashes,
        *,
        lookup_id: str | None = None,
        sources: Sequence[str] | None = None,
        tags: Tags = (),
        ttl_ms: int = PREFETCH_TTL_MS,
        target: Target | None = None,
    ) -> AsyncHandle:
        """Bring chunks into DDR, the most important first. Raises ProtocolError for bad input, BusError."""
        return await self.send(
            Prefetch(
                chunk_hashes=to_hashes(chunk_hashes),
                lookup_id=lookup_id,
                sources=None if sources is None else tuple(sources),
                tags=tags,
                ttl_ms=ttl_ms,
                target=target,
            )
        )

    async def evict(
        self,
        chunk_hashes: Hashes,
        *,
        lookup_id: str | None = None,
        locations: Sequence[str] | None = None,
        tags: Tags = (),
        ttl_ms: int = EVICT_TTL_MS,
        target: Target | None = None,
    ) -> AsyncHandle:
        """Remove chunks from the named tiers (None: from all). Raises ProtocolError for bad input, BusError."""
        return await self.send(
            Evict(
                chunk_hashes=to_hashes(chunk_hashes),
                lookup_id=lookup_id,
                locations=None if locations is None else tuple(locations),
                tags=tags,
                ttl_ms=ttl_ms,
                target=target,
            )
        )

    async def lookup(
        self, chunk_hashes: Hashes, *, tags: Tags = (), ttl_ms: int = LOOKUP_TTL_MS, target: Target | None = None
    ) -> AsyncHandle:
        """Ask which tiers hold each chunk. Raises ProtocolError, BusError."""
        return await self.send(Lookup(chunk_hashes=to_hashes(chunk_hashes), tags=tags, ttl_ms=ttl_ms, target=target))

    async def ping(self, *, ttl_ms: int = LOOKUP_TTL_MS, target: Target | None = None) -> AsyncHandle:
        """Ask every worker for a sign of life. Raises BusError."""
        return await self.send(Ping(ttl_ms=ttl_ms, target=target))

    async def send(
        self,
        command: Command,
        *,
        command_id: str | None = None,
        timeout_s: float = SEND_TIMEOUT_S,
        need_workers: bool = False,
    ) -> AsyncHandle:
        """Put any command on the stream, see KVBus.send. Raises ProtocolError, BusError, NoWorkers.

        What other tasks send meanwhile goes along. A task that is cancelled before its turn sends nothing.
        """
        loop = asyncio.get_running_loop()
        if self._wakeups is None or self._wakeups.loop is not loop:
            self._wakeups = _Wakeups(loop)
        item = _Sending(command, command_id, timeout_s, need_workers, self._wakeups)
        with self._lock:
            self._outbox.append(item)
            idle, self._draining = not self._draining, True
        if idle:
            self._pool.submit(self._drain)
        return AsyncHandle(await item.sent, item.wakeups)

    async def workers(self) -> tuple[Member, ...]:
        """Who is registered, and who of them is alive. Raises BusError."""
        return await self.call(self.sync.workers)

    async def events(self, *, reader: str | None = None, start: Start = "end") -> AsyncIterator[Delivery]:
        """Finished requests and the workers' own events, as KVBus.events; rides out an outage of the bus by itself.

        With a `reader` the place is saved behind every batch whose deliveries were all taken. Raises BusError only
        when the first place cannot be found.
        """
        loop = asyncio.get_running_loop()
        stream = await self.call(lambda: self.sync.events(reader=reader, start=start))
        # Reading blocks, and must not hold up what is sent.
        own_thread = ThreadPoolExecutor(1, thread_name_prefix="kvbus-aio-events")
        limited = RateLimitedLog(_log)
        try:
            backoff = 0.05
            while True:
                try:
                    batch = await loop.run_in_executor(own_thread, lambda: list(stream.read(block_ms=EVENTS_BLOCK_MS)))
                    backoff = 0.05
                except BusError:
                    await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                    backoff = min(backoff * 2, 2.0)
                    continue
                for delivery in batch:
                    yield delivery
                if reader is not None and batch:
                    try:
                        await self.call(stream.save)
                    except BusError as error:
                        # The next batch's place says all that this one would have; until then a restart reads it again.
                        limited.warning("unsaved", "the place of reader %s cannot be saved: %s", reader, error)
        finally:
            stream.close()  # wakes the thread; it then drops the connection itself
            own_thread.submit(stream.__exit__, None, None, None)
            own_thread.shutdown(wait=False)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a blocking call of the client in this client's own threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    async def close(self) -> None:
        """Stop the threads and close the connections, if this face opened them."""
        with self._lock:
            left = list(self._outbox)
            self._outbox.clear()
        for item in left:
            item.resolve(Stopped("this client was closed before the command was sent"))
        if self._owned:
            await asyncio.get_running_loop().run_in_executor(None, self.sync.close)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> AsyncKVBus:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- the sender's thread -----------------------------------------------------------------------------------

    def _drain(self) -> None:
        while True:
            with self._lock:
                first = self._outbox[0] if self._outbox else None
                if first is None:
                    self._draining = False
                    return
                batch: list[_Sending] = []
                while self._outbox and len(batch) < BATCH and self._outbox[0].goes_with == first.goes_with:
                    batch.append(self._outbox.popleft())
            wanted = [item for item in batch if not item.sent.done()]
            if wanted:
                self._send_batch(wanted)

    def _send_batch(self, batch: list[_Sending]) -> None:
        try:
            handles = self.sync.send_all(
                [item.command for item in batch],
                command_ids=[item.command_id or new_message_id() for item in batch],
                timeout_s=batch[0].timeout_s,
                need_workers=batch[0].need_workers,
            )
        except ProtocolError as error:
            if len(batch) == 1:
                batch[0].resolve(error)
            else:  # nothing was written: each for itself, so that only the one at fault is refused
                for item in batch:
                    self._send_batch([item])
        except BaseException as error:  # noqa: BLE001 - whatever it is, the tasks that wait are told
            for item in batch:
                item.resolve(error)
        else:
            for item, handle in zip(batch, handles, strict=True):
                item.resolve(handle)
