"""Every way to a server: TCP, TLS, unix socket, password, Sentinel, Cluster; and connections that misbehave."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus.errors import BusRefused, BusUnavailable, ConfigError
from kvbus.protocol import CommandResult, Ping, Results, Status, encode_entry
from kvbus.protocol.codec import encode_body
from kvbus.settings import Settings
from kvbus.streams.checkpoint import Append, Checkpoint, Commit, CommitAnswer, commit, register, renew
from kvbus.streams.connection import Bus, connect
from kvbus.streams.issue import Issuer
from kvbus.streams.log import Log
from kvbus.streams.position import Position
from kvbus.streams.registry import Registration, encode_registration
from kvbus.streams.subscription import Subscription
from tests.conftest import MakeServer
from tests.proxy import Proxy
from tests.servers import RealServer, cluster, eventually, replica_of, sentinels, tls_options

NAME = "node-a/0"


def settings(url: str, namespace: str, **values: int) -> Settings:
    return Settings(redis_url=url, namespace=namespace, **values)  # type: ignore[arg-type]


def begin(bus: Bus) -> Checkpoint:
    registration = encode_registration(Registration(instance="node-a"))
    found = register(bus, NAME, "o1", start=Position(), registration=registration)
    assert isinstance(found, Checkpoint)
    return found


def one_result(bus: Bus, rev: int) -> Commit:
    result = CommandResult(command_id=f"c{rev}", type="ping", status=Status.DONE)
    body = encode_body(Results(worker=NAME, instance="node-a", rank=0, epoch=1, results=(result,)))
    append = Append(stream=bus.keys.results, type=Results.TYPE, message_id=f"r{rev}", body=body)
    return Commit(
        name=NAME, owner="o1", old_rev=rev, new_rev=rev + 1, position=Position("1-1", "m", 1), appends=(append,)
    )


def exercise(bus: Bus) -> None:
    """Everything that crosses the wire: appends, MULTI, waiting reads, scripts, time."""
    log, key = Log(bus), bus.keys.commands
    subscription = Subscription.from_end(bus, key)
    log.append(key, encode_entry(Ping(), message_id="m0"))
    log.append_batch(key, [encode_entry(Ping(), message_id=f"m{number}") for number in (1, 2)])
    seen: list[bytes] = []
    while len(seen) < 3:
        seen += [fields[b"id"] for _, fields in subscription.read(block_ms=500).entries]
    assert seen == [b"m0", b"m1", b"m2"]
    begin(bus)
    assert commit(bus, one_result(bus, 0)) == (CommitAnswer.OK, "")
    renew(bus, NAME, "o1")
    issued = Issuer(bus).issue(encode_entry(Ping(), message_id="m3"))
    assert [member.name for member in issued.members] == [NAME]
    assert bus.server_time_ms() > 0
    subscription.check_now()
    assert [fields[b"id"] for _, fields in subscription.read(block_ms=500).entries] == [b"m3"]
    assert [item[0] for item in log.scan(bus.keys.results)]


@pytest.fixture
def opened() -> Iterator[list[Bus]]:
    buses: list[Bus] = []
    yield buses
    for bus in buses:
        bus.close()


def test_plain_tcp(real_server: RealServer, namespace: str) -> None:
    exercise(real_server.bus(namespace))


def test_unix_socket(start_server: MakeServer, tmp_path: Path, namespace: str, opened: list[Bus]) -> None:
    start_server("valkey", unixsocket=str(tmp_path / "s.sock"))
    opened.append(Bus(settings(f"unix://{tmp_path}/s.sock?db=0", namespace)))
    exercise(opened[0])


def test_tls_with_a_known_authority(
    start_server: MakeServer, tmp_path: Path, namespace: str, opened: list[Bus]
) -> None:
    options, authority = tls_options(tmp_path / "tls")
    start_server("redis7", **{name.replace("-", "_"): value for name, value in options.items()})
    address = f"localhost:{options['tls-port']}/0"
    opened.append(Bus(settings(f"rediss://{address}?ssl_ca_certs={authority}", namespace)))
    exercise(opened[0])
    opened.append(Bus(settings(f"rediss://{address}", namespace)))  # nobody has signed it for the whole world
    with pytest.raises(BusUnavailable, match=r"(?i)certificate"):
        opened[1].server_time_ms()


def test_password_and_what_happens_without(start_server: MakeServer, namespace: str, opened: list[Bus]) -> None:
    server = start_server("valkey")
    assert isinstance(server, RealServer)
    server.client().execute_command("ACL", "SETUSER", "kvbus", "on", ">hunter2", "~kvbus:*", "+@all")
    server.client().execute_command("ACL", "SETUSER", "default", "off")
    opened.append(Bus(settings(f"redis://kvbus:hunter2@127.0.0.1:{server.port}/0", namespace)))
    exercise(opened[0])
    for credentials in ("", "kvbus:hunter3@"):
        opened.append(Bus(settings(f"redis://{credentials}127.0.0.1:{server.port}/0", namespace)))
        with pytest.raises(BusRefused) as caught:
            opened[-1].server_time_ms()
        assert "hunter3" not in str(caught.value)
    opened[0].client.execute_command("ACL", "SETUSER", "default", "on")


def test_sentinel_finds_the_master_and_its_successor(
    start_server: MakeServer, tmp_path: Path, namespace: str, opened: list[Bus]
) -> None:
    master = start_server("valkey")
    assert isinstance(master, RealServer)
    with replica_of(master, tmp_path / "replica") as replica, sentinels(master, tmp_path) as ports:
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        url = f"redis+sentinel://{hosts}/mymaster/0"
        bus = Bus(settings(url, namespace, connect_timeout_ms=500, reply_timeout_ms=1_000))
        opened.append(bus)
        exercise(bus)
        subscription = Subscription.from_end(bus, bus.keys.commands)
        eventually(
            lambda: replica.client().xlen(bus.keys.commands) == 4 and replica.client().xlen(bus.keys.results) == 1,
            what="the replica's copy",
        )
        master.kill()

        def append() -> bool:
            try:
                Log(bus).append(bus.keys.commands, encode_entry(Ping(), message_id="after"))
            except BusUnavailable:
                return False
            return True

        eventually(append, within_s=60, what="an append to the new master")
        seen: list[bytes] = []

        def read() -> list[bytes]:
            try:
                batch = subscription.read(block_ms=200)
            except BusUnavailable:
                return seen
            assert batch.gap is None
            seen.extend(fields[b"id"] for _, fields in batch.entries)
            return seen

        assert eventually(read, within_s=60, what="a read from the new master") == [b"after"]


def test_sentinel_that_is_away_is_said_so(namespace: str, opened: list[Bus]) -> None:
    opened.append(Bus(settings("redis+sentinel://127.0.0.1:1,127.0.0.1:2/mymaster/0", namespace)))
    with pytest.raises(BusUnavailable):
        opened[0].server_time_ms()


@pytest.mark.parametrize("kind", ["valkey", "redis7"])
def test_cluster(kind: str, tmp_path: Path, namespace: str, opened: list[Bus]) -> None:
    with cluster(kind, tmp_path) as nodes:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes[:2])
        for number in range(3):  # namespaces on several nodes
            opened.append(Bus(settings(f"redis+cluster://{hosts}", f"{namespace}-{number}")))
            exercise(opened[-1])
        for bus in opened:
            bus.close()
        opened.clear()


def test_cluster_that_is_away_is_said_so(namespace: str) -> None:
    bus = Bus(settings("redis+cluster://127.0.0.1:1,127.0.0.1:2", namespace))
    with pytest.raises(BusUnavailable):
        bus.server_time_ms()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:6379",
        "http://127.0.0.1",
        "redis://127.0.0.1:notaport/0",
        "redis+sentinel://127.0.0.1:26379",
        "redis+sentinel://127.0.0.1/mymaster",
        "redis+sentinel://127.0.0.1:26379/mymaster/x",
        "redis+cluster://127.0.0.1",
        "redis+cluster://",
        "rediss://:hunter2@127.0.0.1:notaport/0",
    ],
)
def test_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="redis_url") as caught:
        connect(settings(url, "n"), client_name="test", reply_timeout_s=1)
    assert "hunter2" not in str(caught.value)


# -- connections that misbehave ----------------------------------------------------------------------------------


@pytest.fixture
def proxied(valkey: RealServer, namespace: str) -> Iterator[tuple[Proxy, Bus]]:
    with Proxy("127.0.0.1", valkey.port) as proxy:
        bus = Bus(settings(proxy.url, namespace, reply_timeout_ms=300, connect_timeout_ms=300, block_ms=300))
        yield proxy, bus
        bus.close()


def test_commit_whose_reply_is_lost_is_found_applied(proxied: tuple[Proxy, Bus], valkey: RealServer) -> None:
    proxy, bus = proxied
    begin(bus)
    assert commit(bus, one_result(bus, 0)) == (CommitAnswer.OK, "")
    proxy.drop_replies()
    with pytest.raises(BusUnavailable):
        commit(bus, one_result(bus, 1))
    eventually(lambda: valkey.client().xlen(bus.keys.results) == 2, what="the commit on the server")
    proxy.heal()
    assert commit(bus, one_result(bus, 1)) == (CommitAnswer.ALREADY, "")
    assert valkey.client().xlen(bus.keys.results) == 2


def test_commit_that_never_arrived_is_applied_when_sent_again(proxied: tuple[Proxy, Bus], valkey: RealServer) -> None:
    proxy, bus = proxied
    begin(bus)
    proxy.black_hole()
    with pytest.raises(BusUnavailable):
        commit(bus, one_result(bus, 0))
    proxy.heal()
    assert commit(bus, one_result(bus, 0)) == (CommitAnswer.OK, "")
    assert valkey.client().xlen(bus.keys.results) == 1


def test_append_is_never_written_twice_behind_our_back(proxied: tuple[Proxy, Bus], valkey: RealServer) -> None:
    proxy, bus = proxied
    log = Log(bus)
    log.append(bus.keys.events, {b"n": b"0"})
    proxy.drop_replies()
    with pytest.raises(BusUnavailable):
        log.append(bus.keys.events, {b"n": b"1"})
    proxy.heal()
    log.append(bus.keys.events, {b"n": b"2"})
    written = [fields[b"n"] for _, fields in valkey.client().xrange(bus.keys.events)]
    assert written in ([b"0", b"1", b"2"], [b"0", b"2"])  # once or, as the caller was told, perhaps not


def test_reader_goes_on_where_it_was_when_the_line_was_cut(proxied: tuple[Proxy, Bus], valkey: RealServer) -> None:
    proxy, bus = proxied
    subscription = Subscription.from_end(bus, bus.keys.commands)
    writer = valkey.client()
    seen: list[bytes] = []
    for number in range(12):
        writer.xadd(bus.keys.commands, {b"id": b"%d" % number})
        if number % 3 == 0:
            proxy.cut_once()
        if number % 3 == 1:
            proxy.drop_replies()
        try:
            seen += [fields[b"id"] for _, fields in subscription.read(block_ms=50).entries]
        except BusUnavailable:
            proxy.heal()
    proxy.heal()

    def all_seen() -> bool:
        try:
            batch = subscription.read(block_ms=50)
        except BusUnavailable:
            return False
        assert batch.gap is None
        seen.extend(fields[b"id"] for _, fields in batch.entries)
        return len(seen) >= 12

    eventually(all_seen, what="all twelve entries")
    assert seen == [b"%d" % number for number in range(12)]


def test_waiting_reader_can_be_interrupted(valkey: RealServer, namespace: str) -> None:
    bus = valkey.bus(namespace, block_ms=5_000)
    subscription = Subscription.from_end(bus, bus.keys.commands)
    ended = threading.Event()

    def wait() -> None:
        while not ended.is_set():
            try:
                subscription.read()
            except BusUnavailable:
                ended.set()

    reader = threading.Thread(target=wait)
    reader.start()
    eventually(lambda: valkey.client().info("clients")["blocked_clients"], what="a blocked reader")
    subscription.interrupt()
    reader.join(4)  # less than the block
    assert ended.is_set()
