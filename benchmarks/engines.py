"""Processes with one real LMCache engine each, serving it both ways: as a worker on the bus, and over HTTP.

    python -m benchmarks.engines --redis-url redis://127.0.0.1:6379/0 --directory /tmp/x --workers 2

Over HTTP there is also POST /store {"text": 3, "chunks": 100}, which stores a text in both tiers and tells its hashes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from benchmarks.children import fork_all
from benchmarks.fanout import answer, run, worker_app
from kvbus.settings import load_settings

INSTANCE = "bench"


def engine_app(engine: Any) -> FastAPI:
    """The peer's routes on a real engine, and one that stores."""
    database, storage = engine.engine.token_database, engine.engine.storage_manager
    size = engine.config.chunk_size

    def evict(hashes: list[int], locations: list[str] | None) -> int:
        found = database.process_tokens(hashes=hashes, offsets=[size] * len(hashes))
        return int(storage.batched_remove([key for _, _, key in found], locations=locations))

    def store(text: int, chunks: int) -> list[str]:
        tokens = list(range(text * 1_000_000, text * 1_000_000 + chunks * size))
        engine.store(tokens, engine.random_kv(len(tokens), seed=text))
        engine.wait_stored()
        return [f"{found:x}" for found in engine.chunk_hashes(tokens)]

    app = worker_app(evict)

    @app.post("/store")
    async def store_route(request: Request) -> PlainTextResponse:
        body = await request.json()
        return answer({"hashes": await asyncio.to_thread(store, body["text"], body["chunks"])})

    @app.post("/remove")
    async def remove_route(request: Request) -> PlainTextResponse:
        """Evict by LMCache's own call, and tell how long that took, the way to here and back left out."""
        body = await request.json()
        hashes = [int(text, 16) for text in body["chunk_hashes"]]
        began = time.perf_counter()
        removed = evict(hashes, None)
        return answer({"num_evicted": removed, "seconds": time.perf_counter() - began})

    return app


def main() -> int:
    """Run the engines until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines")
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--namespace", default="bench")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    # Loaded once, before the processes part.
    from worker_plugin.cpu_engine import CpuEngine, CpuEngineConfig
    from worker_plugin.runtime import attach

    settings = load_settings({"redis_url": args.redis_url, "namespace": args.namespace})

    def serve(rank: int, say: Callable[[dict[str, Any]], None]) -> None:
        disk = args.directory / f"ssd{rank}"
        disk.mkdir(parents=True)
        config = CpuEngineConfig(
            instance_id=f"{INSTANCE}-{rank}", rank=rank, world_size=args.workers, disk_dir=disk, cpu_gb=0.4
        )
        with CpuEngine(config) as engine:
            worker = attach(engine.engine, settings=settings, instance=INSTANCE, rank=rank)
            try:
                if not worker.wait_ready(60):
                    raise RuntimeError("the worker did not get its place on the bus")
                run(engine_app(engine), say)
            finally:
                worker.stop()

    return fork_all(serve, args.workers)


if __name__ == "__main__":
    sys.exit(main())
