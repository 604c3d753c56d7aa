"""Dead letters: what was refused, by whom, and why."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from kvbus.protocol.limits import MAX_DEAD_BYTES, Count, Millis, Name, Text


class DeadLetter(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One refused entry.

    stream: the key it stood in; entry_id, message_id: which it was. code, message: the error. refused_by: the
    first worker or reader that refused it. type: as far as it could be read. fields: its raw fields, cut at
    MAX_DEAD_BYTES altogether; size: their bytes before the cut.
    """

    TYPE: ClassVar[str] = "dead"

    stream: Text
    entry_id: Text
    message_id: Text = ""
    type: Text = ""
    code: Name
    message: Text
    refused_by: Name
    at_ms: Millis = 0
    size: Count = 0
    fields: dict[str, bytes] = {}


def cut_fields(fields: dict[bytes, bytes]) -> tuple[dict[str, bytes], int]:
    """Raw fields within MAX_DEAD_BYTES, and how many bytes there were. The smallest fields are kept whole."""
    size = sum(len(name) + len(value) for name, value in fields.items())
    room = MAX_DEAD_BYTES
    kept: dict[str, bytes] = {}
    for name, value in sorted(fields.items(), key=lambda item: len(item[1])):
        label = name[:64].decode("utf-8", "backslashreplace")
        room -= len(label)
        if room <= 0:
            break
        kept[label] = value[:room]
        room -= len(kept[label])
    return kept, size
