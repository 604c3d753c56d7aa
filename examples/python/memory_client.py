"""A memory system's end of the bus with nothing but redis-py and msgpack.

    python memory_client.py prefetch -6ed9a448787a198f 3f5c45ecbab5e9fd
    python memory_client.py evict 3f5c45ecbab5e9fd
    python memory_client.py follow --state place.json            # Ctrl-C; start it again: it goes on where it stood

KVBUS_REDIS_URL and KVBUS_NAMESPACE say where. Every line on stdout is JSON. With kvbus installed all of this is
`kvbus.client.KVBus`; this file shows how little the protocol asks of any language.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import redis

TTL_MS = 30_000
FINAL = {"done", "partial", "expired", "rejected", "not_applicable", "failed"}


def hash_value(text: str) -> int | bytes:
    """A chunk hash's text as it stands in msgpack: a 64-bit integer, or a digest of 32 bytes."""
    return bytes.fromhex(text) if len(text) == 64 else int(text, 16)


def hash_text(value: int | bytes | str) -> str:
    """The other way. Never padded: hashes are compared as text."""
    if isinstance(value, str):
        return value
    return value.hex() if isinstance(value, bytes) else f"{value:x}"


def decode(fields: dict[bytes, bytes]) -> dict[str, Any]:
    """An entry's message, whichever form it came in."""
    if b"body" in fields:
        return dict(msgpack.unpackb(fields[b"body"], raw=False))
    return dict(json.loads(fields[b"json"]))


class Bus:
    """One namespace. The braces are part of the keys."""

    def __init__(self, url: str, namespace: str) -> None:
        self.prefix = f"kvbus:{{{namespace}}}:"
        # A blocked XREAD must time out on our side later than on the server's.
        self.redis = redis.Redis.from_url(url, socket_timeout=10, protocol=2)

    def key(self, name: str) -> str:
        return self.prefix + name

    def end_of(self, stream: str) -> str:
        """The id of the newest entry ever, resolved once: `$` in a loop would lose what comes between two reads."""
        if not self.redis.exists(self.key(stream)):
            return "0-0"
        return str(self.redis.xinfo_stream(self.key(stream))["last-generated-id"].decode())

    def read(self, stream: str, cursor: str, block_ms: int) -> list[tuple[str, dict[bytes, bytes]]]:
        found = self.redis.xread({self.key(stream): cursor}, count=32, block=block_ms)
        return [(entry_id.decode(), fields) for _, entries in found for entry_id, fields in entries]

    def workers(self) -> list[str]:
        """Who is registered and alive: each of them owes a result."""
        names = [name.decode() for name in self.redis.hkeys(self.key("workers"))]
        return [name for name in names if self.redis.exists(self.key(f"live:{name}"))]


def command(bus: Bus, kind: str, hashes: list[str]) -> int:
    """Send a prefetch or an evict and tell every worker's answers."""
    cursor = bus.end_of("results")  # first of all: no answer can be missed
    seconds, micros = bus.redis.time()  # the server's clock; ours may be wrong
    body = {
        "chunk_hashes": [hash_value(text) for text in hashes],
        "lookup_id": "example",
        "ttl_ms": TTL_MS,
        "issued_at_ms": seconds * 1000 + micros // 1000,
        "issuer": "python-example",
    }
    command_id = os.urandom(16).hex()
    waiting = set(bus.workers())
    # Should the reply be lost: send the same entry, id and all, once more. It is carried out once.
    bus.redis.xadd(
        bus.key("commands"),
        {"v": "1", "type": kind, "id": command_id, "body": msgpack.packb(body)},
        maxlen=100_000,
        approximate=True,
    )
    deadline = time.monotonic() + TTL_MS / 1000 + 5
    failed = False
    while waiting and time.monotonic() < deadline:
        for entry_id, fields in bus.read("results", cursor, block_ms=1_000):
            cursor, results = entry_id, decode(fields)
            for result in results.get("results", []):
                if result["command_id"] != command_id:
                    continue
                told = {"worker": results["worker"], "status": result["status"], "counts": result.get("counts", {})}
                print(json.dumps(told), flush=True)
                if result["status"] in FINAL:  # `deferred` is not: a final one follows
                    waiting.discard(results["worker"])
                    failed |= result["status"] in ("failed", "rejected", "expired")
    for name in sorted(waiting):
        print(json.dumps({"worker": name, "status": "no answer"}), flush=True)
    return 1 if waiting or failed else 0


def follow(bus: Bus, state: Path, from_start: bool, count: int) -> int:
    """Tell every finished request once. The place is saved after each: a restart goes on behind it."""
    if state.exists():
        place = json.loads(state.read_text())
    else:
        place = {"cursor": "0-0" if from_start else bus.end_of("events"), "publishers": {}}
    told = 0
    while not count or told < count:
        try:
            entries = bus.read("events", place["cursor"], block_ms=2_000)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            print(f"the bus is away, trying again: {error}", file=sys.stderr)
            time.sleep(0.5)
            continue
        for entry_id, fields in entries:
            place["cursor"] = entry_id
            if fields.get(b"type") == b"request.finished":
                told += finished(decode(fields), place["publishers"])
            save(state, place)
            if count and told >= count:
                break
    return 0


def finished(event: dict[str, Any], publishers: dict[str, list[int]]) -> int:
    """Tell one request, unless it is a repeat. publishers: for each, [epoch, the seq that comes next]."""
    name, at = event["publisher"], [event["epoch"], event["seq"]]
    known = publishers.get(name)
    if known is not None and at < known:
        return 0  # a batch that was sent again
    missed = 0
    if known is not None:
        missed = at[1] - known[1] if at[0] == known[0] else at[1]
    publishers[name] = [at[0], at[1] + 1]
    line = {
        "request_id": event["request_id"],
        "session": event.get("context", {}).get("session"),
        "chunk_hashes": [hash_text(item) for item in event.get("chunk_hashes", [])],
        "missed": missed,
    }
    print(json.dumps(line), flush=True)
    return 1


def save(state: Path, place: dict[str, Any]) -> None:
    unfinished = state.with_suffix(".part")
    unfinished.write_text(json.dumps(place))
    os.replace(unfinished, state)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    for kind in ("prefetch", "evict"):
        commands.add_parser(kind).add_argument("hashes", nargs="+")
    reading = commands.add_parser("follow")
    reading.add_argument("--state", type=Path, required=True)
    reading.add_argument("--from-start", action="store_true", help="the first time: all that the stream still holds")
    reading.add_argument("--count", type=int, default=0, help="end after so many; 0: never")
    if len(sys.argv) > 1 and sys.argv[1] in ("prefetch", "evict"):
        sys.argv.insert(2, "--")  # a hash may begin with a minus sign
    arguments = parser.parse_args()
    bus = Bus(
        os.environ.get("KVBUS_REDIS_URL", "redis://127.0.0.1:6379/0"), os.environ.get("KVBUS_NAMESPACE", "default")
    )
    try:
        if arguments.what == "follow":
            return follow(bus, arguments.state, arguments.from_start, arguments.count)
        return command(bus, arguments.what, arguments.hashes)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
