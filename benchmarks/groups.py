"""The groups of measures that `benchmarks.bench` runs, in this order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from benchmarks import bus, other_environment, profile, rest, scale, sizes, tiers, with_engine
from benchmarks.load import Load
from benchmarks.rows import Row, Skipped

Found = Sequence[Row | Skipped]
Only = Callable[[str], bool]


class Group(msgspec.Struct, frozen=True):
    """measures: what --only can pick out of it. method: how it is measured, for the page."""

    title: str
    method: str
    run: Callable[[Load, Only], Found]
    measures: tuple[str, ...]


ALL: dict[str, Group] = {
    "bus": Group(
        "Bus only",
        "One evict of 100 hashes to N workers whose engines only count, until every one of them has answered. kvbus: "
        "a `KVBus` client, a Valkey with its append-only file, N processes with kvbus's own worker. Peer: the shape of "
        "LMCache-Ascend's `/memory` routes on LMCache's internal API server: a scheduler process (FastAPI under "
        "uvicorn) that forwards by urllib, in asyncio's default pool of threads, to N worker processes (FastAPI under "
        "uvicorn), over keep-alive connections on the client's side. Rates: up to 512 commands under way on the bus, "
        "16 clients over HTTP. Processor times are taken in the same rounds as the rates. Bare streams: N processes on "
        "the same server that read one entry and write one back, nothing decoded and nothing done, which no bus over "
        "streams can undercut; fenced: by the two scripts that kvbus's promises need, in place of XADD.",
        bus.rows,
        ("latency", "rate"),
    ),
    "engine": Group(
        "With real engines",
        "The same with two ranks of real LMCache engines on the CPU; one process a rank serves it both ways. Absent: "
        "100 hashes that no tier holds. Stored: 100 chunks of 64 KiB in both tiers, stored anew for each command.",
        with_engine.rows,
        ("absent", "stored"),
    ),
    "rest": Group(
        "Through the facade",
        "POST /memory/evict of 100 hashes, eight counting workers, keep-alive connections: kvbus's facade beside the "
        "scheduler process of the HTTP fan-out.",
        rest.rows,
        ("latency", "rate"),
    ),
    "publisher": Group(
        "Inside vLLM, and the publisher",
        "`publish()`: what one finished request costs the scheduler's thread, beside vLLM's own ZmqEventPublisher, "
        "in vLLM's environment. To the server: events a second from a full buffer, encoding included, beside "
        "redis-py's pipelined XADD of the same bytes, encoded beforehand. "
        "vLLM's output: a tiny model on the CPU, one rank, every command an evict of 100 chunks that are nowhere.",
        other_environment.rows,
        ("publish", "drain", "tokens"),
    ),
    "tiers": Group(
        "One engine's verbs",
        "Prefetch: chunks on the SSD only, into the DDR tier, beside plain reads of the same files into memory of "
        "the same pool; from the page cache, and after fadvise has dropped it. Evict: kvbus's verb beside LMCache's "
        "batched_remove, chunks of 64 KiB.",
        tiers.rows,
        ("prefetch", "evict"),
    ),
    "sizes": Group(
        "Size of an event",
        "Bytes in the server's memory (MEMORY USAGE) of one request.finished, beside the same event with its hashes "
        "as a list of text.",
        sizes.rows,
        ("events",),
    ),
    "scale": Group(
        "Scale and idling",
        "Processor time of all processes together, a command, at each number of workers, and a line fitted through "
        "it. A command's latency and a worker's memory while the command stream grows, uncapped. Idling: what eight "
        "workers and the facade cost when nothing is asked of them, and the commands that they send to the server.",
        scale.rows,
        ("workers", "length", "idle"),
    ),
    "profile": Group(
        "What processor time is spent on",
        "Microseconds of one command (an evict of 100 hashes to eight counting workers), by process and by what perf's "
        "samples of that process fell into: Python's interpreter, kvbus's code and redis-py's together; the system, "
        "that is sockets, waking and being woken; compiled libraries; the server.",
        profile.rows,
        ("bus", "facade"),
    ),
}
