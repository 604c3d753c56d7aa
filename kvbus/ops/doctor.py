"""Is all well? Every probe answers with evidence, and with one command or setting that mends what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum

import msgspec

from kvbus.errors import BusError, BusUnavailable, ConfigError
from kvbus.settings import Settings, redact_url
from kvbus.streams.connection import Bus


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"
    """Could not be looked at: the server was away, or this user may not ask."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. mend: one command or setting, empty when there is nothing to mend.

    code: of the error that ended the probe, if one did.
    """

    level: Level
    probe: str
    evidence: str
    mend: str = ""
    code: str = ""


Probe = Callable[[Bus], Iterable[Finding]]

CONNECT_MS = 2_000
REPLY_MS = 3_000
"""A probe makes few calls, and each is over within these."""
GIVE_UP_AFTER = 2
"""Probes in a row that found the server away; the rest are skipped."""


def probes() -> dict[str, Probe]:
    """Every probe by its name, in the order of the report."""
    from kvbus.ops import probes_server, probes_workers

    return {
        "settings": _settings,
        "reachable": probes_server.reachable,
        "rights": probes_server.rights,
        "server": probes_server.version,
        "eviction": probes_server.eviction,
        "memory": probes_server.memory,
        "persistence": probes_server.persistence,
        "timeouts": probes_server.timeouts,
        "clock": probes_server.clock,
        "streams": probes_server.streams,
        "workers": probes_workers.workers,
        "places": probes_workers.places,
        "ranks": probes_workers.ranks,
        "protocol": probes_workers.protocol,
        "hashes": probes_workers.fingerprints,
        "versions": probes_workers.versions,
        "publishers": probes_workers.publishers,
        "dead letters": probes_workers.dead_letters,
    }


def examine(settings: Settings) -> Iterator[Finding]:
    """Run every probe, one after the other, each within a bounded time. Never raises a BusError."""
    bounded = msgspec.structs.replace(
        settings,
        connect_timeout_ms=min(settings.connect_timeout_ms, CONNECT_MS),
        reply_timeout_ms=min(settings.reply_timeout_ms, REPLY_MS),
    )
    bus = Bus(bounded, client_name="kvbus-doctor")
    away = 0
    try:
        for name, probe in probes().items():
            if away >= GIVE_UP_AFTER:
                yield Finding(Level.SKIP, name, "the server is away")
                continue
            try:
                yield from probe(bus)
                away = 0
            except (BusError, ConfigError) as error:
                level = Level.FAIL
                if name == "reachable" or isinstance(error, ConfigError):
                    away = GIVE_UP_AFTER
                elif isinstance(error, BusUnavailable):
                    away += 1
                else:
                    level = Level.WARN  # this user may not ask
                yield Finding(level, name, error.message, error.hint, error.code)
    finally:
        bus.close()


def _settings(bus: Bus) -> Iterator[Finding]:
    given = {name: value for name, value in bus.settings.shown().items() if value != getattr(Settings(), name)}
    given.pop("redis_url", None)
    shown = ", ".join(f"{name}={value}" for name, value in given.items()) or "all others as they come"
    yield Finding(
        Level.OK, "settings", f"{redact_url(bus.settings.redis_url)}, namespace {bus.settings.namespace}; {shown}"
    )
