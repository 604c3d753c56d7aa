"""What became of a command: GET /memory/commands/{command_id} and /memory/prefetch/{lookup_id}.

The newest commands of this process and their answers are remembered. All else is read from the streams, by one scan
at a time, so that a restarted facade knows what the one before it knew.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from kvbus.aio import AsyncHandle
from kvbus.answers import Answer
from kvbus.errors import BusUnavailable
from kvbus.facade import replies
from kvbus.facade.errors import Refused
from kvbus.facade.models import CommandReply
from kvbus.facade.service import Facade
from kvbus.history import FoundCommand, command_at, find_command, find_latest, results_of
from kvbus.protocol.commands import Lookup
from kvbus.streams.position import id_key

T = TypeVar("T")
REMEMBER = 10_000
SCAN_S = 10.0
MAX_SCANS_WAITING = 32


class StatusBook:
    """Knows commands by their ids. Belongs to one event loop."""

    def __init__(self, facade: Facade) -> None:
        self._facade = facade
        self._log = facade.client.log
        self._sent: OrderedDict[str, str] = OrderedDict()
        """command id to entry id"""
        self._scan = asyncio.Lock()
        self._scans_waiting = 0

    def remember(self, handle: AsyncHandle) -> None:
        """A command that this process has sent."""
        self._sent[handle.command_id] = handle.entry_id
        while len(self._sent) > REMEMBER:
            self._sent.popitem(last=False)

    async def of_command(self, command_id: str) -> CommandReply:
        """Raises Refused (404), BusError."""
        entry_id = self._sent.get(command_id)
        found = None
        if entry_id is not None:
            found = await self._facade.bus.call(lambda: command_at(self._log, entry_id, command_id))
        else:
            found = await self._scanned(lambda: find_command(self._log, command_id))
        if found is None:
            raise Refused(404, f"no command {command_id[:80]!r} in the stream", hint="It may have been trimmed away.")
        return await self._reply(found)

    async def of_lookup(self, lookup_id: str) -> CommandReply:
        """The latest prefetch with that lookup_id. Raises Refused (404), BusError."""
        found = await self._scanned(lambda: find_latest(self._log, lookup_id))
        if found is None:
            raise Refused(
                404,
                f"no prefetch with lookup_id {lookup_id[:80]!r} in the stream",
                hint="It may have been trimmed away.",
            )
        return await self._reply(found)

    async def _reply(self, found: FoundCommand) -> CommandReply:
        answers, owed, absent = await self._answers(found)
        alive = await self._alive(owed)
        waiting = tuple(name for name in owed if name in alive)
        dead = tuple(name for name in owed if name not in alive)
        command = found.command
        return CommandReply(
            command_id=found.command_id,
            entry_id=found.entry_id,
            type=found.type,
            state=replies.state_of(answers, waiting=bool(waiting), dead=bool(dead)),
            complete=not owed,
            num_chunks=len(getattr(command, "chunk_hashes", ())),
            workers=replies.workers(answers, listed=True, looked_up=command if isinstance(command, Lookup) else None),
            lookup_id=getattr(command, "lookup_id", None),
            issuer=getattr(command, "issuer", None),
            issued_at_ms=getattr(command, "issued_at_ms", None),
            waiting=waiting,
            dead=dead,
            absent=absent,
        )

    async def _alive(self, names: list[str]) -> set[str]:
        """Who of them is alive. Nobody is called dead on the word of the last roll: it may be older than he is."""
        alive = {member.name for member in self._facade.members if member.alive}
        if not alive.issuperset(names):
            alive = {member.name for member in await self._facade.roll_call() if member.alive}
        return alive

    async def _answers(self, found: FoundCommand) -> tuple[list[Answer], list[str], tuple[str, ...]]:
        """The answers, who still owes one, and who owes one but was dead before the command."""
        state = self._facade.client.answers.state(found.command_id) if found.command_id in self._sent else None
        if state is not None:
            late = tuple(name for name in state.absent if name not in state.finals)
            return list(state.answers.values()), sorted({*state.waiting, *state.dead, *state.stuck}), late
        answers = await self._scanned(lambda: results_of(self._log, found))
        # Who was registered then is not on record: whoever has lived since before the command owes an answer.
        written_ms = id_key(found.entry_id)[0]
        owed = [
            member.name
            for member in self._facade.members
            if member.registration.epoch <= written_ms
            and (member.name not in answers or not answers[member.name].result.status.final)
        ]
        return list(answers.values()), owed, ()

    async def _scanned(self, scan: Callable[[], T]) -> T:
        if self._facade.bus_error is not None:
            raise self._facade.bus_error
        if self._scans_waiting >= MAX_SCANS_WAITING:
            raise Refused(503, "too many requests wait to search the streams", code="busy", hint="Ask again later.")
        self._scans_waiting += 1
        try:
            async with asyncio.timeout(SCAN_S), self._scan:
                return await self._facade.bus.call(scan)
        except TimeoutError:
            raise BusUnavailable(f"the streams could not be searched within {SCAN_S:g} s") from None
        finally:
            self._scans_waiting -= 1
