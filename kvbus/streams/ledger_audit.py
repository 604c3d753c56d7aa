"""Counts the ledger anew from its sessions and requests, and compares. Exact while nobody writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from kvbus.streams.connection import Bus, bus_errors
from kvbus.streams.ledger_store import RESIDENT


class Difference(msgspec.Struct, frozen=True):
    """A number that is not what it should be. what: a counter's name, or a chunk's (tags digest and hash, in hex)."""

    what: str
    stored: int
    counted: int


class Audit(msgspec.Struct, frozen=True):
    """sessions: those that are only waiting for a request to end included. holds: the sum over all chunks."""

    sessions: int
    requests: int
    chunks: int
    holds: int
    resident: int
    differences: tuple[Difference, ...]


def audit(bus: Bus) -> Audit:
    """Reads the whole ledger, in steps of bounded size. Raises BusError."""
    client, keys = bus.client, bus.keys
    expected: Counter[bytes] = Counter()
    tenants: Counter[str] = Counter()
    sessions = requests = 0
    with bus_errors("audit the ledger"):
        for key in _scan(bus, "session:"):
            raw = client.hgetall(keys.memory(f"session:{key}"))
            if not raw:
                continue
            sessions += 1
            chain = client.get(keys.memory(f"chain:{key}")) or b""
            width = int(raw[b"width"])
            _add(expected, raw[b"space"], width, chain, int(raw[b"resident"]))
            if raw[b"closing"] == b"0":
                tenants[raw[b"tenant"].decode()] += len(chain) // width
        for key in _scan(bus, "limbo:"):
            for bag in client.lrange(keys.memory(f"limbo:{key}"), 0, -1):
                _add_bag(expected, bag)
        for key in _scan(bus, "request:"):
            requests += 1
            bag = client.hget(keys.memory(f"request:{key}"), "bag")
            if bag:
                _add_bag(expected, bag)
        stored: dict[bytes, int] = {}
        for key in _scan(bus, "chunks:"):
            stored |= {node: int(value) for node, value in client.hgetall(keys.memory(f"chunks:{key}")).items()}
        totals = {name.decode(): int(value) for name, value in client.hgetall(keys.memory("totals")).items()}
        by_tenant = {name.decode(): int(value) for name, value in client.hgetall(keys.memory("tenants")).items()}
    differences = [
        Difference(node.hex(), stored.get(node, 0), expected[node])
        for node in sorted(expected.keys() | stored.keys())
        if stored.get(node, 0) != expected[node]
    ]
    resident = sum(value >= RESIDENT for value in expected.values())
    counted = {"chunks": len(expected), "resident": resident}
    differences += [
        Difference(name, totals.get(name, 0), value) for name, value in counted.items() if totals.get(name, 0) != value
    ]
    differences += [
        Difference(f"tenant {name!r}", by_tenant.get(name, 0), tenants[name])
        for name in sorted(tenants.keys() | by_tenant.keys())
        if by_tenant.get(name, 0) != tenants[name]
    ]
    holds = sum(value % RESIDENT for value in expected.values())
    return Audit(sessions, requests, len(expected), holds, resident, tuple(differences))


def _scan(bus: Bus, part: str) -> Iterator[str]:
    prefix = bus.keys.memory(part)
    pattern = "".join(f"[{c}]" if c in "[]*?" else c for c in prefix) + "*"
    seen: set[str] = set()
    for key in bus.client.scan_iter(match=pattern, count=1_000):
        name = key.decode().removeprefix(prefix)
        if name not in seen:
            seen.add(name)
            yield name


def _add(expected: Counter[bytes], space: bytes, width: int, packed: bytes, residents: int) -> None:
    for place in range(len(packed) // width):
        item = packed[place * width : (place + 1) * width]
        node = space + (item if width == 8 else item[1 : 1 + item[0]])
        expected[node] += 1 + (RESIDENT if place < residents else 0)


def _add_bag(expected: Counter[bytes], bag: bytes) -> None:
    space_len, tags_len, width, residents, rest = bag.split(b" ", 4)
    space = rest[: int(space_len)]
    _add(expected, space, int(width), rest[int(space_len) + int(tags_len) :], int(residents))
