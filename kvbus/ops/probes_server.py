"""Probes of the server: can it be reached, may we, and is it set up to keep a bus?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from kvbus.errors import BusError, BusRefused
from kvbus.ops.doctor import Finding, Level
from kvbus.ops.when import span_text
from kvbus.settings import redact_url
from kvbus.streams.connection import Bus, bus_errors
from kvbus.streams.log import stream_state
from kvbus.streams.position import id_key

OLDEST = (7, 0)
CLOCK_WARN_MS = 2_000
SLOW_MS = 250
FUTURE_MS = 60_000
MIB = 1024 * 1024


def reachable(bus: Bus) -> Iterator[Finding]:
    took = float("inf")
    for _ in range(2):  # the first pays for the connection
        began = time.monotonic()
        with bus_errors("PING"):
            bus.client.ping()
        took = min(took, (time.monotonic() - began) * 1000)
    bus.check_role(bus.client)
    where = redact_url(bus.settings.redis_url)
    if took > SLOW_MS:
        yield Finding(
            Level.WARN, "reachable", f"{where} answers in {took:.0f} ms", "Look at the network and `SLOWLOG GET`"
        )
    else:
        yield Finding(Level.OK, "reachable", f"{where} answers in {took:.1f} ms")


def rights(bus: Bus) -> Iterator[Finding]:
    """May this user do what publishers, workers and clients do? The commands are queued in a MULTI and discarded."""
    keys, name = bus.keys, "doctor"
    wanted: list[tuple[Any, ...]] = [
        *(("XADD", key, "NOMKSTREAM", "*", "v", "1") for key in keys.streams.values()),
        ("XRANGE", keys.commands, "-", "+", "COUNT", 1),
        ("XREVRANGE", keys.results, "+", "-", "COUNT", 1),
        ("XREAD", "COUNT", 1, "STREAMS", keys.commands, "0-0"),
        ("XINFO", "STREAM", keys.commands),
        ("HGETALL", keys.workers),
        ("HSET", keys.worker(name), "x", "1"),
        ("HSET", keys.reader(name), "x", "1"),
        ("SET", keys.live(name), "1", "PX", 1),
        ("MGET", keys.live(name)),
        ("ZADD", keys.dead_seen, "NX", 1, "x"),
        ("PEXPIRE", keys.worker(name), 1),
        ("EVALSHA", "0" * 40, 1, keys.workers),
        ("TIME",),
    ]
    if not hasattr(bus.client, "client"):
        yield Finding(Level.SKIP, "rights", "not looked at on a cluster")
        return
    refused: list[str] = []
    with bus_errors("look at the rights"):
        alone = bus.client.client()
        try:
            for parts in (("MULTI",), *wanted, ("DISCARD",)):
                # Below redis-py's commands, whose parsers do not expect the answer QUEUED.
                alone.connection.send_command(*parts)
                try:
                    with bus_errors(str(parts[0])):
                        alone.connection.read_response()
                except BusRefused as error:
                    refused.append(f"{' '.join(map(str, parts[:2]))} ({error.message})"[:200])
        finally:
            alone.close()
    if refused:
        yield Finding(
            Level.FAIL,
            "rights",
            f"{len(refused)} of {len(wanted)} are refused: {refused[0]}",
            f"ACL SETUSER <user> '~{keys.prefix}*' +@read +@write +@scripting +multi +exec +time +info +role",
        )
    else:
        yield Finding(Level.OK, "rights", f"all {len(wanted)} commands that the bus needs are allowed")


def version(bus: Bus) -> Iterator[Finding]:
    info = _info(bus, "server")
    name = str(info.get("server_name", "redis"))
    text = str(info.get(f"{name}_version", info.get("redis_version", "?")))
    parts = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    if parts and parts < OLDEST:
        yield Finding(Level.FAIL, "server", f"{name} {text}", "Upgrade to Redis 7.0 or newer, or to Valkey")
    else:
        mode = info.get("redis_mode") or info.get("server_mode") or "standalone"
        yield Finding(
            Level.OK, "server", f"{name} {text}, {mode}, up for {span_text(_number(info, 'uptime_in_seconds') * 1000)}"
        )


def eviction(bus: Bus) -> Iterator[Finding]:
    info = _info(bus, "memory")
    policy = str(info.get("maxmemory_policy", "unknown"))
    if policy == "noeviction":
        yield Finding(Level.OK, "eviction", "maxmemory-policy is noeviction")
    elif policy == "unknown":
        yield Finding(Level.SKIP, "eviction", "the server does not tell its maxmemory-policy")
    else:
        limited = _number(info, "maxmemory") > 0
        level = Level.FAIL if limited else Level.WARN
        evidence = f"maxmemory-policy is {policy}: whole streams can be evicted"
        yield Finding(level, "eviction", evidence, "CONFIG SET maxmemory-policy noeviction")


def memory(bus: Bus) -> Iterator[Finding]:
    info, settings = _info(bus, "memory"), bus.settings
    used, limit = _number(info, "used_memory"), _number(info, "maxmemory")
    caps = sum(getattr(settings, f"{name}_cap_bytes") for name in bus.keys.streams)
    shown = f"{used / MIB:,.0f} MiB used"
    if limit == 0:
        yield Finding(Level.OK, "memory", f"{shown}, no limit; the streams may grow to {caps / MIB:,.0f} MiB")
    elif used > 0.9 * limit:
        yield Finding(
            Level.FAIL,
            "memory",
            f"{shown} of {limit / MIB:,.0f} MiB: writes are refused soon",
            f"CONFIG SET maxmemory {limit * 2}",
        )
    elif caps > limit:
        yield Finding(
            Level.WARN,
            "memory",
            f"the streams may grow to {caps / MIB:,.0f} MiB, maxmemory is {limit / MIB:,.0f} MiB",
            "Lower KVBUS_EVENTS_CAP_BYTES, or raise maxmemory",
        )
    else:
        yield Finding(
            Level.OK, "memory", f"{shown} of {limit / MIB:,.0f} MiB; the streams may grow to {caps / MIB:,.0f}"
        )


def persistence(bus: Bus) -> Iterator[Finding]:
    info = _info(bus, "persistence")
    aof = _number(info, "aof_enabled") == 1
    for field, what in (("aof_last_write_status", "append-only file"), ("rdb_last_bgsave_status", "snapshot")):
        if str(info.get(field, "ok")) != "ok":
            yield Finding(
                Level.FAIL, "persistence", f"the last write of the {what} failed", "Look at the server's log and disk"
            )
            return
    if aof:
        yield Finding(Level.OK, "persistence", "append-only file is on")
    else:
        yield Finding(
            Level.WARN,
            "persistence",
            "no append-only file: a restart of the server loses the streams and every place in them",
            "CONFIG SET appendonly yes",
        )


def timeouts(bus: Bus) -> Iterator[Finding]:
    settings = bus.settings
    with bus_errors("CONFIG GET timeout"):
        found = bus.client.config_get("timeout")
    idle_s = int(found.get("timeout", 0) or 0)
    block_s = settings.block_ms / 1000
    if 0 < idle_s <= block_s:
        yield Finding(
            Level.FAIL,
            "timeouts",
            f"the server ends idle connections after {idle_s} s, reads wait {block_s:g} s",
            "CONFIG SET timeout 0",
        )
        return
    info = _info(bus, "clients")
    connected, most = _number(info, "connected_clients"), _number(info, "maxclients")
    if most and connected > 0.8 * most:
        yield Finding(
            Level.WARN, "timeouts", f"{connected} of {most} connections are taken", f"CONFIG SET maxclients {most * 2}"
        )
        return
    idle = f"after {idle_s} s" if idle_s else "never"
    yield Finding(
        Level.OK,
        "timeouts",
        f"a read waits {block_s:g} s, a reply {settings.reply_timeout_ms / 1000:g} s; idle connections end {idle}; "
        f"{connected} connections",
    )


def clock(bus: Bus) -> Iterator[Finding]:
    offset = bus.server_time_ms() - time.time() * 1000
    shown = f"this machine's clock differs from the server's by {span_text(abs(offset))}"
    if abs(offset) > CLOCK_WARN_MS:
        mend = "Let both follow NTP; deadlines are safe, they go by the server's clock alone"
        yield Finding(Level.WARN, "clock", shown, mend)
    else:
        yield Finding(Level.OK, "clock", shown)


def streams(bus: Bus) -> Iterator[Finding]:
    now_ms = bus.now_ms()
    for name, key in bus.keys.streams.items():
        with bus_errors(f"TYPE {key}"):
            kind = bus.client.type(key)
        kind = kind.decode() if isinstance(kind, bytes) else str(kind)
        probe = f"stream {name}"
        if kind not in ("stream", "none"):
            yield Finding(Level.FAIL, probe, f"{key} holds a {kind}, not a stream", f"DEL '{key}'")
            continue
        state = stream_state(bus.client, key)
        ahead = id_key(state.last_id)[0] - now_ms
        if ahead > FUTURE_MS:
            # Every later automatic id is pinned behind it; at the highest id nothing can be added any more.
            full = id_key(state.last_id)[0] >= 2**64 - 1
            evidence = f"its last id {state.last_id} " + (
                "is the highest there is: nothing can be added"
                if full
                else "lies in the future: its times mean nothing"
            )
            mend = f"DEL '{key}' (what it holds is lost), and find who writes such ids"
            yield Finding(Level.FAIL if full else Level.WARN, probe, evidence, mend)
            continue
        cap = getattr(bus.settings, f"{name}_cap_bytes")
        size = _memory_usage(bus, key)
        shown = f"{state.length:,} entries" + (
            f", {size / MIB:,.1f} of {cap / MIB:,.0f} MiB" if size is not None else ""
        )
        if size is not None and size > 1.5 * cap:
            variable = f"KVBUS_{name.upper()}_CAP_BYTES"
            mend = f"Give every writer the same {variable}, or `kvbus trim {name} --keep {state.length // 2}`"
            yield Finding(Level.WARN, probe, f"{shown}: beyond its cap", mend)
        else:
            yield Finding(Level.OK, probe, shown + (f"; {state.removed:,} were trimmed" if state.removed else ""))


def _memory_usage(bus: Bus, key: str) -> int | None:
    try:
        with bus_errors(f"MEMORY USAGE {key}"):
            used = bus.client.memory_usage(key)
    except BusError:
        return None  # not allowed, or no such command: the size is only a remark
    return None if used is None else int(used)


def _info(bus: Bus, section: str) -> dict[str, Any]:
    with bus_errors(f"INFO {section}"):
        found: dict[str, Any] = bus.client.info(section)
    nodes = [value for value in found.values() if isinstance(value, dict)]
    return nodes[0] if nodes and len(nodes) == len(found) else found  # a cluster answers node by node


def _number(info: dict[str, Any], name: str) -> int:
    value = info.get(name, 0)
    return int(value) if isinstance(value, int | float) else 0
