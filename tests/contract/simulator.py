"""Worker processes that are killed, paused, superseded and cut off, on the real WorkerLog and a real stream.

A history is a random walk from a seed: commands are written, and one process after another carries them out, until
something happens to it. Faults strike where the process talks to the server: a call never arrives, its reply is
lost, it arrives late, or the process dies just before or just after it. At the end the faults stop, a last process
runs until nothing is left to do, and the streams are read and judged.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kvbus.errors import BusUnavailable, Fenced, HistoryLost
from kvbus.protocol.codec import Fields, decode_entry, encode_entry
from kvbus.protocol.commands import Evict, Prefetch
from kvbus.protocol.dead import DeadLetter
from kvbus.protocol.results import CommandResult, Results, Status
from kvbus.settings import Settings
from kvbus.streams.checkpoint import Taken
from kvbus.streams.connection import Bus, Client
from kvbus.streams.registry import Registration
from kvbus.streams.suspicion import MAX_CRASHES
from kvbus.streams.worker_log import Task, WorkerLog
from tests.contract.line import Clock, Killed, Line

MAX_TURNS = 400
"""A history that is not done after so many quiet turns is stuck, or spins."""


class Kind(StrEnum):
    SHORT = "short"
    LONG = "long"
    DEFERRED = "deferred"
    KILLER = "killer"
    BAD = "bad"


@dataclass
class Job:
    """A command that a process carries out. turns: how many more it takes."""

    task: Task
    kind: Kind
    turns: int
    interim_told: bool = False


class Life:
    """One worker process, from its start to its end."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.line = Line(world)
        instance, rank = name.split("/")
        bus = Bus(Settings(namespace=world.namespace), client=self.line)
        self.log = WorkerLog(bus, name, Registration(instance=instance, rank=int(rank)))
        self.jobs: list[Job] = []
        self.executed: Counter[str] = Counter()
        self.taken: set[str] = set()
        self.opened = False
        self.lost = False
        self.reopened = 0
        self.superseded = False
        self.fenced = False

    def turn(self) -> bool:
        """What the worker's loop does once. True when it had something to do. Raises Killed and Fenced."""
        assert not self.fenced
        try:
            return self._turn()
        except BusUnavailable:
            return True
        except HistoryLost:
            self.lose_history()
            return True
        except Fenced:
            self.fenced = True
            raise
        finally:
            self.taken |= {*self.executed, *(item.message_id for item in self.log._pending.values())}

    def lose_history(self) -> None:
        """Reopen at the next turn. Only a world that loses history may ask for this."""
        assert self.world.loses_history, "history lost, and nothing was"
        self.lost = True
        if not self.superseded and self.world.holder(self.log.name) != self.log.owner:
            self.world.lapse(self.log.name)

    def _turn(self) -> bool:
        if not self.opened:
            if isinstance(self.log.open(), Taken):
                if not self.superseded:  # nobody who lives holds the name: the heartbeat of a dead one lapses
                    self.world.lapse(self.log.name)
                return True
            self.opened = True
        if self.lost:
            self.reopened += 1
            self.log.reopen()
            self.lost = False
        for job in list(self.jobs):
            self._work(job)
        if self.log.careful and any(not job.interim_told for job in self.jobs):
            self.log.flush()
            return True
        tasks = self.log.read(block_ms=0)
        for task in tasks:
            self._begin(task)
        return bool(tasks or self.jobs or self.log.dirty or self.log.careful)

    def _begin(self, task: Task) -> None:
        world, own_id = self.world, task.envelope.id
        self.executed[own_id] += 1
        kind = world.kinds[own_id]
        if kind is Kind.KILLER:
            world.begun[self.log.name, own_id] += 1
            raise Killed
        turns = 0 if kind is Kind.SHORT else world.rng.randint(1, 4)
        job = Job(task, kind, turns)
        self.jobs.append(job)
        if turns == 0:
            self._work(job)

    def _work(self, job: Job) -> None:
        if job.turns > 0:
            job.turns -= 1
            if job.kind is Kind.DEFERRED and not job.interim_told:
                job.interim_told = True
                self.log.interim(job.task.entry_id, self._result(job, Status.DEFERRED))
            return
        self.log.finish(job.task.entry_id, self._result(job, Status.DONE))
        self.jobs.remove(job)

    def _result(self, job: Job, status: Status) -> CommandResult:
        envelope = job.task.envelope
        return CommandResult(command_id=envelope.id, type=envelope.type, status=status, attempt=job.task.attempt)

    def renew(self) -> None:
        try:
            self.log.renew()
        except BusUnavailable:
            pass
        except HistoryLost:
            self.lose_history()
        except Fenced:
            self.fenced = True
            raise

    def stop(self) -> bool:
        """True when the stop went through."""
        try:
            self.log.close()
        except (BusUnavailable, HistoryLost):
            return False
        return True


@dataclass
class Verdict:
    """What the streams hold for each worker and message id."""

    finals: dict[tuple[str, str], list[CommandResult]] = field(default_factory=lambda: defaultdict(list))
    after_final: list[CommandResult] = field(default_factory=list)
    dead: Counter[str] = field(default_factory=Counter)


def prime(client: Client) -> None:
    """Load the scripts, so that a history takes the same calls whether or not another one ran before it."""
    worker = WorkerLog(Bus(Settings(namespace="prime"), client=client), "prime/0", Registration(instance="prime"))
    assert not isinstance(worker.open(), Taken)
    worker.renew()
    worker.close()


class World:
    """One namespace with its workers and commands, driven by one seed."""

    loses_history = False

    def __init__(self, client: Client, namespace: str, seed: int, workers: int, clock: Clock) -> None:
        self.client = client
        self.clock = clock
        self.namespace = namespace
        self.rng = random.Random(seed)
        self.keys = Bus(Settings(namespace=namespace), client=client).keys
        self.names = [f"sim/{rank}" for rank in range(workers)]
        self.kinds: dict[str, Kind] = {}
        self.fields: dict[str, Fields] = {}
        self.begun: Counter[tuple[str, str]] = Counter()
        self.alive: dict[str, Life] = {}
        self.paused: list[Life] = []
        self.ended: list[Life] = []
        self.calls = 0
        """Calls of all processes so far."""
        self.strike: tuple[int, str] | None = None
        """Which call is to suffer which fault."""

    # -- what happens ------------------------------------------------------------------------------------------

    def run(self, steps: int, *, fault_rate: float, kill_rate: float) -> None:
        """Random steps, then quiet."""
        self.begin()
        for _ in range(steps):
            for life in [*self.alive.values(), *self.paused]:
                life.line.fault_rate, life.line.kill_rate = fault_rate, kill_rate
            self.step()
        self.settle()

    def begin(self) -> None:
        """All workers are registered before the first command: they owe a result for every one."""
        for name in self.names:
            self.start(name)
            self.alive[name].turn()
            assert self.alive[name].opened

    def step(self) -> None:
        name = self.rng.choice(self.names)
        self.clock.now += self.rng.choice([0.01, 0.01, 1.1])
        action = self.rng.choices(
            ["issue", "turn", "renew", "kill", "pause", "resume", "stop", "late"], [6, 10, 1, 1, 1, 1, 0.5, 2]
        )[0]
        life = self.alive[name]
        if action == "issue":
            for _ in range(self.rng.choice([1, 1, 2, 5])):
                self.issue()
        elif action == "turn":
            self.guarded(life, life.turn)
        elif action == "renew" and life.opened:
            self.guarded(life, life.renew)
        elif action == "kill":
            self.bury(life)
        elif action == "pause":
            self.pause(name)
        elif action == "resume" and self.paused:
            paused = self.rng.choice(self.paused)
            self.guarded(paused, paused.turn)
        elif action == "stop" and life.opened:
            self.guarded(life, lambda: self.stop(life))
        elif action == "late":
            for other in [*self.alive.values(), *self.paused, *self.ended]:
                if self.rng.random() < 0.5:
                    other.line.deliver_late()

    def issue(self) -> None:
        if self.kinds and self.rng.random() < 0.15:  # a retried XADD whose first reply was lost
            self.write(self.rng.choice(list(self.fields)))
            return
        own_id = f"c{len(self.kinds)}"
        kind = self.rng.choices(list(Kind), [6, 4, 3, 0.4, 1])[0]
        self.add(own_id, kind)

    def add(self, own_id: str, kind: Kind) -> None:
        """Write one new command."""
        message = Evict(chunk_hashes=(1,)) if kind is Kind.DEFERRED else Prefetch(chunk_hashes=(1, 2))
        fields = encode_entry(message, message_id=own_id)
        if kind is Kind.BAD:
            fields[b"body"] = b"\xc1\xff"
        self.kinds[own_id], self.fields[own_id] = kind, fields
        self.write(own_id)

    def write(self, own_id: str) -> None:
        self.client.xadd(self.keys.commands, self.fields[own_id])

    def guarded(self, life: Life, act: Callable[[], object]) -> None:
        """Act, and see to what is left of the process when it dies or finds itself superseded."""
        try:
            act()
        except Killed:
            self.bury(life)
        except Fenced:
            assert life.superseded, "fenced, and nobody had taken over"
            if life in self.paused:
                self.paused.remove(life)
            self.ended.append(life)
            if self.alive[life.log.name] is life:
                self.start(life.log.name)

    def bury(self, life: Life) -> None:
        """The process is gone, and its heartbeat with it."""
        name = life.log.name
        self.ended.append(life)
        if life in self.paused:
            self.paused.remove(life)
        else:
            self.start(name)

    def pause(self, name: str) -> None:
        """The process stands still until its heartbeat has lapsed, and a successor begins."""
        life = self.alive[name]
        life.superseded = True
        self.paused.append(life)
        self.start(name)

    def stop(self, life: Life) -> None:
        if not life.stop():
            self.bury(life)  # it ends all the same, and does not know how much of its farewell has arrived
            return
        self.ended.append(life)
        self.start(life.log.name)

    def start(self, name: str) -> None:
        self.lapse(name)
        self.alive[name] = Life(self, name)

    def holder(self, name: str) -> str:
        """The token of the process whose heartbeat has not lapsed."""
        return (self.client.get(self.keys.live(name)) or b"").decode()

    def lapse(self, name: str) -> None:
        self.client.delete(self.keys.live(name))

    # -- how it ends -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """No more faults: whoever is still there runs until nothing is left to do."""
        self.strike = None
        for life in [*self.alive.values(), *self.paused]:
            life.line.fault_rate = life.line.kill_rate = 0.0
        if self.rng.random() < 0.5:
            self.deliver_all()
        for paused in list(self.paused):
            self.guarded(paused, paused.turn)
        for name in self.names:
            for _ in range(MAX_TURNS):
                life = self.alive[name]
                busy = True

                def turn(life: Life = life) -> None:
                    nonlocal busy
                    busy = life.turn()

                self.guarded(life, turn)
                if not busy:
                    break
            else:
                raise AssertionError(f"{name} is still busy after {MAX_TURNS} turns")
        self.deliver_all()

    def clear(self) -> None:
        """Leave nothing on the server."""
        for key in self.client.scan_iter(match=self.keys.prefix.replace("[", "[[]") + "*", count=1000):
            self.client.delete(key)

    def deliver_all(self) -> None:
        for life in [*self.alive.values(), *self.paused, *self.ended]:
            life.line.deliver_late()

    def verdict(self) -> Verdict:
        found = Verdict()
        for entry_id, fields in self.client.xrange(self.keys.results):
            message = decode_entry(entry_id, fields).message
            assert isinstance(message, Results)
            for result in message.results:
                key = message.worker, result.command_id
                if result.status.final:
                    found.finals[key].append(result)
                elif found.finals[key]:
                    found.after_final.append(result)
        for entry_id, fields in self.client.xrange(self.keys.dead):
            letter = decode_entry(entry_id, fields).message
            assert isinstance(letter, DeadLetter)
            found.dead[letter.message_id] += 1
        return found

    def judge(self) -> None:
        """Everything that the protocol promises. Raises AssertionError."""
        found = self.verdict()
        for name in self.names:
            for own_id, kind in self.kinds.items():
                finals = found.finals[name, own_id]
                assert len(finals) == 1, f"{name} {own_id} ({kind}): {len(finals)} final results: {finals}"
                self._judge_result(name, own_id, kind, finals[0])
            checkpoint = self.client.hgetall(self.keys.worker(name))
            assert checkpoint[b"pending"] == b"", f"{name} still has commands in hand"
            assert checkpoint[b"attempts"] == b"", f"{name} still counts attempts: {checkpoint[b'attempts']!r}"
        assert not found.after_final, f"told again after the end: {found.after_final}"
        for own_id, kind in self.kinds.items():
            if kind is Kind.BAD:
                assert found.dead[own_id] == 1, f"{own_id}: {found.dead[own_id]} dead letters"
        for life in [*self.alive.values(), *self.paused, *self.ended]:
            twice = [own_id for own_id, count in life.executed.items() if count > 1]
            assert not twice, f"carried out twice in one life: {twice}"

    def _judge_result(self, name: str, own_id: str, kind: Kind, result: CommandResult) -> None:
        if kind is Kind.BAD:
            assert result.status is Status.REJECTED
            return
        poison = result.error is not None and result.error.code == "poison"
        if kind is Kind.KILLER:
            assert poison, f"{own_id} kills, and was not set aside: {result}"
            # A process that stood still and goes on does not know that it was taken for dead.
            others = sum(life.superseded for life in [*self.paused, *self.ended])
            assert self.begun[name, own_id] <= MAX_CRASHES + others
        elif poison:
            # Nobody knows how far the life before the first attempt on record had come with its last batch.
            lives = [life for life in self.ended + self.paused if life.log.name == name and own_id in life.taken]
            assert len(lives) >= MAX_CRASHES - 1, f"{own_id} was set aside too early"
        else:
            assert result.status is Status.DONE, f"{own_id} ({kind}): {result}"
