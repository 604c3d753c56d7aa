"""An engine with its adapter, and the few questions that the tests ask again and again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from kvbus.protocol.hashes import ChunkHash
from tests.integration.outcomes import count
from worker_plugin.cpu_engine import CpuEngine, CpuEngineConfig
from worker_plugin.engine import ChunkOutcome, LMCacheEngineAdapter, Tags
from worker_plugin.engine_tiers import Keys
from worker_plugin.engine_types import to_begin
from worker_plugin.lmcache_access import CPU_TIER, DISK_TIER


class Text:
    """Some tokens that were stored, with their KV and hashes."""

    def __init__(self, tokens: list[int], kv: torch.Tensor, hashes: list[ChunkHash]) -> None:
        self.tokens, self.kv, self.hashes = tokens, kv, hashes


class EngineUnderTest:
    def __init__(self, config: CpuEngineConfig, *, lock_timeout: float, max_share: float) -> None:
        self.config = config
        self.cpu_engine = CpuEngine(config)
        self.lmcache = self.cpu_engine.engine
        self.adapter = LMCacheEngineAdapter(self.lmcache, lock_timeout=lock_timeout, max_share=max_share)

    def close(self) -> None:
        self.cpu_engine.close()

    @property
    def manager(self) -> Any:
        return self.lmcache.storage_manager

    @property
    def cpu(self) -> Any:
        return self.manager.storage_backends[CPU_TIER]

    @property
    def disk(self) -> Any:
        return self.manager.storage_backends[DISK_TIER]

    def key(self, chunk: ChunkHash, tags: Tags = ()) -> Any:
        return Keys(self.lmcache, tags).of([chunk])[0]

    def text(self, number: int, chunks: int) -> Text:
        """A text of its own for each number; not stored."""
        tokens = [number * 1_000_000 + place for place in range(chunks * self.config.chunk_size)]
        kv = self.cpu_engine.random_kv(len(tokens), seed=number)
        return Text(tokens, kv, self.cpu_engine.chunk_hashes(tokens))

    def stored(self, number: int, chunks: int, *, tags: Tags = ()) -> Text:
        """A text in DDR and on the SSD."""
        text = self.text(number, chunks)
        self.cpu_engine.store(text.tokens, text.kv, tags=tags)
        self.cpu_engine.wait_stored()
        return text

    def on_disk(self, number: int, chunks: int, *, tags: Tags = ()) -> Text:
        """A text on the SSD only."""
        text = self.stored(number, chunks, tags=tags)
        outcomes = self.adapter.evict(text.hashes, tags=tags, locations=(CPU_TIER,))
        assert count(outcomes) == {"evicted": chunks}
        return text

    def prefetch(self, hashes: Iterable[ChunkHash], **options: Any) -> list[ChunkOutcome]:
        """As a worker does it: the next ones are begun before it is their turn."""
        chunks = list(hashes)
        found = []
        with self.adapter.prefetching(**options) as session:
            for place, chunk in enumerate(chunks):
                for later in to_begin(chunks, place):
                    session.ahead(later)
                found.append(session.load(chunk))
        return found

    def tiers(self, chunk: ChunkHash, *, tags: Tags = ()) -> tuple[str, ...]:
        return self.adapter.lookup([chunk], tags=tags)[0].tiers

    def assert_holds(self, text: Text, *, tags: Tags = ()) -> None:
        """The engine itself retrieves the whole text, byte for byte."""
        found, kv = self.cpu_engine.retrieve(text.tokens, tags=tags)
        assert found == len(text.tokens)
        assert torch.equal(kv, text.kv)

    def assert_clean(self) -> None:
        usage = self.adapter.usage()
        assert usage.clean, usage
