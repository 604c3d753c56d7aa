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

from kvbus.errors import Fenced, HistoryLost, InvalidMessage, PoisonEntry, ProtocolError
from kvbus.protocol.codec import COMMAND_TYPES, Envelope, Fields, decode_entry
from kvbus.protocol.results import CommandResult, Status
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
from kvbus.streams.line import Line
from kvbus.streams.log import Entry, Log
from kvbus.streams.notices import Notices, dead_letter, type_text, unable
from kvbus.streams.outbox import Outbox, Step
from kvbus.streams.position import Gap, GapKind, Position, after_gap, find_gap
from kvbus.streams.recovery import ids_before, own_finals, suspect_limit
from kvbus.streams.registry import Registration, encode_registration, prune
from kvbus.streams.subscription import BATCH, Subscription, end_position, is_new_history, look, message_id
from kvbus.streams.suspicion import MAX_CRASHES, Suspicion


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
        self._line: Line | None = None
        """For commits alone, under the flush lock."""
        self._position = Position()
        self._pending: OrderedDict[str, Pending] = OrderedDict()
        self._suspicion = Suspicion()
        self._known = KnownCommands()
        self._outbox = Outbox(self._known)
        # taken, and waiting to be handed out
        self._ready: list[Task] = []
        self._recover: list[Pending] = []

    # -- life --------------------------------------------------------------------------------------------------

    def open(self) -> Taken | None:
        """Take the name, and the place to go on from. Taken: a living process has it, try later. Raises BusError."""
        start = end_position(self.bus, self.bus.keys.commands)
        if not self.registration.started_at_ms:  # by the server's clock, for this machine's may be wrong
            self.registration = msgspec.structs.replace(self.registration, started_at_ms=self.bus.now_ms())
        found = self._register(start)
        if isinstance(found, Taken):
            return found
        prune(self.bus)
        lost = found.created and found.known
        answered = own_finals(self._log, self.name)
        # In another history than the one that was read, what stands before the cursor was never met.
        moved = is_new_history(self._compare(found.position)[0])
        earlier = [] if moved else ids_before(self._log, found.position.cursor)
        limit = suspect_limit(self._log, found)
        with self._lock:
            self._outbox.settle(found, set())
            self._adopt(found, found.position)
            self._pending = OrderedDict((item.entry_id, item) for item in found.pending)
            self._recover = list(found.pending)
            self._suspicion.inherit(found, limit)
            in_hand = {item.message_id for item in found.pending}
            for own_id in [*earlier, *answered]:
                if own_id not in in_hand:
                    self._known.mark_answered(own_id, found.rev)
            if lost:
                self._announce(Gap(GapKind.HISTORY_LOST, None, "", start.cursor, "the checkpoint is gone"))
            self._queue(self._notices().started(self.bus.clock.now_ms()))
        return None

    def reopen(self) -> None:
        """After HistoryLost: register again, and go on from what the server holds now. Raises Fenced or BusError.

        Commands that come again are answered from memory, and not carried out again.
        """
        assert self._subscription is not None, "open() comes first"
        with self._flush_lock:  # no step may be on its way while the server is asked how far it has come
            self._subscription.disconnect()
            gap, start = self._compare(self._position)
            found = self._register(start)
            if isinstance(found, Taken):
                if found.epoch > self.epoch:
                    raise Fenced(f"worker {self.name} was taken over by another process while history was lost")
                raise HistoryLost(f"{self.name} is held by a life before this one; waiting for its heartbeat to lapse")
            # The server's own checkpoint may be older than ours (a failover that lost the tail): its place counts.
            older, position = self._compare(found.position)
            missed = gap or older
            # Ids that this life never met may have been answered by the one before.
            ask = found.created or found.brought_back or is_new_history(missed)
            on_server = own_finals(self._log, self.name) if ask else set()
            with self._lock:
                self._outbox.settle(found, on_server)
                if found.brought_back or (found.created and is_new_history(gap)):
                    self._known.forget_answers(after=-1)
                elif not found.created:
                    step = self._outbox.in_flight
                    self._known.forget_answers(after=step.commit.new_rev if step else found.rev)
                for own_id in on_server:
                    self._known.mark_answered(own_id, found.rev)
                self._adopt(found, position)
                if is_new_history(missed):
                    self._suspicion.limit = ""
                for item in found.pending:
                    known = item.entry_id in self._pending or self._known.answered(item.message_id)
                    if not known and not self._meet_again(item.message_id):
                        self._pending[item.entry_id] = item
                        self._recover.append(item)
                self._outbox.dirty = True
                if missed is not None:
                    self._announce(missed)

    def renew(self) -> None:
        """The heartbeat. Raises Fenced, HistoryLost or BusError."""
        renew(self.bus, self.name, self.owner, epoch=self.epoch, rev=self._outbox.rev)

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
        """Let go of the connections that are held. By the thread that reads."""
        if self._subscription is not None:
            self._subscription.disconnect()
        with self._flush_lock:
            if self._line is not None:
                self._line.close()

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
        return bool(self._recover) or self._suspicion.covers(self._position.cursor)

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
            if self._suspicion.attempts:
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
            if entry_id in self._pending:
                # It survived being carried out, so a later crash is not its fault.
                self._suspicion.clear(entry_id)
                self._outbox.add(result)

    @property
    def dirty(self) -> bool:
        """Something waits to be committed."""
        return self._outbox.dirty or self._outbox.in_flight is not None

    def flush(self, *, clean: bool = False) -> None:
        """Commit all that is finished. Raises Fenced, HistoryLost or BusError; the same is sent again next time.

        clean: say that this life ends in good order.
        """
        with self._flush_lock:
            while True:
                with self._lock:
                    step = self._outbox.in_flight or self._next_step(clean)
                if step is None:
                    return
                _, unwritten = commit(self.bus, step.commit, self._held_line())
                with self._lock:
                    self.unwritten += bool(unwritten)
                    self._outbox.acknowledged(step)
                if step.commit.clean:
                    return

    # -- inside ------------------------------------------------------------------------------------------------

    def _held_line(self) -> Line | None:
        if self._line is None or self._line.client is not self.bus.client:
            self._line = self.bus.line()
        return self._line

    def _register(self, start: Position) -> Checkpoint | Taken:
        registration = encode_registration(self.registration)
        rev = self._outbox.next_rev if self.epoch else 0
        return register(
            self.bus, self.name, self.owner, start=start, registration=registration, rev=rev, epoch=self.epoch
        )

    def _compare(self, position: Position) -> tuple[Gap | None, Position]:
        """What is missing behind a place, and where to go on."""
        state, at_cursor = look(self.bus.client, self.bus.keys.commands, position.cursor)
        gap = find_gap(position, state, at_cursor)
        return gap, after_gap(position, state, gap) if gap else position

    def _adopt(self, found: Checkpoint, position: Position) -> None:
        self.epoch, self._position = found.epoch, position
        if self._subscription is None:
            self._subscription = Subscription(self.bus, self.bus.keys.commands, position)
        self._subscription.position = position

    def _next_step(self, clean: bool) -> Step | None:
        if not (self._outbox.dirty or clean):
            return None
        results = self._notices().results(self._outbox.results)
        capped = tuple(
            msgspec.structs.replace(append, maxlen=self._log.maxlen(append.stream, len(append.body)))
            for append in (*results, *self._outbox.appends)
        )
        if clean:
            self._suspicion.leave(item.entry_id for item in self._recover)
        return self._outbox.send(
            Commit(
                name=self.name,
                owner=self.owner,
                epoch=self.epoch,
                old_rev=self._outbox.rev,
                new_rev=self._outbox.next_rev,
                position=self._position,
                pending=tuple(self._pending.values()),
                attempts=dict(self._suspicion.attempts),
                suspect_to=self._suspicion.limit if self._suspicion.covers(self._position.cursor) else "",
                appends=capped,
                clean=clean,
            )
        )

    def _take_next(self, block_ms: int | None) -> None:
        assert self._subscription is not None
        careful = self._suspicion.covers(self._position.cursor)
        batch = self._subscription.read(block_ms=0 if careful else block_ms, count=1 if careful else BATCH)
        if is_new_history(batch.gap):
            raise HistoryLost(f"commands: {batch.gap.reason if batch.gap else ''}")
        with self._lock:
            try:
                for entry_id, fields in batch.entries:
                    self._take((entry_id, fields), careful)
            except BaseException:
                # What was not taken comes again; what was taken is known by then.
                self._subscription.position = self._position
                raise
            # The cursor moves together with what is in hand: another thread may commit at any moment.
            if self._position != self._subscription.position:
                self._position = self._subscription.position
                self._outbox.dirty = self._outbox.dirty or bool(batch.entries)
            if careful and not batch.entries:
                self._suspicion.limit = ""  # they were deleted
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
        self._ready.append(Task(entry_id, envelope, self._suspicion.begin(entry_id, begun=int(careful))))

    def _meet_again(self, own_id: str) -> bool:
        """True when a command that comes again needs no work: it is in hand, answered, or answered from memory."""
        if self._known.answered(own_id) or any(item.message_id == own_id for item in self._pending.values()):
            self.duplicates += 1
            return True
        result = self._known.result(own_id)
        if result is None:
            return False
        self._outbox.add(result)
        self._known.answer(own_id, result)
        return True

    def _take_again(self, item: Pending) -> None:
        """A command that was in hand when the life before this one ended."""
        fields = self._log.get(self.bus.keys.commands, item.entry_id)
        with self._lock:
            self._recover.remove(item)
            self._known.begin(item.message_id)
            begun = self._suspicion.begun(item.entry_id)
            if fields is None or message_id(item.entry_id, fields) != item.message_id:
                gone = HistoryLost("the command was removed from the stream before it could be carried out again")
                self._pending.pop(item.entry_id, None)
                self._answer(item.message_id, item.entry_id, unable(item, Status.FAILED, gone, begun + 1))
                return
            if begun >= MAX_CRASHES:
                self._refuse(item.entry_id, fields, PoisonEntry(f"the worker died {begun} times on this entry"))
                return
            try:
                envelope = _command(item.entry_id, fields)
            except ProtocolError as error:
                self._refuse(item.entry_id, fields, error)
                return
            self._ready.append(Task(item.entry_id, envelope, self._suspicion.begin(item.entry_id, begun)))
            self._outbox.dirty = self._outbox.dirty or bool(begun)

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
        begun = max(1, self._suspicion.begun(entry_id))
        self._answer(own_id, entry_id, unable(item, Status.REJECTED, error, begun))

    def _answer(self, own_id: str, entry_id: str, result: CommandResult) -> None:
        self._suspicion.clear(entry_id)
        self._outbox.add(result)
        self._known.answer(own_id, result)

    def _notices(self) -> Notices:
        return Notices(self.bus.keys, self.name, self.registration, self.epoch)

    def _announce(self, gap: Gap) -> None:
        self.gaps += 1
        self._queue(self._notices().gap(self.bus.clock.now_ms(), gap))

    def _queue(self, append: Append) -> None:
        with self._lock:
            self._outbox.queue(append)


def _command(entry_id: str, fields: Fields) -> Envelope:
    envelope = decode_entry(entry_id, fields)
    if envelope.type not in COMMAND_TYPES:
        raise InvalidMessage(f"a {envelope.type} is not a command", hint="Put it on the stream that it belongs to.")
    return envelope
