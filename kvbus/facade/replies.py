"""What the workers answered, judged and put into words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbus.answers import Answer, CommandState
from kvbus.facade.models import CommandStateName, Failure, WorkerAnswer
from kvbus.protocol.codec import to_plain
from kvbus.protocol.commands import Lookup
from kvbus.protocol.hashes import format_hash
from kvbus.protocol.results import CommandResult, Status

_UNDONE = (Status.FAILED, Status.REJECTED, Status.EXPIRED)


def answered(state: CommandState) -> bool:
    """Every live worker has said something. A first answer counts: chunks in use may take minutes to go."""
    return all(name in state.answers for name in state.waiting)


def failed(result: CommandResult) -> bool:
    """The worker could not do its part. Chunks that are in use, not there, or without room are no failure."""
    return result.status in _UNDONE or result.counts.failed > 0 or result.counts.tier_stuck > 0


def failures(state: CommandState, waited_s: float, *, silent: bool = True) -> dict[str, Failure]:
    """Whose part failed, and why. silent: no answer is a failure, too."""
    found = {name: _failure(answer.result) for name, answer in state.answers.items() if failed(answer.result)}
    told = {
        **dict.fromkeys(state.dead, ("not_answered", "died: its heartbeat has lapsed, and it never answered")),
        **dict.fromkeys(state.stuck, ("engine_stuck", "a call into its engine does not return")),
    }
    if silent:
        late = f"no answer within {waited_s:g} s; it may still carry the command out"
        told |= dict.fromkeys(state.waiting, ("not_answered", late))
    for name, (code, message) in told.items():
        if name not in state.answers:
            found[name] = Failure(code=code, message=message)
    return dict(sorted(found.items()))


def num_evicted(answers: Iterable[Answer]) -> int:
    """(chunk, tier) pairs: of each instance its first storing rank's own count."""
    first: dict[str, Answer] = {}
    for answer in _storing(answers):
        known = first.get(answer.instance)
        if known is None or answer.rank < known.rank:
            first[answer.instance] = answer
    return sum(answer.result.counts.evicted_pairs for answer in first.values())


def num_in_use(answers: Iterable[Answer]) -> int:
    """Chunks that are held or being written: the most on any rank of an instance, summed over instances."""
    most: dict[str, int] = {}
    for answer in _storing(answers):
        counts = answer.result.counts
        most[answer.instance] = max(most.get(answer.instance, 0), counts.in_use + counts.busy)
    return sum(most.values())


def workers(
    answers: Iterable[Answer], *, listed: bool = False, looked_up: Lookup | None = None
) -> dict[str, WorkerAnswer]:
    """The answers by worker. listed: with the hashes behind the counts. looked_up: the command that `held` answers."""
    by_name = sorted(answers, key=lambda answer: (answer.instance, answer.rank, answer.worker))
    asked = looked_up.chunk_hashes if looked_up is not None else ()
    texts = [format_hash(chunk) for chunk in asked]
    return {answer.worker: _worker(answer, listed, texts) for answer in by_name}


def state_of(answers: Sequence[Answer], *, waiting: bool, dead: bool) -> CommandStateName:
    """One word for the whole command. waiting, dead: somebody alive, or dead by now, owes its final answer."""
    if waiting:
        return "running"
    results = [answer.result for answer in answers]
    if any(result.status in _UNDONE for result in results):
        return "failed"
    return "partial" if dead or any(result.status is Status.PARTIAL for result in results) else "done"


def _storing(answers: Iterable[Answer]) -> Iterable[Answer]:
    return (answer for answer in answers if answer.result.status is not Status.NOT_APPLICABLE)


def _failure(result: CommandResult) -> Failure:
    stuck = "the engine holds the tier's lock and does not give it back" if result.counts.tier_stuck else ""
    if result.error is not None:
        code, message = result.error.code, result.error.message
    else:
        code, message = ("tier_stuck", stuck) if stuck else (result.status.value, f"ended as {result.status.value}")
    return Failure(code=code, message=message, status=result.status.value, counts=result.counts)


def _worker(answer: Answer, listed: bool, texts: list[str]) -> WorkerAnswer:
    result = answer.result
    held = result.held
    return WorkerAnswer(
        status=result.status.value,
        instance=answer.instance,
        rank=answer.rank,
        counts=result.counts,
        chunks={name: tuple(found) for name, found in to_plain(result.chunks).items()} if listed else {},
        tiers={text: held.tiers_of(place) for place, text in enumerate(texts)} if held is not None else {},
        error=result.error,
        attempt=result.attempt,
        started_at_ms=result.started_at_ms,
        duration_us=result.duration_us,
    )
