"""The ledger and real LMCache engines: what a request has pinned, what a frozen worker missed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.system import System
from kvbus.client import KVBus
from kvbus.memory import MemoryConfig, MemoryService
from kvbus.protocol import parse_hash
from kvbus.streams.connection import Bus
from tests.contract.ledger_model import finished, publish
from tests.servers import eventually

pytestmark = pytest.mark.timeout(240)
CONFIG = MemoryConfig(grace_ms=0, evict_ttl_ms=400, retry_ms=50)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("ledger"), namespace="ledger", ranks=2, facade=False) as made:
        yield made


@pytest.fixture
def bus(system: System) -> Iterator[Bus]:
    bus = Bus(system.settings(block_ms=100))
    yield bus
    bus.close()


@pytest.fixture
def service(bus: Bus, tmp_path: Path) -> Iterator[MemoryService]:
    with MemoryService(bus, CONFIG) as made:
        eventually(lambda: made.ledger.store.position())
        yield made


class Talk:
    """One session's turns, stored on the engines and published."""

    seq = 0

    def __init__(self, system: System, bus: Bus, service: MemoryService, session: str) -> None:
        self.system, self.bus, self.service, self.session = system, bus, service, session

    def turn(self, first: int, chunks: int) -> list[str]:
        hashes = self.system.store(list(range(first, first + 64 * chunks)), seed=1)
        event = finished("engines", Talk.seq, [parse_hash(text) for text in hashes], session=self.session)
        Talk.seq += 1
        publish(self.bus, event)
        eventually(lambda: self.service.ledger.chunks(self.session) == event.chunk_hashes)
        return hashes


def tiers(client: KVBus, hashes: list[str]) -> set[str]:
    """All tiers of all ranks that hold any of the chunks."""
    helds = [answer.result.held for answer in client.lookup(hashes).results(30).values()]
    return {tier for held in helds if held is not None for place in range(len(hashes)) for tier in held.tiers_of(place)}


def test_pinned_chunks_go_when_they_are_free_unless_they_are_held_again(
    system: System, bus: Bus, service: MemoryService
) -> None:
    with KVBus(bus=bus) as client:
        alice, bob = Talk(system, bus, service, "alice"), Talk(system, bus, service, "bob")
        hashes = alice.turn(10_000, 4)
        tokens = list(range(10_000, 10_000 + 64 * 4))
        system.ask_all("pin", tokens=tokens, id="r1")  # a request that nobody announced
        alice.turn(20_000, 2)
        eventually(lambda: service.counters.get("evict_again_chunks") >= 4, what="the evict was tried")
        assert tiers(client, hashes) == {"LocalCPUBackend", "LocalDiskBackend"}
        # The request ends as bob's, who has half of it.
        bob.turn(10_000, 2)
        system.ask_all("unpin", id="r1")
        eventually(lambda: not tiers(client, hashes[2:]), what="the other half is evicted in the end")
        held = [answer.result.held for answer in client.lookup(hashes[:2]).results(30).values()]
        assert all(item is not None and item.tiers_of(0) and item.tiers_of(1) for item in held)
        eventually(lambda: service.ledger.totals().doomed == 0)


def test_a_waiting_evict_is_taken_back_when_the_chunk_is_held_again(system: System, bus: Bus, tmp_path: Path) -> None:
    tokens = list(range(60_000, 60_000 + 64 * 4))
    with MemoryService(bus, MemoryConfig(grace_ms=0, evict_ttl_ms=60_000)) as service, KVBus(bus=bus) as client:
        client.answers.start()
        dora, emil = Talk(system, bus, service, "dora"), Talk(system, bus, service, "emil")
        hashes = dora.turn(60_000, 4)
        system.ask_all("pin", tokens=tokens, id="r2")  # emil's request, which nobody announced
        (evict,) = service.ledger.close("dora").commands
        eventually(lambda: _answers(client, evict.command_id) == 2, what="both ranks defer it")
        emil.turn(60_000, 2)
        # behind the prefetch that keeps emil's half
        client.ping().results(30)
        system.ask_all("unpin", id="r2")
        eventually(lambda: not tiers(client, hashes[2:]), what="dora's half is evicted")
        held = [answer.result.held for answer in client.lookup(hashes[:2]).results(30).values()]
        assert all(item is not None and item.tiers_of(0) and item.tiers_of(1) for item in held)


def _answers(client: KVBus, command_id: str) -> int:
    state = client.answers.state(command_id)
    return len(state.answers) if state is not None else 0


def test_a_frozen_worker_is_told_again(system: System, bus: Bus, service: MemoryService) -> None:
    with KVBus(bus=bus) as client:
        talk = Talk(system, bus, service, "carol")
        hashes = talk.turn(40_000, 3)
        system.workers[1].signal(signal.SIGSTOP)
        try:
            service.ledger.close("carol")
            # longer than the evict's time to live
            first = client.ping(ttl_ms=1_000)
            first.wait(1.5)
        finally:
            system.workers[1].signal(signal.SIGCONT)
        eventually(lambda: not tiers(client, hashes), what="it is evicted on both ranks")
