"""With real engines: evicts of absent chunks and of chunks stored in both tiers, over the bus and over HTTP."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from benchmarks.bus import CLIENTS, HASHES, answered_everywhere, bus_rate, hashes, latencies_ms, ports
from benchmarks.children import Children
from benchmarks.http_clients import Caller, evict_body, rate
from benchmarks.load import Load
from benchmarks.rows import Row, at_most, compared, percentile, times_higher
from kvbus.client import KVBus
from kvbus.protocol import Evict, parse_hash
from kvbus.settings import load_settings

RANKS = 2
AT_ONCE = 32
"""Commands under way of which each has its own chunks stored in DDR."""


class Bench:
    """Two engines, both ways to them, and texts to store in them."""

    def __init__(self, bus: KVBus, scheduler_port: int, worker_ports: list[int]) -> None:
        self.bus = bus
        self.port = scheduler_port
        self.scheduler = Caller(scheduler_port)
        self.workers = [Caller(port) for port in worker_ports]
        self._pool = ThreadPoolExecutor(RANKS)
        self._texts = count(1)

    def close(self) -> None:
        for caller in (self.scheduler, *self.workers):
            caller.close()
        self._pool.shutdown()

    def everywhere(self, path: str, body: bytes) -> list[dict[str, Any]]:
        """The same to every worker at once."""
        return list(self._pool.map(lambda caller: caller.post(path, body), self.workers))

    def stored(self) -> list[int]:
        """The hashes of a fresh text, in both tiers of both ranks."""
        body = b'{"text": %d, "chunks": %d}' % (next(self._texts), HASHES)
        found: list[str] = self.everywhere("/store", body)[0]["hashes"]
        return [int(parse_hash(text)) for text in found]

    def over_the_bus(self) -> tuple[float, float]:
        """Milliseconds until all have answered, and of the slower rank's engine."""
        chunks = self.stored()
        began = time.perf_counter()
        handle = self.bus.evict(chunks)
        answered_everywhere(handle, RANKS)
        taken = (time.perf_counter() - began) * 1000
        results = [answer.result for answer in handle.state.finals.values()]
        if any(result.counts.evicted_pairs != 2 * HASHES for result in results):
            raise RuntimeError(f"not all was evicted: {results}")
        return taken, max(result.duration_us for result in results) / 1000

    def many_over_the_bus(self, commands: int) -> tuple[float, float]:
        """The same of so many at once, a command."""
        texts = [tuple(self.stored()) for _ in range(commands)]
        began = time.perf_counter()
        handles = self.bus.send_all([Evict(chunk_hashes=chunks) for chunks in texts])
        for handle in handles:
            answered_everywhere(handle, RANKS)
        taken = (time.perf_counter() - began) * 1000
        inside: Counter[str] = Counter()
        for handle in handles:
            for name, answer in handle.state.finals.items():
                if answer.result.counts.evicted_pairs != 2 * HASHES:
                    raise RuntimeError(f"not all was evicted: {answer.result}")
                inside[name] += answer.result.duration_us
        return taken / commands, max(inside.values()) / 1000 / commands

    def over_http(self) -> float:
        """Milliseconds until the scheduler has answered."""
        body = evict_body(self.stored())
        began = time.perf_counter()
        found = self.scheduler.post("/memory/evict", body)
        taken = (time.perf_counter() - began) * 1000
        if found["num_evicted"] != 2 * HASHES:
            raise RuntimeError(f"not all was evicted: {found}")
        return taken

    def by_itself(self) -> float:
        """Milliseconds that LMCache's batched_remove takes, of the slower rank, both at work at once."""
        body = evict_body(self.stored())
        return max(answer["seconds"] for answer in self.everywhere("/remove", body)) * 1000


def rows(load: Load, only: Callable[[str], bool]) -> list[Row]:
    with (
        load.server("engine") as server,
        tempfile.TemporaryDirectory(dir=load.directory) as disk,
        Children("benchmarks.engines", _arguments(server.url, disk), RANKS) as engines,
        Children("benchmarks.fanout", ["scheduler", "--ports", ports(engines)], 1) as scheduler,
        KVBus(load_settings({"redis_url": server.url, "namespace": "bench"})) as bus,
    ):
        bench = Bench(bus, int(scheduler.ready[0]["port"]), [int(line["port"]) for line in engines.ready])
        try:
            found: list[Row] = []
            if only("absent"):
                found += _absent(bench, load)
            if only("stored"):
                found += _stored(bench, load)
            return found
        finally:
            bench.close()


def _arguments(url: str, disk: str) -> list[str]:
    return ["--redis-url", url, "--directory", disk, "--workers", str(RANKS)]


def _absent(bench: Bench, load: Load) -> list[Row]:
    chunks = hashes()
    body = evict_body(chunks)
    ours: list[list[float]] = []
    peer: list[list[float]] = []
    our_rates: list[float] = []
    peer_rates: list[float] = []
    latencies_ms(lambda: answered_everywhere(bench.bus.evict(chunks), RANKS), 10)
    latencies_ms(lambda: bench.scheduler.post("/memory/evict", body), 10)
    for _ in range(load.rounds):
        ours.append(latencies_ms(lambda: answered_everywhere(bench.bus.evict(chunks), RANKS), load.calls))
        peer.append(latencies_ms(lambda: bench.scheduler.post("/memory/evict", body), load.calls))
        our_rates.append(bus_rate(bench.bus, chunks, RANKS, load.seconds))
        peer_rates.append(rate(bench.port, body, clients=CLIENTS, seconds=load.seconds))
    found = []
    for share, name in ((0.1, "p10"), (0.5, "p50"), (0.99, "p99")):
        mine, theirs = ([percentile(turn, share) for turn in side] for side in (ours, peer))
        found.append(compared(f"with engine, absent: evict answered by all, {name}", RANKS, mine, theirs, "ms"))
    found.append(
        compared(
            "with engine, absent: answered everywhere", RANKS, our_rates, peer_rates, "commands/s", times_higher(4)
        )
    )
    return found


def _stored(bench: Bench, load: Load) -> list[Row]:
    whole: list[float] = []
    engine: list[float] = []
    http: list[float] = []
    alone: list[float] = []
    for _ in range(2):
        bench.over_the_bus(), bench.over_http(), bench.by_itself()
    for _ in range(3 if load.quick else 4 * load.rounds):
        taken, inside = bench.over_the_bus()
        whole.append(taken)
        engine.append(inside)
        http.append(bench.over_http())
        alone.append(bench.by_itself())
    many: list[float] = []
    inside_many: list[float] = []
    for _ in range(3 if load.quick else 2 * load.rounds):
        taken, inside = bench.many_over_the_bus(AT_ONCE)
        many.append(taken)
        inside_many.append(inside)
    goal = at_most(1.05, "at most 5 % over the engine's own time")
    note = "each round is one command; the engine's own time is the slower rank's in it; ratio: the rounds' median"
    return [
        compared(
            "with engine, stored: whole command, beside the engine's own time",
            RANKS,
            whole,
            engine,
            "ms",
            goal,
            note,
            paired=True,
        ),
        compared(
            f"with engine, stored: {AT_ONCE} commands under way, beside the engine's own time",
            RANKS,
            many,
            inside_many,
            "ms a command",
            goal,
            "from the first one sent until all are answered; the engine's own time is the slower rank's sum",
            paired=True,
        ),
        compared("with engine, stored: whole command, beside the HTTP fan-out", RANKS, whole, http, "ms"),
        compared("with engine, stored: whole command, beside batched_remove alone", RANKS, whole, alone, "ms"),
    ]
