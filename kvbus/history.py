"""Finding commands and their results again, in the streams alone: after a restart, or when somebody else sent them.

Each call is one backward scan, newest first. A scan of 100,000 results takes about 0.3 s: run one at a time.
"""

from __future__ import annotations

import msgspec

from kvbus.answers import Answer
from kvbus.errors import ProtocolError
from kvbus.protocol.codec import COMMAND_TYPES, Fields, decode_entry
from kvbus.protocol.commands import Command, Prefetch
from kvbus.protocol.results import Results
from kvbus.streams.log import Log
from kvbus.streams.notices import type_text
from kvbus.streams.position import id_key
from kvbus.streams.subscription import message_id

_PAGE = 64
_PAGE_RESULTS = 512
"""Results are small as a rule; commands may have 1.5 MiB each."""
CLOCK_SLACK_MS = 300_000
"""Entry ids of two streams are compared: the server's clock may have been set back by this much in between."""


class FoundCommand(msgspec.Struct, frozen=True):
    """A command as it stands in the stream. command: None when its entry cannot be decoded; workers refused it."""

    command_id: str
    entry_id: str
    type: str
    command: Command | None


def find_command(log: Log, command_id: str) -> FoundCommand | None:
    """The command with this id, or None when the stream does not hold it (any more). Raises BusError."""
    key = log.bus.keys.commands
    if _is_entry_id(command_id):  # a command without an id of its own goes by its entry's
        found = command_at(log, command_id, command_id)
        if found is not None:
            return found
    wanted = command_id.encode("utf-8", "replace")
    for entry_id, fields in log.scan_back(key, page=_PAGE):
        if fields.get(b"id") == wanted:
            return _found(entry_id, fields)
    return None


def command_at(log: Log, entry_id: str, command_id: str) -> FoundCommand | None:
    """The command at a known place, or None when the entry is gone or is another one. Raises BusError."""
    fields = log.get(log.bus.keys.commands, entry_id)
    if fields is None or message_id(entry_id, fields) != command_id:
        return None
    return _found(entry_id, fields)


def find_latest(log: Log, lookup_id: str) -> FoundCommand | None:
    """The newest prefetch with this lookup_id, or None. Raises BusError."""
    needle = lookup_id.encode("utf-8", "replace")
    for entry_id, fields in log.scan_back(log.bus.keys.commands, page=_PAGE):
        if fields.get(b"type") != Prefetch.TYPE.encode():
            continue
        if needle not in fields.get(b"body", needle):  # a text stands in msgpack as it is; JSON may escape it
            continue
        found = _found(entry_id, fields)
        if isinstance(found.command, Prefetch) and found.command.lookup_id == lookup_id:
            return found
    return None


def results_of(log: Log, found: FoundCommand) -> dict[str, Answer]:
    """Every worker's newest answer to the command, a final one if there is one. Raises BusError."""
    answers: dict[str, Answer] = {}
    needle = found.command_id.encode("utf-8", "replace")
    oldest = max(0, id_key(found.entry_id)[0] - CLOCK_SLACK_MS)
    for entry_id, fields in log.scan_back(log.bus.keys.results, end=f"{oldest}-0", page=_PAGE_RESULTS):
        if needle not in fields.get(b"body", needle):
            continue
        try:
            message = decode_entry(entry_id, fields).message
        except ProtocolError:
            continue  # a stranger's: what workers write can be read
        if not isinstance(message, Results):
            continue
        for result in reversed(message.results):
            known = answers.get(message.worker)
            newer = known is None or (result.status.final and not known.result.status.final)
            if result.command_id == found.command_id and newer:
                answers[message.worker] = Answer(message.worker, message.instance, message.rank, message.epoch, result)
    return answers


def _found(entry_id: str, fields: Fields) -> FoundCommand:
    try:
        envelope = decode_entry(entry_id, fields)
    except ProtocolError:
        return FoundCommand(message_id(entry_id, fields), entry_id, type_text(fields), None)
    command: Command | None = envelope.message if envelope.type in COMMAND_TYPES else None  # type: ignore[assignment]
    return FoundCommand(envelope.id, entry_id, envelope.type, command)


def _is_entry_id(text: str) -> bool:
    head, dash, tail = text.partition("-")
    return bool(dash) and all(part.isascii() and part.isdigit() and len(part) <= 19 for part in (head, tail))
