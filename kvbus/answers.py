"""The workers' answers to commands: one reader of the results stream serves everyone in the process who waits."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from kvbus.errors import BusError, InvalidMessage, ProtocolError, Stopped
from kvbus.metrics import Counters, RateLimitedLog
from kvbus.protocol.codec import Fields, decode_entry
from kvbus.protocol.results import ChunkLists, CommandResult, Results
from kvbus.streams.connection import Bus
from kvbus.streams.dead import set_aside
from kvbus.streams.issue import Issuer
from kvbus.streams.log import Log
from kvbus.streams.registry import Member
from kvbus.streams.subscription import Subscription

_log = logging.getLogger(__name__)

KEEP_COMMANDS = 10_000
KEEP_WEIGHT = 500_000
"""Hashes named in the answers that are kept, each answer counting as one more: some 40 MB at the most."""
HOLD_S = 5.0
"""A command that this process sends is not forgotten before its sender has had the time to watch it."""
DEAD_AFTER_S = 2.0
"""After an outage of the bus all heartbeats have lapsed: only one that stays away this long counts as dead."""
LIVENESS_EVERY_S = 0.5
LOOKS = 32
"""How many old commands are looked at, whether they may be forgotten, when one more comes."""


class Answer(msgspec.Struct, frozen=True):
    """One worker's answer to one command."""

    worker: str
    instance: str
    rank: int
    epoch: int
    result: CommandResult


class CommandState(msgspec.Struct, frozen=True):
    """What is known of a command at one moment.

    answers: worker name to its newest answer, final or interim. waiting: alive at the time of the command, and no
    final answer yet. dead: the same, but no heartbeat any more. absent: registered, but dead before the command;
    it still owes its result and gives it when it comes back.
    """

    command_id: str
    answers: dict[str, Answer] = {}
    waiting: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    """Alive, but their engine had not returned from a call for long when the command was written; not waited for."""

    @property
    def settled(self) -> bool:
        """Nobody is waited for any more."""
        return not self.waiting

    @property
    def complete(self) -> bool:
        """Every worker that was alive has given its final answer."""
        return not self.waiting and not self.dead and not self.stuck

    @property
    def finals(self) -> dict[str, Answer]:
        return {name: answer for name, answer in self.answers.items() if answer.result.status.final}


class _Watcher:
    """A callback that is told of states in their order, though several threads tell: never an old one after a new."""

    def __init__(self, callback: Callable[[CommandState], None]) -> None:
        self._callback = callback
        self._lock = threading.RLock()
        self._told = -1

    def tell(self, number: int, state: CommandState) -> None:
        with self._lock:
            if number > self._told:
                self._told = number
                self._callback(state)


_Call = tuple[_Watcher, int, CommandState]


class _Record:
    """The answers to one command so far, and who wants to know."""

    def __init__(self, command_id: str) -> None:
        self.command_id = command_id
        self.answers: dict[str, Answer] = {}
        self.expected: frozenset[str] = frozenset()
        self.absent: tuple[str, ...] = ()
        self.stuck: frozenset[str] = frozenset()
        self.dead: frozenset[str] = frozenset()
        self.weight = 1
        self.hold_until = 0.0
        self.number = 0
        """Of the newest state that was told."""
        self.watchers: list[_Watcher] = []
        self.waiting: list[threading.Lock] = []
        """Each held by a thread that waits until it is settled."""

    def done(self) -> frozenset[str]:
        return frozenset(name for name, answer in self.answers.items() if answer.result.status.final)

    def missing(self) -> frozenset[str]:
        return self.expected - self.done()

    def settled(self) -> bool:
        """Nobody is waited for any more."""
        return all(
            name in self.dead or ((answer := self.answers.get(name)) is not None and answer.result.status.final)
            for name in self.expected
        )

    def state(self) -> CommandState:
        done = self.done()
        missing = self.expected - done
        return CommandState(
            command_id=self.command_id,
            answers=dict(self.answers),
            waiting=tuple(sorted(missing - self.dead)),
            dead=tuple(sorted(missing & self.dead)),
            absent=self.absent,
            stuck=tuple(sorted(self.stuck - done)),
        )


class Answers:
    """Follows the results stream in one thread of its own, from the moment it was started.

    A command is expected before it is sent, so that no answer can be missed; answers to commands of others are kept
    for a while, too.
    """

    def __init__(self, bus: Bus, issuer: Issuer) -> None:
        self.bus = bus
        self.counters = Counters()
        self._issuer = issuer
        self._log = Log(bus)
        self._lock = threading.Lock()
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._weight = 0
        self._watched: set[str] = set()
        self._silent_since: dict[str, float] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._limited = RateLimitedLog(_log)
        self._subscription: Subscription | None = None

    def start(self) -> None:
        """Fix the place in the results stream and begin to follow it. Raises BusError. Does nothing the second time."""
        with self._lock:
            if self._stop.is_set():
                raise Stopped("this client was closed")
            if self._thread is not None and self._thread.is_alive():
                return  # in a forked child it is not
            self._subscription = Subscription.from_end(self.bus, self.bus.keys.results)
            self._thread = threading.Thread(target=self._run, name="kvbus-answers", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop following, and wait for the thread."""
        self._stop.set()
        thread, subscription = self._thread, self._subscription
        if thread is None or subscription is None or thread is threading.current_thread():
            return
        deadline = time.monotonic() + (self.bus.settings.block_ms + self.bus.settings.reply_timeout_ms) / 1000 + 1
        while thread.is_alive() and time.monotonic() < deadline:
            # Again and again: an interruption just before the thread begins to wait would be lost.
            subscription.interrupt()
            thread.join(0.02)

    def expect(self, *command_ids: str) -> None:
        """Keep these commands' answers from now on, before anyone knows who will give them."""
        until = time.monotonic() + HOLD_S
        with self._lock:
            for command_id in command_ids:
                self._record(command_id).hold_until = until

    def owed_by(self, members: tuple[Member, ...], *command_ids: str) -> None:
        """Who was registered when the commands were written."""
        silent = self.heard_of(members)
        stuck = frozenset(member.name for member in members if member.alive and member.registration.stuck)
        heard = frozenset(name for name, seconds in silent.items() if seconds < DEAD_AFTER_S)
        absent = tuple(name for name in silent if name not in heard)
        calls: list[_Call] = []
        with self._lock:
            for command_id in command_ids:
                record = self._record(command_id)
                record.expected, record.absent, record.stuck = heard - stuck, absent, stuck
                calls += self._calls(record)
        self._tell(calls)

    def heard_of(self, members: tuple[Member, ...]) -> dict[str, float]:
        """Take note of who is alive. Returns for how many seconds each has been known to be silent."""
        now = time.monotonic()
        with self._lock:
            for member in members:
                if member.alive:
                    self._silent_since.pop(member.name, None)
                else:
                    self._silent_since.setdefault(member.name, now)
            return {member.name: now - self._silent_since.get(member.name, now) for member in members}

    def may_return(self, members: tuple[Member, ...]) -> bool:
        """Whether one of them is alive, or has not been silent for long enough to be called dead."""
        return any(seconds < DEAD_AFTER_S for seconds in self.heard_of(members).values())

    def watch(self, command_id: str, callback: Callable[[CommandState], None]) -> Callable[[], None]:
        """Call back, from the reader's thread, at every answer, and once at once. Returns what ends it.

        The callback must not block. It also learns of workers that died.
        """
        watcher = _Watcher(callback)
        with self._lock:
            record = self._record(command_id)
            record.watchers.append(watcher)
            self._watched.add(command_id)
            number, state = record.number, record.state()

        def end() -> None:
            with self._lock:
                if watcher in record.watchers:
                    record.watchers.remove(watcher)
                    self._unwatched(record)

        try:
            watcher.tell(number, state)
        except BaseException:
            end()
            raise
        return end

    def state(self, command_id: str) -> CommandState | None:
        """What is remembered of a command; None when it is not."""
        with self._lock:
            record = self._records.get(command_id)
            return record.state() if record is not None else None

    def wait(self, command_id: str, timeout_s: float) -> CommandState:
        """Until nobody is waited for any more, or the time is over."""
        settled = threading.Lock()  # held until then: waking by an Event takes two more switches of threads
        with self._lock:
            record = self._record(command_id)
            if record.settled() or timeout_s <= 0:
                return record.state()
            settled.acquire()
            record.waiting.append(settled)
            self._watched.add(command_id)
        try:
            settled.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
        finally:
            with self._lock:
                if settled in record.waiting:
                    record.waiting.remove(settled)
                self._unwatched(record)
        with self._lock:
            return record.state()

    # -- the reader's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        subscription = self._subscription
        assert subscription is not None
        liveness_at, backoff = 0.0, 0.05
        while not self._stop.is_set():
            try:
                block = int(LIVENESS_EVERY_S * 1000) if self._watched else self.bus.settings.block_ms
                batch = subscription.read(block_ms=min(block, self.bus.settings.block_ms))
                if batch.gap is not None:
                    self.counters.add("results_gaps")
                    self._limited.warning("gap", "results: %s (%s missed)", batch.gap.reason, batch.gap.missed)
                for entry_id, fields in batch.entries:
                    self._take_entry(entry_id, fields)
                if self._watched and time.monotonic() - liveness_at >= LIVENESS_EVERY_S:
                    self._look_for_dead()
                    liveness_at = time.monotonic()
                backoff = 0.05
            except BusError as error:
                if self._stop.is_set():
                    break
                self.counters.add("bus_errors")
                self._limited.warning("bus", "results cannot be read, trying again: %s", error)
                self._silent_since.clear()  # what is not heard during an outage says nothing of the workers
                self._stop.wait(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 2, 1.0)
            except Exception:  # noqa: BLE001 - all who wait in this process depend on this thread
                self.counters.add("internal_errors")
                _log.exception("unexpected error while reading results; going on")
                self._stop.wait(backoff)
                backoff = min(backoff * 2, 1.0)
        subscription.disconnect()

    def _take_entry(self, entry_id: str, fields: Fields) -> None:
        try:
            message = decode_entry(entry_id, fields).message
            if not isinstance(message, Results):
                raise InvalidMessage(f"a {message.TYPE} does not belong on the results stream")
        except ProtocolError as error:
            self.counters.add("results_refused")
            self._limited.warning("refused", "results entry %s set aside: %s", entry_id, error)
            try:
                set_aside(self._log, self.bus.keys.results, entry_id, fields, error, by="results-reader")
            except BusError as fault:
                self.counters.add("results_refused_untold")
                self._limited.warning("untold", "no dead letter for results entry %s: %s", entry_id, fault)
            return
        self._take(message)

    def _take(self, message: Results) -> None:
        calls: list[_Call] = []
        with self._lock:
            for result in message.results:
                record = self._record(result.command_id)
                before = record.answers.get(message.worker)
                if before is not None and before.result.status.final and not result.status.final:
                    continue
                record.answers[message.worker] = Answer(
                    message.worker, message.instance, message.rank, message.epoch, result
                )
                self._weigh(record, _weight(result) - (_weight(before.result) if before is not None else 0))
                calls += self._calls(record)
            self._forget_oldest()
        self._tell(calls)

    def _look_for_dead(self) -> None:
        with self._lock:
            waiting = {name for command_id in self._watched for name in self._records[command_id].missing()}
        if not waiting:
            return
        alive_now = self._issuer.alive(sorted(waiting))
        now = time.monotonic()
        calls: list[_Call] = []
        with self._lock:
            for name, alive in alive_now.items():
                if alive:
                    self._silent_since.pop(name, None)
                else:
                    self._silent_since.setdefault(name, now)
            dead = frozenset(name for name in waiting if now - self._silent_since.get(name, now) >= DEAD_AFTER_S)
            for command_id in self._watched:
                record = self._records[command_id]
                if record.dead != dead & record.expected:
                    record.dead = dead & record.expected
                    calls += self._calls(record)
        self._tell(calls)

    def _calls(self, record: _Record) -> list[_Call]:
        """Under the lock: who is to be told of the record's new state, once the lock is free; who waits is woken."""
        if record.waiting and record.settled():
            for settled in record.waiting:
                settled.release()
            record.waiting.clear()
        if not record.watchers:
            return []
        record.number += 1
        state = record.state()
        return [(watcher, record.number, state) for watcher in record.watchers]

    def _tell(self, calls: list[_Call]) -> None:
        for watcher, number, state in calls:
            try:
                watcher.tell(number, state)
            except Exception:  # noqa: BLE001 - one watcher's fault must not keep the others from their answers
                self.counters.add("watchers_failed")
                _log.exception("a watcher of command %s failed", state.command_id)

    def _unwatched(self, record: _Record) -> None:
        if not (record.watchers or record.waiting):
            self._watched.discard(record.command_id)

    def _record(self, command_id: str) -> _Record:
        record = self._records.get(command_id)
        if record is None:
            record = self._records[command_id] = _Record(command_id)
            self._weight += record.weight
            self._forget_oldest()
        return record

    def _weigh(self, record: _Record, change: int) -> None:
        record.weight += change
        self._weight += change

    def _forget_oldest(self) -> None:
        """Keep within the bounds, whatever comes in; a command that somebody watches stays."""
        if len(self._records) <= KEEP_COMMANDS and self._weight <= KEEP_WEIGHT:
            return
        now, newest = time.monotonic(), next(reversed(self._records))
        # Not all at once: where thousands are held, looking through them for each that comes would be all that is done.
        for _ in range(min(LOOKS, len(self._records))):
            own_id, record = next(iter(self._records.items()))
            if own_id in self._watched or own_id == newest or record.hold_until >= now:
                self._records.move_to_end(own_id)
                continue
            self._weight -= self._records.pop(own_id).weight
            if len(self._records) <= KEEP_COMMANDS and self._weight <= KEEP_WEIGHT:
                return


_NOTHING_LISTED = ChunkLists()


def _weight(result: CommandResult) -> int:
    """What an answer costs to keep: the hashes that it names, and an eighth of a lookup's bytes."""
    named = sum(map(len, msgspec.structs.astuple(result.chunks))) if result.chunks != _NOTHING_LISTED else 0
    return 1 + named + (len(result.held.masks) // 8 if result.held is not None else 0)
