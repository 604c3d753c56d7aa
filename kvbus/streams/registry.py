"""Who is there: registrations, heartbeats, counters, and the places of named readers."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping

import msgspec

from kvbus.errors import BusRefused, Fenced
from kvbus.protocol.limits import PROTOCOL_VERSION
from kvbus.streams.checkpoint import KEEP_MS
from kvbus.streams.connection import Bus, Script, bus_errors
from kvbus.streams.position import Position

_log = logging.getLogger(__name__)


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker or a publisher tells of itself (JSON in the `workers` and `publishers` hashes)."""

    instance: str
    rank: int = 0
    world_size: int = 1
    model: str = ""
    chunk_size: int = 0
    hash_fingerprint: str = ""
    tiers: tuple[str, ...] = ()
    stores: bool = True
    """False on a rank that holds no KV of its own (MLA): it answers not_applicable."""
    protocol: str = PROTOCOL_VERSION
    kvbus: str = ""
    lmcache: str = ""
    vllm: str = ""
    host: str = ""
    pid: int = 0
    epoch: int = 0
    started_at_ms: int = 0
    stuck: bool = False
    """An engine call has not returned for long: this worker answers nothing until it does."""


class Member(msgspec.Struct, frozen=True):
    """One registered process. alive: its heartbeat has not lapsed."""

    name: str
    registration: Registration
    alive: bool


class Reader(msgspec.Struct, frozen=True):
    """A named reader's saved place."""

    name: str
    stream: str
    position: Position
    updated_at_ms: int = 0
    extra: bytes = b""
    """What else the reader wants back with its place."""


_registration_decoder = msgspec.json.Decoder(Registration)


def encode_registration(registration: Registration) -> bytes:
    return msgspec.json.encode(registration)


_UPDATE = Script(
    """
if redis.call('HGET', KEYS[2], 'owner') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
""",
    allow_oom=True,
)


def update_registration(bus: Bus, name: str, owner: str, registration: Registration) -> bool:
    """Change what a living worker tells of itself; False, with nothing written, once the name is another's.

    owner: the token of this process's life. Raises BusError.
    """
    with bus_errors(f"update the registration of {name}"):
        written = _UPDATE.run(
            bus.client, [bus.keys.workers, bus.keys.worker(name)], [name, owner, encode_registration(registration)]
        )
    return bool(written)


def decode_registration(name: str, raw: bytes) -> Registration:
    """Raises BusRefused when the hash holds something else."""
    try:
        return _registration_decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise BusRefused(f"registration of {name} cannot be read: {error}") from None


class Membership:
    """Reads who is registered and alive; what it has decoded once it does not decode again. Safe for threads."""

    def __init__(self, bus: Bus, key: str | None = None) -> None:
        self._bus = bus
        self._key = key or bus.keys.workers
        self._decoded: dict[bytes, tuple[bytes, Registration]] = {}

    def read(self) -> tuple[Member, ...]:
        """Raises BusError."""
        with bus_errors("read the registrations"):
            raw: Mapping[bytes, bytes] = self._bus.client.hgetall(self._key)
        return self.members(raw)

    def members(self, raw: Mapping[bytes, bytes], alive: Mapping[str, bool] | None = None) -> tuple[Member, ...]:
        """Members from the hash's content. alive: what is known already; the rest is asked. Raises BusError."""
        registrations = {
            name.decode("utf-8", "backslashreplace"): self._decode(name, value) for name, value in sorted(raw.items())
        }
        if len(self._decoded) > 2 * len(raw) + 64:  # names come and go
            self._decoded = {name: self._decoded[name] for name in raw if name in self._decoded}
        known = dict(alive or {})
        unknown = [name for name in registrations if name not in known]
        if unknown:
            known.update(self.alive(unknown))
        return tuple(Member(name, registration, known[name]) for name, registration in registrations.items())

    def alive(self, names: list[str]) -> dict[str, bool]:
        """Whose heartbeat has not lapsed. Raises BusError."""
        with bus_errors("read the heartbeats"):
            found = self._bus.client.mget([self._bus.keys.live(name) for name in names])
        return {name: value is not None for name, value in zip(names, found, strict=True)}

    def _decode(self, name: bytes, raw: bytes) -> Registration:
        cached = self._decoded.get(name)
        if cached is None or cached[0] != raw:
            text = name.decode("utf-8", "backslashreplace")
            try:
                registration = decode_registration(text, raw)
            except BusRefused as error:
                # Another version's, or a stranger's. Whoever it is owes results all the same, and the others go on.
                _log.warning("%s; only its name is known", error.message)
                registration = Registration(instance=text.rpartition("/")[0] or text)
            cached = self._decoded[name] = (raw, registration)
        return cached[1]


def prune(bus: Bus) -> list[str]:
    """Forget registrations whose checkpoint and heartbeat are both gone (7 days without a renewal). Raises BusError."""
    keys = bus.keys
    gone: list[str] = []
    with bus_errors("prune the registrations"):
        for raw in bus.client.hkeys(keys.workers):
            name = raw.decode()
            # One key a call: a cluster client takes several only through MGET.
            if not bus.client.exists(keys.worker(name)) and not bus.client.exists(keys.live(name)):
                bus.client.hdel(keys.workers, name)
                gone.append(name)
    return gone


_REGISTER_PUBLISHER = Script(
    """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local floor = 0
local old = redis.call('HGET', KEYS[1], ARGV[1])
if old then
  local ok, was = pcall(cjson.decode, old)
  if ok and type(was) == 'table' and tonumber(was.epoch) then floor = tonumber(was.epoch) + 1 end
end
local epoch = math.max(floor, tonumber(ARGV[3]))
redis.call('HSET', KEYS[1], ARGV[1], (string.gsub(ARGV[2], '"epoch":0', '"epoch":' .. string.format('%d', epoch), 1)))
return {string.format('%d', epoch), string.format('%d', now)}
"""
)


class PublisherRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """What a publisher tells of itself. next_seq: the number that its next event will carry."""

    epoch: int = 0
    instance: str
    next_seq: int = 0
    model: str = ""
    hash_fingerprint: str = ""
    protocol: str = PROTOCOL_VERSION
    host: str = ""
    pid: int = 0


def register_publisher(bus: Bus, name: str, registration: PublisherRegistration, *, least_epoch: int) -> int:
    """Begin a publisher's life and return its epoch: above all earlier ones of that name, least_epoch at least.

    registration.epoch must be 0: the script fills it in. Raises BusError.
    """
    assert registration.epoch == 0
    with bus_errors(f"register publisher {name}"):
        answer = _REGISTER_PUBLISHER.run(
            bus.client, [bus.keys.publishers], [name, msgspec.json.encode(registration), least_epoch]
        )
    return int(answer[0])


_BEAT_PUBLISHER = Script(
    """
local t = redis.call('TIME')
local now = string.format('%d', t[1] * 1000 + math.floor(t[2] / 1000))
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[2] then return {'TAKEN', now, holder} end
if ARGV[5] ~= '' then
  local old = redis.call('HGET', KEYS[2], ARGV[1])
  if old then
    local ok, was = pcall(cjson.decode, old)
    local epoch = ok and type(was) == 'table' and tonumber(was.epoch)
    if epoch and epoch > tonumber(ARGV[4]) then return {'SUPERSEDED', now, string.format('%d', epoch)} end
  end
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[5])
end
if ARGV[3] == '0' then redis.call('DEL', KEYS[1]) else redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) end
return {'OK', now}
""",
    allow_oom=True,
)


def beat_publisher(
    bus: Bus, name: str, owner: str, registration: PublisherRegistration | None, *, last: bool = False
) -> None:
    """Renew a publisher's heartbeat, its registration and this process's clock; one round trip.

    owner: the token of this process's life. registration: None only takes the name, before there is an epoch.
    last: give the name back. Raises Fenced, with nothing written, while another living process has the name or when
    a later one has registered; BusError.
    """
    epoch, encoded = (registration.epoch, msgspec.json.encode(registration)) if registration else (0, b"")
    sent = time.monotonic()
    with bus_errors(f"heartbeat of publisher {name}"):
        answer = _BEAT_PUBLISHER.run(
            bus.client,
            [bus.keys.live(name), bus.keys.publishers],
            [name, owner, 0 if last else bus.settings.live_ms, epoch, encoded],
        )
    bus.clock.set(int(answer[1]), sent, time.monotonic())
    if answer[0] == b"TAKEN":
        raise Fenced(
            f"publisher name {name!r} belongs to another living process",
            hint="Give every publisher its own instance; after a crash the name is free once its heartbeat lapses.",
        )
    if answer[0] == b"SUPERSEDED":
        raise Fenced(f"publisher {name!r}: epoch {answer[2].decode()} was registered after this process's {epoch}")


def registered_epoch(bus: Bus, name: str) -> int:
    """The epoch last registered under a publisher's name; 0 for none, or an unreadable one. Raises BusError."""
    with bus_errors(f"read publisher {name}"):
        raw: bytes | None = bus.client.hget(bus.keys.publishers, name)
    try:
        return msgspec.json.decode(raw, type=PublisherRegistration).epoch if raw is not None else 0
    except msgspec.MsgspecError:
        return 0


def read_publishers(bus: Bus) -> dict[str, PublisherRegistration]:
    """Raises BusError."""
    with bus_errors("read the publishers"):
        raw: Mapping[bytes, bytes] = bus.client.hgetall(bus.keys.publishers)
    found = {}
    for name, value in sorted(raw.items()):
        try:
            found[name.decode()] = msgspec.json.decode(value, type=PublisherRegistration)
        except msgspec.MsgspecError as error:
            raise BusRefused(f"registration of publisher {name.decode()} cannot be read: {error}") from None
    return found


def write_publisher(bus: Bus, name: str, registration: PublisherRegistration) -> None:
    """Renew a registration, its next_seq above all. Raises BusError."""
    with bus_errors(f"renew publisher {name}"):
        bus.client.hset(bus.keys.publishers, name, msgspec.json.encode(registration))


def write_stats(bus: Bus, name: str, counters: Mapping[str, int | float]) -> None:
    """Counters for /metrics; they lapse when they are not renewed. Raises BusError."""
    with bus_errors(f"write the counters of {name}"):
        bus.client.set(bus.keys.stats(name), msgspec.json.encode(dict(counters)), px=4 * bus.settings.stats_ms)


def read_stats(bus: Bus, names: list[str]) -> dict[str, dict[str, float]]:
    """Counters of the named processes, where they have written any that can be read. Raises BusError."""
    if not names:
        return {}
    with bus_errors("read the counters"):
        raw = bus.client.mget([bus.keys.stats(name) for name in names])
    found = {}
    for name, value in zip(names, raw, strict=True):
        # What a stranger wrote there must not take the others' counters along.
        with contextlib.suppress(msgspec.MsgspecError):
            if value is not None:
                found[name] = msgspec.json.decode(value, type=dict[str, float])
    return found


def save_reader(bus: Bus, name: str, stream: str, position: Position, *, extra: bytes = b"") -> None:
    """Keep a named reader's place for 7 days after its last use. Raises BusError."""
    key = bus.keys.reader(name)
    values: dict[str, str | int | bytes] = {
        "stream": stream,
        "cursor": position.cursor,
        "at": position.at,
        "entries": position.entries,
        "updated_at_ms": bus.clock.now_ms(),
        "extra": extra,
    }
    with bus_errors(f"save reader {name}"):
        pipe = bus.client.pipeline(transaction=True)
        pipe.hset(key, mapping=values)
        pipe.pexpire(key, KEEP_MS)
        pipe.execute()


def load_reader(bus: Bus, name: str) -> Reader | None:
    """Raises BusError."""
    with bus_errors(f"load reader {name}"):
        raw: Mapping[bytes, bytes] = bus.client.hgetall(bus.keys.reader(name))
    if not raw:
        return None
    try:
        return Reader(
            name=name,
            stream=raw.get(b"stream", b"").decode(),
            position=Position(raw[b"cursor"].decode(), raw.get(b"at", b"").decode(), int(raw.get(b"entries", b"0"))),
            updated_at_ms=int(raw.get(b"updated_at_ms", b"0")),
            extra=raw.get(b"extra", b""),
        )
    except (KeyError, ValueError) as error:
        raise BusRefused(f"reader {name}: its saved place cannot be read: {error!r}") from None


def list_readers(bus: Bus) -> list[Reader]:
    """All named readers, by a bounded-step SCAN. Raises BusError."""
    prefix = bus.keys.prefix + "reader:"
    names: set[str] = set()
    pattern = "".join(f"[{c}]" if c in "[]*?" else c for c in prefix) + "*"
    with bus_errors("list the readers"):
        for key in bus.client.scan_iter(match=pattern, count=500):
            names.add(key.decode().removeprefix(prefix))
    readers = (load_reader(bus, name) for name in sorted(names))
    return [reader for reader in readers if reader is not None]


def forget_reader(bus: Bus, name: str) -> bool:
    """Raises BusError."""
    with bus_errors(f"forget reader {name}"):
        return bool(bus.client.delete(bus.keys.reader(name)))
