"""Commands over HTTP, on workers that answer as they are told, on every kind of server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from kvbus.client import KVBus
from kvbus.protocol.codec import decode_entry
from kvbus.protocol.results import ChunkLists, CommandResult, Counts, ErrorInfo, Held, Status
from kvbus.streams.worker_log import Task
from tests.facade_kit import QUICK, Answering, Scene, result, say_nothing, scene
from tests.servers import Server, eventually

SEED = ["-6ed9a448787a198f", "-4ca98d8c9e52152e", "3f5c45ecbab5e9fd"]
EVICT = {"chunk_hashes": SEED, "locations": ["LocalCPUBackend"]}
PREFETCH = {"chunk_hashes": SEED, "lookup_id": "my_prefetch_001"}


@pytest.fixture
def here(server: Server, namespace: str) -> Iterator[Scene]:
    with scene(server.settings(namespace, **QUICK)) as made:
        yield made


@pytest.fixture
def on_valkey(valkey: Server, namespace: str) -> Iterator[Scene]:
    with scene(valkey.settings(namespace, **QUICK)) as made:
        yield made


def evicted(pairs: int, status: Status = Status.DONE) -> Answering:
    return lambda task: [result(task, status, requested=3, evicted_pairs=pairs)]


def test_evict_answers_with_what_the_first_storing_rank_removed(here: Scene) -> None:
    here.worker("a/0", evicted(0, Status.NOT_APPLICABLE), stores=False)
    first = here.worker("a/1", evicted(6))
    here.worker("a/2", evicted(4))
    here.worker("b/0", evicted(3))
    facade = here.facade()
    answer = facade.post("/memory/evict", EVICT)
    body = answer.json()
    assert answer.status_code == 200
    assert (body["status"], body["num_evicted"]) == ("success", 9)
    assert {name: worker["status"] for name, worker in body["workers"].items()} == {
        "a/0": "not_applicable",
        "a/1": "done",
        "a/2": "done",
        "b/0": "done",
    }
    assert body["workers"]["a/2"]["counts"]["evicted_pairs"] == 4
    assert answer.headers["x-kvbus-command-id"] == body["command_id"] == first.seen[0].envelope.id
    command: Any = first.seen[0].envelope.message
    assert command.locations == ("LocalCPUBackend",)
    assert command.chunk_hashes == tuple(int(text, 16) for text in SEED)


def test_prefetch_waits_for_nobody(here: Scene) -> None:
    here.worker("a/0", say_nothing)
    facade = here.facade()
    body = facade.post("/memory/prefetch", PREFETCH).json()
    assert body == {
        "status": "prefetch_started",
        "lookup_id": "my_prefetch_001",
        "num_chunks": 3,
        "command_id": body["command_id"],
    }
    assert here.commands() == 1
    assert facade.http.get(f"/memory/commands/{body['command_id']}").json()["waiting"] == ["a/0"]


def test_prefetch_with_wait_answers_when_done(here: Scene) -> None:
    here.worker("a/0", lambda task: [result(task, requested=3, loaded=3, bytes=48)])
    here.worker("a/1", lambda task: [result(task, Status.PARTIAL, requested=3, loaded=1, no_space=2)])
    body = here.facade().post("/memory/prefetch?wait=20", PREFETCH).json()
    assert body["status"] == "prefetch_started"
    assert body["complete"] is True
    assert body["workers"]["a/0"]["counts"] == {"requested": 3, "loaded": 3, "bytes": 48}
    assert body["workers"]["a/1"]["status"] == "partial"


def test_prefetch_with_wait_says_who_is_not_done(here: Scene) -> None:
    here.worker("a/0", lambda task: [result(task, requested=3, loaded=3)])
    here.worker("a/1", say_nothing)
    answer = here.facade().post("/memory/prefetch?wait=3", PREFETCH)
    assert answer.status_code == 200
    assert answer.json()["complete"] is False
    assert answer.json()["waiting"] == ["a/1"]
    assert list(answer.json()["workers"]) == ["a/0"]


def test_chunks_in_use_end_the_wait(here: Scene) -> None:
    in_hand: list[Task] = []

    def defer(task: Task) -> list[CommandResult]:
        in_hand.append(task)
        return [result(task, Status.DEFERRED, requested=3, evicted=1, evicted_pairs=2, in_use=2)]

    here.worker("a/0", defer)
    answer = here.facade(rest_wait_ms=60_000).post("/memory/evict", EVICT)
    assert answer.status_code == 200
    assert (answer.json()["num_evicted"], answer.json()["in_use"]) == (2, 2)
    assert answer.json()["workers"]["a/0"]["status"] == "deferred"


def test_a_failure_is_named_and_the_others_work_is_done(here: Scene) -> None:
    def fail(task: Task) -> list[CommandResult]:
        return [
            CommandResult(
                command_id=task.envelope.id,
                type="evict",
                status=Status.FAILED,
                counts=Counts(requested=3, failed=3),
                error=ErrorInfo("engine_failed", "OSError: no such device"),
            )
        ]

    here.worker("a/0", evicted(3))
    here.worker("a/1", fail)
    answer = here.facade().post("/memory/evict", EVICT)
    body = answer.json()
    assert answer.status_code == 500
    assert body["error"] == "Some workers failed to process request"
    assert body["failures"] == {
        "a/1": {
            "code": "engine_failed",
            "message": "OSError: no such device",
            "status": "failed",
            "counts": {"requested": 3, "failed": 3},
        }
    }
    assert body["workers"]["a/0"]["counts"]["evicted_pairs"] == 3


def test_a_silent_worker_is_named_when_the_time_is_over(here: Scene) -> None:
    here.worker("a/0", evicted(3))
    here.worker("a/1", say_nothing)
    answer = here.facade(rest_wait_ms=300).post("/memory/evict", EVICT)
    assert answer.status_code == 500
    assert list(answer.json()["failures"]) == ["a/1"]
    assert "no answer within 0.3 s" in answer.json()["failures"]["a/1"]["message"]


def test_a_worker_that_dies_is_not_waited_for_to_the_end(on_valkey: Scene) -> None:
    on_valkey.worker("a/0", evicted(3))
    mortal = on_valkey.worker("a/1", say_nothing)
    facade = on_valkey.facade(rest_wait_ms=60_000)
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(facade.post, "/memory/evict", EVICT)
        eventually(lambda: mortal.seen, what="the command reaches a/1")
        mortal.die()
        answer = answering.result(30)
    assert answer.status_code == 500
    assert list(answer.json()["failures"]) == ["a/1"]
    assert "died" in answer.json()["failures"]["a/1"]["message"]
    # From now on it is known to be dead: it owes, and nobody waits.
    answer = facade.post("/memory/evict", EVICT)
    assert answer.status_code == 200
    assert answer.json()["absent"] == ["a/1"]


def test_a_worker_that_comes_back_catches_up_and_its_answer_shows(on_valkey: Scene) -> None:
    worker = on_valkey.worker("a/0", evicted(3))
    facade = on_valkey.facade(rest_wait_ms=300)
    worker.freeze()
    command_id = facade.post("/memory/evict", EVICT).json()["command_id"]
    worker.thaw()
    status = eventually(
        lambda: (found := facade.http.get(f"/memory/commands/{command_id}").json())["complete"] and found,
        what="the late answer",
    )
    assert status["state"] == "done"
    assert status["workers"]["a/0"]["counts"]["evicted_pairs"] == 3


def test_a_worker_that_has_just_come_is_not_called_dead(here: Scene) -> None:
    """It is younger than what the facade last knew of who is there."""
    facade = here.facade()
    here.worker("a/0", say_nothing)
    command_id = facade.post("/memory/prefetch", PREFETCH).json()["command_id"]
    status = facade.http.get(f"/memory/commands/{command_id}").json()
    assert (status["state"], status.get("waiting"), status.get("dead")) == ("running", ["a/0"], None)


@pytest.mark.parametrize(("path", "body"), [("prefetch", PREFETCH), ("evict", EVICT), ("lookup", EVICT)])
def test_nobody_there(here: Scene, path: str, body: dict[str, Any]) -> None:
    answer = here.facade().post(f"/memory/{path}", body)
    assert answer.status_code == 503
    assert answer.json()["code"] == "no_workers"
    assert here.commands() == 0


def test_all_dead(on_valkey: Scene) -> None:
    on_valkey.worker().die()
    facade = on_valkey.facade()
    eventually(lambda: facade.http.get("/memory/workers").json()["alive"] == 0, what="the heartbeat lapses")
    answer = facade.post("/memory/evict", EVICT)
    assert answer.status_code == 503
    assert "a/0" in answer.json()["error"]
    assert on_valkey.commands() == 0


def test_one_label_for_all_and_everyone_gets_their_own(here: Scene) -> None:
    def loaded_as_many_as_its_hash(task: Task) -> list[CommandResult]:
        message: Any = task.envelope.message
        return [result(task, requested=1, loaded=message.chunk_hashes[0])]

    for name in ("a/0", "a/1"):
        here.worker(name, loaded_as_many_as_its_hash)
    facade = here.facade()

    def client(number: int) -> int:
        with facade.client() as http:
            body = {"chunk_hashes": [f"{number:x}"], "lookup_id": "turn_prefetch"}
            answer = http.post("/memory/prefetch", params={"wait": 60}, json=body).json()
        assert len(answer["workers"]) == 2
        return int(answer["workers"]["a/0"]["counts"]["loaded"])

    numbers = range(1, 21)
    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(client, numbers)) == list(numbers)


def test_lookup_names_the_tiers(here: Scene) -> None:
    def look(task: Task) -> list[CommandResult]:
        held = Held(("LocalCPUBackend", "LocalDiskBackend"), bytes([1, 2, 0]))
        return [CommandResult(command_id=task.envelope.id, type="lookup", status=Status.DONE, held=held)]

    here.worker("a/0", look)
    body = here.facade().post("/memory/lookup", {"chunk_hashes": SEED}).json()
    assert body["num_chunks"] == 3
    assert body["workers"]["a/0"]["tiers"] == {SEED[0]: ["LocalCPUBackend"], SEED[1]: ["LocalDiskBackend"], SEED[2]: []}


def test_what_else_a_command_may_say_reaches_the_workers(here: Scene) -> None:
    worker = here.worker()
    more = {"tags": [["user", "7"]], "target": {"instances": ["a"], "ranks": [0]}, "ttl_ms": 5_000.0, "unknown": 1}
    assert here.facade().post("/memory/evict", {**EVICT, **more, "lookup_id": "x"}).status_code == 200
    command: Any = worker.seen[0].envelope.message
    assert command.tags == (("user", "7"),)
    assert (command.target.instances, command.target.ranks) == (("a",), (0,))
    assert (command.ttl_ms, command.lookup_id, command.issuer) == (5_000, "x", "facade")


def test_status_knows_the_hashes_behind_the_counts(here: Scene) -> None:
    def missing(task: Task) -> list[CommandResult]:
        found = result(task, requested=3, loaded=2, missing=1)
        return [_with_missing(found, -1)]

    here.worker("a/0", missing)
    facade = here.facade()
    facade.post("/memory/prefetch?wait=20", PREFETCH)
    status = facade.http.get("/memory/prefetch/my_prefetch_001").json()
    assert status["workers"]["a/0"]["chunks"] == {"missing": ["-1"]}
    assert (status["type"], status["num_chunks"], status["issuer"]) == ("prefetch", 3, "facade")


def _with_missing(given: CommandResult, *hashes: int) -> CommandResult:
    return msgspec.structs.replace(given, chunks=ChunkLists(missing=hashes))


def test_status_of_the_latest_with_that_label(here: Scene) -> None:
    here.worker()
    facade = here.facade()
    for number in (1, 2, 3):
        facade.post("/memory/prefetch?wait=20", {"chunk_hashes": ["1"] * number, "lookup_id": "same"})
    facade.post("/memory/prefetch?wait=20", {"chunk_hashes": ["1"] * 4, "lookup_id": "same but longer"})
    assert facade.http.get("/memory/prefetch/same").json()["num_chunks"] == 3
    assert facade.http.get("/memory/prefetch/unknown").status_code == 404
    assert facade.http.get("/memory/commands/unknown").status_code == 404
    assert facade.http.get("/memory/commands/1-1").status_code == 404


def test_a_fresh_facade_knows_what_was_before_it(here: Scene) -> None:
    here.worker("a/0")
    here.worker("a/1")
    first = here.facade()
    command_id = first.post("/memory/prefetch?wait=20", PREFETCH).json()["command_id"]
    before = first.http.get(f"/memory/commands/{command_id}").json()
    second = here.facade()
    eventually(lambda: second.http.get("/readyz").status_code == 200, what="the second facade is ready")
    assert second.http.get(f"/memory/commands/{command_id}").json() == before
    assert second.http.get("/memory/prefetch/my_prefetch_001").json() == before


def test_commands_of_others_are_known_too(here: Scene) -> None:
    here.worker()
    facade = here.facade()
    with KVBus(here.settings, issuer="someone else") as bus:
        sent = bus.prefetch(SEED, lookup_id="theirs")
        sent.results(20)
    found = facade.http.get("/memory/prefetch/theirs").json()
    assert (found["command_id"], found["issuer"], found["state"]) == (sent.command_id, "someone else", "done")
    # A command typed by hand has no id of its own: its entry's id serves.
    client = here.bus().client
    key = here.bus().keys.commands
    entry_id = client.xadd(key, {"type": "evict", "json": '{"chunk_hashes":["1"]}'}).decode()
    by_hand = eventually(
        lambda: (answer := facade.http.get(f"/memory/commands/{entry_id}").json()).get("complete") and answer,
        what="the answer to a command typed by hand",
    )
    assert by_hand["workers"]["a/0"]["status"] == "done"


def test_the_command_on_the_stream_is_the_one_that_was_posted(here: Scene) -> None:
    here.worker()
    answer = here.facade().post("/memory/prefetch", PREFETCH).json()
    bus = here.bus()
    [(entry_id, fields)] = bus.client.xrange(bus.keys.commands)
    envelope = decode_entry(entry_id, fields)
    assert envelope.id == answer["command_id"]
    assert envelope.type == "prefetch"


def test_stopping_ends_the_waits_and_says_where_to_ask(on_valkey: Scene) -> None:
    worker = on_valkey.worker("a/0", say_nothing)
    facade = on_valkey.facade(rest_wait_ms=60_000)
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(facade.post, "/memory/evict", EVICT)
        eventually(lambda: worker.seen, what="the command reaches the worker")
        began = time.monotonic()
        facade.server.should_exit = True
        answer = answering.result(30)
    assert answer.status_code == 503
    assert answer.json()["code"] == "stopped"
    assert answer.json()["command_id"] == worker.seen[0].envelope.id
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(("keep", "weight"), [(5, 10**9), (10**9, 5)], ids=["by number", "by weight"])
def test_what_is_forgotten_is_read_from_the_streams(
    here: Scene, monkeypatch: pytest.MonkeyPatch, keep: int, weight: int
) -> None:
    monkeypatch.setattr("kvbus.answers.KEEP_COMMANDS", keep)
    monkeypatch.setattr("kvbus.answers.KEEP_WEIGHT", weight)
    monkeypatch.setattr("kvbus.answers.HOLD_S", 0.0)
    monkeypatch.setattr("kvbus.facade.status.REMEMBER", 3)
    here.worker("a/0", lambda task: [_with_missing(result(task, requested=3, missing=3), 1, 2, 3)])
    facade = here.facade()
    sent = [facade.post("/memory/prefetch?wait=20", PREFETCH).json()["command_id"] for _ in range(20)]
    answers = facade.app.state.parts.facade.client.answers
    assert len(answers._records) <= 6
    for command_id in sent:
        status = facade.http.get(f"/memory/commands/{command_id}").json()
        assert (status["state"], status["complete"]) == ("done", True)
        assert status["workers"]["a/0"]["chunks"] == {"missing": ["1", "2", "3"]}
