"""Scenarios 1 to 4: hashes that agree everywhere, and commands that move KV between DDR and SSD on every rank."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator

import pytest

from kvbus.client import KVBus
from kvbus.errors import NotAnswered
from kvbus.protocol import DDR, SSD, ChunkHash, Evict, Lookup, Prefetch, RequestFinished, Status, WorkerStarted
from tests.e2e.bus import BusView, hashes_of
from tests.e2e.conftest import MakeOptions
from tests.e2e.engine import CHUNK_SIZE, Engine, pause, resume
from tests.e2e.prompts import prompt
from tests.servers import RealServer

WHOLE = 640
"""Tokens of the 697 that fill whole chunks."""
CHUNKS = WHOLE // CHUNK_SIZE


class Running:
    """A vLLM with `ranks` workers, and its bus."""

    def __init__(self, engine: Engine, bus: BusView, ranks: int) -> None:
        self.engine = engine
        self.bus = bus
        self.ranks = ranks
        self.workers = tuple(f"e2e/{rank}" for rank in range(ranks))

    def run(self, text: list[int]) -> tuple[list[int], RequestFinished]:
        """The greedy continuation, and the event of the request."""
        output = self.engine.generate(text)[0]
        event = self.bus.finished(output["id"])
        assert event.cached_tokens == output["cached"]
        assert hashes_of(output["params"]["chunk_hashes"]) == event.chunk_hashes
        return output["tokens"], event

    def run_stored(self, seed: int) -> tuple[list[int], list[int], tuple[ChunkHash, ...]]:
        """A text that was never seen before, its continuation and its hashes, once it is on every rank's SSD."""
        text = prompt(seed)
        tokens, event = self.run(text)
        assert event.cached_tokens == 0
        self.bus.wait_for(lambda: self.on_disk(event) == self.expected_files(event), "the files of the text")
        return text, tokens, event.chunk_hashes

    def on_disk(self, event: RequestFinished) -> set[tuple[int, str]]:
        """Rank and hash of the text's files."""
        wanted = {f"{found:x}" for found in event.chunk_hashes}
        names = (path.name.split("@") for path in self.engine.options.disk.glob("*.pt"))
        return {(int(rank), found) for _, _, rank, found, _ in names if found in wanted}

    def expected_files(self, event: RequestFinished) -> set[tuple[int, str]]:
        return {(rank, f"{found:x}") for rank in range(self.ranks) for found in event.chunk_hashes}

    def tiers(self, hashes: tuple[ChunkHash, ...]) -> dict[str, list[tuple[str, ...]]]:
        """Worker to the tiers that hold each chunk."""
        answers = self.bus.run(Lookup(chunk_hashes=hashes), *self.workers)
        return {
            worker: [tuple(sorted(answer.held.tiers_of(place))) for place in range(len(hashes))]
            for worker, answer in answers.items()
            if answer.held is not None
        }

    def evict(self, hashes: tuple[ChunkHash, ...], *locations: str) -> None:
        answers = self.bus.run(Evict(chunk_hashes=hashes, locations=locations or None), *self.workers)
        for answer in answers.values():
            assert (answer.status, answer.counts.evicted) == (Status.DONE, len(hashes)), answer


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def running(request: pytest.FixtureRequest, make_options: MakeOptions, bus_server: RealServer) -> Iterator[Running]:
    bus = BusView(bus_server, f"e2e-{uuid.uuid4().hex[:12]}")
    options = make_options(bus.namespace)
    options.vllm["tensor_parallel_size"] = request.param
    with Engine(options) as engine:
        found = Running(engine, bus, request.param)
        bus.wait_for_workers(*found.workers)
        yield found


def test_hashes_are_the_same_in_event_response_and_files(running: Running) -> None:
    text, tokens, hashes = running.run_stored(1)
    assert len(hashes) == len(set(hashes)) == CHUNKS

    again, event = running.run(text)
    assert event.cached_tokens == WHOLE
    assert event.chunk_hashes == hashes
    assert again == tokens
    assert (event.instance, event.reason, event.chunk_size) == ("e2e", "length", CHUNK_SIZE)
    assert (event.prompt_tokens, event.output_tokens) == (len(text), len(tokens))


def test_the_output_depends_on_the_first_chunk(running: Running) -> None:
    """Else equal outputs would say nothing about the KV that was loaded."""
    text = prompt(2)
    other = prompt(3)[:CHUNK_SIZE] + text[CHUNK_SIZE:]
    outputs = [found["tokens"] for found in running.engine.generate(text, other)]
    assert outputs[0] != outputs[1]


def test_one_hash_fingerprint(running: Running) -> None:
    started = running.bus.events(WorkerStarted)
    assert {found.worker for found in started} == set(running.workers)
    fingerprints = {found.hash_fingerprint for found in [*started, *running.bus.events()]}
    assert len(fingerprints) == 1
    assert fingerprints != {""}


def test_evicted_from_ddr_still_hits_from_ssd(running: Running) -> None:
    text, tokens, hashes = running.run_stored(4)
    running.evict(hashes, DDR)
    assert running.tiers(hashes) == dict.fromkeys(running.workers, [(SSD,)] * CHUNKS)
    again, event = running.run(text)
    assert (again, event.cached_tokens) == (tokens, WHOLE)


def test_evicted_from_all_tiers_is_gone(running: Running) -> None:
    text, tokens, hashes = running.run_stored(5)
    running.evict(hashes)
    assert running.tiers(hashes) == dict.fromkeys(running.workers, [()] * CHUNKS)
    again, event = running.run(text)
    assert (again, event.cached_tokens) == (tokens, 0)


def test_prefetch_in_any_order_brings_all_back_to_ddr(running: Running) -> None:
    text, tokens, hashes = running.run_stored(6)
    running.evict(hashes, DDR)
    shuffled = list(hashes)
    random.Random(7).shuffle(shuffled)
    assert shuffled[0] != hashes[0]

    answers = running.bus.run(Prefetch(chunk_hashes=tuple(shuffled)), *running.workers)
    for answer in answers.values():
        assert (answer.status, answer.counts.loaded) == (Status.DONE, CHUNKS), answer
        assert answer.counts.bytes > 0
    assert running.tiers(hashes) == dict.fromkeys(running.workers, [(DDR, SSD)] * CHUNKS)

    # Without the files the next run can have them from DDR only.
    for path in running.engine.options.disk.glob("*.pt"):
        path.unlink()
    again, event = running.run(text)
    assert (again, event.cached_tokens) == (tokens, WHOLE)


@pytest.mark.parametrize("running", [2], ids=["tp2"], indirect=True)
def test_a_rank_that_did_not_get_a_command_is_named(running: Running, bus_server: RealServer) -> None:
    _, _, hashes = running.run_stored(8)
    paused = running.engine.workers()[1]
    with KVBus(bus_server.settings(running.bus.namespace)) as client:
        pause(paused)
        try:
            handle = client.evict(hashes, locations=[DDR])
            state = handle.wait(2)
            assert (set(state.finals), state.waiting) == ({"e2e/0"}, ("e2e/1",))
            with pytest.raises(NotAnswered, match="e2e/1"):
                handle.results(0.1)
        finally:
            resume(paused)
        # It was only late: nobody has to send the command again.
        assert set(handle.results(30)) == {"e2e/0", "e2e/1"}
    assert running.tiers(hashes) == dict.fromkeys(running.workers, [(SSD,)] * CHUNKS)
