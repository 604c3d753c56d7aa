"""Workers, client, facade, publisher and reader on one server, with traffic through all while the server misbehaves.

What was accepted must arrive, what was dropped must be counted, whoever was blocked must come back by itself.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec

from kvbus.client import KVBus
from kvbus.errors import BusError
from kvbus.event_stream import Delivery
from kvbus.protocol import (
    DDR,
    Command,
    Evict,
    Ping,
    Prefetch,
    RequestFinished,
    Results,
    WorkerGap,
    decode_entry,
    new_message_id,
)
from kvbus.settings import Settings
from kvbus.streams.connection import Bus
from kvbus.streams.subscription import message_id
from publisher import FinishedRequest, Publisher
from tests.facade_kit import RunningFacade
from tests.servers import eventually
from worker_plugin.engine_types import Engine
from worker_plugin.runtime import Worker

FAST: dict[str, Any] = {
    "connect_timeout_ms": 500,
    "reply_timeout_ms": 700,
    "block_ms": 200,
    "heartbeat_ms": 100,
    "live_ms": 1_500,
    "stats_ms": 500,
    "deferred_retry_ms": 20,
}
"""Times short enough that a test sees every timeout run out."""


class Rig:
    """One of each, and the traffic. chunks: what the engines hold on the SSD."""

    def __init__(
        self, settings: Settings, engines: list[Engine], chunks: list[int], *, spool: str | None = None
    ) -> None:
        self.settings = settings
        self.chunks = chunks
        self.workers = [
            Worker(engine, settings=settings, instance="i", rank=rank) for rank, engine in enumerate(engines)
        ]
        self.client = KVBus(settings, issuer="rig")
        self.publisher = Publisher(settings, name="i/scheduler", instance="i")
        self.facade: RunningFacade
        self.accepted: list[str] = []
        """Ids of commands that the server has acknowledged to the client."""
        self.posted: list[str] = []
        """Ids of commands that the facade has told its client."""
        self.replies: Counter[int] = Counter()
        """What the facade answered, by status."""
        self.delivered: list[Delivery] = []
        self.send_errors: Counter[str] = Counter()
        self._stop = threading.Event()
        self._pause = threading.Event()
        self._sending, self._publishing, self._posting = threading.Lock(), threading.Lock(), threading.Lock()
        self._threads: list[threading.Thread] = []
        self._numbers = itertools.count()
        self.published = 0
        self._events: Any = None

    def start(self) -> None:
        for worker in self.workers:
            worker.start()
        for worker in self.workers:
            assert worker.wait_ready(20)
        self.publisher.start()
        self.facade = RunningFacade(msgspec.structs.replace(self.settings, rest_wait_ms=3_000))
        self._events = self.client.events(start="end", block_ms=200)
        for run in (self._send, self._post, self._publish, self._read):
            thread = threading.Thread(target=run, name=f"rig{run.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        self._stop.set()
        if self._events is not None:
            self._events.close()
        for thread in self._threads:
            thread.join(20)
        self.facade.stop()
        for worker in self.workers:
            assert worker.stop(), "a thread of the worker did not end"
        self.publisher.close()
        self.client.close()
        assert not any(thread.is_alive() for thread in self._threads)

    # -- traffic -----------------------------------------------------------------------------------------------

    def command(self) -> Command:
        number = next(self._numbers)
        some = tuple(self.chunks[number % len(self.chunks) :][:4])
        kinds: tuple[Command, ...] = (
            Evict(chunk_hashes=some, locations=(DDR,)),
            Prefetch(chunk_hashes=some, ttl_ms=300_000),
            Ping(ttl_ms=300_000),
        )
        return kinds[number % 3]

    def _send(self) -> None:
        while not self._stop.wait(0.01):
            with self._sending:
                if not self._pause.is_set():
                    self._send_one(self.command(), new_message_id())

    def _send_one(self, command: Command, own_id: str) -> None:
        """The same command under the same id until it is acknowledged, as any client should."""
        while not self._stop.is_set():
            try:
                self.client.send(command, command_id=own_id, timeout_s=0.2)
                self.accepted.append(own_id)
                return
            except BusError as error:
                self.send_errors[error.code] += 1
                time.sleep(0.05)

    def _post(self) -> None:
        while not self._stop.wait(0.05):
            with self._posting:
                if not self._pause.is_set():
                    self._post_one()

    def _post_one(self) -> None:
        """The facade always answers: that all is done, what is not, or that the bus is away."""
        some = [f"{chunk:x}" for chunk in self.chunks[:2]]
        reply = self.facade.post("/memory/evict", {"chunk_hashes": some, "locations": [DDR]})
        self.replies[reply.status_code] += 1
        assert reply.status_code in (200, 500, 503), reply.text
        if "command_id" in reply.json():
            self.posted.append(reply.json()["command_id"])

    def _publish(self) -> None:
        while not self._stop.wait(0.01):
            with self._publishing:
                if not self._pause.is_set():
                    self._publish_one()

    def _publish_one(self) -> None:
        finished = FinishedRequest(
            request_id=f"r{self.published}", instance="i", reason="stop", chunk_hashes=tuple(self.chunks[:8])
        )
        self.publisher.publish(finished)
        self.published += 1

    def _read(self) -> None:
        for delivery in self._events:
            self.delivered.append(delivery)

    def pause(self) -> None:
        """No more traffic once this returns: a command that is being sent is accepted first."""
        self._pause.set()
        with self._sending, self._publishing, self._posting:
            return

    def resume(self) -> None:
        self._pause.clear()

    # -- questions ---------------------------------------------------------------------------------------------

    def flowing(self) -> None:
        """Wait until commands are answered and events are delivered anew, the facade's clients included."""
        commands, events, replies = len(self.accepted), len(self.requests), self.replies[200]
        eventually(lambda: len(self.accepted) > commands + 3, what="commands to be accepted")
        latest = self.accepted[-1]
        eventually(lambda: self.answered(latest), what="a command to be answered")
        eventually(lambda: len(self.requests) > events + 3, what="events to be delivered")
        eventually(lambda: self.replies[200] > replies + 3, what="the facade to carry commands out")

    def answered(self, command_id: str) -> bool:
        state = self.client.answers.state(command_id)
        return state is not None and len(state.finals) == len(self.workers)

    @property
    def requests(self) -> list[RequestFinished]:
        return [delivery.event for delivery in self.delivered if isinstance(delivery.event, RequestFinished)]

    @property
    def gaps(self) -> list[WorkerGap]:
        return [delivery.event for delivery in self.delivered if isinstance(delivery.event, WorkerGap)]

    def settle(self) -> None:
        """Stop the traffic and wait until all that was accepted has been answered and delivered."""
        self.pause()
        eventually(
            lambda: all(self.answered(own_id) for own_id in (*self.accepted[-200:], *self.posted[-50:])),
            what="the last answers",
        )
        dropped = self.publisher.counters.get("events_dropped")
        eventually(lambda: len({event.seq for event in self.requests}) >= self.published - dropped, what="the events")

    def finals(self, bus: Bus) -> Counter[tuple[str, str]]:
        """How many final results each (worker, command) has on the stream."""
        found: Counter[tuple[str, str]] = Counter()
        for entry_id, fields in self.client.log.scan(bus.keys.results):
            message = decode_entry(entry_id, fields).message
            assert isinstance(message, Results)
            found.update((message.worker, result.command_id) for result in message.results if result.status.final)
        return found

    def assert_nothing_lost(self) -> None:
        """Within one history: one final result for each command and worker, every event once and in order."""
        self.settle()
        finals = self.finals(self.client.bus)
        assert {pair: number for pair, number in finals.items() if number > 1} == {}
        owed = {(worker.name, own_id) for worker in self.workers for own_id in (*self.accepted, *self.posted)}
        lost = owed - finals.keys()
        if lost:
            log, keys = self.client.log, self.client.bus.keys
            there = {message_id(*entry) for entry in log.scan(keys.commands)}
            told = [(worker, command_id, command_id in there) for worker, command_id in sorted(lost)]
            raise AssertionError(f"no final result of (worker, command, is it on the stream?): {told}")
        self.assert_events_complete()

    def assert_events_complete(self) -> None:
        """Delivered or told as dropped: nothing else, nothing twice, in order."""
        seqs = [event.seq for event in self.requests]
        assert seqs == sorted(set(seqs)), "out of order or twice"
        holes = sum(delivery.hole.missed for delivery in self.delivered if delivery.hole)
        assert len(seqs) + holes == self.published
        assert holes == self.publisher.counters.get("events_dropped")


@contextmanager
def running(rig: Rig) -> Iterator[Rig]:
    with ExitStack() as stack:
        stack.callback(rig.close)
        rig.start()
        rig.flowing()
        yield rig
