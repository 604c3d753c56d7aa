"""What the drain thread asks of the server, and how kvbus.streams does it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvbus.protocol.codec import Fields
from kvbus.settings import Settings
from kvbus.streams.connection import Bus
from kvbus.streams.log import Log
from kvbus.streams.registry import (
    Membership,
    PublisherRegistration,
    beat_publisher,
    register_publisher,
    registered_epoch,
    write_stats,
)


class EventBus(Protocol):
    """The drain's port. All calls but `close` come from one thread, answer within the settings' timeouts, and raise
    BusError; after BusUnavailable a write may or may not have been applied."""

    hash_fingerprint: str

    def claim(self) -> None:
        """Take the name for this process. Raises Fenced while another living process has it."""

    def registered_epoch(self) -> int:
        """The epoch last registered under the name, 0 for none."""

    def register(self, least_epoch: int, next_seq: int) -> int:
        """Register with an epoch above all earlier ones, at least least_epoch; returns it."""

    def beat(self, epoch: int, next_seq: int) -> None:
        """Renew claim and registration. Raises Fenced when another process has taken the name."""

    def append(self, entries: Sequence[Fields], meanwhile: Callable[[], None]) -> None:
        """All of them, in order, or none. meanwhile: work to do while the server works; may go uncalled."""

    def write_stats(self, counters: Mapping[str, int | float]) -> None: ...

    def other_fingerprints(self) -> Mapping[str, str]:
        """Living workers whose hash settings are not this publisher's, with their fingerprints."""

    def risky_eviction(self) -> str | None:
        """The server's eviction policy if it may remove whole streams."""

    def retire(self, epoch: int, next_seq: int) -> None:
        """Leave a last registration and give the name back."""

    def now_ms(self) -> int:
        """Server time, as far as it is known; asks nobody."""

    def interrupt(self) -> None:
        """From any thread: a call that waits for the server fails at once."""

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""


class StreamsBus:
    """EventBus on a Redis or Valkey server. Raises ConfigError for a URL that cannot be used."""

    def __init__(
        self, settings: Settings, name: str, instance: str, model: str = "", hash_fingerprint: str = ""
    ) -> None:
        self._name = name
        self._instance = instance
        self._owner = os.urandom(16).hex()
        self._bus = Bus(settings, client_name="kvbus-publisher")
        self._log = Log(self._bus)
        self._workers = Membership(self._bus)
        if "cluster" not in settings.redis_url.partition("://")[0]:  # a cluster's client would connect
            self._bus.client  # noqa: B018  # a URL that can never work is told here, not in the thread's log
        self._model = model
        self.hash_fingerprint = hash_fingerprint

    def _registration(self, epoch: int, next_seq: int) -> PublisherRegistration:
        return PublisherRegistration(
            epoch=epoch,
            instance=self._instance,
            next_seq=next_seq,
            model=self._model,
            hash_fingerprint=self.hash_fingerprint,
            host=socket.gethostname(),
            pid=os.getpid(),
        )

    def claim(self) -> None:
        beat_publisher(self._bus, self._name, self._owner, None)

    def registered_epoch(self) -> int:
        return registered_epoch(self._bus, self._name)

    def register(self, least_epoch: int, next_seq: int) -> int:
        return register_publisher(self._bus, self._name, self._registration(0, next_seq), least_epoch=least_epoch)

    def beat(self, epoch: int, next_seq: int) -> None:
        beat_publisher(self._bus, self._name, self._owner, self._registration(epoch, next_seq))

    def append(self, entries: Sequence[Fields], meanwhile: Callable[[], None]) -> None:
        self._log.append_batch(self._bus.keys.events, entries, meanwhile=meanwhile)

    def write_stats(self, counters: Mapping[str, int | float]) -> None:
        self._bus.check_role(self._bus.client)  # a master that was left behind takes writes, too
        write_stats(self._bus, self._name, counters)

    def other_fingerprints(self) -> Mapping[str, str]:
        own = self.hash_fingerprint
        if not own:
            return {}
        return {
            member.name: member.registration.hash_fingerprint
            for member in self._workers.read()
            if member.alive and member.registration.hash_fingerprint not in ("", own)
        }

    def risky_eviction(self) -> str | None:
        return self._bus.risky_eviction()

    def retire(self, epoch: int, next_seq: int) -> None:
        beat_publisher(self._bus, self._name, self._owner, self._registration(epoch, next_seq), last=True)

    def now_ms(self) -> int:
        return self._bus.clock.now_ms()

    def interrupt(self) -> None:
        self._bus.interrupt(self._bus.client)

    def close(self) -> None:
        self._bus.close()
