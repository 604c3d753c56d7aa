"""Bytes to typed messages and back. No sockets.

An entry is a flat map of byte strings: v, type, id, and body (msgpack) or json (JSON object text).
Whatever is wrong with an entry, decoding raises a ProtocolError and nothing else.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from kvbus.errors import InvalidMessage, OverLimit, ProtocolError, UndecodableEntry, UnknownType
from kvbus.protocol.commands import COMMANDS, Command
from kvbus.protocol.dead import DeadLetter
from kvbus.protocol.events import EVENTS, Event
from kvbus.protocol.limits import MAX_BODY_BYTES, MAX_NESTING, MAX_TEXT, PROTOCOL_VERSION
from kvbus.protocol.results import Results

Message = Command | Event | Results | DeadLetter
Fields = dict[bytes, bytes]

COMMAND_TYPES = frozenset(cls.TYPE for cls in COMMANDS)
EVENT_TYPES = frozenset(cls.TYPE for cls in EVENTS)
MESSAGES: dict[str, type[Message]] = {cls.TYPE: cls for cls in (*COMMANDS, *EVENTS, Results, DeadLetter)}

_VERSION = PROTOCOL_VERSION.encode()
_MANY_HASHES = 16
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[bytes, msgspec.msgpack.Decoder[Any]] = {
    name.encode(): msgspec.msgpack.Decoder(cls) for name, cls in MESSAGES.items()
}


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """One entry, decoded. entry_id: where it stands in its stream. id: the message's own, the same in retries.

    origin: the message that this one repeats (replayed or requeued), or None.
    """

    entry_id: str
    id: str
    type: str
    message: Message
    origin: str | None = None


def new_message_id() -> str:
    """A fresh unique message id: 32 hex digits."""
    return os.urandom(16).hex()


def encode_body(message: Message) -> bytes:
    """The msgpack body, checked against the protocol's limits. Raises ProtocolError.

    Values are checked as a reader would check them, so that nothing goes on the bus that readers must refuse.
    """
    try:
        body = _encoder.encode(message)
    except (OverflowError, ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidMessage(f"{message.TYPE} cannot be encoded: {error}") from None
    if len(body) > MAX_BODY_BYTES:
        raise OverLimit(f"{message.TYPE} has {len(body):,} bytes; the limit is {MAX_BODY_BYTES:,}")
    probe = body
    hashes = getattr(message, "chunk_hashes", ())
    if len(hashes) > _MANY_HASHES:
        # A frozen message has checked its hashes when it was made; to decode them again would cost ten times the rest.
        probe = _encoder.encode(msgspec.structs.replace(message, chunk_hashes=hashes[:1]))
    _decode_body(message.TYPE.encode(), probe)
    return body


def encode_entry(message: Message, *, message_id: str, origin: str | None = None) -> Fields:
    """The entry's fields in their standard form (`body`). Raises ProtocolError."""
    return entry_fields(message.TYPE, encode_body(message), message_id=message_id, origin=origin)


def entry_fields(type_name: str, body: bytes, *, message_id: str, origin: str | None = None) -> Fields:
    """Fields around a body that is already encoded."""
    fields = {b"v": _VERSION, b"type": type_name.encode(), b"id": message_id.encode(), b"body": body}
    if origin is not None:
        fields[b"origin"] = origin.encode()
    return fields


def encode_json_entry(message: Message, *, message_id: str | None = None) -> Fields:
    """The form for people and simple clients: `json` in place of `body`, the id optional. Raises ProtocolError."""
    encode_body(message)  # for its checks
    text = msgspec.json.encode(to_plain(message))
    _check_size("json", text)
    fields = {b"v": _VERSION, b"type": message.TYPE.encode(), b"json": text}
    if message_id is not None:
        fields[b"id"] = message_id.encode()
    return fields


def to_plain(message: msgspec.Struct) -> dict[str, Any]:
    """JSON-ready data: hashes as text, other bytes as base64, defaults left out. `from_plain` is its inverse."""
    plain = _plain(msgspec.to_builtins(message, builtin_types=(bytes,)), "")
    assert isinstance(plain, dict)
    return plain


_HASH_FIELDS = frozenset(
    ("chunk_hashes", "missing", "in_use", "busy", "no_space", "unsupported", "tier_stuck", "failed")
)


def _plain(value: Any, field: str) -> Any:
    if isinstance(value, dict):
        # The context (a map) is the caller's own data: nothing in it is a hash of ours.
        return {k: v if k == "context" and isinstance(v, dict) else _plain(v, k) for k, v in value.items()}
    if isinstance(value, list | tuple):
        if field in _HASH_FIELDS:
            return [item.hex() if isinstance(item, bytes) else f"{item:x}" for item in value]
        return [_plain(item, field) for item in value]
    # base64 is what from_plain reads back for any other bytes.
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def decode_entry(entry_id: str | bytes, fields: Mapping[bytes, bytes]) -> Envelope:
    """One entry as a typed message. Raises ProtocolError, and nothing else."""
    place = entry_id.decode() if isinstance(entry_id, bytes) else entry_id
    version = fields.get(b"v", _VERSION)
    if version != _VERSION:
        raise UnknownType(f"protocol version {_show(version)}: this release knows {PROTOCOL_VERSION}")
    type_bytes = fields.get(b"type")
    if type_bytes is None:
        raise UndecodableEntry("the entry has no `type` field")
    if type_bytes not in _decoders:
        raise UnknownType(f"type {_show(type_bytes)}: this release knows {', '.join(sorted(MESSAGES))}")
    message_id = _text(fields, b"id") or place
    body, text = fields.get(b"body"), fields.get(b"json")
    if (body is None) == (text is None):
        raise UndecodableEntry("the entry must have exactly one of `body` (msgpack) and `json`")
    if body is not None:
        _check_size("body", body)
        message = _decode_body(type_bytes, body)
    else:
        assert text is not None
        _check_size("json", text)
        message = from_plain(type_bytes.decode(), parse_json_object(text))
    return Envelope(
        entry_id=place,
        id=message_id,
        type=type_bytes.decode(),
        message=message,
        origin=_text(fields, b"origin") or None,
    )


def from_plain(type_name: str, plain: Mapping[str, Any]) -> Message:
    """A typed message from JSON-like data. Raises ProtocolError."""
    try:
        return msgspec.convert(plain, MESSAGES[type_name])
    except ProtocolError:
        raise
    except msgspec.ValidationError as error:
        raise _not_valid(type_name, error) from None
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise UndecodableEntry(f"{type_name}: {type(error).__name__}: {error}") from None


def parse_json_object(text: bytes | str) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8, no duplicate keys, no NaN, at most MAX_NESTING levels. Raises ProtocolError."""
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(decoded, object_pairs_hook=_unique, parse_constant=_no_constant)
        if "\\u" in decoded:
            # Half a surrogate pair is a text that nobody could write out again, say in a result that quotes it.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except ProtocolError:
        raise
    except (ValueError, RecursionError, MemoryError) as error:
        raise UndecodableEntry(f"not JSON: {type(error).__name__}: {error}"[:300]) from None
    if not isinstance(value, dict):
        raise UndecodableEntry(f"not a JSON object but {_kind(value)}")
    if decoded.count("[") + decoded.count("{") > MAX_NESTING:  # no level without a bracket: most need no walk
        _check_depth(value, 1)
    return value


def _decode_body(type_bytes: bytes, body: bytes) -> Message:
    try:
        message: Message = _decoders[type_bytes].decode(body)
    except ProtocolError:
        raise
    except msgspec.ValidationError as error:
        raise _not_valid(type_bytes.decode(), error) from None
    # Hostile bytes can end a decoder by recursion or memory, too; all of it is one kind of refusal.
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise UndecodableEntry(f"{type_bytes.decode()}: {type(error).__name__}: {error}"[:300]) from None
    return message


def _not_valid(type_name: str, error: msgspec.ValidationError) -> ProtocolError:
    text = str(error)
    # Only this tells msgspec's length limits from its other checks.
    kind = OverLimit if " of length <= " in text else InvalidMessage
    return kind(f"{type_name}: {text}")


def _check_size(name: str, value: bytes) -> None:
    if len(value) > MAX_BODY_BYTES:
        raise OverLimit(f"`{name}` has {len(value):,} bytes; the limit is {MAX_BODY_BYTES:,}")


def _text(fields: Mapping[bytes, bytes], name: bytes) -> str:
    raw = fields.get(name, b"")
    if len(raw) > MAX_TEXT:
        raise OverLimit(f"`{name.decode()}` has {len(raw):,} bytes; the limit is {MAX_TEXT:,}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise UndecodableEntry(f"`{name.decode()}` is not UTF-8: {_show(raw)}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise InvalidMessage(f"duplicate key {key[:80]!r}", hint="Say each key once.")
        result[key] = value
    return result


def _no_constant(name: str) -> Any:
    raise InvalidMessage(f"{name} is not a JSON number")


def _check_depth(value: Any, depth: int) -> None:
    if isinstance(value, dict | list):
        if depth > MAX_NESTING:
            raise OverLimit(f"nested more than {MAX_NESTING} levels deep")
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, dict | list):  # most are hashes: not a call for each
                _check_depth(item, depth + 1)


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _show(raw: bytes) -> str:
    return repr(raw[:60].decode("utf-8", "backslashreplace")) + ("..." if len(raw) > 60 else "")
