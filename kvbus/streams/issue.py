"""Putting commands on the stream, and reading in the same step who owes a result for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from kvbus.errors import BusError, BusUnavailable, KVBusError, NoWorkers
from kvbus.protocol.codec import Fields
from kvbus.streams.connection import Bus, Script, bus_errors
from kvbus.streams.line import Line
from kvbus.streams.log import Log
from kvbus.streams.registry import Member, Membership

BATCH = 64
"""Commands a step at the most: a script holds everybody up while it runs."""
BATCH_BYTES = 1 << 20

# KEYS: commands, workers, then the heartbeats asked about. ARGV: MAXLEN, then for each command
# whether it is written only if one of them is there, how many words it has, and its fields.
_ISSUE = Script(
    """
local alive, living = {}, 0
for first = 3, #KEYS, 1000 do
  for i, holder in ipairs(redis.call('MGET', unpack(KEYS, first, math.min(first + 999, #KEYS)))) do
    alive[first - 3 + i] = holder and 1 or 0
    living = living + alive[first - 3 + i]
  end
end
local ids, at = {}, 2
while at <= #ARGV do
  local last, id = at + 1 + tonumber(ARGV[at + 1]), ''
  if ARGV[at] == '0' or living > 0 then
    if ARGV[1] == '0' then
      id = redis.call('XADD', KEYS[1], '*', unpack(ARGV, at + 2, last))
    else
      id = redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', unpack(ARGV, at + 2, last))
    end
  end
  ids[#ids + 1] = id
  at = last + 1
end
return {ids, redis.call('HGETALL', KEYS[2]), alive}
"""
)


class Issued(msgspec.Struct, frozen=True):
    """A command on the stream. members: all who were registered at that moment, each owing a result."""

    entry_id: str
    members: tuple[Member, ...]


class _Waiting:
    """A command whose sender waits for its turn, or for another thread's step that takes it along."""

    __slots__ = ("call", "error", "fields", "issued", "need_alive", "size")

    def __init__(self, fields: Fields, need_alive: bool, call: object) -> None:
        self.call = call
        self.fields = fields
        self.need_alive = need_alive
        self.size = sum(map(len, fields.values()))
        self.issued: Issued | None = None
        self.error: KVBusError | None = None

    @property
    def done(self) -> bool:
        return self.issued is not None or self.error is not None


class Issuer:
    """Writes commands. Safe for threads: those that come while a step is under way go together in the next one."""

    def __init__(self, bus: Bus, log: Log | None = None) -> None:
        self._bus = bus
        self._log = log or Log(bus)
        self._membership = Membership(bus)
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._line: Line | None = None
        self._queue: list[_Waiting] = []
        self._names: tuple[str, ...] = ()
        self._keys: tuple[str, ...] = ()
        self._last_roll: tuple[tuple[str, ...], list[Any]] | None = None
        """What the script was asked and answered when the members were last worked out."""
        self._last_members: tuple[Member, ...] = ()

    def members(self) -> tuple[Member, ...]:
        """Who is registered now, and who of them is alive. Raises BusError."""
        members = self._membership.read()
        self._know(tuple(member.name for member in members))
        return members

    def issue(self, fields: Fields, *, need_alive: bool = False) -> Issued:
        """Append the command. Raises BusError; after BusUnavailable it may have been written: send the same again.

        need_alive: raise NoWorkers, with nothing written, when no registered worker's heartbeat is there.
        """
        return self.issue_all([fields], need_alive=need_alive)[0]

    def issue_all(self, batch: Sequence[Fields], *, need_alive: bool = False) -> list[Issued]:
        """Append commands in this order. Raises as `issue` does; the first of them may then have been written."""
        call = object()
        mine = [_Waiting(fields, need_alive, call) for fields in batch]
        with self._lock:
            self._queue += mine
        for item in mine:
            while not item.done:
                with self._turn:
                    if not item.done:
                        self._step()
        found = []
        for item in mine:
            if item.error is not None:
                raise item.error
            assert item.issued is not None
            found.append(item.issued)
        return found

    def alive(self, names: list[str]) -> dict[str, bool]:
        """Whose heartbeat has not lapsed. Raises BusError."""
        return self._membership.alive(names)

    def _step(self) -> None:
        """One round trip for the commands at the head of the queue. It ends for all of them in the same way."""
        with self._lock:
            size, count = 0, 0
            for item in self._queue[:BATCH]:
                size += item.size
                if count and size > BATCH_BYTES:
                    break
                count += 1
            batch, self._queue = self._queue[:count], self._queue[count:]
        try:
            unwritten = self._write(batch)
            if unwritten and any(member.alive for member in self._last_members):
                unwritten = self._write(unwritten)  # a worker that this process had not heard of
            if unwritten:
                names = ", ".join(member.name for member in self._last_members) or "none"
                nobody = f"no worker is alive in namespace {self._bus.keys.namespace!r} (registered: {names})"
                self._fail(unwritten, NoWorkers(nobody))
        except BaseException as error:
            # Whatever ended this thread's step, the others must not wait for ever.
            self._fail(batch, error if isinstance(error, BusError) else BusUnavailable(f"XADD: {error!r}"))
            if not isinstance(error, BusError):
                raise

    def _fail(self, items: Sequence[_Waiting], error: KVBusError) -> None:
        """Nor is anything written that stands behind them in the same call: sent again, it would come before them."""
        calls = {item.call for item in items}
        with self._lock:
            behind = [item for item in self._queue if item.call in calls]
            self._queue = [item for item in self._queue if item.call not in calls]
        for item in (*items, *behind):
            item.error = error

    def _call_roll(self, names: tuple[str, ...], raw: list[bytes], flags: list[int]) -> tuple[Member, ...]:
        """Members from what the script says of the registered, and of those names that it was asked about."""
        alive = {name: flag == 1 for name, flag in zip(names, flags, strict=True)}
        members = self._membership.members(dict(zip(raw[::2], raw[1::2], strict=True)), alive)
        self._know(tuple(member.name for member in members))
        return members

    def _know(self, names: tuple[str, ...]) -> None:
        keys = self._bus.keys
        with self._lock:
            if names != self._names:
                self._names = names
                self._keys = (keys.commands, keys.workers, *map(keys.live, names))

    def _held_line(self) -> Line | None:
        """For steps alone, one at a time."""
        if self._line is None or self._line.client is not self._bus.client:
            self._line = self._bus.line()
        return self._line

    def _write(self, batch: Sequence[_Waiting]) -> list[_Waiting]:
        """Those that were not written, for want of workers."""
        keys = self._bus.keys
        with self._lock:
            names, words = self._names, self._keys or (keys.commands, keys.workers)
        args: list[str | bytes | int] = [self._log.maxlen(keys.commands, sum(item.size for item in batch))]
        for item in batch:
            args += [int(item.need_alive), 2 * len(item.fields)]
            for name, value in item.fields.items():
                args += [name, value]
        with bus_errors(f"XADD {keys.commands}"):
            line = self._held_line()
            answer = _ISSUE.run(self._bus.client, words, args) if line is None else _ISSUE.run_on(line, words, args)
        ids, *roll = answer
        if (names, roll) != self._last_roll:
            self._last_members = self._call_roll(names, *roll)
            # What the script was not asked about is not in its answer: that has to be seen anew.
            whole = names == tuple(member.name for member in self._last_members)
            self._last_roll = (names, roll) if whole else None
        members = self._last_members
        unwritten = []
        for item, entry_id in zip(batch, ids, strict=True):
            if entry_id:
                item.issued = Issued(entry_id.decode(), members)
            else:
                unwritten.append(item)
        return unwritten
