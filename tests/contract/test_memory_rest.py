"""The ledger's routes in the facade, and its service with metrics, over a real server."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import msgspec
import pytest

from kvbus.errors import ConfigError
from kvbus.memory import Ledger, MemoryConfig, MemoryService
from kvbus.memory.exporter import Exporter
from kvbus.streams.position import Position
from tests.contract.ledger_model import finished, publish
from tests.facade_kit import QUICK, Scene, scene
from tests.servers import Server, eventually


@pytest.fixture
def here(valkey: Server, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("KVBUS_MEMORY_GRACE_MS", "0")
    with scene(valkey.settings(namespace, **QUICK)) as made:
        yield made


@pytest.fixture
def ledger(here: Scene) -> Ledger:
    ledger = Ledger(here.bus(), MemoryConfig(grace_ms=0))
    ledger.turn(finished("p", 0, (1, -2, 3), session="a", intent="travel", tags=()), Position("1-0"))
    ledger.turn(finished("p", 1, (1, 9), session="b/1", intent="travel", tenant="t"), Position("2-0"))
    return ledger


def test_sessions_are_listed_and_shown(here: Scene, ledger: Ledger) -> None:
    http = here.facade().http
    listed = http.get("/memory/sessions").json()
    assert [(item["session"], item["num_chunks"]) for item in listed["sessions"]] == [("b/1", 2), ("a", 3)]
    assert (listed["total"], listed["chunks"]) == (2, 4)
    assert http.get("/memory/sessions?tenant=t&count=1").json()["sessions"][0]["session"] == "b/1"
    one = http.get("/memory/sessions/a").json()
    assert one["chunk_hashes"] == ["1", "-2", "3"]
    assert (one["intent"], one["turns"]) == ("travel", 1)
    assert http.get("/memory/sessions/nobody").status_code == 404


def test_switch_and_close(here: Scene, ledger: Ledger) -> None:
    http = here.facade().http
    switched = http.post("/memory/sessions/a/switch").json()
    assert (switched["status"], switched["num_sessions"], switched["num_chunks"]) == ("switched", 1, 3)
    assert len(switched["command_ids"]) == 1
    assert http.post("/memory/intents/travel/switch?tenant=t").json()["num_chunks"] == 2
    assert http.post("/memory/sessions/nobody/switch").status_code == 404
    assert http.delete("/memory/sessions/a?tenant=t").status_code == 404
    assert http.post("/memory/sessions/a/switch?tenant=t").status_code == 404
    closed = http.delete("/memory/sessions/a").json()
    assert (closed["status"], closed["num_chunks"], len(closed["command_ids"])) == ("closed", 3, 1)
    assert http.delete("/memory/sessions/a").status_code == 404
    assert ledger.held_by(1) == 1


def test_a_request_is_announced(here: Scene, ledger: Ledger) -> None:
    http = here.facade().http
    told = {"request_id": "r1", "session": "a", "chunk_hashes": ["1", "-2", "3", "4"]}
    assert http.post("/memory/requests", json=told).json() == {"status": "begun", "request_id": "r1"}
    assert http.post("/memory/requests", json=told).json()["status"] == "already"
    assert ledger.held_by(4) == 1
    foreign = http.post("/memory/requests", json={"request_id": "r2", "session": "a", "tenant": "t"})
    assert (foreign.status_code, foreign.json()["code"]) == (404, "not_found")
    assert http.put("/memory/sessions/a").headers["allow"] == "DELETE, GET"
    for wrong in ({}, {"request_id": "r"}, {"request_id": 7, "session": "a"}, {"request_id": "r", "chunk_hashes": "x"}):
        assert http.post("/memory/requests", json=wrong).status_code == 400
    assert http.post("/memory/requests", content=b"[").status_code == 400


def test_switched_off_it_says_so(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBUS_KVCACHE_ENABLED", "off")
    answer = here.facade().http.get("/memory/sessions")
    assert (answer.status_code, answer.json()["code"]) == (503, "config")


def test_metrics_of_the_service(valkey: Server, namespace: str) -> None:
    bus = valkey.bus(namespace, block_ms=100, stats_ms=100)
    with MemoryService(bus, MemoryConfig(grace_ms=0)) as service:
        exporter = Exporter(service.counters, 0)
        try:
            eventually(lambda: service.ledger.store.position())
            publish(bus, finished("p", 0, (1, 2), session="a"))
            publish(bus, finished("p", 1, (1, 3), session="a"))
            wanted = ("kvbus_memory_events_taken_total 2.0", "kvbus_memory_ledger_chunks 2.0")

            def told() -> bool:
                with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics") as answer:
                    text = answer.read().decode()
                return all(line in text for line in (*wanted, "kvbus_memory_evict_chunks_total 1.0"))

            eventually(told, what="the numbers are there")
            with pytest.raises(ConfigError, match="cannot be served"):
                Exporter(service.counters, exporter.port)
        finally:
            exporter.close()
    assert msgspec.to_builtins(service.ledger.totals())["sessions"] == 1
