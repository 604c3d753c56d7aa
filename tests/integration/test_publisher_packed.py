"""The hand-packed MULTI against real servers: the same entries as redis-py's own, all or none, and errors told."""

from __future__ import annotations

import socket
import threading

import pytest
import redis

from kvbus.errors import BusFull, BusRefused, BusUnavailable
from kvbus.protocol.codec import Fields
from kvbus.settings import Settings
from kvbus.streams.connection import Bus
from kvbus.streams.log import Log
from kvbus.streams.packed import add_packed, can_pack
from tests.servers import RealServer, Server

ENTRIES: list[Fields] = [
    {b"v": b"1", b"body": bytes(range(256)) * 400},
    {b"\r\n": b"\r\n$5\r\n"},
    {b"%d%": b"%b", b"%%": b"%"},
    {b"empty": b"", b"": b"nameless"},
    {b"n": b"x" * 1_500_000},
    *({b"n": b"%d" % number} for number in range(300)),
]


def test_the_same_as_a_pipeline(real_server: Server, namespace: str) -> None:
    client = real_server.client()
    assert can_pack(client)
    ids = add_packed(client, f"{namespace}:packed", ENTRIES, 0)
    pipe = client.pipeline(transaction=True)
    for fields in ENTRIES:
        pipe.xadd(f"{namespace}:piped", fields)  # type: ignore[arg-type]
    pipe.execute()
    packed = client.xrange(f"{namespace}:packed")
    assert [fields for _, fields in packed] == [fields for _, fields in client.xrange(f"{namespace}:piped")]
    assert [entry_id for entry_id, _ in packed] == ids
    client.delete(f"{namespace}:packed", f"{namespace}:piped")


def test_the_cap_is_applied(real_server: Server, namespace: str) -> None:
    client = real_server.client()
    for _ in range(30):
        add_packed(client, namespace, [{b"n": b"1"}] * 100, 500)
    assert 500 <= client.xlen(namespace) < 1_000


def test_fakeredis_and_clusters_keep_redis_pys_way(server: Server, namespace: str) -> None:
    bus = server.bus(namespace)
    assert can_pack(bus.client) == server.real
    assert len(Log(bus).append_batch(bus.keys.events, [{b"a": b"b"}] * 3)) == 3


def test_memory_reached_in_the_middle_writes_nothing_and_keeps_the_connection(own_real_server: RealServer) -> None:
    bus = own_real_server.bus("n")
    log = Log(bus)
    log.append_batch(bus.keys.events, [{b"a": b"b"}])
    client = own_real_server.client()
    connections = client.info("stats")["total_connections_received"]
    client.config_set("maxmemory", 1)
    for _ in range(3):
        with pytest.raises(BusFull):
            add_to(bus)
    client.config_set("maxmemory", 0)
    assert client.xlen(bus.keys.events) == 1
    assert len(add_to(bus)) == 2
    assert client.info("stats")["total_connections_received"] == connections


def add_to(bus: Bus) -> list[str]:
    return Log(bus).append_batch(bus.keys.events, [{b"a": b"b"}, {b"a": b"c"}])


def test_a_key_of_another_type_is_refused(real_server: Server, namespace: str) -> None:
    bus = real_server.bus(namespace)
    real_server.client().set(bus.keys.events, "text")
    with pytest.raises((BusRefused, redis.ResponseError), match="WRONGTYPE"):
        add_packed(bus.client, bus.keys.events, [{b"a": b"b"}], 0)
    assert bus.client.ping(), "the connection is in step"


def test_a_server_that_goes_in_the_middle_of_its_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    while True:
                        data = connection.recv(1 << 20)
                        if b"XLEN" in data:
                            connection.sendall(b":0\r\n")
                        elif b"EXEC" in data:
                            connection.sendall(b"+OK\r\n+QUEUED\r\n+QUE")
                            break
                        else:  # the client's own set-up, a reply for each command
                            connection.sendall(b"+OK\r\n" * data.count(b"CLIENT\r\n"))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        settings = Settings(redis_url=f"redis://127.0.0.1:{listener.getsockname()[1]}/0", reply_timeout_ms=2_000)
        bus = Bus(settings)
        for _ in range(2):
            with pytest.raises(BusUnavailable):
                add_to(bus)
        bus.close()
        thread.join(10)
        assert not thread.is_alive()


def test_work_meanwhile_that_fails_does_not_leave_the_connection_out_of_step(valkey: Server, namespace: str) -> None:
    client = valkey.client()

    def fails() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        add_packed(client, namespace, [{b"a": b"b"}], 0, fails)
    assert client.ping()
    assert len(add_packed(client, namespace, [{b"a": b"b"}], 0, lambda: None)) == 1
