"""Every message that the protocol can carry, for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvbus.protocol import (
    ChunkLists,
    CommandResult,
    Counts,
    DeadLetter,
    ErrorInfo,
    Evict,
    FinishReason,
    Held,
    Lookup,
    Ping,
    Prefetch,
    RequestFinished,
    Results,
    Status,
    Target,
    WorkerGap,
    WorkerStarted,
    WorkerStopped,
)
from kvbus.protocol.limits import INT64_MIN, MAX_TTL_MS, UINT64_MAX

texts = st.text(st.characters(codec="utf-8"), max_size=40)
names = st.text("abcXYZ019._-/", min_size=1, max_size=40)
counts = st.integers(0, 2**53 - 1)
ranks = st.integers(0, 1_000_000)
integer_hashes = st.integers(INT64_MIN, UINT64_MAX) | st.sampled_from([0, -1, 1, INT64_MIN, 2**63 - 1, UINT64_MAX])
hashes = integer_hashes | st.binary(min_size=32, max_size=32)
hash_tuples = st.lists(hashes, min_size=1, max_size=12).map(tuple)
tags = st.lists(st.tuples(texts, texts), max_size=4).map(tuple)
tiers = st.none() | st.lists(names, min_size=1, max_size=4).map(tuple)
ttls = st.integers(1, MAX_TTL_MS)

plain: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def _levels(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_levels, value.values()), default=0)
    return 1 + max(map(_levels, value), default=0) if isinstance(value, list) else 0


contexts = st.dictionaries(texts, plain, max_size=4).filter(lambda context: _levels(context) <= 7)


def _lists_of(given: st.SearchStrategy[Any], *, size: int = 3) -> st.SearchStrategy[Any]:
    return st.none() | st.lists(given, max_size=size).map(tuple)


targets = st.none() | st.builds(Target, models=_lists_of(texts), instances=_lists_of(names), ranks=_lists_of(ranks))
_command: dict[str, Any] = {
    "target": targets,
    "issued_at_ms": st.none() | counts,
    "issuer": st.none() | texts,
    "ttl_ms": ttls,
}
_chunks: dict[str, Any] = {**_command, "chunk_hashes": hash_tuples, "tags": tags, "lookup_id": st.none() | texts}
commands = st.one_of(
    st.builds(Prefetch, **_chunks, sources=tiers),
    st.builds(Evict, **_chunks, locations=tiers),
    st.builds(Lookup, **_chunks),
    st.builds(Ping, **_command),
)

_worker: dict[str, Any] = {"worker": names, "instance": names, "rank": ranks, "epoch": counts, "at_ms": counts}
events = st.one_of(
    st.builds(
        RequestFinished,
        request_id=texts,
        external_id=st.none() | texts,
        instance=names,
        model=texts,
        reason=st.sampled_from(FinishReason),
        chunk_hashes=st.just(()) | hash_tuples,
        chunk_size=counts,
        prompt_tokens=counts,
        output_tokens=counts,
        cached_tokens=counts,
        hash_fingerprint=texts,
        tags=tags,
        context=contexts,
        publisher=names,
        epoch=counts,
        seq=counts,
        finished_at_ms=counts,
    ),
    st.builds(
        WorkerStarted,
        **_worker,
        model=texts,
        world_size=counts,
        chunk_size=counts,
        hash_fingerprint=texts,
        tiers=st.lists(names, max_size=3).map(tuple),
    ),
    st.builds(WorkerStopped, **_worker, reason=texts),
    st.builds(WorkerGap, **_worker, reason=texts, missed=st.none() | counts, after=texts, before=texts),
)

_some_hashes = st.just(()) | hash_tuples
results = st.builds(
    Results,
    worker=names,
    instance=names,
    rank=ranks,
    epoch=counts,
    results=st.lists(
        st.builds(
            CommandResult,
            command_id=texts,
            type=names,
            status=st.sampled_from(Status),
            lookup_id=st.none() | texts,
            counts=st.builds(Counts, **dict.fromkeys(Counts.__struct_fields__, counts)),
            chunks=st.builds(ChunkLists, **dict.fromkeys(ChunkLists.__struct_fields__, _some_hashes)),
            held=st.none() | st.builds(Held, tiers=st.lists(names, max_size=8).map(tuple), masks=st.binary(max_size=9)),
            error=st.none() | st.builds(ErrorInfo, code=names, message=texts),
            attempt=counts,
            started_at_ms=counts,
            duration_us=counts,
        ),
        max_size=3,
    ).map(tuple),
)
dead_letters = st.builds(
    DeadLetter,
    stream=texts,
    entry_id=texts,
    message_id=texts,
    type=texts,
    code=names,
    message=texts,
    refused_by=names,
    at_ms=counts,
    size=counts,
    fields=st.dictionaries(
        texts | st.sampled_from(["context", "missing", "failed"]), st.binary(max_size=40), max_size=3
    ),
)
messages = st.one_of(commands, events, results, dead_letters)
