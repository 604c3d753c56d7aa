"""Streams and readers: one behaviour on fakeredis, Valkey 9.1 and Redis 7.0."""

from __future__ import annotations

import threading

import pytest

from kvbus.errors import BusFull, BusRefused, BusUnavailable
from kvbus.protocol import Ping, decode_entry, encode_entry
from kvbus.protocol.codec import Fields
from kvbus.streams.connection import Bus
from kvbus.streams.log import Log, StreamState, stream_state
from kvbus.streams.position import Gap, GapKind, Position
from kvbus.streams.subscription import Subscription
from tests.conftest import MakeServer
from tests.servers import RealServer, Server, eventually


@pytest.fixture
def bus(server: Server, namespace: str) -> Bus:
    return server.bus(namespace)


def command(number: int) -> Fields:
    return encode_entry(Ping(issuer=f"test-{number}"), message_id=f"m{number}")


def fill(bus: Bus, first: int, last: int) -> list[str]:
    """Commands number first to last, both included; their entry ids."""
    return Log(bus).append_batch(bus.keys.commands, [command(number) for number in range(first, last + 1)])


def numbers(found: list[tuple[str, Fields]]) -> list[int]:
    return [int(decode_entry(entry_id, fields).id.removeprefix("m")) for entry_id, fields in found]


def drain(subscription: Subscription, *, may_reconnect: bool = False) -> tuple[list[int], list[Gap]]:
    """All that comes without waiting, after a look at the server's counters; and what was found missing."""
    seen: list[int] = []
    gaps: list[Gap] = []
    for _ in range(100):
        subscription.check_now()
        try:
            batch = subscription.read(block_ms=0, count=5)
        except BusUnavailable:  # a connection that died with its server; the next read makes a new one
            assert may_reconnect
            continue
        seen += numbers(batch.entries)
        if batch.gap is not None:
            gaps.append(batch.gap)
        elif not batch.entries:
            return seen, gaps
    pytest.fail("the reader spins")


# -- log ---------------------------------------------------------------------------------------------------------


def test_append_and_look_into(bus: Bus) -> None:
    log, key = Log(bus), bus.keys.commands
    assert log.state(key) == StreamState()
    first = log.append(key, command(0))
    ids = [first, *log.append_batch(key, [command(number) for number in range(1, 150)])]
    assert sorted(ids, key=lambda one: tuple(map(int, one.split("-")))) == ids
    assert numbers(list(log.scan(key))) == list(range(150))
    assert numbers(list(log.scan_back(key, page=7))) == list(range(149, -1, -1))
    assert numbers(list(log.scan(key, ids[3], ids[5]))) == [3, 4, 5]
    assert log.get(key, ids[7]) == command(7)
    assert log.get(key, "1-1") is None
    state = log.state(key)
    assert (state.length, state.first_id, state.last_id, state.entries_added) == (150, ids[0], ids[-1], 150)
    assert log.append_batch(key, []) == []


def test_values_are_bytes_of_any_kind(bus: Bus) -> None:
    fields = {b"body": bytes(range(256)) * 40, b"": b"", b"\r\n\x00": b"$5\r\n"}
    entry_id = Log(bus).append(bus.keys.events, fields)
    assert Log(bus).get(bus.keys.events, entry_id) == fields


def test_stream_is_capped_by_bytes(server: Server, namespace: str) -> None:
    cap = 200_000
    bus = server.bus(namespace, commands_cap_bytes=cap)
    log, key = Log(bus), bus.keys.commands
    for number in range(150):
        log.append_batch(key, [{b"n": b"%d" % number, b"body": b"x" * 400}] * 20)  # 1.2 MB altogether
    state = log.state(key)
    assert state.entries_added == 3_000
    assert 0.3 * cap < state.length * 400 < 1.3 * cap
    if server.real:
        assert bus.client.memory_usage(key) < 1.3 * cap


def test_wrong_kind_of_key_is_refused_with_a_hint(bus: Bus) -> None:
    bus.client.set(bus.keys.commands, "not a stream")
    for call in (
        lambda: Log(bus).append(bus.keys.commands, command(0)),
        lambda: Log(bus).append_batch(bus.keys.commands, [command(0)]),
        lambda: Log(bus).state(bus.keys.commands),
        lambda: Subscription.from_end(bus, bus.keys.commands),
    ):
        with pytest.raises(BusRefused, match="WRONGTYPE") as caught:
            call()
        assert caught.value.hint


# -- subscription ------------------------------------------------------------------------------------------------


def test_reader_begins_where_it_is_told(bus: Bus) -> None:
    ids = fill(bus, 0, 9)
    key = bus.keys.commands
    assert drain(Subscription.from_start(bus, key)) == (list(range(10)), [])
    assert drain(Subscription.from_end(bus, key)) == ([], [])
    assert drain(Subscription.from_id(bus, key, ids[6])) == ([7, 8, 9], [])
    at_end = Subscription.from_end(bus, key)
    fill(bus, 10, 11)
    assert drain(at_end) == ([10, 11], [])


def test_reader_of_an_absent_stream_gets_its_first_entry(bus: Bus) -> None:
    for subscription in (
        Subscription.from_end(bus, bus.keys.commands),
        Subscription.from_start(bus, bus.keys.commands),
    ):
        assert drain(subscription) == ([], [])
        bus.client.delete(bus.keys.commands)
        fill(bus, 0, 0)
        assert drain(subscription) == ([0], [])
        bus.client.delete(bus.keys.commands)


def test_saved_position_resumes_without_loss_or_repeat(bus: Bus) -> None:
    fill(bus, 0, 19)
    key, seen = bus.keys.commands, []
    position = Subscription.from_start(bus, key).position
    while True:  # every read by another reader, from what the one before has saved
        subscription = Subscription(bus, key, position)
        batch = subscription.read(block_ms=0, count=3)
        assert batch.gap is None
        seen += numbers(batch.entries)
        position = subscription.position
        if not batch.entries:
            break
    assert seen == list(range(20))


def test_waiting_reader_wakes_up(bus: Bus) -> None:
    subscription = Subscription.from_end(bus, bus.keys.commands)
    got: list[int] = []

    def wait() -> None:
        while not got:
            got.extend(numbers(subscription.read(block_ms=1_000).entries))

    reader = threading.Thread(target=wait)
    reader.start()
    fill(bus, 5, 5)
    reader.join(20)
    assert got == [5]


def test_trim_past_the_cursor_is_counted_exactly(bus: Bus) -> None:
    subscription = Subscription.from_start(bus, bus.keys.commands)
    ids = fill(bus, 0, 9)
    assert numbers(subscription.read(block_ms=0, count=4).entries) == [0, 1, 2, 3]
    bus.client.xtrim(bus.keys.commands, maxlen=2, approximate=False)
    seen, gaps = drain(subscription)
    assert seen == [8, 9]
    assert [(gap.kind, gap.missed, gap.after, gap.before) for gap in gaps] == [
        (GapKind.TRIMMED, 4, ids[3], ids[8]),
    ]


def test_everything_trimmed_is_counted_exactly(bus: Bus) -> None:
    subscription = Subscription.from_start(bus, bus.keys.commands)
    fill(bus, 0, 9)
    subscription.read(block_ms=0, count=4)
    bus.client.xtrim(bus.keys.commands, maxlen=0, approximate=False)
    seen, gaps = drain(subscription)
    assert (seen, [(gap.kind, gap.missed) for gap in gaps]) == ([], [(GapKind.TRIMMED, 6)])
    fill(bus, 10, 10)
    assert drain(subscription) == ([10], [])


def test_trim_of_what_was_read_is_no_gap(bus: Bus) -> None:
    subscription = Subscription.from_start(bus, bus.keys.commands)
    fill(bus, 0, 9)
    subscription.read(block_ms=0, count=8)
    bus.client.xtrim(bus.keys.commands, maxlen=3, approximate=False)
    assert drain(subscription) == ([8, 9], [])
    bus.client.xtrim(bus.keys.commands, maxlen=0, approximate=False)
    assert drain(subscription) == ([], [])


def test_deleted_unread_entry_is_counted_once(bus: Bus) -> None:
    subscription = Subscription.from_start(bus, bus.keys.commands)
    ids = fill(bus, 0, 9)
    subscription.read(block_ms=0, count=3)
    bus.client.xdel(bus.keys.commands, ids[5])
    seen, gaps = drain(subscription)
    assert seen == [3, 4, 6, 7, 8, 9]
    assert [(gap.kind, gap.missed) for gap in gaps] == [(GapKind.TRIMMED, 1)]
    fill(bus, 10, 10)
    assert drain(subscription) == ([10], [])


@pytest.mark.parametrize("deleted", [2, 9])
def test_deleted_entry_that_was_read_is_no_gap(bus: Bus, deleted: int) -> None:
    subscription = Subscription.from_start(bus, bus.keys.commands)
    ids = fill(bus, 0, 9)
    assert drain(subscription) == (list(range(10)), [])
    bus.client.xdel(bus.keys.commands, ids[deleted])
    fill(bus, 10, 12)
    assert drain(subscription) == ([10, 11, 12], [])


def test_deleted_entry_at_the_cursor_is_no_gap(bus: Bus) -> None:
    subscription = Subscription.from_start(bus, bus.keys.commands)
    ids = fill(bus, 0, 9)
    subscription.read(block_ms=0, count=4)
    bus.client.xdel(bus.keys.commands, ids[3])
    assert drain(subscription) == ([4, 5, 6, 7, 8, 9], [])


@pytest.mark.parametrize("fresh", [0, 1, 9, 10, 11, 40])
def test_deleted_stream_is_another_history(bus: Bus, fresh: int) -> None:
    subscription = Subscription.from_start(bus, bus.keys.commands)
    fill(bus, 0, 9)
    assert drain(subscription) == (list(range(10)), [])
    bus.client.delete(bus.keys.commands)
    if fresh:
        fill(bus, 100, 99 + fresh)
    seen, gaps = drain(subscription)
    assert seen == list(range(100, 100 + fresh))
    assert [gap.kind for gap in gaps] == [GapKind.HISTORY_LOST]
    fill(bus, 500, 500)
    assert drain(subscription) == ([500], [])


@pytest.mark.parametrize("fresh", ["1-1", "*", "99999999999999-0"])
def test_flush_under_a_waiting_reader_is_another_history(own_server: Server, namespace: str, fresh: str) -> None:
    bus = own_server.bus(namespace)
    subscription = Subscription.from_start(bus, bus.keys.commands)
    fill(bus, 0, 9)
    assert drain(subscription) == (list(range(10)), [])
    seen: list[int] = []
    gaps: list[Gap] = []
    waits = threading.Event()

    def wait() -> None:
        waits.set()
        while not seen:
            batch = subscription.read(block_ms=300)
            seen.extend(numbers(batch.entries))
            if batch.gap is not None:
                gaps.append(batch.gap)

    reader = threading.Thread(target=wait)
    reader.start()
    waits.wait(10)
    writer = own_server.client()
    if own_server.real:
        eventually(lambda: writer.info("clients")["blocked_clients"], what="a blocked reader")
    writer.flushall()
    writer.xadd(bus.keys.commands, command(100), id=fresh)
    reader.join(30)
    assert seen == [100]
    more, found = drain(subscription)
    assert [number for number in more if number != 100] == []
    assert [gap.kind for gap in gaps + found] == [GapKind.HISTORY_LOST]


def test_lost_tail_with_equal_counters_is_another_history(bus: Bus) -> None:
    # As after a failover that lost the newest entry: same ids and counters, one entry with other content.
    client, key = bus.client, bus.keys.commands
    for number in range(3):
        client.xadd(key, command(number), id=f"5-{number + 1}")
    subscription = Subscription.from_start(bus, key)
    assert drain(subscription) == ([0, 1, 2], [])
    client.delete(key)
    for number in (0, 1, 77):
        client.xadd(key, command(number), id=f"5-{min(number, 2) + 1}")
    seen, gaps = drain(subscription)
    assert [gap.kind for gap in gaps] == [GapKind.HISTORY_LOST]
    assert seen == [0, 1, 77]  # all of the new history: readers know by message id what they have seen


def test_position_beyond_the_server_is_another_history(bus: Bus) -> None:
    fill(bus, 0, 1)
    ahead = Subscription(bus, bus.keys.commands, Position("99999999999999-0", "x", 50))
    seen, gaps = drain(ahead)
    assert (seen, [gap.kind for gap in gaps]) == ([0, 1], [GapKind.HISTORY_LOST])


# -- servers that stop -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_append_only_file_keeps_the_history(own_real_server: RealServer, namespace: str, how: str) -> None:
    bus = own_real_server.bus(namespace)
    subscription = Subscription.from_start(bus, bus.keys.commands)
    fill(bus, 0, 9)
    assert numbers(subscription.read(block_ms=0, count=4).entries) == [0, 1, 2, 3]
    if how == "restart":
        own_real_server.restart()
    else:
        own_real_server.kill()
        own_real_server.start()
    assert drain(subscription, may_reconnect=True) == ([4, 5, 6, 7, 8, 9], [])
    bus.close()
    fill(bus, 10, 10)
    assert drain(subscription) == ([10], [])


@pytest.mark.parametrize("kind", ["valkey", "redis7"])
def test_restart_without_a_file_is_another_history(start_server: MakeServer, namespace: str, kind: str) -> None:
    server = start_server(kind)
    assert isinstance(server, RealServer)
    bus = server.bus(namespace)
    subscription = Subscription.from_start(bus, bus.keys.commands)
    fill(bus, 0, 9)
    assert drain(subscription) == (list(range(10)), [])
    server.restart()
    bus.close()
    fill(bus, 100, 101)
    seen, gaps = drain(subscription, may_reconnect=True)
    assert (seen, [gap.kind for gap in gaps]) == ([100, 101], [GapKind.HISTORY_LOST])


def test_server_that_is_away_or_frozen_is_said_so(own_real_server: RealServer, namespace: str) -> None:
    bus = own_real_server.bus(namespace, reply_timeout_ms=200, connect_timeout_ms=200)
    fill(bus, 0, 0)
    own_real_server.pause()
    with pytest.raises(BusUnavailable, match="Timeout"):
        Log(bus).append(bus.keys.commands, command(1))
    own_real_server.resume()
    eventually(lambda: Log(bus).append(bus.keys.commands, command(2)))
    own_real_server.stop()
    with pytest.raises(BusUnavailable) as caught:
        Log(bus).append(bus.keys.commands, command(3))
    assert "KVBUS_REDIS_URL" in caught.value.hint


def test_full_server_refuses_appends_and_still_reads(own_real_server: RealServer, namespace: str) -> None:
    bus = own_real_server.bus(namespace)
    subscription = Subscription.from_start(bus, bus.keys.commands)
    fill(bus, 0, 4)
    bus.client.config_set("maxmemory", 1)
    for call in (
        lambda: Log(bus).append(bus.keys.commands, command(5)),
        lambda: Log(bus).append_batch(bus.keys.commands, [command(5)]),
    ):
        with pytest.raises(BusFull):
            call()
    assert drain(subscription) == ([0, 1, 2, 3, 4], [])
    bus.client.config_set("maxmemory", 0)
    fill(bus, 5, 5)
    assert drain(subscription) == ([5], [])
    assert stream_state(bus.client, bus.keys.commands).entries_added == 6
