"""The facade and real workers (real LMCache engines) as processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.servers import eventually

ROOT = Path(__file__).parents[1]
_RUN = "import sys; from kvbus.cli.main import main; sys.exit(main())"


def environment(url: str, namespace: str, **more: str) -> dict[str, str]:
    """For processes of ours: the bus, and hashes that are the same in all of them."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")},
        "KVBUS_REDIS_URL": url,
        "KVBUS_NAMESPACE": namespace,
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(ROOT),
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        **more,
    }


class FacadeProcess:
    """`kvbus serve` on a free port."""

    def __init__(self, env: dict[str, str], log: Path) -> None:
        self._env = {**env, "KVBUS_REST_PORT": env.get("KVBUS_REST_PORT", "0")}
        self._log = log
        self.url = ""
        self.http: httpx.Client
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-c", _RUN, "serve"], env=self._env, cwd=ROOT, stderr=log)
        pattern = re.compile(r"kvbus facade on (http://\S+:\d+)")
        try:
            found = eventually(lambda: pattern.search(self._log.read_text()), within_s=60, what="the facade's start")
            self.url = found[1]
            self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False, verify=False)
            eventually(self._answers, within_s=60, what="the facade's first answer")
        except BaseException:
            self.process.kill()  # nobody else knows of it yet
            raise

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def kill(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait(20)

    def stop(self) -> int:
        """A clean stop; returns the exit code."""
        self.http.close()
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(30)

    def lines(self) -> list[dict[str, Any]]:
        """What it has logged so far."""
        return [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]

    def _answers(self) -> bool:
        try:
            return self.http.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False


class WorkerProcess:
    """A worker on a real engine, which stores what it is asked to, as a finished prefill would."""

    def __init__(self, env: dict[str, str], disk: Path, *, instance: str, rank: int, world_size: int) -> None:
        self.name = f"{instance}/{rank}"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "worker_plugin.standalone", "--control", "--instance", instance),
                *("--rank", str(rank), "--world-size", str(world_size), "--disk", str(disk)),
                *("--cpu-gb", "0.05", "--chunk-size", "16"),
            ],
            env=env,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._lock = threading.Lock()

    def ready(self) -> WorkerProcess:
        """Wait until it has its engine and its name."""
        told = self._read()
        assert told.get("ready"), told
        return self

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"op": op, **request}).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._read()
        assert answer.get("ok"), answer
        return answer

    def freeze(self) -> None:
        """Stop it, and wait until every thread stands still: a signal sent is not a signal taken."""
        self._process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self._process.pid}/task")

        def stands() -> bool:
            return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir())

        eventually(stands, what="the freeze")

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(20)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while True:
            line = self._process.stdout.readline()
            assert line, f"{self.name} ended: {self._process.wait(20)}"
            if line.startswith(b"{"):
                answer: dict[str, Any] = json.loads(line)
                return answer


def curl(arguments: Sequence[str]) -> dict[str, Any]:
    """What curl prints, as JSON."""
    done = subprocess.run(["curl", "-s", "--noproxy", "*", *arguments], capture_output=True, timeout=60, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
