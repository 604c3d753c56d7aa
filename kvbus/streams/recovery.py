"""What the streams still tell a worker about the lives before this one, when its own memory or checkpoint is gone."""

from __future__ import annotations

from kvbus.errors import ProtocolError
from kvbus.protocol.codec import decode_entry
from kvbus.protocol.results import Results
from kvbus.streams.log import Log
from kvbus.streams.subscription import message_id

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
