"""GET /memory/events: the events stream as server-sent events, resumable with Last-Event-ID."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf

import msgspec
from prometheus_client import Gauge
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvbus.errors import BusError, BusUnavailable
from kvbus.event_stream import Delivery, EventStream
from kvbus.facade.errors import Refused
from kvbus.facade.service import AWAY_AFTER_S, Facade
from kvbus.protocol.codec import to_plain
from kvbus.streams.position import Gap, GapKind, id_key

MAX_STREAMS = 64
"""Each holds a thread and a connection to the server."""
BLOCK_MS = 1_000
KEEP_ALIVE_S = 15.0
"""A comment goes out after so long without an event, so that proxies keep the connection."""
ENTRY_ID = "^[0-9]{1,19}-[0-9]{1,19}$"


class Events:
    """The open event streams. Belongs to one event loop."""

    def __init__(self, facade: Facade, open_now: Gauge) -> None:
        self._facade = facade
        self._open_now = open_now
        self._open = 0

    async def follow(self, start: str, seconds: float | None) -> EventResponse:
        """Server-sent events from `start`: "start", "end", or behind an entry id. Raises Refused, BusError.

        seconds: end after so long; None: never.
        """
        if self._open >= MAX_STREAMS:
            raise Refused(503, f"{MAX_STREAMS} event streams are open already", code="busy", hint="Close one of them.")
        self._count(1)
        # Each reader blocks in a thread of its own: it must not hold up commands.
        thread = ThreadPoolExecutor(1, thread_name_prefix="kvbus-sse")

        def release(stream: EventStream | None) -> None:
            self._count(-1)
            if stream is not None:
                stream.close()
                thread.submit(stream.__exit__, None, None, None)
            thread.shutdown(wait=False)

        try:
            async with asyncio.timeout(AWAY_AFTER_S):
                stream, gap = await asyncio.get_running_loop().run_in_executor(thread, self._begin, start)
        except BaseException as error:
            release(None)
            if isinstance(error, TimeoutError):
                raise BusUnavailable(f"the bus did not answer within {AWAY_AFTER_S:g} s") from None
            raise
        return EventResponse(self._frames(stream, gap, thread, seconds), lambda: release(stream))

    def _count(self, change: int) -> None:
        self._open += change
        self._open_now.set(self._open)

    def _begin(self, start: str) -> tuple[EventStream, Gap | None]:
        client = self._facade.client
        if start in ("start", "end"):
            return client.events(start=start, block_ms=BLOCK_MS), None
        state = client.log.state(client.bus.keys.events)
        if id_key(start) > id_key(state.last_id):
            reason = "the server does not know this entry: it holds another history"
            lost = Gap(GapKind.HISTORY_LOST, None, start, state.first_id, reason)
            return client.events(start="start", block_ms=BLOCK_MS), lost
        gap: Gap | None = None
        if state.removed and id_key(start) < id_key(state.first_id):
            gap = Gap(GapKind.TRIMMED, None, start, state.first_id, "entries after it may have been trimmed away")
        return client.events(start=start, block_ms=BLOCK_MS), gap

    async def _frames(
        self, stream: EventStream, gap: Gap | None, thread: ThreadPoolExecutor, seconds: float | None
    ) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        now = loop.time()
        end, quiet_since, backoff = now + (seconds if seconds is not None else inf), now, 0.05
        yield b"retry: 1000\n\n"
        if gap is not None:
            yield _frame("kvbus.gap", gap)
        while not self._facade.stopping.is_set() and (now := loop.time()) < end:
            block_ms = max(1, min(BLOCK_MS, int((end - now) * 1000))) if end < inf else BLOCK_MS
            try:
                batch = await loop.run_in_executor(thread, lambda ms=block_ms: list(stream.read(block_ms=ms)))  # type: ignore[misc]
                backoff = 0.05
            except BusError:
                batch = []
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 2, 2.0)
            if batch:
                yield b"".join(map(encode_delivery, batch))
                quiet_since = loop.time()
            elif loop.time() - quiet_since >= KEEP_ALIVE_S:
                yield b": still here\n\n"
                quiet_since = loop.time()


class EventResponse(StreamingResponse):
    """Gives back what the stream holds, however it ends, even before its first byte."""

    def __init__(self, frames: AsyncIterator[bytes], release: Callable[[], None]) -> None:
        # X-Accel-Buffering: a proxy must not collect events before it passes them on.
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(frames, media_type="text/event-stream", headers=headers)
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release()


def encode_delivery(delivery: Delivery) -> bytes:
    """One event, after what is known to be missing before it."""
    frames = []
    if delivery.gap is not None:
        frames.append(_frame("kvbus.gap", delivery.gap))
    if delivery.hole is not None:
        frames.append(_frame("kvbus.hole", delivery.hole))
    data = msgspec.json.encode(to_plain(delivery.event))
    frames.append(b"id: %s\nevent: %s\ndata: %s\n\n" % (delivery.entry_id.encode(), delivery.event.TYPE.encode(), data))
    return b"".join(frames)


def _frame(name: str, value: msgspec.Struct) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(value))
