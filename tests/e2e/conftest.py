"""One bus and one model for all end-to-end tests; one vLLM at a time."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.bus import BusView
from tests.e2e.engine import ROOT, Options
from tests.servers import RealServer

MakeOptions = Callable[..., Options]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(720))  # the start of vLLM is part of a test's time


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the tiny model and its tokenizer."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([sys.executable, "-m", "tests.e2e.model", str(directory)], cwd=ROOT, check=True, timeout=120)
    return directory


@pytest.fixture(scope="session")
def bus_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A Valkey that no test of this folder stops."""
    server = RealServer("valkey", tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def module_bus(bus_server: RealServer) -> BusView:
    """A namespace of the module's own."""
    return BusView(bus_server, f"e2e-{uuid.uuid4().hex[:12]}")


@pytest.fixture(scope="module")
def make_options(tmp_path_factory: pytest.TempPathFactory, model: Path, bus_server: RealServer) -> MakeOptions:
    """Options of a vLLM with an empty SSD of its own: make_options(namespace)."""

    def make(namespace: str, *, url: str | None = None) -> Options:
        return Options(tmp_path_factory.mktemp("vllm"), model, url=url or bus_server.url, namespace=namespace)

    return make
