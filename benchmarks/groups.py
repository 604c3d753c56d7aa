"""The groups of measures that `benchmarks.bench` runs, in this order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from benchmarks import bus, other_environment, rest, scale, sizes, tiers, with_engine
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
    "engine": Group("the same on real LMCache engines", with_engine.rows, ("absent", "stored")),
    "rest": Group("POST /memory/evict through the facade", rest.rows, ("latency", "rate")),
    "publisher": Group("publish() and the way to the server", other_environment.rows, ("publish", "drain")),
    "tiers": Group("prefetch and evict in one engine", tiers.rows, ("prefetch", "evict")),
    "sizes": Group("bytes of an event in the server's memory", sizes.rows, ("events",)),
    "scale": Group("cost against workers and length, and idling", scale.rows, ("workers", "length", "idle")),
}
