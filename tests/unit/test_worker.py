"""The worker above its engine: lanes, order per chunk, deferral, deadlines, stops. The bus is a server in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest

from kvbus.answers import CommandState
from kvbus.client import CommandHandle, KVBus
from kvbus.protocol import DDR, SSD, CommandResult, Evict, Lookup, Ping, Prefetch, Status, Target, encode_entry
from kvbus.streams.connection import Bus
from kvbus.testing import fake_bus
from tests.servers import eventually
from tests.unit.scripted_engine import ScriptedEngine
from worker_plugin.runtime import Worker


@pytest.fixture
def bus() -> Bus:
    return fake_bus(deferred_retry_ms=10, block_ms=20, stuck_ms=200)


@pytest.fixture
def client(bus: Bus) -> Iterator[KVBus]:
    with KVBus(bus=bus) as made:
        yield made


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(ssd=range(1, 100))


@pytest.fixture
def worker(bus: Bus, engine: ScriptedEngine) -> Iterator[Worker]:
    made = Worker(engine, settings=bus.settings, instance="i", rank=0, bus=bus)
    made.start()
    assert made.wait_ready(10)
    yield made
    engine.gate.set()
    assert made.stop()


def result_of(state: CommandState) -> CommandResult:
    assert state.complete, state
    return state.answers["i/0"].result


def done(handle: CommandHandle) -> CommandResult:
    return result_of(handle.wait(10))


def test_prefetch_loads_in_the_given_order_and_tells_what_is_missing(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.ddr.add(3)
    result = done(client.prefetch([9, 500, 3, 7]))
    assert [chunks[0] for verb, chunks in engine.calls if verb == "load"] == [9, 500, 3, 7]
    counts = result.counts
    assert (counts.requested, counts.loaded, counts.resident, counts.missing) == (4, 2, 1, 1)
    assert (counts.bytes, result.chunks.missing, result.status) == (200, (500,), Status.DONE)


def test_a_few_chunks_are_begun_before_their_turn_each_of_them_once(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    done(client.prefetch(range(1, 8)))
    calls = [(verb, chunks[0]) for verb, chunks in engine.calls]
    first = [("ahead", 2), ("ahead", 3), ("ahead", 4), ("ahead", 5), ("load", 1), ("ahead", 6), ("load", 2)]
    assert calls[:7] == first, "the disk has something to read"
    assert calls[7:] == [("ahead", 7), *(("load", chunk) for chunk in range(3, 8))]


def test_what_was_begun_for_a_chunk_that_an_evict_took_is_left(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.gate.clear()
    prefetch = client.prefetch(range(1, 10))
    assert engine.loading.wait(10)
    done(client.evict([3, 8], locations=[DDR]))
    engine.gate.set()
    assert done(prefetch).counts.evicted == 2
    calls = [(verb, chunks[0]) for verb, chunks in engine.calls if verb in ("ahead", "leave")]
    assert ("ahead", 3) in calls, "it was begun before the evict came"
    assert ("ahead", 8) not in calls
    assert [chunk for verb, chunk in calls if verb == "leave"] == [3, 8]


def test_an_evict_overtakes_a_long_prefetch_and_its_chunks_stay_away(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.gate.clear()
    long = client.prefetch(range(1, 51))
    assert engine.loading.wait(10)
    evicted = done(client.evict([1, 30, 40], locations=[DDR]))
    assert not long.state.finals, "the prefetch is still held up: the evict did not wait for it"
    assert evicted.status is Status.DONE
    engine.gate.set()
    counts = done(long).counts
    assert engine.ddr.isdisjoint({1, 30, 40})
    assert (counts.requested, counts.loaded, counts.evicted) == (50, 47, 3)


def test_a_prefetch_after_an_evict_of_the_same_chunk_brings_it_back(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.ddr.add(5)
    evict, prefetch = client.evict([5], locations=[DDR]), client.prefetch([5])
    assert done(evict).counts.evicted == 1
    assert done(prefetch).counts.loaded == 1
    assert 5 in engine.ddr


def test_an_evict_from_ssd_waits_for_the_prefetch_that_came_before(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.gate.clear()
    prefetch = client.prefetch([1, 2])
    assert engine.loading.wait(10)
    evict = client.evict([2], locations=[SSD])
    eventually(lambda: "i/0" in evict.state.answers, what="an interim answer")
    assert evict.state.answers["i/0"].result.status is Status.DEFERRED
    engine.gate.set()
    assert done(prefetch).counts.loaded == 2
    assert done(evict).counts.evicted == 1
    assert 2 in engine.ddr
    assert 2 not in engine.ssd


def test_a_chunk_in_use_is_deferred_and_evicted_once_it_is_free(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.pinned = {8}
    handle = client.evict([7, 8])
    eventually(lambda: "i/0" in handle.state.answers, what="an interim answer")
    interim = handle.state.answers["i/0"].result
    assert (interim.status, interim.counts.evicted, interim.counts.in_use) == (Status.DEFERRED, 1, 1)
    assert interim.chunks.in_use == (8,)
    engine.pinned = set()
    result = done(handle)
    assert (result.status, result.counts.evicted, result.counts.in_use) == (Status.DONE, 2, 0)


def test_a_chunk_that_stays_in_use_ends_as_such_when_the_time_is_over(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.pinned = {8}
    result = done(client.evict([8], ttl_ms=2_000))
    assert (result.status, result.counts.in_use) == (Status.PARTIAL, 1)


def test_a_later_prefetch_supersedes_a_deferred_evict(client: KVBus, engine: ScriptedEngine, worker: Worker) -> None:
    engine.ddr, engine.pinned = {8}, {8}
    evict = client.evict([8])
    eventually(lambda: "i/0" in evict.state.answers, what="an interim answer")
    assert done(client.prefetch([8])).counts.resident == 1
    engine.pinned = set()
    assert done(evict).counts.in_use == 1
    assert 8 in engine.ddr


def test_lookup_tells_the_tiers_of_each_chunk_in_the_order_asked(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.ddr = {2}
    held = done(client.lookup([500, 2, 3])).held
    assert held is not None
    assert [held.tiers_of(place) for place in range(3)] == [(), (DDR, SSD), (SSD,)]


def test_expired_commands_are_answered_and_not_carried_out(
    client: KVBus, bus: Bus, engine: ScriptedEngine, worker: Worker
) -> None:
    long_ago = bus.server_time_ms() - 60_000
    for command in (
        Prefetch(chunk_hashes=(1,), issued_at_ms=long_ago),
        Lookup(chunk_hashes=(1,), issued_at_ms=long_ago),
    ):
        assert done(client.send(command)).status is Status.EXPIRED
    assert engine.calls == []


def test_a_time_of_issue_in_the_future_lengthens_no_deadline(
    client: KVBus, bus: Bus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.pinned = {8}
    tomorrow = bus.server_time_ms() + 86_400_000
    result = done(client.send(Evict(chunk_hashes=(8,), issued_at_ms=tomorrow, ttl_ms=100)))
    assert result.counts.in_use == 1


def test_a_prefetch_that_runs_out_of_time_tells_how_far_it_came(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.gate.clear()
    handle = client.prefetch([1, 2, 3], ttl_ms=2_000)
    assert engine.loading.wait(10)
    eventually(lambda: worker.stats()["engine_busy_s"] > 2.1, what="the time to be over")
    engine.gate.set()
    result = done(handle)
    assert result.status is Status.EXPIRED
    assert (result.counts.requested, result.counts.loaded) == (3, 1)


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (Target(models=("m",)), Status.DONE),
        (Target(models=("other",)), Status.NOT_APPLICABLE),
        (Target(instances=("i",), ranks=(0,)), Status.DONE),
        (Target(ranks=(1, 2)), Status.NOT_APPLICABLE),
        (Target(instances=("j",)), Status.NOT_APPLICABLE),
    ],
)
def test_a_target_names_whom_a_command_is_for(client: KVBus, worker: Worker, target: Target, status: Status) -> None:
    assert done(client.send(Ping(target=target))).status is status


def test_a_rank_that_stores_nothing_says_so(client: KVBus, bus: Bus) -> None:
    engine = ScriptedEngine(stores=False)
    worker = Worker(engine, settings=bus.settings, instance="i", rank=0, bus=bus)
    with worker:
        assert worker.wait_ready(10)
        for handle in (client.prefetch([1]), client.evict([1]), client.lookup([1])):
            assert done(handle).status is Status.NOT_APPLICABLE
        assert done(client.ping()).status is Status.DONE
    assert engine.calls == []


def test_an_engine_that_raises_fails_the_command_and_no_other(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.raises = RuntimeError("disk on fire")
    for handle in (client.evict([1]), client.prefetch([1])):
        result = done(handle)
        assert result.status is Status.FAILED
        assert result.error is not None
        assert (result.error.code, "disk on fire" in result.error.message) == ("engine_failed", True)
    engine.raises = None
    assert done(client.prefetch([1])).counts.loaded == 1


def test_chunks_that_are_being_written_are_tried_again(client: KVBus, engine: ScriptedEngine, worker: Worker) -> None:
    engine.busy = {4}
    handle = client.prefetch([4, 5])
    eventually(lambda: [chunks for _, chunks in engine.calls].count((4,)) >= 2, what="a second try")
    engine.busy = set()
    assert done(handle).counts.loaded == 2


def test_the_same_message_id_is_carried_out_once(client: KVBus, engine: ScriptedEngine, worker: Worker) -> None:
    command = Evict(chunk_hashes=(1,))
    first = client.send(command, command_id="once")
    second = client.send(command, command_id="once")
    assert done(first).counts.evicted == done(second).counts.evicted == 1
    assert done(client.ping()).status is Status.DONE
    assert [verb for verb, _ in engine.calls] == ["evict"]
    assert worker.stats()["duplicates"] == 1


def test_a_stop_leaves_what_is_not_finished_for_the_next_life(client: KVBus, bus: Bus) -> None:
    engine = ScriptedEngine(ssd=range(1, 100))
    engine.gate.clear()
    first = Worker(engine, settings=bus.settings, instance="i", rank=0, bus=bus)
    with first:
        assert first.wait_ready(10)
        handle = client.prefetch(range(1, 51))
        assert engine.loading.wait(10)
        engine.gate.set()
        assert first.stop()
    loaded = len(engine.ddr)
    assert not handle.state.finals or loaded == 50
    with Worker(engine, settings=bus.settings, instance="i", rank=0, bus=bus) as second:
        assert second.wait_ready(10)
        counts = done(handle).counts
        assert counts.loaded + counts.resident == 50
    assert len(engine.ddr) == 50


def test_an_engine_call_that_hangs_is_told_and_nobody_waits_for_it(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.gate.clear()
    hung = client.prefetch([1])
    eventually(lambda: client.workers()[0].registration.stuck, what="the rank to be told as stuck")
    state = client.prefetch([2]).wait(10)
    assert (state.stuck, state.waiting, state.complete) == (("i/0",), (), False)
    engine.gate.set()
    assert done(hung).counts.loaded == 1
    eventually(lambda: not client.workers()[0].registration.stuck, what="the rank to recover")


def test_a_read_that_hangs_when_its_chunk_is_not_wanted_any_more_is_told_too(
    client: KVBus, engine: ScriptedEngine, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(engine, "leave", lambda chunk: let_go.wait(20))
    engine.gate.clear()
    prefetch = client.prefetch([1, 2])
    assert engine.loading.wait(10)
    done(client.evict([2], locations=[DDR]))
    engine.gate.set()
    eventually(lambda: client.workers()[0].registration.stuck, what="the rank to be told as stuck")
    let_go.set()
    assert done(prefetch).counts.evicted == 1
    eventually(lambda: not client.workers()[0].registration.stuck, what="the rank to recover")


def test_bad_entries_between_good_ones(client: KVBus, bus: Bus, worker: Worker) -> None:
    keys = bus.keys
    first = client.prefetch([1])
    client.log.append(keys.commands, {b"type": b"evict", b"id": b"bad-1", b"body": b"\xff\xfe"})
    client.log.append(keys.commands, {b"type": b"no-such-type", b"id": b"bad-2", b"body": b"\x80"})
    client.log.append(keys.commands, {b"type": b"evict", b"id": b"bad-3", b"body": b"x" * 1_600_000})
    last = client.prefetch([2])
    assert done(first).counts.loaded == done(last).counts.loaded == 1
    letters = list(client.log.scan(keys.dead))
    assert len(letters) == 3
    for bad in ("bad-1", "bad-2", "bad-3"):
        rejected = client.answers.state(bad)
        assert rejected is not None
        assert rejected.answers["i/0"].result.status is Status.REJECTED


def test_stats_are_written_where_the_facade_reads_them(client: KVBus, bus: Bus, worker: Worker) -> None:
    assert done(client.prefetch([1])).counts.loaded == 1
    raw = eventually(lambda: bus.client.get(bus.keys.stats("i/0")), what="the stats key")
    assert "epoch" in msgspec.json.decode(raw)
    assert worker.stats()["commands_prefetch"] == 1
    assert worker.stats()["chunks_loaded"] == 1


def test_an_entry_without_issue_time_counts_from_when_it_was_read(client: KVBus, bus: Bus, worker: Worker) -> None:
    client.answers.start()
    fields = encode_entry(Prefetch(chunk_hashes=(1,), ttl_ms=60_000), message_id="by-hand")
    client.log.append(bus.keys.commands, fields)
    client.answers.owed_by(client.workers(), "by-hand")
    assert result_of(client.answers.wait("by-hand", 10)).counts.loaded == 1
