"""A finished request as an entry of the events stream. What can be mended is mended; the rest is refused."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
from blake3 import blake3

from kvbus.errors import OverLimit, ProtocolError
from kvbus.protocol.codec import Fields, encode_body, entry_fields
from kvbus.protocol.events import FinishReason, RequestFinished, check_context
from kvbus.protocol.hashes import ChunkHash
from kvbus.protocol.limits import MAX_HASHES, MAX_TEXT
from publisher.finished import FinishedRequest

_MOST = 2**53 - 1
_FITS_A_BODY = 40_000
"""Digests of 32 bytes that fit into a body whatever else it holds."""


class Record(msgspec.Struct, frozen=True):
    """An event ready to be sent. body: the msgpack body, which holds epoch and seq as well."""

    epoch: int
    seq: int
    body: bytes

    def fields(self, publisher: str) -> Fields:
        """The entry. Its message id follows from publisher, epoch and seq: a resend carries the same one."""
        return entry_fields(
            RequestFinished.TYPE, self.body, message_id=f"{_prefix(publisher, self.epoch)}{self.seq:016x}"
        )


@functools.lru_cache(maxsize=64)
def _prefix(publisher: str, epoch: int) -> str:
    return blake3(f"{publisher}\0{epoch}".encode()).hexdigest(length=8)


def encode(
    finished: FinishedRequest,
    hashes: Sequence[ChunkHash],
    *,
    publisher: str,
    epoch: int,
    seq: int,
    finished_at_ms: int,
) -> tuple[Record, tuple[str, ...]]:
    """The record, and the names of the fields that had to be mended (as a rule none).

    What is over a limit and can be spared is left out or cut, so that the chunk hashes still arrive: `context` and
    `external_id` are left out, `request_id` keeps its beginning and gets a digest of the whole, a chain of too many
    hashes keeps its beginning, an unknown reason becomes `error`, numbers are brought into their range. Wrong tags
    or hashes are not mended: they would name other chunks. Raises ProtocolError.
    """
    own: dict[str, Any] = {"publisher": publisher, "epoch": epoch, "seq": seq, "finished_at_ms": finished_at_ms}
    values: dict[str, Any] = {name: getattr(finished, name) for name in _COPIED}
    values["chunk_hashes"] = hashes if type(hashes) is tuple else tuple(hashes)
    try:
        return Record(epoch, seq, encode_body(RequestFinished(**values, **own))), ()
    except (ProtocolError, TypeError, AttributeError):
        mended = _mend(values)
    try:
        body = encode_body(RequestFinished(**values, **own))
    except OverLimit:
        if len(values["chunk_hashes"]) <= _FITS_A_BODY:
            raise
        values["chunk_hashes"] = values["chunk_hashes"][:_FITS_A_BODY]
        mended.append("chunk_hashes")
        body = encode_body(RequestFinished(**values, **own))
    return Record(epoch, seq, body), tuple(dict.fromkeys(mended))


_COPIED = (
    "request_id",
    "external_id",
    "instance",
    "model",
    "reason",
    "chunk_size",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "hash_fingerprint",
    "tags",
    "context",
)


def _mend(values: dict[str, Any]) -> list[str]:
    """Bring the values within the limits, in place; the names of those that were not."""
    before = dict(values)
    try:
        values["context"] = dict(values["context"])
        check_context(values["context"])
    except (ProtocolError, TypeError, ValueError, RecursionError):
        values["context"] = {}
        before["context"] = None
    external = values["external_id"]
    if external is not None and (not isinstance(external, str) or _encodable(external)[:MAX_TEXT] != external):
        values["external_id"] = None
    for name in ("request_id", "model", "hash_fingerprint"):
        values[name] = _cut(str(values[name]))
    if values["reason"] not in set(FinishReason):
        values["reason"] = FinishReason.ERROR
    for name in ("chunk_size", "prompt_tokens", "output_tokens", "cached_tokens"):
        values[name] = min(max(int(values[name] or 0), 0), _MOST)
    values["chunk_hashes"] = values["chunk_hashes"][:MAX_HASHES]
    return [name for name, value in values.items() if value != before[name]]


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _cut(text: str) -> str:
    """The text if it fits; else its beginning and a digest of the whole, so that two long ones stay apart."""
    text = _encodable(text)
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[: MAX_TEXT - 17]}~{blake3(text.encode()).hexdigest(length=8)}"


def with_epoch(record: Record, epoch: int) -> Record:
    """The same event under another epoch. Raises ProtocolError or msgspec.MsgspecError for a body that is none."""
    message = msgspec.msgpack.decode(record.body, type=RequestFinished)
    return Record(epoch, record.seq, encode_body(msgspec.structs.replace(message, epoch=epoch)))
