"""kvbus dead, reset, trim: what is lost is said before, and asked for."""

from __future__ import annotations

import os
import pty
import subprocess

import pytest

from kvbus.client import KVBus
from kvbus.event_stream import EventStream
from kvbus.protocol.codec import encode_entry, entry_fields
from kvbus.protocol.commands import Evict
from kvbus.protocol.dead import DeadLetter
from kvbus.streams.connection import Bus
from kvbus.streams.registry import load_reader
from tests.acceptance.conftest import StartWorker
from tests.cli_kit import PROGRAM, Kvbus, finished
from tests.servers import eventually
from tests.unit.scripted_engine import ScriptedEngine


def refuse(bus: Bus, fields: dict[bytes, bytes], **more: object) -> str:
    """A dead letter of an entry, as a worker writes it. Its entry id."""
    named = {name.decode(): value for name, value in fields.items()}
    values: dict[str, object] = {
        "stream": bus.keys.commands, "entry_id": "5-0", "message_id": "the-refused", "type": "evict", "code": "poison",
        "message": "the worker died 3 times on this entry", "refused_by": "host-a/0", "fields": named,
        "size": sum(len(name) + len(value) for name, value in fields.items()),
    }  # fmt: skip
    letter = DeadLetter(**values | more)  # type: ignore[arg-type]
    entry_id: bytes = bus.client.xadd(bus.keys.dead, encode_entry(letter, message_id="d"))
    return entry_id.decode()


def evict(*chunks: int) -> dict[bytes, bytes]:
    return encode_entry(Evict(chunk_hashes=chunks, issued_at_ms=1, issuer="x"), message_id="the-refused")


def test_requeue_sends_it_again_under_a_new_id(kvbus: Kvbus, bus: Bus, start_worker: StartWorker) -> None:
    engine = ScriptedEngine(ddr=[7])
    start_worker(engine)
    dead_id = refuse(bus, evict(7))
    assert "it can be requeued" in kvbus("dead", "show", dead_id).ok().out
    assert kvbus("dead", "requeue", dead_id, "--dry-run").ok().row["dry_run"]
    assert 7 in engine.ddr
    row = kvbus("dead", "requeue", "the-refused").ok().row
    assert row["origin"] == "the-refused"
    assert row["id"] != "the-refused"
    eventually(lambda: 7 not in engine.ddr, what="the evict")
    (sent,) = kvbus("tail", "commands").ok().rows
    assert (sent["id"], sent["origin"]) == (row["id"], "the-refused")
    assert sent["message"]["issued_at_ms"] > 1
    assert sent["message"]["issuer"] == "x", "content is kept"
    assert bus.client.xlen(bus.keys.dead) == 0
    again = kvbus("dead", "requeue", "the-refused")
    assert again.code == 2
    assert "no dead letter" in again.err


def test_what_still_cannot_be_taken_stays(kvbus: Kvbus, bus: Bus) -> None:
    refuse(bus, {b"type": b"evict", b"json": b'{"chunk_hashes":["zz"]}'}, code="invalid")
    refuse(bus, evict(7), size=999_999, code="over_limit")
    refuse(bus, entry_fields("results", b"\x80", message_id="r"), code="invalid")
    good = refuse(bus, evict(8))
    done = kvbus("dead", "requeue", "--all")
    assert done.code == 1
    assert done.row["dead_id"] == good
    assert "[invalid]" in done.err
    assert "[over_limit]" in done.err
    assert bus.client.xlen(bus.keys.dead) == 3


def test_list_filters_and_drop_asks(kvbus: Kvbus, bus: Bus) -> None:
    refuse(bus, evict(1))
    keep = refuse(bus, evict(2), code="invalid", refused_by="host-b/0")
    assert [row["code"] for row in kvbus("dead", "list").ok().rows] == ["poison", "invalid"]
    assert kvbus("dead", "list", "--by", "host-b/0").ok().row["dead_id"] == keep
    assert "poison" in kvbus("dead", "list", "--table").ok().out
    asked = kvbus("dead", "drop", "--code", "poison")
    assert asked.code == 2
    assert "Drop 1 dead letters for good?" in asked.err
    assert bus.client.xlen(bus.keys.dead) == 2
    assert kvbus("dead", "drop", "--code", "poison", "--yes").ok().row == {"dropped": 1}
    assert kvbus("dead", "drop").code == 2
    assert kvbus("dead", "list").ok().row["dead_id"] == keep


@pytest.mark.parametrize(("answer", "left"), [("n", 1), ("y", 0)])
def test_a_person_is_asked_on_a_terminal(kvbus: Kvbus, bus: Bus, answer: str, left: int) -> None:
    refuse(bus, evict(1))
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, "dead", "drop", "--all"],
        cwd=kvbus.directory,
        env=kvbus.env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while b"for good?" not in shown:
        shown += os.read(ours, 4_096)
    os.write(ours, f"{answer}\n".encode())
    assert process.wait(30) == left
    os.close(ours)
    assert bus.client.xlen(bus.keys.dead) == left


def take(stream: EventStream, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        found += [delivery.event.seq for delivery in stream.read(block_ms=100)]  # type: ignore[union-attr]
    return found


def test_reset_of_a_reader_back_and_forth(kvbus: Kvbus, bus: Bus, client: KVBus) -> None:
    def publish(number: int) -> None:
        client.log.append(bus.keys.events, encode_entry(finished(number, [1]), message_id=f"m{number}"))

    for number in range(6):
        publish(number)
    with client.events(reader="mine", start="start") as stream:
        assert take(stream, 6) == [0, 1, 2, 3, 4, 5]
        stream.save()
    plan = kvbus("reset", "mine", "--to", "start", "--dry-run").ok().row
    assert (plan["repeated"], plan["skipped"]) == (6, 0)
    assert kvbus("reset", "mine", "--to", "start").code == 2, "nobody can be asked"
    kvbus("reset", "mine", "--to", "start", "--yes").ok()
    with client.events(reader="mine") as stream:
        assert take(stream, 6) == [0, 1, 2, 3, 4, 5], "they come again, and are not taken for repeats"
    publish(6)
    forth = kvbus("reset", "mine", "--to", "end", "--yes").ok().row
    assert forth["skipped"] == 7
    with client.events(reader="mine") as stream:
        publish(7)
        assert take(stream, 1) == [7]
    ids = [row["entry_id"] for row in kvbus("tail", "events", "--from", "start").ok().rows]
    assert kvbus("reset", "mine", "--to", ids[2], "--yes").ok().row["repeated"] == 4
    kvbus("reset", "mine", "--forget", "--yes").ok()
    assert load_reader(bus, "mine") is None


def test_reset_of_a_worker_is_refused(kvbus: Kvbus, start_worker: StartWorker) -> None:
    start_worker(ScriptedEngine())
    done = kvbus("reset", "host-a/0", "--to", "end", "--yes")
    assert done.code == 2
    assert "is a worker" in done.err
    assert "no reader" in kvbus("reset", "nobody", "--to", "end").err


def test_trim_says_who_has_not_read_it(kvbus: Kvbus, bus: Bus, client: KVBus) -> None:
    for number in range(10):
        client.log.append(bus.keys.events, encode_entry(finished(number, [1]), message_id=f"m{number}"))
    with client.events(reader="slow", start="start") as stream:
        take(stream, 3)
        stream.save()
    behind = load_reader(bus, "slow")
    assert behind is not None
    plan = kvbus("trim", "events", "--keep", 4, "--dry-run").ok().row
    assert plan["removed"] == 6
    unread = 6 - behind.position.entries
    assert plan["losers"] == (
        [{"name": "slow", "role": "reader", "unread": unread, "in_hand": 0}] if unread > 0 else []
    )
    assert bus.client.xlen(bus.keys.events) == 10
    assert kvbus("trim", "events", "--keep", 4).code == 2
    assert kvbus("trim", "events", "--keep", 4, "--yes").ok().row["removed"] == 6
    ids = [row["entry_id"] for row in kvbus("tail", "events", "--from", "start").ok().rows]
    assert len(ids) == 4
    assert kvbus("trim", "events", "--before", ids[2], "--yes").ok().row["removed"] == 2
    assert kvbus("trim", "events", "--before", "1h", "--yes").ok().row["removed"] == 0
    assert kvbus("trim", "events", "--keep", 0, "--yes").ok().row["removed"] == 2
