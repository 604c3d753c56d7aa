"""How much work a run does, and the server that it does it on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvbus.embedded import EmbeddedServer


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a run. directory: for files; seconds: of one round of a rate; calls: of one round of a latency."""

    directory: Path
    rounds: int = 5
    calls: int = 120
    seconds: float = 1.5
    workers: tuple[int, ...] = (2, 8, 16)
    quick: bool = False

    @contextmanager
    def server(self, name: str) -> Iterator[EmbeddedServer]:
        """A real Valkey as kvbus runs it: append-only file, written to disk every second."""
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=self.directory) as data, EmbeddedServer(data) as server:
            yield server


def quick(directory: Path) -> Load:
    """A run of a minute or two, to see that everything works."""
    return Load(directory=directory, rounds=3, calls=40, seconds=0.5, workers=(2, 8), quick=True)
