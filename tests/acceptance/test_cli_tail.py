"""kvbus tail: every place to begin, every filter, following, and the ways in which it can be cut short."""

from __future__ import annotations

import re
import select
from collections.abc import Iterator
from typing import Any

import pytest

from kvbus.client import KVBus
from kvbus.protocol.codec import encode_entry
from kvbus.protocol.commands import Evict
from kvbus.protocol.results import CommandResult, Results, Status
from kvbus.streams.connection import Bus
from tests.cli_kit import Kvbus, Running, finished
from tests.proxy import Proxy
from tests.servers import RealServer


@pytest.fixture
def ids(bus: Bus, client: KVBus) -> list[str]:
    """Ten requests of two sessions, one command with its result; the entry ids of the events."""
    found = [
        client.log.append(
            bus.keys.events,
            encode_entry(
                finished(number, [number, 0x3F5C45ECBAB5E9FD], context={"session": f"s{number % 2}"}),
                message_id=f"m{number}",
            ),
        )
        for number in range(10)
    ]
    handle = client.send(Evict(chunk_hashes=(0x3F5C45ECBAB5E9FD,), lookup_id="mine"), command_id="the-command")
    result = CommandResult(command_id=handle.command_id, type="evict", status=Status.DONE)
    answer = Results(worker="host-a/0", instance="host-a", rank=0, epoch=1, results=(result,))
    client.log.append(bus.keys.results, encode_entry(answer, message_id="r0"))
    return found


def requests(kvbus: Kvbus, *arguments: object) -> list[int]:
    """The numbers of the requests that it shows."""
    rows = kvbus("tail", "events", *arguments).ok().rows
    return [row["message"].get("seq", 0) for row in rows]


def test_every_place_to_begin_and_to_stop(kvbus: Kvbus, ids: list[str]) -> None:
    assert requests(kvbus, "--from", "start") == list(range(10))
    assert requests(kvbus, "--last", 3) == [7, 8, 9]
    assert requests(kvbus) == list(range(10)), "the last ten by itself"
    assert requests(kvbus, "--from", ids[6]) == [7, 8, 9], "behind an entry"
    assert requests(kvbus, "--from", ids[2], "--to", ids[4]) == [3, 4]
    assert requests(kvbus, "--from", "1h") == list(range(10))
    assert requests(kvbus, "--from", "2020-01-01T00:00") == list(range(10))
    assert requests(kvbus, "--from", "2100-01-01") == []
    assert requests(kvbus, "--from", "start", "--limit", 2) == [0, 1]
    assert requests(kvbus, "--last", 0) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--session", "s1", "--last", "2"], [7, 9]),
        (["--request", "chatcmpl-4"], [4]),
        (["--request", "chatcmpl-4", "--request", "chatcmpl-5-0a1b2c3d"], [4, 5]),
        (["--hash", "5"], [5]),
        (["--hash", "3f5c45ecbab5e9fd", "--session", "s0"], [0, 2, 4, 6, 8]),
        (["--hash", "abcdefabcdef0123"], []),
        (["--instance", "host-a", "--last", "1"], [9]),
        (["--instance", "host-b"], []),
        (["--type", "worker.started"], []),
    ],
)
def test_filters(kvbus: Kvbus, ids: list[str], options: list[str], expected: list[int]) -> None:
    assert requests(kvbus, *options) == expected


def test_all_streams_in_the_order_of_time_and_one_command_with_its_results(kvbus: Kvbus, ids: list[str]) -> None:
    rows = kvbus("tail", "all", "--from", "start").ok().rows
    assert [row["stream"] for row in rows] == ["events"] * 10 + ["commands", "results"]
    by_command = kvbus("tail", "all", "--command", "the-command").ok().rows
    assert [row["type"] for row in by_command] == ["evict", "results"]
    assert len(kvbus("tail", "all", "--command", "mine").ok().rows) == 1, "by its lookup_id"
    assert [row["type"] for row in kvbus("tail", "--worker", "host-a/0").ok().rows] == ["results"]


def test_raw_shows_what_stands_there(kvbus: Kvbus, ids: list[str]) -> None:
    row = kvbus("tail", "events", "--raw", "--last", 1).ok().row
    assert row["fields"]["type"] == "request.finished"
    assert row["fields"]["body"].startswith("base64:")


def test_what_cannot_be_decoded_is_shown_with_the_reason(kvbus: Kvbus, bus: Bus) -> None:
    bus.client.xadd(bus.keys.commands, {"type": "nonsense", "body": b"\x00\xff"})
    row = kvbus("tail", "commands").ok().row
    assert row["error"]["code"] == "unknown_type"
    assert row["fields"]["body"].startswith("base64:")
    assert "nonsense" in kvbus("tail", "commands", "--table").ok().out


def test_follow_shows_what_comes_and_ctrl_c_ends_it(kvbus: Kvbus, client: KVBus, ids: list[str]) -> None:
    with kvbus.started("tail", "all", "--last", 2, "--follow") as tail:
        assert [tail.row()["type"] for _ in range(2)] == ["evict", "results"]
        sent = client.evict([1]).command_id
        assert tail.row()["id"] == sent
        client.log.append(client.bus.keys.events, encode_entry(finished(10, [1]), message_id="m10"))
        assert tail.row()["id"] == "m10"
        assert tail.interrupt().code == 130


def test_follow_from_the_end_shows_only_what_is_new(kvbus: Kvbus, client: KVBus, ids: list[str]) -> None:
    with kvbus.started("tail", "commands", "--from", "end") as tail:
        answers = until_seen(client, tail)
        assert answers["type"] == "ping"


def until_seen(client: KVBus, tail: Running) -> dict[str, Any]:
    for _ in range(600):  # nobody can see from outside when it has begun to follow
        client.ping()
        if select.select([tail.process.stdout], [], [], 0.1)[0]:
            return tail.row()
    raise AssertionError("nothing was seen")


def test_closed_pipe_is_quiet(kvbus: Kvbus, ids: list[str]) -> None:
    done = kvbus.shell("kvbus tail all --from start | head -n 1")
    assert done.code == 0, done
    assert done.err == ""
    assert len(done.out.splitlines()) == 1
    followed = kvbus.shell("kvbus tail all --from start --follow --table | head -n 2; echo ${PIPESTATUS[0]}")
    assert followed.err == ""
    assert followed.out.splitlines()[-1] == "0"


def test_follow_rides_out_an_outage(kvbus: Kvbus, valkey: RealServer, client: KVBus) -> None:
    with Proxy("127.0.0.1", valkey.port) as proxy:
        first = client.ping().command_id
        with kvbus.started("tail", "commands", "--last", 1, "--follow", "--url", proxy.url) as tail:
            assert tail.row()["id"] == first
            proxy.cut()
            assert "trying again" in tail.line(err=True)
            during = client.ping().command_id
            proxy.heal()
            assert tail.row()["id"] == during
            assert tail.interrupt().code == 130


def test_following_tells_what_was_removed_unseen(kvbus: Kvbus, valkey: RealServer, client: KVBus) -> None:
    with Proxy("127.0.0.1", valkey.port) as proxy:
        first = client.ping().command_id
        with kvbus.started("tail", "commands", "--last", 1, "--follow", "--url", proxy.url) as tail:
            assert tail.row()["id"] == first
            proxy.cut()
            assert "trying again" in tail.line(err=True)
            for _ in range(5):
                last = client.ping().command_id
            client.bus.client.xtrim(client.bus.keys.commands, maxlen=1, approximate=False)
            proxy.heal()
            assert tail.row()["id"] == last
            assert re.search(r"4 entries missed: trimmed", tail.interrupt().err)


def test_steals_nothing_and_creates_nothing(kvbus: Kvbus, bus: Bus) -> None:
    done = kvbus("tail", "all", "--from", "start").ok()
    assert done.out == ""
    assert "nothing found" in done.err
    with kvbus.started("tail", "all", "--follow") as tail:
        bus.client.xadd(bus.keys.events, {"type": "x", "body": b""})
        tail.line()
        tail.interrupt()
    assert list(keys_of(bus)) == [bus.keys.events]


def keys_of(bus: Bus) -> Iterator[str]:
    for key in bus.client.scan_iter(match=bus.keys.prefix.replace("{", "\\{") + "*"):
        yield key.decode()
