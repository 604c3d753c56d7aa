"""The ledger's configuration, and its packed hashes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import ConfigError
from kvbus.memory import MemoryConfig, load_config
from kvbus.protocol import ChunkHash
from kvbus.settings import Settings
from kvbus.streams.ledger_store import pack, unpack
from tests.unit.strategies import hashes


def test_the_agents_own_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        '[llm]\nmodel = "qwen"\nkvcache_enabled = true\nkvcache_debug_enabled = true\n'
        '[memory]\nddr_budget_chunks = 5000\nevict_locations = ["LocalCPUBackend"]\n[other]\nx = 1\n'
    )
    config = load_config(file, {})
    assert config.kvcache_enabled
    assert config.kvcache_debug_enabled
    assert (config.ddr_budget_chunks, config.evict_locations) == (5000, ("LocalCPUBackend",))


def test_the_environment_goes_first(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[llm]\nkvcache_enabled = true\n[memory]\ngrace_ms = 5\n")
    env = {"KVBUS_KVCACHE_ENABLED": "off", "KVBUS_MEMORY_GRACE_MS": "7", "KVBUS_MEMORY_PREFETCH_SOURCES": "A, B"}
    config = load_config(file, env, Settings(kvcache_debug_enabled=True))
    assert not config.kvcache_enabled
    assert config.kvcache_debug_enabled
    assert (config.grace_ms, config.prefetch_sources) == (7, ("A", "B"))
    assert load_config(None, {}) == MemoryConfig()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[memory]\ngrace = 1\n", "grace"),
        ("[memory]\ngrace_ms = -1\n", "grace_ms"),
        ("[memory]\nmax_sessions = 0\n", "max_sessions"),
        ('[llm]\nkvcache_enabled = "yes"\n', "kvcache_enabled"),
        ("[llm]\nkvcache_enabled = 7\n", "kvcache_enabled"),
        ("llm = 1\n", "llm"),
        ("[llm\n", "TOML"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_config(file, {})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_config(tmp_path / "none.toml", {})


@given(st.lists(hashes, max_size=20))
def test_packed_hashes_come_back(values: list[ChunkHash]) -> None:
    assert unpack(pack(values)) == tuple(values)
