"""What a worker tells of itself and of entries that it cannot take: events, dead letters, results. Pure."""

from __future__ import annotations

import msgspec

from kvbus.errors import KVBusError
from kvbus.protocol.codec import Fields, encode_body, new_message_id
from kvbus.protocol.dead import DeadLetter, cut_fields
from kvbus.protocol.events import WorkerGap, WorkerStarted, WorkerStopped
from kvbus.protocol.limits import MAX_BODY_BYTES, MAX_RESULTS_PER_ENTRY
from kvbus.protocol.results import CommandResult, ErrorInfo, Results, Status
from kvbus.streams.checkpoint import Append, Pending
from kvbus.streams.keys import Keys
from kvbus.streams.position import Gap
from kvbus.streams.registry import Registration


class Notices(msgspec.Struct, frozen=True):
    """Builds the entries of one life of one worker."""

    keys: Keys
    name: str
    registration: Registration
    epoch: int

    def started(self, at_ms: int) -> Append:
        info = self.registration
        event = WorkerStarted(
            worker=self.name,
            instance=info.instance,
            rank=info.rank,
            epoch=self.epoch,
            at_ms=at_ms,
            model=info.model,
            world_size=info.world_size,
            chunk_size=info.chunk_size,
            hash_fingerprint=info.hash_fingerprint,
            tiers=info.tiers,
        )
        return self._event(event, f"{self.name}:{self.epoch}:started")

    def stopped(self, at_ms: int, reason: str) -> Append:
        info = self.registration
        event = WorkerStopped(
            worker=self.name, instance=info.instance, rank=info.rank, epoch=self.epoch, at_ms=at_ms, reason=reason
        )
        return self._event(event, f"{self.name}:{self.epoch}:stopped")

    def gap(self, at_ms: int, gap: Gap) -> Append:
        info = self.registration
        event = WorkerGap(
            worker=self.name,
            instance=info.instance,
            rank=info.rank,
            epoch=self.epoch,
            at_ms=at_ms,
            reason=f"{gap.kind}: {gap.reason}"[:1024],
            missed=gap.missed,
            after=gap.after,
            before=gap.before,
        )
        return self._event(event, new_message_id())

    def results(self, answers: list[CommandResult]) -> list[Append]:
        """One entry as a rule, more where the protocol's limits ask for it."""
        if not answers:
            return []
        info = self.registration
        whole = Results(
            worker=self.name, instance=info.instance, rank=info.rank, epoch=self.epoch, results=tuple(answers)
        )
        body = msgspec.msgpack.encode(whole)
        if len(answers) == 1 or (len(body) <= MAX_BODY_BYTES and len(answers) <= MAX_RESULTS_PER_ENTRY):
            return [Append(stream=self.keys.results, type=Results.TYPE, message_id=new_message_id(), body=body)]
        half = len(answers) // 2
        return self.results(answers[:half]) + self.results(answers[half:])

    def _event(self, event: WorkerStarted | WorkerStopped | WorkerGap, event_id: str) -> Append:
        return Append(stream=self.keys.events, type=event.TYPE, message_id=event_id, body=encode_body(event))


def type_text(fields: Fields) -> str:
    """The type of an entry that may not be readable, fit to be told."""
    return fields.get(b"type", b"").decode("utf-8", "backslashreplace")[:256]


def dead_letter(
    keys: Keys, *, stream: str, entry_id: str, message_id: str, fields: Fields, error: KVBusError, by: str, at_ms: int
) -> Append:
    """One dead letter, however many refuse the same entry. stream: the key that it stood in."""
    cut, size = cut_fields(fields)
    letter = DeadLetter(
        stream=stream,
        entry_id=entry_id,
        message_id=message_id,
        type=type_text(fields),
        code=error.code,
        message=error.message[:1024],
        refused_by=by,
        at_ms=at_ms,
        size=size,
        fields=cut,
    )
    return Append(
        stream=keys.dead,
        type=DeadLetter.TYPE,
        message_id=new_message_id(),
        body=encode_body(letter),
        refuse_once=f"{stream.removeprefix(keys.prefix)}|{entry_id}",
    )


def unable(item: Pending, status: Status, error: KVBusError, attempt: int) -> CommandResult:
    """The final result of a command that could not even be begun."""
    return CommandResult(
        command_id=item.message_id,
        type=item.type,
        status=status,
        lookup_id=item.lookup_id,
        error=ErrorInfo(error.code, error.message[:1024]),
        attempt=attempt,
    )
