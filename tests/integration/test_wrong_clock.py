"""Real processes whose wall clock is an hour off: deadlines, events and ages still go by the server's time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvbus.client import KVBus
from kvbus.event_stream import EventStream
from kvbus.ops.workers import list_workers
from kvbus.protocol import DDR, SSD, Evict, Prefetch, RequestFinished, Results, Status, WorkerStarted, decode_entry
from tests.facade_processes import ROOT, FacadeProcess, WorkerProcess, environment
from tests.servers import RealServer, eventually

CLOCKS = {"ahead": 3600, "behind": -3600}
NEAR_MS = 600_000
"""A busy machine may take its time, but no hour."""
TTL_MS = 300
CHUNKS = 8
NAMES = {"ahead/0", "behind/0"}

SHIFT = """
import time
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + {shift}
time.time_ns = lambda: _time_ns() + {shift} * 10**9
"""
"""Python imports `sitecustomize` before anything else: all that runs in that process sees the wrong clock."""

SENDER = """
import json, sys
from kvbus import KVBus
with KVBus() as bus:
    print(bus.evict(json.loads(sys.argv[1]), locations=["LocalCPUBackend"], ttl_ms=int(sys.argv[2])).command_id)
"""

PUBLISHER = """
from kvbus.settings import load_settings
from publisher import FinishedRequest, Publisher
publisher = Publisher(load_settings(), name="i/publisher", instance="i")
publisher.publish(FinishedRequest(request_id="before it knew the server", instance="i", reason="stop"))
publisher.start()
publisher.publish(FinishedRequest(request_id="after", instance="i", reason="stop"))
assert publisher.close(20)
"""


class Stage:
    """A client with a right clock, and two workers, one an hour ahead, one an hour behind."""

    def __init__(self, client: KVBus, home: Path, workers: list[WorkerProcess]) -> None:
        self.client, self.home, self.workers = client, home, workers
        self._texts = 0

    def store(self) -> list[str]:
        """A new text in both tiers of both workers; returns its chunk hashes."""
        self._texts += 1
        tokens = list(range(self._texts * 10_000, self._texts * 10_000 + 16 * CHUNKS))
        hashes, _ = (worker.ask("store", tokens=tokens, seed=1)["chunk_hashes"] for worker in self.workers)
        return list(hashes)

    def tiers(self, hashes: list[str]) -> set[tuple[str, ...]]:
        """The tiers that any chunk is in, on any worker."""
        helds = [answer.result.held for answer in self.client.lookup(hashes).results(20).values()]
        return {held.tiers_of(place) for held in helds if held is not None for place in range(CHUNKS)}

    def run(self, clock: str, program: str, *arguments: str) -> str:
        """What a process with that clock prints."""
        command = (sys.executable, "-c", program, *arguments)
        return subprocess.check_output(command, env=self.env(clock), text=True, timeout=60, cwd=ROOT).strip()

    def env(self, clock: str) -> dict[str, str]:
        own = self.home / clock
        own.mkdir(exist_ok=True)
        (own / "sitecustomize.py").write_text(SHIFT.format(shift=CLOCKS[clock]))
        url, namespace = self.client.settings.redis_url, self.client.settings.namespace
        return environment(url, namespace, PYTHONPATH=f"{own}:{ROOT}", KVBUS_LIVE_MS="30000")

    def statuses(self, command_id: str) -> set[Status]:
        """The final statuses that the workers gave a command, one each, whoever sent it."""

        def finals() -> list[Status]:
            messages = [decode_entry(*entry).message for entry in self.client.log.scan(self.client.bus.keys.results)]
            results = [one for message in messages if isinstance(message, Results) for one in message.results]
            return [one.status for one in results if one.command_id == command_id and one.status.final]

        eventually(lambda: len(finals()) == len(NAMES), what="both answers")
        return set(finals())

    def too_late(self, send: Callable[[], str]) -> set[Status]:
        """The statuses of a command that no worker could read within TTL_MS. send: returns its id."""
        for worker in self.workers:
            worker.freeze()
        try:
            command_id = send()
            sent = decode_entry(*next(self.client.log.scan_back(self.client.bus.keys.commands))).message
            assert isinstance(sent, Evict | Prefetch)
            assert self.near(sent.issued_at_ms)
            over_ms = (sent.issued_at_ms or 0) + 2 * TTL_MS  # clocks are known to a few milliseconds only
            eventually(lambda: self.client.bus.server_time_ms() > over_ms)
        finally:
            for worker in self.workers:
                worker.thaw()
        return self.statuses(command_id)

    def near(self, moment_ms: int | None) -> bool:
        return moment_ms is not None and abs(moment_ms - self.client.bus.server_time_ms()) < NEAR_MS


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, _lmcache: None) -> Iterator[Stage]:
    home = tmp_path_factory.mktemp("wrong-clock")
    with ExitStack() as stack:
        server = RealServer("valkey", home / "server")
        server.start()
        stack.callback(server.close)
        made = Stage(stack.enter_context(KVBus(server.settings("wrong-clock"))), home, [])
        for clock in CLOCKS:
            disk = home / f"ssd-{clock}"
            made.workers.append(WorkerProcess(made.env(clock), disk, instance=clock, rank=0, world_size=1))
            stack.callback(made.workers[-1].stop)
        for worker in made.workers:
            worker.ready()
        eventually(lambda: {member.name for member in made.client.workers()} == NAMES, what="both registered")
        yield made


@pytest.mark.parametrize("clock", CLOCKS)
def test_these_processes_do_have_a_wrong_clock(stage: Stage, clock: str) -> None:
    told = map(float, stage.run(clock, "import time; print(time.time(), time.time_ns() / 1e9)").split())
    assert all(abs(one - time.time() - CLOCKS[clock]) < 60 for one in told)


def test_a_command_in_time_is_carried_out_by_workers_with_a_wrong_clock(stage: Stage) -> None:
    hashes = stage.store()
    for handle in (stage.client.evict(hashes, locations=[DDR], ttl_ms=30_000), stage.client.ping()):
        assert stage.statuses(handle.command_id) == {Status.DONE}
    assert stage.tiers(hashes) == {(SSD,)}
    assert stage.statuses(stage.client.prefetch(hashes).command_id) == {Status.DONE}
    assert stage.tiers(hashes) == {(DDR, SSD)}


def test_a_command_that_is_late_expires_at_workers_with_a_wrong_clock(stage: Stage) -> None:
    hashes = stage.store()
    assert stage.too_late(lambda: stage.client.evict(hashes, ttl_ms=TTL_MS).command_id) == {Status.EXPIRED}
    assert stage.tiers(hashes) == {(DDR, SSD)}, "nothing was removed"
    assert stage.too_late(lambda: stage.client.evict(hashes, ttl_ms=30_000).command_id) == {Status.DONE}


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_command_of_a_client_with_a_wrong_clock_means_the_same(stage: Stage, clock: str) -> None:
    hashes = stage.store()

    def send(ttl_ms: int) -> str:
        return stage.run(clock, SENDER, json.dumps(hashes), str(ttl_ms))

    assert stage.too_late(lambda: send(TTL_MS)) == {Status.EXPIRED}
    assert stage.tiers(hashes) == {(DDR, SSD)}
    assert stage.statuses(send(30_000)) == {Status.DONE}
    assert stage.tiers(hashes) == {(SSD,)}


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_command_of_a_facade_with_a_wrong_clock_means_the_same(stage: Stage, clock: str) -> None:
    hashes = stage.store()
    facade = FacadeProcess(stage.env(clock), stage.home / f"facade-{clock}.log")
    prefetch = {"chunk_hashes": hashes, "lookup_id": clock, "ttl_ms": TTL_MS}
    try:
        evicted = facade.post("/memory/evict", chunk_hashes=hashes, locations=[DDR])
        assert evicted.status_code == 200, evicted.text
        send = lambda: str(facade.post("/memory/prefetch", **prefetch).json()["command_id"])  # noqa: E731
        assert stage.too_late(send) == {Status.EXPIRED}
        assert stage.tiers(hashes) == {(SSD,)}
    finally:
        facade.stop()


@pytest.mark.parametrize("clock", CLOCKS)
def test_events_of_a_process_with_a_wrong_clock_carry_the_servers_time(stage: Stage, clock: str) -> None:
    stage.run(clock, PUBLISHER)
    with EventStream(stage.client.bus, reader=None, start="start", block_ms=10) as stream:
        events = [delivery.event for delivery in stream.read(count=100)]
    finished = [event.finished_at_ms for event in events if isinstance(event, RequestFinished)]
    started = [event.at_ms for event in events if isinstance(event, WorkerStarted)]
    assert len(finished) >= len(started) == 2
    assert all(map(stage.near, finished + started))


def test_the_age_of_a_worker_goes_by_the_servers_time(stage: Stage) -> None:
    for view in list_workers(stage.client.bus):
        assert stage.near(view.registration.started_at_ms)
        assert 0 < (view.age_ms or 0) < NEAR_MS
