"""The facade in front of real LMCache engines: the two calls that clients know, and all that can go wrong with them."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvbus.client import KVBus
from kvbus.protocol.codec import decode_entry
from kvbus.protocol.commands import DDR, SSD
from kvbus.settings import Settings
from tests.facade_processes import FacadeProcess, WorkerProcess, curl, environment
from tests.servers import RealServer, eventually, missing

CHUNK = 16
CHUNKS = 8
WORLD = 2

pytestmark = pytest.mark.timeout(300)


class System:
    """Two ranks of one instance, each with its shard of the same texts, and a facade."""

    def __init__(self, env: dict[str, str], workers: list[WorkerProcess], facade: FacadeProcess) -> None:
        self.env = env
        self.workers = workers
        self.facade = facade
        self.texts = 0

    def settings(self) -> Settings:
        return Settings(redis_url=self.env["KVBUS_REDIS_URL"], namespace=self.env["KVBUS_NAMESPACE"])

    def store(self) -> list[str]:
        """A text that no test has seen, in both tiers of both ranks. Returns its chunk hashes."""
        self.texts += 1
        tokens = list(range(self.texts * 10_000, self.texts * 10_000 + CHUNK * CHUNKS))
        with ThreadPoolExecutor(WORLD) as pool:
            stored = list(pool.map(lambda worker: worker.ask("store", tokens=tokens, seed=self.texts), self.workers))
        hashes: list[str] = stored[0]["chunk_hashes"]
        assert len(hashes) == CHUNKS
        assert stored[1]["chunk_hashes"] == hashes
        return hashes

    def tiers(self, hashes: list[str]) -> dict[str, list[list[str]]]:
        """Worker to the tiers of each chunk."""
        body = self.facade.post("/memory/lookup", chunk_hashes=hashes).json()
        return {name: [worker["tiers"][text] for text in hashes] for name, worker in body["workers"].items()}

    def status(self, command_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.facade.http.get(f"/memory/commands/{command_id}").json()
        return found

    def all_alive(self) -> None:
        """Every worker has a heartbeat and its turn: nothing of an earlier test is left over."""
        eventually(lambda: self.facade.http.get("/memory/workers").json()["alive"] == WORLD, what="all alive")
        with KVBus(self.settings()) as bus:
            eventually(lambda: bus.ping().wait(5).complete, what="everybody answers")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    for module in ("lmcache", "torch"):
        if importlib.util.find_spec(module) is None:
            missing(module)
    home = tmp_path_factory.mktemp("facade-workers")
    server = RealServer("valkey", home / "server", {"appendonly": "yes"})
    server.start()
    env = environment(server.url, "acceptance", KVBUS_REST_WAIT_MS="4000")
    workers: list[WorkerProcess] = []
    facade: FacadeProcess | None = None
    try:
        workers += [
            WorkerProcess(env, home / f"ssd{rank}", instance="llm", rank=rank, world_size=WORLD)
            for rank in range(WORLD)
        ]
        facade = FacadeProcess(env, home / "facade.log")
        for worker in workers:
            worker.ready()
        yield System(env, workers, facade)
    finally:
        for worker in workers:
            worker.stop()
        if facade is not None:
            facade.stop()
        server.close()


@pytest.fixture(autouse=True)
def _everyone_there(system: System) -> Iterator[None]:
    system.all_alive()
    yield
    for worker in system.workers:
        worker.thaw()


def test_the_two_curl_lines_as_they_are_known(system: System) -> None:
    if shutil.which("curl") is None:
        missing("curl")
    header = ["-X", "POST", "-H", "Content-Type: application/json"]
    hashes = '["-6ed9a448787a198f","-4ca98d8c9e52152e","3f5c45ecbab5e9fd"]'
    evicted = curl(
        [
            *(*header, f"{system.facade.url}/memory/evict"),
            *("-d", f'{{"chunk_hashes": {hashes}, "locations": ["LocalCPUBackend"]}}'),
        ]
    )
    assert (evicted["status"], evicted["num_evicted"]) == ("success", 0)
    started = curl(
        [
            *(*header, f"{system.facade.url}/memory/prefetch"),
            *("-d", f'{{"chunk_hashes": {hashes}, "lookup_id": "my_prefetch_001"}}'),
        ]
    )
    assert (started["status"], started["lookup_id"], started["num_chunks"]) == (
        "prefetch_started",
        "my_prefetch_001",
        3,
    )


def test_evict_counts_what_was_really_there(system: System) -> None:
    hashes = system.store()
    assert all(tiers == [[DDR, SSD]] * CHUNKS for tiers in system.tiers(hashes).values())
    body = system.facade.post("/memory/evict", chunk_hashes=hashes[:3], locations=[DDR]).json()
    assert body["num_evicted"] == 3
    assert {worker["counts"]["evicted_pairs"] for worker in body["workers"].values()} == {3}
    assert all(tiers == [[SSD]] * 3 + [[DDR, SSD]] * 5 for tiers in system.tiers(hashes).values())
    body = system.facade.post("/memory/evict", chunk_hashes=hashes).json()
    assert body["num_evicted"] == 13
    assert all(tiers == [[]] * CHUNKS for tiers in system.tiers(hashes).values())
    assert system.facade.post("/memory/evict", chunk_hashes=hashes).json()["num_evicted"] == 0


def test_prefetch_answers_first_and_tells_later_what_each_rank_loaded(system: System) -> None:
    hashes = system.store()
    system.facade.post("/memory/evict", chunk_hashes=hashes, locations=[DDR])
    shuffled = [*hashes[5:], "7", *hashes[:5]]
    # With the disks' readers frozen, the answer can only come before anything is read.
    for worker in system.workers:
        worker.freeze()
    body = system.facade.post("/memory/prefetch", chunk_hashes=shuffled, lookup_id="turn_prefetch").json()
    assert (body["status"], body["num_chunks"]) == ("prefetch_started", CHUNKS + 1)
    status = system.status(body["command_id"])
    assert status["state"] == "running", status
    for worker in system.workers:
        worker.thaw()
    status = eventually(
        lambda: (found := system.status(body["command_id"]))["complete"] and found, what="the prefetch is done"
    )
    for worker in status["workers"].values():
        assert (worker["counts"]["loaded"], worker["counts"]["missing"]) == (CHUNKS, 1)
        assert worker["counts"]["bytes"] > 0
        assert worker["chunks"]["missing"] == ["7"]
    assert all(tiers == [[DDR, SSD]] * CHUNKS for tiers in system.tiers(hashes).values())
    assert system.facade.http.get("/memory/prefetch/turn_prefetch").json() == status


def test_twenty_clients_with_one_label_each_get_their_own_result(system: System) -> None:
    texts = [system.store() for _ in range(4)]
    for hashes in texts:
        system.facade.post("/memory/evict", chunk_hashes=hashes, locations=[DDR])

    def client(number: int) -> None:
        wanted = texts[number % 4][: 1 + number % CHUNKS] + [f"{number + 1:x}"] * (number % 3)
        answer = system.facade.http.post(
            "/memory/prefetch?wait=60", json={"chunk_hashes": wanted, "lookup_id": "turn_prefetch"}
        ).json()
        assert answer["complete"], answer
        for worker in answer["workers"].values():
            counts = worker["counts"]
            assert counts["requested"] == len(wanted)
            assert counts.get("loaded", 0) + counts.get("resident", 0) == 1 + number % CHUNKS
            assert counts.get("missing", 0) == number % 3

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(client, range(20)))


def test_chunks_of_a_running_request_are_told_and_go_later(system: System) -> None:
    hashes = system.store()
    tokens = list(range(system.texts * 10_000, system.texts * 10_000 + CHUNK * CHUNKS))
    system.workers[0].ask("pin", tokens=tokens, id="running")
    body = system.facade.post("/memory/evict", chunk_hashes=hashes, locations=[DDR]).json()
    assert body["status"] == "success"
    assert body["in_use"] == CHUNKS
    assert body["num_evicted"] == 0
    assert body["workers"]["llm/0"]["status"] == "deferred"
    assert body["workers"]["llm/1"]["counts"]["evicted_pairs"] == CHUNKS
    system.workers[0].ask("unpin", id="running")
    status = eventually(
        lambda: (found := system.status(body["command_id"]))["complete"] and found, what="the rest is evicted"
    )
    assert status["workers"]["llm/0"]["counts"]["evicted_pairs"] == CHUNKS


def test_a_frozen_worker_is_named_within_the_time_and_catches_up(system: System) -> None:
    hashes = system.store()
    system.workers[1].freeze()
    began = time.monotonic()
    answer = system.facade.post("/memory/evict", chunk_hashes=hashes, locations=[DDR])
    assert time.monotonic() - began < 20
    body = answer.json()
    assert answer.status_code == 500
    assert body["error"] == "Some workers failed to process request"
    assert list(body["failures"]) == ["llm/1"]
    assert body["workers"]["llm/0"]["counts"]["evicted_pairs"] == CHUNKS
    assert system.status(body["command_id"])["complete"] is False
    system.workers[1].thaw()
    status = eventually(
        lambda: (found := system.status(body["command_id"]))["complete"] and found, what="the frozen worker catches up"
    )
    assert status["workers"]["llm/1"]["counts"]["evicted_pairs"] == CHUNKS
    assert all(tiers == [[SSD]] * CHUNKS for tiers in system.tiers(hashes).values())


def test_a_facade_killed_in_mid_wait_comes_back_and_knows(system: System) -> None:
    hashes = system.store()
    for worker in system.workers:
        worker.freeze()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(system.facade.post, "/memory/evict", chunk_hashes=hashes, lookup_id="before the crash")
        with KVBus(system.settings()) as bus:
            command_id = eventually(lambda: _issued(bus, "before the crash"), what="the command is on the stream")
        system.facade.process.kill()
        with pytest.raises(Exception):  # noqa: B017 - whatever the client makes of a vanished server
            waiting.result(30)
    system.facade.kill()
    for worker in system.workers:
        worker.thaw()
    system.facade.start()
    status = eventually(
        lambda: (found := system.status(command_id)).get("complete") and found, what="the status after the restart"
    )
    assert status["type"] == "evict"
    assert {worker["counts"]["evicted_pairs"] for worker in status["workers"].values()} == {2 * CHUNKS}


def _issued(bus: KVBus, lookup_id: str) -> str | None:
    for entry_id, fields in bus.log.scan_back(bus.bus.keys.commands):
        envelope = decode_entry(entry_id, fields)
        if getattr(envelope.message, "lookup_id", None) == lookup_id:
            return envelope.id
    return None


def test_metrics_show_what_real_workers_did(system: System) -> None:
    def told() -> list[str]:
        lines = system.facade.http.get("/metrics").text.splitlines()
        return [line for line in lines if line.startswith("kvbus_worker_commands_evict{")]

    eventually(lambda: len(told()) == WORLD, within_s=40, what="both workers' counters")


def test_a_clean_stop_and_one_log_line_a_request(system: System) -> None:
    system.facade.post("/memory/evict", chunk_hashes=["1"])
    assert system.facade.stop() == 0
    line = next(line for line in reversed(system.facade.lines()) if line.get("path") == "/memory/evict")
    assert (line["status"], line["counts"]) == (200, {"chunks": 1, "evicted": 0})
    system.facade.start()
