"""Who is there: workers and publishers with their heartbeats and counters."""

from __future__ import annotations

import msgspec

from kvbus.streams.connection import Bus, bus_errors
from kvbus.streams.registry import Membership, Registration, read_publishers, read_stats


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One registered worker. age_ms: since its process began, None when it does not say."""

    role: str = "worker"
    name: str
    alive: bool
    registration: Registration
    age_ms: int | None = None
    stats: dict[str, float] = {}


class PublisherView(msgspec.Struct, frozen=True, kw_only=True):
    """One registered publisher. next_seq: the number of its next event, so that many were made in this epoch."""

    role: str = "publisher"
    name: str
    alive: bool
    instance: str
    model: str
    epoch: int
    next_seq: int
    hash_fingerprint: str
    protocol: str
    host: str
    pid: int
    stats: dict[str, float] = {}


def list_workers(bus: Bus) -> list[WorkerView]:
    """Raises BusError."""
    members = Membership(bus).read()
    stats = read_stats(bus, [member.name for member in members])
    now_ms = bus.now_ms()
    return [
        WorkerView(
            name=member.name,
            alive=member.alive,
            registration=member.registration,
            age_ms=max(0, now_ms - member.registration.started_at_ms) if member.registration.started_at_ms else None,
            stats=stats.get(member.name, {}),
        )
        for member in members
    ]


def list_publishers(bus: Bus) -> list[PublisherView]:
    """Raises BusError."""
    found = read_publishers(bus)
    names = list(found)
    stats = read_stats(bus, names)
    alive: list[bytes | None] = []
    if names:
        with bus_errors("read the heartbeats"):
            alive = bus.client.mget([bus.keys.live(name) for name in names])
    return [
        PublisherView(
            name=name,
            alive=beat is not None,
            instance=own.instance,
            model=own.model,
            epoch=own.epoch,
            next_seq=own.next_seq,
            hash_fingerprint=own.hash_fingerprint,
            protocol=own.protocol,
            host=own.host,
            pid=own.pid,
            stats=stats.get(name, {}),
        )
        for (name, own), beat in zip(found.items(), alive, strict=True)
    ]
