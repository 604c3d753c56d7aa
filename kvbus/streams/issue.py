"""Putting a command on the stream, and reading in the same step who owes a result for it."""

from __future__ import annotations

import threading

import msgspec

from kvbus.protocol.codec import Fields
from kvbus.streams.connection import Bus, Script, bus_errors
from kvbus.streams.log import Log
from kvbus.streams.registry import Member, Membership

_ISSUE = Script(
    """
local entry = {'XADD', KEYS[1], '*'}
if ARGV[1] ~= '0' then entry = {'XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*'} end
for i = 2, #ARGV do entry[#entry + 1] = ARGV[i] end
local id = redis.call(unpack(entry))
local alive = {}
for i = 3, #KEYS do alive[i - 2] = redis.call('EXISTS', KEYS[i]) end
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

    def issue(self, fields: Fields) -> Issued:
        """Append the command. Raises BusError; after BusUnavailable it may have been written: send the same again."""
        keys, names = self._bus.keys, self._names
        size = sum(map(len, fields.values()))
        args: list[str | bytes | int] = [self._log.maxlen(keys.commands, size)]
        for name, value in fields.items():
            args += [name, value]
        with bus_errors(f"XADD {keys.commands}"):
            entry_id, raw, flags = _ISSUE.run(
                self._bus.client, [keys.commands, keys.workers, *(keys.live(name) for name in names)], args
            )
        registered = dict(zip(raw[::2], raw[1::2], strict=True))
        alive = {name: flag == 1 for name, flag in zip(names, flags, strict=True)}
        members = self._membership.members(registered, alive)
        if len(members) != len(names):
            with self._lock:
                self._names = tuple(member.name for member in members)
        return Issued(entry_id.decode(), members)

    def alive(self, names: list[str]) -> dict[str, bool]:
        """Whose heartbeat has not lapsed. Raises BusError."""
        return self._membership.alive(names)
