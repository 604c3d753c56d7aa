"""`kvbus memory`, as a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbus.memory import Ledger, MemoryConfig
from kvbus.streams.position import Position
from tests.cli_kit import Kvbus
from tests.contract.ledger_model import finished, publish
from tests.servers import Server, eventually


@pytest.fixture
def kvbus(valkey: Server, namespace: str, tmp_path: Path) -> Kvbus:
    return Kvbus(valkey.url, namespace, tmp_path)


@pytest.fixture
def ledger(valkey: Server, namespace: str) -> Ledger:
    return Ledger(valkey.bus(namespace), MemoryConfig(grace_ms=0))


def test_run_does_it_all_from_events(kvbus: Kvbus, ledger: Ledger) -> None:
    (kvbus.directory / "agent.toml").write_text(
        "[llm]\nkvcache_enabled = true\nkvcache_debug_enabled = true\n[memory]\ngrace_ms = 0\n"
    )
    with kvbus.started("memory", "run", "--config", "agent.toml", "--name", "m1", "--metrics-port", "0") as running:
        told = running.row()
        assert told["name"] == "m1"
        assert told["metrics_port"] > 0
        eventually(ledger.store.position)
        publish(ledger.bus, finished("p", 0, (1, 2), session="a"))
        publish(ledger.bus, finished("p", 1, (1, -3), session="a"))
        eventually(lambda: ledger.chunks("a") == (1, -3))
        eventually(lambda: len(list((kvbus.directory / "kvcache_debug").glob("*.json"))) == 2)
        done = running.interrupt()
    assert done.code == 0, done.err
    shown = kvbus("memory", "show", "a").ok().row
    assert shown["chunk_hashes"] == ["1", "-3"]
    assert kvbus("memory", "check").ok().row["differences"] == []


def test_run_refuses_when_it_is_switched_off(kvbus: Kvbus) -> None:
    (kvbus.directory / "agent.toml").write_text("[llm]\nkvcache_enabled = false\n")
    done = kvbus("memory", "run", "--config", "agent.toml")
    assert done.code == 2
    assert "kvcache_enabled" in done.err


def test_looking_and_acting(kvbus: Kvbus, ledger: Ledger) -> None:
    assert kvbus("memory", "sessions").ok().rows == []
    ledger.turn(finished("p", 0, (1, -2, 3), session="a", intent="travel"), Position("1-0"))
    ledger.turn(finished("p", 1, (1, 9), session="b"), Position("2-0"))
    assert [row["session"] for row in kvbus("memory", "sessions").ok().rows] == ["b", "a"]
    table = kvbus("memory", "sessions", "--table").ok().out
    assert "travel" in table
    assert kvbus("memory", "totals").ok().row["chunks"] == 4
    assert {row["session"] for row in kvbus("memory", "holders", "1").ok().rows} == {"a", "b"}
    assert kvbus("memory", "holders", "-2").ok().row["session"] == "a"
    assert kvbus("memory", "holders", "77").code == 1
    assert kvbus("memory", "switch", "a").ok().row["num_chunks"] == 3
    assert kvbus("memory", "switch", "--intent", "travel").ok().row["form"] == "prefetch"
    assert kvbus("memory", "switch", "nobody").code == 1
    assert kvbus("memory", "switch").code == 2
    kvbus("memory", "close", "a").ok()
    assert kvbus("memory", "close", "a").code == 1
    assert kvbus("memory", "show", "a").code == 1
    ledger.bus.client.hset(ledger.bus.keys.memory("totals"), "chunks", 77)
    wrong = kvbus("memory", "check")
    assert wrong.code == 1
    assert json.loads(wrong.out)["differences"][0]["what"] == "chunks"
