"""Prefetch and evict rounds without end on real LMCache engines: nothing may leak, nothing may be lost or repeated.

    python -m benchmarks.soak --rounds 2000
    python -m benchmarks.soak --rounds 100000 --faults

Two workers, a DDR pool smaller than what is stored, random subsets of the chunks. With --faults a random fault comes
about once a second: a worker is killed and started again, all connections are cut, the server is killed and restarted
over its append-only file. Prints one JSON line; exit code 0 only if every number that must be zero is zero. Ctrl-C ends
it after the round that is under way; the numbers are then those of the rounds that were run.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.census import Census
from examples.system import System
from kvbus.cli.common import stopped_by_signal
from kvbus.client import CommandHandle, KVBus
from kvbus.errors import BusError
from kvbus.protocol import DDR, Evict, Prefetch, parse_hash

RANKS = 2
CHUNK = 64
SHAPE = ("--layers", "8", "--kv-heads", "4", "--head-size", "64")
"""512 KiB a chunk: 8 layers x K and V x 64 tokens x 4 heads x 64 values x 2 bytes."""
TEXTS, CHUNKS_A_TEXT = 6, 50
"""300 chunks, 150 MiB a rank, in a DDR pool of 0.1 GB."""
LARGEST = 60
SAFE = {"appendfsync": "always"}
"""With everysec a killed server may lose what it has acknowledged."""
FAULTS = ("kill worker", "cut connections", "restart server")


class Soak:
    """The rounds, and the count of what came back."""

    def __init__(self, system: System, bus: KVBus, seed: int) -> None:
        self.system = system
        self.bus = bus
        self.random = random.Random(seed)
        self.chunks: list[str] = []
        self.rounds = 0
        self.sent = 0
        self.faults: Counter[str] = Counter()

    def store_all(self) -> None:
        for text in range(TEXTS):
            self.chunks += self.system.store(self._tokens(text), seed=text)

    def run(self, rounds: int, stop: threading.Event) -> None:
        """Each round: a prefetch and an evict of random subsets, both on the stream before either is awaited."""
        shown_at = time.monotonic()
        while self.rounds < rounds and not stop.is_set():
            wanted = self.random.sample(self.chunks, self.random.randint(1, LARGEST))
            unwanted = self.random.sample(self.chunks, self.random.randint(1, LARGEST))
            if self.random.random() < 0.2:
                wanted.append(f"{self.random.getrandbits(62):x}")
            handles = [
                self.bus.send(self._prefetch(wanted), timeout_s=60),
                self.bus.send(self._evict(unwanted), timeout_s=60),
            ]
            self.sent += 2
            for handle in handles:
                self._await(handle)
            self.rounds += 1
            if time.monotonic() - shown_at > 5:
                shown_at = time.monotonic()
                print(f"  round {self.rounds} of {rounds}", file=sys.stderr, flush=True)

    def _await(self, handle: CommandHandle) -> None:
        deadline = time.monotonic() + 120
        while True:
            state = handle.wait(5)
            finals = state.finals.keys()
            if all(f"soak/{rank}" in finals for rank in range(RANKS)):
                return
            if time.monotonic() > deadline:
                return  # counted as lost by the census
            if state.settled:
                time.sleep(0.05)  # a dead worker is not waited for; here it comes back

    def _prefetch(self, chunks: list[str]) -> Prefetch:
        return Prefetch(chunk_hashes=tuple(map(parse_hash, chunks)), ttl_ms=300_000)

    def _evict(self, chunks: list[str]) -> Evict:
        # From DDR alone, so that there is always something to prefetch.
        return Evict(chunk_hashes=tuple(map(parse_hash, chunks)), locations=(DDR,))

    def _tokens(self, text: int) -> list[int]:
        return list(range(text * 10_000, text * 10_000 + CHUNKS_A_TEXT * CHUNK))

    # -- faults ------------------------------------------------------------------------------------------------

    def trouble(self, stop: threading.Event) -> None:
        """A fault about once a second, until told to stop."""
        chooser = random.Random(self.random.random())
        with ThreadPoolExecutor(1) as pool:
            restart: Future[None] | None = None
            while not stop.wait(chooser.uniform(0.5, 1.5)):
                fault = chooser.choices(FAULTS, (2, 5, 2))[0]
                if fault == "kill worker":
                    # A worker takes seconds to come back; the other faults go on meanwhile.
                    if restart is not None and not restart.done():
                        continue
                    if restart is not None:
                        restart.result()
                    restart = pool.submit(self._kill_worker, chooser.randrange(RANKS))
                elif fault == "cut connections":
                    self._cut()
                else:
                    self._restart_server()
                self.faults[fault] += 1
            if restart is not None:
                restart.result()

    def _kill_worker(self, rank: int) -> None:
        worker = self.system.workers[rank]
        worker.signal(signal.SIGKILL)
        worker.kill()
        worker.start().wait_ready()
        for text in range(TEXTS):  # its tiers are empty after a restart
            worker.ask("store", tokens=self._tokens(text), seed=text)

    def _restart_server(self) -> None:
        server = self.system.server
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        server.start()

    def _cut(self) -> None:
        try:
            self.bus.bus.client.client_kill_filter(_type="normal", skipme=False)
        except Exception as error:  # noqa: BLE001 - the cut also cuts the connection that asked for it
            logging.getLogger(__name__).debug("cut: %s", error)


def main() -> int:
    """Run the soak; 0 if nothing leaked, nothing was lost and nothing came twice."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--faults", action="store_true", help="a random fault about once a second")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.faults:
        logging.disable(logging.ERROR)  # what is said of faults made on purpose
    began = time.monotonic()
    with (
        stopped_by_signal() as told,
        tempfile.TemporaryDirectory(prefix="kvbus-soak-") as data,
        System(
            Path(data),
            instance="soak",
            ranks=RANKS,
            chunk_size=CHUNK,
            facade=False,
            options=SHAPE,
            server_options=SAFE if args.faults else None,
        ) as system,
        KVBus(system.settings(), issuer="soak") as bus,
    ):
        soak = Soak(system, bus, args.seed)
        census = Census(bus.bus)
        soak.store_all()
        before = [_held(usage) for usage in system.ask_all("usage")]
        stop = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            trouble = pool.submit(soak.trouble, stop) if args.faults else None
            try:
                soak.run(args.rounds, told)
            finally:
                stop.set()
            if trouble is not None:
                trouble.result()  # a fault that could not be made is a failure of the soak
        counted = census.count(timeout_s=30, until=soak.sent * RANKS)
        usages = system.ask_all("usage")
        report = {
            "rounds": soak.rounds,
            "allocations_before": before,
            "allocations_after": [_held(usage) for usage in usages],
            "pool_objects_after": [usage["pool_objects"] for usage in usages],
            "pins_after": sum(usage["cpu_pins"] + usage["disk_pins"] + usage["extra_refs"] for usage in usages),
            "loading_events_after": sum(usage["loading_events"] for usage in usages),
            "disk_lock_held": any(usage["disk_locked"] for usage in usages),
            "disk_drift_bytes": sum(abs(usage["disk_drift"]) for usage in usages),
            "commands_sent": soak.sent,
            "results_received": counted.finals,
            "lost": soak.sent * RANKS - counted.pairs,
            "duplicate": counted.duplicates,
            "statuses": dict(sorted(counted.statuses.items())),
            "faults": dict(sorted(soak.faults.items())),
            "elapsed_s": round(time.monotonic() - began, 1),
        }
    print(json.dumps(report))
    ok = report["allocations_before"] == report["allocations_after"] and not any(
        report[name]
        for name in ("pins_after", "loading_events_after", "disk_lock_held", "disk_drift_bytes", "lost", "duplicate")
    )
    return 0 if ok else 1


def _held(usage: dict[str, Any]) -> int:
    """Allocations of the pool that no index names: what a leak would raise."""
    return int(usage["pool_objects"]) - int(usage["cached_objects"])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BusError as error:
        print(f"{error}. {error.hint}", file=sys.stderr)
        sys.exit(3)
