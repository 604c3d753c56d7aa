"""kvbus explain: a life as a timeline."""

from __future__ import annotations

from kvbus.client import KVBus
from kvbus.protocol.codec import encode_entry
from kvbus.protocol.commands import DDR, SSD
from kvbus.protocol.hashes import format_hash
from kvbus.streams.connection import Bus
from tests.acceptance.conftest import StartWorker
from tests.cli_kit import Kvbus, finished
from tests.servers import eventually
from tests.unit.scripted_engine import ScriptedEngine

CHUNK = 0x3F5C45ECBAB5E9FD


def test_life_of_a_chunk(kvbus: Kvbus, bus: Bus, client: KVBus, start_worker: StartWorker) -> None:
    start_worker(ScriptedEngine(ssd=[CHUNK, 2]), "host-a")
    start_worker(ScriptedEngine(), "host-b")
    for number, chunks in enumerate(([CHUNK, 2], [3], [2, CHUNK])):
        event = finished(number, chunks, context={"session": "s1"})
        client.log.append(bus.keys.events, encode_entry(event, message_id=f"m{number}"))
    assert client.prefetch([2, CHUNK]).wait(20).complete
    assert client.prefetch([2]).wait(20).complete, "of another chunk"
    assert client.evict([CHUNK], locations=[DDR]).wait(20).complete
    rows = kvbus("explain", "chunk", format_hash(CHUNK)).ok().rows
    by_what = [row["what"] for row in rows]
    assert by_what[:3] == ["announced", "announced", "prefetch"]
    assert "chunk 1 of 2, session s1" in rows[0]["detail"]
    assert {(row["who"], row["what"]) for row in rows if row.get("stream") == "results"} == {
        ("host-a/0", "loaded"), ("host-b/0", "missing"), ("host-a/0", "evicted"), ("host-b/0", "missing")
    }  # fmt: skip
    now = {row["who"]: row["tiers"] for row in rows if row["what"] == "now"}
    assert now == {"host-a/0": [SSD], "host-b/0": []}
    shown = kvbus("explain", "chunk", format_hash(CHUNK), "--table").ok().out
    assert "host-a/0  LocalDiskBackend" in shown
    assert "in no tier" in shown
    quiet = kvbus("explain", "chunk", format_hash(CHUNK), "--no-lookup").ok().rows
    assert "now" not in {row["what"] for row in quiet}


def test_life_of_a_command(kvbus: Kvbus, client: KVBus, bus: Bus, start_worker: StartWorker) -> None:
    engine = ScriptedEngine(ddr=[CHUNK])
    engine.pinned.add(CHUNK)
    start_worker(engine)
    handle = client.evict([CHUNK], lookup_id="mine")
    eventually(lambda: handle.state.answers, what="the interim answer")
    waiting = kvbus("explain", "command", handle.command_id).ok()
    assert [row["what"] for row in waiting.rows] == ["evict", "deferred"]
    assert "host-a/0: has it in hand" in waiting.err
    engine.pinned.clear()
    assert handle.wait(20).complete
    done = kvbus("explain", "command", handle.entry_id).ok()
    assert [row["what"] for row in done.rows] == ["evict", "deferred", "done"]
    assert done.rows[0]["who"] == "a-test"
    assert done.err == ""
    prefetch = client.prefetch([CHUNK], lookup_id="turn")
    assert prefetch.wait(20).complete
    assert prefetch.command_id == kvbus("explain", "command", "turn").ok().rows[0]["command_id"]


def test_life_of_a_command_that_was_refused_and_sent_again(kvbus: Kvbus, bus: Bus, start_worker: StartWorker) -> None:
    start_worker(ScriptedEngine())
    entry = bus.client.xadd(
        bus.keys.commands, {"type": "evict", "json": '{"chunk_hashes":["zz"]}', "id": "bad"}
    ).decode()
    eventually(lambda: bus.client.xlen(bus.keys.dead), what="the dead letter")
    rows = kvbus("explain", "command", "bad").ok().rows
    assert {row["what"] for row in rows} == {"evict", "rejected", "refused"}
    assert entry == rows[0]["entry_id"]


def test_life_of_a_request(kvbus: Kvbus, bus: Bus, client: KVBus, start_worker: StartWorker) -> None:
    start_worker(ScriptedEngine(ssd=[1, 2]))
    client.log.append(bus.keys.events, encode_entry(finished(7, [1, 2, 3]), message_id="m7"))
    assert client.prefetch([3, 2, 9]).wait(20).complete
    assert client.prefetch([8]).wait(20).complete
    rows = kvbus("explain", "request", "chatcmpl-7").ok().rows
    assert [row["what"] for row in rows] == ["finished", "prefetch", "done", "now"]
    assert rows[1]["detail"].startswith("2 of this request's chunks")
    assert rows[-1]["chunks"] == 3
    assert rows[-1]["tiers"] == {DDR: 1, SSD: 2}


def test_what_nobody_knows_ends_with_1(kvbus: Kvbus) -> None:
    for subject in (("chunk", "5"), ("command", "nobody"), ("request", "nobody")):
        done = kvbus("explain", *subject)
        assert done.code == 1
        assert "nothing is known of" in done.err
