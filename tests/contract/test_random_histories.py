"""Whatever happens to a stream, a reader accounts for every entry: delivered once and in order, or told as missing."""

from __future__ import annotations

import uuid

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbus.streams.log import Log
from kvbus.streams.position import Gap, GapKind
from kvbus.streams.subscription import Subscription
from tests.servers import Server

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 12)),
        st.tuples(st.just("read"), st.integers(1, 6)),
        st.tuples(st.just("trim"), st.integers(0, 8)),
        st.tuples(st.just("delete"), st.integers(0, 30)),
        st.tuples(st.just("resume"), st.just(0)),
        st.tuples(st.just("lose"), st.integers(0, 12)),
    ),
    max_size=25,
)
RUNS = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


class History:
    """A stream that things happen to, and its reader."""

    def __init__(self, server: Server) -> None:
        self.bus = server.bus(f"t-{uuid.uuid4().hex[:16]}")
        self.key = self.bus.keys.events
        self.reader = Subscription.from_start(self.bus, self.key)
        self.written = 0
        self.appended = 0
        """In the present history."""
        self.histories_lost = 0
        self.seen: list[int] = []
        self.gaps: list[Gap] = []

    def append(self, count: int) -> None:
        batch = [{b"id": b"%d" % (self.written + number)} for number in range(count)]
        Log(self.bus).append_batch(self.key, batch)
        self.written += count
        self.appended += count

    def read(self, count: int) -> bool:
        """False when there is no more to come."""
        self.reader.check_now()
        batch = self.reader.read(block_ms=0, count=count)
        self.seen += [int(fields[b"id"]) for _, fields in batch.entries]
        if batch.gap is not None:
            self.gaps.append(batch.gap)
        return bool(batch.entries or batch.gap)

    def trim(self, left: int) -> None:
        self.bus.client.xtrim(self.key, maxlen=left, approximate=False)

    def delete(self, place: int) -> None:
        ids = [entry_id for entry_id, _ in self.bus.client.xrange(self.key)]
        if ids:
            self.bus.client.xdel(self.key, ids[place % len(ids)])

    def resume(self, _: int) -> None:
        """Another process goes on from the saved place."""
        self.reader = Subscription(self.bus, self.key, self.reader.position)

    def lose(self, fresh: int) -> None:
        """The server forgets the stream, and perhaps gets a new one before the reader looks again."""
        if self.reader.position.entries > 0 and self.appended:
            self.histories_lost += 1
        self.bus.client.delete(self.key)
        self.appended = 0
        if fresh:
            self.append(fresh)

    def finish(self) -> None:
        self.append(1)
        for _ in range(1_000):
            if not self.read(7):
                return
        raise AssertionError("the reader spins")


@RUNS
@given(steps=STEPS)
def test_every_entry_is_accounted_for(server: Server, steps: list[tuple[str, int]]) -> None:
    history = History(server)
    for name, argument in steps:
        if name != "lose":
            getattr(history, name)(argument)
    history.finish()
    assert history.seen == sorted(set(history.seen))
    assert history.seen[-1] == history.written - 1
    assert {gap.kind for gap in history.gaps} <= {GapKind.TRIMMED}
    assert len(history.seen) + sum(gap.missed or 0 for gap in history.gaps) == history.written


@RUNS
@given(steps=STEPS)
def test_lost_history_is_told_and_nothing_is_delivered_twice(server: Server, steps: list[tuple[str, int]]) -> None:
    history = History(server)
    for name, argument in steps:
        # Trimming a new history until its counters fit the old place is the one case that no counter can show.
        if name not in ("trim", "delete"):
            getattr(history, name)(argument)
    history.finish()
    assert history.seen == sorted(set(history.seen))
    assert history.seen[-1] == history.written - 1
    told = [gap.kind for gap in history.gaps].count(GapKind.HISTORY_LOST)
    assert told == len(history.gaps)
    assert (told > 0) == (history.histories_lost > 0)
    assert told <= history.histories_lost
