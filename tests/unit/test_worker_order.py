"""The worker where commands meet on one chunk, where the engine is at its worst, and where its name is another's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from kvbus.client import CommandHandle, KVBus
from kvbus.errors import BusRefused
from kvbus.protocol import DDR, SSD, CommandResult, Evict, Ping, Prefetch, Status
from kvbus.streams.checkpoint import Commit, CommitAnswer, commit
from kvbus.streams.connection import Bus
from kvbus.streams.line import Line
from kvbus.streams.registry import Registration, encode_registration, update_registration
from kvbus.testing import fake_bus
from tests.servers import eventually
from tests.unit.scripted_engine import ScriptedEngine
from worker_plugin.engine_types import EngineInfo
from worker_plugin.runtime import Worker, WorkerState


class Rude(Exception):
    """An exception that cannot even be shown."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.fixture
def bus() -> Bus:
    return fake_bus(deferred_retry_ms=10, block_ms=20, stuck_ms=200, heartbeat_ms=100)


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
    for held in engine.held.values():
        held.set()
    assert made.stop()


def done(handle: CommandHandle) -> CommandResult:
    state = handle.wait(5)
    assert state.complete, state
    return state.answers["i/0"].result


def began(engine: ScriptedEngine, verb: str, chunk: int) -> None:
    eventually(lambda: any(seen == verb and chunk in chunks for seen, chunks in engine.calls), what=f"{verb} {chunk}")


# -- order per chunk -------------------------------------------------------------------------------------------


def test_a_busy_chunk_that_was_evicted_meanwhile_is_not_brought_back(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.busy = {4}
    prefetch = client.prefetch([4])
    began(engine, "load", 4)
    done(client.evict([4], locations=[DDR]))
    engine.busy = set()
    assert done(prefetch).counts.evicted == 1
    assert 4 not in engine.ddr


def test_a_chunk_that_is_named_twice_is_not_brought_back_either(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.held = {2: threading.Event()}
    prefetch = client.prefetch([1, 2, 1])
    began(engine, "load", 2)
    assert done(client.evict([1], locations=[DDR])).counts.evicted == 1
    engine.held[2].set()
    counts = done(prefetch).counts
    assert (counts.requested, counts.loaded, counts.evicted) == (3, 2, 1)
    assert engine.ddr == {2}


def test_an_evict_from_ssd_does_not_wait_for_a_prefetch_that_came_after(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.held = {1: threading.Event(), 50: threading.Event()}
    before = client.prefetch([1, 2])
    began(engine, "load", 1)
    evict = client.evict([2], locations=[SSD])
    eventually(lambda: "i/0" in evict.state.answers, what="an interim answer")
    after = client.prefetch([50, 2])
    engine.held[1].set()
    assert done(before).counts.loaded == 2
    assert done(evict).counts.evicted == 1
    engine.held[50].set()
    counts = done(after).counts
    assert (counts.loaded, counts.resident) == (1, 1)


def test_an_overtaken_chunk_that_a_request_holds_is_not_told_as_gone(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.held = {2: threading.Event()}
    prefetch = client.prefetch([2])
    began(engine, "load", 2)
    evict = client.send(Evict(chunk_hashes=(3, 2), locations=(DDR,)))
    began(engine, "evict", 2)
    engine.pinned = {2}
    engine.held[2].set()
    assert done(prefetch).counts.loaded == 1
    assert 2 in engine.ddr
    engine.pinned = set()
    assert done(evict).counts.evicted == 1
    assert 2 not in engine.ddr


# -- results ---------------------------------------------------------------------------------------------------


def test_trouble_that_has_passed_is_not_in_the_final_result(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.pinned = {8}
    handle = client.evict([7, 8])
    eventually(lambda: "i/0" in handle.state.answers, what="an interim answer")
    assert handle.state.answers["i/0"].result.counts.in_use == 1
    engine.pinned = set()
    result = done(handle)
    assert (result.status, result.error) == (Status.DONE, None)


def test_an_answer_does_not_wait_for_the_command_behind_it(
    client: KVBus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.held = {99: threading.Event()}
    quick, slow = client.send_all([Evict(chunk_hashes=(1,)), Evict(chunk_hashes=(99,))])
    began(engine, "evict", 99)
    assert done(quick).counts.evicted == 1
    assert not slow.state.finals
    engine.held[99].set()
    assert done(slow).counts.evicted == 1


@pytest.mark.parametrize("fault", [Rude(), RuntimeError("no such file: /ssd/\udcff.pt"), RuntimeError("x" * 5000)])
def test_whatever_the_engine_raises_every_command_is_answered(
    client: KVBus, engine: ScriptedEngine, worker: Worker, fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "worker_plugin")  # half a surrogate in a test's report cannot be sent on
    engine.raises = fault
    handles = client.send_all(
        [Evict(chunk_hashes=(1,)), Prefetch(chunk_hashes=(2,)), Evict(chunk_hashes=(3,)), Prefetch(chunk_hashes=(4,))]
    )
    for handle in handles:
        result = done(handle)
        assert result.status is Status.FAILED
        assert result.error is not None
        assert result.error.code == "engine_failed"
    engine.raises = None
    assert done(client.prefetch([1])).counts.loaded == 1
    assert done(client.evict([1])).counts.evicted == 1


def test_a_fault_outside_the_verbs_fails_its_command_and_no_other(client: KVBus, bus: Bus) -> None:
    class Moody(ScriptedEngine):
        asked = 0

        @property
        def info(self) -> EngineInfo:
            self.asked += 1
            if self.asked == 3:
                raise RuntimeError("no metadata")
            return super().info

    with Worker(Moody(ssd=range(9)), settings=bus.settings, instance="i", rank=0, bus=bus) as worker:
        assert worker.wait_ready(10)
        handles = client.send_all([Evict(chunk_hashes=(place,)) for place in range(1, 5)])
        statuses = [done(handle).status for handle in handles]
    assert sorted(statuses) == [Status.DONE, Status.DONE, Status.DONE, Status.FAILED]


def test_the_first_of_a_batch_are_answered_while_the_last_are_carried_out(
    client: KVBus, engine: ScriptedEngine, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_plugin.runtime.ANSWER_EVERY_S", -1.0)  # after every command
    engine.held[3] = threading.Event()
    handles = client.send_all([Evict(chunk_hashes=(place,)) for place in range(1, 5)])
    assert [done(handle).status for handle in handles[:2]] == [Status.DONE] * 2
    assert not handles[2].state.answers
    engine.held[3].set()
    assert [done(handle).status for handle in handles[2:]] == [Status.DONE] * 2


@pytest.mark.parametrize("fault", [BusRefused("MISCONF the server's disk is full"), RuntimeError("a fault of ours")])
def test_an_answer_that_cannot_be_written_holds_up_none_of_its_batch(
    client: KVBus, engine: ScriptedEngine, worker: Worker, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = threading.Event()

    def faulty(bus: Bus, step: Commit, line: Line | None) -> tuple[CommitAnswer, str]:
        if step.pending and not raised.is_set():
            raised.set()
            raise fault
        return commit(bus, step, line)

    monkeypatch.setattr("worker_plugin.runtime.ANSWER_EVERY_S", -1.0)  # after every command
    monkeypatch.setattr("kvbus.streams.worker_log.commit", faulty)
    engine.held[3] = raised
    handles = client.send_all([Evict(chunk_hashes=(place,)) for place in range(1, 5)])
    assert [done(handle).counts.evicted for handle in handles] == [1, 1, 1, 1]
    assert raised.is_set()


# -- whose name it is ------------------------------------------------------------------------------------------


def test_a_stuck_rank_is_still_told_as_stuck_after_the_server_forgot_everyone(
    client: KVBus, bus: Bus, engine: ScriptedEngine, worker: Worker
) -> None:
    engine.gate.clear()
    client.prefetch([1])
    eventually(lambda: client.workers()[0].registration.stuck, what="the rank to be told as stuck")
    bus.client.flushall()
    found = eventually(client.workers, what="the rank to register again")
    assert found[0].registration.stuck


def test_a_superseded_worker_does_not_write_over_its_successors_registration(bus: Bus) -> None:
    mine, successor = Registration(instance="i", stuck=True), Registration(instance="i", pid=7, epoch=2)
    bus.client.hset(bus.keys.worker("i/0"), "owner", "successor")
    bus.client.hset(bus.keys.workers, "i/0", encode_registration(successor))
    assert not update_registration(bus, "i/0", "mine", mine)
    assert bus.client.hget(bus.keys.workers, "i/0") == encode_registration(successor)
    assert update_registration(bus, "i/0", "successor", mine)
    assert bus.client.hget(bus.keys.workers, "i/0") == encode_registration(mine)


def test_a_worker_that_was_superseded_may_be_stopped_from_the_callback_that_tells_it(bus: Bus) -> None:
    stopped: list[bool] = []

    def stop() -> None:
        stopped.append(taken_over.stop())

    taken_over = Worker(ScriptedEngine(), settings=bus.settings, instance="i", rank=0, bus=bus, on_fenced=stop)
    with taken_over:
        assert taken_over.wait_ready(10)
        bus.client.hset(bus.keys.worker("i/0"), mapping={"owner": "successor", "epoch": 2**52})
        eventually(lambda: stopped, what="the callback to return")
    assert taken_over.state is WorkerState.FENCED


def test_a_worker_that_was_never_started_can_be_stopped(bus: Bus) -> None:
    assert Worker(ScriptedEngine(), settings=bus.settings, instance="i", rank=0, bus=bus).stop()


def test_ping_is_answered_behind_what_was_asked_before(client: KVBus, engine: ScriptedEngine, worker: Worker) -> None:
    evict, ping = client.send_all([Evict(chunk_hashes=(1,)), Ping()])
    assert done(ping).status is Status.DONE
    assert done(evict).counts.evicted == 1
