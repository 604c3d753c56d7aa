"""Probes of who uses the bus: workers, readers, publishers, their hashes and versions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from kvbus.ops.compatibility import LMCACHE, VLLM, fits
from kvbus.ops.dead import list_dead
from kvbus.ops.doctor import Finding, Level
from kvbus.ops.lag import read_lag
from kvbus.ops.when import clock_text, id_ms, span_text
from kvbus.ops.workers import WorkerView, list_publishers, list_workers
from kvbus.streams.checkpoint import read_checkpoint
from kvbus.streams.connection import Bus, bus_errors

FAR_BEHIND = 1_000
SHOWN = 3


def workers(bus: Bus) -> Iterator[Finding]:
    found = list_workers(bus)
    alive = [worker for worker in found if worker.alive]
    if not found:
        yield Finding(
            Level.WARN,
            "workers",
            f"none is registered in namespace {bus.keys.namespace}",
            "Start vLLM with KVBusConnector, or check KVBUS_NAMESPACE there and here",
        )
        return
    dead = [worker.name for worker in found if not worker.alive]
    if dead:
        level = Level.FAIL if not alive else Level.WARN
        yield Finding(
            level, "workers", f"{len(dead)} of {len(found)} have no heartbeat: {_names(dead)}", f"Restart {dead[0]}"
        )
    for worker in alive:
        yield from _trouble_of(bus, worker)
    if alive and not dead:
        yield Finding(Level.OK, "workers", f"{len(alive)} alive: {_names(worker.name for worker in alive)}")


def _trouble_of(bus: Bus, worker: WorkerView) -> Iterator[Finding]:
    checkpoint = read_checkpoint(bus, worker.name)
    with bus_errors("read a heartbeat"):
        holder: bytes | None = bus.client.get(bus.keys.live(worker.name))
    if checkpoint is None:
        yield Finding(Level.FAIL, f"worker {worker.name}", "alive, and without a checkpoint", f"Restart {worker.name}")
    elif holder is not None and holder.decode("utf-8", "replace") != checkpoint.owner:
        yield Finding(
            Level.FAIL,
            f"worker {worker.name}",
            "two processes have this name: its heartbeat and its checkpoint have different owners",
            "Give every process its own KVBUS_INSTANCE",
        )
    stuck = worker.stats.get("engine_stuck", 0) or getattr(worker.registration, "stuck", False)
    if stuck:
        busy = worker.stats.get("engine_busy_s", 0)
        yield Finding(
            Level.FAIL,
            f"worker {worker.name}",
            f"stuck: an engine call has not returned{f' for {busy:.0f} s' if busy else ''}",
            f"Restart {worker.name}; its SSD tier may hold a lock for ever (`kvbus errors not_answered`)",
        )
    if worker.stats.get("unwritten", 0):
        yield Finding(
            Level.WARN,
            f"worker {worker.name}",
            f"{worker.stats['unwritten']:.0f} commits whose events or dead letters the server refused",
            "Raise maxmemory on the server",
        )


def places(bus: Bus) -> Iterator[Finding]:
    lags = read_lag(bus)
    fine = 0
    for lag in lags:
        who = f"{lag.role} {lag.name}"
        mend = f"kvbus reset {lag.name} --to end" if lag.role == "reader" else "kvbus lag --watch 2s"
        if lag.trouble:
            yield Finding(Level.WARN, who, f"on {lag.stream}: {lag.trouble}", mend)
        elif lag.in_flight is not None and lag.in_flight.attempt > 1:
            evidence = f"begins {lag.in_flight.type} {lag.in_flight.command_id} for the {lag.in_flight.attempt}. time"
            yield Finding(Level.WARN, who, evidence, f"kvbus explain command {lag.in_flight.command_id}")
        elif lag.in_flight is not None and (lag.in_flight.age_ms or 0) > 2 * bus.settings.stuck_ms and lag.alive:
            age = span_text(lag.in_flight.age_ms or 0)
            evidence = f"has {lag.in_flight.type} {lag.in_flight.command_id} in hand for {age}"
            yield Finding(Level.WARN, who, evidence, f"kvbus explain command {lag.in_flight.command_id}")
        elif lag.behind is not None and lag.behind > FAR_BEHIND:
            yield Finding(Level.WARN, who, f"{lag.behind:,} entries behind on {lag.stream}", mend)
        else:
            fine += 1
    if fine:
        yield Finding(Level.OK, "places", f"{fine} of {len(lags)} workers and readers are where they should be")


def ranks(bus: Bus) -> Iterator[Finding]:
    """A rank that is missing leaves a model's KV incomplete: hits are the least that any rank holds."""
    by_instance: dict[str, list[WorkerView]] = defaultdict(list)
    for worker in list_workers(bus):
        if worker.alive:
            by_instance[worker.registration.instance].append(worker)
    for instance, found in by_instance.items():
        size = max(worker.registration.world_size for worker in found)
        missing = sorted(set(range(size)) - {worker.registration.rank for worker in found})
        if missing:
            yield Finding(
                Level.FAIL,
                "ranks",
                f"instance {instance} has {len(found)} of {size} ranks; missing {', '.join(map(str, missing[:8]))}",
                f"Look at the log of {instance}, rank {missing[0]}",
            )
        else:
            yield Finding(Level.OK, "ranks", f"instance {instance}: {size} of {size}")


def protocol(bus: Bus) -> Iterator[Finding]:
    spoken = _by_value(
        [(worker.registration.protocol, worker.name) for worker in list_workers(bus)]
        + [(publisher.protocol, publisher.name) for publisher in list_publishers(bus)]
    )
    if len(spoken) > 1:
        shown = "; ".join(f"version {value}: {_names(names)}" for value, names in spoken.items())
        yield Finding(Level.FAIL, "protocol", f"mixed: {shown}", "Upgrade the older processes: pip install -U kvbus")
    elif spoken:
        yield Finding(Level.OK, "protocol", f"all speak version {next(iter(spoken))}")


def fingerprints(bus: Bus) -> Iterator[Finding]:
    """Different fingerprints in one namespace: hashes of one process can never match those of another."""
    found = _by_value(
        [(worker.registration.hash_fingerprint, worker.name) for worker in list_workers(bus) if worker.alive]
        + [(publisher.hash_fingerprint, publisher.name) for publisher in list_publishers(bus) if publisher.alive]
    )
    silent = found.pop("", [])
    if len(found) > 1:
        shown = "; ".join(f"{value}: {_names(names)}" for value, names in found.items())
        mend = "Set PYTHONHASHSEED=0 for every vLLM process, or KVBUS_HASH_ALGORITHM=blake3, and one chunk size"
        yield Finding(Level.FAIL, "hashes", f"{len(found)} different fingerprints: {shown}", mend)
    elif found:
        yield Finding(Level.OK, "hashes", f"one fingerprint everywhere: {next(iter(found))}")
    if silent:
        yield Finding(
            Level.WARN, "hashes", f"{_names(silent)} do not tell their fingerprint", "Restart them with this kvbus"
        )


def versions(bus: Bus) -> Iterator[Finding]:
    for what, tried in (("lmcache", LMCACHE), ("vllm", VLLM)):
        found = _by_value([(getattr(worker.registration, what), worker.name) for worker in list_workers(bus)])
        found.pop("", None)
        for value, names in found.items():
            if fits(value, tried):
                yield Finding(Level.OK, "versions", f"{what} {value}: {_names(names)}")
            else:
                mend = f"pip install '{what}=={tried[0]}'"
                yield Finding(Level.WARN, "versions", f"{what} {value} was never tried ({_names(names)})", mend)
    own = _by_value([(worker.registration.kvbus, worker.name) for worker in list_workers(bus)])
    own.pop("", None)
    if len(own) > 1:
        shown = "; ".join(f"{value}: {_names(names)}" for value, names in own.items())
        yield Finding(Level.WARN, "versions", f"mixed kvbus versions: {shown}", "pip install -U kvbus, on every host")


def publishers(bus: Bus) -> Iterator[Finding]:
    for publisher in list_publishers(bus):
        who = f"publisher {publisher.name}"
        dropped = publisher.stats.get("events_dropped", 0)
        if not publisher.alive:
            yield Finding(Level.WARN, who, "has no heartbeat", f"Restart {publisher.instance}")
        elif dropped:
            mend = "Set KVBUS_SPOOL_DIR, so that events wait on disk while the bus is away"
            yield Finding(Level.WARN, who, f"{dropped:,.0f} events were dropped", mend)
        else:
            yield Finding(Level.OK, who, f"{publisher.next_seq:,} events in this epoch, none dropped")


def dead_letters(bus: Bus) -> Iterator[Finding]:
    with bus_errors("XLEN"):
        count = int(bus.client.xlen(bus.keys.dead))
    newest = next(list_dead(bus), None) if count else None
    if newest is None:
        yield Finding(Level.OK, "dead letters", "none")
        return
    letter = newest.letter
    evidence = f"{count:,}; the newest at {clock_text(id_ms(newest.entry_id))}: [{letter.code}] {letter.message[:120]}"
    yield Finding(Level.WARN, "dead letters", evidence, f"kvbus dead show {newest.entry_id}")


def _by_value(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for value, name in pairs:
        found[value].append(name)
    return dict(found)


def _names(names: Iterable[str]) -> str:
    known = list(names)
    more = len(known) - SHOWN
    return ", ".join(known[:SHOWN]) + (f" and {more} more" if more > 0 else "")
