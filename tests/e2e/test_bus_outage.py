"""Scenario 7: Redis is killed and comes back while requests run. Nobody who waits for tokens notices."""

from __future__ import annotations

import time
from pathlib import Path

from kvbus.protocol import DDR, Lookup, Status
from tests.conftest import MakeServer
from tests.e2e.bus import BusView
from tests.e2e.conftest import MakeOptions
from tests.e2e.engine import Engine
from tests.e2e.prompts import prompt
from tests.servers import RealServer

RUN_S = 15.0
DOWN_S = 5.0


def test_redis_killed_while_requests_run(
    start_server: MakeServer, make_options: MakeOptions, namespace: str, tmp_path: Path
) -> None:
    server = start_server("valkey", appendonly="yes")
    assert isinstance(server, RealServer)
    bus = BusView(server, namespace)
    with Engine(make_options(namespace, url=server.url)) as engine:
        bus.wait_for_workers("e2e/0")
        texts = [prompt(seed, 200 + seed) for seed in range(8)]
        healthy = [found["tokens"] for found in engine.generate(*texts)]

        engine.send("generate_for", seconds=RUN_S, prompts=texts)
        bus.wait_for(lambda: len(bus.events()) > len(texts), "events of the requests that run")
        before = len(bus.events())
        server.kill()
        time.sleep(DOWN_S)  # requests go on meanwhile
        server.start()
        outputs = engine.receive()

        assert len(outputs) > before
        assert all(found["reason"] == "length" for found in outputs)
        for place, found in enumerate(outputs):
            assert found["tokens"] == healthy[place % len(texts)]

        # Every event arrives: what came meanwhile was buffered, and what the server had was in its file.
        ids = {found["id"] for found in outputs}
        bus.wait_for(lambda: ids <= {event.external_id for event in bus.events()}, "an event for every request")
        numbers = {(event.epoch, event.seq) for event in bus.events()}
        epochs = {epoch for epoch, _ in numbers}
        assert len(epochs) == 1
        assert {number for _, number in numbers} == set(range(len(ids) + len(texts)))  # no hole: nothing was dropped

        # The worker takes commands again.
        bus.wait_for_workers("e2e/0")
        hashes = bus.finished(outputs[0]["id"]).chunk_hashes
        answer = bus.run(Lookup(chunk_hashes=hashes), "e2e/0")["e2e/0"]
        assert answer.status == Status.DONE
        assert answer.held is not None
        assert all(DDR in answer.held.tiers_of(place) for place in range(len(hashes)))
