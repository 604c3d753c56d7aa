"""The publisher against real servers that fail: what was accepted arrives once and in order, what was dropped shows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from kvbus.errors import ConfigError
from kvbus.event_stream import EventStream
from kvbus.protocol import RequestFinished
from kvbus.settings import Settings
from kvbus.streams.registry import Registration, encode_registration, read_publishers, read_stats
from publisher import FinishedRequest, Publisher
from tests.conftest import MakeServer
from tests.proxy import Proxy
from tests.servers import RealServer, Server, eventually

NAME = "i/publisher"
QUICK: dict[str, Any] = {"connect_timeout_ms": 400, "reply_timeout_ms": 400}


@pytest.fixture(params=["valkey", "redis7"])
def durable_server(request: pytest.FixtureRequest, start_server: MakeServer) -> RealServer:
    """A server that has written to its file what it acknowledges.

    `everysec` does not: while a sync is under way it puts off the write itself (seen: 136 acknowledged events gone
    after a kill -9 on a busy disk).
    """
    server = start_server(request.param, appendonly="yes", appendfsync="always")
    assert isinstance(server, RealServer)
    return server


def finished(number: int, **values: Any) -> FinishedRequest:
    return FinishedRequest(
        **{"request_id": f"r{number}", "instance": "i", "reason": "stop", "chunk_hashes": (number, -number), **values}
    )


def names(first: int, last: int) -> list[str]:
    return [f"r{number}" for number in range(first, last)]


@contextmanager
def running(settings: Settings) -> Iterator[Publisher]:
    publisher = Publisher(settings, name=NAME, instance="i", model="m", hash_fingerprint="f")
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()
        assert "kvbus-publisher" not in {thread.name for thread in threading.enumerate()}


def sent(publisher: Publisher, count: int) -> None:
    eventually(lambda: publisher.counters.get("events_sent") >= count, what=f"{count} events sent")


def more_than(publisher: Publisher, counter: str) -> None:
    """Wait until a counter has risen."""
    before = publisher.counters.get(counter)
    eventually(lambda: publisher.counters.get(counter) > before, what=f"{counter} above {before}")


class Seen:
    """What a reader of the whole stream makes of it."""

    def __init__(self, server: Server, namespace: str) -> None:
        self.delivered: list[str] = []
        self.missing = 0
        self.epochs: list[int] = []
        with EventStream(server.bus(namespace), reader=None, start="start", block_ms=10) as stream:
            while batch := list(stream.read(count=512)):
                for delivery in batch:
                    assert isinstance(delivery.event, RequestFinished)
                    self.delivered.append(delivery.event.request_id)
                    if delivery.event.epoch not in self.epochs:
                        self.epochs.append(delivery.event.epoch)
                    self.missing += delivery.hole.missed if delivery.hole else 0
            self.repeats = int(stream.counters.get("repeats"))
            assert stream.counters.get("refused") == 0


def test_events_arrive_with_registration_heartbeat_and_counters(server: Server, namespace: str) -> None:
    settings = server.settings(namespace)
    with running(settings) as publisher:
        for number in range(200):
            publisher.publish(finished(number))
        sent(publisher, 200)
        client = server.client()
        assert client.pttl(f"kvbus:{{{namespace}}}:live:{NAME}") > 0
        assert publisher.close()
    assert client.exists(f"kvbus:{{{namespace}}}:live:{NAME}") == 0, "the name is given back"
    bus = server.bus(namespace)
    registration = read_publishers(bus)[NAME]
    seen = Seen(server, namespace)
    assert (seen.delivered, seen.missing, seen.repeats) == (names(0, 200), 0, 0)
    assert [registration.epoch] == seen.epochs
    assert (registration.next_seq, registration.model, registration.hash_fingerprint) == (200, "m", "f")
    assert read_stats(bus, [NAME])[NAME]["events_sent"] == 200


def test_a_second_process_under_a_living_name_waits_for_it(valkey: Server, namespace: str) -> None:
    settings = valkey.settings(namespace)
    with running(settings) as first:
        first.publish(finished(0))
        sent(first, 1)
        second = Publisher(settings, name=NAME, instance="i")
        second.start()
        second.publish(finished(1))
        eventually(lambda: second.counters.get("errors_fenced") >= 2)
        first.publish(finished(2))
        sent(first, 2)
        assert first.close()
        sent(second, 1)
        assert second.close()
    seen = Seen(valkey, namespace)
    assert (seen.delivered, seen.missing) == (["r0", "r2", "r1"], 0)
    assert len(seen.epochs) == 2


def test_lost_replies_give_repeats_that_readers_drop(own_real_server: RealServer, namespace: str) -> None:
    server = own_real_server
    with (
        Proxy("127.0.0.1", server.port) as proxy,
        running(Settings(redis_url=proxy.url, namespace=namespace, **QUICK)) as publisher,
    ):
        publisher.publish(finished(0))
        sent(publisher, 1)
        for turn in range(3):
            proxy.drop_replies()
            for number in range(1 + turn * 20, 21 + turn * 20):
                publisher.publish(finished(number))
            more_than(publisher, "errors_bus_unavailable")
            proxy.heal()
            sent(publisher, 21 + turn * 20)
        assert publisher.close()
    seen = Seen(server, namespace)
    assert (seen.delivered, seen.missing) == (names(0, 61), 0)
    assert seen.repeats > 0


@pytest.mark.parametrize("spooled", [False, True])
def test_cut_connections(valkey: Server, namespace: str, tmp_path: Path, spooled: bool) -> None:
    assert isinstance(valkey, RealServer)
    spool = {"spool_dir": str(tmp_path)} if spooled else {}
    with (
        Proxy("127.0.0.1", valkey.port) as proxy,
        running(Settings(redis_url=proxy.url, namespace=namespace, **QUICK, **spool)) as publisher,
    ):
        for number in range(400):
            if number % 100 == 20:
                proxy.cut()  # before the event, so that there is one to send again
            publisher.publish(finished(number))
            if number % 50 == 10:
                proxy.cut_once()
            if number % 100 == 20:
                more_than(publisher, "retries")
                proxy.heal()
        assert publisher.close()
    seen = Seen(valkey, namespace)
    assert (seen.delivered, seen.missing) == (names(0, 400), 0)


def test_a_black_hole_holds_nobody_up(valkey: Server, namespace: str) -> None:
    assert isinstance(valkey, RealServer)
    with Proxy("127.0.0.1", valkey.port) as proxy:
        settings = Settings(redis_url=proxy.url, namespace=namespace, buffer_events=100, stop_ms=1_000)
        with running(settings) as publisher:
            publisher.publish(finished(0))
            sent(publisher, 1)
            proxy.black_hole()
            accepted = sum(publisher.publish(finished(number)) for number in range(1, 1_000))
            started = time.monotonic()
            assert not publisher.close(), "nothing can be delivered"
            # The reply timeout is 3 s: a stop within its bound had to end the call that waits.
            assert time.monotonic() - started < 2.5
            counters = publisher.counters
            assert counters.get("events_dropped_at_close") == accepted
            assert counters.get("events_dropped") == 999
    assert Seen(valkey, namespace).delivered == ["r0"]


def test_a_server_that_was_never_there(namespace: str, tmp_path: Path) -> None:
    with running(Settings(redis_url="redis://127.0.0.1:1/0", namespace=namespace, stop_ms=500)) as publisher:
        assert publisher.publish(finished(0))
        assert not publisher.close()
        assert publisher.counters.get("events_dropped_at_close") == 1
    settings = Settings(redis_url="redis://127.0.0.1:1/0", namespace=namespace, spool_dir=str(tmp_path))
    with running(settings) as publisher:
        assert publisher.publish(finished(0))
        assert not publisher.close()
        assert publisher.counters.get("events_dropped") == 0, "it is on disk"


def test_a_frozen_server(own_real_server: RealServer, namespace: str) -> None:
    server = own_real_server
    with running(server.settings(namespace, **QUICK)) as publisher:
        publisher.publish(finished(0))
        sent(publisher, 1)
        server.pause()
        try:
            for number in range(1, 100):
                publisher.publish(finished(number))
            eventually(lambda: publisher.counters.get("errors_bus_unavailable") >= 2)
        finally:
            server.resume()
        sent(publisher, 100)
    seen = Seen(server, namespace)
    assert (seen.delivered, seen.missing) == (names(0, 100), 0)


@pytest.mark.parametrize("spooled", [False, True])
def test_kill_9_of_the_server_with_an_append_only_file(
    durable_server: RealServer, namespace: str, tmp_path: Path, spooled: bool
) -> None:
    server = durable_server
    spool = {"spool_dir": str(tmp_path / "spool")} if spooled else {}
    with running(server.settings(namespace, **QUICK, **spool)) as publisher:
        number = 0
        for _ in range(3):
            for _ in range(300):
                publisher.publish(finished(number))
                number += 1
            eventually(lambda: publisher.counters.get("batches") > 0)
            server.kill()
            for _ in range(300):
                publisher.publish(finished(number))
                number += 1
            server.start()
        sent(publisher, number)
        assert publisher.close()
    seen = Seen(server, namespace)
    assert (seen.delivered, seen.missing) == (names(0, 1800), 0)
    assert len(seen.epochs) == 1


@pytest.mark.parametrize("spooled", [False, True])
def test_memory_pressure_switched_on_and_off(
    own_real_server: RealServer, namespace: str, tmp_path: Path, spooled: bool
) -> None:
    server = own_real_server
    client = server.client()
    client.config_set("maxmemory-policy", "noeviction")
    spool = {"spool_dir": str(tmp_path / "spool")} if spooled else {}
    with running(server.settings(namespace, batch_events=16, **spool)) as publisher:
        stop = threading.Event()

        def toggle() -> None:
            while not stop.wait(0.02):
                client.config_set("maxmemory", 1)
                stop.wait(0.02)
                client.config_set("maxmemory", 0)

        thread = threading.Thread(target=toggle)
        thread.start()
        try:
            for number in range(3_000):
                publisher.publish(finished(number))
                if number % 10 == 0:
                    time.sleep(0.001)
            eventually(lambda: publisher.counters.get("errors_bus_full") >= 3)
        finally:
            stop.set()
            thread.join()
            client.config_set("maxmemory", 0)
        sent(publisher, 3_000)
        assert publisher.close()
    seen = Seen(server, namespace)
    assert (seen.delivered, seen.missing, seen.repeats) == (names(0, 3_000), 0, 0)


def test_heartbeats_go_on_under_memory_pressure(own_real_server: RealServer, namespace: str) -> None:
    server = own_real_server
    client = server.client()
    live = f"kvbus:{{{namespace}}}:live:{NAME}"
    with running(server.settings(namespace, heartbeat_ms=50, live_ms=60_000)) as publisher:
        eventually(lambda: client.exists(live))
        client.config_set("maxmemory", 1)
        client.pexpire(live, 1)
        eventually(lambda: client.pttl(live) > 30_000, what="a new heartbeat")
        assert publisher.publish(finished(0))
        client.config_set("maxmemory", 0)
        sent(publisher, 1)


def test_drops_equal_the_holes_that_a_reader_sees(durable_server: RealServer, namespace: str) -> None:
    server = durable_server
    with running(server.settings(namespace, buffer_events=200, **QUICK)) as publisher:
        accepted = [publisher.publish(finished(0))]
        sent(publisher, 1)
        for turn in range(2):
            server.kill()
            accepted += [publisher.publish(finished(1 + turn * 1000 + number)) for number in range(1_000)]
            server.start()
            eventually(lambda: publisher.counters.get("buffer_events") == 0)
        accepted.append(publisher.publish(finished(2001)))
        assert publisher.close()
        dropped = publisher.counters.get("events_dropped")
    seen = Seen(server, namespace)
    assert seen.delivered == [f"r{number}" for number, taken in enumerate(accepted) if taken]
    assert seen.missing == dropped == accepted.count(False) > 0


def test_a_history_that_the_server_lost_is_followed_by_the_rest(own_server: Server, namespace: str) -> None:
    with running(own_server.settings(namespace, heartbeat_ms=50, live_ms=1_000)) as publisher:
        publisher.publish(finished(0))
        sent(publisher, 1)
        own_server.client().flushall()
        publisher.publish(finished(1))
        sent(publisher, 2)
        bus = own_server.bus(namespace)
        eventually(lambda: NAME in read_publishers(bus), what="the registration written anew")
        assert publisher.close()
    assert Seen(own_server, namespace).delivered == ["r1"]


def test_a_key_that_holds_something_else(valkey: Server, namespace: str) -> None:
    client = valkey.client()
    key = f"kvbus:{{{namespace}}}:events"
    client.set(key, "not a stream")
    with running(valkey.settings(namespace)) as publisher:
        publisher.publish(finished(0))
        eventually(lambda: publisher.counters.get("errors_bus_refused") >= 2)
        client.delete(key)
        sent(publisher, 1)


def test_a_user_without_rights_is_refused_and_later_let_in(own_real_server: RealServer, namespace: str) -> None:
    client = own_real_server.client()
    client.execute_command("ACL", "SETUSER", "p", "on", ">secret", "~nothing:*", "+@all")
    url = own_real_server.url.replace("redis://", "redis://p:secret@")
    with running(Settings(redis_url=url, namespace=namespace)) as publisher:
        publisher.publish(finished(0))
        eventually(lambda: publisher.counters.get("errors_bus_refused") >= 1)
        client.execute_command("ACL", "SETUSER", "p", "~kvbus:*")
        sent(publisher, 1)


# --- the process itself

PROGRAM = """
import sys, time
from kvbus.settings import Settings
from publisher import FinishedRequest, Publisher
url, namespace, spool, count = sys.argv[1:5]
settings = Settings(redis_url=url, namespace=namespace, spool_dir=spool, connect_timeout_ms=300, reply_timeout_ms=300)
publisher = Publisher(settings, name="i/publisher", instance="i")
publisher.start()
for number in range(int(count)):
    publisher.publish(FinishedRequest(request_id=f"r{number}", instance="i", reason="stop", chunk_hashes=(number,)))
while publisher.counters.get("events_spooled") < int(count):
    time.sleep(0.01)
print("spooled", flush=True)
time.sleep(60)
"""


def test_sigkill_of_the_process_loses_nothing_that_was_spooled(
    own_real_server: RealServer, namespace: str, tmp_path: Path
) -> None:
    server = own_real_server
    server.stop()
    command = [sys.executable, "-c", PROGRAM, server.url, namespace, str(tmp_path / "spool"), "2000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "spooled\n"
        finally:
            process.send_signal(signal.SIGKILL)
    segment = max((tmp_path / "spool").rglob("*.seg"))
    with segment.open("ab") as file:
        file.write(b"half a record")  # as a crash of the machine may leave it
    server.start()
    settings = server.settings(namespace, spool_dir=str(tmp_path / "spool"), live_ms=2_000)
    with running(settings) as publisher:
        publisher.publish(finished(2_000))
        sent(publisher, 2_001)
        assert publisher.close()
        assert publisher.counters.get("events_replayed") >= 2_000
    seen = Seen(server, namespace)
    assert (seen.delivered, seen.missing, seen.repeats) == (names(0, 2_001), 0, 0)
    assert len(seen.epochs) == 2


def test_an_outage_of_many_thousand_events_comes_back_from_disk_in_order(
    durable_server: RealServer, namespace: str, tmp_path: Path
) -> None:
    server = durable_server
    hashes = tuple(range(10**18, 10**18 + 50))
    settings = server.settings(namespace, spool_dir=str(tmp_path / "spool"), buffer_events=1_000, **QUICK)
    with running(settings) as publisher:
        publisher.publish(finished(0))
        sent(publisher, 1)
        server.kill()
        for number in range(1, 10_001):
            if number % 100 == 0:
                eventually(lambda: publisher.counters.get("buffer_events") < 800)
            assert publisher.publish(finished(number, chunk_hashes=hashes))
            assert publisher.counters.get("buffer_bytes") < 64 << 20
        server.start()
        sent(publisher, 10_001)
        assert publisher.close(20)
    seen = Seen(server, namespace)
    assert (seen.delivered, seen.missing) == (names(0, 10_001), 0)
    assert list((tmp_path / "spool").rglob("*.seg")) == []


def test_a_fork_after_connect_leaves_the_parents_connection_alone(valkey: Server, namespace: str) -> None:
    with running(valkey.settings(namespace)) as publisher:
        publisher.publish(finished(0))
        sent(publisher, 1)
        pid = os.fork()
        if pid == 0:
            try:
                refused = not publisher.publish(finished(99))
                own = Publisher(valkey.settings(f"{namespace}-child"), name=NAME, instance="i")
                own.start()
                own.publish(finished(7))
                os._exit(0 if refused and own.close() else 1)
            finally:
                os._exit(2)
        for number in range(1, 50):
            publisher.publish(finished(number))
        assert os.waitpid(pid, 0)[1] == 0
        sent(publisher, 50)
        assert publisher.counters.get("retries") == 0
    assert Seen(valkey, namespace).delivered == names(0, 50)
    assert Seen(valkey, f"{namespace}-child").delivered == ["r7"]


def test_many_lives_leave_nothing_behind(valkey: Server, namespace: str) -> None:
    client: redis.Redis = valkey.client()

    def used() -> tuple[int, int, int]:
        keys = len(client.keys(f"kvbus:{{{namespace}}}:*"))
        return len(os.listdir("/proc/self/fd")), threading.active_count(), keys

    settings = valkey.settings(namespace)
    base: tuple[int, int, int] | None = None
    for life in range(30):
        with running(settings) as publisher:
            publisher.publish(finished(life))
            assert publisher.close()
        if life == 4:
            base = used()
    assert base == used()
    seen = Seen(valkey, namespace)
    assert (seen.delivered, seen.missing) == (names(0, 30), 0)
    assert len(seen.epochs) == 30


def test_a_process_that_ends_without_close_flushes_all_the_same(valkey: Server, namespace: str) -> None:
    program = f"""
from kvbus.settings import Settings
from publisher import FinishedRequest, Publisher
publisher = Publisher(Settings(redis_url={valkey.url!r}, namespace={namespace!r}), name="i/publisher", instance="i")
publisher.start()
for number in range(500):
    publisher.publish(FinishedRequest(request_id=f"r{{number}}", instance="i", reason="stop"))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert Seen(valkey, namespace).delivered == names(0, 500)


def test_a_url_that_can_never_work_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match="scheme"):
        Publisher(Settings(redis_url="http://localhost"), name=NAME, instance="i")


def test_a_master_that_became_a_replica_is_left(start_server: MakeServer, namespace: str) -> None:
    old, new = start_server("valkey"), start_server("valkey")
    assert isinstance(old, RealServer)
    assert isinstance(new, RealServer)
    with (
        Proxy("127.0.0.1", old.port) as proxy,
        running(Settings(redis_url=proxy.url, namespace=namespace, **QUICK)) as publisher,
    ):
        publisher.publish(finished(0))
        sent(publisher, 1)
        new.client().replicaof("127.0.0.1", old.port)
        eventually(lambda: new.client().info("replication").get("master_link_status") == "up")
        new.client().replicaof("NO", "ONE")
        proxy.point_at("127.0.0.1", new.port)  # as a name or a virtual address would; open connections stay
        old.client().replicaof("127.0.0.1", new.port)
        publisher.publish(finished(1))
        sent(publisher, 2)
    assert Seen(new, namespace).delivered == names(0, 2)


def test_other_hash_settings_and_a_risky_eviction_policy_are_told(
    start_server: MakeServer, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server("valkey", maxmemory_policy="allkeys-lru")
    bus = server.bus(namespace)
    registration = Registration(instance="i", rank=0, chunk_size=128, hash_fingerprint="builtin/128/2")
    bus.client.hset(bus.keys.workers, "i/0", encode_registration(registration))
    with running(server.settings(namespace, stats_ms=50)) as publisher:
        publisher.publish(finished(0))
        sent(publisher, 1)
        assert publisher.counters.get("fingerprint_mismatches") == 0, "a worker that is gone is not a trouble"
        bus.client.set(bus.keys.live("i/0"), "owner")
        eventually(lambda: publisher.counters.get("fingerprint_mismatches") == 1)
        bus.client.delete(bus.keys.live("i/0"))
        eventually(lambda: publisher.counters.get("fingerprint_mismatches") == 0)
    assert "hashes as f, worker i/0 as builtin/128/2" in caplog.text
    assert "maxmemory-policy allkeys-lru may remove whole streams" in caplog.text
