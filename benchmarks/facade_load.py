"""Load on the REST facade, beside the HTTP fan-out that it replaces, in one run on the same engines.

    python -m benchmarks.facade_load                      64 clients, evicts of 100 hashes, 4 real LMCache engines
    python -m benchmarks.facade_load --commands 200000    the facade's memory over that many commands

Every worker process holds one real engine and serves it both ways: as a worker on the bus, and as an HTTP server to
which a scheduler process forwards (benchmarks.fanout). The sides take turns. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.children import Children, fork_all
from benchmarks.fanout import run, worker_app
from benchmarks.http_clients import Caller, evict_body
from kvbus.embedded import EmbeddedServer
from kvbus.settings import load_settings

HASHES = 100
INSTANCE = "load"


def main() -> int:
    """Measure and print, or, as a child, be one of the engines."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.facade_load")
    parser.add_argument("--part", choices=("measure", "engines"), default="measure", help=argparse.SUPPRESS)
    parser.add_argument("--redis-url", default="", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each side's turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commands", type=int, default=0, help="run so many commands, and watch the facade's memory")
    args = parser.parse_args()
    if args.part == "engines":
        return _engines(args.redis_url, args.directory, args.workers)
    with tempfile.TemporaryDirectory(prefix="facade-load-") as home, EmbeddedServer(Path(home) / "server") as server:
        found = _memory(args, server.url) if args.commands else _load(args, server.url, Path(home))
    print(json.dumps(found))
    return 0


# -- the load ------------------------------------------------------------------------------------------------------


def _load(args: argparse.Namespace, url: str, home: Path) -> dict[str, Any]:
    engines = ["--part", "engines", "--redis-url", url, "--directory", str(home), "--workers", str(args.workers)]
    with Children("benchmarks.facade_load", engines, args.workers) as workers:
        ports = ",".join(str(worker["port"]) for worker in workers.ready)
        with Children("benchmarks.fanout", ["scheduler", "--ports", ports], 1) as scheduler, facade(url) as (port, _):
            hashes = [random.Random(7).getrandbits(63) for _ in range(HASHES)]
            sides = {"facade": port, "fanout": int(scheduler.ready[0]["port"])}
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
            for number in range(args.rounds):
                order = list(sides) if number % 2 == 0 else list(sides)[::-1]
                for name in order:
                    rounds[name].append(turn(sides[name], evict_body(hashes), args.clients, args.seconds))
    result = {name: {key: _median(found, key) for key in found[0]} for name, found in rounds.items()}
    return {
        "clients": args.clients,
        "workers": args.workers,
        "hashes": HASHES,
        "rounds": args.rounds,
        "cores": os.cpu_count(),
        **result,
        "rate_ratio": round(result["facade"]["rps"] / result["fanout"]["rps"], 2),
        "p99_ratio": round(result["facade"]["p99_ms"] / result["fanout"]["p99_ms"], 2),
    }


def turn(port: int, body: bytes, clients: int, seconds: float) -> dict[str, float]:
    """Each client sends its next request when the last was answered. Requests a second, and their times."""
    times: list[list[float]] = [[] for _ in range(clients)]
    failed: list[BaseException] = []
    start = threading.Barrier(clients + 1)
    end = [0.0]

    def work(place: int) -> None:
        caller = Caller(port)
        try:
            caller.post("/memory/evict", body)
            start.wait(120)
            while (began := time.perf_counter()) < end[0]:
                caller.post("/memory/evict", body)
                times[place].append(time.perf_counter() - began)
        except BaseException as error:  # noqa: BLE001 - told by the thread that measures
            failed.append(error)
            start.abort()
        finally:
            caller.close()

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(clients)]
    end[0] = time.perf_counter() + 3_600
    for thread in threads:
        thread.start()
    try:
        start.wait(120)
    except threading.BrokenBarrierError:
        raise RuntimeError(f"a client failed: {failed[:1]}") from None
    began = time.perf_counter()
    end[0] = began + seconds
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - began
    if failed:
        raise RuntimeError(f"a client failed: {failed[0]}") from failed[0]
    all_times = sorted(itertools.chain.from_iterable(times))
    percentiles = statistics.quantiles(all_times, n=100)
    return {"rps": len(all_times) / taken, "p50_ms": percentiles[49] * 1000, "p99_ms": percentiles[98] * 1000}


def _median(rounds: Sequence[dict[str, float]], key: str) -> float:
    return round(statistics.median(found[key] for found in rounds), 2)


# -- the memory ----------------------------------------------------------------------------------------------------


def _memory(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """Half evicts that are waited for, half prefetches with one constant label, by 16 clients, on counting workers."""
    counting = ["--redis-url", url, "--namespace", "default", "--workers", "2"]
    with Children("benchmarks.counting", counting, 2), facade(url) as (port, pid):
        samples: list[tuple[int, float]] = []
        refused: list[str] = []
        numbers = itertools.count()
        failed: list[BaseException] = []

        def work() -> None:
            caller = Caller(port)
            try:
                while (number := next(numbers)) < args.commands:
                    hashes = range(number, number + 10)
                    path, label = ("evict", {}) if number % 2 else ("prefetch", {"lookup_id": "turn_prefetch"})
                    try:
                        caller.post(f"/memory/{path}", evict_body(hashes, **label))
                    except RuntimeError as error:  # a busy machine may keep the bus waiting too long: told, not fatal
                        refused.append(str(error))
                    if number % max(1, args.commands // 20) == 0:
                        samples.append((number, _rss_mb(pid)))
                        print(f"{number:>9,} commands: {samples[-1][1]} MB", file=sys.stderr, flush=True)
            except BaseException as error:  # noqa: BLE001 - told below
                failed.append(error)
            finally:
                caller.close()

        began = time.perf_counter()
        threads = [threading.Thread(target=work, daemon=True) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise RuntimeError(f"a client failed: {failed[0]}") from failed[0]
        samples.append((args.commands, _rss_mb(pid)))
        # Its caches hold the newest 10,000 commands: what counts is whether it grows once they are full.
        warm = [mb for number, mb in samples if number >= max(30_000, args.commands // 4)] or [samples[-1][1]]
        return {
            "commands": args.commands,
            "refused": len(refused),
            "elapsed_s": round(time.perf_counter() - began, 1),
            "rss_mb": [[number, mb] for number, mb in samples],
            "growth_mb": round(warm[-1] - warm[0], 1),
        }


def _rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise RuntimeError(f"process {pid} has no VmRSS")


# -- the processes -------------------------------------------------------------------------------------------------


@contextmanager
def facade(url: str) -> Iterator[tuple[int, int]]:
    """`kvbus serve` as it is run: (port, process id)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    env = os.environ | {"KVBUS_REDIS_URL": url, "KVBUS_REST_PORT": str(port), "KVBUS_NAMESPACE": "default"}
    command = [sys.executable, "-c", "from kvbus.facade.app import run; run()"]
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                    break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError("the facade did not come up") from None
                time.sleep(0.1)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(20)


def _engines(url: str, directory: Path, workers: int) -> int:
    from worker_plugin.cpu_engine import CpuEngine, CpuEngineConfig
    from worker_plugin.runtime import attach

    settings = load_settings({"redis_url": url, "namespace": "default"})

    def serve(rank: int, say: Callable[[dict[str, Any]], None]) -> None:
        config = CpuEngineConfig(
            instance_id=f"{INSTANCE}-{rank}", rank=rank, world_size=workers, disk_dir=directory / f"ssd{rank}"
        )
        (directory / f"ssd{rank}").mkdir()
        with CpuEngine(config) as engine:
            worker = attach(engine.engine, settings=settings, instance=INSTANCE, rank=rank)
            database, storage = engine.engine.token_database, engine.engine.storage_manager
            size = config.chunk_size

            def evict(hashes: list[int], locations: list[str] | None) -> int:
                found = database.process_tokens(hashes=hashes, offsets=[size] * len(hashes))
                return int(storage.batched_remove([key for _, _, key in found], locations=locations))

            try:
                run(worker_app(evict), say)
            finally:
                worker.stop()

    return fork_all(serve, workers)


if __name__ == "__main__":
    sys.exit(main())
