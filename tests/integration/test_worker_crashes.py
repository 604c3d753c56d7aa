"""Workers with real LMCache engines, killed in the middle of commands: one final result each, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbus.client import CommandHandle, KVBus
from kvbus.protocol import DDR, CommandResult, DeadLetter, Results, Status, decode_entry
from tests.servers import RealServer, eventually

NAME = "i/0"
TIMES = {"live_ms": 600, "heartbeat_ms": 100, "block_ms": 100}


@pytest.fixture(scope="module")
def zygote() -> Iterator[subprocess.Popen[str]]:
    env = os.environ | {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
    env |= {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.integration.zygote"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()


class Workers:
    """Starts workers of one namespace and knows which of them are alive."""

    def __init__(self, zygote: subprocess.Popen[str], client: KVBus, disk: Path) -> None:
        self._zygote, self._client, self._disk = zygote, client, disk
        self.pids: list[int] = []

    def start(
        self, crash: dict[str, Any] | None = None, *, rank: int = 0, texts: tuple[int, ...] = (1, 2)
    ) -> list[str]:
        """Start one and wait until it is registered under a new epoch; returns the chunk hashes that it holds."""
        epochs = {member.registration.epoch for member in self._client.workers()}
        settings = TIMES | {"redis_url": self._client.settings.redis_url, "namespace": self._client.settings.namespace}
        request = {"settings": settings, "instance": "i", "rank": rank, "texts": [1, 2], "crash": crash}
        request["disk"] = str(self._disk / f"{rank}-{len(self.pids)}")
        Path(request["disk"]).mkdir(parents=True)
        answer = _ask(self._zygote, request)
        self.pids.append(answer["pid"])
        eventually(
            lambda: any(member.registration.epoch not in epochs for member in self._client.workers()),
            what="the worker to register",
        )
        hashes: list[str] = answer["hashes"]
        return hashes

    def gone(self, pid: int | None = None) -> None:
        """Wait until the newest worker (or the one with this pid) has died."""
        waited = pid or self.pids[-1]
        eventually(lambda: not _alive(waited), what=f"process {waited} to end")

    def signal(self, number: int) -> None:
        os.kill(self.pids[-1], number)


def _ask(zygote: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    zygote.stdin.write(json.dumps(request) + "\n")
    zygote.stdin.flush()
    answer: dict[str, Any] = json.loads(zygote.stdout.readline())
    return answer


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def client(valkey: RealServer, namespace: str) -> Iterator[KVBus]:
    with KVBus(valkey.settings(namespace, **TIMES)) as made:
        made.answers.start()
        yield made


@pytest.fixture
def workers(zygote: subprocess.Popen[str], client: KVBus, tmp_path: Path) -> Iterator[Workers]:
    made = Workers(zygote, client, tmp_path)
    yield made
    for pid in made.pids:
        if _alive(pid):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGTERM)
    for pid in made.pids:
        made.gone(pid)


def finals(client: KVBus) -> Counter[tuple[str, str]]:
    """How many final results each (worker, command) has on the stream."""
    found: Counter[tuple[str, str]] = Counter()
    for entry_id, fields in client.log.scan(client.bus.keys.results):
        message = decode_entry(entry_id, fields).message
        assert isinstance(message, Results)
        found.update((message.worker, result.command_id) for result in message.results if result.status.final)
    return found


def final(handle: CommandHandle, worker: str = NAME) -> CommandResult:
    eventually(lambda: worker in handle.state.finals, what=f"a final result of {handle} from {worker}")
    return handle.state.finals[worker].result


CRASHES: list[tuple[str, Callable[[list[str]], dict[str, Any]]]] = [
    ("load-before", lambda hashes: {"at": "load", "chunk": hashes[3], "when": "before"}),
    ("load-after", lambda hashes: {"at": "load", "chunk": hashes[3], "when": "after"}),
    ("evict-before", lambda hashes: {"at": "evict", "chunk": hashes[9], "when": "before"}),
    ("evict-after", lambda hashes: {"at": "evict", "chunk": hashes[9], "when": "after"}),
    ("commit-before", lambda _: {"at": "commit", "number": 2, "when": "before"}),
    ("commit-after", lambda _: {"at": "commit", "number": 2, "when": "after"}),
]


@pytest.fixture(scope="module")
def hashes(zygote: subprocess.Popen[str]) -> list[str]:
    """What every worker here stores: the same texts, so the same hashes."""
    found: list[str] = _ask(zygote, {"hashes_of": [1, 2]})["hashes"]
    return found


@pytest.mark.parametrize("crash", [make for _, make in CRASHES], ids=[name for name, _ in CRASHES])
def test_killed_at_any_point_every_command_has_one_result(
    workers: Workers, client: KVBus, hashes: list[str], crash: Callable[[list[str]], dict[str, Any]]
) -> None:
    assert workers.start(crash(hashes)) == hashes
    sent = [
        client.evict(hashes[:8], locations=[DDR]),
        client.prefetch(hashes[:8]),
        client.evict(hashes[8:]),
        client.lookup(hashes),
        client.ping(),
    ]
    workers.gone()
    workers.start()
    sent.append(client.prefetch(hashes[:2]))
    for handle in sent:
        assert final(handle).status in (Status.DONE, Status.PARTIAL), final(handle)
    final(client.ping())
    assert {pair: number for pair, number in finals(client).items() if number != 1} == {}
    assert {handle.command_id for handle in sent} <= {command_id for _, command_id in finals(client)}


def test_the_third_crash_on_an_entry_sets_it_aside(workers: Workers, client: KVBus, hashes: list[str]) -> None:
    crash = {"at": "load", "chunk": hashes[3], "when": "before"}
    workers.start(crash)
    before, poison, behind = client.ping(), client.prefetch(hashes[:8]), client.evict(hashes[8:10])
    # The worker dies on it three times; whoever comes then sets it aside, still with the same bug.
    for _ in range(2):
        workers.gone()
        workers.start(crash)
    workers.gone()
    workers.start(crash)
    rejected = final(poison)
    assert rejected.status is Status.REJECTED
    assert rejected.error is not None
    assert (rejected.error.code, rejected.attempt) == ("poison", 3)
    letters = [decode_entry(*entry).message for entry in client.log.scan(client.bus.keys.dead)]
    assert [(letter.message_id, letter.code) for letter in letters if isinstance(letter, DeadLetter)] == [
        (poison.command_id, "poison")
    ]
    assert final(before).status is Status.DONE
    assert final(behind).status is Status.DONE
    assert final(client.ping()).status is Status.DONE
    assert set(finals(client).values()) == {1}


def test_a_worker_told_to_stop_reports_only_what_it_did(workers: Workers, client: KVBus, hashes: list[str]) -> None:
    workers.start()
    sent = [
        client.prefetch(hashes[:8]) if number % 2 else client.evict(hashes[:8], locations=[DDR]) for number in range(60)
    ]
    workers.signal(signal.SIGTERM)
    workers.gone()
    answered = finals(client)
    assert set(answered.values()) <= {1}
    left = [handle for handle in sent if (NAME, handle.command_id) not in answered]
    workers.start()
    for handle in left:
        final(handle)
    assert set(finals(client).values()) == {1}
    assert len(finals(client)) == len(sent)


def test_a_paused_worker_that_was_superseded_stops_itself(workers: Workers, client: KVBus, hashes: list[str]) -> None:
    workers.start()
    final(client.ping())
    eventually(lambda: client.bus.client.exists(client.bus.keys.stats(NAME)), what="the keeper's first round")
    old, connections = workers.pids[-1], len(_connections(client, NAME))
    assert connections > 0
    os.kill(old, signal.SIGSTOP)
    sent = [client.evict(hashes[:4], locations=[DDR]), client.prefetch(hashes[:4])]
    workers.start()
    for handle in sent:
        final(handle)
    os.kill(old, signal.SIGCONT)
    late = client.evict(hashes[4:8])
    final(late)
    eventually(lambda: len(_connections(client, NAME)) <= connections, what="the old process to let go of the bus")
    assert set(finals(client).values()) == {1}


def _connections(client: KVBus, name: str) -> list[dict[str, str]]:
    return [found for found in client.bus.client.client_list() if found["name"].startswith(f"kvbus-worker-{name}")]


def test_restarts_leave_no_trace(workers: Workers, client: KVBus, hashes: list[str]) -> None:
    epochs = []
    for _ in range(5):
        workers.start()
        epochs.append(next(member.registration.epoch for member in client.workers()))
        final(client.ping())
        workers.signal(signal.SIGTERM)
        workers.gone()
        assert client.workers() == ()
    assert epochs == sorted(set(epochs))
    keys = {
        key.decode().removeprefix(client.bus.keys.prefix)
        for key in client.bus.client.keys(client.bus.keys.prefix + "*")
    }
    assert keys <= {"events", "commands", "results", f"worker:{NAME}", f"stats:{NAME}"}
