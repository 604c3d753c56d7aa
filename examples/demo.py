"""The whole timeline on real parts: a real Valkey, four real LMCache ranks, a publisher, the facade.

    python -m examples.demo

Two requests finish and announce their chunks; the memory system keeps intent -> chunks; it evicts the old topic and
prefetches the new one; every rank is asked where the chunks are; KV bytes are compared; the next request hits.
Ends with a table, writes out/demo.json, and exits with 0 only if every step held.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from examples.system import System
from kvbus.answers import Answer, CommandState
from kvbus.client import KVBus
from kvbus.event_stream import EventStream
from kvbus.protocol import (
    DDR,
    SSD,
    Evict,
    RequestFinished,
    encode_json_entry,
    format_hash,
    new_message_id,
    parse_hash,
)
from publisher import FinishedRequest, Publisher

RANKS = 4
CHUNK = 64
OUT = Path("out/demo.json")
OLD, NEW = "plan a trip", "write a report"


class Failed(Exception):
    """A step did not show what it must."""


class Demo:
    """The steps, and what they have in hand."""

    def __init__(self, system: System, bus: KVBus, events: EventStream, publisher: Publisher) -> None:
        self.system = system
        self.bus = bus
        self.events = events
        self.publisher = publisher
        self.steps: list[dict[str, Any]] = []
        self.texts = {OLD: list(range(1_000, 1_000 + 12 * CHUNK)), NEW: list(range(5_000, 5_000 + 12 * CHUNK))}
        self.seeds = {OLD: 1, NEW: 2}
        self.stored: dict[str, list[str]] = {}
        self.chunks: dict[str, list[str]] = {}
        """The memory system's map: intent to chunk hashes, learnt from events alone."""

    def step(self, name: str, act: Callable[[], str]) -> None:
        began = time.monotonic()
        try:
            shown, ok = act(), True
        except Failed as error:
            shown, ok = str(error), False
        elapsed = time.monotonic() - began
        self.steps.append({"name": name, "ok": ok, "shown": shown, "ms": round(elapsed * 1000, 1)})
        print(f"  {'ok  ' if ok else 'FAIL'} {name}: {shown}", file=sys.stderr, flush=True)

    # -- the timeline ------------------------------------------------------------------------------------------

    def requests_finish(self) -> str:
        for number, (intent, tokens) in enumerate(self.texts.items()):
            self.stored[intent] = self.system.store(tokens, self.seeds[intent])
            told = self.publisher.publish(
                FinishedRequest(
                    request_id=f"chatcmpl-{number}",
                    instance="llm-a",
                    model="kvbus-demo",
                    reason="stop",
                    chunk_hashes=tuple(parse_hash(text) for text in self.stored[intent]),
                    chunk_size=CHUNK,
                    prompt_tokens=len(tokens),
                    context={"session": "s1", "intent": intent},
                )
            )
            _check(told, "the publisher dropped an event")
        return f"{len(self.texts)} texts of {12 * CHUNK} tokens stored on {RANKS} ranks, DDR and SSD; both published"

    def memory_learns(self) -> str:
        deadline = time.monotonic() + 10
        while len(self.chunks) < len(self.texts) and time.monotonic() < deadline:
            for delivery in self.events.read():
                event = delivery.event
                _check(delivery.hole is None, f"a hole in the events: {delivery.hole}")
                if isinstance(event, RequestFinished):
                    self.chunks[event.context["intent"]] = [format_hash(found) for found in event.chunk_hashes]
        _check(self.chunks == self.stored, "the events' chunk hashes are not those that the engines stored")
        return ", ".join(f"{intent!r}: {len(chunks)} chunks" for intent, chunks in self.chunks.items())

    def evict_by_http(self) -> str:
        answer = self._post("/memory/evict", {"chunk_hashes": self.chunks[NEW], "locations": [DDR]})
        _check(answer["status"] == "success", f"{answer}")
        _check(answer["num_evicted"] == 12, f"12 (chunk, tier) pairs of the first rank expected: {answer}")
        self._expect_tiers(NEW, {SSD})
        return f"POST /memory/evict of {NEW!r} from DDR: num_evicted {answer['num_evicted']}; lookup: SSD on every rank"

    def evict_by_stream(self) -> str:
        handle = self.bus.evict(self.chunks[OLD], locations=[DDR])
        pairs = [answer.result.counts.evicted_pairs for answer in _all(handle.wait(10))]
        _check(pairs == [12] * RANKS, f"each rank had 12 chunks to evict: {pairs}")
        self._expect_tiers(OLD, {SSD})
        return f"evict of {OLD!r} from DDR on the stream: {pairs} by rank"

    def evict_by_hand(self) -> str:
        """The form for people: a json field, as redis-cli would send it."""
        command = Evict(chunk_hashes=tuple(map(parse_hash, self.chunks[OLD])))
        command_id = new_message_id()
        self.bus.answers.expect(command_id)
        entry_id = self.bus.log.append(self.bus.bus.keys.commands, encode_json_entry(command, message_id=command_id))
        self.bus.answers.owed_by(self.bus.workers(), command_id)
        pairs = [answer.result.counts.evicted_pairs for answer in _all(self.bus.answers.wait(command_id, 10))]
        _check(pairs == [12] * RANKS, f"each rank had 12 chunks on its SSD: {pairs}")
        self._expect_tiers(OLD, set())
        return f"XADD {entry_id} ... json: {OLD!r} gone from the SSD as well: {pairs} by rank"

    def prefetch_new(self) -> str:
        wanted = [*self.chunks[NEW], "abc123", "-7fffffffffffff01"]
        random.Random(7).shuffle(wanted)
        answer = self._post("/memory/prefetch?wait=10", {"chunk_hashes": wanted, "lookup_id": "turn_prefetch"})
        _check(answer["status"] == "prefetch_started", f"{answer}")
        state = self._get(f"/memory/commands/{answer['command_id']}")
        counts = [worker["counts"] for _, worker in sorted(state["workers"].items())]
        loaded = [count.get("loaded", 0) for count in counts]
        missing = [count.get("missing", 0) for count in counts]
        _check(loaded == [12] * RANKS, f"each rank had 12 chunks to load: {counts}")
        _check(missing == [2] * RANKS, f"2 hashes are unknown: {counts}")
        return f"{len(wanted)} hashes in shuffled order, 2 unknown: loaded {loaded}, missing {missing} by rank"

    def lookup_new(self) -> str:
        self._expect_tiers(NEW, {DDR, SSD})
        return f"all 12 chunks of {NEW!r} are in DDR on all {RANKS} ranks"

    def bytes_equal(self) -> str:
        tokens, seed = self.texts[NEW], self.seeds[NEW]
        stored = [answer["digest"] for answer in self.system.ask_all("kv", tokens=tokens, seed=seed)]
        found = self.system.ask_all("retrieve", tokens=tokens)
        _check([answer["digest"] for answer in found] == stored, "KV bytes differ from what was stored")
        _check(len(set(stored)) == RANKS, "every rank must hold a shard of its own")
        return f"KV bytes of {found[0]['found']} tokens equal what was stored, on every rank"

    def next_request_hits(self) -> str:
        tokens = self.texts[NEW]
        found = [answer["found"] for answer in self.system.ask_all("retrieve", tokens=[*tokens, 1, 2, 3])]
        _check(found == [len(tokens)] * RANKS, f"the next request should hit {len(tokens)} tokens: {found}")
        gone = [answer["found"] for answer in self.system.ask_all("retrieve", tokens=self.texts[OLD])]
        _check(gone == [0] * RANKS, f"the old topic should be gone: {gone}")
        return f"the next {NEW!r} request hits {found[0]} of {len(tokens) + 3} tokens; {OLD!r} hits 0"

    def leaks(self) -> dict[str, int]:
        usages = self.system.ask_all("usage")
        return {
            "allocations": sum(usage["pool_objects"] - usage["cached_objects"] for usage in usages),
            "pins": sum(usage["cpu_pins"] + usage["disk_pins"] + usage["extra_refs"] for usage in usages),
            "loading_events": sum(usage["loading_events"] for usage in usages),
        }

    # -- help --------------------------------------------------------------------------------------------------

    def _expect_tiers(self, intent: str, tiers: set[str]) -> None:
        state = self.bus.lookup(self.chunks[intent]).wait(10)
        for answer in _all(state):
            held = answer.result.held
            _check(held is not None, f"{answer.worker} told nothing of its tiers")
            assert held is not None
            for place, text in enumerate(self.chunks[intent]):
                found = set(held.tiers_of(place))
                _check(found == tiers, f"{answer.worker}: chunk {text} is in {found or 'no tier'}, expected {tiers}")

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._call(
            Request(
                self.system.facade_url + path,
                data=json.dumps(body).encode(),
                headers={"Content-Type": "application/json"},
            )
        )

    def _get(self, path: str) -> dict[str, Any]:
        return self._call(Request(self.system.facade_url + path))

    def _call(self, request: Request) -> dict[str, Any]:
        try:
            with urlopen(request, timeout=20) as reply:
                answer: dict[str, Any] = json.load(reply)
        except HTTPError as error:
            raise Failed(f"{request.full_url}: {error.code} {error.read().decode()[:300]}") from None
        return answer


def _all(state: CommandState) -> list[Answer]:
    _check(state.complete, f"no final answer from {(*state.waiting, *state.dead)}")
    _check(len(state.answers) == RANKS, f"{len(state.answers)} of {RANKS} ranks answered")
    return [answer for _, answer in sorted(state.answers.items())]


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


def _table(rows: Iterable[dict[str, Any]]) -> str:
    lines = [f"{'step':<34} {'':<5} {'ms':>8}  what was seen"]
    lines += [f"{row['name']:<34} {'ok' if row['ok'] else 'FAIL':<5} {row['ms']:>8}  {row['shown']}" for row in rows]
    return "\n".join(lines)


def main() -> int:
    """Run the demo; 0 if every step held."""
    began = time.monotonic()
    print(f"starting a Valkey server, {RANKS} LMCache workers and the facade ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="kvbus-demo-") as data, System(Path(data), ranks=RANKS) as system:
        print(f"all up after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        settings = system.settings()
        with (
            KVBus(settings, issuer="demo") as bus,
            bus.events(start="end", reader="demo-memory") as events,
            Publisher(settings, name="llm-a/scheduler", instance="llm-a", model="kvbus-demo") as publisher,
        ):
            demo = Demo(system, bus, events, publisher)
            for name, act in (
                ("requests stored and published", demo.requests_finish),
                ("memory reads the events", demo.memory_learns),
                ("evict by HTTP", demo.evict_by_http),
                ("evict by stream", demo.evict_by_stream),
                ("evict by hand (json form)", demo.evict_by_hand),
                ("prefetch the new topic", demo.prefetch_new),
                ("lookup on every rank", demo.lookup_new),
                ("KV bytes", demo.bytes_equal),
                ("next request", demo.next_request_hits),
            ):
                demo.step(name, act)
            leaks = demo.leaks()
            server = bus.bus.server_version()
            lmcache = {member.registration.lmcache for member in bus.workers()}
    ok = all(step["ok"] for step in demo.steps) and len(demo.steps) == 9 and not any(leaks.values())
    report = {
        "ok": ok,
        "server": server,
        "lmcache": ", ".join(sorted(lmcache)),
        "workers": RANKS,
        "steps": demo.steps,
        "leaks": leaks,
        "elapsed_s": round(time.monotonic() - began, 1),
    }
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(report, indent=2) + "\n")
    print(_table(demo.steps))
    print(f"leaks: {leaks}   {report['elapsed_s']} s   {'all held' if ok else 'FAILED'}   {OUT}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
