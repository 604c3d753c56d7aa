"""Request bodies, read strictly: what is not exactly a command is refused, with the offender named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request

from kvbus.errors import InvalidMessage, OverLimit
from kvbus.facade.errors import Refused
from kvbus.protocol.codec import from_plain, parse_json_object
from kvbus.protocol.commands import KNOWN_TIERS, Command
from kvbus.protocol.limits import INT64_MIN, MAX_HASHES

MAX_BODY = 4 * 1024 * 1024
"""Bytes of a request's body: 65,536 hashes of 64 bits take 1.4 MB as text."""

_INTEGERS = re.compile(r"(?:(?:0|-?[1-9a-fA-F][0-9a-fA-F]{0,15}),)+", re.ASCII)
_OPTIONAL = ("tags", "target", "ttl_ms", "lookup_id")
_MORE = {"prefetch": ("sources",), "evict": ("locations",), "lookup": ()}


async def read_body(request: Request) -> bytes:
    """The whole body, never more than MAX_BODY of it. Raises Refused (413)."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > MAX_BODY:
        raise _too_large(f"{int(declared):,}")
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY:
                raise _too_large(f"more than {MAX_BODY:,}")
            parts.append(part)
    except ClientDisconnect:
        raise Refused(400, "the client hung up before the body was complete") from None
    return b"".join(parts)


def parse_command(kind: str, raw: bytes) -> Command:
    """The command in a body. kind: "prefetch", "evict" or "lookup". Raises ProtocolError, Refused (400).

    Keys that are not known are ignored, as they always were.
    """
    plain = parse_json_object(raw)
    if kind == "prefetch" and not (plain.get("chunk_hashes") and plain.get("lookup_id")):
        raise Refused(400, "chunk_hashes and lookup_id are required", bare=True)
    if not plain.get("chunk_hashes"):
        raise Refused(400, "chunk_hashes is required", bare=True)
    _check_texts(plain, "chunk_hashes")
    for name in _MORE[kind]:
        if plain.get(name) is not None:
            _check_texts(plain, name)
            _check_tiers(plain, name)
    if (hashes := _integers(plain["chunk_hashes"])) is not None:
        plain["chunk_hashes"] = hashes
    known = ("chunk_hashes", *_OPTIONAL, *_MORE[kind])
    given = {name: plain[name] for name in known if plain.get(name) is not None}
    for name in ("ttl_ms", "target"):
        if name in given:
            given[name] = _whole(given[name])
    command: Command = from_plain(kind, given)  # type: ignore[assignment]
    return command


def _integers(texts: list[str]) -> list[int] | None:
    """The hashes' values when all are 64-bit integers, by one match for the whole list: a third of the cost.

    None where there is a digest, or something for the protocol's own check to name.
    """
    if not _INTEGERS.fullmatch(",".join(texts) + ","):
        return None
    try:
        values = [int(text, 16) for text in texts]
    except ValueError:  # a comma inside a text
        return None
    return values if min(values) >= INT64_MIN else None


def _whole(value: Any) -> Any:
    """The same with 320.0 as 320, which are one integer to JSON and two types to Python."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return {key: _whole(item) for key, item in value.items()} if isinstance(value, dict) else value


def _check_texts(plain: Mapping[str, Any], name: str) -> None:
    value = plain[name]
    if not isinstance(value, list):
        raise InvalidMessage(f"{name} must be a list of texts, not {_kind(value)}")
    if len(value) > MAX_HASHES:
        raise OverLimit(f"{name} has {len(value):,} items; the limit is {MAX_HASHES:,}", hint="Split the command.")
    if value and set(map(type, value)) != {str}:
        place, item = next((place, item) for place, item in enumerate(value) if not isinstance(item, str))
        raise InvalidMessage(f"{name}[{place}] must be a text, not {_kind(item)}")


def _check_tiers(plain: Mapping[str, Any], name: str) -> None:
    if not plain[name]:
        raise InvalidMessage(f"{name} is empty", hint=f"Leave {name} out to mean every tier.")
    for place, item in enumerate(plain[name]):
        if item not in KNOWN_TIERS:
            raise InvalidMessage(
                f"{name}[{place}]: {item[:80]!r} is not a tier", hint=f"The tiers are {', '.join(KNOWN_TIERS)}."
            )


def _too_large(size: str) -> Refused:
    return Refused(
        413, f"the body has {size} bytes; the limit is {MAX_BODY:,}", code="over_limit", hint="Split the command."
    )


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    return {int: "a number", float: "a number", str: "a text", list: "a list"}.get(type(value), "an object")
