"""The standalone worker's control lines, without an engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from worker_plugin import standalone
from worker_plugin.runtime import Worker


class Part:
    """What the control lines ask of a worker."""

    def stats(self) -> dict[str, int]:
        return {"epoch": 7}


def control(monkeypatch: pytest.MonkeyPatch, lines: list[bytes], say: Any) -> None:
    """Run the control thread's work on these lines; returns when it ends, and it must end the process then."""

    def given(_: object) -> Iterator[bytes]:
        yield from lines

    monkeypatch.setattr(standalone, "_lines", given)
    monkeypatch.setattr(standalone, "_say", say)
    stop = threading.Event()
    standalone._control(None, cast("Worker", Part()), stop)
    assert stop.is_set()


def test_each_line_has_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = []
    control(
        monkeypatch, [b'{"op":"stats"}', b'{"op":"fly"}', b"no json", b'{"op":"stop"}', b'{"op":"stats"}'], said.append
    )
    assert [answer["ok"] for answer in said] == [True, False, False]
    assert said[0]["epoch"] == 7
    assert "'fly' is not one of" in said[1]["error"]


def test_a_worker_whose_parent_has_died_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_reads(answer: dict[str, Any]) -> None:
        raise BrokenPipeError

    control(monkeypatch, [b'{"op":"stats"}'], nobody_reads)


def test_the_end_of_the_lines_is_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    control(monkeypatch, [], print)
