"""The engine's settings: tags, layerwise keys, cache policies, MLA, tiers that are off, and the check at start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from kvbus.errors import EngineIncompatible
from kvbus.protocol.hashes import fingerprint_tokens, hash_fingerprint
from tests.integration.conftest import MakeEngine
from tests.integration.outcomes import count
from worker_plugin.engine import LMCacheEngineAdapter
from worker_plugin.lmcache_access import CPU_TIER, DISK_TIER

if TYPE_CHECKING:
    from tests.integration.engines import EngineUnderTest

POLICIES = ("LRU", "LFU", "FIFO", "MRU")


class TestTags:
    TAGS = (("user", "anna"), ("org", "x"))

    def test_chunks_with_tags_are_found_with_the_same_tags_only(self, engine: EngineUnderTest) -> None:
        text = engine.on_disk(1, 3, tags=self.TAGS)
        for other in ((), self.TAGS[::-1], (("user", "anna"),)):
            assert count(engine.prefetch(text.hashes, tags=other)) == {"missing": 3}
            assert count(engine.adapter.evict(text.hashes, tags=other)) == {"missing": 3}
            assert engine.tiers(text.hashes[0], tags=other) == ()
        assert count(engine.prefetch(text.hashes, tags=self.TAGS)) == {"loaded": 3}
        engine.assert_holds(text, tags=self.TAGS)
        assert count(engine.adapter.evict(text.hashes, tags=self.TAGS)) == {"evicted": 3}
        engine.assert_clean()

    def test_the_same_chunk_under_two_tags_is_two(self, engine: EngineUnderTest) -> None:
        text = engine.on_disk(1, 2, tags=self.TAGS)
        engine.on_disk(1, 2)
        with engine.adapter.prefetching(tags=self.TAGS) as session:
            assert count([session.load(chunk) for chunk in text.hashes]) == {"loaded": 2}
            assert count(engine.adapter.evict(text.hashes)) == {"evicted": 2}
            assert engine.tiers(text.hashes[0], tags=self.TAGS) == (CPU_TIER, DISK_TIER)
        engine.assert_clean()


class TestLayerwise:
    @pytest.fixture
    def engine(self, make_engine: MakeEngine) -> EngineUnderTest:
        return make_engine(use_layerwise=True)

    def test_all_layers_are_loaded_and_removed(self, engine: EngineUnderTest) -> None:
        text = engine.on_disk(1, 6)
        outcomes = engine.prefetch([*text.hashes[::-1], 5])
        assert count(outcomes) == {"loaded": 6, "missing": 1}
        assert outcomes[0].bytes == engine.config.chunk_bytes
        engine.assert_clean()
        engine.disk.dict.clear()
        engine.assert_holds(text)
        assert {outcome.tiers for outcome in engine.adapter.evict(text.hashes)} == {1}
        assert engine.adapter.usage().pool_objects == 0

    def test_counts_are_of_chunks_not_of_layers(self, engine: EngineUnderTest) -> None:
        text = engine.stored(1, 3)
        assert [outcome.tiers for outcome in engine.adapter.evict(text.hashes)] == [2, 2, 2]
        assert os.listdir(engine.config.disk_dir) == []
        engine.assert_clean()

    @pytest.mark.parametrize("harm", ["forgotten", "gone", "short"])
    def test_a_chunk_that_lacks_a_layer_is_not_loaded_at_all(self, engine: EngineUnderTest, harm: str) -> None:
        text = engine.on_disk(1, 2)
        layer = engine.key(text.hashes[0]).split_layers(engine.config.layers)[2]
        entry = engine.disk.dict[layer]
        if harm == "forgotten":
            engine.disk.remove(layer)
        elif harm == "gone":
            os.remove(entry.path)
        else:
            os.truncate(entry.path, 7)
        assert count(engine.prefetch(text.hashes)) == {"missing": 1, "loaded": 1}
        assert [key.chunk_hash for key in engine.cpu.hot_cache] == [text.hashes[1]] * engine.config.layers
        if harm != "forgotten":
            assert engine.tiers(text.hashes[0]) == ()
            engine.assert_clean()

    def test_space_is_made_by_whole_chunks(self, make_engine: MakeEngine) -> None:
        engine = make_engine(use_layerwise=True, cpu_gb=0.001)
        room = engine.adapter.usage().pool_size // engine.config.chunk_bytes
        wanted = engine.on_disk(1, 10)
        engine.stored(2, room)
        assert count(engine.prefetch(wanted.hashes)) == {"loaded": 10}
        layers: dict[Any, int] = {}
        for key in engine.cpu.hot_cache:
            layers[key.chunk_hash] = layers.get(key.chunk_hash, 0) + 1
        assert set(layers.values()) == {engine.config.layers}
        engine.assert_holds(wanted)
        engine.assert_clean()

    def test_chunks_in_use_are_not_pushed_out(self, make_engine: MakeEngine) -> None:
        engine = make_engine(use_layerwise=True, cpu_gb=0.001)
        room = engine.adapter.usage().pool_size // engine.config.chunk_bytes
        wanted = engine.on_disk(1, 3)
        held = engine.stored(2, room)
        assert engine.lmcache.lookup(tokens=held.tokens, lookup_id="request", pin=True) == len(held.tokens)
        assert count(engine.prefetch(wanted.hashes)) == {"no_space": 3}
        engine.lmcache.lookup_unpin("request")
        assert count(engine.prefetch(wanted.hashes)) == {"loaded": 3}
        engine.assert_clean()


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_cache_policy_survives_rounds_of_all_verbs(make_engine: MakeEngine, policy: str, layerwise: bool) -> None:
    engine = make_engine(cache_policy=policy, use_layerwise=layerwise, cpu_gb=0.001, disk_gb=0.5)
    room = engine.adapter.usage().pool_size // engine.config.chunk_bytes
    texts = [engine.text(number, room // 3) for number in range(4)]
    for _ in range(3):
        for text in texts:  # more than DDR holds: the policy has to find victims
            engine.cpu_engine.store(text.tokens, text.kv)
            engine.cpu_engine.wait_stored()
        for text in texts:
            assert set(count(engine.prefetch(text.hashes))) <= {"loaded", "resident"}
            engine.assert_holds(text)
        engine.adapter.evict(texts[0].hashes)
        engine.adapter.evict(texts[1].hashes, locations=(CPU_TIER,))
    for text in texts:
        engine.adapter.evict(text.hashes)
    engine.adapter.reconcile()
    engine.assert_clean()
    assert engine.adapter.usage().pool_objects == 0


def test_lfu_on_a_full_ssd_survives_evicts_of_chunks_stored_twice(make_engine: MakeEngine) -> None:
    engine = make_engine(cache_policy="LFU", disk_gb=0.001, chunk_size=64)
    room = engine.disk.max_cache_size // engine.config.chunk_bytes
    twice = engine.on_disk(1, 2)
    for _ in range(2):
        engine.prefetch(twice.hashes)
        engine.adapter.evict(twice.hashes, locations=(CPU_TIER,))
    engine.stored(1, 2)  # LFU counts these from 1 again and keeps their old place as well
    engine.adapter.evict(twice.hashes)
    engine.adapter.reconcile()
    assert not engine.disk.cache_policy.key_to_freq
    often = engine.on_disk(2, room)
    for _ in range(3):
        engine.prefetch(often.hashes)
        engine.adapter.evict(often.hashes, locations=(CPU_TIER,))
    engine.stored(3, 1)  # the search for a victim comes by the places that the evicted chunks had
    assert engine.adapter.usage().disk_objects == room


class TestMLA:
    def test_the_first_rank_stores_and_serves(self, make_engine: MakeEngine) -> None:
        engine = make_engine(use_mla=True, world_size=2, rank=0, kv_heads=1)
        assert engine.adapter.info.stores
        text = engine.on_disk(1, 3)
        assert count(engine.prefetch(text.hashes)) == {"loaded": 3}
        assert count(engine.adapter.evict(text.hashes)) == {"evicted": 3}
        engine.assert_clean()

    def test_other_ranks_store_nothing_and_say_so(self, make_engine: MakeEngine) -> None:
        engine = make_engine(use_mla=True, world_size=2, rank=1, kv_heads=1)
        assert not engine.adapter.info.stores
        assert count(engine.prefetch([1, 2])) == {"unsupported": 2}
        assert count(engine.adapter.evict([1, 2])) == {"unsupported": 2}
        assert [found.tiers for found in engine.adapter.lookup([1, 2])] == [(), ()]


class TestTiersThatAreOff:
    def test_hot_cache_off(self, engine: EngineUnderTest) -> None:
        text = engine.stored(1, 2)
        engine.lmcache.set_hot_cache(False)
        assert count(engine.prefetch(text.hashes)) == {"unsupported": 2}
        assert count(engine.adapter.evict(text.hashes)) == {"evicted": 2}
        engine.assert_clean()

    def test_frozen(self, engine: EngineUnderTest) -> None:
        text = engine.stored(1, 2)
        engine.lmcache.freeze(True)
        assert count(engine.prefetch(text.hashes)) == {"unsupported": 2}
        assert count(engine.adapter.evict(text.hashes)) == {"unsupported": 2}
        engine.lmcache.freeze(False)
        assert engine.tiers(text.hashes[0]) == (CPU_TIER, DISK_TIER)

    def test_ssd_bypassed(self, engine: EngineUnderTest) -> None:
        text = engine.on_disk(1, 2)
        engine.manager.set_backend_bypass(DISK_TIER, True)
        assert count(engine.prefetch(text.hashes)) == {"unsupported": 2}
        assert count(engine.adapter.evict(text.hashes)) == {"unsupported": 2}
        engine.manager.set_backend_bypass(DISK_TIER, False)
        assert count(engine.prefetch(text.hashes)) == {"loaded": 2}

    def test_no_ssd(self, make_engine: MakeEngine) -> None:
        engine = make_engine(disk_dir=None)
        text = engine.stored(1, 2)
        assert engine.adapter.info.tiers == (CPU_TIER,)
        assert count(engine.prefetch([*text.hashes, 5])) == {"resident": 2, "missing": 1}
        assert count(engine.adapter.evict(text.hashes)) == {"evicted": 2}
        engine.assert_clean()

    def test_remote_tiers_are_not_driven(self, engine: EngineUnderTest) -> None:
        text = engine.on_disk(1, 1)
        engine.manager.storage_backends["RemoteBackend"] = object()
        try:
            assert count(engine.prefetch([*text.hashes, 5])) == {"loaded": 1, "unsupported": 1}
            assert count(engine.prefetch([5], sources=(DISK_TIER,))) == {"missing": 1}
            assert count(engine.adapter.evict([5])) == {"missing": 1}
            (outcome,) = engine.adapter.evict(text.hashes, locations=(CPU_TIER, "RemoteBackend"))
            assert (str(outcome.outcome), outcome.tiers) == ("unsupported", 1)
        finally:
            del engine.manager.storage_backends["RemoteBackend"]

    def test_several_groups_of_layers_are_not_loaded(
        self, engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = engine.on_disk(1, 1)
        monkeypatch.setattr(engine.lmcache.metadata, "get_num_groups", lambda: 2)
        assert count(engine.prefetch(text.hashes)) == {"unsupported": 1}
        engine.assert_clean()

    def test_a_recreated_ssd_tier_is_used(self, engine: EngineUnderTest) -> None:
        engine.stored(1, 2)
        engine.manager.recreate_backend(DISK_TIER)
        text = engine.on_disk(2, 2)
        assert count(engine.prefetch(text.hashes)) == {"loaded": 2}
        engine.assert_clean()


class TestInfo:
    def test_it_names_the_shard_and_the_hash_settings(self, make_engine: MakeEngine) -> None:
        engine = make_engine(model="org/model", world_size=4, rank=2)
        info = engine.adapter.info
        first = engine.cpu_engine.chunk_hashes(fingerprint_tokens(16))[0]
        assert (info.model, info.world_size, info.rank, info.chunk_size) == ("org/model", 4, 2, 16)
        assert info.tiers == (CPU_TIER, DISK_TIER)
        assert info.hash_fingerprint == hash_fingerprint("builtin", 16, first)

    def test_another_chunk_size_is_another_fingerprint(self, make_engine: MakeEngine) -> None:
        first, second = make_engine(), make_engine(chunk_size=32)
        assert first.adapter.info.hash_fingerprint != second.adapter.info.hash_fingerprint


class TestCheckAtStart:
    def test_what_is_missing_is_named(self, engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(engine.disk, "os_disk_bs")
        monkeypatch.setattr(engine.cpu, "allocate", lambda shapes, dtypes, fmt=None, eviction=True: None)
        with pytest.raises(EngineIncompatible) as refused:
            LMCacheEngineAdapter(engine.lmcache)
        assert "LocalDiskBackend.os_disk_bs is missing" in str(refused.value)
        assert "LocalCPUBackend.allocate() has no parameter busy_loop" in str(refused.value)
        assert "0.4.3" in refused.value.hint

    def test_classes_are_compared_too(self, engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
        from lmcache.utils import DiskCacheMetadata

        monkeypatch.delattr(DiskCacheMetadata, "unpin")
        with pytest.raises(EngineIncompatible, match=r"DiskCacheMetadata\.unpin is missing"):
            LMCacheEngineAdapter(engine.lmcache)

    def test_something_else_than_an_engine(self) -> None:
        with pytest.raises(EngineIncompatible, match="storage_manager is missing"):
            LMCacheEngineAdapter(object())

    def test_an_engine_before_post_init(self, engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine.lmcache, "storage_manager", None)
        with pytest.raises(EngineIncompatible, match="post_init"):
            LMCacheEngineAdapter(engine.lmcache)

    def test_an_untried_version_that_fits_is_taken_with_a_warning(
        self, engine: EngineUnderTest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("worker_plugin.lmcache_access.lmcache_version", lambda: "0.4.9")
        LMCacheEngineAdapter(engine.lmcache)
        assert "0.4.9" in caplog.text
