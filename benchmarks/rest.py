"""POST /memory/evict through the facade, beside the same request to the HTTP fan-out; workers on both sides count."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.bus import CLIENTS, hashes, latencies_ms, ports
from benchmarks.children import Children
from benchmarks.facade_load import facade
from benchmarks.http_clients import Caller, evict_body, rate
from benchmarks.load import Load
from benchmarks.rows import Row, compared, percentile, times_higher, times_lower

WORKERS = 8


def rows(load: Load, only: Callable[[str], bool]) -> list[Row]:
    body = evict_body(hashes())
    ours: list[list[float]] = []
    peer: list[list[float]] = []
    our_rates: list[float] = []
    peer_rates: list[float] = []
    with (
        load.server("rest") as server,
        Children(
            "benchmarks.counting",
            ["--redis-url", server.url, "--namespace", "default", "--workers", str(WORKERS)],
            WORKERS,
        ),
        Children("benchmarks.fanout", ["workers", "--workers", str(WORKERS)], WORKERS) as http,
        Children("benchmarks.fanout", ["scheduler", "--ports", ports(http)], 1) as scheduler,
        facade(server.url) as (facade_port, _),
    ):
        peer_port = int(scheduler.ready[0]["port"])
        callers = Caller(facade_port), Caller(peer_port)
        for caller in callers:
            latencies_ms(lambda caller=caller: caller.post("/memory/evict", body), 10)
        for _ in range(load.rounds):
            if only("latency"):
                for caller, side in zip(callers, (ours, peer), strict=True):
                    side.append(latencies_ms(lambda caller=caller: caller.post("/memory/evict", body), load.calls))
            if only("rate"):
                our_rates.append(rate(facade_port, body, clients=CLIENTS, seconds=load.seconds))
                peer_rates.append(rate(peer_port, body, clients=CLIENTS, seconds=load.seconds))
        for caller in callers:
            caller.close()
    found: list[Row] = []
    if ours:
        for share, name, goal in ((0.1, "p10", None), (0.5, "p50", times_lower(3)), (0.99, "p99", None)):
            mine, theirs = ([percentile(turn, share) for turn in side] for side in (ours, peer))
            found.append(compared(f"POST /memory/evict, one client, {name}", WORKERS, mine, theirs, "ms", goal))
    if our_rates:
        found.append(
            compared(
                f"POST /memory/evict, {CLIENTS} clients",
                WORKERS,
                our_rates,
                peer_rates,
                "requests/s",
                times_higher(10),
            )
        )
    return found
