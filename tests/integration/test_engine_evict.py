"""Evict on a real engine: tiers, pins, writes in flight, accounting, and races with prefetches."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.conftest import MakeEngine
from tests.integration.outcomes import count
from worker_plugin import engine_prefetch
from worker_plugin.engine_files import read_exactly
from worker_plugin.engine_probe import codes_of
from worker_plugin.engine_tiers import Keys
from worker_plugin.engine_types import ChunkOutcome, Tags
from worker_plugin.lmcache_access import CPU_TIER, DISK_TIER

if TYPE_CHECKING:
    from tests.integration.engines import EngineUnderTest, Text


def files(engine: EngineUnderTest) -> list[str]:
    return os.listdir(engine.config.disk_dir)


def test_evict_removes_from_both_tiers_and_mends_the_accounting(engine: EngineUnderTest) -> None:
    text = engine.stored(1, 40)
    outcomes = engine.adapter.evict([*text.hashes, 99])
    assert count(outcomes) == {"evicted": 40, "missing": 1}
    assert sum(outcome.tiers for outcome in outcomes) == 80
    assert [outcome.outcome.value for outcome in outcomes] == ["evicted"] * 40 + ["missing"]
    usage = engine.adapter.usage()
    assert usage.clean, usage
    assert (usage.pool_bytes, usage.disk_bytes, engine.disk.current_cache_size, files(engine)) == (0, 0, 0, [])


def test_every_removal_mends_the_accounting_by_itself(engine: EngineUnderTest) -> None:
    text = engine.stored(1, 40)
    engine.adapter.evict(text.hashes[:20])  # this one may reconcile the whole tier, the next ones come too soon for it
    for chunk in text.hashes[20:]:
        engine.adapter.evict([chunk])
        engine.assert_clean()


@pytest.mark.parametrize(("locations", "left"), [((CPU_TIER,), (DISK_TIER,)), ((DISK_TIER,), (CPU_TIER,))])
def test_locations_limit_what_is_removed(
    engine: EngineUnderTest, locations: tuple[str, ...], left: tuple[str, ...]
) -> None:
    text = engine.stored(1, 3)
    assert count(engine.adapter.evict(text.hashes, locations=locations)) == {"evicted": 3}
    assert {engine.tiers(chunk) for chunk in text.hashes} == {left}
    assert count(engine.adapter.evict(text.hashes, locations=locations)) == {"missing": 3}
    engine.assert_holds(text)
    engine.assert_clean()


def test_the_tail_goes_first(engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    text = engine.stored(1, 40)
    removed: list[Any] = []
    for backend in (engine.cpu, engine.disk):
        real = backend.remove

        def remove(key: Any, force: bool = True, real: Any = real) -> bool:
            removed.append(key.chunk_hash)
            return bool(real(key, force=force))

        monkeypatch.setattr(backend, "remove", remove)
    engine.adapter.evict(text.hashes)
    first_seen = list(dict.fromkeys(removed))
    assert first_seen == text.hashes[::-1]


def test_chunks_pinned_in_ddr_stay_until_they_are_unpinned(engine: EngineUnderTest) -> None:
    text = engine.stored(1, 4)
    assert engine.lmcache.lookup(tokens=text.tokens[:32], lookup_id="request", pin=True) == 32
    outcomes = engine.adapter.evict(text.hashes, locations=(CPU_TIER,))
    assert [str(outcome.outcome) for outcome in outcomes] == ["in_use", "in_use", "evicted", "evicted"]
    outcomes = engine.adapter.evict(text.hashes[:2])
    assert [(str(outcome.outcome), outcome.tiers) for outcome in outcomes] == [("in_use", 0)] * 2
    assert engine.tiers(text.hashes[0]) == (CPU_TIER, DISK_TIER)
    engine.lmcache.lookup_unpin("request")
    assert {outcome.tiers for outcome in engine.adapter.evict(text.hashes[:2])} == {2}
    engine.adapter.evict(text.hashes)
    engine.assert_clean()
    assert engine.adapter.usage().pool_objects == 0


def test_a_chunk_that_is_being_unpinned_twice_leaves_ddr_too(engine: EngineUnderTest) -> None:
    text = engine.stored(1, 2)
    for memory in engine.cpu.hot_cache.values():
        memory.meta.pin_count = -1  # until LMCache has told of it, and sets it back to 0
    assert {outcome.tiers for outcome in engine.adapter.evict(text.hashes)} == {2}
    assert not engine.cpu.hot_cache


def test_chunks_pinned_on_the_ssd_stay_until_they_are_unpinned(engine: EngineUnderTest) -> None:
    text = engine.on_disk(1, 3)
    assert engine.lmcache.lookup(tokens=text.tokens[:16], lookup_id="request", pin=True) == 16
    assert count(engine.adapter.evict(text.hashes)) == {"in_use": 1, "evicted": 2}
    engine.lmcache.lookup_unpin("request")
    assert count(engine.adapter.evict(text.hashes)) == {"evicted": 1, "missing": 2}
    engine.assert_clean()


@pytest.mark.parametrize("locations", [None, (CPU_TIER,), (DISK_TIER,)])
def test_a_chunk_pinned_on_the_ssd_stays_in_ddr_too(engine: EngineUnderTest, locations: tuple[str, ...] | None) -> None:
    text = engine.on_disk(1, 2)
    assert engine.lmcache.lookup(tokens=text.tokens, lookup_id="request", pin=True) == 32
    assert count(engine.prefetch(text.hashes)) == {"loaded": 2}
    assert count(engine.adapter.evict(text.hashes, locations=locations)) == {"in_use": 2}
    assert engine.tiers(text.hashes[0]) == (CPU_TIER, DISK_TIER)
    engine.lmcache.lookup_unpin("request")
    engine.assert_clean()


def test_a_file_that_is_gone_already_leaves_no_lock_held(engine: EngineUnderTest) -> None:
    text = engine.stored(1, 3)
    for name in files(engine):
        os.remove(os.path.join(str(engine.config.disk_dir), name))
    outcomes = engine.adapter.evict(text.hashes)
    assert [(str(outcome.outcome), outcome.tiers) for outcome in outcomes] == [("evicted", 2)] * 3
    assert "gone" in outcomes[0].detail
    engine.assert_clean()
    engine.assert_holds(engine.stored(2, 2))


@contextmanager
def writes_held(engine: EngineUnderTest) -> Iterator[None]:
    """The SSD tier's writes wait until the block ends."""
    go_on = threading.Event()
    real = engine.disk.write_file

    def write_file(buffer: Any, path: str) -> None:
        assert go_on.wait(timeout=30)
        real(buffer, path)

    engine.disk.write_file = write_file
    try:
        yield
    finally:
        go_on.set()
        del engine.disk.write_file
        engine.cpu_engine.wait_stored()


def test_a_chunk_being_written_is_busy_because_it_would_come_back(engine: EngineUnderTest) -> None:
    text = engine.text(1, 2)
    with writes_held(engine):
        engine.cpu_engine.store(text.tokens, text.kv)
        outcomes = engine.adapter.evict(text.hashes)
        assert [(str(outcome.outcome), outcome.tiers) for outcome in outcomes] == [("busy", 0)] * 2
        assert count(engine.adapter.evict(text.hashes, locations=(CPU_TIER,))) == {"busy": 2}
        assert count(engine.prefetch(text.hashes)) == {"resident": 2}
    assert count(engine.adapter.evict(text.hashes)) == {"evicted": 2}
    engine.assert_clean()


def test_storing_again_drifts_and_reconcile_mends_it(engine: EngineUnderTest) -> None:
    text = engine.stored(1, 5)
    engine.cpu_engine.store(text.tokens, text.kv)
    engine.cpu_engine.wait_stored()
    assert engine.adapter.usage().disk_drift == 5 * engine.config.chunk_bytes
    assert engine.adapter.reconcile()
    engine.assert_clean()


def test_reconcile_waits_for_writes_to_end(engine: EngineUnderTest) -> None:
    text = engine.text(1, 1)
    with writes_held(engine):
        engine.cpu_engine.store(text.tokens, text.kv)
        assert not engine.adapter.reconcile()
    assert engine.adapter.reconcile()
    assert engine.disk.current_cache_size == engine.config.chunk_bytes


@pytest.mark.parametrize("tier", [CPU_TIER, DISK_TIER])
def test_a_stuck_lock_is_reported_and_the_other_tier_is_served(make_engine: MakeEngine, tier: str) -> None:
    engine = make_engine(lock_timeout=0.05)
    text = engine.stored(1, 40)
    lock = engine.cpu.cpu_lock if tier == CPU_TIER else engine.disk.disk_lock
    with lock:
        outcomes = engine.adapter.evict(text.hashes)
        assert [(str(outcome.outcome), outcome.tiers) for outcome in outcomes] == [("tier_stuck", 1)] * 40
    assert {engine.tiers(chunk) for chunk in text.hashes} == {(tier,)}
    assert count(engine.adapter.evict(text.hashes)) == {"evicted": 40}
    engine.assert_clean()


def test_chunks_that_a_prefetch_holds_are_evicted_at_once(engine: EngineUnderTest) -> None:
    text = engine.on_disk(1, 4)
    with engine.adapter.prefetching() as session:
        for chunk in text.hashes:
            session.load(chunk)
        assert count(engine.adapter.evict(text.hashes[:3])) == {"evicted": 3}
        usage = engine.adapter.usage()
        assert (usage.pool_objects, usage.session_holds) == (1, 1)
        assert usage.session_bytes == engine.config.chunk_bytes
        assert str(session.load(text.hashes[0]).outcome) == "missing"
    engine.assert_clean()
    assert engine.tiers(text.hashes[3]) == (CPU_TIER, DISK_TIER)


class Overtaken:
    """A prefetch of one chunk, stopped after its file was read; `evict` comes there."""

    def __init__(self, engine: EngineUnderTest, text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.text = engine, text
        self._read, self._go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(engine_prefetch, "read_exactly", self._read_and_wait)

    def _read_and_wait(self, *arguments: Any, **options: Any) -> None:
        read_exactly(*arguments, **options)
        self._read.set()
        assert self._go_on.wait(timeout=30)

    def evict(self, locations: tuple[str, ...] | None) -> tuple[ChunkOutcome, ChunkOutcome]:
        """What the evict answered, then what the prefetch answered."""
        prefetched: list[ChunkOutcome] = []
        thread = threading.Thread(target=lambda: prefetched.extend(self.engine.prefetch(self.text.hashes)))
        thread.start()
        assert self._read.wait(timeout=30)
        (evicted,) = self.engine.adapter.evict(self.text.hashes, locations=locations)
        self._go_on.set()
        thread.join(timeout=30)
        return evicted, prefetched[0]


@pytest.mark.parametrize(
    ("locations", "evicted", "prefetched", "left"),
    [
        (None, "evicted", "evicted", ()),
        ((CPU_TIER,), "missing", "evicted", (DISK_TIER,)),
        ((DISK_TIER,), "evicted", "loaded", (CPU_TIER,)),
    ],
)
def test_a_load_does_not_bring_back_what_was_evicted_meanwhile(
    engine: EngineUnderTest,
    monkeypatch: pytest.MonkeyPatch,
    locations: tuple[str, ...] | None,
    evicted: str,
    prefetched: str,
    left: tuple[str, ...],
) -> None:
    text = engine.on_disk(1, 1)
    evict, load = Overtaken(engine, text, monkeypatch).evict(locations)
    assert (str(evict.outcome), str(load.outcome)) == (evicted, prefetched)
    assert engine.tiers(text.hashes[0]) == left
    engine.assert_clean()


class TestStalePins:
    """With asynchronous loading LMCache leaves a pin on the SSD entry for each hit."""

    @pytest.fixture
    def engine(self, make_engine: MakeEngine) -> EngineUnderTest:
        engine = make_engine(async_loading=True)
        engine.manager.async_lookup_server = _LookupServer()
        return engine

    def lookup(self, engine: EngineUnderTest, text: Text, lookup_id: str) -> None:
        engine.lmcache.async_lookup_and_prefetch(lookup_id, tokens=text.tokens, pin=True)
        assert engine.manager.async_lookup_server.answered.wait(timeout=30)

    def test_they_do_not_keep_chunks_on_the_ssd(self, engine: EngineUnderTest) -> None:
        text = engine.on_disk(1, 3)
        self.lookup(engine, text, "request")
        engine.lmcache.lookup_unpin("request")
        assert engine.adapter.usage().disk_pins == 3
        assert count(engine.adapter.evict(text.hashes)) == {"evicted": 3}
        engine.assert_clean()
        # LMCache would raise KeyError here for chunks that were removed between a pinned lookup and this one.
        assert engine.lmcache.lookup(tokens=text.tokens, lookup_id="next", pin=True) == 0

    def test_pins_that_a_lookup_lists_are_respected(self, engine: EngineUnderTest) -> None:
        text = engine.on_disk(1, 2)
        self.lookup(engine, text, "request")
        engine.lmcache.lookup_unpin("request")
        engine.adapter.evict(text.hashes, locations=(CPU_TIER,))
        assert engine.lmcache.lookup(tokens=text.tokens[:16], lookup_id="other", pin=True) == 16
        assert count(engine.adapter.evict(text.hashes)) == {"in_use": 1, "evicted": 1}
        engine.lmcache.lookup_unpin("other")
        assert count(engine.adapter.evict(text.hashes)) == {"evicted": 1, "missing": 1}
        engine.assert_clean()

    def test_pins_of_a_load_under_way_are_respected(self, engine: EngineUnderTest) -> None:
        text = engine.on_disk(1, 2)
        go_on, real = threading.Event(), engine.disk.read_file

        def read_file(*arguments: Any) -> None:
            assert go_on.wait(timeout=30)
            real(*arguments)

        engine.disk.read_file = read_file
        engine.lmcache.async_lookup_and_prefetch("request", tokens=text.tokens, pin=True)
        while engine.adapter.usage().loading_events == 0:
            pass
        assert count(engine.adapter.evict(text.hashes)) == {"in_use": 2}
        go_on.set()
        assert engine.manager.async_lookup_server.answered.wait(timeout=30)
        engine.lmcache.lookup_unpin("request")
        assert count(engine.adapter.evict(text.hashes)) == {"evicted": 2}
        engine.assert_clean()


class _LookupServer:
    """Stands where LMCache answers the scheduler."""

    def __init__(self) -> None:
        self.answered = threading.Event()

    def send_response_to_scheduler(self, lookup_id: str, retrieved_length: int) -> None:
        self.answered.set()


@pytest.mark.parametrize("tags", [(), (("user", "a"), ("turn", "2"))])
def test_the_hashes_of_keys_that_are_not_made_are_those_of_lmcache(engine: EngineUnderTest, tags: Tags) -> None:
    """Else absent chunks would be looked for one by one, and nothing but the benchmark would tell."""
    chunks = [*engine.text(1, 5).hashes, 0, 1, 2**63, 2**64 - 1]
    keys = Keys(engine.lmcache, tags).of(chunks)
    assert codes_of(keys[0], chunks) == [hash(key) for key in keys]


@pytest.mark.parametrize("locations", [(CPU_TIER,), (DISK_TIER,), (CPU_TIER, DISK_TIER)])
def test_one_chunk_among_many_that_are_nowhere_is_found(engine: EngineUnderTest, locations: tuple[str, ...]) -> None:
    [chunk] = engine.stored(1, 1).hashes
    absent = engine.text(2, 50).hashes
    outcomes = engine.adapter.evict([*absent[:25], chunk, *absent[25:]], locations=locations)
    assert [outcome.outcome.value for outcome in outcomes] == ["missing"] * 25 + ["evicted"] + ["missing"] * 25
    assert outcomes[25].tiers == len(locations)
    # The same chunk under another tag is another one.
    assert count(engine.adapter.evict([chunk, *absent], tags=(("user", "a"),))) == {"missing": 51}
    engine.assert_clean()


def test_keys_that_hash_in_another_way_are_made(engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    text = engine.text(1, 3)
    key_class = type(engine.key(text.hashes[0]))
    plain = key_class.__hash__
    monkeypatch.setattr(key_class, "__hash__", lambda key: plain(key) ^ 1)
    assert codes_of(engine.key(text.hashes[0]), text.hashes) is None
    engine.cpu_engine.store(text.tokens, text.kv)
    engine.cpu_engine.wait_stored()
    assert count(engine.adapter.evict([5, *text.hashes])) == {"evicted": 3, "missing": 1}
