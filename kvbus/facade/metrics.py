"""/metrics: the facade's own numbers, and every worker's and publisher's counters from their `stats` keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, UntypedMetricFamily
from prometheus_client.registry import Collector

MAX_NAMES = 512
"""Different counters shown of all workers together, and of all publishers: a stranger must not fill the scraper."""
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,120}", re.ASCII)
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Remote(msgspec.Struct, frozen=True):
    """The counters of one worker or publisher."""

    labels: tuple[str, ...]
    counters: Mapping[str, float]


class Snapshot(msgspec.Struct, frozen=True):
    """What the bus told at the last scrape."""

    bus_up: bool = False
    workers_alive: int = 0
    workers_registered: int = 0
    fingerprints: int = 0
    stream_lengths: Mapping[str, int] = {}
    workers: tuple[Remote, ...] = ()
    publishers: tuple[Remote, ...] = ()
    facade: Mapping[str, int | float] = {}
    results_reader: Mapping[str, int | float] = {}


class Metrics(Collector):
    """One application's numbers. Labels are few: route patterns, never paths; worker names, never commands."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvbus_facade_requests", "Requests answered", ("method", "route", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "kvbus_facade_request_seconds",
            "Time until the answer was complete",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.commands = Counter("kvbus_facade_commands", "Commands put on the bus", ("type",), registry=self.registry)
        self.in_flight = Gauge("kvbus_facade_requests_in_flight", "Requests being served", registry=self.registry)
        self.event_streams = Gauge("kvbus_facade_event_streams", "Open /memory/events", registry=self.registry)
        self.snapshot = Snapshot()
        self.registry.register(self)

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        self.requests.labels(method if method in _METHODS else "OTHER", route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """What is not counted here but copied from elsewhere."""
        seen = self.snapshot
        yield GaugeMetricFamily("kvbus_bus_up", "1 when the server answered the last time", value=seen.bus_up)
        yield GaugeMetricFamily("kvbus_workers_alive", "Workers with a heartbeat", value=seen.workers_alive)
        yield GaugeMetricFamily("kvbus_workers_registered", "Workers known", value=seen.workers_registered)
        yield GaugeMetricFamily(
            "kvbus_hash_fingerprints",
            "Different hash settings among the living; above 1 is wrong",
            value=seen.fingerprints,
        )
        lengths = GaugeMetricFamily("kvbus_stream_entries", "Entries in a stream", labels=("stream",))
        for name, length in seen.stream_lengths.items():
            lengths.add_metric((name,), length)
        yield lengths
        yield from _counters("kvbus_facade", seen.facade)
        yield from _counters("kvbus_facade_results", seen.results_reader)
        yield from _families("kvbus_worker", ("worker", "instance", "rank"), seen.workers)
        yield from _families("kvbus_publisher", ("publisher", "instance"), seen.publishers)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names are not known before they are read."""
        return ()


def _counters(prefix: str, counters: Mapping[str, int | float]) -> Iterator[Metric]:
    for name, value in sorted(counters.items()):
        yield CounterMetricFamily(f"{prefix}_{name}", "Counted by the facade", value=value)


def _families(prefix: str, labels: tuple[str, ...], sources: tuple[Remote, ...]) -> Iterator[Metric]:
    # A stats key does not say which of its numbers only grow: they go out without a type.
    families: dict[str, Metric] = {}
    for source in sources:
        for name, value in source.counters.items():
            family = families.get(name)
            if family is None:
                if len(families) >= MAX_NAMES or not _NAME.fullmatch(name):
                    continue
                family = families[name] = UntypedMetricFamily(
                    f"{prefix}_{name}", f"As reported by each {labels[0]}", labels=labels
                )
            family.add_metric(source.labels, value)  # type: ignore[attr-defined]
    yield from families.values()
