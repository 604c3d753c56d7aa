"""Prefetches, evicts and the engine's own traffic at the same time: no wrong byte, no error, nothing left behind."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from tests.integration.conftest import MakeEngine
from worker_plugin.engine_types import to_begin
from worker_plugin.lmcache_access import CPU_TIER

if TYPE_CHECKING:
    from tests.integration.engines import EngineUnderTest, Text

SECONDS = 2.5
TEXTS, CHUNKS = 12, 12  # more than DDR holds


class Traffic:
    """Threads that run until the time is up; the first exception of any is raised at the end."""

    def __init__(self, engine: EngineUnderTest) -> None:
        self.engine = engine
        self.texts = [engine.text(number, CHUNKS) for number in range(TEXTS)]
        self.seen: Counter[str] = Counter()
        self.checked = 0
        self._errors: list[BaseException] = []
        self._until = time.monotonic() + SECONDS

    def run(self, *jobs: Callable[[random.Random], None]) -> None:
        def repeat(job: Callable[[random.Random], None], seed: int) -> None:
            rng = random.Random(seed)
            try:
                while time.monotonic() < self._until and not self._errors:
                    job(rng)
            except BaseException as error:  # noqa: BLE001  # raised again in the test's own thread
                self._errors.append(error)

        threads = [threading.Thread(target=repeat, args=(job, seed)) for seed, job in enumerate(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a thread is stuck"
        if self._errors:
            raise self._errors[0]

    def prefetch(self, rng: random.Random) -> None:
        text = rng.choice(self.texts)
        asked = rng.sample(range(CHUNKS), rng.randint(1, CHUNKS))
        with self.engine.adapter.prefetching() as session:
            for turn, place in enumerate(asked):
                for later in to_begin(asked, turn):
                    session.ahead(text.hashes[later])
                if rng.random() < 0.1:
                    session.leave(text.hashes[place])
                    continue
                outcome = session.load(text.hashes[place])
                self.seen[str(outcome.outcome)] += 1
                assert outcome.outcome not in ("failed", "tier_stuck", "unsupported"), outcome
                if outcome.outcome == "loaded":
                    self.check(text, place)

    def check(self, text: Text, place: int) -> None:
        """DDR's bytes of one chunk, where an evict has not taken it away yet."""
        memory = self.engine.cpu.get_blocking(self.engine.key(text.hashes[place]))
        if memory is not None:
            size = self.engine.config.chunk_size
            assert torch.equal(memory.tensor, text.kv[:, :, place * size : (place + 1) * size]), "wrong bytes"
            memory.ref_count_down()
            self.checked += 1

    def evict(self, rng: random.Random) -> None:
        text = rng.choice(self.texts)
        chosen = rng.sample(text.hashes, rng.randint(1, CHUNKS))
        for outcome in self.engine.adapter.evict(chosen, locations=rng.choice([None, (CPU_TIER,)])):
            self.seen[f"evict:{outcome.outcome}"] += 1
            assert outcome.outcome not in ("failed", "tier_stuck", "unsupported"), outcome
        time.sleep(0.001)

    def request(self, rng: random.Random) -> None:
        """What a serving engine does: look up with pin, retrieve what was found, store the text, unpin."""
        text = rng.choice(self.texts)
        request = f"request-{rng.random()}"
        lmcache, cpu_engine = self.engine.lmcache, self.engine.cpu_engine
        found = lmcache.lookup(tokens=text.tokens, lookup_id=request, pin=True)
        if found:
            kv = cpu_engine.empty_kv(found)
            got = int(lmcache.retrieve(text.tokens[:found], kv=kv, req_id=request).sum())
            assert got == found
            assert torch.equal(kv, text.kv[:, :, :found]), "wrong bytes in a request"
            self.seen["request:hit"] += 1
        cpu_engine.store(text.tokens, text.kv, skip=found)
        lmcache.lookup_unpin(request)
        # Storing behind a gap rewrites files that are there, and LMCache itself reads such a file half written.
        cpu_engine.wait_stored()


@pytest.mark.parametrize("policy", ["LRU", "LFU", "FIFO", "MRU"])
def test_prefetch_and_evict_next_to_traffic(make_engine: MakeEngine, policy: str) -> None:
    engine = make_engine(cpu_gb=0.0015, cache_policy=policy, max_share=0.4)
    traffic = Traffic(engine)
    for text in traffic.texts:
        engine.cpu_engine.store(text.tokens, text.kv)
    traffic.run(traffic.prefetch, traffic.prefetch, traffic.evict, traffic.request)
    engine.cpu_engine.wait_stored()

    assert traffic.checked > 20, traffic.seen
    assert {"loaded", "evict:evicted", "request:hit"} <= set(traffic.seen), traffic.seen
    assert engine.adapter.reconcile()
    engine.assert_clean()
    for text in traffic.texts:
        engine.adapter.evict(text.hashes)
    engine.assert_clean()
    usage = engine.adapter.usage()
    assert (usage.pool_objects, usage.pool_bytes, usage.disk_objects, usage.disk_bytes) == (0, 0, 0, 0)


def test_rounds_in_a_small_pool_leave_nothing(engine: EngineUnderTest) -> None:
    """The path that this replaces leaks every loaded chunk and stops for good after a few such rounds."""
    rng = random.Random(1)
    texts = [engine.stored(number, 20) for number in range(5)]
    before = engine.adapter.usage()
    for _ in range(150):
        text = rng.choice(texts)
        chosen = rng.sample(text.hashes, 10)
        engine.adapter.evict(chosen, locations=(CPU_TIER,))
        assert {str(outcome.outcome) for outcome in engine.prefetch(chosen)} == {"loaded"}
    after = engine.adapter.usage()
    assert after.clean, after
    assert (after.pool_objects, after.pool_bytes) == (before.pool_objects, before.pool_bytes)
