"""Counters and logs that every process keeps alike, small enough to load inside vLLM."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping


class Counters:
    """Named numbers, safe for threads. They go to the `stats` key and, from there, to /metrics."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, int | float] = {}

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._values[name] = self._values.get(name, 0) + amount

    def add_all(self, amounts: Mapping[str, int]) -> None:
        """Several at once, in one step."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] = self._values.get(name, 0) + amount

    def set(self, name: str, value: int | float) -> None:
        with self._lock:
            self._values[name] = value

    def get(self, name: str) -> int | float:
        with self._lock:
            return self._values.get(name, 0)

    def snapshot(self) -> Mapping[str, int | float]:
        with self._lock:
            return dict(self._values)


class RateLimitedLog:
    """At most one line a second for each kind of trouble; the next line tells how many were kept back."""

    def __init__(self, logger: logging.Logger, *, every_s: float = 1.0) -> None:
        self._logger = logger
        self._every = every_s
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._kept_back: dict[str, int] = {}

    def log(self, level: int, kind: str, message: str, *args: object) -> None:
        """Log under `kind`, which must come from a small fixed set."""
        now = time.monotonic()
        with self._lock:
            if now - self._last.get(kind, -self._every) < self._every:
                self._kept_back[kind] = self._kept_back.get(kind, 0) + 1
                return
            self._last[kind] = now
            kept_back = self._kept_back.pop(kind, 0)
        if kept_back:
            message += f" ({kept_back} more of this kind kept back)"
        self._logger.log(level, message, *args)

    def warning(self, kind: str, message: str, *args: object) -> None:
        self.log(logging.WARNING, kind, message, *args)

    def error(self, kind: str, message: str, *args: object) -> None:
        self.log(logging.ERROR, kind, message, *args)
