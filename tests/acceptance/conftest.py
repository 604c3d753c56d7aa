"""The command line against a real server, and real workers on scripted engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvbus.client import KVBus
from kvbus.streams.connection import Bus
from tests.cli_kit import Kvbus
from tests.servers import RealServer
from tests.unit.scripted_engine import ScriptedEngine
from worker_plugin.runtime import Worker

StartWorker = Callable[..., Worker]

LIVE = {"heartbeat_ms": 200, "live_ms": 2_000, "stats_ms": 200, "block_ms": 200}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each command is a process that has to start: on a busy machine a test of ten takes its time."""
    for item in items:
        if item.path.name.startswith("test_cli") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture
def kvbus(valkey: RealServer, namespace: str, tmp_path: Path) -> Kvbus:
    """The command line against a real Valkey, in a namespace of its own."""
    return Kvbus(valkey.url, namespace, tmp_path)


@pytest.fixture
def bus(valkey: RealServer, namespace: str) -> Bus:
    return valkey.bus(namespace, **LIVE)


@pytest.fixture
def client(bus: Bus) -> Iterator[KVBus]:
    with KVBus(bus=bus, issuer="a-test") as made:
        yield made


@pytest.fixture
def start_worker(valkey: RealServer, namespace: str) -> Iterator[StartWorker]:
    """Real workers on engines of two sets, stopped at the end: start_worker(engine, "host-a")."""
    with ExitStack() as stack:

        def start(engine: ScriptedEngine, instance: str = "host-a") -> Worker:
            worker = Worker(engine, settings=valkey.settings(namespace, **LIVE), instance=instance, rank=0)
            worker.start()
            stack.callback(worker.stop)
            stack.callback(engine.gate.set)
            assert worker.wait_ready(20)
            return worker

        yield start
