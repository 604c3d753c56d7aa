"""A worker's end of the bus: takes commands, keeps what is in hand, and writes exactly one final result for each.

The order of every step: entries are read; each is finished or stays pending; one fenced commit writes the results
and moves the checkpoint; only then is more read. So a crash, a lost reply or a paused predecessor can neither lose
a result nor write it twice.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

import msgspec

from kvbus.errors import HistoryLost, InvalidMessage, PoisonEntry, ProtocolError
from kvbus.protocol.codec import COMMAND_TYPES, Envelope, Fields, decode_entry
from kvbus.protocol.results import CommandResult, Results, Status
from kvbus.streams.checkpoint import (
    MAX_PENDING,
    Append,
    Checkpoint,
    Commit,
    Pending,
    Taken,
    commit,
    register,
    renew,
    retire,
)
from kvbus.streams.connection import Bus
from kvbus.streams.known import KnownCommands
from kvbus.streams.log import Entry, Log
from kvbus.streams.notices import Notices, dead_letter, type_text, unable
from kvbus.streams.position import Gap, GapKind, Position, after_gap, find_gap
from kvbus.streams.registry import Registration, encode_registration, prune
from kvbus.streams.subscription import BATCH, Subscription, end_position, is_new_history, look, message_id

MAX_CRASHES = 3
"""The third crash on the same entry sets it aside."""
LOOK_BACK = 1_000
LOOK_BACK_BYTES = 32 * 1024 * 1024


class Task(msgspec.Struct, frozen=True):
    """A command to carry out. Its entry stays in the worker's hand until `finish` is called with its entry_id."""

    entry_id: str
    envelope: Envelope
    attempt: int = 1


class WorkerLog:
    """One worker's commands, results and checkpoint.

    One thread opens, reads, reopens and closes; any thread may call `finish`, `interim`, `flush` and `renew`.
    Errors: Fenced means stop; HistoryLost means call `reopen`; BusUnavailable means call again, nothing is lost.
    """

    def __init__(self, bus: Bus, name: str, registration: Registration) -> None:
        self.bus = bus
        self.name = name
        self.registration = registration
        self.owner = os.urandom(16).hex()
        self.epoch = 0
        self.duplicates = 0
        """Commands that came again under the same message id and were not carried out again."""
        self.gaps = 0
        self.dead_letters = 0
        self.unwritten = 0
        """Commits whose dead letters or events the server refused to take."""
        self._log = Log(bus)
        self._subscription: Subscription | None = None
        self._lock = threading.RLock()
        self._flush_lock = threading.Lock()
        self._rev = 0
        self._position = Position()
        self._pending: OrderedDict[str, Pending] = OrderedDict()
        self._attempts: dict[str, int] = {}
        self._known = KnownCommands()
        # waiting to be committed, and on the way
        self._outgoing: list[CommandResult] = []
        self._appends: list[Append] = []
        self._dirty = False
        self._in_flight: tuple[Commit, list[CommandResult], list[Append]] | None = None
        # taken, and waiting to be handed out
        self._ready: list[Task] = []
        self._recover: list[Pending] = []
        self._careful = 0

    # -- life --------------------------------------------------------------------------------------------------

    def open(self) -> Taken | None:
        """Take the name, and the place to go on from. Taken: a living process has it, try later. Raises BusError."""
        keys = self.bus.keys
        start = end_position(self.bus, keys.commands)
        found = self._register(start)
        if isinstance(found, Taken):
            return found
        prune(self.bus)
        answered = self._own_results() if found.created and found.known else []
        earlier = self._ids_before(found.position.cursor)
        with self._lock:
            self._adopt(found, found.position)
            self._attempts = {} if found.clean else dict(found.attempts)
            self._pending = OrderedDict((item.entry_id, item) for item in found.pending)
            self._recover = list(found.pending)
            # What was read but not committed before a crash is at most one batch beyond the cursor.
            self._careful = 0 if found.clean or found.created else BATCH
            in_hand = {item.message_id for item in found.pending}
            for own_id in [*earlier, *answered]:
                if own_id not in in_hand:
                    self._known.mark_answered(own_id)
            if found.created and found.known:
                self._announce(Gap(GapKind.HISTORY_LOST, None, "", start.cursor, "the checkpoint is gone"))
            self._queue(self._notices().started(self.bus.clock.now_ms()))
        return None

    def reopen(self) -> None:
        """After HistoryLost: register again, and go on from what the server holds now. Raises Fenced or BusError.

        Commands that come again are answered from memory, and not carried out again.
        """
        assert self._subscription is not None, "open() comes first"
        self._subscription.disconnect()
        keys, mine = self.bus.keys, self._position
        state, at_cursor = look(self.bus.client, keys.commands, mine.cursor)
        gap = find_gap(mine, state, at_cursor)
        found = self._register(after_gap(mine, state, gap) if gap else mine)
        if isinstance(found, Taken):
            raise HistoryLost(f"another process has taken the name {self.name}; waiting for its heartbeat to lapse")
        # The server's own checkpoint may be older than ours (a failover that lost the tail): then its place counts.
        position = found.position
        state, at_cursor = look(self.bus.client, keys.commands, position.cursor)
        older = find_gap(position, state, at_cursor)
        position = after_gap(position, state, older) if older else position
        answered = self._own_results()
        with self._lock:
            waiting = self._outgoing
            if self._in_flight is not None:
                _, results, appends = self._in_flight
                waiting = [*results, *waiting]
                self._appends = [*appends, *self._appends]
            self._adopt(found, position)
            self._known.new_history()
            for own_id in answered:
                self._known.mark_answered(own_id)
            self._outgoing = []
            for result in waiting:
                if not self._known.answered(result.command_id):
                    self._outgoing.append(result)
                    if result.status.final:
                        self._known.answer(result.command_id, result)
            for item in found.pending:
                if item.entry_id not in self._pending and not self._meet_again(item.message_id):
                    self._pending[item.entry_id] = item
                    self._recover.append(item)
            self._dirty = True
            found_gap = gap or older
            if found_gap is not None:
                self._announce(found_gap)

    def renew(self) -> None:
        """The heartbeat. Raises Fenced, HistoryLost or BusError."""
        renew(self.bus, self.name, self.owner)

    def close(self, reason: str = "stopped") -> None:
        """Commit what is finished, leave the rest pending, give the name back. Raises Fenced, HistoryLost, BusError."""
        self._queue(self._notices().stopped(self.bus.clock.now_ms(), reason))
        self.flush(clean=True)
        retire(self.bus, self.name, self.owner)
        self.disconnect()

    def interrupt(self) -> None:
        """End a read that waits in another thread: it raises BusUnavailable."""
        if self._subscription is not None:
            self._subscription.interrupt()

    def disconnect(self) -> None:
        if self._subscription is not None:
            self._subscription.disconnect()

    # -- taking commands ---------------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """The last command taken."""
        return self._position

    @property
    def in_hand(self) -> int:
        return len(self._pending)

    @property
    def full(self) -> bool:
        """No more may wait: what cannot be done soon must be answered at once."""
        return len(self._pending) >= MAX_PENDING

    @property
    def careful(self) -> bool:
        """After an unclean stop: commands come one at a time, and each must be finished before the next is read."""
        return bool(self._recover) or self._careful > 0

    def read(self, *, block_ms: int | None = None) -> list[Task]:
        """The next commands to carry out; commits what was finished before.

        Waits up to block_ms (None: the setting) for them. Raises Fenced, HistoryLost or BusError.
        """
        assert self._subscription is not None, "open() comes first"
        self.flush()
        if not self._ready:
            if self._recover:
                self._take_again(self._recover[0])
            else:
                self._take_next(block_ms)
            if self._attempts:
                self.flush()  # an attempt is on record before it is made
        ready, self._ready = self._ready, []
        return ready

    def finish(self, entry_id: str, result: CommandResult) -> None:
        """The final result of a command in hand. It is on the bus after the next flush."""
        assert result.status.final
        with self._lock:
            pending = self._pending.pop(entry_id, None)
            if pending is not None:
                self._answer(pending.message_id, entry_id, result)

    def interim(self, entry_id: str, result: CommandResult) -> None:
        """Tell that a command waits; a final result follows."""
        with self._lock:
            # It survived being carried out, so a later crash is not its fault.
            self._attempts.pop(entry_id, None)
            self._outgoing.append(result)
            self._dirty = True

    @property
    def dirty(self) -> bool:
        """Something waits to be committed."""
        return self._dirty or self._in_flight is not None

    def flush(self, *, clean: bool = False) -> None:
        """Commit all that is finished. Raises Fenced, HistoryLost or BusError; the same is sent again next time.

        clean: say that this life ends in good order.
        """
        with self._flush_lock:
            while True:
                with self._lock:
                    self._in_flight = sent = self._in_flight or self._next_step(clean)
                if sent is None:
                    return
                _, unwritten = commit(self.bus, sent[0])
                with self._lock:
                    self.unwritten += bool(unwritten)
                    # A reopened log has dropped this step, and taken another revision.
                    if self._in_flight is sent:
                        self._in_flight, self._rev = None, sent[0].new_rev
                if sent[0].clean:
                    return

    # -- inside ------------------------------------------------------------------------------------------------

    def _register(self, start: Position) -> Checkpoint | Taken:
        registration = encode_registration(self.registration)
        return register(self.bus, self.name, self.owner, start=start, registration=registration)

    def _adopt(self, found: Checkpoint, position: Position) -> None:
        self.epoch, self._rev, self._in_flight = found.epoch, found.rev, None
        self._position = position
        if self._subscription is None:
            self._subscription = Subscription(self.bus, self.bus.keys.commands, position)
        self._subscription.position = position

    def _next_step(self, clean: bool) -> tuple[Commit, list[CommandResult], list[Append]] | None:
        if not (self._dirty or clean):
            return None
        results = self._notices().results(self._outgoing)
        capped = tuple(
            msgspec.structs.replace(append, maxlen=self._log.maxlen(append.stream, len(append.body)))
            for append in (*results, *self._appends)
        )
        step = Commit(
            name=self.name,
            owner=self.owner,
            old_rev=self._rev,
            new_rev=self._rev + 1,
            position=self._position,
            pending=tuple(self._pending.values()),
            attempts=dict(self._attempts),
            appends=capped,
            clean=clean,
        )
        sent = (step, self._outgoing, self._appends)
        self._outgoing, self._appends, self._dirty = [], [], False
        return sent

    def _take_next(self, block_ms: int | None) -> None:
        assert self._subscription is not None
        careful = self._careful > 0
        batch = self._subscription.read(block_ms=0 if careful else block_ms, count=1 if careful else BATCH)
        if is_new_history(batch.gap):
            raise HistoryLost(f"commands: {batch.gap.reason if batch.gap else ''}")
        with self._lock:
            for entry_id, fields in batch.entries:
                self._take((entry_id, fields), careful)
            # The cursor moves together with what is in hand: another thread may commit at any moment.
            if self._position != self._subscription.position:
                self._position = self._subscription.position
                self._dirty = self._dirty or bool(batch.entries)
            if careful:
                self._careful = self._careful - 1 if batch.entries else 0
            if batch.gap is not None:
                self._announce(batch.gap)

    def _take(self, entry: Entry, careful: bool) -> None:
        entry_id, fields = entry
        own_id = message_id(entry_id, fields)
        if own_id in self._known and self._meet_again(own_id):
            return
        self._known.begin(own_id)
        try:
            envelope = _command(entry_id, fields)
        except ProtocolError as error:
            self._refuse(entry_id, fields, error)
            return
        lookup_id = getattr(envelope.message, "lookup_id", None)
        self._pending[entry_id] = Pending(entry_id, own_id, envelope.type, lookup_id)
        self._ready.append(Task(entry_id, envelope, self._count_attempt(entry_id) if careful else 1))

    def _meet_again(self, own_id: str) -> bool:
        """True when a command that comes again needs no work: it is in hand, answered, or answered from memory."""
        if self._known.answered(own_id) or any(item.message_id == own_id for item in self._pending.values()):
            self.duplicates += 1
            return True
        result = self._known.result(own_id)
        if result is None:
            return False
        self._outgoing.append(result)
        self._known.answer(own_id, result)
        self._dirty = True
        return True

    def _take_again(self, item: Pending) -> None:
        """A command that was in hand when the life before this one ended."""
        fields = self._log.get(self.bus.keys.commands, item.entry_id)
        with self._lock:
            self._recover.remove(item)
            self._known.begin(item.message_id)
            tries = self._attempts.get(item.entry_id, 0)
            if fields is None or message_id(item.entry_id, fields) != item.message_id:
                gone = HistoryLost("the command was removed from the stream before it could be carried out again")
                self._pending.pop(item.entry_id, None)
                self._answer(item.message_id, item.entry_id, unable(item, Status.FAILED, gone, tries + 1))
                return
            # The life in which the entry was first taken is one crash more than the attempts counted since.
            if self._careful and tries + 1 >= MAX_CRASHES:
                self._refuse(item.entry_id, fields, PoisonEntry(f"the worker died {tries + 1} times on this entry"))
                return
            try:
                envelope = _command(item.entry_id, fields)
            except ProtocolError as error:
                self._refuse(item.entry_id, fields, error)
                return
            attempt = self._count_attempt(item.entry_id) if self._careful else tries + 1
            self._ready.append(Task(item.entry_id, envelope, attempt))

    def _count_attempt(self, entry_id: str) -> int:
        self._attempts[entry_id] = self._attempts.get(entry_id, 0) + 1
        self._dirty = True
        return self._attempts[entry_id] + 1

    def _refuse(self, entry_id: str, fields: Fields, error: ProtocolError) -> None:
        """One dead letter however many workers refuse the entry, and a `rejected` result from each of them."""
        own_id = message_id(entry_id, fields)
        letter = dead_letter(
            self.bus.keys,
            stream=self.bus.keys.commands,
            entry_id=entry_id,
            message_id=own_id,
            fields=fields,
            error=error,
            by=self.name,
            at_ms=self.bus.clock.now_ms(),
        )
        self._queue(letter)
        self.dead_letters += 1
        item = self._pending.pop(entry_id, None) or Pending(entry_id, own_id, type_text(fields))
        tries = self._attempts.get(entry_id, 0) + 1
        self._answer(own_id, entry_id, unable(item, Status.REJECTED, error, tries))

    def _answer(self, own_id: str, entry_id: str, result: CommandResult) -> None:
        self._attempts.pop(entry_id, None)
        self._outgoing.append(result)
        self._known.answer(own_id, result)
        self._dirty = True

    def _ids_before(self, cursor: str) -> list[str]:
        """The ids of the newest commands up to the cursor, oldest first: late duplicates of them are not done again."""
        room, ids = LOOK_BACK_BYTES, []
        for entry_id, fields in self._log.scan_back(self.bus.keys.commands, cursor, page=16):
            ids.append(message_id(entry_id, fields))
            room -= sum(map(len, fields.values()))
            if len(ids) >= LOOK_BACK or room < 0:
                break
        return ids[::-1]

    def _own_results(self) -> list[str]:
        """The commands whose final result from this worker stands in the present history."""
        found: list[str] = []
        for seen, (entry_id, fields) in enumerate(self._log.scan_back(self.bus.keys.results)):
            if seen >= LOOK_BACK:
                break
            try:
                message = decode_entry(entry_id, fields).message
            except ProtocolError:
                continue  # a stranger's: what this worker writes can be read
            if isinstance(message, Results) and message.worker == self.name:
                found += [result.command_id for result in message.results if result.status.final]
        return found

    def _notices(self) -> Notices:
        return Notices(self.bus.keys, self.name, self.registration, self.epoch)

    def _announce(self, gap: Gap) -> None:
        self.gaps += 1
        self._queue(self._notices().gap(self.bus.clock.now_ms(), gap))

    def _queue(self, append: Append) -> None:
        with self._lock:
            self._appends.append(append)
            self._dirty = True


def _command(entry_id: str, fields: Fields) -> Envelope:
    envelope = decode_entry(entry_id, fields)
    if envelope.type not in COMMAND_TYPES:
        raise InvalidMessage(f"a {envelope.type} is not a command", hint="Put it on the stream that it belongs to.")
    return envelope
