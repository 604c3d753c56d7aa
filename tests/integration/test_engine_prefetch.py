"""Prefetch on a real engine: bytes, order, space, and files that are not what the index says."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.conftest import MakeEngine
from tests.integration.outcomes import count
from worker_plugin import engine_prefetch
from worker_plugin.engine_files import Changed, Damaged, read_exactly
from worker_plugin.lmcache_access import CPU_TIER, DISK_TIER

if TYPE_CHECKING:
    from tests.integration.engines import EngineUnderTest


def test_prefetched_bytes_are_those_stored(engine: EngineUnderTest) -> None:
    text = engine.on_disk(1, 10)
    outcomes = engine.prefetch(text.hashes)
    assert count(outcomes) == {"loaded": 10}
    assert {outcome.bytes for outcome in outcomes} == {engine.config.chunk_bytes}
    assert engine.tiers(text.hashes[3]) == (CPU_TIER, DISK_TIER)
    engine.disk.dict.clear()  # so that only DDR can answer
    engine.assert_holds(text)


def test_any_order_gaps_and_unknown_chunks(engine: EngineUnderTest) -> None:
    text = engine.on_disk(1, 12)
    asked = [*text.hashes[::2], 77, -1, 2**63 - 1]
    random.Random(5).shuffle(asked)
    outcomes = engine.prefetch(asked)
    assert count(outcomes) == {"loaded": 6, "missing": 3}
    assert [outcome.outcome.value == "loaded" for outcome in outcomes] == [chunk in text.hashes for chunk in asked]
    assert [engine.tiers(chunk) for chunk in text.hashes[1::2]] == [(DISK_TIER,)] * 6
    engine.assert_holds(text)


def test_resident_chunks_and_repeats_are_not_read_again(engine: EngineUnderTest) -> None:
    text = engine.stored(1, 3)
    assert count(engine.prefetch(text.hashes * 2)) == {"resident": 6}
    engine.assert_clean()


def test_sources_limit_where_chunks_come_from(engine: EngineUnderTest) -> None:
    text = engine.on_disk(1, 2)
    assert count(engine.prefetch(text.hashes, sources=(CPU_TIER,))) == {"missing": 2}
    assert count(engine.prefetch(text.hashes, sources=(DISK_TIER,))) == {"loaded": 2}


def test_everything_is_put_back_when_the_session_ends(engine: EngineUnderTest) -> None:
    text = engine.on_disk(1, 8)
    with engine.adapter.prefetching() as session:
        for chunk in text.hashes:
            session.load(chunk)
        assert engine.adapter.usage().session_holds == 8
    usage = engine.adapter.usage()
    assert usage.clean, usage
    assert (usage.pool_objects, usage.pool_bytes) == (8, 8 * engine.config.chunk_bytes)


def test_first_chunks_are_the_last_to_be_pushed_out(engine: EngineUnderTest) -> None:
    text = engine.on_disk(1, 4)
    engine.prefetch(text.hashes)
    assert [key.chunk_hash for key in engine.cpu.hot_cache] == text.hashes[::-1]


def test_pool_full_of_pinned_chunks_answers_no_space(make_engine: MakeEngine) -> None:
    engine = make_engine(cpu_gb=0.001)
    wanted = engine.on_disk(1, 5)
    while engine.adapter.usage().pool_bytes + engine.config.chunk_bytes <= engine.adapter.usage().pool_size:
        engine.stored(2 + engine.adapter.usage().pool_objects, 1)
    held = list(engine.cpu.hot_cache.values())
    for memory in held:
        memory.pin()
    assert count(engine.prefetch(wanted.hashes)) == {"no_space": 5}
    for memory in held:
        memory.unpin()
    engine.assert_clean()
    assert count(engine.prefetch(wanted.hashes)) == {"loaded": 5}


def test_a_session_takes_no_more_than_its_share(make_engine: MakeEngine) -> None:
    engine = make_engine(cpu_gb=0.001, max_share=0.25)
    fitting = engine.adapter.usage().pool_size // 4 // engine.config.chunk_bytes
    text = engine.on_disk(1, fitting + 6)
    assert count(engine.prefetch(text.hashes)) == {"loaded": fitting, "no_space": 6}
    assert count(engine.prefetch(text.hashes[fitting:])) == {"loaded": 6}
    engine.assert_clean()


@pytest.mark.parametrize("outcome", ["loaded", "resident"])
def test_a_session_keeps_its_chunks_while_the_engine_stores(make_engine: MakeEngine, outcome: str) -> None:
    engine = make_engine(cpu_gb=0.001)
    chunks = engine.adapter.usage().pool_size // engine.config.chunk_bytes
    text = engine.stored(1, chunks // 2) if outcome == "resident" else engine.on_disk(1, chunks // 2)
    with engine.adapter.prefetching() as session:
        assert count([session.load(chunk) for chunk in text.hashes]) == {outcome: chunks // 2}
        for number in range(2, 6):
            engine.stored(number, chunks // 2 - 1)
        assert all(CPU_TIER in engine.tiers(chunk) for chunk in text.hashes)
    engine.stored(7, chunks - 1)
    assert not all(CPU_TIER in engine.tiers(chunk) for chunk in text.hashes)
    engine.assert_clean()


def test_missing_file_is_missing_and_the_index_is_mended(engine: EngineUnderTest) -> None:
    text = engine.on_disk(1, 3)
    os.remove(engine.disk.dict[engine.key(text.hashes[1])].path)
    outcomes = engine.prefetch(text.hashes)
    assert [str(outcome.outcome) for outcome in outcomes] == ["loaded", "missing", "loaded"]
    assert "gone" in outcomes[1].detail
    assert engine.tiers(text.hashes[1]) == ()
    engine.assert_clean()


@pytest.mark.parametrize("change", ["short", "empty", "long"])
def test_damaged_file_is_never_taken_for_kv(engine: EngineUnderTest, change: str) -> None:
    text = engine.on_disk(1, 3)
    path = Path(engine.disk.dict[engine.key(text.hashes[1])].path)
    whole = path.read_bytes()
    path.write_bytes({"short": whole[:-1], "empty": b"", "long": whole + bytes(4097)}[change])
    outcomes = engine.prefetch(text.hashes)
    assert [str(outcome.outcome) for outcome in outcomes] == ["loaded", "missing", "loaded"]
    assert engine.tiers(text.hashes[1]) == ()
    assert not path.exists()
    engine.assert_clean()


def test_damaged_file_stays_indexed_while_a_request_has_it_pinned(engine: EngineUnderTest) -> None:
    text = engine.on_disk(1, 1)
    entry = engine.disk.dict[engine.key(text.hashes[0])]
    os.truncate(entry.path, 100)
    entry.pin()
    assert count(engine.prefetch(text.hashes)) == {"missing": 1}
    assert engine.tiers(text.hashes[0]) == (DISK_TIER,)
    entry.unpin()
    assert count(engine.prefetch(text.hashes)) == {"missing": 1}
    assert engine.tiers(text.hashes[0]) == ()


def test_unreadable_file_fails_and_stays(engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    text = engine.on_disk(1, 1)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(engine_prefetch, "read_exactly", broken)
    (outcome,) = engine.prefetch(text.hashes)
    assert (str(outcome.outcome), "Input/output" in outcome.detail) == ("failed", True)
    assert engine.tiers(text.hashes[0]) == (DISK_TIER,)
    engine.assert_clean()


def test_chunk_being_written_is_busy(engine: EngineUnderTest) -> None:
    text = engine.on_disk(1, 1)
    key = engine.key(text.hashes[0])
    engine.disk.disk_worker.insert_put_task(key)
    assert count(engine.prefetch(text.hashes)) == {"busy": 1}
    engine.disk.disk_worker.remove_put_task(key)
    assert count(engine.prefetch(text.hashes)) == {"loaded": 1}


@pytest.mark.parametrize("tier", [CPU_TIER, DISK_TIER])
def test_a_stuck_lock_is_reported_not_waited_for(make_engine: MakeEngine, tier: str) -> None:
    engine = make_engine(lock_timeout=0.05)
    text = engine.on_disk(1, 4)
    lock = engine.cpu.cpu_lock if tier == CPU_TIER else engine.disk.disk_lock
    with lock:
        outcomes = engine.prefetch(text.hashes)
        assert count(outcomes) == {"tier_stuck": 4}
        assert tier in outcomes[0].detail
        assert engine.adapter.lookup(text.hashes)[0].tiers == (DISK_TIER,)
    assert count(engine.prefetch(text.hashes)) == {"loaded": 4}
    engine.assert_clean()


def test_the_lock_getting_stuck_during_a_read_leaves_no_pin(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(lock_timeout=0.05)
    text = engine.on_disk(1, 1)

    def read_then_stick(*arguments: Any, **options: Any) -> None:
        read_exactly(*arguments, **options)
        engine.disk.disk_lock.acquire()

    monkeypatch.setattr(engine_prefetch, "read_exactly", read_then_stick)
    assert count(engine.prefetch(text.hashes)) == {"loaded": 1}
    engine.disk.disk_lock.release()
    engine.assert_clean()


def test_two_sessions_may_load_the_same_chunk(engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    text = engine.on_disk(1, 1)
    together = threading.Barrier(2, timeout=20)

    def read_together(*arguments: Any, **options: Any) -> None:
        together.wait()
        read_exactly(*arguments, **options)
        together.wait()

    monkeypatch.setattr(engine_prefetch, "read_exactly", read_together)
    results: list[dict[str, int]] = []
    threads = [threading.Thread(target=lambda: results.append(count(engine.prefetch(text.hashes)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == [{"loaded": 1}] * 2
    assert engine.adapter.usage().pool_objects == 1
    engine.assert_clean()
    engine.assert_holds(text)


def test_o_direct_where_lmcache_is_set_to_it_and_plain_reads_where_it_cannot_be(engine: EngineUnderTest) -> None:
    text = engine.on_disk(1, 3)
    engine.disk.use_odirect = True  # the pool may be unaligned, the file system without O_DIRECT: both are EINVAL
    assert count(engine.prefetch(text.hashes)) == {"loaded": 3}
    engine.assert_holds(text)


class Reads:
    """Stands in for read_exactly: notes which thread reads which file, and lets none end before `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by: dict[str, str] = {}
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        monkeypatch.setattr(engine_prefetch, "read_exactly", self)

    def __call__(self, path: str, *arguments: Any, **options: Any) -> None:
        self.by[path] = threading.current_thread().name
        self.begun.release()
        assert self.go_on.wait(30)
        read_exactly(path, *arguments, **options)


class TestReadingAhead:
    """Chunks that are begun before it is their turn."""

    def test_the_session_s_own_threads_read_and_end_with_it(
        self, engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = engine.on_disk(1, 3)
        paths = [engine.disk.dict[engine.key(chunk)].path for chunk in text.hashes]
        reads = Reads(monkeypatch)
        with engine.adapter.prefetching() as session:
            for chunk in text.hashes[:2]:
                session.ahead(chunk)
                session.ahead(chunk)  # nothing more
                assert reads.begun.acquire(timeout=10)
            reads.go_on.set()
            assert [str(session.load(chunk).outcome) for chunk in text.hashes] == ["loaded"] * 3
        readers = [reads.by[path] for path in paths]
        assert set(readers[:2]) == {"kvbus-read-0", "kvbus-read-1"}
        assert readers[2] == threading.current_thread().name
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvbus-read")]
        engine.assert_holds(text)
        engine.assert_clean()

    def test_only_chunks_on_the_ssd_are_begun(self, engine: EngineUnderTest) -> None:
        text = engine.on_disk(1, 2)
        engine.prefetch(text.hashes[:1])
        with engine.adapter.prefetching() as session:
            for chunk in (text.hashes[0], 77):
                session.ahead(chunk)
                assert engine.adapter.usage().session_loads == 0
            session.ahead(text.hashes[1])
            assert engine.adapter.usage().session_loads == 1
        engine.assert_clean()

    @pytest.mark.parametrize("how", ["left", "closed"])
    def test_what_is_not_loaded_is_given_back_when_nobody_writes_into_it_any_more(
        self, engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch, how: str
    ) -> None:
        text = engine.on_disk(1, 4)
        reads = Reads(monkeypatch)
        given_back = threading.Event()

        def begin_and_leave() -> None:
            with engine.adapter.prefetching() as session:
                for chunk in text.hashes:  # two are being read, two wait for a reader
                    session.ahead(chunk)
                for chunk in text.hashes if how == "left" else ():
                    session.leave(chunk)
                    session.leave(chunk)  # nothing more
            given_back.set()

        thread = threading.Thread(target=begin_and_leave)
        thread.start()
        assert reads.begun.acquire(timeout=10)
        assert not given_back.wait(0.2), "a reader is still writing"
        assert engine.adapter.usage().pool_objects > 0
        reads.go_on.set()
        thread.join(timeout=30)
        assert given_back.is_set()
        usage = engine.adapter.usage()
        assert usage.clean, usage
        assert usage.pool_objects == 0

    def test_an_evict_cancels_what_was_begun(self, engine: EngineUnderTest) -> None:
        text = engine.on_disk(1, 3)
        with engine.adapter.prefetching() as session:
            for chunk in text.hashes:
                session.ahead(chunk)
            assert count(engine.adapter.evict(text.hashes[:2], locations=(CPU_TIER,))) == {"missing": 2}
            assert [str(session.load(chunk).outcome) for chunk in text.hashes] == ["evicted", "evicted", "loaded"]
            # Asked for again, they are wanted again.
            assert [str(session.load(chunk).outcome) for chunk in text.hashes] == ["loaded", "loaded", "resident"]
        engine.assert_holds(text)
        engine.assert_clean()

    def test_what_was_stored_meanwhile_is_not_replaced(self, engine: EngineUnderTest) -> None:
        text = engine.on_disk(1, 2)
        with engine.adapter.prefetching() as session:
            session.ahead(text.hashes[0])
            engine.cpu_engine.store(text.tokens, text.kv)
            stored = engine.cpu.hot_cache[engine.key(text.hashes[0])]
            assert str(session.load(text.hashes[0]).outcome) == "loaded"
            assert engine.cpu.hot_cache[engine.key(text.hashes[0])] is stored
        engine.cpu_engine.wait_stored()
        engine.assert_holds(text)
        assert engine.adapter.reconcile()  # it was stored twice
        engine.assert_clean()

    def test_faults_of_the_disk_are_told_by_load(
        self, engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = engine.on_disk(1, 4)
        gone, short, broken = (engine.disk.dict[engine.key(chunk)].path for chunk in text.hashes[:3])
        os.remove(gone)
        os.truncate(short, 100)

        def read(path: str, *arguments: Any, **options: Any) -> None:
            if path == broken:
                raise OSError(5, "Input/output error")
            read_exactly(path, *arguments, **options)

        monkeypatch.setattr(engine_prefetch, "read_exactly", read)
        with engine.adapter.prefetching() as session:
            for chunk in text.hashes:
                session.ahead(chunk)
            found = [session.load(chunk) for chunk in text.hashes]
        assert [str(outcome.outcome) for outcome in found] == ["missing", "missing", "failed", "loaded"]
        assert ["gone" in found[0].detail, "100 bytes" in found[1].detail, "Input" in found[2].detail] == [True] * 3
        engine.assert_clean()

    def test_no_room_ahead_of_its_turn_is_asked_for_again_in_its_turn(self, make_engine: MakeEngine) -> None:
        engine = make_engine(cpu_gb=0.001, max_share=0.25)
        fitting = engine.adapter.usage().pool_size // 4 // engine.config.chunk_bytes
        text = engine.on_disk(1, fitting + 1)
        other = engine.adapter.prefetching()
        with engine.adapter.prefetching() as session, other as before:
            for chunk in text.hashes[:fitting]:
                before.load(chunk)
            session.ahead(text.hashes[-1])
            assert engine.adapter.usage().session_loads == 0
            assert str(session.load(text.hashes[-1]).outcome) == "no_space"
            engine.adapter.evict(text.hashes[:1], locations=(CPU_TIER,))
            assert str(session.load(text.hashes[-1]).outcome) == "loaded"
        engine.assert_clean()


class TestReadExactly:
    def test_a_file_cut_while_it_is_read_is_damaged(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "chunk"
        path.write_bytes(bytes(range(200)))
        real = os.preadv

        def read_a_little_then_cut(file: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
            got = real(file, [buffers[0][:10]], offset, flags)
            os.truncate(path, 10)
            return got

        monkeypatch.setattr(os, "preadv", read_a_little_then_cut)
        with pytest.raises(Damaged, match="10 of 200"):
            read_exactly(str(path), memoryview(bytearray(200)), 4096)

    def test_a_file_rewritten_while_it_is_read_is_changed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "chunk"
        path.write_bytes(bytes(200))
        os.utime(path, ns=(1, 1))
        real = os.preadv

        def read_then_rewrite(file: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
            got = real(file, buffers, offset, flags)
            path.write_bytes(b"x" * 200)
            return got

        monkeypatch.setattr(os, "preadv", read_then_rewrite)
        with pytest.raises(Changed):
            read_exactly(str(path), memoryview(bytearray(200)), 4096)

    @pytest.mark.parametrize("in_cache", [0, 7, 200])
    def test_short_reads_are_continued(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_cache: int) -> None:
        path = tmp_path / "chunk"
        path.write_bytes(bytes(range(200)))
        real = os.preadv
        waited: list[int] = []

        def read(file: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
            """Some of it at once, the rest in pieces of a disk's."""
            if flags & os.RWF_NOWAIT:
                if not in_cache:
                    raise BlockingIOError(11, "Resource temporarily unavailable")
                return real(file, [buffers[0][:in_cache]], offset)
            waited.append(offset)
            return real(file, [buffers[0][:90]], offset)

        monkeypatch.setattr(os, "preadv", read)
        buffer = bytearray(200)
        read_exactly(str(path), memoryview(buffer), 200)
        assert buffer == bytes(range(200))
        assert waited == {0: [0, 90, 180], 7: [7, 97, 187], 200: []}[in_cache]
