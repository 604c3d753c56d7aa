"""A worker's checkpoint: who owns the name, how far it has come, and what it has in hand. Three fenced scripts.

Plain MULTI is not enough: a lost reply and a late EXEC would give two results, a failing XADD inside MULTI would
still move the cursor, and a paused predecessor would overwrite its successor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from kvbus.errors import BusRefused, Fenced, HistoryLost
from kvbus.protocol.limits import PROTOCOL_VERSION
from kvbus.streams.connection import Bus, Script, bus_errors
from kvbus.streams.line import Line
from kvbus.streams.position import Position

KEEP_MS = 7 * 24 * 3600 * 1000
"""A checkpoint that nobody renews is forgotten after 7 days."""
MAX_PENDING = 256
KEEP_DEAD_SEEN = 10_000


class Pending(msgspec.Struct, frozen=True, array_like=True):
    """A command that was taken and not finished."""

    entry_id: str
    message_id: str
    type: str
    lookup_id: str | None = None


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's state on the server.

    attempts: entry id to how often it was begun, for those in hand after an unclean stop. suspect_to: entries behind
    the cursor up to this id may have been begun in a life that put no attempts on record; "" if there are none.
    """

    owner: str
    rev: int
    epoch: int
    position: Position
    pending: tuple[Pending, ...] = ()
    attempts: dict[str, int] = {}
    suspect_to: str = ""
    clean: bool = False
    """The life before this one ended in good order."""
    created: bool = False
    """There was no checkpoint before, and nothing has been committed since."""
    brought_back: bool = False
    """It is from before this life: the server has lost all that this life committed."""
    known: bool = False
    """The name was registered before, and not given back."""


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that a commit writes. refuse_once: for a dead letter, what names the refused entry."""

    stream: str
    type: str
    message_id: str
    body: bytes
    maxlen: int = 0
    refuse_once: str = ""


class Taken(msgspec.Struct, frozen=True):
    """The name belongs to a living process. lapses_in_ms: until its heartbeat lapses if it has died.

    epoch: of the checkpoint's owner, 0 where there is no checkpoint.
    """

    lapses_in_ms: int
    epoch: int = 0


class CommitAnswer(StrEnum):
    OK = "OK"
    ALREADY = "ALREADY"
    """This very commit had been applied before; its reply was lost."""


# What was found is told again until the first commit, so that a lost reply changes nothing: `fresh` is 1 for a new
# checkpoint, 2 for one that should have been there, 3 for one from before this life, which a failover brought back;
# and `clean` still speaks of the life before.
_REGISTER = Script(
    """
local live, worker, workers = KEYS[1], KEYS[2], KEYS[3]
local name, owner, live_ms, keep_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local holder = redis.call('GET', live)
if holder and holder ~= owner then
  return {'TAKEN', redis.call('PTTL', live), redis.call('HGET', worker, 'epoch') or '0'}
end
redis.call('SET', live, owner, 'PX', live_ms)
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local known = redis.call('HEXISTS', workers, name)
if redis.call('EXISTS', worker) == 0 then
  redis.call('HSET', worker, 'rev', ARGV[9], 'cursor', ARGV[5], 'at', ARGV[6], 'entries', ARGV[7], 'pending', '',
    'attempts', '', 'suspect_to', '', 'clean', '0', 'epoch', '0', 'fresh', known == 1 and '2' or '1')
end
local epoch = redis.call('HGET', worker, 'epoch')
if redis.call('HGET', worker, 'owner') ~= owner then
  epoch = tonumber(epoch)
  if tonumber(ARGV[10]) > epoch then
    if epoch > 0 then redis.call('HSET', worker, 'fresh', '3') end
    epoch = tonumber(ARGV[10])
  else
    epoch = math.max(now, epoch + 1)
  end
end
redis.call('HSET', worker, 'owner', owner, 'epoch', string.format('%d', epoch))
redis.call('PEXPIRE', worker, keep_ms)
local text = string.gsub(ARGV[8], '"epoch":0', '"epoch":' .. string.format('%d', epoch), 1)
redis.call('HSET', workers, name, text)
local fresh = redis.call('HGET', worker, 'fresh')
local created = (fresh == '1' or fresh == '2') and 1 or 0
if created == 1 then known = fresh == '2' and 1 or 0 end
local was = redis.call('HMGET', worker, 'rev', 'cursor', 'at', 'entries', 'pending', 'attempts', 'suspect_to',
  'clean')
return {'OK', created, known, string.format('%d', epoch), string.format('%d', now), was[1], was[2], was[3], was[4],
  was[5], was[6], was[7], was[8], fresh == '3' and 1 or 0}
""",
    allow_oom=True,
)

# An owner with a lower epoch than ours did not supersede us: a failover that lost its tail took our registration back.
_RENEW = Script(
    """
local live, worker = KEYS[1], KEYS[2]
local was = redis.call('HMGET', worker, 'owner', 'epoch', 'rev')
if not was[1] then return {'UNKNOWN'} end
if was[1] ~= ARGV[1] then
  if tonumber(was[2]) < tonumber(ARGV[4]) then return {'UNKNOWN'} end
  return {'FENCED', was[1]}
end
local holder = redis.call('GET', live)
if holder and holder ~= ARGV[1] then return {'FENCED', holder} end
if tonumber(was[3]) < tonumber(ARGV[5]) then return {'STALE', was[3]} end
redis.call('SET', live, ARGV[1], 'PX', ARGV[2])
redis.call('PEXPIRE', worker, ARGV[3])
local t = redis.call('TIME')
return {'OK', string.format('%d', t[1] * 1000 + math.floor(t[2] / 1000))}
""",
    allow_oom=True,
)

# The checkpoint's time to live is the heartbeat's business, once a second is enough.
# A revision beyond ours: a registration of ours that arrived late took the name back from a successor. Its work counts.
# Results are written first: if that fails, nothing has happened. A dead letter or an event that cannot be written
# must not hold up results for ever, so that failure is counted and answered, not raised.
_COMMIT = Script(
    """
local worker = KEYS[1]
local was = redis.call('HMGET', worker, 'owner', 'epoch', 'rev')
local owner, rev = was[1], was[3]
if not owner then return {'UNKNOWN'} end
if owner ~= ARGV[1] then
  if tonumber(was[2]) < tonumber(ARGV[12]) then return {'UNKNOWN'} end
  return {'FENCED', owner}
end
if rev == ARGV[3] then return {'ALREADY'} end
if tonumber(rev) > tonumber(ARGV[2]) then return {'FENCED', 'revision ' .. rev} end
if rev ~= ARGV[2] then return {'STALE', rev} end
local failed = ''
for i = 14, #ARGV, 6 do
  local key, maxlen, once = KEYS[tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 2]
  local fresh = true
  if once ~= '' then
    fresh = redis.call('ZADD', KEYS[5], 'NX', ARGV[11], once) == 1
    redis.call('ZREMRANGEBYRANK', KEYS[5], 0, -KEEP_DEAD_SEEN - 1)
    redis.call('PEXPIRE', KEYS[5], ARGV[10])
  end
  if fresh then
    local call, answer = key == KEYS[2] and redis.call or redis.pcall, nil
    if maxlen == '0' then
      answer = call('XADD', key, '*', 'v', 'VERSION', 'type', ARGV[i + 3], 'id', ARGV[i + 4], 'body', ARGV[i + 5])
    else
      answer = call('XADD', key, 'MAXLEN', '~', maxlen, '*',
        'v', 'VERSION', 'type', ARGV[i + 3], 'id', ARGV[i + 4], 'body', ARGV[i + 5])
    end
    if type(answer) == 'table' and answer.err then failed = failed .. key .. ': ' .. tostring(answer.err) .. '; ' end
  end
end
redis.call('HSET', worker, 'rev', ARGV[3], 'cursor', ARGV[4], 'at', ARGV[5], 'entries', ARGV[6], 'pending', ARGV[7],
  'attempts', ARGV[8], 'suspect_to', ARGV[13], 'clean', ARGV[9], 'fresh', '0')
return {'OK', failed}
""".replace("VERSION", PROTOCOL_VERSION).replace("KEEP_DEAD_SEEN", str(KEEP_DEAD_SEEN)),
    allow_oom=True,
)

_RETIRE = Script(
    """
if redis.call('HGET', KEYS[2], 'owner') ~= ARGV[1] then return 0 end
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[2], 'clean', '1')
redis.call('HDEL', KEYS[3], ARGV[2])
return 1
""",
    allow_oom=True,
)

_pending_encoder = msgspec.msgpack.Encoder()
_pending_decoder = msgspec.msgpack.Decoder(tuple[Pending, ...])
_attempts_decoder = msgspec.json.Decoder(dict[str, int])


def register(
    bus: Bus, name: str, owner: str, *, start: Position, registration: bytes, rev: int = 0, epoch: int = 0
) -> Checkpoint | Taken:
    """Take the name unless a living process has it. `start` and `rev` count only where there is no checkpoint.

    registration: JSON for the `workers` hash, with `"epoch":0`, which is filled in. rev: above all revisions that
    this life has used, so that none of its steps still on the way can fit; epoch: of this life, if it has one
    already. Asking again with the same owner does no harm. Raises BusError.
    """
    keys, settings = bus.keys, bus.settings
    sent = time.monotonic()
    with bus_errors(f"register {name}"):
        answer = _REGISTER.run(
            bus.client,
            [keys.live(name), keys.worker(name), keys.workers],
            [
                *(name, owner, settings.live_ms, KEEP_MS, start.cursor, start.at, start.entries),
                *(registration, rev, epoch),
            ],
        )
    if answer[0] == b"TAKEN":
        return Taken(int(answer[1]), int(answer[2]))
    _, created, known, epoch, now_ms, rev, cursor, at, entries, pending, attempts, suspect_to, clean, brought_back = (
        answer
    )
    bus.clock.set(int(now_ms), sent, time.monotonic())
    return Checkpoint(
        owner=owner,
        rev=int(rev),
        epoch=int(epoch),
        position=Position(cursor.decode(), at.decode(), int(entries)),
        pending=_pending_decoder.decode(pending) if pending else (),
        attempts=_attempts_decoder.decode(attempts) if attempts else {},
        suspect_to=suspect_to.decode(),
        clean=clean == b"1",
        created=created == 1,
        brought_back=brought_back == 1,
        known=known == 1,
    )


def renew(bus: Bus, name: str, owner: str, *, epoch: int = 0, rev: int = 0) -> None:
    """The heartbeat; also sets the bus's clock. Raises Fenced, HistoryLost or BusError.

    epoch: this life's; rev: the last that the server has acknowledged. Where it holds less, it has lost history.
    """
    keys = bus.keys
    args: list[str | bytes | int] = [owner, bus.settings.live_ms, KEEP_MS, epoch, rev]
    sent = time.monotonic()
    with bus_errors(f"renew {name}"):
        answer = _RENEW.run(bus.client, [keys.live(name), keys.worker(name)], args)
    _check(answer, name)
    bus.clock.set(int(answer[1]), sent, time.monotonic())


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a worker. It is sent, unchanged, until the server has answered."""

    name: str
    owner: str
    epoch: int = 0
    old_rev: int
    new_rev: int
    position: Position
    pending: tuple[Pending, ...] = ()
    attempts: dict[str, int] = {}
    suspect_to: str = ""
    appends: tuple[Append, ...] = ()
    clean: bool = False

    def arguments(self, bus: Bus) -> tuple[list[str], list[str | bytes | int]]:
        """The script's keys and arguments."""
        keys = bus.keys
        names = [keys.worker(self.name), keys.results, keys.events, keys.dead, keys.dead_seen]
        args: list[str | bytes | int] = [
            self.owner,
            self.old_rev,
            self.new_rev,
            self.position.cursor,
            self.position.at,
            self.position.entries,
            _pending_encoder.encode(self.pending) if self.pending else b"",
            msgspec.json.encode(self.attempts) if self.attempts else b"",
            int(self.clean),
            KEEP_MS,
            bus.clock.now_ms(),
            self.epoch,
            self.suspect_to,
        ]
        for append in self.appends:
            place = names.index(append.stream) + 1
            args += [place, append.maxlen, append.refuse_once, append.type, append.message_id, append.body]
        return names, args


def commit(bus: Bus, step: Commit, line: Line | None = None) -> tuple[CommitAnswer, str]:
    """Write results, then move the checkpoint, or do nothing at all. line: a connection that the caller holds.

    Returns the answer, and what could not be written to `events` or `dead` ("" as a rule). Raises Fenced,
    HistoryLost or BusError; after BusUnavailable the same step must be sent again.
    """
    names, args = step.arguments(bus)
    with bus_errors(f"commit {step.name}"):
        answer = _COMMIT.run(bus.client, names, args) if line is None else _COMMIT.run_on(line, names, args)
    return check_commit(answer, step.name)


def check_commit(answer: Sequence[bytes], name: str) -> tuple[CommitAnswer, str]:
    """The script's answer, or the error that it stands for."""
    _check(answer, name)
    return CommitAnswer(answer[0].decode()), answer[1].decode() if len(answer) > 1 else ""


def retire(bus: Bus, name: str, owner: str) -> bool:
    """Give the name back after a clean stop: it owes no more results. False if it was not ours. Raises BusError."""
    keys = bus.keys
    with bus_errors(f"retire {name}"):
        return bool(_RETIRE.run(bus.client, [keys.live(name), keys.worker(name), keys.workers], [owner, name]))


def read_checkpoint(bus: Bus, name: str) -> Checkpoint | None:
    """A worker's state as it stands, changing nothing: for those who look on. Raises BusError."""
    with bus_errors(f"read the checkpoint of {name}"):
        raw: dict[bytes, bytes] = bus.client.hgetall(bus.keys.worker(name))
    if not raw:
        return None
    try:
        pending, attempts = raw.get(b"pending"), raw.get(b"attempts")
        return Checkpoint(
            owner=raw[b"owner"].decode(),
            rev=int(raw[b"rev"]),
            epoch=int(raw[b"epoch"]),
            position=Position(raw[b"cursor"].decode(), raw[b"at"].decode(), int(raw[b"entries"])),
            pending=_pending_decoder.decode(pending) if pending else (),
            attempts=_attempts_decoder.decode(attempts) if attempts else {},
            clean=raw.get(b"clean") == b"1",
        )
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise BusRefused(f"the checkpoint of worker {name} cannot be read: {error!r}") from None


def _check(answer: Sequence[bytes], name: str) -> None:
    if answer[0] in (b"OK", b"ALREADY"):
        return
    if answer[0] == b"UNKNOWN":
        raise HistoryLost(f"the server does not know this life of worker {name} any more")
    if answer[0] == b"STALE":
        raise HistoryLost(f"the server holds revision {answer[1].decode()} of worker {name}, not the one last written")
    if answer[0] == b"FENCED":
        raise Fenced(f"worker {name} was taken over by another process ({answer[1].decode()[:12]})")
    raise BusRefused(f"worker {name}: unexpected answer {answer[0]!r}")
