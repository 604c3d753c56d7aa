"""The client: commands, their answers, who is waited for. The bus is a server in memory, the workers have no engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvbus import answers as answers_module
from kvbus.answers import Answers, CommandState
from kvbus.client import KVBus
from kvbus.errors import BusUnavailable, InvalidMessage, NotAnswered, NoWorkers, Stopped
from kvbus.protocol import CommandResult, Evict, Ping, Results, Status, encode_entry, new_message_id
from kvbus.protocol.codec import Envelope
from kvbus.protocol.results import Counts
from kvbus.streams.connection import Bus
from kvbus.streams.issue import BATCH
from kvbus.streams.log import Log
from kvbus.testing import FakeWorker, all_done, fake_bus, fake_workers
from tests.servers import eventually


@pytest.fixture
def bus() -> Bus:
    return fake_bus(block_ms=20, heartbeat_ms=50, live_ms=200)


@pytest.fixture
def client(bus: Bus) -> Iterator[KVBus]:
    with KVBus(bus=bus) as made:
        yield made


def tell(bus: Bus, worker: str, command_id: str, status: Status = Status.DONE, **counts: int) -> None:
    """Write a result as that worker would."""
    instance, _, rank = worker.partition("/")
    result = CommandResult(command_id=command_id, type="evict", status=status, counts=Counts(**counts))
    message = Results(worker=worker, instance=instance, rank=int(rank), epoch=1, results=(result,))
    Log(bus).append(bus.keys.results, encode_entry(message, message_id=new_message_id()))


class Held:
    """A worker's part that answers commands once it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, envelope: Envelope) -> CommandResult:
        assert self.go.wait(20), "nobody let go"
        return all_done(envelope)


# -- commands and handles --------------------------------------------------------------------------------------


def test_every_worker_answers_for_itself(bus: Bus, client: KVBus) -> None:
    with fake_workers(ranks=3, bus=bus):
        found = client.evict([1, 2]).results(10)
        assert sorted(found) == ["test/0", "test/1", "test/2"]
        assert {answer.result.counts.evicted for answer in found.values()} == {2}
        assert {(answer.instance, answer.rank) for answer in found.values()} == {("test", 0), ("test", 1), ("test", 2)}


def test_answers_come_one_by_one_as_they_are_given(bus: Bus, client: KVBus) -> None:
    late = Held()
    with FakeWorker(bus, rank=0), FakeWorker(bus, rank=1, carry=late):
        coming = client.ping().answers(10)
        assert next(coming).worker == "test/0"
        late.go.set()
        assert [answer.worker for answer in coming] == ["test/1"]


def test_time_that_runs_out_is_no_error_but_is_named_by_results(bus: Bus, client: KVBus) -> None:
    late = Held()
    with FakeWorker(bus, carry=late):
        handle = client.ping()
        state = handle.wait(0.05)
        assert (state.waiting, state.settled, state.complete) == (("test/0",), False, False)
        assert list(handle.answers(0.05)) == []
        with pytest.raises(NotAnswered, match=r"test/0 \(no answer yet\)"):
            handle.results(0.05)
        late.go.set()
        assert handle.wait(10).complete


def test_a_worker_that_dies_is_not_waited_for(bus: Bus, client: KVBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_module, "DEAD_AFTER_S", 0.2)
    monkeypatch.setattr(answers_module, "LIVENESS_EVERY_S", 0.05)
    bus.client.hset(bus.keys.workers, "ghost/0", b'{"instance":"ghost"}')
    bus.client.set(bus.keys.live("ghost/0"), "owner")
    handle = client.ping()
    assert handle.state.waiting == ("ghost/0",)
    bus.client.delete(bus.keys.live("ghost/0"))
    state = handle.wait(10)
    assert (state.dead, state.settled, state.complete) == (("ghost/0",), True, False)
    assert client.ping().state.absent == ("ghost/0",), "it was dead before this one"


def test_nothing_bad_is_written(bus: Bus, client: KVBus) -> None:
    with pytest.raises(InvalidMessage):
        client.evict([])
    with pytest.raises(InvalidMessage):
        client.prefetch(["xyz"])
    with pytest.raises(NoWorkers):
        client.send(Ping(), need_workers=True)
    assert bus.client.xlen(bus.keys.commands) == 0


def test_many_commands_keep_their_order_when_a_step_fails(
    bus: Bus, client: KVBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = client._issuer
    write, failures = issuer._write, [BusUnavailable("cut")]

    def failing(batch: object) -> object:
        if failures:
            raise failures.pop()
        return write(batch)  # type: ignore[arg-type]

    monkeypatch.setattr(issuer, "_write", failing)
    handles = client.send_all([Ping() for _ in range(2 * BATCH)])
    written = [fields[b"id"].decode() for _, fields in client.log.scan(bus.keys.commands)]
    assert list(dict.fromkeys(written)) == [handle.command_id for handle in handles]


def test_a_command_is_sent_again_under_its_id_while_the_bus_is_away(
    bus: Bus, client: KVBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = client._issuer
    write, failures = issuer._write, [BusUnavailable("cut")]

    def reply_lost(batch: object) -> object:
        found = write(batch)  # type: ignore[arg-type]
        if failures:
            raise failures.pop()
        return found

    monkeypatch.setattr(issuer, "_write", reply_lost)
    with FakeWorker(bus):
        handle = client.evict([1])
        assert handle.wait(10).complete
        ids = [fields[b"id"].decode() for _, fields in client.log.scan(bus.keys.commands)]
        assert ids == [handle.command_id] * 2
        assert client.ping().wait(10).complete
    finals = [fields for _, fields in client.log.scan(bus.keys.results)]
    assert len(finals) == 2, "one for the evict, one for the ping"


def test_a_stranger_among_the_registrations_does_not_stop_the_others(bus: Bus, client: KVBus) -> None:
    with FakeWorker(bus):
        bus.client.hset(bus.keys.workers, b"odd\xff/0", b"not json")
        assert client.ping().wait(10).finals.keys() == {"test/0"}
        assert [member.name for member in client.workers()] == ["odd\\xff/0", "test/0"]


def test_a_closed_client_says_so(bus: Bus) -> None:
    client = KVBus(bus=bus)
    client.ping()
    client.close()
    client.close()
    with pytest.raises(Stopped):
        client.ping()


def test_the_client_serves_many_threads(bus: Bus, client: KVBus) -> None:
    complete: list[bool] = []
    with fake_workers(ranks=2, bus=bus):
        threads = [
            threading.Thread(target=lambda: complete.append(client.evict([1]).wait(20).complete)) for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert complete == [True] * 16


def test_a_forked_child_gets_answers_of_its_own(bus: Bus, client: KVBus) -> None:
    client.answers.start()
    child = os.fork()
    if child == 0:
        try:
            client.answers.start()
            tell(bus, "w/0", "for-the-child")
            eventually(lambda: client.answers.state("for-the-child"), within_s=10)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.answers.state("for-the-child") is None


# -- answers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def answers(client: KVBus) -> Answers:
    client.answers.start()
    return client.answers


def test_a_watcher_that_fails_keeps_nobody_from_their_answers(bus: Bus, client: KVBus, answers: Answers) -> None:
    def fail(state: CommandState) -> None:
        if state.answers:
            raise RuntimeError("a bug of somebody else's")

    answers.watch("c", fail)
    tell(bus, "w/0", "c")
    eventually(lambda: answers.counters.get("watchers_failed"), what="the watcher to fail")
    with FakeWorker(bus):
        assert client.ping().wait(10).complete


def test_a_watcher_that_fails_at_once_is_not_kept(answers: Answers) -> None:
    def fail(state: CommandState) -> None:
        raise RuntimeError("at once")

    with pytest.raises(RuntimeError):
        answers.watch("c", fail)
    assert not answers._watched


def test_the_reader_outlives_whatever_goes_wrong_in_it(
    bus: Bus, client: KVBus, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, failures = answers._take, [ValueError("a bug")]

    def failing(message: Results) -> None:
        if failures:
            raise failures.pop()
        take(message)

    monkeypatch.setattr(answers, "_take", failing)
    tell(bus, "w/0", "lost")
    eventually(lambda: answers.counters.get("internal_errors"), what="the fault")
    tell(bus, "w/0", "found")
    eventually(lambda: answers.state("found"), what="the next answer")


def test_no_watcher_is_told_an_older_state_after_a_newer_one(bus: Bus, answers: Answers) -> None:
    told: list[int] = []
    first_is_told, go_on = threading.Event(), threading.Event()

    def slow(state: CommandState) -> None:
        if not state.answers:
            first_is_told.set()
            assert go_on.wait(10)
        told.append(len(state.answers))

    watching = threading.Thread(target=lambda: answers.watch("c", slow))
    watching.start()
    assert first_is_told.wait(10)
    tell(bus, "w/0", "c")
    tell(bus, "w/1", "c")
    eventually(lambda: len((answers.state("c") or CommandState("c")).answers) >= 1, what="an answer to be taken")
    go_on.set()
    watching.join(10)
    eventually(lambda: told and told[-1] == 2, what="the last state")
    assert told == sorted(told)


def test_a_final_answer_is_not_overwritten_by_an_interim_one(bus: Bus, answers: Answers) -> None:
    for status in (Status.DEFERRED, Status.DONE, Status.DEFERRED):
        tell(bus, "w/0", "c", status)
    tell(bus, "w/0", "end")
    eventually(lambda: answers.state("end"), what="the last result")
    state = answers.state("c")
    assert state is not None
    assert state.answers["w/0"].result.status is Status.DONE


def test_one_ranks_second_answer_is_not_taken_for_anothers(bus: Bus, client: KVBus) -> None:
    late = Held()
    with FakeWorker(bus, rank=0), FakeWorker(bus, rank=1, carry=late):
        handle = client.ping()
        eventually(lambda: handle.state.finals, what="the first answer")
        tell(bus, "test/0", handle.command_id)
        tell(bus, "test/0", "end")
        eventually(lambda: client.answers.state("end"), what="the repeat to be read")
        assert handle.state.waiting == ("test/1",)
        late.go.set()
        assert handle.wait(10).complete


def test_a_stuck_rank_stays_named_until_its_final_answer(bus: Bus, client: KVBus) -> None:
    bus.client.hset(bus.keys.workers, "s/0", b'{"instance":"s","stuck":true}')
    bus.client.set(bus.keys.live("s/0"), "owner")
    handle = client.evict([1])
    assert (handle.state.stuck, handle.state.waiting) == (("s/0",), ())
    with pytest.raises(NotAnswered, match=r"from s/0 \(stuck\)"):
        handle.results(timeout_s=5)
    tell(bus, "s/0", handle.command_id, Status.DEFERRED)
    eventually(lambda: handle.state.answers, what="an interim answer")
    assert (handle.state.stuck, handle.state.complete) == (("s/0",), False)
    tell(bus, "s/0", handle.command_id)
    eventually(lambda: handle.state.complete, what="the final answer")


def test_what_is_kept_of_others_commands_is_bounded(
    bus: Bus, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers_module, "KEEP_COMMANDS", 50)
    end = answers.watch("watched", lambda _: None)
    for number in range(200):
        tell(bus, "w/0", f"c-{number}")
    eventually(lambda: answers.state("c-199"), what="the last result")
    assert len(answers._records) == 50
    assert answers.state("watched") is not None
    assert answers.state("c-0") is None
    assert answers._weight == sum(record.weight for record in answers._records.values())
    end()
    end()
    assert not answers._watched


def test_an_entry_that_is_no_result_is_set_aside_and_the_next_is_read(bus: Bus, answers: Answers) -> None:
    log = Log(bus)
    log.append(bus.keys.results, {b"type": b"results", b"id": b"bad", b"body": b"\xff"})
    log.append(bus.keys.results, encode_entry(Evict(chunk_hashes=(1,)), message_id="wrong-stream"))
    tell(bus, "w/0", "c")
    eventually(lambda: answers.state("c"), what="the good one")
    assert answers.counters.get("results_refused") == 2
    assert bus.client.xlen(bus.keys.dead) == 2


# -- what is shipped for tests ---------------------------------------------------------------------------------


def test_a_fake_worker_whose_part_raises_answers_failed(bus: Bus, client: KVBus) -> None:
    def broken(envelope: Envelope) -> CommandResult:
        raise RuntimeError("no such thing")

    with ExitStack() as stack:
        stack.enter_context(FakeWorker(bus, carry=broken))
        for _ in range(2):
            result = client.evict([1]).results(10)["test/0"].result
            assert result.status is Status.FAILED
            assert result.error is not None
            assert "no such thing" in result.error.message
