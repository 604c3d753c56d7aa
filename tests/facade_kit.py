"""A facade on a free port in a thread of this process, and workers of a few lines that answer as a test tells them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
import msgspec

from kvbus.errors import BusUnavailable, HistoryLost
from kvbus.facade.app import create_app
from kvbus.facade.server import Server, listen, make_server
from kvbus.protocol.results import CommandResult, Counts, Status
from kvbus.settings import Settings
from kvbus.streams.connection import Bus
from kvbus.streams.registry import Registration
from kvbus.streams.worker_log import Task, WorkerLog
from tests.servers import eventually

Answering = Callable[[Task], Sequence[CommandResult]]
"""What a worker says to a command: interim results, then at most one final one. None at all: it stays in hand."""

QUICK = {"heartbeat_ms": 100, "live_ms": 600, "block_ms": 100}
"""A worker counts as dead soon after its last sign of life."""


def result(task: Task, status: Status = Status.DONE, **counts: int) -> CommandResult:
    """A result for the task's command."""
    return CommandResult(
        command_id=task.envelope.id,
        type=task.envelope.type,
        status=status,
        lookup_id=getattr(task.envelope.message, "lookup_id", None),
        counts=Counts(**counts),
    )


def evict_all(task: Task) -> Sequence[CommandResult]:
    """Every chunk was in one tier."""
    number = len(getattr(task.envelope.message, "chunk_hashes", ()))
    return [result(task, requested=number, evicted=number, evicted_pairs=number)]


def say_nothing(task: Task) -> Sequence[CommandResult]:
    return []


class StandIn:
    """A worker on the real WorkerLog, without an engine. `answering` may be changed at any time."""

    def __init__(self, settings: Settings, registration: Registration, answering: Answering = evict_all) -> None:
        self.name = f"{registration.instance}/{registration.rank}"
        self.answering = answering
        self.seen: list[Task] = []
        self._bus = Bus(settings, client_name="stand-in")
        self._log = WorkerLog(self._bus, self.name, registration)
        self._stop = threading.Event()
        self._die = False
        self._awake = threading.Event()
        self._awake.set()
        self._asleep = threading.Event()
        eventually(lambda: self._log.open() is None, what=f"{self.name} takes its name")
        self._thread = threading.Thread(target=self._run, name=self.name)
        self._thread.start()

    def freeze(self) -> None:
        """Takes nothing and answers nothing, as a process after SIGSTOP."""
        self._awake.clear()
        eventually(self._asleep.is_set, what=f"{self.name} is frozen")

    def thaw(self) -> None:
        self._awake.set()

    def die(self) -> None:
        """End without a word: the registration stays, the heartbeat lapses."""
        self._die = True
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._awake.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._bus.close()

    def _run(self) -> None:
        beat_at = 0.0
        while not self._stop.is_set():
            if not self._awake.is_set():
                self._asleep.set()
                self._awake.wait()
                self._asleep.clear()
            try:
                if time.monotonic() - beat_at > self._bus.settings.heartbeat_ms / 1000:
                    self._log.renew()
                    beat_at = time.monotonic()
                for task in self._log.read(block_ms=50):
                    self._answer(task)
                self._log.flush()
            except BusUnavailable:
                self._stop.wait(0.05)
            except HistoryLost:
                with suppress(BusUnavailable, HistoryLost):
                    self._log.reopen()
        if not self._die:
            with suppress(BusUnavailable, HistoryLost):
                self._log.close()
        self._log.disconnect()

    def _answer(self, task: Task) -> None:
        self.seen.append(task)
        for answer in self.answering(task):
            if answer.status.final:
                self._log.finish(task.entry_id, answer)
            else:
                self._log.interim(task.entry_id, answer)


class RunningFacade:
    """The facade over real sockets."""

    def __init__(self, settings: Settings) -> None:
        self.settings = msgspec.structs.replace(settings, rest_port=0)
        self._socket = listen(self.settings)
        self.host, self.port = self._socket.getsockname()[:2]
        self.url = f"http://{self.host}:{self.port}"
        self.app = create_app(self.settings)
        self.server: Server = make_server(self.app, self.settings)
        self._clients: list[httpx.Client] = []
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]}, name="facade")
        self._thread.start()
        eventually(lambda: self.server.started, what="the facade's start")
        self.http = self.client()

    def client(self, **options: Any) -> httpx.Client:
        client = httpx.Client(base_url=self.url, **{"timeout": 30.0, "trust_env": False, "verify": False, **options})
        self._clients.append(client)
        return client

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "the facade did not stop"


class Scene:
    """Facades and workers of one namespace, all stopped at the end."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self.settings = settings
        self._stack = stack

    def worker(self, name: str = "a/0", answering: Answering = evict_all, **registration: Any) -> StandIn:
        instance, _, rank = name.partition("/")
        made = StandIn(self.settings, Registration(instance=instance, rank=int(rank), **registration), answering)
        self._stack.callback(made.stop)
        return made

    def facade(self, **values: Any) -> RunningFacade:
        made = RunningFacade(msgspec.structs.replace(self.settings, **values))
        self._stack.callback(made.stop)
        return made

    def bus(self) -> Bus:
        made = Bus(self.settings, client_name="test")
        self._stack.callback(made.close)
        return made

    def commands(self) -> int:
        """Commands that were ever put on the stream."""
        bus = self.bus()
        return int(bus.client.xlen(bus.keys.commands))


@contextmanager
def scene(settings: Settings) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(settings, stack)
