"""What the facade sees of the bus: who is there, whether hashes can match, and everybody's counters."""

from __future__ import annotations

import asyncio
import time

import msgspec

from kvbus.errors import BusError
from kvbus.facade.metrics import Metrics, Remote, Snapshot
from kvbus.facade.models import Check, ReadyReply, WorkerInfo, WorkersReply
from kvbus.facade.service import Facade
from kvbus.streams.registry import Member, Membership, PublisherRegistration, read_publishers, read_stats

KEEP_S = 1.0
"""A scrape this soon after another is answered from memory."""


class Seen(msgspec.Struct, frozen=True):
    """The namespace at one moment. publishers: name to registration, the living ones only."""

    members: tuple[Member, ...]
    publishers: dict[str, PublisherRegistration]

    @property
    def fingerprints(self) -> dict[str, list[str]]:
        """Hash fingerprint to the living workers and publishers that have it. One is right, more cannot match."""
        found: dict[str, list[str]] = {}
        for member in self.members:
            if member.alive and member.registration.hash_fingerprint:
                found.setdefault(member.registration.hash_fingerprint, []).append(f"worker {member.name}")
        for name, publisher in self.publishers.items():
            if publisher.hash_fingerprint:
                found.setdefault(publisher.hash_fingerprint, []).append(f"publisher {name}")
        return found


class Observer:
    """Reads from the bus for everyone who asks, one reading at a time. Belongs to one event loop."""

    def __init__(self, facade: Facade, metrics: Metrics) -> None:
        self._facade = facade
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._read_at = float("-inf")

    async def workers(self) -> WorkersReply:
        """Raises BusError."""
        members = await self._facade.roll_call()
        return WorkersReply(
            workers=tuple(_info(member) for member in members), alive=sum(member.alive for member in members)
        )

    async def ready(self) -> ReadyReply:
        """Whether a command could be carried out now, and whether hashes can match. Never raises BusError."""
        try:
            seen = await self._facade.ask(self._look)
        except BusError as error:
            checks = {"bus": Check(ok=False, detail=error.message)}
            return ReadyReply(ready=False, checks=checks)
        checks = {
            "bus": Check(ok=True, detail="the server answers"),
            "workers": _check_workers(seen),
            "hash_fingerprint": _check_fingerprints(seen),
        }
        return ReadyReply(ready=all(check.ok for check in checks.values()), checks=checks)

    async def refresh(self) -> None:
        """Bring the snapshot of the metrics up to date; without the bus only the facade's own numbers are."""
        async with self._lock:
            if time.monotonic() - self._read_at < KEEP_S:
                return
            facade = self._facade
            try:
                snapshot = await self._facade.ask(self._snapshot)
            except BusError:
                snapshot = Snapshot()
            self._metrics.snapshot = msgspec.structs.replace(
                snapshot,
                facade=facade.counters.snapshot(),
                results_reader=facade.client.answers.counters.snapshot(),
            )
            self._read_at = time.monotonic()

    def _look(self) -> Seen:
        client = self._facade.client
        members = client.workers()
        publishers = read_publishers(client.bus)
        alive = Membership(client.bus).alive(list(publishers)) if publishers else {}
        return Seen(members, {name: info for name, info in publishers.items() if alive[name]})

    def _snapshot(self) -> Snapshot:
        seen = self._look()
        client = self._facade.client
        names = [member.name for member in seen.members] + list(seen.publishers)
        stats = read_stats(client.bus, names)
        return Snapshot(
            bus_up=True,
            workers_alive=sum(member.alive for member in seen.members),
            workers_registered=len(seen.members),
            fingerprints=len(seen.fingerprints),
            stream_lengths={name: client.log.state(key).length for name, key in client.bus.keys.streams.items()},
            workers=tuple(
                Remote((member.name, member.registration.instance, str(member.registration.rank)), stats[member.name])
                for member in seen.members
                if member.name in stats
            ),
            publishers=tuple(
                Remote((name, info.instance), stats[name]) for name, info in seen.publishers.items() if name in stats
            ),
        )


def _check_workers(seen: Seen) -> Check:
    alive = [member.name for member in seen.members if member.alive]
    stuck = [member.name for member in seen.members if member.alive and member.registration.stuck]
    if alive:
        told = f"; with an engine that does not return: {', '.join(stuck)}" if stuck else ""
        return Check(ok=len(stuck) < len(alive), detail=f"alive: {', '.join(alive)}{told}")
    registered = ", ".join(member.name for member in seen.members) or "none"
    return Check(ok=False, detail=f"none is alive (registered: {registered})")


def _check_fingerprints(seen: Seen) -> Check:
    found = seen.fingerprints
    told = "; ".join(f"{text!r}: {', '.join(names)}" for text, names in sorted(found.items()))
    if len(found) > 1:
        return Check(ok=False, detail=f"{len(found)} different ones, whose hashes can never match: {told}")
    return Check(ok=True, detail=told or "nobody has announced one")


def _info(member: Member) -> WorkerInfo:
    info = member.registration
    return WorkerInfo(
        name=member.name,
        alive=member.alive,
        **{field: getattr(info, field) for field in WorkerInfo.__struct_fields__ if hasattr(info, field)},
    )
