"""How far every worker and every named reader has come, and what it has in hand."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvbus.errors import BusRefused, ProtocolError
from kvbus.ops.when import id_ms
from kvbus.protocol.codec import Fields, decode_entry
from kvbus.protocol.commands import COMMANDS
from kvbus.protocol.events import RequestFinished
from kvbus.streams.checkpoint import Checkpoint, read_checkpoint
from kvbus.streams.connection import Bus, bus_errors
from kvbus.streams.log import StreamState
from kvbus.streams.position import UNKNOWN, GapKind, Position, find_gap, id_key
from kvbus.streams.registry import Membership, list_readers
from kvbus.streams.subscription import look


class InHand(msgspec.Struct, frozen=True):
    """A command that a worker has taken and not finished. age_ms: since it was issued. attempt: 1 as a rule."""

    command_id: str
    type: str
    age_ms: int | None
    attempt: int


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """One reader of one stream. What is None is not known."""

    name: str
    role: str
    """worker or reader."""
    stream: str
    cursor: str = "0-0"
    behind: int | None = None
    """Entries not taken yet."""
    oldest_unread_ms: int | None = None
    """Age of the oldest entry not taken yet; None when there is none, too."""
    alive: bool | None = None
    """Of a worker: its heartbeat has not lapsed."""
    in_flight: InHand | None = None
    """The oldest command in hand."""
    pending: int = 0
    """Commands in hand."""
    trouble: str = ""
    """What is wrong with its place: trimmed past it, history lost, no checkpoint."""


def read_lag(bus: Bus) -> list[Lag]:
    """Every registered worker, then every named reader. Raises BusError."""
    now_ms = bus.now_ms()
    commands = bus.keys.commands
    found = []
    for member in Membership(bus).read():
        checkpoint = read_checkpoint(bus, member.name)
        if checkpoint is None:
            found.append(Lag(name=member.name, role="worker", stream="commands", alive=member.alive, trouble=NO_PLACE))
            continue
        place = _place(bus, commands, checkpoint.position, now_ms)
        found.append(
            Lag(
                name=member.name,
                role="worker",
                stream="commands",
                cursor=checkpoint.position.cursor,
                behind=place.behind,
                oldest_unread_ms=place.oldest_unread_ms,
                alive=member.alive,
                in_flight=_in_hand(bus, checkpoint, now_ms),
                pending=len(checkpoint.pending),
                trouble=place.trouble,
            )
        )
    for reader in list_readers(bus):
        try:
            place = _place(bus, reader.stream, reader.position, now_ms)
        except BusRefused as error:
            place = _Place(None, None, str(error))
        found.append(
            Lag(
                name=reader.name,
                role="reader",
                stream=reader.stream.removeprefix(bus.keys.prefix),
                cursor=reader.position.cursor,
                behind=place.behind,
                oldest_unread_ms=place.oldest_unread_ms,
                trouble=place.trouble,
            )
        )
    return found


def above(lags: Iterable[Lag], limit: int) -> list[Lag]:
    """Those further behind than the limit, or of whom it is not known."""
    return [lag for lag in lags if lag.behind is None or lag.behind > limit]


NO_PLACE = "no checkpoint: it has never taken a command, or the server has lost it"


class _Place(msgspec.Struct, frozen=True):
    behind: int | None
    oldest_unread_ms: int | None
    trouble: str = ""


def _place(bus: Bus, key: str, position: Position, now_ms: int) -> _Place:
    state, at_cursor = look(bus.client, key, position.cursor)
    gap = find_gap(position, state, at_cursor)
    if gap is not None and gap.kind is GapKind.HISTORY_LOST:
        return _Place(None, None, f"history lost: {gap.reason}")
    unread = _first_unread(bus, key, position.cursor)
    return _Place(
        behind_of(position, state),
        None if unread is None else age_ms(*unread, now_ms),
        "" if gap is None else f"{'some' if gap.missed is None else gap.missed} {gap.reason}",
    )


def behind_of(position: Position, state: StreamState) -> int | None:
    """Entries behind a place; None when that cannot be told without reading them."""
    if id_key(position.cursor) >= id_key(state.last_id):
        return 0
    if state.length == 0:
        return 0
    if id_key(position.cursor) < id_key(state.first_id):
        return state.length
    if position.entries == UNKNOWN:
        return None
    return max(0, state.entries_added - position.entries)


def _first_unread(bus: Bus, key: str, cursor: str) -> tuple[str, Fields] | None:
    with bus_errors(f"XRANGE {key}"):
        found = bus.client.xrange(key, f"({cursor}", "+", count=1)
    return (found[0][0].decode(), found[0][1]) if found else None


def age_ms(entry_id: str, fields: Fields, now_ms: int) -> int | None:
    """How old an entry is: by its message's own time, else by its id, unless that lies in the future."""
    try:
        message = decode_entry(entry_id, fields).message
    except ProtocolError:
        message = None
    said = None
    if isinstance(message, COMMANDS):
        said = message.issued_at_ms
    elif isinstance(message, RequestFinished):
        said = message.finished_at_ms
    moment = said if said is not None else id_ms(entry_id)
    return now_ms - moment if moment <= now_ms else None


def _in_hand(bus: Bus, checkpoint: Checkpoint, now_ms: int) -> InHand | None:
    if not checkpoint.pending:
        return None
    oldest = checkpoint.pending[0]
    with bus_errors(f"XRANGE {bus.keys.commands}"):
        found = bus.client.xrange(bus.keys.commands, oldest.entry_id, oldest.entry_id, count=1)
    age = age_ms(oldest.entry_id, found[0][1], now_ms) if found else None
    return InHand(oldest.message_id, oldest.type, age, checkpoint.attempts.get(oldest.entry_id, 0) + 1)
