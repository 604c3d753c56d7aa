"""Worker processes that answer everything at once, and what tests write and read beside them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvbus.errors import BusUnavailable, Fenced, HistoryLost
from kvbus.protocol.codec import decode_entry, encode_entry
from kvbus.protocol.commands import Ping
from kvbus.protocol.events import WorkerGap
from kvbus.protocol.results import CommandResult, Results, Status
from kvbus.streams.checkpoint import Taken
from kvbus.streams.connection import Bus, Client
from kvbus.streams.keys import Keys
from kvbus.streams.registry import Registration
from kvbus.streams.subscription import message_id
from kvbus.streams.worker_log import WorkerLog
from tests.servers import eventually

NAME = "node/0"
QUICK = {"block_ms": 300, "heartbeat_ms": 100, "live_ms": 400, "connect_timeout_ms": 500, "reply_timeout_ms": 1_000}


class Namespace:
    """What the tests write and read beside the workers."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.keys = Keys(namespace)

    def command(self, own_id: str) -> str:
        entry_id: bytes = self.client.xadd(self.keys.commands, encode_entry(Ping(), message_id=own_id))
        return entry_id.decode()

    def finals(self, worker: str = NAME) -> Counter[str]:
        """How often each command was answered for good by one worker."""
        found: Counter[str] = Counter()
        for entry_id, fields in self.client.xrange(self.keys.results):
            message = decode_entry(entry_id, fields).message
            assert isinstance(message, Results)
            if message.worker == worker:
                found.update(result.command_id for result in message.results if result.status.final)
        return found

    def gaps(self) -> list[WorkerGap]:
        """All that workers told of what they missed, repeats of one telling left out."""
        found: dict[str, WorkerGap] = {}
        for entry_id, fields in self.client.xrange(self.keys.events):
            message = decode_entry(entry_id, fields).message
            if isinstance(message, WorkerGap):
                found[message_id(entry_id.decode(), fields)] = message
        return list(found.values())


class Process:
    """A worker process's loop, in a thread: takes commands, answers them at once, reopens when history is lost."""

    def __init__(self, bus: Bus, name: str = NAME) -> None:
        instance, rank = name.split("/")
        self.log = WorkerLog(bus, name, Registration(instance=instance, rank=int(rank)))
        self.executed: list[str] = []
        self.lost = self.unavailable = 0
        self.fenced = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker")

    def start(self) -> Process:
        self._thread.start()
        eventually(lambda: self.log.epoch, what="the worker's registration")
        return self

    def _run(self) -> None:
        opened = lost = False
        while not self._stop.is_set():
            try:
                if not opened:
                    opened = not isinstance(self.log.open(), Taken)
                elif lost:
                    self.log.reopen()
                    lost = False
                else:
                    self._round()
            except HistoryLost:
                self.lost += 1
                lost = True
                self._stop.wait(0.02)
            except Fenced:
                self.fenced = True
                return
            except BusUnavailable:
                self.unavailable += 1
                self._stop.wait(0.02)

    def _round(self) -> None:
        self.log.renew()
        for task in self.log.read():
            self.executed.append(task.envelope.id)
            self.log.finish(task.entry_id, done(task.envelope.id))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.log.disconnect()


StartProcess = Callable[[Bus], Process]


def done(own_id: str) -> CommandResult:
    return CommandResult(command_id=own_id, type="ping", status=Status.DONE)


def opened(bus: Bus, name: str = NAME) -> WorkerLog:
    instance, rank = name.split("/")
    log = WorkerLog(bus, name, Registration(instance=instance, rank=int(rank)))
    assert log.open() is None
    return log


def work(log: WorkerLog) -> list[str]:
    """Take and answer all there is, and commit; reopen where history is lost. Returns what was carried out."""
    executed: list[str] = []
    lost = 0
    while True:
        try:
            tasks = log.read(block_ms=0)
        except HistoryLost:
            lost += 1
            assert lost < 4, "it spins"
            log.reopen()
            continue
        for task in tasks:
            executed.append(task.envelope.id)
            log.finish(task.entry_id, done(task.envelope.id))
        if not tasks and not log.dirty:
            return executed


def check_place(log: WorkerLog) -> None:
    """Compare with the server's counters at the next read, as a reader does every few seconds."""
    log.disconnect()


def calls(client: Client, *names: str) -> int:
    """How often the server was called so far."""
    stats: dict[str, Any] = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in names)


def await_blocked(client: Client) -> None:
    eventually(lambda: client.info("clients")["blocked_clients"] >= 1, what="the blocked read")


def answered(space: Namespace, own_id: str) -> None:
    eventually(lambda: space.finals()[own_id], what=f"a final result of {own_id}")
