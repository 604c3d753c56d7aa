"""Forks worker processes with real LMCache engines: torch and LMCache are imported once, so a restart takes no time.

    python -m tests.integration.zygote

Each JSON line on stdin starts one worker; the answer is its pid, once it is ready:
    {"settings": {...}, "instance": "i", "rank": 0, "disk": "/tmp/..", "texts": [1, 2], "crash": {...} | null}
    {"hashes_of": [1, 2]} starts none: it only tells the chunk hashes of these texts

crash: {"at": "load" | "evict", "chunk": "<hash>", "when": "before" | "after"}: the process kills itself there.
       {"at": "commit", "number": 2, "when": "before" | "after"}: around its commit of that number which holds a result.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

import kvbus.streams.worker_log as worker_log_module
from kvbus.protocol.hashes import ChunkHash, parse_hash
from kvbus.settings import load_settings
from worker_plugin.cpu_engine import CpuEngine, CpuEngineConfig
from worker_plugin.engine import ChunkOutcome, LMCacheEngineAdapter, Tags
from worker_plugin.runtime import Worker

CHUNK = 16
CHUNKS_A_TEXT = 8


def tokens_of(text: int) -> list[int]:
    return list(range(text * 10_000, text * 10_000 + CHUNKS_A_TEXT * CHUNK))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class CrashingEngine:
    """A real engine whose process dies at one step of one chunk."""

    def __init__(self, engine: LMCacheEngineAdapter, at: str, chunk: ChunkHash, when: str) -> None:
        self._engine = engine
        self._at, self._chunk, self._when = at, chunk, when

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _step(self, at: str, chunks: Sequence[ChunkHash], when: str) -> None:
        if (at, when) == (self._at, self._when) and self._chunk in chunks:
            die()

    def evict(
        self, chunks: Sequence[ChunkHash], *, tags: Tags = (), locations: tuple[str, ...] | None = None
    ) -> list[ChunkOutcome]:
        self._step("evict", chunks, "before")
        outcomes = self._engine.evict(chunks, tags=tags, locations=locations)
        self._step("evict", chunks, "after")
        return outcomes

    def prefetching(self, *, tags: Tags = (), sources: tuple[str, ...] | None = None) -> AbstractContextManager[Any]:
        @contextmanager
        def crashing() -> Any:
            with self._engine.prefetching(tags=tags, sources=sources) as session:
                yield _CrashingSession(self, session)

        return crashing()


class _CrashingSession:
    def __init__(self, engine: CrashingEngine, session: Any) -> None:
        self._engine, self._session = engine, session

    def ahead(self, chunk: ChunkHash) -> None:
        self._session.ahead(chunk)

    def leave(self, chunk: ChunkHash) -> None:
        self._session.leave(chunk)

    def load(self, chunk: ChunkHash) -> ChunkOutcome:
        self._engine._step("load", [chunk], "before")
        outcome: ChunkOutcome = self._session.load(chunk)
        self._engine._step("load", [chunk], "after")
        return outcome


def crash_at_commit(number: int, when: str) -> None:
    """Die around the commit of that number among those that carry results."""
    real, count = worker_log_module.commit, 0

    def commit(bus: Any, step: Any, *line: Any) -> Any:
        nonlocal count
        with_results = any(append.type == "results" for append in step.appends)
        count += with_results
        if with_results and count == number and when == "before":
            die()
        answer = real(bus, step, *line)
        if with_results and count == number and when == "after":
            die()
        return answer

    worker_log_module.commit = commit


def tell_hashes(texts: Sequence[int], ready: int) -> None:
    """In the child: what every engine here makes of these texts."""
    with CpuEngine(CpuEngineConfig(instance_id="hashes", chunk_size=CHUNK, cpu_gb=0.02)) as engine:
        hashes = [f"{found:x}" for text in texts for found in engine.chunk_hashes(tokens_of(text))]
    os.write(ready, msgspec.json.encode({"hashes": hashes}))


def run_worker(request: dict[str, Any], ready: int) -> None:
    """In the child: a worker until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    config = CpuEngineConfig(
        instance_id=f"{request['instance']}-{request['rank']}-{os.getpid()}",
        rank=request["rank"],
        world_size=max(2, request["rank"] + 1),
        chunk_size=CHUNK,
        cpu_gb=0.02,
        disk_dir=Path(request["disk"]),
    )
    crash = request.get("crash")
    with CpuEngine(config) as engine:
        for text in request["texts"]:
            engine.store(tokens_of(text), engine.random_kv(CHUNKS_A_TEXT * CHUNK, seed=text))
        engine.wait_stored()
        adapter: Any = LMCacheEngineAdapter(engine.engine)
        if crash and crash["at"] == "commit":
            crash_at_commit(crash["number"], crash["when"])
        elif crash:
            adapter = CrashingEngine(adapter, crash["at"], parse_hash(crash["chunk"]), crash["when"])
        worker = Worker(
            adapter, settings=load_settings(request["settings"], {}), instance=request["instance"], rank=request["rank"]
        )
        worker.start()
        hashes = [f"{found:x}" for text in request["texts"] for found in engine.chunk_hashes(tokens_of(text))]
        os.write(ready, msgspec.json.encode({"pid": os.getpid(), "hashes": hashes}))
        os.close(ready)
        stop.wait()
        if not worker.stop():
            os._exit(1)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        ours, theirs = os.pipe()
        if os.fork() == 0:
            os.close(ours)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                request = msgspec.json.decode(line)
                if "hashes_of" in request:
                    tell_hashes(request["hashes_of"], theirs)
                else:
                    run_worker(request, theirs)
            finally:
                os._exit(0)  # not the parent's clean-up
        os.close(theirs)
        answer = b""
        while piece := os.read(ours, 1 << 16):
            answer += piece
        os.close(ours)
        sys.stdout.write(answer.decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
