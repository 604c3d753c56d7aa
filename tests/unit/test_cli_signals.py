"""A signal at any moment ends a command in good order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvbus.cli.exits import ExitCode

ROOT = Path(__file__).parents[2]

# Between two steps of `Event.wait` the thread that waits has the event's own lock, and a handler runs in that thread.
IN_THE_MIDST_OF_WAITING = """
import signal, sys
from kvbus.cli.common import stopped_by_signal
with stopped_by_signal() as stop:
    with stop._cond:
        signal.raise_signal(signal.SIGTERM)
    sys.exit(0 if stop.wait(10) else 1)
"""
A_SECOND_ONE = """
import signal
from kvbus.cli.common import stopped_by_signal
with stopped_by_signal() as stop:
    try:
        with stop._cond:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        print("broken off")
"""


def test_a_signal_in_the_midst_of_waiting_is_taken() -> None:
    done = subprocess.run([sys.executable, "-c", IN_THE_MIDST_OF_WAITING], cwd=ROOT, timeout=30)
    assert done.returncode == ExitCode.OK


def test_a_second_signal_breaks_it_off_wherever_the_first_came() -> None:
    done = subprocess.run([sys.executable, "-c", A_SECOND_ONE], cwd=ROOT, timeout=30, capture_output=True, text=True)
    assert done.stdout == "broken off\n"
