"""Redis away for minutes while requests go on finishing: what two publishers keep, what they drop, what they need.

    python -m benchmarks.outage --minutes 10 --rate 200

A real Valkey is killed (SIGKILL) and comes back minutes later over its append-only file (`appendfsync always`). Two
publishers, each a process of its own, go on meanwhile: one with a spool and a buffer of 1,000 events, one without a
spool and with the default buffer. In the middle of the outage the one with the spool is killed (SIGKILL), the newest
file of its spool gets a torn tail, and it is started again under its name.

Owed is what had reached the server or the disk: what a killed process had only in memory is not promised. Prints one
JSON line; exit code 0 only if all of it was delivered, once and in order, what was dropped is what the reader misses,
and memory stayed within its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.outage_publisher import NAMESPACE, Plan, Told, hashes_of, request_id
from kvbus.embedded import HOST, EmbeddedServer
from kvbus.errors import BusError
from kvbus.event_stream import EventStream
from kvbus.protocol import RequestFinished
from kvbus.settings import MIB, Settings
from kvbus.streams.connection import Bus
from publisher.spool import Spool

SPOOLED, UNSPOOLED = "with-spool", "without-spool"
AROUND_S = 5.0
"""Of events before the outage, and after it."""
SMALL_EVENTS, SMALL_BYTES = 1_000, 8 * MIB
"""The buffer of the publisher with the spool."""
FLUSH_S = 300.0
SLACK_MIB = 24.0
"""Beside its buffer a publisher holds one batch as it came (64 events) and encoded (4 MiB at most), one read of the
spool (1 MiB), at its start a segment (8 MiB), and what the allocator keeps back. None of it grows with the outage."""
LONGEST_MS = 500.0
"""A call that waited for the server would take the connect timeout of 2 s at least; a busy machine takes its tens."""
TORN = b"\x00\x01\x02\x03 half a record"


class Process:
    """One publisher's process, and the last that it told."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.told: list[Told] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.outage_publisher", msgspec.json.encode(plan).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._thread = threading.Thread(target=self._read, name="told", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.told.append(msgspec.json.decode(line, type=Told))

    def next_told(self) -> Told:
        """Wait for the next second's words."""
        before, deadline = len(self.told), time.monotonic() + 60
        while len(self.told) <= before:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"{self.plan.name} tells nothing; exit code {self._process.poll()}")
            time.sleep(0.02)
        return self.told[-1]

    @property
    def rss_mib(self) -> float:
        return float(psutil.Process(self._process.pid).memory_info().rss) / MIB

    def kill(self) -> Told:
        """SIGKILL; returns its last words."""
        self._process.kill()
        self.wait()
        return self.told[-1]

    def end(self) -> None:
        """Tell it to flush and to end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self) -> Told:
        self._process.wait(FLUSH_S + 60)
        self._thread.join()
        return self.told[-1]

    def close(self) -> None:
        """However it stands."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Reader:
    """What a reader of the whole stream makes of it, by publisher and life."""

    def __init__(self, settings: Settings) -> None:
        self.delivered: dict[tuple[str, int], int] = {}
        self.last_seq: dict[tuple[str, int], int] = {}
        self.holes = {SPOOLED: 0, UNSPOOLED: 0}
        self.out_of_order = self.repeats = self.wrong = 0
        self._seen: set[tuple[str, int, int]] = set()
        self._place: dict[str, tuple[int, int]] = {}
        bus = Bus(settings)
        try:
            with EventStream(bus, reader=None, start="start", block_ms=10) as stream:
                while batch := list(stream.read(count=128)):
                    for delivery in batch:
                        if delivery.hole is not None:
                            self.holes[delivery.hole.publisher] += delivery.hole.missed
                        assert isinstance(delivery.event, RequestFinished)
                        self._take(delivery.event)
                self.repeats_dropped = int(stream.counters.get("repeats"))
                self.gaps = int(stream.counters.get("gaps") + stream.counters.get("refused"))
        finally:
            bus.close()

    def _take(self, event: RequestFinished) -> None:
        life = int(event.request_id.split("/")[1])
        self.delivered[event.publisher, life] = self.delivered.get((event.publisher, life), 0) + 1
        self.last_seq[event.publisher, life] = event.seq
        place = (event.epoch, event.seq)
        self.out_of_order += place < self._place.get(event.publisher, (0, 0))
        self._place[event.publisher] = place
        self.repeats += (event.publisher, *place) in self._seen
        self._seen.add((event.publisher, *place))
        same = event.request_id == request_id(event.publisher, life, event.seq)
        self.wrong += not same or event.chunk_hashes != hashes_of(life, event.seq)


class Outage:
    """The run: before, away, after."""

    def __init__(self, directory: Path, minutes: float, rate: int) -> None:
        self.away_s = minutes * 60
        self.rate = rate
        self.spools = directory / "spool"
        self.copy = directory / "copy"
        self.server = EmbeddedServer(directory / "server", port=_port(), options={"appendfsync": "always"})
        self.processes: list[Process] = []
        self.growth: dict[str, list[float]] = {SPOOLED: [], UNSPOOLED: []}
        self.on_disk: list[int] = []

    def run(self) -> None:
        """All of it. Everyone has ended when it returns; the server has not."""
        settle_s = min(5.0, self.away_s / 8)
        self.server.start()
        spooled, unspooled = self._start(SPOOLED, 1), self._start(UNSPOOLED, 1)
        for process in (spooled, unspooled):
            while process.next_told().sent == 0:
                pass
        time.sleep(AROUND_S)
        assert self.server.pid is not None
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()
        began = time.monotonic()

        time.sleep(settle_s)
        first = {process.plan.name: process.rss_mib for process in (spooled, unspooled)}
        _sleep_until(began + self.away_s / 2)
        self._grown(spooled, first[SPOOLED])
        spooled.kill()
        self.on_disk = self._tear()
        spooled = self._start(SPOOLED, 2)
        spooled.next_told()
        time.sleep(settle_s)
        again = spooled.rss_mib
        _sleep_until(began + self.away_s)
        self._grown(spooled, again)
        self._grown(unspooled, first[UNSPOOLED])

        self.server.start()
        time.sleep(AROUND_S)
        while unspooled.next_told().waiting > self.rate:
            pass  # so that the last event finds room: a hole at the very end nobody could see
        time.sleep(1.0)
        for process in (spooled, unspooled):
            process.end()
        for process in (spooled, unspooled):
            process.wait()

    def _start(self, name: str, life: int) -> Process:
        with_spool = name == SPOOLED
        default = Settings()
        plan = Plan(
            url=self.server.url,
            name=name,
            life=life,
            rate=self.rate,
            buffer_events=SMALL_EVENTS if with_spool else default.buffer_events,
            buffer_bytes=SMALL_BYTES if with_spool else default.buffer_bytes,
            spool_dir=str(self.spools) if with_spool else None,
            events_cap_bytes=8 << 30,
            flush_s=FLUSH_S,
        )
        self.processes.append(Process(plan))
        return self.processes[-1]

    def _grown(self, process: Process, before: float) -> None:
        self.growth[process.plan.name].append(process.rss_mib - before)

    def _tear(self) -> list[int]:
        """What the killed process had on disk, by its numbers. Then the newest file gets a torn tail."""
        own = self.spools / NAMESPACE / SPOOLED
        shutil.copytree(own, self.copy)  # to read a spool is to move its cursor
        with max(own.glob("*.seg")).open("ab") as newest:
            newest.write(TORN)
        spool = Spool(self.copy, 1 << 40)
        try:
            found: list[int] = []
            while records := spool.peek(1_024, 4 * MIB):
                found += [record.seq for record in records]
                spool.ack()
            return found
        finally:
            spool.close()

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.server.stop()


def report(outage: Outage, seen: Reader) -> dict[str, Any]:
    """All numbers, and the list of what does not hold."""
    first, unspooled, second = (process.told[-1] for process in outage.processes)
    told = [one for process in outage.processes for one in process.told]
    delivered = {key: seen.delivered.get(key, 0) for key in ((SPOOLED, 1), (SPOOLED, 2), (UNSPOOLED, 1))}
    owed = outage.on_disk[-1] + 1 if outage.on_disk else 0
    lost = {
        "owed by the killed process": owed - delivered[SPOOLED, 1],
        "accepted by its successor": second.accepted - delivered[SPOOLED, 2],
        "accepted without a spool": unspooled.accepted - delivered[UNSPOOLED, 1],
    }
    bounds = {SPOOLED: SMALL_BYTES / MIB + SLACK_MIB, UNSPOOLED: Settings().buffer_bytes / MIB + SLACK_MIB}
    growth = {name: [round(one, 1) for one in found] for name, found in outage.growth.items()}
    longest = max(one.longest_ms for one in told)
    dropped = {SPOOLED: first.dropped + second.dropped, UNSPOOLED: unspooled.dropped}
    files = [path.name for path in outage.spools.rglob("*.seg")]
    holds = {
        "lost": not any(lost.values()),
        "spooled what it told": first.on_way <= delivered[SPOOLED, 1],
        "on disk without a hole": outage.on_disk == list(range(owed - len(outage.on_disk), owed)),
        "out_of_order": not seen.out_of_order,
        "repeats": not seen.repeats,
        "wrong": not seen.wrong,
        "gaps": not seen.gaps,
        "dropped is what the reader misses": dropped == seen.holes,
        "none dropped with a spool": dropped[SPOOLED] == 0,
        "delivered_all": second.delivered_all and unspooled.delivered_all,
        "torn tail": second.corrupt_bytes >= len(TORN),
        "spool files left": not files,
        "spool_bytes": second.spool_bytes == 0,
        "memory": all(one <= bounds[name] for name, found in growth.items() for one in found),
        "longest_publish_ms": longest <= LONGEST_MS,
    }
    return {
        "rate": outage.rate,
        "minutes": round(outage.away_s / 60, 2),
        SPOOLED: {
            "accepted_at_least_before_kill": first.accepted,
            "owed_at_kill": owed,
            "delivered_of_killed": delivered[SPOOLED, 1],
            "accepted_by_successor": second.accepted,
            "delivered_of_successor": delivered[SPOOLED, 2],
            "dropped": dropped[SPOOLED],
            "holes": seen.holes[SPOOLED],
            "torn_bytes_skipped": second.corrupt_bytes,
            "spool_peak_bytes": max(one.spool_bytes for one in told),
            "memory_growth_mib": growth[SPOOLED],
            "memory_bound_mib": bounds[SPOOLED],
        },
        UNSPOOLED: {
            "published": unspooled.published,
            "accepted": unspooled.accepted,
            "delivered": delivered[UNSPOOLED, 1],
            "dropped": dropped[UNSPOOLED],
            "holes": seen.holes[UNSPOOLED],
            "memory_growth_mib": growth[UNSPOOLED],
            "memory_bound_mib": bounds[UNSPOOLED],
        },
        "longest_publish_ms": round(longest, 2),
        "out_of_order": seen.out_of_order,
        "repeats": seen.repeats,
        "repeats_dropped_by_reader": seen.repeats_dropped,
        "wrong": seen.wrong,
        "lost": sum(lost.values()),
        "spool_files_left": len(files),
        "does_not_hold": [name for name, held in holds.items() if not held],
    }


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _port() -> int:
    """A free port that no outgoing connection is given: one that is tried again and again while nobody listens may
    otherwise meet itself, and hold the port when the server comes back."""
    while True:
        port = random.randint(20_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
                return port
            except OSError:
                continue


def main() -> int:
    """Run it; 0 if everything holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outage", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10, help="how long the server is away")
    parser.add_argument("--rate", type=int, default=200, help="finished requests a second, of each publisher")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without taking everyone along
    with tempfile.TemporaryDirectory(prefix="kvbus-outage-") as directory:
        outage = Outage(Path(directory), args.minutes, args.rate)
        try:
            outage.run()
            found = report(outage, Reader(Settings(redis_url=outage.server.url, namespace=NAMESPACE)))
        finally:
            outage.close()
    print(json.dumps(found))
    return 1 if found["does_not_hold"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BusError as error:
        print(f"{error}. {error.hint}", file=sys.stderr)
        sys.exit(3)
