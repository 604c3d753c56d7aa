"""The ledger on a Redis Cluster: its scripts reach many keys, all of them in the namespace's one slot."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbus.memory import MemoryConfig, MemoryService
from kvbus.settings import Settings
from kvbus.streams.connection import Bus
from kvbus.streams.ledger_audit import audit
from tests.contract.ledger_model import Worker, finished, publish
from tests.servers import HOST, cluster, eventually


@pytest.mark.parametrize("kind", ["valkey", "redis7"])
@pytest.mark.parametrize("namespace", ["default", "cell-2"])
def test_sessions_in_a_cluster(kind: str, namespace: str, tmp_path: Path) -> None:
    with cluster(kind, tmp_path) as nodes:
        addresses = ",".join(f"{HOST}:{node.port}" for node in nodes)
        bus = Bus(Settings(redis_url=f"redis+cluster://{addresses}", namespace=namespace, block_ms=200, stats_ms=100))
        worker = Worker(bus)
        try:
            with MemoryService(bus, MemoryConfig(grace_ms=0, ddr_budget_chunks=4)) as service:
                eventually(lambda: service.ledger.store.position())
                service.ledger.begin("r", session="b", intent="travel", chunk_hashes=(1, 2, 5))
                publish(bus, finished("p", 0, (1, 2, 3), session="a", intent="travel"))
                publish(bus, finished("p", 1, (1, 2, 4), session="a", intent="travel"))
                publish(bus, finished("p", 2, (1, 2, 5), request_id="r"))
                eventually(lambda: service.ledger.chunks("b") == (1, 2, 5))
                assert service.ledger.switch(intent="travel").found == 2
                assert sorted(service.ledger.holders(1)) == ["a", "b"]
                service.ledger.close("a")
                assert audit(bus).differences == ()
                assert [(item.TYPE, item.chunk_hashes) for item in worker.commands()] == [
                    ("evict", (3,)),
                    ("prefetch", (1, 2, 5, 4)),
                    ("evict", (4,)),
                ]
        finally:
            bus.close()
