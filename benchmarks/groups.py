"""The groups of measures that `benchmarks.bench` runs, in this order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from benchmarks import bus
from benchmarks.load import Load
from benchmarks.rows import Row, Skipped

Found = Sequence[Row | Skipped]
Only = Callable[[str], bool]


class Group(msgspec.Struct, frozen=True):
    """measures: what --only can pick out of it."""

    what: str
    run: Callable[[Load, Only], Found]
    measures: tuple[str, ...]


ALL: dict[str, Group] = {
    "bus": Group("a command to N counting workers, against an HTTP fan-out", bus.rows, ("latency", "rate")),
}
