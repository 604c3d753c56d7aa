"""How messages look to people: one line each."""

from __future__ import annotations

from rich.text import Text

from kvbus.cli.output import styled
from kvbus.ops.entries import Seen
from kvbus.ops.when import clock_text, id_ms
from kvbus.protocol.codec import Message
from kvbus.protocol.commands import COMMANDS
from kvbus.protocol.dead import DeadLetter
from kvbus.protocol.events import RequestFinished, WorkerGap, WorkerStarted, WorkerStopped
from kvbus.protocol.hashes import format_hash
from kvbus.protocol.results import CommandResult, Counts, Results, Status

STREAM_STYLE = {"events": "cyan", "commands": "yellow", "results": "green", "dead": "red"}
STATUS_STYLE = {
    Status.DONE: "green",
    Status.DEFERRED: "yellow",
    Status.PARTIAL: "yellow",
    Status.NOT_APPLICABLE: "dim",
    Status.EXPIRED: "red",
    Status.REJECTED: "red",
    Status.FAILED: "red",
}


def entry_line(seen: Seen) -> Text:
    """An entry of any stream."""
    head = Text.assemble(
        (clock_text(id_ms(seen.entry_id)), "dim"), "  ", (f"{seen.stream:8}", STREAM_STYLE.get(seen.stream, "")), "  "
    )
    if seen.envelope is None:
        return head + styled(f"{seen.type or '?'}  {seen.error}", "red")
    origin = Text(f"  of {seen.envelope.origin}", style="dim") if seen.envelope.origin else Text()
    return head + message_line(seen.envelope.message, seen.envelope.id) + origin


def message_line(message: Message, message_id: str) -> Text:
    if isinstance(message, RequestFinished):
        cached = f", {message.cached_tokens} cached" if message.cached_tokens else ""
        return styled(
            f"{message.TYPE}  {message.external_id or message.request_id}  {message.reason}  "
            f"{len(message.chunk_hashes)} chunks  {message.prompt_tokens}+{message.output_tokens} tokens{cached}  "
            f"{message.instance}"
        )
    if isinstance(message, COMMANDS):
        chunks = getattr(message, "chunk_hashes", ())
        first = f"  {len(chunks)} chunks from {format_hash(chunks[0])}" if chunks else ""
        issuer = f"  by {message.issuer}" if message.issuer else ""
        return styled(f"{message.TYPE}  {message_id}{first}{issuer}")
    if isinstance(message, Results):
        line = styled(message.worker)
        for result in message.results[:4]:
            line += Text("  ") + result_text(result) + styled(f" of {result.type} {result.command_id}")
        more = len(message.results) - 4
        return line + Text(f"  and {more} more" if more > 0 else "")
    if isinstance(message, DeadLetter):
        return styled(f"{message.type or '?'}  [{message.code}] {message.message}  by {message.refused_by}")
    if isinstance(message, WorkerStarted):
        return styled(f"{message.TYPE}  {message.worker}  epoch {message.epoch}  {message.model}")
    if isinstance(message, WorkerStopped):
        return styled(f"{message.TYPE}  {message.worker}  {message.reason}")
    assert isinstance(message, WorkerGap)
    missed = "an unknown number of" if message.missed is None else f"{message.missed:,}"
    return styled(f"{message.TYPE}  {message.worker}  {missed} commands missed: {message.reason}", "red")


def result_text(result: CommandResult) -> Text:
    """A result's status and counts."""
    text = styled(result.status.value, STATUS_STYLE[result.status]) + styled(counts_text(result.counts))
    return text + (styled(f" [{result.error.code}] {result.error.message}", "red") if result.error else Text())


def counts_text(counts: Counts) -> str:
    named = [name for name in counts.__struct_fields__ if name not in ("requested", "bytes")]
    parts = [f"{getattr(counts, name):,} {name}" for name in named if getattr(counts, name)]
    if counts.bytes:
        parts.append(bytes_size(counts.bytes))
    return f" ({', '.join(parts)})" if parts else ""


def bytes_size(count: float) -> str:
    """Bytes for people: 3.2 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
