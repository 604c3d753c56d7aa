"""Chunk hashes: their strict text, their exact value, and the optional blake3 chain.

The text is what the engine prints: a signed hexadecimal integer without padding, or 64 hex digits of a digest.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from blake3 import blake3

from kvbus.errors import InvalidMessage, OverLimit
from kvbus.protocol.limits import INT64_MIN, MAX_HASHES, UINT64_MAX

ChunkHash = int | bytes
"""A 64-bit integer (-2^63 to 2^64-1), or a digest of 32 bytes: exactly what LMCache's keys hold."""

if TYPE_CHECKING:
    ChunkHashes = tuple[ChunkHash, ...]
else:
    # On the wire a hash may be an integer, bytes or text, which msgspec cannot tell apart in one union:
    # structs take anything here and bring it to ChunkHash with to_hashes in __post_init__.
    ChunkHashes = Annotated[
        tuple[Any, ...],
        msgspec.Meta(
            max_length=MAX_HASHES,
            extra_json_schema={
                "items": {
                    "description": "a chunk hash: 64-bit integer, 32-byte digest, or the text of either",
                    "anyOf": [
                        {"type": "string", "pattern": "^(0|-?[1-9a-fA-F][0-9a-fA-F]{0,15}|[0-9a-fA-F]{64})$"},
                        {"type": "integer", "minimum": INT64_MIN, "maximum": UINT64_MAX},
                    ],
                }
            },
        ),
    ]


class _Checked(tuple):  # type: ignore[type-arg]  # of ChunkHash
    """Hashes that `to_hashes` has been through: a message that is made anew from another does not check them again."""

    __slots__ = ()


class _Signed(msgspec.Struct, array_like=True):
    # A class of its own: looking up a generic alias costs a call into Python for every conversion.
    items: tuple[Annotated[int, msgspec.Meta(ge=INT64_MIN, le=2**63 - 1)], ...]


DIGEST_BYTES = 32
# fullmatch, not match with $: `$` would let a trailing newline through.
_INTEGER = re.compile(r"0|-?[1-9a-f][0-9a-f]{0,15}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)

BLAKE3_ROOT = bytes(8)
"""What stands before the first chunk: h[-1], eight zero bytes."""


def parse_hash(text: str) -> ChunkHash:
    """The exact value behind a hash's text.

    Raises InvalidMessage, quoting the text, for whatever is not strictly a hash.
    """
    if isinstance(text, str) and len(text) <= 64:
        folded = text.lower() if text.isascii() else ""
        if _INTEGER.fullmatch(folded):
            value = int(folded, 16)
            if value >= INT64_MIN:
                return value
            raise InvalidMessage(f"chunk hash {text!r} is below -2^63", hint="A chunk hash is a 64-bit integer.")
        if _DIGEST.fullmatch(folded):
            return bytes.fromhex(folded)
    shown = repr(text) if len(repr(text)) <= 100 else repr(text)[:97] + "..."
    raise InvalidMessage(
        f"{shown} is not a chunk hash",
        hint="A chunk hash is a signed hexadecimal integer like -6ed9a448787a198f, or 64 hex digits.",
    )


def format_hash(value: ChunkHash) -> str:
    """The hash's text, as the engine prints it."""
    return value.hex() if isinstance(value, bytes) else f"{value:x}"


def to_hash(item: object) -> ChunkHash:
    """A hash from any of its wire forms: integer, 32 bytes, or text. Raises InvalidMessage."""
    if type(item) is int:
        if INT64_MIN <= item <= UINT64_MAX:
            return item
        raise InvalidMessage(f"chunk hash {hex(item)[:40]} does not fit in 64 bits")
    if isinstance(item, bytes):
        if len(item) == DIGEST_BYTES:
            return item
        raise InvalidMessage(f"chunk hash of {len(item)} bytes: a digest has {DIGEST_BYTES}")
    return parse_hash(item)  # type: ignore[arg-type]  # refuses what is not text


def to_hashes(items: Iterable[object], *, field: str = "chunk_hashes") -> tuple[ChunkHash, ...]:
    """Many hashes from their wire forms, in order. Raises InvalidMessage or OverLimit, naming the item's place."""
    if type(items) is _Checked:
        return items
    if isinstance(items, str | bytes):
        raise InvalidMessage(f"{field} must be a list of chunk hashes, not one text")
    given = items if isinstance(items, tuple) else tuple(items)
    if not given:
        return ()  # the default itself, which is left out on the wire
    if len(given) > MAX_HASHES:
        raise OverLimit(f"{field} has {len(given):,} hashes; the limit is {MAX_HASHES:,}")
    # The engine's own signed integers, by far the most common case, are checked in one call: 520 in 6 to 15 us,
    # where a loop takes 50 and more.
    try:
        return _Checked(msgspec.convert((given,), _Signed).items)
    except msgspec.ValidationError:
        pass  # digests, texts, unsigned integers, or something that the loop below will name
    result: list[ChunkHash] = []
    for place, item in enumerate(given):
        try:
            result.append(to_hash(item))
        except InvalidMessage as error:
            raise InvalidMessage(f"{field}[{place}]: {error.message}", hint=error.hint) from None
    return _Checked(result)


def blake3_chunk(previous: ChunkHash | None, tokens: Sequence[int]) -> int:
    """The hash of one chunk: blake3(previous hash || tokens as big-endian u32), first 8 bytes as a signed integer.

    `previous` is the hash of the chunk before, or None at the start of the text.
    """
    if previous is None:
        prefix = BLAKE3_ROOT
    elif isinstance(previous, bytes):
        prefix = previous
    else:
        prefix = (previous & UINT64_MAX).to_bytes(8, "big")
    digest = blake3(prefix + struct.pack(f">{len(tokens)}I", *tokens)).digest(length=8)
    return int.from_bytes(digest, "big", signed=True)


def blake3_chain(tokens: Sequence[int], chunk_size: int, *, keep_partial: bool = False) -> list[int]:
    """The hashes of a text's chunks, each covering all tokens up to its end.

    tokens: token ids, each 0 to 2^32-1. chunk_size: tokens a chunk. keep_partial: hash a shorter last chunk too.
    """
    if chunk_size < 1:
        raise InvalidMessage(f"chunk_size {chunk_size} is not positive")
    hashes: list[int] = []
    previous: int | None = None
    end = len(tokens) if keep_partial else len(tokens) - len(tokens) % chunk_size
    for start in range(0, end, chunk_size):
        previous = blake3_chunk(previous, tokens[start : start + chunk_size])
        hashes.append(previous)
    return hashes


def fingerprint_tokens(chunk_size: int) -> list[int]:
    """The fixed chunk of tokens whose hash stands for all hash settings: 1, 2, ... chunk_size."""
    return list(range(1, chunk_size + 1))


def hash_fingerprint(algorithm: str, chunk_size: int, first_hash: ChunkHash) -> str:
    """One text for a process's hash settings: equal texts mean that hashes can match.

    first_hash: what the process's own settings make of `fingerprint_tokens(chunk_size)`.
    """
    return f"{algorithm}/{chunk_size}/{format_hash(first_hash)}"
