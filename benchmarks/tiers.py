"""One rank's engine: prefetch against plain reads of the same files, evict against LMCache's batched_remove.

    python -m benchmarks.tiers --directory /tmp/x        rows as JSON lines

A process of its own, for it loads torch and LMCache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.load import Load
from benchmarks.rows import Row, Skipped, at_least, compared

DDR_GB = 0.6
CHUNKS = {2: 128, 8: 48}
"""MiB a chunk: how many. All of them fit in DDR, and in the share of it that prefetches may fill."""


def rows(load: Load, only: Callable[[str], bool]) -> list[Row | Skipped]:
    """Runs itself as a child."""
    chosen = [name for name in ("prefetch", "evict") if only(name)]
    directory = load.directory / "tiers"
    directory.mkdir()
    command = [sys.executable, "-m", "benchmarks.tiers", "--directory", str(directory), "--rounds", str(load.rounds)]
    env = os.environ | {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
    try:
        done = subprocess.run([*command, *chosen], env=env, stdout=subprocess.PIPE, timeout=300, check=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return [msgspec.json.decode(line, type=Row) for line in done.stdout.splitlines() if line.startswith(b"{")]


def main() -> int:
    """Measure and print the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers")
    parser.add_argument("what", nargs="*", choices=("prefetch", "evict"), default=["prefetch", "evict"])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    found: list[Row] = []
    if "prefetch" in args.what:
        for mib, chunks in CHUNKS.items():
            found += _prefetch(args.directory, mib, chunks, args.rounds)
    if "evict" in args.what:
        found += _evict(args.directory, args.rounds)
    for row in found:
        print(msgspec.json.encode(row).decode(), flush=True)
    return 0


@contextmanager
def _engine(directory: Path, mib: int, cpu_gb: float, **more: Any) -> Iterator[tuple[Any, Any]]:
    """An engine whose chunks have `mib` MiB (0: 64 KiB), and our adapter on it."""
    from worker_plugin.cpu_engine import CpuEngine, CpuEngineConfig
    from worker_plugin.engine import LMCacheEngineAdapter

    # 256 tokens x 8 heads x 64 values x K and V x 2 bytes is half a MiB a layer.
    shape = {"layers": 2 * mib, "chunk_size": 256, "kv_heads": 8, "head_size": 64} if mib else {}
    disk = directory / f"ssd-{mib}"
    config = CpuEngineConfig(instance_id=f"tiers-{mib}", disk_dir=disk, cpu_gb=cpu_gb, **shape, **more)
    disk.mkdir()
    try:
        with CpuEngine(config) as engine:
            yield engine, LMCacheEngineAdapter(engine.engine, max_share=1.0)
    finally:
        shutil.rmtree(disk, ignore_errors=True)


def _store(engine: Any, chunks: int, text: int = 1) -> list[Any]:
    """The hashes of a text that is now in both tiers. Stored in pieces, so that its tensor stays small."""
    size = engine.config.chunk_size
    tokens = list(range(text * 1_000_000, text * 1_000_000 + chunks * size))
    step = max(1, (64 << 20) // engine.config.chunk_bytes)
    for first in range(0, chunks, step):
        upto = min(chunks, first + step)
        kv = engine.empty_kv(upto * size)
        kv[:, :, first * size :] = 0.5
        engine.store(tokens[: upto * size], kv, skip=first * size)
        engine.wait_stored()
    return list(engine.chunk_hashes(tokens))


def _prefetch(directory: Path, mib: int, chunks: int, rounds: int) -> list[Row]:
    from kvbus.protocol.commands import DDR
    from kvbus.protocol.results import Outcome
    from worker_plugin.engine_types import to_begin

    with _engine(directory, mib, DDR_GB) as (engine, adapter):
        hashes = _store(engine, chunks)
        backend = engine.engine.storage_manager.storage_backends["LocalDiskBackend"]
        cpu = engine.engine.storage_manager.storage_backends["LocalCPUBackend"]
        first = next(iter(backend.dict.values()))
        paths = [entry.path for entry in backend.dict.values()]
        total = sum(os.path.getsize(path) for path in paths) / 2**20

        def ours() -> float:
            adapter.evict(hashes, locations=(DDR,))
            return total / _timed(load_all)

        def load_all() -> None:
            with adapter.prefetching() as session:
                for place, chunk in enumerate(hashes):
                    for later in to_begin(hashes, place):  # as the worker does
                        session.ahead(later)
                    outcome = session.load(chunk)
                    if outcome.outcome is not Outcome.LOADED:
                        raise RuntimeError(f"{outcome}")

        def plain() -> float:
            """The same files into memory of the same pool, one after the other, nothing else done."""
            adapter.evict(hashes, locations=(DDR,))
            objects = [cpu.allocate(first.shape, first.dtype, first.fmt, busy_loop=False) for _ in paths]

            def read_all() -> None:
                for path, memory in zip(paths, objects, strict=True):
                    with open(path, "rb", buffering=0) as file:
                        file.readinto(memory.byte_array)

            taken = _timed(read_all)
            for memory in objects:
                memory.ref_count_down()
            return total / taken

        found = []
        for name, before in (("page cache", lambda: None), ("dropped cache", lambda: _drop(paths))):
            before(), ours(), before(), plain()
            mine: list[float] = []
            theirs: list[float] = []
            for _ in range(rounds + 2):
                before()
                mine.append(ours())
                before()
                theirs.append(plain())
            measure = f"prefetch SSD to DDR, {name}, {mib} MiB chunks"
            found.append(compared(measure, chunks, mine, theirs, "MiB/s", at_least(0.9)))
        return found


def _drop(paths: list[str]) -> None:
    """Out of the page cache with them, as far as the system follows the advice."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _evict(directory: Path, rounds: int) -> list[Row]:
    chunks = 400
    with _engine(directory, 0, 0.2) as (engine, adapter):
        database, storage = engine.engine.token_database, engine.engine.storage_manager
        size = engine.config.chunk_size

        def ours(hashes: list[Any]) -> float:
            return chunks / _timed(lambda: adapter.evict(hashes))

        def theirs(hashes: list[Any]) -> float:
            def remove() -> None:
                found = database.process_tokens(hashes=hashes, offsets=[size] * len(hashes))
                storage.batched_remove([key for _, _, key in found])

            return chunks / _timed(remove)

        found = []
        for name, stored in (("in both tiers", True), ("absent", False)):
            hashes = _store(engine, chunks)
            mine: list[float] = []
            peer: list[float] = []
            for turn in range(2 * rounds + 2):
                if stored:
                    _store(engine, chunks)
                else:
                    adapter.evict(hashes)
                side = mine if turn % 2 else peer
                side.append((ours if turn % 2 else theirs)(hashes))
            found.append(
                compared(f"evict in one rank, chunks {name}", chunks, mine[1:], peer[1:], "keys/s", at_least(0.8))
            )
        return found


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
