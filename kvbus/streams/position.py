"""Where a reader stands in a stream, and whether what it had read is still what the server holds. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvbus.streams.log import StreamState

UNKNOWN = -1


class Position(msgspec.Struct, frozen=True):
    """A reader's place.

    cursor: the last entry read, "0-0" before the first. at: that entry's message id, "" when it is not known.
    entries: how many entries had ever been added when the cursor's was, as the server counts them; UNKNOWN when the
    reader began in the middle of a stream.
    """

    cursor: str = "0-0"
    at: str = ""
    entries: int = 0

    def advance(self, cursor: str, at: str, count: int) -> Position:
        """The place `count` entries further on."""
        return Position(cursor, at, self.entries if self.entries == UNKNOWN else self.entries + count)


class GapKind(StrEnum):
    TRIMMED = "trimmed"
    """Entries were removed before this reader came to them."""
    HISTORY_LOST = "history_lost"
    """The server holds another history than the one that this reader had read."""


class Gap(msgspec.Struct, frozen=True):
    """What a reader missed. missed: entries, None when it cannot be known. after, before: ids around the hole."""

    kind: GapKind
    missed: int | None
    after: str
    before: str
    reason: str


def id_key(entry_id: str) -> tuple[int, int]:
    """Entry ids in their order."""
    milliseconds, _, serial = entry_id.partition("-")
    return int(milliseconds), int(serial or 0)


def at_end(state: StreamState, at: str = "") -> Position:
    """The place behind everything that the stream has ever held."""
    return Position(cursor=state.last_id, at=at, entries=state.entries_added)


def at_start(state: StreamState) -> Position:
    """The place before the first entry that the stream still holds."""
    return Position(cursor="0-0", at="", entries=state.removed)


def find_gap(position: Position, state: StreamState, at_cursor: str | None) -> Gap | None:
    """What is wrong between a reader and the server, if anything.

    at_cursor: the message id that the entry at the cursor carries on the server now, None if there is no such
    entry. The rules need only fields that Redis 7.0, Valkey and fakeredis all give (XINFO STREAM, 7.0).
    """
    cursor, first, last = id_key(position.cursor), id_key(state.first_id), id_key(state.last_id)
    if cursor > last:
        return _lost(position, state, f"the cursor {position.cursor} is beyond the stream's last id {state.last_id}")
    if state.entries_added < position.entries:
        return _lost(position, state, f"{position.entries} entries were read, {state.entries_added} were ever added")
    if at_cursor is not None and position.at and at_cursor != position.at:
        return _lost(position, state, f"the entry at {position.cursor} is another message than the one read")
    deleted = id_key(state.last_deleted_id) >= cursor  # an operator's XDEL may have taken the entry at the cursor
    if at_cursor is None and position.at and state.length and first <= cursor and not deleted:
        return _lost(position, state, f"the entry at {position.cursor} that was read is gone, older ones are not")
    if position.entries == UNKNOWN:
        return None
    if cursor == last:
        missed = state.entries_added - position.entries
        if missed > 0:
            return Gap(GapKind.TRIMMED, missed, position.cursor, state.last_id, "entries were removed unread")
        return None
    if state.length == 0 or first > cursor:
        # With nothing left the loss is exact; otherwise entries deleted one by one make it an upper bound.
        missed = state.removed - position.entries
        if missed > 0:
            before = state.first_id if state.length else state.last_id
            return Gap(GapKind.TRIMMED, missed, position.cursor, before, "trimmed before they were read")
        if missed < 0 and first > cursor:
            return _lost(
                position, state, f"{position.entries} entries were read, {state.removed} came before the first"
            )
    return None


def after_gap(position: Position, state: StreamState, gap: Gap) -> Position:
    """Where to go on: behind the hole, or at the start of the new history."""
    if gap.kind is GapKind.HISTORY_LOST:
        return at_start(state)
    if state.length == 0 or id_key(position.cursor) == id_key(state.last_id):
        return at_end(state)
    return Position(cursor=position.cursor, at=position.at, entries=state.removed)


def _lost(position: Position, state: StreamState, reason: str) -> Gap:
    return Gap(GapKind.HISTORY_LOST, None, position.cursor, state.first_id, reason)
