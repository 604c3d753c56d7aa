"""What processor time is spent on: the interpreter, the system, compiled libraries, the server; by perf's samples.

The rows that miss their targets are made of these. Measured while commands go one at a time and at full rate, through
the client and through the facade; processes and samples of the same seconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.bus import CLIENTS, answered_everywhere, bus_rate, cpu_s, hashes, latencies_ms
from benchmarks.children import Children
from benchmarks.facade_load import facade
from benchmarks.http_clients import Caller, evict_body, rate
from benchmarks.load import Load
from benchmarks.rows import Row, Skipped, limited
from kvbus.client import KVBus
from kvbus.settings import load_settings

WORKERS = 8
PER_S = 997
"""Samples a second of a running process; no divisor of what it does regularly itself."""
PARTS = (
    ("msgspec, hiredis, httptools", ("_core.cpython", "hiredis", "parser.cpython")),
    ("Python", ("python",)),
    ("the system", ("[kernel", "[vdso")),
    ("the server's own code", ("valkey-server", "redis-server")),
)
REST = "C library and others"

Parts = dict[str, Sequence[int]]
"""Processes by what they are; numbers are told of one of them."""


def rows(load: Load, only: Callable[[str], bool]) -> list[Row | Skipped]:
    """Microseconds of a command, by process and by what they are spent on."""
    if why := _unusable():
        return [Skipped("what processor time is spent on", why)]
    found: list[Row | Skipped] = []
    with (
        load.server("profile") as server,
        Children(
            "benchmarks.counting",
            ["--redis-url", server.url, "--namespace", "default", "--workers", str(WORKERS)],
            WORKERS,
        ) as counting,
        KVBus(load_settings({"redis_url": server.url, "namespace": "default"})) as bus,
    ):
        chunks = hashes()
        between: Parts = {"one worker": counting.pids, "the server": [server.pid or 0]}

        def one_at_a_time() -> int:
            return len(latencies_ms(lambda: answered_everywhere(bus.evict(chunks), WORKERS), 10_000))

        def at_full_rate() -> int:
            began = time.perf_counter()
            return round(bus_rate(bus, chunks, WORKERS, load.seconds) * (time.perf_counter() - began))

        latencies_ms(lambda: answered_everywhere(bus.evict(chunks), WORKERS), 20)
        if only("bus"):
            whole = between | {"the sender": [os.getpid()]}
            found += _profile("one at a time", load.directory, whole, one_at_a_time)
            found += _profile("at full rate", load.directory, whole, at_full_rate)
        if only("facade"):
            with facade(server.url) as (port, pid):
                body = evict_body(chunks)
                caller = Caller(port)

                def one_request() -> int:
                    return len(latencies_ms(lambda: caller.post("/memory/evict", body), 10_000))

                def many_requests() -> int:
                    began = time.perf_counter()
                    per_second = rate(port, body, clients=CLIENTS, seconds=load.seconds)
                    return round(per_second * (time.perf_counter() - began))

                latencies_ms(lambda: caller.post("/memory/evict", body), 20)
                whole = between | {"the facade": [pid]}
                found += _profile("through the facade, one client", load.directory, whole, one_request)
                found += _profile(f"through the facade, {CLIENTS} clients", load.directory, whole, many_requests)
                caller.close()
    return found


def _unusable() -> str:
    """Why perf cannot be used, or "" where it can."""
    if shutil.which("perf") is None:
        return "perf is not installed"
    tried = subprocess.run(
        ["perf", "record", "-q", "-e", "cpu-clock", "-o", os.devnull, "--", "true"], capture_output=True, timeout=30
    )
    return "" if tried.returncode == 0 else f"perf cannot record: {tried.stderr.decode().strip()[:100]}"


def _profile(how: str, directory: Path, processes: Parts, run: Callable[[], int]) -> list[Row]:
    """run: works for a while, and returns how many commands that were."""
    files = {name: directory / f"perf-{place}.data" for place, name in enumerate(processes)}
    recorders = [
        subprocess.Popen(
            ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(PER_S), "-o", files[name], "-p", _listed(pids)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name, pids in processes.items()
    ]
    try:
        before = {name: cpu_s(pids) for name, pids in processes.items()}
        commands = run()
        used = {name: cpu_s(pids) - before[name] for name, pids in processes.items()}
    finally:
        for recorder in recorders:
            recorder.send_signal(signal.SIGINT)
        for recorder in recorders:
            recorder.wait(30)
    found: list[Row] = []
    for name, pids in processes.items():
        whole = used[name] / len(pids) / commands * 1e6
        found.append(limited(f"{how}, {name}: all", WORKERS, [whole], "us"))
        shares = _shares(files[name])
        found += [limited(f"{how}, {name}: {part}", WORKERS, [whole * shares[part]], "us") for part in shares]
    return found


def _listed(pids: Sequence[int]) -> str:
    return ",".join(map(str, pids))


def _shares(file: Path) -> dict[str, float]:
    """By part, from the most to the least."""
    command = ["perf", "report", "-i", str(file), "--stdio", "--no-children", "-F", "overhead,dso", "-t", ";"]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    shares: dict[str, float] = {}
    for line in done.stdout.decode().splitlines():
        share, _, name = line.partition(";")
        if name and not line.startswith("#"):
            part = next((part for part, marks in PARTS if any(mark in name for mark in marks)), REST)
            shares[part] = shares.get(part, 0.0) + float(share.strip().removesuffix("%")) / 100
    if not shares:
        raise RuntimeError(f"perf took no samples: {done.stderr.decode()[:300]}")
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
