"""Readiness, workers and metrics: what the facade sees of the bus."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from kvbus.protocol.results import Status
from kvbus.streams.registry import PublisherRegistration, beat_publisher, register_publisher, write_stats
from tests.facade_kit import QUICK, RunningFacade, Scene, result, say_nothing, scene
from tests.servers import Server, eventually

EVICT = {"chunk_hashes": ["3f5c45ecbab5e9fd", "1"]}


@pytest.fixture
def here(server: Server, namespace: str) -> Iterator[Scene]:
    with scene(server.settings(namespace, **QUICK)) as made:
        yield made


def metrics(facade: RunningFacade) -> dict[str, float]:
    lines = facade.http.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line and line[0] != "#"}


def publisher(here: Scene, name: str, fingerprint: str, *, alive: bool = True) -> None:
    bus = here.bus()
    info = PublisherRegistration(instance=name, hash_fingerprint=fingerprint)
    register_publisher(bus, name, info, least_epoch=1)
    beat_publisher(bus, name, os.urandom(8).hex(), None)
    if not alive:
        bus.client.delete(bus.keys.live(name))


def test_ready_when_a_worker_is_there(here: Scene) -> None:
    facade = here.facade()
    answer = facade.http.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["checks"]["workers"] == {"ok": False, "detail": "none is alive (registered: none)"}
    here.worker("a/0", hash_fingerprint="builtin/256/1f")
    answer = facade.http.get("/readyz")
    assert answer.status_code == 200
    assert answer.json()["ready"] is True
    assert "builtin/256/1f" in answer.json()["checks"]["hash_fingerprint"]["detail"]


def test_two_hash_settings_are_named_with_who_has_them(here: Scene) -> None:
    here.worker("a/0", hash_fingerprint="builtin/256/1f")
    here.worker("a/1", hash_fingerprint="builtin/64/2e")
    here.worker("a/2")  # says nothing of its settings
    facade = here.facade()
    answer = facade.http.get("/readyz")
    assert answer.status_code == 503
    check = answer.json()["checks"]["hash_fingerprint"]
    assert check["ok"] is False
    for told in ("'builtin/256/1f': worker a/0", "'builtin/64/2e': worker a/1"):
        assert told in check["detail"]
    assert metrics(facade)["kvbus_hash_fingerprints"] == 2


def test_a_publisher_with_other_settings_counts_while_it_lives(here: Scene) -> None:
    here.worker("a/0", hash_fingerprint="builtin/256/1f")
    publisher(here, "gone", "builtin/16/00", alive=False)
    facade = here.facade()
    assert facade.http.get("/readyz").status_code == 200
    publisher(here, "scheduler", "sha256/256/aa")
    check = facade.http.get("/readyz").json()["checks"]["hash_fingerprint"]
    assert not check["ok"]
    assert "'sha256/256/aa': publisher scheduler" in check["detail"]


def test_workers_are_listed_with_what_they_tell(here: Scene) -> None:
    here.worker("a/0", model="tiny", chunk_size=64, lmcache="0.4.3", world_size=2)
    here.worker("a/1", stores=False, stuck=True)
    body = here.facade().http.get("/memory/workers").json()
    assert body["alive"] == 2
    first, second = body["workers"]
    assert (first["name"], first["model"], first["chunk_size"], first["lmcache"]) == ("a/0", "tiny", 64, "0.4.3")
    assert (first["alive"], first["stores"], second["stores"], second["stuck"]) == (True, True, False, True)
    assert first["epoch"] > 0


def test_nobody_waits_for_a_stuck_engine(here: Scene) -> None:
    here.worker("a/0")
    here.worker("a/1", say_nothing, stuck=True)
    facade = here.facade(rest_wait_ms=60_000)
    answer = facade.post("/memory/evict", EVICT)
    assert answer.status_code == 500
    assert answer.json()["failures"]["a/1"]["code"] == "engine_stuck"
    assert answer.json()["workers"]["a/0"]["status"] == "done"
    assert facade.http.get("/readyz").status_code == 200
    assert "a/1" in facade.http.get("/readyz").json()["checks"]["workers"]["detail"]


def test_metrics_count_what_the_facade_did(here: Scene) -> None:
    here.worker("a/0", lambda task: [result(task, Status.DONE, evicted_pairs=2)])
    facade = here.facade()
    for number in range(3):
        facade.post("/memory/evict", EVICT)
        facade.http.get(f"/memory/commands/unknown-{number}")
        facade.http.get(f"/no/such/path/{number}")
    facade.post("/memory/evict", {"chunk_hashes": ["no"]})
    facade.http.request("BREW", "/memory/evict")
    seen = metrics(facade)
    assert seen['kvbus_facade_requests_total{method="POST",route="/memory/evict",status="200"}'] == 3
    assert seen['kvbus_facade_requests_total{method="POST",route="/memory/evict",status="400"}'] == 1
    assert seen['kvbus_facade_requests_total{method="GET",route="/memory/commands/{command_id}",status="404"}'] == 3
    assert seen['kvbus_facade_requests_total{method="GET",route="other",status="404"}'] == 3
    assert seen['kvbus_facade_request_seconds_count{route="/memory/evict"}'] >= 4
    assert seen['kvbus_facade_commands_total{type="evict"}'] == 3
    assert seen["kvbus_bus_up"] == 1
    assert seen["kvbus_workers_alive"] == 1
    assert seen['kvbus_stream_entries{stream="commands"}'] == 3
    assert "BREW" not in json.dumps(list(seen))


def test_metrics_hold_every_workers_and_publishers_counters(here: Scene) -> None:
    here.worker("a/0")
    here.worker("a/1")
    publisher(here, "scheduler", "")
    bus = here.bus()
    write_stats(bus, "a/0", {"chunks_loaded": 7, "kv_bytes": 1.5, 'bad name{"': 1})
    write_stats(bus, "scheduler", {"events_sent": 11})
    seen = metrics(here.facade())
    assert seen['kvbus_worker_chunks_loaded{instance="a",rank="0",worker="a/0"}'] == 7
    assert seen['kvbus_worker_kv_bytes{instance="a",rank="0",worker="a/0"}'] == 1.5
    assert seen['kvbus_publisher_events_sent{instance="scheduler",publisher="scheduler"}'] == 11
    assert not [name for name in seen if "bad name" in name or 'worker="a/1"' in name]


def test_a_strangers_stats_key_does_not_take_the_others_along(here: Scene) -> None:
    here.worker("a/0")
    here.worker("a/1")
    bus = here.bus()
    write_stats(bus, "a/0", {"fine": 1})
    bus.client.set(bus.keys.stats("a/1"), b"not json")
    seen = metrics(here.facade())
    assert seen["kvbus_bus_up"] == 1
    assert seen['kvbus_worker_fine{instance="a",rank="0",worker="a/0"}'] == 1


def test_without_the_bus_health_and_metrics_go_on(start_server: object, namespace: str) -> None:
    server: Server = start_server("valkey")  # type: ignore[operator]
    with scene(server.settings(namespace)) as here:
        facade = here.facade()
        eventually(lambda: metrics(facade)["kvbus_bus_up"] == 1, what="the bus is seen")
        server.stop()  # type: ignore[union-attr]
        assert facade.http.get("/healthz").json() == {"status": "ok"}
        answer = facade.http.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["checks"]["bus"]["ok"] is False
        eventually(lambda: metrics(facade)["kvbus_bus_up"] == 0, what="the bus is missed")
        assert metrics(facade)["kvbus_facade_bus_errors_total"] >= 1
