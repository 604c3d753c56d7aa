"""The buffer: bounded, first in first out, numbered without gaps, never waiting."""

from __future__ import annotations

import threading

from publisher import FinishedRequest
from publisher.buffer import Buffer


def finished(name: str = "r", **values: object) -> FinishedRequest:
    return FinishedRequest(**{"request_id": name, "instance": "i", "reason": "stop", **values})  # type: ignore[arg-type]


def test_first_in_first_out_with_numbers() -> None:
    buffer = Buffer(10, 1 << 20)
    for name in "abc":
        assert buffer.put(finished(name))
    taken = buffer.take(2)
    assert [(item.seq, item.finished.request_id) for item in taken] == [(0, "a"), (1, "b")]
    assert len(buffer) == 1
    assert [item.seq for item in buffer.take(5)] == [2]
    assert buffer.take(5) == []
    assert buffer.nbytes == 0


def test_a_full_buffer_refuses_the_newest_and_uses_up_its_number() -> None:
    buffer = Buffer(2, 1 << 20)
    assert [buffer.put(finished()) for _ in range(4)] == [True, True, False, False]
    assert buffer.dropped_full == 2
    buffer.take(1)
    assert buffer.put(finished())
    assert [item.seq for item in buffer.take(9)] == [1, 4]
    assert buffer.next_seq == 5


def test_bytes_are_bounded_whatever_holds_them() -> None:
    for values in (
        {"chunk_hashes": tuple(range(1000))},
        {"chunk_hashes": None, "prompt_tokens": 1000},
        {"context": {"a": "x" * 40_000}},
        {"context": {"a": list(range(1000))}},
        {"request_id": "x" * 40_000},
    ):
        buffer = Buffer(1000, 100_000)
        accepted = sum(buffer.put(finished(**values)) for _ in range(100))  # type: ignore[arg-type]
        assert 1 <= accepted <= 4, values
        assert buffer.nbytes <= 100_000


def test_a_hostile_context_is_not_walked_to_its_end() -> None:
    context: dict[str, object] = {}
    context["itself"] = [context] * 100
    assert Buffer(10, 1 << 24).put(finished(context=context))


def test_a_closed_buffer_refuses_and_counts_without_a_number() -> None:
    buffer = Buffer(10, 1 << 20)
    buffer.put(finished())
    buffer.close()
    assert not buffer.put(finished())
    assert (buffer.dropped_closed, buffer.next_seq, len(buffer)) == (1, 1, 1)


def test_take_is_woken() -> None:
    buffer = Buffer(10, 1 << 20)
    found: list[object] = [None]
    thread = threading.Thread(target=lambda: found.__setitem__(0, buffer.take(1, timeout_s=60)))
    thread.start()
    buffer.wake()
    thread.join(30)
    assert not thread.is_alive()
    assert found == [[]]


def test_many_writers_one_reader_keep_numbers_in_order() -> None:
    buffer = Buffer(100_000, 1 << 30)
    threads = [threading.Thread(target=lambda: [buffer.put(finished()) for _ in range(2_000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    seqs: list[int] = []
    while len(seqs) < 16_000:
        seqs += [item.seq for item in buffer.take(64, timeout_s=10)]
    for thread in threads:
        thread.join()
    assert seqs == list(range(16_000))
    assert (len(buffer), buffer.nbytes) == (0, 0)
