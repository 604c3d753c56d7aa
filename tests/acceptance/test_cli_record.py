"""kvbus record, verify and replay: nothing lost, nothing twice, whatever is interrupted."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from kvbus.client import KVBus
from kvbus.errors import ConfigError
from kvbus.ops.recording import RecordingReader, RecordingWriter
from kvbus.ops.replay import Range, Replay, from_file, from_stream
from kvbus.ops.tail import history
from kvbus.protocol.codec import encode_entry
from kvbus.protocol.commands import Evict, Prefetch
from kvbus.streams.connection import Bus
from tests.acceptance.conftest import LIVE, StartWorker
from tests.cli_kit import Kvbus, finished
from tests.proxy import Proxy
from tests.servers import RealServer, eventually
from tests.unit.scripted_engine import ScriptedEngine


@pytest.fixture
def filled(bus: Bus, client: KVBus) -> int:
    """150 events and 50 commands, by turns. How many there are."""
    for number in range(150):
        event = finished(number, [number, number + 1], context={"session": "s"})
        client.log.append(bus.keys.events, encode_entry(event, message_id=f"m{number}"))
        if number % 3 == 0:
            message = Evict(chunk_hashes=(number,), issued_at_ms=1, lookup_id=f"l{number}")
            client.log.append(bus.keys.commands, encode_entry(message, message_id=f"c{number}"))
    return 200


def other(valkey: RealServer, namespace: str) -> Bus:
    return valkey.bus(f"{namespace}-copy", **LIVE)


def contents(bus: Bus) -> list[tuple[str, object, str | None]]:
    """(stream, message without its issue time, what it repeats), in order."""
    found = []
    for seen in history(bus, ("events", "commands")):
        assert seen.envelope is not None
        message = seen.envelope.message
        if isinstance(message, Evict | Prefetch):
            assert message.issued_at_ms is not None
            message = type(message)(
                **{n: getattr(message, n) for n in message.__struct_fields__ if n != "issued_at_ms"}
            )
        found.append((seen.stream, message, seen.envelope.origin))
    return found


def without_origin(found: list[tuple[str, object, str | None]]) -> list[tuple[str, object]]:
    """Each stream by itself: entries of two streams with one time have no order."""
    return sorted(((stream, message) for stream, message, _ in found), key=lambda item: item[0])


def test_record_and_replay_at_once(kvbus: Kvbus, filled: int, bus: Bus, valkey: RealServer, namespace: str) -> None:
    done = kvbus("record", "a.kvrec").ok().row
    assert done["added"] == filled
    assert done["entries"] == {"events": 150, "commands": 50, "results": 0, "dead": 0}
    checked = kvbus("verify", "a.kvrec").ok().row
    assert checked["whole"]
    assert checked["file_bytes"] < checked["raw_bytes"] / 2
    copy = f"{namespace}-copy"
    plan = kvbus("replay", "a.kvrec", "--into", copy, "--dry-run").ok().row
    assert plan["counts"] == {"request.finished": 150, "evict": 50}
    assert not contents(other(valkey, namespace)), "a dry run writes nothing"
    assert kvbus("replay", "a.kvrec", "--into", copy, "--speed", "max").ok().row["written"] == filled
    target = other(valkey, namespace)
    assert without_origin(contents(target)) == without_origin(contents(bus))
    old = {seen.message_id for seen in history(bus, ("events", "commands"))}
    new = list(history(target, ("events", "commands")))
    assert {seen.envelope.origin for seen in new if seen.envelope} == old
    assert {seen.message_id for seen in new}.isdisjoint(old)
    issued = [seen.envelope.message.issued_at_ms for seen in new if seen.envelope and seen.stream == "commands"]  # type: ignore[union-attr]
    assert min(issued) > 1, "issue times are new"


def test_ranges_and_streams(kvbus: Kvbus, filled: int, bus: Bus, namespace: str) -> None:
    ids = [seen.entry_id for seen in history(bus, ("events",))]
    kvbus("record", "a.kvrec", "--stream", "events", "--from", ids[9], "--to", ids[19]).ok()
    with RecordingReader(kvbus.directory / "a.kvrec") as reader:
        assert [found.entry_id for found in reader] == ids[10:20]
    plan = kvbus("replay", "a.kvrec", "--into", "x", "--from", ids[14], "--dry-run").ok().row
    assert plan["total"] == 5
    live = kvbus("replay", "all", "--into", f"{namespace}-c", "--from", ids[140], "--dry-run").ok().row
    assert set(live["counts"]) == {"request.finished", "evict"}


def test_a_recording_is_added_to(kvbus: Kvbus, filled: int, client: KVBus) -> None:
    kvbus("record", "a.kvrec").ok()
    again = kvbus("record", "a.kvrec")
    assert again.code == 2
    assert "--append" in again.err
    client.evict([1])
    assert kvbus("record", "a.kvrec", "--append").ok().row["added"] == 1
    assert kvbus("verify", "a.kvrec").ok().row["entries"]["commands"] == 51


def test_recording_goes_on_until_ctrl_c_and_is_closed_well(kvbus: Kvbus, client: KVBus) -> None:
    client.evict([1])
    with kvbus.started("record", "a.kvrec", "--follow") as recording:
        wait_for_entries(kvbus.directory / "a.kvrec", 1)
        for number in range(5):
            client.evict([number])
        wait_for_entries(kvbus.directory / "a.kvrec", 6)
        done = recording.interrupt()
    assert done.code == 130
    assert done.row["added"] == 6
    assert kvbus("verify", "a.kvrec").ok().row["whole"]


def wait_for_entries(path: Path, count: int) -> None:
    def there() -> bool:
        if not path.exists() or path.stat().st_size < 32:
            return False
        with RecordingReader(path) as reader:
            return sum(1 for _ in reader) >= count

    eventually(there, what=f"{count} entries in the file")


def test_a_recording_that_was_killed_is_sound_up_to_there(kvbus: Kvbus, client: KVBus) -> None:
    client.evict([1])
    with kvbus.started("record", "a.kvrec", "--follow") as recording:
        wait_for_entries(kvbus.directory / "a.kvrec", 1)
        recording.process.kill()
        recording.end()
    checked = kvbus("verify", "a.kvrec")
    assert checked.code == 1
    assert not checked.row["ended"]
    assert "not closed" in kvbus("verify", "a.kvrec", "--table").out
    assert kvbus("replay", "a.kvrec", "--into", "x", "--dry-run").ok().row["total"] == 1


def test_replay_goes_on_after_ctrl_c(kvbus: Kvbus, filled: int, bus: Bus, valkey: RealServer, namespace: str) -> None:
    kvbus("record", "a.kvrec").ok()
    target, copy = other(valkey, namespace), f"{namespace}-copy"
    # it was written in far less than a second: slowed down 500 times it leaves time for Ctrl-C
    with kvbus.started("replay", "a.kvrec", "--into", copy, "--speed", "0.002") as replay:
        eventually(lambda: len(contents(target)) >= 5, what="the first entries")
        stopped = replay.interrupt()
    assert stopped.code == 130
    assert "--resume" in stopped.err
    written = len(contents(target))
    assert 5 <= written < filled
    refused = kvbus("replay", "a.kvrec", "--into", copy, "--speed", "max")
    assert refused.code == 2
    assert "interrupted after" in refused.err
    done = kvbus("replay", "a.kvrec", "--into", copy, "--speed", "max", "--resume").ok().row
    assert done["earlier"] == written
    assert done["written"] == filled - written
    assert without_origin(contents(target)) == without_origin(contents(bus))
    assert kvbus("replay", "a.kvrec", "--into", copy, "--resume").ok().row["written"] == 0, "it is finished"
    assert kvbus("replay", "a.kvrec", "--into", copy, "--speed", "max").ok().row["written"] == filled, "a new replay"
    assert kvbus("replay", "a.kvrec", "--into", copy, "--from", "10m", "--resume").code == 2, "of a range never begun"


def test_replay_survives_lost_answers_without_a_repeat(
    filled: int, bus: Bus, valkey: RealServer, namespace: str, kvbus: Kvbus
) -> None:
    kvbus("record", "a.kvrec").ok()
    chosen = Range()
    with Proxy("127.0.0.1", valkey.port) as proxy:
        settings = valkey.settings(f"{namespace}-copy", reply_timeout_ms=200)
        through = Bus(type(settings)(redis_url=proxy.url, namespace=settings.namespace, reply_timeout_ms=200))
        troubles = itertools.cycle([proxy.drop_replies, proxy.cut, proxy.black_hole])
        replay = Replay(from_file(kvbus.directory / "a.kvrec", chosen), through)
        written: list[int] = []

        def trouble(count: int) -> None:
            written.append(count)
            next(troubles)()
            threading.Timer(0.3, proxy.heal).start()

        done = replay.run(speed=None, progress=trouble)
        proxy.heal()
        through.close()
    assert done.written == filled
    assert len(written) > 2
    assert without_origin(contents(other(valkey, namespace))) == without_origin(contents(bus))


def test_replay_keeps_its_pace(kvbus: Kvbus, bus: Bus, valkey: RealServer, namespace: str) -> None:
    for number in range(5):
        fields = encode_entry(Evict(chunk_hashes=(number,)), message_id=f"c{number}")
        bus.client.xadd(bus.keys.commands, fields, id=f"{1_000_000 + number * 400}-0")
    copy = f"{namespace}-copy"
    assert kvbus("replay", "commands", "--into", copy, "--speed", "2").ok().row["seconds"] >= 0.8
    ids = [int(seen.entry_id.split("-")[0]) for seen in history(other(valkey, namespace), ("commands",))]
    assert all(later - earlier >= 150 for earlier, later in itertools.pairwise(ids))
    quick = kvbus("replay", "commands", "--into", copy, "--speed", "0.001", "--max-pause", "1ms", "--from", "1000400")
    assert quick.ok().row["written"] == 3


def test_live_workers_are_not_driven_by_accident(
    kvbus: Kvbus, filled: int, start_worker: StartWorker, namespace: str
) -> None:
    start_worker(ScriptedEngine())
    refused = kvbus("-n", f"{namespace}-empty", "replay", "commands", "--into", namespace)
    assert refused.code == 2
    assert "live workers (host-a/0)" in refused.err
    own = kvbus("replay", "commands")
    assert own.code == 2
    assert "own namespace" in own.err
    forced = kvbus("replay", "commands", "--force", "--speed", "max").ok().row
    assert forced["written"] == 50, "it does not meet its own entries"
    answers = kvbus("tail", "results", "--from", "start").ok().rows
    assert sum(len(row["message"]["results"]) for row in answers) >= 1


def test_what_cannot_be_decoded_is_counted_not_replayed(bus: Bus, valkey: RealServer, namespace: str) -> None:
    bus.client.xadd(bus.keys.commands, {"type": "nonsense", "json": "{}"})
    bus.client.xadd(bus.keys.commands, {"type": "evict", "json": '{"chunk_hashes":["5"]}'})
    target = other(valkey, namespace)
    replay = Replay(from_stream(bus, Range(streams=("commands",))), target)
    assert replay.plan().refused == 1
    done = replay.run(speed=None)
    assert (done.written, done.refused) == (1, 1)
    assert [seen.type for seen in history(target, ("commands",))] == ["evict"]


def test_restart_begins_anew_even_at_the_same_place(
    bus: Bus, client: KVBus, valkey: RealServer, namespace: str
) -> None:
    for number in range(3):
        client.evict([number])
    target = other(valkey, namespace)
    replay = Replay(from_stream(bus, Range(streams=("commands",))), target)
    stop = threading.Event()
    stop.set()
    replay.run(speed=None, stop=stop)
    with pytest.raises(ConfigError, match="interrupted"):
        replay.run(speed=None)
    assert replay.run(speed=None, restart=True).written == 3
    assert len(contents(target)) == 3


def test_replay_onto_another_server(kvbus: Kvbus, filled: int, bus: Bus, redis7: RealServer, namespace: str) -> None:
    done = kvbus("replay", "all", "--into-url", redis7.url, "--speed", "max").ok().row
    assert done["written"] == filled
    assert without_origin(contents(redis7.bus(namespace))) == without_origin(contents(bus))
    with_password = redis7.url.replace("redis://", "redis://user:hidden@")
    plan = kvbus("replay", "all", "--into-url", with_password, "--dry-run", "--table")
    assert "hidden" not in plan.out + plan.err


def test_a_recording_of_two_histories_is_replayed_whole(valkey: RealServer, namespace: str, tmp_path: Path) -> None:
    path, target = tmp_path / "a.kvrec", other(valkey, namespace)
    with RecordingWriter.create(path, namespace="n", streams=("commands",), now_ms=1) as writer:
        for history_of, first in (("old", 1_000), ("new", 500)):  # the server had lost what it held
            for number in range(3):
                fields = encode_entry(Evict(chunk_hashes=(number,)), message_id=f"{history_of}{number}")
                writer.add("commands", f"{first + number}-0", fields)
    replay = Replay(from_file(path, Range(streams=("commands",))), target)
    assert replay.run(speed=None).written == 6
    origins = [seen.envelope.origin for seen in history(target, ("commands",)) if seen.envelope]
    assert origins == ["old0", "old1", "old2", "new0", "new1", "new2"]
