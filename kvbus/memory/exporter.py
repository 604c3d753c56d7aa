"""The memory service's numbers for Prometheus, on a port of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvbus.errors import ConfigError
from kvbus.metrics import Counters


class _Numbers(Collector):
    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        for name, value in sorted(self._counters.snapshot().items()):
            if name.startswith("ledger_"):
                yield GaugeMetricFamily(f"kvbus_memory_{name}", "The ledger, as last looked at", value=value)
            else:
                yield CounterMetricFamily(f"kvbus_memory_{name}", "Counted by this memory process", value=value)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names come as things happen."""
        return ()


class Exporter:
    """Serves GET /metrics until it is closed. Raises ConfigError when it cannot listen."""

    def __init__(self, counters: Counters, port: int, host: str = "127.0.0.1") -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Numbers(counters))
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(f"metrics cannot be served on {host}:{port}: {error}") from None
        self.port = int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
