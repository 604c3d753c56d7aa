"""The command line as its users meet it: a process of its own, with a real server behind it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbus.protocol.events import FinishReason, RequestFinished
from kvbus.protocol.hashes import ChunkHash

ROOT = Path(__file__).parents[1]
PROGRAM = (sys.executable, "-m", "kvbus.cli.main")


class Done(msgspec.Struct, frozen=True):
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """stdout as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def row(self) -> dict[str, Any]:
        (only,) = self.rows
        return only

    def ok(self) -> Done:
        assert self.code == 0, self
        return self


class Running:
    """A command that goes on. Its output is read as it comes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._rest = {1: b"", 2: b""}
        self._pipes = {1: process.stdout, 2: process.stderr}

    def line(self, *, err: bool = False, within_s: float = 60.0) -> str:
        """The next line of stdout, or of stderr."""
        place = 2 if err else 1
        pipe = self._pipes[place]
        assert pipe is not None
        deadline = time.monotonic() + within_s
        while b"\n" not in self._rest[place]:
            ready, _, _ = select.select([pipe], [], [], max(0, deadline - time.monotonic()))
            piece = os.read(pipe.fileno(), 65_536) if ready else b""
            if not piece:
                pytest.fail(f"no line came: {self._rest[place]!r}, exit code {self.process.poll()}")
            self._rest[place] += piece
        line, _, self._rest[place] = self._rest[place].partition(b"\n")
        return line.decode()

    def row(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.line())
        return found

    def interrupt(self, number: int = signal.SIGINT) -> Done:
        """Ctrl-C, and what the command says to it."""
        self.process.send_signal(number)
        return self.end()

    def end(self, within_s: float = 60.0) -> Done:
        out, err = self.process.communicate(timeout=within_s)
        return Done(self.process.returncode, (self._rest[1] + out).decode(), (self._rest[2] + err).decode())


class Kvbus:
    """`kvbus` for one server and namespace, in a working directory."""

    def __init__(self, url: str, namespace: str, directory: Path) -> None:
        self.directory = directory
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")},
            "PYTHONDONTWRITEBYTECODE": "",  # to compile everything anew would take most of each command's time
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "error",
            "KVBUS_REDIS_URL": url,
            "KVBUS_NAMESPACE": namespace,
            "KVBUS_PROFILES_FILE": str(directory / "profiles.toml"),
            "COLUMNS": "160",
            "TERM": "dumb",
        }

    def __call__(
        self, *arguments: object, text: str | None = None, env: Mapping[str, str] | None = None, timeout: float = 120
    ) -> Done:
        """Run to the end. text: on stdin, nothing otherwise."""
        done = subprocess.run(
            [*PROGRAM, *map(str, arguments)],
            cwd=self.directory,
            env=self.env | dict(env or {}),
            input=text if text is not None else "",
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    @contextlib.contextmanager
    def started(self, *arguments: object, argv: Sequence[str] = PROGRAM) -> Iterator[Running]:
        """Start, and go on; killed at the end of the block if it still runs."""
        process = subprocess.Popen(
            [*argv, *map(str, arguments)],
            cwd=self.directory,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # whoever runs the tests in the background may have switched Ctrl-C off for its children
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        try:
            yield Running(process)
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def shell(self, line: str, timeout: float = 120) -> Done:
        """A line as a person types it, pipes and all."""
        program = self.directory / "bin"
        program.mkdir(exist_ok=True)
        shim = program / "kvbus"
        shim.write_text(f'#!/bin/sh\nexec {" ".join(PROGRAM)} "$@"\n')
        shim.chmod(0o755)
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            cwd=self.directory,
            env=self.env | {"PATH": f"{program}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)


def finished(number: int, chunks: Sequence[ChunkHash], **more: Any) -> RequestFinished:
    """A finished request, number 0, 1, ... of its publisher."""
    fields: dict[str, Any] = {
        "request_id": f"chatcmpl-{number}-0a1b2c3d",
        "external_id": f"chatcmpl-{number}",
        "instance": "host-a",
        "model": "m",
        "reason": FinishReason.STOP,
        "chunk_hashes": tuple(chunks),
        "chunk_size": 64,
        "prompt_tokens": 64 * len(chunks),
        "output_tokens": 8,
        "publisher": "host-a",
        "epoch": 1,
        "seq": number,
        "finished_at_ms": 1_764_480_000_000 + number,
    }
    return RequestFinished(**fields | more)
