"""Scenarios 8 and 9: ways to run LMCache, and chunk hashes that need no PYTHONHASHSEED. Each with one rank, or said."""

from __future__ import annotations

import uuid

import pytest

from kvbus.protocol import DDR, Evict, Prefetch, RequestFinished, Status, WorkerStarted, blake3_chain
from tests.e2e.bus import BusView, hashes_of
from tests.e2e.conftest import MakeOptions
from tests.e2e.engine import CHUNK_SIZE, Engine
from tests.e2e.prompts import prompt
from tests.servers import RealServer

TEXT = 697
WHOLE = TEXT // CHUNK_SIZE * CHUNK_SIZE


@pytest.fixture
def bus(bus_server: RealServer) -> BusView:
    return BusView(bus_server, f"e2e-{uuid.uuid4().hex[:12]}")


@pytest.mark.parametrize("loading", ["sync", "async"])
@pytest.mark.parametrize("last_chunk", ["whole", "unfull"])
def test_loading_and_the_last_chunk(loading: str, last_chunk: str, make_options: MakeOptions, bus: BusView) -> None:
    options = make_options(bus.namespace)
    options.lmcache["ENABLE_ASYNC_LOADING"] = str(loading == "async").lower()
    options.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process less to start
    options.lmcache["SAVE_UNFULL_CHUNK"] = str(last_chunk == "unfull").lower()
    chunks = WHOLE // CHUNK_SIZE + (last_chunk == "unfull")
    # A whole text that is cached is computed again from its last token.
    cached = TEXT - 1 if last_chunk == "unfull" else WHOLE

    with Engine(options) as engine:
        bus.wait_for_workers("e2e/0")
        text = prompt(1, TEXT)
        first, event = run(engine, bus, text)
        assert event.cached_tokens == 0
        assert len(event.chunk_hashes) == chunks
        bus.wait_for(lambda: files(engine) == {f"{found:x}" for found in event.chunk_hashes}, "the files of the text")

        again, event = run(engine, bus, text)
        assert (again, event.cached_tokens) == (first, cached)

        command(bus, Evict(chunk_hashes=event.chunk_hashes, locations=(DDR,)), evicted=chunks)
        # With asynchronous loading every hit from the SSD leaves a pin behind, and nothing in DDR.
        for _ in range(2):
            again, event = run(engine, bus, text)
            assert (again, event.cached_tokens) == (first, cached)
        where = {"missing" if loading == "async" else "evicted": chunks}
        command(bus, Evict(chunk_hashes=event.chunk_hashes, locations=(DDR,)), **where)
        command(bus, Prefetch(chunk_hashes=event.chunk_hashes), loaded=chunks)
        again, event = run(engine, bus, text)
        assert (again, event.cached_tokens) == (first, cached)

        command(bus, Evict(chunk_hashes=event.chunk_hashes), evicted=chunks)
        again, event = run(engine, bus, text)
        assert (again, event.cached_tokens) == (first, 0)


def test_blake3_hashes_are_the_same_in_every_process_without_a_seed(make_options: MakeOptions, bus: BusView) -> None:
    """Scheduler, two workers and kvbus's own function. With LMCache's own hashes and no seed nothing would ever hit."""
    options = make_options(bus.namespace)
    del options.env["PYTHONHASHSEED"]
    options.extra["kvbus.hash_algorithm"] = "blake3"
    options.vllm["tensor_parallel_size"] = 2
    with Engine(options) as engine:
        bus.wait_for_workers("e2e/0", "e2e/1")
        text = prompt(1, TEXT)
        first, event = run(engine, bus, text)
        assert event.chunk_hashes == tuple(blake3_chain(text, CHUNK_SIZE))
        bus.wait_for(lambda: files(engine) == {f"{found:x}" for found in event.chunk_hashes}, "the files of the text")

        started = bus.events(WorkerStarted)
        assert {found.hash_fingerprint for found in started} == {event.hash_fingerprint}
        assert event.hash_fingerprint.startswith(f"blake3/{CHUNK_SIZE}/")

        command(bus, Evict(chunk_hashes=event.chunk_hashes, locations=(DDR,)), workers=2, evicted=WHOLE // CHUNK_SIZE)
        again, event = run(engine, bus, text)
        assert (again, event.cached_tokens) == (first, WHOLE)


def run(engine: Engine, bus: BusView, text: list[int]) -> tuple[list[int], RequestFinished]:
    """The greedy continuation, and the event of the request, whose hashes are also in the response."""
    output = engine.generate(text)[0]
    event = bus.finished(output["id"])
    assert hashes_of(output["params"]["chunk_hashes"]) == event.chunk_hashes
    return output["tokens"], event


def files(engine: Engine) -> set[str]:
    """Hashes that have a file on every rank."""
    by_rank: dict[str, set[str]] = {}
    for path in engine.options.disk.glob("*.pt"):
        _, _, rank, found, _ = path.name.split("@")
        by_rank.setdefault(rank, set()).add(found)
    return set.intersection(*by_rank.values()) if by_rank else set()


def command(bus: BusView, wanted: Evict | Prefetch, workers: int = 1, **counts: int) -> None:
    """Run it; every worker must have done it, with these counts."""
    answers = bus.run(wanted, *(f"e2e/{rank}" for rank in range(workers)))
    for answer in answers.values():
        assert answer.status == Status.DONE, answer
        assert {name: getattr(answer.counts, name) for name in counts} == counts, answer
