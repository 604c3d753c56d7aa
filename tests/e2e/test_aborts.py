"""Scenario 5: aborted and preempted requests leave nothing behind, and each has its event."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.e2e.bus import BusView
from tests.e2e.conftest import MakeOptions
from tests.e2e.engine import Engine
from tests.e2e.prompts import prompt
from tests.servers import RealServer

REQUESTS = 200
"""In one storm; about half of them are aborted."""


@pytest.fixture(scope="module", params=["sync", "async", "async-wrapped"])
def stormy(
    request: pytest.FixtureRequest, make_options: MakeOptions, bus_server: RealServer
) -> Iterator[tuple[Engine, BusView]]:
    """A vLLM with room for a few requests only, in one process."""
    bus = BusView(bus_server, f"e2e-{uuid.uuid4().hex[:12]}")
    options = make_options(bus.namespace)
    options.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    options.vllm |= {"max_model_len": 512, "num_gpu_blocks_override": 40, "block_size": 16}
    if request.param.startswith("async"):
        options.lmcache["ENABLE_ASYNC_LOADING"] = "true"
    if request.param.endswith("wrapped"):
        # On an abort LMCache's own request_finished raises then: its wrappers do not pass cancel_lookup on.
        options.lmcache["ENABLE_CHUNK_STATISTICS"] = "true"
    with Engine(options) as engine:
        yield engine, bus


def test_aborts_and_preemptions_leave_nothing_behind(stormy: tuple[Engine, BusView]) -> None:
    engine, bus = stormy
    first = prompt(0, 300)
    before = engine.generate(first)[0]["tokens"]
    storms = []
    kept = []
    for seed in (1, 2):
        storms.append(engine.call("storm", seed=seed, count=REQUESTS))
        # LMCache's asynchronous client clears the last aborted lookups when it is asked the next time.
        assert engine.generate(first)[0]["tokens"] == before
        kept.append(engine.call("kept"))
    aborted = [request_id for found in storms for request_id in found["aborted"]]
    ended = {request_id: reason for found in storms for request_id, reason in found["ended"].items()}
    assert min(len(aborted), len(ended)) > REQUESTS / 2
    assert sum(found["preemptions"] for found in storms) > 0

    # One event for each, with its reason, and not one more.
    bus.wait_for(lambda: len(bus.events()) >= 2 * REQUESTS + 3, "an event for every request")
    events = [event for event in bus.events() if event.external_id.startswith("storm-")]
    assert Counter(event.external_id for event in events) == Counter([*aborted, *ended])
    reasons = {event.external_id: str(event.reason) for event in events}
    assert all(reasons[request_id] == "abort" for request_id in aborted)
    assert all(reasons[request_id] == reason for request_id, reason in ended.items())
    assert all(len(event.chunk_hashes) >= event.prompt_tokens // 64 for event in events)

    # Nothing has grown between the storms but what is the cache itself.
    grown = {name: (kept[0][name], size) for name, size in kept[1].items() if size > kept[0][name]}
    assert grown == {}
    assert {name: size for name, size in kept[1].items() if size and name in MUST_BE_EMPTY} == {}
    assert kept[1].keys() >= MUST_BE_EMPTY - {"client.aborted_lookups"}  # the synchronous client has none


MUST_BE_EMPTY = {
    "scheduler.load_specs",
    "scheduler._requests_priority",
    "scheduler._request_trackers",
    "scheduler._unfinished_requests",
    "client.reqs_status",
    "client.aborted_lookups",
    "tap.hashes",
    "engine.lookup_pins",
    "pin_monitor._pinned_objects",
    "events.LOADING.ONGOING",
    "events.LOADING.DONE",
    "pins.cpu",
    "refs.cpu",
}
