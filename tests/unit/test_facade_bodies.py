"""Bodies of every kind: what is not exactly a command is refused by name, and nothing reaches the stream."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kvbus.facade.bodies import MAX_BODY
from kvbus.protocol.limits import MAX_HASHES
from tests.facade_kit import RunningFacade, Scene, StandIn, scene
from tests.servers import Server

GOOD = "3f5c45ecbab5e9fd"
REQUIRED = {
    "prefetch": {"error": "chunk_hashes and lookup_id are required"},
    "evict": {"error": "chunk_hashes is required"},
    "lookup": {"error": "chunk_hashes is required"},
}


class Stage:
    def __init__(self, here: Scene) -> None:
        self.here = here
        self.worker: StandIn = here.worker()
        self.facade: RunningFacade = here.facade()

    def send(self, kind: str, content: bytes) -> tuple[int, Any]:
        headers = {"content-type": "application/json"}
        answer = self.facade.http.post(f"/memory/{kind}", content=content, headers=headers)
        assert answer.headers["content-type"] == "application/json"
        return answer.status_code, answer.json()


@pytest.fixture(scope="module")
def stage(_shared: Any) -> Iterator[Stage]:
    server: Server = _shared("valkey")
    with scene(server.settings("facade-bodies")) as here:
        yield Stage(here)


@pytest.fixture(autouse=True)
def _nothing_on_the_stream(stage: Stage) -> Iterator[None]:
    before = stage.here.commands()
    yield
    assert stage.here.commands() == before


@pytest.mark.parametrize("kind", ["prefetch", "evict", "lookup"])
@pytest.mark.parametrize(
    "body",
    [{}, {"chunk_hashes": []}, {"chunk_hashes": None}, {"lookup_id": "x"}, {"chunk_hashes": [], "lookup_id": "x"}],
    ids=str,
)
def test_what_is_required_is_said_as_ever(stage: Stage, kind: str, body: dict[str, Any]) -> None:
    assert stage.send(kind, json.dumps(body).encode()) == (400, REQUIRED[kind])


@pytest.mark.parametrize("lookup_id", [None, ""])
def test_prefetch_needs_a_lookup_id(stage: Stage, lookup_id: str | None) -> None:
    body = {"chunk_hashes": [GOOD], "lookup_id": lookup_id}
    assert stage.send("prefetch", json.dumps(body).encode()) == (400, REQUIRED["prefetch"])
    assert stage.send("prefetch", json.dumps({"chunk_hashes": [GOOD]}).encode()) == (400, REQUIRED["prefetch"])


DEEP = b'{"chunk_hashes":["1"],"lookup_id":"x","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not JSON"),
        (b"hello", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "an array"),
        (b"null", "null"),
        (b"7", "a number"),
        (b"true", "a boolean"),
        (b'"text"', "a text"),
        (b'{"chunk_hashes":["1"],"lookup_id":"x"} trailing', "not JSON"),
        (b'{"chunk_hashes":["1"],"lookup_id":"\xff"}', "UnicodeDecodeError"),
        (b'{"chunk_hashes":["1"],"chunk_hashes":["2"],"lookup_id":"x"}', "duplicate key 'chunk_hashes'"),
        (b'{"chunk_hashes":["1"],"lookup_id":"x","a":NaN}', "NaN"),
        (b'{"chunk_hashes":["1"],"lookup_id":"\\ud800"}', "not JSON"),
        (DEEP, ""),
        (b'{"chunk_hashes":["1"],"lookup_id":"x","a":[[[[[[[[[]]]]]]]]]}', "levels deep"),
        (b'{"chunk_hashes":"1","lookup_id":"x"}', "chunk_hashes must be a list of texts, not a text"),
        (b'{"chunk_hashes":5,"lookup_id":"x"}', "not a number"),
        (b'{"chunk_hashes":{"a":1},"lookup_id":"x"}', "not an object"),
        (b'{"chunk_hashes":["1",2],"lookup_id":"x"}', "chunk_hashes[1] must be a text, not a number"),
        (b'{"chunk_hashes":["1",null],"lookup_id":"x"}', "chunk_hashes[1] must be a text, not null"),
        (b'{"chunk_hashes":["1"],"lookup_id":5}', "lookup_id"),
        (b'{"chunk_hashes":["1"],"lookup_id":"%s"}' % (b"x" * 1025), "lookup_id"),
        (b'{"chunk_hashes":["1"],"lookup_id":"x","sources":["Cupboard"]}', "sources[0]: 'Cupboard' is not a tier"),
        (b'{"chunk_hashes":["1"],"lookup_id":"x","ttl_ms":0}', "ttl_ms"),
        (b'{"chunk_hashes":["1"],"lookup_id":"x","ttl_ms":1.5}', "ttl_ms"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, bytes) else "",
)
def test_what_is_no_command_is_refused_by_name(stage: Stage, content: bytes, told: str) -> None:
    status, body = stage.send("prefetch", content)
    assert status == 400, body
    assert told in body["error"]
    assert body["code"] in ("invalid", "undecodable", "over_limit")


@pytest.mark.parametrize(
    "text",
    [
        *("0x3f", "3f ", " 3f", "+3f", "3_f", "-0", "00", "03f", "--1", "g", "", "3f\n", "٣", "1,2", ","),
        *("1" * 17, "f" * 63, "f" * 65, "-8000000000000001", "-ffffffffffffffff"),
    ],
)
def test_hashes_are_strict(stage: Stage, text: str) -> None:
    status, body = stage.send("evict", json.dumps({"chunk_hashes": [GOOD, text]}).encode())
    assert status == 400
    assert "chunk_hashes[1]" in body["error"]


@pytest.mark.parametrize(
    ("locations", "told"),
    [
        (["LocalCPUBackend", "Attic"], "locations[1]: 'Attic' is not a tier"),
        ([], "locations is empty"),
        ("LocalCPUBackend", "must be a list"),
        ([3], "locations[0] must be a text"),
    ],
)
def test_unknown_locations_are_named(stage: Stage, locations: Any, told: str) -> None:
    status, body = stage.send("evict", json.dumps({"chunk_hashes": [GOOD], "locations": locations}).encode())
    assert status == 400
    assert told in body["error"]


def test_too_many_hashes(stage: Stage) -> None:
    content = json.dumps({"chunk_hashes": ["1"] * (MAX_HASHES + 1)}).encode()
    status, body = stage.send("evict", content)
    assert status == 400
    assert "65,537" in body["error"]


def test_a_body_of_fifty_megabytes_is_not_even_read(stage: Stage) -> None:
    status, body = stage.send("evict", b'{"chunk_hashes":["' + b"1" * 50_000_000 + b'"]}')
    assert status == 413
    assert "limit" in body["error"]


def test_nor_one_that_does_not_say_how_large_it_is(stage: Stage) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(2 * MAX_BODY // 65_536):
            yield b" " * 65_536

    answer = stage.facade.http.post("/memory/evict", content=chunks())
    assert answer.status_code == 413


def test_a_client_that_hangs_up_in_the_middle_of_its_body(stage: Stage) -> None:
    with socket.create_connection((stage.facade.host, stage.facade.port), timeout=10) as client:
        client.sendall(b"POST /memory/evict HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert stage.facade.http.get("/healthz").status_code == 200
