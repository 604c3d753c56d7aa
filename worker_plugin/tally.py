"""Adds up what became of a command's chunks, and makes its result of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

import msgspec

from kvbus.errors import EngineFailed, KVBusError
from kvbus.protocol.commands import Command
from kvbus.protocol.hashes import ChunkHash
from kvbus.protocol.limits import MAX_RESULT_HASHES, MAX_TEXT
from kvbus.protocol.results import ChunkLists, CommandResult, Counts, ErrorInfo, Held, Outcome, Status
from worker_plugin.engine_types import ChunkOutcome

_LISTED = frozenset(Outcome(name) for name in ChunkLists.__struct_fields__)
_PROBLEMS = _LISTED - {Outcome.MISSING}
AGAIN = frozenset((Outcome.IN_USE, Outcome.BUSY))
"""Outcomes that may be others a little later."""
_FAULTS = _PROBLEMS - AGAIN
"""Outcomes whose details are told as the command's error; that a chunk is in use is none."""


class Tally:
    """The newest outcome of every chunk of one command. A chunk that is tried again counts once, as it ended.

    Most commands end alike for all their chunks, so whole runs of chunks are taken in, and counted, at once: chunk by
    chunk this was a third of a worker's time.
    """

    def __init__(self, chunks: Sequence[ChunkHash]) -> None:
        self.requested = len(chunks)
        self._chunks = chunks
        self.bytes = 0
        self.pairs = 0
        self._found: list[ChunkOutcome | None] = [None] * len(chunks)
        self._kinds: set[Outcome] = set()
        """All outcomes that there have been; some may have been overtaken."""
        self._whole = False
        """Every chunk came in one run, and none was tried again."""
        self._removed: set[int] = set()

    def put(self, place: int, outcome: ChunkOutcome) -> None:
        """What became of the command's chunk number `place`."""
        before = self._found[place]
        if before is not None and before.tiers:
            self._removed.add(place)
        if outcome.outcome is Outcome.MISSING and place in self._removed:
            # A chunk that left one tier at the first try, and had gone from the other by the second, was evicted.
            outcome = msgspec.structs.replace(outcome, outcome=Outcome.EVICTED)
        self._found[place] = outcome
        self._kinds.add(outcome.outcome)
        self._whole = False
        self.bytes += outcome.bytes
        self.pairs += outcome.tiers

    def put_run(self, start: int, outcomes: list[ChunkOutcome]) -> None:
        """What became of chunks that are met for the first time: those from number `start` on."""
        self._found[start : start + len(outcomes)] = outcomes
        self._whole = len(outcomes) == self.requested
        if outcomes and outcomes.count(outcomes[0]) == len(outcomes):
            alike, many = outcomes[:1], len(outcomes)
        else:
            alike, many = outcomes, 1
        for outcome in alike:
            self._kinds.add(outcome.outcome)
            self.bytes += outcome.bytes * many
            self.pairs += outcome.tiers * many

    def open_places(self) -> list[int]:
        """The chunks that are in use or busy."""
        if AGAIN.isdisjoint(self._kinds):
            return []
        return [place for place, found in enumerate(self._found) if found is not None and found.outcome in AGAIN]

    def untried(self) -> list[int]:
        return [place for place, found in enumerate(self._found) if found is None]

    def result(
        self,
        command_id: str,
        command: Command,
        *,
        status: Status | None = None,
        error: KVBusError | None = None,
        held: Held | None = None,
        attempt: int = 1,
        started_at_ms: int = 0,
        duration_us: int = 0,
    ) -> CommandResult:
        """The command's result. status: None works it out from the outcomes."""
        numbers = self._numbers()
        lists: dict[str, tuple[ChunkHash, ...]] = {}
        for kind in self._kinds & _LISTED:
            if kind in numbers:
                lists[kind.value] = tuple(self._named(kind))
        if error is None:
            error = self._fault()
        return CommandResult(
            command_id=command_id,
            type=command.TYPE,
            status=status or self._status(numbers),
            lookup_id=getattr(command, "lookup_id", None),
            counts=Counts(requested=self.requested, evicted_pairs=self.pairs, bytes=self.bytes, **numbers),
            chunks=ChunkLists(**lists),
            held=held,
            error=None if error is None else ErrorInfo(error.code, _sendable(error.message)),
            attempt=attempt,
            started_at_ms=started_at_ms,
            duration_us=duration_us,
        )

    def _numbers(self) -> dict[Outcome, int]:
        if self._whole and len(self._kinds) == 1:
            return dict.fromkeys(self._kinds, self.requested)
        return Counter(found.outcome for found in self._found if found is not None)

    def _named(self, kind: Outcome) -> Iterable[ChunkHash]:
        if self._whole and len(self._kinds) == 1:
            return self._chunks[:MAX_RESULT_HASHES]
        ended = zip(self._chunks, self._found, strict=True)
        named = (chunk for chunk, found in ended if found is not None and found.outcome is kind)
        return islice(named, MAX_RESULT_HASHES)

    def _fault(self) -> KVBusError | None:
        """What is told of the first chunk, as it ended, with which something is wrong."""
        if self._kinds.isdisjoint(_FAULTS):
            return None
        details = (found.detail for found in self._found if found is not None and found.outcome in _FAULTS)
        detail = next(filter(None, details), "")
        return EngineFailed(detail) if detail else None

    def _status(self, numbers: dict[Outcome, int]) -> Status:
        if self.requested and numbers.get(Outcome.FAILED) == self.requested:
            return Status.FAILED
        return Status.DONE if _PROBLEMS.isdisjoint(numbers) else Status.PARTIAL


def failure(fault: Exception) -> EngineFailed:
    """What the engine raised, as an error to tell, whatever its text is."""
    try:
        return EngineFailed(f"{type(fault).__name__}: {fault}")
    except Exception:  # noqa: BLE001 - an exception whose text cannot be had is still to be answered
        return EngineFailed(f"{type(fault).__name__}, whose text cannot be shown")


def _sendable(text: str) -> str:
    """File names may hold bytes that are no UTF-8; a result with such a text could never be committed."""
    return text[:MAX_TEXT].encode("utf-8", "backslashreplace").decode()[:MAX_TEXT]
