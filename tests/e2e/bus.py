"""The bus as any program may see it: plain Redis commands and kvbus.protocol, none of kvbus's own clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kvbus.protocol import (
    ChunkHash,
    Command,
    CommandResult,
    Event,
    RequestFinished,
    Results,
    decode_entry,
    encode_entry,
    new_message_id,
    parse_hash,
)
from kvbus.streams.keys import Keys
from tests.servers import RealServer

WAIT_S = 30


class BusView:
    """Sends commands, and sees all events and results of one namespace since the beginning."""

    def __init__(self, server: RealServer, namespace: str) -> None:
        self.keys = Keys(namespace)
        self.namespace = namespace
        self.redis = server.client()

    def events(self, kind: type[Event] = RequestFinished) -> list[Any]:
        """All of this kind, each once: a publisher may send again what it got no answer for, as every reader knows."""
        found = (message for message in map(_message, self.redis.xrange(self.keys.events)) if isinstance(message, kind))
        return list({_identity(message): message for message in found}.values())

    def finished(self, external_id: str) -> RequestFinished:
        """The event of the request that its client knows by this id."""
        found = self.wait_for(
            lambda: [event for event in self.events() if event.external_id == external_id],
            f"the event of request {external_id}",
        )
        assert len(found) == 1, f"{len(found)} events for one request"
        return found[0]  # type: ignore[no-any-return]

    def workers(self) -> set[str]:
        """Names of all registered workers whose heartbeat lives."""
        names = [name.decode() for name in self.redis.hkeys(self.keys.workers)]
        return {name for name in names if self.redis.exists(self.keys.live(name))}

    def wait_for_workers(self, *names: str) -> None:
        self.wait_for(lambda: set(names) <= self.workers(), f"workers {names}")

    def send(self, command: Command) -> str:
        """The id of the command, which all its results carry."""
        message_id = new_message_id()
        self.redis.xadd(self.keys.commands, encode_entry(command, message_id=message_id))  # type: ignore[arg-type]
        return message_id

    def results(self, command_id: str) -> dict[str, CommandResult]:
        """Worker to its final result, of those that have one."""
        found: dict[str, CommandResult] = {}
        for message in map(_message, self.redis.xrange(self.keys.results)):
            assert isinstance(message, Results)
            for result in message.results:
                if result.command_id == command_id and result.status.final:
                    assert message.worker not in found, f"two final results of {message.worker}"
                    found[message.worker] = result
        return found

    def run(self, command: Command, *workers: str) -> dict[str, CommandResult]:
        """Send it and wait until all these workers have answered."""
        command_id = self.send(command)
        return self.wait_for(  # type: ignore[no-any-return]
            lambda: (found := self.results(command_id)) and set(workers) <= set(found) and found,
            f"results of {workers} for {command.TYPE} {command_id}",
        )

    def wait_for(self, condition: Callable[[], Any], what: str, within_s: float = WAIT_S) -> Any:
        deadline = time.monotonic() + within_s
        while not (found := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"{what}: not within {within_s} s; on the bus: {self._state()}")
            time.sleep(0.05)
        return found

    def _state(self) -> str:
        lengths = {name: self.redis.xlen(key) for name, key in self.keys.streams.items()}
        return f"{lengths}, workers {sorted(self.workers())}"


def hashes_of(texts: Iterable[str]) -> tuple[ChunkHash, ...]:
    return tuple(map(parse_hash, texts))


def _identity(message: Any) -> Any:
    return (message.publisher, message.epoch, message.seq) if isinstance(message, RequestFinished) else id(message)


def _message(entry: tuple[bytes, dict[bytes, bytes]]) -> Any:
    return decode_entry(*entry).message
