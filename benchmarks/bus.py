"""Bus only: a command to N workers whose engines only count, over the bus and over the HTTP fan-out."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psutil

from benchmarks.bare import Sender
from benchmarks.children import Children
from benchmarks.http_clients import Caller, evict_body, rate
from benchmarks.load import Load
from benchmarks.rows import Row, compared, percentile, times_higher, times_lower
from kvbus.client import CommandHandle, KVBus
from kvbus.embedded import EmbeddedServer
from kvbus.protocol import Evict
from kvbus.protocol.codec import encode_body
from kvbus.settings import load_settings

HASHES = 100
CLIENTS = 16
WINDOW = 512
"""Commands that the sender lets be under way at once."""
MOST_S = 2.0
FEWEST = 20
RATE_GOALS = {2: 50, 8: 80, 16: 100}


def hashes(count: int = HASHES, seed: int = 1) -> tuple[int, ...]:
    chooser = random.Random(seed)
    return tuple(chooser.getrandbits(64) - 2**63 for _ in range(count))


def latencies_ms(call: Callable[[], object], count: int) -> list[float]:
    """How long each of `count` calls took, one after the other; fewer of them where that would last too long."""
    taken: list[float] = []
    end = time.perf_counter() + MOST_S
    while len(taken) < count and (len(taken) < FEWEST or time.perf_counter() < end):
        began = time.perf_counter()
        call()
        taken.append((time.perf_counter() - began) * 1000)
    return taken


def answered_everywhere(handle: CommandHandle, workers: int) -> None:
    """Wait for the command's last worker. Raises RuntimeError when one does not answer."""
    state = handle.wait(30)
    if len(state.finals) != workers:
        raise RuntimeError(f"{len(state.finals)} of {workers} workers answered")


def bus_rate(bus: KVBus, chunks: Sequence[int], workers: int, seconds: float) -> float:
    """Commands a second that every worker has carried out and answered, WINDOW of them under way."""
    command = Evict(chunk_hashes=tuple(chunks))
    under_way: deque[CommandHandle] = deque()
    done = 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        while len(under_way) < WINDOW:
            under_way.extend(bus.send_all([command] * 32))
        answered_everywhere(under_way.popleft(), workers)
        done += 1
    while under_way:
        answered_everywhere(under_way.popleft(), workers)
        done += 1
    return done / (time.perf_counter() - began)


def rows(load: Load, only: Callable[[str], bool]) -> list[Row]:
    """Latency and rate at each N; a server and both sides' workers of their own."""
    found: list[Row] = []
    with load.server("bus") as server:
        for workers in load.workers:
            found += _at(server, workers, load, only)
    return found


def _at(server: EmbeddedServer, workers: int, load: Load, only: Callable[[str], bool]) -> list[Row]:
    namespace = f"bus-{workers}"
    chunks = hashes()
    body = evict_body(chunks)
    ours, peer = Side(), Side()
    floor: tuple[list[list[float]], list[list[float]]] = ([], [])
    arguments = ["--redis-url", server.url, "--namespace", namespace, "--workers", str(workers)]
    with (
        Children("benchmarks.counting", arguments, workers) as counting,
        Children("benchmarks.fanout", ["workers", "--workers", str(workers)], workers) as http,
        Children("benchmarks.fanout", ["scheduler", "--ports", ports(http)], 1) as scheduler,
        KVBus(load_settings({"redis_url": server.url, "namespace": namespace})) as bus,
        bare(server, workers, fenced=False) as streams,
        bare(server, workers, fenced=True) as fenced,
    ):
        port = int(scheduler.ready[0]["port"])
        caller = Caller(port)

        def one_command() -> None:
            answered_everywhere(bus.evict(chunks), workers)

        def one_request() -> None:
            caller.post("/memory/evict", body)

        calls = (one_command, one_request, streams, fenced)
        for call in calls:
            latencies_ms(call, 20)
        for _ in range(load.rounds):
            if only("latency"):
                for taken, call in zip((ours.latencies, peer.latencies, *floor), calls, strict=True):
                    taken.append(latencies_ms(call, load.calls))
            if only("rate"):
                for side, parts, run in (
                    (ours, (counting.pids, [server.pid or 0]), lambda: bus_rate(bus, chunks, workers, load.seconds)),
                    (
                        peer,
                        (http.pids, scheduler.pids),
                        lambda: rate(port, body, clients=CLIENTS, seconds=load.seconds),
                    ),
                ):
                    side.turn(run, *parts)
        caller.close()
    found: list[Row] = []
    if ours.latencies:
        for share, name, goal in ((0.1, "p10", None), (0.5, "p50", times_lower(4)), (0.99, "p99", times_lower(5))):
            mine, theirs = ([percentile(turn, share) for turn in side.latencies] for side in (ours, peer))
            found.append(compared(f"bus only: evict answered by all, {name}", workers, mine, theirs, "ms", goal))
        theirs = [percentile(turn, 0.5) for turn in peer.latencies]
        for least, what in zip(floor, ("by bare streams", "by bare streams, fenced"), strict=True):
            mine = [percentile(turn, 0.5) for turn in least]
            found.append(compared(f"bus only: an entry answered {what}, p50", workers, mine, theirs, "ms"))
    if ours.rates:
        goal = times_higher(RATE_GOALS.get(workers, 50))
        found.append(compared("bus only: answered everywhere", workers, ours.rates, peer.rates, "commands/s", goal))
        for what, mine, theirs in (
            ("one worker", ours.workers_us, peer.workers_us),
            ("the server; peer: the scheduler process", ours.between_us, peer.between_us),
            ("the sender; peer: 16 clients", ours.senders_us, peer.senders_us),
            ("all together", ours.all_us, peer.all_us),
        ):
            found.append(compared(f"bus only: processor time a command, {what}", workers, mine, theirs, "us"))
    return found


@contextmanager
def bare(server: EmbeddedServer, workers: int, *, fenced: bool) -> Iterator[Callable[[], object]]:
    """One entry of a command's size to N processes that do nothing but write one back: no bus can be quicker."""
    namespace = f"bare-{workers}-{fenced}"
    arguments = ["--redis-url", server.url, "--namespace", namespace, "--workers", str(workers)]
    with (
        Children("benchmarks.bare", [*arguments, "--fenced"] if fenced else arguments, workers),
        KVBus(load_settings({"redis_url": server.url, "namespace": namespace})) as bus,
    ):
        body = encode_body(Evict(chunk_hashes=hashes()))
        sender = Sender(bus.bus, fenced=fenced)
        try:
            yield lambda: sender.call(body, workers)
        finally:
            sender.close()


class Side:
    """What the rounds of one side brought. Processor times in microseconds a command, at full rate."""

    def __init__(self) -> None:
        self.latencies: list[list[float]] = []
        self.rates: list[float] = []
        self.workers_us: list[float] = []
        self.between_us: list[float] = []
        self.senders_us: list[float] = []
        self.all_us: list[float] = []

    def turn(self, run: Callable[[], float], workers: Sequence[int], between: Sequence[int]) -> None:
        """One round at full rate. run: commands a second; workers, between: process ids."""
        groups = (workers, between)
        before, mine, began = [cpu_s(pids) for pids in groups], time.process_time(), time.perf_counter()
        self.rates.append(run())
        commands = self.rates[-1] * (time.perf_counter() - began)
        used = [cpu_s(pids) - earlier for pids, earlier in zip(groups, before, strict=True)]
        used.append(time.process_time() - mine)
        self.workers_us.append(used[0] / len(workers) / commands * 1e6)
        self.between_us.append(used[1] / commands * 1e6)
        self.senders_us.append(used[2] / commands * 1e6)
        self.all_us.append(sum(used) / commands * 1e6)


def cpu_s(pids: Sequence[int]) -> float:
    """Processor seconds that these processes have used."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(one.user + one.system for one in times)


def ports(children: Children) -> str:
    return ",".join(str(line["port"]) for line in children.ready)
