"""The drain thread against a server that fails on command: order, repeats, holes, and what a stop leaves."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvbus.errors import BusError, BusFull, BusRefused, BusUnavailable, ConfigError, Fenced, Stopped
from kvbus.protocol import RequestFinished, decode_entry
from kvbus.protocol.codec import Fields
from kvbus.settings import Settings
from publisher import FinishedRequest, Publisher
from tests.servers import eventually


class FakeBus:
    """A server in memory. `trouble` is raised by every call; `lost_replies` counts appends that are applied first."""

    def __init__(self) -> None:
        self.stream: list[Fields] = []
        self.trouble: BusError | None = None
        self.lost_replies = 0
        self.hang: threading.Event | None = None
        self.epoch = 0
        self.next_seq = -1
        self.retired = False
        self.appends = 0
        self.clock_ms = 1_700_000_000_000
        self.stats: Mapping[str, int | float] = {}
        self.threads: set[int] = set()
        self.hash_fingerprint = "builtin/256/1"
        self.others: dict[str, str] = {}

    def _check(self) -> None:
        self.threads.add(threading.get_ident())
        if self.hang is not None and not self.hang.wait(60):
            raise BusUnavailable("nobody answered")
        if self.trouble is not None:
            raise self.trouble

    def claim(self) -> None:
        self._check()

    def registered_epoch(self) -> int:
        self._check()
        return self.epoch

    def register(self, least_epoch: int, next_seq: int) -> int:
        self._check()
        self.epoch = max(self.epoch + 1, least_epoch)
        return self.epoch

    def beat(self, epoch: int, next_seq: int) -> None:
        self._check()
        self.next_seq = next_seq

    def append(self, entries: Sequence[Fields], meanwhile: Callable[[], None]) -> None:
        self.appends += 1
        if self.appends % 3:
            meanwhile()
        self._check()
        self.stream.extend(entries)
        if self.lost_replies:
            self.lost_replies -= 1
            raise BusUnavailable("the reply was lost")

    def write_stats(self, counters: Mapping[str, int | float]) -> None:
        self.stats = counters

    def other_fingerprints(self) -> Mapping[str, str]:
        return self.others

    def risky_eviction(self) -> str | None:
        return None

    def retire(self, epoch: int, next_seq: int) -> None:
        self._check()
        self.next_seq = next_seq
        self.retired = True

    def now_ms(self) -> int:
        return self.clock_ms

    def close(self) -> None:
        pass

    def interrupt(self) -> None:
        if self.hang is not None:
            self.trouble = BusUnavailable("closed")
            self.hang.set()

    def read(self) -> list[RequestFinished]:
        messages = []
        for fields in self.stream:
            message = decode_entry("1-1", fields).message
            assert isinstance(message, RequestFinished)
            messages.append(message)
        return messages


def read(messages: Sequence[RequestFinished]) -> tuple[list[str], int, int]:
    """A reader's rule: (request ids delivered, repeats ignored, events missing)."""
    delivered, repeats, missing = [], 0, 0
    epoch, expected = -1, 0
    for message in messages:
        if message.epoch > epoch:
            epoch, expected = message.epoch, 0
        if message.epoch < epoch or message.seq < expected:
            repeats += 1
            continue
        missing += message.seq - expected
        expected = message.seq + 1
        delivered.append(message.request_id)
    return delivered, repeats, missing


def request(number: int, **values: Any) -> FinishedRequest:
    return FinishedRequest(**{"request_id": f"r{number}", "instance": "i", "reason": "stop", **values})


def names(first: int, last: int) -> list[str]:
    return [f"r{number}" for number in range(first, last)]


@pytest.fixture
def bus() -> FakeBus:
    return FakeBus()


@contextmanager
def running(bus: FakeBus, **settings: Any) -> Iterator[Publisher]:
    publisher = Publisher(Settings(**settings), name="i/publisher", instance="i", bus=bus)
    publisher.start()
    try:
        yield publisher
    finally:
        if bus.hang is not None:
            bus.hang.set()
        publisher.close()
        assert "kvbus-publisher" not in {thread.name for thread in threading.enumerate()}


def test_everything_in_order_and_one_thread_talks(bus: FakeBus) -> None:
    with running(bus, batch_events=8) as publisher:
        assert all(publisher.publish(request(number)) for number in range(100))
        assert publisher.close()
    assert read(bus.read()) == (names(0, 100), 0, 0)
    assert len(bus.threads) == 1
    assert bus.appends < 100
    assert (bus.retired, bus.next_seq, bus.stats["events_sent"]) == (True, 100, 100)
    counters = publisher.counters
    assert counters.get("events_accepted") == counters.get("events_sent") == 100
    assert counters.get("events_dropped") == 0


def test_what_comes_before_the_server_is_there_waits(bus: FakeBus) -> None:
    bus.trouble = BusUnavailable("not there")
    with running(bus) as publisher:
        for number in range(20):
            publisher.publish(request(number))
        eventually(lambda: publisher.counters.get("errors_bus_unavailable") >= 2)
        bus.trouble = None
        eventually(lambda: publisher.counters.get("events_sent") == 20)
    assert read(bus.read()) == (names(0, 20), 0, 0)


@pytest.mark.parametrize("trouble", [BusUnavailable("away"), BusFull("maxmemory"), BusRefused("WRONGTYPE")])
def test_trouble_in_the_middle_costs_nothing(bus: FakeBus, trouble: BusError) -> None:
    with running(bus, batch_events=4) as publisher:
        for number in range(300):
            publisher.publish(request(number))
            if number == 100:
                eventually(lambda: publisher.counters.get("events_sent") > 0)
                bus.trouble = trouble
            if number == 200:
                eventually(lambda: publisher.counters.get("retries") >= 2)
                bus.trouble = None
        assert publisher.close()
    assert read(bus.read()) == (names(0, 300), 0, 0)
    assert publisher.counters.get(f"errors_{trouble.code}") >= 2


def test_a_lost_reply_gives_repeats_with_the_same_ids_and_readers_drop_them(bus: FakeBus) -> None:
    with running(bus, batch_events=16) as publisher:
        publisher.publish(request(0))
        eventually(lambda: publisher.counters.get("events_sent") == 1)
        bus.lost_replies = 3
        for number in range(1, 40):
            publisher.publish(request(number))
        assert publisher.close()
    delivered, repeats, missing = read(bus.read())
    assert (delivered, missing) == (names(0, 40), 0)
    assert repeats > 0
    assert len({fields[b"id"] for fields in bus.stream}) == 40


def test_drops_equal_the_holes_that_a_reader_sees(bus: FakeBus) -> None:
    with running(bus, buffer_events=50) as publisher:
        publisher.publish(request(0))
        eventually(lambda: publisher.counters.get("events_sent") == 1)
        bus.trouble = BusUnavailable("away")
        accepted = [publisher.publish(request(number)) for number in range(1, 500)]
        assert not all(accepted)
        bus.trouble = None
        eventually(lambda: publisher.counters.get("buffer_events") == 0)
        assert publisher.publish(request(500))
        assert publisher.close()
    delivered, repeats, missing = read(bus.read())
    assert repeats == 0
    assert missing == publisher.counters.get("events_dropped") == accepted.count(False)
    assert delivered == ["r0", *(f"r{n + 1}" for n, taken in enumerate(accepted) if taken), "r500"]


def test_an_event_that_cannot_go_on_the_bus_is_counted_and_leaves_a_hole(bus: FakeBus) -> None:
    with running(bus) as publisher:
        publisher.publish(request(0))
        publisher.publish(request(1, chunk_hashes=("no hash",)))
        publisher.publish(request(2, context={"a": "x" * 5000}))
        assert publisher.close(), "what was refused is not undelivered"
    assert read(bus.read()) == (["r0", "r2"], 0, 1)
    assert publisher.counters.get("events_dropped_invalid") == publisher.counters.get("events_dropped") == 1
    assert publisher.counters.get("events_mended") == 1


def test_hashes_that_come_later_are_made_in_the_drain_thread(bus: FakeBus) -> None:
    made_in: list[int] = []

    def later() -> list[int]:
        made_in.append(threading.get_ident())
        return [1, 2]

    def fails() -> list[int]:
        raise RuntimeError("no tokens")

    with running(bus) as publisher:
        publisher.publish(request(0, chunk_hashes=None, hashes_later=later))
        publisher.publish(request(1, chunk_hashes=None, hashes_later=fails))
        publisher.publish(request(2, chunk_hashes=None))
        publisher.close()
    assert [message.chunk_hashes for message in bus.read()] == [(1, 2), (), ()]
    assert set(made_in) == bus.threads
    assert publisher.counters.get("hashes_failed") == 1


def test_finished_at_is_the_servers_time_when_publish_was_called(bus: FakeBus) -> None:
    bus.hang = threading.Event()
    with running(bus) as publisher:
        publisher.publish(request(0))
        time.sleep(0.2)  # this long it waits in the buffer
        bus.hang.set()
        publisher.close()
    assert bus.clock_ms - 2000 < bus.read()[0].finished_at_ms <= bus.clock_ms - 200


def test_epochs_rise_from_life_to_life(bus: FakeBus) -> None:
    epochs = []
    for number in range(3):
        with running(bus) as publisher:
            publisher.publish(request(number))
            publisher.close()
        epochs.append(bus.read()[-1].epoch)
    assert epochs == sorted(set(epochs))
    assert read(bus.read()) == (names(0, 3), 0, 0)


def test_a_registration_whose_reply_was_lost_keeps_its_epoch(bus: FakeBus, monkeypatch: pytest.MonkeyPatch) -> None:
    register = FakeBus.register
    calls = []

    def lost_once(self: FakeBus, least_epoch: int, next_seq: int) -> int:
        calls.append(register(self, least_epoch, next_seq))
        raise BusUnavailable("the reply was lost")

    monkeypatch.setattr(FakeBus, "register", lost_once)
    with running(bus) as publisher:
        publisher.publish(request(0))
        assert publisher.close()
    assert len(calls) == 1
    assert bus.read()[0].epoch == calls[0] == bus.epoch


def test_a_name_that_another_process_has_is_waited_for(bus: FakeBus) -> None:
    bus.trouble = Fenced("another process has it")
    with running(bus) as publisher:
        publisher.publish(request(0))
        eventually(lambda: publisher.counters.get("errors_fenced") >= 2)
        assert bus.stream == []
        bus.trouble = None
        eventually(lambda: publisher.counters.get("events_sent") == 1)


def test_superseded_in_the_middle_goes_on_under_a_higher_epoch(bus: FakeBus) -> None:
    with running(bus, heartbeat_ms=10, live_ms=100) as publisher:
        publisher.publish(request(0))
        eventually(lambda: publisher.counters.get("events_sent") == 1)
        first = bus.epoch
        bus.trouble = Fenced("superseded")
        eventually(lambda: publisher.counters.get("errors_fenced") >= 1)
        bus.epoch += 1000  # another process's, which has ended since
        publisher.publish(request(1))
        bus.trouble = None
        eventually(lambda: publisher.counters.get("events_sent") == 2)
    assert [message.epoch for message in bus.read()] == [first, first + 1001]


def test_close_without_spool_counts_what_it_could_not_deliver(bus: FakeBus) -> None:
    with running(bus, stop_ms=600) as publisher:
        publisher.publish(request(0))
        eventually(lambda: publisher.counters.get("events_sent") == 1)
        bus.trouble = BusUnavailable("away")
        for number in range(1, 200):
            publisher.publish(request(number))
        assert not publisher.close()
        assert not publisher.close(), "the same answer again"
    counters = publisher.counters
    assert counters.get("events_dropped_at_close") == 199
    assert counters.get("events_accepted") == counters.get("events_sent") + counters.get("events_dropped_at_close")


def test_close_ends_a_call_that_hangs_and_says_what_is_in_doubt(bus: FakeBus) -> None:
    with running(bus, stop_ms=300, batch_events=4) as publisher:
        publisher.publish(request(0))
        eventually(lambda: publisher.counters.get("events_sent") == 1)
        bus.hang = threading.Event()
        for number in range(1, 10):
            publisher.publish(request(number))
        eventually(lambda: bus.appends >= 2)
        assert not publisher.close()
    assert publisher.counters.get("events_dropped_at_close") == 9
    assert 1 <= publisher.counters.get("events_in_doubt") <= 4


def test_after_close_nothing_is_accepted(bus: FakeBus) -> None:
    with running(bus) as publisher:
        pass
    assert not publisher.publish(request(0))
    assert publisher.counters.get("events_dropped_closed") == 1
    with pytest.raises(Stopped):
        publisher.start()


def test_closed_without_ever_being_started(bus: FakeBus) -> None:
    publisher = Publisher(Settings(), name="p", instance="i", bus=bus)
    publisher.publish(request(0))
    assert not publisher.close()
    assert publisher.counters.get("events_dropped_at_close") == 1
    assert Publisher(Settings(), name="p", instance="i", bus=bus).close()


@pytest.mark.parametrize("name", ["", "a b", "a{b}", "ü", "x" * 300, "a\n"])
def test_a_name_that_cannot_be_part_of_a_key(name: str, bus: FakeBus) -> None:
    with pytest.raises(ConfigError, match="publisher name"):
        Publisher(Settings(), name=name, instance="i", bus=bus)


# --- with a spool


def test_an_outage_goes_to_disk_and_comes_back_in_order(bus: FakeBus, tmp_path: Path) -> None:
    with running(bus, spool_dir=str(tmp_path), buffer_events=100) as publisher:
        publisher.publish(request(0))
        eventually(lambda: publisher.counters.get("events_sent") == 1)
        bus.trouble = BusUnavailable("away")
        for number in range(1, 1000):
            eventually(lambda: publisher.counters.get("buffer_events") < 90)
            assert publisher.publish(request(number))
        eventually(lambda: publisher.counters.get("events_spooled") == 999)
        bus.trouble = None
        eventually(lambda: publisher.counters.get("events_sent") == 1000)
        publisher.publish(request(1000))
        assert publisher.counters.get("spool_bytes") == 0, "told again once it is empty, not only while it grows"
        assert publisher.close()
    assert read(bus.read()) == (names(0, 1001), 0, 0)
    assert publisher.counters.get("events_replayed") == 999
    assert list(tmp_path.rglob("*.seg")) == []


def test_what_the_disk_does_not_give_back_is_told(bus: FakeBus, tmp_path: Path) -> None:
    with running(bus, spool_dir=str(tmp_path)) as publisher:
        publisher.publish(request(0))
        eventually(lambda: publisher.counters.get("events_sent") == 1)
        bus.trouble = BusUnavailable("away")
        for number in range(1, 10):
            publisher.publish(request(number))
        eventually(lambda: publisher.counters.get("events_spooled") == 9)
        with next(tmp_path.rglob("*.seg")).open("r+b") as file:
            file.seek(8)
            file.write(b"\xff" * 8)
        bus.trouble = None
        eventually(lambda: publisher.counters.get("spool_corrupt_bytes") > 0)
        assert publisher.counters.get("spool_bytes") == 0
        publisher.publish(request(10))
        assert publisher.close()
    assert read(bus.read()) == ([*names(0, 1), *names(10, 11)], 0, 9)


def test_a_lost_reply_before_the_outage_is_repeated_from_disk(bus: FakeBus, tmp_path: Path) -> None:
    with running(bus, spool_dir=str(tmp_path)) as publisher:
        publisher.publish(request(0))
        eventually(lambda: publisher.counters.get("events_sent") == 1)
        bus.lost_replies = 2
        for number in range(1, 50):
            publisher.publish(request(number))
        eventually(lambda: publisher.counters.get("events_sent") == 50)
        publisher.close()
    delivered, repeats, missing = read(bus.read())
    assert (delivered, missing) == (names(0, 50), 0)
    assert repeats > 0
    assert len({fields[b"id"] for fields in bus.stream}) == 50


def test_a_successor_sends_the_spool_first_under_its_own_epoch(bus: FakeBus, tmp_path: Path) -> None:
    bus.trouble = BusUnavailable("away")
    with running(bus, spool_dir=str(tmp_path)) as publisher:
        for number in range(100):
            publisher.publish(request(number))
        assert not publisher.close(), "on disk is not delivered"
        assert publisher.counters.get("events_dropped") == 0
    bus.trouble = None
    with running(bus, spool_dir=str(tmp_path)) as publisher:
        for number in range(100, 150):
            publisher.publish(request(number))
        assert publisher.close()
    messages = bus.read()
    assert read(messages) == (names(0, 150), 0, 0)
    assert len({message.epoch for message in messages}) == 2


def test_three_lives_without_a_server(bus: FakeBus, tmp_path: Path) -> None:
    bus.trouble = BusUnavailable("away")
    for life in range(3):
        with running(bus, spool_dir=str(tmp_path)) as publisher:
            for number in range(life * 10, life * 10 + 10):
                publisher.publish(request(number))
    bus.trouble = None
    with running(bus, spool_dir=str(tmp_path)) as publisher:
        eventually(lambda: publisher.counters.get("events_sent") == 30)
    messages = bus.read()
    assert read(messages) == (names(0, 30), 0, 0)
    assert len({message.epoch for message in messages}) == 3


def test_a_clock_that_ran_behind_does_not_hide_the_spool_from_readers(bus: FakeBus, tmp_path: Path) -> None:
    with running(bus) as publisher:  # on another machine, without this spool
        publisher.publish(request(0))
        publisher.close()
    bus.clock_ms -= 3_600_000
    bus.trouble = BusUnavailable("away")
    with running(bus, spool_dir=str(tmp_path)) as publisher:
        for number in range(1, 20):
            publisher.publish(request(number))
        eventually(lambda: publisher.counters.get("events_spooled") == 19)
        bus.trouble = None
        publisher.publish(request(20))
        assert publisher.close()
    assert read(bus.read()) == (names(0, 21), 0, 0)


def test_a_full_spool_then_a_full_buffer_then_holes(bus: FakeBus, tmp_path: Path) -> None:
    bus.trouble = BusUnavailable("away")
    settings: dict[str, Any] = {"spool_dir": str(tmp_path), "spool_cap_bytes": 40_000, "buffer_events": 200}
    with running(bus, **settings) as publisher:
        accepted = 0
        for number in range(5_000):
            accepted += publisher.publish(request(number))
            if number % 100 == 0:
                time.sleep(0.002)
        eventually(lambda: publisher.counters.get("spool_refused") > 0)
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.seg")) <= 40_000
        bus.trouble = None
        eventually(lambda: publisher.counters.get("events_sent") == accepted)
        publisher.publish(request(5_000))
        assert publisher.close()
    delivered, repeats, missing = read(bus.read())
    assert (len(delivered), repeats) == (accepted + 1, 0)
    assert missing == publisher.counters.get("events_dropped") == 5_000 - accepted > 0


def test_a_disk_that_fails_leaves_the_buffer(bus: FakeBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bus.trouble = BusUnavailable("away")
    with running(bus, spool_dir=str(tmp_path), spool_fsync="batch") as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            for number in range(50):
                publisher.publish(request(number))
            eventually(lambda: publisher.counters.get("spool_errors") >= 2)
        bus.trouble = None
        assert publisher.close()
    assert read(bus.read()) == (names(0, 50), 0, 0)


def test_a_spool_that_another_process_holds_is_waited_for(bus: FakeBus, tmp_path: Path) -> None:
    with (
        running(bus, spool_dir=str(tmp_path)) as first,
        running(bus, spool_dir=str(tmp_path)) as second,
    ):
        second.publish(request(0))
        first.close()
        eventually(lambda: second.counters.get("events_sent") == 1)


def test_a_spool_directory_that_cannot_be_used(bus: FakeBus, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    publisher = Publisher(Settings(spool_dir=str(tmp_path / "file")), name="p", instance="i", bus=bus)
    with pytest.raises(ConfigError, match="spool_dir"):
        publisher.start()


def test_a_spool_that_cannot_be_opened_does_not_keep_the_events_from_the_server(
    bus: FakeBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("publisher.drain._SPOOL_TRIES", 2)
    (tmp_path / "default" / "i%2Fpublisher" / "lock").mkdir(parents=True)  # a directory where a file should be
    with running(bus, spool_dir=str(tmp_path)) as publisher:
        publisher.publish(request(0))
        eventually(lambda: publisher.counters.get("events_sent") == 1)
        assert publisher.counters.get("spool_errors") == 2


def test_a_disk_that_is_full_when_the_epoch_is_noted(
    bus: FakeBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with running(bus, spool_dir=str(tmp_path)) as publisher:
        publisher.publish(request(0))
        eventually(lambda: publisher.counters.get("events_sent") == 1)
        assert publisher.counters.get("spool_errors") == 1


# --- forks and threads


def test_a_forked_child_publishes_nothing_and_does_not_disturb_the_parent(bus: FakeBus, tmp_path: Path) -> None:
    with running(bus, spool_dir=str(tmp_path)) as publisher:
        publisher.publish(request(0))
        eventually(lambda: publisher.counters.get("events_sent") == 1)
        pid = os.fork()
        if pid == 0:
            refused = not publisher.publish(request(99)) and publisher.counters.get("events_dropped_closed") == 1
            os._exit(0 if refused and not publisher.close() else 1)
        assert os.waitpid(pid, 0)[1] == 0
        publisher.publish(request(1))
        assert publisher.close()
    assert read(bus.read()) == (names(0, 2), 0, 0)


def test_many_threads_publish_and_close_races_them(bus: FakeBus) -> None:
    accepted: list[int] = []

    def work(publisher: Publisher) -> None:
        accepted.append(sum(publisher.publish(request(number)) for number in range(1000)))

    with running(bus) as publisher:
        threads = [threading.Thread(target=work, args=(publisher,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert publisher.close()
        for thread in threads:
            thread.join()
    delivered, repeats, missing = read(bus.read())
    assert (len(delivered), repeats, missing) == (sum(accepted), 0, 0)
    assert publisher.counters.get("events_dropped") == 4000 - sum(accepted)
