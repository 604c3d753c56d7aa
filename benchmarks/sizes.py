"""What a request.finished event takes in the server's memory, beside one event with its hashes as a list of text."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import redis

from benchmarks.load import Load
from benchmarks.publisher import hashes, request
from benchmarks.rows import Row, at_most, compared
from kvbus.protocol.codec import Fields
from kvbus.protocol.hashes import format_hash
from publisher.encode import encode

EVENTS = 2_000
GOALS = {520: 0.55, 100: 0.62}


def rows(load: Load, only: Callable[[str], bool]) -> list[Row]:
    found = []
    with load.server("sizes") as server, redis.Redis(host="127.0.0.1", port=server.port, protocol=2) as client:
        for n in (10, 100, 520):
            typed = [_event(n, number) for number in range(EVENTS)]
            ours = _bytes(client, [fields for fields, _ in typed])
            peer = _bytes(client, [fields for _, fields in typed])
            goal = at_most(GOALS[n]) if n in GOALS else None
            found.append(compared("request.finished in the server's memory", n, [ours], [peer], "bytes", goal))
    return found


def _event(n: int, number: int) -> tuple[Fields, Fields]:
    """The same event as the publisher writes it, and with its hashes as a list of text."""
    chunk_hashes = hashes(n)
    record, _ = encode(
        request(number, chunk_hashes),
        chunk_hashes,
        publisher="bench/publisher",
        epoch=1_700_000_000_000,
        seq=number,
        finished_at_ms=1_700_000_000_000,
    )
    fields = record.fields("bench/publisher")
    body = msgspec.msgpack.decode(fields[b"body"])
    body["chunk_hashes"] = [format_hash(value) for value in chunk_hashes]
    return fields, fields | {b"body": msgspec.msgpack.encode(body)}


def _bytes(client: redis.Redis, entries: list[Fields]) -> float:
    """The server's own bytes an entry."""
    client.delete("sizes")
    pipe = client.pipeline(transaction=False)
    for fields in entries:
        pipe.xadd("sizes", fields)  # type: ignore[arg-type]
    pipe.execute()
    used = client.memory_usage("sizes", samples=0)
    client.delete("sizes")
    return float(used or 0) / len(entries)
