"""Dead letters: look at what was refused, send it again, or drop it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvbus.client import KVBus
from kvbus.errors import ConfigError, InvalidMessage, OverLimit, ProtocolError
from kvbus.protocol.codec import COMMAND_TYPES, EVENT_TYPES, Envelope, decode_entry, encode_entry, new_message_id
from kvbus.protocol.commands import COMMANDS
from kvbus.protocol.dead import DeadLetter
from kvbus.streams.connection import Bus, bus_errors
from kvbus.streams.log import Log


class Dead(msgspec.Struct, frozen=True):
    """One dead letter where it stands."""

    entry_id: str
    letter: DeadLetter

    @property
    def kept_bytes(self) -> int:
        return sum(len(name.encode()) + len(value) for name, value in self.letter.fields.items())

    @property
    def whole(self) -> bool:
        """The refused entry was kept whole, so it can be sent again."""
        return self.kept_bytes >= self.letter.size


class Requeued(msgspec.Struct, frozen=True, kw_only=True):
    """A refused entry that stands in its stream again. origin: the message id of the refused one."""

    dead_id: str
    stream: str
    type: str
    id: str
    entry_id: str
    origin: str


def list_dead(bus: Bus, *, code: str | None = None, by: str | None = None) -> Iterator[Dead]:
    """The newest first. code, by: only with this error code, only refused by this worker. Raises BusError."""
    for entry_id, fields in Log(bus).scan_back(bus.keys.dead):
        try:
            message = decode_entry(entry_id, fields).message
        except ProtocolError:
            continue  # a stranger's entry: `kvbus tail dead` shows it
        if isinstance(message, DeadLetter) and code in (None, message.code) and by in (None, message.refused_by):
            yield Dead(entry_id, message)


def find_dead(bus: Bus, name: str) -> Dead:
    """By its own entry id, or by the id of the message that was refused. Raises ConfigError, BusError."""
    for found in list_dead(bus):
        if name in (found.entry_id, found.letter.message_id, found.letter.entry_id):
            return found
    raise ConfigError(f"no dead letter has the id {name!r}", hint="`kvbus dead list` shows all of them.")


def check(bus: Bus, found: Dead) -> Envelope:
    """The refused entry as a message, through the same checks as any reader's. Raises ProtocolError, ConfigError."""
    letter = found.letter
    if not found.whole:
        raise OverLimit(
            f"dead letter {found.entry_id}: only {found.kept_bytes:,} of {letter.size:,} bytes were kept",
            hint="Send the message anew from where it came.",
        )
    name = _stream(bus, letter)
    envelope = decode_entry(letter.entry_id, {key.encode(): value for key, value in letter.fields.items()})
    allowed = {"commands": COMMAND_TYPES, "events": EVENT_TYPES}.get(name, frozenset())
    if envelope.type not in allowed:
        raise InvalidMessage(
            f"dead letter {found.entry_id}: a {envelope.type} does not belong on {name}",
            hint="Only commands and events can be sent again, each on its own stream.",
        )
    return envelope


def requeue(client: KVBus, found: Dead) -> Requeued:
    """Send a refused entry again, with a new message id and issue time, and remove its letter.

    Raises ProtocolError when it still cannot be taken (the letter stays), ConfigError, BusError.
    """
    bus, envelope = client.bus, check(client.bus, found)
    origin = found.letter.message_id or found.letter.entry_id
    message = envelope.message
    if isinstance(message, COMMANDS):
        handle = client.send(msgspec.structs.replace(message, issued_at_ms=None), origin=origin)
        own_id, entry_id = handle.command_id, handle.entry_id
    else:
        own_id = new_message_id()
        entry_id = client.log.append(bus.keys.events, encode_entry(message, message_id=own_id, origin=origin))
    drop(bus, found.entry_id)
    return Requeued(
        dead_id=found.entry_id,
        stream=_stream(bus, found.letter),
        type=envelope.type,
        id=own_id,
        entry_id=entry_id,
        origin=origin,
    )


def drop(bus: Bus, entry_id: str) -> bool:
    """Remove one dead letter. False if it was gone already. Raises BusError."""
    with bus_errors(f"XDEL {bus.keys.dead}"):
        return bool(bus.client.xdel(bus.keys.dead, entry_id))


def _stream(bus: Bus, letter: DeadLetter) -> str:
    for name, key in bus.keys.streams.items():
        if key == letter.stream:
            return name
    raise ConfigError(
        f"the entry stood in {letter.stream}, which is no stream of namespace {bus.keys.namespace}",
        hint="Name its namespace with --namespace.",
    )
