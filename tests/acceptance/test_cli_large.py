"""The command line on 200,000 entries: paged, with flat memory, the first line at once."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvbus.protocol.codec import encode_entry
from kvbus.protocol.commands import Evict
from kvbus.protocol.hashes import format_hash
from kvbus.streams.connection import Bus
from kvbus.streams.position import Position
from kvbus.streams.registry import save_reader
from kvbus.streams.subscription import end_position
from tests.cli_kit import Kvbus, finished
from tests.servers import RealServer, Server

pytestmark = pytest.mark.timeout(300)

EVENTS, COMMANDS = 190_000, 10_000
CHUNK = 0x3F5C45ECBAB5E9FD
FLAT_BYTES = 48 * 1024 * 1024
"""What a process may grow while it goes through all entries, which have more than 60 MiB."""


@pytest.fixture(scope="session")
def large(_shared: Callable[[str], Server]) -> Iterator[Bus]:
    """A namespace with 200,000 entries, written once."""
    server = _shared("valkey")
    assert isinstance(server, RealServer)
    bus = Bus(server.settings(f"large-{uuid.uuid4().hex[:8]}"), client_name="kvbus-test")
    template = encode_entry(finished(0, list(range(2**40, 2**40 + 24))), message_id="m")
    special = encode_entry(finished(1, [7, CHUNK], context={"session": "rare"}), message_id="special")
    command = encode_entry(Evict(chunk_hashes=(CHUNK,)), message_id="the-command")
    for begin in range(0, EVENTS, 10_000):
        pipe = bus.client.pipeline(transaction=False)
        for number in range(begin, begin + 10_000):
            pipe.xadd(bus.keys.events, special if number == 100 else template | {b"id": b"m%d" % number})
        pipe.execute()
    pipe = bus.client.pipeline(transaction=False)
    for number in range(COMMANDS):
        pipe.xadd(bus.keys.commands, command | {b"id": b"c%d" % number})
    pipe.execute()
    yield bus
    for key in bus.client.scan_iter(match=f"kvbus:[{{]{bus.keys.namespace}[}}]:*"):
        bus.client.delete(key)
    bus.close()


@pytest.fixture
def kvbus(large: Bus, tmp_path: Path) -> Kvbus:
    return Kvbus(large.settings.redis_url, large.keys.namespace, tmp_path)


def run_watched(kvbus: Kvbus, *arguments: object) -> tuple[int, int, int]:
    """(exit code, lines of stdout, bytes that the process grew after its first line)."""
    count = base = most = 0
    with kvbus.started(*arguments) as running:
        assert running.process.stdout is not None
        watched = psutil.Process(running.process.pid)
        for _ in running.process.stdout:
            count += 1
            if count == 1:
                base = watched.memory_info().rss
            elif count % 5_000 == 0:
                most = max(most, watched.memory_info().rss)
        return running.process.wait(60), count, max(0, most - base)


def test_tail_of_all_is_paged_with_flat_memory(kvbus: Kvbus) -> None:
    code, count, grown = run_watched(kvbus, "tail", "all", "--from", "start")
    assert (code, count) == (0, EVENTS + COMMANDS)
    assert grown < FLAT_BYTES


def test_first_line_comes_before_the_rest_is_read(kvbus: Kvbus, large: Bus) -> None:
    before = large.client.info("commandstats").get("cmdstat_xrange", {}).get("calls", 0)
    done = kvbus.shell("kvbus tail all --from start | head -n 1")
    after = large.client.info("commandstats")["cmdstat_xrange"]["calls"]
    assert (done.code, done.err) == (0, "")
    assert len(done.out.splitlines()) == 1
    # A page of each stream, and as many more as a pipe's buffer takes: not the 1,563 pages that there are.
    assert after - before < 40


def test_last_ones_need_no_way_through_the_rest(kvbus: Kvbus, large: Bus) -> None:
    rows = kvbus("tail", "--last", 3).ok().rows
    assert [row["id"] for row in rows] == [f"c{number}" for number in range(COMMANDS - 3, COMMANDS)]
    assert kvbus("tail", "events", "--last", 1).ok().row["id"] == f"m{EVENTS - 1}"


def test_filters_find_a_needle(kvbus: Kvbus) -> None:
    assert kvbus("tail", "events", "--from", "start", "--hash", format_hash(CHUNK)).ok().row["id"] == "special"
    assert kvbus("tail", "events", "--from", "start", "--session", "rare").ok().row["id"] == "special"


def test_explain_keeps_the_newest_moments(kvbus: Kvbus) -> None:
    done = kvbus("explain", "chunk", format_hash(CHUNK), "--no-lookup").ok()
    assert len(done.rows) == 1_000
    assert f"{COMMANDS + 1 - 1_000:,} earlier moments" in done.err
    assert kvbus("explain", "request", "chatcmpl-1", "--no-lookup").ok().rows[0]["what"]


def test_record_verify_and_replay_all_of_it(kvbus: Kvbus, large: Bus) -> None:
    done = kvbus("record", "all.kvrec", timeout=200).ok().row
    assert done["added"] == EVENTS + COMMANDS
    found = kvbus("verify", "all.kvrec").ok().row
    assert found["whole"]
    assert found["file_bytes"] < found["raw_bytes"] / 5
    plan = kvbus("replay", "all.kvrec", "--into", "nowhere", "--dry-run").ok().row
    assert plan["total"] == EVENTS + COMMANDS
    into = f"{large.keys.namespace}-copy"
    part = kvbus("replay", "all.kvrec", "--stream", "commands", "--into", into, "--speed", "max").ok().row
    assert part["written"] == COMMANDS
    copy = Bus(large.settings.__class__(redis_url=large.settings.redis_url, namespace=into))
    assert copy.client.xlen(copy.keys.commands) == COMMANDS
    copy.client.delete(copy.keys.commands)
    copy.close()


def test_ctrl_c_in_the_middle_of_much_output(kvbus: Kvbus) -> None:
    with kvbus.started("tail", "all", "--from", "start") as tail:
        for _ in range(100):
            tail.line()
        os.kill(tail.process.pid, signal.SIGINT)
        deadline = time.monotonic() + 30
        while tail.process.poll() is None and time.monotonic() < deadline:
            assert tail.process.stdout is not None
            os.read(tail.process.stdout.fileno(), 65_536)  # it may wait for room in the pipe
        assert tail.process.returncode == 130
        assert tail.process.stderr is not None
        assert b"Traceback" not in tail.process.stderr.read()


def test_lag_reset_and_trim_count_without_reading_all(kvbus: Kvbus, large: Bus) -> None:
    end = end_position(large, large.keys.events)
    save_reader(large, "at-start", large.keys.events, Position())
    save_reader(large, "at-end", large.keys.events, end)
    rows = {row["name"]: row["behind"] for row in kvbus("lag").ok().rows}
    assert rows == {"at-start": EVENTS, "at-end": 0}
    assert kvbus("reset", "at-start", "--to", "end", "--dry-run").ok().row["skipped"] == EVENTS
    plan = kvbus("trim", "events", "--keep", 1_000, "--dry-run").ok().row
    assert (plan["removed"], [loser["name"] for loser in plan["losers"]]) == (EVENTS - 1_000, ["at-start"])
    for name in ("at-start", "at-end"):
        large.client.delete(large.keys.reader(name))
