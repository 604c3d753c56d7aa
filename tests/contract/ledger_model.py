"""What the session ledger should hold, in plain Python; a bus that loses calls; and the worker that obeys."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from blake3 import blake3

from kvbus.errors import BusUnavailable
from kvbus.protocol import ChunkHash, Evict, FinishReason, Prefetch, RequestFinished
from kvbus.protocol.codec import decode_entry, encode_entry
from kvbus.streams.connection import Argument, Bus
from kvbus.streams.ledger_store import Answer, Form, LedgerStore
from kvbus.streams.log import Log


def chain(path: Sequence[object]) -> tuple[ChunkHash, ...]:
    """The chained hashes of a text whose chunks are the parts of `path`."""
    hashes: list[ChunkHash] = []
    text = b""
    for part in path:
        text = blake3(text + repr(part).encode()).digest(length=8)
        hashes.append(int.from_bytes(text, "big", signed=True))
    return tuple(hashes)


def finished(
    publisher: str,
    seq: int,
    hashes: Sequence[ChunkHash],
    *,
    epoch: int = 1,
    request_id: str = "",
    external_id: str | None = None,
    tags: tuple[tuple[str, str], ...] = (),
    **context: Any,
) -> RequestFinished:
    """An event as a publisher would send it. context: session, intent, tenant."""
    return RequestFinished(
        request_id=request_id or f"{publisher}-{epoch}-{seq}",
        external_id=external_id,
        instance=publisher,
        reason=FinishReason.STOP,
        chunk_hashes=tuple(hashes),
        tags=tags,
        context=context,
        publisher=publisher,
        epoch=epoch,
        seq=seq,
        finished_at_ms=0,
    )


def publish(bus: Bus, event: RequestFinished) -> str:
    message_id = f"{event.publisher}:{event.epoch}:{event.seq}"
    return Log(bus).append(bus.keys.events, encode_entry(event, message_id=message_id))


class Worker:
    """Holds what finished requests have stored, until an evict from every tier."""

    def __init__(self, bus: Bus) -> None:
        self._log, self._keys = Log(bus), bus.keys
        self._cursor = "-"
        self.stored: set[ChunkHash] = set()

    def commands(self) -> Iterator[Evict | Prefetch]:
        """What is new on the stream."""
        for entry_id, fields in self._log.scan(self._keys.commands, self._cursor):
            self._cursor = f"({entry_id}"
            message = decode_entry(entry_id, fields).message
            assert isinstance(message, Evict | Prefetch)
            yield message


class LossyStore(LedgerStore):
    """Loses calls before they arrive, and replies on their way back."""

    def __init__(self, bus: Bus, chance: Callable[[], float]) -> None:
        super().__init__(bus)
        self._chance = chance
        self.applied: list[str] = []

    def step(self, op: str, values: Mapping[str, Argument], forms: Mapping[str, Form]) -> Answer:
        chance = self._chance()
        if chance < 0.1:
            raise BusUnavailable("lost on its way")
        answer = super().step(op, values, forms)
        self.applied.append(op)
        if chance < 0.2:
            raise BusUnavailable("the reply was lost")
        return answer


class Held:
    """A session of the model. limbo: what it let go of while a request of its own ran."""

    def __init__(self) -> None:
        self.chain: tuple[ChunkHash, ...] = ()
        self.limbo: list[ChunkHash] = []
        self.running: set[str] = set()
        self.closing = False


class Model:
    """The ledger's promise: who holds what. No residency, no limits."""

    def __init__(self) -> None:
        self.sessions: dict[str, Held] = {}
        self.requests: dict[str, tuple[str, tuple[ChunkHash, ...]]] = {}
        self.closed: set[str] = set()

    def counts(self) -> Counter[ChunkHash]:
        counts: Counter[ChunkHash] = Counter()
        for held in self.sessions.values():
            counts.update(held.chain)
            counts.update(held.limbo)
        for _, own in self.requests.values():
            counts.update(own)
        return counts

    def in_running(self) -> set[ChunkHash]:
        """What running requests and their sessions hold."""
        held = {item for _, own in self.requests.values() for item in own}
        for session in self.sessions.values():
            if session.running:
                held.update(session.chain, session.limbo)
        return held

    def begin(self, request: str, session: str, hashes: tuple[ChunkHash, ...]) -> None:
        if request in self.requests:
            return
        held = self.sessions.setdefault(session, Held())
        self.closed.discard(session)
        held.closing = False
        held.running.add(request)
        common = _common(held.chain, hashes)
        self.requests[request] = (session, hashes[common:])

    def end(self, request: str) -> None:
        session, _ = self.requests.pop(request)
        held = self.sessions[session]
        held.running.discard(request)
        if not held.running:
            held.limbo = []
            if held.closing:
                del self.sessions[session]

    def finish(self, request: str, session: str, hashes: tuple[ChunkHash, ...]) -> None:
        """A request's event."""
        announced = self.requests.get(request)
        session = announced[0] if announced else session
        held = self.sessions.get(session)
        late = held.closing if held else session in self.closed
        if announced:
            self.end(request)
        if late:
            return
        held = self.sessions.setdefault(session, Held())
        if hashes:
            self._let_go(held, held.chain[_common(held.chain, hashes) :])
            held.chain = hashes

    def close(self, session: str) -> None:
        held = self.sessions.get(session)
        if held is None or held.closing:
            return
        self.closed.add(session)
        self._let_go(held, held.chain)
        held.chain, held.closing = (), True
        if not held.running:
            del self.sessions[session]

    def _let_go(self, held: Held, hashes: tuple[ChunkHash, ...]) -> None:
        if held.running:
            held.limbo += hashes


def _common(one: tuple[ChunkHash, ...], other: tuple[ChunkHash, ...]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def random_path(rng: random.Random, before: list[int], systems: int = 3) -> list[int]:
    """A session's next text: longer, cut, changed in the middle, or another altogether."""
    if not before or rng.random() < 0.1:
        return [rng.randrange(systems)] * 4 + [rng.randrange(4) for _ in range(rng.randrange(4))]
    kind = rng.random()
    if kind < 0.6:
        return before + [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
    cut = rng.randrange(len(before) + 1)
    return before[:cut] + [rng.randrange(4) for _ in range(rng.randrange(0 if cut else 1, 4))]
