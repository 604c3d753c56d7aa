"""The life of a chunk, a command or a request, as a timeline over all streams and ranks."""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from kvbus.client import KVBus
from kvbus.history import FoundCommand, command_at, find_command, find_latest
from kvbus.ops.entries import Filters, Needle, Seen, as_command, chunks_of
from kvbus.ops.tail import history
from kvbus.protocol.codec import Fields
from kvbus.protocol.dead import DeadLetter
from kvbus.protocol.events import RequestFinished, WorkerGap, WorkerStarted, WorkerStopped
from kvbus.protocol.hashes import ChunkHash, format_hash
from kvbus.protocol.results import CommandResult, Results
from kvbus.streams.checkpoint import read_checkpoint
from kvbus.streams.connection import Bus
from kvbus.streams.log import Log
from kvbus.streams.position import id_key
from kvbus.streams.registry import Membership
from kvbus.streams.subscription import message_id

KEEP = 1_000
"""Moments that a timeline keeps, the newest: a prompt that all requests share is announced by each of them."""
EVERY_STREAM = ("events", "commands", "results", "dead")
ANSWERING = ("commands", "results", "dead")
REQUEST_FINISHED = RequestFinished.TYPE.encode()


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened. what: announced, prefetch, loaded, worker.started, ...; who: instance or worker."""

    entry_id: str
    stream: str
    what: str
    who: str = ""
    command_id: str = ""
    detail: str = ""


class Holding(msgspec.Struct, frozen=True):
    """Where one worker holds a chunk at this moment."""

    worker: str
    chunk: str
    tiers: tuple[str, ...]


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The life of one thing. earlier: moments before the first that is shown. now: None when nobody was asked."""

    subject: str
    moments: tuple[Moment, ...]
    earlier: int = 0
    now: tuple[Holding, ...] | None = None
    silent: tuple[str, ...] = ()
    """Live workers that did not answer the live lookup, or have not answered the command."""
    notes: tuple[str, ...] = ()


class _Moments:
    """The newest KEEP moments."""

    def __init__(self) -> None:
        self._kept: deque[Moment] = deque(maxlen=KEEP)
        self._count = 0

    def add(self, seen: Seen, what: str, **more: str) -> None:
        self._count += 1
        self._kept.append(Moment(entry_id=seen.entry_id, stream=seen.stream, what=what, **more))

    @property
    def earlier(self) -> int:
        return self._count - len(self._kept)

    def __iter__(self) -> Iterator[Moment]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def explain_chunk(bus: Bus, chunk: ChunkHash, *, after: str = "0-0") -> Timeline:
    """Announced by which requests, asked for and carried out by whom. Empty when nothing is known. Raises BusError."""
    text, moments = format_hash(chunk), _Moments()
    commands: dict[str, int] = {}  # to the chunk's place among those that it names: all of them could be too much
    for seen in history(bus, ("commands",), after=after, filters=Filters(hashes=(chunk,))):
        command = as_command(seen)
        if command is not None:
            commands[seen.message_id] = chunks_of(command).index(chunk)
    needle = Needle(chunk)

    def worth(stream: str, fields: Fields) -> bool:
        # Requests and commands are many and long: their bytes tell whether they can hold the chunk.
        if stream == "events":
            return fields.get(b"type") != REQUEST_FINISHED or needle.may_be_in(fields)
        return stream != "commands" or needle.may_be_in(fields)

    for seen in history(bus, EVERY_STREAM, after=after, worth=worth):
        message = seen.envelope.message if seen.envelope is not None else None
        if isinstance(message, RequestFinished):
            if chunk in message.chunk_hashes:
                number = message.chunk_hashes.index(chunk) + 1
                detail = f"request {message.external_id or message.request_id}, chunk {number} of "
                detail += f"{len(message.chunk_hashes)}{_session(message)}"
                moments.add(seen, "announced", who=message.instance, detail=detail)
        elif isinstance(message, Results):
            for result in message.results:
                if (place := commands.get(result.command_id)) is not None:
                    outcome, detail = outcome_of(chunk, place, result)
                    moments.add(seen, outcome, who=message.worker, command_id=result.command_id, detail=detail)
        elif isinstance(message, WorkerStarted | WorkerStopped | WorkerGap):
            if len(moments):
                _add_worker(moments, seen, message)
        elif isinstance(message, DeadLetter):
            if message.message_id in commands:
                _add_dead(moments, seen, message)
        elif seen.message_id in commands:
            _add_command(moments, seen)
    return Timeline(subject=f"chunk {text}", moments=tuple(moments), earlier=moments.earlier)


def explain_command(bus: Bus, name: str) -> Timeline | None:
    """From its entry to the last answer. name: command id, entry id, or lookup_id (its newest prefetch).

    None when no stream knows of it. Raises BusError.
    """
    log, moments = Log(bus), _Moments()
    found = _at(log, name) or find_command(log, name) or find_latest(log, name)
    own_id = found.command_id if found is not None else name
    origin = _origin(log, found)
    notes = [] if origin is None else [f"it repeats {origin}"]
    answered: set[str] = set()
    # The command's own entry comes before all that speaks of it, unless ids were written by hand.
    for seen in history(bus, ANSWERING, after=_just_before(found)):
        message = seen.envelope.message if seen.envelope is not None else None
        if isinstance(message, Results):
            for result in message.results:
                if result.command_id == own_id:
                    if result.status.final:
                        answered.add(message.worker)
                    moments.add(seen, result.status, who=message.worker, command_id=own_id, detail=_counts(result))
        elif isinstance(message, DeadLetter):
            if message.message_id == own_id:
                _add_dead(moments, seen, message)
        elif seen.stream == "commands":
            if seen.message_id == own_id:
                _add_command(moments, seen)
            elif seen.envelope is not None and seen.envelope.origin == own_id:
                moments.add(
                    seen, "repeated", who=_issuer(seen), command_id=seen.envelope.id, detail="a replay or requeue"
                )
    if not len(moments):
        return None
    waiting = _waiting(bus, found, answered) if found is not None else {}
    notes += [f"{worker}: {why}" for worker, why in waiting.items()]
    if found is None:
        notes.append("its own entry was trimmed from the commands stream")
    return Timeline(
        subject=f"command {own_id}",
        moments=tuple(moments),
        earlier=moments.earlier,
        silent=tuple(waiting),
        notes=tuple(notes),
    )


def explain_request(bus: Bus, request: str) -> tuple[Timeline, tuple[ChunkHash, ...]] | None:
    """A request's announcement, and all commands about its chunks. request: vLLM's id, or the client's.

    Returns its chunks, too; None when no event names it. Raises BusError.
    """
    events = list(history(bus, ("events",), filters=Filters(requests=(request,))))
    if not events:
        return None
    chunks: dict[ChunkHash, None] = {}
    for seen in events:
        assert seen.envelope is not None
        chunks.update(dict.fromkeys(chunks_of(seen.envelope.message)))
    wanted, moments = frozenset(chunks), _Moments()
    commands: dict[str, int] = {}
    for seen in history(bus, ("commands",)):
        command = as_command(seen)
        touched = len(wanted.intersection(chunks_of(command))) if command is not None else 0
        if touched:
            commands[seen.message_id] = touched
    others = history(bus, ANSWERING)
    for seen in heapq.merge(events, others, key=lambda item: id_key(item.entry_id)):
        message = seen.envelope.message if seen.envelope is not None else None
        if isinstance(message, RequestFinished):
            detail = f"{message.reason}, {len(message.chunk_hashes)} chunks, {message.prompt_tokens} + "
            detail += f"{message.output_tokens} tokens, {message.cached_tokens} cached{_session(message)}"
            moments.add(seen, "finished", who=message.instance, detail=detail)
        elif isinstance(message, Results):
            for result in message.results:
                if result.command_id in commands:
                    moments.add(
                        seen, result.status, who=message.worker, command_id=result.command_id, detail=_counts(result)
                    )
        elif isinstance(message, DeadLetter):
            if message.message_id in commands:
                _add_dead(moments, seen, message)
        elif seen.stream == "commands" and seen.message_id in commands:
            _add_command(moments, seen, f"{commands[seen.message_id]} of this request's chunks; ")
    timeline = Timeline(subject=f"request {request}", moments=tuple(moments), earlier=moments.earlier)
    return timeline, tuple(chunks)


def with_lookup(client: KVBus, timeline: Timeline, chunks: Iterable[ChunkHash], *, timeout_s: float) -> Timeline:
    """The timeline, and where every live worker holds the chunks now. Sends one lookup. Raises BusError."""
    asked = tuple(chunks)
    handle = client.lookup(asked, ttl_ms=max(1, int(timeout_s * 1000)))
    state = handle.wait(timeout_s)
    now: list[Holding] = []
    for name, answer in sorted(state.finals.items()):
        held = answer.result.held
        if held is not None:
            now += [Holding(name, format_hash(chunk), held.tiers_of(place)) for place, chunk in enumerate(asked)]
    return msgspec.structs.replace(timeline, now=tuple(now), silent=(*state.waiting, *state.dead))


def outcome_of(chunk: ChunkHash, place: int, result: CommandResult) -> tuple[str, str]:
    """What became of a command's chunk number `place`, as exactly as the result tells: the outcome, and a remark."""
    error = f"[{result.error.code}] {result.error.message}" if result.error is not None else ""
    for name in result.chunks.__struct_fields__:
        if chunk in getattr(result.chunks, name):
            return name, error
    if result.held is not None:
        tiers = result.held.tiers_of(place)
        return "looked up", ", ".join(tiers) or "in no tier"
    good = [name for name in ("loaded", "resident", "evicted") if getattr(result.counts, name)]
    cut = any(
        getattr(result.counts, name) > len(getattr(result.chunks, name)) for name in result.chunks.__struct_fields__
    )
    if cut:
        good.append("not among those that the result names")
    return (" or ".join(good) if good else str(result.status)), error


def _at(log: Log, entry_id: str) -> FoundCommand | None:
    if not re.fullmatch(r"\d{1,20}-\d{1,20}", entry_id, re.ASCII):
        return None
    fields = log.get(log.bus.keys.commands, entry_id)
    return None if fields is None else command_at(log, entry_id, message_id(entry_id, fields))


def _origin(log: Log, found: FoundCommand | None) -> str | None:
    if found is None:
        return None
    fields = log.get(log.bus.keys.commands, found.entry_id) or {}
    return fields.get(b"origin", b"").decode("utf-8", "backslashreplace") or None


def _just_before(found: FoundCommand | None) -> str:
    if found is None:
        return "0-0"
    milliseconds, serial = id_key(found.entry_id)
    return f"{milliseconds}-{serial - 1}" if serial else f"{max(0, milliseconds - 1)}-0"


def _waiting(bus: Bus, found: FoundCommand, answered: set[str]) -> dict[str, str]:
    """Registered workers without a final answer, and why, as far as their checkpoints tell."""
    waiting: dict[str, str] = {}
    for member in Membership(bus).read():
        if member.name in answered:
            continue
        checkpoint = read_checkpoint(bus, member.name)
        dead = "" if member.alive else ", and it is dead"
        if checkpoint is None:
            waiting[member.name] = f"has no checkpoint{dead}"
        elif any(item.entry_id == found.entry_id for item in checkpoint.pending):
            waiting[member.name] = f"has it in hand{dead}"
        elif id_key(checkpoint.position.cursor) < id_key(found.entry_id):
            waiting[member.name] = f"has not come to it yet{dead}"
        else:
            waiting[member.name] = "has passed it: its answer was trimmed, or it came later"
    return waiting


def _add_worker(moments: _Moments, seen: Seen, message: WorkerStarted | WorkerStopped | WorkerGap) -> None:
    if isinstance(message, WorkerStarted):
        detail = "its DDR and SSD are empty"
    elif isinstance(message, WorkerGap):
        detail = f"{message.missed if message.missed is not None else 'unknown many'} commands missed: {message.reason}"
    else:
        detail = message.reason
    moments.add(seen, message.TYPE, who=message.worker, detail=detail)


def _add_dead(moments: _Moments, seen: Seen, message: DeadLetter) -> None:
    moments.add(
        seen,
        "refused",
        who=message.refused_by,
        command_id=message.message_id,
        detail=f"[{message.code}] {message.message}",
    )


def _add_command(moments: _Moments, seen: Seen, before: str = "") -> None:
    command = as_command(seen)
    if command is None:
        moments.add(seen, seen.type or "?", command_id=seen.message_id, detail=str(seen.error))
        return
    parts = [f"{len(chunks_of(command))} chunks"] if chunks_of(command) else []
    for name in ("lookup_id", "sources", "locations"):
        value = getattr(command, name, None)
        if value:
            parts.append(f"{name} {value if isinstance(value, str) else ', '.join(value)}")
    if command.target is not None:
        parts.append("for " + ", ".join(f"{k} {v}" for k, v in msgspec.to_builtins(command.target).items()))
    if seen.envelope is not None and seen.envelope.origin is not None:
        parts.append(f"repeats {seen.envelope.origin}")
    moments.add(
        seen, command.TYPE, who=command.issuer or "", command_id=seen.message_id, detail=before + ", ".join(parts)
    )


def _issuer(seen: Seen) -> str:
    command = as_command(seen)
    return (command.issuer or "") if command is not None else ""


def _session(message: RequestFinished) -> str:
    session = message.context.get("session") or message.context.get("session_id")
    return f", session {session}" if session else ""


def _counts(result: CommandResult) -> str:
    names = [name for name in result.counts.__struct_fields__ if name != "requested" and getattr(result.counts, name)]
    parts = [f"{getattr(result.counts, name)} {name}" for name in names]
    if result.error is not None:
        parts.append(f"[{result.error.code}] {result.error.message}")
    if result.attempt > 1:
        parts.append(f"attempt {result.attempt}")
    return ", ".join(parts)
