"""One or two messages of every kind, with fixed ids: shown in the documents, checked against by other languages."""

from __future__ import annotations

import msgspec

from kvbus.protocol.codec import Message
from kvbus.protocol.commands import DDR, SSD, Evict, Lookup, Ping, Prefetch, Target
from kvbus.protocol.dead import DeadLetter
from kvbus.protocol.events import FinishReason, RequestFinished, WorkerGap, WorkerStarted, WorkerStopped
from kvbus.protocol.hashes import ChunkHash, parse_hash
from kvbus.protocol.results import ChunkLists, CommandResult, Counts, ErrorInfo, Held, Results, Status

AT_MS = 1_764_480_000_000


class Sample(msgspec.Struct, frozen=True):
    """A message and where it belongs. stream: the short name. origin: the message that it repeats, if any."""

    name: str
    stream: str
    message_id: str
    message: Message
    origin: str | None = None


def hashes(*texts: str) -> tuple[ChunkHash, ...]:
    return tuple(parse_hash(text) for text in texts)


_THREE = ("-6ed9a448787a198f", "-4ca98d8c9e52152e", "3f5c45ecbab5e9fd")
_DIGEST = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def samples() -> tuple[Sample, ...]:
    """All samples, the commands first."""
    return (*_commands(), *_events(), *_answers())


def _commands() -> tuple[Sample, ...]:
    return (
        Sample(
            "prefetch",
            "commands",
            "5f0c8d6e1b2a4c3d9e8f7a6b5c4d3e2f",
            Prefetch(
                chunk_hashes=hashes(*_THREE),
                lookup_id="turn_prefetch",
                issued_at_ms=AT_MS,
                issuer="agentos",
            ),
        ),
        Sample(
            "prefetch-all-fields",
            "commands",
            "prefetch-2",
            Prefetch(
                chunk_hashes=hashes("0", "-1", "7fffffffffffffff", "-8000000000000000", "ffffffffffffffff", _DIGEST),
                lookup_id="l",
                sources=(SSD,),
                tags=(("user", "alice"), ("team", "blau")),
                ttl_ms=10_000,
                target=Target(models=("qwen",), instances=("node-1",), ranks=(0, 1)),
                issued_at_ms=AT_MS,
                issuer="agentos",
            ),
        ),
        Sample("evict", "commands", "evict-1", Evict(chunk_hashes=hashes(*_THREE))),
        Sample(
            "evict-ddr-replayed",
            "commands",
            "evict-2",
            Evict(chunk_hashes=hashes(_THREE[2]), locations=(DDR,), lookup_id="e", issued_at_ms=AT_MS),
            origin="evict-1",
        ),
        Sample("lookup", "commands", "lookup-1", Lookup(chunk_hashes=hashes(*_THREE), issued_at_ms=AT_MS)),
        Sample("ping", "commands", "ping-1", Ping()),
    )


def _events() -> tuple[Sample, ...]:
    worker = {"worker": "node-1/0", "instance": "node-1", "rank": 0, "epoch": AT_MS}
    return (
        Sample(
            "request.finished",
            "events",
            "0d1e2f3a4b5c6d7e0000000000000007",
            RequestFinished(
                request_id="chatcmpl-42-1a2b3c4d",
                external_id="chatcmpl-42",
                instance="node-1",
                model="qwen",
                reason=FinishReason.STOP,
                chunk_hashes=hashes(*_THREE),
                chunk_size=256,
                prompt_tokens=812,
                output_tokens=64,
                cached_tokens=512,
                hash_fingerprint="builtin/256/3f5c45ecbab5e9fd",
                context={"session": "alice-1", "intent": "travel"},
                publisher="node-1",
                epoch=AT_MS,
                seq=7,
                finished_at_ms=AT_MS + 5,
            ),
        ),
        Sample(
            "request.finished-smallest",
            "events",
            "finished-2",
            RequestFinished(
                request_id="r",
                instance="node-1",
                reason=FinishReason.ABORT,
                publisher="node-1",
                epoch=1,
                seq=0,
                finished_at_ms=0,
            ),
        ),
        Sample(
            "worker.started",
            "events",
            f"node-1/0:{AT_MS}:started",
            WorkerStarted(
                **worker,  # type: ignore[arg-type]
                at_ms=AT_MS,
                model="qwen",
                world_size=2,
                chunk_size=256,
                hash_fingerprint="builtin/256/3f5c45ecbab5e9fd",
                tiers=(DDR, SSD),
            ),
        ),
        Sample(
            "worker.stopped",
            "events",
            f"node-1/0:{AT_MS}:stopped",
            WorkerStopped(**worker, at_ms=AT_MS + 9, reason="stopped"),  # type: ignore[arg-type]
        ),
        Sample(
            "worker.gap",
            "events",
            "gap-1",
            WorkerGap(
                **worker,  # type: ignore[arg-type]
                at_ms=AT_MS + 9,
                reason="trimmed: trimmed before they were read",
                missed=12,
                after="1764480000000-0",
                before="1764480000500-3",
            ),
        ),
    )


def _answers() -> tuple[Sample, ...]:
    loaded = CommandResult(
        command_id="5f0c8d6e1b2a4c3d9e8f7a6b5c4d3e2f",
        type="prefetch",
        status=Status.PARTIAL,
        lookup_id="turn_prefetch",
        counts=Counts(requested=3, loaded=1, resident=1, no_space=1, bytes=2_097_152),
        chunks=ChunkLists(no_space=hashes(_THREE[2])),
        started_at_ms=AT_MS + 1,
        duration_us=1_830,
    )
    waiting = CommandResult(
        command_id="evict-1",
        type="evict",
        status=Status.DEFERRED,
        counts=Counts(requested=3, evicted=2, in_use=1, evicted_pairs=4),
        chunks=ChunkLists(in_use=hashes(_THREE[0])),
    )
    refused = CommandResult(
        command_id="x",
        type="evict",
        status=Status.REJECTED,
        error=ErrorInfo("invalid", "evict: chunk_hashes is empty"),
    )
    held = CommandResult(
        command_id="lookup-1",
        type="lookup",
        status=Status.DONE,
        counts=Counts(requested=3),
        held=Held(tiers=(DDR, SSD), masks=b"\3\2\0"),
    )
    letter = DeadLetter(
        stream="kvbus:{default}:commands",
        entry_id="1764480000000-0",
        message_id="x",
        type="evict",
        code="invalid",
        message="evict: chunk_hashes is empty",
        refused_by="node-1/0",
        at_ms=AT_MS,
        size=40,
        fields={"type": b"evict", "json": b'{"chunk_hashes":[]}'},
    )
    return (
        Sample(
            "results",
            "results",
            "results-1",
            Results(
                worker="node-1/0", instance="node-1", rank=0, epoch=AT_MS, results=(loaded, waiting, refused, held)
            ),
        ),
        Sample("dead", "dead", "dead-1", letter),
    )
