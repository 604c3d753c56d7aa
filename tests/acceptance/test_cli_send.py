"""kvbus send: to real workers, with and without waiting, and when they fail, die or do not exist."""

from __future__ import annotations

import json
import os
import pty
import subprocess

import pytest

from kvbus.protocol.commands import DDR, SSD
from kvbus.protocol.hashes import format_hash
from kvbus.streams.connection import Bus
from tests.acceptance.conftest import StartWorker
from tests.cli_kit import PROGRAM, Kvbus
from tests.servers import eventually
from tests.unit.scripted_engine import ScriptedEngine

HASH, OTHER = 0x3F5C45ECBAB5E9FD, -0x6ED9A448787A198F
TEXTS = [format_hash(HASH), format_hash(OTHER)]


def test_every_worker_answers_as_it_comes(kvbus: Kvbus, start_worker: StartWorker) -> None:
    first, second = ScriptedEngine(ssd=[HASH, OTHER]), ScriptedEngine(ssd=[HASH])
    start_worker(first, "host-a")
    start_worker(second, "host-b")
    rows = kvbus("send", "prefetch", *TEXTS, "--wait").ok().rows
    counts = {row["worker"]: row["counts"] for row in rows}
    assert counts["host-a/0"]["loaded"] == 2
    assert counts["host-b/0"] == {"requested": 2, "loaded": 1, "missing": 1, "bytes": 100}
    assert first.ddr == {HASH, OTHER}
    shown = kvbus("send", "evict", TEXTS[0], "--location", DDR, "--wait", "--table").ok().out
    assert "host-a/0  done (1 evicted" in shown
    assert HASH in first.ssd
    assert HASH not in first.ddr


def test_lookup_and_ping_wait_by_themselves(kvbus: Kvbus, start_worker: StartWorker) -> None:
    start_worker(ScriptedEngine(ssd=[HASH, OTHER], ddr=[OTHER]))
    rows = kvbus("send", "lookup", *TEXTS).ok().rows
    assert [row["tiers"] for row in rows if "tiers" in row] == [[SSD], [DDR, SSD]]
    assert kvbus("send", "ping").ok().row["status"] == "done"


def test_a_failure_ends_with_1(kvbus: Kvbus, start_worker: StartWorker) -> None:
    engine = ScriptedEngine(ddr=[HASH])
    start_worker(engine)
    engine.raises = RuntimeError("disk on fire")
    done = kvbus("send", "evict", TEXTS[0], "--wait")
    assert done.code == 1
    assert done.row["status"] == "failed"
    assert "disk on fire" in done.row["error"]["message"]


def test_who_does_not_answer_is_named(kvbus: Kvbus, start_worker: StartWorker) -> None:
    engine = ScriptedEngine(ssd=[HASH])
    engine.gate.clear()
    start_worker(engine)
    done = kvbus("send", "prefetch", TEXTS[0], "--wait", "--timeout", "300ms")
    assert done.code == 1
    assert done.out == ""
    assert "host-a/0: no final answer yet" in done.err


def test_interim_answers_are_no_answers(kvbus: Kvbus, start_worker: StartWorker) -> None:
    engine = ScriptedEngine(ddr=[HASH])
    engine.pinned.add(HASH)
    start_worker(engine)
    done = kvbus("send", "evict", TEXTS[0], "--wait", "--timeout", "1s")
    assert done.code == 1
    assert "host-a/0: no final answer yet (deferred)" in done.err


def test_nobody_there(kvbus: Kvbus) -> None:
    sent = kvbus("send", "evict", TEXTS[0])
    assert sent.code == 0
    assert sent.row["workers"] == []
    assert "no worker is registered" in sent.err
    assert kvbus("send", "ping", "--timeout", "1s").code == 1


def test_hashes_from_stdin_file_and_arguments(kvbus: Kvbus, bus: Bus) -> None:
    (kvbus.directory / "chunks.txt").write_text(f"{TEXTS[0]}\n{TEXTS[1]},5\n\n{TEXTS[0]}\n")
    assert kvbus("send", "evict", "--file", "chunks.txt").ok().row["chunks"] == 3, "each once"
    assert kvbus("send", "evict", "-", text="1 2\n3\n").ok().row["chunks"] == 3
    assert kvbus("send", "evict", "--file", "-", "9", text="1").ok().row["chunks"] == 2
    assert kvbus("send", "prefetch", "--", "-5", "6").ok().row["chunks"] == 2
    nothing = kvbus("send", "evict", "-", text="\n")
    assert nothing.code == 2
    assert "no chunk hash" in nothing.err
    assert kvbus("send", "evict", "--file", "nosuch").code == 2
    assert bus.client.xlen(bus.keys.commands) == 4


@pytest.mark.parametrize("what", ["prefetch", "evict", "lookup"])
def test_dry_run_checks_and_sends_nothing(kvbus: Kvbus, bus: Bus, what: str) -> None:
    options = [
        "--tag",
        "user=alice",
        "--ttl",
        "5s",
        "--model",
        "m",
        "--instance",
        "host-a",
        "--rank",
        "1",
        "--rank",
        "2",
    ]
    row = kvbus("send", what, TEXTS[0], *options, "--dry-run").ok().row
    assert row["dry_run"]
    assert row["message"]["tags"] == [["user", "alice"]]
    assert row["message"]["ttl_ms"] == 5_000
    assert row["message"]["target"] == {"models": ["m"], "instances": ["host-a"], "ranks": [1, 2]}
    assert not bus.client.exists(bus.keys.commands)


def test_a_target_that_is_not_meant_says_so(kvbus: Kvbus, start_worker: StartWorker) -> None:
    start_worker(ScriptedEngine(ddr=[HASH]))
    row = kvbus("send", "evict", TEXTS[0], "--instance", "elsewhere", "--wait").ok().row
    assert row["status"] == "not_applicable"


def test_ctrl_c_while_waiting_ends_with_130_and_the_command_goes_on(
    kvbus: Kvbus, start_worker: StartWorker, bus: Bus
) -> None:
    engine = ScriptedEngine(ssd=[HASH])
    engine.gate.clear()
    start_worker(engine)
    with kvbus.started("send", "prefetch", TEXTS[0], "--wait") as sending:
        eventually(engine.loading.is_set, what="the worker to have it in hand")
        assert sending.interrupt().code == 130
    engine.gate.set()
    eventually(lambda: HASH in engine.ddr, what="the prefetch to end")


def test_progress_on_the_terminal_takes_no_data_out_of_the_pipe(kvbus: Kvbus, start_worker: StartWorker) -> None:
    start_worker(ScriptedEngine(ssd=[HASH]))
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*PROGRAM, "send", "prefetch", TEXTS[0], "--wait"],
        cwd=kvbus.directory,
        env=kvbus.env | {"TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        timeout=60,
    )
    os.close(theirs)
    shown = os.read(ours, 65_536).decode()
    os.close(ours)
    assert json.loads(done.stdout)["status"] == "done"
    assert "1 of 1 workers have answered" in shown
    assert shown.endswith("\x1b[2K"), "nothing of it is left"
