"""Counters and rate-limited logs."""

from __future__ import annotations

import logging
import threading

import pytest

from kvbus.metrics import Counters, RateLimitedLog


def test_counters_count_in_many_threads() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(2_000):
            counters.add("a")
            counters.add("b", 3)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters.set("lag", 0.5)
    assert counters.snapshot() == {"a": 8_000, "b": 24_000, "lag": 0.5}
    assert counters.get("a") == 8_000
    assert counters.get("nothing") == 0


def test_snapshot_is_a_copy() -> None:
    counters = Counters()
    counters.add("a")
    before = counters.snapshot()
    counters.add("a")
    assert before["a"] == 1


def test_one_line_of_a_kind_at_a_time_and_the_rest_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("kvbus.metrics.time.monotonic", lambda: now[0])
    log = RateLimitedLog(logging.getLogger("kvbus.test"))
    for _ in range(3):
        log.warning("away", "server away: %s", "100%")
    log.error("other", "another kind")
    now[0] += 1
    log.warning("away", "server away: %s", "still")
    now[0] += 1
    log.warning("away", "server away: %s", "back")
    assert [record.getMessage() for record in caplog.records] == [
        "server away: 100%",
        "another kind",
        "server away: still (2 more of this kind kept back)",
        "server away: back",
    ]
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR", "WARNING", "WARNING"]
