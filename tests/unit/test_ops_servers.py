"""The modules under the command line on every kind of server, a Cluster included."""

from __future__ import annotations

from pathlib import Path

from kvbus.client import KVBus
from kvbus.ops.admin import plan_reset, plan_trim, reset, trim
from kvbus.ops.dead import check, list_dead, requeue
from kvbus.ops.doctor import Level, examine
from kvbus.ops.explain import explain_chunk, explain_command, explain_request
from kvbus.ops.lag import read_lag
from kvbus.ops.record import record
from kvbus.ops.recording import verify
from kvbus.ops.replay import Range, Replay, from_file, from_stream
from kvbus.ops.tail import Follower, ends_of, history, newest, tail
from kvbus.ops.top import Top
from kvbus.ops.workers import list_workers
from kvbus.protocol.codec import encode_entry
from kvbus.protocol.commands import Evict
from kvbus.settings import Settings
from kvbus.streams.connection import Bus
from kvbus.streams.log import stream_state
from kvbus.streams.registry import load_reader, save_reader
from kvbus.streams.subscription import end_position
from tests.cli_kit import finished
from tests.servers import Server, cluster, eventually
from tests.unit.scripted_engine import ScriptedEngine
from worker_plugin.runtime import Worker


def exercise(bus: Bus, copy: Bus, directory: Path) -> None:
    """Everything once, with a worker that answers, one entry that it refuses, and a reader."""
    with KVBus(bus=bus) as client:
        for number in range(5):
            event = finished(number, [number, 7])
            client.log.append(bus.keys.events, encode_entry(event, message_id=f"m{number}"))
        save_reader(bus, "mine", bus.keys.events, end_position(bus, bus.keys.events))
        handle = client.evict([7])
        assert handle.wait(20).complete
        bus.client.xadd(bus.keys.commands, {"type": "evict", "json": '{"chunk_hashes":["zz"]}'})
        dead = eventually(lambda: list(list_dead(bus)), what="the dead letter")
        assert len(list(tail(bus, ("events", "commands"), start="start"))) == 8, "the worker's start is an event, too"
        assert [seen.message_id for seen in newest(bus, ("events",), 2)] == ["m3", "m4"]
        assert {lag.name: lag.behind for lag in read_lag(bus)} == {"i/0": 0, "mine": 0}
        assert [worker.alive for worker in list_workers(bus)] == [True]
        assert Top(bus).take().streams[0].length >= 5
        assert explain_chunk(bus, 7).moments[0].what == "announced"
        told = explain_command(bus, handle.command_id)
        assert told is not None
        assert [moment.what for moment in told.moments] == ["evict", "done"]
        assert explain_request(bus, "chatcmpl-3") is not None
        follower = Follower(bus, ends_of(bus, ("events", "commands")))
        client.log.append(bus.keys.events, encode_entry(finished(5, [1]), message_id="m5"))
        assert [item.message_id for item in follower.read()] == ["m5"]  # type: ignore[union-attr]
        follower.close()
        plan, reader, target = plan_reset(bus, "mine", "start")
        reset(bus, plan, reader, target)
        moved = load_reader(bus, "mine")
        assert moved is not None
        assert moved.position.cursor == "0-0"
        done = record(bus, directory / "a.kvrec", ("events", "commands", "results", "dead"))
        assert verify(directory / "a.kvrec").whole
        replay = Replay(from_file(directory / "a.kvrec", Range(streams=("commands",))), copy)
        assert (replay.plan().total, replay.plan().refused) == (1, 1)
        assert replay.run(speed=None).written == 1
        assert done.entries["dead"] == 1
        assert Replay(from_stream(bus, Range()), copy).run(speed=None).written == 8
        assert plan_trim(bus, "events", keep=2).losers[0].name == "mine"
        assert trim(bus, plan_trim(bus, "events", keep=2)) == bus_removed(bus)
        good = dead[0].letter.__class__(
            stream=bus.keys.commands, entry_id="1-0", message_id="x", code="poison", message="", refused_by="i/0",
            fields={k.decode(): v for k, v in encode_entry(Evict(chunk_hashes=(1,)), message_id="x").items()},
        )  # fmt: skip
        bus.client.xadd(bus.keys.dead, encode_entry(good, message_id="d2"))
        letter = next(list_dead(bus))
        assert check(bus, letter).type == "evict"
        assert requeue(client, letter).origin == "x"
        assert any(seen.envelope and seen.envelope.origin == "x" for seen in history(bus, ("commands",)))


def bus_removed(bus: Bus) -> int:
    """How many events there were beyond the two that stay."""
    state = stream_state(bus.client, bus.keys.events)
    return state.entries_added - 2


def worker_of(settings: Settings, bus: Bus | None = None) -> Worker:
    return Worker(ScriptedEngine(ddr=[7]), settings=settings, instance="i", rank=0, bus=bus)


def test_on_every_kind_of_server(server: Server, namespace: str, tmp_path: Path) -> None:
    settings = {"heartbeat_ms": 200, "live_ms": 2_000, "block_ms": 100}
    bus, copy = server.bus(namespace, **settings), server.bus(f"{namespace}-copy", **settings)
    with worker_of(bus.settings, None if server.real else server.bus(namespace, **settings)) as worker:
        assert worker.wait_ready(20)
        exercise(bus, copy, tmp_path)
    if server.real:
        levels = {finding.probe: finding.level for finding in examine(bus.settings)}
        assert levels["rights"] is levels["server"] is levels["eviction"] is Level.OK
        assert levels["reachable"] is not Level.FAIL, "slow on a busy machine, perhaps"


def test_on_a_cluster(tmp_path: Path) -> None:
    with cluster("valkey", tmp_path / "cluster") as nodes:
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        settings = Settings(redis_url=url, namespace="here", heartbeat_ms=200, live_ms=2_000, block_ms=100)
        bus, copy = Bus(settings), Bus(Settings(redis_url=url, namespace="there"))
        with worker_of(settings) as worker:
            assert worker.wait_ready(20)
            exercise(bus, copy, tmp_path)
        levels = {finding.probe: finding.level for finding in examine(settings)}
        assert levels["server"] is levels["eviction"] is Level.OK
        assert levels["rights"] is Level.SKIP
        assert Level.FAIL not in levels.values()
        bus.close()
        copy.close()
