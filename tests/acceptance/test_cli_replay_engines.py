"""A random run of real LMCache engines, recorded and replayed into fresh ones: every chunk ends in the same tiers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvbus.client import KVBus
from kvbus.ops.tail import history
from kvbus.protocol.commands import DDR, SSD
from tests.cli_kit import ROOT, Kvbus
from tests.servers import RealServer, eventually, require

pytestmark = pytest.mark.timeout(300)

CHUNK_SIZE, TEXTS, CHUNKS, RANKS, ROUNDS = 16, 6, 8, 2, 60


class Standalone:
    """One rank of a real engine in a process of its own, with the serving engine's part in our hands."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        ready = self._read()
        assert ready["ready"]
        self.name = ready["worker"]

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._read()
        assert answer["ok"], answer
        return answer

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the worker ended with {self._process.wait(10)}"
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def workers(url: str, namespace: str, directory: Path, env: dict[str, str]) -> Iterator[list[Standalone]]:
    """Fresh ranks of one instance, each with DDR and SSD of its own."""
    with ExitStack() as stack:
        processes = []
        for rank in range(RANKS):
            log = stack.enter_context((directory / f"rank-{rank}.log").open("wb"))
            options = {
                "namespace": namespace, "redis-url": url, "instance": "engine", "rank": rank, "world-size": RANKS,
                "disk": directory / f"ssd-{rank}", "cpu-gb": 0.05, "disk-gb": 1, "chunk-size": CHUNK_SIZE,
            }  # fmt: skip
            arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
            process = subprocess.Popen(
                [sys.executable, "-m", "worker_plugin.standalone", *arguments, "--control"],
                cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
            stack.enter_context(process)  # waits at the end; its stdin is closed by then, which ends it
            processes.append(process)
        found = [Standalone(process) for process in processes]
        for worker in found:
            for number in range(TEXTS):
                tokens = [number * 1_000 + place for place in range(CHUNKS * CHUNK_SIZE)]
                worker.ask(op="store", tokens=tokens, seed=number)
        yield found


def tiers(client: KVBus, chunks: list[str]) -> dict[str, list[tuple[str, ...]]]:
    """What each rank holds of each chunk, after all that was asked before."""
    answers = client.lookup(chunks).results(30)
    found = {}
    for name, answer in answers.items():
        assert answer.result.held is not None
        found[name] = [tuple(sorted(answer.result.held.tiers_of(place))) for place in range(len(chunks))]
    return found


def random_run(client: KVBus, texts: list[list[str]], rng: random.Random) -> None:
    """Prefetches, evicts and lookups of random chunks, many at a time."""
    handles = []
    for _ in range(ROUNDS):
        text = rng.choice(texts)
        chosen = rng.sample(text, rng.randint(1, len(text)))
        match rng.choice(["prefetch", "evict", "evict ddr", "evict ssd", "lookup"]):
            case "prefetch":
                handles.append(client.prefetch(chosen, lookup_id="turn_prefetch"))
            case "evict":
                handles.append(client.evict(chosen[:2]))
            case "evict ddr":
                handles.append(client.evict(chosen, locations=[DDR]))
            case "evict ssd":
                handles.append(client.evict(chosen[:3], locations=[SSD]))
            case _:
                handles.append(client.lookup(chosen))
        if rng.random() < 0.3:
            assert handles[-1].wait(30).complete
    for handle in handles:
        assert handle.wait(30).complete, handle


@pytest.mark.parametrize("seed", [1, 2])
def test_replay_into_fresh_workers_ends_in_the_same_tiers(
    kvbus: Kvbus, valkey: RealServer, namespace: str, tmp_path: Path, seed: int
) -> None:
    require("lmcache")
    env = kvbus.env | {"LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"}
    copy = f"{namespace}-copy"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with workers(valkey.url, namespace, tmp_path / "first", env) as first, KVBus(valkey.settings(namespace)) as client:
        texts = [
            first[0].ask(op="store", tokens=[n * 1_000 + p for p in range(CHUNKS * CHUNK_SIZE)], seed=n)["chunk_hashes"]
            for n in range(TEXTS)
        ]
        chunks = [chunk for text in texts for chunk in text]
        before = tiers(client, chunks)
        random_run(client, texts, random.Random(seed))
        expected = tiers(client, chunks)
    assert expected != before
    assert len({held for ranks in expected.values() for held in ranks}) >= 3, "chunks lie in many ways"
    kvbus("record", "run.kvrec").ok()
    assert kvbus("verify", "run.kvrec").ok().row["whole"]

    with workers(valkey.url, copy, tmp_path / "second", env) as second, KVBus(valkey.settings(copy)) as client:
        assert [worker.name for worker in second] == [worker.name for worker in first]
        assert tiers(client, chunks) == before, "fresh workers with the same texts"
        asked = len(list(history(client.bus, ("commands",))))
        refused = kvbus("replay", "run.kvrec", "--into", copy, "--speed", "max")
        assert refused.code == 2
        assert "live workers" in refused.err
        done = kvbus("replay", "run.kvrec", "--into", copy, "--speed", "max", "--stream", "commands", "--force").ok()
        total = asked + done.row["written"]
        assert len(list(history(client.bus, ("commands",)))) == total
        eventually(lambda: answered(client) == total * RANKS, within_s=60, what="every rank's answer to every command")
        assert tiers(client, chunks) == expected


def answered(client: KVBus) -> int:
    """Final results so far."""
    count = 0
    for seen in history(client.bus, ("results",)):
        assert seen.envelope is not None
        count += sum(result.status.final for result in seen.envelope.message.results)  # type: ignore[union-attr]
    return count
