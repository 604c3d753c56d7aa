"""kvbus workers, lag, top, doctor: what they say of a healthy bus, and of one that is not."""

from __future__ import annotations

import os
import pty
import time
from pathlib import Path

import msgspec
import pytest

from kvbus.client import KVBus
from kvbus.ops.doctor import Level, examine
from kvbus.protocol.codec import encode_entry
from kvbus.settings import Settings
from kvbus.streams.connection import Bus
from kvbus.streams.position import UNKNOWN, Position
from kvbus.streams.registry import PublisherRegistration, Registration, save_reader, write_publisher, write_stats
from tests.acceptance.conftest import StartWorker
from tests.cli_kit import PROGRAM, Kvbus, finished
from tests.conftest import MakeServer
from tests.servers import RealServer, eventually
from tests.unit.scripted_engine import ScriptedEngine


def register(bus: Bus, name: str, **fields: object) -> None:
    """A worker that is registered and has no process."""
    instance, _, rank = name.partition("/")
    registration = Registration(instance=instance, rank=int(rank), **fields)  # type: ignore[arg-type]
    bus.client.hset(bus.keys.workers, name, msgspec.json.encode(registration))


def test_workers_and_publishers(kvbus: Kvbus, bus: Bus, start_worker: StartWorker) -> None:
    start_worker(ScriptedEngine())
    register(bus, "host-z/3", model="m")
    write_publisher(bus, "host-a", PublisherRegistration(epoch=7, instance="host-a", next_seq=42, model="m"))
    rows = {row["name"]: row for row in kvbus("workers").ok().rows}
    assert rows["host-a/0"]["alive"]
    assert rows["host-a/0"]["registration"]["lmcache"] == "0.4.3"
    assert not rows["host-z/3"]["alive"]
    assert (rows["host-a"]["role"], rows["host-a"]["next_seq"]) == ("publisher", 42)
    shown = kvbus("workers", "--table").ok().out
    assert "3 of 1" in shown
    assert "lmcache 0.4.3" in shown


def test_lag_of_a_worker_that_is_held_up(kvbus: Kvbus, client: KVBus, start_worker: StartWorker) -> None:
    engine = ScriptedEngine(ssd=[1])
    engine.gate.clear()
    start_worker(engine)
    handle = client.prefetch([1], lookup_id="slow")
    eventually(lambda: kvbus("lag").ok().row["pending"] == 1, what="the command to be in hand")
    row = kvbus("lag").ok().row
    assert (row["name"], row["role"], row["stream"], row["behind"]) == ("host-a/0", "worker", "commands", 0)
    assert row["in_flight"]["command_id"] == handle.command_id
    assert row["in_flight"]["age_ms"] > 0
    engine.gate.set()
    assert handle.wait(20).complete


def test_lag_of_readers_known_unknown_and_lost(kvbus: Kvbus, bus: Bus, client: KVBus) -> None:
    ids = [
        client.log.append(bus.keys.events, encode_entry(finished(number, [number]), message_id=f"m{number}"))
        for number in range(10)
    ]
    save_reader(bus, "exact", bus.keys.events, Position(ids[3], "m3", 4))
    save_reader(bus, "at-end", bus.keys.events, Position(ids[9], "m9", UNKNOWN))
    save_reader(bus, "unknown", bus.keys.events, Position(ids[3], "m3", UNKNOWN))
    save_reader(bus, "lost", bus.keys.events, Position(ids[3], "another", 4))
    rows = {row["name"]: row for row in kvbus("lag").ok().rows}
    assert {name: row["behind"] for name, row in rows.items()} == {
        "exact": 6,
        "at-end": 0,
        "unknown": None,
        "lost": None,
    }
    assert "history lost" in rows["lost"]["trouble"]
    assert rows["exact"]["oldest_unread_ms"] > 1_000_000, "by the event's own time"
    assert "unknown" in kvbus("lag", "--table").ok().out
    assert kvbus("lag", "--fail-above", 6).code == 1, "what is not known is no good news"
    for name in ("unknown", "lost"):
        bus.client.delete(bus.keys.reader(name))
    assert kvbus("lag", "--fail-above", 6).code == 0
    failed = kvbus("lag", "--fail-above", 5)
    assert failed.code == 1
    assert "reader exact is 6 behind on events" in failed.err
    bus.client.xtrim(bus.keys.events, maxlen=2, approximate=False)
    assert "4 trimmed before they were read" in next(r for r in kvbus("lag").rows if r["name"] == "exact")["trouble"]


@pytest.mark.parametrize("command", [["workers"], ["lag"], ["top", "--once"], ["dead", "list"], ["tail"]])
def test_empty_namespace(kvbus: Kvbus, command: list[str]) -> None:
    done = kvbus(*command).ok()
    assert "Traceback" not in done.err
    assert command[0] == "top" or (done.out == "" and done.err)


def test_watch_goes_on_until_ctrl_c(kvbus: Kvbus, bus: Bus) -> None:
    save_reader(bus, "r", bus.keys.events, Position())
    with kvbus.started("lag", "--watch", "100ms") as watch:
        assert watch.row()["name"] == watch.row()["name"] == "r"
        assert watch.interrupt().code == 130


def test_top_counts_what_moves(kvbus: Kvbus, client: KVBus, start_worker: StartWorker) -> None:
    engine = ScriptedEngine(ssd=range(1, 100))
    start_worker(engine)
    with kvbus.started("top", "--every", "200ms") as top:
        assert top.row()["streams"][1]["per_s"] is None
        for number in range(1, 40):
            assert client.prefetch([number]).wait(20).complete
        seen = False
        for _ in range(100):
            row = top.row()
            seen = seen or (row["streams"][1]["per_s"] or 0) > 0
            if seen and row["rates"].get("host-a/0", {}).get("chunks_loaded", 0) > 0:
                break
        else:
            pytest.fail("no rate was shown")
        engine.raises = RuntimeError("disk on fire")
        assert client.evict([1]).wait(20).complete
        for _ in range(100):
            troubles = top.row()["troubles"]
            if troubles:
                break
        assert troubles[-1]["what"] == "evict failed"
        assert top.interrupt().code == 130


def test_top_on_a_terminal(kvbus: Kvbus, client: KVBus, start_worker: StartWorker) -> None:
    start_worker(ScriptedEngine())
    ours, theirs = pty.openpty()
    import subprocess

    process = subprocess.Popen(
        [*PROGRAM, "top", "--every", "200ms"], cwd=kvbus.directory, env=kvbus.env | {"TERM": "xterm"},
        stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 30
    while b"1 of 1 workers alive" not in shown and time.monotonic() < deadline:
        shown += os.read(ours, 65_536)
    process.send_signal(2)
    try:
        while piece := os.read(ours, 65_536):
            shown += piece
    except OSError:
        pass  # the other end is gone
    os.close(ours)
    assert process.wait(30) == 130
    assert b"1 of 1 workers alive" in shown
    assert b"\x1b[?1049l" in shown, "the terminal is as it was"


def test_doctor_finds_a_healthy_bus_well(kvbus: Kvbus, start_worker: StartWorker) -> None:
    start_worker(ScriptedEngine())
    done = kvbus("doctor")
    levels = {row["probe"]: row["level"] for row in done.rows}
    assert done.code == 0, done
    assert set(levels.values()) <= {"ok", "warn"}
    for probe in ("rights", "server", "eviction", "workers", "hashes", "versions", "ranks"):
        assert levels[probe] == "ok", (probe, done.rows)
    assert levels["persistence"] == "warn", "the tests' server keeps nothing"


def findings(settings: Settings) -> dict[str, tuple[Level, str, str]]:
    """The worst finding of each probe."""
    order = [Level.OK, Level.SKIP, Level.WARN, Level.FAIL]
    found: dict[str, tuple[Level, str, str]] = {}
    for one in examine(settings):
        if one.probe not in found or order.index(one.level) > order.index(found[one.probe][0]):
            found[one.probe] = (one.level, one.evidence, one.mend)
    return found


def test_doctor_finds_what_is_wrong_with_the_workers(bus: Bus, start_worker: StartWorker) -> None:
    start_worker(ScriptedEngine())
    register(
        bus, "host-b/0", world_size=2, hash_fingerprint="builtin/64/2", lmcache="0.3.9", vllm="0.11.0", protocol="0"
    )
    bus.client.set(bus.keys.live("host-b/0"), "a-second-process", px=60_000)
    bus.client.hset(
        bus.keys.worker("host-b/0"),
        mapping={"owner": "the-first", "rev": 1, "epoch": 1, "cursor": "0-0", "at": "", "entries": 0, "pending": ""},
    )
    register(bus, "host-c/0")
    write_stats(bus, "host-b/0", {"engine_stuck": 1, "engine_busy_s": 77})
    bus.client.xadd(bus.keys.dead, encode_entry_of_dead())
    found = findings(bus.settings)
    assert found["hashes"][0] is Level.FAIL
    assert "PYTHONHASHSEED" in found["hashes"][2]
    assert found["protocol"][0] is Level.FAIL
    assert found["ranks"][0] is Level.FAIL
    assert "missing 1" in found["ranks"][1]
    assert found["versions"][0] is Level.WARN
    assert "pip install" in found["versions"][2]
    assert found["worker host-b/0"][0] is Level.FAIL
    assert found["workers"][0] is Level.WARN
    assert "host-c/0" in found["workers"][1]
    assert found["dead letters"][2].startswith("kvbus dead show ")
    probes = [one for one in examine(bus.settings) if one.probe == "worker host-b/0"]
    assert {"two processes" in one.evidence or "stuck" in one.evidence for one in probes} == {True}
    assert len(probes) == 2
    assert all(one.mend for one in examine(bus.settings) if one.level in (Level.WARN, Level.FAIL))


def encode_entry_of_dead() -> dict[bytes, bytes]:
    from kvbus.protocol.dead import DeadLetter

    letter = DeadLetter(stream="s", entry_id="1-0", code="invalid", message="no", refused_by="host-b/0")
    return encode_entry(letter, message_id="d")


def test_doctor_finds_what_is_wrong_with_the_server(start_server: MakeServer) -> None:
    server = start_server("valkey")
    assert isinstance(server, RealServer)
    client = server.client()
    settings = server.settings("sick", block_ms=2_000)
    client.config_set("maxmemory", "300mb")
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("timeout", "1")
    client.xadd("kvbus:{sick}:events", {"a": "b"}, id="18446744073709551615-1")
    client.xadd("kvbus:{sick}:results", {"a": "b"}, id=f"{int(time.time() * 1000) + 86_400_000}-1")
    client.set("kvbus:{sick}:commands", "no stream")
    found = findings(settings)
    assert found["eviction"][:1] + found["eviction"][2:] == (Level.FAIL, "CONFIG SET maxmemory-policy noeviction")
    assert found["memory"][0] is Level.WARN
    assert found["timeouts"][::2] == (Level.FAIL, "CONFIG SET timeout 0")
    assert found["stream events"][0] is Level.FAIL
    assert "nothing can be added" in found["stream events"][1]
    assert found["stream results"][0] is Level.WARN
    assert found["stream commands"][::2] == (Level.FAIL, "DEL 'kvbus:{sick}:commands'")


def test_doctor_finds_missing_rights_without_changing_anything(start_server: MakeServer, kvbus: Kvbus) -> None:
    server = start_server("valkey")
    assert isinstance(server, RealServer)
    client = server.client()
    client.acl_setuser(
        "reader", enabled=True, passwords=["+secret"], keys=["kvbus:{n}:*"], commands=["+@read", "+ping", "+multi",
        "+discard", "+client", "+role", "+info", "+time", "+exec"],
    )  # fmt: skip
    url = server.url.replace("redis://", "redis://reader:secret@")
    done = kvbus("doctor", "--url", url, "-n", "n")
    rows = {row["probe"]: row for row in done.rows}
    assert done.code == 1
    assert rows["rights"]["level"] == "fail"
    assert "XADD" in rows["rights"]["evidence"]
    assert rows["timeouts"]["level"] == "warn", "CONFIG is not allowed"
    assert "secret" not in done.out
    assert not list(client.scan_iter()), "looking changed nothing"
    wrong = kvbus("doctor", "--url", url.replace("secret", "wrong"))
    assert wrong.code == 1
    assert "wrong" not in wrong.out + wrong.err


def test_doctor_is_over_soon_when_the_server_is_frozen(start_server: MakeServer, tmp_path: Path) -> None:
    server = start_server("valkey")
    assert isinstance(server, RealServer)
    server.pause()
    try:
        found = list(examine(server.settings("x", reply_timeout_ms=300)))
    finally:
        server.resume()
    assert [one.level for one in found[:2]] == [Level.OK, Level.FAIL]
    assert {one.level for one in found[2:]} == {Level.SKIP}
