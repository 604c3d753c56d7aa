"""The session ledger's storage: every step is one Lua script, so it happens whole or not at all, commands included.

The scripts stand in the folder `ledger`; what they keep where is said at the top of the first. They reach keys that
are not named in the call (one for each session touched): all of them lie in the namespace's one slot.
"""

from __future__ import annotations

import functools
import os
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources

import msgspec
from blake3 import blake3

from kvbus.errors import BusRefused
from kvbus.protocol.commands import Tags
from kvbus.protocol.hashes import ChunkHash
from kvbus.protocol.limits import INT64_MIN
from kvbus.streams.connection import Argument, Bus, Script, bus_errors
from kvbus.streams.log import Log
from kvbus.streams.position import Position

RESIDENT = 1 << 20
"""A chunk's number holds how many hold it, and this many times how many of these are taken to have it in DDR."""
COMMAND_PREFIX = "memory-"
"""What the ids of the ledger's own commands begin with."""
_COMMAND_BYTES = 4_096
_INT64_MAX = 2**63 - 1


class Packed(msgspec.Struct, frozen=True):
    """Hashes in order as the scripts take them. width: bytes a hash; 33 where not all are signed 64-bit integers."""

    width: int
    data: bytes

    def __len__(self) -> int:
        return len(self.data) // self.width


def pack(hashes: Sequence[ChunkHash]) -> Packed:
    try:
        numbers = array("q", hashes)  # type: ignore[type-var]  # what is no number is told by the error
    except (OverflowError, TypeError):
        return Packed(33, b"".join(bytes([len(raw := _raw(item))]) + raw.ljust(32, b"\0") for item in hashes))
    if sys.byteorder == "little":
        numbers.byteswap()
    return Packed(8, numbers.tobytes())


def unpack(packed: Packed) -> tuple[ChunkHash, ...]:
    if packed.width == 8:
        return struct.unpack(f">{len(packed)}q", packed.data)
    parts = (packed.data[start : start + 33] for start in range(0, len(packed.data), 33))
    return tuple(_hash(part[1 : 1 + part[0]]) for part in parts)


def _raw(value: ChunkHash) -> bytes:
    if isinstance(value, bytes):
        return value
    if INT64_MIN <= value <= _INT64_MAX:
        return value.to_bytes(8, "big", signed=True)
    return b"\1" + value.to_bytes(8, "big")


def _hash(raw: bytes) -> ChunkHash:
    if len(raw) == 32:
        return raw
    return int.from_bytes(raw[-8:], "big", signed=len(raw) == 8)


def space_of(tags: Tags) -> bytes:
    """Chunks with other tags are other chunks: this names the tags in eight bytes, none in no byte."""
    return blake3(encode_tags(tags)).digest(length=8) if tags else b""


def encode_tags(tags: Tags) -> bytes:
    """The tags as they stand in a command's body."""
    return msgspec.msgpack.encode(tags) if tags else b""


class Form(msgspec.Struct, frozen=True):
    """The part of a command's body that does not change: an encoded map without its header, and its pairs' number."""

    pairs: int
    body: bytes

    @classmethod
    def of(cls, **values: object) -> Form:
        given = {name: value for name, value in values.items() if value is not None}
        body = b"".join(msgspec.msgpack.encode(item) for pair in given.items() for item in pair)
        return cls(len(given), body)


class Issued(msgspec.Struct, frozen=True):
    """A command that a step has put on the stream. form: evict, demote (evict from DDR alone) or prefetch."""

    form: str
    command_id: str
    chunk_hashes: tuple[ChunkHash, ...]


class Answer(msgspec.Struct, frozen=True):
    """What a step answers: its status, the commands that it issued, and what else it tells."""

    status: str
    issued: tuple[Issued, ...]
    rest: tuple[bytes, ...]

    def number(self, place: int) -> int:
        return int(self.rest[place])


class StoredSession(msgspec.Struct, frozen=True):
    """A session as it is stored. length, resident: chunks. used_ms: server time, 0 when only its limbo is left."""

    session: str
    tenant: str
    intent: str
    length: int
    resident: int
    running: int
    turns: int
    since_ms: int
    used_ms: int
    width: int
    space: bytes
    tags: Tags
    closing: bool


_hashes = msgspec.msgpack.Decoder(list[int | bytes])
_tags = msgspec.msgpack.Decoder(Tags)


@functools.cache
def _script() -> Script:
    folder = resources.files("kvbus.streams") / "ledger"
    files = ("1_chunks.lua", "2_sessions.lua", "3_steps.lua")
    return Script("\n".join((folder / name).read_text("utf-8") for name in files))


class LedgerStore:
    """Runs steps and reads what is stored. Safe for threads."""

    def __init__(self, bus: Bus, log: Log | None = None) -> None:
        self.bus = bus
        self._log = log or Log(bus)

    def step(self, op: str, values: Mapping[str, Argument], forms: Mapping[str, Form]) -> Answer:
        """One step. Raises BusError; after BusUnavailable it may have been done: the same may be asked again."""
        keys = self.bus.keys
        args: list[Argument] = ["op", op, "token", COMMAND_PREFIX + os.urandom(16).hex()]
        args += ["maxlen", self._log.maxlen(keys.commands, _COMMAND_BYTES if forms else 0)]
        for name, form in forms.items():
            args += [name, form.body, f"{name}_pairs", form.pairs]
        for name, value in values.items():
            args += [name, value]
        with bus_errors(f"ledger {op}"):
            reply = _script().run(self.bus.client, [keys.commands, keys.memory("position")], args)
        flat = reply[1]
        issued = tuple(
            Issued(flat[i].decode(), flat[i + 1].decode(), tuple(_hashes.decode(flat[i + 2])))
            for i in range(0, len(flat), 3)
        )
        rest = tuple(item if isinstance(item, bytes) else str(item).encode() for item in reply[2:])
        return Answer(reply[0].decode(), issued, rest)

    def position(self) -> Position | None:
        """How far the ledger has taken the events; None at the very first start. Raises BusError."""
        with bus_errors("read the ledger's place"):
            raw = self.bus.client.hmget(self.bus.keys.memory("position"), "cursor", "at", "entries")
        if raw[0] is None:
            return None
        try:
            return Position(raw[0].decode(), (raw[1] or b"").decode(), int(raw[2] or 0))
        except ValueError as error:
            raise BusRefused(f"the ledger's place cannot be read: {error}") from None

    def holds(self, value: ChunkHash, tags: Tags = ()) -> tuple[int, int]:
        """How many sessions and running requests hold a chunk, and how many of them in DDR. Raises BusError."""
        node = space_of(tags) + _raw(value)
        with bus_errors("read a chunk's holders"):
            raw = self.bus.client.hget(self.bus.keys.memory(f"chunks:{_bucket(node)}"), node)
        number = int(raw or 0)
        return number % RESIDENT, number // RESIDENT

    def session(self, session: str) -> StoredSession | None:
        """Raises BusError."""
        return next(iter(self._sessions([(session.encode(), None)])), None)

    def chain(self, session: str, width: int = 8) -> tuple[ChunkHash, ...]:
        """A session's chunks in their order. Raises BusError."""
        with bus_errors(f"read the chunks of session {session!r}"):
            raw = self.bus.client.get(self.bus.keys.memory(f"chain:{session}"))
        return unpack(Packed(width, raw or b""))

    def recent(self, *, tenant: str | None = None, first: int = 0, count: int = 100) -> list[StoredSession]:
        """Sessions, the most recently used first, from place `first` on. Raises BusError."""
        key = self.bus.keys.memory("recent" if tenant is None else f"tenant:{tenant}")
        with bus_errors("list the ledger's sessions"):
            found = self.bus.client.zrevrange(key, first, first + count - 1, withscores=True)
        return self._sessions([(name, int(score)) for name, score in found])

    def count(self, key: str) -> int:
        """Members of one of the ledger's sorted sets. Raises BusError."""
        with bus_errors(f"count memory:{key}"):
            return int(self.bus.client.zcard(self.bus.keys.memory(key)))

    def numbers(self, key: str) -> dict[str, int]:
        """One of the ledger's hashes of counters. Raises BusError."""
        with bus_errors(f"read memory:{key}"):
            raw = self.bus.client.hgetall(self.bus.keys.memory(key))
        return {name.decode(): int(value) for name, value in raw.items()}

    def holders(self, value: ChunkHash, tags: Tags = (), *, page: int = 200) -> Iterator[str]:
        """The sessions that hold a chunk, by a look at every session's chain, a page at a time. Raises BusError."""
        space, raw = space_of(tags), _raw(value)
        for sessions in self.pages(page):
            with bus_errors("look for a chunk's holders"):
                chains = self.bus.client.mget([self.bus.keys.memory(f"chain:{item.session}") for item in sessions])
            for item, chain in zip(sessions, chains, strict=True):
                if item.space == space and chain and _contains(Packed(item.width, chain), raw):
                    yield item.session

    def pages(self, page: int = 200) -> Iterator[list[StoredSession]]:
        """All sessions, a page at a time. Raises BusError."""
        first = 0
        while sessions := self.recent(first=first, count=page):
            yield sessions
            first += page

    def _sessions(self, found: Sequence[tuple[bytes, int | None]]) -> list[StoredSession]:
        keys = self.bus.keys
        with bus_errors("read the ledger's sessions"):
            pipe = self.bus.client.pipeline(transaction=False)
            for name, score in found:
                pipe.hgetall(keys.memory(f"session:{name.decode()}"))
                if score is None:
                    pipe.zscore(keys.memory("recent"), name)
            replies = iter(pipe.execute())
        sessions = []
        for name, score in found:
            raw = next(replies)
            used = next(replies) if score is None else score
            if raw:
                sessions.append(_stored(name.decode(), raw, int(used or 0)))
        return sessions


def _stored(name: str, raw: Mapping[bytes, bytes], used_ms: int) -> StoredSession:
    tags = raw[b"tags"]
    return StoredSession(
        session=name,
        tenant=raw[b"tenant"].decode(),
        intent=raw[b"intent"].decode(),
        length=int(raw[b"length"]),
        resident=int(raw[b"resident"]),
        running=int(raw[b"running"]),
        turns=int(raw.get(b"turns", b"0")),
        since_ms=int(raw.get(b"since", b"0")),
        used_ms=used_ms,
        width=int(raw[b"width"]),
        space=raw[b"space"],
        tags=_tags.decode(tags) if tags else (),
        closing=raw[b"closing"] == b"1",
    )


def _bucket(node: bytes) -> int:
    return node[-1] % 64 * 256 + node[-2]


def _contains(chain: Packed, raw: bytes) -> bool:
    wanted = raw if chain.width == 8 else bytes([len(raw)]) + raw
    start = chain.data.find(wanted)
    while start >= 0:
        if start % chain.width == 0:
            return True
        start = chain.data.find(wanted, start + 1)
    return False
