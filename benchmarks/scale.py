"""What a command costs against the number of workers and against the length of the stream, and what idling costs."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence

import psutil
import redis

from benchmarks.bus import answered_everywhere, bus_rate, cpu_s, hashes, latencies_ms
from benchmarks.children import Children
from benchmarks.facade_load import facade
from benchmarks.load import Load
from benchmarks.rows import Row, limited
from kvbus.client import KVBus
from kvbus.embedded import EmbeddedServer
from kvbus.protocol.codec import encode_entry
from kvbus.protocol.commands import Ping
from kvbus.settings import load_settings
from kvbus.streams.keys import Keys

COUNTS = (1, 2, 4, 8, 16, 32)
LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
IDLE_S = 20.0


def rows(load: Load, only: Callable[[str], bool]) -> list[Row]:
    found: list[Row] = []
    if only("workers"):
        found += _workers(load)
    if only("length"):
        found += _length(load)
    if only("idle"):
        found += _idle(load)
    return found


def _workers(load: Load) -> list[Row]:
    """Processor time of a command, of all processes together, at each N: linear, with the slope shown."""
    counts = COUNTS[:4] if load.quick else COUNTS
    costs, medians = [], []
    found: list[Row] = []
    with load.server("workers") as server:
        for workers in counts:
            namespace = f"scale-{workers}"
            arguments = ["--redis-url", server.url, "--namespace", namespace, "--workers", str(workers)]
            with (
                Children("benchmarks.counting", arguments, workers) as children,
                KVBus(load_settings({"redis_url": server.url, "namespace": namespace})) as bus,
            ):
                chunks = hashes()
                latencies_ms(lambda: answered_everywhere(bus.evict(chunks), workers), 10)  # noqa: B023 - called here
                took = latencies_ms(lambda: answered_everywhere(bus.evict(chunks), workers), load.calls)  # noqa: B023
                medians.append(statistics.median(took))
                pids = [server.pid or 0, *children.pids]
                before, mine = cpu_s(pids), time.process_time()
                began = time.perf_counter()
                per_second = bus_rate(bus, chunks, workers, load.seconds)
                commands = per_second * (time.perf_counter() - began)
                costs.append((cpu_s(pids) - before + time.process_time() - mine) / commands * 1e6)
            found.append(limited("processor time of a command, everywhere", workers, [costs[-1]], "us", None))
            found.append(limited("evict answered by all, p50", workers, [medians[-1]], "ms", None))
    slope, intercept = statistics.linear_regression(counts, costs)
    fit = statistics.correlation(counts, costs) ** 2
    note = f"{intercept:.0f} us + {slope:.0f} us a worker; R2 {fit:.3f}"
    row = limited("processor time of one worker more, fitted", max(counts), [slope], "us", None, note)
    found.append(_judged(row, "linear in N: R2 of at least 0.98", fit >= 0.98))
    return found


def _length(load: Load) -> list[Row]:
    """Latency of a command and a worker's memory at each length of the stream."""
    lengths = LENGTHS[:3] if load.quick else LENGTHS
    found: list[Row] = []
    fastest: list[float] = []
    memory: list[float] = []
    with load.server("length") as server:
        # No cap: the stream shall grow.
        settings = load_settings({"redis_url": server.url, "namespace": "length", "commands_cap_bytes": 1 << 40})
        arguments = ["--redis-url", server.url, "--namespace", "length", "--workers", "2"]
        chunks = hashes()
        for length in lengths:
            _grow(server, Keys("length"), length)
            with Children("benchmarks.counting", arguments, 2) as children, KVBus(settings) as bus:
                latencies_ms(lambda: answered_everywhere(bus.evict(chunks), 2), 50)
                turns = [
                    latencies_ms(lambda: answered_everywhere(bus.evict(chunks), 2), 40) for _ in range(load.rounds)
                ]
                memory.append(psutil.Process(children.pids[0]).memory_info().rss / 2**20)
            medians = [statistics.median(turn) for turn in turns]
            fastest.append(min(medians))
            found.append(limited("evict answered by all against the stream's length, p50", length, medians, "ms"))
            found.append(limited("worker's memory against the stream's length", length, memory[-1:], "MiB"))
    # The least disturbed rounds: the lengths cannot take turns.
    found[-2] = _judged(found[-2], "flat: fastest round at most 1.5x the first", fastest[-1] <= 1.5 * fastest[0])
    found[-1] = _judged(found[-1], "flat: at most 8 MiB over the first", memory[-1] <= memory[0] + 8)
    return found


def _grow(server: EmbeddedServer, keys: Keys, length: int) -> None:
    """Fill the command stream up to `length`, and let the next workers begin at its end."""
    with redis.Redis(host="127.0.0.1", port=server.port, protocol=2) as client:
        have = int(client.xlen(keys.commands))
        fields = encode_entry(Ping(ttl_ms=1, issued_at_ms=1), message_id="grow")
        while have < length:
            pipe = client.pipeline(transaction=False)
            for _ in range(min(1_000, length - have)):
                pipe.xadd(keys.commands, fields)  # type: ignore[arg-type]
            have += len(pipe.execute())
        client.delete(*(keys.worker(f"counting/{rank}") for rank in range(2)))


def _idle(load: Load) -> list[Row]:
    """Eight idle workers, then the facade before them: processor share, and commands that the server gets."""
    workers = 8
    seconds = 6.0 if load.quick else IDLE_S
    arguments = ["--namespace", "default", "--workers", str(workers)]
    with (
        load.server("idle") as server,
        Children("benchmarks.counting", ["--redis-url", server.url, *arguments], workers) as children,
        redis.Redis(host="127.0.0.1", port=server.port) as client,
    ):
        time.sleep(2)
        cpu, commands = _watch(client, children.pids, seconds)
        found = [
            limited("idle worker: share of a core", 1, [cpu / workers * 100], "%", 0.5),
            limited("idle worker: commands to the server", 1, [commands / workers], "commands/s", 3),
        ]
        with facade(server.url) as (_, pid):
            time.sleep(3)
            cpu, both = _watch(client, [pid], seconds)
        note = f"beside {workers} workers, whose commands are taken off"
        found.append(limited("idle facade: share of a core", 1, [cpu * 100], "%", 0.5))
        found.append(
            limited("idle facade: commands to the server", 1, [max(0.0, both - commands)], "commands/s", None, note)
        )
    return found


def _watch(client: redis.Redis, pids: Sequence[int], seconds: float) -> tuple[float, float]:
    """Processor seconds a second of these processes, and commands a second that the server is sent.

    What scripts call on the server itself is not sent, and not counted.
    """
    sent, used, began = 0, cpu_s(pids), time.monotonic()
    timer = threading.Timer(seconds, client.ping)  # MONITOR waits for the next command, this one at the latest
    timer.start()
    with client.monitor() as monitor:
        for command in monitor.listen():
            sent += command["client_type"] != "lua"
            if time.monotonic() - began >= seconds:
                break
    timer.join()
    taken = time.monotonic() - began
    return (cpu_s(pids) - used) / taken, (sent - 1) / taken


def _judged(row: Row, target: str, ok: bool) -> Row:
    return Row(row.measure, row.n, row.ours, row.peer, row.unit, row.ratio, target, ok, row.spread, row.note)
