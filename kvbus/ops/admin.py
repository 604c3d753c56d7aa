"""Setting a reader back or forth, and trimming a stream: first what it would lose, then the deed."""

from __future__ import annotations

import msgspec

from kvbus.errors import ConfigError
from kvbus.ops.lag import behind_of, read_lag
from kvbus.ops.when import parse_place
from kvbus.streams.connection import Bus, bus_errors
from kvbus.streams.log import Log, StreamState
from kvbus.streams.position import Position, at_start, id_key
from kvbus.streams.registry import Membership, Reader, forget_reader, load_reader, save_reader
from kvbus.streams.subscription import end_position, position_at

COUNT_UP_TO = 100_000
"""Entries that are counted one by one where the server's counters do not tell."""


class ResetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What setting a reader would do. skipped, repeated: entries; None when there are too many to count."""

    reader: str
    stream: str
    cursor: str
    to: str
    skipped: int | None = 0
    repeated: int | None = 0
    forget: bool = False


class Loser(msgspec.Struct, frozen=True):
    """A reader that would lose entries. unread: of those that go; None when it is not known."""

    name: str
    role: str
    unread: int | None
    in_hand: int = 0
    """Commands that a worker has taken and not finished, and whose entries would be gone after a crash."""


class TrimPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What trimming a stream would do. before: the oldest id that stays, None when it goes by number."""

    stream: str
    length: int
    removed: int
    keep: int | None = None
    before: str | None = None
    losers: tuple[Loser, ...] = ()


def plan_reset(bus: Bus, name: str, to: str, *, forget: bool = False) -> tuple[ResetPlan, Reader, Position]:
    """What it would mean to set a named reader to `to`: "start", "end", an entry id, a date or a time ago.

    Raises ConfigError for a reader that is not there, BusError.
    """
    reader = load_reader(bus, name) if "/" not in name else None
    if reader is None:
        if any(member.name == name for member in Membership(bus).read()):
            raise ConfigError(
                f"{name} is a worker, not a named reader",
                hint="A worker's place belongs to its results and cannot be set; a restart goes on where it was.",
            )
        raise ConfigError(f"no reader has the name {name!r}", hint="`kvbus lag` lists the readers.")
    state = Log(bus).state(reader.stream)
    target = _position(bus, reader.stream, to, state)
    old, new = id_key(reader.position.cursor), id_key(target.cursor)
    skipped = repeated = 0 if new == old else None
    if new > old:
        repeated, skipped = 0, _between(bus, reader.stream, reader.position, target, state)
    elif new < old:
        skipped, repeated = 0, _between(bus, reader.stream, target, reader.position, state)
    plan = ResetPlan(
        reader=name,
        stream=reader.stream.removeprefix(bus.keys.prefix),
        cursor=reader.position.cursor,
        to=target.cursor,
        skipped=skipped,
        repeated=repeated,
        forget=forget,
    )
    return plan, reader, target


def reset(bus: Bus, plan: ResetPlan, reader: Reader, target: Position) -> None:
    """Carry a plan out. A reader that is running keeps its own place: stop it first. Raises BusError."""
    if plan.forget:
        forget_reader(bus, reader.name)
        return
    # Going back, the reader must not take what comes again for repeats: what it knows of sequences goes, too.
    extra = b"" if id_key(target.cursor) < id_key(reader.position.cursor) else reader.extra
    save_reader(bus, reader.name, reader.stream, target, extra=extra)


def plan_trim(bus: Bus, stream: str, *, keep: int | None = None, before: str | None = None) -> TrimPlan:
    """What would go, and who has not read it. keep: the newest N stay; before: what is older goes. Raises BusError."""
    key = bus.keys.streams[stream]
    state = Log(bus).state(key)
    if keep is not None:
        removed, cut = max(0, state.length - keep), None
    else:
        assert before is not None
        cut = parse_place(before, bus.now_ms())
        removed = _count(bus, key, "-", f"({cut}", state.length)
    losers = []
    for lag in read_lag(bus) if removed else ():
        if lag.stream != stream:
            continue
        stays = state.length - removed
        unread = None if lag.behind is None else max(0, lag.behind - stays)
        if unread != 0 or lag.pending:
            losers.append(Loser(lag.name, lag.role, unread, lag.pending))
    return TrimPlan(stream=stream, length=state.length, removed=removed, keep=keep, before=cut, losers=tuple(losers))


def trim(bus: Bus, plan: TrimPlan) -> int:
    """Carry a plan out, exactly. Returns how many entries went. Raises BusError."""
    key = bus.keys.streams[plan.stream]
    with bus_errors(f"XTRIM {key}"):
        if plan.keep is not None:
            return int(bus.client.xtrim(key, maxlen=plan.keep, approximate=False))
        return int(bus.client.xtrim(key, minid=plan.before, approximate=False))


def _position(bus: Bus, key: str, to: str, state: StreamState) -> Position:
    if to == "end":
        return end_position(bus, key)
    if to == "start":
        return at_start(state)
    return position_at(bus, key, parse_place(to, bus.now_ms()))


def _between(bus: Bus, key: str, first: Position, last: Position, state: StreamState) -> int | None:
    """Entries behind one place up to another, both of one stream."""
    near, far = behind_of(last, state), behind_of(first, state)
    if near is not None and far is not None:
        return far - near
    counted = _count(bus, key, f"({first.cursor}", last.cursor, COUNT_UP_TO + 1)
    return counted if counted <= COUNT_UP_TO else None


def _count(bus: Bus, key: str, start: str, end: str, most: int) -> int:
    count = 0
    for _ in Log(bus).scan(key, start, end, page=256):
        count += 1
        if count >= most:
            break
    return count
