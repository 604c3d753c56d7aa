"""The examples in other languages, against a live system: real LMCache workers, a real publisher, a real Valkey."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from examples.system import System
from kvbus.client import KVBus
from kvbus.protocol import DDR, format_hash
from kvbus.protocol.hashes import parse_hash
from kvbus.settings import Settings
from kvbus.streams.connection import Bus
from publisher import FinishedRequest, Publisher
from tests.servers import RealServer, eventually, missing

# Two workers load LMCache, and npm fetches packages: slow on a busy machine.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "docs" / "golden.json"
HASHES = (
    "-6ed9a448787a198f",
    "0",
    "ffffffffffffffff",
    "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
)


class Told(msgspec.Struct, frozen=True):
    """A finished request as an example has told it."""

    request_id: str
    session: str | None
    chunk_hashes: tuple[str, ...]
    missed: int


class Example:
    """One language's program. argv: before its own arguments."""

    def __init__(self, name: str, argv: Sequence[str], directory: Path) -> None:
        self.name, self.argv, self.directory = name, tuple(argv), directory

    def environment(self, settings: Settings) -> dict[str, str]:
        return os.environ | {"KVBUS_REDIS_URL": settings.redis_url, "KVBUS_NAMESPACE": settings.namespace}

    def run(self, settings: Settings, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        done = subprocess.run(
            [*self.argv, *arguments],
            cwd=self.directory,
            env=self.environment(settings) | (env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout

    def command(self, settings: Settings, kind: str, hashes: Sequence[str]) -> tuple[int, dict[str, dict[str, Any]]]:
        """(exit code, worker -> {"status", "counts"})"""
        code, out = self.run(settings, kind, *hashes)
        answers = [json.loads(line) for line in out.splitlines()]
        return code, {answer["worker"]: answer for answer in answers}

    def follow_arguments(self, place: Path, *, from_start: bool, count: int) -> tuple[list[str], dict[str, str]]:
        return [
            "follow",
            str(place),
            *(["--from-start"] if from_start else []),
            *(["--count", str(count)] if count else []),
        ], {}

    def told(self, line: str) -> Told:
        return msgspec.json.decode(line, type=Told)

    def follow(self, settings: Settings, place: Path, *, from_start: bool = False, count: int = 0) -> list[Told]:
        arguments, env = self.follow_arguments(place, from_start=from_start, count=count)
        code, out = self.run(settings, *arguments, env=env)
        assert code == 0
        return [self.told(line) for line in out.splitlines()]

    def follow_until_killed(self, settings: Settings, place: Path, lines: int) -> list[Told]:
        """Follow from the start, and SIGKILL it after so many lines."""
        arguments, env = self.follow_arguments(place, from_start=True, count=0)
        process = subprocess.Popen(
            [*self.argv, *arguments],
            cwd=self.directory,
            env=self.environment(settings) | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            found = [self.told(process.stdout.readline()) for _ in range(lines)]
            os.killpg(process.pid, signal.SIGKILL)  # bash and whatever it runs at this moment
            rest, _ = process.communicate()
            return found + [self.told(line) for line in rest.splitlines() if line.endswith(("}", " ")) or self.bare]
        finally:
            watchdog.cancel()
            process.kill()
            process.wait()

    bare = False


class PythonExample(Example):
    def follow_arguments(self, place: Path, *, from_start: bool, count: int) -> tuple[list[str], dict[str, str]]:
        arguments, env = super().follow_arguments(place, from_start=from_start, count=count)
        return [arguments[0], "--state", *arguments[1:]], env


class RedisCliExample(Example):
    """Lines of text in place of JSON: a shell has none."""

    bare = True

    def run(self, settings: Settings, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        script = "./follow.sh" if arguments[0] == "follow" else "./command.sh"
        rest = arguments[1:] if arguments[0] == "follow" else arguments
        return Example(self.name, ["bash", script], self.directory).run(settings, *rest, env=env)

    def command(self, settings: Settings, kind: str, hashes: Sequence[str]) -> tuple[int, dict[str, dict[str, Any]]]:
        code, out = self.run(settings, kind, *hashes)
        answers = {}
        for line in out.splitlines():
            worker, status, *counts = line.split()
            numbers = {name: int(number) for name, number in (item.split("=") for item in counts)}
            answers[worker] = {"status": status, "counts": numbers}
        return code, answers

    def follow_arguments(self, place: Path, *, from_start: bool, count: int) -> tuple[list[str], dict[str, str]]:
        return ["follow", str(place)], {"FROM": "start" if from_start else "end", "COUNT": str(count)}

    def follow_until_killed(self, settings: Settings, place: Path, lines: int) -> list[Told]:
        example = Example(self.name, ["bash", "./follow.sh"], self.directory)
        example.told, example.bare = self.told, True  # type: ignore[method-assign]
        example.follow_arguments = (  # type: ignore[method-assign]
            lambda place, **_: ([str(place)], {"FROM": "start", "COUNT": "0"})
        )
        return example.follow_until_killed(settings, place, lines)

    def told(self, line: str) -> Told:
        request, session, missed, *hashes = line.split()
        name = session.removeprefix("session=")
        return Told(request, None if name == "-" else name, tuple(hashes), int(missed.removeprefix("missed=")))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Example:
    """The Node example with its packages, installed by npm into a temporary directory."""
    if shutil.which("npm") is None:
        missing("npm")
    directory = tmp_path_factory.mktemp("node")
    for name in ("package.json", "memory_client.mjs", "golden.mjs"):
        shutil.copy(ROOT / "examples" / "node" / name, directory)
    done = subprocess.run(
        ["npm", "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"npm cannot install ioredis and @msgpack/msgpack: {done.stderr[-300:]}")
    return Example("node", ["node", "memory_client.mjs"], directory)


@pytest.fixture(params=["python", "redis_cli", "node"])
def example(request: pytest.FixtureRequest) -> Example:
    if request.param == "node":
        found: Example = request.getfixturevalue("node")
        return found
    directory = ROOT / "examples" / request.param
    if request.param == "python":
        return PythonExample("python", [sys.executable, "memory_client.py"], directory)
    if shutil.which("redis-cli") is None:
        missing("redis-cli")
    return RedisCliExample("redis_cli", [], directory)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Two ranks with real LMCache engines."""
    with System(tmp_path_factory.mktemp("live"), namespace="examples", ranks=2, facade=False) as made:
        yield made


def test_prefetch_and_evict_on_real_workers(system: System, example: Example) -> None:
    tokens = [hash(example.name) % 50_000 + place for place in range(64 * 5)]
    hashes = system.store(tokens, seed=3)
    settings = system.settings()
    with KVBus(settings) as bus:
        bus.evict(hashes, locations=[DDR]).results(30)
        code, answers = example.command(settings, "prefetch", [*hashes, "7"])
        assert code == 0
        assert set(answers) == {"llm-a/0", "llm-a/1"}
        for answer in answers.values():
            assert answer["status"] == "done"
            assert {name: int(answer["counts"].get(name, 0)) for name in ("requested", "loaded", "missing")} == {
                "requested": 6,
                "loaded": 5,
                "missing": 1,
            }
        held = bus.lookup(hashes).results(30)
        assert all(DDR in answer.result.held.tiers_of(0) for answer in held.values() if answer.result.held)
        code, answers = example.command(settings, "evict", hashes)
        assert code == 0
        assert {int(answer["counts"]["evicted"]) for answer in answers.values()} == {5}


def test_a_wrong_command_is_told(system: System, example: Example) -> None:
    """`-0` is no hash: every worker rejects the command, and the example ends with 1."""
    if example.name == "redis_cli":  # the others do not get as far as sending it
        code, answers = example.command(system.settings(), "evict", ["-0"])
        assert code == 1
        assert {answer["status"] for answer in answers.values()} == {"rejected"}


def _publish(publisher: Publisher, number: int, session: str | None) -> None:
    event = FinishedRequest(
        request_id=f"r{number}",
        instance="node-1",
        reason="stop",
        chunk_hashes=tuple(parse_hash(text) for text in HASHES[: number % 5]),
        chunk_size=64,
        prompt_tokens=7,
        context={"session": session} if session else {},
    )
    assert publisher.publish(event)


def _expected(number: int, missed: int = 0) -> Told:
    return Told(f"r{number}", f"s{number}", HASHES[: number % 5], missed)


@pytest.fixture
def events(valkey: RealServer, namespace: str) -> Iterator[Publisher]:
    """A real publisher in a namespace of its own."""
    publisher = Publisher(valkey.settings(namespace, batch_events=1), name="node-1/scheduler", instance="node-1")
    publisher.start()
    yield publisher
    publisher.close(10)


def _length(bus: Bus, wanted: int) -> bool:
    return bool(bus.client.xlen(bus.keys.events) >= wanted)


def test_finished_requests_are_read_and_resumed(
    valkey: RealServer, namespace: str, events: Publisher, example: Example, tmp_path: Path
) -> None:
    settings, bus = valkey.settings(namespace), valkey.bus(namespace)
    place = tmp_path / "place"
    for number in range(5):
        _publish(events, number, f"s{number}")
    eventually(lambda: _length(bus, 5))
    assert example.follow(settings, place, from_start=True, count=2) == [_expected(0), _expected(1)]
    # A batch that is sent again, and an event that never came.
    first, *_, last = bus.client.xrange(bus.keys.events)
    bus.client.xadd(bus.keys.events, first[1])
    bus.client.xadd(bus.keys.events, last[1])
    for number in (5, 6):
        _publish(events, number, f"s{number}")
    eventually(lambda: _length(bus, 9))
    lost = bus.client.xrevrange(bus.keys.events, count=2)[1][0]
    bus.client.xdel(bus.keys.events, lost)
    found = example.follow(settings, place, count=4)
    assert found == [_expected(2), _expected(3), _expected(4), _expected(6, missed=1)]


def test_killed_in_the_middle_it_loses_nothing(
    valkey: RealServer, namespace: str, events: Publisher, example: Example, tmp_path: Path
) -> None:
    settings, bus = valkey.settings(namespace), valkey.bus(namespace)
    place = tmp_path / "place"
    for number in range(12):
        _publish(events, number, f"s{number}")
    eventually(lambda: _length(bus, 12))
    told = [item.request_id for item in example.follow_until_killed(settings, place, lines=3)]
    assert told == [f"r{number}" for number in range(len(told))]
    # Killed between telling and saving, it tells one again; that is what "at least once" means.
    begin = len(told) - 1 if _saved(place) < len(told) else len(told)
    again = [item.request_id for item in example.follow(settings, place, from_start=True, count=12 - begin)]
    assert again == [f"r{number}" for number in range(begin, 12)]


def _saved(place: Path) -> int:
    """How many events the place lies behind: the seq that comes next."""
    if not place.exists():
        return 0
    found = re.search(r'"node-1/scheduler":\s?\[\d+,\s?(\d+)\]|\[node-1/scheduler\]="\d+ (\d+)"', place.read_text())
    assert found, place.read_text()
    return int(found[1] or found[2])


def test_the_codec_of_the_node_example_reads_all_golden_entries(node: Example) -> None:
    done = subprocess.run(
        ["node", "golden.mjs", str(GOLDEN)], cwd=node.directory, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 40


def test_the_codec_of_redis_cli_reads_every_hash(valkey: RealServer, namespace: str, tmp_path: Path) -> None:
    if shutil.which("redis-cli") is None:
        missing("redis-cli")
    bus = valkey.bus(namespace)
    for entry in json.loads(GOLDEN.read_text())["entries"]:
        if entry["type"] == "request.finished":
            bus.client.xadd(bus.keys.events, {"type": entry["type"], "body": bytes.fromhex(entry["body_hex"])})
    hashes = [parse_hash(item["text"]) for item in json.loads(GOLDEN.read_text())["hashes"]]
    body = msgspec.msgpack.encode({"publisher": "p", "epoch": 1, "seq": 0, "request_id": "x", "chunk_hashes": hashes})
    bus.client.xadd(bus.keys.events, {"type": "request.finished", "body": body})
    example = RedisCliExample("redis_cli", [], ROOT / "examples" / "redis_cli")
    told = example.follow(valkey.settings(namespace), tmp_path / "place", from_start=True, count=2)
    assert told[0].chunk_hashes == ("-6ed9a448787a198f", "-4ca98d8c9e52152e", "3f5c45ecbab5e9fd")
    assert told[1].chunk_hashes == tuple(format_hash(item) for item in hashes)
