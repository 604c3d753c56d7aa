"""Random, mutated and hostile entries on all streams, while real commands run on real LMCache engines.

    python -m benchmarks.fuzz --entries 200000

Prints one JSON line: entries written, how many were bad, dead letters, good commands and how many of them every worker
carried out, crashes, stuck workers. Exit code 0 only if every bad entry is a dead letter, once, every good command was
answered by all, nothing crashed and nothing is stuck.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.census import Census
from examples.system import System
from kvbus.client import KVBus
from kvbus.errors import ProtocolError
from kvbus.event_stream import EventStream
from kvbus.protocol import (
    Evict,
    FinishReason,
    Lookup,
    Message,
    Ping,
    Prefetch,
    RequestFinished,
    decode_entry,
    encode_entry,
    encode_json_entry,
    new_message_id,
)
from kvbus.protocol.codec import COMMAND_TYPES, EVENT_TYPES, Fields
from kvbus.streams.log import Log

RANKS = 2
BATCH = 64
PACE = 8
"""Batches between two pings: the writer waits there for every worker."""
LARGEST = 200_000
"""Bytes of an ordinary hostile entry; over-limit ones come now and then."""


class Fuzz:
    """Makes entries. Whether one is bad is for the protocol to say, by its own error and by no other."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def valid(self) -> Message:
        hashes = tuple(self.random.getrandbits(63) - 2**62 for _ in range(self.random.randint(1, 20)))
        kind = self.random.randrange(5)
        if kind == 0:
            return Evict(chunk_hashes=hashes)
        if kind == 1:
            return Prefetch(chunk_hashes=hashes, lookup_id="fuzz", ttl_ms=300_000)
        if kind == 2:
            return Lookup(chunk_hashes=hashes, ttl_ms=300_000)
        if kind == 3:
            return Ping(ttl_ms=300_000)
        return RequestFinished(
            request_id="r",
            instance="fuzz",
            reason=FinishReason.STOP,
            chunk_hashes=hashes,
            publisher=f"fuzz-{self.random.getrandbits(64):x}",
            epoch=1,
            seq=self.random.randrange(1000),
            finished_at_ms=1,
            context={"session": "s"},
        )

    def entry(self) -> Fields:
        """Anything from a good entry to noise; always with an id of its own, or none."""
        message = self.valid()
        own_id = new_message_id()
        fields = encode_entry(message, message_id=own_id)
        if self.random.random() < 0.4:
            fields = encode_json_entry(message, message_id=own_id)
        choice = self.random.random()
        if choice < 0.3:
            return fields
        if choice < 0.6:
            return self._mutated(fields)
        return self._hostile(fields)

    def _mutated(self, fields: Fields) -> Fields:
        """Bits flipped, bytes cut, doubled or put in, in the body or in the type."""
        name = self.random.choice([name for name in fields if name != b"id"])
        raw = bytearray(fields[name])
        for _ in range(self.random.randint(1, 4)):
            place = self.random.randrange(len(raw) + 1)
            match self.random.randrange(4):
                case 0 if place < len(raw):
                    raw[place] ^= 1 << self.random.randrange(8)
                case 1:
                    del raw[place:]
                case 2:
                    raw[place:place] = self.random.randbytes(self.random.randint(1, 8))
                case _:
                    raw[place:place] = raw[:place]
        return fields | {name: bytes(raw[:LARGEST])}

    def _hostile(self, fields: Fields) -> Fields:
        body_name = b"json" if b"json" in fields else b"body"
        deep = self.random.randint(9, 50_000)
        bodies: list[tuple[bytes, bytes]] = [
            (b"body", b"\x91" * deep),
            (b"body", b"\x81\xa1a" * deep),
            (b"json", b"[" * deep),
            (b"json", b'{"a":' * deep),
            (b"body", self.random.randbytes(self.random.randint(0, 300))),
            (b"json", self.random.randbytes(self.random.randint(0, 300))),
            (b"body", b"\xdd\xff\xff\xff\xff"),
            (b"body", b"\xdf\xff\xff\xff\xff"),
            (b"body", b"\xc6\xff\xff\xff\xff"),
            (b"json", b'{"chunk_hashes":["' + b"f" * 17 + b'"]}'),
            (b"json", b'{"chunk_hashes":["1"],"chunk_hashes":["2"]}'),
            (b"json", b'{"chunk_hashes":["1"],"ttl_ms":1e999}'),
            (b"json", b'{"chunk_hashes":["1"],"ttl_ms":' + b"9" * 5000 + b"}"),
            (b"json", b'{"chunk_hashes":[NaN]}'),
            (b"json", b'{"chunk_hashes":[]}'),
            (b"json", b'{"chunk_hashes":["\\ud800"]}'),
            (b"body", msgspec.msgpack.encode({"chunk_hashes": [2**64 - 1, -(2**63), b"x" * 31]})),
            (b"body", msgspec.msgpack.encode({"chunk_hashes": list(range(70_000))})),
        ]
        if self.random.random() < 0.002:
            bodies = [(b"body", b"x" * 1_600_000), (b"json", b"{" + b" " * 1_600_000 + b"}")]
        name, value = self.random.choice(bodies)
        made = {key: item for key, item in fields.items() if key != body_name} | {name: value}
        match self.random.randrange(8):
            case 0:
                made[b"type"] = self.random.choice([b"", b"results", b"dead", b"\xff", b"evict\n", b"worker.gap"])
            case 1:
                made[b"v"] = self.random.choice([b"", b"0", b"2", b"\x00", b"1 "])
            case 2:
                del made[b"type"]
            case 3:
                made[b"body"], made[b"json"] = b"\x80", b"{}"
            case _:
                pass
        return made


def judge(stream: str, fields: Fields) -> bool:
    """Whether an entry can be taken on that stream. Lets anything but the protocol's own error through."""
    try:
        kind = decode_entry("1-1", fields).type
    except ProtocolError:
        return False
    return kind in {"commands": COMMAND_TYPES, "events": EVENT_TYPES, "results": frozenset(("results",))}[stream]


def main() -> int:
    """Run the fuzz; 0 if all that was bad was set aside, and all that was good was done."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--entries", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # what is said of entries that are bad on purpose
    with (
        tempfile.TemporaryDirectory(prefix="kvbus-fuzz-") as data,
        System(Path(data), instance="fuzz", ranks=RANKS, facade=False) as system,
        KVBus(system.settings(), issuer="fuzz") as bus,
        bus.events(start="end", block_ms=100) as events,
    ):
        bus.answers.start()
        report = _run(args.entries, args.seed, system, bus, events)
    print(json.dumps(report))
    ok = report["dead"] == report["bad"] and report["good_done"] == report["good"]
    ok = ok and report["events_delivered"] == report["good_events"]
    return 0 if ok and not report["crashes"] and not report["stuck"] else 1


def _run(entries: int, seed: int, system: System, bus: KVBus, events: EventStream) -> dict[str, Any]:
    fuzz, census, log = Fuzz(seed), Census(bus.bus), Log(bus.bus)
    keys = bus.bus.keys.streams
    bad = good = good_events = batches = pings = 0
    began = shown_at = time.monotonic()
    written = delivered = 0
    while written < entries:
        stream = fuzz.random.choices(("commands", "events", "results"), (6, 3, 1))[0]
        batch = [fuzz.entry() for _ in range(min(BATCH, entries - written))]
        verdicts = [judge(stream, fields) for fields in batch]
        log.append_batch(keys[stream], batch)
        written += len(batch)
        bad += verdicts.count(False)
        good += verdicts.count(True) if stream == "commands" else 0
        good_events += verdicts.count(True) if stream == "events" else 0
        # Never so far ahead that the streams' caps could take away what was not read.
        delivered += _drain(events)
        batches += 1
        if batches % PACE == 0:
            bus.ping(ttl_ms=300_000).wait(120)
            pings += 1
        if time.monotonic() - shown_at > 5:
            shown_at = time.monotonic()
            print(f"  {written:,} of {entries:,}", file=sys.stderr, flush=True)
    state = bus.ping(ttl_ms=300_000).wait(120)
    stuck = RANKS - len(state.finals)
    counted = census.count(until=0, timeout_s=1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        delivered += _drain(events)
        if log.state(keys["dead"]).entries_added >= bad and delivered >= good_events:
            break
        time.sleep(0.05)
    crashes = sum(worker.process is None or worker.process.poll() is not None for worker in system.workers)
    done = counted.carried_out_by(RANKS)
    return {
        "entries": written,
        "bad": bad,
        "dead": log.state(keys["dead"]).entries_added,
        "good": good,
        "good_done": done - pings - 1,
        "good_events": good_events,
        "events_delivered": delivered,
        "duplicate_results": counted.duplicates,
        "crashes": crashes,
        "stuck": stuck,
        "elapsed_s": round(time.monotonic() - began, 1),
    }


def _drain(events: EventStream) -> int:
    """Read on, not for ever; how many finished requests were delivered. The workers' own events are not counted."""
    finished = 0
    for _ in range(4):
        found = list(events.read(block_ms=0))
        finished += sum(isinstance(delivery.event, RequestFinished) for delivery in found)
        if not found:
            break
    return finished


if __name__ == "__main__":
    sys.exit(main())
