"""Many alike child processes, quickly: one process loads what they need and forks them. They end with their parent.

A child is a function of the form `serve(place, say)`: `say` sends its one line of JSON when it is ready. It ends when
the standard input of the forking process does, however its parent went.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

Serve = Callable[[int, Callable[[dict[str, Any]], None]], None]


class Children:
    """The processes of `python -m <module> <arguments>`, whose main function calls `fork_all`."""

    def __init__(self, module: str, arguments: Sequence[str], count: int, *, ready_s: float = 120.0) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._count = count
        self._ready_s = ready_s
        self._process: subprocess.Popen[bytes] | None = None
        self.ready: list[dict[str, Any]] = []
        """What each child said, in its place."""

    def __enter__(self) -> Self:
        quiet = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "LMCACHE_TRACK_USAGE": "false"}
        env = os.environ | quiet | {"LMCACHE_LOG_LEVEL": "ERROR"}
        # Unbuffered: select does not see a second line that was read along with the first.
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, bufsize=0
        )
        said: dict[int, dict[str, Any]] = {}
        try:
            while len(said) < self._count:
                line = self._line()
                said[int(line["place"])] = line
        except BaseException:
            self.close()
            raise
        self.ready = [said[place] for place in range(self._count)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Tell them to end, and wait for it."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        process.stdout.close()

    @property
    def pids(self) -> list[int]:
        return [int(line["pid"]) for line in self.ready]

    def _line(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], self._ready_s)
        line = self._process.stdout.readline() if readable else b""
        if not line:
            raise RuntimeError(f"{' '.join(self._command)} did not come up; its words are on stderr")
        found: dict[str, Any] = json.loads(line)
        return found


def fork_all(serve: Serve, count: int) -> int:
    """In the child's main: fork `count` processes, each running serve(place, say), until standard input ends."""
    pids = []
    for place in range(count):
        pid = os.fork()
        if pid == 0:
            _run(serve, place)
        pids.append(pid)
    while os.read(0, 1 << 16):
        pass
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    for pid in pids:
        os.waitpid(pid, 0)
    return 0


def _run(serve: Serve, place: int) -> None:
    def say(words: dict[str, Any]) -> None:
        # One write, shorter than a pipe takes in one piece: the lines of many processes do not mix.
        os.write(1, json.dumps({"place": place, "pid": os.getpid()} | words).encode() + b"\n")

    code = 1
    try:
        serve(place, say)
        code = 0
    except BaseException as error:  # noqa: BLE001 - the last frame of this process: told, then the exit code says it
        print(f"child {place}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def until_told() -> threading.Event:
    """An event that SIGTERM sets."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return stop
