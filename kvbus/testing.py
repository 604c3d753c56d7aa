"""Helpers for your own tests: a bus in memory, and workers that need no engine.

    def test_my_memory_system():
        with fake_workers(ranks=2) as bus:
            client = KVBus(bus=bus)
            client.evict(["3f5c45ecbab5e9fd"]).results(5)

The server is fakeredis with Lua (pip install 'kvbus[dev]', or fakeredis[lua]). What it cannot show is said in
docs/testing.md: it has no persistence, no memory limit and no failover.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from kvbus.errors import BusError, EngineFailed, MissingExtra
from kvbus.protocol.codec import Envelope
from kvbus.protocol.results import CommandResult, Counts, ErrorInfo, Status
from kvbus.settings import Settings
from kvbus.streams.connection import Bus
from kvbus.streams.keys import worker_name
from kvbus.streams.registry import Registration
from kvbus.streams.worker_log import WorkerLog

Carry = Callable[[Envelope], CommandResult]
"""What a fake worker does with a command: its final result."""


def fake_bus(namespace: str | None = None, **settings: object) -> Bus:
    """A bus on a server in memory, empty, of this caller's own. settings: any of kvbus.settings.Settings."""
    try:
        import fakeredis
        import lupa  # noqa: F401 - fakeredis tells too late that it cannot run scripts
    except ImportError as error:
        raise MissingExtra(
            f"kvbus.testing needs fakeredis with Lua: {error}", hint="pip install 'fakeredis[lua]'"
        ) from None
    client = fakeredis.FakeRedis(server=fakeredis.FakeServer(), version=(7, 0), protocol=2)
    values = {"block_ms": 100, **settings, "namespace": namespace or f"test-{uuid.uuid4().hex[:12]}"}
    return Bus(Settings(**values), client=client)  # type: ignore[arg-type]


def all_done(envelope: Envelope) -> CommandResult:
    """The answer of a worker for which everything went well: each chunk loaded, or evicted from one tier."""
    requested = len(getattr(envelope.message, "chunk_hashes", ()))
    done = {
        "prefetch": Counts(requested=requested, loaded=requested),
        "evict": Counts(requested=requested, evicted=requested, evicted_pairs=requested),
        "lookup": Counts(requested=requested, missing=requested),
    }
    return CommandResult(
        command_id=envelope.id,
        type=envelope.type,
        status=Status.DONE,
        lookup_id=getattr(envelope.message, "lookup_id", None),
        counts=done.get(envelope.type, Counts()),
    )


class FakeWorker:
    """A worker on the real protocol, without an engine. carry: makes the result of each command; what it raises
    becomes a `failed` result, as an engine's fault does.

    Only the engine is missing: registration, heartbeat, checkpoint and results are those of a real worker.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        instance: str = "test",
        rank: int = 0,
        carry: Carry = all_done,
        registration: Registration | None = None,
    ) -> None:
        self.name = worker_name(instance, rank)
        self._carry = carry
        self._log = WorkerLog(bus, self.name, registration or Registration(instance=instance, rank=rank))
        self._heartbeat_s = bus.settings.heartbeat_ms / 1000
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"fake-worker-{self.name}", daemon=True)
        self._keeper = threading.Thread(target=self._keep, name=f"fake-keeper-{self.name}", daemon=True)

    def __enter__(self) -> FakeWorker:
        taken = self._log.open()
        assert taken is None, f"{self.name} is taken by a living worker"
        self._log.flush()
        self._thread.start()
        self._keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        self._keeper.join(10)
        self._log.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                for task in self._log.read(block_ms=50):
                    self._log.finish(task.entry_id, self._result(task.envelope))
                self._log.flush()
            except BusError:
                self._stop.wait(0.05)

    def _result(self, envelope: Envelope) -> CommandResult:
        try:
            return self._carry(envelope)
        except Exception as fault:  # noqa: BLE001 - a thread that ended in silence would leave the test waiting
            error = EngineFailed(f"{type(fault).__name__}: {fault}")
            return CommandResult(
                command_id=envelope.id,
                type=envelope.type,
                status=Status.FAILED,
                error=ErrorInfo(error.code, error.message[:1024]),
            )

    def _keep(self) -> None:
        while not self._stop.wait(self._heartbeat_s):
            try:
                self._log.renew()
            except BusError:
                continue


@contextmanager
def fake_workers(
    *, ranks: int = 1, instance: str = "test", carry: Carry = all_done, bus: Bus | None = None
) -> Iterator[Bus]:
    """That many fake workers on one bus in memory, for as long as the block lasts."""
    shared = bus or fake_bus()
    with ExitStack() as stack:
        for rank in range(ranks):
            stack.enter_context(FakeWorker(shared, instance=instance, rank=rank, carry=carry))
        yield shared
