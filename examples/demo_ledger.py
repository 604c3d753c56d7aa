"""What the session ledger is good for, on four real LMCache ranks whose DDR is too small for two sessions.

    python -m examples.demo_ledger

Two sessions with one system prompt take turns; one of them is rewritten from its first word in between. The same turns
run three times: with plain LRU, with the evict that a client makes of its own difference alone (it knows no other
session), and with the ledger. Before each turn every rank is asked where the chunks are that the session had before.
Ends with a table, writes out/demo_ledger.json, and exits with 0 only if the ledger had all of them in DDR, plain LRU
had not, and the own difference had lost some.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from examples.system import System
from kvbus.client import KVBus
from kvbus.memory import MemoryConfig, MemoryService
from kvbus.protocol import DDR, SSD, format_hash, parse_hash
from publisher import FinishedRequest, Publisher

RANKS = 4
CHUNK = 64
LAYERS = 16
DDR_CHUNKS = 20
DDR_GB = 0.005
"""20 chunks of 16 layers x 64 tokens."""
ROOM = 2
"""Chunks of DDR that the ledger leaves to the requests themselves."""
SHARED, OWN = 6, 8
OUT = Path("out/demo_ledger.json")
LABELS = {"own difference": "own difference (AgentOS today)", "ledger": "with the ledger"}
ALICE, BOB = "alice", "bob"
TURNS = (ALICE, BOB, ALICE, BOB, "rewrite alice", BOB, ALICE, BOB)


class Row(msgspec.Struct):
    """How the chunks that a session had before were found when its next turn came. In chunks, on the worst rank."""

    name: str
    asked: int = 0
    ddr: int = 0
    ssd: int = 0
    lost: int = 0


class Run:
    """The turns once. first_token: so that no run finds another's chunks."""

    def __init__(self, system: System, bus: KVBus, publisher: Publisher, name: str, first_token: int) -> None:
        self.system, self.bus, self.publisher, self.name = system, bus, publisher, name
        self.row = Row(name)
        prompt = self._tokens(first_token, SHARED)
        self.texts = {
            ALICE: prompt + self._tokens(first_token + 10_000, OWN),
            BOB: prompt + self._tokens(first_token + 20_000, OWN),
        }
        self.fresh = first_token + 30_000
        self.known: dict[str, list[str]] = {}
        """Each session's chunks after its last turn."""
        self.all: set[str] = set()

    def turns(self) -> None:
        for number, turn in enumerate(TURNS):
            session = turn.removeprefix("rewrite ")
            known = self.known.get(session, [])
            if known:
                self.before_turn(session)
                self._count(known)
            if turn != session:
                self.texts[session] = self._new_tokens(OWN)  # another system prompt, another topic
            elif known:
                self.texts[session] += self._new_tokens(1)
            self.system.ask_all("retrieve", tokens=self.texts[session])
            hashes = self.system.store(self.texts[session], seed=1)
            self.all.update(hashes)
            self.known[session] = hashes
            self.publisher.publish(
                FinishedRequest(
                    request_id=f"{self.name}-{number}",
                    instance="llm-a",
                    reason="stop",
                    chunk_hashes=tuple(parse_hash(text) for text in hashes),
                    chunk_size=CHUNK,
                    prompt_tokens=len(self.texts[session]),
                    context={"session": f"{self.name}-{session}"},
                )
            )
            self.after_turn(session, known, hashes)
        self.bus.evict(sorted(self.all)).results(30)

    def before_turn(self, session: str) -> None:
        """Plain LRU: nothing."""

    def after_turn(self, session: str, before: list[str], after: list[str]) -> None:
        """Plain LRU: nothing."""

    def _count(self, known: list[str]) -> None:
        """A chunk behind one that is lost is of no use: it counts as lost."""
        helds = [answer.result.held for answer in self.bus.lookup(known).results(30).values()]
        self.row.asked += len(known)
        for place in range(len(known)):
            tiers = [set(held.tiers_of(place)) if held is not None else set() for held in helds]
            if all(DDR in found for found in tiers):
                self.row.ddr += 1
            elif all(found & {DDR, SSD} for found in tiers):
                self.row.ssd += 1
            else:
                self.row.lost += len(known) - place
                return

    def _new_tokens(self, chunks: int) -> list[int]:
        tokens = self._tokens(self.fresh, chunks)
        self.fresh += len(tokens)
        return tokens

    @staticmethod
    def _tokens(first: int, chunks: int) -> list[int]:
        return list(range(first, first + chunks * CHUNK))


class OwnDifference(Run):
    """As a client that knows one session: before a turn it prefetches all its chunks in the order of a hash map, and
    after it evicts from every tier what the new turn no longer has.
    """

    def before_turn(self, session: str) -> None:
        self.bus.prefetch(sorted(self.known[session]), lookup_id="turn_prefetch").results(30)

    def after_turn(self, session: str, before: list[str], after: list[str]) -> None:
        gone = [item for item in before if item not in set(after)]
        if gone:
            self.bus.evict(gone).results(30)


class WithLedger(Run):
    """`switch` before a turn; the rest follows from the events."""

    service: MemoryService

    def before_turn(self, session: str) -> None:
        switched = self.service.ledger.switch(f"{self.name}-{session}")
        for item in switched.commands:
            self._finished(item.command_id)

    def after_turn(self, session: str, before: list[str], after: list[str]) -> None:
        name = f"{self.name}-{session}"
        deadline = time.monotonic() + 20
        while [format_hash(item) for item in self.service.ledger.chunks(name)] != after:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the ledger has not taken the turn of {session}")
            time.sleep(0.01)

    def _finished(self, command_id: str) -> None:
        self.bus.answers.owed_by(self.bus.workers(), command_id)
        state = self.bus.answers.wait(command_id, 30)
        if not state.complete:
            raise RuntimeError(f"{command_id}: no answer from {(*state.waiting, *state.dead)}")


def main() -> int:
    """Run all three; 0 if they ended as they should."""
    began = time.monotonic()
    _say(f"starting a Valkey server and {RANKS} LMCache workers with room for {DDR_CHUNKS} chunks in DDR ...")
    options = ("--layers", str(LAYERS), "--chunk-size", str(CHUNK), "--max-share", "1.0")
    with (
        tempfile.TemporaryDirectory(prefix="kvbus-ledger-") as data,
        System(Path(data), ranks=RANKS, cpu_gb=DDR_GB, facade=False, options=options) as system,
    ):
        settings = system.settings(block_ms=100)
        config = MemoryConfig(grace_ms=0, ddr_budget_chunks=DDR_CHUNKS - ROOM)
        with (
            KVBus(settings, issuer="demo") as bus,
            Publisher(settings, name="llm-a/scheduler", instance="llm-a", model="kvbus-demo") as publisher,
        ):
            bus.answers.start()
            plain = Run(system, bus, publisher, "plain LRU", 100_000)
            own = OwnDifference(system, bus, publisher, "own difference", 200_000)
            ledger = WithLedger(system, bus, publisher, "ledger", 300_000)
            for run in (plain, own):
                _timed(run.name, run.turns)
            with MemoryService(bus.bus, config) as ledger.service:
                _await_place(ledger.service)
                _timed(ledger.name, ledger.turns)
        usages = system.ask_all("usage")
    rows = [run.row for run in (plain, own, ledger)]
    leaks = sum(usage["pool_objects"] - usage["cached_objects"] for usage in usages)
    best, unsafe, lru = ledger.row, own.row, plain.row
    ok = (
        best.ddr == best.asked
        and lru.ddr < lru.asked
        and lru.lost == 0
        and unsafe.lost > 0
        and best.lost == 0
        and leaks == 0
    )
    report = {"ok": ok, "workers": RANKS, "ddr_chunks": DDR_CHUNKS, "rows": msgspec.to_builtins(rows), "leaks": leaks}
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(report, indent=2) + "\n")
    print(_table(rows))
    print(f"leaks: {leaks}   {time.monotonic() - began:.1f} s   {'all held' if ok else 'FAILED'}   {OUT}")
    return 0 if ok else 1


def _await_place(service: MemoryService) -> None:
    """Events count from the moment at which the service has fixed its place."""
    deadline = time.monotonic() + 20
    while service.ledger.store.position() is None:
        if time.monotonic() > deadline:
            raise RuntimeError("the memory service did not begin")
        time.sleep(0.01)


def _timed(name: str, work: Callable[[], Any]) -> None:
    began = time.monotonic()
    work()
    _say(f"  {name}: {len(TURNS)} turns in {time.monotonic() - began:.1f} s")


def _table(rows: list[Row]) -> str:
    lines = [f"{'known chunks at the next turn':<30} {'asked':>6} {'in DDR':>7} {'on SSD':>7} {'lost':>5}   from DDR"]
    for row in rows:
        counts = f"{row.asked:>6} {row.ddr:>7} {row.ssd:>7} {row.lost:>5}   {row.ddr / max(1, row.asked):.0%}"
        lines.append(f"{LABELS.get(row.name, row.name):<30} {counts}")
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
