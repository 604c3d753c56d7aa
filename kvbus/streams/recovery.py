"""What the streams still tell a worker about the lives before this one, when its own memory or checkpoint is gone."""

from __future__ import annotations

from kvbus.errors import ProtocolError
from kvbus.protocol.codec import decode_entry
from kvbus.protocol.results import Results
from kvbus.streams.checkpoint import Checkpoint
from kvbus.streams.log import Log
from kvbus.streams.position import id_key
from kvbus.streams.subscription import BATCH, message_id

LOOK_BACK = 1_000
"""Entries to look back at."""
LOOK_BACK_BYTES = 32 * 1024 * 1024


def ids_before(log: Log, cursor: str) -> list[str]:
    """The ids of the newest commands up to the cursor, oldest first: late duplicates of them are not done again.

    Raises BusError.
    """
    room, ids = LOOK_BACK_BYTES, []
    for entry_id, fields in log.scan_back(log.bus.keys.commands, cursor, page=16):
        ids.append(message_id(entry_id, fields))
        room -= sum(map(len, fields.values()))
        if len(ids) >= LOOK_BACK or room < 0:
            break
    return ids[::-1]


def own_finals(log: Log, worker: str) -> set[str]:
    """The commands whose final result from this worker is among the newest entries of `results`. Raises BusError."""
    room, found = LOOK_BACK_BYTES, set[str]()
    for seen, (entry_id, fields) in enumerate(log.scan_back(log.bus.keys.results)):
        room -= sum(map(len, fields.values()))
        if seen >= LOOK_BACK or room < 0:
            break
        try:
            message = decode_entry(entry_id, fields).message
        except ProtocolError:
            continue  # a stranger's: what this worker writes can be read
        if isinstance(message, Results) and message.worker == worker:
            found.update(result.command_id for result in message.results if result.status.final)
    return found


def suspect_limit(log: Log, found: Checkpoint) -> str:
    """The id up to which entries may have been begun in an earlier life that ended before it put them on record.

    What is read and not committed is at most one batch beyond the cursor. "" if there are none. Raises BusError.
    """
    if found.suspect_to and id_key(found.position.cursor) < id_key(found.suspect_to):
        return found.suspect_to  # the life before went one by one, and had not come to the end of these
    if found.clean or found.created:
        return ""
    limit = ""
    for seen, (entry_id, _) in enumerate(log.scan(log.bus.keys.commands, f"({found.position.cursor}", page=BATCH), 1):
        limit = entry_id
        if seen == BATCH:
            break
    return limit
