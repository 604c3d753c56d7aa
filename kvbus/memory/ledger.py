"""Who needs which chunk: sessions and their chunks, kept in Redis and shared by all memory processes.

with Bus(settings) as bus:            # or KVBus(...).bus
    ledger = Ledger(bus)
    ledger.begin("chatcmpl-7", session="alice-1", intent="travel")
    ...                               # the request runs; its end comes as an event, see kvbus.memory.service
    ledger.switch(session="alice-1")  # before its next turn
    ledger.close("alice-1")

Every call is one step that happens whole or not at all, the commands that follow from it included: they are written to
the commands stream by the same script. So processes may crash, repeat themselves, and run side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec

from kvbus.errors import ConfigError, InvalidMessage
from kvbus.memory.chains import Chain, KnownChains, chain_arguments
from kvbus.memory.config import MemoryConfig, load_config
from kvbus.protocol.commands import Tags, Target
from kvbus.protocol.events import RequestFinished, WorkerGap, WorkerStarted
from kvbus.protocol.hashes import ChunkHash, to_hashes
from kvbus.protocol.limits import MAX_TEXT
from kvbus.protocol.results import CommandResult, Status
from kvbus.streams.connection import Argument, Bus
from kvbus.streams.ledger_store import (
    COMMAND_PREFIX,
    Answer,
    Form,
    Issued,
    LedgerStore,
    Packed,
    StoredSession,
    pack,
    unpack,
)
from kvbus.streams.position import Position

ISSUER = "kvbus-memory"


class TurnStatus(StrEnum):
    """What became of an event."""

    TAKEN = "TURN"
    REPEAT = "REPEAT"
    """It was taken before, here or by another process."""
    ANONYMOUS = "ANONYMOUS"
    """It names no session, and nobody announced its request: its chunks are left to the engine."""
    LATE = "LATE"
    """Its session was closed before; what only this request held is evicted."""
    FOREIGN = "FOREIGN"
    """Its session belongs to another tenant."""
    OFF = "OFF"
    """kvcache_enabled is false."""


class Turn(msgspec.Struct, frozen=True):
    """What an event changed. before, common, after: the chain's length, and how much of it stayed; missed: events of
    this publisher that never came; commands: what was put on the stream; chunks_before: with debugging alone.
    """

    status: TurnStatus
    session: str = ""
    before: int = 0
    common: int = 0
    after: int = 0
    missed: int = 0
    commands: tuple[Issued, ...] = ()
    chunks_before: tuple[ChunkHash, ...] = ()


class Begun(StrEnum):
    """What became of an announcement."""

    BEGUN = "BEGUN"
    ALREADY = "ALREADY"
    """The same request was announced before; its time begins anew."""
    FOREIGN = "FOREIGN"
    """Its session belongs to another tenant; nothing was done."""


class Switched(msgspec.Struct, frozen=True):
    """found: sessions, 0 if this tenant has none of that name. chunks: how many are asked for."""

    found: int
    chunks: int = 0
    commands: tuple[Issued, ...] = ()


class Closed(msgspec.Struct, frozen=True):
    """known: the tenant had such a session. chunks: how many it held; commands: evicts of what nobody else holds."""

    known: bool
    chunks: int = 0
    commands: tuple[Issued, ...] = ()


class Totals(msgspec.Struct, frozen=True):
    """The whole ledger in numbers. chunks: different ones that are held; resident: of these, taken to be in DDR."""

    sessions: int
    chunks: int
    resident: int
    running: int
    doomed: int
    expired: int
    shed: int


class Ledger:
    """The ledger of one namespace. Safe for threads; any number of processes may use the same one at a time."""

    def __init__(self, bus: Bus, config: MemoryConfig | None = None) -> None:
        self.bus = bus
        self.config = config or load_config(settings=bus.settings)
        self.store = LedgerStore(bus)
        self._chains = KnownChains()

    # -- what a memory system says -----------------------------------------------------------------------------

    def begin(
        self,
        request_id: str,
        *,
        session: str = "",
        intent: str = "",
        tenant: str = "",
        chunk_hashes: Iterable[ChunkHash | str] = (),
        tags: Tags = (),
    ) -> Begun:
        """A request begins: nothing that it or its session holds is evicted until its event comes.

        request_id: vLLM's own, or the one that the client knows. chunk_hashes: what the request will use, if that
        is known; its session's chunks are held anyway. Raises InvalidMessage for a name too long, BusError.
        """
        self._must_be_on()
        hashes = to_hashes(chunk_hashes)
        if not request_id or not (session or hashes):
            raise InvalidMessage("a request needs an id, and a session or chunk_hashes")
        values: dict[str, Argument] = {"request": _name("request_id", request_id)}
        values |= _who(session, intent, tenant) | chain_arguments(hashes, tags)
        answer = self._step("begin", values)
        return Begun(answer.status)

    def switch(self, session: str = "", *, intent: str = "", tenant: str = "") -> Switched:
        """Another topic begins: bring its chunks into DDR, and make room for them if there is a budget.

        session, or intent: all sessions of that intent (the 64 used last), the newest first. Chunks of running
        requests are not touched. Raises InvalidMessage, BusError.
        """
        self._must_be_on()
        if bool(session) == bool(intent):
            raise InvalidMessage("switch to a session or to an intent: name one of them")
        answer = self._step("switch", _who(session, intent, tenant))
        if answer.status != "SWITCHED":
            return Switched(0)
        return Switched(answer.number(0), answer.number(1), answer.issued)

    def close(self, session: str, *, tenant: str | None = None) -> Closed:
        """A session is over: what nobody else holds is evicted. tenant: None for whoever it is. Raises BusError."""
        self._must_be_on()
        values: dict[str, Argument] = {"session": _name("session", session)}
        if tenant is not None:
            values["tenant"] = tenant
        answer = self._step("close", values)
        if answer.status != "CLOSED":
            return Closed(False)
        return Closed(True, answer.number(0), answer.issued)

    # -- what events say ---------------------------------------------------------------------------------------

    def turn(self, event: RequestFinished, position: Position) -> Turn:
        """A request has finished. position: the event's place in the stream, taken by the same step. Raises BusError.

        Who it was comes from the announced request or else from the event's context: `session`, `intent` and
        `tenant`, texts or integers. An event without hashes changes no chunks.
        """
        if not self.config.kvcache_enabled:
            return Turn(TurnStatus.OFF)
        values: dict[str, Argument] = {
            "publisher": event.publisher,
            "epoch": event.epoch,
            "seq": event.seq,
            "request": event.request_id,
            "external": event.external_id or "",
            "debug": int(self.config.kvcache_debug_enabled),
            "changes": int(bool(event.chunk_hashes)),
            **_who(*(_context(event, name) for name in ("session", "intent", "tenant")), strict=False),
        }
        session, chain = str(values["session"]), Chain.of(event)
        known = self._chains.get(session)
        answer = self._step("turn", values | chain.arguments(after=known), position)
        if answer.status == "WHOLE":
            answer = self._step("turn", values | chain.arguments(), position)
        if chain.hashes:
            self._chains.keep(session, chain)
        status = TurnStatus(answer.status)
        if status is not TurnStatus.TAKEN:
            missed, session = (answer.number(0), answer.rest[1].decode()) if answer.rest else (0, "")
            return Turn(status, session, missed=missed, commands=answer.issued)
        missed, before, common, after = (answer.number(place) for place in range(4))
        chunks = unpack(Packed(answer.number(5), answer.rest[4])) if answer.rest[4] else ()
        return Turn(status, answer.rest[6].decode(), before, common, after, missed, answer.issued, chunks)

    def worker_event(self, event: WorkerStarted | WorkerGap, position: Position) -> tuple[Issued, ...]:
        """A worker has started empty, or has missed commands: what matters is sent again, to it alone.

        The newest sessions are prefetched; after a gap, what was evicted lately and is still held by nobody is
        evicted once more. Raises BusError.
        """
        target = Target(instances=(event.instance,), ranks=(event.rank,))
        evicts = isinstance(event, WorkerGap)
        answer = self._step(
            "reissue", {"hot": self.config.hot_sessions, "evicts": int(evicts)}, position, target=target
        )
        return answer.issued

    def answered(self, result: CommandResult) -> int:
        """A worker's answer. If it could not carry out an evict of the ledger's, its chunks are looked at again.

        Chunks in use, and commands that came too late: they are evicted after retry_ms unless somebody holds them by
        then. Returns how many will be looked at. Raises BusError.
        """
        if result.type != "evict" or not result.command_id.startswith(COMMAND_PREFIX) or not result.status.final:
            return 0
        left = (*result.chunks.in_use, *result.chunks.busy)
        all_listed = len(left) == result.counts.in_use + result.counts.busy
        if result.status is not Status.EXPIRED and not left and all_listed:
            return 0
        packed = pack(left if all_listed else ())
        values: dict[str, Argument] = {
            "command": result.command_id,
            "packed": packed.data,
            "width": packed.width,
            "retry_ms": self.config.retry_ms,
        }
        return self._step("again", values).number(0)

    def skip(self, position: Position) -> None:
        """An event that says nothing to the ledger: only the place moves. Raises BusError."""
        self._step("pass", {}, position)

    def rewind(self, expected: Position, position: Position) -> bool:
        """The events stream is another one than that of `expected`: go on from `position`, unless another process
        has moved the place before. Raises BusError.
        """
        return self._step("rewind", {"expected": expected.cursor}, position).status == "REWOUND"

    def sweep(self) -> tuple[int, tuple[Issued, ...]]:
        """What time brings: evicts that are due, idle sessions, requests that never ended, limits.

        Returns how much was done (0: nothing is left for now) and the commands. Raises BusError.
        """
        answer = self._step("sweep", {})
        return answer.number(0), answer.issued

    # -- reading -----------------------------------------------------------------------------------------------

    def session(self, session: str) -> StoredSession | None:
        """Raises BusError."""
        return self.store.session(session)

    def chunks(self, session: str) -> tuple[ChunkHash, ...]:
        """A session's chunks in their order. Raises BusError."""
        found = self.store.session(session)
        return self.store.chain(session, found.width) if found is not None else ()

    def sessions(self, *, tenant: str | None = None, first: int = 0, count: int = 100) -> list[StoredSession]:
        """Sessions, the most recently used first. Raises BusError."""
        return self.store.recent(tenant=tenant, first=first, count=count)

    def held_by(self, chunk_hash: ChunkHash | str, tags: Tags = ()) -> int:
        """How many sessions and running requests hold a chunk. Raises InvalidMessage, BusError."""
        return self.store.holds(to_hashes((chunk_hash,))[0], tags)[0]

    def holders(self, chunk_hash: ChunkHash | str, tags: Tags = ()) -> Iterator[str]:
        """The sessions that hold a chunk; looks at all sessions. Raises InvalidMessage, BusError."""
        return self.store.holders(to_hashes((chunk_hash,))[0], tags)

    def totals(self) -> Totals:
        """Raises BusError."""
        numbers = self.store.numbers("totals")
        return Totals(
            sessions=self.store.count("recent"),
            chunks=numbers.get("chunks", 0),
            resident=numbers.get("resident", 0),
            running=self.store.count("running"),
            doomed=self.store.count("doomed"),
            expired=numbers.get("expired", 0),
            shed=numbers.get("shed", 0),
        )

    # -- inside ------------------------------------------------------------------------------------------------

    def _step(
        self,
        op: str,
        values: dict[str, Argument],
        position: Position | None = None,
        *,
        target: Target | None = None,
    ) -> Answer:
        config = self.config
        given: dict[str, Argument] = {
            "budget": config.ddr_budget_chunks,
            "grace_ms": config.grace_ms,
            "evict_ttl_ms": config.evict_ttl_ms,
            "request_ms": config.request_ms,
            "ttl_ms": config.session_ms,
            "closed_ms": config.closed_ms,
            "max_sessions": config.max_sessions,
            "tenant_sessions": config.tenant_sessions,
            "tenant_chunks": config.tenant_chunks,
            **values,
        }
        if position is not None:
            given |= {"entry": position.cursor, "at": position.at, "entries": position.entries}
        return self.store.step(op, given, self._forms(target))

    def _forms(self, target: Target | None) -> dict[str, Form]:
        config = self.config
        evict_ttl, prefetch_ttl = config.evict_ttl_ms, config.prefetch_ttl_ms
        return {
            "evict": Form.of(issuer=ISSUER, ttl_ms=evict_ttl, locations=config.evict_locations, target=target),
            "demote": Form.of(issuer=ISSUER, ttl_ms=evict_ttl, locations=(config.ddr_tier,), target=target),
            "prefetch": Form.of(issuer=ISSUER, ttl_ms=prefetch_ttl, sources=config.prefetch_sources, target=target),
        }

    def _must_be_on(self) -> None:
        if not self.config.kvcache_enabled:
            raise ConfigError("kvcache_enabled is false", hint="Set kvcache_enabled to use the ledger.")


def _name(what: str, value: str) -> str:
    if len(value) > MAX_TEXT:
        raise InvalidMessage(f"{what} has {len(value):,} characters; the limit is {MAX_TEXT:,}")
    return value


def _who(session: str, intent: str, tenant: str, *, strict: bool = True) -> dict[str, Argument]:
    given = {"session": session, "intent": intent, "tenant": tenant}
    return {name: _name(name, value) if strict else value[:MAX_TEXT] for name, value in given.items()}


def _context(event: RequestFinished, name: str) -> str:
    value = event.context.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) else ""
