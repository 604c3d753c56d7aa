"""Entries of any stream as one typed thing, and filters over them. Pure."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from kvbus.errors import ProtocolError
from kvbus.protocol.codec import Envelope, Fields, decode_entry, to_plain
from kvbus.protocol.commands import COMMANDS, Command
from kvbus.protocol.dead import DeadLetter
from kvbus.protocol.events import RequestFinished, WorkerGap, WorkerStarted, WorkerStopped
from kvbus.protocol.hashes import ChunkHash, format_hash
from kvbus.protocol.results import Results

STREAMS = ("events", "commands", "results", "dead")


class Seen(msgspec.Struct, frozen=True):
    """An entry where it stands. Exactly one of envelope and error is there."""

    stream: str
    """Short name: events, commands, results or dead."""
    entry_id: str
    fields: Fields
    envelope: Envelope | None = None
    error: ProtocolError | None = None

    @property
    def type(self) -> str:
        """Its type, as far as it can be read."""
        if self.envelope is not None:
            return self.envelope.type
        return self.fields.get(b"type", b"").decode("utf-8", "backslashreplace")

    @property
    def message_id(self) -> str:
        if self.envelope is not None:
            return self.envelope.id
        return self.fields.get(b"id", b"").decode("utf-8", "backslashreplace") or self.entry_id


def look_at(stream: str, entry_id: str, fields: Fields) -> Seen:
    """Decode an entry, or keep the reason why it cannot be."""
    try:
        return Seen(stream, entry_id, fields, decode_entry(entry_id, fields))
    except ProtocolError as error:
        return Seen(stream, entry_id, fields, None, error)


def decoded(seen: Seen) -> dict[str, Any]:
    """JSON-ready: what the entry says."""
    shown: dict[str, Any] = {"stream": seen.stream, "entry_id": seen.entry_id, "id": seen.message_id, "type": seen.type}
    if seen.envelope is None:
        assert seen.error is not None
        shown["error"] = {"code": seen.error.code, "message": seen.error.message}
        shown["fields"] = raw_fields(seen.fields)
        return shown
    if seen.envelope.origin is not None:
        shown["origin"] = seen.envelope.origin
    shown["message"] = to_plain(seen.envelope.message)
    return shown


def raw(seen: Seen) -> dict[str, Any]:
    """JSON-ready: what stands on the server, undecoded."""
    return {"stream": seen.stream, "entry_id": seen.entry_id, "fields": raw_fields(seen.fields)}


def raw_fields(fields: Fields) -> dict[str, str]:
    """Text as it is, other bytes as base64 behind `base64:`."""
    return {name.decode("utf-8", "backslashreplace"): bytes_text(value) for name, value in fields.items()}


def bytes_text(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(value).decode()


class Needle:
    """One chunk hash, looked for in entries: a quick look at the bytes first, since decoding is the greater cost."""

    def __init__(self, chunk: ChunkHash) -> None:
        self.chunk = chunk
        text = format_hash(chunk).encode()
        self._text = text
        self._bytes: tuple[bytes, ...] = ()
        if isinstance(chunk, bytes):
            self._bytes = (chunk,)
        elif chunk >= 2**32:
            self._bytes = (chunk.to_bytes(8, "big"),)
        elif chunk < -(2**31):
            self._bytes = (chunk.to_bytes(8, "big", signed=True),)
        # small integers have many forms in msgpack: those are always decoded

    def may_be_in(self, fields: Fields) -> bool:
        """False only when the entry cannot hold the hash."""
        body = fields.get(b"body")
        if body is None or not self._bytes:
            return True
        return any(form in body for form in self._bytes) or self._text in body.lower()


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """What to show. Within one field any value will do; every field that is given must hold."""

    types: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    instances: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()
    """vLLM's id of a request, or the client's."""
    sessions: tuple[str, ...] = ()
    """`session` or `session_id` of a request's context."""
    commands: tuple[str, ...] = ()
    """Command ids: the command, its results, its dead letter. A lookup_id will do, too."""
    hashes: tuple[ChunkHash, ...] = ()

    @property
    def any(self) -> bool:
        return any(getattr(self, name) for name in self.__struct_fields__)


class Filter:
    """Filters, ready to be asked."""

    def __init__(self, filters: Filters) -> None:
        self.filters = filters
        self._needles = [Needle(chunk) for chunk in filters.hashes]
        self._chunks = frozenset(filters.hashes)

    def may_match(self, fields: Fields) -> bool:
        """A quick look before decoding: False only for what cannot match."""
        wanted = self.filters.types
        if wanted and fields.get(b"type", b"").decode("utf-8", "backslashreplace") not in wanted:
            return False
        return not self._needles or any(needle.may_be_in(fields) for needle in self._needles)

    def matches(self, seen: Seen) -> bool:
        wanted = self.filters
        if not wanted.any:
            return True
        if wanted.types and seen.type not in wanted.types:
            return False
        message = seen.envelope.message if seen.envelope is not None else None
        if message is None:  # what cannot be decoded is found by its type and id only
            only = (wanted.workers, wanted.instances, wanted.requests, wanted.sessions, wanted.hashes)
            return not any(only) and (not wanted.commands or seen.message_id in wanted.commands)
        return (
            (not wanted.workers or _worker(message) in wanted.workers)
            and (not wanted.instances or _of_instance(message, wanted.instances))
            and (not wanted.requests or not _requests(message).isdisjoint(wanted.requests))
            and (not wanted.sessions or not _sessions(message).isdisjoint(wanted.sessions))
            and (not wanted.commands or not command_ids(seen).isdisjoint(wanted.commands))
            and (not wanted.hashes or not self._chunks.isdisjoint(chunks_of(message)))
        )


def _worker(message: object) -> str | None:
    if isinstance(message, Results | WorkerStarted | WorkerStopped | WorkerGap):
        return message.worker
    return message.refused_by if isinstance(message, DeadLetter) else None


def _of_instance(message: object, wanted: tuple[str, ...]) -> bool:
    if isinstance(message, COMMANDS):
        target = message.target.instances if message.target is not None else None
        return target is not None and not set(target).isdisjoint(wanted)
    return getattr(message, "instance", None) in wanted


def _requests(message: object) -> set[str | None]:
    return {message.request_id, message.external_id} if isinstance(message, RequestFinished) else set()


def _sessions(message: object) -> set[str]:
    if not isinstance(message, RequestFinished):
        return set()
    found = (message.context.get("session"), message.context.get("session_id"))
    return {value for value in found if isinstance(value, str)}


def command_ids(seen: Seen) -> set[str]:
    """The commands that an entry is or speaks of, and their lookup_ids."""
    assert seen.envelope is not None
    message = seen.envelope.message
    if isinstance(message, COMMANDS):
        found = {seen.envelope.id, seen.entry_id, getattr(message, "lookup_id", None), seen.envelope.origin}
    elif isinstance(message, Results):
        found = {name for result in message.results for name in (result.command_id, result.lookup_id)}
    elif isinstance(message, DeadLetter):
        found = {message.message_id, message.entry_id}
    else:
        found = set()
    return {name for name in found if name}


def chunks_of(message: object) -> tuple[ChunkHash, ...]:
    """The hashes that a message names."""
    if isinstance(message, Results):
        lists = (getattr(result.chunks, name) for result in message.results for name in result.chunks.__struct_fields__)
        return tuple(chunk for chunks in lists for chunk in chunks)
    found: tuple[ChunkHash, ...] = getattr(message, "chunk_hashes", ())
    return found


def as_command(seen: Seen) -> Command | None:
    message = seen.envelope.message if seen.envelope is not None else None
    return message if isinstance(message, COMMANDS) else None
