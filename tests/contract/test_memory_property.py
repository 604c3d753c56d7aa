"""Random histories of the ledger: many sessions with shared prefixes, several processes, crashes, lost replies."""

from __future__ import annotations

import random

import pytest

from kvbus.errors import BusUnavailable
from kvbus.memory import MemoryConfig, MemoryService
from kvbus.memory.chains import KnownChains
from kvbus.protocol import Evict
from kvbus.protocol.codec import decode_entry
from kvbus.protocol.events import RequestFinished
from kvbus.streams.connection import Bus
from kvbus.streams.ledger_audit import audit
from kvbus.streams.log import Log
from tests.conftest import MakeServer
from tests.contract.ledger_model import LossyStore, Model, Worker, chain, finished, publish, random_path

FOREVER = 10**9


class History:
    """One random history. After every step: counts exact, nothing evicted that anyone holds."""

    def __init__(self, bus: Bus, seed: int, *, budget: int = 0, processes: int = 3) -> None:
        self.bus, self.rng = bus, random.Random(seed)
        self.config = MemoryConfig(
            grace_ms=0, ddr_budget_chunks=budget, closed_ms=FOREVER, request_ms=FOREVER, session_ms=FOREVER
        )
        self.model, self.worker = Model(), Worker(bus)
        self.names = [f"s{number}" for number in range(8)]
        self.paths: dict[str, list[int]] = {}
        self.seqs = {"p0": 0, "p1": 0}
        self.sent: list[RequestFinished] = []
        self.running: dict[str, tuple[str, list[int]]] = {}
        self.requests = 0
        self.taken = "-"
        self.seen: set[tuple[str, int]] = set()
        self.known: set[int] = set()
        self.lossy = True
        self.checks = self.demoted = 0
        self.processes = [self._process() for _ in range(processes)]

    def _process(self) -> MemoryService:
        service = MemoryService(self.bus, self.config, start="start")
        service.ledger.store = LossyStore(self.bus, lambda: self.rng.random() if self.lossy else 1.0)
        # Chains as short as these are sent whole as a rule: here the shortened form is to be tried as well.
        service.ledger._chains = KnownChains(short=1, keep_hashes=200)
        service._swept_at = service._told_at = float("inf")
        return service

    # -- what happens ------------------------------------------------------------------------------------------

    def step(self) -> None:
        kinds = {"finish": 6, "read": 8, "crash": 1, "begin": 3, "end": 3, "close": 1, "switch": 1, "repeat": 1}
        kind = self.rng.choices(list(kinds), list(kinds.values()))[0]
        getattr(self, f"_{kind}")()
        self.check()

    def _publish(self, session: str, path: list[int], request: str = "") -> None:
        self.paths[session] = path
        publisher = self.rng.choice(list(self.seqs))
        # An announced request need not say whose it is.
        context = {} if request and self.rng.random() < 0.5 else {"session": session}
        event = finished(publisher, self.seqs[publisher], chain(path), request_id=request, **context)
        self.seqs[publisher] += 1
        self.sent.append(event)
        publish(self.bus, event)

    def _finish(self) -> None:
        session = self.rng.choice(self.names)
        path = random_path(self.rng, self.paths.get(session, []))
        self._publish(session, [] if self.rng.random() < 0.05 else path)

    def _repeat(self) -> None:
        """A publisher that lost a reply sends its last events again."""
        last = self.rng.randrange(1, 4)
        for publisher in self.seqs:
            for event in [item for item in self.sent if item.publisher == publisher][-last:]:
                publish(self.bus, event)

    def _read(self) -> None:
        service = self.rng.choice(self.processes)
        self._risk(lambda: service.turn_over(block_ms=0, count=1))

    def _crash(self) -> None:
        place = self.rng.randrange(len(self.processes))
        self.processes[place] = self._process()

    def _begin(self) -> None:
        session = self.rng.choice(self.names)
        path = random_path(self.rng, self.paths.get(session, []))
        request = f"r{self.requests}"
        self.requests += 1
        told = chain(path) if self.rng.random() < 0.5 else ()
        self.running[request] = (session, path)
        self.known.update(told)

        def begin() -> None:
            service.ledger.begin(request, session=session, chunk_hashes=told)

        service = self.rng.choice(self.processes)
        if self._risk(begin):
            self.model.begin(request, session, told)
        else:
            del self.running[request]

    def _end(self) -> None:
        if self.running:
            request = self.rng.choice(list(self.running))
            session, path = self.running.pop(request)
            self._publish(session, path, request)

    def _close(self) -> None:
        session = self.rng.choice(self.names)
        service = self.rng.choice(self.processes)
        if self._risk(lambda: service.ledger.close(session)):
            self.model.close(session)
            # A session's name is not used again in this history: its late events must change nothing.
            self.names[self.names.index(session)] = f"s{len(self.paths) + len(self.model.closed) + self.requests + 100}"

    def _switch(self) -> None:
        service = self.rng.choice(self.processes)
        session = self.rng.choice(self.names)
        self._risk(lambda: service.ledger.switch(session))

    def _risk(self, work: object) -> bool:
        """Run it, lost calls and all. Whether the last step of the ledger was applied."""
        stores = [service.ledger.store for service in self.processes]
        before = [len(store.applied) for store in stores if isinstance(store, LossyStore)]
        self.sync()
        try:
            work()  # type: ignore[operator]
        except BusUnavailable:
            pass
        after = [len(store.applied) for store in stores if isinstance(store, LossyStore)]
        self.sync()
        return before != after

    # -- what must hold ----------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Tell the model of every event that the ledger has taken since."""
        place = self.processes[0].ledger.store.position()
        if place is None or place.cursor == "0-0":
            return
        for entry_id, fields in Log(self.bus).scan(self.bus.keys.events, self.taken, place.cursor):
            self.taken = f"({entry_id}"
            event = decode_entry(entry_id, fields).message
            assert isinstance(event, RequestFinished)
            if (event.publisher, event.seq) in self.seen:
                continue
            self.seen.add((event.publisher, event.seq))
            self.model.finish(event.request_id, event.context.get("session", ""), event.chunk_hashes)
            self.known.update(event.chunk_hashes)
            self.worker.stored.update(event.chunk_hashes)

    def check(self) -> None:
        self.sync()
        counts = self.model.counts()
        store = self.processes[0].ledger.store
        running = self.model.in_running()
        for command in self.worker.commands():
            if isinstance(command, Evict) and command.locations is not None:
                self.demoted += len(command.chunk_hashes)
                assert not running.intersection(command.chunk_hashes), "a running request's chunk left DDR"
            elif isinstance(command, Evict):
                held = [item for item in command.chunk_hashes if counts[item]]
                assert not held, f"evicted while held: {held}"
                self.worker.stored.difference_update(command.chunk_hashes)
        some = self.rng.sample(sorted(self.known), min(8, len(self.known)))
        assert {item: store.holds(item)[0] for item in some} == {item: counts[item] for item in some}
        self.checks += 1
        if self.checks % 16 == 0:
            self.recount()

    def recount(self) -> None:
        counts = self.model.counts()
        found = audit(self.bus)
        assert found.differences == ()
        assert found.chunks == sum(1 for value in counts.values() if value)
        assert found.holds == sum(counts.values())

    def _read_all(self) -> None:
        # One at a time: what is evicted is compared with what is held at that moment.
        while self.processes[0].turn_over(block_ms=0, count=1):
            self.check()

    def finish(self) -> None:
        """All events are read: what nobody holds has been evicted; then all is closed, and nothing is left."""
        self.lossy = False
        self._read_all()
        self.recount()
        held = {item for item, value in self.model.counts().items() if value}
        told_only = {item for _, own in self.model.requests.values() for item in own}
        assert self.worker.stored | told_only == held | told_only
        for session, state in self.model.sessions.items():
            if not state.closing:
                assert self.processes[0].ledger.chunks(session) == state.chain
        for request in list(self.running):
            session, path = self.running.pop(request)
            self._publish(session, path, request)
        self._read_all()
        for session in list(self.model.sessions):
            self.processes[0].ledger.close(session)
            self.model.close(session)
        self.check()
        assert self.worker.stored == set()
        assert audit(self.bus).chunks == 0


@pytest.mark.parametrize("seed", range(8))
def test_random_history(start_server: MakeServer, namespace: str, seed: int) -> None:
    history = History(start_server("fakeredis").bus(namespace), seed, budget=(0, 12)[seed % 2])
    for _ in range(150):
        history.step()
    history.finish()
    assert bool(history.demoted) == bool(seed % 2)


@pytest.mark.parametrize("kind", ["valkey", "redis7"])
@pytest.mark.parametrize("seed", [101, 102])
def test_random_history_on_real_servers(start_server: MakeServer, namespace: str, kind: str, seed: int) -> None:
    history = History(start_server(kind).bus(namespace), seed, budget=(0, 12)[seed % 2])
    for _ in range(400):
        history.step()
    history.finish()
