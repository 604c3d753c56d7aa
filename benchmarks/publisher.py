"""The publisher against its peers: what `publish` costs its caller, and how fast events reach the server.

    python -m benchmarks.publisher [--only publish|drain] [--rounds 5]

One JSON line a measure. Rounds of ours and of the peer alternate, so that a busy machine hits both alike; the value is
the median over the rounds and `spread` holds the lowest and the highest. vLLM's own publisher is measured where vLLM
can be imported.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import redis

from kvbus.embedded import EmbeddedServer
from kvbus.protocol.codec import Fields
from kvbus.settings import Settings
from publisher import FinishedRequest, Publisher
from publisher.encode import encode
from tests.proxy import Proxy


class Row(msgspec.Struct):
    """One line of the report. ratio: ours to the peer's; above 1 is better for rates, below 1 for times."""

    measure: str
    n: int
    ours: float
    peer: float | None
    unit: str
    ratio: float | None
    target: str
    ok: bool | None
    spread: dict[str, list[float]]


def hashes(count: int) -> tuple[int, ...]:
    return tuple(random.randint(-(2**63), 2**63 - 1) for _ in range(count))


def request(number: int, chunk_hashes: tuple[int, ...]) -> FinishedRequest:
    return FinishedRequest(
        request_id=f"chatcmpl-7f3a-{number:08x}",
        external_id="chatcmpl-7f3a",
        instance="bench",
        model="model",
        reason="stop",
        chunk_hashes=chunk_hashes,
        chunk_size=256,
        prompt_tokens=256 * len(chunk_hashes),
        output_tokens=100,
        hash_fingerprint="builtin/256/-6ed9a448787a198f",
        context={"session": "s-1", "intent": "next"},
    )


# --- what publish() costs its caller


def cost(publish: Callable[[Any], object], events: list[Any], every_s: float = 0.001) -> dict[str, float]:
    """Microseconds of the caller's time a call, one call every millisecond as in a scheduler's loop."""
    taken = []
    for event in events:
        began = time.perf_counter_ns()
        publish(event)
        taken.append((time.perf_counter_ns() - began) / 1000)
        time.sleep(every_s)
    taken.sort()
    return {"p50": taken[len(taken) // 2], "p99": taken[int(len(taken) * 0.99)], "max": taken[-1]}


def zmq_publisher(events: int) -> tuple[Any, list[Any]] | None:
    """vLLM's ZmqEventPublisher and events of as many hashes for it, or None where vLLM is not installed."""
    try:
        from vllm.distributed.kv_events import BlockStored, KVEventBatch, ZmqEventPublisher
    except ImportError:
        return None
    peer = ZmqEventPublisher(0, endpoint=f"tcp://127.0.0.1:{random.randint(20_000, 60_000)}")
    block_hashes = list(hashes(520))

    event = BlockStored(
        block_hashes=block_hashes,
        parent_block_hash=None,
        token_ids=[],
        block_size=256,
        lora_id=None,
        medium=None,
        lora_name=None,
    )
    return peer, [KVEventBatch(ts=time.time(), events=[event]) for _ in range(events)]


def publish_rows(server: EmbeddedServer, rounds: int, events: int = 1_000) -> list[Row]:
    peer = zmq_publisher(events)
    chunk_hashes = hashes(520)
    ours_events = [request(number, chunk_hashes) for number in range(events)]
    measured: dict[str, list[dict[str, float]]] = {"peer": []}
    with Proxy("127.0.0.1", server.port) as proxy:
        urls = {"healthy": server.url, "black-holed": proxy.url, "dead": "redis://127.0.0.1:1/0"}
        for turn in range(rounds):
            for state, url in urls.items():
                settings = Settings(redis_url=url, namespace=f"cost-{turn}", stop_ms=200)
                proxy.heal()
                with Publisher(settings, name=f"bench/{state}", instance="bench") as publisher:
                    if state != "dead":
                        publisher.publish(request(0, chunk_hashes))
                        while publisher.counters.get("events_sent") < 1:
                            time.sleep(0.01)
                    if state == "black-holed":
                        proxy.black_hole()
                    measured.setdefault(state, []).append(cost(publisher.publish, ours_events))
            if peer is not None:
                measured["peer"].append(cost(peer[0].publish, peer[1]))
    if peer is not None:
        peer[0].shutdown()
    rows = []
    for state in urls:
        for what in ("p50", "p99", "max"):
            ours = [one[what] for one in measured[state]]
            theirs = [one[what] for one in measured["peer"]]
            rows.append(_row(f"publish() on the caller's thread, {state}, {what}", 520, ours, theirs, "us", None))
    return rows


# --- how fast events reach the server


def drained(server: EmbeddedServer, namespace: str, count: int, chunk_hashes: tuple[int, ...]) -> float:
    """Events a second from a full buffer into the stream: encoding, MULTI, cap and heartbeats included."""
    settings = Settings(redis_url=server.url, namespace=namespace, buffer_events=count + 1, buffer_bytes=1 << 40)
    publisher = Publisher(settings, name="bench/publisher", instance="bench")
    for number in range(count):
        publisher.publish(request(number, chunk_hashes))
    began = time.perf_counter()
    publisher.start()
    if not publisher.close(120):
        raise RuntimeError(f"not all events arrived: {publisher.counters.snapshot()}")
    return count / (time.perf_counter() - began)


def piped(client: redis.Redis, key: str, entries: list[Fields]) -> float:
    """Events a second by redis-py's own pipelined XADD of the same bytes, encoded beforehand."""
    began = time.perf_counter()
    for first in range(0, len(entries), 64):
        pipe = client.pipeline(transaction=False)
        for fields in entries[first : first + 64]:
            pipe.xadd(key, fields)  # type: ignore[arg-type]
        pipe.execute()
    return len(entries) / (time.perf_counter() - began)


def drain_rows(server: EmbeddedServer, rounds: int) -> list[Row]:
    rows = []
    with redis.Redis(host="127.0.0.1", port=server.port, protocol=2) as client:
        for n, count in ((1, 6_000), (520, 3_000)):
            chunk_hashes = hashes(n)
            entries = [
                encode(
                    request(number, chunk_hashes),
                    chunk_hashes,
                    publisher="bench/publisher",
                    epoch=1_700_000_000_000,
                    seq=number,
                    finished_at_ms=1_700_000_000_000,
                )[0].fields("bench/publisher")
                for number in range(count)
            ]
            ours, theirs = [], []
            for turn in range(3 * rounds):  # short ones: what else the machine does comes and goes
                ours.append(drained(server, f"drain-{n}-{turn}", count, chunk_hashes))
                client.delete(f"kvbus:{{drain-{n}-{turn}}}:events")
                theirs.append(piped(client, "peer", entries))
                client.delete("peer")
            rows.append(_row("publisher to the server", n, ours, theirs, "events/s", 0.8))
    return rows


def _row(measure: str, n: int, ours: list[float], peer: list[float], unit: str, least_ratio: float | None) -> Row:
    mine, theirs = statistics.median(ours), statistics.median(peer) if peer else None
    ratio = mine / theirs if theirs else None
    if least_ratio is not None:
        target, ok = f"ratio >= {least_ratio}", None if ratio is None else ratio >= least_ratio
    else:
        target, ok = "not slower", None if ratio is None else ratio <= 1
    spread = {"ours": [min(ours), max(ours)]} | ({"peer": [min(peer), max(peer)]} if peer else {})
    return Row(measure, n, mine, theirs, unit, ratio, target, ok, spread)


def rows(only: str | None = None, rounds: int = 5) -> list[Row]:
    """All measures, on a server started for them."""
    with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as directory:
        server = EmbeddedServer(Path(directory))
        server.start()
        try:
            found: list[Row] = []
            if only in (None, "publish"):
                found += publish_rows(server, rounds)
            if only in (None, "drain"):
                found += drain_rows(server, rounds)
            return found
        finally:
            server.stop()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("publish", "drain"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    for row in rows(options.only, options.rounds):
        plain: dict[str, Any] = msgspec.to_builtins(row)
        print(json.dumps(plain))
    return 0


if __name__ == "__main__":
    sys.exit(main())
