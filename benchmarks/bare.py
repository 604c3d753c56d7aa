"""What streams take by themselves: N processes that read an entry and write one back, nothing decoded, nothing done.

    python -m benchmarks.bare --redis-url redis://127.0.0.1:6379/0 --namespace bare --workers 8 [--fenced]

With --fenced they answer by kvbus's commit, which moves a checkpoint and refuses a predecessor, in place of XADD.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.children import fork_all, until_told
from kvbus.errors import BusError
from kvbus.protocol.codec import Fields, new_message_id
from kvbus.settings import load_settings
from kvbus.streams.checkpoint import Append, Commit, Taken, commit, register
from kvbus.streams.connection import Bus
from kvbus.streams.issue import Issuer
from kvbus.streams.line import Line
from kvbus.streams.position import Position
from kvbus.streams.registry import Registration, encode_registration
from kvbus.streams.subscription import Subscription

ANSWER = bytes(120)
"""As long as one worker's answer to one command."""
OWNER = "bare"


class Sender:
    """The other end: one entry out, N entries back. Owned by one thread."""

    def __init__(self, bus: Bus, *, fenced: bool) -> None:
        self._bus = bus
        self._issuer = Issuer(bus) if fenced else None
        self._line = Line(bus.client)
        self._answers = Subscription.from_end(bus, bus.keys.results)

    def call(self, body: bytes, workers: int) -> None:
        """Until every worker has written its entry."""
        fields = _fields("evict", body)
        if self._issuer is not None:
            self._issuer.issue(fields)
        else:
            self._line.call(_xadd(self._bus.keys.commands, fields))
        found = 0
        while found < workers:
            found += len(self._answers.read().entries)

    def close(self) -> None:
        self._answers.disconnect()
        self._line.close()


def _fields(kind: str, body: bytes) -> Fields:
    return {b"v": b"1", b"type": kind.encode(), b"id": new_message_id().encode(), b"body": body}


def _xadd(key: str, fields: Fields) -> list[str | bytes | int]:
    return ["XADD", key, "MAXLEN", "~", 100_000, "*", *(word for pair in fields.items() for word in pair)]


def _answer_all(bus: Bus, name: str, *, fenced: bool) -> None:
    """Read and answer until told to end."""
    stop = until_told()
    rev = 0
    if fenced:
        registration = encode_registration(Registration(instance="bare"))
        found = register(bus, name, OWNER, start=Position(), registration=registration)
        if isinstance(found, Taken):
            raise RuntimeError(f"{name} is taken")
        rev = found.rev
    commands, line = Subscription.from_end(bus, bus.keys.commands), Line(bus.client)
    while not stop.is_set():
        try:
            batch = commands.read(block_ms=500)
        except BusError:
            return  # the server has gone before us
        for _ in batch.entries:
            if not fenced:
                line.call(_xadd(bus.keys.results, _fields("results", ANSWER)))
                continue
            append = Append(
                stream=bus.keys.results, type="results", message_id=new_message_id(), body=ANSWER, maxlen=100_000
            )
            step = Commit(
                name=name, owner=OWNER, old_rev=rev, new_rev=rev + 1, position=commands.position, appends=(append,)
            )
            commit(bus, step, line)
            rev += 1


def main() -> int:
    """Answer until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bare")
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--namespace", default="bare")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fenced", action="store_true")
    args = parser.parse_args()
    # Its name is not renewed: it has to live as long as the run.
    settings = load_settings({"redis_url": args.redis_url, "namespace": args.namespace, "live_ms": "3600000"})

    def serve(rank: int, say: Callable[[dict[str, Any]], None]) -> None:
        bus = Bus(settings, client_name="bare")
        bus.server_time_ms()
        say({"rank": rank})
        _answer_all(bus, f"bare/{rank}", fenced=args.fenced)

    return fork_all(serve, args.workers)


if __name__ == "__main__":
    sys.exit(main())
