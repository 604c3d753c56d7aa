"""How the workers' answers become a status code and a number: the rules, without a server."""

from __future__ import annotations

import pytest

from kvbus.answers import Answer, CommandState
from kvbus.facade import replies
from kvbus.protocol.commands import DDR, SSD, Lookup
from kvbus.protocol.results import CommandResult, Counts, ErrorInfo, Held, Status


def answer(name: str, status: Status = Status.DONE, error: ErrorInfo | None = None, **counts: int) -> Answer:
    instance, _, rank = name.partition("/")
    result = CommandResult(command_id="c", type="evict", status=status, counts=Counts(**counts), error=error)
    return Answer(name, instance, int(rank), 1, result)


def state(*answers: Answer, **lists: tuple[str, ...]) -> CommandState:
    return CommandState("c", {given.worker: given for given in answers}, **lists)


def test_the_first_storing_rank_counts_for_its_instance() -> None:
    given = [
        answer("a/1", evicted_pairs=7),
        answer("a/0", evicted_pairs=5),
        answer("b/10", evicted_pairs=100),
        answer("b/9", evicted_pairs=1),
    ]
    assert replies.num_evicted(given) == 6


def test_a_rank_that_stores_nothing_is_never_the_first() -> None:
    given = [answer("a/0", Status.NOT_APPLICABLE), answer("a/1", evicted_pairs=4), answer("a/2", evicted_pairs=9)]
    assert replies.num_evicted(given) == 4
    assert replies.failures(state(*given), 10) == {}


def test_chunks_in_use_are_the_most_on_any_rank() -> None:
    given = [answer("a/0", in_use=1), answer("a/1", Status.DEFERRED, in_use=3, busy=1), answer("b/0", in_use=2)]
    assert replies.num_in_use(given) == 6


@pytest.mark.parametrize("status", [Status.FAILED, Status.REJECTED, Status.EXPIRED])
def test_a_worker_that_did_not_do_its_part_failed(status: Status) -> None:
    bad = answer("a/1", status, ErrorInfo("engine_failed", "the disk is on fire"))
    found = replies.failures(state(answer("a/0"), bad), 10)
    assert list(found) == ["a/1"]
    assert (found["a/1"].code, found["a/1"].message, found["a/1"].status) == (
        "engine_failed",
        "the disk is on fire",
        status.value,
    )


@pytest.mark.parametrize(
    ("counts", "fails"),
    [
        ({"in_use": 1}, False),
        ({"busy": 1}, False),
        ({"no_space": 1}, False),
        ({"unsupported": 1}, False),
        ({"missing": 1}, False),
        ({"failed": 1}, True),
        ({"tier_stuck": 1}, True),
    ],
)
def test_part_of_the_work(counts: dict[str, int], fails: bool) -> None:
    assert bool(replies.failures(state(answer("a/0", Status.PARTIAL, **counts)), 10)) is fails


def test_silence_and_death_are_failures_that_say_so() -> None:
    found = replies.failures(state(answer("a/0"), waiting=("a/1",), dead=("a/2",)), 10)
    assert "10 s" in found["a/1"].message
    assert "died" in found["a/2"].message
    assert {failure.code for failure in found.values()} == {"not_answered"}


def test_an_interim_answer_ends_the_wait_and_is_no_failure() -> None:
    given = state(answer("a/0", Status.DEFERRED, in_use=2), waiting=("a/0",))
    assert replies.answered(given)
    assert replies.failures(given, 10) == {}
    assert not replies.answered(state(waiting=("a/0",)))


def test_a_worker_that_answered_and_then_died_has_answered() -> None:
    assert replies.failures(state(answer("a/0", Status.DEFERRED, in_use=1), dead=("a/0",)), 10) == {}


def test_a_lookup_names_the_tiers_of_every_chunk() -> None:
    held = Held((DDR, SSD), bytes([0b11, 0b10, 0]))
    result = CommandResult(command_id="c", type="lookup", status=Status.DONE, held=held)
    looked = replies.workers([Answer("a/0", "a", 0, 1, result)], looked_up=Lookup(chunk_hashes=("3F", "-1", "ab" * 32)))
    assert looked["a/0"].tiers == {"3f": (DDR, SSD), "-1": (SSD,), "ab" * 32: ()}


@pytest.mark.parametrize(
    ("statuses", "owing", "word"),
    [
        ([Status.DONE, Status.NOT_APPLICABLE], "", "done"),
        ([Status.DONE], "waiting", "running"),
        ([Status.DONE, Status.PARTIAL], "", "partial"),
        ([Status.PARTIAL, Status.FAILED], "", "failed"),
        ([], "waiting", "running"),
        ([], "waiting dead", "running"),
        ([Status.DONE], "dead", "partial"),
        ([Status.FAILED], "dead", "failed"),
    ],
)
def test_one_word_for_the_whole_command(statuses: list[Status], owing: str, word: str) -> None:
    given = [answer(f"a/{rank}", status) for rank, status in enumerate(statuses)]
    assert replies.state_of(given, waiting="waiting" in owing, dead="dead" in owing) == word
