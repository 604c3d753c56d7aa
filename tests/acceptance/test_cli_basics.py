"""What every command shares: help, exit codes, errors, output forms, profiles, and a server that is away."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
from pathlib import Path

import pytest

import kvbus as package
from kvbus.cli.app import build
from kvbus.cli.common import EXAMPLES, Cli, Common
from kvbus.cli.exits import MEANING, ExitCode, exit_code_of
from kvbus.errors import BusUnavailable, all_errors
from tests.cli_kit import PROGRAM, Kvbus
from tests.proxy import Proxy
from tests.servers import RealServer

build()
HASH = "3f5c45ecbab5e9fd"
ASKS_THE_SERVER = (
    "tail",
    "tail all --from start",
    f"send evict {HASH}",
    "send ping",
    "workers",
    "lag",
    "top --once",
    f"explain chunk {HASH}",
    "explain command nobody",
    "explain request nobody",
    "record away.kvrec",
    "replay commands --into elsewhere",
    "dead list",
    "dead drop --all --yes",
    "reset nobody --to end",
    "trim events --keep 5 --yes",
    "doctor",
)


def test_version(kvbus: Kvbus) -> None:
    assert kvbus("--version").ok().out == f"kvbus {package.__version__}\n"


def test_every_command_has_help_with_examples(kvbus: Kvbus) -> None:
    assert {"tail", "send evict", "lag", "doctor", "replay", "dead requeue", "explain chunk"} <= set(EXAMPLES)
    for name, examples in EXAMPLES.items():
        assert examples, f"{name} has no example"
    shown = kvbus("dead", "requeue", "--help").ok().out
    assert "$ kvbus dead requeue" in shown
    assert "--json" in shown
    assert "--dry-run" in shown


@pytest.mark.parametrize("line", ASKS_THE_SERVER)
def test_server_away_ends_with_3_and_the_next_step(kvbus: Kvbus, line: str) -> None:
    done = kvbus(*line.split(), "--url", "redis://127.0.0.1:1")
    assert done.code == ExitCode.UNREACHABLE, done
    assert "Traceback" not in done.err
    if line != "doctor":
        assert done.out == ""
        assert "error [bus_unavailable]" in done.err
        assert "127.0.0.1:1" in done.err
        assert "next:" in done.err
        assert "kvbus errors bus_unavailable" in done.err


def test_server_that_is_silent_is_told_within_the_reply_timeout(kvbus: Kvbus, valkey: RealServer) -> None:
    with Proxy("127.0.0.1", valkey.port) as proxy:
        proxy.black_hole()
        done = kvbus("lag", "--url", proxy.url, env={"KVBUS_REPLY_TIMEOUT_MS": "300"})
    assert done.code == ExitCode.UNREACHABLE
    assert "[bus_unavailable]" in done.err


def test_traceback_only_with_debug(kvbus: Kvbus) -> None:
    assert "Traceback" not in kvbus("lag", "--url", "redis://127.0.0.1:1").err
    assert "Traceback" in kvbus("lag", "--url", "redis://127.0.0.1:1", "--debug").err


@pytest.mark.parametrize(
    "line", ["nosuch", "tail --nosuch", "tail nosuch", "tail --from yesterday", "send evict", "send evict zz",
             "lag --fail-above x", "replay nosuch.kvrec --into x", "verify nosuch.kvrec", "tail --from 1 --last 2",
             "-n no/name lag", "--url ftp://x lag", "errors nosuch", "reset x", "trim events", "trim all --keep 1"]
)  # fmt: skip
def test_wrong_use_ends_with_2_and_says_what_is_wrong(kvbus: Kvbus, line: str) -> None:
    done = kvbus(*line.split())
    assert done.code == ExitCode.USAGE, done
    assert done.out == ""
    assert done.err
    assert "Traceback" not in done.err


def test_a_fault_of_ours_is_one_sentence_too(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ZeroDivisionError("by zero")

    assert Cli(Common()).run(fail) is ExitCode.WRONG
    told = capsys.readouterr().err
    assert "unexpected ZeroDivisionError: by zero" in told
    assert "--debug" in told
    assert "Traceback" not in told


def test_a_disk_that_is_full_is_told(kvbus: Kvbus) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    done = kvbus.shell("kvbus errors > /dev/full")
    assert done.code == 1
    assert "No space left on device" in done.err
    assert "Traceback" not in done.err


def test_options_for_all_may_stand_before_or_behind(kvbus: Kvbus, namespace: str) -> None:
    kvbus("send", "evict", HASH).ok()
    before = kvbus("--table", "-n", namespace, "tail").ok().out
    behind = kvbus("tail", "--table", "-n", namespace).ok().out
    assert before == behind
    assert not before.startswith("{")
    assert kvbus("--table", "tail", "--json").ok().row["type"] == "evict"


def test_on_a_terminal_tables_and_in_a_pipe_json(kvbus: Kvbus) -> None:
    kvbus("send", "evict", HASH).ok()
    assert kvbus("tail").ok().row["message"]["chunk_hashes"] == [HASH]
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*PROGRAM, "tail"], cwd=kvbus.directory, env=kvbus.env, stdin=subprocess.DEVNULL, stdout=theirs, timeout=60
    )
    os.close(theirs)
    shown = os.read(ours, 65_536).decode()
    os.close(ours)
    assert done.returncode == 0
    assert f"1 chunks from {HASH}" in shown
    assert "{" not in shown


def test_control_characters_from_the_bus_never_reach_a_terminal(
    kvbus: Kvbus, valkey: RealServer, namespace: str
) -> None:
    nasty = '{"chunk_hashes":["1"],"issuer":"\\u001b[2J\\u0007evil"}'
    valkey.client().xadd(f"kvbus:{{{namespace}}}:commands", {"type": "evict", "json": nasty})
    shown = kvbus("tail", "--table").ok().out
    assert "\x1b[2J" not in shown
    assert "evil" in shown


def test_profile_goes_before_variables_and_options_before_it(kvbus: Kvbus, valkey: RealServer) -> None:
    (kvbus.directory / "profiles.toml").write_text(
        f'[here]\nredis_url = "{valkey.url}"\nnamespace = "by-profile"\n[secret]\nredis_url = "redis://u:hidden@h/0"\n'
    )
    away = {"KVBUS_REDIS_URL": "redis://127.0.0.1:1", "KVBUS_NAMESPACE": "by-variable"}
    assert "namespace by-profile" in kvbus("--profile", "here", "workers", env=away).ok().err
    assert "namespace by-profile" in kvbus("workers", env=away | {"KVBUS_PROFILE": "here"}).ok().err
    assert "namespace by-option" in kvbus("workers", "--profile", "here", "-n", "by-option", env=away).ok().err
    both = kvbus("--profile", "here", "workers", env=away | {"KVBUS_PROFILE": "secret"}).ok()
    assert "namespace by-profile" in both.err, "an option goes before the variable, wherever it stands"
    missing = kvbus("workers", "--profile", "her")
    assert missing.code == ExitCode.USAGE
    assert "Did you mean here?" in missing.err
    listed = kvbus("profiles").ok()
    assert [row["name"] for row in listed.rows] == ["here", "secret"]
    assert "hidden" not in listed.out
    (kvbus.directory / "profiles.toml").write_text("[here\n")
    assert kvbus("profiles").code == ExitCode.USAGE


def test_errors_explains_every_code(kvbus: Kvbus) -> None:
    rows = kvbus("errors").ok().rows
    assert {row["code"] for row in rows} == {error.code for error in all_errors()}
    one = kvbus("errors", "bus_full").ok().row
    assert one["hint"].startswith("Raise maxmemory")
    assert "Did you mean bus_full?" in kvbus("errors", "bus_ful").err


def test_exit_codes_are_documented_and_used() -> None:
    assert set(MEANING) == set(ExitCode)
    assert exit_code_of(BusUnavailable) is ExitCode.UNREACHABLE
    assert {exit_code_of(error) for error in all_errors()} == {ExitCode.WRONG, ExitCode.USAGE, ExitCode.UNREACHABLE}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(kvbus: Kvbus, shell: str) -> None:
    assert "_KVBUS_COMPLETE" in kvbus("completion", shell).ok().out
    assert kvbus("completion", "tcsh").code == ExitCode.USAGE


def test_completion_knows_commands_and_codes(kvbus: Kvbus) -> None:
    def complete(line: str) -> str:
        words = {"_KVBUS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        return kvbus(env=words).out

    assert "doctor" in complete("kvbus do")
    assert "history_lost" in complete("kvbus errors hist")


def test_up_runs_a_real_server_until_ctrl_c(kvbus: Kvbus, tmp_path: Path) -> None:
    with kvbus.started("up", "--data", tmp_path / "data", "--port", 0) as up:
        told = up.row()
        assert re.fullmatch(r"redis://127\.0\.0\.1:\d+/0", told["url"])
        kvbus("send", "evict", HASH, "--url", told["url"]).ok()
        assert kvbus("tail", "--url", told["url"]).ok().row["type"] == "evict"
        assert up.interrupt().code == ExitCode.OK
    with kvbus.started("up", "--data", tmp_path / "data", "--port", 0, "--table") as up:
        shown = "\n".join(up.line() for _ in range(5))
        assert "redis-cli -p" in shown
        port = int(re.search(r"127\.0\.0\.1:(\d+)/0", shown)[1])  # type: ignore[index]
        assert kvbus("tail", "--url", f"redis://127.0.0.1:{port}/0").ok().row["type"] == "evict", "data was kept"
        assert up.interrupt(signal.SIGTERM).code == ExitCode.OK


def test_up_says_when_the_directory_is_taken(kvbus: Kvbus, tmp_path: Path) -> None:
    with kvbus.started("up", "--data", tmp_path / "data", "--port", 0) as up:
        up.row()
        second = kvbus("up", "--data", tmp_path / "data", "--port", 0, env={"KVBUS_STOP_MS": "100"})
        assert second.code == ExitCode.USAGE
        assert "in use by process" in second.err
        up.interrupt()


def test_help_needs_no_server_and_loads_no_engine(kvbus: Kvbus) -> None:
    code = (
        "import sys, kvbus.cli.app as a; a.build();"
        "print(sorted({'torch', 'lmcache', 'vllm', 'fastapi', 'uvicorn', 'fakeredis'} & set(sys.modules)))"
    )
    done = subprocess.run([PROGRAM[0], "-c", code], env=kvbus.env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
