"""What became of a command's chunks adds up, however they came in."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvbus.protocol import Evict, Results, Status, decode_entry, encode_entry
from kvbus.protocol.limits import MAX_RESULT_HASHES
from kvbus.protocol.results import CommandResult, Outcome
from worker_plugin.engine_types import ChunkOutcome
from worker_plugin.tally import AGAIN, Tally, failure

PROBLEMS = frozenset(Outcome) - {Outcome.LOADED, Outcome.RESIDENT, Outcome.EVICTED, Outcome.MISSING}

outcomes = st.builds(
    ChunkOutcome,
    outcome=st.sampled_from(Outcome),
    tiers=st.integers(min_value=0, max_value=2),
    bytes=st.integers(min_value=0, max_value=1000),
    detail=st.sampled_from(("", "its file was gone")),
)

hashes = st.integers(min_value=-(2**63), max_value=2**63 - 1)


def result_of(tally: Tally) -> CommandResult:
    return tally.result("c", Evict(chunk_hashes=(1,)))


def counted(result: CommandResult) -> dict[Outcome, int]:
    return {kind: getattr(result.counts, kind.value) for kind in Outcome}


@given(st.lists(outcomes, min_size=1, max_size=40), st.integers(min_value=1, max_value=40), st.data())
def test_counts_lists_and_status_are_those_of_how_each_chunk_ended(
    first: list[ChunkOutcome], run: int, data: st.DataObject
) -> None:
    """A model that counts the chunks one by one, as they ended."""
    chunks = data.draw(st.lists(hashes, min_size=len(first), max_size=len(first)))
    tally = Tally(chunks)
    for start in range(0, len(first), run):
        tally.put_run(start, first[start : start + run])
    ended = list(first)
    tried = list(first)
    for _ in range(3):
        for place in tally.open_places():
            again = data.draw(outcomes)
            tally.put(place, again)
            tried.append(again)
            left_a_tier = ended[place].tiers > 0 or getattr(ended[place], "detail", "") == "left a tier"
            if again.outcome is Outcome.MISSING and left_a_tier:
                again = msgspec.structs.replace(again, outcome=Outcome.EVICTED)
            if left_a_tier:
                again = msgspec.structs.replace(again, detail="left a tier")
            ended[place] = again
    result = result_of(tally)
    assert counted(result) == {kind: sum(found.outcome is kind for found in ended) for kind in Outcome}
    assert sum(counted(result).values()) == result.counts.requested == len(first)
    assert result.counts.bytes == sum(found.bytes for found in tried)
    assert result.counts.evicted_pairs == sum(found.tiers for found in tried)
    assert tally.open_places() == [place for place, found in enumerate(ended) if found.outcome in AGAIN]
    for name in result.chunks.__struct_fields__:
        named = tuple(chunk for chunk, found in zip(chunks, ended, strict=True) if found.outcome.value == name)
        assert getattr(result.chunks, name) == named
    if all(found.outcome is Outcome.FAILED for found in ended):
        assert result.status is Status.FAILED
    else:
        assert (result.status is Status.PARTIAL) == any(found.outcome in PROBLEMS for found in ended)
    assert (result.error is None) or any(found.outcome in PROBLEMS - AGAIN for found in ended)


@given(st.lists(outcomes, max_size=20), st.integers(min_value=0, max_value=20))
def test_what_was_not_come_to_counts_as_nothing(found: list[ChunkOutcome], more: int) -> None:
    tally = Tally(range(len(found) + more))
    for place, outcome in enumerate(found):
        tally.put(place, outcome)
    assert tally.untried() == list(range(len(found), len(found) + more))
    result = tally.result("c", Evict(chunk_hashes=(1,)), status=Status.EXPIRED)
    assert (result.counts.requested, sum(counted(result).values())) == (len(found) + more, len(found))


def test_many_named_hashes_are_cut_and_counted() -> None:
    tally = Tally(range(3000))
    tally.put_run(0, [ChunkOutcome(Outcome.MISSING)] * 3000)
    result = result_of(tally)
    assert (result.counts.missing, result.status) == (3000, Status.DONE)
    assert result.chunks.missing == tuple(range(MAX_RESULT_HASHES))


@given(st.text(alphabet=st.characters(), max_size=40) | st.just("\udcff" * 2000))
def test_whatever_was_raised_can_be_sent_and_read(text: str) -> None:
    result = Tally((1,)).result("c", Evict(chunk_hashes=(1,)), status=Status.FAILED, error=failure(OSError(text)))
    message = Results(worker="w/0", instance="w", rank=0, epoch=1, results=(result,))
    assert decode_entry("1-1", encode_entry(message, message_id="m")).message == message
