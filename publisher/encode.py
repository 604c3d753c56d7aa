"""A finished request as an entry of the events stream. What can be mended is mended; the rest is refused."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from blake3 import blake3

from kvbus.errors import OverLimit, ProtocolError
from kvbus.protocol.codec import Fields, encode_body, entry_fields
from kvbus.protocol.events import FinishReason, RequestFinished, check_context
from kvbus.protocol.hashes import ChunkHash
from kvbus.protocol.limits import MAX_CONTEXT_BYTES, MAX_HASHES, MAX_TEXT
from publisher.finished import FinishedRequest

_MOST = 2**53 - 1
_FITS_A_BODY = 40_000
"""Digests of 32 bytes that fit into a body whatever else it holds."""


class Record(msgspec.Struct, frozen=True, gc=False):
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
    if (body := _encode_plain(finished, hashes, own)) is not None:
        return Record(epoch, seq, body), ()
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


_field: Any = msgspec.field  # either of its two arguments may be NODEFAULT, which its overloads do not say
_Body = msgspec.defstruct(
    "_Body",
    [
        (field.name, Any)
        if field.required
        else (field.name, Any, _field(default=field.default, default_factory=field.default_factory))
        for field in msgspec.structs.fields(RequestFinished)
    ],
    omit_defaults=True,
    kw_only=True,
    frozen=True,
    gc=False,
)
"""RequestFinished on the wire, without its checks."""
_INTEGERS = tuple[int, ...]  # their range, the encoder checks: no integer beyond 64 bits fits msgpack
_encoder = msgspec.msgpack.Encoder()
_REASONS = frozenset(FinishReason)


def _encode_plain(finished: FinishedRequest, hashes: Sequence[ChunkHash], own: dict[str, Any]) -> bytes | None:
    """The body of an event that is as nearly all are: small plain fields, signed integers as hashes. None: look closer.

    The full checks cost more than all the rest of a publisher's work, and this runs beside a scheduler. Whatever
    passes here passes a reader's own checks, too; the tests hold it to that.
    """
    external, context = finished.external_id, finished.context
    if not (
        type(finished.request_id) is str
        and len(finished.request_id) <= MAX_TEXT
        and (external is None or (type(external) is str and len(external) <= MAX_TEXT))
        and type(finished.instance) is str
        and len(finished.instance) <= 128
        and type(finished.model) is str
        and len(finished.model) <= MAX_TEXT
        and type(finished.hash_fingerprint) is str
        and len(finished.hash_fingerprint) <= MAX_TEXT
        and finished.reason in _REASONS
        and type(finished.chunk_size) is type(finished.prompt_tokens) is type(finished.output_tokens) is int
        and type(finished.cached_tokens) is int
        and 0 <= finished.chunk_size <= _MOST
        and 0 <= finished.prompt_tokens <= _MOST
        and 0 <= finished.output_tokens <= _MOST
        and 0 <= finished.cached_tokens <= _MOST
        and not finished.tags
        and len(hashes) <= MAX_HASHES
        and (not context or _is_plain(context))
    ):
        return None
    try:
        return _encoder.encode(
            _Body(
                request_id=finished.request_id,
                external_id=external,
                instance=finished.instance,
                model=finished.model,
                reason=finished.reason,
                chunk_hashes=msgspec.convert(hashes, _INTEGERS) if hashes else (),
                chunk_size=finished.chunk_size,
                prompt_tokens=finished.prompt_tokens,
                output_tokens=finished.output_tokens,
                cached_tokens=finished.cached_tokens,
                hash_fingerprint=finished.hash_fingerprint,
                context=context,
                **own,
            )
        )
    except (msgspec.ValidationError, ValueError, TypeError, OverflowError):
        return None


def _is_plain(context: Mapping[str, Any]) -> bool:
    """A flat map of short texts, integers, booleans and None, well within the limit."""
    if type(context) is not dict:
        return False
    size = 0
    for key, value in context.items():
        kind = type(value)
        if type(key) is not str or kind not in _PLAIN_TYPES:
            return False
        size += 12 + len(key) + (len(value) if kind is str else 0)
    return 4 * size <= MAX_CONTEXT_BYTES  # a character takes up to 4 bytes


_PLAIN_TYPES = frozenset((str, int, bool, type(None)))

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
