"""Measures that need vLLM: run in the environment that has it, where that is installed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks import publisher
from benchmarks.load import Load
from benchmarks.rows import Row, Skipped, at_least, at_most, compared

PYTHON = Path(os.environ.get("KVBUS_E2E_PYTHON", ".venv-e2e/bin/python"))


def rows(load: Load, only: Callable[[str], bool]) -> list[Row | Skipped]:
    found: list[Row | Skipped] = []
    if only("drain"):
        found += [msgspec.convert(row, Row, from_attributes=True) for row in publisher.rows("drain", load.rounds)]
    if only("publish"):
        found += _publish(load)
    if only("tokens"):
        found.append(_tokens(load))
    return found


def _tokens(load: Load) -> Row | Skipped:
    measure = "vLLM's output with 500 commands a second, beside none"
    if not PYTHON.exists():
        return Skipped(measure, "vLLM is not installed here: make e2e-setup")
    command = [str(PYTHON), "-m", "benchmarks.tokens", "--out", str(load.directory)]
    done = subprocess.run(
        [*command, "--rounds", "2" if load.quick else "6"], stdout=subprocess.DEVNULL, timeout=400, check=False
    )
    if done.returncode:
        return Skipped(measure, f"benchmarks.tokens ended with {done.returncode}")
    rates = json.loads((load.directory / "tokens.json").read_text())
    note = "the sender and the server run on the same cores"
    goal = at_least(0.98, "at most 2 % lower")
    return compared(measure, 1, rates["commands"], rates["none"], "tokens/s", goal, note)


def _publish(load: Load) -> list[Row | Skipped]:
    if not PYTHON.exists():
        return [Skipped("publish() on the caller's thread", "vLLM is not installed here: make e2e-setup")]
    requests = 600 if load.quick else 1_500
    command = [str(PYTHON), "-m", "benchmarks.handoff", "--requests", str(requests), "--out", str(load.directory)]
    rounds = []
    for _ in range(1 if load.quick else 3):
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=240, check=False)
        if done.returncode not in (0, 1):  # 1: slower than its peer in some bus, which the rows tell
            return [Skipped("publish() on the caller's thread", f"benchmarks.handoff ended with {done.returncode}")]
        rounds.append(json.loads((load.directory / "handoff.json").read_text()))
    found: list[Row | Skipped] = []
    for place, row in enumerate(rounds[0]):
        for what in ("p50", "p99", "max"):
            if f"peer_{what}_us" in row and row["what"] == "publish":
                mine = [turn[place][f"{what}_us"] for turn in rounds]
                theirs = [turn[place][f"peer_{what}_us"] for turn in rounds]
                measure = f"publish() on the caller's thread, server {row['bus']}, {what}"
                found.append(compared(measure, 520, mine, theirs, "us", at_most(1.0, "not slower")))
    return found
