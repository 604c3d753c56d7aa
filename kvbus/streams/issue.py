"""Putting a command on the stream, and reading in the same step who owes a result for it."""

from __future__ import annotations

import threading

import msgspec

from kvbus.errors import NoWorkers
from kvbus.protocol.codec import Fields
from kvbus.streams.connection import Bus, Script, bus_errors
from kvbus.streams.log import Log
from kvbus.streams.registry import Member, Membership

# With ARGV[2] = 1 nothing is written unless one of the named heartbeats is there.
_ISSUE = Script(
    """
local alive, living = {}, 0
for i = 3, #KEYS do
  alive[i - 2] = redis.call('EXISTS', KEYS[i])
  living = living + alive[i - 2]
end
local id = ''
if ARGV[2] == '0' or living > 0 then
  local entry = {'XADD', KEYS[1], '*'}
  if ARGV[1] ~= '0' then entry = {'XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*'} end
  for i = 3, #ARGV do entry[#entry + 1] = ARGV[i] end
  id = redis.call(unpack(entry))
end
return {id, redis.call('HGETALL', KEYS[2]), alive}
"""
)


class Issued(msgspec.Struct, frozen=True):
    """A command on the stream. members: all who were registered at that moment, each owing a result."""

    entry_id: str
    members: tuple[Member, ...]


class Issuer:
    """Writes commands. Safe for threads."""

    def __init__(self, bus: Bus, log: Log | None = None) -> None:
        self._bus = bus
        self._log = log or Log(bus)
        self._membership = Membership(bus)
        self._lock = threading.Lock()
        self._names: tuple[str, ...] = ()

    def members(self) -> tuple[Member, ...]:
        """Who is registered now, and who of them is alive. Raises BusError."""
        members = self._membership.read()
        with self._lock:
            self._names = tuple(member.name for member in members)
        return members

    def issue(self, fields: Fields, *, need_alive: bool = False) -> Issued:
        """Append the command. Raises BusError; after BusUnavailable it may have been written: send the same again.

        need_alive: raise NoWorkers, with nothing written, when no registered worker's heartbeat is there.
        """
        issued = self._issue(fields, need_alive)
        if not issued.entry_id and any(member.alive for member in issued.members):
            issued = self._issue(fields, need_alive)  # a worker that this process had not heard of
        if not issued.entry_id:
            names = ", ".join(member.name for member in issued.members) or "none"
            raise NoWorkers(f"no worker is alive in namespace {self._bus.keys.namespace!r} (registered: {names})")
        return issued

    def alive(self, names: list[str]) -> dict[str, bool]:
        """Whose heartbeat has not lapsed. Raises BusError."""
        return self._membership.alive(names)

    def _issue(self, fields: Fields, need_alive: bool) -> Issued:
        keys, names = self._bus.keys, self._names
        size = sum(map(len, fields.values()))
        args: list[str | bytes | int] = [self._log.maxlen(keys.commands, size), int(need_alive)]
        for name, value in fields.items():
            args += [name, value]
        with bus_errors(f"XADD {keys.commands}"):
            entry_id, raw, flags = _ISSUE.run(
                self._bus.client, [keys.commands, keys.workers, *(keys.live(name) for name in names)], args
            )
        registered = dict(zip(raw[::2], raw[1::2], strict=True))
        alive = {name: flag == 1 for name, flag in zip(names, flags, strict=True)}
        members = self._membership.members(registered, alive)
        found = tuple(member.name for member in members)
        if found != names:
            with self._lock:
                self._names = found
        return Issued(entry_id.decode(), members)
