"""A worker whose engine's disk fails: the chunk concerned is told, everything else goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvbus.client import CommandHandle, KVBus
from kvbus.protocol import DDR, CommandResult, Status
from kvbus.settings import Settings
from tests.integration.conftest import MakeEngine
from tests.integration.rig import FAST
from tests.servers import RealServer, eventually
from worker_plugin.runtime import Worker

if TYPE_CHECKING:
    from tests.integration.engines import EngineUnderTest


@pytest.fixture
def settings(valkey: RealServer, namespace: str) -> Settings:
    return Settings(redis_url=valkey.url, namespace=namespace, **FAST)


@pytest.fixture
def client(settings: Settings) -> Iterator[KVBus]:
    with KVBus(settings) as made:
        yield made


@pytest.fixture
def engine(make_engine: MakeEngine, settings: Settings) -> Iterator[EngineUnderTest]:
    made = make_engine()
    with Worker(made.adapter, settings=settings, instance="i", rank=0) as worker:
        assert worker.wait_ready(20)
        yield made


def done(handle: CommandHandle) -> CommandResult:
    state = handle.wait(20)
    assert state.complete, state
    return state.answers["i/0"].result


def test_a_full_disk_costs_that_chunk_alone(client: KVBus, engine: EngineUnderTest) -> None:
    text = engine.text(1, 6)
    full = Path(engine.disk._key_to_path(engine.key(text.hashes[2])))
    full.symlink_to("/dev/full")  # every write there fails with ENOSPC
    engine.cpu_engine.store(text.tokens, text.kv)
    others = [text.hashes[place] for place in (0, 1, 3, 4, 5)]
    eventually(lambda: all(len(engine.tiers(chunk)) == 2 for chunk in others), what="the other chunks on the SSD")
    # LMCache never forgets a write that failed: to it the chunk is being written for ever.
    evicted = done(client.evict(text.hashes, locations=[DDR], ttl_ms=1_500))
    assert (evicted.status, evicted.counts.evicted, evicted.counts.busy) == (Status.PARTIAL, 5, 1)
    assert evicted.chunks.busy == (text.hashes[2],)
    loaded = done(client.prefetch(text.hashes))
    assert (loaded.counts.loaded, loaded.counts.resident + loaded.counts.busy) == (5, 1)
    engine.assert_holds(text)


def test_a_file_that_cannot_be_read_fails_alone(client: KVBus, engine: EngineUnderTest) -> None:
    text = engine.on_disk(1, 6)
    bad = Path(engine.disk.dict[engine.key(text.hashes[4])].path)
    bad.unlink()
    bad.mkdir()
    result = done(client.prefetch(text.hashes))
    assert result.counts.loaded == 5
    assert result.counts.failed + result.counts.missing == 1
    assert done(client.ping()).status is Status.DONE
    engine.disk.dict.pop(engine.key(text.hashes[4]), None)


def test_files_deleted_behind_the_engine_are_missing_and_the_rest_is_loaded(
    client: KVBus, engine: EngineUnderTest
) -> None:
    text = engine.on_disk(1, 6)
    for place in (1, 5):
        Path(engine.disk.dict[engine.key(text.hashes[place])].path).unlink()
    result = done(client.prefetch(text.hashes))
    assert (result.status, result.counts.loaded, result.counts.missing) == (Status.DONE, 4, 2)
    assert set(result.chunks.missing) == {text.hashes[1], text.hashes[5]}
    found = done(client.lookup(text.hashes)).held
    assert found is not None
    assert [bool(found.tiers_of(place)) for place in range(6)] == [True, False, True, True, True, False]
    assert engine.adapter.usage().clean


def test_a_pool_full_of_pins_answers_at_once_and_serves_again_when_they_are_gone(
    client: KVBus, make_engine: MakeEngine, settings: Settings
) -> None:
    engine = make_engine(cpu_gb=0.002)
    with Worker(engine.adapter, settings=settings, instance="i", rank=0) as worker:
        assert worker.wait_ready(20)
        wanted = engine.on_disk(1, 8)
        held = [engine.stored(number, 8) for number in range(2, 40)]
        pinned = [text for text in held if engine.lmcache.lookup(tokens=text.tokens, lookup_id=str(id(text)), pin=True)]
        assert pinned
        result = done(client.prefetch(wanted.hashes))
        assert result.status is Status.PARTIAL
        assert result.counts.no_space > 0
        assert result.counts.no_space + result.counts.loaded == 8
        for text in pinned:
            engine.lmcache.lookup_unpin(str(id(text)))
        assert done(client.prefetch(wanted.hashes)).counts.no_space == 0
        engine.assert_holds(wanted)
