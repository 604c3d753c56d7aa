"""The events stream over HTTP: in order, resumable, and honest about what is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvbus.facade import events as facade_events
from kvbus.protocol.codec import encode_entry, new_message_id
from kvbus.protocol.events import FinishReason, RequestFinished
from kvbus.streams.connection import Bus
from tests.facade_kit import RunningFacade, Scene, scene
from tests.servers import Server, eventually


@pytest.fixture
def here(server: Server, namespace: str) -> Iterator[Scene]:
    with scene(server.settings(namespace, block_ms=100)) as made:
        yield made


def publish(bus: Bus, seq: int, publisher: str = "p") -> str:
    event = RequestFinished(
        request_id=f"r{seq}",
        instance="a",
        reason=FinishReason.STOP,
        chunk_hashes=(-1, 2),
        context={"session": "s1"},
        publisher=publisher,
        epoch=1,
        seq=seq,
        finished_at_ms=1,
    )
    entry_id: bytes = bus.client.xadd(bus.keys.events, encode_entry(event, message_id=new_message_id()))
    return entry_id.decode()


Frame = tuple[str, str, Any]
"""(id, event, data)"""


def parse(text: str) -> list[Frame]:
    frames = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in fields:
            frames.append((fields.get("id", ""), fields["event"], json.loads(fields["data"])))
    return frames


def read(facade: RunningFacade, last: str | None = None, **query: Any) -> list[Frame]:
    """All that comes within a moment."""
    headers = {"last-event-id": last} if last else {}
    answer = facade.http.get("/memory/events", params={"seconds": 0.5, **query}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return parse(answer.text)


def test_events_come_decoded_with_their_ids(here: Scene) -> None:
    bus = here.bus()
    ids = [publish(bus, seq) for seq in range(3)]
    frames = read(here.facade(), start="start")
    assert [(place, name, data["request_id"]) for place, name, data in frames] == [
        (ids[seq], "request.finished", f"r{seq}") for seq in range(3)
    ]
    assert frames[0][2]["chunk_hashes"] == ["-1", "2"]
    assert frames[0][2]["context"] == {"session": "s1"}


def test_without_a_place_only_what_is_new(here: Scene) -> None:
    bus = here.bus()
    publish(bus, 0)
    facade = here.facade()
    with facade.http.stream("GET", "/memory/events") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "retry: 1000"
        publish(bus, 1)
        told = next(line for line in lines if line.startswith("data: "))
    assert json.loads(told.removeprefix("data: "))["request_id"] == "r1"


def test_resumes_behind_the_last_one_seen(here: Scene) -> None:
    bus = here.bus()
    ids = [publish(bus, seq) for seq in range(5)]
    frames = read(here.facade(), last=ids[2])
    assert [place for place, _, _ in frames] == ids[3:]
    assert read(here.facade(), last=ids[4]) == []


def test_holes_are_told(here: Scene) -> None:
    bus = here.bus()
    for seq in (0, 1, 5):
        publish(bus, seq)
    names = [(name, data.get("first"), data.get("last")) for _, name, data in read(here.facade(), start="start")]
    assert names == [
        ("request.finished", None, None),
        ("request.finished", None, None),
        ("kvbus.hole", 2, 4),
        ("request.finished", None, None),
    ]


def test_a_place_that_was_trimmed_away_is_told(here: Scene) -> None:
    bus = here.bus()
    ids = [publish(bus, seq) for seq in range(5)]
    bus.client.xtrim(bus.keys.events, maxlen=2, approximate=False)
    frames = read(here.facade(), last=ids[0])
    assert [name for _, name, _ in frames] == ["kvbus.gap", "request.finished", "request.finished"]
    assert frames[0][2]["kind"] == "trimmed"


def test_a_place_of_another_history_is_told(here: Scene) -> None:
    bus = here.bus()
    first = publish(bus, 0)
    frames = read(here.facade(), last="9999999999999-0")
    assert [(place, name) for place, name, _ in frames] == [("", "kvbus.gap"), (first, "request.finished")]
    assert frames[0][2]["kind"] == "history_lost"


@pytest.mark.parametrize("place", ["1", "-", "1-", "end", "1-1-1", "1-99999999999999999999", "x"])
def test_a_place_that_is_none(here: Scene, place: str) -> None:
    answer = here.facade().http.get("/memory/events", headers={"last-event-id": place})
    assert answer.status_code == 400
    assert "last-event-id" in answer.json()["error"]


def test_entries_that_are_no_events_do_not_stop_it(here: Scene) -> None:
    bus = here.bus()
    bus.client.xadd(bus.keys.events, {"type": "nonsense", "body": b"\xff"})
    publish(bus, 0)
    assert [name for _, name, _ in read(here.facade(), start="start")] == ["request.finished"]


def test_streams_are_bounded_and_given_back(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facade_events, "MAX_STREAMS", 2)
    facade = here.facade()

    def stream_now() -> int:
        with facade.http.stream("GET", "/memory/events", params={"seconds": 0}) as answer:
            return answer.status_code

    with facade.http.stream("GET", "/memory/events"), facade.http.stream("GET", "/memory/events"):
        answer = facade.http.get("/memory/events")
        assert answer.status_code == 503
        assert answer.json()["code"] == "busy"
    eventually(lambda: stream_now() == 200, what="a stream is given back")


def test_keeps_the_connection_awake(here: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facade_events, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(facade_events, "BLOCK_MS", 50)
    with here.facade().http.stream("GET", "/memory/events") as answer:
        assert next(line for line in answer.iter_lines() if line.startswith(":")) == ": still here"


def test_rides_out_an_outage(start_server: Any, namespace: str) -> None:
    server = start_server("valkey", appendonly="yes")
    with scene(server.settings(namespace, block_ms=100)) as here:
        bus = here.bus()
        publish(bus, 0)
        facade = here.facade()
        with facade.http.stream("GET", "/memory/events", params={"start": "start"}, timeout=60) as answer:
            seen = _requests(answer)
            assert next(seen) == "r0"
            server.kill()
            server.start()
            publish(bus, 1)
            assert next(seen) == "r1"


def test_ends_when_the_facade_stops(here: Scene) -> None:
    facade = here.facade()
    with facade.http.stream("GET", "/memory/events", timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        facade.server.should_exit = True
        list(lines)


def _requests(answer: httpx.Response) -> Iterator[str]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))["request_id"]
