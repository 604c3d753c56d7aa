"""Adds up what became of a command's chunks, and makes its result of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvbus.errors import KVBusError
from kvbus.protocol.commands import Command
from kvbus.protocol.hashes import ChunkHash
from kvbus.protocol.limits import MAX_RESULT_HASHES
from kvbus.protocol.results import ChunkLists, CommandResult, Counts, ErrorInfo, Held, Outcome, Status
from worker_plugin.engine_types import ChunkOutcome

_LISTED = tuple(Outcome(name) for name in ChunkLists.__struct_fields__)
_PROBLEMS = frozenset(_LISTED) - {Outcome.MISSING}
AGAIN = frozenset((Outcome.IN_USE, Outcome.BUSY))
"""Outcomes that may be others a little later."""


class Tally:
    """The newest outcome of every chunk of one command. A chunk that is tried again counts once, as it ended."""

    def __init__(self, requested: int) -> None:
        self.requested = requested
        self.bytes = 0
        self.pairs = 0
        self._outcomes: list[Outcome | None] = [None] * requested
        self._chunks: list[ChunkHash | None] = [None] * requested
        self._removed: set[int] = set()
        self._detail = ""

    def put(self, place: int, outcome: ChunkOutcome) -> None:
        """What became of the command's chunk number `place`."""
        if outcome.tiers:
            self._removed.add(place)
        # A chunk that left one tier at the first try, and had gone from the other by the second, was evicted.
        gone = outcome.outcome is Outcome.MISSING and place in self._removed
        self._outcomes[place] = Outcome.EVICTED if gone else outcome.outcome
        self._chunks[place] = outcome.chunk_hash
        self.bytes += outcome.bytes
        self.pairs += outcome.tiers
        if outcome.detail and outcome.outcome in _PROBLEMS:
            self._detail = outcome.detail

    def open_places(self) -> list[int]:
        """The chunks that are in use or busy."""
        return [place for place, outcome in enumerate(self._outcomes) if outcome in AGAIN]

    def untried(self) -> list[int]:
        return [place for place, outcome in enumerate(self._outcomes) if outcome is None]

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
        numbers = Counter(outcome for outcome in self._outcomes if outcome is not None)
        lists: dict[str, tuple[ChunkHash, ...]] = {}
        for kind in _LISTED:
            if numbers[kind]:
                lists[kind.value] = tuple(self._named(kind))
        info = None
        if error is not None:
            info = ErrorInfo(error.code, error.message[:1024])
        elif self._detail:
            info = ErrorInfo("engine_failed", self._detail[:1024])
        return CommandResult(
            command_id=command_id,
            type=command.TYPE,
            status=status or self._status(numbers),
            lookup_id=getattr(command, "lookup_id", None),
            counts=Counts(
                requested=self.requested,
                evicted_pairs=self.pairs,
                bytes=self.bytes,
                **{kind.value: number for kind, number in numbers.items()},
            ),
            chunks=ChunkLists(**lists),
            held=held,
            error=info,
            attempt=attempt,
            started_at_ms=started_at_ms,
            duration_us=duration_us,
        )

    def _named(self, kind: Outcome) -> Iterable[ChunkHash]:
        found = 0
        for outcome, chunk in zip(self._outcomes, self._chunks, strict=True):
            if outcome is kind and chunk is not None:
                yield chunk
                found += 1
                if found == MAX_RESULT_HASHES:
                    return

    def _status(self, numbers: Counter[Outcome]) -> Status:
        if self.requested and numbers[Outcome.FAILED] == self.requested:
            return Status.FAILED
        return Status.PARTIAL if any(numbers[kind] for kind in _PROBLEMS) else Status.DONE
