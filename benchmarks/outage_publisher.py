"""One publisher in a process of its own, at a steady rate, that tells its counters once a second.

    python -m benchmarks.outage_publisher '{"url": "redis://..", "name": "a", "life": 1, "rate": 200, ...}'

Ends when its standard input does: it flushes, tells its last numbers and whether all was delivered.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import time

import msgspec

from kvbus.settings import Settings
from publisher import FinishedRequest, Publisher

NAMESPACE = "outage"
HASHES = 100
TOLD_EVERY_S = 1.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one process does. life: which process of this name it is; rate: finished requests a second."""

    url: str
    name: str
    life: int
    rate: int
    buffer_events: int
    buffer_bytes: int
    spool_dir: str | None
    events_cap_bytes: int
    flush_s: float


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What it knows of itself. on_way: accepted events that reached the server or the disk; all before them, too."""

    published: int
    accepted: int
    dropped: int
    sent: int
    on_way: int
    waiting: int
    spool_bytes: int
    corrupt_bytes: int
    longest_ms: float
    """The longest that one call of publish() took so far."""
    done: bool = False
    delivered_all: bool = False


def request_id(name: str, life: int, number: int) -> str:
    return f"{name}/{life}/{number}"


def hashes_of(life: int, number: int) -> tuple[int, ...]:
    """The same for whoever asks, so that the reader can tell that what it got is what was published."""
    made = random.Random((life << 40) + number)
    return tuple(made.getrandbits(64) - 2**63 for _ in range(HASHES))


def main() -> int:
    """Publish until told to stop."""
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    logging.disable(logging.WARNING)  # what is said of an outage made on purpose
    stop = threading.Event()
    threading.Thread(target=_await_end, args=(stop,), name="stdin", daemon=True).start()
    settings = Settings(
        redis_url=plan.url,
        namespace=NAMESPACE,
        buffer_events=plan.buffer_events,
        buffer_bytes=plan.buffer_bytes,
        spool_dir=plan.spool_dir,
        events_cap_bytes=plan.events_cap_bytes,
    )
    publisher = Publisher(settings, name=plan.name, instance="outage")
    publisher.start()
    longest = _publish(publisher, plan, stop)
    delivered_all = publisher.close(plan.flush_s)
    _tell(publisher, longest, done=True, delivered_all=delivered_all)
    return 0


def _publish(publisher: Publisher, plan: Plan, stop: threading.Event) -> float:
    """Publish at the plan's rate; what a busy machine held up is made good. Returns the longest call in ms."""
    began = time.monotonic()
    tell_at = began + TOLD_EVERY_S
    number, longest = 0, 0.0
    while not stop.wait(max(0.0, began + number / plan.rate - time.monotonic())):
        finished = FinishedRequest(
            request_id=request_id(plan.name, plan.life, number),
            instance="outage",
            reason="stop",
            chunk_hashes=hashes_of(plan.life, number),
        )
        before = time.perf_counter()
        publisher.publish(finished)
        longest = max(longest, (time.perf_counter() - before) * 1000)
        number += 1
        if time.monotonic() >= tell_at:
            _tell(publisher, longest)
            tell_at += TOLD_EVERY_S
    return longest


def _tell(publisher: Publisher, longest_ms: float, *, done: bool = False, delivered_all: bool = False) -> None:
    get = publisher.counters.get
    told = Told(
        published=int(get("next_seq")),
        accepted=int(get("events_accepted")),
        dropped=int(get("events_dropped")),
        sent=int(get("events_sent")),
        on_way=int(get("events_sent") - get("events_replayed") + get("events_spooled")),
        waiting=int(get("buffer_events")),
        spool_bytes=int(get("spool_bytes")),
        corrupt_bytes=int(get("spool_corrupt_bytes")),
        longest_ms=longest_ms,
        done=done,
        delivered_all=delivered_all,
    )
    os.write(1, msgspec.json.encode(told) + b"\n")


def _await_end(stop: threading.Event) -> None:
    while os.read(0, 1 << 16):
        pass
    stop.set()


if __name__ == "__main__":
    sys.exit(main())
