"""Processes and clocks for the contract suites."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbus.streams.connection import Bus
from tests.contract.line import Clock, clocked
from tests.contract.processes import Process, StartProcess


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Steps, not seconds: the same seed runs the same history on a slow machine."""
    return clocked(monkeypatch)


@pytest.fixture
def start_process() -> Iterator[StartProcess]:
    started: list[Process] = []

    def start(bus: Bus) -> Process:
        process = Process(bus)
        started.append(process)
        return process.start()

    yield start
    for process in started:
        process.stop()
