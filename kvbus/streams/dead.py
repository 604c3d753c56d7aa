"""Setting an entry aside that a reader cannot take: one dead letter, however many readers refuse it."""

from __future__ import annotations

from kvbus.errors import KVBusError
from kvbus.protocol.codec import Fields, entry_fields
from kvbus.protocol.dead import DeadLetter
from kvbus.streams.checkpoint import KEEP_DEAD_SEEN, KEEP_MS
from kvbus.streams.connection import Bus, Script, bus_errors
from kvbus.streams.log import Log
from kvbus.streams.notices import dead_letter
from kvbus.streams.subscription import message_id

# The same rule as in the workers' commit (checkpoint.py), for readers that have no checkpoint there.
_REFUSE = Script(
    """
if redis.call('ZADD', KEYS[2], 'NX', ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -tonumber(ARGV[3]) - 1)
redis.call('PEXPIRE', KEYS[2], ARGV[4])
local entry = {'XADD', KEYS[1], '*'}
if ARGV[5] ~= '0' then entry = {'XADD', KEYS[1], 'MAXLEN', '~', ARGV[5], '*'} end
for i = 6, #ARGV do entry[#entry + 1] = ARGV[i] end
redis.call(unpack(entry))
return 1
""",
    allow_oom=True,
)


def set_aside(log: Log, stream: str, entry_id: str, fields: Fields, error: KVBusError, *, by: str) -> bool:
    """Write the dead letter of an entry; False if another reader has done so. stream: its key. Raises BusError."""
    bus: Bus = log.bus
    letter = dead_letter(
        bus.keys,
        stream=stream,
        entry_id=entry_id,
        message_id=message_id(entry_id, fields),
        fields=fields,
        error=error,
        by=by,
        at_ms=bus.clock.now_ms(),
    )
    args: list[str | bytes | int] = [
        bus.clock.now_ms(),
        letter.refuse_once,
        KEEP_DEAD_SEEN,
        KEEP_MS,
        log.maxlen(bus.keys.dead, len(letter.body)),
    ]
    for name, value in entry_fields(DeadLetter.TYPE, letter.body, message_id=letter.message_id).items():
        args += [name, value]
    with bus_errors(f"XADD {bus.keys.dead}"):
        return bool(_REFUSE.run(bus.client, [bus.keys.dead, bus.keys.dead_seen], args))
