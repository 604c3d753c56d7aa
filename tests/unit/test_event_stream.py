"""Reading events: every publisher's in order, repeats dropped, holes and gaps told, the place kept."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus import event_stream
from kvbus.aio import AsyncKVBus
from kvbus.client import KVBus
from kvbus.errors import BusUnavailable
from kvbus.event_stream import Delivery, EventStream, Hole, SequenceTracker
from kvbus.protocol import FinishReason, Ping, RequestFinished, WorkerStarted, encode_entry, new_message_id
from kvbus.streams.connection import Bus
from kvbus.streams.log import Log
from kvbus.streams.registry import load_reader
from kvbus.testing import fake_bus
from tests.servers import eventually


@pytest.fixture
def bus() -> Bus:
    return fake_bus(block_ms=20)


def finished(seq: int, *, epoch: int = 1, publisher: str = "p") -> RequestFinished:
    return RequestFinished(
        request_id=f"{publisher}-{epoch}-{seq}",
        instance="i",
        reason=FinishReason.STOP,
        publisher=publisher,
        epoch=epoch,
        seq=seq,
        finished_at_ms=1,
    )


def publish(bus: Bus, *events: RequestFinished | WorkerStarted | Ping) -> list[str]:
    log = Log(bus)
    return [log.append(bus.keys.events, encode_entry(event, message_id=new_message_id())) for event in events]


def numbers(deliveries: list[Delivery]) -> list[int]:
    return [delivery.event.seq for delivery in deliveries if isinstance(delivery.event, RequestFinished)]


# -- numbers ---------------------------------------------------------------------------------------------------


def taken(events: list[tuple[str, int, int]]) -> list[tuple[tuple[str, int, int], Hole | None]]:
    tracker = SequenceTracker()
    found = []
    for publisher, epoch, seq in events:
        fresh, hole = tracker.take(finished(seq, epoch=epoch, publisher=publisher))
        if fresh:
            found.append(((publisher, epoch, seq), hole))
    return found


@given(
    st.lists(
        st.tuples(st.sampled_from("pq"), st.integers(min_value=1, max_value=3), st.integers(min_value=0, max_value=6)),
        max_size=40,
    )
)
def test_what_is_delivered_grows_and_what_is_missing_is_told(events: list[tuple[str, int, int]]) -> None:
    """A model that remembers everything: an event is new if it is beyond all that its publisher has delivered."""
    found = taken(events)
    for publisher in "pq":
        ours = [(epoch, seq) for name, epoch, seq in events if name == publisher]
        running: list[tuple[int, int]] = []
        for place in ours:
            if not running or place > running[-1]:
                running.append(place)
        theirs = [((epoch, seq), hole) for (name, epoch, seq), hole in found if name == publisher]
        assert [place for place, _ in theirs] == running
        for number, ((epoch, seq), hole) in enumerate(theirs):
            if number == 0:
                assert hole is None
                continue
            before_epoch, before_seq = running[number - 1]
            first = before_seq + 1 if epoch == before_epoch else 0
            assert hole == (Hole(publisher, epoch, first, seq - 1) if first < seq else None)


@given(st.sets(st.integers(min_value=1, max_value=60)), st.integers(min_value=61, max_value=70))
def test_delivered_and_missed_together_are_all_that_was_published(lost: set[int], last: int) -> None:
    sent = [0, *(seq for seq in range(1, last) if seq not in lost), last]
    found = taken([("p", 1, seq) for seq in sent])
    assert sum(hole.missed for _, hole in found if hole is not None) == len(lost)
    told = {seq for _, hole in found if hole is not None for seq in range(hole.first, hole.last + 1)}
    assert told == lost


@given(st.lists(st.integers(min_value=0, max_value=9), max_size=30), st.integers(min_value=0, max_value=30))
def test_a_tracker_goes_on_from_its_saved_places(seqs: list[int], cut: int) -> None:
    whole, first = SequenceTracker(), SequenceTracker()
    wanted = [whole.take(finished(seq)) for seq in seqs]
    before = [first.take(finished(seq)) for seq in seqs[:cut]]
    second = SequenceTracker(first.places)
    assert before + [second.take(finished(seq)) for seq in seqs[cut:]] == wanted
    assert second.places == whole.places


def test_publishers_that_were_heard_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "KEEP_PUBLISHERS", 3)
    tracker = SequenceTracker()
    for name in ("a", "b", "c", "a", "d"):
        tracker.take(finished(len(tracker.places), publisher=name, epoch=1 + (name == "a" and bool(tracker.places))))
    assert [place.publisher for place in tracker.places] == ["c", "a", "d"]


# -- the stream ------------------------------------------------------------------------------------------------


def test_where_to_begin(bus: Bus) -> None:
    ids = publish(bus, finished(0), finished(1))
    with (
        EventStream(bus, reader=None, start="start") as all_of_them,
        EventStream(bus, reader=None, start=ids[0]) as behind_the_first,
        EventStream(bus, reader=None, start="end") as new_ones,
    ):
        publish(bus, finished(2))
        assert numbers(list(all_of_them.read())) == [0, 1, 2]
        assert numbers(list(behind_the_first.read())) == [1, 2]
        assert numbers(list(new_ones.read())) == [2]


def test_repeats_are_dropped_and_holes_told(bus: Bus) -> None:
    with EventStream(bus, reader=None, start="start") as stream:
        publish(bus, *(finished(seq) for seq in (0, 1, 0, 1, 2, 5, 4)))
        found = list(stream.read())
    assert numbers(found) == [0, 1, 2, 5]
    assert [delivery.hole for delivery in found] == [None, None, None, Hole("p", 1, 3, 4)]
    assert (stream.counters.get("repeats"), stream.counters.get("holes"), stream.counters.get("events")) == (3, 2, 4)


def test_what_is_no_event_is_set_aside_once_for_all_readers(bus: Bus) -> None:
    with EventStream(bus, reader="a", start="start") as one, EventStream(bus, reader="b", start="start") as other:
        publish(bus, finished(0), Ping(), finished(1))
        Log(bus).append(bus.keys.events, {b"type": b"request.finished", b"body": b"\xc1"})
        publish(bus, finished(2))
        for stream in (one, other):
            assert numbers(list(stream.read())) == [0, 1, 2]
            assert stream.counters.get("refused") == 2
    assert bus.client.xlen(bus.keys.dead) == 2


def test_a_named_reader_goes_on_behind_what_it_saved(bus: Bus) -> None:
    publish(bus, *(finished(seq) for seq in range(6)))
    with EventStream(bus, reader="memory", start="start") as stream:
        for delivery in stream.read():
            if numbers([delivery]) == [2]:
                break
        stream.save()
        assert stream.position == load_reader(bus, "memory").position  # type: ignore[union-attr]
    with EventStream(bus, reader="memory", start="start") as stream:
        publish(bus, finished(1), finished(8))
        found = list(stream.read())
    assert numbers(found) == [3, 4, 5, 8]
    assert found[-1].hole == Hole("p", 1, 6, 7), "its numbers were saved with its place"


def test_a_stop_in_the_middle_of_a_round_loses_nothing(bus: Bus) -> None:
    publish(bus, *(finished(seq) for seq in range(4)))
    with EventStream(bus, reader=None, start="start") as stream:
        assert numbers([next(stream.read())]) == [0]
        assert numbers(list(stream.read())) == [1, 2, 3]


def test_events_trimmed_before_they_were_read_are_told_with_the_next(bus: Bus) -> None:
    with EventStream(bus, reader=None, start="end") as stream:
        publish(bus, *(finished(seq) for seq in range(5)))
        bus.client.xtrim(bus.keys.events, maxlen=2, approximate=False)
        found: list[Delivery] = []
        while len(found) < 2:
            found += stream.read()
    assert numbers(found) == [3, 4]
    gaps = [delivery.gap for delivery in found]
    assert gaps[0] is not None
    assert (gaps[0].missed, gaps[1]) == (3, None)


def test_close_ends_the_iteration_from_another_thread(bus: Bus) -> None:
    seen: list[int] = []
    with EventStream(bus, reader=None, start="end") as stream:

        def read() -> None:
            for delivery in stream:
                seen.extend(numbers([delivery]))

        reading = threading.Thread(target=read)
        reading.start()
        publish(bus, finished(0))
        eventually(lambda: seen, what="an event")
        stream.close()
        reading.join(10)
        assert not reading.is_alive()
    assert seen == [0]


def test_a_place_that_cannot_be_saved_does_not_end_the_reading(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    save, failures = EventStream.save, [BusUnavailable("away")]

    def failing(stream: EventStream) -> None:
        if failures:
            raise failures.pop()
        save(stream)

    monkeypatch.setattr(EventStream, "save", failing)

    async def main() -> list[Delivery]:
        found: list[Delivery] = []
        with KVBus(bus=bus) as client:
            face = AsyncKVBus(client=client)
            try:
                async for delivery in face.events(reader="memory", start="start"):
                    found.append(delivery)
                    publish(bus, finished(len(found)))
                    if len(found) == 4:
                        break
            finally:
                await face.close()
        return found

    publish(bus, finished(0))
    assert numbers(asyncio.run(main())) == [0, 1, 2, 3]
    assert not failures
    eventually(lambda: load_reader(bus, "memory") is not None, what="a saved place")
