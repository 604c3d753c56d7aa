"""Servers that freeze, die, fill up and move, under traffic through workers, client, facade and publisher at once."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvbus.client import KVBus
from kvbus.errors import BusError, BusFull
from kvbus.protocol import WorkerGap
from kvbus.settings import Settings
from tests.conftest import MakeServer
from tests.integration.conftest import MakeEngine
from tests.integration.rig import FAST, Rig, running
from tests.proxy import Proxy
from tests.servers import HOST, RealServer, cluster, eventually, replica_of, sentinels

RANKS = 2
MakeRig = Callable[..., Rig]

# everysec puts a write off while a sync runs: now and then kill -9 then loses what was acknowledged.
DURABLE = {"appendonly": "yes", "appendfsync": "always"}


@pytest.fixture
def make_rig(make_engine: MakeEngine, namespace: str) -> MakeRig:
    """make_rig(url, **settings): real engines with sixteen chunks each on their SSD."""

    def make(url: str, **values: Any) -> Rig:
        engines = [make_engine(rank=rank, world_size=RANKS) for rank in range(RANKS)]
        hashes = [engine.on_disk(1, 16).hashes for engine in engines]
        assert hashes[0] == hashes[1]
        settings = Settings(redis_url=url, namespace=namespace, **{**FAST, **values})
        return Rig(settings, [engine.adapter for engine in engines], [int(found) for found in hashes[0]])

    return make


@pytest.fixture(params=["valkey", "redis7"])
def durable(request: pytest.FixtureRequest, start_server: MakeServer) -> RealServer:
    server = start_server(request.param, **DURABLE)
    assert isinstance(server, RealServer)
    return server


@pytest.fixture
def proxied(valkey: RealServer) -> Iterator[Proxy]:
    with Proxy(HOST, valkey.port) as proxy:
        yield proxy


def test_idle_for_longer_than_every_timeout(valkey: RealServer, make_rig: MakeRig) -> None:
    rig = make_rig(valkey.url)
    with running(rig):
        rig.settle()
        # The facade holds the connection that it sends on; its roll, once a second, makes another beside that.
        time.sleep(2.5)
        connected = _connections(valkey)
        threads = _threads()
        # longer than block + reply timeout, live time, and the idle check
        time.sleep(7)
        assert _connections(valkey) == connected
        assert _threads() == threads
        for worker in rig.workers:
            assert worker.counters.get("bus_errors") == 0
        rig.resume()
        rig.flowing()
        rig.assert_nothing_lost()


def test_a_frozen_server(durable: RealServer, make_rig: MakeRig) -> None:
    rig = make_rig(durable.url)
    with running(rig):
        durable.pause()
        began = time.monotonic()
        with KVBus(rig.settings) as other, pytest.raises(BusError):
            other.ping()
        assert time.monotonic() - began < 8, "a client must not hang on a frozen server"
        eventually(
            lambda: all(worker.counters.get("bus_errors") for worker in rig.workers), what="the workers to notice"
        )
        durable.resume()
        rig.flowing()
        rig.assert_nothing_lost()
        assert rig.gaps == []


def test_an_answer_that_comes_too_late_is_written_twice_and_done_once(valkey: RealServer, make_rig: MakeRig) -> None:
    rig = make_rig(valkey.url)
    with running(rig):
        rig.settle()
        before = rig.client.log.state(rig.client.bus.keys.commands).entries_added
        sleeper = threading.Thread(target=lambda: valkey.client().execute_command("DEBUG", "SLEEP", "2"))
        sleeper.start()
        eventually(lambda: _asleep(valkey), what="the server to sleep")
        handle = rig.client.send(rig.command(), timeout_s=10)
        rig.accepted.append(handle.command_id)
        sleeper.join()
        assert handle.wait(10).complete
        entries = rig.client.log.state(rig.client.bus.keys.commands).entries_added - before
        assert entries >= 2, "the reply was lost, so the command was written again"
        eventually(
            lambda: sum(int(worker.stats()["duplicates"]) for worker in rig.workers) >= RANKS * (entries - 1),
            what="the duplicates to be known as such",
        )
        rig.assert_nothing_lost()


@pytest.mark.parametrize("trouble", ["cut", "black_hole", "drop_replies"])
def test_a_faulty_line(proxied: Proxy, make_rig: MakeRig, trouble: str) -> None:
    rig = make_rig(proxied.url)
    with running(rig):
        for _ in range(2):
            getattr(proxied, trouble)()
            eventually(lambda: rig.send_errors.total() > 0, what="the client to notice")
            eventually(lambda: all(w.counters.get("bus_errors") for w in rig.workers), what="the workers to notice")
            rig.send_errors.clear()
            proxied.heal()
            rig.flowing()
        rig.assert_nothing_lost()
        assert rig.gaps == []


def test_a_slow_line_is_no_fault(proxied: Proxy, make_rig: MakeRig) -> None:
    rig = make_rig(proxied.url)
    with running(rig):
        proxied.delay(0.15)
        rig.flowing()
        proxied.delay(0)
        rig.assert_nothing_lost()


def test_kill_9_of_the_server_with_an_append_only_file(durable: RealServer, make_rig: MakeRig) -> None:
    rig = make_rig(durable.url)
    with running(rig):
        for _ in range(2):
            durable.kill()
            durable.start()
            rig.flowing()
        rig.assert_nothing_lost()
        assert rig.gaps == [], "a clean history must not be mistaken for a lost one"


@pytest.mark.parametrize("loss", ["restart", "flush", "delete commands"])
def test_a_lost_history_is_told_and_later_commands_run(start_server: MakeServer, make_rig: MakeRig, loss: str) -> None:
    server = start_server("valkey")
    assert isinstance(server, RealServer)
    rig = make_rig(server.url)
    with running(rig):
        if loss == "restart":
            server.kill()
            server.start()
        elif loss == "flush":
            server.client().flushall()
        else:
            server.client().delete(rig.client.bus.keys.commands)
        rig.flowing()
        eventually(lambda: {gap.worker for gap in rig.gaps} == {"i/0", "i/1"}, what="both workers to tell of the gap")
        before = [worker.counters.get("history_lost") for worker in rig.workers]
        rig.flowing()
        assert [worker.counters.get("history_lost") for worker in rig.workers] == before, "they must not spin"
        assert max(before) <= 10
        assert {pair: number for pair, number in rig.finals(rig.client.bus).items() if number > 1} == {}


def test_a_worker_that_was_away_while_the_stream_was_trimmed(start_server: MakeServer, make_rig: MakeRig) -> None:
    server = start_server("valkey")
    assert isinstance(server, RealServer)
    rig = make_rig(server.url)
    with running(rig):
        away = rig.workers[0]
        assert away.stop()
        sent = len(rig.accepted)
        eventually(lambda: len(rig.accepted) > sent + 30, what="commands while it is away")
        server.client().xtrim(rig.client.bus.keys.commands, maxlen=2, approximate=False)
        rig.workers[0] = type(away)(away.engine, settings=rig.settings, instance="i", rank=0)
        rig.workers[0].start()
        gap = eventually(lambda: [gap for gap in rig.gaps if gap.worker == "i/0"], what="the gap to be told")[0]
        assert isinstance(gap, WorkerGap)
        assert gap.missed is not None
        assert gap.missed >= 20
        assert gap.after < gap.before
        rig.flowing()


def test_memory_limit_reached(start_server: MakeServer, make_rig: MakeRig) -> None:
    server = start_server("valkey", **{"maxmemory-policy": "noeviction"})
    assert isinstance(server, RealServer)
    rig = make_rig(server.url)
    with running(rig):
        admin = server.client()
        handle = rig.client.ping()
        admin.config_set("maxmemory", 1_000_000)
        eventually(lambda: _refused(rig.client), what="a command to be refused")
        assert handle.wait(10).complete, "results go on"
        eventually(lambda: rig.send_errors["bus_full"] > 0, what="the sender to be told")
        admin.config_set("maxmemory", 0)
        rig.flowing()
        rig.assert_nothing_lost()


def test_a_master_is_killed_and_a_replica_promoted(tmp_path: Path, start_server: MakeServer, make_rig: MakeRig) -> None:
    master = start_server("valkey")
    assert isinstance(master, RealServer)
    with replica_of(master, tmp_path / "replica") as replica, sentinels(master, tmp_path / "sentinels") as ports:
        hosts = ",".join(f"{HOST}:{port}" for port in ports)
        rig = make_rig(f"redis+sentinel://{hosts}/mymaster/0")
        with running(rig):
            master.kill()
            eventually(lambda: replica.client().role()[0] == b"master", what="the promotion", within_s=30)
            rig.flowing()
            # An asynchronous failover may lose a tail: what came after it must be complete.
            sent = len(rig.accepted)
            eventually(lambda: len(rig.accepted) > sent + 10, what="commands after the failover")
            later = rig.accepted[sent + 1 :]
            eventually(lambda: all(rig.answered(command_id) for command_id in later), what="their answers")
            finals = rig.finals(rig.client.bus)
            assert {pair: number for pair, number in finals.items() if number > 1} == {}


def test_a_client_left_on_the_old_master_notices(tmp_path: Path, start_server: MakeServer, make_rig: MakeRig) -> None:
    master = start_server("valkey")
    assert isinstance(master, RealServer)
    with replica_of(master, tmp_path / "replica") as replica:
        rig = make_rig(master.url)
        with running(rig):
            replica.client().replicaof("NO", "ONE")
            master.client().replicaof(HOST, replica.port)
            eventually(lambda: rig.send_errors["bus_unavailable"] > 0, what="the sender to be refused")
            eventually(
                lambda: all(worker.counters.get("bus_errors") > 0 for worker in rig.workers),
                what="the workers to notice that they read from a replica",
            )
            master.client().replicaof("NO", "ONE")
            rig.flowing()


@pytest.mark.parametrize("kind", ["valkey", "redis7"])
def test_a_cluster_and_a_slot_that_moves(tmp_path: Path, make_rig: MakeRig, kind: str, namespace: str) -> None:
    with cluster(kind, tmp_path / "cluster") as nodes:
        url = "redis+cluster://" + ",".join(f"{HOST}:{node.port}" for node in nodes)
        rig = make_rig(url)
        with running(rig):
            _move_slot(nodes, rig.client.bus.keys.prefix)
            rig.flowing()
            rig.assert_nothing_lost()


def test_an_eviction_policy_that_loses_streams_is_warned_of(
    start_server: MakeServer, make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server("valkey", **{"maxmemory-policy": "allkeys-lru", "maxmemory": "100mb"})
    with running(make_rig(server.url)):
        assert any("maxmemory-policy" in record.getMessage() for record in caplog.records)


def test_many_lives_leave_nothing_behind(valkey: RealServer, make_engine: MakeEngine, namespace: str) -> None:
    from worker_plugin.runtime import Worker

    engine = make_engine().adapter
    settings = Settings(redis_url=valkey.url, namespace=namespace, **FAST)
    epochs, files, threads = [], [], []
    with KVBus(settings) as client:
        for _ in range(200):
            with Worker(engine, settings=settings, instance="i", rank=0) as worker:
                assert worker.wait_ready(10)
                epochs.append(client.workers()[0].registration.epoch)
            files.append(len(os.listdir("/proc/self/fd")))
            threads.append(threading.active_count())
        prefix = client.bus.keys.prefix
        keys = {key.decode().removeprefix(prefix) for key in client.bus.client.keys(prefix + "*")}
    assert epochs == sorted(set(epochs)), "a reader sees every life as a new epoch"
    assert max(files[100:]) <= max(files[:20]) + 2
    assert max(threads) == min(threads)
    assert keys <= {"events", "worker:i/0", "stats:i/0"}


def test_memory_is_flat_over_many_commands(valkey: RealServer, make_rig: MakeRig) -> None:
    rig = make_rig(valkey.url)
    with running(rig):
        for _ in range(300):
            rig.client.ping()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(3000):
            rig.client.ping()
        assert rig.client.ping().wait(30).complete
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        assert grown < 64, f"{grown:.0f} MiB more"
        rig.assert_nothing_lost()


def test_one_client_of_many_threads_and_a_forked_child(valkey: RealServer, make_rig: MakeRig) -> None:
    rig = make_rig(valkey.url)
    with running(rig):
        complete: list[bool] = []
        threads = [
            threading.Thread(target=lambda: complete.append(rig.client.ping().wait(20).complete)) for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert complete == [True] * 16
        child = os.fork()
        if child == 0:
            try:
                answered = len(KVBus(rig.settings).workers()) == RANKS
                os._exit(0 if answered else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        rig.flowing()
        rig.assert_nothing_lost()


def _asleep(server: RealServer) -> bool:
    try:
        return not server.client(socket_timeout=0.1, retry=Retry(NoBackoff(), 0)).ping()
    except redis.TimeoutError:
        return True


def _refused(client: KVBus) -> bool:
    try:
        client.ping()
    except BusFull:
        return True
    return False


def _threads() -> int:
    """All but those of the facade's pool, which has as many as were ever needed at once, up to its bound."""
    return len([thread for thread in threading.enumerate() if not thread.name.startswith("kvbus-aio")])


def _connections(server: RealServer) -> int:
    return len([found for found in server.client().client_list() if found["name"].startswith("kvbus-")])


def _move_slot(nodes: list[RealServer], prefix: str) -> None:
    """Move the namespace's slot to another node, key by key, the way redis-cli does it."""
    tag = prefix.partition("{")[2].partition("}")[0]
    first: redis.Redis = nodes[0].client()
    slot = int(first.execute_command("CLUSTER", "KEYSLOT", tag))
    ids = [node.client().execute_command("CLUSTER", "MYID").decode() for node in nodes]
    source = next(
        number
        for number, node in enumerate(nodes)
        if node.client().execute_command("CLUSTER", "COUNTKEYSINSLOT", slot) > 0
    )
    target = (source + 1) % len(nodes)
    nodes[target].client().execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    nodes[source].client().execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    moving = nodes[source].client()
    while keys := moving.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1):
        moving.execute_command("MIGRATE", HOST, nodes[target].port, "", 0, 5000, "KEYS", *keys)
        time.sleep(0.05)  # with its keys split the slot stays for a while
    for node in (nodes[target], nodes[source], *nodes):
        node.client().execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
