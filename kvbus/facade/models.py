"""Every JSON body that the facade answers with. The OpenAPI document is made from these types."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvbus.protocol.limits import MAX_HASHES, MAX_TEXT
from kvbus.protocol.results import Counts, ErrorInfo


class Model(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields at their default are left out."""


CommandStateName = Literal["running", "done", "partial", "failed"]


class WorkerAnswer(Model, frozen=True):
    """One worker's answer. chunks: the hashes behind the counts that need a look, at most 1,024 each."""

    status: str
    instance: str
    rank: int
    counts: Counts
    chunks: dict[str, tuple[str, ...]] = {}
    tiers: dict[str, tuple[str, ...]] = {}
    """Answer to a lookup: chunk hash to the names of the tiers that hold it; chunks in no tier have an empty list."""
    error: ErrorInfo | None = None
    attempt: int = 1
    started_at_ms: int = 0
    duration_us: int = 0


class PrefetchReply(Model, frozen=True):
    """complete, workers, waiting: only with ?wait=, what was known when the time was over or all had answered."""

    status: Literal["prefetch_started"]
    lookup_id: str
    num_chunks: int
    command_id: str
    complete: bool | None = None
    workers: dict[str, WorkerAnswer] = {}
    waiting: tuple[str, ...] = ()


class EvictReply(Model, frozen=True):
    """num_evicted: (chunk, tier) pairs, the first storing rank's count of each instance, summed over instances.

    in_use: chunks that a running request holds, at most over the ranks of an instance, summed over instances; they
    are removed later. absent: workers that were dead before the command and still owe an answer.
    """

    status: Literal["success"]
    num_evicted: int
    command_id: str
    workers: dict[str, WorkerAnswer]
    in_use: int = 0
    absent: tuple[str, ...] = ()


class LookupReply(Model, frozen=True):
    """workers: each one's `tiers` tells which tiers hold each chunk."""

    status: Literal["success"]
    num_chunks: int
    command_id: str
    workers: dict[str, WorkerAnswer]
    absent: tuple[str, ...] = ()


class CommandReply(Model, frozen=True):
    """What is known of a command. waiting, dead, absent: who owes an answer, by whether it lives."""

    command_id: str
    entry_id: str
    type: str
    state: CommandStateName
    complete: bool
    num_chunks: int
    workers: dict[str, WorkerAnswer]
    lookup_id: str | None = None
    issuer: str | None = None
    issued_at_ms: int | None = None
    waiting: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


class ErrorReply(Model, frozen=True):
    """code: stable, the same in Python, the CLI and the docs. hint: what to do next."""

    error: str
    code: str | None = None
    hint: str | None = None
    command_id: str | None = None


class Failure(Model, frozen=True):
    """Why one worker's part of a command did not succeed."""

    code: str
    message: str
    status: str | None = None
    counts: Counts | None = None


class FailuresReply(Model, frozen=True):
    """workers: the answers of those that did succeed."""

    error: Literal["Some workers failed to process request"]
    failures: dict[str, Failure]
    command_id: str
    workers: dict[str, WorkerAnswer] = {}


class WorkerInfo(Model, frozen=True):
    """A registered worker, as it tells of itself. stuck: a call into its engine does not return."""

    name: str
    alive: bool
    instance: str
    rank: int
    world_size: int
    stores: bool
    stuck: bool
    model: str
    chunk_size: int
    hash_fingerprint: str
    tiers: tuple[str, ...]
    host: str
    pid: int
    epoch: int
    started_at_ms: int
    kvbus: str
    lmcache: str
    vllm: str


class WorkersReply(Model, frozen=True):
    workers: tuple[WorkerInfo, ...]
    alive: int


class HealthReply(Model, frozen=True):
    status: Literal["ok"]


class Check(Model, frozen=True):
    """detail: the evidence, naming who is at fault."""

    ok: bool
    detail: str


class ReadyReply(Model, frozen=True):
    ready: bool
    checks: dict[str, Check]


HASH_PATTERN = (
    "^(0|[1-9a-fA-F][0-9a-fA-F]{0,15}|-[1-9a-fA-F][0-9a-fA-F]{0,14}|-[1-7][0-9a-fA-F]{15}|-80{15}|[0-9a-fA-F]{64})$"
)
"""A chunk hash's text, from -2^63 to 2^64-1, or a digest."""

CHUNK_HASHES = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_HASHES,
    "items": {"type": "string", "pattern": HASH_PATTERN},
    "description": "The chunks' hashes as the engine prints them.",
    "examples": [["-6ed9a448787a198f", "-4ca98d8c9e52152e", "3f5c45ecbab5e9fd"]],
}
LOOKUP_ID = {
    "type": "string",
    "maxLength": MAX_TEXT,
    "description": "The caller's own label; it need not be unique.",
}
