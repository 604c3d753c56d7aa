"""Servers and names for all tests. Tests share servers, never keys: each has a namespace of its own, nobody flushes."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.servers import KINDS, RealServer, Server, make_server

MakeServer = Callable[..., Server]

# No time limit for one example: a busy machine is not a fault of the code.
settings.register_profile("kvbus", deadline=None, print_blob=True)
settings.load_profile("kvbus")


@pytest.fixture(scope="session", autouse=True)
def _no_settings_from_outside() -> Iterator[None]:
    """A developer's KVBUS_* variables must not change what tests see, nor what their processes inherit."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("KVBUS_"):
                patch.delenv(name)
        yield


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return f"t-{uuid.uuid4().hex[:16]}"


@pytest.fixture(scope="session")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    started: dict[str, Server] = {}

    def get(kind: str) -> Server:
        if kind not in started:
            started[kind] = make_server(kind, tmp_path_factory.mktemp(kind))
        return started[kind]

    yield get
    for server in started.values():
        server.close()


def _lend(server: Server) -> Iterator[Server]:
    yield server
    server.forget_clients()


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, _shared: Callable[[str], Server]) -> Iterator[Server]:
    """Each kind of server in turn, shared by the whole session: use `namespace`, and do not stop or flush it."""
    yield from _lend(_shared(request.param))


@pytest.fixture(params=[kind for kind in KINDS if kind != "fakeredis"])
def real_server(request: pytest.FixtureRequest, _shared: Callable[[str], Server]) -> Iterator[Server]:
    """The same without fakeredis."""
    yield from _lend(_shared(request.param))


@pytest.fixture
def valkey(_shared: Callable[[str], Server]) -> Iterator[Server]:
    """Valkey 9.1, shared by the whole session."""
    yield from _lend(_shared("valkey"))


@pytest.fixture
def redis7(_shared: Callable[[str], Server]) -> Iterator[Server]:
    """Redis 7.0, shared by the whole session."""
    yield from _lend(_shared("redis7"))


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[MakeServer]:
    """Start servers of this test's own, to stop, flush, kill or fill: start_server("valkey", appendonly="yes")."""
    started: list[Server] = []

    def start(kind: str = "valkey", **options: str) -> Server:
        named = {name.replace("_", "-"): value for name, value in options.items()}
        server = make_server(kind, tmp_path / f"server-{len(started)}", named)
        started.append(server)
        return server

    yield start
    for server in started:
        server.close()


@pytest.fixture(params=KINDS)
def own_server(request: pytest.FixtureRequest, start_server: MakeServer) -> Server:
    """Each kind of server in turn, this test's own: it may be flushed."""
    return start_server(request.param)


@pytest.fixture(params=[kind for kind in KINDS if kind != "fakeredis"])
def own_real_server(request: pytest.FixtureRequest, start_server: MakeServer) -> RealServer:
    """Each kind of real server in turn, this test's own, with an append-only file: it may be stopped and killed."""
    server = start_server(request.param, appendonly="yes")
    assert isinstance(server, RealServer)
    return server
