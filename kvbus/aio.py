"""The asyncio face of kvbus.client: the same commands, handles and events, awaited.

    async with AsyncKVBus() as bus:
        handle = await bus.evict(old_chunks)
        state = await handle.wait(5.0)
        async for delivery in bus.events():
            ...

The threads underneath are those of kvbus.client: sending runs in a small pool, and one reader of the results stream
wakes every coroutine that waits, so that a thousand waiting tasks cost no thread and no call to the server.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from kvbus.answers import Answer, CommandState
from kvbus.client import SEND_TIMEOUT_S, CommandHandle, Hashes, KVBus
from kvbus.errors import BusError, NotAnswered
from kvbus.event_stream import Delivery, Start
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

T = TypeVar("T")
THREADS = 16
"""How many commands may be on their way to the server at once, per client."""
EVENTS_BLOCK_MS = 1_000
"""How long a cancelled event reader may still wait for the server."""


def settled(state: CommandState) -> bool:
    """The usual end of a wait: every live worker has given its final answer."""
    return state.settled


class AsyncHandle:
    """A command on its way, see kvbus.client.CommandHandle."""

    def __init__(self, handle: CommandHandle) -> None:
        self.sync = handle
        self.command = handle.command
        self.command_id = handle.command_id
        self.entry_id = handle.entry_id
        self.members = handle.members

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
        loop = asyncio.get_running_loop()
        reached: asyncio.Future[None] = loop.create_future()
        latest = [self.state]

        def see(state: CommandState) -> None:
            latest[0] = state
            if until(state):
                _wake(loop, reached)

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
        state = await self.wait(timeout_s)
        if not state.complete:
            silent = ", ".join([*state.waiting, *(f"{name} (died)" for name in state.dead)])
            raise NotAnswered(f"{self.command.TYPE} {self.command_id}: no final result from {silent}")
        return state.finals


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
        origin: str | None = None,
        timeout_s: float = SEND_TIMEOUT_S,
        need_workers: bool = False,
    ) -> AsyncHandle:
        """Put any command on the stream, see KVBus.send. Raises ProtocolError, BusError, NoWorkers."""
        return AsyncHandle(
            await self.call(
                lambda: self.sync.send(
                    command, command_id=command_id, origin=origin, timeout_s=timeout_s, need_workers=need_workers
                )
            )
        )

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
                    await self.call(stream.save)
        finally:
            stream.close()  # wakes the thread; it then drops the connection itself
            own_thread.submit(stream.__exit__, None, None, None)
            own_thread.shutdown(wait=False)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a blocking call of the client in this client's own threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    async def close(self) -> None:
        """Stop the threads and close the connections, if this face opened them."""
        if self._owned:
            await asyncio.get_running_loop().run_in_executor(None, self.sync.close)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> AsyncKVBus:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    """Resolve a future from another thread, once; a loop that has ended has nobody left to wake."""

    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    try:
        loop.call_soon_threadsafe(resolve)
    except RuntimeError:
        if not loop.is_closed():
            raise
