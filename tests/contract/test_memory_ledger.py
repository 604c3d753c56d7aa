"""The session ledger, promise by promise, on every kind of server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvbus.errors import ConfigError, InvalidMessage
from kvbus.memory import Begun, Ledger, MemoryConfig, MemoryService, TurnStatus
from kvbus.memory.ledger import Turn
from kvbus.protocol import (
    DDR,
    ChunkLists,
    CommandResult,
    Counts,
    Evict,
    Prefetch,
    RequestFinished,
    Results,
    Status,
    WorkerGap,
    WorkerStarted,
    WorkerStopped,
)
from kvbus.protocol.codec import decode_entry, encode_entry
from kvbus.streams.connection import Bus
from kvbus.streams.ledger_audit import audit
from kvbus.streams.log import Log
from kvbus.streams.position import Position
from kvbus.streams.registry import read_stats
from tests.contract.ledger_model import finished, publish
from tests.servers import RealServer, Server, eventually

NOW = MemoryConfig(grace_ms=0)


class Desk:
    """A ledger, events in their order, and what has come on the commands stream."""

    def __init__(self, bus: Bus, config: MemoryConfig = NOW) -> None:
        self.bus, self.ledger = bus, Ledger(bus, config)
        self.seq = 0
        self.cursor = "-"

    def turn(self, session: str, *hashes: int | bytes, request: str = "", **more: object) -> TurnStatus:
        context = {"session": session} if session else {}
        event = finished("p", self.seq, hashes, request_id=request, **context, **more)  # type: ignore[arg-type]
        self.seq += 1
        return self.ledger.turn(event, Position(f"{self.seq}-1", f"m{self.seq}", self.seq)).status

    def commands(self) -> list[tuple[str, tuple[int | bytes, ...]]]:
        """What is new: (evict | demote | prefetch, hashes)."""
        found: list[tuple[str, tuple[int | bytes, ...]]] = []
        for entry_id, fields in Log(self.bus).scan(self.bus.keys.commands, self.cursor):
            self.cursor = f"({entry_id}"
            message = decode_entry(entry_id, fields).message
            assert isinstance(message, Evict | Prefetch)
            assert message.issuer == "kvbus-memory"
            assert message.issued_at_ms
            demoted = isinstance(message, Evict) and message.locations == (DDR,)
            found.append(("demote" if demoted else message.TYPE, message.chunk_hashes))
        return found

    def sound(self) -> None:
        assert audit(self.bus).differences == ()


MakeDesk = Callable[..., Desk]


@pytest.fixture
def desk(server: Server, namespace: str) -> MakeDesk:
    def make(**values: object) -> Desk:
        config = msgspec.structs.replace(NOW, **values)
        return Desk(server.bus(namespace), config)

    return make


# -- diff_deleted ----------------------------------------------------------------------------------------------------


def test_what_a_session_no_longer_has_is_evicted_tail_first(desk: MakeDesk) -> None:
    d = desk()
    assert d.turn("a", 1, 2, 3, 4) is TurnStatus.TAKEN
    d.turn("a", 1, 2, 3, 4, 5)
    assert d.commands() == []
    d.turn("a", 1, 2, 9)
    assert d.commands() == [("evict", (5, 4, 3))]
    assert d.ledger.chunks("a") == (1, 2, 9)
    d.sound()


def test_a_shared_prefix_stays_until_the_last_session_leaves(desk: MakeDesk) -> None:
    d = desk()
    d.turn("a", 1, 2, 3)
    d.turn("b", 1, 2, 4)
    assert (d.ledger.held_by(1), d.ledger.held_by(3), d.ledger.held_by(99)) == (2, 1, 0)
    assert sorted(d.ledger.holders(2)) == ["a", "b"]
    d.turn("a", 7)
    assert d.commands() == [("evict", (3,))]
    closed = d.ledger.close("b")
    assert (closed.known, closed.chunks) == (True, 3)
    assert d.commands() == [("evict", (4, 2, 1))]
    assert not d.ledger.close("b").known
    d.sound()


def test_an_event_without_hashes_changes_no_chunks(desk: MakeDesk) -> None:
    d = desk()
    d.turn("a", 1, 2)
    assert d.turn("a") is TurnStatus.TAKEN
    assert d.ledger.chunks("a") == (1, 2)
    found = d.ledger.session("a")
    assert found is not None
    assert found.turns == 2


def test_chunks_of_other_tags_are_other_chunks(desk: MakeDesk) -> None:
    d = desk()
    d.turn("a", 1, 2, tags=(("user", "x"),))
    d.turn("b", 1, 2)
    d.ledger.close("b")
    d.ledger.close("a")
    entries = list(Log(d.bus).scan(d.bus.keys.commands))
    messages = [decode_entry(entry_id, fields).message for entry_id, fields in entries]
    assert [message.tags for message in messages if isinstance(message, Evict)] == [(), (("user", "x"),)]
    d.sound()


def test_every_kind_of_hash_survives(desk: MakeDesk) -> None:
    d = desk()
    hashes = (-(2**63), 2**63 - 1, -1, 2**64 - 1, 0, b"\0\n\xff" * 10 + b"ab")
    d.turn("a", *hashes)
    assert d.ledger.chunks("a") == hashes
    assert list(d.ledger.holders(2**64 - 1)) == ["a"]
    assert list(d.ledger.holders(-1)) == ["a"]
    d.turn("a", *hashes[:1])  # another width: the same chunk
    assert d.commands() == [("evict", hashes[:0:-1])]
    d.sound()


def test_a_hash_twice_in_a_chain_is_evicted_once(desk: MakeDesk) -> None:
    d = desk()
    d.turn("a", 5, 5, 6, 5)
    assert d.ledger.chunks("a") == (5, 5, 6, 5)
    d.sound()
    d.ledger.close("a")
    assert d.commands() == [("evict", (6, 5))]


def test_chains_need_not_be_prefixes_for_the_counts_to_be_right(desk: MakeDesk) -> None:
    d = desk()
    d.turn("a", 1, 2, 3, 4)
    d.turn("a", 4, 2, 1)
    assert d.commands() == [("evict", (3,))]
    d.sound()


# -- events ----------------------------------------------------------------------------------------------------------


def test_repeats_are_known_by_entry_and_by_sequence(desk: MakeDesk) -> None:
    d = desk()
    event = finished("p", 7, (1, 2), session="a")
    assert d.ledger.turn(event, Position("5-1", "m", 1)).status is TurnStatus.TAKEN
    assert d.ledger.turn(event, Position("5-1", "m", 1)).status is TurnStatus.REPEAT
    assert d.ledger.turn(event, Position("6-0", "m", 2)).status is TurnStatus.REPEAT
    older = finished("p", 6, (9,), session="a")
    assert d.ledger.turn(older, Position("6-1", "m", 3)).status is TurnStatus.REPEAT
    assert d.ledger.chunks("a") == (1, 2)
    assert d.ledger.store.position() == Position("6-1", "m", 3)


def test_holes_are_told(desk: MakeDesk) -> None:
    d = desk()
    steps = [(1, 0, 0), (1, 4, 3), (2, 0, 0), (3, 2, 2)]
    for place, (epoch, seq, missed) in enumerate(steps, 1):
        event = finished("p", seq, (1,), epoch=epoch, session="a")
        assert d.ledger.turn(event, Position(f"{place}-0", "", place)).missed == missed


def test_who_it_was_comes_from_the_announced_request_or_the_context(desk: MakeDesk) -> None:
    d = desk()
    assert d.turn("", 1, 2) is TurnStatus.ANONYMOUS
    d.ledger.begin("chat-1", session="a", intent="travel", tenant="t")
    event = finished("p", d.seq, (1, 2), request_id="chat-1-abcd", external_id="chat-1")
    assert d.ledger.turn(event, Position("9-0", "", 9)).session == "a"
    found = d.ledger.session("a")
    assert found is not None
    assert (found.intent, found.tenant, found.running) == ("travel", "t", 0)
    assert d.commands() == []


@pytest.mark.parametrize("name", ["a b", "zeile\nzwei", "\0", "{x}", "größe", "*", "x" * 1024, ":", "/"])
def test_names_may_be_anything(desk: MakeDesk, name: str) -> None:
    d = desk()
    d.turn(name, 1, 2, intent=name, tenant=name)
    assert d.ledger.chunks(name) == (1, 2)
    assert d.ledger.switch(intent=name, tenant=name).found == 1
    assert [item.session for item in d.ledger.sessions(tenant=name)] == [name]
    assert d.ledger.close(name).known
    d.sound()


def test_a_session_may_be_a_number_and_too_long_a_name_is_cut(desk: MakeDesk) -> None:
    d = desk()
    for seq, (session, stored) in enumerate(((42, "42"), (True, ""), ("y" * 2_000, "y" * 1_024), ({"a": 1}, ""))):
        event = finished("q", seq, (seq,), session=session)
        assert d.ledger.turn(event, Position(f"{seq + 1}-0")).session == stored


def test_a_session_belongs_to_its_tenant(desk: MakeDesk) -> None:
    d = desk()
    d.turn("a", 1, 2, tenant="one")
    assert d.turn("a", 3, tenant="two") is TurnStatus.FOREIGN
    assert d.ledger.chunks("a") == (1, 2)
    assert d.ledger.begin("r", session="a", tenant="two") is Begun.FOREIGN
    assert not d.ledger.close("a", tenant="two").known
    assert d.ledger.switch("a", tenant="two").found == 0
    assert d.commands() == []
    d.sound()


def test_a_late_event_does_not_open_a_closed_session(desk: MakeDesk) -> None:
    d = desk()
    d.turn("a", 1, 2)
    d.turn("b", 1)
    d.ledger.close("a")
    assert d.turn("a", 1, 2, 3) is TurnStatus.LATE
    assert d.commands() == [("evict", (2,)), ("evict", (3, 2))]
    assert d.ledger.session("a") is None
    d.ledger.begin("r", session="a")
    assert d.turn("a", 1, 2, request="r") is TurnStatus.TAKEN
    d.sound()


# -- running requests ------------------------------------------------------------------------------------------------


def test_nothing_that_a_running_request_holds_is_evicted(desk: MakeDesk) -> None:
    d = desk()
    d.turn("a", 1, 2, 3)
    assert d.ledger.begin("r1", session="a", chunk_hashes=["1", "2", "3", "4"]) is Begun.BEGUN
    assert d.ledger.begin("r1", session="a") is Begun.ALREADY
    d.turn("a", 1, 9)  # another request of the same session
    d.ledger.close("a")
    assert d.commands() == []
    assert d.turn("", 1, 2, 3, 4, request="r1") is TurnStatus.LATE
    assert {item for _, hashes in d.commands() for item in hashes} == {1, 2, 3, 4, 9}
    assert audit(d.bus).sessions == 0
    d.sound()


def test_a_request_of_no_session_holds_what_it_names(desk: MakeDesk) -> None:
    d = desk()
    d.turn("a", 1, 2)
    d.ledger.begin("r", chunk_hashes=(1, 2))
    d.ledger.close("a")
    assert d.commands() == []
    assert d.turn("", 1, 2, request="r") is TurnStatus.ANONYMOUS
    assert d.commands() == [("evict", (2, 1))]
    d.sound()


def test_a_request_that_never_ends_is_over_in_the_end(desk: MakeDesk) -> None:
    d = desk(request_ms=30)
    d.turn("a", 1, 2)
    d.ledger.begin("r", session="a", chunk_hashes=(1, 2, 3))
    d.ledger.close("a")
    assert d.commands() == []
    eventually(lambda: d.ledger.sweep()[0], what="the request's time is over")
    assert {item for _, hashes in d.commands() for item in hashes} == {1, 2, 3}
    assert d.ledger.totals().running == 0
    d.sound()


# -- switch and DDR --------------------------------------------------------------------------------------------------


def test_switch_prefetches_in_order(desk: MakeDesk) -> None:
    d = desk()
    d.turn("a", 1, 2, 3, intent="travel")
    d.turn("b", 1, 2, 4, intent="travel")
    d.turn("c", 8, intent="music")
    switched = d.ledger.switch("a")
    assert (switched.found, switched.chunks) == (1, 3)
    assert d.commands() == [("prefetch", (1, 2, 3))]
    assert d.ledger.switch(intent="music").found == 1
    assert d.commands() == [("prefetch", (8,))]
    d.ledger.switch(intent="travel")
    first = d.commands()
    assert {item for _, hashes in first for item in hashes} == {1, 2, 3, 4}
    d.ledger.switch(intent="travel")
    assert d.commands() == first  # the order among them is not lost by the switch itself
    assert d.ledger.switch("nobody").found == 0
    with pytest.raises(InvalidMessage):
        d.ledger.switch()


def test_a_new_intent_leaves_the_old_one(desk: MakeDesk) -> None:
    d = desk()
    d.turn("a", 1, intent="travel")
    d.turn("a", 1, intent="music")
    assert d.ledger.switch(intent="travel").found == 0
    assert d.ledger.switch(intent="music").found == 1
    assert d.ledger.switch(intent="music", tenant="other").found == 0


def test_when_ddr_is_short_the_oldest_tails_leave_it(desk: MakeDesk) -> None:
    d = desk(ddr_budget_chunks=6)
    d.turn("a", 1, 2, 3, 4)
    d.turn("b", 1, 2, 5, 6)
    assert d.commands() == []
    d.turn("c", 7, 8)
    # a is the oldest; 1 and 2 are b's too, and stay
    assert d.commands() == [("demote", (4, 3))]
    assert d.ledger.totals().resident == 6
    d.ledger.switch("a")
    names = d.commands()
    assert names[-1] == ("prefetch", (1, 2, 3, 4))
    assert [name for name, _ in names[:-1]] == ["demote"] * (len(names) - 1)
    assert {item for name, hashes in names if name == "demote" for item in hashes} == {5, 6}
    assert d.ledger.totals().resident <= 6
    d.sound()


def test_demotion_spares_running_requests(desk: MakeDesk) -> None:
    d = desk(ddr_budget_chunks=4)
    d.turn("a", 1, 2, 3)
    d.ledger.begin("r", session="a")
    d.turn("b", 5, 6, 7)
    d.ledger.switch("b")
    assert [name for name, _ in d.commands()] == ["prefetch"]
    d.turn("a", 1, 2, 3, request="r")
    assert {item for name, hashes in d.commands() if name == "demote" for item in hashes} <= {5, 6, 7}
    d.sound()


# -- limits ----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_sessions_go(desk: MakeDesk) -> None:
    d = desk(max_sessions=2)
    for number, name in enumerate("abc"):
        d.turn(name, number + 1)
        eventually(lambda: d.bus.server_time_ms() > 0)
    assert [item.session for item in d.ledger.sessions()] == ["c", "b"]
    assert d.commands() == [("evict", (1,))]
    assert d.ledger.totals().shed == 1
    d.sound()


def test_each_tenant_has_its_own_limits(desk: MakeDesk) -> None:
    d = desk(tenant_sessions=2, tenant_chunks=5)
    d.turn("a", 1, 2, tenant="x")
    d.turn("z", 7, tenant="y")
    d.turn("b", 3, tenant="x")
    d.turn("c", 4, tenant="x")
    assert {item.session for item in d.ledger.sessions(tenant="x")} == {"b", "c"}
    d.turn("c", 4, 10, 11, 12, 13, tenant="x")
    assert {item.session for item in d.ledger.sessions(tenant="x")} == {"c"}
    assert {item.session for item in d.ledger.sessions()} == {"c", "z"}
    d.sound()
    d.ledger.close("z")
    assert d.ledger.store.numbers("tenants") == {"x": 5}


def test_idle_sessions_are_closed(desk: MakeDesk) -> None:
    d = desk(session_ms=20)
    d.turn("a", 1, 2)
    eventually(lambda: d.ledger.sweep()[0], what="the session's time is over")
    assert d.commands() == [("evict", (2, 1))]
    assert d.ledger.totals().expired == 1
    d.sound()


def test_a_chunk_held_again_within_its_grace_stays(desk: MakeDesk) -> None:
    d = desk(grace_ms=200)
    d.turn("a", 1, 2, 3)
    d.ledger.close("a")
    d.turn("b", 1, 2)
    assert d.commands() == []
    eventually(lambda: d.ledger.sweep()[0], what="the grace is over")
    assert d.commands() == [("evict", (3,))]
    assert d.ledger.totals().doomed == 0


# -- what workers could not remove ------------------------------------------------------------------------------------


def _answer(command_id: str, status: Status, *in_use: int, of: int = 2) -> CommandResult:
    counts = Counts(requested=of, in_use=len(in_use), evicted=of - len(in_use))
    return CommandResult(
        command_id=command_id, type="evict", status=status, counts=counts, chunks=ChunkLists(in_use=in_use)
    )


def test_chunks_that_were_in_use_are_evicted_later_if_nobody_holds_them_by_then(desk: MakeDesk) -> None:
    d = desk(retry_ms=50)
    d.turn("a", 1, 2, 3)
    (evict,) = d.ledger.close("a").commands
    assert d.commands() == [("evict", (3, 2, 1))]
    assert d.ledger.answered(_answer(evict.command_id, Status.DEFERRED, 1, 2)) == 0
    assert d.ledger.answered(_answer(evict.command_id, Status.DONE)) == 0
    assert d.ledger.answered(_answer("another", Status.PARTIAL, 1, 2)) == 0
    assert d.ledger.answered(_answer(evict.command_id, Status.PARTIAL, 2, 1)) == 2
    assert d.ledger.answered(_answer(evict.command_id, Status.PARTIAL, 2)) == 1  # another worker
    d.turn("b", 1)  # the request that was using it
    assert d.commands() == [("prefetch", (1,))]  # takes back an evict that still waits in a worker
    eventually(lambda: d.ledger.sweep() and not d.ledger.totals().doomed, what="they are looked at again")
    assert d.commands() == [("evict", (2,))]
    assert d.ledger.sweep()[0] == 0


def test_an_evict_is_taken_back_only_while_it_may_wait(desk: MakeDesk) -> None:
    d = desk(evict_ttl_ms=30)
    d.turn("a", 1, 2)
    d.ledger.close("a")
    d.commands()
    eventually(lambda: _nothing_waits(d), what="the evict's time is over")
    d.turn("b", 1, 2)
    assert d.commands() == []


def _nothing_waits(d: Desk) -> bool:
    newest = d.bus.client.zrange(d.bus.keys.memory("evicted"), -1, -1, withscores=True)
    return not newest or d.bus.server_time_ms() > newest[0][1] + 30


def test_an_evict_that_came_too_late_is_sent_again(desk: MakeDesk) -> None:
    d = desk(retry_ms=1)
    d.turn("a", 1, 2)
    (evict,) = d.ledger.close("a").commands
    assert d.ledger.answered(_answer(evict.command_id, Status.EXPIRED, of=0)) == 2
    eventually(lambda: d.ledger.sweep() and not d.ledger.totals().doomed)
    assert d.commands() == [("evict", (2, 1)), ("evict", (2, 1))]


def test_more_than_a_result_can_name_means_all(desk: MakeDesk) -> None:
    d = desk(retry_ms=1)
    d.turn("a", 1, 2, 3)
    (evict,) = d.ledger.close("a").commands
    cut = CommandResult(
        command_id=evict.command_id,
        type="evict",
        status=Status.PARTIAL,
        counts=Counts(requested=3, in_use=3),
        chunks=ChunkLists(in_use=(1,)),
    )
    assert d.ledger.answered(cut) == 3


def test_the_service_reads_results_and_sends_again(server: Server, namespace: str) -> None:
    bus = server.bus(namespace)
    with _run(server, namespace, msgspec.structs.replace(NOW, retry_ms=10)) as service:
        eventually(lambda: service.ledger.store.position())
        publish(bus, finished("p", 0, (1, 2), session="a"))
        publish(bus, finished("p", 1, (1, 3), session="a"))
        (entry,) = eventually(lambda: list(Log(bus).scan(bus.keys.commands)))
        told = _answer(decode_entry(*entry).id, Status.PARTIAL, 2, of=1)
        results = Results(worker="i/0", instance="i", rank=0, epoch=1, results=(told,))
        Log(bus).append(bus.keys.results, {b"type": b"junk"})
        Log(bus).append(bus.keys.results, encode_entry(results, message_id="r"))
        eventually(lambda: bus.client.xlen(bus.keys.commands) == 2, what="it is evicted again")
        assert service.counters.get("evict_again_chunks") == 1


# -- workers ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_missed_commands_is_told_again_what_matters(desk: MakeDesk) -> None:
    d = desk(hot_sessions=1)
    d.turn("old", 8)
    d.turn("a", 1, 2, 3)
    d.turn("a", 1, 7)
    d.turn("b", 3)  # evicted before, held again
    assert d.commands() == [("evict", (3, 2)), ("prefetch", (3,))]
    gap = WorkerGap(worker="i/1", instance="i", rank=1, epoch=1, reason="trimmed")
    d.ledger.worker_event(gap, Position("90-0", "", 9))
    d.ledger.worker_event(gap, Position("90-0", "", 9))
    entries = list(Log(d.bus).scan(d.bus.keys.commands, d.cursor))
    messages = [decode_entry(entry_id, fields).message for entry_id, fields in entries]
    assert [(message.TYPE, getattr(message, "chunk_hashes", ())) for message in messages] == [
        ("evict", (2,)),
        ("prefetch", (3,)),
    ]
    for message in messages:
        assert isinstance(message, Evict | Prefetch)
        assert message.target is not None
        assert (message.target.instances, message.target.ranks) == (("i",), (1,))


# -- the service -----------------------------------------------------------------------------------------------------


def _run(server: Server, namespace: str, config: MemoryConfig = NOW, **more: str) -> MemoryService:
    return MemoryService(server.bus(namespace, block_ms=200, stats_ms=100), config, **more)  # type: ignore[arg-type]


def test_the_service_follows_events_and_goes_on_after_a_restart(server: Server, namespace: str) -> None:
    bus = server.bus(namespace)
    publish(bus, finished("p", 0, (9,), session="before"))
    with _run(server, namespace, name="one") as service:
        eventually(lambda: service.ledger.store.position())
        publish(bus, finished("p", 1, (1, 2), session="a"))
        Log(bus).append(bus.keys.events, {b"type": b"junk"})
        publish(bus, finished("p", 2, (1, 3), session="a"))
        stopped = WorkerStopped(worker="i/0", instance="i", rank=0, epoch=1)
        Log(bus).append(bus.keys.events, encode_entry(stopped, message_id="w"))
        eventually(lambda: service.ledger.chunks("a") == (1, 3), what="both turns are taken")
        eventually(lambda: read_stats(bus, ["memory/one"]).get("memory/one", {}).get("ledger_sessions") == 1)
        eventually(lambda: service.counters.get("refused") == 1)
        assert bus.client.xlen(bus.keys.dead) == 1
    publish(bus, finished("p", 3, (1, 4), session="a"))
    publish(bus, finished("p", 5, (1, 4), session="b"))
    with _run(server, namespace) as service, _run(server, namespace) as other:
        eventually(lambda: service.ledger.chunks("b") == (1, 4), what="what came between is read")
        eventually(lambda: service.counters.get("missed") + other.counters.get("missed") == 1)
    assert service.ledger.chunks("a") == (1, 4)
    assert service.ledger.session("before") is None
    evicted = [
        message.chunk_hashes
        for message in (decode_entry(*entry).message for entry in Log(bus).scan(bus.keys.commands))
        if isinstance(message, Evict)
    ]
    assert evicted == [(2,), (3,)]


def test_the_service_may_begin_at_the_start(server: Server, namespace: str) -> None:
    bus = server.bus(namespace)
    publish(bus, finished("p", 0, (9,), session="before"))
    with _run(server, namespace, start="start") as service:
        eventually(lambda: service.ledger.session("before") is not None)


def test_a_started_worker_gets_the_newest_sessions(server: Server, namespace: str) -> None:
    bus = server.bus(namespace)
    with _run(server, namespace) as service:
        eventually(lambda: service.ledger.store.position())
        publish(bus, finished("p", 0, (1, 2), session="a"))
        started = WorkerStarted(worker="i/3", instance="i", rank=3, epoch=1)
        Log(bus).append(bus.keys.events, encode_entry(started, message_id="w"))
        entries = eventually(lambda: list(Log(bus).scan(bus.keys.commands)), what="a command")
    message = decode_entry(*entries[0]).message
    assert isinstance(message, Prefetch)
    assert message.target is not None
    assert (message.chunk_hashes, message.target.ranks) == ((1, 2), (3,))


def test_a_lost_history_is_begun_anew(own_server: Server, namespace: str) -> None:
    bus = own_server.bus(namespace)
    with _run(own_server, namespace) as service:
        eventually(lambda: service.ledger.store.position())
        publish(bus, finished("p", 0, (1, 2), session="a"))
        eventually(lambda: service.ledger.session("a"))
        bus.client.flushall()
        publish(bus, finished("p", 0, (5,), session="b"))
        eventually(lambda: service.ledger.session("b"), what="the new history is read")
        assert service.ledger.session("a") is None


def test_a_lost_events_stream_alone_does_not_stop_the_ledger(own_server: Server, namespace: str) -> None:
    bus = own_server.bus(namespace)
    with _run(own_server, namespace) as service:
        eventually(lambda: service.ledger.store.position())
        bus.client.xadd(bus.keys.events, {"type": "junk"}, id="9999999999999-0")
        publish(bus, finished("p", 0, (1, 2), session="a"))
        eventually(lambda: service.ledger.session("a"))
        bus.client.delete(bus.keys.events)
        publish(bus, finished("p", 1, (1, 5), session="a"))
        eventually(lambda: service.ledger.chunks("a") == (1, 5), what="the new stream is read")


def test_killed_servers_forget_nothing_halfway(own_real_server: RealServer, namespace: str) -> None:
    server = own_real_server
    bus = server.bus(namespace)
    with _run(server, namespace) as service:
        eventually(lambda: service.ledger.store.position())
        for number in range(60):
            publish(bus, finished("p", number, [*range(number % 7), 1_000 + number], session=f"s{number % 5}"))
        server.kill()
        server.start()
        eventually(lambda: _alive(bus))
        publish(bus, finished("p", 60, (1, 2, 3), session="s0"))
        eventually(lambda: service.ledger.chunks("s0") == (1, 2, 3), what="the ledger goes on")
    held = {item for number in range(5) for item in service.ledger.chunks(f"s{number}")}
    assert audit(bus).differences == ()
    evicted = {
        item
        for message in (decode_entry(*entry).message for entry in Log(bus).scan(bus.keys.commands))
        if isinstance(message, Evict)
        for item in message.chunk_hashes
    }
    assert {1_000 + number for number in range(60)} - held <= evicted


def _alive(bus: Bus) -> bool:
    try:
        return bool(bus.client.ping())
    except Exception:  # noqa: BLE001  # any trouble means: not yet
        time.sleep(0.05)
        return False


# -- debugging, configuration ----------------------------------------------------------------------------------------


def test_one_debug_file_a_turn(valkey: Server, namespace: str, tmp_path: Path) -> None:
    config = msgspec.structs.replace(NOW, kvcache_debug_enabled=True, debug_dir=str(tmp_path / "debug"), debug_keep=100)
    bus = valkey.bus(namespace)
    with _run(valkey, namespace, config) as service:
        eventually(lambda: service.ledger.store.position())
        publish(bus, finished("p", 0, (1, 2, -3), session="a"))
        publish(bus, finished("p", 1, (1, 4), session="a"))
        files = eventually(lambda: (found := sorted((tmp_path / "debug").glob("*.json"))) and len(found) == 2 and found)
    told = json.loads(files[1].read_text())
    assert told["before"] == ["1", "2", "-3"]
    assert told["after"] == ["1", "4"]
    assert (told["diff_added"], told["diff_deleted"]) == (["4"], ["2", "-3"])
    assert told["commands"][0]["chunk_hashes"] == ["-3", "2"]
    assert told["commands"][0]["form"] == "evict"


def test_switched_off_it_does_nothing(valkey: Server, namespace: str) -> None:
    d = Desk(valkey.bus(namespace), MemoryConfig(kvcache_enabled=False))
    assert d.turn("a", 1, 2) is TurnStatus.OFF
    with pytest.raises(ConfigError, match="kvcache_enabled"):
        d.ledger.close("a")
    with pytest.raises(ConfigError, match="kvcache_enabled"):
        MemoryService(d.bus, MemoryConfig(kvcache_enabled=False))


def test_an_event_that_the_server_cannot_take_does_not_stop_the_rest(valkey: Server, namespace: str) -> None:
    bus = valkey.bus(namespace)
    with _run(valkey, namespace) as service:
        eventually(lambda: service.ledger.store.position())
        bus.client.set(bus.keys.memory("session:bad"), "not a hash")
        publish(bus, finished("p", 0, (1,), session="bad"))
        publish(bus, finished("p", 1, (2,), session="good"))
        eventually(lambda: service.ledger.chunks("good") == (2,))
        assert service.counters.get("failed") == 1


def test_a_fault_of_its_own_does_not_end_the_service(
    valkey: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = valkey.bus(namespace)
    with _run(valkey, namespace) as service:
        eventually(lambda: service.ledger.store.position())
        turn, faults = service.ledger.turn, [RuntimeError("a bug")]

        def faulty(event: RequestFinished, place: Position) -> Turn:
            if faults:
                raise faults.pop()
            return turn(event, place)

        monkeypatch.setattr(service.ledger, "turn", faulty)
        publish(bus, finished("p", 0, (1,), session="a"))
        eventually(lambda: service.ledger.chunks("a") == (1,), what="the event is read again")
        assert service.counters.get("internal_errors") == 1
