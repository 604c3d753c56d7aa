"""Workers whose engine only counts: kvbus's own Worker, on an engine with nothing behind it.

    python -m benchmarks.counting --redis-url redis://127.0.0.1:6379/0 --namespace bench --workers 8

Each rank is a process of its own; neither torch nor LMCache is loaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.children import fork_all, until_told
from kvbus.protocol.commands import DDR, SSD
from kvbus.protocol.hashes import ChunkHash
from kvbus.protocol.results import Outcome
from kvbus.settings import load_settings
from worker_plugin.engine_types import ChunkLocation, ChunkOutcome, EngineInfo, EngineUsage, PrefetchSession, Tags
from worker_plugin.runtime import Worker

_LOADED, _EVICTED = ChunkOutcome(Outcome.LOADED, bytes=1), ChunkOutcome(Outcome.EVICTED, tiers=1)


class CountingEngine:
    """Every chunk is there, is removed, is loaded; all that remains is a number."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.chunks = 0
        self.info = EngineInfo(
            model="counting",
            world_size=world_size,
            rank=rank,
            chunk_size=256,
            hash_algorithm="builtin",
            hash_fingerprint="builtin/256/1",
            tiers=(DDR, SSD),
            stores=True,
            layerwise=False,
            lmcache_version="none",
        )

    @contextmanager
    def prefetching(self, *, tags: Tags = (), sources: tuple[str, ...] | None = None) -> Iterator[PrefetchSession]:
        yield self

    def ahead(self, chunk: ChunkHash) -> None:
        pass

    def leave(self, chunk: ChunkHash) -> None:
        pass

    def load(self, chunk: ChunkHash) -> ChunkOutcome:
        self.chunks += 1
        return _LOADED

    def evict(
        self, chunks: Sequence[ChunkHash], *, tags: Tags = (), locations: tuple[str, ...] | None = None
    ) -> list[ChunkOutcome]:
        self.chunks += len(chunks)
        return [_EVICTED] * len(chunks)

    def lookup(self, chunks: Sequence[ChunkHash], *, tags: Tags = ()) -> list[ChunkLocation]:
        self.chunks += len(chunks)
        return [ChunkLocation(chunk, (DDR,)) for chunk in chunks]

    def usage(self) -> EngineUsage:
        raise NotImplementedError("there is nothing behind this engine")


def main() -> int:
    """Run the workers until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counting")
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--namespace", default="bench")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    settings = load_settings({"redis_url": args.redis_url, "namespace": args.namespace})

    def serve(rank: int, say: Callable[[dict[str, Any]], None]) -> None:
        stop = until_told()
        engine = CountingEngine(rank, args.workers)
        with Worker(engine, settings=settings, instance="counting", rank=rank) as worker:
            if not worker.wait_ready(60):
                raise RuntimeError("the worker did not get its place on the bus")
            say({"worker": worker.name})
            stop.wait()

    return fork_all(serve, args.workers)


if __name__ == "__main__":
    sys.exit(main())
