"""What the session ledger costs: memory for each chunk, and time for each event.

    python -m benchmarks.ledger                       # 10,000 sessions of 500 chunks, 60 % of them shared
    python -m benchmarks.ledger --sessions 1000 --json out.json

A server of its own is started (Valkey, or --redis for the system's Redis). p50 and p99 are round trips of one process;
server_us and client_us are processor time for each event, which a busy machine does not change.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbus.embedded import EmbeddedServer
from kvbus.memory import Ledger, MemoryConfig
from kvbus.protocol import FinishReason, RequestFinished
from kvbus.settings import Settings
from kvbus.streams.connection import Bus
from kvbus.streams.position import Position

SHARED_TEXTS = 20
SAMPLES = 400


class Load:
    """Sessions with shared prefixes, and their next turns. Hashes are 64-bit numbers as LMCache makes them."""

    def __init__(self, ledger: Ledger, chunks: int, shared: float, seed: int = 1) -> None:
        self.ledger = ledger
        self.rng = random.Random(seed)
        self.chains: list[list[int]] = []
        self._chunks, self._shared = chunks, int(chunks * shared)
        self._prefixes = [self.hashes(self._shared) for _ in range(SHARED_TEXTS)]
        self._seq = 0

    def hashes(self, count: int) -> list[int]:
        return [self.rng.getrandbits(64) - 2**63 for _ in range(count)]

    def open(self, count: int) -> None:
        for _ in range(count):
            chain = [*self.rng.choice(self._prefixes), *self.hashes(self._chunks - self._shared)]
            self.chains.append(chain)
            self.turn(len(self.chains) - 1)

    def turn(self, session: int, chain: Sequence[int] | None = None) -> float:
        """Milliseconds for one event, from the typed event to the answer."""
        if chain is not None:
            self.chains[session] = list(chain)
        event = RequestFinished(
            request_id=f"r{self._seq}",
            instance="bench",
            reason=FinishReason.STOP,
            chunk_hashes=tuple(self.chains[session]),
            context={"session": f"session-{session}"},
            publisher="bench",
            epoch=1,
            seq=self._seq,
            finished_at_ms=1,
        )
        self._seq += 1
        position = Position(f"{self._seq}-0", "x", self._seq)
        start = time.perf_counter()
        self.ledger.turn(event, position)
        return (time.perf_counter() - start) * 1000


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50_ms": round(statistics.median(ordered), 3),
        "p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 3),
    }


def timed(bus: Bus, turns: Callable[[], float], samples: int = SAMPLES) -> dict[str, float]:
    server, client = server_seconds(bus), time.process_time()
    values = [turns() for _ in range(samples)]
    client, server = time.process_time() - client, server_seconds(bus) - server
    return {
        **percentiles(values),
        "server_us": round(server / samples * 1e6, 1),
        "client_us": round(client / samples * 1e6, 1),
    }


def server_seconds(bus: Bus) -> float:
    used = bus.client.info("cpu")
    return float(used["used_cpu_sys"]) + float(used["used_cpu_user"])


def grow(load: Load, sessions: Sequence[int], change: int) -> Callable[[], float]:
    """A turn that adds `change` chunks to a random session."""

    def turn() -> float:
        session = load.rng.choice(sessions)
        return load.turn(session, [*load.chains[session], *load.hashes(change)])

    return turn


def rewrite(load: Load, sessions: Sequence[int], change: int) -> Callable[[], float]:
    """A turn that replaces the last `change` chunks: as many evicted as added."""

    def turn() -> float:
        session = load.rng.choice(sessions)
        return load.turn(session, [*load.chains[session][:-change], *load.hashes(change)])

    return turn


def row(load: Load, sessions: Sequence[int], what: str, change: int) -> dict[str, Any]:
    turns = {"added": grow, "replaced": rewrite}[what](load, sessions, change)
    length = len(load.chains[sessions[0]])
    return {"sessions": len(load.chains), "length": length, what: change, **timed(load.ledger.bus, turns)}


def used_bytes(bus: Bus) -> int:
    return int(bus.client.info("memory")["used_memory"])


def measure(bus: Bus, arguments: argparse.Namespace) -> dict[str, Any]:
    ledger = Ledger(bus, MemoryConfig(grace_ms=0, max_sessions=1_000_000, evict_ttl_ms=1_000))
    load = Load(ledger, arguments.chunks, arguments.shared)
    ledger.totals()
    report: dict[str, Any] = {
        "sessions": arguments.sessions,
        "chunks_a_session": arguments.chunks,
        "shared": arguments.shared,
        "server": str(bus.client.info("server").get("valkey_version") or bus.client.info("server")["redis_version"]),
    }
    report["cost_of_a_turn"] = turns = []
    few = max(1, arguments.sessions // 100)
    before = used_bytes(bus)
    load.open(few)
    turns += [row(load, range(few), "added", change) for change in (1, 4, 16)]
    base = used_bytes(bus)
    start = time.perf_counter()
    known = len(load.chains)
    load.open(arguments.sessions - known)
    seconds = time.perf_counter() - start
    opened = arguments.sessions - known
    totals = ledger.totals()
    session_chunks = opened * arguments.chunks
    own_chunks = opened * (arguments.chunks - int(arguments.chunks * arguments.shared))
    report["memory"] = {
        "distinct_chunks": totals.chunks,
        "session_chunks": arguments.sessions * arguments.chunks,
        "bytes_in_all": used_bytes(bus) - before,
        "bytes_a_session_chunk": round((used_bytes(bus) - base) / session_chunks, 1),
        "bytes_a_distinct_chunk": round((used_bytes(bus) - base) / own_chunks, 1),
    }
    report["new_sessions_a_second"] = round(opened / seconds, 1)
    everyone = range(few, arguments.sessions)
    turns += [row(load, everyone, "added", n) for n in (1, 4, 16)]
    turns += [row(load, everyone, "replaced", n) for n in (4, 16)]
    for length in (50, 5_000):
        longer = range(len(load.chains), len(load.chains) + 20)
        load.chains += [load.hashes(length) for _ in longer]
        for session in longer:
            load.turn(session)
        turns.append(row(load, longer, "added", 4))
    slowest = max((entry["duration"] for entry in bus.client.slowlog_get(128)), default=0)
    report["slowest_step_ms"] = round(slowest / 1000, 1)
    report["switch"] = timed(bus, lambda: switch(load), 50)
    return report


def switch(load: Load) -> float:
    name = f"session-{load.rng.randrange(len(load.chains) - 40)}"
    start = time.perf_counter()
    load.ledger.switch(name)
    return (time.perf_counter() - start) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--chunks", type=int, default=500)
    parser.add_argument("--shared", type=float, default=0.6)
    parser.add_argument("--redis", help="path of another server program")
    parser.add_argument("--json", type=Path, help="write the report here, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvbus-ledger-") as directory:
        options = {"appendonly": "no", "save": ""}
        server = EmbeddedServer(Path(directory), port=0, binary=arguments.redis, options=options)
        server.start()
        bus = Bus(Settings(redis_url=server.url, namespace="bench", reply_timeout_ms=60_000))
        try:
            report = measure(bus, arguments)
        finally:
            bus.close()
            server.stop()
    json.dump(report, sys.stdout, indent=2)
    sys.stdout.write("\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
