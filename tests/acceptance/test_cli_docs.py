"""The CLI page is what the program says, and every example in it runs."""

from __future__ import annotations

import os
import pty
import shutil
import socket
import subprocess
from typing import Any

import pytest
import typer.main

from kvbus.cli.app import build
from kvbus.cli.common import EXAMPLES
from kvbus.cli.reference import render
from kvbus.client import KVBus
from kvbus.protocol.codec import encode_entry
from kvbus.protocol.commands import Evict, Ping
from kvbus.protocol.dead import DeadLetter
from kvbus.streams.connection import Bus
from kvbus.streams.registry import save_reader
from kvbus.streams.subscription import end_position
from tests.acceptance.conftest import StartWorker
from tests.cli_kit import ROOT, Done, Kvbus, finished
from tests.servers import eventually
from tests.unit.scripted_engine import ScriptedEngine

CHUNKS = (0x3F5C45ECBAB5E9FD, -0x6ED9A448787A198F)
build()
LINES = [(name, line) for name, examples in EXAMPLES.items() for line in examples]
GOES_ON = ("kvbus up", "kvbus serve", "kvbus memory run", "kvbus top", "kvbus lag --watch")
ASKS = ("kvbus reset", "kvbus trim", "kvbus dead drop")


def test_page_is_what_the_program_says() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert page == render(), "make it anew: python -m kvbus.cli.reference > docs/cli.md"


def test_commands_that_take_hashes_have_no_short_option_of_a_hex_digit() -> None:
    root: Any = typer.main.get_command(build())
    for group, name in (("send", "prefetch"), ("send", "evict"), ("send", "lookup"), ("explain", "chunk")):
        found = root.commands[group].commands[name]
        assert found.context_settings["ignore_unknown_options"]
        short = {flag for param in found.params for flag in param.opts if len(flag) == 2}
        assert short.isdisjoint({f"-{digit}" for digit in "0123456789abcdef"})


@pytest.fixture
def prepared(kvbus: Kvbus, bus: Bus, client: KVBus, start_worker: StartWorker) -> Kvbus:
    """A namespace and a directory in which every example has something to work on."""
    refused = encode_entry(Evict(chunk_hashes=(1,)), message_id="x")
    letter = DeadLetter(
        stream=bus.keys.commands, entry_id="5-0", message_id="x", type="evict", code="poison", message="no",
        refused_by="host-a/0", fields={name.decode(): raw for name, raw in refused.items()},
    )  # fmt: skip
    bus.client.xadd(bus.keys.dead, encode_entry(letter, message_id="d"), id="1764480000000-0")
    for number, name in enumerate(("chatcmpl-41", "chatcmpl-42")):
        event = finished(number, CHUNKS, external_id=name, context={"session": "agent-7"})
        client.log.append(bus.keys.events, encode_entry(event, message_id=f"m{number}"))
    start_worker(ScriptedEngine(ssd=CHUNKS), "host-a")
    command = client.send(Ping(), command_id="706f7b124321b2b6f714c4a530ba2a31")
    assert command.wait(20).complete
    save_reader(bus, "memory-a", bus.keys.events, end_position(bus, bus.keys.events))
    directory = kvbus.directory
    (directory / "chunks.txt").write_text("3f5c45ecbab5e9fd\n-6ed9a448787a198f\n")
    (directory / "agent.toml").write_text("[llm]\nkvcache_enabled = true\n")
    (directory / "home/.local/share/bash-completion/completions").mkdir(parents=True)
    shutil.copytree(ROOT / "docs", directory / "docs")
    kvbus.env["HOME"] = str(directory / "home")
    return kvbus


@pytest.mark.parametrize(("name", "line"), LINES, ids=[line[:60] for _, line in LINES])
def test_example_runs(prepared: Kvbus, name: str, line: str, namespace: str) -> None:
    # the one name that examples share with each other
    line = line.replace("--into scratch", f"--into {namespace}-scratch")
    if "run.kvrec" in line and ("replay" in line or "verify" in line or "--append" in line):
        prepared("record", "run.kvrec").ok()
    if "--resume" in line:
        assert prepared.shell(line.replace("--resume", "--speed max")).code == 0
    if "--follow" in line or (line.startswith(GOES_ON) and "--once" not in line):
        with prepared.started(argv=("bash", "-c", f"exec {program(prepared, line)}")) as running:
            first = running.line(err=line.startswith(("kvbus serve", "kvbus memory", "kvbus record")))
            if "is taken by another process" in first or "[config]" in first:
                assert port_is_taken(line), first
                return
            if line.startswith("kvbus serve"):
                eventually(lambda: port_is_taken(line), within_s=60, what="the facade to listen")
            done = running.interrupt()
        assert done.code in (0, 130), done
        assert "Traceback" not in done.err
        return
    if line.startswith(ASKS) and "--yes" not in line and "--dry-run" not in line:
        done = answer_yes(prepared, line)
    else:
        done = prepared.shell(line)
    # the ledger is empty here: its commands have tests of their own
    allowed = (0, 1) if name.startswith(("memory", "spec")) else (0,)
    assert done.code in allowed, done
    assert "Traceback" not in done.err


def program(kvbus: Kvbus, line: str) -> str:
    """The line with the program's path in place of its name."""
    kvbus.shell("true")  # makes the shim
    return line.replace("kvbus", str(kvbus.directory / "bin" / "kvbus"), 1)


def port_is_taken(line: str) -> bool:
    """Somebody else on this machine has the port that the example names."""
    port = int(line.partition("--port ")[2] or (6999 if "serve" in line else 6379))
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def answer_yes(kvbus: Kvbus, line: str) -> Any:
    """At a terminal, by a person who agrees."""
    ours, theirs = pty.openpty()
    os.write(ours, b"y\n")
    done = subprocess.run(
        ["bash", "-c", program(kvbus, line)],
        cwd=kvbus.directory, env=kvbus.env, stdin=theirs, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    os.close(theirs)
    os.close(ours)
    return Done(done.returncode, done.stdout, done.stderr)


def test_readme_examples_of_the_command_line(prepared: Kvbus, namespace: str) -> None:
    text = (ROOT / "README.md").read_text()
    block = [line.strip().partition("  #")[0] for line in text.splitlines() if line.startswith("    kvbus ")]
    lines = [line for line in block if not line.startswith(("kvbus up", "kvbus serve", "kvbus/"))]
    assert any("replay" in line for line in lines)
    for line in lines:
        done = prepared.shell(line.replace("--namespace copy", f"--namespace {namespace}-copy"))
        assert done.code == 0, (line, done)
