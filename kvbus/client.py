"""What a memory system uses: prefetch, evict, lookup, ping, and the events.

with KVBus() as bus:
    for delivery in bus.events():
        ...
    bus.evict(old_chunks).wait()
    bus.prefetch(new_chunks)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from queue import Empty, SimpleQueue
from types import TracebackType

import msgspec

from kvbus.answers import Answer, Answers, CommandState
from kvbus.errors import BusUnavailable, NotAnswered
from kvbus.event_stream import EventStream, Start
from kvbus.protocol.codec import encode_entry, new_message_id
from kvbus.protocol.commands import (
    EVICT_TTL_MS,
    LOOKUP_TTL_MS,
    PREFETCH_TTL_MS,
    Command,
    Evict,
    Lookup,
    Ping,
    Prefetch,
    Tags,
    Target,
)
from kvbus.protocol.hashes import ChunkHash, to_hashes
from kvbus.settings import Settings, load_settings
from kvbus.streams.connection import Bus
from kvbus.streams.issue import Issued, Issuer
from kvbus.streams.log import Log
from kvbus.streams.registry import Member

Hashes = Iterable[ChunkHash | str]

SEND_TIMEOUT_S = 1.5
"""How long a command is sent again while the bus does not answer."""


class CommandHandle:
    """A command on its way. `state` never waits; `wait` does."""

    def __init__(self, answers: Answers, command: Command, command_id: str, issued: Issued) -> None:
        self.command = command
        self.command_id = command_id
        self.entry_id = issued.entry_id
        self.members = issued.members
        """Who was registered when the command was written: each owes a result."""
        self._answers = answers

    def __repr__(self) -> str:
        return f"CommandHandle({self.command.TYPE} {self.command_id})"

    @property
    def state(self) -> CommandState:
        """What is known now."""
        return self._answers.state(self.command_id) or CommandState(self.command_id)

    def wait(self, timeout_s: float | None = None) -> CommandState:
        """The final result of every live worker, or what there is when the time is over.

        timeout_s: None takes the command's own time to live and a little more. Look at `.complete`, `.waiting` and
        `.dead` of what is returned: time that runs out is no error here.
        """
        return self._answers.wait(self.command_id, self._seconds(timeout_s))

    def results(self, timeout_s: float | None = None) -> dict[str, Answer]:
        """The same, but raises NotAnswered, naming them, unless every live worker has answered."""
        return self.finals(self.wait(timeout_s))

    def finals(self, state: CommandState) -> dict[str, Answer]:
        """The final results in a state of this command. Raises NotAnswered, naming who has not given one."""
        if not state.complete:
            silent = [
                *(f"{name} (no answer yet)" for name in state.waiting),
                *(f"{name} (died)" for name in state.dead),
                *(f"{name} (stuck)" for name in state.stuck),
            ]
            raise NotAnswered(f"{self.command.TYPE} {self.command_id}: no final result from {', '.join(silent)}")
        return state.finals

    def answers(self, timeout_s: float | None = None) -> Iterator[Answer]:
        """Final answers as they come, until nobody is waited for any more or the time is over."""
        queue: SimpleQueue[CommandState] = SimpleQueue()
        end = self._answers.watch(self.command_id, queue.put)
        deadline = time.monotonic() + self._seconds(timeout_s)
        told: set[str] = set()
        try:
            while True:
                try:
                    state = queue.get(timeout=max(0.0, deadline - time.monotonic()))
                except Empty:
                    return
                for name, answer in state.finals.items():
                    if name not in told:
                        told.add(name)
                        yield answer
                if state.settled:
                    return
        finally:
            end()

    def watch(self, callback: Callable[[CommandState], None]) -> Callable[[], None]:
        """Call back from another thread at every change, without ever blocking it. Returns what ends it."""
        return self._answers.watch(self.command_id, callback)

    def _seconds(self, timeout_s: float | None) -> float:
        return self.command.ttl_ms / 1000 + 5.0 if timeout_s is None else timeout_s


class KVBus:
    """One memory system's end of the bus. Safe for threads. Connects at first use.

    settings: None reads KVBUS_* from the environment. issuer: who sends the commands, for people who look later.
    """

    def __init__(self, settings: Settings | None = None, *, issuer: str | None = None, bus: Bus | None = None) -> None:
        self.settings = settings or (bus.settings if bus is not None else load_settings())
        self.issuer = issuer
        self.bus = bus or Bus(self.settings, client_name="kvbus-client")
        self.log = Log(self.bus)
        self._issuer = Issuer(self.bus, self.log)
        self.answers = Answers(self.bus, self._issuer)
        self._owned = bus is None

    def prefetch(
        self,
        chunk_hashes: Hashes,
        *,
        lookup_id: str | None = None,
        sources: Sequence[str] | None = None,
        tags: Tags = (),
        ttl_ms: int = PREFETCH_TTL_MS,
        target: Target | None = None,
    ) -> CommandHandle:
        """Bring chunks into DDR, the most important first. Raises ProtocolError for bad input, BusError."""
        return self.send(
            Prefetch(
                chunk_hashes=to_hashes(chunk_hashes),
                lookup_id=lookup_id,
                sources=tuple(sources) if sources is not None else None,
                tags=tags,
                ttl_ms=ttl_ms,
                target=target,
            )
        )

    def evict(
        self,
        chunk_hashes: Hashes,
        *,
        lookup_id: str | None = None,
        locations: Sequence[str] | None = None,
        tags: Tags = (),
        ttl_ms: int = EVICT_TTL_MS,
        target: Target | None = None,
    ) -> CommandHandle:
        """Remove chunks from the named tiers (None: from all). Raises ProtocolError for bad input, BusError."""
        return self.send(
            Evict(
                chunk_hashes=to_hashes(chunk_hashes),
                lookup_id=lookup_id,
                locations=tuple(locations) if locations is not None else None,
                tags=tags,
                ttl_ms=ttl_ms,
                target=target,
            )
        )

    def lookup(
        self, chunk_hashes: Hashes, *, tags: Tags = (), ttl_ms: int = LOOKUP_TTL_MS, target: Target | None = None
    ) -> CommandHandle:
        """Ask which tiers hold each chunk: `.held.tiers_of(place)` of each result. Raises ProtocolError, BusError."""
        return self.send(Lookup(chunk_hashes=to_hashes(chunk_hashes), tags=tags, ttl_ms=ttl_ms, target=target))

    def ping(self, *, ttl_ms: int = LOOKUP_TTL_MS, target: Target | None = None) -> CommandHandle:
        """Ask every worker for a sign of life. Raises BusError."""
        return self.send(Ping(ttl_ms=ttl_ms, target=target))

    def send(
        self,
        command: Command,
        *,
        command_id: str | None = None,
        origin: str | None = None,
        timeout_s: float = SEND_TIMEOUT_S,
        need_workers: bool = False,
    ) -> CommandHandle:
        """Put any command on the stream. Raises ProtocolError before anything is written, BusError.

        command_id: a command sent again under its old id is not carried out twice. origin: the message that this
        one repeats. timeout_s: how long to try while the bus does not answer; a lost reply does no harm.
        need_workers: raise NoWorkers, with nothing written, when nobody is alive to carry the command out. After an
        outage of the bus every heartbeat has lapsed for a second or two: `answers.may_return` knows.
        """
        ids = [command_id or new_message_id()]
        return self._send([command], ids, origin, timeout_s, need_workers)[0]

    def send_all(
        self,
        commands: Sequence[Command],
        *,
        command_ids: Sequence[str] | None = None,
        timeout_s: float = SEND_TIMEOUT_S,
        need_workers: bool = False,
    ) -> list[CommandHandle]:
        """Put many commands on the stream, in this order and in few round trips. Raises as `send` does.

        command_ids: one for each command; None makes them. After BusUnavailable some of them may have been written.
        """
        ids = [new_message_id() for _ in commands] if command_ids is None else command_ids
        return self._send(commands, ids, None, timeout_s, need_workers)

    def _send(
        self, commands: Sequence[Command], ids: Sequence[str], origin: str | None, timeout_s: float, need_workers: bool
    ) -> list[CommandHandle]:
        deadline = time.monotonic() + timeout_s
        backoff = 0.02
        while True:
            try:
                self.answers.start()
                commands = [self._stamped(command) for command in commands]
                entries = [
                    encode_entry(command, message_id=own_id, origin=origin)
                    for command, own_id in zip(commands, ids, strict=True)
                ]
                self.answers.expect(*ids)
                issued = self._issuer.issue_all(entries, need_alive=need_workers)
                break
            except BusUnavailable:
                if time.monotonic() + backoff > deadline:
                    raise
                time.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 2, 0.5)
        for members, group in groupby(zip(ids, issued, strict=True), lambda pair: pair[1].members):
            self.answers.owed_by(members, *(own_id for own_id, _ in group))
        return [
            CommandHandle(self.answers, command, own_id, one)
            for command, own_id, one in zip(commands, ids, issued, strict=True)
        ]

    def _stamped(self, command: Command) -> Command:
        if command.issued_at_ms is not None:
            return command
        return msgspec.structs.replace(command, issued_at_ms=self.bus.now_ms(), issuer=command.issuer or self.issuer)

    def workers(self) -> tuple[Member, ...]:
        """Who is registered, and who of them is alive. Raises BusError."""
        members = self._issuer.members()
        self.answers.heard_of(members)
        return members

    def events(self, *, reader: str | None = None, start: Start = "end", block_ms: int | None = None) -> EventStream:
        """Finished requests and the workers' own events, one by one.

        reader: a name under which the place is kept, so that a restart goes on where `save` was last called; start
        counts only the first time: "end", "start" or an entry id. Raises BusError.
        """
        return EventStream(self.bus, reader=reader, start=start, block_ms=block_ms)

    def close(self) -> None:
        """Stop the reader's thread and close the connections."""
        self.answers.close()
        if self._owned:
            self.bus.close()

    def __enter__(self) -> KVBus:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
